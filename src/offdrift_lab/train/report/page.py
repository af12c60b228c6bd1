"""The report of a run: one self-contained HTML page, built from the run folder alone, also while the run goes on; and
the page of a sweep of runs.

Text that a model wrote is never trusted, see `offdrift.show.html`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from offdrift.judge import load_rules
from offdrift.records.atomic import write_json
from offdrift.show.anchors import Anchors
from offdrift.show.charts import NUM_COLORS, SYMBOLS, Chart, Series, chart_data, symbol_of
from offdrift.show.figures import write_chart
from offdrift.show.findings import WORDS, Shown, finding_matrix, footnote, in_order, severity
from offdrift.show.html import PAGE_BYTES, render_document, write_document
from offdrift.show.json_access import mapping, number
from offdrift.show.numbers import flatten, kl_labels, kl_level, short
from offdrift.stats import METRICS, over_seeds
from offdrift_lab.train.report.overlap import OVERLAP, drift_by_lag
from offdrift_lab.train.report.spread import ONE_SEED, spread
from offdrift_lab.train.report.stored import (
    Run,
    Sample,
    StoredArm,
    columns_for,
    lag_counts,
    notes_of,
    read_run,
    verdict_lines,
)
from offdrift_lab.train.sweep.sweep import HELD_OUT, RESULTS, Grid, Setting, worded
from offdrift_lab.train.sweep.sweep_results import curve, explained, results, sentence, signed

FILE_NAME = "report.html"
SAMPLES_PER_ARM = 8
TOKENS_PER_SAMPLE, TOKENS, FEWEST_TOKENS = 600, 8000, 60
"""Tokens of a sample that are shown, of all samples together, and of a sample however many there are."""
GLYPHS: dict[str, str] = dict(zip(SYMBOLS, "●■◆▲✚★⬢⬟"))
"""The plotted marker symbols as text, for legend and table."""


def write_report(run_dir: Path, *, limit: float | int = PAGE_BYTES, rules: Path | None = None) -> Path:
    """Write `report.html` of a run, finished or not, whole or not at all; an earlier one is replaced.

    Args:
        limit: bytes of the page, to which long series are thinned; math.inf keeps every update.
        rules: a rules file to judge the run by, in place of the rules that it was started with.

    Returns: path of the page.

    Raises: `RecordError` if the folder is not a run, or cannot be written; `RecipeError` for a wrong rules file.
    """
    return write_document(render(read_run(run_dir, rules), limit=limit), run_dir / FILE_NAME)


def render(run: Run, *, limit: float | int = PAGE_BYTES) -> str:
    """The page of a run as text, `limit` bytes at most."""
    charts, overlapped = all_charts(run.arms), any(arm.schedule for arm in run.arms)
    beside = overlap_charts(run.arms) if overlapped else []
    shown = [(arm, pick_samples(arm.samples, SAMPLES_PER_ARM)) for arm in run.arms]
    count = sum(len(samples) for _, samples in shown)
    cut = min(TOKENS_PER_SAMPLE, max(FEWEST_TOKENS, TOKENS // max(count, 1)))
    place = Anchors()
    findings = findings_of(run.arms, place)
    headline, *remarks = verdict_lines(run)
    context = {
        "place": place,
        "words": WORDS,
        "findings": findings,
        "matrix": finding_matrix([(arm.name, f) for arm, f in findings]),
        "footnote": footnote(f for _, f in findings),
        "run": run,
        "verdict": headline,
        "remarks": remarks,
        "notes": notes_of(run.arms),
        "spread": spread(run),
        "one_seed": ONE_SEED,
        "columns": columns_for(run),
        "judged_by": run.judged_by,
        "description": lambda arm: arm.label("description"),
        "charts": charts,
        "overlap": OVERLAP if overlapped else (),
        "method": lambda arm: arm.label("method"),
        "overlap_charts": beside,
        "workers": int(number(mapping(run.recipe.get("pipeline")).get("workers")) or 1),
        "shown": shown,
        "recipe": list(flatten(run.recipe)),
        "in_turns": any(s.context for _, samples in shown for s in samples),
        "kl_level": kl_level,
        "kl_labels": kl_labels(),
        "glyph": lambda i: GLYPHS[symbol_of(i)],
        "num_colors": NUM_COLORS,
        "token_limit": cut,
        "grade_of": lambda arms: ", ".join(sorted({arm.label("grade") for arm in arms} - {""})),
    }
    # KL, TV, log-prob and weight of every shown token.
    tokens = [
        [
            [[short(v) for v in row] for row in itertools.islice(zip(s.kl, s.tv, s.logp_rollout, s.weight), cut)]
            for s in samples
        ]
        for _, samples in shown
    ]
    return render_document(
        "report.html.j2",
        context,
        data=lambda columns: {**chart_data([*charts, *beside], columns), "samples": tokens},
        limit=limit,
    )


def findings_of(arms: Sequence[StoredArm], place: Anchors) -> list[tuple[StoredArm, Shown]]:
    """Findings of all arms, the most severe first, each with its arm; `place` gives them their names on the page."""
    findings = [(arm, f) for arm in arms for f in in_order(arm.findings, kind=f"finding-{arm.name}", names=place)]
    return sorted(findings, key=lambda pair: severity(pair[1]))


def pick_samples(samples: Sequence[Sample], limit: int) -> list[Sample]:
    """The latest samples, newest first and at most `limit`, always with the one of largest KL among all."""
    newest = list(reversed(samples))
    picked = newest[:limit]
    worst = max(newest, key=lambda s: s.kl_max, default=None)
    if worst is not None and not any(s is worst for s in picked):
        picked[-1] = worst
    return picked


# -- charts: metrics over updates, one line an arm ---------------------------------------------------

SMOOTHING = 5
"""Updates in the moving average of the reward."""


@dataclass(frozen=True)
class Quantity:
    """One metric over updates, as a chart shows it."""

    id: str
    title: str
    unit: str
    key: str
    meaning: str
    log: bool = False
    share: bool = False
    """Drawn from 0 to 100 %."""
    line_at: float | str | None = None
    """Where a horizontal reference line goes: a number, or the name of a threshold."""
    digits: str = ".3g"


REWARD = Quantity(
    "reward",
    "Reward",
    "",
    "reward/mean",
    f"Mean reward of the training batch: faint as recorded, strong its mean over {SMOOTHING} updates. "
    "Higher is better.",
)
HELD_OUT_REWARD = Quantity(
    "held_out",
    "Held-out reward",
    "",
    "reward",
    "Mean reward on prompts that are never trained on, at every evaluation. Arms are compared by it. Higher is better.",
)

QUANTITIES = (
    Quantity(
        "acceptance",
        "Acceptance",
        "of sequences",
        "gate/acceptance_seq",
        "Share of sequences that passed the gate. The Trust Region Masking paper asks to watch for "
        "less than the line (Remark 4.3).",
        share=True,
        line_at="acceptance_low",
        digits=".1%",
    ),
    Quantity(
        "kl_mean",
        "KL, mean over tokens",
        "nat, log scale",
        "divergence/kl_rollout_current_mean",
        "KL(rollout || current) of a token. Lower is closer to on-policy.",
        log=True,
    ),
    Quantity(
        "kl_max",
        "KL, worst token",
        "nat, log scale",
        "divergence/kl_rollout_current_max",
        "Largest KL(rollout || current) in the batch: what the bounds depend on.",
        log=True,
    ),
    Quantity(
        "bound",
        "KL of sequences",
        "nat, log scale",
        "certificate/kl_seq",
        "KL(rollout || current) of whole sequences in the batch. Its expectation bounds how far the "
        "surrogate is from the true change of the return, for any two policies. Lower is better.",
        log=True,
    ),
    Quantity(
        "gain_low",
        "Certified change of the return",
        "at least, at the run's confidence",
        "certificate/gain_low",
        "Lower end of J(current) − J(rollout) from this batch alone; above 0 is a certified "
        "improvement. Only batches that were new to the policy count. The confidence (95 % unless the recipe says "
        'otherwise) is that of all points of the run together; with certificate.looks = "once" it is each point\'s '
        "own, and of many updates one in twenty may stand above 0 by chance.",
        line_at=0.0,
    ),
    Quantity(
        "ppl_gap",
        "Perplexity gap",
        "nat",
        "full/log_ppl_gap",
        "Mean over sequences of |mean log-prob, current − rollout| (eq. 25). Lower is better.",
    ),
    Quantity(
        "ess",
        "Effective sample size",
        "of the batch",
        "full/ess_frac",
        "(Σw)² / Σw² over the count, w the raw token ratio of current to rollout policy: 100 % when they agree.",
        share=True,
        digits=".1%",
    ),
    Quantity(
        "length",
        "Response length",
        "tokens",
        "response/length_mean",
        "Mean over the batch. A collapse or an explosion often precedes one of reward.",
        digits=".1f",
    ),
    Quantity(
        "version_lag",
        "Version lag",
        "updates",
        "version_lag/mean",
        "How many updates old the weights were that drew a token, mean over tokens.",
        digits=".2f",
    ),
)


OF_MIXTURES = (
    Quantity(
        "alpha",
        "Share of the teacher",
        "of the logits",
        "fusion/alpha_mean",
        "Mean over responses of the teacher's share in the logits that they were drawn from; 0 where the policy drew "
        "alone.",
        digits=".2f",
    ),
    Quantity(
        "mixture_kl",
        "KL of the mixture",
        "nat",
        "fusion/kl_mean",
        "Mean over tokens of KL(mixture || policy alone), both as the engine drew: the part of the drift that is "
        "deliberate. It falls with the share, and as the policy comes nearer to the teacher.",
    ),
)
"""Shown where a teacher decoded along."""


def all_charts(arms: Sequence[StoredArm]) -> list[Chart]:
    """Every chart of the report, in the order of the page."""
    mixed = any(arm.series(OF_MIXTURES[0].key)[0] for arm in arms)
    quantities = (*QUANTITIES, *(OF_MIXTURES if mixed else ()))
    return [held_out_chart(arms), reward_chart(arms), *(line_chart(quantity, arms) for quantity in quantities)]


OVERLAPS = (
    Quantity(
        "worker_idle",
        "Workers idle",
        "of their time",
        "pipeline/worker_idle",
        "Share of the workers' time since the last update in which they neither drew nor loaded weights. Lower is "
        "better.",
        share=True,
        digits=".1%",
    ),
    Quantity(
        "trainer_idle",
        "Trainer idle",
        "of its time",
        "pipeline/trainer_idle",
        "Share of the time since the last update in which the trainer waited for groups. Lower is better.",
        share=True,
        digits=".1%",
    ),
    Quantity(
        "stored_groups",
        "Groups on their way",
        "in progress or waiting",
        "pipeline/stored_groups",
        "Groups that were in progress or waited for the trainer at the end of the update: what is drawn ahead.",
        digits=".0f",
    ),
)


def overlap_charts(arms: Sequence[StoredArm]) -> list[Chart]:
    """Charts of what ran in parallel, the lag of responses, and the drift at each lag, for runs with `[pipeline]`."""
    looks, drifts = _looks(arms), [drift_by_lag(arm) for arm in arms]
    bars, lines = [], []
    for look, arm, drift in zip(looks, arms, drifts, strict=True):
        counts = lag_counts(arm.metrics)
        shares = [n / sum(counts) for n in counts] if sum(counts) else []
        bars.append(
            Series(arm.name, [f"{lag}" for lag in range(len(shares))], shares, kind="bars", hover=".1%", **look)
        )
        texts = [f"{kl:.3g} nat, {n:,} tokens" for kl, n in zip(drift.kl, drift.tokens, strict=True)]
        lines.append(Series(arm.name, drift.lags, drift.kl, kind="points", texts=texts, **look))
    how = "estimated from sampled tokens (k3)" if any(d.sampled for d in drifts) else "exact"
    lag = Chart(
        "Lag of responses",
        "of an arm's responses",
        bars,
        "lags",
        "How many updates old the weights were that drew a response's oldest token, when it was trained on: the share "
        "of an arm's responses with each lag, over the whole run.",
        x_title="lag (updates)",
        share=True,
    )
    drift = Chart(
        "Drift by lag",
        "nat per token",
        lines,
        "drift_by_lag",
        "Mean KL(rollout || current) of a token by how many updates old the weights were that drew it, over the whole "
        f"run, {how}; each token at the update that first trained on it. The rise is what lag costs, the height at 0 "
        "what engine and trainer disagree on without it.",
        x_title="lag (updates)",
        wide=True,
    )
    return [lag, drift, *(line_chart(quantity, arms) for quantity in OVERLAPS)]


def held_out_chart(arms: Sequence[StoredArm]) -> Chart:
    """Held-out reward at every evaluation, a line with its points an arm."""
    looks = zip(_looks(arms), arms, strict=True)
    series = [Series(arm.name, *arm.held_out(), kind="points", **look) for look, arm in looks]
    return _chart(HELD_OUT_REWARD, series, wide=True)


def reward_chart(arms: Sequence[StoredArm]) -> Chart:
    """Training reward, raw and smoothed, for every arm."""
    series = []
    for look, arm in zip(_looks(arms), arms):
        updates, rewards = arm.series(REWARD.key)
        series += [
            Series(arm.name, updates, rewards, faint=True, **look),
            Series(arm.name, updates, moving_mean(rewards, SMOOTHING), **look),
        ]
    return _chart(REWARD, series)


def line_chart(quantity: Quantity, arms: Sequence[StoredArm]) -> Chart:
    """One metric over updates, a line an arm; arms that did not record it are left out."""
    lines = [Series(a.name, *a.series(quantity.key), **look) for look, a in zip(_looks(arms), arms)]
    limits = arms[0].limits if arms else load_rules().limits
    at = limits.get(quantity.line_at) if isinstance(quantity.line_at, str) else quantity.line_at
    return _chart(replace(quantity, line_at=at), lines)


def _looks(arms: Sequence[StoredArm]) -> list[dict[str, Any]]:
    """Color, dash and marker of each arm, the same in all charts."""
    return [
        {
            "color": f"arm-{i % NUM_COLORS}",
            "dash": "solid" if i < NUM_COLORS else "dash",
            "symbol": symbol_of(i),
            "group": str(i),
        }
        for i in range(len(arms))
    ]


def _chart(quantity: Quantity, series: Sequence[Series], wide: bool = False) -> Chart:
    q, at = quantity, None if isinstance(quantity.line_at, str) else quantity.line_at
    return Chart(
        q.title,
        q.unit,
        [replace(s, hover=q.digits) for s in series],
        q.id,
        q.meaning,
        x_title="update",
        log=q.log,
        share=q.share,
        lines=() if at is None else [(at, f"{at:.0%}" if q.share else f"{at:g}")],
        wide=wide,
    )


def moving_mean(values: Sequence[float], window: int) -> list[float]:
    """Centered moving average; at the ends, of what is there.

    Args:
        window: how many values are averaged (odd).

    Example:
        >>> moving_mean([0.0, 3.0, 6.0, 3.0], 3)
        [1.5, 3.0, 4.0, 4.5]
    """
    reach = window // 2
    cuts = [values[max(0, i - reach) : i + reach + 1] for i in range(len(values))]
    return [sum(cut) / len(cut) for cut in cuts]


# -- sweeps: means over seeds, with bands ------------------------------------------------------------


def write_sweep(grid: Grid, *, limit: float | int = PAGE_BYTES) -> tuple[dict[str, Any], Path]:
    """Write `sweep.json` and `sweep.html` from what a sweep's runs have stored by now; the results, and the page.

    Args:
        limit: bytes of the page, to which long series are thinned; math.inf keeps every update.

    Raises: `RecordError` if they cannot be written.
    """
    document = results(grid)
    write_json(grid.folder / RESULTS, document)
    return document, write_sweep_page(grid, document, limit=limit)


def write_sweep_page(grid: Grid, document: Mapping[str, Any], *, limit: float | int = PAGE_BYTES) -> Path:
    """Write `sweep.html` from the results of a sweep and the curves of its runs, whole or not at all.

    Raises: `RecordError` if it cannot be written.
    """
    return write_document(render_sweep(grid, document, limit=limit), grid.folder / "sweep.html")


def render_sweep(grid: Grid, document: Mapping[str, Any], *, limit: float | int = PAGE_BYTES) -> str:
    """The page of a sweep as text, `limit` bytes at most."""
    charts = sweep_charts(grid, document)
    context = {
        "name": document["name"],
        "sentence": sentence(document),
        "notes": explained(document),
        "judged_by": document.get("judged_by", ""),
        "metric": document["metric"],
        "settings": document["settings"],
        "runs": document["runs"],
        "charts": charts,
        "glyph": lambda i: GLYPHS[symbol_of(i)],
        "num_colors": NUM_COLORS,
        "signed": signed,
        "worded": lambda values: ", ".join(f"{key}={worded(value)}" for key, value in values.items()),
        "has_interval": lambda mean: number(mean["low"]) is not None and number(mean["high"]) is not None,
        "recipe": list(flatten(mapping(document["sweep"]))),
        "versions": [pair for versions in document["versions"] for pair in versions.items()],
    }
    return render_document("sweep.html.j2", context, data=lambda columns: chart_data(charts, columns), limit=limit)


def sweep_charts(grid: Grid, document: Mapping[str, Any]) -> list[Chart]:
    """The differences to the baseline, and the compared metric, rewards and KL over updates: means over seeds."""
    level = f"{100 * document['confidence']:g} %"
    looks = _looks([StoredArm(s.name, True) for s in grid.settings])
    dots, places = [], []
    for look, row in zip(looks, document["settings"]):
        change = row["difference"]
        if change is None or number(change["mean"]) is None:
            continue
        ends = [number(change[end]) for end in ("low", "high")]
        interval = {} if None in ends else {"low": ends[:1], "high": ends[1:]}
        dots.append(Series(row["name"], [len(places)], [change["mean"]], kind="dots", **interval, **look))
        places.append((len(places), GLYPHS[look["symbol"]]))
    charts = []
    if dots:
        meaning = (
            "Mean over seeds of the difference to the baseline at the same seed. An interval that leaves out 0 has a "
            f"verdict; all verdicts together hold at {level}."
        )
        charts.append(
            Chart(
                "Difference from the baseline",
                document["metric"],
                dots,
                "difference",
                meaning,
                x_title="setting",
                x_ticks=places,
                lines=[(0.0, "")],
                wide=True,
            )
        )
    metrics = dict.fromkeys([document["metric"], HELD_OUT, "reward/mean", "divergence/kl_rollout_current_mean"])
    return charts + [_curves(grid, document, metric, f"curve-{i}", wide=not i) for i, metric in enumerate(metrics)]


def write_sweep_chart(path: Path, grid: Grid, document: Mapping[str, Any]) -> Path:
    """Draw the compared metric over updates: means over seeds, in bands of their intervals.

    Args:
        path: a .svg, .png or .html file.

    Raises: as in `offdrift.show.figures.write_chart`.
    """
    chart = _curves(grid, document, document["metric"], "curve", wide=True)
    return write_chart(path, [chart], title=sentence(document), caption=chart.meaning)


def _curves(grid: Grid, document: Mapping[str, Any], metric: str, name: str, *, wide: bool) -> Chart:
    """A metric over updates: a line and a band for every setting."""
    looks = _looks([StoredArm(s.name, True) for s in grid.settings])
    seeds = max((row["n"] for row in document["settings"]), default=0)
    row, kl = METRICS.get(metric), metric.startswith("divergence/")
    meaning = (
        f"Mean over {seeds} seeds of {'held-out reward' if row is None else row.formula}; bands are "
        f"{100 * document['confidence']:g} % intervals."
    )
    title, limits = "Held-out reward" if metric == HELD_OUT else metric, None
    if metric in (HELD_OUT, "reward/mean"):  # an interval of few seeds may reach beyond any possible reward
        lows, highs = zip(*(cell.recipe.reward_range for cell in grid.cells))
        limits = (min(lows), max(highs))
        meaning = meaning.removesuffix(".") + ", cut at the smallest and largest possible reward."
    series = [
        _band(grid, setting, metric, look, document, limits=limits) for look, setting in zip(looks, grid.settings)
    ]
    unit = "nat, log scale" if kl else "" if row is None else row.unit
    return Chart(title, unit, series, name, meaning, x_title="update", log=kl, wide=wide, y_range=limits)


def _band(
    grid: Grid,
    setting: Setting,
    metric: str,
    look: Mapping[str, Any],
    document: Mapping[str, Any],
    *,
    limits: tuple[float, float] | None,
) -> Series:
    """A metric of a setting over updates, as mean and interval, within limits, over the seeds that recorded it."""
    lowest, highest = limits or (-math.inf, math.inf)
    values: dict[int, list[float]] = {}
    for cell in grid.cells:
        if cell.setting == setting:
            for update, value in curve(cell, metric):
                values.setdefault(update, []).append(value)
    most = max(map(len, values.values()), default=0)
    # Where some runs have already ended, the mean would jump.
    updates = sorted(update for update, of_seeds in values.items() if len(of_seeds) == most)
    means = [
        over_seeds(values[update], confidence=document["confidence"]).within(lowest, highest) for update in updates
    ]
    band = {"low": [m.low for m in means], "high": [m.high for m in means]} if most > 1 else {}
    return Series(setting.name, updates, [m.mean for m in means], **band, **look)
