"""A compressed cache of the engine (`rollout.kv`): the trainer's model must be one whose attention can be led."""

from __future__ import annotations

from typing import Any

from offdrift.engines.retention import need_led
from offdrift.errors import EngineError, RecipeError
from offdrift_lab.train.features.base import Feature
from offdrift_lab.train.settings.recipe import Recipe


class CompressedCache(Feature):
    """`rollout.kv`: what the engine's cache let go is recorded with the rollouts, and replayed in passes on them."""

    @classmethod
    def of(cls, recipe: Recipe, arm: str) -> CompressedCache | None:
        return None if recipe.rollout.kv is None else cls()

    def check(self, recipe: Recipe, model: Any) -> None:
        assert recipe.rollout.kv is not None
        try:
            need_led(model)
        except EngineError as e:
            raise RecipeError(f"rollout.kv.budget = {recipe.rollout.kv.budget}: {e}; leave it out") from e
