"""The counterfactual table as page, terminal and comparison show it: one list of columns, and the methods' rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from offdrift.show.headline import thresholds
from offdrift.show.json_access import Fields, at, mapping, number, numbers, rows, text
from offdrift.show.numbers import percent, short

MAX_CURVES = 6
"""Methods drawn in the chart of acceptance by length."""

FAMILIAR = (
    "decoupled_token_is", "decoupled_seq_is", "decoupled_token_icepop", "decoupled_geo_rs",
    "decoupled_k3_rs", "decoupled_seq_is_rs", "trm_max", "trm_max_k2", "token_veto",
)  # fmt: skip
"""What most people ask about: shown where there is no room for the whole table."""
FAMILIAR_FULL = (
    "token_tis", "seq_tis", "bypass_pg_token_icepop", "bypass_pg_geo_rs", "bypass_pg_geo_rs_token_tis",
    "bypass_ppo_clip_k3_rs", "trm_max", "trm_max_k2", "token_veto",
)  # fmt: skip
"""The same for a log without the old policy's log-probs."""


@dataclass(frozen=True)
class Tried:
    """One method on this log; shares in [0, 1], None where not computed."""

    name: str
    family: str
    on: str
    rule: str
    """What it rejects and how it weights, in words."""
    suggested: bool
    values: dict[str, float | None]
    by_length: tuple[float | None, ...]
    floors: Mapping[str, float]
    """Values below which a number is one to look at, by column."""
    in_code: bool = False
    """Whether it is in the user's code, and in no table."""
    trained: bool = False
    """Whether the run of the log trains with it."""
    clips: bool = False
    """Whether its objective has a clip, whatever the log shows of it."""
    clipped_at_least: bool = False
    """Whether its clip may have changed further tokens that the log does not show."""

    def cell(self, column: MethodColumn) -> str:
        """A number as the table shows it: "?" where the method has such a part and the log cannot tell."""
        value = self.values[column.key]
        if column.key != CLIPPED:
            return column.write(value)
        if value is None:
            return "?" if self.clips else column.write(value)
        return ("≥ " if self.clipped_at_least else "") + column.write(value)

    def flagged(self, key: str) -> bool:
        """Whether a number is one to look at."""
        value, floor = self.values.get(key), self.floors.get(key)
        return value is not None and floor is not None and value < floor


@dataclass(frozen=True)
class MethodColumn:
    """One number of the table."""

    key: str
    title: str
    short_title: str
    meaning: str
    write: Callable[[float | None], str]
    better: str
    """ "worse", "better" or "neither", as in METRICS: what more of it is."""


TITLE = "Share of the data that each correction keeps"
"""Heading of the table, wherever it stands."""
READ = (
    "A high share wastes little; it is not better: a fault is repaired, not corrected. – : the method has no such part."
)
"""How to read it."""
CLIPPED = "clipped_frac"
OF_GATES = ("kept_tokens", "kept_sequences", "kept_length_ratio")
OF_WEIGHTS = ("weight_mean", "weight_max", "limited_frac")
"""Columns that mean nothing for a method without gates, or without weights."""
FLOORS = {"kept_length_ratio": "length_kept", "ess_frac": "ess_half"}
"""Columns with numbers to look at, and the threshold below which they are."""


def method_columns(audit: Fields) -> tuple[MethodColumn, ...]:
    """The columns of the table, explained with the audit's own thresholds."""
    limits = thresholds(audit)
    kept_sequences = (
        "Share of sequences with a kept token. Trust Region Masking asks to watch for less than "
        f"{100 * limits['acceptance_low']:g} % (Remark 4.3)."
    )
    kept_length = (
        f"Mean length of kept sequences over that of all. Below {limits['length_kept']:g} the gate prefers short "
        "responses: the length trap."
    )
    ess = (
        "Effective sample size (Σw)² / Σw² under the limited weights, 0 for what is rejected, over the count of all "
        f"tokens. Below {limits['ess_half']:g} the weights are too noisy to use (survey, cause D)."
    )
    mean, limited = (
        "Mean weight after limits; 1 means that no mass was cut.",
        "Share of tokens whose weight met a limit.",
    )
    clipped = (
        "Share of tokens whose loss the objective's own clip or projection changed. ≥: the log shows some of them; "
        "?: the log cannot tell."
    )
    columns = (
        ("kept_tokens", "Tokens kept", "tokens", "Share of tokens that the gates let take part.", percent, "better"),
        ("kept_sequences", "Sequences kept", "seqs", kept_sequences, percent, "better"),
        ("kept_length_ratio", "Length kept", "length kept", kept_length, percent, "neither"),
        ("ess_frac", "ESS after", "ESS", ess, percent, "better"),
        ("weight_mean", "Weight, mean", "mean weight", mean, short, "neither"),
        ("weight_max", "Weight, max", "max weight", "Largest weight after limits.", short, "worse"),
        ("limited_frac", "Limited", "limited", limited, percent, "worse"),
        (CLIPPED, "Clipped", "clipped", clipped, percent, "neither"),
    )  # fmt: skip
    return tuple(MethodColumn(*c) for c in columns)


