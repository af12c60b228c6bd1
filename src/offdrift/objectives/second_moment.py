"""The second moment of the log-ratios as the trust region: a clip, a mask or a penalty that depends on their spread.

M2PO measures the mean squared log-ratio of the tokens that are being pushed further out, over the whole step, and
sets the clip's distances from it: none while the step is within its budget, the loosest that restore it otherwise.

Sources disagree about R2VPO: its authors describe a constraint on the ratio's variance without any
clip (`VariancePenalized`), a survey a clip whose range tightens with the variance (`GroupClipped`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from offdrift.batch_info import NO_INFO, BatchInfo, StepSums
from offdrift.errors import MethodError, check_choice, check_number, check_positive
from offdrift.logprobs import LogProbs
from offdrift.numerics import ratio, transformed
from offdrift.objectives.base import PerToken, StepPrompts, TokenLoss, capped, larger, prompt_ids
from offdrift.objectives.clipped import ppo_clip
from offdrift.objectives.reinforce import importance_sampled
from offdrift.ratios import RatioName, log_ratio, stopped_log_ratio

Level = Literal["discrete", "exact"]
Scope = Literal["harmful", "all_drop_largest"]
SLACK = 1e-12
"""Advantages and excesses smaller than this are rounding, as in the official code."""


class Bounds(NamedTuple):
    """Lower and upper limit of a ratio; 0 and infinity where nothing is clipped."""

    low: Float[Tensor, ""]
    high: Float[Tensor, ""]


def second_moment_threshold(
    squares: Float[Tensor, " n"], *, budget: float, level: Level = "discrete"
) -> Float[Tensor, ""]:
    """Largest |log-ratio| tau with which the second moment of the capped tokens meets the budget.

        D = the nonzero squares,  n = |D|
        mean of D <= budget:  tau = inf
        discrete:  tau^2 = the largest d in D with sum_D min(x, d) < budget n;   0 if there is none
        exact:     tau^2 solves sum_D min(x, tau^2) = budget n

    Args:
        squares: squared log-ratios, nats^2; zeros are tokens outside of D.
        budget: the largest mean square that is not clipped, nats^2.
        level: only a value that occurs, as the official code, or the budget to the digit.

    Gradient: none.

    Example:
        >>> d = torch.tensor([0.36, 0.09, 0.0, 0.01, 0.81])
        >>> second_moment_threshold(d, budget=0.04), second_moment_threshold(d, budget=0.4)
        (tensor(0.1000, dtype=torch.float64), tensor(inf, dtype=torch.float64))

    Reference: M2PO, arXiv:2510.01161, and its official code.
    """
    if not len(squares):
        return squares.new_full((), torch.inf, dtype=torch.float64)
    # Zeros add nothing to any sum of capped squares, so they need not be removed (a host transfer).
    x = sorted_squares(squares)
    size = (x > 0).sum().double()
    target = budget * size
    rank = torch.arange(len(x), device=x.device)
    capped = x.cumsum(0) + (len(x) - 1 - rank) * x
    below = capped < target - SLACK
    if level == "discrete":
        square = x.where(below, 0.0).max()
    else:
        square = (target - x.where(below, 0.0).sum()) / (~below).sum().clamp(min=1)
    within = x.sum() <= target + SLACK * size
    return square.clamp(min=0).sqrt().where(~within, torch.inf)


def second_moment_bounds(threshold: Float[Tensor, ""], *, floor_low: float = 0.3, floor_high: float = 0.5) -> Bounds:
    """Limits of the ratio, with distances from 1 that never fall below the floors.

        [1 - max(1 - e^-tau, floor_low),  1 + max(e^tau - 1, floor_high)]

    Gradient: none.

    Example:
        >>> second_moment_bounds(torch.tensor(1.0))
        Bounds(low=tensor(0.3679), high=tensor(2.7183))

    Reference: M2PO, arXiv:2510.01161; the floors: official code.
    """
    low = 1 - (1 - (-threshold).exp()).clamp(min=floor_low)
    return Bounds(low, 1 + (threshold.exp() - 1).clamp(min=floor_high))


def largest_kept(squares: Float[Tensor, " n"], *, budget: float) -> Float[Tensor, ""]:
    """Largest square that stays when the largest are dropped until the mean is below the budget.

    Strictly below. Equal squares share one fate and are dropped together, so that it does not matter
    in which order tokens come; the smallest always stay. Gradient: none.

    Example:
        >>> largest_kept(torch.tensor([0.36, 0.09, 0.0625, 0.01, 0.81]), budget=0.04)
        tensor(0.0625, dtype=torch.float64)

    Reference: AReaL, `m2_threshold` of its PPO actor.
    """
    if not len(squares):
        return squares.new_full((), torch.inf, dtype=torch.float64)
    x = sorted_squares(squares)
    count = torch.arange(1, len(x) + 1, device=x.device, dtype=x.dtype)
    first_dropped = x.where(x.cumsum(0) >= budget * count, torch.inf).min()
    return x.where(x < first_dropped, x[0]).max()


def sorted_squares(squares: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Non-negative numbers in ascending order, float64. Gradient: none.

    Their bits, read as integers, have the same order, and integers sort three times as fast; on a CPU numpy's sort,
    which gives no order and uses vectors, several times as fast again.
    """
    bits = squares.detach().double().view(torch.int64)
    if bits.is_cpu and not transformed():
        return torch.from_numpy(np.sort(bits.numpy())).view(torch.float64)
    return bits.sort().values.view(torch.float64)


