"""Tables, figures and JSON of the lab's experiments: frontier, length bias, routing, lags, bounds, coverage, masks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby, pairwise
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from offdrift.certificate.bounds import LABELS as BOUNDS
from offdrift.show.charts import Chart, Series
from offdrift_lab.exact.coverage import WORLDS
from offdrift_lab.exact.coverage import CoverageRate as Covered
from offdrift_lab.exact.flips import Exponent
from offdrift_lab.exact.frontier import Estimate, Verdict, conjecture, verdict
from offdrift_lab.exact.masking import MaskRow, Vanishing
from offdrift_lab.exact.search import Row, Tightness, of_drift, summarize
from offdrift_lab.exact.statements import LABELS as STATEMENTS
from offdrift_lab.exact.three_policies import Advice, Judged, tightness
from offdrift_lab.exact.three_policies import violations as wrongly_bounded

SMALLEST = 1e-4
"""Smallest bias that the figure shows; exact methods would stretch the axis otherwise."""
FAMILIES = ("token", "prefix", "turn", "geometric", "variational", "sequence", "uncorrected", "other")


def by_horizon(estimates: Sequence[Estimate]) -> list[Verdict]:
    """The verdict at each horizon."""
    ordered = sorted(estimates, key=lambda e: e.horizon)
    return [verdict(list(group)) for _, group in groupby(ordered, key=lambda e: e.horizon)]


def empty_table(title: str, caption: str = "", *, left: Sequence[str] = (), right: Sequence[str] = ()) -> Table:
    """An empty table: columns of words to the left, then columns of numbers."""
    table = Table(
        title=Text(title, style="bold"),
        title_justify="left",
        caption=Text(caption) if caption else None,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def frontier_table(title: str, estimates: Sequence[Estimate]) -> Table:
    """Progress of the best method of every family at every horizon; the winners are marked."""
    verdicts = by_horizon(estimates)
    longest = verdicts[-1]
    table = empty_table(
        f"{title}: progress P of the best method of each family",
        f"conjecture (an intermediate unit is best from T = 200): {conjecture(verdicts)}",
        left=["family"],
        right=[f"T={v.horizon}" for v in verdicts],
    )
    table.add_column(f"best at {longest.horizon}", no_wrap=True)
    table.add_column("bias", justify="right")
    table.add_column("spread", justify="right")
    for name in FAMILIES:
        last = longest.best.get(name)
        if last is None:
            continue
        cells = []
        for v in verdicts:
            e = v.best.get(name)
            error = f"±{e.progress_se:.0e}" if e and e.progress_se > 0.01 * e.progress else ""
            style = "bold green" if e is v.winner else ""
            cells.append(Text(f"{e.progress:.3g}{error}" if e else "", style=style))
        table.add_row(name, *cells, last.method, f"{last.bias:.2g}", f"{last.spread:.2g}")
    return table


def frontier_panels(by_testbed: Mapping[str, Sequence[Estimate]]) -> list[Chart]:
    """For every testbed, progress against the horizon, then bias against spread at the longest."""
    progress, clouds = [], []
    logarithmic = partial(Chart, log_x=True, log=True)
    for title, estimates in by_testbed.items():
        verdicts = by_horizon(estimates)
        longest = [e for e in estimates if e.horizon == verdicts[-1].horizon]
        lines, points = [], []
        for name in FAMILIES:
            present = [v for v in verdicts if name in v.best]
            if not present:
                continue
            best = [v.best[name].progress for v in present]
            lines.append(Series(name, [v.horizon for v in present], best))
            members = [e for e in longest if e.family == name]
            bias = [max(e.bias, SMALLEST) for e in members]
            points.append(Series(name, bias, [e.spread for e in members], kind="dots"))
        best_title, every_title = "progress of the best of each family", f"every method at T = {verdicts[-1].horizon}"
        progress.append(logarithmic(f"{title}: {best_title}", "P / |∇J|²", lines, x_title="horizon T, tokens"))
        bias_label = f"bias / |∇J| (at least {SMALLEST:g})"
        clouds.append(logarithmic(f"{title}: {every_title}", "spread of a batch / |∇J|", points, x_title=bias_label))
    return progress + clouds


def frontier_rows(title: str, estimates: Sequence[Estimate]) -> dict[str, Any]:
    """Everything, ready for JSON."""
    verdicts = by_horizon(estimates)
    return {
        "testbed": title,
        "conjecture": conjecture(verdicts),
        "winners": [
            {
                "horizon": v.horizon,
                "method": v.winner.method,
                "family": v.winner.family,
                "tied": list(v.tied),
                "plain": v.plain and v.plain.method,
            }
            for v in verdicts
        ],
        "estimates": [vars(e) for e in estimates],
    }


SCHEMES = {"own": "own", "r3": "R3, mu's", "r2": "R2, old's", "reference": "reference"}


def routing_table(rows: Sequence[Mapping[str, Any]], *, steps: int) -> Table:
    """One row per scheme of `lab.routing`; the first computes the policy that draws."""
    table = empty_table(
        f"Surrogates under routing replay, and what {steps} steps of ascent on each gain",
        left=["routes"],
        right=["error", "α0", "α1", "cos", "var", "router", "gain", "±"],
    )
    for row in rows:
        error = row["surrogate_error"]
        table.add_row(
            SCHEMES[row["scheme"]],
            "-" if error is None else f"{error:.0%}",
            f"{row['alpha_0_seen']:.3f}",
            f"{row['alpha_1_seen']:.3f}",
            f"{row['cosine']:.3f}",
            f"x{row['variance_ratio']:.2f}",
            f"{row['router_share']:.0%}",
            f"{row['gain']:.4f}",
            f"{row['gain_se']:.4f}",
        )
    return table


def masks_table(rows: Sequence[MaskRow]) -> Table:
    """One row per mask: what it keeps, and what of the pair and its bound it leaves where it was."""
    table = empty_table(
        "A mask on the loss, and the trust region of the pair (medians)",
        left=["mask"],
        right=["kept", "D_max", "of kept", "B*", "error", "> B*", "> B*(δ)", "after"],
    )
    for row in rows:
        over, claimed = (float((row.error > x * (1 + 1e-9)).double().mean()) for x in (row.bound, row.bound_claimed))
        medians = (row.kl_max, row.kl_max_kept, row.bound, row.error)
        table.add_row(
            row.mask,
            f"{float(row.kept.mean()):.0%}",
            *(f"{float(x.median()):.2g}" for x in medians),
            Text(f"{over:.1%}", style="bold red" if over else ""),
            Text(f"{claimed:.1%}", style="bold red" if claimed else ""),
            f"{float(row.kl_max_after.median()):.2g}",
        )
    return table


def masks_rows(rows: Sequence[MaskRow]) -> list[dict[str, Any]]:
    """Rows for JSON: medians, means and the share of pairs whose error exceeds each bound."""
    return [
        {
            "mask": row.mask,
            "kept": float(row.kept.mean()),
            "kl_max": float(row.kl_max.median()),
            "kl_max_kept": float(row.kl_max_kept.median()),
            "bound": float(row.bound.median()),
            "bound_claimed": float(row.bound_claimed[0]),
            "error": float(row.error.median()),
            "error_largest": float(row.error.max()),
            "exceeds_bound": float((row.error > row.bound * (1 + 1e-9)).double().mean()),
            "exceeds_claimed": float((row.error > row.bound_claimed * (1 + 1e-9)).double().mean()),
            "kl_max_after": float(row.kl_max_after.median()),
            "gain_after": float(row.gain_after.mean()),
        }
        for row in rows
    ]


def vanishing_rows_table(rows: Sequence[Vanishing], *, delta: float, width: int = 140) -> Table:
    """|L - L_masked| / (||A|| T) at every horizon, one row per criterion and share of rejected sequences."""
    horizons = sorted({row.horizon for row in rows})
    while len(horizons) > max(2, (width - 34) // 9):
        horizons.pop(len(horizons) // 2)
    table = empty_table(
        f"|L - L_masked| / (||A|| T) as rejection goes to 0, delta = {delta:g}",
        left=["criterion"],
        right=["rejected", *(f"T={t}" for t in horizons), "limit"],
    )
    by_row = {(row.criterion, f"{row.rejected:.3g}"): row.limit for row in rows}
    for (criterion, rejected), limit in by_row.items():
        by_horizon = {r.horizon: r for r in rows if (r.criterion, f"{r.rejected:.3g}") == (criterion, rejected)}
        cells = [f"{by_horizon[t].share:.4f}" if t in by_horizon else "" for t in horizons]
        table.add_row(CRITERIA_LABELS[criterion], rejected, *cells, f"{limit:.4f}")
    return table


CRITERIA_LABELS = {"kl": "exact KL", "ratio": "k2 of w"}


def three_policies_table(judged: Judged) -> Table:
    """Every bound against the truth: violations and how close it comes."""
    table = empty_table(
        "|J(π) - L_μ(π)| / bound, at most 1 where the bound holds",
        left=["bound"],
        right=["violations", "median", "largest"],
    )
    for name, label in THREE_POLICIES.items():
        close, wrong = tightness(judged, name), wrongly_bounded(judged, name)
        numbers = f"{float(close.median()):.2g}", f"{float(close.max()):.3f}"
        table.add_row(label, Text(f"{wrong:,}", style="bold red" if wrong else ""), *numbers)
    return table


THREE_POLICIES = {
    "paper": "C (α0 + α1)",
    "one_pair": "C β, β = max TV(μ, π)",
    "sharp": "the same inputs, sharp",
}


def advice_table(rows: Sequence[Advice]) -> Table:
    """The rule to invest in the larger distance, by how much larger it is."""
    table = empty_table(
        "Invest in the larger of mismatch α1 and staleness α0: is the error then smaller?",
        left=["larger / smaller"],
        right=["triples", "right", "error left", "other way"],
    )
    for row in rows:
        span = f"{row.low:g} and more" if math.isinf(row.high) else f"{row.low:g} to {row.high:g}"
        share = f"{row.right / row.triples:.1%}"
        table.add_row(span, f"{row.triples:,}", share, f"{row.left:.2g}", f"{row.left_other:.2g}")
    return table


SWEEPS = {
    "delta": "δ",
    "T": "T",
    "T_last": "T, last doubling",
    "K": "K, 2 act",
    "K_sparse": "K, a quarter act",
}


def exponents_table(rows: Sequence[Exponent]) -> Table:
    """The power of the bias in each quantity; the conjecture says 1 in every row."""
    table = empty_table(
        "Power of the bias of token-level weights (the conjecture: 1 everywhere)",
        left=["task", "in"],
        right=["power", "95 % interval", "of bias / |∇J|"],
    )
    for row in rows:
        deviates = not row.low <= 1 <= row.high and abs(row.mean - 1) > 0.05
        cells = f"{row.mean:.2f}", f"{row.low:.2f} to {row.high:.2f}", f"{row.relative:.2f}"
        table.add_row(row.task, SWEEPS[row.swept], Text(cells[0], style="bold yellow" if deviates else ""), *cells[1:])
    return table


def explained_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """R^2 of each predictor of log bias, and what a dense drift of the same token KL does."""
    names = [name for name in rows[0] if name not in ("task", "dense_over_flips")]
    table = empty_table(
        "How much of log |bias| a fitted power explains (R²)", left=["task"], right=[*names, "dense / flips"]
    )
    for row in rows:
        cells = (f"{row[name]:.2f}" for name in names)
        table.add_row(str(row["task"]), *cells, f"x{row['dense_over_flips']:.0f}")
    return table


BOUND_LABELS = (
    BOUNDS
    | STATEMENTS
    | {
        "masked_ratio": "Masked, ratio region",
        "masked_kl": "Masked, trust region",
    }
)
DRAWN = ("coupling", "pinsker_marginal_kl", "mixed_kl", "mixed_tv", "adaptive", "pointwise", "sequence_kl")
"""Bounds in the figure, with sharp constants; more lines would hide each other."""
EDGES = (0.0, 1e-3, 1e-2, 1e-1, math.inf)
"""Largest token TV that separates sizes of drift."""


def violations(outcomes: Sequence[Tightness]) -> int:
    """Pairs and bounds for which the error exceeds the bound."""
    return sum(int(o.violated.sum()) for o in outcomes)


def bounds_table(outcomes: Sequence[Tightness], attacked: Sequence[Tightness], *, width: int = 140) -> Table:
    """Every bound: pairs, violations, the largest |Error| / bound, and where that was.

    Args:
        outcomes: random pairs.
        attacked: pairs of the adversarial search; may be empty.
        width: columns of the screen; where is left out on a narrow one.
    """
    wide, narrow = width >= 150, width < 100
    random, searched = summarize(outcomes), summarize(attacked)
    numbers = ["pairs", "violations", *(() if narrow else ("median",)), "largest"]
    title = "|Error| / bound, at most 1 where the bound holds"
    table = empty_table(title, left=["bound", "constants"], right=numbers)
    if wide:
        table.add_column("at", style="dim")
    table.add_column("searched", justify="right", no_wrap=True)
    if wide:
        table.add_column("at", style="dim")
    for i, row in enumerate(random or searched):
        other = searched[i] if searched else None
        first = row if random else None
        wrong = sum(r.violations for r in (first, other) if r)
        table.add_row(
            BOUND_LABELS[row.bound],
            row.constants,
            f"{first.checked:,}" if first else "–",
            Text(f"{wrong:,}", style="bold red" if wrong else ""),
            *(() if narrow else (f"{first.median:.4f}" if first else "–",)),
            *_cells(first)[: 2 if wide else 1],
            *_cells(other)[: 2 if wide else 1],
        )
    return table


def horizon_table(outcomes: Sequence[Tightness], attacked: Sequence[Tightness], *, width: int = 140) -> Table:
    """The largest |Error| / bound at every horizon, random or searched, with sharp constants."""
    both = [*outcomes, *attacked]
    horizons = sorted({o.horizon for o in both})
    most = max(2, (width - 24) // 9)  # columns that fit; the first and the last are among them
    while len(horizons) > most:
        horizons.pop(len(horizons) // 2)
    columns = [_sharp([o for o in both if o.horizon == t]) for t in horizons]
    title = "largest at every horizon, sharp constants"
    table = empty_table(title, left=["bound"], right=[f"T={t}" for t in horizons])
    for i, row in enumerate(columns[0]) if columns else ():
        cells = [f"{c[i].largest:.3f}" if c[i].checked and c[i].where else "–" for c in columns]
        table.add_row(BOUND_LABELS[row.bound], *cells)
    return table


def bounds_panels(outcomes: Sequence[Tightness], attacked: Sequence[Tightness]) -> list[Chart]:
    """Tightness against the horizon: searched, random, typical; and against the drift's size."""
    panels = []
    y = "|Error| / bound"
    for title, chosen, value in (
        ("largest found by search", attacked, "largest"),
        ("largest of random pairs", outcomes, "largest"),
        ("median of random pairs", outcomes, "median"),
    ):
        if chosen:
            horizons = sorted({o.horizon for o in chosen})
            rows = [_sharp([o for o in chosen if o.horizon == t]) for t in horizons]
            typical = value == "median"
            marks = () if typical else ((1.0, "attained"),)
            lines = _series(horizons, rows, value)
            panels.append(Chart(title, y, lines, x_title="horizon T, tokens", log_x=True, log=typical, lines=marks))
    if outcomes:
        rows = [_sharp([of_drift(o, *edges) for o in outcomes]) for edges in pairwise(EDGES)]
        lines = _series([3e-4, 3e-3, 3e-2, 3e-1], rows, "median")
        title, x = "median by size of drift", "largest token TV, by decade"
        panels.append(Chart(title, y, lines, x_title=x, log_x=True, log=True))
    return panels


