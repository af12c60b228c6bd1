"""Gradient alignment control in a run: the last update's gradient, and what a new one repeats of it.

Memory: one more gradient, float32, on the device of the weights; a checkpoint stores it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from offdrift.methods.gradient_alignment import gac_coefficient
from offdrift_lab.train.features.base import Feature, Metrics
from offdrift_lab.train.loop.old_policy import read_weights, write_weights
from offdrift_lab.train.settings.optim import AlignSettings
from offdrift_lab.train.settings.recipe import Recipe

FILE = "last_gradient.safetensors"
"""File of the last gradient in a checkpoint."""


def gradient_dot(a: Iterable[Tensor], b: Iterable[Tensor]) -> Float[Tensor, ""]:
    """Scalar product of two gradients in parts, float64.

        <a, b> = sum over tensors and their entries of a b

    Gradients are averaged over data-parallel processes before it is called, so that every process computes the same
    number. Where each holds a shard of a gradient, this is the place to add up the shards' products.

    Gradient: none. Raises: `ValueError` if there are more tensors in one than in the other.

    Example:
        >>> gradient_dot([torch.tensor([1.0, 2.0]), torch.tensor([3.0])], [torch.ones(2), torch.ones(1)])
        tensor(6., dtype=torch.float64)
    """
    products = [torch.dot(x.flatten().float(), y.flatten().float()).double() for x, y in zip(a, b, strict=True)]
    return torch.stack(products).sum() if products else torch.zeros((), dtype=torch.float64)


class Alignment(Feature):
    """The gradient of the last update, from which each new one is kept apart.

    It is the gradient as it was computed, before projection and clipping: the cosine compares what two successive
    batches asked for, whatever was done with it. A parameter without a gradient (an expert that no token chose) takes
    no part in the update's products.

    Args:
        settings: threshold, strength, and where a step is skipped.

    Example:
        >>> weight = nn.Parameter(torch.zeros(3))
        >>> align = Alignment(AlignSettings())
        >>> for gradient in ([1.0, 0.0, 0.0], [0.8, 0.6, 0.0]):
        ...     weight.grad = torch.tensor(gradient)
        ...     cosine = align.project({"weight": weight}).get("optim/gradient_cosine")
        >>> weight.grad, round(float(cosine), 4)
        (tensor([0.0000, 0.6000, 0.0000]), 0.8)

    Reference: GAC, arXiv:2603.01501; threshold and strength are this library's.
    """

    def __init__(self, settings: AlignSettings) -> None:
        self.settings = settings
        self.device: torch.device | None = None
        self.cosine: Tensor | None = None
        """Of the newest gradient and the one before it; None at the first update."""
        self.last: dict[str, Tensor] = {}
        """The last gradient by parameter; empty before the first update."""

    @classmethod
    def of(cls, recipe: Recipe, arm: str) -> Alignment | None:
        return None if recipe.optim.align is None else cls(recipe.optim.align)

    def start(self, arm: Any) -> None:
        self.device = arm.accelerator.device

    def gradients(self, arm: Any, parameters: Mapping[str, nn.Parameter]) -> Metrics:
        maxima = self.project(parameters)
        self.cosine = maxima.get("optim/gradient_cosine")
        return Metrics(maxima=maxima)

    def leaves_out(self, arm: Any, norm: Tensor) -> bool | None:
        """True if the cosine exceeds `skip_above`; None if that is not set. Transfers the cosine to the host."""
        limit = self.settings.skip_above
        if limit is None:
            return None
        return self.cosine is not None and float(self.cosine) > limit

    @torch.no_grad()
    def project(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Float[Tensor, ""]]:
        """Remove from the gradients, in place, what they repeat of the last ones, and remember them as they were.

        Returns: the cosine and the share of the gradient's norm that was removed, as `optim/...`; nothing at the first
            update, which has no last gradient. A gradient that is not finite is neither changed nor remembered.
        """
        gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        square = gradient_dot(gradients.values(), gradients.values())
        finite = square.isfinite()
        sums: dict[str, Tensor] = {}
        coefficient = torch.zeros_like(square)
        if self.last:
            before = [self.last[name] if name in self.last else torch.zeros_like(g) for name, g in gradients.items()]
            dot, last_square = gradient_dot(gradients.values(), before), gradient_dot(before, before)
            settings = self.settings
            coefficient, cosine = gac_coefficient(
                dot, square, last_square, threshold=settings.threshold, strength=settings.strength
            )
            removed = coefficient.abs() * (last_square / square.where(square > 0, 1.0)).sqrt()
            sums = {"optim/gradient_cosine": cosine, "optim/gradient_removed_frac": removed}
        for name, gradient in gradients.items():
            raw = gradient.detach().to(torch.float32, copy=True)
            if name not in self.last:
                self.last[name] = torch.zeros_like(raw)
            gradient.sub_(coefficient * self.last[name])
            self.last[name].copy_(raw.where(finite, self.last[name]))
        for name in self.last.keys() - gradients.keys():
            self.last[name].zero_()
        return sums

    def save(self, folder: Path) -> None:
        """Store the last gradient in a checkpoint. Raises: `RecordError` if it cannot be written."""
        write_weights(self.last, folder / FILE)

    def load(self, folder: Path) -> None:
        """Take back what `save` stored. Raises: `CheckpointError` if it is not there."""
        self.last = {name: x.to(self.device) for name, x in read_weights(folder / FILE).items()}
