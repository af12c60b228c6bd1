"""Logs of generated sequences that drift by different amounts, with every field there is."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offdrift.records.batch import Logged

SCALES = (3e-4, 0.01, 0.1, 0.3, 0.8)
"""Nats by which the tokens of a sequence drift, from mu to old and from old to pi."""


def logged(
    lengths: Sequence[int],
    *,
    steps: Sequence[int] | None = None,
    group: int = 3,
    seed: int = 0,
    scales: Sequence[float] = SCALES,
) -> Logged:
    """Sequences of the given lengths, `group` of them per prompt, drift cycling through `scales`."""
    draw = torch.Generator().manual_seed(seed)
    size, b = torch.tensor(lengths), len(lengths)
    n = int(size.sum())

    def normal(k: int) -> torch.Tensor:
        return torch.randn(k, generator=draw, dtype=torch.float64)

    scale = torch.tensor(scales, dtype=torch.float64)[torch.arange(b) % len(scales)]
    drift = scale.repeat_interleave(size)
    mu = -4 - 2 * torch.rand(n, generator=draw, dtype=torch.float64)
    old = mu + drift * normal(n).clamp(-3, 3)
    current = old + drift * normal(n).clamp(-3, 3)
    names = [(f"{d}_rollout_{p}", x) for d in ("kl", "tv") for p, x in (("current", current), ("old", old))]  # fmt: skip
    return Logged(
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int64), size.cumsum(0)]),
        step=torch.tensor(steps if steps is not None else [1] * b),
        row=torch.arange(1, b + 1),
        response_lengths=torch.tensor([63, 64, 65, 1000, 70_000, 2])[torch.arange(b) % 6],
        logp_rollout=mu,
        logp_old=old,
        logp=current,
        advantages=(normal(b) + 0.1).repeat_interleave(size),
        rewards=torch.rand(b, generator=draw, dtype=torch.float64),
        group_ids=torch.arange(b) // group,
        rollout_version=(torch.arange(b) % 4).repeat_interleave(size),
        version=torch.full((b,), 4),
        entropy=torch.rand(n, generator=draw, dtype=torch.float64),
        divergences={name: (x - mu).square() / 2 for name, x in names},
    )
