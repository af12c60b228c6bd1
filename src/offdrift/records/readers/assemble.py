"""Columns of a log as `Logged` batches of the tokens that can be compared.

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
    running      a column that falls, or stays, from token to token in nearly every row: sums of log-probs so far
    repeated     a column with one number at all tokens of a row, in nearly every row, where another policy has many

A token that a policy does not score is left out of every comparison, and its sequence stays. A row
that a policy does not score at all keeps its tokens for the policies that do. Fields beside these
log-probs cost no tokens: a row that they do not cover completely has none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from offdrift.logprobs import POSITIVE_SLACK, UNSCORED_BELOW
from offdrift.records.batch import Logged
from offdrift.records.readers.columns import Columns, Lists, Numbers
from offdrift.records.readers.files import BadRow
from offdrift.records.schema import BY_SEQUENCE, BY_TOKEN, COLUMNS, DIVERGENCES, EITHER, LOGPS, PADDING, POLICIES
from offdrift.segments import cumulative
from offdrift.texts import text_id

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
"""How many times the same share of nearly certain tokens that must be: policies that really disagree do so about both
kinds of token, and a column that was filled in has its zeros from nowhere."""

PAD_RUN = 4
"""Equal numbers in a row at the end of a response, in every column, from which on they may be padding."""
PAD_ROWS = 0.25
"""Share of the rows that end so in a padded log."""
PEEKED = 4096
"""Tokens that are looked at first."""
ROW_TOKENS, ROW_SHARE = 8, 0.95
"""Tokens of a row from which on it tells what its numbers are, and the share of such rows that must tell the same."""
NOTHING_BUT_ZEROS = 64
"""Tokens from which on a log in which no column has anything but zeros was filled with them."""

Tokens = Bool[Tensor, " n"]
Rows = Bool[Tensor, " b"]


@dataclass(frozen=True)
class Layout:
    """Places of the tokens of each row."""

    cuts: Int[Tensor, " cuts"]

    @cached_property
    def lengths(self) -> Int[Tensor, " _"]:
        """Tokens of each row."""
        return self.cuts.diff()

    def count(self, tokens: Bool[Tensor, " _"]) -> Int[Tensor, " _"]:
        """Return the number of a mask's tokens in each row."""
        return cumulative(tokens)[self.cuts].diff()

    def spread(self, rows: Bool[Tensor, " _"]) -> Bool[Tensor, " _"]:
        """The tokens of these rows."""
        return torch.repeat_interleave(rows, self.lengths)


@dataclass(frozen=True)
class Examined:
    """Tokens of some rows that can be compared, and the counts and causes of those that cannot."""

    keep: Tokens | None
    """Tokens that may train and that every policy of their row scores; None: all."""
    trainable: Int[Tensor, " b"]
    """Tokens of each row that may train."""
    unscored: Mapping[str, Int[Tensor, " b"]]
    """Of these, tokens that a policy does not score, by "FIELD/CAUSE"; a token that two policies do not score counts
    in both."""
    lacks: Mapping[str, Rows]
    """Rows without a field that others have."""


def examined(lists: Mapping[str, Lists], numbers: Mapping[str, Numbers], cuts: Int[Tensor, " cuts"]) -> Examined:
    """Find the tokens that can be compared; `lists`: fields per token, of equal lengths; `numbers`: per row."""
    layout = Layout(cuts)
    count, spread = layout.count, layout.spread
    trains = None
    if (mask := lists.get("mask")) is not None:
        trains = mask.values != 0 if mask.missing is None else (mask.values != 0) | mask.missing
        trains = None if bool(trains.all()) else trains
    trainable = layout.lengths if trains is None else count(trains)
    holes = _holes(lists, trains, spread)

    # A row lacks a policy that scores none of its tokens, where two others do.
    scored = {name: torch.full_like(trainable, name in lists, dtype=torch.bool) for name in POLICIES}
    for name in POLICIES:
        if causes := holes.get(name):
            scored[name] = (count(torch.stack([*causes.values()]).any(0)) < trainable) | (trainable == 0)
    compared = torch.stack([*scored.values()]).sum(0) >= 2
    lacks = {name: compared & ~scored[name] for name in POLICIES if name in holes}
    lacks = {name: rows for name, rows in lacks.items() if bool(rows.any())}

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

    others = {name: x for name, x in lists.items() if name not in (*POLICIES, "mask", "position")}
    lacks |= {name: rows for name, x in others.items() if (rows := uncovered(name, x, keep, layout)) is not None}
    lacks |= {name: gone for name, x in numbers.items() if bool((gone := x.missing()).any())}
    return Examined(keep, trainable, unscored, lacks)


