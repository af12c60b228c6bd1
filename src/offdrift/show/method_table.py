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
STAR = "★"
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


def _explained(axis: str, values: list[str]) -> str:
    """Values of an axis, one a line, each with what it means."""
    meaning = stored()["words"][axis]
    return "\n".join(f"{value}: {meaning[value]}" if value in meaning else value for value in values)


def find(name: str) -> dict[str, Any]:
    """Facts of one row; case, spaces and hyphens do not matter.

    Raises: `MethodError` with names that are called alike, or rows that mention it.

    Example:
        >>> find("GSPO-token")["name"], find("Keep Routing")["kind"]
        ('gspo_token', 'system')
    """
    rows, key = stored()["rows"], _key(name)
    if key in rows:
        return rows[key]
    if name.endswith(".py"):
        raise MethodError(f"no method {name!r}; a method in a file is named with the file: {name}:NAME")
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
        filters: an axis and one of its values (or its beginning, if that is enough); `situation` and one of those of
            `offdrift.methods.situations`; `reference` and a text that the reference contains; `search` and words that
            all stand somewhere in a row; None for any.

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
    if axis in ANY_TEXT:
        return value
    choices_of = stored()["choices"]
    if axis not in choices_of:
        raise MethodError(f"no filter {axis!r}; filters are {', '.join([*choices_of, *ANY_TEXT])}")
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
    "search": lambda row, axis, value: all(word in _text(row) for word in value.casefold().split()),
    "situation": lambda row, axis, value: row["name"] in stored()["situations"][value]["methods"],
}
ANY_TEXT = ("reference", "search")
"""Filters that take any text."""
SEARCHED = "name title summary family mechanism is_treatment target fails reference formula where"
"""What `search` looks through; the page "Find a method" does, too."""


def _text(row: Row) -> str:
    return " ".join(row.get(field) or "" for field in SEARCHED.split()).casefold()


def _flag(axis: str) -> str:
    return "--for" if axis == "situation" else "--" + axis.replace("_", "-")


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
    # Axes get the columns that they need, the bias at least half of them, the text the rest.
    names = max(6, *(len(_marked(name)) for name in cells))
    axes = [
        max(len(title), *(len(line) for c in cells.values() for line in c[1 + i].plain.split("\n")))
        for i, title in enumerate(AXES)
    ]
    if width < WIDEST:
        axes[-1] = min(axes[-1], NARROW_BIAS)
    left = width - names - sum(axes) - 2 * (len(axes) + 1)
    widths = [names, min(left, max(12, *(len(c[0]) for c in cells.values()))), *axes]
    parts: list[RenderableType] = []
    if width >= WIDE:
        heads = [Text(title, style="dim") for title in ("method", "what it does", *AXES)]
        parts += [_grid([heads], widths), Text("─" * (sum(widths) + 2 * len(widths) - 2), style="dim")]
    for title in dict.fromkeys(row["family"] for row in rows.values()):
        family = {name: cells[name] for name, row in rows.items() if row["family"] == title}
        heading = Text.assemble((title, "bold cyan"), (f"  {ABOUT.get(title, '')}", "cyan"))
        parts += [heading, *_family(family, widths, width), Text()]
    return Group(*parts, _legend(rows))


def _family(cells: Mapping[str, list[Text]], widths: list[int], width: int) -> list[RenderableType]:
    """The rows of one family; in a narrow terminal name and axes, then what it does."""
    if width < WIDE:
        stacked: list[RenderableType] = []
        for name, (what, *others) in cells.items():
            *axes, bias = (c.plain.replace(",\n", "+") for c in others)
            words = [a for a in axes if a not in ("", "none")] + [f"bias {bias}"] * bool(bias)
            first = [Text(_marked(name), style="bold"), Text(" · ".join(words), style="dim")]
            stacked += [_grid([first], [widths[0], width - widths[0] - 2]), Padding(what, (0, 0, 0, 4))]
        return stacked
    lines = [[Text(_marked(n), style="bold"), *row] for n, row in cells.items()]
    filled = [[c for c in line if c.plain] for line in lines]
    if all(len(line) == 3 for line in filled):  # systems have no axes
        tag = max(len(line[2]) for line in filled)
        what = min(max(len(line[1]) for line in filled), width - widths[0] - tag - 4)
        return [_grid(filled, [widths[0], what, tag])]
    return [_grid(lines, widths)]


def _marked(name: str) -> str:
    """The name, with a star if most frameworks have the method."""
    return f"{name} {STAR}" if stored()["rows"].get(name, {}).get("used_by") else name


def _cells(row: Row, joiner: str) -> list[Text]:
    """Cells of a row: what it does, and its axes in as few words as they have."""
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


