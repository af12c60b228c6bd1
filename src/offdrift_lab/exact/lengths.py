"""Every bound for drift that was measured, against the length of responses: where each stops to be of use.

A drift is a pair of numbers per token, the mean and the largest KL(rollout || current) that were met. For sequences
of T tokens the smallest bound is then

    B*(T) = min over bounds of B(T; delta = largest KL, KL_seq = T * mean KL)

which takes for granted that longer responses drift as much per token, and that no context is worse than the worst that
was met: the second is an estimate, never a proof.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from offdrift.certificate import all_bounds
from offdrift.certificate.bounds import LABELS, Bound
from offdrift.certificate.inverse import first_useless
from offdrift.errors import BadValueError
from offdrift.show.charts import Chart, Series
from offdrift.show.numbers import short

LENGTHS = tuple(2**n for n in range(4, 14))
"""16 to 8192 tokens."""
SHOWN = (16, 256, 4096)
"""Lengths of the table on a screen of 80 columns."""


@dataclass(frozen=True)
class Drift:
    """The drift of one token between two policies, as measured."""

    name: str
    kl_rate: float
    """Mean KL(rollout || current) of a token, nats."""
    delta: float
    """The largest that was met, nats."""
    source: str
    """How it was measured."""

    def __post_init__(self) -> None:
        if not 0 <= self.kl_rate <= self.delta < math.inf:
            raise BadValueError(
                f"{self.name}: mean token KL {self.kl_rate}, largest {self.delta}; give 0 <= mean <= largest, finite"
            )


SMOLLM2 = "SmolLM2-135M-Instruct"
SUMS = "tiny Qwen3 on sums, lr 1e-4, float32 (benchmarks/certificates_at_work.py --lags)"
MEASURED = (
    Drift("float16 MoE", 9.5e-7, 8.6e-5, "tiny Qwen3-MoE after a warm start, transformers (benchmarks/replay.py)"),
    Drift("bfloat16 MoE", 6.4e-5, 9.5e-3, "tiny Qwen3-MoE after a warm start, transformers (benchmarks/replay.py)"),
    Drift("vLLM bf16 MoE", 3.5e-5, 2.9e-3, "tiny Qwen3-MoE after a warm start, vLLM (benchmarks/replay.py)"),
    Drift("vLLM bfloat16", 1.42e-3, 0.029, f"{SMOLLM2}, vLLM against float32 (offdrift check)"),
    Drift("int8 weights", 3.3e-3, 0.15, f"{SMOLLM2}, transformers against float32 (benchmarks/record_drift.py)"),
    Drift("vLLM FP8 cache", 3.2e-2, 3.0, "tiny Qwen3, vLLM in bfloat16 with an FP8 cache (benchmarks/quantized.py)"),
    Drift("lag 1", 1.0e-3, 0.13, SUMS),
    Drift("lag 4", 5.7e-3, 0.66, SUMS),
    Drift("lag 16", 2.4e-2, 2.1, SUMS),
    Drift("lag 64", 3.1e-2, 3.3, SUMS),
)
"""Drifts that were measured for the documentation (docs/lab-notes.md), by kind and by their mean."""


def _at(drift: Drift, length: int, constants: str) -> list[Bound]:
    limits: dict[str, Any] = {"horizon": length, "delta": drift.delta, "kl_seq": length * drift.kl_rate}
    return [b for b in all_bounds(**limits, constants=constants) if b.unified]


def _smallest(drift: Drift, length: int, which: str) -> Bound:
    """The smallest of the "sharp" bounds, of the "others" than the KL of sequences, or of the "paper"'s."""
    bounds = _at(drift, length, "paper" if which == "paper" else "sharp")
    return min((b for b in bounds if which != "others" or b.name != "sequence_kl"), key=lambda b: b.value)


def passes(drift: Drift, which: str, *, reward_range: float = 1.0) -> int | None:
    """The shortest length at which a bound is no longer below the rewards' range; None up to 10^12 tokens.

    Args:
        which: "sharp" for the smallest of all, "others" for the smallest that needs a trust region (all but the KL of
            sequences), "paper" for the smallest with the paper's constants.

    Example:
        >>> passes(Drift("bf16", 1.42e-3, 0.029, ""), "sharp"), passes(Drift("bf16", 1.42e-3, 0.029, ""), "others")
        (705, 30)
    """

    def useful(length: int) -> bool:
        return _smallest(drift, length, which).value < reward_range

    return first_useless(useful)