def uncovered(name: str, x: Lists, keep: Tokens | None, layout: Layout) -> Rows | None:
    """Rows of which a field does not cover all tokens that are kept, and which then lack it; None if it covers all."""
    hole, rows = x.missing, x.absent
    if name in LOGPS:
        causes = [*_unusable(name, x.values, keep).values()]
        hole = torch.stack(causes).any(0) if causes else None
    elif x.values.dtype.is_floating_point and len(x.values):
        low, high = (abs(float(v)) for v in torch.aminmax(x.values))
        hole = None if low < float("inf") and high < float("inf") else ~x.values.isfinite()
    if hole is not None:
        some = layout.count(hole if keep is None else hole & keep) > 0
        rows = some if rows is None else rows | some
    return rows if rows is not None and bool(rows.any()) else None


def _holes(
    lists: Mapping[str, Lists], trains: Tokens | None, spread: Callable[[Rows], Tokens]
) -> dict[str, dict[str, Tokens]]:
    """By policy and cause, tokens that may train and that it does not score; one cause per token."""
    logps = {name: lists[name] for name in LOGPS if name in lists}
    zero, of_rows = _filled_in(logps, trains), _of_rows(logps, trains)
    holes: dict[str, dict[str, Tokens]] = {}
    for name, x in lists.items():
        causes: dict[str, Tokens] = {}
        if name == "mask" and x.missing is not None:
            causes = {"missing": x.missing}
        elif name in POLICIES:
            absent = {} if x.absent is None else {"absent": spread(x.absent)}
            filled = {"zero": zero[name]} if name in zero else {}
            causes = {**absent, **of_rows.get(name, {}), **_unusable(name, x.values, trains), **filled}
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
        present = values[there]
        if float(present.min()) >= 0:
            return causes | {"probability" if float(present.max()) <= 1 else "negated": there}
    return causes | {"placeholder": values <= least, "positive": values > POSITIVE_SLACK}


def padding(lists: Mapping[str, Lists], cuts: Int[Tensor, " cuts"], stated: Numbers | None = None) -> Tokens | None:
    """Tokens at the ends of rows that are padding: the same number in every column of log-probs, or in one of them and
    the same token; None if there is none.

    A log without a mask, or with one that leaves nothing out, would count them as tokens on which all agree, or one
    policy is certain. Zeros are certain tokens, too: where the token is not known, rows must be as long as many others,
    as padded ones are.

    Args:
        stated: lengths of the responses, where the log has them; rows that are no longer have no padding.
    """
    if (mask := lists.get("mask")) is not None and not bool(mask.values.all()):
        return None
    reaches = None if stated is None else (stated.values >= cuts.diff())[~stated.missing()]
    if reaches is not None and len(reaches) and bool(reaches.all()):
        return None
    policies = [lists[name].values for name in POLICIES if name in lists]
    if len(policies) < 2:
        return None
    if (pads := _constant_ends(policies, cuts, alike=True)) is not None:
        return pads
    tokens = [lists["tokens"].values] if "tokens" in lists else []
    ends = (_constant_ends([*tokens, x], cuts) for x in policies if tokens)
    return next((pads for pads in ends if pads is not None), None)