@dataclass(frozen=True, kw_only=True)
class SecondMomentClipped:
    """PPO clipping with bounds set by the second moment of the log-ratios of the whole step.

        harmful:           (A > 0 and u > 1) or (A < 0 and u < 1), with the sequence's mean A
        L = max(-A u, -A clip(u, low, high)),   low and high from `second_moment_threshold` of the
                                                squared log-ratios of harmful tokens
        all_drop_largest:  L = -A u where (log u)^2 <= `largest_kept` of all squares, else 0

    Args:
        budget: second moment up to which nothing is clipped, nats^2.
        floor_low: smallest distance below 1 at which to clip.
        floor_high: smallest distance above 1 at which to clip.
        level: see `second_moment_threshold`; unused where the largest are dropped.
        scope: "harmful" is M2PO. "all_drop_largest" is AReaL's mask, over all tokens of the step;
            AReaL applies it to each micro-batch, on the mismatch, and clips what stays as PPO does.

    Gradient: to `logp`, -A u where unclipped; the bounds carry none.

    Reference: M2PO, arXiv:2510.01161; AReaL. Aggregate as `token_mean`.
    """

    on: RatioName = "staleness"
    budget: float = 0.04
    floor_low: float = 0.3
    floor_high: float = 0.5
    level: Level = "discrete"
    scope: Scope = "harmful"
    gradient = "unit"

    def __post_init__(self) -> None:
        check_choice("on", self.on, ("full", "staleness"))
        check_choice("level", self.level, get_args(Level))
        check_choice("scope", self.scope, get_args(Scope))
        for name in ("budget", "floor_low", "floor_high"):
            check_number(name, getattr(self, name))
        if self.budget <= 0:
            raise MethodError(f"budget={self.budget} must be positive (a mean square, in nats^2)")
        if not (0 <= self.floor_low <= 1 and self.floor_high >= 0):
            raise MethodError(
                f"floor_low={self.floor_low} must lie in [0, 1] and floor_high={self.floor_high} "
                "must not be negative; they are distances from ratio 1"
            )

    @property
    def formula(self) -> str:
        u = f"u = ratio({self.on})"
        if self.scope == "all_drop_largest":
            return f"L = -A u, 0 where (log u)^2 is dropped to bring its mean below {self.budget:g}, {u}"
        exactly = "exactly " if self.level == "exact" else ""
        return (
            f"L = max(-A u, -A clip(u, 1 - max(1 - e^-tau, {self.floor_low:g}), "
            f"1 + max(e^tau - 1, {self.floor_high:g}))), {u}, "
            f"tau where the second moment of harmful tokens is {exactly}{self.budget:g}"
        )

    def __call__(self, logprobs: LogProbs, advantages: PerToken, batch_info: BatchInfo = NO_INFO) -> TokenLoss:
        squares = batch_info.seen_by(self, logprobs, advantages)["squares"]
        u = ratio(log_ratio(logprobs, on=self.on))
        plain = -advantages * u
        if self.scope == "all_drop_largest":
            limit = largest_kept(squares, budget=self.budget)
            dropped = stopped_log_ratio(logprobs, on=self.on).double().square() > limit
            return TokenLoss(plain.where(~dropped, 0.0), dropped & (advantages != 0))
        tau = second_moment_threshold(squares, budget=self.budget, level=self.level)
        low, high = second_moment_bounds(tau, floor_low=self.floor_low, floor_high=self.floor_high)
        return larger(plain, -advantages * u.clamp(low, high))

    def observe(self, logprobs: LogProbs, advantages: Float[Tensor, " n"] | None, batch_info: BatchInfo) -> StepSums:
        """Squared log-ratio of every token, 0 where it is out of scope. Gradient: none."""
        x = stopped_log_ratio(logprobs, on=self.on)
        squares = x.double().square()
        if self.scope == "harmful":
            if advantages is None:
                raise MethodError("which tokens are harmful depends on the advantages; give them")
            segments = logprobs.segments
            a = segments.spread(segments.mean(advantages.detach()))
            harmful = ((a > SLACK) & (x > 0)) | ((a < -SLACK) & (x < 0))
            squares = squares.where(harmful, 0.0)
        return {"squares": squares}


