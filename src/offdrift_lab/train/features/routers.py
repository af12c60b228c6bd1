"""Routers of a mixture of experts: choices that are replayed, and biases that do not train."""

from __future__ import annotations

from typing import Any

from torch import nn

from offdrift.engines.routing import router_biases, routers_of_mixture, rule_of
from offdrift.errors import EngineError, RecipeError
from offdrift_lab.train.features.base import Feature
from offdrift_lab.train.settings.recipe import Recipe
from offdrift_lab.train.settings.rollout import ReplaySettings


class ReplayedRoutes(Feature):
    """`replay.routes`: experts of the engine, or of the old policy's pass, are recorded and led to by `train.batch`."""

    def __init__(self, arm: str, replay: ReplaySettings) -> None:
        self.arm, self.replay = arm, replay

    @classmethod
    def of(cls, recipe: Recipe, arm: str) -> ReplayedRoutes | None:
        replay = recipe.replay_of(arm)
        return None if replay.routes == "none" else cls(arm, replay)

    def check(self, recipe: Recipe, model: Any) -> None:
        try:
            for router in routers_of_mixture(model):
                rule_of(router)
        except EngineError as e:
            raise RecipeError(f'arms.{self.arm}: replay.routes = "{self.replay.routes}": {e}; leave it out') from e


class FrozenBias(Feature):
    """`replay.freeze_router_bias`: biases of routers do not train (Ring-1T)."""

    def __init__(self, arm: str) -> None:
        self.arm = arm

    @classmethod
    def of(cls, recipe: Recipe, arm: str) -> FrozenBias | None:
        return cls(arm) if recipe.replay_of(arm).freeze_router_bias else None

    def check(self, recipe: Recipe, model: Any) -> None:
        try:
            router_biases(model)
        except EngineError as e:
            raise RecipeError(f"arms.{self.arm}: replay.freeze_router_bias = true: {e}; leave it out") from e

    def prepare(self, run: Any, model: nn.Module) -> None:
        for bias in router_biases(model):
            bias.requires_grad_(False)
