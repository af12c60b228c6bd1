"""The method table in a terminal: a list that fits its width, and a page for each row.

Nothing is computed here: `offdrift.methods.catalog` has the facts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from offdrift.methods.axes import BIASES, EVIDENCE, SIGNS, STATUS, STOPPED, UNITS

Row = Mapping[str, Any]

WIDE, WIDEST = 104, 160
"""Terminal columns from which axes have columns of their own, and from which they need one line."""

RATIOS = {
    "full": "current to rollout policy",
    "mismatch": "old to rollout policy: two engines, the same weights",
    "staleness": "current to old policy: one engine, two versions of the weights",
}
ABOUT = {
    "weights": "a number without gradient multiplies REINFORCE or PPO",
    "token clips": "a loss per token, with a trust region",
    "units and sequences": "ratios over prefixes, turns and responses; baselines; gates of sequences",
    "trust region masking": "whole sequences are rejected, the rest pushed by the full ratio",
    "recipes": "what was published with a model",
    "presets": "verl's rollout correction, by its names",
    "in the engine": "systems: what two engines compute; nothing here runs them",
    "around the loss": "systems: schedulers, buffers, optimizers; nothing here runs them",
}
"""One line for each family."""


# -- the list -------------------------------------------------------------------------------------


def method_list(rows: Mapping[str, Row], *, width: int) -> RenderableType:
    """All given rows by family, for a terminal of that many columns.

    Args:
        rows: of `offdrift.methods.catalog`.
        width: columns; below `WIDE` the axes stand under what a method does.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_header=width >= WIDE)
    table.add_column("method", no_wrap=True, min_width=max(map(len, rows)))
    table.add_column("what it does", min_width=30)
    if width >= WIDE:
        for title in ("unit", "ratio", "evidence", "bias"):
            table.add_column(title, no_wrap=True)
    last = None
    for name, row in rows.items():
        if row["family"] != last:
            if last is not None:
                table.add_section()
            last = row["family"]
            table.add_row(Text(last, style="bold cyan"), Text(ABOUT.get(last, ""), style="cyan"))
        table.add_row(*_cells(name, row, width))
    return Group(table, Padding(_legend(rows), (0, 0, 0, 1)))


def _cells(name: str, row: Row, width: int) -> list[Text]:
    what = Text(row["summary"])
    if row["experimental"]:
        what.append(" (experimental)", style="yellow")
    axes = _axes(row)
    if width < WIDE:
        line = " · ".join(", ".join(words) for words in axes if words)
        return [Text(name, style="bold"), what.append("\n" + line, style="dim")]
    joiner = ", " if width >= WIDEST else ",\n"
    return [Text(name, style="bold"), what, *(Text(joiner.join(w), style="dim") for w in axes)]


def _axes(row: Row) -> list[list[str]]:
    """Unit, ratio, evidence and bias in as few words as they have."""
    if row["kind"] == "system":
        return [["system"], [], [], []]
    bias = [] if row["bias"] is None else [row["bias"]]
    return [row["unit"], row["ratio"] or ["no ratio"], row["evidence"], bias]


def _legend(rows: Mapping[str, Row]) -> Text:
    systems = sum(row["kind"] == "system" for row in rows.values())
    methods = len(rows) - systems
    counts = [f"{n} {what}{'s' * (n != 1)}" for n, what in ((methods, "method"), (systems, "system")) if n]  # fmt: skip
    words = Text.assemble((", ".join(counts), "bold"), ".  ")
    if methods:
        words.append(
            "unit: over what policies are compared (worst: the worst token). ratio: full is current "
            "to rollout policy, mismatch old to rollout, staleness current to old. evidence: what a "
            "rollout must record. bias: of the expected gradient, by enumeration.",
            style="dim",
        )
    first = next(iter(rows))
    return words.append_text(
        Text.assemble("\noffdrift methods ", (first, "bold"), "  explains one;  ")
    ).append("offdrift methods --help  says how to choose")


# -- one row --------------------------------------------------------------------------------------


def method_page(row: Row) -> RenderableType:
    """Everything that is known of one row."""
    return _system_page(row) if row["kind"] == "system" else _method_page(row)


