"""The folder of a run: everything it stores, which is all that reports and audits read.

    run.json                          recipe, versions, model, and at the end the table of arms
    workers.jsonl                     with [pipeline], a line for every rollout worker: process, node, since when
    arms/NAME/metrics.jsonl           one object per optimizer step
    arms/NAME/eval.jsonl              held-out rewards
    arms/NAME/samples.jsonl           a few rollouts with per-token divergences
    arms/NAME/findings.jsonl          what the diagnosis found, at the update at which it did
    arms/NAME/rollouts/*.parquet      every batch, with provenance and evidence
    arms/NAME/log/*.parquet           every batch as it was trained on: what `offdrift audit` reads
    arms/NAME/checkpoints/batch-N/    what `--resume` continues from
    arms/NAME/model/                  the trained model
    arms/NAME/adapter/                its adapters, where only those were trained
    arms/NAME/summary.json            the arm's row of the table; its presence means "finished"

Single files are replaced whole; line files are appended line by line and cut back to the checkpoint
when a run resumes. NaN and infinity are stored as null.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from safetensors import SafetensorError

from offdrift.errors import CheckpointError, RecordError
from offdrift.methods.load import content_hash, displayed
from offdrift.records import store
from offdrift.records.atomic import plain as plain
from offdrift.records.atomic import remove_half_written, write_atomically
from offdrift.records.atomic import write_json as write_json
from offdrift.show.json_access import mapping, read_lines, text
from offdrift.texts import read_json
from offdrift_lab.train.report.stored import FORMAT

LINE_FILES = ("metrics", "eval", "samples", "findings")


@dataclass(frozen=True)
class RunFolder:
    """A run's folder on disk."""

    path: Path

    def clean(self) -> None:
        """Remove what a process that was killed was writing, half checkpoints among it."""
        remove_half_written(self.path)
        for abandoned in self.path.glob("arms/*/checkpoints/.partial-*"):
            shutil.rmtree(abandoned, ignore_errors=True)

    def create(self, head: Mapping[str, Any]) -> None:
        """Write `run.json`. Raises: `RecordError` if the folder cannot be written."""
        write_json(self.path / "run.json", {"format": FORMAT, **head})

    def head(self) -> dict[str, Any]:
        """Content of `run.json`. Raises: `CheckpointError` if there is no run here."""
        try:
            return read_json(self.path / "run.json")
        except (OSError, ValueError) as e:
            raise CheckpointError(f"there is no run to resume at {self.path} ({e}); start it without --resume") from e

    def progress(self, arms: Iterable[str]) -> str:
        """Progress of a run in words: the newest update of every arm.

        Example:
            >>> RunFolder(Path("nowhere")).progress(["none", "gspo"])
            'none at update 0, gspo at update 0'
        """
        words = []
        for name in arms:
            arm = self.arm(name)
            rows = arm.rows("metrics")
            finished = arm.summary() is not None
            words.append(f"{name} finished" if finished else f"{name} at update {rows[-1]['update'] if rows else 0}")
        return ", ".join(words)

    def arm(self, name: str) -> ArmFolder:
        """The folder of one arm."""
        return ArmFolder(self.path / "arms" / name)


@dataclass(frozen=True)
class ArmFolder:
    """One arm's folder."""

    path: Path

    def summary(self) -> dict[str, Any] | None:
        """The arm's row of the table, or None if the arm has not finished."""
        try:
            return read_json(self.path / "summary.json")
        except (OSError, ValueError):
            return None

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Store the arm's row: from now on the arm counts as finished."""
        write_json(self.path / "summary.json", summary)

    def append(self, name: str, row: Mapping[str, Any]) -> None:
        """Add one line to a line file. Raises: `RecordError` if it cannot be written."""
        file = self.path / f"{name}.jsonl"
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a", encoding="utf-8") as f:
                f.write(json.dumps(plain(row), allow_nan=False) + "\n")
        except OSError as e:
            raise RecordError(
                f"cannot write {file}: {e.strerror or e}; free disk space or choose another run "
                "folder, then continue with --resume"
            ) from e

    def rows(self, name: str) -> list[dict[str, Any]]:
        """The rows of a line file; a last line that a killed run left half written is dropped."""
        return read_lines(self.path / f"{name}.jsonl")[0]

    def cut_back(self, version: int, *, batch: int) -> None:
        """Forget what came after optimizer step `version`, and logs from `batch` on; evaluations are repeated."""
        for name in LINE_FILES:
            first_gone = version if name == "eval" else version + 1
            text = "".join(json.dumps(r) + "\n" for r in self.rows(name) if r["update"] < first_gone)
            write_atomically(self.path / f"{name}.jsonl", lambda tmp, text=text: Path(tmp).write_text(text, "utf-8"))
        for file in self.path.glob("log/batch-*.parquet"):
            number = re.match(r"batch-(\d+)", file.name)
            if number and int(number[1]) >= batch:
                file.unlink()
        for file in self.path.rglob(".*.tmp"):  # what a killed process was writing
            file.unlink(missing_ok=True)

    def trim(self, limit: int, needed: AbstractSet[int]) -> None:
        """Delete the oldest rollouts and token logs until they take at most `limit` bytes.

        Rollouts of the batches in `needed` stay, and so does the newest batch, whatever their size.
        """
        rollouts = self.path / "rollouts"
        files = [*rollouts.glob("batch-*.parquet"), *self.path.glob("log/batch-*.parquet")]
        # By the number of the batch: dates are wrong after a jump of the clock.
        by_age = sorted(files, key=lambda f: f.name.removeprefix("batch-"))
        excess = sum(f.stat().st_size for f in [*files, *rollouts.glob("heads/*")]) - limit
        for file in by_age:
            index = file.name.removeprefix("batch-")[:6]
            stays = file.parent == rollouts and int(index) in needed
            if excess <= 0:
                return
            if not stays and index not in by_age[-1].name:
                excess -= store.delete(file)

    @contextmanager
    def storing(self, name: str) -> Iterator[Path]:
        """The path of a folder that is being written under this one, such as `model`.

        Raises: `RecordError` naming it where the disk is full or it may not be written, as libraries do not.
        """
        path = self.path / name
        try:
            yield path
        except (OSError, SafetensorError) as e:  # which wraps a full disk
            raise RecordError(
                f"cannot write {path}: {getattr(e, 'strerror', None) or e}; free disk space, then continue with "
                "--resume"
            ) from e

    def clear(self) -> None:
        """Forget everything: the arm starts over."""
        shutil.rmtree(self.path, ignore_errors=True)


