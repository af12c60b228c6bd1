"""A framework's own loss and ours on the tokens of one micro-batch: equal, or the run stops.

What an adapter does around a method (which log-probs are which policy's, masks, denominators, ranks, nonzero) is right
if and only if the plain loss of the framework comes out of it: with every weight 1 and every gate open, its own clip
and its own aggregate, loss and gradient are those of its own function. Once per process, at the first micro-batch,
on log-probs near it whose three policies differ, so that a first step that is on policy proves something, too.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from offdrift.adapters.frameworks import FRAMEWORKS
from offdrift.aggregate import AggregateName
from offdrift.correction import Correction
from offdrift.errors import FrameworkError, OffdriftError
from offdrift.methods import Method
from offdrift.objectives import Clipped
from offdrift.ratios import RatioName

TOLERANCE = 1e-5
"""Of the largest gradient, and of the sum of absolute ones for the loss. Computed in float64: rounding, the 1e-8 that
frameworks add to their counts, and exponentials that they take in float32."""
FARTHEST, APART = 1.0, 0.5
"""How far two policies of the micro-batch may be apart to be taken as they are, and how far they are moved; nat."""

Loss = Callable[[Tensor], Tensor]
"""Loss (of any shape) as a function of the log-probs, or of whatever receives the gradient."""


@dataclass(frozen=True)
class Sample:
    """Log-probs, `[b, t]` or packed, near those of the micro-batch: every token scored, no two policies alike."""

    logp: Tensor
    """log pi: what the gradient is taken to."""
    old: Tensor
    rollout: Tensor
    advantages: Tensor


def sample_of(
    logp: Float[Tensor, ...],
    old: Float[Tensor, ...],
    rollout: Float[Tensor, ...],
    *,
    advantages: Float[Tensor, ...],
    mask: Bool[Tensor, ...],
) -> Sample:
    """The micro-batch in float64, with policies up to `APART` nat from each other, and no advantage of 0.

    Masked positions hold numbers: a framework multiplies by its mask.
    """
    logp, mask = logp.detach().double(), mask.bool()
    base = logp.where(mask & logp.isfinite(), -1.0).clamp(max=0.0)
    places = torch.arange(base.numel(), dtype=torch.float64, device=base.device).view_as(base)
    moved = [APART * (places * turn % 1.0) for turn in (2**0.5, 3**0.5, 5**0.5)]

    def near(x: Tensor, by: Tensor) -> Tensor:
        x = x.detach().double()
        return x.where(mask & ((x - base).abs() < FARTHEST), base).clamp(max=0.0) - by

    nonzero = advantages.detach().double()
    nonzero = nonzero.where(mask & nonzero.isfinite() & (nonzero != 0), 1.0 - 2.0 * (places % 2))
    return Sample(base - moved[0], near(old, moved[1]), near(rollout, moved[2]), nonzero)


def clipped(
    low: float | None,
    high: float | None = None,
    dual: float | None = None,
    *,
    on: RatioName = "staleness",
    aggregate: AggregateName = "token_mean",
) -> Method:
    """The framework's plain loss as a method: PPO's clip at its numbers, no gate, no weight."""
    low = 0.2 if low is None else float(low)
    objective = Clipped(on=on, eps_low=low, eps_high=low if high is None else float(high), dual_clip=dual)
    return Method(objective=objective, correction=Correction(), aggregate=aggregate)


def differences(native: Loss, ours: Loss, at: Tensor) -> tuple[float, float]:
    """By how much two losses differ at a point: of loss and gradient, each over its size (see `TOLERANCE`).

    A result that is not finite, or of another shape, is infinitely far.
    """
    (theirs, slope), (mine, my_slope) = _with_gradient(native, at), _with_gradient(ours, at)
    if theirs.shape != mine.shape:
        return float("inf"), float("inf")
    if not theirs.numel() or not slope.numel():  # a rank without a token of the micro-batch
        return 0.0, 0.0
    sizes = slope.abs()
    loss = float((theirs - mine).abs().max() / (sizes.sum() + theirs.abs().max()).clamp(min=1e-30))
    gradient = float((slope - my_slope).abs().max() / sizes.max().clamp(min=1e-30))
    return tuple(x if x == x else float("inf") for x in (loss, gradient))  # type: ignore[return-value]


def prove(log: logging.Logger, framework: str, name: str, *, native: Loss | None, ours: Loss, at: Tensor) -> None:
    """Say that two losses are equal, or stop.

    Args:
        name: the framework's class or function, as its source has it.
        native: None where it cannot be called in this process, which is said once.

    Raises: `FrameworkError` naming it, and what differs.
    """
    if native is None:
        log.warning("%s is not in this process: the adapter could not prove itself against it", name)
        return
    loss = gradient = float("inf")
    try:
        loss, gradient = differences(native, ours, at)
        problem = f"its loss differs by {loss:.1e} and its gradient by {gradient:.1e} of their sizes"
        known = loss <= TOLERANCE and gradient <= TOLERANCE
    except OffdriftError:
        raise
    except Exception as error:
        problem, known = f"it ends with {type(error).__name__}: {str(error)[:200]}", False
    if not known:
        raise FrameworkError(
            f"{framework}: {name} is a loss that this adapter does not know: with every weight 1 and every gate open, "
            f"{problem}. A correction could mean something else in it: take a version that was tested "
            f"({tested(framework)}), and leave settings that change this loss at their defaults"
        )
    log.info("%s: loss and gradient equal to %.0e and %.0e with every weight 1", name, loss, gradient)


def tested(framework: str) -> str:
    """The versions of a framework that were tested, as text."""
    known = FRAMEWORKS[framework]
    return known.tested if known.oldest == known.tested else f"{known.oldest} to {known.tested}"


def changed(arguments: Any, values: Mapping[str, Any]) -> Any:
    """A copy of a framework's settings, some of them changed; the original stays."""
    made = copy.copy(arguments)
    for name, value in values.items():
        setattr(made, name, value)
    return made


def _with_gradient(loss: Loss, at: Tensor) -> tuple[Tensor, Tensor]:
    """The loss, detached, and the gradient of its sum with a coefficient of its own for each entry."""
    leaf = at.detach().clone().requires_grad_()
    with torch.enable_grad():
        value = loss(leaf).double()
        if not value.requires_grad:  # weights, which carry none
            return value.detach(), torch.zeros_like(leaf)
        uneven = torch.linspace(1.0, 2.0, value.numel(), dtype=value.dtype, device=value.device).view_as(value)
        (gradient,) = torch.autograd.grad((value * uneven).sum(), leaf, allow_unused=True)
    return value.detach(), torch.zeros_like(leaf) if gradient is None else gradient
