"""Columns of a log to `Logged`: rows that do not fit are named, those that lack a field stand apart."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from offdrift.records.batch import Logged, text_id
from offdrift.records.readers.columns import Columns, Lists, cumulative
from offdrift.records.readers.comparable import examined, response_positions
from offdrift.records.readers.types import BadRow
from offdrift.records.schema import BY_SEQUENCE, BY_TOKEN, COLUMNS, DIVERGENCES, EITHER, POLICIES

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

    Args:
        columns: as decoded.
        file: for the messages.
        step: of rows that do not say; None: 0 if no row says.
    """
    lists = {n: x for n, x in columns.lists.items() if x.absent is None or not x.absent.all()}
    columns, bad = _usable(replace(columns, lists=lists), file, step)
    return (_logged(columns, step) if len(columns.row) else ()), bad


def _usable(columns: Columns, file: str, step: int | None) -> tuple[Columns, tuple[BadRow, ...]]:
    wrong = torch.zeros(len(columns.row), dtype=torch.bool)
    listed = columns.lists
    if listed:
        longest = torch.stack([x.lengths for x in listed.values()]).amax(0)
        for x in listed.values():
            differs = x.lengths != longest
            wrong |= differs if x.absent is None else differs & ~x.absent
        if all(x.absent is not None for x in listed.values()):
            nothing = torch.stack([x.absent for x in listed.values() if x.absent is not None]).all(0)
            wrong |= nothing & ~_empty(columns)
    stepless = torch.zeros_like(wrong)
    if step is None and "step" in columns.numbers:
        stepless = columns.numbers["step"].missing()
        if bool(stepless.all()):
            stepless = torch.zeros_like(wrong)
    bad = tuple(
        BadRow(file, int(columns.row[i]), _reason(listed, i, bool(wrong[i])))
        for i in (wrong | stepless).nonzero().squeeze(-1).tolist()
    )
    return (columns.rows(~(wrong | stepless)), bad) if bad else (columns, bad)


def _empty(columns: Columns) -> Bool[Tensor, " b"]:
    """Rows that say that their response has no token."""
    stated = columns.numbers.get("response_length")
    if stated is None:
        return torch.zeros(len(columns.row), dtype=torch.bool)
    return ~stated.missing() & (stated.values == 0)


def _reason(lists: dict[str, Lists] | object, i: int, wrong: bool) -> str:
    assert isinstance(lists, dict)
    if not wrong:
        return "the row has no step, though the log has a column for it"
    lengths = {name: int(x.lengths[i]) for name, x in lists.items() if x.absent is None or not bool(x.absent[i])}
    if not lengths:
        return f"none of {', '.join(lists)} is there"
    described = ", ".join(f"{name} {n}" for name, n in lengths.items())
    return f"lists of unequal length ({described}); all lists of a row describe its response tokens"


def _logged(columns: Columns, step: int | None) -> tuple[Logged, ...]:
    b = len(columns.row)
    lengths = torch.zeros(b, dtype=torch.int64)
    for x in columns.lists.values():
        lengths = torch.maximum(lengths, x.lengths)
    lists = {name: x.filled(lengths) for name, x in columns.lists.items()}
    if "mask" in lists and (unmasked := lists["mask"].absent) is not None:
        # A row without a mask trains on every token.
        rows = torch.repeat_interleave(unmasked, lengths)
        trains, holes = lists["mask"].values.bool() | rows, lists["mask"].missing
        holes = None if holes is None else holes & ~rows
        lists["mask"] = Lists(trains.long(), lists["mask"].cuts, None, holes)
    for name in EITHER:
        if name in columns.numbers and name not in lists:
            whole = COLUMNS[name].is_whole
            lists[name] = columns.numbers[name].per_token(lengths, whole=whole)
    counted = {f.column: columns.numbers[f.column] for f in COUNTED if f.column in columns.numbers}
    cuts = cumulative(lengths)
    usable = examined(lists, counted, cuts)
    keep = usable.keep
    position = _positions(lists.get("position"), cuts, always=keep is not None)
    if keep is not None:
        position = None if position is None else position[keep]
        cuts = torch.cat([cuts.new_zeros(1), keep.cumsum(0)])[cuts]

    values: dict[str, Any] = {}
    for f in BY_TOKEN:
        if f.column in lists and f.column != "position":
            values[f.name] = lists[f.column].kept(keep)
    for f in BY_SEQUENCE:
        if f.is_text and (texts := columns.texts.get(f.column)) is not None:
            values[f.name] = tuple(t or "" for t in texts)
        elif f.column in counted:
            values[f.name] = counted[f.column].whole()
        elif (x := columns.numbers.get(f.column)) and not (f.is_whole or x.missing().all()):
            values[f.name] = x.values.float().masked_fill(x.missing(), float("nan"))
    steps = _steps(columns, step)
    responses, unit = _response_lengths(columns, lengths)
    batch = Logged(
        cu_seqlens=cuts,
        step=steps,
        row=columns.row,
        response_lengths=responses,
        length_unit=unit,
        group_ids=_groups(columns, steps),
        position=position,
        divergences={f.name: lists[f.column].kept(keep) for f in DIVERGENCES if f.column in lists},
        trainable=usable.trainable,
        unscored=usable.unscored,
        **values,
    )
    return tuple(_apart(batch, dict(usable.lacks)))


