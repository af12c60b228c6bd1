"""A run of an engine and a trainer, with a fault in it or none, and the log that a perfect recorder would keep of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from benchmarks.field.world import BFLOAT16, END, FLOAT32, Array, Side, Tokens, Walked, Weights, World
from numpy.typing import NDArray

Flags = NDArray[np.bool_]


@dataclass
class Batch:
    """What a step drew and how both sides score it; arrays are [responses, places] or [responses]."""

    step: int
    prompts: list[list[int]]
    group: NDArray[np.int64]
    worker: NDArray[np.int64]
    turn: NDArray[np.int64]
    tokens: Tokens
    valid: Flags
    """Places of the response; the rest is padding."""
    mask: Flags
    """Places that the policy drew; tool output is not."""
    mu: Array
    mu_raw: Array
    mu_top: Array
    entropy: Array
    truncated: Flags
    version: NDArray[np.int64]
    """Updates before the one that trains on the response."""
    rollout_version: NDArray[np.int64]
    """Version of the weights that drew each place, as the log will claim it."""
    generator: np.random.Generator
    old: Array = field(default_factory=lambda: np.zeros(0))
    current: Array = field(default_factory=lambda: np.zeros(0))
    updates_before: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    reward: Array = field(default_factory=lambda: np.zeros(0))
    advantage: Array = field(default_factory=lambda: np.zeros(0))

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Places of each response."""
        return self.valid.sum(1)

    def last(self) -> NDArray[np.int64]:
        """Index of the last place of each response."""
        return self.lengths - 1


Edit = Callable[[Batch, "Run"], None]


@dataclass
class Run:
    """A run, to be changed by what plants a fault.

    Everything starts healthy: the engine holds the trainer's weights, `lag` updates old, rounds to bfloat16, and records
    what it drew from. A fault replaces a side's weights, appends hooks, or edits what is recorded.
    """

    world: World
    seed: int
    steps: int = 8
    prompts: int = 8
    group: int = 4
    prompt_length: tuple[int, int] = (3, 12)
    max_length: int = 72
    turns: int = 1
    tool_tokens: int = 0
    workers: int = 1
    lag: int = 0
    first_version: int = 0
    temperature: float = 1.0
    """Of both sides; recorded after it."""
    versions: bool = True
    """Whether formats that can hold versions do."""
    repeated_prompts: bool = False
    """Prompts of a small set that comes again, as a data set of few problems does."""
    engine: Side = field(init=False)
    trainer: Side = field(init=False)
    updater: Side | None = None
    """Scores `current`, where that is not a copy of `old`."""
    drawn_by: Callable[[Batch, Run], None] | None = None
    draw_edits: list[Edit] = field(default_factory=list)
    """Change what the engine handed over, before the trainer sees it."""
    record_edits: list[Edit] = field(default_factory=list)
    """Change what was recorded, after both sides scored it."""
    seen_prompts: Callable[[list[list[int]], Batch], list[list[int]]] | None = None
    """Prompts that the trainer sees in place of the engine's."""
    seen_tokens: Callable[[Batch], Tokens] | None = None
    """Tokens that the trainer reads as the response in place of those drawn."""
    engine_prompts: Callable[[list[list[int]], np.random.Generator], list[list[int]]] | None = None
    """Prompts that the engine sees in place of the recorded ones."""

    def __post_init__(self) -> None:
        self.engine = Side(self.held, BFLOAT16)
        self.trainer = Side(lambda step, worker: self.world.weights(self.trained(step)), FLOAT32)
        self.generator = np.random.default_rng([self.seed, 11])

    def trained(self, step: int) -> int:
        """Version of the trainer at a step."""
        return self.first_version + step

    def held(self, step: int, worker: int) -> Weights:
        """Weights of the engine at a step, unless a fault replaces them."""
        return self.world.weights(max(0, self.trained(step) - self.lag))

    def wrap_weights(self, change: Callable[[Weights, int, int], Weights], side: str = "engine") -> None:
        """Pass a side's weights through `change(weights, step, worker)`."""
        target = getattr(self, side)
        before = target.weights
        target.weights = lambda step, worker: change(before(step, worker), step, worker)


@dataclass
class Log:
    """Batches of a run, and what is true of all of it."""

    batches: list[Batch]
    vocab: int
    temperature: float
    versions: bool
    extra: dict[str, Any] = field(default_factory=dict)


