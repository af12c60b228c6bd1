"""Rewards that rollout workers compute beside generation (`pipeline.rewards = "workers"`), a group at a time.

A group's rewards are ordered from the least busy worker as soon as its last response has ended, and the trainer finds
them there when it takes the group. What a lost worker was to compute, or what a resumed run does not have, the trainer
computes. A reward is a function of the prompt and the completion, so that nothing else of a run depends on who does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from offdrift.errors import RewardError
from offdrift_lab.train.data.problems import Problem
from offdrift_lab.train.data.rewards import RewardFunction, Rewards, find_reward
from offdrift_lab.train.data.tasks import find_task, rewards_of


@dataclass(frozen=True)
class RewardSpec:
    """The rewards that a worker computes: a recipe's `reward`, else those of its `task`."""

    task: str
    reward: str | None
    folder: str
    """The trainer's working folder, where a function is looked for."""

    def find(self) -> RewardFunction:
        """Find the function that scores completions, in this process. Raises: `RecipeError` if there is none here."""
        if self.reward is not None:
            return find_reward(self.reward, folder=Path(self.folder))
        return partial(rewards_of, find_task(self.task))


class Score(NamedTuple):
    """An order: compute the rewards of a group."""

    group: int
    attempt: int
    completions: tuple[str, ...]
    problems: tuple[Problem, ...]


class Scored(NamedTuple):
    """The rewards of a group, by a worker."""

    group: int
    attempt: int
    rewards: Rewards


@dataclass
class _Asked:
    """Rewards that are wanted of a worker; the future has None if nobody will send them."""

    order: Score
    future: Future[Rewards | None] = field(default_factory=Future)
    worker: str | None = None

    def give_up(self) -> None:
        if not self.future.done():
            self.future.set_result(None)


class RewardLedger:
    """Groups' rewards that are wanted, who computes them, and what has come. Knows no process and no clock."""

    def __init__(self) -> None:
        self._asked: dict[int, _Asked] = {}  # by number of the group, until the trainer takes it or it is dropped
        self._under_way: list[_Asked] = []  # those that have no result yet

    def want(self, order: Score) -> None:
        """A group is complete; another attempt at it before this one counts no more."""
        self.forget(order.group)
        self._asked[order.group] = asked = _Asked(order)
        self._under_way.append(asked)

    def assign(self, busy: Mapping[str, int]) -> list[tuple[str, Score]]:
        """Orders for workers, the least busy first.

        Args:
            busy: responses that each worker has in progress. Without a worker the trainer computes what is wanted.
        """
        waiting = [asked for asked in self._under_way if asked.worker is None]
        if not busy:
            self._end(waiting)
            return []
        load = {name: [count, 0] for name, count in busy.items()}
        for asked in waiting:
            asked.worker = min(load, key=lambda name: (load[name], name))
            load[asked.worker][1] += 1
        return [(asked.worker, asked.order) for asked in waiting if asked.worker is not None]

    def arrived(self, scored: Scored) -> None:
        """A worker has computed the rewards of a group."""
        for asked in self._under_way:
            if asked.order[:2] == scored[:2]:
                asked.future.set_result(scored.rewards)
        self._under_way = [asked for asked in self._under_way if not asked.future.done()]

    def lost(self, worker: str) -> None:
        """A worker is gone: the trainer computes what it was to."""
        self._end([asked for asked in self._under_way if asked.worker == worker])

    def take(self, group: int) -> Future[Rewards | None] | None:
        """Rewards of a group that goes to the trainer; None if no worker was asked."""
        asked = self._asked.pop(group, None)
        return None if asked is None else asked.future

    def forget(self, group: int) -> None:
        """A group is dropped, or drawn again."""
        asked = self._asked.pop(group, None)
        if asked is not None:
            self._end([asked])

    def clear(self) -> None:
        """Forget all: the run goes on from a checkpoint, which has none."""
        self._end(self._under_way)
        self._asked = {}

    def _end(self, given_up: Sequence[_Asked]) -> None:
        for asked in given_up:
            asked.give_up()
        self._under_way = [asked for asked in self._under_way if not asked.future.done()]


Scorer = Callable[[int, int, Sequence[Sequence[int]]], Score]
"""Makes the order for a group from its number, the attempt at it, and the tokens of its responses."""


def joined(parts: Sequence[Rewards]) -> Rewards:
    """Rewards of several groups as those of one batch. Raises: `RewardError` if they have other components."""
    names = {tuple(sorted(part.components)) for part in parts}
    if len(names) > 1:
        first, second, *_ = (", ".join(map(repr, of)) or "none" for of in sorted(names))
        raise RewardError(
            f"the reward returned the components {first} for one group and {second} for another; return the same names "
            "for every completion"
        )
    total = tuple(x for part in parts for x in part.total)
    return Rewards(total, {name: tuple(x for p in parts for x in p.components[name]) for name in parts[0].components})