def tried(audit: Fields) -> list[Tried]:
    """Methods that the log could answer for: the suggested, those most asked about, the rest as stored."""
    row_name = at(audit, "suggestion", "row") or at(audit, "suggestion", "method")
    suggestion = text(row_name)  # with other settings a method has a row of its own
    trains = _trained(audit)
    limits, columns = thresholds(audit), [c.key for c in method_columns(audit)]
    floors = {key: limits[name] for key, name in FLOORS.items()}
    methods = [
        Tried(
            name=text(row.get("name")),
            family=text(row.get("family")),
            on=text(row.get("on")),
            rule="; ".join(filter(None, (text(row.get("gates")), text(row.get("weights"))))),
            in_code=bool(mapping(row.get("code"))),
            suggested=bool(suggestion) and text(row.get("name")) == suggestion,
            trained=text(row.get("name")) == trains,
            clips=bool(row.get("clips")),
            clipped_at_least=bool(row.get("clipped_at_least")),
            values={key: None if key in absent else number(row.get(key)) for key in columns},
            by_length=tuple(numbers(row.get("acceptance_by_length"))),
            floors=floors,
        )
        for row in rows(audit.get("methods"))
        if not row.get("why_not")
        for absent in [_absent(row)]
    ]
    return sorted(methods, key=_order(methods))


def _absent(row: Fields) -> tuple[str, ...]:
    """Columns of parts that a method does not have: nothing of it drops a token, or nothing weighs one."""
    drops = row.get("gates") != "" or "mask" in text(row.get("weights")) or number(row.get("kept_tokens")) != 1
    return (*(() if drops else OF_GATES), *(OF_WEIGHTS if row.get("weights") == "" else ()))


def asked_about(names: Iterable[str]) -> tuple[str, ...]:
    """Select the methods shown first: the familiar ones for these names.

    Example:
        >>> asked_about(["token_tis", "trm_max"]) == FAMILIAR_FULL
        True
    """
    names = set(names)
    return FAMILIAR if any(n in names for n in FAMILIAR if n.startswith("decoupled")) else FAMILIAR_FULL


def untried(audit: Fields) -> dict[str, list[str]]:
    """Methods that the log could not answer for, by the reason."""
    by_reason: dict[str, list[str]] = {}
    for row in rows(audit.get("methods")):
        if row.get("why_not"):
            by_reason.setdefault(text(row["why_not"]), []).append(text(row.get("name")))
    return by_reason


def familiar(methods: list[Tried]) -> list[Tried]:
    """The suggested method, the user's own, and those that most people ask about; all if none of them is there."""
    names = asked_about(m.name for m in methods)
    return [m for m in methods if m.suggested or m.trained or m.in_code or m.name in names] or methods[: len(names)]


def length_curves(methods: list[Tried]) -> list[tuple[str, tuple[float | None, ...]]]:
    """The methods whose acceptance depends most on length, and the suggested one, a curve each.

    Methods with the same curve share it: many of the table have the same gate.
    """
    same: dict[tuple[float | None, ...], list[Tried]] = {}
    for m in methods:
        same.setdefault(m.by_length, []).append(m)
    ranked = []
    for curve, alike in same.items():
        values = [v for v in curve if v is not None]
        if len(values) > 1 and min(values) < 1:
            best = min(alike, key=_order(alike))
            name = best.name if len(alike) == 1 else f"{best.name} (+{len(alike) - 1} alike)"
            ranked.append(((any(m.suggested for m in alike), max(values) - min(values)), name, curve))
    ranked.sort(key=lambda row: row[0], reverse=True)
    return [(name, curve) for _, name, curve in ranked[:MAX_CURVES]]


def _order(methods: list[Tried]) -> Callable[[Tried], tuple[bool, bool, int]]:
    """Sort key: the suggested method, the user's own, those that most people ask about, the rest as they stand."""
    order = {name: i for i, name in enumerate(asked_about(m.name for m in methods))}
    return lambda m: (not m.suggested, not m.trained, -1 if m.in_code else order.get(m.name, len(order)))


def _trained(audit: Fields) -> str:
    """Name of the method that the run trains with, as the table has it; "" if it is not known."""
    return Path(text(at(audit, "context", "method"))).name


def trained_words(audit: Fields) -> str:
    """Sentences on the method that the run trains with, and what it does with the logged tokens; "" if not known.

    Example:
        >>> row = {"name": "troll", "clips": True, "clipped_frac": 0.06, "clipped_at_least": True, "gates": "",
        ...        "weights": "", "why_not": None}
        >>> trained_words({"context": {"method": "troll"}, "methods": [row]}).partition(" (")[0]
        'The run trains with troll. With its default settings it clips or projects at least 6.0 % of the logged tokens'
    """
    name = _trained(audit)
    row = next((r for r in rows(audit.get("methods")) if name and text(r.get("name")) == name), None)
    if row is None:
        return ""
    begin = f"The run trains with {name}."
    if why := text(row.get("why_not")):
        return f"{begin} What it did this log cannot show: {why}"
    does, share = [], percent(number(row.get(CLIPPED)))
    if text(row.get("gates")):
        does.append(f"keeps {percent(number(row.get('kept_tokens')))} of the logged tokens")
    if text(row.get("weights")):
        does.append(f"limits {percent(number(row.get('limited_frac')))} of the weights")
    if row.get("clipped_at_least"):
        does.append(f"clips or projects at least {share} of the logged tokens ({NOT_ALL})")
    elif row.get("clips"):
        is_known = number(row.get(CLIPPED)) is not None
        does.append(f"clips or projects {share} of the logged tokens" if is_known else CANNOT_TELL)
    return f"{begin} With its default settings it {'; '.join(does)}." if does else ""


NOT_ALL = "seen at the drawn tokens only; kl_current_old in the log would show all of them"
"""What a log lacks that shows some of the tokens of a projection."""
CANNOT_TELL = "has a clip, and the log cannot tell what it changes"
