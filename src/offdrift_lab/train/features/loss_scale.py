"""The scale of a float16 loss, and the precision that the trainer computes in."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from offdrift.errors import EngineError, RecipeError
from offdrift_lab.train.features.base import Feature, Metrics
from offdrift_lab.train.settings.recipe import Recipe

LAUNCHED = {"no": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""accelerate's names of precisions, and `optim.dtype`'s."""


@dataclass(frozen=True)
class LossScale:
    """Factor of a float16 loss before its gradient is taken, so that small gradients are not lost.

        s <- s / 2   where the gradient overflowed: its step is skipped
        s <- 2 s     after `interval` steps without an overflow

    Gradients are divided by s before they are clipped; a power of two changes none of their digits. It is a function of
    which steps were skipped, so that a resumed run rebuilds it from its metrics.

    Example:
        >>> scale = LossScale(interval=2)
        >>> [scale := scale.after(skipped=x) for x in (True, False, False)][-1].value == scale.value == 65536.0
        True

    Reference: Micikevicius et al., arXiv:1710.03740, section 3.2; the constants are those of `torch.amp.GradScaler`.
    """

    value: float = 65536.0
    steps: int = 0
    """Without an overflow, since the scale last changed."""
    interval: int = 2000

    def after(self, *, skipped: bool) -> LossScale:
        """The scale of the next step.

        Raises: `EngineError` where even an unscaled loss would overflow.
        """
        if skipped and self.value <= 1:
            raise EngineError(
                "the gradient overflows in float16 even with a loss scale of 1, so no step can be taken; set "
                'optim.dtype = "bfloat16", or look at the last batch\'s log-ratios (metric full/abs_log_ratio_max)'
            )
        if skipped:
            return replace(self, value=self.value / 2, steps=0)
        if self.steps + 1 == self.interval:
            return replace(self, value=2 * self.value, steps=0)
        return replace(self, steps=self.steps + 1)


class LossScaling(Feature):
    """Scales the loss where the trainer computes in float16, and skips steps whose gradient overflows."""

    def __init__(self) -> None:
        self.scale = LossScale()

    @classmethod
    def of(cls, recipe: Recipe, arm: str) -> LossScaling | None:
        return cls() if half_precision(recipe) is torch.float16 else None

    @property
    def loss_scale(self) -> float:  # type: ignore[override]
        """Loss scale of the next step."""
        return self.scale.value

    def stepped(self, arm: Any, update: Any) -> Metrics:
        skipped = not bool(update.norm.isfinite())
        return Metrics(maxima={"optim/loss_scale": self.loss_scale, "optim/skipped": float(skipped)})

    def recorded(self, arm: Any, row: Mapping[str, Any]) -> None:
        self.scale = self.scale.after(skipped=bool(row["optim/skipped"]))


def half_precision(recipe: Recipe) -> torch.dtype | None:
    """Dtype of the trainer's matrix products: bfloat16, float16, or None for float32.

    `optim.dtype` decides, or where it is absent what accelerate was launched with.

    Raises: `RecipeError` if the two contradict each other, or accelerate names a precision that is none of these.
    """
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if launched not in LAUNCHED:
        raise RecipeError(f"--mixed_precision {launched}: this trainer computes in no, bf16 or fp16")
    dtype = recipe.optim.dtype or LAUNCHED[launched]
    if recipe.batch_invariant and dtype != recipe.rollout.dtype:  # the recipe's own are checked where it is read
        raise RecipeError(
            f"batch_invariant = true needs one precision on both sides, and accelerate was launched with "
            f'--mixed_precision {launched}, but rollout.dtype = "{recipe.rollout.dtype}"; set optim.dtype to that'
        )
    if launched != "no" and dtype != LAUNCHED[launched]:
        raise RecipeError(
            f'optim.dtype = "{dtype}", and accelerate was launched with --mixed_precision {launched}; leave out one'
        )
    return None if dtype == "float32" else getattr(torch, dtype)
