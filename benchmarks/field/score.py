"""Compare answers with what was planted, and count.

An answer is right by its first cause. `outcome` names what it was; `tables` counts by kind, format and size, with
intervals of Wilson (shares of right answers) and of Clopper and Pearson (shares that should be near 0), which take logs as
independent draws; `by_kind` has the kinds apart.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

SEVERITIES = ("ok", "info", "watch", "act", "stop")

GOOD = ("right", "honest abstention", "abstention")
"""Of logs with a fault that can be seen: what a user is helped by, or at least not misled by."""
OUTCOMES = (
    "right", "honest abstention", "abstention", "missed", "unexplained", "wrong", "confidently wrong",
    "clean", "false alarm", "silent", "invented",
)  # fmt: skip
"""Answers to visible faults (the first seven), to clean logs (two), and to logs of formats that show nothing (two)."""


@dataclass(frozen=True)
class Answer:
    """What a detector says of a log.

    `causes` are ranked and in the plain vocabulary; `unexplained` stands for a finding that names none. `abstains` says
    that the first finding is a question: it names what the log cannot tell, or the measurement that decides.
    """

    causes: tuple[str, ...]
    confident: bool
    abstains: bool
    severity: str
    fix: tuple[str, ...] = ()
    detail: str = ""

    @staticmethod
    def of(values: Mapping[str, Any]) -> Answer:
        """Read an answer from JSON; raises `ValueError` with the field that is wrong."""
        severity = values.get("severity", "ok")
        if severity not in SEVERITIES:
            raise ValueError(f"severity is {severity!r}, not one of {', '.join(SEVERITIES)}")
        fix = values.get("fix") or ()
        return Answer(
            causes=tuple(values.get("causes", ())),
            confident=bool(values.get("confident", False)),
            abstains=bool(values.get("abstains", False)),
            severity=severity,
            fix=(fix,) if isinstance(fix, str) else tuple(fix),
            detail=str(values.get("detail", "")),
        )


@dataclass(frozen=True)
class Truth:
    """What a log holds: causes that are right to name first, whether abstention is, and fixes that apply."""

    clean: bool
    visible: bool
    right: frozenset[str]
    abstain: bool
    fixes: frozenset[str]


def outcome(truth: Truth, answer: Answer) -> str:
    """Name what an answer was, one of `OUTCOMES`."""
    first = answer.causes[0] if answer.causes else "none"
    loud = SEVERITIES.index(answer.severity) > SEVERITIES.index("watch")
    named = first in truth.right
    if not truth.visible:
        return "silent" if first == "none" or answer.abstains or not loud else "invented"
    if truth.clean:
        return "false alarm" if loud and not named and not (answer.abstains and truth.abstain) else "clean"
    if named:
        return "right"
    if answer.abstains:
        return "honest abstention" if truth.abstain else "abstention"
    if first == "none":
        return "missed"
    if first == "unexplained":
        return "unexplained"
    return "confidently wrong" if answer.confident else "wrong"


def fix_applies(truth: Truth, answer: Answer) -> bool:
    """Whether the first fix would help."""
    return bool(answer.fix) and answer.fix[0] in truth.fixes


def wilson(k: int, n: int, z: float = 1.959964) -> tuple[float, float]:
    """Interval of a share, 95 %: (p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n); (0, 1) of nothing."""
    if not n:
        return 0.0, 1.0
    p, d = k / n, 1 + z * z / n
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, (p + z * z / (2 * n) - half) / d), min(1.0, (p + z * z / (2 * n) + half) / d)


def clopper_pearson(k: int, n: int, level: float = 0.95) -> tuple[float, float]:
    """Exact interval of a share: where the binomial tails have half of 1 - level each; (0, 1) of nothing."""
    tail = (1 - level) / 2

    def at_least(p: float, least: int) -> float:
        return math.fsum(math.comb(n, j) * p**j * (1 - p) ** (n - j) for j in range(least, n + 1))

    def crossing(rises: Callable[[float], float], target: float) -> float:
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if rises(middle) < target else (low, middle)
        return (low + high) / 2

    lower = 0.0 if k == 0 else crossing(lambda p: at_least(p, k), tail)
    upper = 1.0 if k == n else crossing(lambda p: at_least(p, k + 1), 1 - tail)
    return lower, upper


def share(k: int, n: int, interval: Callable[[int, int], tuple[float, float]] = wilson) -> dict[str, Any]:
    """A count as a share with its interval."""
    low, high = interval(k, n)
    return {"count": k, "of": n, "share": k / n if n else None, "low": low, "high": high}


def summary(records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Count the outcomes of records."""
    records = list(records)
    counts = Counter(r["outcome"] for r in records)
    seen = [r for r in records if not r["clean"] and r["visible"]]
    clean = counts["clean"] + counts["false alarm"]
    blind = counts["silent"] + counts["invented"]
    n = len(seen)
    return {
        "logs": len(records),
        "outcomes": {name: counts[name] for name in OUTCOMES if counts[name]},
        "right": share(counts["right"], n),
        "right or abstaining": share(sum(counts[g] for g in GOOD), n),
        "right or honestly abstaining": share(counts["right"] + counts["honest abstention"], n),
        "missed": share(counts["missed"], n),
        "unexplained": share(counts["unexplained"], n),
        "wrong": share(counts["wrong"] + counts["confidently wrong"], n, clopper_pearson),
        "confidently wrong": share(counts["confidently wrong"], n, clopper_pearson),
        "fix applicable": share(sum(r["fix_applies"] for r in seen), n),
        "false alarms": share(counts["false alarm"], clean, clopper_pearson),
        "invented": share(counts["invented"], blind, clopper_pearson),
    }


def tables(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Summaries of all records, and of each half, kind, format and size."""

    def apart(key: str) -> dict[str, Any]:
        return {name: summary(r for r in records if r[key] == name) for name in sorted({r[key] for r in records})}

    by_kind = {
        name: dict(Counter(r["outcome"] for r in records if r["kind"] == name))
        for name in sorted({r["kind"] for r in records})
    }
    return {
        "all": summary(records),
        "by_half": apart("half"),
        "by_format": apart("format"),
        "by_size": apart("size"),
        "by_kind": by_kind,
    }


def written(found: Mapping[str, Any]) -> str:
    """A summary as lines of text."""
    out = [f"{found['logs']} logs"]
    for name, s in found.items():
        if isinstance(s, Mapping) and "share" in s and s["of"]:
            out.append(
                f"  {name:30s} {s['count']:4d} of {s['of']:4d}  {s['share']:6.1%}  [{s['low']:.1%}, {s['high']:.1%}]"
            )
    return "\n".join(out)
