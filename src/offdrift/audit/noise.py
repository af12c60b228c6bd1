"""What a check would show of engines that do not differ: chance, and the harness' own part."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from torch import Tensor

from offdrift.audit.measure import measure
from offdrift.audit.pair import Bench, EngineSpec
from offdrift.rollouts.records import Rollouts
from offdrift.segments import Segments

NOISE_PROMPTS = 8
"""Prompts of the draws that measure each engine against itself."""


def repeated(first: Rollouts, second: Rollouts) -> dict[str, float]:
    """The same draw made twice: whether the tokens are the same, and how far their log-probs are.

    Log-probs are compared where both draws have the same tokens up to and including this one.
    """
    a, b = _rectangle(first, first.tokens, -1), _rectangle(second, second.tokens, -2)
    width = min(a.shape[1], b.shape[1])
    same = (a[:, :width] == b[:, :width]).cumprod(1).bool()
    x = _rectangle(first, first.logp_rollout, 0.0)[:, :width]
    y = _rectangle(second, second.logp_rollout, 0.0)[:, :width]
    apart = (x - y).abs()[same]
    whole = same.sum(1) == first.lengths
    return {
        "sequences": float(len(whole)),
        "same_tokens_frac": float(whole.double().mean()),
        "compared_tokens": float(len(apart)),
        "abs_log_ratio_max": float(apart.max()) if len(apart) else math.nan,
    }


def null_pair(bench: Bench, train: EngineSpec) -> dict[str, Any]:
    """The training engine draws a few tokens and scores them: what the harness itself adds.

    Drawing goes token by token from a cache and scoring all at once, so in half precision even
    this pair differs; in float32 it must not, by more than 1e-6 nat.
    """
    sampling = replace(bench.sampling, max_tokens=min(32, bench.sampling.max_tokens))
    plain_options = {k: v for k, v in train.options.items() if k != "head_dtype"}
    drawer = EngineSpec("transformers", train.dtype, plain_options)
    rollouts = bench.rollouts(drawer, prompts=bench.prompts[:NOISE_PROMPTS], sampling=sampling)
    found = measure(bench, rollouts, train)
    bench.close_engine("transformers")  # a copy of the model
    return {
        "rollout": str(drawer),
        "train": str(train),
        "tokens": found.tokens,
        "kl_mean": found.kl_mean,
        "kl_max": found.kl_max,
        "tv_max": found.tv_max,
        "abs_log_ratio_max": found.abs_log_ratio_max,
    }


def _rectangle(rollouts: Rollouts, x: Tensor, fill: float | int) -> Tensor:
    segments = Segments(rollouts.cu_seqlens)
    made = x.new_full((rollouts.num_sequences, int(rollouts.lengths.max())), fill)
    made[segments.seq_ids, segments.position] = x
    return made
