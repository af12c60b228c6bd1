"""Random logs with every field, and what each metric is by its formula, one token at a time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from offdrift.records.batch import Logged

LIMIT = 20.0
ALL = ("logp_old", "logp", "advantages", "rewards", "group_ids", "rollout_version", "version", "entropy", "divergences", "tokens", "old_status", "truncated", "texts")  # fmt: skip


def make_log(
    seed: int = 0,
    *,
    lengths: list[int] | None = None,
    steps: list[int] | None = None,
    fields: tuple[str, ...] = ALL,
    drift: float = 0.05,
    dtype: torch.dtype = torch.float64,
) -> Logged:
    """A log of the given lengths (0 is legal) with heavy-tailed drift and short texts."""
    g = torch.Generator().manual_seed(seed)
    if lengths is None:
        lengths = torch.randint(0, 200, (24,), generator=g).tolist()
    b, n = len(lengths), sum(lengths)
    size = torch.tensor(lengths)

    def noise(scale: float) -> Tensor:
        x = torch.randn(n, generator=g, dtype=torch.float64)
        return scale * x * (1 + 20 * (torch.rand(n, generator=g) < 0.02))

    def repeated(x: Tensor) -> Tensor:
        return torch.repeat_interleave(x, size)

    rollout = -6 * torch.rand(n, generator=g, dtype=torch.float64) ** 4
    old = (rollout + noise(drift)).clamp(max=0.0)
    new = (old + noise(2 * drift)).clamp(max=0.0)
    held: dict[str, object] = {
        "logp_old": old.to(dtype),
        "logp": new.to(dtype),
        "advantages": repeated(torch.randint(-1, 2, (b,), generator=g)).to(dtype),
        "rewards": torch.randint(0, 3, (b,), generator=g).to(dtype) / 2,
        "group_ids": torch.arange(b) // 4,
        "rollout_version": repeated(torch.randint(0, 45, (b,), generator=g)),
        "version": torch.full((b,), 44),
        "entropy": torch.rand(n, generator=g, dtype=torch.float64).to(dtype),
        "divergences": {"kl_rollout_old": torch.rand(n, generator=g, dtype=torch.float64).to(dtype)},
        "tokens": torch.randint(0, 1000, (n,), generator=g),
        "truncated": torch.randint(0, 2, (b,), generator=g),
        "old_status": torch.randint(0, 4, (b,), generator=g),
    }  # fmt: skip
    given = {name: held[name] for name in fields if name in held}
    if "texts" in fields:
        given["prompts"] = tuple(f"question {i}" for i in range(b))
        given["completions"] = tuple("word " * max(1, k) for k in lengths)
    return Logged(
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int64), size.cumsum(0)]),
        step=torch.tensor(steps if steps is not None else [1 + 3 * i // b for i in range(b)]),
        row=torch.arange(b) + 1,
        response_lengths=size,
        logp_rollout=rollout.to(dtype),
        **given,  # type: ignore[arg-type]
    )


def log_ratios(log: Logged, on: str) -> list[list[float]]:
    """l of every token by sequence, as Python numbers."""
    second = log.logp_old if on == "mismatch" else log.logp
    assert second is not None
    assert log.logp_rollout is not None
    flat, cuts = (second - log.logp_rollout).tolist(), log.cu_seqlens.tolist()
    return [flat[a:b] for a, b in itertools.pairwise(cuts)]


def token_metrics(ls: list[float]) -> dict[str, float]:
    """The metrics of a facet's row from its tokens' log-ratios."""
    n = len(ls)
    limited = [max(-LIMIT, min(LIMIT, x)) for x in ls]
    w = [math.exp(x) for x in limited]
    return {
        "k1": -sum(limited) / n,
        "k3": sum(math.expm1(x) - x for x in limited) / n,
        "abs_log_ratio_mean": sum(map(abs, ls)) / n,
        "abs_log_ratio_max": max(map(abs, ls)),
        "chi2_token": sum(x * x for x in w) / n - 1,
        "ess_frac": sum(w) ** 2 / (n * sum(x * x for x in w)),
        "tv_sampled": sum(abs(x - 1) for x in w) / n / 2,
        "ratio_mean": sum(w) / n,
    }


Place = Callable[[Logged, int, int], object]
"""The bucket of token `t` of sequence `i`, or None."""


def by_bucket(log: Logged, on: str, place: Place) -> Mapping[object, list[tuple[int, float]]]:
    """(sequence, log-ratio) of the tokens of each bucket."""
    found: dict[object, list[tuple[int, float]]] = {}
    for i, ls in enumerate(log_ratios(log, on)):
        for t, x in enumerate(ls):
            found.setdefault(place(log, i, t), []).append((i, x))
    return found
