"""What every objective is: a per-token loss to be minimized, the only thing gradient flows through."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

from jaxtyping import Bool, Float
from torch import Tensor

from offdrift.logprobs import LogProbs
from offdrift.ratios import RatioName


class TokenLoss(NamedTuple):
    """Per-token loss, and where a clip changed it (None if the objective does not clip)."""

    loss: Float[Tensor, " n"]
    clipped: Bool[Tensor, " n"] | None = None


@runtime_checkable
class Objective(Protocol):
    """A frozen set of parameters that maps a batch to per-token losses."""

    @property
    def on(self) -> RatioName | None:
        """The ratio this objective already contains; None if it contains none."""
        ...

    def __call__(self, logprobs: LogProbs, advantages: Float[Tensor, " n"]) -> TokenLoss: ...
