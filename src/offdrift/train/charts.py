"""The charts of a run: from stored numbers to plotly figures, one trace an arm.

A chart is plain data (the JSON that plotly.js draws). It holds no colour: a trace says which arm it
belongs to (`meta.arm`), and the page gives every arm its colour of the light or the dark palette,
the same in all charts.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

from offdrift.show.figure import SYMBOLS
from offdrift.show.sanitize import visible
from offdrift.train.stored import Arm

SMOOTHING = 5
"""Updates in the moving average of the reward."""


@dataclass(frozen=True)
class Quantity:
    """What one chart shows: a metric over updates."""

    id: str
    title: str
    unit: str
    key: str
    meaning: str
    log: bool = False
    share: bool = False
    """Drawn from 0 to 100 %."""
    line_at: float | None = None
    """Where a horizontal reference line goes."""
    digits: str = ".3g"


REWARD = Quantity(
    "reward",
    "Reward",
    "",
    "reward/mean",
    f"Mean reward of the training batch: faint as recorded, strong its mean over {SMOOTHING} "
    "updates. Markers: held-out prompts. Higher is better.",
)

QUANTITIES = (
    Quantity(
        "acceptance",
        "Acceptance",
        "of sequences",
        "gate/acceptance_seq",
        "Share of sequences that passed the gate. The Trust Region Masking paper asks to watch for "
        "less than the 70 % of the line (Remark 4.3).",
        share=True,
        line_at=0.7,
        digits=".1%",
    ),
    Quantity(
        "kl_mean",
        "KL, mean over tokens",
        "nat, log scale",
        "divergence/kl_rollout_current_mean",
        "KL(rollout || current) of a token. Lower is closer to on-policy.",
        log=True,
    ),
    Quantity(
        "kl_max",
        "KL, worst token",
        "nat, log scale",
        "divergence/kl_rollout_current_max",
        "Largest KL(rollout || current) in the batch: what the bounds depend on.",
        log=True,
    ),
    Quantity(
        "bound",
        "KL of sequences",
        "nat, log scale",
        "certificate/kl_seq",
        "KL(rollout || current) of whole sequences in the batch. Its expectation bounds how far the "
        "surrogate is from the true change of the return, for any two policies. Lower is better.",
        log=True,
    ),
    Quantity(
        "gain_low",
        "Certified change of the return",
        "at least, 95 % confidence (one policy, one look)",
        "certificate/gain_low",
        "Lower end of J(current) − J(rollout) from this batch alone; above 0 is a certified "
        "improvement. Only batches that were new to the policy count. The confidence is each point's own: "
        "of many updates, one in twenty may stand above 0 by chance.",
        line_at=0.0,
    ),
    Quantity(
        "ppl_gap",
        "Perplexity gap",
        "nat",
        "full/log_ppl_gap",
        "Mean over sequences of |mean log-prob, current − rollout| (eq. 25). Lower is better.",
    ),
    Quantity(
        "ess",
        "Effective sample size",
        "of the batch",
        "full/ess_frac",
        "(Σw)² / Σw² over the count, w the raw token ratio of current to rollout policy: 100 % when they agree.",
        share=True,
        digits=".1%",
    ),
    Quantity(
        "length",
        "Response length",
        "tokens",
        "response/length_mean",
        "Mean over the batch. A collapse or an explosion often precedes one of reward.",
        digits=".1f",
    ),
    Quantity(
        "version_lag",
        "Version lag",
        "updates",
        "version_lag/mean",
        "How many updates old the weights were that drew a token, mean over tokens.",
        digits=".2f",
    ),
)


def all_charts(arms: Sequence[Arm]) -> list[dict]:
    """Every chart of the report, in the order of the page."""
    return [reward_chart(arms), *(line_chart(quantity, arms) for quantity in QUANTITIES)]


def reward_chart(arms: Sequence[Arm]) -> dict:
    """Training reward, raw and smoothed, and held-out reward, for every arm."""
    traces = []
    for i, arm in enumerate(arms):
        updates, rewards = arm.series(REWARD.key)
        evaluated, held_out = arm.held_out()
        if rewards:
            traces += [
                _line(i, arm, updates, rewards, width=1.0, opacity=0.35, hoverinfo="skip"),
                _line(i, arm, updates, moving_mean(rewards, SMOOTHING), width=2.25),
            ]
        if held_out:
            traces.append(_markers(i, arm, evaluated, held_out))
    return _chart(REWARD, traces)


def line_chart(quantity: Quantity, arms: Sequence[Arm]) -> dict:
    """One metric over updates, a line an arm; arms that did not record it are left out."""
    traces = []
    for i, arm in enumerate(arms):
        pairs = [p for p in zip(*arm.series(quantity.key)) if p[1] > 0 or not quantity.log]
        if pairs:
            x, y = map(list, zip(*pairs))
            traces.append(_line(i, arm, x, y, width=1.75, digits=quantity.digits))
    return _chart(quantity, traces)


def moving_mean(values: Sequence[float], window: int) -> list[float]:
    """Centered moving average; at the ends, of what is there.

    Args:
        window: how many values are averaged (odd).

    Example:
        >>> moving_mean([0.0, 3.0, 6.0, 3.0], 3)
        [1.5, 3.0, 4.0, 4.5]
    """
    reach = window // 2
    cuts = [values[max(0, i - reach) : i + reach + 1] for i in range(len(values))]
    return [sum(cut) / len(cut) for cut in cuts]


def _line(
    index: int, arm: Arm, x: list[int], y: list[float], *, width: float, digits: str = ".3g", **extra: object
) -> dict:
    return {
        "type": "scatter",
        # A single point draws no line.
        "mode": "lines" if len(x) > 1 else "markers",
        "name": html.escape(visible(arm.name), quote=False),  # plotly reads some markup in names
        "x": x,
        "y": [_rounded(v) for v in y],
        "line": {"width": width, "dash": "solid" if index < len(SYMBOLS) else "dash"},
        "marker": {"size": 6, "symbol": SYMBOLS[index % len(SYMBOLS)]},
        "hovertemplate": f"%{{y:{digits}}}",
        "meta": {"arm": index},
        **extra,
    }


def _markers(index: int, arm: Arm, x: list[int], y: list[float]) -> dict:
    trace = _line(index, arm, x, y, width=0.0)
    marker = {**trace["marker"], "size": 9, "line": {"width": 1.5}}
    template = f"%{{y:{REWARD.digits}}} held out"
    shown = {"mode": "markers", "marker": marker, "hovertemplate": template, "cliponaxis": False}
    return {**trace, **shown}


def _chart(quantity: Quantity, traces: list[dict]) -> dict:
    layout: dict = {"yaxis": _y_axis(quantity, traces), "xaxis": _x_axis(traces)}
    if quantity.line_at is not None:
        across = {"xref": "paper", "x0": 0, "x1": 1, "y0": quantity.line_at, "y1": quantity.line_at}
        layout["shapes"] = [{"type": "line", **across, "line": {"width": 1.5, "dash": "dash"}}]
    return {
        "id": quantity.id,
        "title": quantity.title,
        "unit": quantity.unit,
        "meaning": quantity.meaning,
        "if_empty": "No value above 0 was recorded." if quantity.log else "Not recorded.",
        "data": traces,
        "layout": layout,
    }


def _x_axis(traces: list[dict]) -> dict:
    last = max((trace["x"][-1] for trace in traces), default=0)
    # There is no update 1.5.
    return {"rangemode": "tozero"} | ({"dtick": 1} if last <= 8 else {})


def _y_axis(quantity: Quantity, traces: list[dict]) -> dict:
    if quantity.share:
        middle = [0.75] if quantity.line_at is None else [quantity.line_at]
        return {"range": [0, 1.04], "tickformat": ".0%", "tickvals": [0, 0.25, 0.5, *middle, 1]}
    if not quantity.log:
        return {"rangemode": "tozero"}
    values = [y for trace in traces for y in trace["y"]]
    if not values or max(values) >= 100 * min(values):
        return {"type": "log", "dtick": 1}
    # Within two decades an axis that hugs its values could end up without a single tick.
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return {"type": "log", "dtick": "D2", "range": [low, max(high, low + 1)]}


def _rounded(value: float) -> float:
    """Six significant digits: all that a chart can show, in a third of the bytes."""
    return float(f"{value:.6g}")
