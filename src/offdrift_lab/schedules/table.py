"""The table of schedules: each system's published way to overlap generation and training, as a composition of rules.

`Schedule.max_lag` is the proved limit of the version lag; a test drives every row with random durations, crashes and
speeds against it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from typing import Any

from offdrift.errors import RecipeError
from offdrift.setting import typed, typed_fields
from offdrift_lab.schedules.rules import (
    Admission,
    Always,
    BoundedStaleness,
    Consumption,
    Dispatch,
    InFlight,
    PauseAt,
    Quota,
    TooOld,
    Weights,
)


@dataclass(frozen=True, slots=True)
class Schedule:
    """A composition of rules; see `offdrift_lab.schedules.rules`."""

    admission: Admission
    dispatch: Dispatch = field(default_factory=Dispatch)
    weights: Weights = field(default_factory=Weights)
    too_old: TooOld = field(default_factory=TooOld)
    consumption: Consumption = field(default_factory=Consumption)
    sync_every: int = 1
    """T, updates between two publications of weights."""
    title: str = ""
    summary: str = ""
    cost: str = ""
    """What it costs."""
    source: str = ""

    def __post_init__(self) -> None:
        if self.sync_every < 1:
            raise ValueError(f"sync_every = {self.sync_every}: weights are published after 1 update or more")
        together = self.weights.on_new == "interrupt" or self.weights == Weights(delivery="push")
        if self.dispatch.slice_tokens is not None and not together:
            raise ValueError(
                f"slice_tokens = {self.dispatch.slice_tokens} needs workers of one version, as a response may go on "
                "on any of them; use weights that are pushed to drained workers, or that interrupt"
            )
        if self.too_old.limit is not None and self.too_old.limit < self.sync_every - 1:
            raise ValueError(
                f"too_old.limit = {self.too_old.limit} and sync_every = {self.sync_every}: the last update before a "
                f"publication finds no group younger than {self.sync_every - 1} updates, so that training would never "
                f"go on; set limit >= {self.sync_every - 1}"
            )

    @property
    def max_lag(self) -> int | None:
        """Largest version lag of any token that is trained on, updates; None if nothing limits it.

        Every response starts with the newest published weights, so at submission its lag is at most T - 1 more than
        the updates that come before the one that takes it.

        - Groups taken as submitted: of an interval between publications, of version p, at most B (p + T + a) groups
          have been submitted at its end, v = p + T - 1; the last of them is taken by update p + T + a - 1 at the
          latest: lag <= a + T - 1.
        - Groups taken as finished, weights pushed and workers drained: all groups of the interval have finished before
          the trainer goes on. First finished, first taken: the same limit.
        - Otherwise a straggler can be overtaken without end: only dropping or drawing again limits the lag.
        """
        ahead = self.admission.ahead(self.sync_every)
        drained = self.weights.on_new == "drain" and self.weights.delivery == "push"
        limits = [] if self.too_old.limit is None else [self.too_old.limit]
        if math.isfinite(ahead) and (self.consumption.order == "submitted" or drained):
            limits.append(math.ceil(ahead - 1e-9) + self.sync_every - 1)
        return min(limits, default=None)

    @property
    def selects(self) -> bool:
        """Whether what an update trains on depends on how long responses took: long ones are then missing from early
        updates, or from all of them, so that no update is an independent sample of prompts and responses.

        It does not if update k takes the groups k B to (k + 1) B - 1: in the order of submission, or because no other
        groups have been submitted.
        """
        no_others = self.admission.ahead(self.sync_every) <= 0 and self.sync_every == 1
        return self.too_old.limit is not None or not (self.consumption.order == "submitted" or no_others)

    def with_(self, **changes: Any) -> Schedule:
        """Return the schedule with some rules replaced."""
        return replace(self, **changes)


SCHEDULES: dict[str, Schedule] = {
    "sync": Schedule(
        BoundedStaleness(0),
        title="Synchronous",
        summary="the trainer waits for a batch, the workers for its update",
        cost="one side is always idle; a batch takes as long as its longest response",
        source="the baseline of every other row",
    ),
    "one_step_off": Schedule(
        BoundedStaleness(1),
        consumption=Consumption(order="submitted"),
        title="One step off",
        summary="batch k + 1 is drawn while batch k is trained on",
        cost="one version of lag; a batch still takes as long as its longest response",
        source="verl, one-step-off-policy trainer; Noukhovitch et al., arXiv:2410.18252",
    ),
    "verl_on_policy": Schedule(
        Quota(0.0),
        consumption=Consumption(take="stream"),
        title="verl, fully asynchronous: on-policy pipeline",
        summary="groups stream to the trainer, and weights are published after every update",
        cost="as sync, less the training time that fits into the batch's tail",
        source="verl, fully asynchronous policy: trigger_parameter_sync_step 1, staleness_threshold 0",
    ),
    "verl_stream": Schedule(
        Quota(0.0),
        consumption=Consumption(take="stream"),
        sync_every=4,
        title="verl, fully asynchronous: stream off-policy",
        summary="several updates between two publications, from what their first weights drew",
        cost="up to T - 1 updates of lag; the tail of every T batches",
        source="verl, fully asynchronous policy: trigger_parameter_sync_step > 1, staleness_threshold 0",
    ),
    "verl_stale": Schedule(
        Quota(0.5),
        consumption=Consumption(take="stream"),
        title="verl, fully asynchronous: stale samples",
        summary="a share of an interval's groups is drawn ahead; publication waits for responses in progress",
        cost="lag of those groups; workers drain at every publication",
        source="verl, fully asynchronous policy: staleness_threshold > 0, partial_rollout false",
    ),
    "verl_partial": Schedule(
        Quota(0.5),
        weights=Weights(on_new="interrupt"),
        consumption=Consumption(take="stream"),
        title="verl, fully asynchronous: partial rollouts",
        summary="as stale samples, but responses in progress take the new weights and go on",
        cost="responses of several versions; one prefill per interrupted response",
        source="verl, fully asynchronous policy: staleness_threshold > 0, partial_rollout true",
    ),
    "areal": Schedule(
        BoundedStaleness(4),
        weights=Weights(on_new="interrupt"),
        too_old=TooOld("correct"),
        consumption=Consumption(order="submitted"),
        title="AReaL",
        summary="bounded staleness, interruptible generation, oldest groups first",
        cost="responses of several versions; needs a decoupled objective",
        source="AReaL, arXiv:2505.24298, section 5",
    ),
    "echo_2": Schedule(
        PauseAt(3),
        weights=Weights(delivery="pull"),
        too_old=TooOld("correct"),
        consumption=Consumption(order="submitted"),
        title="ECHO-2",
        summary="generation pauses when what it starts would be too old; weights spread while training goes on",
        cost="the lag that the user allows; stragglers hold the trainer up",
        source="ECHO-2, arXiv:2602.02192",
    ),
    "roll_flash": Schedule(
        InFlight(2.0),
        weights=Weights(on_new="interrupt"),
        too_old=TooOld("redraw", limit=2),
        title="ROLL Flash",
        summary="(1 + alpha) B groups outstanding; what has become too old is aborted and drawn again",
        cost="tokens of aborted responses",
        source="ROLL Flash, arXiv:2510.11345",
    ),
    "periodic": Schedule(
        BoundedStaleness(0),
        consumption=Consumption(take="stream"),
        title="Periodic asynchrony",
        summary="groups of a batch enter its gradient as they finish; weights change after the batch: on-policy",
        cost="the tail of every batch",
        source="Periodic Asynchrony, arXiv:2511.18871",
    ),
    "seer": Schedule(
        BoundedStaleness(0),
        dispatch=Dispatch(slice_tokens=2048, order="longest"),
        title="Seer",
        summary="synchronous; responses move between workers in slices, those of long groups first",
        cost="a shared cache of prefixes, or one prefill per slice",
        source="Seer, arXiv:2511.14617; its drafting in groups belongs to the engine (docs/speculative.md)",
    ),
    "compassmax": Schedule(
        BoundedStaleness(0),
        dispatch=Dispatch(order="longest"),
        consumption=Consumption(take="stream"),
        title="CompassMax",
        summary="synchronous; groups foretold to be long first; rewards of finished groups beside drawing",
        cost='a group\'s length is known from its first response on; rewards on workers: pipeline.rewards = "workers"',
        source="CompassMax-V3-Thinking, arXiv:2512.07710, after a description; lengths foretold as in Seer",
    ),
    "dora": Schedule(
        BoundedStaleness(3),
        weights=Weights(on_new="finish", delivery="pull", versions=3),
        too_old=TooOld("drop", limit=3),
        title="DORA",
        summary="several versions are alive; every response ends on the version it began with",
        cost="memory of several versions on every worker; dropped groups",
        source="DORA, arXiv:2604.26256",
    ),
    "llama_rl": Schedule(
        BoundedStaleness(1),
        dispatch=Dispatch(to="push"),
        weights=Weights(on_new="drain", delivery="push"),
        too_old=TooOld("correct"),
        consumption=Consumption(order="submitted"),
        title="LlamaRL",
        summary="one step of overlap; weights go from the trainer's memory straight to the workers'",
        cost="one version of lag, corrected by importance weights",
        source="LlamaRL, arXiv:2505.24034",
    ),
    "asyncflow": Schedule(
        BoundedStaleness(1),
        consumption=Consumption(take="stream"),
        title="AsyncFlow",
        summary="groups stream through a transfer queue; the next batch is drawn before this one's update",
        cost="one version of lag",
        source="AsyncFlow, arXiv:2507.01663",
    ),
    "distflow": Schedule(
        BoundedStaleness(0),
        dispatch=Dispatch(to="push"),
        title="DistFlow",
        summary="synchronous; every worker has a share of the prompts of its own and no central queue",
        cost="workers wait for the slowest share",
        source="DistFlow, arXiv:2507.13833; its controllers, one beside every worker, are one scheduler here",
    ),
    "laminar": Schedule(
        InFlight(3.0),
        weights=Weights(on_new="drain", delivery="pull"),
        title="Laminar",
        summary="every worker pulls the newest weights from a store between two of its batches",
        cost="nothing limits the lag of a straggler; a tier of relays",
        source="Laminar, arXiv:2510.12633; its relays are one store here, and repacking of long tails is not modeled",
    ),
    "unbounded": Schedule(
        Always(),
        weights=Weights(on_new="interrupt", delivery="pull"),
        title="Unbounded",
        summary="workers never wait, except for room in the store",
        cost="nothing limits the lag",
        source="the other end of the scale, to compare with",
    ),
}
"""Every schedule by its name (docs/schedules.md), as a composition of rules."""


def schedule(name: str) -> Schedule:
    """A row of the table. Raises: `RecipeError` naming the nearest names if there is none."""
    from difflib import get_close_matches

    if name not in SCHEDULES:
        near = get_close_matches(name, SCHEDULES, 3) or list(SCHEDULES)
        raise RecipeError(f"unknown schedule {name!r}; did you mean {', '.join(near)}? See `offdrift schedules`")
    return SCHEDULES[name]


CHANGEABLE = ("admission", "dispatch", "weights", "too_old", "consumption")


def override(row: Schedule, changes: Mapping[str, Any]) -> Schedule:
    """The row with single rules changed.

    Paths: `sync_every`, and `PART.FIELD` with a part of `CHANGEABLE`; `admission.rule` names another rule of `RULES`,
    whose fields stand beside it. Nested mappings are paths, too.

    Raises: `RecipeError` naming the path, the value, and what there is.

    Example:
        >>> override(schedule("areal"), {"admission.eta": 2, "consumption": {"order": "submitted"}}).max_lag
        2
    """
    by_part: dict[str, dict[str, Any]] = {}
    for part, value in changes.items():
        head, _, name = part.partition(".")
        values = value if isinstance(value, Mapping) and not name else {name: value}
        by_part.setdefault(head, {}).update(values)
    try:
        for part, values in by_part.items():
            if part == "sync_every":
                _check_count(part, every := typed(part, values.get(""), int))
                row = row.with_(sync_every=every)
            elif part in CHANGEABLE:
                row = row.with_(**{part: _changed(getattr(row, part), part, dict(values))})
            else:
                raise RecipeError(f"{part!r} is no part of a schedule; there are sync_every, {', '.join(CHANGEABLE)}")
    except ValueError as e:
        raise e if isinstance(e, RecipeError) else RecipeError(str(e)) from e
    return row


def _changed(part: Any, path: str, values: dict[str, Any]) -> Any:
    """A rule with other values; `rule` names another admission rule, which starts from those values alone."""
    kind: type = type(part)
    before = {f.name: getattr(part, f.name) for f in fields(part)}
    if path == "admission" and "rule" in values:
        name = values.pop("rule")
        if name not in RULES:
            raise RecipeError(f"admission.rule = {name!r}: there are {', '.join(RULES)}")
        kind = RULES[name]
        before = {k: x for k, x in before.items() if k in {f.name for f in fields(kind)}}
    values = typed_fields(kind, values, path)
    for name, value in values.items():
        _check_count(f"{path}.{name}", value)
    if missing := {f.name for f in fields(kind) if f.default is MISSING} - before.keys() - values.keys():
        raise RecipeError(f"{path}.rule = {kind.__name__!r} needs {path}.{min(missing)}")
    return kind(**{**before, **values})


def _check_count(path: str, value: Any) -> None:
    """Raise `RecipeError` if a value is a number below 0, or without end."""
    if isinstance(value, int | float) and not 0 <= value < math.inf:
        whole = "whole " * isinstance(value, int)
        raise RecipeError(f"{path} = {value!r}: must be a {whole}number, 0 or more")


def parts_of(row: Schedule) -> dict[str, Any]:
    """The rules of a schedule as plain values, defaults included, for JSON and for a run's record."""

    def plain(part: Any) -> Any:
        if not is_dataclass(part):
            return part
        values = {f.name: plain(getattr(part, f.name)) for f in fields(part)}
        return {"rule": type(part).__name__, **values} if type(part).__name__ in RULES else values

    names = ("admission", "dispatch", "weights", "too_old", "consumption", "sync_every")
    return {name: plain(getattr(row, name)) for name in names} | {"max_lag": row.max_lag}