def bounds_rows(outcomes: Sequence[Tightness], attacked: Sequence[Tightness]) -> dict[str, Any]:
    """Everything, ready for JSON: all random pairs, what was searched, and random by regime."""
    return {
        "pairs": sum(len(o.eps) for o in outcomes),
        "violations": violations(outcomes) + violations(attacked),
        "random": _json(summarize(outcomes)),
        "searched": _json(summarize(attacked)),
        "by_horizon": _grouped(outcomes, lambda o: o.horizon),
        "searched_by_horizon": _grouped(attacked, lambda o: o.horizon),
        "by_family": _grouped(outcomes, lambda o: o.family),
        "by_drift": {
            f"{low:g} to {min(high, 1):g}": _json(summarize([of_drift(o, low, high) for o in outcomes]))
            for low, high in pairwise(EDGES)
        },
    }


def coverage_table(title: str, rows: Sequence[Covered], *, intervals: bool = False) -> Table:
    """Table of how often each statement was false in a world; what offdrift does not state is dimmed.

    Args:
        intervals: also the interval of each estimate.
    """
    numbers = ["false", "95 % interval", "alpha", "speaks", "width"]
    table = empty_table(title, left=["statement"], right=numbers)
    for row in rows:
        if row.statement.startswith("interval of") and not intervals:
            continue
        table.add_row(
            row.statement,
            Text(f"{row.share:.3f}", style="bold red" if row.refuted else ""),
            f"{row.low:.3f}–{row.high:.3f}",
            f"{row.alpha:.2g}",
            "" if row.speaks is None else f"{row.speaks:.2f}",
            "" if row.width is None else f"{row.width:.2g}",
            style="" if row.claims else "dim",
        )
    return table