def length_rows(drifts: Sequence[Drift], lengths: Sequence[int] = LENGTHS) -> list[dict[str, Any]]:
    """Rows of what each bound says of every drift at each length, ready for JSON.

    Args:
        drifts: such as `MEASURED`.
        lengths: tokens of a response.

    Returns: per drift its numbers, `passes` (the length from which a bound is no longer below 1, by "sharp", "others",
        "paper") and `lengths`: per length the smallest bound's name and value, that of the others and of the paper,
        and `bounds`, every sharp row.

    Raises: `BadValueError` for a length below 1 or without drifts.
    """
    if not drifts or not lengths or min(lengths) < 1:
        raise BadValueError(f"{len(drifts)} drifts at lengths {list(lengths)}: give one drift and one length at least")
    rows = []
    for drift in drifts:
        by_length = []
        for length in lengths:
            best = {which: _smallest(drift, length, which) for which in ("sharp", "others", "paper")}
            by_length.append(
                {
                    "tokens": length,
                    **{which: {"bound": b.name, "value": b.value} for which, b in best.items()},
                    "bounds": {b.name: b.value for b in _at(drift, length, "sharp")},
                }
            )
        reached = {which: passes(drift, which) for which in ("sharp", "others", "paper")}
        rows.append({**vars(drift), "passes": reached, "lengths": by_length})
    return rows


def length_table(rows: Sequence[dict[str, Any]], *, width: int) -> Table:
    """The rows of `length_rows` for a terminal: B* by length, and where bounds pass the range of the reward.

    Args:
        width: columns of the terminal; from 100 on more lengths are shown.
    """
    there = [entry["tokens"] for entry in rows[0]["lengths"]]
    columns = there if width >= 60 + 9 * len(there) else [t for t in there if t in SHOWN] or there[:3]
    table = Table(
        box=box.SIMPLE_HEAD,
        title=Text("How long may responses be? Bounds on |J(π) − J(μ) − L′(π)| for measured drift", style="bold"),
        title_justify="left",
        caption=Text(_caption(rows)),
        caption_justify="left",
        caption_style="",
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("drift", no_wrap=True)
    table.add_column("KL/token", justify="right", no_wrap=True)
    for tokens in columns:
        table.add_column(f"T={tokens}", justify="right", no_wrap=True)
    for name in ("B* ≥ 1", "region", "paper"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        values = [entry["sharp"]["value"] for entry in row["lengths"] if entry["tokens"] in columns]
        cells = [Text(f"{v:.2g}" if v < 1 else f"{v:.3g}", style="green" if v < 1 else "yellow") for v in values]
        ends = ["–" if (t := row["passes"][which]) is None else f"{t:,}" for which in ("sharp", "others", "paper")]
        table.add_row(Text(row["name"]), f"{row['kl_rate']:.1e}", *cells, *ends)
    return table


def _caption(rows: Sequence[dict[str, Any]]) -> str:
    winners = {entry["sharp"]["bound"] for row in rows for entry in row["lengths"]}
    others = {entry["others"]["bound"] for row in rows for entry in row["lengths"]}
    words = " or ".join(sorted(LABELS[name] for name in winners))
    return (
        f"In the table: B*, the smallest bound, which is {words} at every length here. B* ≥ 1: the length from which "
        f"it is not below the reward's range, 1. region: the same of bounds that need a trust region "
        f"({', '.join(sorted(LABELS[name] for name in others))}). paper: with the paper's constants."
    )


def length_chart(rows: Sequence[dict[str, Any]]) -> Chart:
    """B* against the length for every drift; its name ends in the length at which it is 1, and in brackets that of the
    smallest bound that needs a trust region."""
    tokens = [entry["tokens"] for entry in rows[0]["lengths"]]
    series = []
    for row in sorted(rows, key=lambda row: -row["kl_rate"]):
        ends = ["none" if (t := row["passes"][which]) is None else f"{t:,}" for which in ("sharp", "others")]
        values = [entry["sharp"]["value"] for entry in row["lengths"]]
        series.append(Series(f"{row['name']}: {ends[0]} ({ends[1]})", tokens, values, kind="points"))
    return Chart(
        "In the legend: T at which B* is 1 (and of bounds with a trust region)",
        "B* on |J(π) − J(μ) − L′(π)| (reward)",
        series,
        x_title="length of responses T (tokens)",
        log_x=True,
        log=True,
        lines=[(1.0, "reward's range, 1")],
        wide=True,
    )


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """The drifts in words, for the caption of the chart."""
    return "; ".join(f"{row['name']} {short(row['kl_rate'])} nat, largest {short(row['delta'])}" for row in rows)
