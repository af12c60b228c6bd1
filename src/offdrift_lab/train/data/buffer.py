"""Replay buffer: groups of responses that wait to be trained on, or are trained on again.

The unit is the group, all responses to one prompt as drawn together, since baselines are taken over groups. A pick is a
function of what the buffer holds and of a seed, so that a resumed run picks what the uninterrupted one would have.

Trading staleness and diversity for the cost of generation: experience replay, arXiv:2604.08706. Priorities that decay
with age: freshness-aware prioritized replay, arXiv:2604.16918. Clearing at a synchronization: OAPL, arXiv:2602.19362.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from offdrift.records.rollouts import Rollouts, concatenate
from offdrift_lab.train.settings import recipe

PRIORITY_FLOOR = 1e-6
"""Added to priorities, so that a group without reward can be picked."""

MEMORY = 0.9
"""Weight of earlier updates in the running means behind tau, per update."""

LONGEST_TAU = 1e6


@dataclass(frozen=True)
class Picked:
    """A batch to train on."""

    rollouts: Rollouts
    sample_weight: Float[Tensor, " b"] | None = None
    """Weight of each sequence's loss, where groups were picked by priority: the largest is 1."""
    earlier_uses: float = 0.0
    """Mean number of updates that were taken before on its groups' batches."""
    independent: bool = True
    """Whether the current policy and the picking know nothing of these responses: certificates assume it."""


@dataclass(frozen=True)
class Groups:
    """Bookkeeping of the groups that a buffer holds, oldest first."""

    batch: Int[Tensor, " g"]
    """Index of the drawn batch that the group is of."""
    group: Int[Tensor, " g"]
    """The group's id there."""
    version: Int[Tensor, " g"]
    """Oldest weights that drew a token of the group."""
    prompt: Int[Tensor, " g"]
    """Hash of its prompt."""
    value: Float[Tensor, " g"]
    """Mean over its sequences of what priority is made of, before age."""
    uses: Int[Tensor, " g"]
    """Batches that it was part of."""

    @staticmethod
    def of(index: int, drawn: Rollouts, priority: str) -> Groups:
        """The groups of a drawn batch, whose ids are 0, 1, ..."""
        rewards, ids = drawn.rewards, drawn.group_ids
        assert rewards is not None
        order, sizes = ids.argsort(stable=True), torch.bincount(ids)
        first = order[sizes.cumsum(0) - sizes]
        surprise = rewards.double()
        if priority == "advantage":
            surprise = surprise - (torch.bincount(ids, surprise) / sizes)[ids]
        oldest = drawn.segments.min(drawn.rollout_version.double()).long()
        return Groups(
            torch.full_like(sizes, index),
            torch.arange(len(sizes)),
            oldest[first].scatter_reduce(0, ids, oldest, "amin"),
            prompt=drawn.prompt_keys()[first],
            value=torch.bincount(ids, surprise.abs()) / sizes,
            uses=torch.zeros_like(sizes),
        )

    def __len__(self) -> int:
        return len(self.batch)

    def __getitem__(self, rows: Tensor | slice) -> Groups:
        return Groups(*(getattr(self, f.name)[rows] for f in fields(Groups)))

    def __add__(self, other: Groups) -> Groups:
        return Groups(*(torch.cat([getattr(self, f.name), getattr(other, f.name)]) for f in fields(Groups)))


