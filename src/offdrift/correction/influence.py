"""Weights that correct for no ratio: they say how much a token or an answer should count, not how it was sampled.

`on` is None, so they may multiply an objective or a weight that contains any ratio.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import torch
from jaxtyping import Float
from torch import Tensor

from offdrift.batch_info import NO_INFO, BatchInfo
from offdrift.correction.weight import Weighted
from offdrift.errors import MethodError, check_choice, check_number, check_positive
from offdrift.logprobs import LogProbs
from offdrift.numerics import clamped, ratio
from offdrift.ratios import RatioName, discounted_future, stopped_log_ratio


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