def _positions(stated: Lists | None, cuts: Int[Tensor, " cuts"], *, always: bool) -> Int[Tensor, " n"] | None:
    """Places of tokens in their responses: as stated, and counted where a row does not say."""
    if stated is None:
        return response_positions(cuts) if always else None
    if stated.missing is None:
        return stated.values
    unknown = torch.repeat_interleave(stated.per_row(stated.missing) > 0, stated.lengths)
    return response_positions(cuts).where(unknown, stated.values)


def _apart(batch: Logged, lacks: dict[str, Bool[Tensor, " b"]]) -> Iterator[Logged]:
    """Sequences by the fields that they have, those of the first sequence first."""
    left_out: set[str] = set()
    # A sequence without tokens lacks no field of theirs, and is kept with the most.
    some = batch.cu_seqlens.diff() > 0
    by_token = {name: x for name, x in lacks.items() if COLUMNS[name].by_token}
    lacks |= {n: x & some if bool((~x & some).any()) else x | ~some for n, x in by_token.items()}
    while len((patterns := _sets(lacks, batch.num_sequences)).unique()) > PATTERNS:
        most = max((n for n in lacks if n not in POLICIES), key=lambda n: int(lacks[n].sum()))
        left_out.add(most)
        del lacks[most]
    for i in dict.fromkeys(patterns.tolist()):
        without = left_out.union(n for place, n in enumerate(lacks) if i >> place & 1)
        rows = (patterns == i).nonzero().squeeze(-1)
        part = batch if len(rows) == len(patterns) else batch.select(rows)
        yield _without(part, without) if without else part


def _sets(lacks: Mapping[str, Bool[Tensor, " b"]], b: int) -> Int[Tensor, " b"]:
    """A number for the set of fields that each sequence lacks."""
    patterns = torch.zeros(b, dtype=torch.int64)
    for place, rows in enumerate(lacks.values()):
        patterns |= rows.long() << place
    return patterns


def _without(batch: Logged, columns: Collection[str]) -> Logged:
    exact = {name: x for name, x in batch.divergences.items() if name not in columns}
    absent = {COLUMNS[c].name: None for c in columns if c not in batch.divergences}
    return replace(batch, divergences=exact, **absent)


def _steps(columns: Columns, step: int | None) -> Int[Tensor, " b"]:
    default = torch.full((len(columns.row),), step or 0)
    if "step" not in columns.numbers:
        return default
    stated = columns.numbers["step"]
    return torch.where(stated.missing(), default, stated.whole())


def _response_lengths(columns: Columns, lengths: Int[Tensor, " b"]) -> tuple[Int[Tensor, " b"], str]:
    if "response_length" in columns.numbers:
        return torch.maximum(columns.numbers["response_length"].whole(), lengths), "token"
    if not columns.lists and "completion" in columns.texts:
        return torch.tensor([len(t or "") for t in columns.texts["completion"]]), "character"
    return lengths, "token"


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
