"""Proxies of the gradient's signal and noise, from log-probs that a step has anyway."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from offdrift.segments import Segments
from offdrift.stats import DriftStats
from offdrift.stats.metrics import PROXIES, gradient_power


class VarianceProxies(NamedTuple):
    """How large the gradient is, and a sign of how much of that is noise."""

    signal_strength: float
    """Proxy 1: squared norm of the mean gradient, over parameters."""
    total_power: float
    """Proxy 2: mean squared norm of one sequence's gradient, over logits."""
    pure_noise: float
    """Proxy 3: a difference of norms in two spaces; NaN for fewer than two sequences."""
    expected_a_squared: float
    expected_w: float

    def metrics(self) -> dict[str, float]:
        """Under the names that are logged."""
        return {row.name: x for row, x in zip(PROXIES, self, strict=True)}


def variance_proxies(
    sum_pi_squared: Float[Tensor, " n"],
    logp_old: Float[Tensor, " n"],
    advantages: Float[Tensor, " n"],
    segments: Segments,
    *,
    grad_norm: float | int,
    weight: Float[Tensor, " n"] | None = None,
) -> VarianceProxies:
    """Signal, power and noise of the policy gradient, per sequence i of N.

        s_t = 1 - 2 pi(y_t) + sum_a pi(a)^2        squared norm of the logits' gradient of log pi(y_t)
        W_i = sum_t s_t        A_i, w_i = means over the sequence's tokens
        proxy 1 = |g|^2        proxy 2 = mean_i w_i^2 A_i^2 max(W_i, 0)
        proxy 3 = max(0, (proxy 2 - proxy 1) / (N - 1))

    Proxies, not variances: tokens of a sequence are taken as uncorrelated, only the last layer's logits
    are seen, and proxy 3, as the source has it, takes a norm over parameters (proxy 1) from one over
    logits (proxy 2). The two have no common unit; where the parameters' is the larger, proxy 3 is 0
    whatever the noise. Its trend in one run, when weights are switched on, is all that it can say.

    One space for both would not say more from what a step logs. Over logits, sequences have coordinates
    of their own, so the squared norm of the mean gradient is proxy 2 / N identically, and the variance
    of the mean is proxy 2 / N, too: proxy 2 again. Over parameters, proxy 2 would need the norm of each
    sequence's gradient, a backward pass for every sequence.

    Args:
        sum_pi_squared: sum over the vocabulary of pi^2, per token.
        logp_old: log-probs of the sampled tokens under the same policy, nats.
        grad_norm: global norm of the mean gradient before clipping.
        weight: importance weights per token; None for 1.

    Gradient: none. Raises: `ShapeError` if the tensors differ in length.

    Example:
        >>> import torch
        >>> two = Segments.from_lengths([1, 1])
        >>> half = torch.tensor([0.5, 0.5])
        >>> proxies = variance_proxies(half, half.log(), torch.tensor([1.0, -1.0]), two, grad_norm=0.0)
        >>> round(proxies.pure_noise, 6)
        0.5

    Reference: verl's variance proxy metrics; survey, "Gradient variance proxy metrics".
    """
    sums = gradient_power(sum_pi_squared, logp_old, advantages, segments, weight=weight)
    none = sum_pi_squared.new_zeros(0).double()
    numbers = DriftStats((), none, (), none, (), none, {})  # fmt: skip
    found = numbers.plus(sums, {"optim/grad_norm": float(grad_norm)}).to_host()
    return VarianceProxies(*(row.value(found) for row in PROXIES))
