"""Sums for the proxies of the gradient's signal and noise: `DriftStats.of(lp).plus(gradient_power(...))`."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from offdrift.errors import ShapeError
from offdrift.segments import Segments
from offdrift.stats.metric import Metric, Numbers


@torch.no_grad()
def gradient_power(
    sum_pi_squared: Float[Tensor, " n"],
    logp: Float[Tensor, " n"],
    advantages: Float[Tensor, " n"],
    segments: Segments,
    *,
    weight: Float[Tensor, " n"] | None = None,
) -> dict[str, Tensor]:
    """What each sequence's gradient contributes, added up over sequences with tokens.

        s_t = 1 - 2 pi(y_t) + sum_a pi(a)^2        squared norm of the logits' gradient of log pi(y_t)
        W_i = sum_t s_t        A_i, w_i = means over the sequence's tokens
        power = sum_i w_i^2 A_i^2 max(W_i, 0)      a2 = sum_i A_i^2      w = sum_i w_i^2 W_i

    Args:
        sum_pi_squared: sum over the vocabulary of pi^2, per token.
        logp: log-probs of the sampled tokens under the same policy, nats.
        weight: importance weights per token, 0 where rejected; None for 1.

    Gradient: none. Raises: `ShapeError` if the tensors differ in length.

    Reference: verl's variance proxy metrics; survey, "Gradient variance proxy metrics".
    """
    n = int(segments.cu_seqlens[-1])
    for name, x in (("sum_pi_squared", sum_pi_squared), ("logp", logp), ("advantages", advantages), ("weight", weight)):  # fmt: skip
        if x is not None and len(x) != n:
            raise ShapeError(f"{name} has {len(x)} tokens, the segments {n}")
    # In an empty sequence sums and means are 0, and so is all that follows.
    power = segments.sum(1 - 2 * logp.double().exp() + sum_pi_squared.double())
    a2 = segments.mean(advantages.double()).square()
    w2 = torch.ones_like(a2) if weight is None else segments.mean(weight.double()).square()
    by_name = {"power": w2 * a2 * power.clamp(min=0), "a2": a2, "w": w2 * power}
    sums = {f"variance_proxy/{name}": x.sum() for name, x in by_name.items()}
    return {**sums, "variance_proxy/n": segments.lengths.count_nonzero()}


def signal(s: Numbers) -> float:
    """Proxy 1: the squared norm of the mean gradient before clipping, over parameters."""
    return s["optim/grad_norm"] ** 2


def power(s: Numbers) -> float:
    """Proxy 2: the mean squared norm of one sequence's gradient, over logits."""
    return s["variance_proxy/power"] / s["variance_proxy/n"]


def noise(s: Numbers) -> float:
    """Proxy 3: what proxy 2 exceeds proxy 1 by, per further sequence; NaN for fewer than two sequences."""
    n = s["variance_proxy/n"]
    return max(0.0, (power(s) - signal(s)) / (n - 1)) if n > 1 else math.nan


PROXIES = [
    Metric("variance_proxy/proxy1_signal_strength", "1", "|g|^2, g the mean gradient with respect to the parameters, before clipping", "neither", lambda s: signal(s) if s["variance_proxy/n"] else math.nan),
    Metric("variance_proxy/proxy2_total_power", "1", "mean over sequences of w^2 A^2 sum_t (1 - 2 pi(y_t) + sum_a pi(a)^2): squared norms of gradients with respect to the logits", "neither", power),
    Metric("variance_proxy/proxy3_pure_noise", "1", "max(0, (proxy 2 - proxy 1) / (sequences - 1)), as verl logs it: a norm over logits less one over parameters, so it is the variance of the mean gradient in neither space, and comparable with nothing but itself", "worse", noise),
    Metric("variance_proxy/expected_a_squared", "1", "mean over sequences of A^2", "neither", lambda s: s["variance_proxy/a2"] / s["variance_proxy/n"]),
    Metric("variance_proxy/expected_w", "1", "mean over sequences of w^2 sum_t (1 - 2 pi(y_t) + sum_a pi(a)^2)", "neither", lambda s: s["variance_proxy/w"] / s["variance_proxy/n"]),
]  # fmt: skip
"""Rows of METRICS. Proxies, not variances: tokens of a sequence are taken as uncorrelated, only the last
layer's logits are seen, and proxy 3 takes a norm over parameters from one over logits, which have no common
unit: where the parameters' is the larger it is 0, whatever the noise. Watch its trend when weights are
switched on, in one run, and no more."""