def _method_page(row: Row) -> RenderableType:
    parts = [(part["path"].replace(".", " "), part["formula"]) for part in row["parts"]]
    parts.append(("aggregate", row["aggregate"]))
    if row["advantage"]:
        parts.append(("advantage", f"{row['advantage']}, as published"))
    return Group(
        _title(row),
        _section("Formulas", parts),
        _section("What it is", _axes_in_full(row)),
        _section("Why, and why not", _words(row)),
        _section("Values, and what --set calls them", _settings(row), style="none"),
        _run(row),
    )


def _system_page(row: Row) -> RenderableType:
    about = [
        ("works on", row["aggregate"]),
        ("mechanism", row["mechanism"]),
        ("IS", row["is_treatment"]),
        ("models", {"both": "dense and MoE"}.get(row["model_class"], row["model_class"])),
        ("against", row["target"]),
        ("fails", row["fails"]),
        ("status", f"{row['status']}: {STATUS[row['status']]}"),
        ("reference", row["reference"]),
    ]
    place = [("where", row["where"]), ("here", ", ".join(row["here"]) or "nothing that runs")]
    place.append(("watch", ", ".join(row["watch"]) or "–"))
    place.append(("correct with", ", ".join(row["related"])))
    return Group(
        _title(row),
        _section("What it is", about),
        _section("What it takes", place),
    )


def _title(row: Row) -> Text:
    name = Text(row["name"], style="bold")
    if row["kind"] == "system":
        name.append("  a system, not a method: nothing here runs it", style="yellow")
        return name.append(f"\n{row['title']}: {row['summary']}", style="not bold default")
    name.append(f"  {row['family']}", style="not bold cyan")
    if row["experimental"]:
        name.append("  EXPERIMENTAL: the formula is unverified", style="bold yellow")
    return name.append(f"\n{row['summary']}", style="not bold default")


def _axes_in_full(row: Row) -> list[tuple[str, str]]:
    said = lambda words, meaning: "\n".join(f"{w}: {meaning.get(w, '')}".rstrip(": ") for w in words)  # noqa: E731
    bias = row["bias"]
    needs = list(row["needs"]) + ["logp_old"] * row["needs_old"]
    return [
        ("unit", said(row["unit"], UNITS)),
        ("ratio", said(row["ratio"], RATIOS) or "none"),
        ("importance", row["is_treatment"]),
        ("evidence", said(row["evidence"], EVIDENCE)),
        ("sign", said([row["sign"]], SIGNS)),
        ("stop-gradient", said([row["stop_gradient"]], STOPPED)),
        ("bias", "not known" if bias is None else f"{bias}: {BIASES[bias]}"),
        ("needs", ", ".join(sorted(needs)) or "log-probs of rollout and current policy, advantages"),
    ]


def _words(row: Row) -> list[tuple[str, str]]:
    return [
        ("against", row["target"]),
        ("mechanism", row["mechanism"]),
        ("fails", row["fails"]),
        ("status", f"{row['status']}: {STATUS[row['status']]}"),
        ("reference", row["reference"]),
    ]


def _settings(row: Row) -> list[tuple[str, str]]:
    return [(f"override.{path}", shown(value)) for path, value in row["settings"].items()]


def _run(row: Row) -> Text:
    numbers = [p for p, v in row["settings"].items() if isinstance(v, float) and "." in p]
    path = numbers[0] if numbers else "aggregate"
    value = shown(row["settings"][path])
    lines = Text.assemble("Run it\n", style="bold")
    lines.append(f"  {row['command']}\n", style="not bold green")
    return lines.append(f"  {row['command']} --set override.{path}={value}", style="not bold green")


def shown(value: Any) -> str:
    """A value as it is written after --set; one that is not given as a dash.

    Example:
        >>> shown(0.05), shown(1 / 3), shown(None), shown(True), shown([0.4, 0.5])
        ('0.05', '0.333333', '–', 'true', '[0.4, 0.5]')
    """
    if value is None:
        return "–"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(shown, value))}]"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _section(title: str, lines: list[tuple[str, str]], *, style: str = "none") -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True, justify="left")
    grid.add_column(overflow="fold")
    for label, words in lines:
        grid.add_row(Text(label), Text(words))
    return Group(Text(), Text(title, style="bold"), Padding(grid, (0, 0, 0, 2)))