# Checkpoints. They are taken right after a weight synchronization, so the engine has the trainer's weights
# and only the trainer's are stored. accelerate stores model, optimizer and random states. Prompts and samples
# need no random state, because they are functions of the recipe's seed.

KEPT = 2
"""Checkpoints kept: the newest, and one to fall back to."""


@dataclass(frozen=True)
class Position:
    """Position of a run between two batches."""

    batch: int
    """Index of the next batch."""
    version: int
    """Optimizer steps taken."""
    method: dict[str, float] = field(default_factory=dict)
    """Changes that an adaptive method made to itself, as overrides."""
    switched: bool = False
    """Whether a surge of lengths has changed the arm's method; `method` are then changes of that one."""
    source: dict[str, Any] = field(default_factory=dict)
    """Where this process's source of batches stands; every process stores its own."""


def save_checkpoint(
    accelerator: Accelerator, folder: Path, position: Position, *, also: Callable[[Path], None] = lambda path: None
) -> None:
    """Write a checkpoint, and in every process whatever `also` adds to its folder; all but the newest two go.

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
        # accelerate warns at every save that tied weights are stored once, which is intended.
        log = logging.getLogger("accelerate.utils.other")
        level = log.level
        log.setLevel(logging.ERROR)
        try:
            accelerator.save_state(str(partial))
        finally:
            log.setLevel(level)
        common = asdict(position)
        source_file = partial / f"source-{accelerator.process_index:03d}.json"
        source_file.write_text(json.dumps(common.pop("source")))
        also(partial)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            (partial / "position.json").write_text(json.dumps(common))
            shutil.rmtree(final, ignore_errors=True)
            os.replace(partial, final)
            for old in checkpoints(folder)[:-KEPT]:
                shutil.rmtree(old, ignore_errors=True)
    except (OSError, RuntimeError, SafetensorError) as e:  # torch and safetensors wrap a full disk
        shutil.rmtree(partial, ignore_errors=True)
        raise RecordError(
            f"cannot write checkpoint {final}: {getattr(e, 'strerror', None) or e}; free disk space, then continue "
            "from the previous checkpoint with --resume"
        ) from e
    accelerator.wait_for_everyone()


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(p for p in folder.glob("batch-*") if p.is_dir())


def load_checkpoint(accelerator: Accelerator, folder: Path, *, whole: bool = True) -> Position | None:
    """Restore the newest checkpoint into what accelerate has prepared; None if there is none.

    Args:
        whole: whether it holds every weight; else only those that train.

    Raises: `CheckpointError` naming the folder if it cannot be read back.
    """
    stored_checkpoints = checkpoints(folder)
    if not stored_checkpoints:
        return None
    newest = stored_checkpoints[-1]
    try:
        source_file = newest / f"source-{accelerator.process_index:03d}.json"
        position = Position(
            **json.loads((newest / "position.json").read_text()), source=json.loads(source_file.read_text())
        )
        options: dict[str, Any] = {} if whole else {"strict": False}
        accelerator.load_state(str(newest), **options)
    except Exception as e:  # whatever a damaged file provokes in the libraries that read it
        reason = str(e).splitlines()[0] if str(e) else "no message"
        earlier = stored_checkpoints[-2:-1]
        fall_back = f"the run continues from {earlier[0].name}" if earlier else "the arm starts over"
        raise CheckpointError(
            f"checkpoint {newest} cannot be read ({type(e).__name__}: {reason}); "
            f"remove that folder and --resume again: {fall_back}"
        ) from e
    return position


def checked_head(folder: Path) -> dict[str, Any]:
    """The head of a run that is to go on. Raises: `CheckpointError` if the code of its methods has changed."""
    head = RunFolder(folder).head()
    check_code(head, folder)
    return head


def check_code(head: Mapping[str, Any], folder: Path) -> None:
    """Refuse to resume a run whose methods' files have changed. Runs none of them.

    Raises: `CheckpointError` naming the file and both hashes.
    """
    for name, source in mapping(head.get("code")).items():
        file, then = (text(mapping(source).get(key)) for key in ("file", "sha256"))
        if (now := content_hash(file)) != then:
            change = "is gone" if now is None else f"has changed (SHA-256 {now[:12]}, then {then[:12]})"
            raise CheckpointError(
                f"{displayed(name)}: {file} {change} since the run at {folder} was started; restore it, or start a new "
                "run without --resume"
            )