RULES: dict[str, type] = {rule.__name__: rule for rule in (Always, BoundedStaleness, Quota, InFlight, PauseAt)}
"""Admission rules by name."""


# -- in words, for the terminal, for JSON and for docs/schedules.md

SYMBOLS = {
    "B": "groups per update",
    "T": "updates between two publications of weights",
    "v": "the trainer's version: updates taken",
    "p": "the newest published version",
    "lag": "v less the version that drew a token, at the update that trains on it",
}
NO_LIMIT = "nothing limits it: a straggler can be overtaken without end"


def facts(name: str) -> dict[str, Any]:
    """Everything that is known of a row. Raises: `RecipeError` naming similar names if there is none.

    Example:
        >>> facts("areal")["max_lag"], facts("areal")["rules"]["admission"]
        (4, 'bounded staleness: floor((n - 1) / B) <= v + 4, n groups submitted')
    """
    row = schedule(name)
    return {
        "name": name,
        "title": row.title,
        "summary": row.summary,
        "rules": {
            "admission": admission_words(row.admission),
            "dispatch": dispatch_words(row),
            "weights": weights_words(row),
            "too old": too_old_words(row),
            "consumption": consumption_words(row),
        },
        "selects": row.selects,
        "versions_per_response": "several" if row.weights.mixes else "one",
        "cost": row.cost,
        "source": row.source,
        **parts_of(row),
    }