def ratio_variance(log_ratio: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Squared distance of each ratio from its mean on policy, (r - 1)^2 with r = exp(log_ratio).

    Its expectation under the policy in the denominator is the variance of r, and chi-squared.

    Gradient: to `log_ratio`, 2 (r - 1) r; zero where |log_ratio| > 20.

    Example:
        >>> import torch
        >>> ratio_variance(torch.tensor([1.5]).log())
        tensor([0.2500])

    Reference: R2VPO, arXiv:2601.03320.
    """
    return (ratio(log_ratio) - 1).square()


@dataclass(frozen=True, kw_only=True)
class VariancePenalized:
    """The surrogate, with a price on the ratio's variance; published with token_mean.

        L = -(r A - penalty (r - 1)^2)
        penalty <- max(0, penalty + step (mean (r - 1)^2 - target))      after each optimizer step

    The penalty is a `regularizer`: gates and weights leave it alone, so that it keeps pulling on
    what drifted, and on exactly the tokens whose mean it bounds. It remains where A = 0. A token at
    the clamp (r = 5e8) drives the penalty out of any useful range in one step.

    Unverified: best reading. The authors state the idea; step and target are this library's, the
    first penalty is from a secondary source.

    Args:
        penalty: price of one unit of variance, in units of the advantage.
        step: how fast the price moves per step and unit of violation; 0 holds it.
        target: variance allowed.

    Reference: R2VPO, arXiv:2601.03320.
    """

    on: RatioName = "staleness"
    penalty: float = 0.04
    step: float = 0.1
    target: float = 0.01
    gradient = "unit"

    def __post_init__(self) -> None:
        check_choice("on", self.on, ("full", "staleness"))
        for name in ("penalty", "step", "target"):
            check_number(name, getattr(self, name))
            if not getattr(self, name) >= 0:
                raise MethodError(f"{name}={getattr(self, name)} must not be negative")

    @property
    def formula(self) -> str:
        p = f"{self.penalty:g}"
        moves = f"{p} moves by {self.step:g} (mean (r - 1)^2 - {self.target:g}) per step"
        return f"L = -(A r - {p} (r - 1)^2), r = ratio({self.on})" + (f", {moves}" if self.step else "")

    def observe(self, logprobs: LogProbs, advantages: Float[Tensor, " n"] | None, batch_info: BatchInfo) -> StepSums:
        """Sum of (r - 1)^2 and number of tokens. Gradient: none."""
        variance = ratio_variance(stopped_log_ratio(logprobs, on=self.on)).double()
        return {"variance": variance.sum(), "count": logprobs.segments.cu_seqlens[-1].double()}

    def next(self, seen: StepSums) -> VariancePenalized:
        """The objective of the next step: its penalty follows the violation (host transfer)."""
        mean = float(seen["variance"]) / max(float(seen["count"]), 1.0)
        return replace(self, penalty=max(0.0, self.penalty + self.step * (mean - self.target)))

    def __call__(self, logprobs: LogProbs, advantages: PerToken, batch_info: BatchInfo = NO_INFO) -> TokenLoss:
        log_r = log_ratio(logprobs, on=self.on)
        pull = self.penalty * ratio_variance(log_r)
        return TokenLoss(importance_sampled(log_r, advantages), regularizer=pull)


@dataclass(frozen=True, kw_only=True)
class GroupClipped:
    """PPO clipping with one range per prompt, narrower where the prompt's ratios vary more.

        eps_g = eps clip(sqrt(reference / Var_g), 1/2, 2)

    Var_g is the variance (over n, not n - 1) of r over all tokens of the prompt's answers in the
    step, wherever they lie.

    Unverified: best reading of one sentence of a survey.

    Args:
        eps: range at the reference variance; between half and twice this is used.
        reference: variance at which the range is `eps`. None is published; 0.01 is this library's.

    Raises: `EvidenceError` when called on a batch without group ids.

    Reference: the survey's reading of R2VPO, arXiv:2601.03320.
    """

    on: RatioName = "staleness"
    eps: float = 0.2
    reference: float = 0.01
    gradient = "unit"

    def __post_init__(self) -> None:
        check_choice("on", self.on, ("full", "staleness"))
        check_number("eps", self.eps)
        check_number("reference", self.reference)
        if not (0 < self.eps <= 0.5 and self.reference > 0):
            raise MethodError(
                f"eps={self.eps} must lie in (0, 0.5], because up to twice this is a distance "
                f"below ratio 1, and reference={self.reference} above 0"
            )

    @property
    def formula(self) -> str:
        return (
            f"L = max(-A r, -A clip(r, 1 - e, 1 + e)), r = ratio({self.on}), "
            f"e = {self.eps:g} clip(sqrt({self.reference:g} / Var r of the prompt), 1/2, 2)"
        )

    def observe(self, logprobs: LogProbs, advantages: Float[Tensor, " n"] | None, batch_info: BatchInfo) -> StepSums:
        """Prompt id, and sums of r - 1, its square and 1, of each sequence. Gradient: none."""
        segments = logprobs.segments
        # One ratio at the guard of e^20 already takes the range to its narrowest: more changes nothing.
        change = ratio(stopped_log_ratio(logprobs, on=self.on)).double() - 1
        return {
            "prompt": prompt_ids(segments),
            "change": segments.sum(change),
            "square": segments.sum(change.square()),
            "count": segments.lengths.double(),
        }

    def __call__(self, logprobs: LogProbs, advantages: PerToken, batch_info: BatchInfo = NO_INFO) -> TokenLoss:
        log_r = log_ratio(logprobs, on=self.on)
        eps = logprobs.segments.spread(self.ranges(logprobs, batch_info)).to(log_r.dtype)
        return ppo_clip(log_r, advantages, eps_low=eps, eps_high=eps)

    def ranges(self, logprobs: LogProbs, batch_info: BatchInfo) -> Float[Tensor, " b"]:
        """eps_g of each sequence's prompt, float64. Gradient: none."""
        prompts, observed = StepPrompts.seen(self, logprobs, batch_info)
        count = prompts.sum(observed["count"]).clamp(min=1)
        mean = prompts.sum(observed["change"]) / count
        variance = prompts.sum(observed["square"]) / count - mean.square()
        # Rounding may leave a variance of 0 a little below it; both mean the widest range.
        tightness = (self.reference / variance.clamp(min=1e-30)).sqrt()
        return self.eps * prompts.here(tightness.clamp(0.5, 2.0))


# BAPO: a clip whose bounds open, searched on the whole step, until answers that gain carry their share of the loss.


class RatioBounds(NamedTuple):
    """Lower and upper limit of the ratio in one step."""

    low: Float[Tensor, ""]
    high: Float[Tensor, ""]


@dataclass(frozen=True, kw_only=True)
class BalancedClipped:
    """PPO's clip on [low, high], the bounds raised step by step until positives carry `share` of the surrogate.

        P(high) = sum over A >= 0 of A min(r, high),   N(low) = sum over A < 0 of |A| max(r, low)
        low rises from `low` to `low_max` until P >= share (P + N); then high from `high` to `high_max`
        L = max(-A r, -A clip(r, low, high));   where A < 0:  L <- min(L, -A dual_clip)

    Bounds that still miss the share at their maxima stay there. The search starts anew in every step. A higher `low`
    stops more negatives and yet raises N, which counts stopped tokens at the bound: a step that misses the share at
    first goes through to `low_max`, in the official code as here.

    Args:
        low, low_max: first and last lower bound, ratios.
        high, high_max: first and last upper bound, ratios.
        increment: distance between two bounds that are tried.
        share: of positives in the surrogate, in (0, 1).
        dual_clip: ratio beyond which a negative advantage stops pushing; None for plain PPO.

    Gradient: to `logp`, -A r where unclipped; the bounds carry none.

    Example:
        >>> BalancedClipped().candidates(0.6, 0.9)
        [0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9]

    Reference: BAPO, arXiv:2510.18927, and its official code, `recipe/bapo` (dual clip, order of the search).
    """

    on: RatioName = "staleness"
    low: float = 0.6
    low_max: float = 0.9
    high: float = 1.2
    high_max: float = 3.0
    increment: float = 0.05
    share: float = 0.5
    dual_clip: float | None = 3.0
    gradient = "unit"

    def __post_init__(self) -> None:
        check_choice("on", self.on, get_args(RatioName))
        check_positive(self, "high", "increment", "share")
        for name in ("low", "low_max", "high_max", "dual_clip"):
            check_number(name, getattr(self, name))
        if not (0 <= self.low <= self.low_max <= 1 <= self.high <= self.high_max):
            raise MethodError(
                f"low={self.low}, low_max={self.low_max}, high={self.high} and high_max={self.high_max} are ratios: "
                "low <= low_max <= 1 <= high <= high_max"
            )
        if self.share >= 1:
            raise MethodError(f"share={self.share} must be below 1: negatives would have to vanish")
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise MethodError(f"dual_clip={self.dual_clip} must exceed 1")

    @property
    def formula(self) -> str:
        dual = "" if self.dual_clip is None else f", at most -A {self.dual_clip:g} where A < 0"
        return (
            f"L = max(-A u, -A clip(u, low, high)){dual}, u = ratio({self.on}), low in "
            f"[{self.low:g}, {self.low_max:g}] and high in [{self.high:g}, {self.high_max:g}] until positives carry "
            f"{self.share:g} of it"
        )

    def candidates(self, first: float, last: float) -> list[float]:
        """Bounds that are tried, in their order; the last one is reached exactly."""
        count = math.ceil((last - first) / self.increment - 1e-9)
        return [round(min(first + k * self.increment, last), 12) for k in range(count + 1)]

    def __call__(self, logprobs: LogProbs, advantages: PerToken, batch_info: BatchInfo = NO_INFO) -> TokenLoss:
        u = ratio(log_ratio(logprobs, on=self.on))
        low, high = (b.to(u) for b in self.bounds(batch_info.seen_by(self, logprobs, advantages)))
        token_losses = larger(-advantages * u, -advantages * u.clamp(low, high))
        return (
            token_losses if self.dual_clip is None else capped(token_losses, advantages, -advantages * self.dual_clip)
        )

    def bounds(self, seen: StepSums) -> RatioBounds:
        """The bounds of a step from what was observed of it. Gradient: none."""
        lows, highs = self.candidates(self.low, self.low_max), self.candidates(self.high, self.high_max)
        negative = torch.stack([seen[f"negative_{i}"] for i in range(len(lows))])
        positive = torch.stack([seen[f"positive_{i}"] for i in range(len(highs))])
        odds = self.share / (1 - self.share)
        low = _first(positive[0] >= odds * negative)
        high = _first(positive >= odds * negative.gather(0, low))
        return RatioBounds(negative.new_tensor(lows).gather(0, low)[0], positive.new_tensor(highs).gather(0, high)[0])

    def observe(self, logprobs: LogProbs, advantages: Float[Tensor, " n"] | None, batch_info: BatchInfo) -> StepSums:
        """N at every lower bound and P at every upper one, float64. Gradient: none."""
        if advantages is None:
            raise MethodError("which tokens gain depends on the advantages; give them")
        with torch.no_grad():
            r = ratio(stopped_log_ratio(logprobs, on=self.on)).double()
            up, down = advantages.double().clamp(min=0), (-advantages.double()).clamp(min=0)
            lows, highs = self.candidates(self.low, self.low_max), self.candidates(self.high, self.high_max)
            negative = {f"negative_{i}": (down * r.clamp(min=b)).sum() for i, b in enumerate(lows)}
            return negative | {f"positive_{i}": (up * r.clamp(max=b)).sum() for i, b in enumerate(highs)}


def _first(holds: Tensor) -> Tensor:
    """Index of the first True, of the last entry if there is none, as one number to gather by: no host waits for it."""
    at = torch.arange(len(holds), device=holds.device)
    return at.where(holds, len(holds) - 1).amin(0, keepdim=True)
