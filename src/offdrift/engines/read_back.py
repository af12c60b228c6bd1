"""Read weights back from an engine that can show them, and compare their bits with the trainer's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from offdrift.engines import HoldsWeights
from offdrift.engines.sync_units import Units


@torch.no_grad()
def arrived(engine: HoldsWeights, model: nn.Module, units: Units, originals: Sequence[Tensor]) -> bool:
    """Whether the engine holds every weight of the trainer's, cast to its own precision, to the last bit.

    Not said of an engine that has others by name, or keeps them in another form, nor where a weight that was to be
    moved is in that precision what it was before: one that stayed behind would look the same.

    Args:
        originals: what each of `units.weights` was before.
    """
    copies, sent = dict(engine.held_weights()), dict(model.named_parameters())
    if copies.keys() != sent.keys():
        return False
    if not all(_equal(copies[name], weight) for name, weight in sent.items()):
        return False
    before = {id(weight): original for weight, original in zip(units.weights, originals, strict=True)}
    return not any(_equal(copies[name], before[id(weight)]) for name, weight in sent.items() if id(weight) in before)


def _equal(copy: Tensor, weight: Tensor) -> bool:
    return copy.shape == weight.shape and torch.equal(copy, weight.to(copy))