def catalog() -> dict[str, dict[str, Any]]:
    """Facts of all rows, by name."""
    return {name: facts(name) for name in SCHEDULES}


def admission_words(rule: Admission) -> str:
    """When another prompt may start."""
    if isinstance(rule, Always):
        return "always, while the store has room"
    if isinstance(rule, BoundedStaleness):
        return f"bounded staleness: floor((n - 1) / B) <= v + {rule.eta}, n groups submitted"
    if isinstance(rule, Quota):
        return f"quota: at most {1 + rule.staleness:g} B T groups between publications, leftovers included"
    if isinstance(rule, InFlight):
        return f"in flight: at most {1 + rule.alpha:g} B groups started and not trained on"
    if isinstance(rule, PauseAt):
        return f"pause: while floor(outstanding / B) + v - p would exceed {rule.limit}"
    return type(rule).__name__


def dispatch_words(row: Schedule) -> str:
    """Say where a response is drawn."""
    rule = row.dispatch
    if rule.to == "push":
        return "pushed to the worker with the fewest responses when its group starts"
    words = "pulled from one queue by whichever worker has room"
    if rule.slice_tokens is not None:
        words += f", {rule.slice_tokens:,} tokens at a time"
    if rule.order == "longest":
        words += "; the first response of every group first, then siblings of the longest"
    return words


