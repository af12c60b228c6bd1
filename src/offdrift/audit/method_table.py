"""The counterfactual table: what each method would have kept, and at what price, on this log.

One list of columns serves page, terminal and comparison. Methods that the log cannot answer for stand
apart, by the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from offdrift.show.json_access import Fields, at, number, numbers, rows, text
from offdrift.show.numbers import percent, short

LENGTH_FLOOR = 0.9
"""A method that keeps responses shorter than this share of the mean length is marked."""
ESS_FLOOR = 0.5
"""Below, the survey's tree calls the weights too noisy (cause D)."""
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

    def flagged(self, key: str) -> bool:
        """Whether a number is one to look at."""
        value = self.values.get(key)
        limit = {"kept_length_ratio": LENGTH_FLOOR, "ess_frac": ESS_FLOOR}.get(key)
        return value is not None and limit is not None and value < limit


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


METHOD_COLUMNS = (
    MethodColumn("kept_tokens", "Tokens kept", "tokens", "Share of tokens that the gates let take part.", percent, "better"),
    MethodColumn("kept_sequences", "Sequences kept", "seqs", "Share of sequences with a kept token. Trust Region Masking asks to watch for less than 70 % (Remark 4.3).", percent, "better"),
    MethodColumn("kept_length_ratio", "Length kept", "length", f"Mean length of kept sequences over that of all. Below {LENGTH_FLOOR:g} the gate prefers short responses: the length trap.", percent, "neither"),
    MethodColumn("ess_frac", "ESS after", "ESS", f"Effective sample size (Σw)² / Σw² under the limited weights, 0 for what is rejected, over the count of all tokens. Below {ESS_FLOOR:g} the update uses less than half of the batch.", percent, "better"),
    MethodColumn("weight_mean", "Weight, mean", "w mean", "Mean weight after limits; 1 means that no mass was cut.", short, "neither"),
    MethodColumn("weight_max", "Weight, max", "w max", "Largest weight after limits.", short, "worse"),
    MethodColumn("limited_frac", "Limited", "limited", "Share of tokens whose weight met a limit.", percent, "worse"),
)  # fmt: skip


def tried(audit: Fields) -> list[Tried]:
    """Methods that the log could answer for: the suggested, those most asked about, the rest as stored."""
    row_name = at(audit, "suggestion", "row") or at(audit, "suggestion", "method")
    suggestion = text(row_name)  # with other settings a method has a row of its own
    found = [
        Tried(
            name=text(row.get("name")),
            family=text(row.get("family")),
            on=text(row.get("on")),
            rule="; ".join(filter(None, (text(row.get("gates")), text(row.get("weights"))))),
            suggested=bool(suggestion) and text(row.get("name")) == suggestion,
            values={c.key: number(row.get(c.key)) for c in METHOD_COLUMNS},
            by_length=tuple(numbers(row.get("acceptance_by_length"))),
        )
        for row in rows(audit.get("methods"))
        if not row.get("why_not")
    ]
    order = {name: i for i, name in enumerate(asked_about(m.name for m in found))}
    return sorted(found, key=lambda m: (not m.suggested, order.get(m.name, len(order))))


def asked_about(names: Iterable[str]) -> tuple[str, ...]:
    """What most people ask about, among methods of these names.

    Example:
        >>> asked_about(["token_tis", "trm_max"]) == FAMILIAR_FULL
        True
    """
    held = set(names)
    return FAMILIAR if any(n in held for n in FAMILIAR if n.startswith("decoupled")) else FAMILIAR_FULL


def untried(audit: Fields) -> dict[str, list[str]]:
    """Methods that the log could not answer for, by the reason."""
    found: dict[str, list[str]] = {}
    for row in rows(audit.get("methods")):
        if row.get("why_not"):
            found.setdefault(text(row["why_not"]), []).append(text(row.get("name")))
    return found


def familiar(methods: list[Tried]) -> list[Tried]:
    """The suggested method and those that most people ask about; all if none of them is there."""
    names = asked_about(m.name for m in methods)
    return [m for m in methods if m.suggested or m.name in names] or methods[: len(names)]


def length_curves(methods: list[Tried]) -> list[tuple[str, tuple[float | None, ...]]]:
    """The methods whose acceptance depends most on length, and the suggested one, a curve each.

    Methods with the same curve share it: many of the table have the same gate.
    """
    same: dict[tuple[float | None, ...], list[Tried]] = {}
    for m in methods:
        known = [v for v in m.by_length if v is not None]
        if len(known) > 1 and min(known) < 1:
            same.setdefault(m.by_length, []).append(m)

    def spread(curve: tuple[float | None, ...]) -> tuple[bool, float]:
        known = [v for v in curve if v is not None]
        return any(m.suggested for m in same[curve]), max(known) - min(known)

    chosen = sorted(same, key=spread, reverse=True)[:MAX_CURVES]
    return [(_called(same[curve]), curve) for curve in chosen]


def _called(methods: list[Tried]) -> str:
    """One name for methods with the same curve: the suggested, else the best known."""
    names = asked_about(m.name for m in methods)
    order = {name: i for i, name in enumerate(names)}
    first = min(methods, key=lambda m: (not m.suggested, order.get(m.name, len(order))))
    return first.name if len(methods) == 1 else f"{first.name} (+{len(methods) - 1} alike)"
