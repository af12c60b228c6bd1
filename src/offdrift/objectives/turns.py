"""ST-PPO: turn-level PPO whose update is divided by the size of what its clip removed, where that exceeds 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from offdrift.batch_info import NO_INFO, BatchInfo, StepSums
from offdrift.errors import MethodError, check_choice, check_positive
from offdrift.logprobs import LogProbs
from offdrift.numerics import clamped, log_sums, ratio
from offdrift.objectives.base import PerToken, TokenLoss
from offdrift.objectives.clipped import ppo_clip, unit_ratio
from offdrift.ratios import RatioName, Unit, turns_of
from offdrift.segments import Segments

TURN_UNITS = ("token", "turn", "turn_product", "turn_arithmetic")


def clipping_bias(
    log_ratio: Float[Tensor, " n"], advantages: Float[Tensor, " n"], clipped: Bool[Tensor, " n"], segments: Segments
) -> Float[Tensor, ""]:
    """Log of the squared length of what a clip removed from the gradient, times the squared number of
    sequences; -inf if it removed nothing:

        N^2 |C|^2 = sum over clipped tokens of (u_t A_t / T_i)^2

    C lists the removed factors of grad log pi token by token. It stands in for the gradient vector
    itself, which would take another backward pass.

    Gradient: none.

    Example:
        >>> s, a = Segments.from_lengths([2]), torch.tensor([3.0, 3.0])
        >>> clipping_bias(torch.zeros(2), a, torch.tensor([True, False]), s)  # log of (3 / 2)^2
        tensor(0.8109, dtype=torch.float64)

    Reference: ST-PPO, arXiv:2511.20718v1, clipping-bias correction. Unverified: best reading of the
    per-token stand-in.
    """
    with torch.no_grad():
        lengths = segments.spread(segments.lengths.double())
        removed = log_ratio.double() + advantages.double().abs().log() - lengths.log()
        return log_sums(removed.where(clipped, -torch.inf))[1]


def renormalized(
    log_ratio: Float[Tensor, " n"], clipped: Bool[Tensor, " n"], turns: Segments, *, eps_low: float, eps_high: float
) -> Float[Tensor, " n"]:
    """Log-ratios divided by the mean clipped ratio of their turn, in turns where a clip acts:

        u_t <- u_t / mean over the turn of clip(u_s, 1 - eps_low, 1 + eps_high)

    Gradient: to `log_ratio`; the mean is a constant.

    Example:
        >>> l, clipped = torch.tensor([1.54, 1.0]).log(), torch.tensor([True, False])
        >>> s = Segments.from_lengths([2])  # (1.2 + 1) / 2 = 1.1
        >>> renormalized(l, clipped, s, eps_low=0.2, eps_high=0.2).exp()
        tensor([1.4000, 0.9091])

    Reference: ST-PPO, arXiv:2511.20718. Unverified: best reading.
    """
    with torch.no_grad():
        mean = turns.mean(ratio(log_ratio).clamp(1 - eps_low, 1 + eps_high))
        triggered = turns.sum(clipped.to(mean.dtype)) > 0
        shift = turns.spread(mean.log().where(triggered, 0.0))
    return clamped(log_ratio) - shift


@dataclass(frozen=True, kw_only=True)
class TurnNormalized:
    """PPO on turn ratios, rescaled by what its clip removed.

        mode="rescale":  L <- L / max(1, |C|)     C of the whole step, see `clipping_bias`
        mode="renorm":   u <- u / mean clip(u)    in turns where the clip acts, see `renormalized`

    Average it over sequences ("seq_mean_token_mean"): C assumes it. Tokens that gates remove count
    towards C. Without recorded turns a sequence is one turn.

    Args:
        unit: turn (geometric), turn_product, turn_arithmetic; or token (S-PPO). "renorm" needs
            token ratios: where a turn has one ratio, dividing by its clipped value changes nothing.

    Gradient: as PPO on the unit; |C| and the mean are constants.

    Reference: ST-PPO, arXiv:2511.20718. Unverified: best reading of the guard at 1, of `renorm` and
    of the turn's mean.
    """

    on: RatioName = "staleness"
    unit: Unit = "turn"
    eps_low: float = 0.2
    eps_high: float = 0.2
    mode: Literal["rescale", "renorm"] = "rescale"
    gradient = "unit"

    def __post_init__(self) -> None:
        check_choice("on", self.on, get_args(RatioName))
        check_choice("unit", self.unit, TURN_UNITS)
        check_choice("mode", self.mode, ("rescale", "renorm"))
        check_positive(self, "eps_low", "eps_high", hint=": a distance from ratio 1")
        if self.eps_low >= 1:
            raise MethodError(f"eps_low={self.eps_low} must lie in (0, 1): a distance below ratio 1")
        if self.mode == "renorm" and self.unit != "token":
            raise MethodError(
                f'mode="renorm" changes nothing with unit="{self.unit}", where all tokens of a turn '
                'have one ratio; choose unit="token"'
            )

    @property
    def formula(self) -> str:
        clip = f"clip(u, 1 - {self.eps_low:g}, 1 + {self.eps_high:g})"
        loss, u = f"L = max(-A u, -A {clip})", f"u = {self.unit} ratio({self.on})"
        if self.mode == "rescale":
            return f"{loss} / max(1, |clipped u A|), {u}"
        return f"{loss}, {u} / mean {clip} of its turn where clipped"

    def __call__(self, logprobs: LogProbs, advantages: PerToken, batch_info: BatchInfo = NO_INFO) -> TokenLoss:
        u, a = unit_ratio(logprobs, advantages, self.on, self.unit, "unit")
        loss, clipped = self._clip(u, a)
        if self.mode == "renorm":
            turns = turns_of(logprobs.segments)
            u = renormalized(u, clipped, turns, eps_low=self.eps_low, eps_high=self.eps_high)
            return TokenLoss(*self._clip(u, a))
        observed = batch_info.seen_by(self, logprobs, advantages)
        log_norm = observed["log_squares"] / 2 - observed["sequences"].clamp(min=1).log()
        return TokenLoss(loss / log_norm.clamp(min=0).exp().to(loss.dtype), clipped)

    def observe(self, logprobs: LogProbs, advantages: Float[Tensor, " n"] | None, batch_info: BatchInfo) -> StepSums:
        """Log of the squared size of what was clipped, and the number of sequences; nothing for "renorm".

        Gradient: none. Raises: `MethodError` without advantages.
        """
        if self.mode == "renorm":
            return {}
        if advantages is None:
            raise MethodError("TurnNormalized measures clipped advantages; give advantages")
        segments = logprobs.segments
        with torch.no_grad():
            u, a = unit_ratio(logprobs, advantages, self.on, self.unit, "unit")
            _, clipped = self._clip(u, a)
            count = u.new_full((), len(segments), dtype=torch.float64)
            return {"log_squares": clipping_bias(u, a, clipped, segments), "sequences": count}

    def _clip(self, u: Float[Tensor, " n"], a: Float[Tensor, " n"]) -> tuple[Tensor, Tensor]:
        loss, clipped, _ = ppo_clip(u, a, eps_low=self.eps_low, eps_high=self.eps_high)
        assert clipped is not None
        return loss, clipped
