"""The surrogate of a projected policy (TROLL): in place of a clip, a KL ball around the old policy at every token."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxtyping import Bool
from torch import Tensor

from offdrift.batch_info import NO_INFO, BatchInfo
from offdrift.divergence.projection import Projection, project
from offdrift.errors import BadValueError, MethodError, check_number
from offdrift.logprobs import LogProbs
from offdrift.objectives.base import PerToken, TokenLoss
from offdrift.objectives.reinforce import importance_sampled

CLOSE = 0.05
"""Nats by which log-probs of a batch may differ from those of its logits: far above half precision's rounding."""
LOWEST = -1e3
"""Nats below which log-probs are not compared: floors stand there."""


@dataclass(frozen=True, kw_only=True)
class Projected:
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
        >>> Projected().formula
        'L = -A pi / pi_old + 1 KL(current || pi), pi = the current policy projected to KL(pi || old) <= 0.05'

    Reference: Becker et al., TROLL, arXiv:2510.03817: objective and projection as on the authors' project page, loss as
        in their code (loss mode trpl), which keeps the largest logits only: here the whole vocabulary.
    """

    bound: float = 0.05
    coef: float = 1.0
    on = "staleness"
    needs = ("distributions",)
    exact = True
    gradient = "unit"

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

    def __call__(self, logprobs: LogProbs, advantages: PerToken, batch_info: BatchInfo = NO_INFO) -> TokenLoss:
        there = project(batch_info.required("distributions"), bound=self.bound)
        far = _apart(logprobs.old, there.logp_old) | _apart(logprobs.current, there.logp)
        if far.is_cpu and bool(far.any()):
            _refuse(logprobs, there, int(far.nonzero()[0]))
        loss = importance_sampled(there.log_ratio, advantages).where(~far, math.nan)
        return TokenLoss(loss, there.outside, self.coef * there.distance)


def _apart(given: PerToken, own: PerToken) -> Bool[Tensor, " n"]:
    """Whether a log-prob of the batch is not that of its logits; NaN is."""
    given = given.detach().double()
    return ~((given - own).abs() <= CLOSE) & (given > LOWEST)


def _refuse(logprobs: LogProbs, there: Projection, row: int) -> None:
    """Name the first token whose logits are of another policy, temperature or token than its log-probs."""
    pairs = (("logits_old", logprobs.old, there.logp_old), ("logits", logprobs.current.detach(), there.logp))
    name, given, own = next(pair for pair in pairs if bool(_apart(*pair[1:])[row]))
    raise BadValueError(
        f"{name} of distributions give the drawn token of row {row} the log-prob {float(own[row]):.4g}, the batch has "
        f"{float(given[row]):.4g}; both must come from one forward pass, tempered, row by row in the batch's order"
    )
