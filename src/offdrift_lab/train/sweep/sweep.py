"""Sweeps: a recipe's arms over a grid of settings and several seeds, run by run, and what their comparison says.

    offdrift sweep recipes/sweep.toml

A sweep's folder holds a run folder per arm, setting and seed, and what is made of them:

    sweep.json                          every run's number, every setting's mean and interval, versions and seeds
    sweep.html                          the same as a page, with curves; both are of what is there so far
    runs/ARM/SETTING/seed-N/            a run of one arm (`run_folder`)
    runs/ARM/SETTING/seed-N/error.json  why the run failed, if it did
    runs/ARM/SETTING/seed-N/nodes.json  the nodes of a Ray cluster that it was on, if it was on one

Where a run stands is read from its folder, so that the same command goes on after any interruption. `sweep_workers`
runs them, `sweep_results` compares them.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from offdrift.certificate.certify import LOGGED
from offdrift.errors import MethodError, RecipeError, RecordError
from offdrift.judge import Rules, load_rules
from offdrift.judge.rules_record import Chosen, choose_rules, stored_rules
from offdrift.methods.load import absolute, may_load, short_name, without_loading
from offdrift.records.atomic import remove_half_written, write_json
from offdrift.show.json_access import mapping, rows
from offdrift.show.numbers import duration
from offdrift.stats import METRICS
from offdrift.texts import read_json
from offdrift_lab.train.loop.run_folder import ArmFolder, check_code
from offdrift_lab.train.settings.places import base_recipe, found_beside, read_settings
from offdrift_lab.train.settings.recipe import Recipe, changed_settings, load_recipe, problems
from offdrift_lab.train.settings.sections import FOLDER, FolderName, Natural, Positive, Section

RESULTS = "sweep.json"
NODES = "nodes.json"
HELD_OUT = "held_out"
"""The metric that is the mean reward of held-out prompts."""


class CompareSettings(Section):
    """Metric that a sweep compares, and the confidence level of the comparison."""

    metric: str = HELD_OUT
    """"held_out", the mean reward of held-out prompts, or a metric of every update (docs/metrics.md)."""
    at: Positive | None = None
    """Update at which it is taken. Absent: the last."""
    smooth: Positive = 1
    """Mean over so many updates (evaluations, of held_out) up to then."""
    larger_is: Literal["better", "worse"] | None = None
    """Direction of a metric that has none by itself, such as response/length_mean."""
    confidence: Annotated[float, Field(ge=0.5, lt=1)] = 0.95
    """Of every interval, and of all verdicts together."""
    collapse_after: Positive | None = None
    """Updates for which the reward must stay `reward_lost` (30 %) below its best to count as collapsed. Absent:
    `collapse_recovery` (100) of the rules, or a quarter of a run that is shorter than four times that."""

    @model_validator(mode="after")
    def _directed(self) -> CompareSettings:
        row = METRICS.get(self.metric) or LOGGED.get(self.metric)
        if self.metric != HELD_OUT and row is None:
            raise ValueError(
                f'compare.metric = "{self.metric}" is no metric that every run logs; use "{HELD_OUT}", "reward/mean" '
                "or another of docs/metrics.md"
            )
        own = "better" if row is None else row.larger_is
        if own == "neither" and self.larger_is is None:
            raise ValueError(
                f'compare.metric = "{self.metric}" has no direction by itself; add compare.larger_is = "better" or '
                '"worse"'
            )
        if own != "neither" and self.larger_is not in (None, own):
            raise ValueError(
                f'compare.larger_is = "{self.larger_is}", but a larger {self.metric} is {own}; leave it out'
            )
        return self

    @property
    def direction(self) -> str:
        """Direction of the metric: "better" or "worse" if it is larger."""
        row = METRICS.get(self.metric) or LOGGED.get(self.metric)
        return self.larger_is or ("better" if row is None else row.larger_is)


ArmName = Annotated[str, Field(pattern=rf"{FOLDER}|^[^:]+:[A-Za-z][A-Za-z0-9_]*$")]
"""A folder's name, or that of a method in code."""
MOST_RUNS = 10_000
"""Runs of a sweep: each is checked before the first is made, and has a folder."""


