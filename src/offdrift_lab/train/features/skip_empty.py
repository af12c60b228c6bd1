"""`optim.skip_empty` and `optim.min_acceptance`: no step, or a smaller one, where little or nothing was accepted."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from offdrift.stats.drift import DriftStats
from offdrift.step_policy import StepPolicy
from offdrift_lab.train.features.base import Feature, Metrics
from offdrift_lab.train.settings.recipe import Recipe


class SkipEmpty(Feature):
    """Leaves out steps whose gradient is 0, in which AdamW would move the weights by its mean of earlier gradients,
    and shrinks steps of which few sequences were accepted.

    Args:
        policy: what happens at such steps.
    """

    def __init__(self, policy: StepPolicy | None = None) -> None:
        self.policy = policy or StepPolicy()

    @classmethod
    def of(cls, recipe: Recipe, arm: str) -> SkipEmpty | None:
        policy = recipe.optim.step_policy
        return None if policy == StepPolicy("step") else cls(policy)

    def leaves_out(self, arm: Any, norm: Tensor) -> bool | None:
        return None if self.policy.empty == "step" else not bool(norm)

    def step_scale(self, arm: Any, stats: DriftStats) -> float:
        if self.policy.min_acceptance == 0:
            return 1.0
        return self.policy.scale(stats.metrics["gate/acceptance_seq"])

    def stepped(self, arm: Any, update: Any) -> Metrics:
        if not bool(update.norm):
            self.policy.settle(arm.optimizer)
        return Metrics()
