"""Pictures and tables of drift that was measured, from the numbers that the package has of it; see docs/generate.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

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
