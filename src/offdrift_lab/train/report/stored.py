"""A stored run, read back also while it still runs: its numbers, its table with an arm a row, and its verdict.

Numbers that are missing, null or unknown stay absent. A line that cannot be read is skipped and counted.
Only a folder without a run is refused. The verdict is built from the table's numbers: a lead that the number of
held-out prompts cannot tell from chance is called that.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from offdrift.errors import RecipeError, RecordError
from offdrift.judge import load_rules
from offdrift.judge.rules_record import choose_rules
from offdrift.show.json_access import items, mapping, number, numbers, read_lines, text
from offdrift.show.numbers import duration, fixed, percent, short
from offdrift.texts import read_json
from offdrift_lab.schedules import override as with_rules
from offdrift_lab.schedules import schedule
from offdrift_lab.train.report.diagnosis import findings_again, stored_context

FORMAT = 1
"""The layout of run folders that this reader reads."""

Row = Mapping[str, object]

REMARK = "Remark 4.3 of the Trust Region Masking paper asks to watch the accepted share"
FEW_ACCEPTED = "accepted {share} of the sequences, below {floor}: updates rest on few sequences (Remark 4.3)"
"""Note of an arm whose gates accepted less than `acceptance_low`."""
EARLIER_NOTE = "accepted "
"""Beginning of that note in summaries of earlier versions, which stored it."""

Weighted = list[tuple[float, float]]
"""Values of a metric, each with the tokens of its update."""


def _mean(values: Weighted) -> float:
    return sum(v for v, _ in values) / len(values)


SUMMARY: dict[str, tuple[str, Callable[[Weighted], float]]] = {
    "reward_train_last": ("reward/mean", lambda values: values[-1][0]),
    "kl_mean": (
        "divergence/kl_rollout_current_mean",
        lambda values: sum(v * tokens for v, tokens in values) / sum(tokens for _, tokens in values),
    ),
    "kl_max": ("divergence/kl_rollout_current_max", lambda values: max(values)[0]),
    "acceptance": ("gate/acceptance_seq", _mean),
    "acceptance_min": ("gate/acceptance_seq", lambda values: min(values)[0]),
    "ess_frac": ("full/ess_frac", _mean),
    "bound": ("certificate/kl_seq", _mean),
    "falsified_updates": ("certificate/falsified", lambda values: int(sum(v for v, _ in values))),
    "log_ppl_gap": ("full/log_ppl_gap", _mean),
    "tokens_per_s": ("throughput/tokens_per_s", _mean),
}
"""Numbers of an arm's row of the table, from its metrics: divergences are means over tokens, others over updates."""


def summary_numbers(metrics: Sequence[Row], evals: Sequence[Row]) -> dict[str, float | None]:
    """The numbers of an arm's row of the table; None where nothing was recorded."""
    rewards = _points(evals, "reward")[1] or [None]
    figures: dict[str, float | None] = {"reward_before": rewards[0], "reward_after": rewards[-1]}
    for name, (key, reduce) in SUMMARY.items():
        values = [(v, number(m.get("batch/tokens")) or 1.0) for m in metrics if (v := number(m.get(key))) is not None]
        figures[name] = reduce(values) if values else None
    return figures | overlap_numbers(metrics)


def lag_counts(metrics: Iterable[Row]) -> list[float]:
    """Responses by the lag (updates) of their oldest token, over all these rows.

    Example:
        >>> lag_counts([{"pipeline/lag_counts": [3, 1]}, {}, {"pipeline/lag_counts": [2, None, 4]}])
        [5.0, 1.0, 4.0]
    """
    counts = ([n or 0.0 for n in numbers(row.get("pipeline/lag_counts"))] for row in metrics)
    return list(map(sum, itertools.zip_longest(*counts, fillvalue=0.0)))


def _share(part: float, of: float) -> float | None:
    """The part of something; None of nothing."""
    return part / of if of else None


