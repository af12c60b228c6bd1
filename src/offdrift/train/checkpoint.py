"""Checkpoints: written whole or not at all, always at a moment when the engine has the trainer's weights.

Taken right after a weight synchronization, a checkpoint need not store the engine's weights: they
are the trainer's. Model, optimizer and random states are accelerate's business; where the run stood
is ours. Prompts and samples need no random state, they are functions of the recipe's seed.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from accelerate import Accelerator
from safetensors import SafetensorError

from offdrift.errors import CheckpointError, RecordError

KEPT = 2
"""Checkpoints kept: the newest, and one to fall back to."""


@dataclass(frozen=True)
class Position:
    """Where a run stands between two batches."""

    batch: int
    """Index of the next batch."""
    version: int
    """Optimizer steps taken."""
    waiting: tuple[int, ...] = ()
    """Batches already drawn and not yet trained on."""
    method: dict[str, float] = field(default_factory=dict)
    """What an adaptive method has changed in itself, as overrides."""


def save(
    accelerator: Accelerator, folder: Path, position: Position, *, also: Callable[[Path], None] = lambda path: None
) -> None:
    """Write a checkpoint; the older of more than two is removed.

    Args:
        also: writes more into the checkpoint's folder; called by the main process alone.

    Raises: `RecordError` if it cannot be written; the previous checkpoint is untouched.
    """
    final = folder / f"batch-{position.batch:06d}"
    partial = folder / f".partial-{position.batch:06d}"
    try:
        if accelerator.is_main_process:
            for abandoned in folder.glob(".partial-*"):
                shutil.rmtree(abandoned, ignore_errors=True)
            partial.mkdir(parents=True)
        accelerator.wait_for_everyone()
        with _quiet():
            accelerator.save_state(str(partial))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            also(partial)
            (partial / "position.json").write_text(json.dumps(asdict(position)))
            shutil.rmtree(final, ignore_errors=True)
            os.replace(partial, final)
            for old in complete(folder)[:-KEPT]:
                shutil.rmtree(old, ignore_errors=True)
    except (OSError, RuntimeError, SafetensorError) as e:  # torch and safetensors wrap a full disk
        shutil.rmtree(partial, ignore_errors=True)
        raise RecordError(
            f"cannot write checkpoint {final}: {getattr(e, 'strerror', None) or e}; free disk space, then continue "
            "from the previous checkpoint with --resume"
        ) from e
    accelerator.wait_for_everyone()


def complete(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(p for p in folder.glob("batch-*") if p.is_dir())


def load(accelerator: Accelerator, folder: Path) -> Position | None:
    """Restore the newest checkpoint into what accelerate has prepared; None if there is none.

    Raises: `CheckpointError` naming the folder if it cannot be read back.
    """
    checkpoints = complete(folder)
    if not checkpoints:
        return None
    newest = checkpoints[-1]
    try:
        stored = json.loads((newest / "position.json").read_text())
        position = Position(**{**stored, "waiting": tuple(stored["waiting"])})
        accelerator.load_state(str(newest))
    except Exception as e:  # whatever a damaged file provokes in the libraries that read it
        reason = str(e).splitlines()[0] if str(e) else "no message"
        fall_back = "the arm starts over"
        if len(checkpoints) > 1:
            fall_back = f"the run continues from {checkpoints[-2].name}"
        raise CheckpointError(
            f"checkpoint {newest} cannot be read ({type(e).__name__}: {reason}); "
            f"remove that folder and --resume again: {fall_back}"
        ) from e
    return position


@contextmanager
def _quiet() -> Iterator[None]:
    """accelerate warns at every save that tied weights are stored once; they are meant to be."""
    log = logging.getLogger("accelerate.utils.other")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
