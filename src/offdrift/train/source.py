"""Source of batches: an engine that lags behind the trainer on a schedule.

The engine takes new weights every `sync_every` updates, and batches may wait in a queue, or in a buffer, before they
are trained on. A draw is a function of the recipe's seed, the batch's index and the engine's weights: a resumed run
draws what the uninterrupted one would have drawn. Every batch is on disk before it is trained on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from offdrift.engines import Engine
from offdrift.records import store
from offdrift.records.rollouts import Rollouts, Sampling
from offdrift.train.buffer import Buffer, Picked
from offdrift.train.models import prompt_ids
from offdrift.train.problems import Problem
from offdrift.train.recipe import Recipe
from offdrift.train.tasks import Task, rewards_of


@dataclass(frozen=True)
class Shard:
    """The part of every batch that this process draws and trains on."""

    rank: int = 0
    world: int = 1

    def file_name(self, index: int) -> str:
        """File name of this process's share of a batch."""
        part = f"-rank{self.rank}" if self.world > 1 else ""
        return f"batch-{index:06d}{part}.parquet"


@dataclass
class Source:
    """Batches of rewarded rollouts, in order.

    Args:
        folder: where batches are written, one Parquet file each.
        start: index of the next batch to return.
        greedy: also draw a greedy response to every prompt, for its reward alone.
    """

    engine: Engine
    task: Task
    tokenizer: PreTrainedTokenizerBase
    recipe: Recipe
    sampling: Sampling
    folder: Path
    shard: Shard = Shard()
    start: int = 0
    greedy: bool = False
    buffer: Buffer | None = field(default=None, init=False)
    _waiting: deque[tuple[int, Rollouts]] = field(default_factory=deque, init=False)
    _drawn: int = field(default=0, init=False)
    """Batches drawn so far, discarded ones included."""
    _since_arrival: int = field(default=0, init=False)
    """Batches trained on since one has entered the buffer."""

    def __post_init__(self) -> None:
        settings = self.recipe.buffer
        self._drawn = self.start
        if settings.capacity is not None:
            self.buffer = Buffer(settings, settings.capacity // self.shard.world)

    def state(self) -> dict[str, Any]:
        """What a checkpoint stores of this process's source; batches have files of their own."""
        state = {
            "drawn": self._drawn,
            "since_arrival": self._since_arrival,
            "waiting": [index for index, _ in self._waiting],
        }
        return state if self.buffer is None else state | {"buffer": self.buffer.state()}

    @staticmethod
    def needed(state: Mapping[str, Any]) -> set[int]:
        """The batches whose files a `state` goes on with."""
        return {*state["waiting"], *(batch for batch, _, _ in state.get("buffer", {"held": []})["held"])}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on where a checkpoint's `state` stands."""
        self._drawn, self._since_arrival = state["drawn"], state["since_arrival"]
        self._waiting = deque((index, store.read(self.path(index))) for index in state["waiting"])
        if self.buffer is not None:
            self.buffer.load(state["buffer"], lambda index: store.read(self.path(index)))

    def due(self, version: int) -> bool:
        """Whether the engine must take new weights before the next batch, `version` steps having been taken."""
        return version - self.engine.version >= self.recipe.lag.sync_every

    def waiting(self) -> tuple[int, ...]:
        """Indices of the batches that are drawn and not yet used."""
        return tuple(index for index, _ in self._waiting)

    def versions(self) -> set[int]:
        """Versions of the weights that drew the batches that may still be trained on."""
        batches = [batch for _, batch in self._waiting]
        batches += [] if self.buffer is None else self.buffer.batches.values()
        return {v for batch in batches for v in batch.rollout_version.unique().tolist()}

    def in_flight(self, version: int) -> set[int]:
        """Versions that batches to come are of, once the trainer has taken `version` updates."""
        undrawn = self.start + len(self._waiting) < self.recipe.batches and not self.due(version)
        return self.versions() | ({self.engine.version} if undrawn else set())

    def next(self, version: int) -> Picked:
        """The next batch for a trainer at `version`: the oldest that waits, or a pick from the buffer."""
        recipe, buffer, index = self.recipe, self.buffer, self.start
        self.start += 1
        if buffer is None:
            return Picked(self._oldest(index)[1])
        buffer.expire(version)
        count = len(range(self.shard.rank, recipe.rollout.prompts, self.shard.world))
        if self._since_arrival % recipe.buffer.reuse == 0 or len(buffer) < count:
            buffer.add(*self._oldest(index))
            self._since_arrival = 0
        self._since_arrival += 1
        picked = buffer.pick(
            count,
            now=version,
            seed=batch_seed(recipe.seed, index, self.shard.rank),
            progress=index / recipe.batches,
        )
        _, group = picked.rollouts.group_ids.unique(return_inverse=True)
        rollouts = picked.rollouts.with_(group_ids=group * self.shard.world + self.shard.rank)
        return replace(picked, rollouts=rollouts)

    def _oldest(self, index: int) -> tuple[int, Rollouts]:
        """The batch that has waited longest, batch `index` being wanted; draws as many ahead as the queue holds."""
        ahead = min(self.recipe.lag.queue, (self.recipe.batches - index - 1) // self.recipe.buffer.reuse)
        while len(self._waiting) <= ahead:
            self._waiting.append((self._drawn, self.draw(self._drawn)))
            self._drawn += 1
        return self._waiting.popleft()

    def sums(self, picked: Picked, version: int) -> dict[str, Tensor]:
        """What the buffer's metrics are made of, the trainer being at `version`; adds over processes."""
        if self.buffer is None:
            return {}
        done = {"drawn": self._drawn - len(self._waiting), "trained": self.start, "earlier": picked.earlier_uses}
        sums = {f"buffer/{name}": torch.tensor(float(x)) for name, x in done.items()}
        return self.buffer.sums(version) | sums

    def synchronized(self) -> None:
        """The engine has taken new weights."""
        if self.recipe.buffer.clear_at_sync:
            self._waiting.clear()
            if self.buffer is not None:
                self.buffer.clear()

    def draw(self, index: int) -> Rollouts:
        """Sample, reward and store one batch with the weights the engine has now."""
        rollout_recipe, shard = self.recipe.rollout, self.shard
        problems = self.task.sample(rollout_recipe.prompts, seed=batch_seed(self.recipe.seed, index))
        rollouts = rollout(
            self.engine,
            problems[shard.rank :: shard.world],
            self.task,
            self.tokenizer,
            self.sampling,
            samples=rollout_recipe.samples,
            seed=batch_seed(self.recipe.seed, index, shard.rank),
            evidence=rollout_recipe.evidence,
        )
        if self.greedy:
            best = rollout(
                self.engine,
                problems[shard.rank :: shard.world],
                self.task,
                self.tokenizer,
                replace(self.sampling, top_k=1),
                samples=1,
                seed=batch_seed(self.recipe.seed, index, shard.rank),
            )
            assert best.rewards is not None
            rollouts = rollouts.with_(greedy_rewards=best.rewards.repeat_interleave(rollout_recipe.samples))
        # A group's id is its problem's index in the whole batch.
        rollouts = rollouts.with_(group_ids=rollouts.group_ids * shard.world + shard.rank)
        store.write(rollouts, self.path(index))
        return rollouts

    def path(self, index: int) -> Path:
        """The file of a batch."""
        return self.folder / self.shard.file_name(index)


def rollout(
    engine: Engine,
    problems: list[Problem],
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    sampling: Sampling,
    *,
    samples: int,
    seed: int,
    evidence: int | str = "sampled",
) -> Rollouts:
    """Draw `samples` responses per problem and reward them; the problem's index is the group id."""
    asked = [p for p in problems for _ in range(samples)]
    prompts = [prompt_ids(p, tokenizer) for p in asked]
    drawn = engine.generate(prompts, sampling, seed=seed, evidence=evidence)  # type: ignore[arg-type]
    responses = drawn.tokens.split(drawn.lengths.tolist())
    completions = tuple(str(tokenizer.decode(r.tolist(), skip_special_tokens=True)) for r in responses)
    rewards = rewards_of(task, completions, asked)
    return drawn.with_(
        group_ids=torch.arange(len(problems)).repeat_interleave(samples),
        rewards=torch.tensor(rewards.total, dtype=torch.float32),
        components={k: torch.tensor(x, dtype=torch.float32) for k, x in rewards.components.items()} or None,
        prompts=tuple(p.prompt for p in asked),
        completions=completions,
    )


def batch_seed(seed: int, index: int, rank: int = 0) -> int:
    """A seed for one batch of one process: the same in every arm and every resumed run."""
    return (seed * 1_000_003 + index) * 4_099 + rank
