"""KL to the reference policy: what it costs to move away from it, in the reward or in the loss.

    place="reward"   r_t <- r_t - coef * kl_t     before the advantages; no gradient through kl
    place="loss"     L   <- L + coef * agg(kl)    a term of its own

`ESTIMATORS` says whose value and whose gradient are right. In the loss, a token is judged in the context it was
sampled in; in the reward, only k1 gives the gradient of the KL of whole sequences. prime-rl's
`kl_tau * (log pi - log mu)^2` is k2 with the rollout policy as the reference and coef = 2 * kl_tau.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from offdrift.divergence.evidence import k3
from offdrift.errors import EvidenceError, MethodError, ShapeError, check_choice, check_number
from offdrift.numerics import LOG_RATIO_LIMIT, at_least_float32, ratio
from offdrift.segments import Segments

EstimatorName = Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k2+", "k3+", "k3_corrected"]
Tokens = Float[Tensor, " n"]
Number = float | int


class PenaltyEstimator(NamedTuple):
    """Properties of an estimator of KL(pi || ref); the gradient is that of its loss form."""

    value_bias: str
    gradient_bias: str
    variance: str
    where: str


ESTIMATORS: dict[EstimatorName, PenaltyEstimator] = {
    "k1": PenaltyEstimator("none", "all of it: 0 on average", "high", "reward; not the loss"),
    "abs": PenaltyEstimator("too high", "biased", "low", "diagnostics"),
    "k2": PenaltyEstimator("biased", "none", "low", "loss, on-policy"),
    "k3": PenaltyEstimator("none", "that of KL(ref || pi)", "low", "metrics; in the loss its other forms"),
    "k1+": PenaltyEstimator("none", "none", "high", "loss, on-policy"),
    "abs+": PenaltyEstimator("too high", "none", "low", "loss, on-policy"),
    "k2+": PenaltyEstimator("biased", "none", "low", "loss, on-policy; the same as k2"),
    "k3+": PenaltyEstimator("none", "none", "low", "loss, on-policy"),
    "k3_corrected": PenaltyEstimator("none", "none", "grows with the ratio's", "loss, off-policy"),
}
"""On tokens drawn from pi; k3_corrected on those of mu, with gradient through the ratio, no cap."""

INFINITE = 1e4
"""Nats that an infinite log-ratio becomes: finite, and far above anything two policies produce."""


def kl_estimate(
    logp: Tokens,
    logp_ref: Tokens,
    *,
    estimator: EstimatorName,
    log_ratio: Tokens | None = None,
    cap: Number | None = None,
    value_limit: Number | None = None,
    ratio_gradient: bool = True,
) -> Tokens:
    """Estimate KL(pi || ref) at every sampled token, nats.

        d = log pi - log ref        k1 = d    abs = |d|    k2 = d^2 / 2    k3 = e^-d + d - 1
        x+             value of x, gradient of k2
        k3_corrected   min(q, cap) k3 with q = pi / mu, and gradient through q

    k3 takes d limited to +-20, with gradient 0 beyond. An infinite d counts as +-10,000 nats and a
    NaN as 0, both without gradient: refuse such references earlier.

    Args:
        log_ratio: log pi - log mu, nats; only k3_corrected reads it.
        cap: upper limit of q, a ratio; where it acts, q has no gradient and the estimate is biased.
        value_limit: largest absolute value before q, nats; no gradient beyond (verl: 10, k3 only).
        ratio_gradient: False detaches q; the mean gradient is then that of KL(ref || pi).

    Gradient: to `logp`, and to `log_ratio` as said; none to `logp_ref`.

    Raises: `MethodError` for an unknown estimator, an option it cannot use, or a `log_ratio` without
        gradient to follow; `EvidenceError` if it lacks `log_ratio`; `ShapeError`.

    Example:
        >>> logp, logp_ref = torch.tensor([-0.5, -1.0]), torch.tensor([-0.7, -0.8])
        >>> kl_estimate(logp, logp_ref, estimator="k3")
        tensor([0.0187, 0.0214])

    Reference: J. Schulman, "Approximating KL divergence", 2020; verl, `kl_penalty` (the + forms);
    DeepSeek-V3.2, arXiv:2512.02556, eq. 7 (k3_corrected; its pi_old is mu).
    """
    _check_options(estimator, cap, value_limit, ratio_gradient)
    _check_same_shape(logp=logp, logp_ref=logp_ref, log_ratio=log_ratio)
    d = at_least_float32(logp) - at_least_float32(logp_ref).detach()
    d = d.nan_to_num(nan=0.0, posinf=INFINITE, neginf=-INFINITE)
    base = estimator.removesuffix("+")
    if base in ("k1", "abs"):
        value = d if base == "k1" else d.abs()
    else:
        value = d.square() / 2 if base == "k2" else k3(-d)
    if value_limit is not None:
        value = value.clamp(-value_limit, value_limit)
    if estimator == "k3_corrected":
        if log_ratio is None:
            raise EvidenceError('"k3_corrected" needs log_ratio=; give log_ratio(logprobs, on="full")')
        if not ratio_gradient:
            log_ratio = log_ratio.detach()
        elif torch.is_grad_enabled() and logp.requires_grad and not log_ratio.requires_grad:
            raise MethodError("log_ratio has no gradient; give one, or say ratio_gradient=False")
        # q = pi / mu; an unknown ratio counts for nothing.
        q = ratio(at_least_float32(log_ratio).nan_to_num(nan=-LOG_RATIO_LIMIT))
        return (q if cap is None else q.clamp(max=cap)) * value
    if estimator.endswith("+"):
        k2 = d.square() / 2
        return value.detach() + (k2 - k2.detach())
    return value


def penalized_rewards(rewards: Float[Tensor, " b"], segments: Segments, kl: Tokens, coef: Number) -> Tokens:
    """Token rewards: the sequence's reward on its last token, minus the penalty on every token.

        r_t = R [t = T] - coef * kl_t

    Args:
        rewards: one per sequence; an empty sequence has no token for its reward, which is dropped.
        kl: estimate per token, nats; k1 for the gradient of the KL of whole sequences.

    Gradient: none. Raises: `ShapeError` unless the counts match.

    Example:
        >>> s = Segments.from_lengths([2, 1])
        >>> penalized_rewards(torch.tensor([1.0, 0.0]), s, torch.tensor([0.2, -0.2, 0.4]), 0.5)
        tensor([-0.1000,  1.1000, -0.2000])

    Reference: Ziegler et al., arXiv:1909.08593, section 2.2.
    """
    _check_same_shape(rewards=rewards, sequences=segments.lengths)
    _check_same_shape(kl=kl, tokens=segments.position)
    last = segments.position + 1 == segments.spread(segments.lengths)
    return segments.spread(rewards.detach()).where(last, 0.0) - coef * kl.detach()


@dataclass(frozen=True, kw_only=True)
class Adaptive:
    """A coefficient that grows while the measured KL is above its target, and shrinks below it.

        coef <- coef * max(1 + clip(kl / target - 1, -0.2, 0.2) * samples / horizon, 0.01)

    The 0.01 keeps it positive; it acts only on steps of almost 5 horizons or more.

    Args:
        target: nats, in the unit of the `kl` that `next` is given.
        horizon: samples over which the coefficient can change by about 20 %.

    Raises: `MethodError` unless both are positive and finite.

    Example:
        >>> round(Adaptive(target=0.1, horizon=10_000).next(0.001, kl=0.5, samples=256), 8)
        0.00100512

    Reference: Ziegler et al., arXiv:1909.08593, section 2.2.
    """

    target: Number
    horizon: Number

    def __post_init__(self) -> None:
        _check_positive(target=self.target, horizon=self.horizon)

    def next(self, coef: Number, *, kl: Number, samples: int) -> float:
        """The coefficient of the next step; unchanged where `kl` is NaN."""
        error = 0.0 if math.isnan(kl) else min(max(kl / self.target - 1, -0.2), 0.2)
        return coef * max(1 + error * samples / self.horizon, 0.01)


@dataclass(frozen=True, kw_only=True)
class KLPenalty:
    """Penalty on an estimate of KL(pi || ref): which one, how much and where; options as `kl_estimate`'s.

    Args:
        coef: weight of one nat, >= 0; the first one if a controller changes it.
        place: "loss" adds the estimate and its gradient; "reward" subtracts its value.
        controller: what changes `coef` between steps.

    Raises: `MethodError` for an unknown name, an impossible number, an option that the estimator
        does not read, k3_corrected in the reward, an adaptive coefficient that starts at 0.

    Example:
        >>> KLPenalty(estimator="k3+", coef=0.001).formula
        'loss + 0.001 k3+'
    """

    estimator: EstimatorName
    coef: Number
    place: Literal["loss", "reward"] = "loss"
    cap: Number | None = None
    value_limit: Number | None = None
    ratio_gradient: bool = True
    controller: Adaptive | None = None

    def __post_init__(self) -> None:
        check_choice("place", self.place, ("loss", "reward"))
        _check_options(self.estimator, self.cap, self.value_limit, self.ratio_gradient)
        if self.coef != 0 or isinstance(self.controller, Adaptive):
            _check_positive(coef=self.coef)
        if self.place == "reward" and self.needs_ratio:
            raise MethodError('k3_corrected corrects a loss; in the reward use estimator="k1"')

    @property
    def needs_ratio(self) -> bool:
        """Whether `log_ratio` has to be given."""
        return self.estimator == "k3_corrected"

    @property
    def formula(self) -> str:
        """One line: where, how much, which estimate, its options."""
        options = [] if self.cap is None else [f"q <= {self.cap:g}"]
        options += [] if self.ratio_gradient else ["no gradient through q"]
        options += [] if self.value_limit is None else [f"|value| <= {self.value_limit:g}"]
        if isinstance(self.controller, Adaptive):
            options.append(f"coef adapts to {self.controller.target:g} nats")
        sign = "+" if self.place == "loss" else "-"
        words = f"{self.place} {sign} {self.coef:g} {self.estimator}"
        return f"{words} ({', '.join(options)})" if options else words

    def __call__(self, logp: Tokens, logp_ref: Tokens, log_ratio: Tokens | None = None) -> Tokens:
        """The estimate per token, nats, not yet times `coef`. Gradient: see `kl_estimate`."""
        names = ("estimator", "cap", "value_limit", "ratio_gradient")
        return kl_estimate(logp, logp_ref, log_ratio=log_ratio, **{name: getattr(self, name) for name in names})


def _check_options(estimator: str, cap: Any, value_limit: Any, ratio_gradient: bool) -> None:
    check_choice("estimator", estimator, get_args(EstimatorName))
    if estimator != "k3_corrected" and (cap is not None or not ratio_gradient):
        raise MethodError(f"cap and ratio_gradient belong to k3_corrected, not to {estimator!r}")
    limits = {"cap": cap, "value_limit": value_limit}
    _check_positive(**{name: x for name, x in limits.items() if x is not None})


def _check_positive(**numbers: Any) -> None:
    for name, x in numbers.items():
        check_number(name, x)
        if x is None or not 0 < x < math.inf:
            raise MethodError(f"{name}={x!r} must be positive and finite")


def _check_same_shape(**fields: Tensor | None) -> None:
    shapes = {name: tuple(x.shape) for name, x in fields.items() if x is not None}
    if len(set(shapes.values())) > 1:
        raise ShapeError(f"shapes {shapes} differ; all must describe the same batch")