def _grid(lines: list[list[Text]], widths: list[int]) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    for w in widths:
        grid.add_column(width=w, overflow="fold")
    for line in lines:
        grid.add_row(*line)
    return grid


def _legend(rows: Mapping[str, Row]) -> Text:
    systems = sum(row["kind"] == "system" for row in rows.values())
    methods = len(rows) - systems
    counts = [f"{n} {what}{'s' * (n != 1)}" for n, what in ((methods, "method"), (systems, "system")) if n]
    words = Text.assemble((", ".join(counts), "bold"), ".  ")
    if methods:
        words.append(
            "unit: span over which policies are compared (worst: the worst token). ratio: full is current "
            "to rollout policy, mismatch old to rollout, staleness current to old. evidence: what a "
            "rollout must record. bias: of the expected gradient, by enumeration. experimental: no "
            "equation was published.",
            style="dim",
        )
    if any(row.get("used_by") for row in rows.values()):
        words.append(f" {STAR}: three frameworks or more have it.", style="dim")
    words.append("\noffdrift methods NAME", style="bold").append(" explains one; ")
    words.append("--for stale", style="bold").append(" suggests three; ")
    return words.append("--help", style="bold").append(" shows how to choose.")


def suggested(rows: Rows, name: str) -> Rows:
    """The rows of a situation, the suggested ones first and with what speaks for them under `suggested`."""
    said = {row["method"]: row for row in stored()["situations"][name]["suggested"]}
    first = {method: {**rows[method], "suggested": row} for method, row in said.items() if method in rows}
    return first | {method: row for method, row in rows.items() if method not in first}


def suggestions(name: str) -> RenderableType:
    """Show what an audit said, and the three methods to begin with, each with what speaks for it.

    Args:
        name: of a situation.
    """
    situation = stored()["situations"][name]
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for number, row in enumerate(situation["suggested"], 1):
        evidence = Text.assemble(row["evidence"], (f" ({row['where']})", "dim"))
        grid.add_row(Text(f"{number}. {row['method']}", style="bold"), evidence)
    heading = Text.assemble(("Begin with", "bold cyan"), (f"  where {situation['audit']}", "cyan"))
    reason = f". Not first here: {situation['differs']}" if situation["differs"] else ""
    survey = f"The survey begins with {' and '.join(situation['survey'][:2])}: {situation['survey_why']}{reason}."
    return Group(heading, Padding(grid, (0, 0, 0, 2)), Padding(Text(survey, style="dim"), (0, 0, 0, 2)), Text())


NEEDED = "log-probs of rollout and current policy, advantages"
"""What every method needs."""


# -- one row --------------------------------------------------------------------------------------


def method_page(row: Row) -> RenderableType:
    """Everything that is known of one row."""
    why = _why(row)
    title = Text(row["name"], style="bold")
    if row["kind"] == "system":
        runs = row["command"]
        title.append(f"  a system, not a method{'' if runs else ': nothing here runs it'}", style="yellow")
        title.append(f"\n{row['title']}: {row['summary']}", style="not bold default")
        models = {"both": "dense and MoE"}.get(row["model_class"], row["model_class"])
        about = [("importance", row["is_treatment"]), ("models", models), *why]
        level = [] if row["aggregate"] == "n/a" else [("works on", row["aggregate"])]
        place = [
            ("where", row["where"]),
            *([("to compute it", ", ".join(row["here"]))] if row["here"] else []),
            ("watch", ", ".join(row["watch"])),
            ("correct with", ", ".join(row["related"])),
        ]
        parts = [title, section("What it is", [*level, *about]), section("What it takes", place)]
        return Group(*parts, *([Text.assemble(("\nRun it\n", "bold"), (f"  {runs}\n", "green"))] if runs else []))
    title.append(f"  {row['family']}", style="not bold cyan")
    if row["experimental"]:
        title.append("  EXPERIMENTAL: the formula is unverified", style="bold yellow")
    title.append(f"\n{row['summary']}", style="not bold default")
    formulas = [(part["path"].replace(".", " "), part["formula"].removeprefix("weight ")) for part in row["parts"]]
    formulas.append(("aggregate", _explained("aggregate", [row["aggregate"]])))
    if row["settings"].get("normalizer", "sampled") != "sampled":
        formulas.append(("divided by", row["settings"]["normalizer"]))
    if row["advantage"]:
        formulas.append(("advantage", f"{row['advantage']}, as published"))
    settings = [(f"override.{path}", setting_words(path, value, row)) for path, value in row["settings"].items()]
    bias = row["bias"]
    needs = [
        *row["needs"],
        *row["divergences"],
        *["logp_old"] * row["needs_old"],
        *["logp_ref"] * row["needs_reference"],
    ]
    axes = [
        ("unit", _explained("unit", row["unit"])),
        ("ratio", "\n".join(f"{ratio}: {RATIOS[ratio]}" for ratio in row["ratio"]) or "none"),
        ("importance", row["is_treatment"]),
        ("evidence", _explained("evidence", row["evidence"])),
        ("sign", _explained("sign", [row["sign"]])),
        ("stop-gradient", stopped_words(row)),
        ("certifies", _explained("certifies", [row["certifies"]])),
        ("optimizes", _raised(row)),
        ("bias", "not known" if bias is None else _explained("bias", [bias])),
        ("needs", ", ".join([NEEDED, *sorted(needs)])),
    ]
    change = _change(row)
    return Group(
        title,
        section("Formulas", formulas),
        section("What it is", axes),
        section("Why, and why not", why),
        section("Settings, by their names for --set", settings),
        Text.assemble(
            ("\nRun it\n", "bold"), (f"  {row['command']}\n", "green"), "  to change a value, add ", (change, "green")
        ),
    )