class Sweep(Section):
    """A sweep file: what to run how often, and what to compare."""

    name: FolderName
    """Names the sweep's folder."""
    recipe: str
    """The recipe that all runs are made from: a file, or its name without .toml, in the working folder, beside the
    sweep file or in recipes/."""
    seeds: tuple[Natural, ...] = tuple(range(5))
    """Seeds of the runs: a list, or a number n for 0 to n - 1. Settings are compared seed by seed."""
    arms: tuple[ArmName, ...] | None = None
    """Arms of the recipe, methods of the table (`offdrift methods`), or methods of yours, "mine.py:mine", beside the
    sweep file or in the working folder; such an arm is called mine. Absent: every arm of the recipe."""
    baseline: ArmName | dict[str, Any] | None = None
    """What the others are compared with: an arm, or values, {"lag.sync_every" = 1}. Absent: the first arm, or, of a
    single arm, the first of all values."""
    fixed: dict[str, Any] = Field(default_factory=dict, alias="set")
    """Settings of the recipe that differ from the file's in every run."""
    values: dict[str, Any] = Field(default_factory=dict)
    """Settings of the recipe with the list of values that they take: every combination is run. Those of arms.NAME vary
    that arm alone."""
    compare: CompareSettings = CompareSettings()

    @field_validator("seeds", mode="before")
    @classmethod
    def _counted(cls, seeds: Any) -> Any:
        if isinstance(seeds, int) and not isinstance(seeds, bool):
            if seeds > MOST_RUNS:
                raise ValueError(f"seeds = {seeds}: more than the {MOST_RUNS:,} runs that a sweep may have")
            seeds = range(seeds)
        seeds = list(seeds) if isinstance(seeds, list | tuple | range) else seeds
        if isinstance(seeds, list) and (not seeds or len({*map(str, seeds)}) < len(seeds)):
            raise ValueError(f"seeds = {seeds}: give a number of at least 1, or a list of different seeds")
        return seeds

    @model_validator(mode="after")
    def _consistent(self) -> Sweep:
        fixed, values = dotted(self.fixed), dotted(self.values)
        for key in (*fixed, *values):
            if key in ("seed", "name", "method", "arms", "override") or key.startswith("override."):
                way_out = {"seed": "use seeds", "name": "the sweep's own name is `name`"}.get(
                    key, 'list methods as arms, arms = ["grpo", "gspo"], and change one by arms.NAME.override'
                )
                raise ValueError(f"{key} cannot be varied as a setting: {way_out}")
        if both := sorted(fixed.keys() & values.keys()):
            raise ValueError(f"{both[0]} stands in [set] and in [values]; leave one of the two out")
        for key, choices in values.items():
            if not isinstance(choices, list) or not choices:
                raise ValueError(f"values.{key} = {choices!r}: give the list of values that it takes")
            if len({*map(repr, choices)}) < len(choices):
                raise ValueError(f"values.{key} = {choices} has a value twice; leave one out")
        if (runs := len(self.seeds) * math.prod(map(len, values.values()))) > MOST_RUNS:
            raise ValueError(f"{runs:,} runs of each arm are more than the {MOST_RUNS:,} that a sweep may have")
        if self.arms is not None and (not self.arms or len({*map(short_name, self.arms)}) < len(self.arms)):
            raise ValueError(
                f"arms = {list(self.arms)}: give one at least, each once and under a name of its own, or leave arms "
                "out for all"
            )
        return self