def coverage_rows(rows: Sequence[Covered]) -> dict[str, Any]:
    """Rows of `coverage_table`, ready for JSON, with what each world is."""
    worlds = {world.name: world for world in (make() for make in WORLDS.values())}
    present = dict.fromkeys(row.world for row in rows)
    return {
        "worlds": {
            name: {
                "about": worlds[name].about,
                "gain": worlds[name].gain,
                "prompts": worlds[name].prompts,
                "answers": worlds[name].answers,
                "looks": worlds[name].looks,
            }
            for name in present
        },
        "rows": [row._asdict() for row in rows],
    }


def _cells(row: Row | None) -> tuple[Text, str]:
    if row is None or not row.where:
        return Text("–"), ""
    return Text(f"{row.largest:.4f}", style="bold" if row.largest > 0.99 else ""), row.where


def _sharp(outcomes: Sequence[Tightness]) -> list[Row]:
    return [r for r in summarize(outcomes) if r.constants == "sharp"]


def _series(places: Sequence[float | int], rows: Sequence[Sequence[Row]], value: str) -> list[Series]:
    """One line per bound that is drawn, with a gap where nothing was checked."""
    values = [{r.bound: getattr(r, value) if r.where else math.nan for r in each} for each in rows]
    return [Series(BOUND_LABELS[n], places, [v.get(n, math.nan) for v in values]) for n in DRAWN]


def _grouped(outcomes: Sequence[Tightness], key: Callable[[Tightness], int | str]) -> dict[str, list[dict[str, Any]]]:
    names = sorted({key(o) for o in outcomes}, key=lambda k: (isinstance(k, str), k))
    return {str(n): _json(summarize([o for o in outcomes if key(o) == n])) for n in names}


def _json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows as mappings; infinite, a bound of 0 with an error above it, is null."""
    return [{k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in vars(r).items()} for r in rows]
