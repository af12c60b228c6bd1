"""What one sampled token tells about two distributions: k1, k2, k3 and |log ratio|.

With `l = log second(token) - log first(token)` on tokens drawn from *first*:

    k1 = -l              unbiased for KL(first || second), signed
    k2 = l^2 / 2         biased, symmetric in the sign of l
    k3 = e^l - 1 - l     unbiased, never negative; too low under top-k or top-p sampling, by the
                         mass that second puts outside first's filter

All are computed on log-ratios clamped to +-20. Their grade is *sampled*: they detect drift, they
never certify its absence.

Reference: J. Schulman, "Approximating KL divergence", 2020; Li et al., arXiv:2512.23075v5, App. E.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from offdrift.numerics import clamped


def k1(log_ratio: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """-l: unbiased, signed estimate of KL(first || second), nats. Gradient: to `log_ratio`."""
    return -clamped(log_ratio)


def k2(log_ratio: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """l^2 / 2: treats a halved and a doubled probability alike. Gradient: to `log_ratio`."""
    return clamped(log_ratio).square() / 2


def k3(log_ratio: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """e^l - 1 - l: unbiased, non-negative. Gradient: to `log_ratio`.

    Example:
        >>> import torch
        >>> k3(torch.tensor([0.0, 0.6931]))
        tensor([0.0000, 0.3068])
    """
    limited = clamped(log_ratio)
    return limited.expm1() - limited


def abs_log_ratio(log_ratio: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """|l|, nats: the same regions as k2, on a scale that reads as a factor. Gradient: its sign."""
    return clamped(log_ratio).abs()