def weights_words(row: Schedule) -> str:
    """Say how new weights arrive."""
    rule = row.weights
    by = "pushed to all workers, the trainer waits" if rule.delivery == "push" else "pulled by each worker"
    when = {
        "drain": "once what runs has ended",
        "interrupt": "at once: responses go on behind their prefixes, whose keys and values are "
        + {"recompute": "computed again", "keep": "kept"}[rule.cache],
        "finish": f"at once, beside the old ones: up to {rule.versions} versions on a worker, one per response",
    }[rule.on_new]
    every = "after every update" if row.sync_every == 1 else f"after every {row.sync_every} updates"
    return f"published {every}; {by}, {when}"


def too_old_words(row: Schedule) -> str:
    """Say what becomes of groups that are too old."""
    rule = row.too_old
    return {
        "train": "trained on as they are",
        "correct": "trained on, by a method that corrects for drift; others are refused",
        "drop": f"dropped above a lag of {rule.limit}; another prompt takes their place",
        "redraw": f"drawn again above a lag of {rule.limit}",
    }[rule.action]


def consumption_words(row: Schedule) -> str:
    """Say what an update takes."""
    rule = row.consumption
    order = "first finished, first taken" if rule.order == "finished" else "in the order of submission"
    take = "a whole batch" if rule.take == "batch" else "streamed: each group enters the gradient when it is there"
    return f"{take}, {order}"


def lag_words(row: Schedule) -> str:
    """The limit of the version lag."""
    return NO_LIMIT if row.max_lag is None else f"at most {row.max_lag} update{'s' * (row.max_lag != 1)}"
