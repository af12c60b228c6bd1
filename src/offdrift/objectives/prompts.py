"""`StepPrompts`: the prompt groups of a whole step, seen from one piece of it.

A prompt's answers may lie in different micro-batches and on different ranks. An objective that
compares them observes its prompt ids and whatever it needs of each sequence; joined over the step,
these vectors give every piece the same statistic of every prompt, however the step was split.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from offdrift.errors import EvidenceError
from offdrift.segments import Segments


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