def _constant_ends(columns: list[Tensor], cuts: Int[Tensor, " cuts"], *, alike: bool = False) -> Tokens | None:
    """Tokens at the ends of rows that are the same in each column, in many rows; the last column is of log-probs.

    Args:
        alike: the columns are of log-probs that have the same number there.
    """
    lengths = cuts.diff()
    rows = (lengths >= PAD_RUN).nonzero().squeeze(-1)
    if len(rows) < 2:
        return None
    ends = cuts[1:][rows]
    pads = [x[ends - 1].mode().values for x in columns]
    last = ends[:, None] - torch.arange(1, PAD_RUN + 1)
    padded = torch.stack([(x[last] == pad).all(1) for x, pad in zip(columns, pads, strict=True)]).all(0)
    if not pads[-1] > LOWEST or int(padded.count_nonzero()) < max(2.0, PAD_ROWS * len(rows)):
        return None
    of_many_lengths = len(lengths[rows].unique()) > max(1.0, PAD_ROWS * len(rows))
    if alike and (len({float(pad) for pad in pads}) > 1 or (pads[-1] == 0 and of_many_lengths)):
        return None
    place = torch.arange(int(cuts[-1]))
    same = torch.stack([x == pad for x, pad in zip(columns, pads, strict=True)]).all(0)
    other = torch.where(same, -1, place)
    newest = torch.segment_reduce((other + 1).double(), "max", offsets=cuts, unsafe=True, initial=0.0).long()
    begins = torch.maximum(newest, cuts[:-1])  # behind the last token that is none
    # A row may end in a few tokens that look like padding and are none.
    begins = torch.where(cuts[1:] - begins < PAD_RUN, cuts[1:], begins) if not alike else begins
    found = place >= torch.repeat_interleave(begins, lengths)
    return None if bool(found.all()) or not bool(found.any()) else found


def _all_zero(policies: Mapping[str, Lists], trains: Tokens | None) -> bool:
    """Whether no policy has anything but zeros, on more tokens than can be certain: a mask that is upside down."""
    values = [x.values for x in policies.values()]
    for at in (slice(PEEKED), slice(None)):  # nearly every log has another number among the first
        part = [v[at] if trains is None else v[at][trains[at]] for v in values]
        if any(bool(v.any()) for v in part):
            return False
    return len(part[0]) >= NOTHING_BUT_ZEROS


def _of_rows(logps: Mapping[str, Lists], trains: Tokens | None) -> dict[str, dict[str, Tokens]]:
    """By policy and cause, columns whose rows show that they hold no log-probs of single tokens."""
    kinds = {name: _kind_of_rows(x, trains) for name, x in logps.items() if name in POLICIES and len(x.values)}
    wrong = (
        {"running", "repeated"} if {"running", "varied"} & set(kinds.values()) else set()
    )  # else a log of one number
    return {
        name: {kind: torch.ones_like(logps[name].values, dtype=torch.bool)}
        for name, kind in kinds.items()
        if kind in wrong and kind is not None
    }


def _kind_of_rows(x: Lists, trains: Tokens | None) -> str | None:
    """Tell whether nearly all rows of a column are "running", "repeated" or "varied"; None if they are several, or hold
    NaN, which the first rows tell."""
    if trains is not None:
        x = x.without(~trains, cumulative(trains)[x.cuts])
    long = x.lengths >= ROW_TOKENS
    for end in (PEEKED, len(x.values)):
        cuts = x.cuts[x.cuts <= max(end, int(x.cuts[1]))]
        chosen = long[: len(cuts) - 1]
        if not bool(chosen.any()):
            return None
        step = x.values[: int(cuts[-1])].diff(append=x.values[:1])
        inner = torch.ones_like(step, dtype=torch.bool)
        inner[cuts[1:] - 1] = False
        rising = Layout(cuts).count(inner & ~(step <= 0))
        changed = Layout(cuts).count(inner & (step != 0))
        first, last = (x.values[at] for at in (cuts[:-1].clamp(max=len(x.values) - 1), cuts[1:] - 1))
        running = (rising == 0) & (last < first - 1)
        repeated = (changed == 0) & (first < 0)
        enough = ROW_SHARE * int(chosen.count_nonzero())
        varied = (changed > 0) & (rising > 0) & (Layout(cuts).count(inner & step.isnan()) == 0)
        rows = {"running": running & chosen, "repeated": repeated & chosen, "varied": varied & chosen}
        kind = next((kind for kind, of in rows.items() if int(of.count_nonzero()) >= enough), None)
        if kind is None:
            return None
    return kind