@dataclass(frozen=True)
class PipelineBatches:
    """Batches of an asynchronous schedule: the rows of metrics that speak of one each."""

    rows: Sequence[Row]
    seconds: Sequence[float]
    """Time of each, since the one before it."""

    @classmethod
    def of(cls, metrics: Sequence[Row]) -> PipelineBatches:
        """Take the rows with counts of lags; the time of the others counts for the next of those."""
        rows, seconds, since_last = [], [], 0.0
        for row in metrics:
            since_last += number(row.get("throughput/seconds")) or 0.0
            if isinstance(row.get("pipeline/lag_counts"), list):
                rows.append(row)
                seconds.append(since_last)
                since_last = 0.0
        return cls(rows, seconds)

    def numbers(self, key: str) -> list[float]:
        """A metric of every batch; 0 where it was not recorded."""
        return [number(row.get(key)) or 0.0 for row in self.rows]

    def mean(self, key: str, weights: Sequence[float] | None = None) -> float | None:
        """The mean of a metric over the batches that recorded it, weighted; None where no weight is left."""
        weights = [1.0] * len(self.rows) if weights is None else weights
        values = [(v, w) for row, w in zip(self.rows, weights, strict=True) if (v := number(row.get(key))) is not None]
        return _share(sum(v * w for v, w in values), sum(w for _, w in values))


def overlap_numbers(metrics: Sequence[Row]) -> dict[str, float | None]:
    """Summary of an arm's asynchronous schedule over the whole run; empty where generation and training alternated.

    Idle shares are of the time, lags and shares of responses of all responses, `wasted_frac` of all tokens drawn;
    counts are sums, `reward_seconds`, `sync_seconds` and `sync_bytes` means over batches.
    """
    batches = PipelineBatches.of(metrics)
    if not batches.rows:
        return {}
    by_lag = lag_counts(batches.rows)
    responses = [sum(lag_counts([row])) for row in batches.rows]
    lengths = batches.numbers("response/length_mean")
    trained = sum(n * length for n, length in zip(responses, lengths, strict=True))
    wasted, seconds = sum(batches.numbers("pipeline/wasted_tokens")), sum(batches.seconds)
    return {
        "worker_idle": batches.mean("pipeline/worker_idle", batches.seconds),
        "trainer_idle": batches.mean("pipeline/trainer_idle", batches.seconds),
        "lag_mean": _share(sum(lag * n for lag, n in enumerate(by_lag)), sum(by_lag)),
        "lag_max": max((lag for lag, n in enumerate(by_lag) if n), default=None),
        "stale_frac": _share(sum(by_lag[1:]), sum(by_lag)),
        "mixed_frac": batches.mean("pipeline/mixed_frac", responses),
        "wasted_tokens": wasted,
        "wasted_frac": _share(wasted, wasted + trained),
        **{
            name: sum(batches.numbers(f"pipeline/{name}"))
            for name in ("dropped_groups", "redrawn_groups", "restarted", "lost_workers")
        },
        "reward_seconds": batches.mean("pipeline/reward_seconds"),
        "sync_seconds": batches.mean("pipeline/sync_seconds"),
        "sync_bytes": batches.mean("pipeline/sync_bytes"),
        "updates_per_minute": _share(60 * len(metrics), seconds),
    }


@dataclass(frozen=True)
class Sample:
    """One stored rollout; every per-token list is as long as `tokens`, None where unknown."""

    update: int | None
    prompt: str
    reward: float | None
    accepted: bool | None
    finish: str
    tokens: tuple[str, ...]
    kl: tuple[float | None, ...]
    tv: tuple[float | None, ...]
    logp_rollout: tuple[float | None, ...]
    weight: tuple[float | None, ...]
    context: Mapping[int, str] = field(default_factory=dict)
    """What an environment wrote before a token, by the token's place."""

    @staticmethod
    def of(row: Row) -> Sample:
        """A line of `samples.jsonl`."""
        tokens = tuple(map(str, items(row.get("tokens"))))
        accepted, update = row.get("accepted"), number(row.get("update"))
        columns = {key: items(row.get(key))[: len(tokens)] for key in ("kl", "tv", "logp_rollout", "weight")}
        return Sample(
            update=None if update is None else int(update),
            prompt=str(row.get("prompt") or ""),
            reward=number(row.get("reward")),
            accepted=accepted if isinstance(accepted, bool) else None,
            finish=str(row.get("finish") or ""),
            tokens=tokens,
            context={
                int(place): text(words)
                for place, words in (pair for pair in map(items, items(row.get("context"))) if len(pair) == 2)
                if number(place) is not None
            },
            **{key: tuple(number(v) for _, v in itertools.zip_longest(tokens, x)) for key, x in columns.items()},
        )

    @property
    def kl_max(self) -> float:
        """Largest stored KL of a token (nats); 0 where none is stored."""
        return max((v for v in self.kl if v is not None), default=0.0)