def dotted(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Nested tables as dotted keys.

    Example:
        >>> dotted({"lag": {"sync_every": [1, 8]}, "optim.lr": [1e-4]})
        {'lag.sync_every': [1, 8], 'optim.lr': [0.0001]}
    """
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat |= {f"{key}.{k}": v for k, v in dotted(value).items()} if isinstance(value, dict) else {key: value}
    return flat


@dataclass(frozen=True)
class Setting:
    """An arm with the values that it is run with; its runs differ in their seeds alone."""

    arm: str
    values: tuple[tuple[str, Any], ...] = ()

    def __hash__(self) -> int:
        return hash((self.arm, repr(self.values)))  # a value may be a list, such as optim.betas

    @property
    def label(self) -> str:
        """The values in words, each under the last part of its name; empty without values."""
        return ", ".join(f"{key.rsplit('.', 1)[-1]}={worded(value)}" for key, value in self.values)

    @property
    def name(self) -> str:
        """Arm and values."""
        return f"{self.arm} ({self.label})" if self.values else self.arm

    @property
    def folder(self) -> str:
        """Folder of the setting's runs, below runs/; contains only letters, digits and `._=,+-`."""
        settings = ",".join(f"{key}={worded(value)}" for key, value in self.values)
        return f"{self.arm}/{re.sub(r'[^A-Za-z0-9._=,+-]', '_', settings) or 'recipe'}"


def worded(value: Any) -> str:
    """A setting's value as a sweep file has it: text bare, `true`, `[0, 0.95]`."""
    return value if isinstance(value, str) else json.dumps(value)


@dataclass(frozen=True)
class Cell:
    """One run of a sweep."""

    setting: Setting
    seed: int
    recipe: Recipe
    """With the setting's arm alone."""
    folder: Path

    @property
    def files(self) -> ArmFolder:
        """Stored files of the run's arm."""
        return ArmFolder(self.folder / "arms" / self.setting.arm)

    @property
    def start(self) -> str:
        """Key of the run's warm start: runs with equal keys share it; "" without one."""
        r = self.recipe
        return repr((r.warm_start.seed_in(r.seed), r.model, r.task, r.warm_start)) if r.warm_start.steps else ""

    @property
    def status(self) -> Literal["finished", "failed", "begun", "waiting"]:
        """Status of the run, from the files in its folder."""
        if self.files.summary() is not None:
            return "finished"
        if (self.folder / "error.json").exists():
            return "failed"
        return "begun" if (self.folder / "run.json").exists() else "waiting"

    @property
    def error(self) -> str:
        """Why it failed, in a line; empty if it did not."""
        return str(stored_json(self.folder / "error.json").get("error", "")) if self.status == "failed" else ""


def nodes_of(cell: Cell) -> list[dict[str, Any]]:
    """The nodes of a Ray cluster that a run was on, in order: name, host, address, id and since when."""
    return rows(stored_json(cell.folder / NODES).get("nodes"))


def stored_json(path: Path) -> dict[str, Any]:
    """A JSON object on disk; empty if it is not there, or not whole."""
    with suppress(OSError, ValueError):
        return mapping(read_json(path))
    return {}


@dataclass(frozen=True)
class Grid:
    """A checked sweep: every run of it, seeds outermost, so that what is finished can be compared at any time."""

    sweep: Sweep
    source: Path
    folder: Path
    cells: tuple[Cell, ...]
    changes: tuple[str, ...] = ()
    """"dotted.key=value" pairs of the command, which are not in the file."""
    started: Rules = field(default_factory=load_rules)
    """Rules that the sweep was started with: its record holds them."""
    rules: Chosen = field(default_factory=lambda: Chosen(load_rules(), ""))
    """Rules that its results are judged by."""

    @property
    def settings(self) -> list[Setting]:
        """Every arm with every combination of values, in order."""
        return list(dict.fromkeys(cell.setting for cell in self.cells))

    def baseline_of(self, setting: Setting) -> Setting | None:
        """The setting that this one is compared with; None for a baseline itself."""
        chosen, every = self.sweep.baseline, self.settings
        chosen = short_name(chosen) if isinstance(chosen, str) else chosen
        if chosen is None and len({s.arm for s in every}) > 1:
            chosen = every[0].arm
        if isinstance(chosen, str):
            wanted = dict(setting.values)
            candidates = [s for s in every if s.arm == chosen]
            # Values of arms.NAME vary that arm alone: what both have must be equal.
            matches = [s for s in candidates if all(wanted.get(key, value) == value for key, value in s.values)]
            return None if setting.arm == chosen or not matches else matches[0]
        replaced = dotted(chosen) if chosen is not None else dict(every[0].values)
        values = tuple((key, replaced.get(key, value)) for key, value in setting.values)
        return None if values == setting.values else Setting(setting.arm, values)


def load_sweep(
    path: Path, folder: Path | None = None, *, changes: Sequence[str] = (), rules: Path | None = None
) -> Grid:
    """Read a sweep file and check every run of it.

    Args:
        folder: of the sweep; absent: runs/NAME.
        changes: "dotted.key=value" pairs for the recipe of every run, as `[set]`.
        rules: a rules file to judge the runs by, not by those that the sweep was started with, or the recipe names.

    Raises: `RecipeError` naming file, key and what was expected, for a run too.
    """
    content = read_settings(path, "sweep")
    try:
        sweep = Sweep.model_validate(content)
    except ValidationError as e:
        raise RecipeError(f"{path}: {problems(e, Sweep, 'a sweep')}") from e
    recipe, places = base_recipe(sweep.recipe, path)
    if recipe is None:
        looked = ", ".join(map(str, places))
        raise RecipeError(f'{path}: recipe = "{sweep.recipe}" is not there; looked for {looked}')
    folder = folder or Path("runs") / sweep.name
    # Files of problems and rewards may also stand beside the sweep file.
    settings = {
        key: found_beside(path, value, recipe) if key in FILES and isinstance(value, str) else value
        for key, value in dotted(sweep.fixed).items()
    }
    fixed = [*_changes(settings.items()), *changes]
    fixed += [] if rules is None else _changes([("diagnosis.rules", str(rules.absolute()))])
    for run in (folder / "runs").glob("*/*/seed-*") if may_load() else ():
        check_code(stored_json(run / "run.json"), run)
    methods = _methods(sweep.arms, path) or dict.fromkeys(load_recipe(recipe, changes=fixed).arms)
    arms, cells = tuple(methods), []
    for seed, setting in itertools.product(sweep.seeds, list(_settings(arms, dotted(sweep.values)))):
        of_run = [*fixed, *_changes(setting.values), f"seed={seed}"]
        run = folder / "runs" / setting.folder / f"seed-{seed}"
        stored = mapping(stored_json(run / "run.json").get("recipe"))
        try:
            made = load_recipe(recipe, changes=of_run, arm=methods[setting.arm] or setting.arm, stored=stored or None)
        except RecipeError as e:
            raise RecipeError(f"{path}: the run {setting.name}, seed {seed}: {e}") from e
        cells.append(Cell(setting, seed, made, run))
    started, chosen = _rules(folder, cells[0].recipe.diagnosis.rules, rules)
    grid = Grid(sweep, path, folder, tuple(cells), changes=tuple(changes), started=started, rules=chosen)
    _check_grid(grid, arms)
    return grid


FILES = ("task", "reward", "diagnosis.rules")
"""Settings of a recipe that may name a file, which may stand beside the sweep file."""


def _rules(folder: Path, of_recipe: str | None, given: Path | None) -> tuple[Rules, Chosen]:
    """The rules that a sweep was started with, and those to judge it by.

    Raises: `RecipeError` for a rules file that is wrong, or a stored one that is damaged.
    """
    document, where = stored_json(folder / RESULTS), str(folder / RESULTS)
    if "rules" in document:
        chosen = choose_rules(given, document, where, record="the sweep")
        return stored_rules(document, where) or chosen.rules, chosen
    started = load_rules(of_recipe if given is None else given)
    return started, choose_rules(given, started.as_record(), where, record="the sweep")


def _methods(arms: Sequence[str] | None, path: Path) -> dict[str, str]:
    """Methods by the names of their arms: code under its absolute name, anything else under its own.

    Raises: `RecipeError` for a file that is neither beside the sweep file nor in the working folder.
    """
    try:
        return {short_name(arm): absolute(arm, path.parent, Path.cwd()) for arm in arms or ()}
    except MethodError as e:
        raise RecipeError(f"{path}: {e}") from e


def stored_sweep(folder: Path, rules: Path | None = None) -> Grid:
    """The sweep of a folder, from the file that its `sweep.json` names, with the runs that are there by now.

    Raises: `RecipeError` if that file is gone, or no longer that of the runs.
    """
    stored = stored_json(folder / RESULTS)
    if "source" not in stored:
        raise RecipeError(
            f"{folder / RESULTS} does not name its sweep file, as those of version 0.1 do not; use "
            f"`offdrift sweep FILE --report --out {folder}`"
        )
    path = Path(os.path.relpath(folder / str(stored["source"])))
    if not path.is_file():
        raise RecipeError(
            f"{folder} was made from {path}, which is gone; use `offdrift sweep FILE --report --out {folder}`"
        )
    with without_loading():  # a record names the file
        return load_sweep(path, folder, changes=stored["changes"], rules=rules)


def _changes(settings: Any) -> list[str]:
    """Settings as `load_recipe` takes them."""
    return [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in settings]


def _settings(arms: Sequence[str], values: Mapping[str, list[Any]]) -> Iterator[Setting]:
    """Every arm with every combination of the values that concern it."""
    for arm in arms:
        own = {k: v for k, v in values.items() if not k.startswith("arms.") or k.startswith(f"arms.{arm}.")}
        for combination in itertools.product(*own.values()):
            yield Setting(arm, tuple(zip(own, combination, strict=True)))


def not_compared(cell: Cell, compare: CompareSettings) -> Iterator[str]:
    """Reasons why a run cannot be compared as a sweep asks."""
    updates, name = cell.recipe.updates, cell.setting.name
    at = compare.at or updates
    # Updates at which the run has the metric, and what these are called.
    points: Sequence[int] = range(1, updates + 1)
    one, several = "an update", "updates"
    if compare.metric == HELD_OUT:
        a_batch = updates // cell.recipe.batches
        points = sorted({*range(0, updates, cell.recipe.log.eval_every * a_batch), updates})
        one, several = "an evaluation", "evaluations"
    if at not in points:
        first = f"{', '.join(map(str, points[:8]))}{', ...' if len(points) > 8 else ''}"
        yield f"compare.at = {at} is not the update of {one} of {name}, which has {first} of {updates}"
    if compare.smooth > (count := sum(point <= at for point in points)):
        yield f"compare.smooth = {compare.smooth} is more than the {count} {several} of {name} up to {at}"
    if (compare.collapse_after or 0) >= updates:
        yield (
            f"compare.collapse_after = {compare.collapse_after} would never be over in the {updates} updates of "
            f"{name}; lower it, or leave it out"
        )


def _check_grid(grid: Grid, arms: Sequence[str]) -> None:
    """Refuse a baseline, a metric or an update that some run does not have, and folders of other runs."""
    sweep, path, compare = grid.sweep, grid.source, grid.sweep.compare
    values = dotted(sweep.values)
    for key in values:
        if key.startswith("arms.") and key.split(".")[1] not in arms:
            raise RecipeError(f"{path}: values.{key} is of an arm that is not run; the arms are {', '.join(arms)}")
    if isinstance(sweep.baseline, str) and short_name(sweep.baseline) not in arms:
        raise RecipeError(f'{path}: baseline = "{sweep.baseline}" is none of the arms, {", ".join(arms)}')
    if isinstance(sweep.baseline, dict):
        for key, value in dotted(sweep.baseline).items():
            if value not in values.get(key, ()):
                raise RecipeError(f"{path}: baseline.{key} = {value!r} is none of values.{key} = {values.get(key)}")
    if len({s.folder for s in grid.settings}) < len(grid.settings):
        raise RecipeError(f"{path}: two settings would have the same folder; give values that differ in their letters")
    for cell in grid.cells[: len(grid.settings)]:  # seeds change none of this
        for problem in not_compared(cell, compare):
            raise RecipeError(f"{path}: {problem}")
    for cell in grid.cells:
        stored = mapping(stored_json(cell.folder / "run.json").get("recipe"))
        if stored and (changed := changed_settings(cell.recipe, stored)):
            raise RecipeError(
                f"{cell.folder} is of another recipe ({', '.join(changed)} differ): delete it, choose another --out, "
                "or restore the sweep file"
            )


# -- running -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Progress:
    """Progress of one run, for a display."""

    cell: Cell
    update: int = 0
    text: str = ""
    done: bool = False
    """Whether it has ended, finished or failed."""


Report = Callable[[Progress], None]


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep a sweep's folder to this process. Raises: `RecordError` while another one runs there."""
    import fcntl  # Unix alone has it

    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / ".lock", "w")  # noqa: SIM115
    except OSError as e:
        raise RecordError(f"cannot write {folder}: {e.strerror or e}; choose another --out") from e
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RecordError(f"another sweep is running in {folder}; wait for it, or choose another --out") from None
        remove_half_written(folder)
        yield


