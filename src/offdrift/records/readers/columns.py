"""Rows of a log as columns: the one shape that every reader decodes to."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from offdrift.records.readers.files import BadRow
from offdrift.records.schema import COLUMNS, LISTS, LOGPS, LogField
from offdrift.segments import cumulative


@dataclass(frozen=True)
class Lists:
    """A list of numbers per row, flat."""

    values: Shaped[Tensor, " n"]
    """Missing floats are NaN."""
    cuts: Int[Tensor, " cuts"]
    absent: Bool[Tensor, " b"] | None = None
    """Rows that have no such list; their length is 0."""
    missing: Bool[Tensor, " n"] | None = None
    """Missing integers."""

    @property
    def lengths(self) -> Int[Tensor, " b"]:
        return self.cuts.diff()

    def per_row(self, tokens: Shaped[Tensor, " n"]) -> Shaped[Tensor, " b"]:
        """The sum in each row of a number, or the count of a truth, per token."""
        return torch.cat([tokens.new_zeros(1), tokens.cumsum(0)])[self.cuts].diff()

    def row_of(self, tokens: Int[Tensor, " k"]) -> Int[Tensor, " k"]:
        """The row of each token, by its place in `values`."""
        return torch.searchsorted(self.cuts, tokens, right=True) - 1

    def rows(self, keep: Bool[Tensor, " b"]) -> Lists:
        """The rows that are True in `keep`."""
        lengths = self.lengths
        kept = torch.repeat_interleave(keep, lengths)
        return Lists(
            self.values[kept],
            cumulative(lengths[keep]),
            None if self.absent is None else self.absent[keep],
            None if self.missing is None else self.missing[kept],
        )

    def kept(self, keep: Bool[Tensor, " n"] | None) -> Shaped[Tensor, " m"]:
        """The values that are True in `keep`, or all of them."""
        return self.values if keep is None else self.values[keep]

    def without(self, tokens: Bool[Tensor, " n"], cuts: Int[Tensor, " cuts"]) -> Lists:
        """All but these tokens, which leaves rows that are cut at `cuts`."""
        missing = None if self.missing is None else self.missing[~tokens]
        return Lists(self.values[~tokens], cuts, self.absent, missing)

    def filled(self, lengths: Int[Tensor, " b"]) -> Lists:
        """With a list of missing values in every row that has none; `absent` still says which."""
        if self.absent is None or not bool(self.absent.any()):
            return replace(self, absent=None)
        there = torch.repeat_interleave(~self.absent, lengths)
        whole = self.values.dtype.is_floating_point
        values = self.values.new_full((len(there),), float("nan") if whole else 0)
        values[there] = self.values
        missing = ~there
        if self.missing is not None:
            missing[there] = self.missing
        return Lists(values, cumulative(lengths), self.absent, None if whole else missing)


@dataclass(frozen=True)
class Numbers:
    """A number per row."""

    values: Shaped[Tensor, " b"]
    """Missing floats are NaN."""
    absent: Bool[Tensor, " b"] | None = None
    """Missing integers."""

    def rows(self, keep: Bool[Tensor, " b"]) -> Numbers:
        """The rows that are True in `keep`."""
        return Numbers(self.values[keep], None if self.absent is None else self.absent[keep])

    def missing(self) -> Bool[Tensor, " b"]:
        """Rows without the number."""
        absent = self.values.isnan()
        return absent if self.absent is None else absent | self.absent

    def whole(self) -> Int[Tensor, " b"]:
        """As integers, 0 where missing."""
        return self.values.masked_fill(self.missing(), 0).long()

    def per_token(self, lengths: Int[Tensor, " b"], *, whole: bool) -> Lists:
        """Repeated for every token of rows of these lengths; `whole`: as integers."""
        missing = torch.repeat_interleave(self.missing(), lengths) if whole else None
        values = torch.repeat_interleave(self.whole() if whole else self.values, lengths)
        return Lists(values, cumulative(lengths), None, missing)


@dataclass(frozen=True)
class Columns:
    """`b` rows by column of `records.schema`."""

    row: Int[Tensor, " b"]
    """Number of each row in its file, from 1."""
    lists: Mapping[str, Lists] = field(default_factory=dict)
    numbers: Mapping[str, Numbers] = field(default_factory=dict)
    texts: Mapping[str, Sequence[str | None]] = field(default_factory=dict)

    def rows(self, keep: Bool[Tensor, " b"]) -> Columns:
        """The rows that are True in `keep`."""
        if bool(keep.all()):
            return self
        chosen = keep.tolist()
        return Columns(
            self.row[keep],
            {name: x.rows(keep) for name, x in self.lists.items()},
            {name: x.rows(keep) for name, x in self.numbers.items()},
            {name: [t for t, k in zip(x, chosen, strict=True) if k] for name, x in self.texts.items()},
        )


def joined(parts: Sequence[Columns]) -> Columns | None:
    """Parts with the same columns, one after another; None if there are none."""
    if len(parts) < 2:
        return parts[0] if parts else None

    def lists(name: str) -> Lists:
        columns = [p.lists[name] for p in parts]
        return Lists(
            torch.cat([x.values for x in columns]),
            cumulative(torch.cat([x.lengths for x in columns])),
            _masks([(x.absent, len(x.cuts) - 1) for x in columns]),
            _masks([(x.missing, len(x.values)) for x in columns]),
        )

    def numbers(name: str) -> Numbers:
        columns = [p.numbers[name] for p in parts]
        return Numbers(torch.cat([x.values for x in columns]), _masks([(x.absent, len(x.values)) for x in columns]))

    return Columns(
        torch.cat([p.row for p in parts]),
        {name: lists(name) for name in parts[0].lists},
        {name: numbers(name) for name in parts[0].numbers},
        {name: [t for p in parts for t in p.texts[name]] for name in parts[0].texts},
    )


def _masks(parts: Sequence[tuple[Bool[Tensor, " s"] | None, int]]) -> Bool[Tensor, " s"] | None:
    if all(mask is None for mask, _ in parts):
        return None
    return torch.cat([torch.zeros(n, dtype=torch.bool) if m is None else m for m, n in parts])


# Rows of Python values (decoded JSON, unpickled tensors) as columns.

Row = Mapping[str, Any]
"""Values by field of the plain schema."""

Conversion = (ValueError, TypeError, OverflowError, RecursionError)

LARGE = 2.0**63
"""What no 64-bit integer reaches."""


def pack(rows: Sequence[Row], numbers: Sequence[int], file: str) -> tuple[Columns, list[BadRow]]:
    """Rows (by field; None is missing) and their numbers in the file as columns, without those of a wrong kind."""
    # A column that has the name of a list per token, and a list in no row, is something else.
    names = {name for row in rows for name in LISTS if row.get(name) is not None}
    single = {n for n in names if not any(_is_list(row.get(n)) for row in rows)}
    if len(single & set(LOGPS)) > 1:
        reason = (
            f"{' and '.join(sorted(single & set(LOGPS)))} are one number each: a row here seems to be one token, and"
        )
        reason += " has to be one response, with one list per column (group the rows by response)"
        return _columns([], []), [BadRow(file, n, reason) for n in numbers]
    if single:
        rows = [{name: x for name, x in row.items() if name not in single} for row in rows]
    try:
        return _columns(rows, numbers), []
    except Conversion:
        pass
    # A value of some row is of the wrong kind: look for it row by row.
    good: list[int] = []
    bad: list[BadRow] = []
    for i, row in enumerate(rows):
        try:
            _columns([row], [numbers[i]])
            good.append(i)
        except Conversion as e:
            bad.append(BadRow(file, numbers[i], str(e)))
    return _columns([rows[i] for i in good], [numbers[i] for i in good]), bad


def _columns(rows: Sequence[Row], numbers: Sequence[int]) -> Columns:
    names = {name for row in rows for name, value in row.items() if value is not None}
    lists: dict[str, Lists] = {}
    single: dict[str, Numbers] = {}
    texts: dict[str, list[str | None]] = {}
    for name, f in COLUMNS.items():
        if name not in names:
            continue
        values = [row.get(name) for row in rows]
        if f.is_text or (f.text_ids and any(isinstance(v, str) for v in values)):
            texts[name] = [text_of(v) for v in values]
        elif f.per == "token":
            lists[name] = _lists(name, values)
        elif f.by_token and any(_is_list(v) for v in values):
            lists[name] = _lists(name, spread_over_tokens(values, rows))
        else:
            single[name] = _numbers(name, f, values)
    return Columns(torch.tensor(numbers, dtype=torch.int64), lists, single, texts)


def spread_over_tokens(values: Sequence[Any], rows: Sequence[Row]) -> list[Any]:
    """Return lists as they are; single numbers among them stand for every token of their row."""
    lengths = (max((len(v) for n, v in row.items() if n in LISTS and _is_list(v)), default=0) for row in rows)
    return [v if v is None or _is_list(v) else [v] * n for v, n in zip(values, lengths, strict=True)]


def text_of(value: Any) -> str | None:
    """A text, the contents of a list of chat messages, or anything else as JSON."""
    if value is None or (isinstance(value, str) and value.isascii()):
        return value
    if isinstance(value, list) and all(isinstance(m, dict) and "content" in m for m in value):
        return "\n".join(text_of(m["content"]) or "" for m in value)
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    # Model output may hold lone surrogates, which no output stream takes.
    return text.encode("utf-8", "replace").decode()


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple | np.ndarray | torch.Tensor)


def _shown(value: Any) -> str:
    excerpt = repr(value)
    return f"{excerpt[:40]}{'...' if len(excerpt) > 40 else ''} ({type(value).__name__})"


def _lists(name: str, values: list[Any]) -> Lists:
    wrong = next((v for v in values if v is not None and not _is_list(v)), None)
    if wrong is not None:
        raise TypeError(
            f"{name} is {_shown(wrong)}, expected a list of numbers; --columns {name}= leaves the column out"
        )
    parts: list[Any] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            value = (value.detach().float() if value.dtype == torch.bfloat16 else value.detach()).numpy()
        if isinstance(value, np.ndarray) and value.ndim != 1:
            raise ValueError(f"expected a list of numbers, got an array of shape {value.shape}")
        if value is not None:
            parts.append(value)
    flat, missing = _array(name, parts)
    absent = [v is None for v in values]
    return Lists(
        torch.from_numpy(flat),
        cumulative(torch.tensor([0 if v is None else len(v) for v in values], dtype=torch.int64)),
        torch.tensor(absent) if any(absent) else None,
        None if missing is None else torch.from_numpy(missing),
    )


def _array(name: str, parts: list[Any]) -> tuple[np.ndarray, np.ndarray | None]:
    """The parts as one array: float32 with NaN for holes, or int64 and where the holes are."""
    whole = COLUMNS[name].is_whole
    if parts and all(isinstance(p, np.ndarray) for p in parts):
        flat = np.concatenate(parts)
        if flat.dtype.kind not in "fiub":
            raise TypeError(f"{name} holds values of type {flat.dtype}, expected numbers")
    else:
        values = [x for p in parts for x in (p.tolist() if isinstance(p, np.ndarray) else p)]
        try:
            flat = np.array(values, dtype=None if whole else np.float64)
            if flat.dtype.kind not in "iubf":
                flat = np.array(values, dtype=np.float64)
        except Conversion as e:
            odd = next((v for v in values if not isinstance(v, int | float | None)), None)
            described = "a number that is too large" if odd is None else _shown(odd)
            raise type(e)(f"{name} holds {described}, expected numbers") from e
        if flat.ndim != 1:
            raise ValueError(f"{name} holds lists, expected numbers")
    if not whole:
        # A double beyond float32 is as unusable as the infinity it becomes.
        with np.errstate(over="ignore"):
            return flat.astype(np.float32), None
    if flat.dtype.kind == "f":
        holes = ~(np.abs(flat) < LARGE)
        return np.where(holes, 0, flat).astype(np.int64), holes if holes.any() else None
    return flat.astype(np.int64), None


def _numbers(name: str, f: LogField, values: list[Any]) -> Numbers:
    plain = [v.item() if isinstance(v, torch.Tensor | np.generic) else v for v in values]
    if f.words:
        plain = [f.words.get(v, f.other_word) if isinstance(v, str) else v for v in plain]
    wrong = next((v for v in plain if v is not None and not isinstance(v, int | float)), None)
    if wrong is not None:
        raise TypeError(f"{name} is {_shown(wrong)}, expected a number; --columns {name}= leaves the column out")
    too_large = f"{name} holds a number that is too large"
    try:
        if all(isinstance(v, int) for v in plain if v is not None):
            absent = [v is None for v in plain]
            integers = torch.tensor([v or 0 for v in plain], dtype=torch.int64)
            return Numbers(integers, torch.tensor(absent) if any(absent) else None)
        array = np.array([np.nan if v is None else v for v in plain], dtype=np.float64)
    except (*Conversion, RuntimeError) as e:
        raise OverflowError(too_large) from e
    usable = np.abs(array) < LARGE
    if f.is_whole and not (usable | np.isnan(array)).all():
        raise OverflowError(too_large)
    return Numbers(torch.from_numpy(np.where(usable, array, np.nan)))
