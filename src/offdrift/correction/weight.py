"""`Weight`: a number >= 0, without gradient, that multiplies the loss of a token.

An importance weight corrects for having sampled from another policy; its limits trade variance for
bias. A weight never receives a gradient: where the ratio itself should be differentiated, that is
an objective.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from offdrift.batch_info import NO_INFO, BatchInfo, StepSums
from offdrift.errors import MethodError, check_choice, check_number, check_positive
from offdrift.logprobs import LogProbs
from offdrift.numerics import LOG_RATIO_LIMIT, asked, blocks, clamped, log_sums, ratio
from offdrift.ratios import RatioName, Unit, discounted_future, per_unit, stopped_log_ratio
from offdrift.segments import Segments

Sign = Literal["any", "negative", "positive"]
Outcome = Literal["any", "incorrect", "correct"]
WHOLE_SEQUENCE = ("sequence", "geometric", "worst")
LEAST, MOST = (math.exp(x * (1 - 1e-6)) for x in (-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
"""Exponentials at or beyond these may be what the guard of `exp` left of others."""


class Weighted(NamedTuple):
    """Weights of the tokens, and marks of those that limits changed."""

    weight: Float[Tensor, " n"]
    limited: Bool[Tensor, " n"]
    exact: Callable[[], Float[Tensor, " n"]] | None = None
    """Gives the logs of the weights as they are without the guard at +-20 nats; None if there is
    none."""
    least: float = LEAST
    """Positive weights up to this may be what the guard left of smaller ones."""

    def guarded(self, extremes: tuple[float, float] | None = None) -> bool:
        """Whether that guard may have changed a weight. An accelerator is not asked: yes.

        Args:
            extremes: the smallest and largest weight, where they are known already.
        """
        w = self.weight
        if self.exact is None or not len(w):
            return False
        if w.device.type != "cpu":
            return True
        low, high = extremes or (float(x) for x in w.aminmax())
        if low > self.least and high < MOST:  # one pass; masked weights are 0 and take another look
            return False
        return high >= MOST or bool(self.beyond().any())

    def beyond(self) -> Bool[Tensor, " n"]:
        """Mark the tokens whose weight that guard may have changed."""
        if self.exact is None:
            return torch.zeros_like(self.limited)
        return (self.weight >= MOST) | ((self.weight > 0) & (self.weight <= self.least))

    def log_weight(self) -> Float[Tensor, " n"]:
        """Logs of the weights at any size, -inf for 0: what sums that divide each other are made of."""
        return self.weight.log() if self.exact is None else self.exact()

    def map(self, function: Callable[[Tensor], Tensor]) -> Weighted:
        """Apply `function` to every tensor, to choose other tokens or another device."""
        exact = self.exact and (lambda: function(self.log_weight()))
        return Weighted(function(self.weight), function(self.limited), exact, self.least)


@dataclass(frozen=True, kw_only=True)
class Weight:
    """Importance weight of each token's unit, limited to `[floor, cap]`.

        W = exp(l)   with l the log-ratio of the unit
        outside="truncate": W <- min(max(W, floor), cap)
        outside="mask":     W <- 0 where W is outside
        saturation=g:       W <- W / (W + g)
        gaussian=s:         W <- W exp(-l^2 / (2 s^2))
        normalize=True:     W <- W / m, m the mean of W over the whole step

    The weight that is returned lies in [e^-20, e^20] unless a limit says otherwise. Means and sums of
    squares are taken of W itself, whatever its size (`Weighted.log_weight`).

    Args:
        on: which ratio; `mismatch` in decoupled form, `full` in bypass form.
        unit: what the ratio is taken over, see `ratios.per_unit`.
        cap: upper limit, a ratio; None for none.
        floor: lower limit, a ratio; None for none.
        outside: what happens beyond the limits.
        advantage: which tokens are weighted, by the sign of their advantage; the others have
            weight 1.
        outcome: which sequences are weighted, by their reward; the others have weight 1.
        correct_above: a sequence is correct if its reward exceeds this number, else incorrect; 0
            suits rewards of 0 and 1 and of -1 and 1. A reward of NaN is neither.
        growth: the limits of the t-th token (from 1) are `floor^(t^growth)` and `cap^(t^growth)`;
            0.5 for prefix products, whose log spreads like the square root of the length.
        normalize: mean over tokens; for whole-sequence units, mean over sequences.
        saturation: see above; None for none.
        gaussian: width of a trust weight in l, nats: a ratio counts for less the farther it is from 1, on either
            side, and nothing is cut off; None for none.

    Example:
        >>> token_tis = Weight(on="mismatch", unit="token", cap=2.0)

    Reference: truncated importance sampling: Yao et al., "Your efficient RL framework secretly
    brings you off-policy RL training", 2025; sequence form and mask: Liu et al., "When speed kills
    stability", 2025; Ionides, 2008; growth: CTPO, arXiv:2605.07331; saturation: LUFFY,
    arXiv:2504.14945; gaussian: GIPO, arXiv:2603.03955.
    """

    on: RatioName
    unit: Unit = "token"
    cap: float | None = None
    floor: float | None = None
    outside: Literal["truncate", "mask"] = "truncate"
    advantage: Sign = "any"
    outcome: Outcome = "any"
    correct_above: float = 0.0
    growth: float = 0.0
    normalize: bool = False
    saturation: float | None = None
    gaussian: float | None = None

    def __post_init__(self) -> None:
        check_choice("on", self.on, get_args(RatioName))
        check_choice("unit", self.unit, get_args(Unit))
        check_choice("outside", self.outside, ("truncate", "mask"))
        check_choice("advantage", self.advantage, get_args(Sign))
        check_choice("outcome", self.outcome, get_args(Outcome))
        for name in ("cap", "floor", "growth", "saturation", "gaussian", "correct_above"):
            check_number(name, getattr(self, name))
        if self.cap is not None and self.cap <= 0:
            raise MethodError(f"cap={self.cap} must be positive")
        if self.floor is not None and not 0 <= self.floor <= (self.cap or float("inf")):
            raise MethodError(f"floor={self.floor} must lie in [0, cap={self.cap}]")
        for name in ("saturation", "gaussian"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise MethodError(f"{name}={value} must be positive")
        if self.growth and ((self.cap or 1) < 1 or (self.floor or 1) > 1 or self.floor == 0):
            raise MethodError(
                f"growth={self.growth} widens limits around 1: floor={self.floor} must lie in "
                f"(0, 1] and cap={self.cap} must be at least 1"
            )

    @property
    def needs(self) -> tuple[str, ...]:
        """Fields of `BatchInfo` that it reads."""
        return () if self.outcome == "any" else ("rewards",)

    @property
    def observes(self) -> bool:
        """Whether it looks at the whole step."""
        return self.normalize

    @property
    def formula(self) -> str:
        """The weight, in one line."""
        limits = [
            f"{self.outside} {side} {value:g}{'^t^' + format(self.growth, 'g') if self.growth else ''}"
            for side, value in (("below", self.floor), ("above", self.cap))
            if value is not None
        ]
        if self.saturation is not None:
            limits.append(f"W / (W + {self.saturation:g})")
        if self.gaussian is not None:
            limits.append(f"times exp(-l^2 / (2 {self.gaussian:g}^2))")
        if self.normalize:
            limits.append("mean 1 over the step")
        where = [] if self.advantage == "any" else [f"advantage is {self.advantage}"]
        if self.outcome != "any":
            sign = ">" if self.outcome == "correct" else "<="
            where.append(f"reward {sign} {self.correct_above:g}")
        if where:
            limits.append(f"where {' and '.join(where)}, else 1")
        return ", ".join([f"weight {self.unit} ratio({self.on})", *limits])

    def __call__(
        self, logprobs: LogProbs, advantages: Float[Tensor, " n"] | None = None, batch_info: BatchInfo = NO_INFO
    ) -> Weighted:
        """Weights of the batch and which tokens the limits touched. Gradient: none.

        Raises: `MethodError` if the weight depends on the advantage and none was given;
            `EvidenceError` if it depends on rewards and none were given.
        """
        with torch.no_grad():
            weight, limited = self._limited(logprobs)
            exact = partial(self.log_weight, logprobs, advantages, batch_info)
            if self.normalize:
                log_w = self._normalized(logprobs, advantages, batch_info)  # only a mask makes a weight 0
                weight = ratio(log_w).where(log_w > -torch.inf, 0.0).to(weight.dtype)
            for applies in self._applies(logprobs, advantages, batch_info):
                weight, limited = weight.where(applies, 1.0), limited & applies
            least = LEAST if self.saturation is None else LEAST / (LEAST + self.saturation)
            return Weighted(weight, limited, exact, least)

    def log_weight(
        self, logprobs: LogProbs, advantages: Float[Tensor, " n"] | None = None, batch_info: BatchInfo = NO_INFO
    ) -> Float[Tensor, " n"]:
        """log W of every token, float64, at any size; -inf where a mask made it 0. Gradient: none.

        Raises: `MethodError` if the weight depends on the advantage and none was given;
            `EvidenceError` if it depends on rewards and none were given.
        """
        with torch.no_grad():
            if self.normalize:
                log_w = self._normalized(logprobs, advantages, batch_info)
            else:
                log_w = self._log_limited(logprobs)
            for applies in self._applies(logprobs, advantages, batch_info):
                log_w = log_w.where(applies, 0.0)
            return log_w

    def observe(self, logprobs: LogProbs, advantages: Float[Tensor, " n"] | None, batch_info: BatchInfo) -> StepSums:
        """Log of the sum of weights, and their number, for their mean over the step. Gradient: none."""
        with torch.no_grad():
            log_w, segments = self._log_limited(logprobs), logprobs.segments
            count = segments.cu_seqlens[-1]
            if self.unit in WHOLE_SEQUENCE:
                log_w, count = segments.max(log_w, empty=-torch.inf), (segments.lengths > 0).sum()
            return {"log_weight": log_sums(log_w)[0], "count": count.double()}

    def _normalized(
        self, logprobs: LogProbs, advantages: Float[Tensor, " n"] | None, batch_info: BatchInfo
    ) -> Float[Tensor, " n"]:
        """Logs of the weights divided by their mean over the step; -inf where all are 0."""
        observed = batch_info.seen_by(self, logprobs, advantages)
        log_mean = observed["log_weight"] - observed["count"].log()
        return self._log_limited(logprobs) - log_mean.clamp(min=torch.finfo(torch.float64).min)

    def _applies(
        self, logprobs: LogProbs, advantages: Float[Tensor, " n"] | None, batch_info: BatchInfo
    ) -> Iterator[Bool[Tensor, " n"]]:
        """Yield the tokens where each condition holds; nothing for a weight of every token."""
        if self.advantage != "any":
            if advantages is None:
                raise MethodError(f'a weight with advantage="{self.advantage}" needs advantages')
            yield advantages > 0 if self.advantage == "positive" else advantages < 0
        if self.outcome != "any":
            rewards, line = batch_info.required("rewards"), self.correct_above
            correct = self.outcome == "correct"
            yield logprobs.segments.spread(rewards > line if correct else rewards <= line)

    def _limited(self, logprobs: LogProbs) -> tuple[Tensor, Tensor]:
        unit, steps = self._units(stopped_log_ratio(logprobs, on=self.on), logprobs.segments)
        if steps is None:
            if asked() and self.saturation is None and self.gaussian is None:
                from offdrift.compiled.passes import limited_weights

                limits = limited_weights(unit, cap=self.cap, floor=self.floor, mask=self.outside == "mask")
                if limits is not None:
                    return limits
            parts = [self._limit(clamped(x), 1.0) for (x,) in blocks(unit)]
        else:
            parts = [self._limit(clamped(x), s) for x, s in blocks(unit, steps)]
        return torch.cat([w for w, _ in parts]), torch.cat([x for _, x in parts])

    def _log_limited(self, logprobs: LogProbs) -> Float[Tensor, " n"]:
        """Logs of the weights inside the limits, float64 and without the guard of `exp`."""
        log_ratio = stopped_log_ratio(logprobs, on=self.on).double()
        unit, steps = self._units(log_ratio, logprobs.segments)
        log_w, size = unit, 1.0 if steps is None else steps
        for limit, beyond in ((self.cap, torch.gt), (self.floor, torch.lt)):
            if limit:
                edge = math.log(limit) * size
                at = -torch.inf if self.outside == "mask" else edge
                log_w = torch.where(beyond(unit, edge), at, log_w)
        if self.saturation is not None:
            log_w = log_w - torch.logaddexp(log_w, torch.full_like(log_w, math.log(self.saturation)))
        return log_w if self.gaussian is None else log_w - (unit / self.gaussian).square() / 2

    def _units(
        self, log_ratio: Float[Tensor, " n"], segments: Segments
    ) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"] | None]:
        """The log-ratio of each token's unit, and the power of its limits if they grow."""
        unit = per_unit(log_ratio, segments, unit=self.unit)
        if not self.growth:
            return unit, None
        return unit, (segments.position + 1).to(unit.dtype) ** self.growth

    def _limit(self, log_ratio: Float[Tensor, " k"], steps: Float[Tensor, " k"] | float) -> tuple[Tensor, Tensor]:
        """Weights inside the limits, and which ones the limits changed.

        Compared in log space, so that a ratio on its limit is inside.
        """
        limited = torch.zeros_like(log_ratio, dtype=torch.bool)
        weight = log_ratio.exp()
        for limit, beyond in ((self.cap, torch.gt), (self.floor, torch.lt)):
            if not limit:  # None, or a floor of 0
                continue
            outside = beyond(log_ratio, math.log(limit) * steps)
            limited |= outside
            edge = 0.0 if self.outside == "mask" else limit**steps
            weight = torch.where(outside, edge, weight)
        if self.saturation is not None:
            weight = weight / (weight + self.saturation)
        if self.gaussian is not None:
            weight = weight * (-(log_ratio / self.gaussian).square() / 2).exp()
        return weight, limited


