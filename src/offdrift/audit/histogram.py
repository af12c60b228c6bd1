"""The histogram of ratios on an axis that is logarithmic towards 1 from both sides.

On a plain logarithmic axis of the ratio nearly all tokens fall into one bar, and a band such as
[0.999, 1.001] into its width. So the axis is l = log ratio on a signed logarithmic scale: ratios
0.999, 0.99, 0.9 and 0.5 are as far apart as their distances from 1 are in magnitude.

The limits that a method puts on ratios are drawn into it (`choices`). Limits on a token's ratio are
lines. Limits on a sequence's geometric mean are lines, too, but they bind means and not the tokens
drawn, and say so. Limits on products have no place on this axis.
"""

from __future__ import annotations

import contextlib
import math
from itertools import pairwise
from typing import Any

from offdrift.correction import Gate, Weight
from offdrift.errors import OffdriftError
from offdrift.methods import METHODS, override
from offdrift.objectives import Clipped
from offdrift.show.charts import PAIR_COLORS, Chart, Series
from offdrift.show.headline import PAIR_WORDS, PAIRS
from offdrift.show.json_access import Fields, at, mapping, numbers, rows, text
from offdrift.show.numbers import percent, short

SMALLEST = 1e-4
"""|l| below which the axis is linear."""
NARROWEST = 0.06
"""Width of a bar on the axis; narrower ones are joined, as nobody could see them."""

CLOSEST = 0.5
"""Distance of two ticks on the axis; closer ones would overlap."""

Bar = tuple[float, float, float]
"""Low end, high end (of the log-ratio) and count."""


def place(log_ratio: float) -> float:
    """Where a log-ratio stands on the axis: sign(l) log10(1 + |l| / 1e-4).

    Example:
        >>> [round(place(x), 3) for x in (0.0, 1e-4, -0.1)]
        [0.0, 0.301, -3.0]
    """
    return math.copysign(math.log10(1 + abs(log_ratio) / SMALLEST), log_ratio)


def histogram_chart(histograms: object) -> Chart:
    """The ratios of every pair of policies that the audit holds."""
    by_pair = mapping(histograms)
    series, reach = [], 0.0
    for pair in PAIRS:
        bars = bars_of(mapping(by_pair.get(pair)))
        if not bars:
            continue
        series.append(steps_of(pair, bars, color=PAIR_COLORS[pair]))
        reach = max(reach, abs(bars[0][0]), abs(bars[-1][1]))
    pairs = "; ".join(f"{s.name}: {PAIR_WORDS[s.name].split(':')[0]}" for s in series)
    meaning = (
        f"How many tokens have which ratio of probabilities; {pairs}. Both axes are logarithmic, the lower one "
        "towards 1 from both sides: equal ratios are in the middle, and the two humps stand at the usual size of a "
        "difference. Dashed lines are the limits of the chosen method."
    )
    return Chart(
        "Ratios of the sampled tokens",
        "log scale",
        series,
        "ratios",
        meaning,
        log=True,
        x_title="ratio",
        wide=True,
        x_ticks=ratio_ticks(reach),
    )


def steps_of(name: str, bars: list[Bar], *, color: str) -> Series:
    """A histogram as one outline in steps, with its counts as texts.

    Args:
        name: of the series, and of what the legend's button hides.
        bars: of `bars_of`.
    """
    total = sum(count for *_, count in bars)
    x = [place(low) for low, *_ in bars] + [place(bars[-1][1])]
    density = [c / total / (b - a) if c else None for (a, b), (*_, c) in zip(pairwise(x), bars)]
    words = [f"{_ratio(a)} to {_ratio(b)}: {c:,.0f} tokens ({percent(c / total)})" for a, b, c in bars]
    outline, texts = [*density, density[-1]], [*words, words[-1]]
    return Series(name, x, outline, color=color, kind="steps", group=name, texts=texts)


