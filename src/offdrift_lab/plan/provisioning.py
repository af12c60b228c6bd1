"""ECHO-2's provisioning rule beside the simulation: how many workers keep the trainer busy, at which bound.

Its authors relate training time, the time that weights take to spread, and the throughput of rollouts, and size a
cluster so that the trainer never waits. The formula could not be read; after a description it is taken to be

    throughput >= B / T_train     and     T_spread <= S T_train

for B groups an update and a staleness bound of S updates. It knows no tails: lengths count by their mean, and every
worker has all of its slots filled. What a bound really costs is what `simulate` says.

Source: ECHO-2, arXiv:2602.02192, after a description (abstract); the rule's form is a reading of it, and unverified.
"""

from __future__ import annotations

import math
from typing import Any

from offdrift_lab.plan.phases import Phases


def train_seconds(phases: Phases) -> float:
    """Seconds of an update, T_train."""
    return phases.trainer.group * phases.batch.groups + phases.trainer.update


def groups_per_second(phases: Phases) -> float:
    """Groups that one worker draws per second, all of its slots filled; prefills count.

    Example:
        >>> from offdrift_lab.plan.phases import EXAMPLE
        >>> round(groups_per_second(EXAMPLE), 4)
        0.1143
    """
    rollout, lengths, samples = phases.rollout, phases.lengths, phases.batch.samples
    seconds = lengths.average * rollout.token_seconds(rollout.slots) / rollout.slots + rollout.prefill * lengths.prompt
    return 1 / (samples * seconds)


def provisioning(phases: Phases) -> dict[str, Any]:
    """Answer of the rule for a cluster.

    Returns: `train_seconds`; `needed` and `capacity`, groups per second that the trainer takes and the workers draw;
        `workers`, the fewest that keep it busy (None: no number does); `spread_seconds`, for weights to reach a worker;
        `bound`, the smallest staleness bound in updates that hides them (None: none does).

    Example:
        >>> from offdrift_lab.plan.phases import EXAMPLE
        >>> rule = provisioning(EXAMPLE)
        >>> rule["workers"], rule["bound"]
        (8, 1)
    """
    busy, spread = train_seconds(phases), phases.sync.load
    needed = phases.batch.groups / busy if busy else math.inf
    one = groups_per_second(phases)
    return {
        "train_seconds": busy,
        "needed": needed,
        "capacity": one * phases.rollout.workers,
        "workers": math.ceil(needed / one - 1e-9) if busy else None,
        "spread_seconds": spread,
        "bound": math.ceil(spread / busy - 1e-9) if busy else None if spread else 0,
    }


def meets_rule(phases: Phases, bound: int | None) -> bool:
    """Whether a number of workers and a staleness bound (None: no limit) satisfy both conditions."""
    rule = provisioning(phases)
    if rule["workers"] is None or rule["bound"] is None:
        return False
    return rule["workers"] <= phases.rollout.workers and (bound is None or rule["bound"] <= bound)
