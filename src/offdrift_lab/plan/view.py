"""View of a plan in a terminal: the table of schedules, the sweep, and the answer in sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from offdrift.judge import load_rules
from offdrift.show.json_access import mapping
from offdrift.show.numbers import percent, short

WIDE = 118
"""Columns of a terminal that shows every column of the table."""

COLUMNS = (
    ("speedup_sync", "× sync", "Throughput over that of `sync` on the same split of devices.", False),
    ("speedup_colocated", "× coloc.", "Throughput over one pool of all devices that generates, then trains.", False),
    ("seconds", "step", "Seconds per update.", False),
    ("tokens_per_s", "tokens/s", "Tokens that were trained on, per second.", True),
    ("worker_idle", "idle w", "Share of the rollout workers' time without a response to draw.", False),
    ("trainer_idle", "idle t", "Share of the trainer's time without groups to train on.", False),
    ("sync", "sync", "Share of the workers' time that loading weights takes.", True),
    ("lag_mean", "lag", "Mean lag of a response's oldest token, updates.", False),
    ("lag_p95", "p95", "Lag that 95 % of the responses do not exceed, updates.", False),
    ("max_lag", "limit", "Proved limit of the lag, updates; ∞: nothing limits it.", False),
    ("wasted", "wasted", "Share of the drawn tokens that no update used.", True),
    ("mixed", "mixed", "Share of the responses with tokens of several versions.", True),
    ("kl", "KL", "Predicted mean KL(rollout || current) per token, nat.", False),
)
"""Key, title and meaning of each column, and whether a narrow terminal leaves it out."""


def cell(row: Mapping[str, Any], key: str) -> str:
    """One number of a row as text."""
    value = row["worker_sync"] if key == "sync" else row.get(key)
    if key == "max_lag":
        return "∞" if value is None else f"{value}"
    if key in ("speedup_sync", "speedup_colocated", "lag_mean"):
        return f"{value:.2f}"
    if key == "tokens_per_s":
        return f"{value:,.0f}"
    if key in ("worker_idle", "trainer_idle", "sync", "wasted", "mixed"):
        return percent(value)
    return f"{value}" if isinstance(value, int) else short(value)


def columns(rows: Sequence[Mapping[str, Any]], *, narrow: bool) -> list[tuple[str, str, str]]:
    """Key, title and meaning of the columns that are shown."""
    return [
        (key, title, about)
        for key, title, about, wide in COLUMNS
        if not (wide and narrow) and (key != "kl" or "kl" in rows[0])
    ]


def plan_view(document: Mapping[str, Any], *, width: int) -> RenderableType:
    """The tables and the answer."""
    phases, rows, sweep = document["phases"], document["schedules"], document["sweep"]
    rollout, trainer = phases["rollout"], phases["trainer"]
    head = Text.assemble(
        (phases["name"], "bold"),
        f"\n{counted(rollout['workers'], 'rollout worker')} of {counted(rollout['devices'], 'device')}, "
        f"{counted(trainer['devices'], 'device')} for the trainer; {counted(phases['batch']['groups'], 'group')} of "
        f"{phases['batch']['samples']} per update",
    )
    parts: list[RenderableType] = [head]
    lines, notes = provenance(document)
    if lines:
        grid = Table.grid(padding=(0, 2, 0, 0))
        for part, values in lines:
            grid.add_row(part, Text(values))
        parts += ["", grid, *(Text(note, style="dim") for note in notes)]
    parts.append(table_of(rows, document["recommended"], narrow=width < WIDE))
    if sweep:
        parts.append(sweep_table(sweep, document["recommended"]))
    legend = "● no other row is faster with less lag   ▶ recommended"
    legend += "   ✓ ECHO-2's rule holds" if any(row["meets_rule"] for row in sweep) else ""
    parts.append(Text(f"{legend}\n", style="dim"))
    parts.append(Text("\n".join(answer(document))))
    if document["drift"] is not None and (judged_by := document.get("judged_by")):
        parts.append(Text(str(judged_by), style="dim"))
    return Group(*parts)


def provenance(document: Mapping[str, Any]) -> tuple[list[tuple[str, str]], list[str]]:
    """Phase times by part, each behind the number of its source; and the sources. Empty for the example alone."""
    origins, assumed = document.get("origins") or {}, document.get("assumed") or {}
    if not origins:
        return [], []
    sources = list(dict.fromkeys(origin["source"] for origin in origins.values()))
    parts: dict[str, dict[str, list[str]]] = {}
    for field in (*origins, *assumed):
        part, _, key = field.partition(".")
        mark = f"[{sources.index(origins[field]['source']) + 1}]" if field in origins else "[assumed]"
        parts.setdefault(part, {}).setdefault(mark, []).append(f"{key} {stated(document['phases'][part][key])}")
    lines = [
        (part, "  ".join(f"{mark} {', '.join(values)}" for mark, values in by_mark.items()))
        for part, by_mark in parts.items()
    ]
    notes = []
    for number, source in enumerate(sources, 1):
        ways: dict[str, list[str]] = {}
        for field, origin in origins.items():
            if origin["source"] == source and origin["how"]:
                ways.setdefault(origin["how"], []).append(field)
        how = "; ".join(f"{', '.join(fields)}: {way}" for way, fields in ways.items())
        notes.append(f"[{number}] {source}." + (f" {how}." if how else ""))
    if assumed:
        notes.append("[assumed] In no source: give yours in a TOML or with --set.")
    return lines, notes


def counted(n: int, what: str) -> str:
    """A number of things.

    Example:
        >>> counted(1, "device"), counted(12, "device")
        ('1 device', '12 devices')
    """
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def stated(value: Any) -> str:
    """A phase time as text; of a list, how long it is and what it spans."""
    if isinstance(value, list):
        return f"{len(value)} from {short(min(value))} to {short(max(value))}" if value else "none"
    return short(value) if isinstance(value, float) else str(value)


def among(document: Mapping[str, Any]) -> str:
    """Rows from which the recommendation was chosen, if predicted drift has narrowed them."""
    if document["drift"] is None:
        return ""
    limits = load_rules().limits | mapping(document.get("limits"))
    for name in ("kl_clean", "kl_large"):
        if document["recommended"]["kl"] < limits[name]:
            return f" and whose predicted KL is below {limits[name]:g} nat"
    return f"; every one is predicted to drift by {limits['kl_large']:g} nat or more"


def table_of(rows: Sequence[Mapping[str, Any]], best: Mapping[str, Any] | None, *, narrow: bool) -> Table:
    """The schedules, one a row."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    table.add_column("schedule", no_wrap=True)
    visible_columns = columns(rows, narrow=narrow)
    for _, title, _ in visible_columns:
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        mark, style = ("▶", "bold green") if row is best else ("●", "") if row["on_front"] else ("", "dim")
        table.add_row(mark, row["schedule"], *(cell(row, key) for key, _, _ in visible_columns), style=style)
    return table


