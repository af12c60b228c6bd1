"""The page of a plan: speed against lag and against predicted drift, where time goes, the answer and its assumptions.

Built from `plan.json` alone; a name in it may be anybody's text, see `offdrift.show.html`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from offdrift.judge import load_rules
from offdrift.show.charts import Chart, Series, chart_data
from offdrift.show.html import STYLES, render_document, write_document
from offdrift.show.json_access import mapping
from offdrift.show.numbers import flatten, percent, short
from offdrift_lab.plan.view import COLUMNS, answer, cell, counted, provenance, stated, verdict

Row = Mapping[str, Any]
STATES = (
    ("busy", "arm-0", "draws responses, or trains"),
    ("sync", "arm-4", "waits while weights are moved"),
    ("idle", "none", "has nothing to do"),
    ("down", "arm-7", "is lost and starts again"),
)
"""What a worker or the trainer does, its color, and what that means."""
ASSUMPTIONS = (
    "A decoding step of c responses takes t0 + t1 c seconds, whatever their length; a prefill stops its worker.",
    "Lengths do not depend on the policy, and every schedule sees the same ones.",
    "All workers are alike; pushes and loads take what is stated, without contention.",
    "Decisions are those of the scheduler that runs use; only time is simulated.",
)


def write_plan_page(document: Row, path: Path) -> Path:
    """Write the page of a plan, whole or not at all; an earlier one is replaced.

    Args:
        document: what `offdrift_lab.plan.compare.plan` returns.

    Raises: `RecordError` if it cannot be written.
    """
    return write_document(render(document), path)


def render(document: Row) -> str:
    """The page as text."""
    rows = sorted(document["schedules"], key=lambda row: -row["groups_per_s"])
    phases, best, drift = document["phases"], document["recommended"], document["drift"]
    charts = tradeoffs(document)
    lines, notes = provenance(document)
    context = {
        "name": phases["name"],
        "facts": facts(phases),
        "verdict": verdict(document),
        "answer": answer(document),
        "tiles": [] if best is None else tiles(document, best),
        "charts": charts,
        "legend": LEGEND,
        "rows": rows,
        "best": best,
        "judged_by": document.get("judged_by", "") if document["drift"] is not None else "",
        "columns": [column for column in COLUMNS if column[0] != "kl" or drift is not None],
        "cell": cell,
        "sort_by": lambda row, key: row["worker_sync"] if key == "sync" else row[key],
        "states": STATES,
        "bars": bars,
        "sweep": sweep_cells(document),
        "assumptions": ASSUMPTIONS,
        "phases": lines or [(part, phase_text(phases[part])) for part in phases if part != "name"],
        "notes": notes,
        "drift": None if drift is None else list(flatten(drift)),
    }
    return render_document(
        "plan.html.j2", context, data=lambda columns: chart_data(charts, columns), styles=(*STYLES, "plan.css")
    )


def facts(phases: Row) -> list[str]:
    """The cluster and the task in a few words each."""
    rollout, trainer, batch, lengths = (phases[k] for k in ("rollout", "trainer", "batch", "lengths"))
    size = {
        "histogram": f"responses of {len(lengths['values'])} lengths",
        "constant": f"responses of {lengths['mean']:,.0f} tokens",
        "lognormal": f"responses of {lengths['mean']:,.0f} tokens on average, {lengths['cap']:,} at most",
    }[lengths["kind"]]
    return [
        f"{counted(rollout['workers'], 'rollout worker')} of {counted(rollout['devices'], 'device')}",
        f"{counted(trainer['devices'], 'device')} for the trainer",
        f"{counted(batch['groups'], 'group')} of {batch['samples']} per update",
        size,
    ]


def phase_text(part: Row) -> str:
    """The values of one part of the phases, but for those that are absent."""
    return ", ".join(f"{key} {stated(value)}" for key, value in part.items() if value not in (None, []))


def tiles(document: Row, best: Row) -> list[tuple[str, str, str, str]]:
    """Title, value, unit and explanation of the numbers that matter of the recommended row."""
    error = f" ± {short(best['error'])}" if round(best["error"] or 0.0, 6) else ""
    table = [
        (
            "Throughput",
            f"{best['speedup_colocated']:.2f} ×",
            "one colocated pool",
            f"{short(best['seconds'])}{error} s per update, {best['speedup_sync']:.2f} × sync on the stated split",
        ),
        (
            "Lag of the oldest token",
            f"{best['lag_mean']:.2f}",
            "updates",
            f"95 % of responses: {best['lag_p95']} or less; proved limit {best['max_lag']}",
        ),
    ]
    if document["drift"] is None:
        waiting = f"trainer {percent(best['trainer_idle'])}, workers {percent(best['worker_idle'])}"
        return [*table, ("Idle", percent(max(best["trainer_idle"], best["worker_idle"])), "of the time", waiting)]
    error = document["drift"]["kl"]["error"]
    sure = "" if error is None else f"; ± {short(error)} at a lag that was not measured"
    fix = f"correction: {document['correction']['method']}"
    return [*table, ("Predicted KL per token", short(best["kl"]), "nat", f"{fix}{sure}")]


# -- charts ----------------------------------------------------------------------------------------

LOOKS = {
    (True, True): ("arm-0", "circle"),
    (True, False): ("arm-0", "diamond"),
    (False, True): ("arm-5", "circle"),
    (False, False): ("arm-5", "diamond"),
}
"""Color and symbol of a row by whether it is on the front, and whether its lag has a limit."""
LEGEND = (
    ("arm-1", "★", "recommended"),
    ("arm-0", "●", "no other row is as fast with less drift"),
    ("arm-5", "●", "another row is"),
    ("arm-0", "◆", "nothing limits its lag"),
)
SPEED = "speedup_colocated"


def tradeoffs(document: Row) -> list[Chart]:
    """Throughput against the lag's mean and 95th percentile, and against predicted KL where there is a fit."""
    rows = [*document["schedules"], *document["sweep"]]
    charts = []
    if document["drift"] is not None:
        limits = load_rules().limits | mapping(document.get("limits"))
        most = max(row["kl"] for row in rows)
        marks = [(limits[k], word) for k, word in (("kl_clean", "clean below"), ("kl_large", "large above"))]
        charts.append(
            _tradeoff(
                document,
                "kl",
                "Throughput against predicted drift",
                "predicted mean KL(rollout || current) per token, nat",
                [mark for mark in marks if mark[0] < 1.3 * most],
            )
        )
    charts += [
        _tradeoff(document, "lag_mean", "Throughput against mean lag", "mean lag of the oldest token, updates", []),
        _tradeoff(document, "lag_p95", "Throughput against the tail of the lag", "95th percentile of the lag", []),
    ]
    return charts


