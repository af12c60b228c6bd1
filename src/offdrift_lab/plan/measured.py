"""Phase times that a run or an audit has measured, and what TOML files or single values say on top of them.

A run of `offdrift train` gives what its arm has recorded: lengths, seconds of generation, training and loading, and
the recipe's numbers; an audit gives the lengths, the workers and the drift by lag. What no source says is as in the
example of `phases`, and is listed as assumed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from offdrift.errors import RecipeError, RecordError
from offdrift.records import store
from offdrift.records.rollouts import Rollouts, concatenate
from offdrift.show.json_access import at, mapping, number, read_lines, rows
from offdrift.texts import parse_toml, read_json
from offdrift_lab.plan.phases import EXAMPLE, UNREAD, Phases, phases_of, read_toml
from offdrift_lab.schedules import override, schedule

SKIPPED = 4
"""First batches of an arm that are left out: queues fill, and memory is touched for the first time."""
LENGTHS = 512
"""Most lengths of a histogram; more are put together, equally many responses in each."""
SURE = 2.0
"""Standard errors by which a rate has to be above 0; else it cannot be told from the others."""


class Origin(NamedTuple):
    """Origin of a phase time."""

    source: str
    how: str = ""
    """How it was come by, where the source alone does not say it."""


@dataclass(frozen=True)
class Inputs:
    """Phases of a plan, and where each of them comes from."""

    phases: Phases
    origins: dict[str, Origin]
    """By field, such as `rollout.t1`; what no source says is absent."""
    drift: Path | None
    """The last source that may hold drift by lag."""

    def facts(self) -> dict[str, Any]:
        """`origins` and `assumed` as the document of a plan has them."""
        return {"origins": {name: origin._asdict() for name, origin in self.origins.items()}, "assumed": self.assumed}

    @property
    def assumed(self) -> dict[str, Any]:
        """Fields that the simulation reads and no source says, with the example's values."""
        unread = {f"lengths.{key}" for key in UNREAD[self.phases.lengths.kind]} | {"lengths.kind"}
        if not self.phases.rollout.crashes_per_hour:
            unread.add("rollout.restart")
        if self.phases.rollout.tokens_per_pass == 1:  # no drafter: measured seconds are per pass as they are
            unread.add("rollout.tokens_per_pass")
        values = {
            f"{part}.{key}": value
            for part, fields in self.phases.model_dump().items()
            if part not in ("name", "run")
            for key, value in fields.items()
            if value
        }
        return {key: value for key, value in values.items() if key not in self.origins.keys() | unread}


@dataclass(frozen=True)
class MeasuredSource:
    """Measurements of one source."""

    values: dict[str, Any]
    """By part and key, as in a TOML."""
    name: str
    how: Mapping[str, str] = field(default_factory=dict)
    """By field: how it was come by."""
    drift: Path | None = None


def gather(paths: Sequence[Path], changes: Sequence[str] = ()) -> Inputs:
    """The phases that several sources say together, later ones before earlier ones.

    Args:
        paths: TOML files, runs or arms of runs, audits.
        changes: "part.key=value" pairs on top of them all.

    Raises: `RecipeError` naming source, key and what was expected; `RecordError` if a run or an audit cannot be read.
    """
    sources = [read_source(path) for path in paths]
    if changes:
        sources.append(MeasuredSource(_changed(changes), "--set"))
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    for source in sources:
        for part, stated in source.values.items():
            if not isinstance(stated, dict):
                values[part] = stated
                continue
            part_values, how = values.setdefault(part, {}), dict(source.how)
            for key in _superseded(part, part_values, stated):
                part_values.pop(key, None)
                origins.pop(f"{part}.{key}", None)
            if part == "trainer" and part_values.get("group") and "devices" in stated and "group" not in stated:
                before, after = (phases_of({part: x}, where=source.name) for x in (part_values, part_values | stated))
                factor = (before.trainer.devices / after.trainer.devices) ** after.trainer.scaling
                stated = {"group": factor * before.trainer.group, **stated}
                how["trainer.group"] = f"scaled from {before.trainer.devices} to {after.trainer.devices} devices"
            part_values |= stated
            for name in (f"{part}.{key}" for key in stated):
                origins.pop(name, None)  # so that sources stand in their order
                origins[name] = Origin(source.name, how.get(name, ""))
    values.setdefault("name", EXAMPLE.name)
    phases = phases_of(values, where=" + ".join(source.name for source in sources))
    return Inputs(phases, origins, next((s.drift for s in reversed(sources) if s.drift is not None), None))


