"""`[lora]`: low-rank adapters are all that trains; see `train.lora`."""

from __future__ import annotations

from typing import Any

from torch import nn

from offdrift_lab.train.features.base import Feature
from offdrift_lab.train.features.lora_adapters import add_adapters, remove_adapters, save_adapter
from offdrift_lab.train.settings.recipe import Recipe
from offdrift_lab.train.settings.sections import LoraSettings


class Adapters(Feature):
    """Puts fresh adapters into the run's own model, which is without them the reference and the next arm's start."""

    shares_model = True

    def __init__(self, settings: LoraSettings) -> None:
        self.settings = settings

    @classmethod
    def of(cls, recipe: Recipe, arm: str) -> Adapters | None:
        return None if recipe.lora is None else cls(recipe.lora)

    def check(self, recipe: Recipe, model: Any) -> None:
        add_adapters(model, self.settings, seed=recipe.seed)
        remove_adapters(model)

    def prepare(self, run: Any, model: nn.Module) -> None:
        add_adapters(model, self.settings, seed=run.recipe.seed)  # type: ignore[arg-type]

    def finished(self, arm: Any) -> None:
        with arm.files.storing("adapter") as path:
            save_adapter(arm.inner, path)