def sweep_table(rows: Sequence[Mapping[str, Any]], best: Mapping[str, Any] | None) -> Table:
    """Speed-ups of one schedule by number of workers and staleness bound."""
    bounds = list(dict.fromkeys(row["bound"] for row in rows))
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        title=Text(f"{rows[0]['schedule']}: × sync by number of workers and staleness bound", style="bold"),
        title_justify="left",
        title_style="",
    )
    table.add_column("workers : trainer devices", no_wrap=True)
    for bound in bounds:
        table.add_column("as published" if bound is None else f"bound {bound}", justify="right", no_wrap=True)
    for workers in dict.fromkeys(row["workers"] for row in rows):
        by_bound = {row["bound"]: row for row in rows if row["workers"] == workers}
        cells = []
        for bound in bounds:
            row = by_bound[bound]
            mark, style = ("▶ ", "bold green") if row is best else ("● ", "") if row["on_front"] else ("", "dim")
            rule = " ✓" if row["meets_rule"] else ""
            cells.append(Text(f"{mark}{row['speedup_sync']:.2f}{rule}", style=style))
        table.add_row(f"{workers} : {by_bound[bounds[0]]['trainer_devices']}", *cells)
    return table


def verdict(document: Mapping[str, Any]) -> str:
    """Recommendation, in one sentence."""
    best = document["recommended"]
    if best is None:
        return "No schedule here limits the lag, so none is recommended; name one that does."
    bound = "" if best["bound"] is None else f" with a staleness bound of {best['bound']}"
    kl = "" if document["drift"] is None else f", at a predicted KL of {short(best['kl'])} nat per token"
    return (
        f"{best['schedule']}{bound}, on {counted(best['workers'], 'rollout worker')} and "
        f"{counted(best['trainer_devices'], 'device')} for the trainer, "
        f"trains {best['speedup_colocated']:.2f} times as fast as one colocated pool, on tokens that are "
        f"{best['lag_mean']:.2f} updates old on average and never more than {best['max_lag']}{kl}."
    )