@dataclass
class Buffer:
    """Drawn groups, and which of them are trained on next.

    Memory: the batches that the held groups are of, with their evidence.
    """

    settings: recipe.BufferSettings
    capacity: int
    """Groups held at most, in this process."""
    batches: dict[int, Rollouts] = field(default_factory=dict)
    """Drawn batches by index."""
    groups: Groups | None = None
    age_seen: float = 0.0
    """Running sums behind `tau`: ages of what was trained on, and -ln ESS of those updates."""
    ess_lost: float = 0.0

    def __len__(self) -> int:
        return 0 if self.groups is None else len(self.groups)

    def add(self, index: int, drawn: Rollouts) -> None:
        """Take a drawn batch's groups in; the oldest leave if there are more than the buffer holds."""
        new = self._take(index, drawn)
        self._hold((new if self.groups is None else self.groups + new)[-self.capacity :])

    def _take(self, index: int, drawn: Rollouts) -> Groups:
        self.batches[index] = drawn.with_(group_ids=drawn.group_ids.unique(return_inverse=True)[1])
        return Groups.of(index, self.batches[index], self.settings.priority)

    def expire(self, now: int) -> None:
        """Let go of groups that are too old at version `now`, or have been used as often as they may."""
        if self.groups is None:
            return
        oldest, uses = self.settings.max_age, self.settings.max_uses
        young = (now - self.groups.version) <= (math.inf if oldest is None else oldest)
        self._hold(self.groups[young & (self.groups.uses < (math.inf if uses is None else uses))])

    def clear(self) -> None:
        """Let go of everything."""
        self.batches, self.groups = {}, None

    def _hold(self, groups: Groups) -> None:
        needed = set(groups.batch.tolist())
        self.groups = groups
        self.batches = {index: drawn for index, drawn in self.batches.items() if index in needed}

    def log_probabilities(self, now: int) -> Float[Tensor, " g"]:
        """Log-probability of every group to be picked first.

            P proportional to ((value + 1e-6) exp(-age / tau))^alpha,   age = now - version, in updates

        or equal for all, with pick = "uniform". In logs, since exp(-age / tau) reaches 0 long before ratios matter.
        """
        assert self.groups is not None
        if self.settings.pick == "uniform":
            return torch.zeros(len(self), dtype=torch.float64).log_softmax(0)
        log_priority = (self.groups.value + PRIORITY_FLOOR).log() - (now - self.groups.version).double() / self.tau
        return (self.settings.alpha * log_priority).log_softmax(0)

    def pick(self, count: int, *, now: int, seed: int, progress: float) -> Picked:
        """Pick `count` different groups, at most all; each counts one use more.

            weight of a group's losses = (N P)^-beta / largest,   beta from its setting to 1 over the run

        Args:
            now: version of the trainer's weights.
            progress: share of the run that is over.

        P is exact for the first pick and approximates the later ones, which are without replacement.
        """
        assert self.groups is not None
        log_p, n = self.log_probabilities(now), len(self)
        uniform = torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        # The largest of log P + Gumbel noise are a draw without replacement.
        rows = (log_p - (-uniform.log()).log()).topk(min(count, n)).indices
        beta = self.settings.beta + (1 - self.settings.beta) * progress
        log_weight = -beta * (log_p + math.log(n))
        weight = (log_weight - log_weight[rows].max()).exp().float()
        parts = []
        for index in self.groups.batch[rows].unique().tolist():
            drawn, of_batch = self.batches[index], rows[self.groups.batch[rows] == index]
            row_of = torch.full((int(drawn.group_ids.max()) + 1,), -1)
            row_of[self.groups.group[of_batch]] = of_batch
            row = row_of[drawn.group_ids]
            parts.append(drawn.with_(group_ids=row).select((row >= 0).nonzero()[:, 0]))
        batch = concatenate(parts)
        uses = self.groups.uses[rows]
        self.groups.uses[rows] += 1
        uniformly = self.settings.pick == "uniform"
        return Picked(
            batch,
            None if uniformly else weight[batch.group_ids],
            earlier_uses=float(uses.double().mean()),
            independent=bool((uses == 0).all()) and (uniformly or len(rows) == n),
        )

    @property
    def tau(self) -> float:
        """Age at which a group's priority has fallen by a factor of e, updates.

        With tau = "ess": a batch of age a whose importance weights have the effective sample size ESS (a share of
        1) is worth ESS fresh ones. Where that is exp(-a / tau),

            tau = sum of a / sum of -ln ESS

        over past updates, each weighing 0.9 times as much as the next; within 1 and 1e6.
        """
        if self.settings.tau != "ess":
            return self.settings.tau
        return min(max(1.0, self.age_seen / max(self.ess_lost, 1e-300)), LONGEST_TAU) if self.age_seen else LONGEST_TAU

    def learn(self, metrics: Mapping[str, Any]) -> None:
        """Take an update's mean age and effective sample size into `tau`."""
        age, ess = metrics["version_lag/mean"], metrics["full/ess_seq_frac"]
        if age > 0 and 0 < ess <= 1:  # neither is NaN
            self.age_seen = MEMORY * self.age_seen + age
            self.ess_lost = MEMORY * self.ess_lost - math.log(ess)

    def sums(self, now: int) -> dict[str, Tensor]:
        """Sums behind the buffer's metrics at version `now`; add them over processes."""
        assert self.groups is not None
        age = (now - self.groups.version).double()
        return {
            "buffer/n": torch.tensor(float(len(self))),
            "buffer/age": age.sum(),
            "buffer/age2": age.square().sum(),
            "buffer/prompts": torch.tensor(float(len(self.groups.prompt.unique()))),
            "buffer/tau": torch.tensor(float(self.tau)),
            "buffer/processes": torch.tensor(1.0),
        }

    def state(self) -> dict[str, Any]:
        """State for a checkpoint; the batches are stored in files of their own."""
        groups = self.groups
        rows = [] if groups is None else torch.stack([groups.batch, groups.group, groups.uses], 1).tolist()
        return {"held": rows, "tau": [self.age_seen, self.ess_lost]}

    def load(self, state: Mapping[str, Any], read: Callable[[int], Rollouts]) -> None:
        """Take back a checkpoint's state; `read` gives a drawn batch."""
        self.clear()
        rows = torch.tensor(state["held"], dtype=torch.int64).reshape(-1, 3)
        for index in rows[:, 0].unique_consecutive().tolist():
            _, group, uses = rows[rows[:, 0] == index].T
            new = self._take(index, read(index))[group]
            new.uses.copy_(uses)
            self.groups = new if self.groups is None else self.groups + new
        self.age_seen, self.ess_lost = state["tau"]
