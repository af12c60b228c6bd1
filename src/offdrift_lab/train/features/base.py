"""`Feature`: what a run may have beside model, optimizer and method, as an object whose hooks the loop calls.

A feature is one file and one row of `features.table`. Its hooks, in the order of an arm's life:

- before it trains: `check`, `prepare`, `modules`, `start`, `load`
- around a batch: `drawing`, `drawn`, and `publishing` where the engine takes new weights
- in a step: `stepping`, `scoring`, `term`, `gradients`, `leaves_out`, `step_scale`, `accepts`, `stepped`,
  `recorded`
- what it leaves: `save` in a checkpoint, `finished` beside the trained model
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, Self

from torch import Tensor, nn

from offdrift.stats.drift import DriftStats
from offdrift_lab.train.settings.recipe import Recipe


class Metrics(NamedTuple):
    """Sums and maxima that a hook adds to the statistics of a step, over all processes."""

    sums: Mapping[str, Tensor | float] = {}
    maxima: Mapping[str, Tensor | float] = {}


class Feature:
    """Hooks of a feature; each does nothing unless it is overridden.

    Hooks get the arm (`train.arm.Arm`) that they act in; one arm has one object of every feature.
    """

    shares_model = False
    """Whether the arm trains parts that are put into the run's own model, not a copy of it."""
    perturbs = False
    """Whether `scoring` makes the loss score another policy than the arm's: evidence is then of a pass without it."""
    adds_term = False
    """Whether `term` adds to the loss; pieces then have hidden states."""
    loss_scale: float | None = None
    """What the loss is multiplied by while its gradient is taken; a step whose gradient is not finite is skipped."""
    rate_scale = 1.0
    """Factor of the next step's learning rate."""

    @classmethod
    def of(cls, recipe: Recipe, arm: str) -> Self | None:
        """The feature of an arm; None where the recipe does not ask for it."""
        raise NotImplementedError

    def check(self, recipe: Recipe, model: Any) -> None:
        """Refuse a model that the feature cannot act on. Raises: `RecipeError`."""

    def prepare(self, run: Any, model: nn.Module) -> None:
        """Change the model of an arm, on its device, before its optimizer is made; `run` is the `RunContext`."""

    def modules(self) -> tuple[nn.Module, ...]:
        """Modules that the arm's optimizer trains beside the model."""
        return ()

    def start(self, arm: Any) -> None:
        """The arm's model and optimizer are prepared; its checkpoint, if it resumes, is not loaded yet."""

    def drawing(self, arm: Any) -> None:
        """A batch is about to be drawn."""

    def drawn(self, arm: Any, batch: Any, source: Any) -> Mapping[str, Tensor]:
        """A whole batch is about to be trained on; sums for its metrics, which add over processes."""
        return {}

    def stepping(self, arm: Any) -> None:
        """A step begins; gradients are cleared."""

    def scoring(self, arm: Any, piece: Any) -> AbstractContextManager[Any]:
        """Around the forward and backward pass of a piece (`train.step.ScoredPiece`)."""
        return nullcontext()

    def term(self, arm: Any, piece: Any, *, tokens: int, counts: bool) -> Tensor:
        """A term of a piece's loss, where the feature `adds_term`.

        Args:
            tokens: of the step, in all processes.
            counts: whether the piece does, or repeats one so that all processes make as many passes.
        """
        raise NotImplementedError

    def gradients(self, arm: Any, parameters: Mapping[str, nn.Parameter]) -> Metrics:
        """Change the gradient of a step before it is clipped; processes have the same."""
        return Metrics()

    def leaves_out(self, arm: Any, norm: Tensor) -> bool | None:
        """True if the step must be skipped; None if the feature never skips steps.

        Args:
            norm: of the gradient before it was clipped.
        """
        return None

    def step_scale(self, arm: Any, stats: DriftStats) -> float:
        """Factor of this step's learning rate, given its statistics over all processes."""
        return 1.0

    def accepts(self, arm: Any, batch: Any) -> bool | None:
        """A step on the batch was taken: False if the feature has undone it; None if it never does."""
        return None

    def stepped(self, arm: Any, update: Any) -> Metrics:
        """A step (`train.step.Update`) was taken, or left out; what it adds to its statistics."""
        return Metrics()

    def publishing(self, arm: Any, model: nn.Module) -> AbstractContextManager[Any]:
        """Around the moment in which the engine takes the model's weights and is compared with it."""
        return nullcontext()

    def recorded(self, arm: Any, row: Mapping[str, Any]) -> None:
        """The row of an update was stored, or is read again as the arm resumes."""

    def save(self, folder: Path) -> None:
        """Store in a checkpoint what cannot be computed again. Raises: `RecordError`."""

    def load(self, folder: Path) -> None:
        """Take back what `save` stored. Raises: `CheckpointError`."""

    def finished(self, arm: Any) -> None:
        """The trained model is stored; called in the main process."""