def rule_of(document: Mapping[str, Any]) -> list[str]:
    """ECHO-2's provisioning rule, in one sentence."""
    rule = document["provisioning"]
    if rule["workers"] is None or rule["bound"] is None:
        return []
    return [
        f"ECHO-2's rule, by mean lengths: {counted(rule['workers'], 'worker')} and a bound of {rule['bound']} keep "
        "this trainer busy."
    ]


def answer(document: Mapping[str, Any]) -> list[str]:
    """Sentences: which schedule and bound, how many workers, what drift, which correction."""
    best = document["recommended"]
    if best is None:
        return [verdict(document)]
    phases = document["phases"]
    bound = "" if best["bound"] is None else f" with a staleness bound of {best['bound']}"
    error = f" ± {short(best['error'])}" if round(best["error"] or 0.0, 6) else ""
    lines = [
        f"Schedule: {best['schedule']}{bound}, {counted(best['workers'], 'rollout worker')} and "
        f"{counted(best['trainer_devices'], 'device')} for the trainer.",
        f"Speed: {short(best['seconds'])}{error} s per update, {best['speedup_sync']:.2f} times sync, "
        f"{best['speedup_colocated']:.2f} times one colocated pool. It has the least lag within "
        f"{100 * document['tolerance']:g} % of the fastest schedule whose lag has a limit{among(document)}.",
        f"Lag: {best['lag_mean']:.2f} updates on average, {best['lag_p95']} at the 95th percentile, never above "
        f"{best['max_lag']}.",
    ]
    lines += rule_of(document)
    drift, correction = document["drift"], document["correction"]
    if drift is None:
        why = document.get("no_drift") or "what a lag costs depends on the run"
        lines.append(f"Drift: unknown; {why}. Add --drift with an audit.json or an arm's folder.")
    else:
        error = drift["kl"]["error"]
        sure = "" if error is None else f" ± {short(error)}"
        far = f", beyond the measured lags of {drift['kl']['lags'][0]:g} to {drift['kl']['lags'][1]:g}"
        lines.append(
            f"Drift: predicted KL {short(best['kl'])}{sure} nat per token on average, {short(best['kl_p95'])} at the "
            f"95th percentile of the lag{far if correction['extrapolated'] else ''}; from {drift['source']}."
        )
        fix = f" {correction['fix']}" if correction["fix"] else ""
        lines.append(f"Correction: {correction['method']}; {correction['because'].rstrip('.')}.{fix}")
    if best["workers"] != phases["rollout"]["workers"]:
        lines.append(f"The split differs from the {phases['rollout']['workers']} workers that were given.")
    return lines
