"""The policy gradient in its plain forms: score function (`Reinforce`, corrected by a `Weight`), and the surrogate
of the Trust Region Masking paper (`ImportanceSampled`), which differentiates the ratio to the rollout policy itself,
also of a policy that is projected into a KL ball first (`ProjectedSurrogate`, TROLL).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from jaxtyping import Bool, Float
from torch import Tensor

from offdrift.batch_info import NO_INFO, BatchInfo
from offdrift.correction.statistics import binary_kl_forward
from offdrift.errors import BadValueError, MethodError, check_choice, check_number
from offdrift.logprobs import LogProbs
from offdrift.numerics import clamped, ratio
from offdrift.objectives.base import LoggedClip, PerToken, TokenLoss
from offdrift.ratios import RatioName, log_ratio

if TYPE_CHECKING:
    from offdrift.divergence.projection import Projection


def reinforce(logp: Float[Tensor, " n"], advantages: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Score-function loss, L_t = -A_t log pi(y_t). Gradient: to `logp`, -A_t.

    Example:
        >>> import torch
        >>> reinforce(torch.tensor([-0.5]), torch.tensor([2.0]))
        tensor([1.])

    Reference: Williams, "Simple statistical gradient-following algorithms", 1992.
    """
    return -advantages * logp


def importance_sampled(log_ratio: Float[Tensor, " n"], advantages: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Importance-sampled surrogate, L_t = -A_t w_t with w_t = exp(log_ratio_t).

    Gradient: to `log_ratio`, -A_t w_t; zero where |log_ratio| > 20.

    Example:
        >>> import torch
        >>> importance_sampled(torch.tensor([0.0]), torch.tensor([2.0]))
        tensor([-2.])

    Reference: Li et al., Trust Region Masking, arXiv:2512.23075v5, eq. 2 and Algorithm 1, line 6.
    """
    return -advantages * ratio(log_ratio)


@dataclass(frozen=True, kw_only=True)
class Reinforce:
    """`reinforce` as an objective; contains no ratio."""

    on = None
    gradient = "score"

    @property
    def formula(self) -> str:
        return "L = -A log pi"

    def __call__(self, logprobs: LogProbs, advantages: PerToken, batch_info: BatchInfo = NO_INFO) -> TokenLoss:
        return TokenLoss(reinforce(logprobs.current, advantages))


@dataclass(frozen=True, kw_only=True)
class ImportanceSampled:
    """`importance_sampled` as an objective on the given ratio.

    Args:
        cap: L = -A min(w, cap), the one-sided cap of Logit Fusion; a capped token has no gradient.
        saturation: L = -A w / (w + saturation), the shaped ratio of LUFFY: its slope, saturation / (w + saturation)^2,
            favors tokens that the policy deems unlikely. Excludes a cap.
        pull: adds pull * (log w)^2, which neither gates nor weights touch (prime-rl's kl_tau).
    """

    on: RatioName = "full"
    cap: float | None = None
    saturation: float | None = None
    pull: float = 0.0
    gradient = "unit"

    def __post_init__(self) -> None:
        check_choice("on", self.on, get_args(RatioName))
        check_number("cap", self.cap)
        check_number("saturation", self.saturation)
        check_number("pull", self.pull)
        for name in ("cap", "saturation"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise MethodError(f"{name}={value} must be positive")
        if self.cap is not None and self.saturation is not None:
            raise MethodError(
                f"cap={self.cap} and saturation={self.saturation}: a shaped ratio stays below 1; leave out one"
            )

    @property
    def formula(self) -> str:
        w = f"ratio({self.on})"
        shape = w if self.cap is None else f"min({w}, {self.cap:g})"
        if self.saturation is not None:
            shape = f"u / (u + {self.saturation:g}), u = {w}"
        pull = f" + {self.pull:g} log({w})^2" if self.pull else ""
        return f"L = -A {shape}{pull}"

    def __call__(self, logprobs: LogProbs, advantages: PerToken, batch_info: BatchInfo = NO_INFO) -> TokenLoss:
        log_w = log_ratio(logprobs, on=self.on)
        pull = self.pull * clamped(log_w).square() if self.pull else None
        if self.saturation is not None:
            w = ratio(log_w)
            return TokenLoss(-advantages * w / (w + self.saturation), None, pull)
        if self.cap is None:
            return TokenLoss(importance_sampled(log_w, advantages), None, pull)
        w = ratio(log_w)
        capped = w > self.cap
        changed = (capped & (advantages != 0)).detach()
        return TokenLoss(-advantages * w.where(~capped, self.cap), changed, pull)


CLOSE = 0.05
"""Nats by which log-probs of a batch may differ from those of its logits: far above half precision's rounding."""
LOWEST = -1e3
"""Nats below which log-probs are not compared: floors stand there."""


@dataclass(frozen=True, kw_only=True)
class ProjectedSurrogate:
    """The importance-sampled surrogate of the projected policy, and a pull of the current one towards it.

        L = -A pi(y) / pi_old(y) + coef KL(pi_new || sg[pi]),
        pi = argmin KL(pi || pi_new)  subject to  KL(pi || pi_old) <= bound

    pi_new is the current policy, y the drawn token, both KLs over the whole vocabulary. Inside the ball pi is pi_new
    and the loss the plain surrogate. Outside, moving along the path from pi_old to pi_new changes nothing, and every
    other direction still learns; a clip would stop them all.

    Args:
        bound: of KL(pi || pi_old) at every token, nats.
        coef: of the pull, per nat; it is no regularizer of the policy: it is 0 inside the ball.

    Gradient: to the logits of `batch_info.distributions` alone, and through them to what made them; `logp` is read for
    its value. The pull is a regularizer (`TokenLoss`): gates and weights do not touch it.

    Raises: `EvidenceError` if the batch has no distributions; `BadValueError` if their log-probs of the drawn tokens
        are not the batch's (another temperature, other tokens), or a logit is NaN. On an accelerator, where asking
        would make the host wait, the loss of such a token is NaN.

    Example:
        >>> ProjectedSurrogate().formula
        'L = -A pi / pi_old + 1 KL(current || pi), pi = the current policy projected to KL(pi || old) <= 0.05'

    Reference: Becker et al., TROLL, arXiv:2510.03817: objective and projection as on the authors' project page, loss as
        in their code (loss mode trpl), which keeps the largest logits only: here the whole vocabulary.
    """

    bound: float = 0.05
    coef: float = 1.0
    needs = ("distributions",)
    exact = True
    gradient = "unit"

    @property
    def on(self) -> RatioName:
        """Name of the ratio that the projection bounds."""
        return "staleness"

    def __post_init__(self) -> None:
        for name in ("bound", "coef"):
            check_number(name, getattr(self, name))
        if self.bound <= 0 or self.coef < 0:
            raise MethodError(f"bound={self.bound} must be positive and coef={self.coef} not negative")

    @property
    def holds(self) -> bool:
        """Whether a part of the loss is held constant on purpose: the projected policy, in the pull."""
        return self.coef != 0

    @property
    def formula(self) -> str:
        return (
            f"L = -A pi / pi_old + {self.coef:g} KL(current || pi), pi = the current policy projected to "
            f"KL(pi || old) <= {self.bound:g}"
        )

    def clipped_in_log(self, logprobs: LogProbs, batch_info: BatchInfo) -> LoggedClip:
        """Mark the tokens outside the ball, as far as a log without distributions shows them.

        KL(pi_new || pi_old) > bound       `divergences["kl_current_old"]`: all of them
        kl(pi_new(y), pi_old(y)) > bound   without it: some of them, since the KL of "y or not" is at most the KL
        """
        if (exact := batch_info.divergences.get("kl_current_old")) is not None:
            return LoggedClip(exact.lo > self.bound, whole=True)
        binary = binary_kl_forward(logprobs.current, logprobs.old - logprobs.current)
        return LoggedClip(binary > self.bound, whole=False)

    def __call__(self, logprobs: LogProbs, advantages: PerToken, batch_info: BatchInfo = NO_INFO) -> TokenLoss:
        from offdrift.divergence.projection import project  # an audit, which has no logits, does without

        there = project(batch_info.required("distributions"), bound=self.bound)
        far = _differs(logprobs.old, there.logp_old) | _differs(logprobs.current, there.logp)
        if far.is_cpu and bool(far.any()):
            _refuse(logprobs, there, int(far.nonzero()[0]))
        loss = importance_sampled(there.log_ratio, advantages).where(~far, math.nan)
        return TokenLoss(loss, there.outside, self.coef * there.distance)


def _differs(of_batch: PerToken, of_logits: PerToken) -> Bool[Tensor, " n"]:
    """Mark tokens whose log-prob in the batch is not that of their logits; NaN is not."""
    of_batch = of_batch.detach().double().clamp(max=0)
    return ~((of_batch - of_logits).abs() <= CLOSE) & (of_batch > LOWEST)


def _refuse(logprobs: LogProbs, there: Projection, row: int) -> None:
    """Name the first token whose logits are of another policy, temperature or token than its log-probs."""
    pairs = (("logits_old", logprobs.old, there.logp_old), ("logits", logprobs.current.detach(), there.logp))
    name, of_batch, of_logits = next(pair for pair in pairs if bool(_differs(*pair[1:])[row]))
    raise BadValueError(
        f"{name} of distributions give the drawn token of row {row} the log-prob {float(of_logits[row]):.4g}, the "
        f"batch has {float(of_batch[row]):.4g}; both must come from one forward pass, tempered, row by row in the "
        "batch's order"
    )