def _filled_in(logps: Mapping[str, Lists], trains: Tokens | None) -> dict[str, Tokens]:
    """Exact zeros that were filled in: another policy finds too many of them unlikely; certain tokens it does not."""
    compared = {name: x for name, x in logps.items() if name in POLICIES}
    compared = compared if len(compared) > 1 else logps
    filled = {}
    if compared and _all_zero(compared, trains):
        return {name: torch.ones_like(x.values, dtype=torch.bool) for name, x in compared.items()}
    for name, x in compared.items() if len(compared) > 1 else ():
        if not _may_be_filled_in(name, compared):
            continue
        # Only where the zeros are: most columns have few, and a log has many tokens.
        zero = (x.values == 0 if trains is None else (x.values == 0) & trains).nonzero().squeeze(-1)
        if len(zero) < ZEROS:
            continue
        others = {other: y.values for other, y in compared.items() if other != name}
        lowest, row, b = _lowest(others, zero), x.row_of(zero), len(x.lengths)
        # Rows of zeros alone, to which another policy gives less than 1/e.
        alone = (x.lengths >= ZEROS) & (torch.bincount(row, minlength=b) == x.lengths)
        rows = alone & (torch.bincount(row, lowest.double(), b) < -1.0)
        odd = lowest < UNLIKELY
        if int(odd.count_nonzero()) >= ZEROS:
            nearly = ((x.values > NEARLY) & (x.values < 0)).nonzero().squeeze(-1)
            disputed = _share(_lowest(others, nearly) < UNLIKELY)
            if _share(odd) >= max(ODD_SHARE, ODD_TIMES * disputed):
                rows = rows | (torch.bincount(row[odd], minlength=b) > 0)
        if bool(rows.any()):
            filled[name] = torch.zeros_like(x.values, dtype=torch.bool).index_fill_(0, zero[rows[row]], True)
    return filled


def _may_be_filled_in(name: str, compared: Mapping[str, Lists]) -> bool:
    """Whether a look at all tokens, by numpy, leaves it open that zeros of this policy were filled in.

    It takes a row of zeros alone, or that another policy finds `ZEROS` of them, and `ODD_SHARE` of all, unlikely.
    """
    x = compared[name]
    zero, starts = x.values.numpy() == 0, x.cuts[:-1][x.lengths >= ZEROS].numpy()
    others = (y.values.numpy() for other, y in compared.items() if other != name)
    odd = sum(np.count_nonzero(zero & (y < UNLIKELY)) for y in others)
    if odd >= max(ZEROS, ODD_SHARE * np.count_nonzero(zero)):
        return True
    return bool(zero[starts].any() and _all_in(zero, x).any())


def _all_in(tokens: np.ndarray, x: Lists) -> np.ndarray:
    """For each row that has a token: true if all its tokens are in the mask `tokens`."""
    starts = x.cuts[:-1][x.lengths > 0].numpy()
    return np.logical_and.reduceat(tokens, starts) if len(starts) else tokens[:0]


def _lowest(policies: Mapping[str, Tensor], tokens: Int[Tensor, " k"]) -> Tensor:
    """The least log-prob that any of the policies gives each of these tokens; 0 where none scores it."""
    chosen = ((name, values[tokens]) for name, values in policies.items())
    return torch.stack([x.where((x > _least(name)) & (x <= POSITIVE_SLACK), 0.0) for name, x in chosen]).amin(0)


def _least(name: str) -> float:
    return UNSCORED_BELOW if name == "logp_rollout" else LOWEST


def _share(part: Bool[Tensor, " k"]) -> float:
    """0 of fewer than `ZEROS`, of which a share says nothing."""
    return int(part.count_nonzero()) / len(part) if len(part) >= ZEROS else 0.0


# Columns of a log as batches: rows that do not fit are named, those that lack a field stand apart.

PATTERNS = 8
"""Sets of fields that rows are told apart by; of more, the field that most rows lack is left out."""

DERIVED = ("step", "response_lengths", "group_ids")
"""Fields per sequence that every row gets, whether or not the log has their columns."""