def _tradeoff(document: Row, key: str, title: str, x_title: str, upright: Sequence[tuple[float, str]]) -> Chart:
    """A dot a row; the front is that of the axis which decides, the predicted KL or else the mean lag."""
    rows, best = [*document["schedules"], *document["sweep"]], document["recommended"]
    decides = key == ("lag_mean" if document["drift"] is None else "kl")
    series = []
    if decides:
        front = sorted((row for row in rows if row["on_front"]), key=lambda row: (row[key], row[SPEED]))
        x, y = [], []
        for row in front:  # as fast as the row before it, until its own drift is reached
            x += [row[key]] * 2
            y += [y[-1] if y else row[SPEED], row[SPEED]]
        x.append(max(row[key] for row in rows))
        series.append(Series("front", x, [*y, y[-1]], color="arm-0", dash="dot", faint=True))
    for (on_front, limited), (color, symbol) in LOOKS.items():
        points = [r for r in rows if (r["on_front"], r["max_lag"] is not None) == (on_front, limited) and r is not best]
        labeled = {id(row) for row in points if on_front and decides and not row["swept"]}
        series.append(_dots(f"{on_front}, {limited}", points, key, color=color, symbol=symbol, labeled=labeled))
    if best is not None:
        series.append(_dots("recommended", [best], key, color="arm-1", symbol="star", labeled={id(best)}))
    return Chart(
        title,
        "× one colocated pool",
        series,
        key,
        "Every schedule, and the bounds and splits that were tried of the recommended one. Up and to the left is "
        "better. The dotted line is the best that can be had at each place.",
        x_title=x_title,
        lines=[(1.0, "")],
        upright=upright,
        y_range=(0, 1.18 * max(1.0, *(row[SPEED] for row in rows))),
        wide=decides,
    )


def _dots(name: str, rows: Sequence[Row], key: str, color: str, symbol: str, labeled: set[int]) -> Series:
    """Rows as dots; of labeled ones at one place, the first has the names of all."""
    places: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if id(row) in labeled:
            places.setdefault((f"{row[key]:.6g}", f"{row[SPEED]:.6g}"), []).append(row)
    labels = {id(same[0]): ", ".join(dict.fromkeys(map(name_of, same))) for same in places.values()}
    texts = [
        f"{name_of(row)}, {row['workers']} workers: {row['tokens_per_s']:,.0f} tokens/s, lag {row['lag_mean']:.2f}, "
        f"p95 {row['lag_p95']}" + (f", KL {short(row['kl'])} nat" if "kl" in row else "")
        for row in rows
    ]
    return Series(
        name,
        [row[key] for row in rows],
        [row[SPEED] for row in rows],
        kind="dots",
        color=color,
        symbol=symbol,  # type: ignore[arg-type]
        strong=symbol == "star",
        texts=texts,
        labels=[labels.get(id(row), "") for row in rows] if labels else (),
    )


def name_of(row: Row) -> str:
    """A row's schedule, with its bound where a sweep has set it."""
    return row["schedule"] if not row["swept"] else f"{row['schedule']} ≤{row['bound']}"


# -- tables ----------------------------------------------------------------------------------------


def bars(row: Row, side: str) -> list[tuple[str, float, float, str]]:
    """Color, start, width (percent) and words of each part of a side's time."""
    parts, at = [], 0.0
    for state, color, _ in STATES:
        share = row.get(f"{side}_{state}", 0.0)
        if share > 0:
            parts.append((color, 100 * at, 100 * share, f"{state} {percent(share)}"))
        at += share
    return parts


def sweep_cells(document: Row) -> dict[str, Any] | None:
    """The sweep as a table: bounds, and for each split its row for every bound."""
    sweep = document["sweep"]
    if not sweep:
        return None
    bounds = list(dict.fromkeys(row["bound"] for row in sweep))
    splits = list(dict.fromkeys(row["workers"] for row in sweep))
    rows = {(row["workers"], row["bound"]): row for row in sweep}
    return {
        "schedule": sweep[0]["schedule"],
        "bounds": ["as published" if b is None else f"bound {b}" for b in bounds],
        "rows": [[rows[workers, bound] for bound in bounds] for workers in splits],
    }