def _superseded(part: str, own: Mapping[str, Any], stated: Mapping[str, Any]) -> set[str]:
    """Keys that mean nothing any more with what a later source says: of another distribution of lengths, or the share
    of another t0."""
    if part == "rollout" and "t0" in stated:
        return {"overhead"} - stated.keys()
    if part != "lengths":
        return set()
    kind = str(stated.get("kind", own.get("kind", "lognormal")))
    if "kind" not in stated and kind == "histogram" and {"mean", "sigma", "cap"} & stated.keys():
        return {"kind", *UNREAD["lognormal"]}
    return set(UNREAD.get(kind, ())) - stated.keys()


def read_source(path: Path) -> MeasuredSource:
    """Read a TOML file, a run, an arm of a run, or an audit."""
    if (path / "run.json").is_file() or (path / "metrics.jsonl").is_file():
        return read_arm(path)
    file = path / "audit.json" if path.is_dir() else path
    if file.suffix == ".json" and (file.is_file() or not path.is_dir()):
        return read_audit(file)
    if path.is_dir():
        raise RecordError(
            f"{path} holds no run.json, no metrics.jsonl and no audit.json; give a run's folder, an arm's folder, an "
            "audit's folder, or a TOML file with phase times"
        )
    return MeasuredSource({"name": path.stem, **read_toml(path)}, str(path))


def _changed(changes: Iterable[str]) -> dict[str, Any]:
    """Values by part and key from "part.key=value" pairs; values are TOML, or bare words taken as text."""
    values: dict[str, Any] = {}
    for change in changes:
        name, equals, text = change.partition("=")
        part, _, key = name.strip().partition(".")
        if not (equals and part) or (not key and part != "name"):
            raise RecipeError(f"--set {change!r}: expected part.key=value, for instance trainer.group=1.5")
        try:
            value = parse_toml(f"x = {text.strip()}")["x"]
        except ValueError:  # a bare word
            value = text.strip()
        if key:
            values.setdefault(part, {})[key] = value
        else:
            values[part] = value
    return values


# -- runs ------------------------------------------------------------------------------------------


class Spent(NamedTuple):
    """Seconds of one batch of a run."""

    batch: int
    span: float
    """From the batch before it to its own end."""
    waited: float
    """In which the trainer had nothing to train on: it waited for groups, or drew them itself."""
    published: float
    """In which the trainer gave its own engine new weights; 0 with workers, whose loads are `loaded`."""
    drawn: float
    """In which engines drew, summed over workers."""
    loaded: float
    """In which workers loaded weights, summed over workers."""


Values = dict[str, dict[str, Any]]
Words = dict[str, str]
RATES = ("rollout.t0", "rollout.t1", "rollout.prefill")


def _count(section: Mapping[str, Any], name: str) -> int:
    """Return a whole number of a recipe, 1 where it says none."""
    return int(number(section.get(name)) or 1)


