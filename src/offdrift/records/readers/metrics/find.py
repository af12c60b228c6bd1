"""Finding files of metrics, telling whose they are, and joining their rows by step."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from offdrift.errors import RecordError
from offdrift.judge.metric_names import OUR_PREFIXES, MetricName, metric_names
from offdrift.records.readers.files import BadRow, fingerprint, is_url, missing, opened, size
from offdrift.records.readers.metrics import event_files, rows, wandb_runs
from offdrift.records.readers.metrics.rows import MetricRow, as_number
from offdrift.stats.metrics import METRICS

Reader = Callable[[str, list[BadRow]], Iterator[MetricRow]]
OUR_OTHERS = ("optim/loss", "optim/grad_norm", "optim/lr", "eval/reward")
"""Names that rules read and no row of `METRICS` has."""
GLANCE = 500
"""Rows of a file that tell whether it holds metrics."""
MOST_FILES = 5_000
"""Files of a folder that are looked at."""
PLAIN = "plain"
"""The framework of a log that tells none."""
NAMED = 8
"""Names that a sentence lists."""
MOST_STEPS = 5_000_000
"""Steps that are kept of a run."""


EVERYWHERE = frozenset({"loss", "grad_norm", "learning_rate", "lr", "entropy", "reward", "kl"})
"""Names that any trainer uses."""


class Container(NamedTuple):
    """A kind of file that metrics come in."""

    what: str
    pattern: str
    """Of its name."""
    read: Reader
    run_of: Callable[[str], str] = str
    """What the files of one run share: by default a file is a run."""
    repeats: bool = False
    """Whether each file of a run repeats the ones before it, so that the longest is read."""
    common: Collection[str] = EVERYWHERE
    """Names that tell no framework here, with "train/" before them or without."""


def _output_folder(file: str) -> str:
    """The folder of a run of transformers: that of its checkpoints."""
    folder = os.path.dirname(file)
    return os.path.dirname(folder) if re.search(r"(^|/)checkpoint-\d+$", folder) else folder


CONTAINERS = (
    Container("JSON lines", r"\.(jsonl|ndjson)$", rows.json_lines),
    Container("a run file of W&B", r"\.wandb$", wandb_runs.wandb_rows),
    Container(
        "event files of TensorBoard", r"(^|/)events\.out\.tfevents\.[^/]*$", event_files.event_rows, os.path.dirname
    ),
    Container("CSV", r"\.csv$", rows.csv_rows),
    Container(
        "trainer_state.json", r"(^|/)trainer_state\.json$", rows.json_rows, _output_folder, repeats=True, common=()
    ),
    Container("JSON", r"\.json$", rows.json_rows),
    Container("printed lines", r"\.(log|txt|out)$", rows.console_rows),
)
"""In the order in which a folder that holds several is read: they repeat each other."""
NAMED_ONLY = "JSON"
"""The container that is read only where its file is named: folders hold JSON of all kinds."""


@dataclass(frozen=True)
class MetricLog:
    """The metrics of one run, without any evidence by token."""

    framework: str
    container: str
    files: tuple[str, ...]
    rows: tuple[Mapping[str, float | int], ...]
    """By our names, one row per step, in the order of the steps."""
    names: Mapping[str, str]
    """The framework's name that each of ours was read from."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """By our name, in what the framework's definition differs."""
    unused: tuple[str, ...] = ()
    """Names of numbers that are not read."""
    bad: tuple[BadRow, ...] = ()

    @property
    def description(self) -> str:
        """One sentence: what was found, and what of it is read."""
        whose = "this library" if self.framework == "offdrift" else self.framework
        renamed = [f"{ours} from {theirs}" for ours, theirs in self.names.items() if ours != theirs]
        first = f"found metrics of {whose} in {self.container}, told by their names"
        if self.framework == PLAIN:
            first = f"found metrics in {self.container}, whose names tell no framework"
        words = [first]
        words += [f"reading {_some(renamed)}"] if renamed else []
        words += [f"not used: {_some(self.unused)}"] if self.unused else []
        return "; ".join(words)

    @property
    def bytes(self) -> int:
        return sum(map(size, self.files))


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(name[:80] for name in names[:NAMED]) + more


def find_metrics(paths: Sequence[str], *, without: frozenset[str] = frozenset()) -> MetricLog | None:
    """The metrics that paths name; None if nothing there holds any.

    Args:
        paths: files, which are joined, or one folder, which is searched to any depth for the metrics of one run.
        without: files that are known to hold none.

    Where one of several paths names no file, nothing is read, so that its absence is said.

    Raises: `RecordError` naming a file of metrics that is damaged, or the runs among which to choose.
    """
    if len(paths) == 1 and not is_url(paths[0]) and os.path.isdir(paths[0]):
        return _in_folder(paths[0], without)
    if not all(is_url(path) or os.path.isfile(path) for path in paths):
        return None
    kinds = {file: _container(file) for file in paths if file not in without}
    problem: RecordError | None = None
    for container in dict.fromkeys(kinds.values()):
        files = [file for file, kind in kinds.items() if kind is container]
        try:
            if any(_holds_metrics(file, container) for file in files):
                return _read(files, container)
        except RecordError as e:
            problem = problem or e
    if problem is not None:
        raise problem
    return None


def state(paths: Sequence[str]) -> tuple[str, ...]:
    """Return a fingerprint of the files at these paths, which changes as they do, or as another appears."""
    files = [file for path in paths for file in (_walk(path) if os.path.isdir(path) else [path])]
    return tuple(fingerprint(file) for file in files if is_url(file) or os.path.isfile(file))


def _container(file: str) -> Container:
    """The kind of a file that was named: by its name, else by its first bytes, else text."""
    for container in CONTAINERS:
        if re.search(container.pattern, file):
            return container
    with opened(file) as f:
        begins = f.read(len(wandb_runs.IDENTITY)) == wandb_runs.IDENTITY
    return next(c for c in CONTAINERS if c.read is (wandb_runs.wandb_rows if begins else rows.console_rows))


def _walk(folder: str) -> list[str]:
    """Files of a folder to any depth, without hidden ones."""
    files: list[str] = []
    for inside, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        files += [os.path.join(inside, name) for name in sorted(names) if not name.startswith(".")]
        if len(files) > MOST_FILES:
            break
    return files[:MOST_FILES]


def _in_folder(folder: str, without: frozenset[str]) -> MetricLog | None:
    files = [file for file in _walk(folder) if os.path.isfile(file) and file not in without]
    problem: RecordError | None = None
    taken: set[str] = set()
    for container in CONTAINERS:
        here = [file for file in files if re.search(container.pattern, file) and file not in taken]
        taken.update(here)
        if container.what == NAMED_ONLY:
            continue
        runs: dict[str, list[str]] = {}
        for file in here:
            try:
                if _holds_metrics(file, container):
                    runs.setdefault(container.run_of(file), []).append(file)
            except RecordError as e:
                problem = problem or e
        if len(runs) > 1:
            some = ", ".join(list(runs)[:5])
            raise RecordError(f"{folder} holds the metrics of {len(runs)} runs ({some}); give one of them")
        for of_run in runs.values():
            return _read(of_run, container)
    if problem is not None:
        raise problem
    return None


def _known(name: str) -> bool:
    return _is_ours(name) or bool(metric_names().find(name))


def _is_ours(name: str) -> bool:
    return name in METRICS or name in OUR_OTHERS or name.startswith(OUR_PREFIXES)


def _holds_metrics(file: str, container: Container) -> bool:
    """Whether the first rows of a file have a step and metrics that are known.

    Raises: `RecordError` if the file is what its name says and cannot be read.
    """
    bad: list[BadRow] = []
    try:
        for row in islice(container.read(file, bad), GLANCE):
            if rows.has_step(row.values) and any(_known(name) for name in row.values):
                return True
    except (OSError, MemoryError) as e:
        raise missing(file, e) from e
    if bad and container.read in (event_files.event_rows, wandb_runs.wandb_rows):
        raise RecordError(f"{file} holds no metric that can be read: {bad[0].reason}; copy it again, or leave it out")
    return False


def _read(files: Sequence[str], container: Container) -> MetricLog:
    """All rows of the files of one run, joined by step: of several values of one step, the last counts."""
    bad: list[BadRow] = []
    unused: dict[str, None] = {}
    by_file = []
    for file in files:
        steps: dict[int, dict[str, float | int]] = {}
        try:
            for row in container.read(file, bad):
                _add(row, file, steps, unused, bad)
        except (OSError, MemoryError) as e:
            raise missing(file, e) from e
        by_file.append(steps)
    if container.repeats:
        by_file = [max(by_file, key=lambda steps: max(steps, default=-1))]
    joined: dict[int, dict[str, float | int]] = {}
    for steps in by_file:
        for step, values in steps.items():
            joined.setdefault(step, {}).update(values)
    return _translated(joined, files, container, tuple(unused), tuple(bad))


def _add(
    row: MetricRow,
    file: str,
    steps: dict[int, dict[str, float | int]],
    unused: dict[str, None],
    bad: list[BadRow],
) -> None:
    """The known numbers of one row, added to those of its step."""
    step = metric_names().step(row.values)
    numbers: dict[str, float | int] = {}
    for name, value in row.values.items():
        if not _known(name):
            if as_number(value) is not None and len(unused) < 1000 and not rows.has_step([name]):
                unused[name] = None
        elif (number := as_number(value)) is not None:
            numbers[name] = number
        elif value is not None:
            bad.append(BadRow(file, row.number, f"{name} is no number: {str(value)[:40]!r}"))
    if not numbers:
        return
    if step is None:
        bad.append(BadRow(file, row.number, "the row has no step, a whole number from 0 on"))
    elif step in steps or len(steps) < MOST_STEPS:
        steps.setdefault(step, {}).update(numbers)


def _translated(
    steps: Mapping[int, Mapping[str, float | int]],
    files: Sequence[str],
    container: Container,
    unused: tuple[str, ...],
    bad: tuple[BadRow, ...],
) -> MetricLog:
    """The log under our names."""
    table = metric_names()
    theirs = {name for values in steps.values() for name in values}
    telling = [name for name in theirs if name.removeprefix("train/") not in container.common]
    entries: dict[str, MetricName] = {}
    translated: list[Mapping[str, float | int]] = []
    unusable: list[BadRow] = []
    for step in sorted(steps):
        row = steps[step]
        of_step = table.entries(row)
        for ours, entry in list(of_step.items()):
            value, (low, high) = row[entry.theirs], _bounds(ours)
            # NaN and infinities are judged by the rules.
            if math.isfinite(value) and not low - ROUNDING <= value <= high + ROUNDING:
                why = f"{entry.theirs} = {value:.4g} at step {step}, and it lies between {low:g} and {high:g}"
                unusable.append(BadRow(files[0], 0, why))
                del of_step[ours]
        entries = of_step | entries
        ours = {name: value for name, value in row.items() if _is_ours(name)}
        translated.append({"step": step, **ours, **{name: row[entry.theirs] for name, entry in of_step.items()}})
    return MetricLog(
        framework=table.framework_of(telling) or PLAIN,
        container=container.what,
        files=tuple(files),
        rows=tuple(translated),
        names={ours: entry.theirs for ours, entry in entries.items()},
        notes={ours: entry.note for ours, entry in entries.items() if entry.note},
        unused=unused,
        bad=(*bad, *unusable),
    )


BOUNDS = (
    (r"/pearson$", -1.0, 1.0),
    (r"frac(_|$)", 0.0, 1.0),
    (r"/prob_diff_", 0.0, 1.0),
    (r"/(k2|k3|abs_log_ratio_\w+|length_\w+|grad_norm|std|entropy|turns_mean|ppl)$", 0.0, math.inf),
)
"""Between what a metric of this name lies, whatever is logged."""
ROUNDING = 1e-4


def _bounds(name: str) -> tuple[float, float]:
    """The smallest and largest value that a metric of ours can have."""
    return next(((low, high) for pattern, low, high in BOUNDS if re.search(pattern, name)), (-math.inf, math.inf))