COUNTED = tuple(f for f in BY_SEQUENCE if f.column and f.is_whole and f.name not in DERIVED)
"""Integers per sequence that some rows may lack; a float that a row lacks is NaN."""

STEP_STRIDE = 0x9E3779B97F4A7C15 - 2**64
"""An odd 64-bit number: `group + step * STEP_STRIDE` keeps equal ids of different steps apart."""


def assemble(columns: Columns, *, file: str, step: int | None = None) -> tuple[tuple[Logged, ...], tuple[BadRow, ...]]:
    """The rows as batches, those that lack a field apart, and the rows that are not usable.

    Rows that state no step are of step `step`; None: of 0 if no row states one.
    """
    lists = {n: x for n, x in columns.lists.items() if x.absent is None or not x.absent.all()}
    columns, bad = _usable(replace(columns, lists=lists), file, step)
    if len(columns.row) == 0:
        return (), bad
    batch, lacks = _logged(columns, step)
    return tuple(_apart(batch, lacks)), bad


def _usable(columns: Columns, file: str, step: int | None) -> tuple[Columns, tuple[BadRow, ...]]:
    """Rows without a problem, and the others, each with its first problem."""
    found = [*problems(columns, step)]
    wrong = torch.zeros(len(columns.row), dtype=torch.bool)
    for problem in found:
        wrong |= problem.rows
    bad = []
    for i in wrong.nonzero().squeeze(-1).tolist():
        reason = next(problem.reason(i) for problem in found if problem.rows[i])
        bad.append(BadRow(file, int(columns.row[i]), reason))
    return (columns.rows(~wrong), tuple(bad)) if bad else (columns, ())


class Problem(NamedTuple):
    """Rows that are not usable, and why, by their place."""

    rows: Rows
    reason: Callable[[int], str]


def problems(columns: Columns, step: int | None) -> Iterator[Problem]:
    """Numbers that cannot be, lists of unequal length, and no step in a log that has steps; the gravest first."""

    def out_of_range(name: str, values: Tensor, i: int) -> str:
        bounds = f"which is not between {COLUMNS[name].least} and {COLUMNS[name].most}"
        return f"{name} holds {int(values[i])}, {bounds}; --columns {name}= leaves the column out"

    def unequal(i: int) -> str:
        listed = columns.lists.items()
        lengths = {n: int(x.lengths[i]) for n, x in listed if x.absent is None or not bool(x.absent[i])}
        described = ", ".join(f"{name} {n}" for name, n in lengths.items())
        if not lengths:
            return f"none of {', '.join(columns.lists)} is there"
        short = min(lengths, key=lambda n: lengths[n])
        last = (
            f" {short} is one short: its log-prob of the last token (the end of the text) or of the first is missing, "
            "so put null in its place, and no other value moves."
            if sorted(lengths.values())[:2] == [max(lengths.values()) - 1, max(lengths.values())]
            else ""
        )
        return f"lists of unequal length ({described}); all lists of a row describe its response tokens.{last}"

    for name, (rows, values) in _impossible(columns).items():
        yield Problem(rows, partial(out_of_range, name, values))
    if columns.lists:
        yield Problem(columns_differ(columns), unequal)
    if step is None and "step" in columns.numbers:
        stepless = columns.numbers["step"].missing()
        yield Problem(stepless & ~stepless.all(), lambda _: "the row has no step, though the log has a column for it")


def columns_differ(columns: Columns) -> Rows:
    """Rows with lists of different lengths, or none at all."""
    listed = columns.lists
    wrong = torch.zeros(len(columns.row), dtype=torch.bool)
    longest = torch.stack([x.lengths for x in listed.values()]).amax(0)
    for x in listed.values():
        differs = x.lengths != longest
        wrong |= differs if x.absent is None else differs & ~x.absent
    absent = [x.absent for x in listed.values() if x.absent is not None]
    if len(absent) == len(listed):
        nothing, length = torch.stack(absent).all(0), columns.numbers.get("response_length")
        # A row may say that its response has no token.
        wrong |= nothing if length is None else nothing & (length.missing() | (length.values != 0))
    return wrong


