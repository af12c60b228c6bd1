"""The limits that a method puts on ratios, to be drawn into the histogram of ratios.

Limits on a token's ratio are lines. Limits on a sequence's geometric mean are lines, too, but they
bind means and not the tokens drawn, and say so. Limits on products have no place on this axis.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable
from typing import Any

from offdrift.correction import Gate, Weight
from offdrift.errors import OffdriftError
from offdrift.methods import METHODS, Method, override
from offdrift.objectives import Clipped
from offdrift.report.fields import Fields, at, mapping, rows, text
from offdrift.report.histogram import place

ON_TOKENS = ("token", "seq_max")
SELECTABLE = 40


def choices(audit: Fields) -> dict[str, list[dict[str, Any]]]:
    """Methods with limits that can be drawn, and those limits; the suggested method first.

    Each limit says on which pair of policies it is (`on`), where it stands on the histogram's axis
    (`x`), and what happens there (`label`).
    """
    suggested = text(at(audit, "suggestion", "method"))
    settings = {text(r.get("name")): mapping(r.get("settings")) for r in rows(audit.get("methods"))}
    names = dict.fromkeys([suggested, *settings])
    if suggested:
        settings[suggested] = mapping(at(audit, "suggestion", "settings")) or settings.get(suggested, {})  # fmt: skip
    found = {name: limits_of(name, settings.get(name, {})) for name in names if name}
    return dict([(n, limits) for n, limits in found.items() if limits][:SELECTABLE])


def limits_of(name: str, settings: Fields | None = None) -> list[dict[str, Any]]:
    """The limits of one method of the table, under changed settings; none if it is unknown.

    Args:
        name: row of `METHODS`; what stands in parentheses after it is ignored.
        settings: changes, by the paths of `offdrift.methods.override`; those it refuses are ignored.

    Example:
        >>> [(l["on"], l["ratio"], l["label"]) for l in limits_of("decoupled_token_icepop")[:2]]
        [('mismatch', 0.5, 'masked below 0.5'), ('mismatch', 5.0, 'masked above 5')]
    """
    row = METHODS.get(name.split("(")[0])
    if row is None:
        return []
    with contextlib.suppress(OffdriftError, TypeError):
        row = override(row, settings or {})
    return [_placed(*limit) for limit in _limits(row)]


Limit = tuple[str, float, str]


def _limits(row: Method) -> Iterable[Limit]:
    for weight in row.correction.weights:
        if isinstance(weight, Weight) and weight.unit == "token":
            verb = "masked" if weight.outside == "mask" else "weight held"
            yield from _ends(weight.on, weight.floor, weight.cap, verb)
    for gate in row.correction.gates:
        if isinstance(gate, Gate):
            yield from _gate(gate)
    if isinstance(row.objective, Clipped) and row.objective.unit == "token":
        o = row.objective
        yield from _ends(o.on, 1 - o.eps_low, 1 + o.eps_high, "clipped")


def _gate(gate: Gate) -> Iterable[Limit]:
    """A gate's limits as ratios; |l| <= h and l^2 / 2 <= h are two-sided."""
    low, high = gate.low, gate.high
    if gate.statistic in ("abs_log_ratio", "k2") and high is not None:
        reach = high if gate.statistic == "abs_log_ratio" else math.sqrt(2 * high)
        low, high = math.exp(-reach), math.exp(reach)
    elif gate.statistic != "ratio":
        return
    if gate.unit in ON_TOKENS:
        verb = "rejected" if gate.unit == "token" else "sequence rejected"
        yield from _ends(gate.on, low, high, verb)
    elif gate.unit == "seq_mean" and gate.statistic == "ratio":
        yield from _ends(gate.on, low, high, "sequence's mean rejected")


def _ends(on: str, low: float | None, high: float | None, verb: str) -> Iterable[Limit]:
    if low is not None and low > 0:
        yield on, low, f"{verb} below {low:.4g}"
    if high is not None:
        yield on, high, f"{verb} above {high:.4g}"


def _placed(on: str, ratio: float, label: str) -> dict[str, Any]:
    return {"on": on, "ratio": ratio, "label": label, "x": place(math.log(ratio))}
