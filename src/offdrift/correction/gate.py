"""`Gate`: a 0/1 decision, without gradient, whether a token takes part.

A gate names its statistic, the two policies it compares (`on`), the unit it is taken over and its
bounds. Bounds are inclusive on the keep side. What a gate rejects stays in the normalizer: it
contributes zero gradient, not a larger step for the rest. Gates look at the original tokens, never
at what another gate left, so the order in which they are composed cannot matter.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from offdrift.batch_info import NO_INFO, BatchInfo
from offdrift.correction.statistics import (
    EXACT,
    SIGNED,
    End,
    StatisticName,
    divergence_name,
    ratio_error,
    statistic,
    statistic_inside,
    statistic_sums,
    statistics,
)
from offdrift.errors import MethodError, check_choice, check_number
from offdrift.logprobs import LogProbs
from offdrift.ratios import RatioName, stopped_log_ratio, turns_of
from offdrift.segments import Segments

GateUnit = Literal["token", "from_first", "turn", "seq_sum", "seq_mean", "seq_max"]
Direction = Literal["any", "negative", "positive", "outward"]


@dataclass(frozen=True, kw_only=True)
class Gate:
    """Keep a unit iff `low <= statistic <= high`; NaN and +inf are never inside.

        token       each token by itself
        from_first  a token falls with the first one outside that stands before it in its sequence, or at it
        turn        the mean over the turn (for `ratio`: the geometric mean); without turns, over the sequence
        seq_sum     the sum over the sequence (for `ratio`: the product of ratios)
        seq_mean    the mean over the sequence (for `ratio`: the geometric mean)
        seq_max     the worst token: every token of the sequence must be inside

    Args:
        statistic: what is looked at, see `correction.statistics`.
        on: which two policies are compared; nothing is guessed.
        unit: over what the statistic is reduced before it meets the bounds.
        low: lower bound, inclusive; for `ratio` a ratio, else in the statistic's unit (nats; tv: 1).
        high: upper bound, inclusive.
        advantage: which tokens the gate may reject: "any"; only those of "negative" or "positive"
            advantage; or "outward": `high` binds where the advantage is positive and `low` where it
            is negative, so that a move back inside is never stopped. Advantage 0 is kept unless "any".
            A statistic without a sign (kl, tv, k2, ...) takes the direction from the token's own
            log-ratio: both bounds bind where advantage and log-ratio have one sign.
        end: what a divergence known as an interval is judged by. "lower": a unit is rejected only if
            it is certainly above `high` or below `low`; tokens of a larger true value may pass.
            "upper": a unit is accepted only if it is certainly inside, so that `high` bounds the true
            value of every accepted unit (acceptance by the upper end backs a guarantee; that of a
            capped interval together with what it assumes). Of exact values both are the same.

    Example:
        >>> trm_max = Gate(statistic="kl", on="full", unit="seq_max", high=0.05)
        >>> certified = Gate(statistic="kl", on="full", unit="seq_max", high=0.05, end="upper")
        >>> certified.formula
        'keep if upper end of seq_max kl(full) <= 0.05'

    Reference: Li et al., arXiv:2512.23075v5, Algorithm 1 and section 4.3; unit names as in verl's
    rollout correction. Ratio bounds are bounds on the ratio (verl applies them to its inverse).
    """

    statistic: StatisticName | str
    on: RatioName
    unit: GateUnit
    low: float | None = None
    high: float | None = None
    advantage: Direction = "any"
    end: End = "lower"

    def __post_init__(self) -> None:
        check_choice("statistic", self.statistic, statistics())
        check_choice("unit", self.unit, get_args(GateUnit))
        check_choice("on", self.on, get_args(RatioName))
        check_choice("advantage", self.advantage, get_args(Direction))
        check_choice("end", self.end, get_args(End))
        check_number("low", self.low)
        check_number("high", self.high)
        if self.low is None and self.high is None:
            raise MethodError(f"a gate on {self.statistic} needs low=, high= or both")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise MethodError(f"low={self.low} is above high={self.high}; nothing could pass")
        if self.statistic == "ratio" and any(x is not None and x <= 0 for x in (self.low, self.high)):
            raise MethodError(f"ratio bounds must be positive, got {self.low} and {self.high}")
        if self.end == "upper" and not self.exact:
            raise MethodError(
                f'end="upper" of {self.statistic}: only divergences of whole distributions (kl, tv) are '
                "known as intervals; a value of the sampled token certifies nothing"
            )
        if self.advantage == "outward" and self.statistic not in SIGNED and self.unit != "token":
            raise MethodError(
                f'advantage="outward" of {self.statistic} over {self.unit}: it has no sign, and a unit of '
                'several tokens no one direction; use unit="token", or a statistic with a sign'
            )

    @property
    def reads(self) -> str | None:
        """The key of `divergences` that this gate reads; None if it reads none."""
        return divergence_name(self.statistic, self.on) if self.exact else None

    @property
    def exact(self) -> bool:
        """Whether this gate reads divergences of whole distributions."""
        return self.statistic in EXACT

    @property
    def formula(self) -> str:
        """Rule for the tokens that are kept, in one line."""
        low = "" if self.low is None else f"{self.low:g} <= "
        high = "" if self.high is None else f" <= {self.high:g}"
        only = "" if self.advantage == "any" else f" where advantage is {self.advantage}"
        if self.advantage == "outward":
            only = ", each bound only against the push"
        end = "upper end of " if self.end == "upper" else ""
        return f"keep if {low}{end}{self.unit} {self.statistic}({self.on}){high}{only}"

    def keep(
        self, logprobs: LogProbs, advantages: Float[Tensor, " n"] | None = None, batch_info: BatchInfo = NO_INFO
    ) -> Bool[Tensor, " n"]:
        """Mark the tokens that take part. Gradient: none.

        Raises: `EvidenceError` if the batch lacks what the gate looks at; `MethodError` if the gate
        depends on the sign of the advantage and no advantages were given.
        """
        with torch.no_grad():
            if (inside := self._compiled(logprobs)) is not None:
                return self._per_token(inside, logprobs)
            sides = self._inside(logprobs, batch_info)
            if self.advantage == "any":
                # Spread once: a token is kept where its unit is inside both.
                given = [side for side in sides if side is not None]
                return self._per_token(functools.reduce(torch.logical_and, given), logprobs)
            if advantages is None:
                raise MethodError(f'a gate with advantage="{self.advantage}" needs advantages')
            above_low, below_high = (self._per_token(side, logprobs) for side in sides)
            up, down = advantages > 0, advantages < 0
            if self.advantage == "outward" and self.statistic not in SIGNED:
                away = advantages * stopped_log_ratio(logprobs, on=self.on) > 0
                return (above_low & below_high) | ~away
            if self.advantage == "outward":
                return (below_high | ~up) & (above_low | ~down)
            return (above_low & below_high) | ~(up if self.advantage == "positive" else down)

    def _compiled(self, logprobs: LogProbs) -> Bool[Tensor, " n"] | None:
        """The tokens that are inside both bounds, by one compiled pass; None where that is not for this gate."""
        if self.advantage != "any" or self.unit not in ("token", "from_first", "seq_max"):
            return None
        low, high = (None if bound is None else self._bound(bound) for bound in (self.low, self.high))
        return statistic_inside(self.statistic, logprobs, on=self.on, low=low, high=high)

    def _inside(self, logprobs: LogProbs, batch_info: BatchInfo) -> tuple[Tensor | None, Tensor | None]:
        """Per unit, whether it is above the lower bound, and below the upper one; None without that bound.

        The bound on one side meets one end of an interval, the bound on the other side the other.
        """
        x = self._of_unit(logprobs, batch_info, self.end)
        below = None if self.high is None else x <= self._bound(self.high)
        if self.exact and self.low is not None:
            x = self._of_unit(logprobs, batch_info, "lower" if self.end == "upper" else "upper")
        above = None if self.low is None else x >= self._bound(self.low)
        return above, below

    def _of_unit(self, logprobs: LogProbs, batch_info: BatchInfo, end: End) -> Float[Tensor, " units"]:
        """The statistic of every token, or of every sequence or turn for its sum or mean."""
        segments = logprobs.segments
        if self.unit in ("seq_sum", "seq_mean"):
            total = statistic_sums(self.statistic, logprobs, on=self.on)
            if total is not None:
                return total if self.unit == "seq_sum" else total / segments.lengths.clamp(min=1).to(total.dtype)
        x = statistic(self.statistic, logprobs, batch_info, on=self.on, end=end)
        if self.unit == "seq_sum":
            return segments.sum(x)
        if self.unit == "turn":
            return turns_of(segments).mean(x)
        return segments.mean(x) if self.unit == "seq_mean" else x

    def _per_token(self, inside: Tensor | None, logprobs: LogProbs) -> Bool[Tensor, " n"]:
        """Spread each unit's decision to its tokens; without a bound everything is inside."""
        segments = logprobs.segments
        if inside is None:
            return torch.ones_like(logprobs.logp_rollout, dtype=torch.bool)
        if self.unit == "token":
            return inside
        if self.unit == "from_first":
            return segments.prefix_sum((~inside).double()) == 0
        if self.unit == "turn":
            return turns_of(segments).spread(inside)
        if self.unit == "seq_max":  # whether there is a violation is cheaper than the worst
            inside = ~segments.any(~inside)
        return segments.spread(inside)

    def _bound(self, value: float) -> float:
        """The bound on the scale the statistic has: log for ratios."""
        return math.log(value) if self.statistic == "ratio" else value


