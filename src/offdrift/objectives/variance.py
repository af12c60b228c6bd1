"""Variance of the ratio as the trust region: a penalty with a learned price, or an adaptive clip.

Sources disagree about R2VPO: its authors describe a constraint on the ratio's variance without any
clip (`VariancePenalized`), a survey a clip whose range tightens with the variance (`GroupClipped`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from jaxtyping import Float
from torch import Tensor

from offdrift.batch_info import NO_INFO, BatchInfo, Seen
from offdrift.errors import MethodError, check_choice, check_number
from offdrift.logprobs import LogProbs
from offdrift.numerics import ratio
from offdrift.objectives.base import PerToken, StepPrompts, TokenLoss, prompt_ids
from offdrift.objectives.clipped import ppo_clip
from offdrift.objectives.reinforce import importance_sampled
from offdrift.ratios import RatioName, log_ratio, stopped_log_ratio


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

    def observe(self, logprobs: LogProbs, advantages: Float[Tensor, " n"] | None, batch_info: BatchInfo) -> Seen:
        """Sum of (r - 1)^2 and number of tokens. Gradient: none."""
        variance = ratio_variance(stopped_log_ratio(logprobs, on=self.on)).double()
        return {"variance": variance.sum(), "count": logprobs.segments.cu_seqlens[-1].double()}

    def next(self, seen: Seen) -> VariancePenalized:
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

    def observe(self, logprobs: LogProbs, advantages: Float[Tensor, " n"] | None, batch_info: BatchInfo) -> Seen:
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
