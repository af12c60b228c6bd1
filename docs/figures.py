"""Pictures and tables of drift that was measured, from the numbers that the package has of it; see docs/generate.py."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from offdrift.show.numbers import short
from offdrift_lab.exact.lengths import MEASURED, Drift, length_rows

LEFT, RIGHT, ROW, TOP = 132, 462, 25, 52
"""Where the axis begins and ends, the height of a row, and of what stands above the first."""
LOW, HIGH = -7, 1
"""Ends of the axis, powers of ten, nat per token."""
LIMITS = ((0.02, "no meaningful drift"), (0.05, "find the cause"))
"""Mean KL per token that the diagnosis judges by (docs/rules.md)."""
STYLE = """<style>
    .od-figure { --ink: #1f2937; --soft: #f3f4f6; --line: #9ca3af; --one: #b45309; --two: #1d4ed8; --three: #047857; }
    @media (prefers-color-scheme: dark) {
      .od-figure { --ink: #e5e7eb; --soft: #2b303b; --line: #6b7280; --one: #fbbf24; --two: #93c5fd; --three: #6ee7b7; }
    }
    .od-figure text { fill: var(--ink); }
    .od-figure .small { font-size: 12.5px; opacity: .85; }
  </style>"""


def measured_figure(drifts: Sequence[Drift] = MEASURED) -> str:
    """A row for each drift: a dot at its mean KL per token, a ring at the largest that was met."""
    rows = sorted(drifts, key=lambda drift: drift.kl_rate)
    bottom = TOP + ROW * len(rows)
    lines = [
        f'<svg class="od-figure" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 480 {bottom + 46}" '
        'font-family="system-ui, sans-serif" font-size="13.5">',
        f"  {STYLE}",
    ]
    for power in range(LOW, HIGH + 1):
        x = _x(10.0**power)
        lines.append(f'  <path d="M{x} {TOP - 8}V{bottom}" stroke="var(--line)" opacity=".35"/>')
        if power % 2:
            label = f"{10.0**power:g}" if power > -2 else f'10<tspan dy="-5" font-size="9">−{-power}</tspan>'
            lines.append(f'  <text class="small" x="{x}" y="{bottom + 18}" text-anchor="middle">{label}</text>')
    low, high = (_x(limit) for limit, _ in LIMITS)
    lines += [
        f'  <rect x="{LEFT}" y="{TOP - 8}" width="{low - LEFT:.1f}" height="{bottom - TOP + 8}" fill="var(--three)" opacity=".1"/>',
        f'  <rect x="{high}" y="{TOP - 8}" width="{RIGHT - high:.1f}" height="{bottom - TOP + 8}" fill="var(--one)" opacity=".12"/>',
        f'  <text class="small" x="{low - 4}" y="20" text-anchor="end" style="fill:var(--three)">mean below {LIMITS[0][0]}: {LIMITS[0][1]}</text>',
        f'  <text class="small" x="{RIGHT}" y="38" text-anchor="end" style="fill:var(--one)">mean above {LIMITS[1][0]}: {LIMITS[1][1]}</text>',
    ]
    for number, drift in enumerate(rows):
        y = TOP + ROW * number + ROW / 2 - 4
        mean, largest = _x(drift.kl_rate), _x(drift.delta)
        lines += [
            f'  <text x="{LEFT - 8}" y="{y + 4.5}" text-anchor="end">{escape(drift.name)}</text>',
            f'  <path d="M{mean} {y}H{largest - 4.5}" stroke="var(--two)" stroke-width="1.5" opacity=".6"/>',
            f'  <circle cx="{mean}" cy="{y}" r="5" fill="var(--two)"/>',
            f'  <circle cx="{largest}" cy="{y}" r="4.5" fill="none" stroke="var(--two)" stroke-width="1.5"/>',
        ]
    lines += [
        f'  <text class="small" x="{LEFT}" y="{bottom + 40}">KL per token, nat: ● mean, ○ largest that was met</text>',
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _x(kl: float) -> float:
    share = (math.log10(kl) - LOW) / (HIGH - LOW)
    return round(LEFT + (RIGHT - LEFT) * share, 1)


def measured_table(drifts: Sequence[Drift] = MEASURED) -> list[str]:
    """The same as a table of Markdown, with the length at which the smallest bound reaches the reward's range."""
    lines = [
        "| measured here | mean KL, nat per token | largest | useful certificates end at | how |",
        "|---|---:|---:|---:|---|",
    ]
    for row in sorted(length_rows(drifts), key=lambda row: row["kl_rate"]):
        end = row["passes"]["sharp"]
        words = "–" if end is None else f"{end:,} tokens"
        lines.append(f"| {row['name']} | {short(row['kl_rate'])} | {short(row['delta'])} | {words} | {row['source']} |")
    return lines


ACCURACY = Path(__file__).parents[1] / "benchmarks" / "results" / "accuracy.json"
WAYS = {
    "log_softmax, bfloat16": ("log_softmax, bfloat16", "var(--line)", "6 3"),
    "log_softmax, float32": ("log_softmax, float32", "var(--one)", ""),
    "Liger, KL loss": ("Liger, KL loss", "var(--three)", "2 4"),
    "TRL, chunked": ("TRL, chunked (in torch)", "var(--ink)", "8 3"),
    "offdrift": ("offdrift, CPU", "var(--two)", ""),
    "offdrift, no compiler": ("offdrift, CPU, no compiler", "var(--two)", "8 3"),
    "offdrift, GPU kernels": ("offdrift, GPU kernels", "var(--two)", "3 3"),
}
"""Ways to compute the KL: their names, colors and dashes."""


def accuracy_figure() -> str:
    """Median relative error of the KL against the KL, both logarithmic: a line for each way."""
    levels = json.loads(ACCURACY.read_text(encoding="utf-8"))["levels"]
    left, right, top, bottom = 62, 462, 20, 250
    low = min(math.log10(level["kl"]) for level in levels) - 0.2
    x = lambda kl: round(left + (right - left) * (math.log10(kl) - low) / (0.2 - low), 1)  # noqa: E731
    y = lambda error: round(bottom - (bottom - top) * (math.log10(max(error, 1e-8)) + 8) / 10, 1)  # noqa: E731
    lines = [
        f'<svg class="od-figure" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 480 {bottom + 49 + 19 * math.ceil(len(WAYS) / 2)}" '
        'font-family="system-ui, sans-serif" font-size="13.5">',
        f"  {STYLE}",
    ]
    for power in range(-8, 3, 2):
        at = y(10.0**power)
        lines += [
            f'  <path d="M{left} {at}H{right}" stroke="var(--line)" opacity=".35"/>',
            f'  <text class="small" x="{left - 6}" y="{at + 4}" text-anchor="end">{_power(power)}</text>',
        ]
    for power in range(-8, 1, 2):
        lines.append(
            f'  <text class="small" x="{x(10.0**power)}" y="{bottom + 18}" text-anchor="middle">{_power(power)}</text>'
        )
    for number, (way, (name, color, dash)) in enumerate(WAYS.items()):
        points = [(x(level["kl"]), y(level["ways"][way]["median"])) for level in levels]
        style = f'stroke="{color}" stroke-width="2" fill="none"' + (f' stroke-dasharray="{dash}"' if dash else "")
        column, row = left + 200 * (number % 2), bottom + 56 + 19 * (number // 2)
        lines += [
            f'  <path d="M{" L".join(f"{a} {b}" for a, b in points)}" {style}/>',
            f'  <path d="M{column} {row - 4}h26" {style}/>',
            f'  <text class="small" x="{column + 32}" y="{row}">{escape(name)}</text>',
        ]
    lines += [
        f'  <text class="small" x="{left}" y="{bottom + 36}">KL(mu || pi), nat; upward: median relative error</text>',
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _power(power: int) -> str:
    return "1" if power == 0 else f'10<tspan dy="-5" font-size="9">{"−" if power < 0 else ""}{abs(power)}</tspan>'


def accuracy_table() -> list[str]:
    """The same as a table of Markdown, with the rows that came out below 0, and what was measured with."""
    stored: dict[str, Any] = json.loads(ACCURACY.read_text(encoding="utf-8"))
    levels, machine = stored["levels"], stored["machine"]
    head = "".join(f" | {name}" for name, _, _ in WAYS.values())
    lines = [f"| KL, nat{head} |", "|---:" + "|---:" * len(WAYS) + "|"]
    for level in levels:
        cells = [_error(level["ways"][way]) for way in WAYS]
        lines.append(f"| {level['kl']:.1e} | {' | '.join(cells)} |")
    versions = ", ".join(f"{name} {machine[name]}" for name in ("torch", "triton", "trl", "liger-kernel"))
    lines += [
        "",
        f"Median relative error of {stored['rows']} rows of {stored['vocab']:,} scores, in brackets the rows whose KL came "
        f"out below 0. {versions}; {machine['processor']} ({machine['simd']}), kernels for GPUs in {stored['kernels']}.",
    ]
    return lines


def _error(way: dict[str, Any]) -> str:
    below = f" ({way['negative_rows']})" if way["negative_rows"] else ""
    error = way["median"]
    return (f"{error:.0e}" if error < 0.01 else f"{error:.0%}" if error < 10 else f"{error:.0f} times") + below


EMPTY_BATCHES = Path(__file__).parents[1] / "benchmarks" / "results" / "empty_batches.json"
EMPTY_LOW, EMPTY_HIGH = 0, 2.2
"""Ends of the axis, powers of ten, usual steps."""


def empty_figure() -> str:
    """A row for each optimizer: how far it moves the weights over 10 and over all of the empty batches, by itself."""
    stored = json.loads(EMPTY_BATCHES.read_text(encoding="utf-8"))
    rows, batches = stored["drift"], stored["settings"]["empty_batches"]
    x = lambda steps: round(LEFT + (RIGHT - LEFT) * math.log10(max(steps, 1)) / EMPTY_HIGH, 1)  # noqa: E731
    top, row = 24, 30
    bottom = top + row * len(rows)
    lines = [
        f'<svg class="od-figure" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 480 {bottom + 62}" '
        'font-family="system-ui, sans-serif" font-size="13.5">',
        f"  {STYLE}",
    ]
    for steps in (1, 3, 10, 30, 100):
        lines += [
            f'  <path d="M{x(steps)} {top - 10}V{bottom - 6}" stroke="var(--line)" opacity=".35"/>',
            f'  <text class="small" x="{x(steps)}" y="{bottom + 12}" text-anchor="middle">{steps}</text>',
        ]
    for number, (name, policies) in enumerate(rows.items()):
        y = top + row * number + 6
        ten, all_of_them = (policies["step"][key][0] for key in ("moved_first_10", "moved"))
        lines += [
            f'  <text x="{LEFT - 8}" y="{y + 4.5}" text-anchor="end">{escape(name)}</text>',
            f'  <path d="M{x(1)} {y}H{x(all_of_them) - 4.5}" stroke="var(--two)" stroke-width="1.5" opacity=".6"/>',
            f'  <circle cx="{x(ten)}" cy="{y}" r="4.5" fill="var(--two)"/>',
            f'  <circle cx="{x(all_of_them)}" cy="{y}" r="6" fill="none" stroke="var(--one)" stroke-width="2"/>',
        ]
    lines += [
        f'  <text class="small" x="{LEFT}" y="{bottom + 34}">distance in usual steps after ● 10 and ○ {batches}</text>',
        f'  <text class="small" x="{LEFT}" y="{bottom + 52}">batches without a gradient; with a guard it is 0</text>',
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def empty_drift_table() -> list[str]:
    """Distances over empty batches, and the first small step after them under each policy, medians over seeds."""
    rows = json.loads(EMPTY_BATCHES.read_text(encoding="utf-8"))["drift"]
    after = list(next(iter(rows.values())))
    lines = [
        "| optimizer | moved (least to most) | KL, nat per token | the next step, by policy: "
        + " / ".join(after)
        + " |",
        "|---|---:|---:|---:|",
    ]
    for name, policies in rows.items():
        middle, low, high = policies["step"]["moved"]
        steps = " / ".join(f"{row['next_step'][0]:.2g}" for row in policies.values())
        lines.append(f"| {name} | {middle:.1f} ({low:.1f} to {high:.1f}) | {policies['step']['kl'][0]:.2g} | {steps} |")
    return lines


def empty_outcome_table() -> list[str]:
    """Ends under the optimizer's own steps, and paired differences of every policy to them, as far as measured."""
    stored = json.loads(EMPTY_BATCHES.read_text(encoding="utf-8"))
    policies = [name for name in next(iter(stored["drift"].values())) if name != "step"]
    lines = [
        f"| cause | optimizer | empty | end | {' | '.join(policies)} |",
        "|---|---|---:|---:|" + "---:|" * len(policies),
    ]
    for cause, optimizers in stored["outcome"].items():
        for optimizer, cells in optimizers.items():
            if "step" not in cells:
                continue
            own = cells["step"]
            columns = [_difference(cells.get(policy)) for policy in policies]
            lines.append(f"| {cause} | {optimizer} | {own['empty']:.0f} | {own['end']:.2f} | {' | '.join(columns)} |")
    return lines


def _difference(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return "not run"
    mark = "**" if cell["p_sign_flip"] < 0.05 else ""
    return f"{mark}{cell['difference']:+.3f}{mark} ± {cell['half_width']:.3f}"
