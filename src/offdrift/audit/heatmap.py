"""The worst sequences, token by token: how strongly each token's color says that the policies disagree.

Two readings: the log-ratio, on a scale with two directions, and the exact KL where the log holds it. The
numbers go to the page's script, which colors anew when the reader changes the reading.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

from offdrift.show.charts import rounded
from offdrift.show.json_access import Fields, any_number, at, items, number, numbers, rows, text
from offdrift.show.numbers import KL_EDGES, fixed, kl_labels, kl_level, short
from offdrift.show.sanitize import clipped

RATIO_EDGES = (0.01, 0.05, 0.2, 1.0, 3.0)
"""|log-ratio| at which the color of a token changes, nats."""
MAX_SEQUENCES = 20
MAX_TOKENS = 600
"""Characters of a prompt or a completion that are on the page."""


@dataclass(frozen=True)
class Heat:
    """One sequence: where it stands, its texts, and a cell for each of its tokens."""

    facts: tuple[str, ...]
    where: str
    on: str
    prompt: str
    completion: str
    cells: tuple[tuple[str, str], ...]
    """Text and color class of each token; the class is that of the log-ratio, or else of the KL."""
    ids: bool
    """Whether the cells are token ids (or places), not texts."""
    first: int
    hidden: int
    """Tokens of the response that are not shown."""
    numbers: tuple[tuple[float | None, float | None, float | None], ...]
    """Log-ratio, rollout's log-prob and KL of each token, nats."""

    @property
    def as_data(self) -> dict[str, Any]:
        return {"first": self.first, "ids": self.ids, "on": self.on, "values": [list(n) for n in self.numbers]}  # fmt: skip


def heats(audit: Fields) -> list[Heat]:
    """The worst sequences that hold any token, in the order stored."""
    stored = rows(at(audit, "worst", "sequences"))[:MAX_SEQUENCES]
    return [heat for row in stored if (heat := _heat(row)).cells]


def ratio_class(log_ratio: float | None) -> str:
    """Color class of a log-ratio: k0 in the middle, n1 to n5 below 0, p1 to p5 above.

    Example:
        >>> ratio_class(0.0), ratio_class(-0.06), ratio_class(7.0), ratio_class(None)
        ('k0', 'n2', 'p5', 'k0')
    """
    if log_ratio is None:
        return "k0"
    level = bisect_right(RATIO_EDGES, abs(log_ratio))
    return f"{'n' if log_ratio < 0 else 'p'}{level}" if level else "k0"


def ratio_scale() -> list[tuple[str, str]]:
    """The legend of the log-ratio: class and label, from the most negative to the most positive."""
    last = len(RATIO_EDGES)
    below = [(f"n{i}", f"−{RATIO_EDGES[i - 1]:g}") for i in range(last, 0, -1)]
    above = [(f"p{i}", f"+{RATIO_EDGES[i - 1]:g}") for i in range(1, last + 1)]
    return [*below, ("k0", "0"), *above]


def kl_scale() -> list[tuple[str, str]]:
    """The legend of the KL, as on the page of a training run."""
    return [("k0", "less"), *((f"k{i}", label) for i, label in enumerate(kl_labels(), start=1))]


def edges() -> dict[str, list[float]]:
    """Where colors change, for the script."""
    return {"ratio": list(RATIO_EDGES), "kl": list(KL_EDGES)}


def _heat(row: Fields) -> Heat:
    ratios, logps, kls = (numbers(row.get(k))[:MAX_TOKENS] for k in ("log_ratio", "logp_rollout", "kl"))  # fmt: skip
    tokens = items(row.get("tokens"))[:MAX_TOKENS]
    count = max(len(ratios), len(kls), len(tokens))
    first = int(number(row.get("first")) or 0)
    triples = tuple((_get(ratios, i), _get(logps, i), _get(kls, i)) for i in range(count))
    classes = [ratio_class(log_ratio) for log_ratio, _, _ in triples]
    if not any_number(ratios):
        classes = [f"k{kl_level(kl)}" for *_, kl in triples]
    names = [text(tokens[i]) if i < len(tokens) else f"{first + i}" for i in range(count)]
    length = number(row.get("length"))
    return Heat(
        facts=tuple(_facts(row)),
        where=_where(row),
        on=text(row.get("on")),
        prompt=clipped(text(row.get("prompt"))),
        completion=clipped(text(row.get("completion"))),
        cells=tuple(zip(names, classes)),
        ids=not any(isinstance(t, str) for t in tokens),
        first=first,
        hidden=max(0, int(length or 0) - count),
        numbers=triples,
    )


def _get(values: list[float | None], i: int) -> float | None:
    value = values[i] if i < len(values) else None
    return None if value is None else rounded(value)


def _where(row: Fields) -> str:
    file, line = text(row.get("file")), text(row.get("row"))
    return f"{file}:{line}" if file and line else file or (f"row {line}" if line else "")


def _facts(row: Fields) -> list[str]:
    step, length = number(row.get("step")), number(row.get("length"))
    worst, k3 = number(row.get("max_abs_log_ratio")), number(row.get("k3_mean"))
    reward, advantage = number(row.get("reward")), number(row.get("advantage"))
    return [
        *([] if step is None else [f"step {step:.0f}"]),
        *([] if worst is None else [f"worst |log ratio| {short(worst)} nat"]),
        *([] if k3 is None else [f"mean k3 {short(k3)} nat"]),
        *([] if reward is None else [f"reward {fixed(reward)}"]),
        *([] if advantage is None else [f"advantage {fixed(advantage)}"]),
        *([] if length is None else [f"{length:,.0f} tokens"]),
    ]