@dataclass(frozen=True)
class StoredArm:
    """One arm of a run: its summary, and the rows it wrote, in order of update."""

    name: str
    finished: bool
    summary: Row = field(default_factory=dict)
    metrics: tuple[Row, ...] = ()
    evals: tuple[Row, ...] = ()
    samples: tuple[Sample, ...] = ()
    findings: tuple[Row, ...] = ()
    """What the diagnosis found while it trained, each at the update at which it fired first."""
    trained_return: Row = field(default_factory=dict)
    """The return that its steps raise, in place of J; empty for runs that did not store it."""
    schedule: Row = field(default_factory=dict)
    """Name, title and limit of the version lag (optimizer steps) of its schedule, and whether rules were changed; empty
    where generation and training alternated."""
    folder: Path | None = None
    """Where it is stored."""
    limits: Mapping[str, float] = field(default_factory=lambda: load_rules().limits)
    """Thresholds that it is judged by (`Rules.limits`)."""
    skipped_lines: int = 0
    """Lines inside a file that were not JSON objects (a half-written last one is not counted)."""

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Updates at which a metric was recorded, and its finite values there."""
        return _points(self.metrics, key)

    def held_out(self) -> tuple[list[int], list[float]]:
        """Updates at which the policy was evaluated, and the mean reward there."""
        return _points(self.evals, "reward")

    def figure(self, key: str) -> float | None:
        """A number of the summary, None if it is absent."""
        return number(self.summary.get(key))

    def label(self, key: str) -> str:
        """A text of the summary, empty if it is absent."""
        value = self.summary.get(key)
        return "" if value is None else str(value)

    @property
    def updates(self) -> int:
        """Optimizer steps taken so far."""
        last = number(self.metrics[-1]["update"]) if self.metrics else None
        return int(self.figure("updates") or last or 0)

    @property
    def proved(self) -> tuple[int, str] | None:
        """The latest update whose batch was new to the policy, and what its certificate says."""
        for row in reversed(self.metrics):
            words, update = row.get("certificate/verdict"), number(row.get("update"))
            if isinstance(words, str) and update is not None and row.get("certificate/fresh"):
                return int(update), words
        return None

    @property
    def certificates(self) -> int:
        """Number of certified batches that were new to the policy: as many looks at the data."""
        fresh = [row for row in self.metrics if row.get("certificate/fresh")]
        return sum(isinstance(row.get("certificate/verdict"), str) for row in fresh)

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks on the numbers, such as gates that never acted."""
        notes = tuple(x for x in map(str, items(self.summary.get("notes"))) if not x.startswith(EARLIER_NOTE))
        share, floor = self.figure("acceptance"), self.limits["acceptance_low"]
        if self.finished and share is not None and share < floor:
            notes = (FEW_ACCEPTED.format(share=percent(share), floor=f"{100 * floor:g} %"), *notes)
        if self.skipped_lines:
            plural = "line was" if self.skipped_lines == 1 else "lines were"
            notes += (f"{self.skipped_lines} unreadable {plural} skipped in its files",)
        return notes


