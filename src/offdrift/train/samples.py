"""Sample rollouts for the report: a few sequences of an update with what is known of each token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from offdrift.rollouts.records import Rollouts
from offdrift.train.view import TokenView

KEPT = 4
"""Sequences per sampled update that go to the report."""


def samples(
    rollouts: Rollouts, view: TokenView, version: int, tokenizer: PreTrainedTokenizerBase
) -> list[dict[str, Any]]:
    """One line of `samples.jsonl` per sequence that is shown; none if texts or rewards are unknown."""
    if rollouts.prompts is None or rollouts.rewards is None:
        return []
    cuts = rollouts.cu_seqlens.tolist()
    found = []
    for i in _worth_showing(rollouts, view.kl):
        s = slice(cuts[i], cuts[i + 1])
        found.append({
            "update": version,
            "prompt": rollouts.prompts[i],
            "reward": float(rollouts.rewards[i]),
            "accepted": bool(view.keep[s].any()),
            "finish": rollouts.finish[i],
            "tokens": [tokenizer.decode([t]) for t in rollouts.tokens[s].tolist()],
            "kl": view.kl[s].tolist(),
            "tv": view.tv[s].tolist(),
            "logp_rollout": rollouts.logp_rollout[s].tolist(),
            "weight": view.weight[s].tolist(),
        })  # fmt: skip
    return found


def _worth_showing(rollouts: Rollouts, kl: Tensor) -> list[int]:
    """The sequence with the worst token, and some spread evenly over the batch's prompts."""
    worst = int(rollouts.segments.max(kl.nan_to_num(0.0)).argmax())
    spread = torch.linspace(0, rollouts.num_sequences - 1, KEPT - 1).long().tolist()
    return list(dict.fromkeys([worst, *spread]))
