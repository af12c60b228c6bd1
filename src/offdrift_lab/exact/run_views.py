"""Tables and figures of the lab's experiments on recorded runs: gates against length, safe lags, collapses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from offdrift.show.charts import Chart, Series
from offdrift_lab.exact.lag_law import LagRun
from offdrift_lab.exact.length_bias import Curve
from offdrift_lab.exact.views import empty_table

LABELS = {
    "trm_max": "TRM-Max",
    "trm_avg": "TRM-Avg",
    "ln_trm": "LN-TRM",
    "ser": "SER",
    "seq_product": "sequence product",
}


def length_bias_table(title: str, curves: Sequence[Curve], *, width: int = 140) -> Table:
    """Acceptance at every length that fits and the fitted growth, one row per gate."""
    stated = width >= 120
    fits = max(2, (width - (79 if stated else 62)) // 8)
    count = len(curves[0].lengths)
    columns = range(count)
    if count > fits:  # from the first to the last
        columns = sorted({round(i * (count - 1) / (fits - 1)) for i in range(fits)})
    lengths = [f"T={curves[0].lengths[i]}" for i in columns]
    table = empty_table(title, left=["gate"], right=["threshold", *lengths, "γ"])
    table.add_column("with length", no_wrap=True)
    if stated:
        table.add_column("Table 2", no_wrap=True, style="dim")
    for c in curves:
        some = [c.acceptance[i] for i in columns]
        shares = [Text(f"{a:.2f}", style="bold red" if a < 0.5 else "") for a in some]
        gamma = "" if c.exponent is None else f"{c.exponent:.2f}"
        last = [c.stated] if stated else []
        table.add_row(LABELS[c.gate], f"{c.threshold:.3g}", *shares, gamma, length_verdict(c), *last)
    return table


def length_verdict(curve: Curve) -> str:
    """The trend of acceptance with length, in words."""
    if curve.exponent is None:
        return "unchanged"
    first, last = curve.acceptance[0], curve.acceptance[-1]
    overlap = curve.low[0] <= last <= curve.high[0] or curve.low[-1] <= first <= curve.high[-1]
    if overlap or abs(first - last) < 0.02:
        return "about constant"
    if last > first:
        return "grows"
    return "falls exponentially" if curve.exponent > 0.85 else "falls"


def length_bias_panels(results: Sequence[tuple[str, Sequence[Curve]]]) -> list[Chart]:
    """One panel per stream and choice of thresholds."""
    return [
        Chart(
            title,
            "accepted sequences",
            x_title="length T, tokens",
            log_x=True,
            series=[Series(LABELS[c.gate], c.lengths, c.acceptance, low=c.low, high=c.high) for c in curves],
        )
        for title, curves in results
    ]


def length_bias_rows(results: Sequence[tuple[str, Sequence[Curve]]]) -> list[dict[str, Any]]:
    """Return the table's numbers, ready for JSON."""
    return [{"stream": title, **vars(c), "verdict": length_verdict(c)} for title, cs in results for c in cs]


def lag_law_tables(result: Mapping[str, Any]) -> list[Table]:
    """The law of each family, and how well it tells stable runs of the others."""
    laws = empty_table(
        "L_max = c ESS^α, fitted in each family of runs",
        left=["family"],
        right=["runs", "stable", "c", "α", "95 %", "1/α: 95 %", "50 ESS right"],
    )
    for row in result["families"]:
        right = row["published"]["accuracy"]
        laws.add_row(
            row["family"],
            *(str(row["runs"]), str(row["stable"]), _short(row.get("c")), _short(row.get("alpha"))),
            _ends(row.get("alpha_interval"), _short),
            _ends(row.get("inverse_alpha_interval"), _two),
            "-" if right is None else f"{right:.0%}",
        )
    tested = empty_table(
        "Stable or not, out of sample: AUROC of each rule",
        left=["fitted on, tested on"],
        right=["law", "95 %", "ESS", "lag", "law - ESS"],
    )
    for row in result["across"]:
        tested.add_row(
            f"{row['fitted_on']},\n  {row['tested_on']}",
            *(_two(row["law"]["auroc"]), _ends(row["law"]["auroc_interval"], _two)),
            *(_two(row["ess"]["auroc"]), _two(row["lag"]["auroc"])),
            _ends(row["law_less_ess"], lambda x: f"{x:+.2f}"),
        )
    return [laws, tested] if result["across"] else [laws]


def _short(value: float | None) -> str:
    return (
        "-" if value is None else f"{value:.2g}" if abs(value) < 100 else f"{value:.0f}" if abs(value) < 1e4 else ">1e4"
    )


def _two(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _ends(interval: Sequence[float] | None, words: Callable[[float], str]) -> str:
    return "-" if interval is None else f"{words(interval[0])} to {words(interval[1])}"


def lag_law_panels(runs: Sequence[LagRun], result: Mapping[str, Any]) -> list[Chart]:
    """Each family's runs by ESS and lag, stable and not, with its fitted boundary and the published one."""
    panels = []
    for row in result["families"]:
        of_family = [run for run in runs if run.family == row["family"]]
        series = []
        for name, stable in (("stable", True), ("not stable", False)):
            of_kind = [run for run in of_family if run.stable(result["keep"]) == stable]
            texts = [f"{run.setting}, seed {run.seed}" for run in of_kind]
            xs, ys = [run.ess for run in of_kind], [run.lag for run in of_kind]
            series.append(Series(name, xs, ys, kind="dots", texts=texts))
        ends = [min(run.ess for run in of_family), 1.0]
        if row.get("c") is not None and row["sharpness"] > 0:
            series.append(Series("fitted boundary", ends, [row["c"] * e ** row["alpha"] for e in ends]))
        series.append(Series("50 ESS", ends, [50 * e for e in ends], dash="dash"))
        panels.append(
            Chart(
                str(row["family"]),
                "lag L, updates",
                series,
                x_title="effective share of sequences, ESS",
                log_x=True,
                log=True,
                y_range=(0.5, 2 * max(run.lag for run in of_family)),
                legend=True,
            )
        )
    return panels


def collapse_table(result: Mapping[str, Any]) -> Table:
    """Table of how well each set of features predicts a collapse on runs that it was not fitted to."""
    table = empty_table(
        "Is a collapse near? On seeds not learned from", left=["features"], right=["AUROC", "95 %", "Brier"]
    )
    for name, p in result["predictors"].items():
        estimate, low, high = p["auroc"]
        table.add_row(name, f"{estimate:.3f}", f"{low:.3f} to {high:.3f}", f"{p['brier']:.3f}")
    return table
