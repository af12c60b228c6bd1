"""How much of a log its audit has seen: what is missing, dropped or unreadable, by cause.

Numbers that are computed from the rest say nothing about the rest. So what was left out has metrics
of its own, which the diagnosis judges by their share (`docs/rules.md`), and sentences that stand
before every other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offdrift.audit.partial import Part, Unread

CAUSES = {
    "missing": "null or NaN",
    "absent": "in rows without the list",
    "infinite": "infinite",
    "placeholder": "a placeholder for minus infinity",
    "positive": "above 0, which no log-prob is",
    "probability": "a probability, not its logarithm",
    "negated": "with the sign changed",
    "zero": "filled in with 0",
}
"""What is wrong with the values that the reader gives each cause (`integrations.logs.scored`)."""

POLICIES = {
    "logp_rollout": "rollout log-prob",
    "logp_old": "old log-prob",
    "logp": "current log-prob",
    "mask": "mask",
    "log-probs": "log-prob",
}

SHOWN = ("prompts", "completions")
"""Fields that a person reads and no number needs."""


def coverage(part: Part, *, files: int, size: int) -> dict[str, Any]:
    """What an audit has seen of a log, as plain data.

        unread_frac    share of rows that could not be read; of files or bytes, where it is larger
        cuts           places from which the rest of a file is lost
        trainable      tokens that may train
        unscored       those which no two policies score, where the log has two policies at all
        unscored_frac  their share
        partly_frac    share that two policies score, and a third does not
        causes         tokens by policy and cause
        partial        fields that only some sequences have: how many, of how many
        ahead_frac     share of tokens with a version lag below 0
        said           in sentences, what was not read or not scored; empty if nothing is missing
        remarks        in sentences, what else numbers are not about: fields that only some
                       sequences have, lags below 0, responses without a token

    Args:
        part: everything that was read.
        files: how many there are, those that could not be opened included.
        size: their bytes.
    """
    counts: Mapping[str, int] = {} if part.tally is None else part.tally.counts
    sequences, trainable = counts.get("sequences", 0), counts.get("trainable", 0)
    seen = counts.get("compared") or counts.get("tokens", 0)
    causes: dict[str, dict[str, int]] = {}
    for name, n in counts.items():
        if name.startswith("unscored/"):
            policy, _, cause = name.removeprefix("unscored/").partition("/")
            causes.setdefault(policy, {})[cause] = n
    partial = {
        name: {"sequences": n, "of": sequences}
        for key, n in counts.items()
        if key.startswith("has/") and n < sequences
        for name in [key.removeprefix("has/")]
    }
    found = {
        "unread_frac": unread_frac(part.unread, sequences, files, size),
        "cuts": part.unread.cuts,
        "unscored_frac": _over(trainable - seen, trainable),
        "partly_frac": _over(counts.get("partly", 0), trainable),
        "causes": causes,
        "partial": partial,
        "ahead_frac": _over(counts.get("ahead", 0), counts.get("tokens", 0)),
        "unscored": trainable - seen,
        "trainable": trainable,
    }
    said = [*_unread(part.unread, sequences, found), *_unscored(found, trainable, seen)]
    return {**found, "said": said, "remarks": _remarks(found, counts)}


def metrics(found: Mapping[str, Any]) -> dict[str, float]:
    """The shares of `coverage` under the names that the diagnosis reads.

    `data/lacking_frac/FIELD` is the share of sequences that lack a field which others have; log-probs
    that are missing count as tokens.
    """
    causes = found["causes"]
    tokens = {c: max((p.get(c, 0) for p in causes.values()), default=0) for c in ("probability", "negated")}
    return {
        "batch/unscored_frac": float(found["unscored_frac"]),
        "batch/unscored_tokens": float(found["unscored"]),
        "batch/trainable_tokens": float(found["trainable"]),
        **{
            f"data/{name}": float(found[name])
            for name in ("unread_frac", "cuts", "partly_frac", "ahead_frac")
        },
        **{
            f"data/lacking_frac/{name}": 1 - _over(held["sequences"], held["of"])
            for name, held in found["partial"].items()
            if name not in (*SHOWN, *POLICIES)
        },
        **{f"data/{cause}": float(n > 0) for cause, n in tokens.items()},
    }  # fmt: skip


def unread_frac(lost: Unread, sequences: int, files: int = 0, size: int = 0) -> float:
    """Share of a log that could not be read: of rows, files or bytes, the largest.

    Example:
        >>> unread_frac(Unread(rows=36), 4)
        0.9
    """
    shares = (_over(lost.files, files), _over(lost.bytes, size))
    return max(_over(lost.rows, lost.rows + sequences), min(1.0, max(shares)))


def _over(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def share(part: float) -> str:
    """A share in percent, as exact as it needs to be.

    Example:
        >>> share(0.9), share(0.00025), share(0.99999)
        ('90 %', '0.025 %', '99.999 %')
    """
    digits = f"{100 * part:.2g}" if part < 0.99 else f"{100 * part:.5g}"
    return f"{digits} %"


def _unread(lost: Unread, sequences: int, found: Mapping[str, Any]) -> list[str]:
    said = []
    if (lines := lost.rows - lost.files) > 0:
        rows = lines + sequences
        said.append(f"{lines:,} of {_n(rows, 'row')} ({share(lines / rows)}) could not be read.")
    if lost.files:
        said.append(f"{_n(lost.files, 'file')} could not be read at all, {share(found['unread_frac'])} of the log.")
    if lost.cuts:
        said.append(f"{_n(lost.cuts, 'file')} ended early, and how much was lost is not known.")
    return said


def _unscored(found: Mapping[str, Any], trainable: int, seen: int) -> list[str]:
    said = []
    lost = trainable - seen
    if lost:
        said.append(f"{lost:,} of {_n(trainable, 'token')} ({share(lost / trainable)}) could not be compared.")
    for policy, causes in found["causes"].items():
        parts = ", ".join(f"{n:,} {CAUSES.get(c, c)}" for c, n in sorted(causes.items(), key=lambda x: -x[1]))
        total = sum(causes.values())
        said.append(
            f"{_n(total, 'token')} ({share(total / max(trainable, 1))}) without a usable {POLICIES.get(policy, policy)}: {parts}."
        )
    return said


def _remarks(found: Mapping[str, Any], counts: Mapping[str, int]) -> list[str]:
    said = [
        f"Only {held['sequences']:,} of {_n(held['of'], 'sequence')} have {name}: numbers that need it are of those."
        for name, held in found["partial"].items()
    ]  # fmt: skip
    if ahead := counts.get("ahead"):
        said.append(
            f"{_n(ahead, 'token')} have a version lag below 0: the log counts sampled and trained versions in different ways, and steps with such tokens have no lag."
        )
    if empty := counts.get("empty"):
        said.append(f"{_n(empty, 'response')} have no token.".replace("1 response have", "1 response has"))
    return said


def _n(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"
