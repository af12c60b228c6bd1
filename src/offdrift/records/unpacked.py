"""`Unpacked`: one batch as a training loop has it, padded or packed, before masked tokens are dropped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from offdrift.errors import BadValueError, ShapeError
from offdrift.records.batch import Logged
from offdrift.segments import Segments

BY_TOKEN = ("logp_rollout", "logp_old", "logp", "logp_ref", "tokens", "entropy")
"""Always one value per token."""
EITHER = ("advantages", "rollout_version")
"""One value per token, or per sequence."""
BY_SEQUENCE = (
    "step",
    "version",
    "rewards",
    "group_ids",
    "old_status",
    "truncated",
    "response_lengths",
)
WHOLE = ("tokens", "rollout_version", *(n for n in BY_SEQUENCE if n != "rewards"))
"""What is counted, and stays an integer."""


@dataclass(frozen=True, kw_only=True)
class Unpacked:
    """Token tensors of one shape: padded `[b, time]` with `mask`, or packed `[n]` with `cu_seqlens`.

    Making one looks at shapes alone, so that nothing waits for a device.

    Raises: `ShapeError` if a field has neither the tokens' shape nor one value per sequence.
    """

    step: Shaped[Tensor, ...]
    """Per sequence, or one number for all; so is `version`."""
    logp_rollout: Shaped[Tensor, ...] | None = None
    logp_old: Shaped[Tensor, ...] | None = None
    logp: Shaped[Tensor, ...] | None = None
    logp_ref: Shaped[Tensor, ...] | None = None
    tokens: Shaped[Tensor, ...] | None = None
    entropy: Shaped[Tensor, ...] | None = None
    divergences: Mapping[str, Tensor] = field(default_factory=dict)
    mask: Shaped[Tensor, ...] | None = None
    cu_seqlens: Shaped[Tensor, ...] | None = None
    advantages: Shaped[Tensor, ...] | None = None
    rollout_version: Shaped[Tensor, ...] | None = None
    version: Shaped[Tensor, ...] | None = None
    rewards: Shaped[Tensor, ...] | None = None
    group_ids: Shaped[Tensor, ...] | None = None
    old_status: Shaped[Tensor, ...] | None = None
    truncated: Shaped[Tensor, ...] | None = None
    response_lengths: Shaped[Tensor, ...] | None = None
    prompts: tuple[str, ...] | None = field(default=None, repr=False)
    completions: tuple[str, ...] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        shape, b = self.shape, self.num_sequences
        if (len(shape) == 2) == (self.cu_seqlens is not None) or len(shape) not in (1, 2):
            raise ShapeError(
                f"{self._first} has shape {shape}: give padded [sequences, time] with mask=, or "
                "packed [tokens] with cu_seqlens="
            )
        if len(shape) == 2 and self.mask is None:
            raise ShapeError("padded input needs mask= (nonzero where a token may train)")
        one = [(b,), (b, 1)]
        expected = {name: [shape] for name in (*BY_TOKEN, "mask")}
        expected |= {name: [shape, (), *one] for name in EITHER}
        expected |= dict.fromkeys(BY_SEQUENCE, one)
        expected |= {name: [(), *one] for name in ("step", "version")}
        given = {name: getattr(self, name) for name in expected} | dict(self.divergences)
        for name, x in given.items():
            allowed = expected.get(name, [shape])
            if x is not None and tuple(x.shape) not in allowed:
                raise ShapeError(
                    f"{name} has shape {tuple(x.shape)}, expected {' or '.join(map(str, allowed))}: "
                    f"{self._first} has shape {shape}, {b} sequences"
                )
        for name, texts in (("prompts", self.prompts), ("completions", self.completions)):
            if texts is not None and len(texts) != b:
                raise ShapeError(f"{name} has {len(texts)} texts for {b} sequences")

    @property
    def _first(self) -> str:
        for name in BY_TOKEN:
            if getattr(self, name) is not None:
                return name
        raise ShapeError(f"nothing per token is given; give at least one of {', '.join(BY_TOKEN)}")

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

        def tokens(name: str, x: Tensor) -> Tensor:
            if tuple(x.shape) == self.shape:
                return _as_stored(name, x.reshape(-1) if kept is None else x.reshape(-1)[kept])
            return torch.repeat_interleave(sequences(name, x), cuts.diff())

        def sequences(name: str, x: Tensor) -> Tensor:
            return _as_stored(name, x.reshape(-1)).expand(b)

        values: dict[str, Any] = {"response_lengths": lengths}
        for name in (*BY_TOKEN, *EITHER, *BY_SEQUENCE):
            x = getattr(self, name)
            if x is not None:
                values[name] = sequences(name, x) if name in BY_SEQUENCE else tokens(name, x)
        return Logged(
            cu_seqlens=cuts,
            row=torch.arange(1, b + 1),
            position=position,
            divergences={name: tokens(name, x) for name, x in self.divergences.items()},
            prompts=self.prompts,
            completions=self.completions,
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


def _as_stored(name: str, x: Shaped[Tensor, " n"]) -> Shaped[Tensor, " n"]:
    if name not in WHOLE:
        return x.float()
    if x.is_floating_point():
        odd = x[~x.isfinite() | (x != x.trunc())]
        if len(odd):
            raise BadValueError(f"{name} holds {float(odd[0]):g}; give whole numbers")
    return x.long()


def _extents(
    kept: Int[Tensor, " n"], cuts: Int[Tensor, " cuts"]
) -> tuple[Int[Tensor, " b"], Int[Tensor, " b"]]:
    """Where the first kept token of each sequence stands, and the length up to the last."""
    if len(kept) == 0:
        return torch.zeros_like(cuts[1:]), torch.zeros_like(cuts[1:])
    last = len(kept) - 1
    start, stop = kept[cuts[:-1].clamp(max=last)], kept[(cuts[1:] - 1).clamp(min=0)]
    return start, torch.where(cuts.diff() > 0, stop - start + 1, 0)


def text_ids(texts: Sequence[str]) -> Int[Tensor, " b"]:
    """Numbers that equal texts share, in every process."""
    digests = (blake2b(t.encode("utf-8", "replace"), digest_size=8).digest() for t in texts)
    return torch.tensor([int.from_bytes(d, "little", signed=True) for d in digests]).long()
