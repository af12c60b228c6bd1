"""Which tokens of a log can be compared: no placeholder, no hole, nothing that is not a number.

Logs hold numbers where there was nothing to log. Each such token has a cause, by which it is counted:

    missing      null or NaN
    absent       the row has no such list
    infinite     an infinity
    placeholder  `UNSCORED_BELOW` nats or less under the rollout policy, as in the library itself;
                 `LOWEST` or less under the others
    positive     above 0, which no log-prob is (+1.0 marks padding in some frameworks)
    probability  a column whose values lie between 0 and 1: probabilities, no logarithms
    negated      a column of positive values beyond 1: log-probs with the sign changed
    zero         exactly 0 where another policy finds the token unlikely: filled in

A token that a policy does not score is left out of every comparison, and its sequence stays. A row
that a policy does not score at all keeps its tokens for the policies that do. Fields beside these
log-probs cost no tokens: a row that they do not cover completely has none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from offdrift.logprobs import POSITIVE_SLACK, UNSCORED_BELOW
from offdrift.records.readers.columns import Lists, Numbers
from offdrift.records.schema import LOGPS, POLICIES

LOWEST = -9999.0
"""What is written for minus infinity; a policy that did not draw the token may find it unlikely."""

ZEROS = 8
"""Exact zeros from which on they are no coincidence: one token can be certain."""
UNLIKELY = -0.5
"""Nats: a token that another policy gives less is not certain, up to rare errors of an engine."""
NEARLY = -1e-3
"""Nats above which a token is nearly certain."""
ODD_SHARE = 0.05
"""Share of a policy's exact zeros that another finds unlikely, from which they were filled in."""
ODD_TIMES = 4.0
"""How many times the same share of nearly certain tokens that must be: policies that really disagree
do so about both kinds of token, and a column that was filled in has its zeros from nowhere."""

Tokens = Bool[Tensor, " n"]
Rows = Bool[Tensor, " b"]
Count = Callable[[Tokens], Int[Tensor, " b"]]


@dataclass(frozen=True)
class Examined:
    """What can be compared in some rows, and what cannot."""

    keep: Tokens | None
    """Tokens that may train and that every policy of their row scores; None: all."""
    trainable: Int[Tensor, " b"]
    """Tokens of each row that may train."""
    unscored: Mapping[str, Int[Tensor, " b"]]
    """Of these, tokens that a policy does not score, by "FIELD/CAUSE"; a token that two policies do
    not score counts in both."""
    lacks: Mapping[str, Rows]
    """Rows without a field that others have."""


def examined(lists: Mapping[str, Lists], numbers: Mapping[str, Numbers], cuts: Int[Tensor, " cuts"]) -> Examined:
    """What can be compared.

    Args:
        lists: fields per token, of equal lengths, `mask` among them if the log has one; rows that
            are `absent` hold anything.
        numbers: fields per row that some rows may lack.
        cuts: where rows begin and end.
    """
    lengths = cuts.diff()

    def count(tokens: Tokens) -> Int[Tensor, " b"]:
        return torch.cat([cuts.new_zeros(1), tokens.cumsum(0)])[cuts].diff()

    def spread(rows: Rows) -> Tokens:
        return torch.repeat_interleave(rows, lengths)

    trains = _trains(lists.get("mask"))
    trainable = lengths if trains is None else count(trains)
    holes = _holes(lists, trains, spread)
    lacks = _unscored_rows(holes, lists, trainable, count)
    keep, unscored = trains, {}
    for name, causes in holes.items():
        covered = ~spread(lacks[name]) if name in lacks else None
        for cause, hole in causes.items():
            dropped = hole if covered is None else hole & covered
            keep = ~dropped if keep is None else keep & ~dropped
            # A policy that other rows have and these do not is no damage where two others are left.
            hole = dropped if cause == "absent" else hole
            if bool((n := count(hole)).any()):
                unscored[f"{name}/{cause}"] = n
    for name, x in lists.items():
        if name not in (*POLICIES, "mask", "position"):
            incomplete = _incomplete(name, x, keep, count)
            if incomplete is not None:
                lacks[name] = incomplete
    for name, x in numbers.items():
        if bool((gone := x.missing()).any()):
            lacks[name] = gone
    return Examined(keep, trainable, unscored, lacks)


def _trains(mask: Lists | None) -> Tokens | None:
    """Tokens that may train, as far as the log knows; None: all."""
    if mask is None:
        return None
    trains = mask.values != 0
    if mask.missing is not None:
        trains = trains | mask.missing
    return None if bool(trains.all()) else trains


def _holes(
    lists: Mapping[str, Lists], trains: Tokens | None, spread: Callable[[Rows], Tokens]
) -> dict[str, dict[str, Tokens]]:
    """By policy and cause, tokens that may train and that it does not score; one cause per token."""
    zero = _filled_in({name: lists[name] for name in LOGPS if name in lists}, trains)
    holes: dict[str, dict[str, Tokens]] = {}
    for name in (*POLICIES, "mask"):
        if name not in lists:
            continue
        x, causes = lists[name], {}
        if x.absent is not None and name != "mask":
            causes["absent"] = spread(x.absent)
        if name == "mask":
            causes |= {} if x.missing is None else {"missing": x.missing}
        else:
            causes |= _unusable(name, x.values, trains)
        if name in zero:
            causes["zero"] = zero[name]
        free = trains
        for cause, hole in causes.items():
            tokens = hole if free is None else hole & free
            free = ~hole if free is None else free & ~hole
            if bool(tokens.any()):
                holes.setdefault(name, {})[cause] = tokens
    return holes