def turns_of(run: Run, n: int) -> tuple[NDArray[np.int64], Tokens]:
    """Turn of each place [n, places], and what the environment writes there, -1 where the policy draws."""
    places = run.max_length
    if run.turns == 1:
        return np.zeros((n, places), np.int64), np.full((n, places), -1, np.int64)
    each = places // run.turns
    turn = np.broadcast_to(np.minimum(np.arange(places) // each, run.turns - 1), (n, places)).copy()
    given = np.full((n, places), -1, np.int64)
    for k in range(1, run.turns):
        text = run.generator.integers(1, run.world.vocab, (n, run.tool_tokens))
        given[:, k * each : k * each + run.tool_tokens] = text
    return turn, given


def tempered(run: Run) -> None:
    """Divide both sides' logits by the run's temperature, before other hooks."""
    if run.temperature != 1.0:
        for side in (run.engine, run.trainer, run.updater):
            if side is not None:
                side.logits.insert(0, lambda z, where: z / run.temperature)


def simulate(run: Run) -> Log:
    """Draw, score and record every step of a run."""
    tempered(run)
    g = run.generator
    pool = [prompt(run, g) for _ in range(max(3, run.prompts // 2))]
    batches = []
    for step in range(run.steps):
        some = [pool[g.integers(len(pool))] if run.repeated_prompts else prompt(run, g) for _ in range(run.prompts)]
        prompts = [p for p in some for _ in range(run.group)]
        batch = draw(run, step, prompts)
        for edit in run.draw_edits:
            edit(batch, run)
        score(run, batch)
        judge(run, batch)
        for edit in run.record_edits:
            edit(batch, run)
        batches.append(batch)
    return Log(batches, run.world.vocab, run.temperature, run.versions)


def prompt(run: Run, g: np.random.Generator) -> list[int]:
    """Random token ids."""
    low, high = run.prompt_length
    return [int(t) for t in g.integers(1, run.world.vocab, g.integers(low, high + 1))]


def draw(run: Run, step: int, prompts: list[list[int]]) -> Batch:
    """Let the engine answer the prompts of a step."""
    n, g = len(prompts), run.generator
    worker = np.arange(n) % run.workers
    turn, given = turns_of(run, n)
    seen = prompts if run.engine_prompts is None else run.engine_prompts(prompts, g)
    walked = run.world.walk(run.engine, step, seen, worker, turn, given=given)
    ended = (walked.tokens == END) & (given < 0)
    stop = np.where(ended.any(1), ended.argmax(1), run.max_length - 1)
    valid = np.arange(run.max_length)[None] <= stop[:, None]
    drawn = max(0, run.trained(step) - run.lag)
    return Batch(
        step=step,
        prompts=prompts,
        group=np.repeat(np.arange(n // run.group), run.group),
        worker=worker,
        turn=turn,
        tokens=walked.tokens,
        valid=valid,
        mask=valid & (given < 0),
        mu=walked.logp,
        mu_raw=walked.raw,
        mu_top=walked.top,
        entropy=walked.entropy,
        truncated=~ended.any(1),
        version=np.full(n, run.trained(step)),
        rollout_version=np.full((n, run.max_length), drawn),
        generator=g,
    )


def scored(run: Run, batch: Batch, side: Side) -> Walked:
    """What a scoring side makes of a batch."""
    prompts = batch.prompts if run.seen_prompts is None else run.seen_prompts(batch.prompts, batch)
    feed = batch.tokens if run.seen_tokens is None else run.seen_tokens(batch)
    g = run.generator
    return run.world.walk(
        side, batch.step, prompts, batch.worker, batch.turn, feed=feed, labels=batch.tokens, generator=g
    )


def score(run: Run, batch: Batch) -> None:
    """Let the trainer score a batch: before its updates, and at each response's own update."""
    batch.old = scored(run, batch, run.trainer).logp
    batch.current = batch.old.copy() if run.updater is None else scored(run, batch, run.updater).logp
    batch.updates_before = np.zeros(len(batch.prompts), np.int64)


def judge(run: Run, batch: Batch) -> None:
    """Reward even tokens, and compare within each group."""
    share = ((batch.tokens % 2 == 0) & batch.mask).sum(1) / np.maximum(batch.mask.sum(1), 1)
    batch.reward = (share > 0.5).astype(float)
    by_group = batch.reward.reshape(-1, run.group)
    batch.advantage = (by_group - by_group.mean(1, keepdims=True)).reshape(-1)
