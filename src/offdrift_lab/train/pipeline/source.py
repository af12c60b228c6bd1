"""`PipelineSource`: batches that rollout workers draw while the trainer trains.

It stands where `Source` does. Prompts are functions of the recipe's seed and a group's number, seeds of its key: the
same groups are drawn whatever the workers do, though not by the same weights. Rewards are computed when the trainer
takes a group, in its own thread, or beside generation by the workers (see `scoring`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from offdrift.engines.generate import request_seed
from offdrift.engines.stream import Delta, DrawJob, rollouts_of
from offdrift.errors import CheckpointError
from offdrift.records import store
from offdrift.records.atomic import write_json
from offdrift.records.rollouts import (
    Evidence,
    FullVocab,
    Rollouts,
    Support,
    TopK,
    concatenate,
    evidence_at,
    joined_evidence,
)
from offdrift.texts import check_file, read_json
from offdrift_lab.schedules import Key, Schedule
from offdrift_lab.train.data.buffer import Picked
from offdrift_lab.train.data.group_filter import penalized
from offdrift_lab.train.data.problems import Problem, digest
from offdrift_lab.train.data.prompts import prompt_ids
from offdrift_lab.train.data.rewards import Rewards
from offdrift_lab.train.data.source import Source, batch_seed
from offdrift_lab.train.data.tasks import Task, rewards_of
from offdrift_lab.train.pipeline.driver import Drawn, Driver, Ready, Snapshot, name_of
from offdrift_lab.train.pipeline.scoring import Score, joined
from offdrift_lab.train.pipeline.worker import Published, published
from offdrift_lab.train.pipeline.workers import Workers

EVIDENCE = {"full": FullVocab, "top": TopK}


@dataclass
class PipelineSource(Source):
    """See the module.

    Args:
        workers: of the run.
        schedule: of the arm.
    """

    workers: Workers = field(kw_only=True)
    schedule: Schedule = field(kw_only=True)
    driver: Driver = field(init=False)
    _snapshot: Snapshot | None = field(default=None, init=False)
    _future: Future[Snapshot] | None = field(default=None, init=False)
    _weights: Published | None = field(default=None, init=False)
    _problem_batches: dict[int, list[tuple[Problem, tuple[int, ...]]]] = field(default_factory=dict, init=False)
    _before: dict[str, float] = field(default_factory=dict, init=False)
    """Sums at the last update, for `metrics`."""
    _sync_bytes: int = field(default=0, init=False)
    """Size of the weights that were published last."""
    _newest: int = field(init=False)
    """Version of the weights that were published last, of which the driver's thread may not have heard yet."""

    def __post_init__(self) -> None:
        super().__post_init__()
        recipe = self.recipe
        assert recipe.pipeline is not None
        self._newest = self.start * self._steps
        self.driver = Driver(
            self.schedule,
            self.workers,
            batch=self.batch,
            samples=recipe.rollout.samples,
            updates=recipe.batches,
            settings=recipe.pipeline,
            job=self._job,
            steps=self._steps,
            scorer=self._score if recipe.pipeline.rewards == "workers" else None,
        )

    @property
    def _steps(self) -> int:
        """Optimizer steps per batch."""
        return self.recipe.updates // self.recipe.batches

    @property
    def batch(self) -> int:
        """Groups per batch."""
        return self.recipe.rollout.prompts * self.recipe.optim.accumulate

    @property
    def streams(self) -> bool:
        """Whether groups go into the gradient as they are there."""
        return self.schedule.consumption.take == "stream"

    # -- what is drawn

    def _problem(self, group: int) -> tuple[Problem, tuple[int, ...]]:
        """The problem of a group, and its prompt's token ids."""
        index, place = divmod(group, self.recipe.rollout.prompts)
        if index not in self._problem_batches:
            for old in sorted(self._problem_batches)[:-64]:  # groups of a few batches are drawn at a time
                del self._problem_batches[old]
            seed = batch_seed(self.recipe.seed, index)
            problems = self.task.sample(self.recipe.rollout.prompts, seed=seed)
            self._problem_batches[index] = [(p, tuple(prompt_ids(p, self.tokenizer))) for p in problems]
        return self._problem_batches[index][place]

    def _job(self, key: Key) -> DrawJob:
        seed = digest("response", self.recipe.seed, *key) % 2**63
        _, prompt = self._problem(key.group)
        return DrawJob(name_of(key), prompt, request_seed(seed, 0))

    def rewarded(self, ready: Ready, first: int) -> Rollouts:
        """The responses of some groups with their rewards; group ids count from `first`."""
        assert isinstance(self.task, Task)
        assert self.workers.provenance is not None
        mixes = self.schedule.weights.mixes
        provenance = replace(
            self.workers.provenance,
            selected=self.schedule.selects,
            cache=self.schedule.weights.cache if mixes else None,
        )
        responses = [response for _, group in ready.groups for response in group]
        rollouts = rollouts_of([d.job for d in responses], {d.job.key: d.deltas for d in responses}, provenance)
        problems = [self._problem(number)[0] for number, group in ready.groups for _ in group]
        completions = self._texts(rollouts_tokens(rollouts))
        rewards = self._rewards(ready, completions, problems)
        sizes = torch.tensor([len(group) for _, group in ready.groups])
        rollouts = rollouts.with_(
            group_ids=(first + torch.arange(len(sizes))).repeat_interleave(sizes),
            rewards=torch.tensor(rewards.total, dtype=torch.float32),
            components={k: torch.tensor(x, dtype=torch.float32) for k, x in rewards.components.items()} or None,
            prompts=tuple(p.prompt for p in problems),
            completions=completions,
            workers=tuple(d.worker for d in responses),
            queue_seconds=torch.tensor([d.queue_seconds for d in responses]),
            generation_seconds=torch.tensor([d.generation_seconds for d in responses]),
        )
        recipe = self.recipe
        return penalized(rollouts, recipe.penalties, max_tokens=recipe.horizon, reward_range=recipe.reward_range)

    def _texts(self, tokens: Sequence[Sequence[int]]) -> tuple[str, ...]:
        return tuple(str(self.tokenizer.decode(list(row), skip_special_tokens=True)) for row in tokens)

    def _score(self, number: int, attempt: int, tokens: Sequence[Sequence[int]]) -> Score:
        """The order for a group's rewards."""
        problem, _ = self._problem(number)
        return Score(number, attempt, self._texts(tokens), (problem,) * len(tokens))

    def _rewards(self, ready: Ready, completions: Sequence[str], problems: Sequence[Problem]) -> Rewards:
        """Rewards of some groups: what workers have sent, and what is left to the trainer."""
        assert isinstance(self.task, Task)
        if not ready.rewards:
            return rewards_of(self.task, completions, problems)
        parts, end = [], 0
        for (_, group), sent in zip(ready.groups, self.driver.rewards(ready), strict=True):
            start, end = end, end + len(group)
            parts.append(sent or rewards_of(self.task, completions[start:end], problems[start:end]))
        return joined(parts)

    # -- what the loop asks

    def parts(self) -> Iterator[Picked]:
        """The groups of the next batch as they come; whatever is asked for next says that the last ones are used."""
        index, first, parts = self.start, 0, []
        self.start += 1
        while True:
            ready = self.driver.take()
            parts.append(self.rewarded(ready, first))
            first += len(ready.groups)
            if ready.last:  # on disk before the optimizer steps
                store.write(concatenate(parts), self.path(index))
            yield Picked(parts[-1], independent=not self.schedule.selects)
            if ready.last:
                return
            self.driver.accumulated()

    def next(self, version: int) -> Picked:
        """The next batch, whole."""
        parts = [picked.rollouts for picked in self.parts()]
        return Picked(concatenate(parts), independent=not self.schedule.selects)

    def begin(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._before = self.driver.start(self._publish(weights, self._newest))

    def due(self, version: int) -> bool:
        """Whether weights are published after the update that has just been taken."""
        return self.start % self.schedule.sync_every == 0

    def publish(self, weights: Iterable[tuple[str, Tensor]], version: int) -> bool:
        """Let workers take these weights once the schedule says so."""
        self._weights = self._publish(weights, version)
        return False

    def trained(self, *, checkpoint: bool) -> None:
        """The trainer has used a batch, and published new weights if they were due."""
        weights, self._weights = self._weights, None
        self._future = self.driver.trained(weights=weights, snapshot=checkpoint)

    def _publish(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Published:
        result = published(weights, version)
        self._sync_bytes, self._newest = result.nbytes, version
        return result

    def close(self) -> None:
        """Stop drawing."""
        self.driver.stop()

    def versions(self) -> set[int]:
        if self._future is not None:
            self._snapshot, self._future = self.driver.snapshot(self._future), None
        return self.in_flight(self._newest) | _versions(self._snapshot)

    def in_flight(self, version: int) -> set[int]:
        return self.driver.versions() | {self._newest}

    # -- checkpoints

    def state(self) -> dict[str, Any]:
        if self._future is not None:
            self._snapshot, self._future = self.driver.snapshot(self._future), None
        scheduler = None if self._snapshot is None else self._snapshot.scheduler
        return {"waiting": [], "solved": [], "drawn": 0, "since_arrival": 0, "schedule": scheduler}

    def save(self, folder: Path) -> None:
        """Store what has been drawn and not been trained on."""
        assert self._snapshot is not None
        save_drawn(folder, self._snapshot.groups)

    def load(self, state: Mapping[str, Any], folder: Path) -> None:
        self._snapshot = Snapshot(state["schedule"], load_drawn(folder, self._job))
        self.driver.load(self._snapshot)

    # -- metrics

    def metrics(self, rollouts: Rollouts, version: int) -> dict[str, Any]:
        """Metrics of the schedule since the last update, for that update's row."""
        driver = self.driver
        with driver.lock:
            sums = driver.sums()
        was, self._before = self._before, sums
        change = Counter({k: sums[k] - was[k] for k in sums})
        seconds = change["seconds"]
        workers = seconds * self.workers.settings.workers
        segments = rollouts.segments
        lag = version - segments.min(rollouts.rollout_version.double())
        newest = version - segments.max(rollouts.rollout_version.double())
        counts = torch.bincount(lag.long())
        return {
            "pipeline/worker_idle": max(0.0, 1 - (change["generation"] + change["load"] + change["reward"]) / workers),
            "pipeline/trainer_idle": min(1.0, change["waited"] / seconds),
            "pipeline/reward_seconds": change["reward"],
            "pipeline/sync_seconds": change["load"],
            "pipeline/sync_bytes": float(self._sync_bytes),
            "pipeline/stale_frac": float((lag > 0).double().mean()),
            "pipeline/mixed_frac": float((lag != newest).double().mean()),
            "pipeline/wasted_tokens": change["wasted_tokens"],
            "pipeline/dropped_groups": change["dropped"],
            "pipeline/redrawn_groups": change["redrawn"],
            "pipeline/restarted": change["restarted"],
            "pipeline/lost_workers": change["lost"],
            "pipeline/stored_groups": sums["stored"],
            "pipeline/queue_seconds": float(rollouts.queue_seconds.mean()),  # type: ignore[union-attr]
            "pipeline/generation_seconds": float(rollouts.generation_seconds.mean()),  # type: ignore[union-attr]
            "pipeline/lag_counts": counts.tolist(),
        }


def rollouts_tokens(rollouts: Rollouts) -> list[list[int]]:
    """Tokens of each response."""
    return [x.tolist() for x in rollouts.tokens.split(rollouts.lengths.tolist())]


def _versions(snapshot: Snapshot | None) -> set[int]:
    groups = {} if snapshot is None else snapshot.groups
    return {delta.version for group in groups.values() for drawn in group.values() for delta in drawn.deltas}


FILE, FACTS = "drawn.safetensors", "drawn.json"


def save_drawn(folder: Path, groups: dict[int, dict[int, Drawn]]) -> None:
    """Store responses that wait, or are in progress, with all that was recorded of their tokens."""
    rows, deltas = [], []
    for number, group in groups.items():
        for place, drawn in group.items():
            own = [[len(d.tokens), d.version, d.finish] for d in drawn.deltas]
            about = [drawn.worker, drawn.queue_seconds, drawn.generation_seconds]
            rows.append([number, place, drawn.attempt, *about, own])
            deltas += drawn.deltas
    tensors: dict[str, Tensor] = {}
    if deltas:
        tensors = {name: torch.cat([getattr(d, name) for d in deltas]).contiguous() for name in ("tokens", "logp")}
    kind = None
    if deltas and deltas[0].evidence is not None:
        evidence = joined_evidence([d.evidence for d in deltas if d.evidence is not None])
        kind = next(name for name, of in EVIDENCE.items() if isinstance(evidence, of))
        tensors |= {f"evidence.{name}": x.contiguous() for name, x in vars(evidence).items()}
    if (support := Support.joined([d.support for d in deltas])) is not None:
        tensors |= {f"support.{name}": x for name, x in vars(support).items()}
    save_file(tensors, folder / FILE)
    write_json(folder / FACTS, {"responses": rows, "evidence": kind})


def load_drawn(folder: Path, job: Any) -> dict[int, dict[int, Drawn]]:
    """The inverse of `save_drawn`. Raises: `CheckpointError` if a file is missing or damaged."""
    try:
        facts = read_json(folder / FACTS)
        check_file(folder / FILE)
        tensors = load_file(folder / FILE)
        groups: dict[int, dict[int, Drawn]] = {}
        evidence: Evidence | None = None
        if facts["evidence"] is not None:
            fields = {k.removeprefix("evidence."): x for k, x in tensors.items() if k.startswith("evidence.")}
            evidence = EVIDENCE[facts["evidence"]](**fields)
        support = Support(tensors["support.ids"], tensors["support.cu_seqlens"]) if "support.ids" in tensors else None
        start = 0
        for number, place, attempt, worker, waited, took, own in facts["responses"]:
            drawn = Drawn(job(Key(number, place, attempt)), attempt, [], worker, waited)
            drawn.generation_seconds = took
            for count, version, finish in own:
                rows = torch.arange(start, start + count)
                start += count
                of_rows = None if evidence is None else evidence_at(evidence, rows)
                kept = None if support is None else support.select(rows)
                recorded = (tensors["tokens"][rows], tensors["logp"][rows], of_rows)
                drawn.deltas.append(Delta(drawn.job.key, version, *recorded, finish, kept))
            groups.setdefault(number, {})[place] = drawn
    except (OSError, ValueError, KeyError, TypeError, IndexError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(
            f"{folder / FILE} cannot be read back ({error}); remove that checkpoint and --resume from the one before"
        ) from error
    return groups
