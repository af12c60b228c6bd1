"""`plan`: every schedule simulated on one cluster, and the answer: which one, which bound, how many workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from offdrift.errors import RecipeError
from offdrift.judge import Rules, load_rules
from offdrift_lab.plan.drift import DriftFit
from offdrift_lab.plan.phases import Phases
from offdrift_lab.plan.provisioning import meets_rule, provisioning
from offdrift_lab.plan.simulate import Outcome, simulate
from offdrift_lab.schedules import SCHEDULES, Schedule, schedule
from offdrift_lab.schedules.rules import Admission, BoundedStaleness, InFlight, PauseAt

BOUNDS = (1, 2, 4, 8)
"""Staleness bounds that are tried, updates."""
SHARES = (1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4)
"""Shares of the devices that generate, of which a sweep tries the nearest possible ones."""
ROUNDING = 1e-9
"""Relative size of differences between simulations that are none."""
BASELINE = "sync"
COLOCATED = "colocated"

Progress = Callable[[str, int, int], object]
"""Is told what is simulated next, how many simulations are over, and how many there are."""


def plan(
    phases: Phases,
    *,
    names: Sequence[str] = (),
    bounds: Sequence[int] = BOUNDS,
    splits: Sequence[int] = (),
    drift: DriftFit | None = None,
    tolerance: float | int = 0.05,
    rules: Rules | None = None,
    progress: Progress = lambda what, done, of: None,
) -> dict[str, Any]:
    """Simulate schedules, then bounds and splits of the one that is recommended.

    Args:
        names: schedules; absent: all rows of the table.
        bounds: staleness bounds of the recommended schedule that are tried, updates.
        splits: numbers of rollout workers that are tried with each of them.
        drift: adds the predicted KL of each row.
        tolerance: share of throughput that less lag is worth; see `recommended`.
        rules: whose thresholds say which predicted drift is clean; default: the built-in ones.

    Returns: what `plan.json` holds: `phases`, `baselines`, `provisioning` (ECHO-2's rule; `meets_rule` of a row),
        `schedules` and `sweep` (a row a simulation), `recommended` (one of these rows; None if every schedule has an
        unlimited lag), `drift` and `correction`.

    Raises: `RecipeError` for an unknown schedule, or a split that is not possible.
    """
    rules = rules or load_rules()
    chosen = {name: schedule(name) for name in names or SCHEDULES}
    total = len(chosen) + 1 + (BASELINE not in chosen) + len(bounds) * max(1, len(splits))
    done = 0

    def run(row: Schedule, split_phases: Phases, name: str, label: str) -> Outcome:
        nonlocal done
        progress(label, done, total)
        done += 1
        return simulate(row, split_phases, name=name)

    colocated = run(SCHEDULES[BASELINE], phases.as_colocated, COLOCATED, COLOCATED)
    outcomes = {name: run(row, phases, name, name) for name, row in chosen.items()}
    sync = outcomes.get(BASELINE) or run(SCHEDULES[BASELINE], phases, BASELINE, BASELINE)

    def row_of(
        outcome: Outcome, row: Schedule, bound: int | None, split_phases: Phases, swept: bool = False
    ) -> dict[str, Any]:
        speeds = {
            "speedup_sync": outcome.groups_per_s / sync.groups_per_s,
            "speedup_colocated": outcome.groups_per_s / colocated.groups_per_s,
        }
        rule = {"meets_rule": meets_rule(split_phases, bound)}
        return {**as_row(outcome, row, bound, split_phases, drift), **speeds, **rule, "swept": swept}

    table = [row_of(outcomes[name], row, bound_of(row.admission), phases) for name, row in chosen.items()]
    best = recommended(table, tolerance, rules.limits)
    sweep = []
    if best is not None:
        name, published = best["schedule"], chosen[best["schedule"]]
        tried = (None,) if best["bound"] is None else bounds
        variants = [(workers, bound) for workers in splits or (phases.rollout.workers,) for bound in tried]
        total = done + len(variants)
        for workers, bound in variants:
            split_phases, row = phases.split(workers), published if bound is None else bounded(published, bound)
            label = f"{name}, {workers} workers" + ("" if bound is None else f", bound {bound}")
            sweep.append(row_of(run(row, split_phases, name, label), row, bound, split_phases, swept=True))
        best = recommended([*table, *sweep], tolerance, rules.limits)
    total = done
    front = {id(row) for row in pareto([*table, *sweep])}
    for row in (*table, *sweep):
        row["on_front"] = id(row) in front
    progress("done", total, total)
    return {
        "kind": "plan",
        "phases": phases.model_dump(mode="json"),
        "baselines": {BASELINE: baseline(sync), COLOCATED: baseline(colocated)},
        "provisioning": provisioning(phases),
        "schedules": table,
        "sweep": sweep,
        "tolerance": tolerance,
        **rules.as_record(),
        "recommended": best,
        "drift": None if drift is None else drift_facts(drift),
        "correction": None if drift is None or best is None else correction(drift, best),
    }


def as_row(
    outcome: Outcome, row: Schedule, bound: int | None, phases: Phases, drift: DriftFit | None
) -> dict[str, Any]:
    """One simulation as plain values, shares of time and tokens between 0 and 1."""
    kl = {} if drift is None else {"kl": drift.kl.over(outcome.lag), "kl_p95": drift.kl(outcome.lag_quantile(0.95))}
    return {
        "schedule": outcome.schedule,
        "title": row.title,
        "bound": bound,
        "workers": outcome.workers,
        "trainer_devices": phases.trainer.devices,
        **baseline(outcome),
        **{f"worker_{state}": share for state, share in outcome.worker.items()},
        **{f"trainer_{state}": share for state, share in outcome.trainer.items()},
        "lag_mean": outcome.lag_mean,
        "lag_p95": outcome.lag_quantile(0.95),
        "lag_max": outcome.lag_max,
        "max_lag": outcome.max_lag,
        "lag": {str(lag): n for lag, n in outcome.lag.items()},
        "wasted": outcome.wasted,
        "mixed": outcome.mixed,
        **kl,
    }


def baseline(outcome: Outcome) -> dict[str, float | None]:
    """Speed of a simulation."""
    return {
        "seconds": outcome.seconds,
        "error": outcome.error,
        "groups_per_s": outcome.groups_per_s,
        "tokens_per_s": outcome.tokens_per_s,
    }


def recommended(
    rows: Iterable[dict[str, Any]], tolerance: float | int, limits: Mapping[str, float] | None = None
) -> dict[str, Any] | None:
    """The least mean lag among rows within a tolerance of the fastest; rows with an unlimited lag are left out.

    With a drift fit, rows whose predicted KL is "clean" by the diagnosis' thresholds (`limits`) are preferred to those
    that are not, and those below "large" to the rest.
    """
    candidates = [row for row in rows if row["max_lag"] is not None]
    if not candidates:
        return None
    limits = load_rules().limits if limits is None else limits
    for limit in (limits["kl_clean"], limits["kl_large"]):
        below = [row for row in candidates if row.get("kl", 0.0) < limit]
        if below:
            candidates = below
            break
    fastest = max(row["groups_per_s"] for row in candidates)
    near = [row for row in candidates if row["groups_per_s"] >= (1 - tolerance) * fastest]
    return min(near, key=lambda row: (round(row["lag_mean"], 9), -row["groups_per_s"]))


def pareto(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows that no other row beats: none is as fast with less drift, or faster with no more.

    Drift is the predicted KL if there is one, else the mean lag. Rows that are alike but for rounding do not beat each
    other.
    """
    drift = "kl" if rows and "kl" in rows[0] else "lag_mean"
    places = [(row["groups_per_s"], row[drift]) for row in rows]

    def beaten(speed: float, cost: float) -> bool:
        faster, cheaper = speed * (1 + ROUNDING), cost * (1 - ROUNDING) - ROUNDING
        slower, dearer = speed * (1 - ROUNDING), cost * (1 + ROUNDING) + ROUNDING
        return any((s > faster and c <= dearer) or (s >= slower and c < cheaper) for s, c in places)

    return [row for row, place in zip(rows, places) if not beaten(*place)]


def bound_of(rule: Admission) -> int | None:
    """The staleness bound of an admission rule, updates; None if it has none."""
    if isinstance(rule, BoundedStaleness):
        return rule.eta
    if isinstance(rule, PauseAt):
        return rule.limit
    if isinstance(rule, InFlight):
        return round(rule.alpha)
    return None


def bounded(row: Schedule, bound: int) -> Schedule:
    """A schedule with another staleness bound; what it drops as too old is as old as the bound."""
    rule = row.admission
    if isinstance(rule, BoundedStaleness):
        rule = replace(rule, eta=bound)
    elif isinstance(rule, PauseAt):
        rule = replace(rule, limit=bound)
    elif isinstance(rule, InFlight):
        rule = replace(rule, alpha=float(bound))
    else:
        raise RecipeError(f"{row.title or 'the schedule'} has no staleness bound: prompts start whenever there is room")
    old = row.too_old
    return replace(row, admission=rule, too_old=old if old.limit is None else replace(old, limit=bound))


def splits_of(phases: Phases) -> list[int]:
    """Numbers of rollout workers that a sweep tries."""
    most = (phases.devices - 1) // phases.rollout.devices
    counts = {round(share * phases.devices / phases.rollout.devices) for share in SHARES}
    return sorted({min(max(1, n), most) for n in counts} | {phases.rollout.workers})


def drift_facts(drift: DriftFit) -> dict[str, Any]:
    """The fit as plain values."""
    fits = {"kl": drift.kl} | ({} if drift.chi2 is None else {"chi2_token": drift.chi2})
    return {"source": drift.source} | {
        name: {"metric": f.metric, "a": f.a, "b": f.b, "c": f.c, "error": f.error, "lags": list(f.lags)}
        for name, f in fits.items()
    }


def correction(drift: DriftFit, row: dict[str, Any]) -> dict[str, Any]:
    """Correction that the diagnosis would ask for at a row's lags: the first method that a finding turns on."""
    findings = drift.findings({int(lag): n for lag, n in row["lag"].items()})
    first = next((f for f in findings if f.method not in (None, "disabled")), None)
    beyond = max(int(lag) for lag in row["lag"]) > drift.kl.lags[1]
    return {
        "method": "none" if first is None else first.method,
        "because": "no rule of the diagnosis fires" if not findings else (first or findings[0]).symptom,
        "fix": "" if not findings else (first or findings[0]).fix,
        "findings": [f.as_dict() for f in findings],
        "extrapolated": beyond,
    }
