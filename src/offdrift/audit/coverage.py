"""Measure how much of a log the audit covers: missing, dropped or unreadable data, and unanswered questions.

What was left out has metrics of its own, which the diagnosis judges by their share (`docs/rules.md`), and sentences
that stand before every other.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from offdrift.audit.partial import AuditPartial, Unread
from offdrift.records.schema import PADDING

CAUSES = {
    "missing": "null or NaN",
    "absent": "in rows without the list",
    "infinite": "infinite",
    "placeholder": "a placeholder for minus infinity",
    "positive": "above 0, impossible for a log-prob",
    "probability": "a probability, not its logarithm",
    "negated": "with the sign changed",
    "zero": "filled in with 0",
    "running": "a sum of log-probs up to its token (cumulative)",
    "repeated": "one number at all tokens of a response",
}
"""What is wrong with the values that the reader gives each cause."""

POLICIES = {
    "logp_rollout": "rollout log-prob",
    "logp_old": "old log-prob",
    "logp": "current log-prob",
    "mask": "mask",
    "log-probs": "log-prob",
}

DERIVED = ("position", "newest_version")
"""Fields that a sequence has only where it needs them: a log does not lack them."""
SHOWN = ("prompts", "completions")
"""Fields that a person reads and no number needs."""


def coverage(part: AuditPartial, *, files: Sequence[str], skipped: int = 0, size: int) -> dict[str, Any]:
    """Return how much of a log was read and compared, as plain data.

        unread_frac    share of rows that could not be read; of files or bytes, where it is larger
        cuts           places from which the rest of a file is lost
        trainable      tokens that may train
        unscored       those which no two policies score, where the log has two policies at all
        unscored_frac  their share
        partly_frac    share that two policies score, and a third does not
        padding        tokens at the ends of rows that are padding
        causes         tokens by policy and cause
        partial        fields that only some sequences have: how many, of how many
        ahead_frac     share of tokens with a version lag below 0
        again          responses that stand in the log again (`tally.Repeats.copies`), and files by their names
        sentences      what was not read or not scored; empty if nothing is missing
        remarks        in sentences, what else numbers are not about: fields that only some
                       sequences have, lags below 0, responses without a token

    Args:
        part: everything that was read.
        files: those that were opened.
        skipped: how many could not be.
        size: bytes of all.
    """
    counts: Mapping[str, int] = {} if part.tally is None else part.tally.counts
    sequences, trainable = counts.get("sequences", 0), counts.get("trainable", 0)
    unscored = trainable - (counts.get("compared") or counts.get("tokens", 0))
    causes: dict[str, dict[str, int]] = {}
    padded = counts.get(f"unscored/{PADDING}", 0)
    for name, n in counts.items():
        if name.startswith("unscored/") and name != f"unscored/{PADDING}":
            policy, _, cause = name.removeprefix("unscored/").partition("/")
            causes.setdefault(policy, {})[cause] = n
    partial = {
        key.removeprefix("has/"): {"sequences": n, "of": sequences}
        for key, n in counts.items()
        if key.startswith("has/") and n < sequences and key.removeprefix("has/") not in DERIVED
    }
    lost = part.unread
    unread = unread_frac(lost, sequences, len(files) + skipped, size)
    again = _named_files(part, files)
    missing = _all_masked(counts)
    if (lines := lost.rows - lost.files) > 0:
        rows = lines + sequences
        of = f"{lines:,} of {_count(rows, 'row')} ({share(lines / rows)})"
        missing.append(f"{of} could not be read{part.first_reason}.")
    if lost.files:
        missing.append(f"{_count(lost.files, 'file')} could not be read at all, {share(unread)} of the log.")
    if lost.cuts:
        missing.append(f"{_count(lost.cuts, 'file')} ended early; how much was lost is unknown.")
    if unscored:
        of = f"{_count(trainable, 'token')} ({share(unscored / trainable)})"
        missing.append(f"{unscored:,} of {of} could not be compared{_where_lost(counts)}.")
    for policy, numbers in causes.items():
        parts = ", ".join(f"{n:,} {CAUSES.get(c, c)}" for c, n in sorted(numbers.items(), key=lambda x: -x[1]))
        total = sum(numbers.values())
        tokens = f"{_count(total, 'token')} ({share(total / max(trainable, 1))})"
        missing.append(f"{tokens} without a usable {POLICIES.get(policy, policy)}: {parts}.")
    if trainable and causes and all(of.get("zero") == trainable for of in causes.values()):
        missing.insert(0, "Every log-prob that counts is 0: a mask that is upside down keeps the prompt or padding.")
    if padded:
        tokens = f"{padded:,} of {_count(padded + trainable, 'token')} ({share(padded / (padded + trainable))})"
        missing.append(
            f"{tokens} are padding, one number again and again at the ends of rows: they were left out. Log a mask "
            "that is 0 there."
        )
    return {
        "unread_frac": unread,
        "padding": padded,
        "cuts": lost.cuts,
        "unscored_frac": _over(unscored, trainable),
        "partly_frac": _over(counts.get("partly", 0), trainable),
        "causes": causes,
        "partial": partial,
        "ahead_frac": _over(counts.get("ahead", 0), counts.get("tokens", 0)),
        "again": again,
        "unscored": unscored,
        "trainable": trainable,
        "sentences": missing,
        "remarks": _remarks(counts, partial, again),
    }


def _remarks(
    counts: Mapping[str, int], partial: Mapping[str, Mapping[str, int]], again: Mapping[str, Any]
) -> list[str]:
    """Sentences on what else numbers are not about."""
    remarks = [
        f"Only {n['sequences']:,} of {_count(n['of'], 'sequence')} have {name}; its numbers cover only those."
        for name, n in partial.items()
    ]
    remarks += _again_words(again)
    if mixed := counts.get("has/newest_version"):
        remarks.append(
            f"{_count(mixed, 'response')} {'was' if mixed == 1 else 'were'} sampled by several weight versions. "
            "The log does not say which tokens, so their lag is counted from the oldest version."
        )
    if ahead := counts.get("ahead"):
        remarks.append(
            f"{_count(ahead, 'token')} have a version lag below 0: the log counts sampled and trained versions "
            "differently, so steps with such tokens have no lag."
        )
    if empty := counts.get("empty"):
        remarks.append(f"{_count(empty, 'response')} {'has' if empty == 1 else 'have'} no token.")
    return remarks


KINDS = ("rank", "worker", "environment", "file")
"""Parts of a log that may be alone in what they lack, the most telling first."""
ALONE = 0.95
"""Share of the tokens that cannot be compared, from which on one part is said to have lost them."""


def _where_lost(counts: Mapping[str, int]) -> str:
    """The part of the log that the tokens which cannot be compared are of, where it is one; else "".

    Example:
        >>> _where_lost({"lost/rank/2": 40, "named/rank/2": 8, "named/rank/0": 9})
        ', all of them of rank 2 (8 of 17 sequences)'
    """
    for kind in KINDS:
        named, lost = (
            {name.removeprefix(prefix): n for name, n in counts.items() if name.startswith(prefix)}
            for prefix in (f"named/{kind}/", f"lost/{kind}/")
        )
        if len(named) < 2 or not lost:
            continue
        worst, total = max(lost, key=lambda name: lost[name]), sum(lost.values())
        if lost[worst] >= ALONE * total:
            most = "all" if lost[worst] == total else f"{lost[worst]:,}"
            if total == 1:
                return f", of {kind} {worst}"
            of = f"{named.get(worst, 0):,} of {sum(named.values()):,} sequences"
            return f", {most} of them of {kind} {worst} ({of})"
    return ""


def _named_files(part: AuditPartial, files: Sequence[str]) -> dict[str, Any]:
    """Responses that stand in a log again, with the names of files in place of their checksums."""
    again = {} if part.tally is None else part.tally.repeats.copies()
    if not again.get("again"):
        return again
    names = {zlib.crc32(file.encode()): file for file in files}
    order = {file: i for i, file in enumerate(files)}
    first = [{"step": step, "file": names.get(file, ""), "row": row} for step, file, row in again["first"]]
    first.sort(key=lambda place: (place["step"], order.get(place["file"], 0), place["row"]))
    return {**again, "files": [names.get(file, "") for file in again["files"]], "first": first}


def _again_words(again: Mapping[str, Any]) -> list[str]:
    """A sentence on responses that stand in the log again: how many, at which steps, and one of them."""
    if not again.get("again"):
        return []
    steps, (one, two) = again["steps"], again["first"]
    when = f"at step {steps[0]}" if len(steps) == 1 else f"at {len(steps):,} steps from {steps[0]} to {steps[-1]}"
    places = " again as ".join(f"{x['file']}:{x['row']} (step {x['step']})" for x in (one, two))
    many, of = again["again"], again["known"]
    words = f"{many:,} of {_count(of, 'response')} ({share(many / of)}) {'repeats' if many == 1 else 'repeat'} "
    words += f"an earlier one, with the same log-probs to the last digit, {when}; {places}."
    if times := again["evenly"]:
        words += f" Nearly every response is there {times} times."
    return [words]


def _all_masked(counts: Mapping[str, int]) -> list[str]:
    """A sentence where a log has log-probs, and a mask that leaves out every token."""
    masked = not counts.get("trainable") and any(name.startswith("has/logp") for name in counts)
    return ["The mask leaves out every token."] if masked else []


def metrics(covered: Mapping[str, Any]) -> dict[str, float]:
    """The shares of `coverage` under the names that the diagnosis reads.

    `data/lacking_frac/FIELD` is the share of sequences that lack a field which others have; log-probs
    that are missing count as tokens.
    """
    causes, again = covered["causes"], covered["again"]
    compared = again.get("known")
    tokens = {c: max((p.get(c, 0) for p in causes.values()), default=0) for c in ("probability", "negated")}
    shares = ("unread_frac", "cuts", "partly_frac", "ahead_frac")
    lacking = {k: n for k, n in covered["partial"].items() if k not in (*SHOWN, *POLICIES)}
    return {
        "batch/unscored_frac": float(covered["unscored_frac"]),
        "batch/unscored_tokens": float(covered["unscored"]),
        "batch/trainable_tokens": float(covered["trainable"]),
        **{f"data/{name}": float(covered[name]) for name in shares},
        **{f"data/lacking_frac/{name}": 1 - _over(n["sequences"], n["of"]) for name, n in lacking.items()},
        "data/impossible_tokens": float(
            max(
                sum(causes.get(policy, {}).get(c, 0) for c in ("infinite", "placeholder"))
                for policy in ("logp_old", "logp")
            )
        ),
        **{f"data/{cause}": float(n > 0) for cause, n in tokens.items()},
        "data/not_per_token": float(any(p.get(c) for p in causes.values() for c in ("running", "repeated"))),
        **({"data/again_frac": again["again"] / compared} if compared else {}),
        **({"data/again_times": float(again["evenly"] or 1)} if compared else {}),
    }


def unread_frac(lost: Unread, sequences: int, files: int = 0, size: int = 0) -> float:
    """Share of a log that could not be read: of rows, files or bytes, the largest.

    Example:
        >>> unread_frac(Unread(rows=36), 4)
        0.9
    """
    shares = (_over(lost.files, files), _over(lost.bytes, size))
    return max(_over(lost.rows, lost.rows + sequences), min(1.0, max(shares)))


def share(part: float) -> str:
    """A share in percent, as exact as it needs to be.

    Example:
        >>> share(0.9), share(0.00025), share(0.99999)
        ('90 %', '0.025 %', '99.999 %')
    """
    digits = f"{100 * part:.2g}" if part < 0.99 else f"{100 * part:.5g}"
    return f"{digits} %"


def _over(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _count(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"


LOG = {
    "logp_rollout": "the rollout engine's log-prob of every sampled token, under the distribution it was sampled from "
    "(vLLM: logprobs=0 with logprobs_mode=processed_logprobs)",
    "logp_old": "the training engine's log-prob of the same tokens before the first update on them",
    "logp": "the training engine's log-prob of the same tokens in the loss (free at the first minibatch)",
    "advantages": "the advantages that the loss used",
    "rewards": "the reward of each response",
    "rollout_version": "the version of the weights that sampled each response (count the synchronizations)",
    "version": "the version of the weights that were trained",
    "group_ids": "an id of the prompt of each response",
    "tokens": "the token ids of the response",
    "entropy": "the entropy of that distribution at each token: with tokens that were drawn from it, -log-prob is as "
    "large on average",
    "exact": "exact divergences per token (kl_rollout_current, tv_rollout_current), from full logits or hidden states",
}
"""How to get each field, in words."""


class Question(NamedTuple):
    """A question, and the fields that answer it: all of `needs`, and one of `either` if any."""

    text: str
    needs: tuple[str, ...]
    either: tuple[str, ...] = ()


TRAINER = ("logp_old", "logp")
SAME_WEIGHTS = "Do rollout and training engine agree at the same weights?"
QUESTIONS = (
    Question("How do response length and reward develop?", ("rewards",)),
    Question(SAME_WEIGHTS, ("logp_rollout", "logp_old")),
    Question("How far is the current policy from the rollout policy?", ("logp_rollout", "logp")),
    Question(
        "Does drift come from the engines or from stale weights?",
        ("logp_rollout", "rollout_version", "version"),
        TRAINER,
    ),
    Question("How much would each method have kept, and at which effective sample size?", ("logp_rollout",), TRAINER),
    Question("Is drift larger for positive or for negative advantages?", ("logp_rollout", "advantages"), TRAINER),
    Question("How many tokens would PPO's clip limit?", ("logp_old", "logp", "advantages")),
    Question("Does rejection remove entire prompt groups?", ("logp_rollout", "group_ids"), TRAINER),
    Question("Which tokens drift?", ("logp_rollout", "tokens"), TRAINER),
    Question("What can be proved about the update?", ("logp_rollout", "rewards", "exact")),
    # Two sides that agree on the wrong temperature, base or filter agree.
    Question(
        "Are the log-probs natural ones of the distribution that was sampled?", ("logp_rollout", "entropy"), TRAINER
    ),
)


def questions(has: Collection[str], *, lags: Iterable[Mapping[str, Any]] = ()) -> list[dict[str, Any]]:
    """Every question, whether these fields answer it, and what to log if not.

    Args:
        has: fields of `Logged` that the log holds; "exact" if it holds exact divergences.
        lags: rows by version lag, as in the audit's facets: tokens at lag 0 compare the engines, too.

    Example:
        >>> [q["question"] for q in questions({"rewards"}) if q["answered"]]
        ['How do response length and reward develop?']
    """
    rows = []
    for text, needs, either in QUESTIONS:
        missing = [name for name in needs if name not in has]
        if either and not any(name in has for name in either):
            missing.append(either[0])
        if text == SAME_WEIGHTS and any(row.get("low") == 0 and row.get("full/k3") is not None for row in lags):
            missing = []
        words = " and no ".join("exact divergences" if name == "exact" else name for name in missing)
        because, log = f"The log has no {words}" if missing else "", "; ".join(LOG[name] for name in missing)
        rows.append({"question": text, "answered": not missing, "because": because, "log": log})
    return rows
