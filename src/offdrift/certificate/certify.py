"""From a batch to what may be said about it: the unified bound, and whether its precondition fell.

The bound B* holds *if* KL(rollout || current) <= delta at every reachable context. A batch can
falsify that; it can never prove it. The per-position mean TV and the sequence KL that enter the
bound are sample means of exact values: estimates of expectations, not limits on them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from offdrift.certificate.bounds import Bound, unified
from offdrift.stats.drift import DriftStats

ACCEPTANCE_FLOOR = 0.70
"""Share of accepted sequences below which the precondition counts as refuted (the paper's Remark
4.3 asks to monitor it; a share above it proves nothing)."""

KL, TV = "kl_rollout_current", "tv_rollout_current"


@dataclass(frozen=True)
class Certificate:
    """What a batch says about the error of its surrogate."""

    bound: Bound | None
    """The unified bound and the row that attains it; None without exact divergences."""
    precondition: Literal["falsified", "not falsified", "unknown"]
    """Whether some token's KL exceeded delta; "unknown" without evidence of distributions."""
    grade: str
    """Grade of the divergences used: with "interval", means are lower ends and bound nothing."""


def certify(stats: DriftStats, *, delta: float, horizon: int) -> Certificate:
    """The unified bound on |J(pi) - J(mu) - L'(pi)| for a batch of exact divergences.

        kl_seq = sum_t E[KL_t],   mean_tv_t = E[TV_t]   over all sequences; 0 after their end

    Args:
        stats: statistics of the batch, with divergences.
        delta: the trust region whose precondition is tested, nats.
        horizon: longest possible response, tokens.

    Example:
        >>> from offdrift.logprobs import LogProbs
        >>> from offdrift.segments import Segments
        >>> import torch
        >>> lp = LogProbs.pack(torch.tensor([-1.0]), segments=Segments.from_lengths([1]))
        >>> certify(DriftStats.of(lp), delta=0.05, horizon=8).precondition
        'unknown'

    Reference: Li et al., arXiv:2512.23075v5, Theorem 3.8 (bound), Theorem 4.2 and Remark 4.3 (role
    of the precondition).
    """
    if KL not in stats.by_position:
        return Certificate(None, "unknown", stats.grade)
    numbers = stats.to_host()
    fell = not numbers[f"divergence/{KL}_max"] <= delta  # NaN falsifies
    precondition = "falsified" if fell else "not falsified"
    if stats.grade != "exact":
        return Certificate(None, precondition, stats.grade)
    eps = min(1.0, float(np.sqrt(delta / 2)))
    mean_tv = np.zeros(horizon)
    measured = stats.by_position[TV].cpu().numpy()[:horizon] / numbers["b"]
    mean_tv[: len(measured)] = np.minimum(measured, eps)
    kl_seq = min(numbers[f"divergence/{KL}"] / numbers["b"], horizon * delta)
    bound = unified(horizon=horizon, delta=delta, kl_seq=kl_seq, mean_tv=mean_tv)
    return Certificate(bound, precondition, stats.grade)
