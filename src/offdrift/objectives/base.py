"""Protocol of objectives: a per-token loss to be minimized, the only thing gradient flows through.

`StepPrompts` is for those that compare the answers to a prompt, which may lie in different micro-batches and on
different ranks: prompt ids and numbers per sequence that are observed, joined over the step, give every piece the
same statistic of every prompt, however the step was split.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from offdrift.batch_info import BatchInfo, Observer, StepSums
from offdrift.errors import EvidenceError
from offdrift.logprobs import LogProbs
from offdrift.ratios import RatioName
from offdrift.segments import Segments

PerToken = Float[Tensor, " n"]
"""One number for each packed token."""


class TokenLoss(NamedTuple):
    """Loss of each token, where a clip changed it, and its regularizer."""

    loss: Float[Tensor, " n"]
    """To be minimized; weights multiply it, gates remove it."""
    clipped: Bool[Tensor, " n"] | None = None
    """Where a clip changed the loss; None if the objective does not clip."""
    regularizer: Float[Tensor, " n"] | None = None
    """A term that neither gates nor weights touch: it keeps acting on what drifted."""

    def scatter_to_all(self, logprobs: LogProbs) -> TokenLoss:
        """Scatter losses of the scored tokens of a batch to all of its tokens: 0 at the others."""
        clipped, regularizer = (
            None if x is None else logprobs.scatter_to_all(x) for x in (self.clipped, self.regularizer)
        )
        return TokenLoss(logprobs.scatter_to_all(self.loss), clipped, regularizer)


class LoggedClip(NamedTuple):
    """Tokens whose loss a clip changed, as a log shows them that lacks an input of the loss (`clipped_in_log`)."""

    clipped: Bool[Tensor, " n"]
    whole: bool
    """Whether these are all of them, not some."""


@runtime_checkable
class ClipsInLog(Protocol):
    """Objective with a clip that reads more than a log holds, and can say what the log shows of it."""

    def clipped_in_log(self, logprobs: LogProbs, batch_info: BatchInfo) -> LoggedClip:
        """Mark tokens that the clip changes, from log-probs and logged divergences. Gradient: none."""
        ...


def larger(plain: PerToken, limited: PerToken) -> TokenLoss:
    """The larger of a loss and the same loss under a clip, and where the clip decides.

    On a tie the gradient goes to the plain loss, as it would not with `torch.maximum`.
    """
    clipped = limited > plain
    return TokenLoss(limited.where(clipped, plain), clipped.detach())


def capped(token_losses: TokenLoss, advantages: PerToken, ceiling: PerToken) -> TokenLoss:
    """Cap the loss of tokens of negative advantage at `ceiling` (dual clip)."""
    assert token_losses.clipped is not None
    over = (advantages < 0) & (token_losses.loss > ceiling)
    return TokenLoss(ceiling.where(over, token_losses.loss), token_losses.clipped | over.detach())


@runtime_checkable
class Objective(Protocol):
    """A frozen set of parameters that maps a batch to per-token losses.

    An objective may also have `observe` (see `batch_info.Observer`) if it needs the whole step;
    `next(seen) -> Objective`, its successor after the step, if it adapts; and `sums(logprobs, batch_info)`, sums over
    the batch by name, if it has metrics of its own.
    """

    @property
    def on(self) -> RatioName | None:
        """The ratio this objective already contains (most: `staleness`, or `full` in bypass mode); None for none."""
        ...

    @property
    def formula(self) -> str:
        """The loss, in one line, with its numbers."""
        ...

    def __call__(self, logprobs: LogProbs, advantages: PerToken, batch_info: BatchInfo = ...) -> TokenLoss: ...


def prompt_ids(segments: Segments) -> Int[Tensor, " b"]:
    """The prompt of each sequence; equal ids must mean the same prompt on all ranks.

    Raises: `EvidenceError` if the batch does not say.
    """
    if segments.group_ids is None:
        raise EvidenceError(
            "this method compares the answers to one prompt, and the batch does not say which "
            "sequences those are; give group_ids= (one prompt id per sequence)"
        )
    return segments.group_ids


@dataclass(frozen=True)
class StepPrompts:
    """`s` sequences of a step by prompt, and the prompts of the `b` sequences of one piece.

    Reductions have one slot per sequence of the step, so that no size depends on data and nothing
    waits for the device; slots beyond the last prompt are empty and belong to no sequence.
    """

    index: Int[Tensor, " s"]
    """Slot of each sequence of the step."""
    mine: Int[Tensor, " b"]
    """Slot of each sequence of this piece."""

    @staticmethod
    def of(step_ids: Int[Tensor, " s"], ids: Int[Tensor, " b"]) -> StepPrompts:
        """Prompts of a step from the ids of its sequences, in any order; `ids` are this piece's.

        Example:
            >>> p = StepPrompts.of(torch.tensor([7, 3, 7]), torch.tensor([7]))
            >>> p.here(p.sum(torch.tensor([1.0, 10.0, 100.0])))
            tensor([101.])
        """
        ordered, order = step_ids.to(ids.device).sort()
        new = torch.cat([ordered.new_zeros(1), (ordered.diff() != 0).to(ordered.dtype)])
        slots = new.cumsum(0)
        return StepPrompts(
            torch.empty_like(slots).scatter(0, order, slots), slots[torch.searchsorted(ordered, ids.to(ordered.dtype))]
        )

    @staticmethod
    def seen(
        part: Observer, logprobs: LogProbs, batch_info: BatchInfo, advantages: PerToken | None = None
    ) -> tuple[StepPrompts, StepSums]:
        """The prompts that an observing part saw in the step under "prompt", and all that it saw, on one device."""
        ids = prompt_ids(logprobs.segments)
        observed = {k: x.to(ids.device) for k, x in batch_info.seen_by(part, logprobs, advantages).items()}
        return StepPrompts.of(observed["prompt"], ids), observed

    @property
    def sizes(self) -> Int[Tensor, " s"]:
        """Sequences per prompt; 0 in empty slots."""
        return torch.zeros_like(self.index).index_add(0, self.index, torch.ones_like(self.index))

    def sum(self, x: Float[Tensor, " s"]) -> Float[Tensor, " s"]:
        """Sum over each prompt; 0 in empty slots."""
        return torch.zeros_like(x).index_add(0, self.index, x)

    def mean(self, x: Float[Tensor, " s"]) -> Float[Tensor, " s"]:
        """Mean over each prompt; 0 in empty slots."""
        return self.sum(x) / self.sizes.clamp(min=1)

    def max(self, x: Float[Tensor, " s"]) -> Float[Tensor, " s"]:
        """Largest of each prompt; 0 in empty slots."""
        return torch.zeros_like(x).scatter_reduce(0, self.index, x, "amax", include_self=False)

    def spread(self, x: Float[Tensor, " s"]) -> Float[Tensor, " s"]:
        """Give every sequence of the step the number of its prompt."""
        return x[self.index]

    def here(self, x: Float[Tensor, " s"]) -> Float[Tensor, " b"]:
        """Give every sequence of this piece the number of its prompt."""
        return x[self.mine]
