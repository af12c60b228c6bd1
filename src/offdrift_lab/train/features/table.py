"""The table of features, and those of an arm."""

from __future__ import annotations

from offdrift_lab.train.features.accept import Acceptance
from offdrift_lab.train.features.align import Alignment
from offdrift_lab.train.features.base import Feature
from offdrift_lab.train.features.critic import OwnCritic, SharedCritic
from offdrift_lab.train.features.drafter import Drafting
from offdrift_lab.train.features.kv import CompressedCache
from offdrift_lab.train.features.length_guard import LengthWatch
from offdrift_lab.train.features.lora import Adapters
from offdrift_lab.train.features.loss_scale import LossScaling
from offdrift_lab.train.features.perturb import LayerNoise
from offdrift_lab.train.features.quantized import EngineGrid, InvariantScale, NormNoise, TrainerGrid
from offdrift_lab.train.features.routers import FrozenBias, ReplayedRoutes
from offdrift_lab.train.features.skip_empty import SkipEmpty
from offdrift_lab.train.settings.recipe import Recipe

FEATURES: list[type[Feature]] = [
    CompressedCache,
    ReplayedRoutes,
    Adapters,
    FrozenBias,
    NormNoise,
    InvariantScale,
    TrainerGrid,
    EngineGrid,
    SharedCritic,
    OwnCritic,
    Alignment,
    LayerNoise,
    Drafting,
    LossScaling,
    SkipEmpty,
    LengthWatch,
    Acceptance,
]
"""Every feature; hooks are called in this order."""


def features_of(recipe: Recipe, arm: str) -> tuple[Feature, ...]:
    """The features that a recipe asks for in an arm, new objects in the order of the table."""
    made = (kind.of(recipe, arm) for kind in FEATURES)
    return tuple(feature for feature in made if feature is not None)
