"""`optim.skip_empty`: no step where the whole gradient is 0."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from offdrift_lab.train.features.base import Feature
from offdrift_lab.train.settings.recipe import Recipe


class SkipEmpty(Feature):
    """Leaves out steps whose gradient is 0: AdamW would move the weights by its mean of earlier gradients."""

    @classmethod
    def of(cls, recipe: Recipe, arm: str) -> SkipEmpty | None:
        return cls() if recipe.optim.skip_empty else None

    def leaves_out(self, arm: Any, norm: Tensor) -> bool:
        return not bool(norm)