@dataclass(frozen=True)
class Run:
    """A training run: its recipe, the versions of its software, and its arms."""

    name: str
    recipe: Row
    started: str
    seconds: float | None
    versions: Row
    model: Row
    arms: tuple[StoredArm, ...]
    judged_by: str = ""
    """Sentence on the rules that its verdict and findings are judged by."""


def read_run(run_dir: Path, rules: Path | None = None) -> Run:
    """Everything that a run has stored so far, judged by the rules that it was started with.

    Args:
        run_dir: folder with `run.json` and one folder per arm under `arms/`.
        rules: a rules file to judge it by instead: its findings are then made again from the stored metrics.

    Raises: `RecordError` if the folder holds no readable `run.json` of format 1; `RecipeError` if the rules file is
        wrong, or the stored one is damaged.
    """
    path = run_dir / "run.json"
    try:
        head = read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        raise RecordError(
            f"{run_dir} holds no run.json, so it is not a run folder; give the folder that training printed at its end"
        ) from None
    except ValueError as error:
        raise RecordError(f"{path} is not JSON ({error}); restore it, or train again") from None
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        stored = head.get("format") if isinstance(head, dict) else type(head).__name__
        raise RecordError(
            f"{path} has format {stored!r}, this version reads format {FORMAT}; "
            "rebuild the report with the version that trained"
        )
    table = {str(row["arm"]): row for row in items(head.get("table")) if mapping(row).get("arm")}
    chosen = choose_rules(rules, head, str(path))
    folders = sorted(p for p in (run_dir / "arms").glob("*") if p.is_dir())
    trained_returns = mapping(head.get("trained_return") or head.get("raises"))  # until 0.1: "raises"
    schedules = _schedules(mapping(head.get("recipe")))
    arms = [
        replace(
            _read_arm(folder, table),
            trained_return=mapping(trained_returns.get(folder.name)),
            schedule=schedules.get(folder.name, {}),
            limits=chosen.rules.limits,
        )
        for folder in folders
    ]
    if chosen.given:
        contexts = [stored_context(head, folder.name) for folder in folders]
        again = [findings_again(arm.metrics, arm.evals, c, chosen.rules) for arm, c in zip(arms, contexts, strict=True)]
        arms = [replace(arm, findings=tuple(judged)) for arm, judged in zip(arms, again, strict=True)]
    without_folder = table.keys() - {arm.name for arm in arms}
    arms += [StoredArm(name, True, table[name], limits=chosen.rules.limits) for name in without_folder]
    planned = mapping(mapping(head.get("recipe")).get("arms"))  # in this order they run
    order = {name: i for i, name in enumerate({**planned, **table})}
    return Run(
        name=str(head.get("name") or run_dir.name),
        recipe=mapping(head.get("recipe")),
        started=str(head.get("started") or ""),
        seconds=number(head.get("seconds")),
        versions=mapping(head.get("versions")),
        model=mapping(head.get("model")),
        arms=tuple(sorted(arms, key=lambda arm: order.get(arm.name, len(order)))),
        judged_by=chosen.words,
    )


def _schedules(recipe: Row) -> dict[str, Row]:
    """The schedule of each arm, as `[pipeline]` and the arm say; what this version's table lacks is a name alone."""
    pipeline, optim = mapping(recipe.get("pipeline")), mapping(recipe.get("optim"))
    if not pipeline:
        return {}
    steps = (number(optim.get("epochs")) or 1) * (number(optim.get("minibatches")) or 1)
    followed: dict[str, Row] = {}
    for arm, settings in mapping(recipe.get("arms")).items():
        own = mapping(settings)
        name = text(own.get("schedule")) or text(pipeline.get("schedule"))
        rules = [mapping(part.get("rules")) for part in (pipeline, own)]
        followed[arm] = {"name": name, "changed": any(rules)}
        with suppress(RecipeError, LookupError, TypeError, ValueError):
            row = with_rules(with_rules(schedule(name), rules[0]), rules[1])
            limit = None if row.max_lag is None else steps * row.max_lag
            followed[arm] = {**followed[arm], "title": row.title, "max_lag": limit}
    return followed


