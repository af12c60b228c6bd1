"""Two audits, number by number: which run drifts less, and what that changes about the methods.

A difference of two numbers is judged by the direction that the metric table gives it; nothing here
says whether it is more than noise between runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from offdrift.report.audit_methods import METHOD_COLUMNS, MethodColumn, Tried, asked_about, tried
from offdrift.report.fields import Fields, column, mapping, rows
from offdrift.report.headline import PAIRS, best_of, kl_metric, kl_metrics, main_pair, meaning_of
from offdrift.report.stored import number
from offdrift.report.table import percent, short
from offdrift.stats.summary import METRICS

SHARES = tuple(
    c for c in METHOD_COLUMNS if c.key in ("kept_tokens", "ess_frac", "kept_length_ratio")
)
"""What is compared of each method."""
SAME = 1e-9
"""Relative difference below which two numbers are the same."""


@dataclass(frozen=True)
class Compared:
    """One number of two runs."""

    name: str
    a: float | None
    b: float | None
    larger_is: str
    meaning: str
    write: Callable[[float | None], str]

    @property
    def difference(self) -> float | None:
        """The second run's number less the first's."""
        return None if self.a is None or self.b is None else self.b - self.a

    @property
    def winner(self) -> str:
        """ "a", "b", or "" where they are equal, or neither direction is better."""
        d = self.difference
        if d is None or self.a is None or self.larger_is == "neither" or abs(d) <= SAME * abs(self.a):  # fmt: skip
            return ""
        return "b" if (d > 0) == (self.larger_is == "better") else "a"

    @property
    def change(self) -> str:
        """The difference with its sign."""
        d = self.difference
        return "–" if d is None else ("+" if d > 0 else "") + _signed(self.write, d)


def overall(a: Fields, b: Fields) -> list[Compared]:
    """Every metric that both runs have over their whole logs, the telling ones first."""
    mine, its = mapping(a.get("overall")), mapping(b.get("overall"))
    pair = main_pair(a) or main_pair(b)
    first = [kl_metric(mine, pair), f"{pair}/ess_frac", f"{pair}/pearson", f"{pair}/chi2_token", "reward/mean", "response/length_mean"]  # fmt: skip
    order = {name: i for i, name in enumerate(dict.fromkeys([*first, *METRICS]))}
    both = [k for k in mine if number(mine[k]) is not None and number(its.get(k)) is not None]
    return [
        Compared(name, number(mine[name]), number(its[name]), METRICS[name].larger_is if name in METRICS else "neither", meaning_of(name), short)
        for name in sorted(both, key=lambda n: (order.get(n, len(order)), n))
    ]  # fmt: skip


def methods(a: Fields, b: Fields) -> list[tuple[str, list[Compared]]]:
    """What each method would have kept of either log, and at which effective sample size."""
    mine, its = ({m.name: m for m in tried(x)} for x in (a, b))
    return [(name, [_compared(c, mine[name], its[name]) for c in SHARES]) for name in mine if name in its]  # fmt: skip


def familiar(found: list[tuple[str, list[Compared]]]) -> list[tuple[str, list[Compared]]]:
    """The methods that most people ask about; all if none of them is there."""
    names = asked_about(name for name, _ in found)
    return [row for row in found if row[0] in names] or found[: len(names)]


def differences(a: Fields, b: Fields) -> dict[str, Any]:
    """The comparison as plain data: metrics over the whole logs, and KL over the steps in common."""
    metric = common_kl(a, b)
    mine, its = in_common(a, b, metric)
    return {
        "kl": {"metric": metric or None, "a": mine, "b": its},
        "metrics": {
            c.name: {"a": c.a, "b": c.b, "difference": c.difference, "better": c.winner or None}
            for c in overall(a, b)
        },
        "methods": {
            name: {c.name: {"a": c.a, "b": c.b} for c in cells} for name, cells in methods(a, b)
        },
    }


def common_kl(a: Fields, b: Fields) -> str:
    """The best measure of KL that both logs have, of the first pair of policies with one; "" for none."""
    mine, its = mapping(a.get("overall")), mapping(b.get("overall"))
    both = [m for pair in PAIRS for m in kl_metrics(pair) if best_of(mine, (m,)) and best_of(its, (m,))]  # fmt: skip
    return both[0] if both else ""


def in_common(a: Fields, b: Fields, metric: str) -> tuple[float | None, float | None]:
    """Mean of a metric over the tokens of the steps that both runs have; over all where none is common.

    A run that went on longer has had more time to drift.
    """
    whole = [number(mapping(x.get("overall")).get(metric)) for x in (a, b)]
    tables = [rows(x.get("steps")) for x in (a, b)]
    found = [[s for s in column(t, "step") if s is not None] for t in tables]
    if not all(found):
        return whole[0], whole[1]
    low, high = max(map(min, found)), min(map(max, found))
    means = [_mean(t, metric, low, high) for t in tables]
    return (means[0], means[1]) if None not in means else (whole[0], whole[1])


def sentence(a: Fields, b: Fields, names: tuple[str, str]) -> str:
    """What the comparison amounts to, by the best measure of KL that both runs have."""
    metric = common_kl(a, b)
    x, y = in_common(a, b, metric)
    if x is None or y is None:
        return "The two logs have no measure of drift in common."
    if abs(x - y) <= SAME * max(x, y):
        return f"Both runs have the same KL per token ({metric}): {short(x)} nat."
    (low, name), (high, _) = sorted([(x, names[0]), (y, names[1])])
    factor = f", a factor of {high / low:.3g}" if low > 0 else ""
    return f"{name} drifts less: over the steps in common its KL per token ({metric}) is {short(low)} nat against {short(high)} nat{factor}."  # fmt: skip


def _mean(table: list[dict[str, Any]], metric: str, low: float, high: float) -> float | None:
    """Mean over the tokens of steps `low` to `high`."""
    inside = [r for r in table if (s := number(r.get("step"))) is not None and low <= s <= high]
    pairs = [(v, number(r.get("tokens")) or 1.0) for r in inside if (v := number(r.get(metric))) is not None]  # fmt: skip
    return sum(v * n for v, n in pairs) / sum(n for _, n in pairs) if pairs else None


def _compared(c: MethodColumn, x: Tried, y: Tried) -> Compared:
    return Compared(c.key, x.values[c.key], y.values[c.key], c.better, c.meaning, percent)


def _signed(write: Callable[[float | None], str], d: float) -> str:
    return write(d) if d >= 0 else "−" + write(-d).lstrip("−")
