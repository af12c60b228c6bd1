"""Rows of a log as columns: the one shape that every reader decodes to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor


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
        """Repeated for every token.

        Args:
            lengths: tokens of each row.
            whole: whether the field holds integers.
        """
        missing = torch.repeat_interleave(self.missing(), lengths) if whole else None
        values = torch.repeat_interleave(self.whole() if whole else self.values, lengths)
        return Lists(values, cumulative(lengths), None, missing)


@dataclass(frozen=True)
class Columns:
    """`b` rows by field name; see `fields` for the names."""

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
            {
                name: [t for t, k in zip(x, chosen, strict=True) if k]
                for name, x in self.texts.items()
            },
        )


def cumulative(lengths: Int[Tensor, " b"]) -> Int[Tensor, " cuts"]:
    """Cuts of consecutive segments with these lengths."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def joined(parts: Sequence[Columns]) -> Columns | None:
    """Parts with the same columns, one after another; None if there are none."""
    if len(parts) < 2:
        return parts[0] if parts else None

    def lists(name: str) -> Lists:
        found = [p.lists[name] for p in parts]
        return Lists(
            torch.cat([x.values for x in found]),
            cumulative(torch.cat([x.lengths for x in found])),
            _masks([(x.absent, len(x.cuts) - 1) for x in found]),
            _masks([(x.missing, len(x.values)) for x in found]),
        )

    def numbers(name: str) -> Numbers:
        found = [p.numbers[name] for p in parts]
        return Numbers(
            torch.cat([x.values for x in found]),
            _masks([(x.absent, len(x.values)) for x in found]),
        )

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