def rejection(mode: str, threshold: str | float, *, on: RatioName, k1_band: Literal["ratio", "verl"] = "ratio") -> Gate:
    """A gate from verl's mode name and threshold.

    Args:
        mode: (token|seq_sum|seq_mean)_(k1|k2|k3) or seq_max_(k2|k3): unit and estimator; kl and tv
            in the estimator's place read exact divergences.
        threshold: for k1 a band of ratios, "low_high", or one number u for [1/u, u]; else the
            largest value, nats (tv: 1).
        on: `mismatch` in verl's decoupled mode, `full` in its bypass mode.
        k1_band: "ratio" applies the band to the ratio; "verl" reproduces verl 0.9, which applies it
            to the inverse, so that "0.6_1.6" accepts [1/1.6, 1/0.6].

    Raises: `MethodError` naming mode or threshold.

    Example:
        >>> rejection("seq_mean_k1", "0.99_1.05", on="mismatch").formula
        'keep if 0.99 <= seq_mean ratio(mismatch) <= 1.05'

    Reference: verl, rollout correction; the inverted band: its PR #4544.
    """
    unit, _, name = mode.rpartition("_")
    if unit not in get_args(GateUnit) or name not in ("k1", "k2", "k3", "kl", "tv"):
        raise MethodError(
            f"mode={mode!r} is not a rejection mode: {'|'.join(get_args(GateUnit))} followed by "
            "_k1, _k2, _k3, _kl or _tv"
        )
    if mode == "seq_max_k1":
        raise MethodError("seq_max_k1 does not exist: k1 is signed; use seq_max_k2")
    check_choice("k1_band", k1_band, ("ratio", "verl"))
    ends = _numbers(threshold)
    if name != "k1":
        if len(ends) != 1:
            raise MethodError(f"threshold={threshold!r} of {mode} must be one number")
        return Gate(statistic=name, on=on, unit=unit, high=ends[0])  # type: ignore[arg-type]
    low, high = ends if len(ends) == 2 else (1 / ends[0], ends[0])
    if k1_band == "verl":
        low, high = 1 / high, 1 / low
    return Gate(statistic="ratio", on=on, unit=unit, low=low, high=high)  # type: ignore[arg-type]