def _impossible(columns: Columns) -> dict[str, tuple[Rows, Int[Tensor, " b"]]]:
    """By field, rows with an integer that cannot be, and the one that is farthest off; masked tokens do not count."""
    mask, found = columns.lists.get("mask"), {}
    for name, f in COLUMNS.items():
        x = columns.lists.get(name) or columns.numbers.get(name)
        if f.least is None or x is None or not len(x.values):
            continue
        low, high = torch.aminmax(x.values.nan_to_num(f.least) if x.values.is_floating_point() else x.values)
        if low >= f.least and high <= f.most:
            continue
        values = x.values.nan_to_num(f.least).long()
        off = torch.where(values < f.least, values, values.where(values > f.most, 0))
        if isinstance(x, Lists):
            if mask is not None and torch.equal(mask.cuts, x.cuts):
                off = off.where(mask.values != 0, 0)
            off = off if x.missing is None else off.masked_fill(x.missing, 0)
            b = len(x.lengths)
            row = torch.repeat_interleave(torch.arange(b), x.lengths)
            none = torch.zeros(b, dtype=torch.int64)
            least, most = (none.scatter_reduce(0, row, off, how) for how in ("amin", "amax"))
            off = torch.where(least < 0, least, most)
        if bool((rows := off != 0).any()):
            found[name] = rows, off
    return found


def _logged(columns: Columns, step: int | None) -> tuple[Logged, dict[str, Rows]]:
    """All rows as one batch, and which of them lack a field."""
    b = len(columns.row)
    lengths = torch.zeros(b, dtype=torch.int64)
    for x in columns.lists.values():
        lengths = torch.maximum(lengths, x.lengths)
    lists = token_lists(columns, lengths)
    counted = {f.column: columns.numbers[f.column] for f in COUNTED if f.column in columns.numbers}
    cuts, unscored = cumulative(lengths), {}
    if (pads := padding(lists, cuts, columns.numbers.get("response_length"))) is not None:
        unscored = {PADDING: Layout(cuts).count(pads)}
        cuts = cumulative(~pads)[cuts]
        lists = {name: x.without(pads, cuts) for name, x in lists.items()}
        lengths = cuts.diff()
    usable = examined(lists, counted, cuts)
    keep = usable.keep
    position = positions(lists.get("position"), cuts, keep)
    if keep is not None:
        cuts = cumulative(keep)[cuts]
    by_token = [f for f in BY_TOKEN if f.column in lists and f.column != "position"]
    values: dict[str, Any] = {f.name: lists[f.column].kept(keep) for f in by_token}
    values |= sequence_fields(columns, counted)
    steps = torch.full((b,), step or 0)
    if (stated := columns.numbers.get("step")) is not None:
        steps = torch.where(stated.missing(), steps, stated.whole())
    unit = "token"
    if "response_length" in columns.numbers:
        lengths = torch.maximum(columns.numbers["response_length"].whole(), lengths)
    elif not columns.lists and "completion" in columns.texts:
        lengths, unit = torch.tensor([len(t or "") for t in columns.texts["completion"]]), "character"
    batch = Logged(
        cu_seqlens=cuts,
        step=steps,
        row=columns.row,
        response_lengths=lengths,
        length_unit=unit,
        group_ids=_groups(columns, steps),
        position=position,
        divergences={f.name: lists[f.column].kept(keep) for f in DIVERGENCES if f.column in lists},
        trainable=usable.trainable,
        unscored={**usable.unscored, **unscored},
        **values,
    )
    return batch, dict(usable.lacks)


def token_lists(columns: Columns, lengths: Int[Tensor, " b"]) -> dict[str, Lists]:
    """Fields per token, each as long as the response of its row; numbers per row are repeated where both may stand."""
    lists = {name: x.filled(lengths) for name, x in columns.lists.items()}
    if "mask" in lists and (unmasked := lists["mask"].absent) is not None:
        # A row without a mask trains on every token.
        rows = torch.repeat_interleave(unmasked, lengths)
        trains, holes = lists["mask"].values.bool() | rows, lists["mask"].missing
        holes = None if holes is None else holes & ~rows
        lists["mask"] = Lists(trains.long(), lists["mask"].cuts, None, holes)
    for name in EITHER:
        if name in columns.numbers and name not in lists:
            lists[name] = columns.numbers[name].per_token(lengths, whole=COLUMNS[name].is_whole)
    return lists


