"""`Unpacked`: one batch as a training loop has it, padded or packed, before masked tokens are dropped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, make_dataclass
from typing import Any

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from offdrift.errors import BadValueError, ShapeError
from offdrift.records.batch import Logged
from offdrift.records.schema import ARGUMENTS, MASK, LogField
from offdrift.segments import Segments

_Values: Any = make_dataclass(
    "_Values",
    [
        (f.name, tuple[str, ...] | None, field(default=None, repr=False))
        if f.is_text
        else (f.name, Tensor | None, None)
        for f in ARGUMENTS
    ],
    frozen=True,
    kw_only=True,
)


@dataclass(frozen=True, kw_only=True)
class Unpacked(_Values):
    """Token tensors of one shape: padded `[b, time]` with `mask`, or packed `[n]` with `cu_seqlens`.

    Its other fields are those that `record` takes. Making one looks at shapes alone, so that nothing
    waits for a device.

    Raises: `ShapeError` if a field has neither the tokens' shape nor one value per sequence.
    """

    step: Shaped[Tensor, ...]
    cu_seqlens: Shaped[Tensor, ...] | None = None
    divergences: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shape, b = self.shape, self.num_sequences
        if (len(shape) == 2) == (self.cu_seqlens is not None) or len(shape) not in (1, 2):
            raise ShapeError(
                f"{self._first} has shape {shape}: give padded [sequences, time] with mask=, or "
                "packed [tokens] with cu_seqlens="
            )
        if len(shape) == 2 and self.mask is None:
            raise ShapeError("padded input needs mask= (nonzero where a token may train)")
        by_sequence = [(b,), (b, 1)]
        for f in ARGUMENTS:
            x = getattr(self, f.name)
            if x is None:
                continue
            if f.is_text:
                if len(x) != b:
                    raise ShapeError(f"{f.name} has {len(x)} texts for {b} sequences")
                continue
            allowed = [shape] if f.by_token else []
            allowed += [()] if f.one_for_all or f.per == "token or sequence" else []
            self._check_shape(f.name, x, allowed + (by_sequence if f.per != "token" else []))
        for name, x in self.divergences.items():
            self._check_shape(name, x, [shape])

    def _check_shape(self, name: str, x: Tensor, allowed: list[tuple[int, ...]]) -> None:
        if tuple(x.shape) not in allowed:
            raise ShapeError(
                f"{name} has shape {tuple(x.shape)}, expected {' or '.join(map(str, allowed))}: "
                f"{self._first} has shape {self.shape}, {self.num_sequences} sequences"
            )

    @property
    def _first(self) -> str:
        names = [f.name for f in ARGUMENTS if f.per == "token" and f is not MASK]
        for name in names:
            if getattr(self, name) is not None:
                return name
        raise ShapeError(f"nothing per token is given; give at least one of {', '.join(names)}")

    @property
    def shape(self) -> tuple[int, ...]:
        """Of every token tensor."""
        return tuple(getattr(self, self._first).shape)

    @property
    def num_sequences(self) -> int:
        """Rows of padded input, cuts less one of packed input."""
        return self.shape[0] if self.cu_seqlens is None else max(0, self.cu_seqlens.numel() - 1)

    def logged(self) -> Logged:
        """The tokens that may train, packed; on a device this waits for it.

        A response reaches from its first to its last token that may train, unless
        `response_lengths` says otherwise; a sequence without any keeps its row. NaN and infinite
        values stay what they are: readers leave such tokens out, and count them.

        Raises: `ShapeError` if `cu_seqlens` does not cut the tokens; `BadValueError` if what is counted
            is no whole number.
        """
        b, cuts = self.num_sequences, self._cuts()
        position, lengths, kept = None, cuts.diff(), None
        if self.mask is not None:
            kept = self.mask.reshape(-1).nonzero().squeeze(-1)
            cuts = torch.searchsorted(kept, cuts)
            start, lengths = _extents(kept, cuts)
            if not torch.equal(lengths, cuts.diff()):
                position = kept - torch.repeat_interleave(start, cuts.diff())

        def sequences(x: Tensor) -> Tensor:
            return x.reshape(-1).expand(b)

        def tokens(x: Tensor) -> Tensor:
            if tuple(x.shape) == self.shape:
                return x.reshape(-1) if kept is None else x.reshape(-1)[kept]
            return torch.repeat_interleave(sequences(x), cuts.diff())

        values: dict[str, Any] = {"response_lengths": lengths}
        for f in ARGUMENTS:
            x = getattr(self, f.name)
            if x is not None and f is not MASK:
                values[f.name] = x if f.is_text else _as_stored(f, (tokens if f.by_token else sequences)(x))
        return Logged(
            cu_seqlens=cuts,
            row=torch.arange(1, b + 1),
            position=position,
            divergences={name: tokens(x).float() for name, x in self.divergences.items()},
            **values,
        )

    def _cuts(self) -> Int[Tensor, " cuts"]:
        if self.cu_seqlens is None:
            return torch.arange(self.shape[0] + 1) * self.shape[1]
        cuts = self.cu_seqlens.reshape(-1).long()
        Segments(cuts).check()
        if int(cuts[-1]) != self.shape[0]:
            raise ShapeError(
                f"{self._first} has {self.shape[0]} tokens, cu_seqlens ends at {int(cuts[-1])}; both "
                "must come from the same packing"
            )
        return cuts


def _as_stored(f: LogField, x: Shaped[Tensor, " n"]) -> Shaped[Tensor, " n"]:
    if not f.is_whole:
        return x.float()
    if x.is_floating_point():
        fractions = x[~x.isfinite() | (x != x.trunc())]
        if len(fractions):
            raise BadValueError(f"{f.name} holds {float(fractions[0]):g}; give whole numbers")
    return x.long()


def _extents(kept: Int[Tensor, " n"], cuts: Int[Tensor, " cuts"]) -> tuple[Int[Tensor, " b"], Int[Tensor, " b"]]:
    """Where the first kept token of each sequence stands, and the length up to the last."""
    if len(kept) == 0:
        return torch.zeros_like(cuts[1:]), torch.zeros_like(cuts[1:])
    last = len(kept) - 1
    start, stop = kept[cuts[:-1].clamp(max=last)], kept[(cuts[1:] - 1).clamp(min=0)]
    return start, torch.where(cuts.diff() > 0, stop - start + 1, 0)