def run_cell(cell: Cell, watch: Callable[[int, str], None]) -> None:
    """Run or continue one run; what stops it is stored beside it. Raises: `RecordError` if nothing can be stored."""
    from offdrift_lab.train.loop.loop import train  # loads transformers

    failure = cell.folder / "error.json"
    failure.unlink(missing_ok=True)
    resume = (cell.folder / "run.json").exists()
    try:
        train(
            cell.recipe,
            cell.folder,
            resume=resume,
            # A warm start counts steps of its own.
            watch=lambda event: watch(0 if event.kind == "warm_start" else event.step, event.text),
        )
    except RecordError:
        raise
    except Exception as e:  # whatever a run dies of is one run's
        write_json(failure, {"error": f"{type(e).__name__}: {e}", "traceback": traceback.format_exc()})


@dataclass
class Pace:
    """Estimate of the time left in a sweep: remaining updates at the rate of the runs that have ended here."""

    grid: Grid
    jobs: int = 1
    begun: dict[Path, tuple[float, int]] = field(default_factory=dict)
    """When a run began here, seconds, and after which update."""
    now: dict[Path, int] = field(default_factory=dict)
    """The update that a run is at."""
    running: set[Path] = field(default_factory=set)
    rates: list[float] = field(default_factory=list)
    """Seconds per update of each run that ended here, its setup included."""

    def __post_init__(self) -> None:
        self.now = {c.folder: c.recipe.updates if c.status == "finished" else 0 for c in self.grid.cells}

    def follow(self, progress: Progress) -> None:
        """Take note of what a run does."""
        cell, clock = progress.cell, time.monotonic()
        self.running.add(cell.folder)
        self.jobs = max(self.jobs, len(self.running))  # a cluster takes as many as there is room for
        start, first = self.begun.setdefault(cell.folder, (clock, 0))
        if progress.update and not first:  # where it goes on from
            self.begun[cell.folder] = start, progress.update - 1
        if not progress.done:
            self.now[cell.folder] = max(self.now[cell.folder], progress.update)
            return
        self.running.discard(cell.folder)
        if cell.status == "finished":
            self.rates.append((clock - start) / max(1, cell.recipe.updates - first))
        self.now[cell.folder] = cell.recipe.updates

    @property
    def updates(self) -> tuple[int, int]:
        """Updates that are over, of all runs together."""
        return sum(self.now.values()), sum(cell.recipe.updates for cell in self.grid.cells)

    @property
    def left(self) -> str:
        """The time that is left, in words: between that of the fastest and that of the slowest run so far."""
        over, whole = self.updates
        if over == whole:
            return "nothing left"
        if not self.rates:
            return "time left is known after the first run"
        of_all = [(whole - over) * rate / self.jobs for rate in (min(self.rates), max(self.rates))]
        low, high = map(duration, of_all)
        return f"about {low} left" if low == high else f"{low} to {high} left"