def _why(row: Row) -> list[tuple[str, str]]:
    """Lines on what a row is for and where it is from; of a user's code those that its author wrote, and the file."""
    why = [("meant for", row["target"]), ("mechanism", row["mechanism"]), ("weakness", row["fails"])]
    if row.get("used_by"):
        why.append(("used by", ", ".join(row["used_by"])))
    if code := row.get("code"):
        why.append(("code", f"{code['file']}, SHA-256 {code['sha256'][:12]}"))
        return [line for line in [*why, ("reference", row["reference"])] if line[1]]
    scale = ("shown at", shown_at_words(row))
    return [*why, scale, ("status", _explained("status", [row["status"]])), ("reference", row["reference"])]


def shown_at_words(row: Row) -> str:
    """Scale at which a method was shown, on which models, and where that is read.

    Example:
        >>> shown_at_words(find("topr")), shown_at_words(find("kpop"))
        ('7B, dense models (survey, comparison map)', 'not stated in a source that was read')
    """
    at = row["shown_at"]
    if not at["source"]:
        return f"{at['scale']} in a source that was read"
    models = "dense models and MoE" if at["models"] == "both" else f"{at['models']} models"
    return f"{at['scale']}, {models} ({at['source']})"


def setting_words(path: str, value: Any, row: Row) -> str:
    """A value, with the range that a source recommends for it."""
    usual = row["ranges"].get(path)
    return shown(value) + (f"   usual: {usual['low']:g} to {usual['high']:g} ({usual['source']})" if usual else "")


def stopped_words(row: Row) -> str:
    """Say whether ratios are constants to the gradient, and why the survey's map says otherwise where it does."""
    words, other = _explained("stop_gradient", [row["stop_gradient"]]), row["survey_differs"]
    return f"{words}\nThe survey's map says {other['survey']}: {other['why']}." if other else words


def _change(row: Row) -> str:
    """An override of the method, which changes a number of the first part that has one."""
    order = ["gate", "weight", "objective"]
    numbers = [p for p, v in row["settings"].items() if isinstance(v, float) and v and "." in p]
    numbers.sort(key=lambda p: [*order, p.partition(".")[0]].index(p.partition(".")[0]))
    path = numbers[0] if numbers else "aggregate"
    return f"--set override.{path}={shown(another(row['settings'][path]))}"


def _raised(row: Row) -> str:
    """Return that a step raises, under which advantage, and how it would be J."""
    about = row["trained_return"]
    by = "as published" if row["advantage"] else "the trainer's default"
    words = f"{about['words']}. (Aggregate {row['aggregate']}, advantage {about['advantage']}, {by}.)"
    return words + (f"\nTo optimize J itself: --set {' --set '.join(about['for_j'])}" if about["for_j"] else "")


def another(value: Any) -> float | str:
    """A value unlike the default, to show how one is changed: further from 1 if it is near, else half as much again.

    Example:
        >>> another(0.2), another(0.99), another(1.0), another("token_mean")
        (0.3, 0.98, 2.0, 'seq_mean_token_mean')
    """
    if not isinstance(value, float):
        return "seq_mean_token_mean" if value == "token_mean" else "token_mean"
    if value == 1:
        return 2.0
    return round(2 * value - 1 if abs(value - 1) < 0.3 else 1.5 * value, 9)


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


def section(title: str, lines: list[tuple[str, str]]) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True, min_width=LABELS)
    grid.add_column(overflow="fold")
    for label, words in lines:
        grid.add_row(Text(label), Text(words, style="dim" if words == "–" else ""))
    return Group(Text(), Text(title, style="bold"), Padding(grid, (0, 0, 0, 2)))