def _read_arm(folder: Path, table: Mapping[str, Row]) -> StoredArm:
    files = (folder / f"{name}.jsonl" for name in ("metrics", "eval", "samples", "findings"))
    (metrics, evals, samples, findings), skipped = zip(*map(read_lines, files), strict=True)
    summary: Row = {}
    with suppress(FileNotFoundError, ValueError):  # not written yet, or being written
        summary = mapping(read_json(folder / "summary.json"))
    summary = summary or table.get(folder.name, {})
    metrics, evals = _by_update(metrics), _by_update(evals)
    return StoredArm(
        name=str(summary.get("arm") or folder.name),
        finished=bool(summary),
        summary={**overlap_numbers(metrics), **summary} if summary else summary_numbers(metrics, evals),
        folder=folder,
        metrics=metrics,
        evals=evals,
        samples=tuple(map(Sample.of, samples)),
        findings=_once(findings),
        skipped_lines=sum(skipped),
    )


def _once(findings: Iterable[Row]) -> tuple[Row, ...]:
    """The first line of every rule: an update that was done again after an interrupt has written another."""
    first: dict[str, Row] = {}
    for row in findings:
        first.setdefault(text(row.get("rule")), row)
    return tuple(first.values())


def _by_update(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Rows in order of update; of an update that was written twice, the later row."""
    latest = {update: row for row in rows if (update := number(row.get("update"))) is not None}
    return tuple(latest[update] for update in sorted(latest))


def _points(rows: Iterable[Row], key: str) -> tuple[list[int], list[float]]:
    pairs = [(int(number(r["update"]) or 0), v) for r in rows if (v := number(r.get(key))) is not None]
    return [x for x, _ in pairs], [y for _, y in pairs]


# -- the table and the verdict ------------------------------------------------------------------------


@dataclass(frozen=True)
class TableCell:
    """One cell: its value, a smaller line under it, and whether it is marked."""

    text: str
    note: str = ""
    flagged: bool = False


@dataclass(frozen=True)
class Column:
    """One column: its name, unit and better direction, and how an arm fills it."""

    id: str
    title: str
    unit: str
    better: str
    meaning: str
    cell: Callable[[StoredArm], TableCell]


def _reward(arm: StoredArm) -> TableCell:
    before, after = arm.figure("reward_before"), arm.figure("reward_after")
    if before is None or after is None:
        return TableCell(fixed(after if before is None else before))
    change = after - before
    return TableCell(f"{fixed(before)} → {fixed(after)}", f"change {'+' if change >= 0 else ''}{fixed(change)}")


def _acceptance(arm: StoredArm) -> TableCell:
    share, floor = arm.figure("acceptance"), arm.limits["acceptance_low"]
    low = share is not None and share < floor
    return TableCell(percent(share), f"below {100 * floor:g} %" if low else "", flagged=low)


def _precondition(arm: StoredArm) -> TableCell:
    falsified = arm.figure("falsified_updates")
    if falsified is None:
        return TableCell("–")
    if falsified == 0:
        return TableCell("yes", f"in all {arm.updates} updates")
    return TableCell("no", f"in {falsified:.0f} of {arm.updates} updates", flagged=True)


def _speed(arm: StoredArm) -> TableCell:
    speed, seconds = arm.figure("tokens_per_s"), arm.figure("seconds")
    text = "–" if speed is None else f"{speed:,.0f}"
    return TableCell(text, "" if seconds is None else duration(seconds))


_LIMITS = load_rules().limits
NORMAL_KL = (
    f"below {_LIMITS['kl_clean']:g} nat is no meaningful drift, above {_LIMITS['kl_large']:g} has a cause to find"
)
NORMAL_ESS = f"{100 * _LIMITS['ess_half']:g} % or more is usable"
"""What is normal, by the thresholds of the diagnosis."""
COLUMNS = (
    Column(
        "reward",
        "Held-out reward",
        "task",
        "higher is better",
        "Mean reward on held-out prompts before the first and after the last update, and the change.",
        cell=_reward,
    ),
    Column(
        "kl_mean",
        "KL mean",
        "nat",
        f"lower is closer to on-policy; {NORMAL_KL}",
        "KL(rollout || current) of a token, averaged over all tokens and updates: how far the distribution that drew "
        "the tokens is from the one being trained. Its grade is below it: exact, certified interval or sampled.",
        cell=lambda arm: TableCell(short(arm.figure("kl_mean")), arm.label("grade")),
    ),
    Column(
        "kl_max",
        "KL max",
        "nat",
        "lower is closer to on-policy",
        "Largest KL(rollout || current) of any token in the run. Trust Region Masking gates on this quantity.",
        cell=lambda arm: TableCell(short(arm.figure("kl_max"))),
    ),
    Column(
        "acceptance",
        "Acceptance",
        "of sequences",
        "watch: {acceptance_low} or more",
        "Share of sampled sequences that the gate let take part. The Trust Region Masking paper asks to watch for a "
        "small one, here less than {acceptance_low}; a high share is not evidence that masking changed little "
        "(Remark 4.3).",
        cell=_acceptance,
    ),
    Column(
        "ess",
        "ESS",
        "of a batch, mean",
        f"higher is better; {NORMAL_ESS}",
        "Effective sample size (Σw)² / Σw² over the count, w the raw token ratio of current to "
        "rollout policy: how much of a batch an importance-weighted update can use, mean over updates. An audit takes "
        "the whole log as one batch, of which a few tokens of any step take more.",
        cell=lambda arm: TableCell(percent(arm.figure("ess_frac"))),
    ),
    Column(
        "ppl_gap",
        "Mean log-prob gap",
        "nat",
        "lower is better",
        "Mean over sequences of the absolute difference of mean log-prob between current and rollout policy (eq. 25).",
        cell=lambda arm: TableCell(short(arm.figure("log_ppl_gap"))),
    ),
    Column(
        "bound",
        "KL of sequences",
        "nat",
        "lower is tighter",
        "KL(rollout || current) of whole sequences, from exact evidence or upper ends; mean over "
        "updates. Its expectation bounds how far the surrogate is from the true change of the return, "
        "for any two policies and rewards in [0, 1]; this is an estimate of it.",
        cell=lambda arm: TableCell(short(arm.figure("bound"))),
    ),
    Column(
        "precondition",
        "Bound B* usable",
        "",
        "watch: yes; training does not depend on it",
        "The trust-region bound B* needs that no token has more divergence than the region allows. At the updates at "
        "which a sampled token already had more, B* proves nothing; the training itself is not affected.",
        cell=_precondition,
    ),
    Column(
        "speed",
        "Speed",
        "tokens/s",
        "higher is faster",
        "Response tokens per second of wall time, drawing and training included, and the time of all updates; held-out "
        "evaluations take more, which the log's clock counts too.",
        cell=_speed,
    ),
)


def notes_of(arms: Iterable[StoredArm]) -> dict[str, list[str]]:
    """Notes of arms, each once, with the names of the arms that have it.

    Example:
        >>> arms = [StoredArm(name, True, {"notes": ["nothing was rejected"]}) for name in ("none", "trm_max")]
        >>> notes_of(arms)
        {'nothing was rejected': ['none', 'trm_max']}
    """
    found: dict[str, list[str]] = {}
    for arm in arms:
        for note in arm.notes:
            found.setdefault(note, []).append(arm.name)
    return found


def columns_for(run: Run) -> tuple[Column, ...]:
    """The columns with the thresholds that the run is judged by in their words."""
    limits = run.arms[0].limits if run.arms else load_rules().limits
    floor = f"{100 * limits['acceptance_low']:g} %"
    of_gate = next(column for column in COLUMNS if column.id == "acceptance")
    words = {key: getattr(of_gate, key).format(acceptance_low=floor) for key in ("better", "meaning")}
    return tuple(replace(column, **words) if column is of_gate else column for column in COLUMNS)


def verdict(run: Run) -> str:
    """Sentences on who ended with the highest held-out reward, by how much, and whose acceptance is too low.

    Example:
        >>> arm = StoredArm("trm_max", True, {"reward_before": 0.25, "reward_after": 0.5})
        >>> verdict(Run("demo", {}, "", None, {}, {}, (arm,)))
        'trm_max went from 0.250 to 0.500 in held-out reward.'
    """
    return " ".join(verdict_lines(run))


def verdict_lines(run: Run) -> tuple[str, ...]:
    """The verdict in one short sentence, and the sentences that qualify it.

    Reference: Li et al., Trust Region Masking, Remark 4.3 (the diagnostic of the accepted share).
    """
    if not run.arms:
        return ("No arm has started yet.",)
    running = [arm.name for arm in run.arms if not arm.finished]
    opening = ""
    if running:
        still = f"{len(running)} arms" if len(running) > FEW else _listed(running)
        opening = f"So far ({still} still running): "
    headline, *remarks = _outcome(run.arms) or (f"{'no' if opening else 'No'} held-out reward has been recorded yet",)
    shares = [(arm.name, share) for arm in run.arms if (share := arm.figure("acceptance")) is not None]
    floor = run.arms[0].limits["acceptance_low"]
    if low := [f"{name} accepted {percent(share)}" for name, share in shares if share < floor]:
        remarks.append(f"{_listed(low)} of its sequences, less than {100 * floor:g} % ({REMARK})")
    return (f"{opening}{headline}.", *(f"{remark}." for remark in remarks))


FEW = 2
"""Arms still running beyond which the verdict counts them."""
MANY = 6
"""Arms beyond which the verdict counts those that ended level, in place of naming them."""


def _outcome(arms: Sequence[StoredArm]) -> tuple[str, ...]:
    """Who ended highest, and by how much, each without its full stop; empty without a held-out reward."""
    scored = [(after, arm) for arm in arms if (after := arm.figure("reward_after")) is not None]
    if not scored:
        return ()
    best, winner = max(scored, key=lambda pair: pair[0])
    level = [arm.name for after, arm in scored if after == best]
    if len(scored) == 1:
        before = winner.figure("reward_before")
        came = "ended at" if before is None else f"went from {fixed(before)} to"
        return (f"{winner.name} {came} {fixed(best)} in held-out reward",)
    if len(level) == len(scored):
        every = f"{len(level)} arms" if len(level) > MANY else _listed(level)
        return (f"{every} ended level, at {fixed(best)} in held-out reward",)
    if len(level) > 1:
        several = f"{len(level)} arms" if len(level) > MANY else _listed(level)
        return (f"{several} ended level, with the highest held-out reward, {fixed(best)}",)
    _, second = max((pair for pair in scored if pair[1] is not winner), key=lambda pair: pair[0])
    error = _error_of_difference(winner, second)
    lead = (winner.figure("reward_after") or 0.0) - (second.figure("reward_after") or 0.0)
    headline = f"{winner.name} ended with the highest held-out reward, {fixed(best)}"
    ahead = f"That is {fixed(lead)} ahead of {second.name}"
    if error is None or lead > 2 * error:
        return headline, ahead
    noise = f"the noise of {_prompts(winner):.0f} held-out prompts (two standard errors: {fixed(2 * error)})"
    return headline, f"{ahead}, within {noise}"


def _error_of_difference(a: StoredArm, b: StoredArm) -> float | None:
    """Standard error of a difference of mean rewards in [0, 1]: at most sqrt(Σ p(1 - p) / n)."""
    variance = 0.0
    for arm in (a, b):
        reward, prompts = arm.figure("reward_after"), _prompts(arm)
        if reward is None or not prompts or not 0 <= reward <= 1:
            return None
        variance += reward * (1 - reward) / prompts
    return math.sqrt(variance)


def _prompts(arm: StoredArm) -> float | None:
    return number(arm.evals[-1].get("prompts")) if arm.evals else None


def _listed(names: Sequence[str]) -> str:
    """Names as prose: "a", "a and b", "a, b and c"."""
    return " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)
