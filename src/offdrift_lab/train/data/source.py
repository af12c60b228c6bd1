"""Source of batches: an engine that lags behind the trainer on a schedule.

The engine takes new weights every `sync_every` updates, and batches may wait in a queue, or in a buffer, before they
are trained on. A draw is a function of the recipe's seed, the batch's index and the engine's weights: a resumed run
draws what the uninterrupted one would have drawn. Every batch is on disk before it is trained on.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from offdrift.engines import Engine
from offdrift.errors import RewardError
from offdrift.records import store
from offdrift.records.provenance import Sampling
from offdrift.records.rollouts import Rollouts, concatenate
from offdrift_lab.train.data.buffer import Buffer, Picked
from offdrift_lab.train.data.environments import Environment
from offdrift_lab.train.data.episodes import rollout
from offdrift_lab.train.data.group_filter import COST, History, has_spread, joined, of_groups, penalized
from offdrift_lab.train.data.problems import Problem, ProblemFile, digest
from offdrift_lab.train.data.tasks import Task
from offdrift_lab.train.features.fusion import MixtureSettings, given_difficulties, probed_difficulties
from offdrift_lab.train.settings.recipe import Recipe
from offdrift_lab.train.settings.rollout import SIBLINGS


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
        by_component: a group has a spread if any component of its rewards does, not if their sum does.
        mixture: the share of the engine's teacher in what is drawn; None: the policy draws alone.
    """

    engine: Engine
    task: Task | Environment
    tokenizer: PreTrainedTokenizerBase
    recipe: Recipe
    sampling: Sampling
    folder: Path
    shard: Shard = Shard()
    start: int = 0
    greedy: bool = False
    by_component: bool = False
    mixture: MixtureSettings | None = None
    buffer: Buffer | None = field(default=None, init=False)
    _waiting: deque[tuple[int, Rollouts]] = field(default_factory=deque, init=False)
    _drawn: int = field(default=0, init=False)
    """Batches drawn so far, discarded ones included."""
    _since_arrival: int = field(default=0, init=False)
    """Batches trained on since one has entered the buffer."""
    _cost: Counter[str] = field(default_factory=Counter, init=False)
    """What `draws.COST` names, since the last batch was asked for."""
    _difficulties: list[Tensor] = field(default_factory=list, init=False)
    """Of the prompts whose share of a teacher depends on them, since the last batch was asked for."""
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float), init=False)
    """What "draw", "publish" and "distill" have taken since the last row of metrics."""

    def __post_init__(self) -> None:
        settings = self.recipe.buffer
        self._drawn = self.start * self.recipe.optim.accumulate
        self.history = History(self.recipe.draws, self.recipe.right)
        if settings.capacity is not None:
            self.buffer = Buffer(settings, settings.capacity // self.shard.world)

    def state(self) -> dict[str, Any]:
        """State of this process's source for a checkpoint; batches are stored in files of their own."""
        state = {
            "drawn": self._drawn,
            "since_arrival": self._since_arrival,
            "waiting": [index for index, _ in self._waiting],
            "solved": self.history.state(),
        }
        return state if self.buffer is None else state | {"buffer": self.buffer.state()}

    @staticmethod
    def needed(state: Mapping[str, Any]) -> set[int]:
        """The batches whose files a `state` goes on with."""
        return {*state["waiting"], *(batch for batch, _, _ in state.get("buffer", {"held": []})["held"])}

    def load(self, state: Mapping[str, Any], folder: Path) -> None:
        """Go on where a checkpoint's `state` stands, and what `save` added to its folder."""
        self._drawn, self._since_arrival = state["drawn"], state["since_arrival"]
        self.history.solved = dict(state["solved"])
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
        draws = self.recipe.optim.accumulate
        undrawn = self.start * draws + len(self._waiting) < self.recipe.batches * draws and not self.due(version)
        return self.versions() | ({self.engine.version} if undrawn else set())

    def parts(self) -> Iterator[Picked]:
        """The groups of the next batch as they come, where the source `streams`."""
        raise NotImplementedError

    def next(self, version: int) -> Picked:
        """The next batch for a trainer at `version`: the oldest that waits, or a pick from the buffer."""
        recipe, buffer, index, count = self.recipe, self.buffer, self.start, self._groups
        self.start += 1
        self._cost.clear()
        self._difficulties.clear()
        if buffer is None:
            return Picked(self._oldest(index)[1], independent=not recipe.draws.selects)
        buffer.expire(version)
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
        return replace(picked, rollouts=rollouts, independent=picked.independent and not recipe.draws.selects)

    def _oldest(self, index: int) -> tuple[int, Rollouts]:
        """The batch that has waited longest, batch `index` being wanted; draws as many ahead as the queue holds.

        Its number is that of its first draw; every draw of a batch has prompts of its own.
        """
        draws, prompts = self.recipe.optim.accumulate, self.recipe.rollout.prompts
        ahead = min(self.recipe.lag.queue, (self.recipe.batches - index - 1) // self.recipe.buffer.reuse)
        begin = time.perf_counter()
        while len(self._waiting) < draws * (ahead + 1):
            self._waiting.append((self._drawn, self.draw(self._drawn)))
            self._drawn += 1
        self.seconds["draw"] += time.perf_counter() - begin
        if draws == 1:
            return self._waiting.popleft()
        numbers, parts = zip(*(self._waiting.popleft() for _ in range(draws)), strict=True)
        shifted = [part.with_(group_ids=part.group_ids + i * prompts) for i, part in enumerate(parts)]
        return numbers[0], concatenate(shifted)

    def sums(self, picked: Picked, version: int) -> dict[str, Tensor]:
        """Sums behind the metrics of groups, draws and buffer, at `version`; add them over processes."""
        rewards, ids = picked.rollouts.rewards, picked.rollouts.group_ids.unique(return_inverse=True)[1]
        assert rewards is not None
        spread = has_spread(rewards[:, None], ids)
        counts = {"groups/n": len(spread), "groups/flat": int((~spread).sum())}
        if self.recipe.draws.selects:
            counts |= {f"draws/{name}": self._cost[name] for name in COST} | {"draws/left_out": self.history.left_out}
        groups = {name: torch.tensor(float(n)) for name, n in counts.items()}
        if self.mixture is not None and self.mixture.difficulty != "uniform":  # in every process, whatever it drew
            difficulties = torch.cat([torch.zeros(0), *self._difficulties])
            groups |= {"fusion/difficulty": difficulties.sum(), "fusion/prompts": torch.tensor(len(difficulties))}
        if (speculation := picked.rollouts.speculation) is not None:
            groups |= speculation.sums(picked.rollouts)
        if self.buffer is None:
            return groups
        done = {"drawn": self._drawn - len(self._waiting), "trained": self.start, "earlier": picked.earlier_uses}
        sums = {f"buffer/{name}": torch.tensor(float(x)) for name, x in done.items()}
        return groups | self.buffer.sums(version) | sums

    @property
    def streams(self) -> bool:
        """Whether groups of a batch come one after the other, to be treated by themselves."""
        return False

    def begin(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """The arm begins; the engine has these weights."""

    def publish(self, weights: Iterable[tuple[str, Tensor]], version: int) -> bool:
        """Give the engine new weights; whether it has them now."""
        self.engine.load_weights(weights, version=version)
        self.synchronized()
        return True

    def trained(self, *, checkpoint: bool) -> None:
        """The trainer has used a batch, and published new weights if they were due.

        Args:
            checkpoint: whether one is taken next.
        """

    def save(self, folder: Path) -> None:
        """Add to a checkpoint what `state` does not hold."""

    def close(self) -> None:
        """The arm has ended."""

    def metrics(self, rollouts: Rollouts, version: int) -> dict[str, Any]:
        """Metrics of the source for the row of an update, besides `sums`."""
        took, self.seconds = self.seconds, defaultdict(float)
        speculative = self.recipe.rollout.speculative
        drafts = speculative is not None and speculative.model != SIBLINGS
        names = ("draw", "publish", "distill") if drafts else ("draw", "publish")
        return {f"throughput/{name}_seconds": took[name] for name in names}

    def learn(self, row: Mapping[str, Any]) -> None:
        """Take in the row of an update that was taken on a batch."""
        if self.buffer is not None:
            self.buffer.learn(row)

    def synchronized(self) -> None:
        """The engine has taken new weights."""
        if self.recipe.buffer.clear_at_sync:
            self._waiting.clear()
            if self.buffer is not None:
                self.buffer.clear()

    @property
    def _groups(self) -> int:
        """Groups of a batch that are this process's."""
        return len(range(self.shard.rank, self.recipe.rollout.prompts, self.shard.world))

    def draw(self, index: int) -> Rollouts:
        """Sample, reward and store one batch with the weights the engine has now.

        Raises: `RewardError` if `draws.at_cap` says so and too few groups have a spread of rewards.
        """
        settings, missing = self.recipe.draws, self._groups
        kept: list[Rollouts] = []
        spare: list[Rollouts] = []
        for turn in range(settings.rounds if settings.dynamic else 1):
            problems = self._problems(index, turn)
            if not problems:  # the file has no more
                break
            drawn, spread = self._answers(problems, index, turn)
            self._cost.update(rounds=1, groups=len(problems))
            if not settings.dynamic:
                kept.append(drawn)
                missing = 0
                break
            useful = spread.nonzero()[:, 0][:missing]
            kept.append(of_groups(drawn, useful))
            missing -= len(useful)
            if not missing:
                break
            spare.append(of_groups(drawn, (~spread).nonzero()[:, 0][: self._groups]))
        if missing:
            if settings.at_cap == "stop":
                raise RewardError(
                    f"batch {index}: after {settings.rounds} rounds {missing} of {self._groups} groups still have "
                    'equal rewards (draws.at_cap = "stop"). The task is too easy or too hard for the model: change it, '
                    'raise draws.rounds or rollout.samples, or set draws.at_cap = "fill"'
                )
            kept.append(of_groups(joined(spare), torch.arange(missing)))
        rollouts = joined(kept)
        self._cost.update(draws=1, kept_groups=self._groups, kept_responses=rollouts.num_sequences, filled=missing)
        # A group's id is its place in the whole batch.
        rollouts = rollouts.with_(group_ids=rollouts.group_ids * self.shard.world + self.shard.rank)
        if settings.selects:
            rollouts = rollouts.with_(provenance=replace(rollouts.provenance, selected=True))
        store.write(rollouts, self.path(index))
        return rollouts

    def _problems(self, index: int, turn: int) -> list[Problem]:
        """This process's prompts of one round of a batch; no prompt of a file is in two of them."""
        task, shard, count = self.task, self.shard, self._groups
        last = shard.world * count * (turn + 1)
        file = getattr(task, "problems", None)
        if isinstance(file, ProblemFile) and self.recipe.draws.selects:
            last = len(file.problems["train"])
        problems = task.sample(max(last, self.recipe.rollout.prompts), seed=batch_seed(self.recipe.seed, index))
        waiting = self.history.waiting_first(problems[shard.rank :: shard.world])
        return waiting[count * turn : count * (turn + 1)]

    def _answers(self, problems: list[Problem], index: int, turn: int) -> tuple[Rollouts, Bool[Tensor, " g"]]:
        """The groups of some problems, enlarged as long as the recipe wants; and whether their rewards differ."""
        recipe, samples = self.recipe, self.recipe.rollout.samples
        first_seed = batch_seed(recipe.seed, index, self.shard.rank)

        def ask(
            asked: list[Problem],
            samples: int,
            stage: int | str,
            sampling: Sampling = self.sampling,
            alphas: Tensor | None = None,
        ) -> Rollouts:
            probe, greedy = stage == "probe", sampling is not self.sampling
            seed = digest("draw", first_seed, turn, stage) % 2**63 if turn or stage else first_seed
            self._cost["responses"] += samples * len(asked)
            return rollout(
                self.engine,
                asked,
                self.task,
                self.tokenizer,
                sampling,
                samples=samples,
                seed=seed,
                evidence="sampled" if probe or greedy else recipe.rollout.evidence,
                max_turns=recipe.max_turns,
                alphas=alphas,
            )

        def spread_of(drawn: Rollouts) -> Bool[Tensor, " g"]:
            assert drawn.rewards is not None
            columns = list((drawn.components or {}).values()) if self.by_component else []
            return has_spread(torch.stack(columns or [drawn.rewards], 1), drawn.group_ids)

        alphas = self._alphas(problems, lambda samples: ask(problems, samples, "probe"))
        drawn, stage = ask(problems, samples, 0, alphas=alphas), 0
        spread = spread_of(drawn)
        while samples < (recipe.draws.max_samples or 0) and not spread.all():
            more, stage = min(samples, (recipe.draws.max_samples or 0) - samples), stage + 1
            flat = (~spread).nonzero()[:, 0]
            of_flat = None if alphas is None else alphas[flat]
            extra = ask([problems[i] for i in flat.tolist()], more, stage, alphas=of_flat)
            drawn, samples = concatenate([drawn, extra.with_(group_ids=flat[extra.group_ids])]), samples + more
            drawn = drawn.select(drawn.group_ids.argsort(stable=True))
            spread = spread_of(drawn)
        self.history.visit(problems, drawn)
        limits: dict[str, Any] = {"max_tokens": recipe.horizon, "reward_range": recipe.reward_range}
        drawn = penalized(drawn, recipe.penalties, **limits)
        if self.greedy:
            best = ask(problems, 1, 0, replace(self.sampling, top_k=1), alphas)
            best = penalized(best, recipe.penalties, **limits)
            assert best.rewards is not None
            drawn = drawn.with_(greedy_rewards=best.rewards[drawn.group_ids])
        return drawn, spread

    def _alphas(self, problems: list[Problem], probe: Callable[[int], Rollouts]) -> Float[Tensor, " g"] | None:
        """The teacher's share in the responses to each problem; None without a teacher.

        Args:
            probe: so many responses to each problem that the policy draws alone.
        """
        mixture = self.mixture
        if mixture is None:
            return None
        shares = mixture.shares(self.engine.version, torch.ones(len(problems)))
        if mixture.difficulty == "uniform" or not shares.any():
            return shares
        if mixture.difficulty == "given":
            difficulties = given_difficulties(problems)
        else:
            probes = probe(mixture.probe_samples)
            assert probes.rewards is not None
            difficulties = probed_difficulties(probes.rewards, probes.group_ids, self.recipe.reward_range)
        self._difficulties.append(difficulties)
        return shares * difficulties

    def path(self, index: int) -> Path:
        """The file of a batch."""
        return self.folder / self.shard.file_name(index)


def batch_seed(seed: int, index: int, rank: int = 0) -> int:
    """A seed for one batch of one process: the same in every arm and every resumed run."""
    return (seed * 1_000_003 + index) * 4_099 + rank