def _numbers(threshold: str | float) -> list[float]:
    parts = threshold.split("_") if isinstance(threshold, str) else [threshold]
    try:
        numbers = [float(p) for p in parts]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2) or not all(0 < x < math.inf for x in numbers):
        raise MethodError(f'threshold={threshold!r} is not a positive number or a band such as "0.99_1.01"')
    return numbers


# LN-TRM: reject by the mean ratio error, weighted by how much each position can still matter.


@dataclass(frozen=True, kw_only=True)
class LengthNeutralGate:
    """Keep a sequence iff S <= high, with S a weighted mean of |w_t - 1|:

        omega_t = min(1, (T - t) eps, sqrt((T - t) delta / 2))
        S = sum_t omega_t |w_t - 1| / Z(T),   Z(T) = sum_t omega_t

    The last token has weight 0: combine it with a gate on the worst token. A sequence of one token
    is kept (Z = 0: its surrogate is exact). Positions count trainable tokens.

    Args:
        high: largest S, 1. No value is published; 0.05 is this library's.
        eps: assumed largest TV of a token.
        delta: assumed largest KL of a token, nats.

    Example:
        >>> LengthNeutralGate(high=0.2, eps=0.05, delta=0.01).formula
        'keep if length-neutral ratio_error(full) <= 0.2'

    Reference: Li et al., arXiv:2512.23075v5, Appendix F.2, eqs. 98-99.
    """

    on: RatioName = "full"
    high: float = 0.05
    eps: float = 5e-3
    delta: float = 1e-4

    exact = False

    def __post_init__(self) -> None:
        check_choice("on", self.on, get_args(RatioName))
        for name in ("high", "eps", "delta"):
            check_number(name, getattr(self, name))
        if not (0 < self.eps <= 1 and self.delta > 0 and self.high >= 0):
            raise MethodError(
                f"eps={self.eps} must lie in (0, 1], delta={self.delta} above 0 and high={self.high} not below 0"
            )

    @property
    def formula(self) -> str:
        """Rule for the tokens that are kept, in one line."""
        return f"keep if length-neutral ratio_error({self.on}) <= {self.high:g}"

    def score(self, logprobs: LogProbs) -> Float[Tensor, " b"]:
        """S of every sequence; 0 where Z is 0. Gradient: none."""
        segments = logprobs.segments
        error = ratio_error(stopped_log_ratio(logprobs, on=self.on))
        omega = self.position_weights(segments).to(error.dtype)
        total = segments.sum(omega)
        return (segments.sum(omega * error) / total.clamp(min=1e-300)).where(total > 0, 0.0)

    def position_weights(self, segments: Segments) -> Float[Tensor, " n"]:
        """omega of every token, float64."""
        left = (segments.spread(segments.lengths) - 1 - segments.position).double()
        return torch.minimum(left * self.eps, left.sqrt() * math.sqrt(self.delta / 2)).clamp(max=1)

    def keep(
        self, logprobs: LogProbs, advantages: Float[Tensor, " n"] | None = None, batch_info: BatchInfo = NO_INFO
    ) -> Bool[Tensor, " n"]:
        """Mark the tokens that take part. Gradient: none."""
        with torch.no_grad():
            return logprobs.segments.spread(self.score(logprobs) <= self.high)
