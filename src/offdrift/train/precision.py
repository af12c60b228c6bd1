"""Precision of the trainer's forward passes, and the scale that float16 needs for the way back.

Weights, their gradients and the optimizer stay in float32: `optim.dtype` is what matrices are multiplied in.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch

from offdrift.errors import EngineError, RecipeError
from offdrift.train.recipe import Recipe

LAUNCHED = {"no": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""accelerate's names of precisions, and `optim.dtype`'s."""


def half_precision(recipe: Recipe) -> torch.dtype | None:
    """What the trainer's matrices are multiplied in: bfloat16, float16, or None where that is float32.

    `optim.dtype` decides, or where it is absent what accelerate was launched with.

    Raises: `RecipeError` if the two contradict each other, or accelerate names a precision that is none of these.
    """
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if launched not in LAUNCHED:
        raise RecipeError(f"--mixed_precision {launched}: this trainer computes in no, bf16 or fp16")
    wanted = recipe.optim.dtype or LAUNCHED[launched]
    if launched != "no" and wanted != LAUNCHED[launched]:
        raise RecipeError(
            f'optim.dtype = "{wanted}", and accelerate was launched with --mixed_precision {launched}; leave out one'
        )
    return None if wanted == "float32" else getattr(torch, wanted)


@dataclass(frozen=True)
class LossScale:
    """What a float16 loss is multiplied by before its gradient is taken, so that small gradients are not lost.

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
