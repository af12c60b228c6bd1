"""`optim.length_guard`: the learning rate falls, and the method may change, once responses become longer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from offdrift.methods.lr_scale import LengthSurge, SurgeState
from offdrift_lab.train.features.base import Feature
from offdrift_lab.train.settings.optim import LengthGuardSettings
from offdrift_lab.train.settings.recipe import Recipe


class LengthWatch(Feature):
    """Follows the mean length of responses; see `methods.lr_scale.LengthSurge`."""

    def __init__(self, settings: LengthGuardSettings) -> None:
        self.settings, self.surge = settings, SurgeState()
        self.rule = LengthSurge(**settings.model_dump(exclude={"switch_to"}))

    @classmethod
    def of(cls, recipe: Recipe, arm: str) -> LengthWatch | None:
        guard = recipe.optim.length_guard
        return None if guard is None else cls(guard)

    @property
    def rate_scale(self) -> float:  # type: ignore[override]
        """Factor of the next step's learning rate."""
        return self.surge.scale

    def recorded(self, arm: Any, row: Mapping[str, Any]) -> None:
        mean_length = row["response/length_mean"] or math.nan  # null in a stored row
        if mean_length > 0:  # not NaN
            self.surge = self.rule.after(self.surge, mean_length)

    def drawing(self, arm: Any) -> None:
        """Take the method that the recipe names for the time after a surge, if there has been one."""
        if self.settings.switch_to is not None and not arm.switched and self.surge.surge is not None:
            arm.switch(self.settings.switch_to)
