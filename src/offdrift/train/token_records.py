"""Sample rollouts for the report: a few sequences of an update with what is known of each token."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from offdrift.records.batch import Logged
from offdrift.records.log import write_log
from offdrift.records.rollouts import Rollouts
from offdrift.segments import Segments
from offdrift.train.source import Shard
from offdrift.train.step import Batch
from offdrift.train.token_view import TokenView

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


# The token log: what the trainer knew about every token when it first used it, one file per batch.
#
# Written in the plain schema that `offdrift audit` reads (`offdrift.records.log`), from what the
# steps computed anyway: no forward pass is made for it. Each sequence stands in it once, with the
# update that first trained on it and the log-probs that the policy gave it just before.


@dataclass
class TokenLog:
    """Collects a batch's minibatches of the first epoch."""

    batch: Batch
    sequences: list[Tensor] = field(default_factory=list)
    views: list[TokenView] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def add(self, sequences: Tensor, view: TokenView, *, version: int) -> None:
        """Note a step on some of the sequences, taken from the weights of `version`."""
        self.sequences.append(sequences)
        self.views.append(view)
        self.versions.append(version)

    def logged(self) -> Logged:
        """The sequences in the order in which they were used."""
        order = torch.cat(self.sequences)
        whole = self.batch.rollouts
        used = whole.with_(evidence=None).select(order)
        rows = whole.segments.rows(order)
        counts = torch.tensor([len(s) for s in self.sequences])
        version = torch.tensor(self.versions).repeat_interleave(counts)
        old, ref = self.batch.old, self.batch.logp_ref
        exact = all(v.exact for v in self.views)
        logp = torch.cat([v.logp for v in self.views])
        return Logged(
            cu_seqlens=used.cu_seqlens,
            step=version + 1,  # metrics call an update by the number of steps taken after it
            row=torch.arange(1, len(order) + 1),
            response_lengths=used.lengths,
            logp_rollout=used.logp_rollout,
            logp_old=logp if self.batch.old_is_current else None if old is None else old.logp[rows],
            logp=logp,
            logp_ref=None if ref is None else ref[rows],
            advantages=self.batch.advantages[rows],
            rewards=used.rewards,
            group_ids=used.group_ids,
            rollout_version=used.rollout_version,
            version=version,
            entropy=torch.cat([v.entropy for v in self.views]),
            divergences=self._divergences() if exact else {},
            tokens=used.tokens,
            old_status=self._old_status(used.segments, rows),
            truncated=torch.tensor([f == "length" for f in used.finish]).long(),
            prompts=used.prompts,
            completions=used.completions,
        )

    def _old_status(self, segments: Segments, rows: Tensor) -> Tensor | None:
        """Of each sequence, its worst token's."""
        status = self.batch.old_status
        return None if status is None else segments.max(status[rows].double()).long()

    def _divergences(self) -> dict[str, Tensor]:
        return {k: torch.cat([v.lower[k] for v in self.views]) for k in self.views[0].lower}

    def write(self, folder: Path, index: int, shard: Shard) -> None:
        """Write the batch's file. Raises: `RecordError` if it cannot be written."""

        write_log(self.logged(), folder / shard.file_name(index))