@dataclass(frozen=True)
class ArmRecord:
    """Recipe and files of an arm; each method gives phases by part and key, and by field how they were come by."""

    folder: Path
    recipe: Mapping[str, Any]

    @property
    def pipeline(self) -> Mapping[str, Any]:
        return mapping(self.recipe.get("pipeline"))

    @property
    def workers(self) -> int:
        return _count(self.pipeline, "workers")

    @property
    def groups(self) -> int:
        """Groups of an update."""
        rollout, optim = (mapping(self.recipe.get(name)) for name in ("rollout", "optim"))
        return _count(rollout, "prompts") * _count(optim, "accumulate")

    @cached_property
    def spent(self) -> list[Spent]:
        return seconds_of(self.folder, self.workers)

    @cached_property
    def rollouts(self) -> dict[int, Rollouts]:
        """Responses by batch, of all batches that the folder still has."""
        return _drawn(self.folder)

    @property
    def batches(self) -> list[tuple[Spent, Rollouts]]:
        """Batches of which both seconds and responses are there."""
        return [(s, self.rollouts[s.batch]) for s in self.spent if s.batch in self.rollouts]

    def settings(self) -> tuple[Values, Words]:
        """Numbers of the recipe."""
        samples = _count(mapping(self.recipe.get("rollout")), "samples")
        batch: dict[str, Any] = {"groups": self.groups, "samples": samples}
        rollout = {"workers": self.workers, "devices": 1}
        if self.pipeline:
            rollout |= {name: _count(self.pipeline, name) for name in ("slots", "steps")}
            if self.pipeline.get("store"):
                batch["store"] = self.pipeline["store"]
        return {"batch": batch, "rollout": rollout, "trainer": {"devices": 1}}, {}

    def lengths(self) -> tuple[Values, Words]:
        """Lengths, and responses to a prompt as they were trained on."""
        every = [rollouts for _, rollouts in self.batches] or list(self.rollouts.values())
        if not every:
            return {}, {}
        samples = max(1, round(sum(r.num_sequences for r in every) / len(every) / self.groups))
        return {"lengths": lengths_of(every), "batch": {"samples": samples}}, {}

    def training(self) -> tuple[Values, Words]:
        """Seconds of training and of loading weights."""
        if not self.spent:
            return {}, {}
        train = float(np.mean([s.span - s.waited - s.published for s in self.spent]))
        loads = float(np.mean([s.loaded / self.workers + s.published for s in self.spent]))
        values = {
            "trainer": {"group": max(0.0, train) / self.groups, "update": 0.0},
            "sync": {"push": loads, "load": loads},
            "colocated": {"switch": loads},
        }
        return values, {
            "trainer.group": f"all of the {train:.4g} s that it trains per update",
            "trainer.update": "counted in trainer.group",
            "sync.push": "loading alone",
            "colocated.switch": "as long as loading",
        }

    def generation(self) -> tuple[Values, Words]:
        """Rates of the engine, from responses that began together, or else from all of its seconds."""
        together = [
            (s, begun)
            for s, rollouts in self.batches
            if (begun := _begun_together(self.folder, self.recipe, rollouts, s)) is not None
        ]
        if together:
            return self._fitted_rates(together)
        # Responses begin at any time here, so that who ran beside whom is not in the record.
        seconds = sum(s.drawn for s in self.spent)
        if not (self.batches and seconds):
            return {}, {}
        tokens = sum(int(r.lengths.sum()) for _, r in self.batches)
        rates = {"t0": 0.0, "t1": sum(s.drawn for s, _ in self.batches) / tokens, "prefill": 0.0}
        words = "engine seconds per token, all of it counted per response: true at this run's number of responses"
        return {"rollout": rates}, dict.fromkeys(RATES, words)

    def _fitted_rates(self, together: Sequence[tuple[Spent, list[Draws]]]) -> tuple[Values, Words]:
        """Rates of an engine whose responses began together; with a pipeline, seconds between its calls as well."""
        values: Values = {"rollout": {}}
        how: Words = {}
        steps, call = _count(self.pipeline, "steps"), 0.0
        if self.pipeline:
            ends = [[float(d.seconds.max()) for d in draws] for _, draws in together]
            calls = sum(-(-int(d.lengths.max()) // steps) for _, draws in together for d in draws)
            call = max(0.0, sum(map(sum, ends)) - sum(s.drawn for s, _ in self.batches)) / calls
            values["rollout"]["overhead"] = call / steps
            how["rollout.overhead"] = f"{call:.3g} s between two calls of {steps} steps"
            waits = [s.waited - max(of_workers) for (s, _), of_workers in zip(together, ends, strict=True)]
            values["sync"] = {"push": max(0.0, float(np.mean(waits)))}
            how["sync.push"] = "what the trainer waits beyond the slowest response"
        rates = fit_rates([d for _, draws in together for d in draws], steps=steps, call=call)
        values["rollout"] |= {"t0": rates.t0, "t1": rates.t1, "prefill": rates.prefill}
        return values, how | dict.fromkeys(RATES, rates.words)


def read_arm(path: Path) -> MeasuredSource:
    """Read what an arm measured; of a run with several, the one that draws and trains in turn, or the first."""
    folder = path if (path / "metrics.jsonl").is_file() else _arm_of(path)
    try:
        recipe = mapping(mapping(read_json(folder.parents[1] / "run.json")).get("recipe"))
    except (OSError, ValueError, IndexError, AttributeError) as e:
        raise RecordError(f"{folder} belongs to no run: there is no readable run.json two folders above it") from e
    arm = ArmRecord(folder, recipe)
    values: dict[str, Any] = {"name": f"{recipe.get('name') or path.name}, as measured in arm {folder.name}"}
    how: Words = {}
    for stated, words in (arm.settings(), arm.lengths(), arm.training(), arm.generation()):
        for part, fields in stated.items():
            values.setdefault(part, {}).update(fields)
        how |= words
    name = f"{folder}, {len(arm.spent)} batches" if arm.spent else str(folder)
    return MeasuredSource(values, name, how, folder)


def _arm_of(path: Path) -> Path:
    """The arm of a run that is read: one that draws and trains in turn, where phases do not overlap, or the first."""
    folders = sorted(file.parent for file in path.glob("arms/*/metrics.jsonl"))
    if not folders:
        raise RecordError(f"{path} holds no arm with metrics yet; give a run that has trained a few batches")
    try:
        recipe = mapping(mapping(read_json(path / "run.json")).get("recipe"))
    except (OSError, ValueError) as e:
        raise RecordError(f"{path} is no run: its run.json cannot be read ({e})") from e
    return min(folders, key=lambda f: (not _in_turn(recipe, f.name), f.name))


def _in_turn(recipe: Mapping[str, Any], arm: str) -> bool:
    """Whether an arm trains on whole batches, and draws none while it trains."""
    pipeline, arm_settings = mapping(recipe.get("pipeline")), mapping(at(recipe, "arms", arm))
    if not pipeline:
        return True
    row = schedule(str(arm_settings.get("schedule") or pipeline.get("schedule")))
    for rules in (pipeline.get("rules"), arm_settings.get("rules")):
        row = override(row, mapping(rules))
    return row.max_lag == 0 and row.consumption.take == "batch" and row.dispatch.slice_tokens is None


def seconds_of(folder: Path, workers: int) -> list[Spent]:
    """Seconds of every batch of an arm, without the first ones and those that follow an evaluation or a checkpoint."""
    table, _ = read_lines(folder / "metrics.jsonl")
    evaluated = {row.get("update") for row in read_lines(folder / "eval.jsonl")[0]}
    spent, span = [], 0.0
    for row in table:
        span += number(row.get("throughput/seconds")) or 0.0
        waited, published = (number(row.get(f"throughput/{name}_seconds")) for name in ("draw", "publish"))
        draw_seconds, loaded = waited, 0.0
        idle, worker_idle = (number(row.get(f"pipeline/{name}_idle")) for name in ("trainer", "worker"))
        if idle is not None and worker_idle is not None:
            loaded = number(row.get("pipeline/sync_seconds")) or 0.0
            rewarded = number(row.get("pipeline/reward_seconds")) or 0.0
            waited, published = idle * span, 0.0
            draw_seconds = max(0.0, (1 - worker_idle) * span * workers - loaded - rewarded)
        if waited is not None and row.get("update", 0) - 1 not in evaluated:
            spent.append(
                Spent(
                    int(row["batch"]),
                    span,
                    waited,
                    published=published or 0.0,
                    drawn=draw_seconds or 0.0,
                    loaded=loaded,
                )
            )
        if waited is not None:
            span = 0.0
    return [s for s in spent if s.batch >= SKIPPED] or spent


def _drawn(folder: Path) -> dict[int, Rollouts]:
    """The responses that the folder still has, by batch."""
    batches: dict[int, list[Rollouts]] = {}
    for file in sorted((folder / "rollouts").glob("batch-[0-9][0-9][0-9][0-9][0-9][0-9]*.parquet")):  # one per process
        batches.setdefault(int(file.name.removeprefix("batch-")[:6]), []).append(store.read(file))
    return {index: concatenate(parts) for index, parts in batches.items()}


def lengths_of(batches: Sequence[Rollouts]) -> dict[str, Any]:
    """`[lengths]` of recorded responses: how often each length occurs, and the correlation within groups."""
    lengths = [rollouts.lengths.numpy() for rollouts in batches]
    every = np.sort(np.concatenate(lengths))
    values, counts = np.unique(every, return_counts=True)
    if len(values) > LENGTHS:
        parts = np.array_split(every, LENGTHS)
        merged: Counter[int] = Counter()
        for part in parts:
            merged[max(1, round(float(part.mean())))] += len(part)
        values, counts = np.array(sorted(merged)), np.array([merged[v] for v in sorted(merged)])
    prompts = sum(len(rollouts.prompt_tokens) for rollouts in batches) / len(every)
    return {
        "kind": "histogram",
        "values": [max(1, int(v)) for v in values],
        "weights": [int(n) for n in counts],
        "correlation": round(correlation_of(lengths, [rollouts.group_ids.numpy() for rollouts in batches]), 4),
        "prompt": round(prompts),
    }


def correlation_of(lengths: Sequence[Int[np.ndarray, " b"]], groups: Sequence[Int[np.ndarray, " b"]]) -> float:
    """Intraclass correlation of the lengths' normal scores: the share of their variance that is between groups.

    One-way analysis of variance, negative estimates being 0.
    """
    from statistics import NormalDist

    every = np.concatenate(lengths)
    names = np.concatenate([g + i * (1 + max(map(int, g))) for i, g in enumerate(groups)])
    _, rank, count = np.unique(every, return_inverse=True, return_counts=True)
    middle = (count.cumsum() - count / 2) / len(every)  # ties stand at the middle of their ranks
    scores = np.array([NormalDist().inv_cdf(p) for p in middle])[rank]
    _, group, sizes = np.unique(names, return_inverse=True, return_counts=True)
    if len(sizes) < 2 or len(sizes) == len(every) or not scores.std():
        return 0.0
    means = np.bincount(group, scores) / sizes
    between = float((sizes * (means - scores.mean()) ** 2).sum() / (len(sizes) - 1))
    within = float(((scores - means[group]) ** 2).sum() / (len(every) - len(sizes)))
    size = (len(every) - (sizes**2).sum() / len(every)) / (len(sizes) - 1)
    return min(1.0, max(0.0, (between - within) / (between + (size - 1) * within)))


# -- rates of an engine ----------------------------------------------------------------------------


class Draws(NamedTuple):
    """Responses that one worker began together and nobody joined."""

    lengths: Int[np.ndarray, " b"]
    seconds: Float[np.ndarray, " k"]
    """From their beginning to the end of each; or of the last one alone."""
    prompt: int
    """Tokens of their prompts."""


class Rates(NamedTuple):
    """Seconds as in `[rollout]`, and how sure they are."""

    t0: float
    t1: float
    prefill: float
    words: str


def _begun_together(folder: Path, recipe: Mapping[str, Any], rollouts: Rollouts, s: Spent) -> list[Draws] | None:
    """The responses of a batch by worker, if all of a worker's ran side by side from the beginning."""
    pipeline = mapping(recipe.get("pipeline"))
    lengths, prompts = rollouts.lengths.numpy(), rollouts.prompt_cu_seqlens.diff().numpy()
    if not _in_turn(recipe, folder.name):
        return None
    if not pipeline:
        return [Draws(lengths, np.array([s.drawn]), int(prompts.sum()))]
    if rollouts.workers is None or rollouts.generation_seconds is None:
        return None
    names, seconds = np.array(rollouts.workers), rollouts.generation_seconds.double().numpy()
    draws = [
        Draws(lengths[of_name], seconds[of_name], int(prompts[of_name].sum()))
        for of_name in (names == n for n in np.unique(names))
    ]
    slots = number(pipeline.get("slots")) or 0
    return draws if all(len(d.lengths) <= slots for d in draws) else None


def fit_rates(batches: Sequence[Draws], *, steps: int = 1, call: float = 0.0) -> Rates:
    """Seconds of a step and of a prefill, from when responses ended that began together.

        end of response i = prefill P + sum over its tokens j of (t0 + t1 c_j),   c_j = responses with j tokens or more
                          = prefill P + t0 n_i + t1 sum_k min(n_k, n_i)

    n_i is its length, rounded up to whole calls of `steps` tokens, since ends are seen between calls alone; P are the
    prompts' tokens. Least squares with rates that are not negative. A rate that is not two standard errors (of
    batches, whose responses share their noise) above 0 cannot be told from the others, and is 0: where all responses
    are about as long, nothing but their sum is known.

    Args:
        batches: responses that began together on a worker.
        call: seconds between two calls, known beforehand; `call / steps` of them are part of the t0 that is returned.

    Example:
        >>> lengths = np.array([10, 20, 40])
        >>> ends = 0.5 + 0.01 * lengths + 0.002 * np.array([30, 50, 70])
        >>> draws = Draws(lengths, ends, 1000)
        >>> other = Draws(lengths, ends + 0.5, 2000)
        >>> [round(rate, 6) for rate in fit_rates([draws, other])[:3]]
        [0.01, 0.002, 0.0005]
    """
    design, seconds, batch = [], [], []
    for i, draws in enumerate(batches):
        ends = np.minimum(-(-draws.lengths // steps) * steps, draws.lengths.max())
        if len(draws.seconds) < len(draws.lengths):
            ends = ends.max(keepdims=True)
        running = np.minimum(draws.lengths[None], ends[:, None]).sum(1)
        design.append(np.stack([ends, running, np.full(len(ends), draws.prompt)], 1))
        seconds.append(draws.seconds - call * -(-ends // steps))
        batch.append(np.full(len(ends), i))
    x, y, of = np.concatenate(design).astype(float), np.concatenate(seconds), np.concatenate(batch)
    fits: list[tuple[float, dict[int, float]]] = []
    for chosen in ((0, 1, 2), (0, 1), (1, 2), (0, 2), (1,), (0,)):
        columns = x[:, chosen]
        scale = np.linalg.norm(columns, axis=0).clip(1e-300)
        unit = columns / scale
        inverse = np.linalg.pinv(unit.T @ unit, rcond=1e-12)
        values = inverse @ unit.T @ y
        residual = y - unit @ values
        by_batch = np.stack([np.bincount(of, c * residual) for c in unit.T], 1)
        errors = np.sqrt(np.diag(inverse @ by_batch.T @ by_batch @ inverse).clip(0))
        sure = np.linalg.cond(unit) < 1e6 and bool((values > np.maximum(SURE * errors, 1e-9)).all())
        if sure or chosen == (1,):
            fits.append((float(residual @ residual), dict(zip(chosen, (values / scale).tolist(), strict=True))))
    least = min(loss for loss, _ in fits) + 1e-12 * float(y @ y)
    loss, rates = next((loss, rates) for loss, rates in fits if loss <= 1.05 * least)
    words = f"fitted to ends of responses within {(loss / len(y)) ** 0.5 / y.mean():.1%}"
    if lacking := [name for i, name in enumerate(("t0", "t1", "prefill")) if i not in rates]:
        words += f"; {' and '.join(lacking)} not to be told from the rest, as responses are about as long"
    t0, t1, prefill = (rates.get(i, 0.0) for i in range(3))
    return Rates(t0 + call / steps, t1, prefill, words)


# -- audits ----------------------------------------------------------------------------------------


def read_audit(file: Path) -> MeasuredSource:
    """Read an audit: lengths by bucket, workers, and drift by lag where versions were logged."""
    try:
        audit = mapping(read_json(file))
    except (OSError, ValueError) as e:
        raise RecordError(f"cannot read {file}: {e}; give an audit.json, or the folder that holds it") from e
    if audit.get("kind") != "audit":
        raise RecordError(f"{file} is no audit; give what `offdrift audit` wrote, a run's folder, or a TOML file")
    buckets = [row for row in rows(at(audit, "facets", "length")) if number(row.get("sequences"))]
    values: dict[str, Any] = {"name": file.parent.name or file.stem}
    if buckets:
        values["lengths"] = {
            "kind": "histogram",
            "values": [max(1, round(row["tokens"] / row["sequences"])) for row in buckets],
            "weights": [row["sequences"] for row in buckets],
        }
    workers = [row for row in rows(at(audit, "facets", "worker")) if row.get("label") != "(no name)"]
    if workers:
        values["rollout"] = {"workers": len(workers)}
    how = {"lengths.values": "the mean of each bucket", "rollout.workers": "those that the log names"}
    return MeasuredSource(values, str(file), how, file)
