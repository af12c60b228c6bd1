"""The method table in a terminal: a list that fits its width, and a page for each row.

Nothing is computed here: `offdrift.methods.describe` has the facts.
"""

from __future__ import annotations

import difflib
import json
import re
import unicodedata
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from offdrift.errors import MethodError

Row = Mapping[str, Any]
Rows = dict[str, dict[str, Any]]

WIDE, WIDEST = 112, 160
"""Terminal columns from which axes have columns of their own, and from which they need one line."""
AXES = ("unit", "ratio", "evidence", "bias")
LABELS = len("stop-gradient")
NARROW_BIAS = 11
"""Columns that "none inside limits" takes on two lines."""

RATIOS = {
    "full": "current to rollout policy",
    "mismatch": "old to rollout policy, two engines at the same weights",
    "staleness": "current to old policy, two versions of the weights in one engine",
}
ABOUT = {
    "weights": "a number without gradient multiplies REINFORCE or PPO",
    "token clips": "a loss per token, with a trust region",
    "units and sequences": "ratios of prefixes, turns, responses; gates of responses",
    "trust region masking": "sequences are rejected, the rest pushed by the full ratio",
    "recipes": "what was published with a model",
    "presets": "verl's rollout correction, by its names",
    "in the engine": "systems: what two engines compute; nothing here runs them",
    "around the loss": "systems: scheduler, buffer, optimizer; nothing here runs them",
}
"""One line for each family."""


# -- look-ups -------------------------------------------------------------------------------------


@cache
def stored() -> dict[str, Any]:
    """methods.json: `rows` by name, `choices` of each filter, `words` that explain each axis."""
    return json.loads((Path(__file__).parent / "methods.json").read_text("utf-8"))


def _meanings(axis: str) -> dict[str, str]:
    return stored()["words"][axis]