def positions(stated: Lists | None, cuts: Int[Tensor, " cuts"], keep: Tokens | None) -> Int[Tensor, " _"] | None:
    """Place in its response of each token that is kept, counted where a row does not state them all; None: in order."""
    position = None if stated is None else stated.values
    if stated is None and keep is not None:
        position = places_in_rows(cuts)
    elif stated is not None and stated.missing is not None:
        unknown = torch.repeat_interleave(stated.per_row(stated.missing) > 0, stated.lengths)
        position = places_in_rows(cuts).where(unknown, stated.values)
    return position if position is None or keep is None else position[keep]


def places_in_rows(cuts: Int[Tensor, " cuts"]) -> Int[Tensor, " n"]:
    """Place of each token in its row, from 0."""
    return torch.arange(int(cuts[-1])) - torch.repeat_interleave(cuts[:-1], cuts.diff())


def sequence_fields(columns: Columns, counted: Mapping[str, Numbers]) -> dict[str, Any]:
    """Fields per sequence by name: texts, integers, and floats with NaN where a row has none."""
    values: dict[str, Any] = {}
    for f in BY_SEQUENCE:
        if f.is_text and (texts := columns.texts.get(f.column)) is not None:
            values[f.name] = tuple(t or "" for t in texts)
        elif f.column in counted:
            values[f.name] = counted[f.column].whole()
        elif (x := columns.numbers.get(f.column)) and not (f.is_whole or x.missing().all()):
            values[f.name] = x.values.float().masked_fill(x.missing(), float("nan"))
    return values


def _groups(columns: Columns, steps: Int[Tensor, " b"]) -> Int[Tensor, " b"] | None:
    """The log's own groups, or else equal prompts, within a step."""
    if "group_id" in columns.numbers:
        stated = columns.numbers["group_id"]
        ids, absent = stated.whole(), stated.missing()
    elif (texts := columns.texts.get("group_id") or columns.texts.get("prompt")) is not None:
        ids = torch.tensor([0 if t is None else text_id(t) for t in texts])
        absent = torch.tensor([t is None for t in texts])
    else:
        return None
    if bool(absent.all()):
        return None
    return torch.where(absent, 2**62 + columns.row, ids) + steps * STEP_STRIDE


def _apart(batch: Logged, lacks: dict[str, Rows]) -> Iterator[Logged]:
    """Sequences by the fields that they have, those of the first sequence first."""

    def patterns() -> Int[Tensor, " b"]:
        """A number for the set of fields that each sequence lacks."""
        sets = torch.zeros(batch.num_sequences, dtype=torch.int64)
        for place, rows in enumerate(lacks.values()):
            sets |= rows.long() << place
        return sets

    left_out: set[str] = set()
    # A sequence without tokens lacks no field of theirs, and is kept with the most.
    some = batch.cu_seqlens.diff() > 0
    by_token = {name: x for name, x in lacks.items() if COLUMNS[name].by_token}
    lacks |= {n: x & some if bool((~x & some).any()) else x | ~some for n, x in by_token.items()}
    while len((sets := patterns()).unique()) > PATTERNS:
        most = max((n for n in lacks if n not in POLICIES), key=lambda n: int(lacks[n].sum()))
        left_out.add(most)
        del lacks[most]
    for i in dict.fromkeys(sets.tolist()):
        without = left_out.union(n for place, n in enumerate(lacks) if i >> place & 1)
        rows = (sets == i).nonzero().squeeze(-1)
        part = batch if len(rows) == len(sets) else batch.select(rows)
        exact = {name: x for name, x in part.divergences.items() if name not in without}
        absent: dict[str, Any] = {COLUMNS[c].name: None for c in without if c not in part.divergences}
        yield replace(part, divergences=exact, **absent)
