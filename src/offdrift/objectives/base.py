"""What every objective is: a per-token loss to be minimized, the only thing gradient flows through."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

from jaxtyping import Bool, Float
from torch import Tensor

from offdrift.batch_info import BatchInfo
from offdrift.logprobs import LogProbs
from offdrift.ratios import RatioName

PerToken = Float[Tensor, " n"]
"""One number for each packed token."""


class TokenLoss(NamedTuple):
    """What an objective says about each token."""

    loss: Float[Tensor, " n"]
    """To be minimized; weights multiply it, gates remove it."""
    clipped: Bool[Tensor, " n"] | None = None
    """Where a clip changed the loss; None if the objective does not clip."""
    regularizer: Float[Tensor, " n"] | None = None
    """A term that neither gates nor weights touch: it keeps acting on what drifted."""

    def placed(self, logprobs: LogProbs) -> TokenLoss:
        """The losses of the scored tokens of a batch, as losses of all of them: 0 at the others."""
        clipped, regularizer = (None if x is None else logprobs.of_all(x) for x in (self.clipped, self.regularizer))
        return TokenLoss(logprobs.of_all(self.loss), clipped, regularizer)


def larger(plain: PerToken, limited: PerToken) -> TokenLoss:
    """The larger of a loss and the same loss under a clip, and where the clip decides.

    On a tie the gradient goes to the plain loss, as it would not with `torch.maximum`.
    """
    clipped = limited > plain
    return TokenLoss(limited.where(clipped, plain), clipped.detach())


@runtime_checkable
class Objective(Protocol):
    """A frozen set of parameters that maps a batch to per-token losses.

    An objective may also have `observe` (see `batch_info.Observer`) if it needs the whole step, and
    `next(seen) -> Objective`, its successor after the step, if it adapts.
    """

    @property
    def on(self) -> RatioName | None:
        """The ratio this objective already contains; None if it contains none."""
        ...

    @property
    def formula(self) -> str:
        """The loss, in one line, with its numbers."""
        ...

    def __call__(self, logprobs: LogProbs, advantages: PerToken, batch_info: BatchInfo = ...) -> TokenLoss: ...
