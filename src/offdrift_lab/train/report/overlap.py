"""Generation beside training, as a run has stored it: its table with an arm a row, and drift by the age of tokens."""

from __future__ import annotations

from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass

from offdrift.errors import RecordError
from offdrift.records.readers.parquet import present, read_rows
from offdrift.show.json_access import number, text
from offdrift.show.numbers import percent, short
from offdrift_lab.train.report.stored import Column, StoredArm, TableCell

MB = 1e6


def _whole(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def _lag(arm: StoredArm) -> TableCell:
    """The mean, and the largest against the limit that is proved."""
    mean, largest = arm.figure("lag_mean"), arm.figure("lag_max")
    if mean is None or largest is None:
        return TableCell("–")
    if "max_lag" not in arm.schedule:
        return TableCell(f"{mean:.2f}", f"largest {largest:.0f}")
    limit = number(arm.schedule["max_lag"])
    words = "no limit" if limit is None else f"limit {limit:.0f}"
    return TableCell(f"{mean:.2f}", f"largest {largest:.0f}, {words}", flagged=limit is not None and largest > limit)


OVERLAP = (
    Column(
        "schedule",
        "Schedule",
        "",
        "",
        "When prompts start, how weights arrive, and what an update takes: `offdrift schedules NAME` has its rules.",
        cell=lambda arm: TableCell(
            text(arm.schedule.get("name")) or "–",
            ", ".join(
                filter(None, (text(arm.schedule.get("title")), "rules changed" if arm.schedule.get("changed") else ""))
            ),
        ),
    ),
    Column(
        "worker_idle",
        "Workers idle",
        "of their time",
        "lower is better",
        "Share of the workers' time in which they neither drew, loaded weights nor computed rewards: the schedule let "
        "nothing start, or too few responses were left to keep all of them busy. Below it, where workers compute "
        "rewards: the seconds that it took them, summed over workers, per update.",
        cell=lambda arm: TableCell(
            percent(arm.figure("worker_idle")),
            f"{short(seconds)} s of rewards" if (seconds := arm.figure("reward_seconds")) else "",
        ),
    ),
    Column(
        "trainer_idle",
        "Trainer idle",
        "of its time",
        "lower is better",
        "Share of the trainer's time in which it waited for groups.",
        cell=lambda arm: TableCell(percent(arm.figure("trainer_idle"))),
    ),
    Column(
        "lag",
        "Lag",
        "updates, mean",
        "lower is closer to on-policy",
        "Updates between the weights that drew the oldest token of a response and those that were trained with it: "
        "mean over responses, the largest, and the limit that is proved for the schedule.",
        cell=_lag,
    ),
    Column(
        "stale",
        "Stale",
        "of responses",
        "lower is closer to on-policy",
        "Share of responses with a token of older weights than the update's own; below it, the share whose tokens have "
        "more than one version.",
        cell=lambda arm: TableCell(
            percent(arm.figure("stale_frac")),
            f"{percent(mixed)} mixed" if (mixed := arm.figure("mixed_frac")) else "",
        ),
    ),
    Column(
        "wasted",
        "Wasted",
        "of tokens",
        "lower is better",
        "Share of the tokens drawn that were thrown away: of groups dropped or drawn again because they were too old, "
        "and of responses begun again because their worker was lost.",
        cell=lambda arm: TableCell(
            percent(arm.figure("wasted_frac")),
            f"{_whole(tokens)} tokens" if (tokens := arm.figure("wasted_tokens")) else "",
        ),
    ),
    Column(
        "groups",
        "Dropped, redrawn",
        "groups",
        "lower is better",
        "Groups that became too old: dropped, so that another prompt took their place, and drawn again.",
        cell=lambda arm: TableCell(f"{_whole(arm.figure('dropped_groups'))}, {_whole(arm.figure('redrawn_groups'))}"),
    ),
    Column(
        "sync",
        "Weights",
        "per update",
        "lower is better",
        "Seconds in which workers loaded weights, summed over workers, and the size of one copy; means over updates.",
        cell=lambda arm: TableCell(
            "–" if (seconds := arm.figure("sync_seconds")) is None else f"{short(seconds)} s",
            f"{size / MB:,.1f} MB" if (size := arm.figure("sync_bytes")) else "",
        ),
    ),
    Column(
        "lost",
        "Workers lost",
        "",
        "watch: none",
        "Workers that died or did not answer, and were replaced; what they were drawing went on elsewhere.",
        cell=lambda arm: TableCell(
            _whole(arm.figure("lost_workers")),
            f"{_whole(again)} responses begun again" if (again := arm.figure("restarted")) else "",
            flagged=bool(arm.figure("lost_workers")),
        ),
    ),
    Column(
        "pace",
        "Updates",
        "per minute",
        "higher is faster",
        "Updates per minute of wall time, without evaluations.",
        cell=lambda arm: TableCell("–" if (pace := arm.figure("updates_per_minute")) is None else f"{pace:.1f}"),
    ),
)
"""What the report says of every arm of a run with `[pipeline]`."""


@dataclass(frozen=True)
class DriftByLag:
    """Mean KL(rollout || current) of a token, nats, by how many updates old the weights were that drew it."""

    lags: list[int]
    kl: list[float]
    tokens: list[int]
    sampled: bool
    """Whether it is estimated from the log-probs of the sampled tokens (k3), the log having no exact divergences."""


COLUMNS_READ = ("rollout_version", "version", "kl_rollout_current", "logp", "logp_rollout")


def drift_by_lag(arm: StoredArm) -> DriftByLag:
    """Drift by age, from the arm's token log, one file in memory at a time; empty if it has none.

    Each token counts at the update that first trained on its response, before that update. Where the log has no exact
    KL, it is estimated by k3 = exp(d) - 1 - d, d = logp - logp_rollout. Files that cannot be read are left out.
    """
    files = [] if arm.folder is None else sorted((arm.folder / "log").glob("*.parquet"))
    sums: dict[int, float] = defaultdict(float)
    counts: Counter[int] = Counter()
    sampled = False
    for file in files:
        with suppress(RecordError):
            parts, _ = read_rows(str(file), 0, 2**62, lambda schema: present(schema, {c: c for c in COLUMNS_READ}))
            for part in parts:
                if not {"rollout_version", "logp_rollout"} <= part.lists.keys() or "version" not in part.numbers:
                    continue
                versions = part.lists["rollout_version"]
                lag = (part.numbers["version"].values.repeat_interleave(versions.lengths) - versions.values).clamp(
                    min=0
                )
                kl = part.lists.get("kl_rollout_current")
                if kl is None:
                    sampled = True
                    d = part.lists["logp"].values.double() - part.lists["logp_rollout"].values.double()
                    values = d.expm1() - d
                else:
                    values = kl.values.double()
                finite = values.isfinite()
                for age in lag[finite].unique().tolist():
                    of_age = values[finite & (lag == age)]
                    sums[age] += float(of_age.sum())
                    counts[age] += len(of_age)
    lags = sorted(counts)
    return DriftByLag(lags, [sums[lag] / counts[lag] for lag in lags], [counts[lag] for lag in lags], sampled)