def _unusable(name: str, values: Tensor, trains: Tokens | None) -> dict[str, Tokens]:
    """Values that are no log-probs, by cause; nothing if there are none, which one pass tells."""
    if len(values) == 0:
        return {}
    low, high = (float(v) for v in torch.aminmax(values))
    least = _least(name)
    # NaN fails every comparison.
    if low > least and high <= POSITIVE_SLACK:
        return {}
    causes = {"missing": values.isnan(), "infinite": values.isinf()}
    there = values.isfinite() if trains is None else values.isfinite() & trains
    positive = there & (values > POSITIVE_SLACK)
    if 2 * int(positive.count_nonzero()) > int(there.count_nonzero()):
        own = values[there]
        if float(own.min()) >= 0:
            return causes | {"probability" if float(own.max()) <= 1 else "negated": there}
    return causes | {"placeholder": values <= least, "positive": values > POSITIVE_SLACK}


def _unscored_rows(
    holes: Mapping[str, Mapping[str, Tokens]], lists: Mapping[str, Lists], trainable: Int[Tensor, " b"], count: Count
) -> dict[str, Rows]:
    """Rows that a policy does not score at all, where two others do."""
    there: dict[str, Rows] = {}
    for name in POLICIES:
        scored = torch.full_like(trainable, name in lists, dtype=torch.bool)
        if causes := holes.get(name):
            scored = (count(torch.stack([*causes.values()]).any(0)) < trainable) | (trainable == 0)
        there[name] = scored
    rollout, old, current = there.values()
    compared = (rollout & (old | current)) | (old & current)
    unscored = {name: compared & ~there[name] for name in POLICIES if name in holes}
    return {name: rows for name, rows in unscored.items() if bool(rows.any())}


def _incomplete(name: str, x: Lists, keep: Tokens | None, count: Count) -> Rows | None:
    """Rows of which a field does not cover every token; None if there are none."""
    hole = x.missing
    if x.values.dtype.is_floating_point and len(x.values):
        if name in LOGPS:
            causes = [*_unusable(name, x.values, keep).values()]
            hole = torch.stack(causes).any(0) if causes else None
        else:
            low, high = (float(v) for v in torch.aminmax(x.values))
            finite = abs(low) < float("inf") and abs(high) < float("inf")
            hole = None if finite else ~x.values.isfinite()
    rows = None
    if hole is not None:
        rows = count(hole if keep is None else hole & keep) > 0
    if x.absent is not None:
        rows = x.absent if rows is None else rows | x.absent
    return rows if rows is not None and bool(rows.any()) else None


def _filled_in(logps: Mapping[str, Lists], trains: Tokens | None) -> dict[str, Tokens]:
    """Exact zeros that were filled in: where another policy finds too many of them unlikely.

    A token can be certain, and greedy ones are; the other policies then call it likely as well.
    """
    compared = {name: x for name, x in logps.items() if name in POLICIES}
    compared = compared if len(compared) > 1 else logps
    filled = {}
    for name, x in compared.items() if len(compared) > 1 else ():
        zero = x.values == 0 if trains is None else (x.values == 0) & trains
        if int(zero.count_nonzero()) < ZEROS:
            continue
        least = torch.stack([_likely(n, o.values) for n, o in compared.items() if n != name]).amin(0)
        odd = zero & (least < UNLIKELY)
        rows = _all_zero(x, zero, least)
        if int(odd.count_nonzero()) >= ZEROS:
            nearly = (x.values > NEARLY) & (x.values < 0)
            disputed = _share(nearly & (least < UNLIKELY), nearly)
            if _share(odd, zero) >= max(ODD_SHARE, ODD_TIMES * disputed):
                rows = rows | (x.per_row(odd) > 0)
        if bool(rows.any()):
            filled[name] = zero & torch.repeat_interleave(rows, x.lengths)
    return filled


def _likely(name: str, values: Tensor) -> Tensor:
    """Log-probs, 0 where there is none."""
    return values.where((values > _least(name)) & (values <= POSITIVE_SLACK), 0.0)


def _least(name: str) -> float:
    return UNSCORED_BELOW if name == "logp_rollout" else LOWEST


def _share(part: Tokens, whole: Tokens) -> float:
    """0 of fewer than `ZEROS`, of which a share says nothing."""
    n = int(whole.count_nonzero())
    return int(part.count_nonzero()) / n if n >= ZEROS else 0.0


def _all_zero(x: Lists, zero: Tokens, least: Tensor) -> Rows:
    """Rows of zeros alone, `ZEROS` or more, to which another policy gives less than 1/e."""
    alone = (x.lengths >= ZEROS) & (x.per_row(zero) == x.lengths)
    return alone & (x.per_row(least.double()) < -1.0)


def response_positions(cuts: Int[Tensor, " cuts"]) -> Int[Tensor, " n"]:
    """Place of every token in its row, from 0."""
    return torch.arange(int(cuts[-1])) - torch.repeat_interleave(cuts[:-1], cuts.diff())