# VESPO's weight: a smooth kernel of the sequence ratio, whose tails vanish on both sides.


LOG_FLOOR = math.log(1e-8)
VANISHED = 1e-3
"""A kernel below this counts as limited: the sequence is dropped in all but name."""


@dataclass(frozen=True, kw_only=True)
class VariationalWeight:
    """phi(l) = exp(lam + k l - lam e^l), phi(0) = 1, largest at e^l = k / lam.

        l = clamp(sum_t clamp(log r_t, +-20) + sum_t log clamp(rho_t, 1e-8, cap), log 1e-8, 20)

    with (k, lam) by the sign of the advantage; zero counts as positive. A NaN kernel is 0.

    Args:
        cap: truncation of the mismatch ratio per token.
        k_positive, lam_positive: the kernel where the advantage is not negative.
        k_negative, lam_negative: the kernel where it is.
        anchor: "old" as above; "rollout" takes l = sum_t log w_t and needs no old policy.

    Gradient: none.

    Example:
        >>> VariationalWeight().kernel(torch.tensor(0.5), torch.tensor(1.0))
        tensor(0.3882)

    Reference: VESPO, arXiv:2602.10693, and its official code.
    """

    cap: float = 2.0
    k_positive: float = 2.0
    lam_positive: float = 3.0
    k_negative: float = 3.0
    lam_negative: float = 2.0
    anchor: Literal["old", "rollout"] = "old"

    unit = "sequence"

    def __post_init__(self) -> None:
        check_positive(self, "cap", "k_positive", "lam_positive", "k_negative", "lam_negative")

    @property
    def on(self) -> RatioName:
        """The ratio it corrects for."""
        return "full"

    @property
    def advantage(self) -> str:
        """The signs of the advantage that it acts on; each has a kernel of its own."""
        return "any"

    @property
    def needs_old(self) -> bool:
        """Whether it reads the old policy."""
        return self.anchor == "old"

    @property
    def formula(self) -> str:
        """The weight, in one line."""
        up, down = (self.k_positive, self.lam_positive), (self.k_negative, self.lam_negative)
        return (
            "weight exp(lam + k l - lam e^l), l = log sequence ratio(full), "
            f"(k, lam) = {up} where A >= 0 and {down} where A < 0"
        )

    def kernel(self, log_ratio: Float[Tensor, "*s"], advantages: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
        """phi of a sequence's log-ratio under the sign of its advantage."""
        up = advantages >= 0
        k = torch.full_like(log_ratio, self.k_positive).where(up, self.k_negative)
        lam = torch.full_like(log_ratio, self.lam_positive).where(up, self.lam_negative)
        return torch.nan_to_num((lam + k * log_ratio - lam * log_ratio.exp()).exp(), nan=0.0)

    def __call__(
        self, logprobs: LogProbs, advantages: Float[Tensor, " n"] | None = None, batch_info: BatchInfo = NO_INFO
    ) -> Weighted:
        """The kernel of every sequence, given to its tokens; limited where it nearly vanishes."""
        if advantages is None:
            raise MethodError("VariationalWeight depends on the sign of the advantage; give advantages")
        with torch.no_grad():
            weight = self.kernel(logprobs.segments.spread(self._total(logprobs)), advantages)
            return Weighted(weight, weight < VANISHED)

    def _total(self, logprobs: LogProbs) -> Float[Tensor, " b"]:
        segments = logprobs.segments
        if self.anchor == "rollout":
            total = segments.sum(clamped(stopped_log_ratio(logprobs, on="full")))
        else:
            staleness = segments.sum(clamped(stopped_log_ratio(logprobs, on="staleness")))
            mismatch = stopped_log_ratio(logprobs, on="mismatch")
            total = staleness + segments.sum(mismatch.clamp(LOG_FLOOR, math.log(self.cap)))
        return total.clamp(LOG_FLOOR, LOG_RATIO_LIMIT)


# Weights that correct for no ratio: `on` is None, so they may multiply an objective or a weight that contains any.


@dataclass(frozen=True, kw_only=True)
class FutureWeight:
    """Weight of a token by how much more likely what follows it has become.

        F_t = sum_{s >= t} decay^(s - t) log r_s [r_s <= drop_above],   decay = 2^(-1 / half_life)
        W_t = clip(exp(F_t), floor, cap);   where A_t < 0 and r_t > harmful_above: W_t <- clip(W_t, 0.8, 1)

    Args:
        of: the ratio r; that of the objective, which the weight multiplies without counting it twice.
        half_life: tokens after which a later log-ratio counts half.
        floor: lower limit of the weight; 1 never weakens a token.
        cap: upper limit.
        drop_above: a ratio above this leaves the sum; None for no such limit.
        harmful_above: ratio from which a token of negative advantage is not strengthened; None for none.

    Gradient: none.

    Example:
        >>> FutureWeight().formula
        'weight clip(exp(discounted future log ratio(staleness)), 1, 1.2), half-life 32 tokens'

    Reference: FIPO, arXiv:2603.19835, as in ms-swift 4.6 (`loss_type="fipo"`); drop_above 10 as in its script.
    """

    of: RatioName = "staleness"
    half_life: float = 32.0
    floor: float = 1.0
    cap: float = 1.2
    drop_above: float | None = 10.0
    harmful_above: float | None = 4.0

    on = None
    unit = "future"
    advantage = "any"

    def __post_init__(self) -> None:
        check_choice("of", self.of, get_args(RatioName))
        check_positive(self, "half_life", "cap")
        for name in ("floor", "drop_above", "harmful_above"):
            check_number(name, getattr(self, name))
        if not 0 <= self.floor <= self.cap:
            raise MethodError(f"floor={self.floor} must lie in [0, cap={self.cap}]")

    @property
    def needs_old(self) -> bool:
        """Whether it reads the old policy."""
        return self.of != "full"

    @property
    def formula(self) -> str:
        """The weight, in one line."""
        return (
            f"weight clip(exp(discounted future log ratio({self.of})), {self.floor:g}, {self.cap:g}), "
            f"half-life {self.half_life:g} tokens"
        )

    def future(self, logprobs: LogProbs) -> Float[Tensor, " n"]:
        """F of every token, nats. Gradient: none."""
        x = stopped_log_ratio(logprobs, on=self.of)
        if self.drop_above is not None:
            x = x.where(ratio(x) <= self.drop_above, 0.0)
        return discounted_future(x, logprobs.segments, decay=2 ** (-1 / self.half_life))

    def __call__(
        self, logprobs: LogProbs, advantages: Float[Tensor, " n"] | None = None, batch_info: BatchInfo = NO_INFO
    ) -> Weighted:
        """Weights of the batch and which tokens the limits touched. Gradient: none.

        Raises: `MethodError` without advantages.
        """
        if advantages is None:
            raise MethodError("FutureWeight depends on the sign of the advantage; give advantages")
        with torch.no_grad():
            raw = clamped(self.future(logprobs)).exp()
            weight = raw.clamp(self.floor, self.cap)
            if self.harmful_above is not None:
                harmful = (advantages < 0) & (ratio(stopped_log_ratio(logprobs, on=self.of)) > self.harmful_above)
                weight = torch.where(harmful, weight.clamp(0.8, 1.0), weight)
            return Weighted(weight, weight != raw)


@dataclass(frozen=True, kw_only=True)
class SurprisalWeight:
    """Divide every token of an answer by the answer's mean surprisal under the current policy.

        W = 1 / max(mean_t -log pi(y_t), floor)

    Times -A log pi, answers of equal |A| contribute equal losses whatever their likelihood, so that stale answers,
    which have become unlikely, do not outweigh the others. Reads no policy but the current one.

    Args:
        floor: smallest mean surprisal that is divided by, nats; an answer that is certain has none.

    Gradient: none: the mean is a constant.

    Example:
        >>> SurprisalWeight().formula
        "weight 1 / max(the answer's mean -log pi, 0.01)"

    Reference: ASymPO, arXiv:2606.03070, abstract; the floor is this library's.
    """

    floor: float = 0.01

    on = None
    unit = "sequence"
    advantage = "any"
    reads_current = True

    def __post_init__(self) -> None:
        check_positive(self, "floor")

    @property
    def formula(self) -> str:
        """The weight, in one line."""
        return f"weight 1 / max(the answer's mean -log pi, {self.floor:g})"

    def __call__(
        self, logprobs: LogProbs, advantages: Float[Tensor, " n"] | None = None, batch_info: BatchInfo = NO_INFO
    ) -> Weighted:
        """Weights of the batch, and the answers that the floor touched. Gradient: none."""
        with torch.no_grad():
            segments = logprobs.segments
            surprisal = segments.mean(-logprobs.current.detach())
            weight = segments.spread(1 / surprisal.clamp(min=self.floor))
            return Weighted(weight, segments.spread(surprisal < self.floor))


@dataclass(frozen=True, kw_only=True)
class SignWeight:
    """A constant for the tokens of each sign of the advantage: `positive` where A >= 0, `negative` where A < 0.

    Args:
        positive: weight of tokens that are not pushed down.
        negative: weight of tokens that are.

    Gradient: none.

    Example:
        >>> SignWeight(negative=0.5).formula
        'weight 1 where A >= 0, 0.5 where A < 0'

    Reference: SPO of ASymPO, arXiv:2606.03070, abstract (a fixed scale for negatives).
    """

    positive: float = 1.0
    negative: float = 1.0

    on = None
    unit = "token"
    advantage = "any"

    def __post_init__(self) -> None:
        for name in ("positive", "negative"):
            check_number(name, getattr(self, name))
            if getattr(self, name) < 0:
                raise MethodError(f"{name}={getattr(self, name)} must not be negative: it would turn the push around")

    @property
    def formula(self) -> str:
        """The weight, in one line."""
        return f"weight {self.positive:g} where A >= 0, {self.negative:g} where A < 0"

    def __call__(
        self, logprobs: LogProbs, advantages: Float[Tensor, " n"] | None = None, batch_info: BatchInfo = NO_INFO
    ) -> Weighted:
        """Weights of the batch. Gradient: none. Raises: `MethodError` without advantages."""
        if advantages is None:
            raise MethodError("SignWeight depends on the sign of the advantage; give advantages")
        with torch.no_grad():
            ones = torch.ones_like(logprobs.logp_rollout)
            weight = torch.where(advantages < 0, self.negative * ones, self.positive * ones)
            return Weighted(weight, torch.zeros_like(weight, dtype=torch.bool))
