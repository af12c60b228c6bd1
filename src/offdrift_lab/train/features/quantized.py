"""`[quantized]` and the grid of the rollouts: what an arm's model is on it, and what of a step the grid lets through.

The formulas are in `train.quantized` and `engines.grids`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from offdrift.engines.grids import fused_experts, grid, on_grid, put_on_grid
from offdrift.errors import RecipeError
from offdrift_lab.train.data.problems import digest
from offdrift_lab.train.features.base import Feature, Metrics
from offdrift_lab.train.features.quantization import (
    NoiseSettings,
    Survival,
    noise_size,
    noisy_norms,
    norm_readers,
    scale_invariantly,
)
from offdrift_lab.train.loop.sharded import is_sharded
from offdrift_lab.train.settings.recipe import Recipe


class InvariantScale(Feature):
    """`quantized.scale`: matrices behind norms are divided by it, and norms multiplied (QuRL)."""

    def __init__(self, arm: str, scale: float) -> None:
        self.arm, self.scale = arm, scale

    @classmethod
    def of(cls, recipe: Recipe, arm: str) -> InvariantScale | None:
        scale = recipe.quantized_of(arm).scale
        return None if scale == 1 else cls(arm, scale)

    def check(self, recipe: Recipe, model: Any) -> None:
        try:
            scale_invariantly(copy.deepcopy(model), self.scale)
        except RecipeError as e:
            raise RecipeError(f"arms.{self.arm}: {e}") from e

    def prepare(self, run: Any, model: nn.Module) -> None:
        scale_invariantly(model, self.scale)


class TrainerGrid(Feature):
    """`quantized.forward`: the trainer's passes round as the engine does, with a straight-through gradient."""

    def __init__(self, grid: str) -> None:
        self.grid = grid

    @classmethod
    def of(cls, recipe: Recipe, arm: str) -> TrainerGrid | None:
        if not recipe.quantized_of(arm).forward:
            return None
        assert recipe.grid is not None
        return cls(recipe.grid)

    def prepare(self, run: Any, model: nn.Module) -> None:
        put_on_grid(model, self.grid)


class NormNoise(Feature):
    """`quantized.noise`: Gaussian noise in the norms that the engine is given (QeRL)."""

    def __init__(self, arm: str, settings: NoiseSettings) -> None:
        self.arm, self.settings = arm, settings
        self.paths: Sequence[str] = ()
        """Norms that get noise."""
        self.published = 0.0
        """Standard deviation of the noise that the engine has."""

    @classmethod
    def of(cls, recipe: Recipe, arm: str) -> NormNoise | None:
        noise = recipe.quantized_of(arm).noise
        return None if noise is None else cls(arm, noise)

    def check(self, recipe: Recipe, model: Any) -> None:
        if not norm_readers(model):
            raise RecipeError(
                f"arms.{self.arm}: quantized.noise: no matrix of {type(model).__name__} reads a norm; leave it out"
            )

    def prepare(self, run: Any, model: nn.Module) -> None:
        self.paths = tuple(norm_readers(model))

    def publishing(self, arm: Any, model: nn.Module) -> AbstractContextManager[None]:
        """The model with noise in its norms; the same in every process."""
        recipe = arm.run.recipe
        self.published = noise_size(arm.version, recipe.updates, self.settings)
        seed = digest("noise", recipe.seed, arm.version)
        return noisy_norms(model, self.paths, sigma=self.published, seed=seed)

    def stepped(self, arm: Any, update: Any) -> Metrics:
        return Metrics(maxima={"grid/noise_sigma": self.published})


class EngineGrid(Feature):
    """`rollout.quantization`: engine and trainer are compared on the engine's grid, and steps are measured on it."""

    def __init__(self, grid: str, *, compares: bool) -> None:
        self.grid, self.compares = grid, compares
        self.before: Survival | None = None

    @classmethod
    def of(cls, recipe: Recipe, arm: str) -> EngineGrid | None:
        if recipe.grid is None:
            return None
        # Where the trainer's passes are on the grid already, nothing is put there. Adapters have no place on it.
        return cls(recipe.grid, compares=recipe.lora is None and not recipe.quantized_of(arm).forward)

    def check(self, recipe: Recipe, model: Any) -> None:
        fused = fused_experts(model) if recipe.rollout.engine == "vllm" else None
        if fused is not None and grid(self.grid).activations is not None:
            raise RecipeError(
                f'rollout.quantization = "{self.grid}" rounds inputs, and {fused} is a fused tensor of experts: vLLM '
                'was not tried with that; use rollout.engine = "transformers", or "int8"'
            )

    def publishing(self, arm: Any, model: nn.Module) -> AbstractContextManager[Any]:
        return on_grid(model, self.grid) if self.compares else nullcontext()

    def stepping(self, arm: Any) -> None:
        """Keep the engine's matrices as they are; not where they are spread over processes."""
        if not is_sharded(arm.inner):
            self.before = Survival.of(self.grid, arm.run.matrices, arm.weights())

    def stepped(self, arm: Any, update: Any) -> Metrics:
        before, self.before = self.before, None
        return Metrics() if before is None else Metrics(sums=before.sums(arm.weights()))