def bars_of(histogram: Fields) -> list[Bar]:
    """Bars as low, high and count, from the first to the last that holds a token.

    Open ends (None) stop one bar's width beyond their neighbor.

    Example:
        >>> bars_of({"edges": [-1.0, 0.0, 1.0, 2.0], "counts": [3, 1, 0]})
        [(-1.0, 0.0, 3.0), (0.0, 1.0, 1.0)]
    """
    edges, counts = numbers(histogram.get("edges")), numbers(histogram.get("counts"))
    if len(counts) == len(edges) + 1 and edges:  # counts below the first edge and above the last
        edges = [None, *edges, None]
    if len(counts) != len(edges) - 1 or any(e is None for e in edges[1:-1]):
        return []
    inner = [e for e in edges[1:-1] if e is not None]
    for end, side in ((0, -1), (-1, 1)):
        if edges[end] is None:
            last = inner[end] if inner else 0.0
            edges[end] = last + side * max(1.0, abs(last))
    bars = [(a or 0.0, b or 0.0, c or 0.0) for (a, b), c in zip(pairwise(edges), counts)]
    if any(low >= high for low, high, _ in bars):
        return []
    filled = [i for i, bar in enumerate(bars) if bar[2] > 0]
    joined: list[Bar] = []  # neighbors together until each is wide enough to be visible
    for low, high, count in bars[filled[0] : filled[-1] + 1] if filled else []:
        if joined and place(joined[-1][1]) - place(joined[-1][0]) < NARROWEST:
            first, _, before = joined[-1]
            joined[-1] = (first, high, before + count)
        else:
            joined.append((low, high, count))
    return joined


def ratio_ticks(reach: float) -> list[tuple[float, str]]:
    """Where ratios that people know stand on the axis, and their texts.

    Args:
        reach: largest |l| drawn.
    """
    below: list[float] = []  # from the middle outwards, so far apart that their texts do not touch
    for r in (0.999, 0.99, 0.9, 0.5, 0.1, 1e-2, 1e-3, 1e-4):
        last = place(math.log(below[0])) if below else 0.0
        if -math.log(r) <= reach and last - place(math.log(r)) >= CLOSEST:
            below.insert(0, r)
    ratios = [*below, 1.0, *(1 / r for r in reversed(below))]
    names = {0.999: "0.999", 1 / 0.999: "1.001", 0.99: "0.99", 1 / 0.99: "1.01", 0.9: "0.9", 1 / 0.9: "1.11"}
    return [(place(math.log(r)), names.get(r, f"{r:g}")) for r in ratios]


def _ratio(log_ratio: float) -> str:
    if 0 < abs(log_ratio) < 0.01:
        return f"1 {'+' if log_ratio > 0 else '−'} {short(abs(math.expm1(log_ratio)))}"
    return short(math.exp(log_ratio)) if log_ratio < 700 else "∞"


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
        settings[suggested] = mapping(at(audit, "suggestion", "settings")) or settings.get(suggested, {})
    limits = {name: limits_of(name, settings.get(name, {})) for name in names if name}
    return dict([(name, own) for name, own in limits.items() if own][:SELECTABLE])


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
    limits: list[tuple[str, float | None, float | None, str]] = []  # ratio, low and high end, and what happens
    for weight in row.correction.weights:
        if isinstance(weight, Weight) and weight.unit == "token":
            verb = "masked" if weight.outside == "mask" else "weight held"
            limits.append((weight.on, weight.floor, weight.cap, verb))
    limits += [limit for gate in row.correction.gates if isinstance(gate, Gate) for limit in _of_gate(gate)]
    objective = row.objective
    if isinstance(objective, Clipped) and objective.unit == "token":
        limits.append((objective.on, 1 - objective.eps_low, 1 + objective.eps_high, "clipped"))
    lines = []
    for on, low, high, verb in limits:
        ends = ((low if low is not None and low > 0 else None, "below"), (high, "above"))
        lines += [
            {"on": on, "ratio": end, "label": f"{verb} {side} {end:.4g}", "x": place(math.log(end))}
            for end, side in ends
            if end is not None
        ]
    return lines


def _of_gate(gate: Gate) -> list[tuple[str, float | None, float | None, str]]:
    """A gate's limits as ratios; |l| <= h and l^2 / 2 <= h are two-sided."""
    low, high = gate.low, gate.high
    if gate.statistic in ("abs_log_ratio", "k2") and high is not None:
        reach = high if gate.statistic == "abs_log_ratio" else math.sqrt(2 * high)
        low, high = math.exp(-reach), math.exp(reach)
    elif gate.statistic != "ratio":
        return []
    if gate.unit in ON_TOKENS:
        return [(gate.on, low, high, "rejected" if gate.unit == "token" else "sequence rejected")]
    if gate.unit == "seq_mean" and gate.statistic == "ratio":
        return [(gate.on, low, high, "sequence's mean rejected")]
    return []