def find(name: str) -> dict[str, Any]:
    """BatchInfo of one row; case, spaces and hyphens do not matter.

    Raises: `MethodError` with names that are called alike, or rows that mention it.

    Example:
        >>> find("GSPO-token")["name"], find("Keep Routing")["kind"]
        ('gspo_token', 'system')
    """
    rows, key = stored()["rows"], _key(name)
    if key in rows:
        return rows[key]
    texts = {n: f"{n} {r['reference']} {r.get('title', '')} {r['summary']}" for n, r in rows.items()}
    mentions = [n for n, text in texts.items() if len(key) > 2 and f"_{key}_" in f"_{_key(text)}_"]
    near = difflib.get_close_matches(key, rows, n=3, cutoff=0.75)
    if mentions and not near:
        hint = f"it is part of {' and '.join(mentions[:5])}; "
    else:
        near = near or difflib.get_close_matches(key, rows, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise MethodError(f"no method {name!r}; {hint}`offdrift methods` lists all {len(rows)}")


def select(rows: Rows, **filters: str | None) -> Rows:
    """The rows that have every axis that is asked for.

    Args:
        rows: of `stored`.
        filters: an axis and one of its values (or its beginning, if that is enough), or `reference`
            and a text that the reference contains; None for any.

    Raises: `MethodError` for an unknown value, naming the choices, and for an empty result, naming
        the filter to drop.

    Example:
        >>> list(select(stored()["rows"], unit="prefix", stop_gradient="no"))
        ['ctpo_paper']
    """
    values = {axis: chosen(axis, value) for axis, value in filters.items() if value is not None}
    selected = _having(rows, values)
    if selected:
        return selected
    ways = []
    for axis in values:
        left = list(_having(rows, {a: v for a, v in values.items() if a != axis}))
        few = f" ({', '.join(left)})" if len(left) <= 5 else ""
        ways += [f"drop {_flag(axis)} for {len(left)}{few}"] if left else []
    if not ways:
        alone = [f"{_flag(a)} alone has {len(_having(rows, {a: v}))}" for a, v in values.items()]
        ways = [f"drop more than one: {', '.join(alone)}"]
    asked = " ".join(f"{_flag(axis)} {value!r}" for axis, value in values.items())
    raise MethodError(f"nothing has {asked}; {' or '.join(ways)}")


def chosen(axis: str, value: str) -> str:
    """A value of an axis as the table spells it. Raises: `MethodError` naming the choices."""
    if axis == "reference":
        return value
    choices_of = stored()["choices"]
    if axis not in choices_of:
        raise MethodError(f"no filter {axis!r}; filters are {', '.join([*choices_of, 'reference'])}")
    choices, key = choices_of[axis], _key("worst" if _key(value) == "seq_max" else value)
    exact = [c for c in choices if _key(c) == key]
    starting = [c for c in choices if _key(c).startswith(key)]
    if exact or len(starting) == 1:
        return (exact or starting)[0]
    raise MethodError(f"{_flag(axis)} {value!r} is not one of: {'; '.join(choices)}")


def _having(rows: Rows, values: Mapping[str, str]) -> Rows:
    return {
        name: row
        for name, row in rows.items()
        if all(READ.get(axis, _has)(row, axis, value) for axis, value in values.items())
    }


def _has(row: Row, axis: str, value: str) -> bool:
    cell = row[axis]
    return value in cell if isinstance(cell, list) else value == cell


READ: dict[str, Callable[[Row, str, str], bool]] = {
    "ratio": lambda row, axis, value: (
        _has(row, axis, value) or (value == "none" and row["kind"] == "method" and not row[axis])
    ),
    "kind": lambda row, axis, value: value in (row["kind"], row["family"]),
    "reference": lambda row, axis, value: value.casefold() in row[axis].casefold(),
}


def _flag(axis: str) -> str:
    return "--" + axis.replace("_", "-")


def _key(text: str) -> str:
    """Names as they are compared: "R²VPO" is "r2vpo", "GSPO-token" is "gspo_token"."""
    flat = unicodedata.normalize("NFKC", text).casefold()
    return re.sub(r"[^a-z0-9]+", "_", flat).strip("_")


# -- the list -------------------------------------------------------------------------------------


def method_list(rows: Mapping[str, Row], *, width: int) -> RenderableType:
    """All given rows by family, for a terminal of that many columns.

    Args:
        rows: of `offdrift.methods.describe`.
        width: columns; below `WIDE` a row is its name and axes, and under them what it does.
    """
    cells = {name: _cells(row, ", " if width >= WIDEST else ",\n") for name, row in rows.items()}
    widths = _widths(cells, width)
    shown: list[RenderableType] = []
    if width >= WIDE:
        heads = [Text(title, style="dim") for title in ("method", "what it does", *AXES)]
        shown += [_grid([heads], widths), Text("─" * (sum(widths) + 2 * len(widths) - 2), style="dim")]
    for title in dict.fromkeys(row["family"] for row in rows.values()):
        names = [name for name, row in rows.items() if row["family"] == title]
        heading = Text.assemble((title, "bold cyan"), (f"  {ABOUT.get(title, '')}", "cyan"))
        shown += [heading, *_family(names, cells, widths, width), Text()]
    return Group(*shown, _legend(rows))


def _family(names: list[str], cells: Mapping[str, list[Text]], widths: list[int], width: int) -> list[RenderableType]:
    lines = [[Text(n, style="bold"), *(c for c in cells[n] if c.plain)] for n in names]
    if width >= WIDE and all(len(line) == 3 for line in lines):  # systems have no axes
        tag = max(len(line[2]) for line in lines)
        what = min(max(len(line[1]) for line in lines), width - widths[0] - tag - 4)
        return [_grid(lines, [widths[0], what, tag])]
    if width >= WIDE:
        return [_grid([[Text(n, style="bold"), *cells[n]] for n in names], widths)]
    return [part for n in names for part in _stacked(n, cells[n], widths[0], width)]


def _cells(row: Row, joiner: str) -> list[Text]:
    """What a row does, and its axes in as few words as they have."""
    what = Text(row["summary"])
    if row["experimental"]:
        what.append(" (experimental)", style="yellow")
    if row["kind"] == "system":
        models = "" if row["model_class"] == "both" else f" ({row['model_class']})"
        words = [["system" + models], [], [], []]
    else:
        bias = [] if row["bias"] is None else [row["bias"]]
        words = [row["unit"], row["ratio"] or ["no ratio"], row["evidence"], bias]
    return [what, *(Text(joiner.join(w), style="dim") for w in words)]


def _widths(cells: Mapping[str, list[Text]], width: int) -> list[int]:
    """Columns of name, text and axes: axes get what they need, the bias at least half of it."""
    names = max(6, *map(len, cells))
    axes = [max(len(title), *(_longest(c[1 + i]) for c in cells.values())) for i, title in enumerate(AXES)]
    if width < WIDEST:
        axes[-1] = min(axes[-1], NARROW_BIAS)
    left = width - names - sum(axes) - 2 * (len(axes) + 1)
    return [names, min(left, max(12, *(len(c[0]) for c in cells.values()))), *axes]


def _longest(text: Text) -> int:
    return max(map(len, text.plain.split("\n")))


def _grid(lines: list[list[Text]], widths: list[int]) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    for w in widths:
        grid.add_column(width=w, overflow="fold")
    for line in lines:
        grid.add_row(*line)
    return grid


def _stacked(name: str, cells: list[Text], names: int, width: int) -> list[RenderableType]:
    """A row for a narrow terminal: name and axes, then what it does."""
    _, *axes, bias = (c.plain.replace(",\n", "+") for c in cells)
    words = [a for a in axes if a not in ("", "none")] + [f"bias {bias}"] * bool(bias)
    first = [Text(name, style="bold"), Text(" · ".join(words), style="dim")]
    return [_grid([first], [names, width - names - 2]), Padding(cells[0], (0, 0, 0, 4))]


def _legend(rows: Mapping[str, Row]) -> Text:
    systems = sum(row["kind"] == "system" for row in rows.values())
    methods = len(rows) - systems
    counts = [f"{n} {what}{'s' * (n != 1)}" for n, what in ((methods, "method"), (systems, "system")) if n]
    words = Text.assemble((", ".join(counts), "bold"), ".  ")
    if methods:
        words.append(
            "unit: over what policies are compared (worst: the worst token). ratio: full is current "
            "to rollout policy, mismatch old to rollout, staleness current to old. evidence: what a "
            "rollout must record. bias: of the expected gradient, by enumeration. experimental: no "
            "equation could be found.",
            style="dim",
        )
    words.append("\noffdrift methods NAME", style="bold").append(" explains one; ")
    return words.append("--help", style="bold").append(" shows how to choose.")


# -- one row --------------------------------------------------------------------------------------


def method_page(row: Row) -> RenderableType:
    """Everything that is known of one row."""
    return _system_page(row) if row["kind"] == "system" else _method_page(row)


def _method_page(row: Row) -> RenderableType:
    parts = [(part["path"].replace(".", " "), part["formula"].removeprefix("weight ")) for part in row["parts"]]
    parts.append(("aggregate", f"{row['aggregate']}: {_meanings('aggregate')[row['aggregate']]}"))
    if row["settings"].get("normalizer", "sampled") != "sampled":
        parts.append(("divided by", row["settings"]["normalizer"]))
    if row["advantage"]:
        parts.append(("advantage", f"{row['advantage']}, as published"))
    return Group(
        _title(row),
        _section("Formulas", parts),
        _section("What it is", _axes_in_full(row)),
        _section("Why, and why not", _words(row)),
        _section("Values, and what --set calls them", _settings(row)),
        _run(row),
    )


def _system_page(row: Row) -> RenderableType:
    level = [] if row["aggregate"] == "n/a" else [("works on", row["aggregate"])]
    about = [
        *level,
        ("mechanism", row["mechanism"]),
        ("importance", row["is_treatment"]),
        ("models", {"both": "dense and MoE"}.get(row["model_class"], row["model_class"])),
        ("against", row["target"]),
        ("fails", row["fails"]),
        ("status", f"{row['status']}: {_meanings('status')[row['status']]}"),
        ("reference", row["reference"]),
    ]
    place = [("where", row["where"])]
    place += [("to compute it", ", ".join(row["here"]))] if row["here"] else []
    place.append(("watch", ", ".join(row["watch"])))
    place.append(("correct with", ", ".join(row["related"])))
    return Group(_title(row), _section("What it is", about), _section("What it takes", place))


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
    bias = row["bias"]
    penalized = any(part["role"] == "penalty" for part in row["parts"])
    needs = [*row["needs"], *["logp_old"] * row["needs_old"], *["logp_ref"] * penalized]
    return [
        ("unit", _explained(row["unit"], _meanings("unit"))),
        ("ratio", _explained(row["ratio"], RATIOS) or "none"),
        ("importance", row["is_treatment"]),
        ("evidence", _explained(row["evidence"], _meanings("evidence"))),
        ("sign", _explained([row["sign"]], _meanings("sign"))),
        ("stop-gradient", _explained([row["stop_gradient"]], _meanings("stop_gradient"))),
        ("certifies", _explained([row["certifies"]], _meanings("certifies"))),
        ("bias", "not known" if bias is None else f"{bias}: {_meanings('bias')[bias]}"),
        ("needs", ", ".join(sorted(needs)) or "log-probs of rollout and current policy, advantages"),
    ]


def _explained(words: list[str], meaning: Mapping[str, str]) -> str:
    return "\n".join(f"{word}: {meaning[word]}" if word in meaning else word for word in words)


def _words(row: Row) -> list[tuple[str, str]]:
    return [
        ("against", row["target"]),
        ("mechanism", row["mechanism"]),
        ("fails", row["fails"]),
        ("status", f"{row['status']}: {_meanings('status')[row['status']]}"),
        ("reference", row["reference"]),
    ]


def _settings(row: Row) -> list[tuple[str, str]]:
    return [(f"override.{path}", shown(value)) for path, value in row["settings"].items()]


def _run(row: Row) -> Text:
    order = ("gate", "weight", "objective")
    numbers = [p for p, v in row["settings"].items() if isinstance(v, float) and v and "." in p]
    numbers.sort(key=lambda p: [*order, p.partition(".")[0]].index(p.partition(".")[0]))
    path = numbers[0] if numbers else "aggregate"
    change = f"--set override.{path}={shown(row['settings'][path])}"
    return Text.assemble(
        ("\nRun it\n", "bold"), (f"  {row['command']}\n", "green"), "  and, to change a value, ", (change, "green")
    )


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


def _section(title: str, lines: list[tuple[str, str]]) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True, min_width=LABELS)
    grid.add_column(overflow="fold")
    for label, words in lines:
        grid.add_row(Text(label), Text(words, style="dim" if words == "–" else ""))
    return Group(Text(), Text(title, style="bold"), Padding(grid, (0, 0, 0, 2)))
