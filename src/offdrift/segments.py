"""`Segments`: where sequences, turns and prompt groups begin and end, and every reduction over them.

A batch is one flat stream of tokens. `cu_seqlens` cuts it into sequences, `turns` cuts the same
stream more finely (assistant turns of an agent), `group_ids` says which sequences answer the same
prompt. Every reduction of the library goes through here: forward and backward, without Python loops
over sequences, without padding, and without host transfers.

Empty segments are legal (a sequence all of whose tokens are masked): their sum and mean are 0,
their max and min are `empty` (0 unless given).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from offdrift.errors import BadValueError, ShapeError
from offdrift.numerics import asked, at_least_float32, cached, check_tensor, tensor_of, transformed


@dataclass(frozen=True)
class Segments:
    """A partition of `n` consecutive tokens into `b` consecutive segments.

    Args:
        cu_seqlens: cumulative starts, first 0, last `n`, never decreasing.
        turns: the same tokens cut into turns; absent means one turn per sequence.
        group_ids: prompt group of each sequence, any integers; absent means all differ.

    Example:
        >>> s = Segments.from_lengths([2, 3])
        >>> s.mean(torch.tensor([1.0, 3.0, 1.0, 2.0, 3.0]))
        tensor([2., 2.])
        >>> s.spread(torch.tensor([10.0, 20.0]))
        tensor([10., 10., 20., 20., 20.])
    """

    cu_seqlens: Int[Tensor, " cuts"]
    turns: Segments | None = None
    group_ids: Int[Tensor, " b"] | None = None

    def __post_init__(self) -> None:
        for name in ("cu_seqlens", "group_ids"):  # int16 and smaller, of which torch repeats and sorts nothing
            x = getattr(self, name)
            if isinstance(x, Tensor) and x.dtype not in (torch.int32, torch.int64, torch.bool) and _whole(x):
                object.__setattr__(self, name, x.long())

    @staticmethod
    def from_lengths(
        lengths: Sequence[int] | Tensor, *, turns: Segments | None = None, group_ids: Tensor | None = None
    ) -> Segments:
        """Segments of the given lengths (tokens per sequence).

        Raises: `ShapeError` if a length is negative, or turns or groups describe another batch.
        """
        counts = lengths if isinstance(lengths, Tensor) else tensor_of("lengths", lengths)
        check_tensor("lengths", counts)
        lengths = counts.long()
        # A number too large for int64 comes back as another.
        if counts.is_floating_point() and not (
            bool(counts.isfinite().all()) and torch.equal(lengths.to(counts.dtype), counts)
        ):
            raise BadValueError(f"lengths {counts.tolist()[:8]} are not whole numbers of tokens")
        if lengths.ndim != 1:
            raise ShapeError(f"lengths must be one-dimensional, got shape {tuple(lengths.shape)}")
        if bool((lengths < 0).any()):
            raise ShapeError(f"sequence {int(lengths.argmin())} has length {int(lengths.min())}")
        segments = Segments(_cumulative(lengths), turns=turns, group_ids=group_ids)
        segments.check()
        return segments

    def check(self) -> None:
        """Raise unless cuts, turns and groups describe one batch (host transfer of the cuts, the first time).

        Raises: `ShapeError`, or `BadValueError` for what are no integers.
        """
        assert self.checked

    @cached
    def checked(self) -> bool:
        """True once `check` has passed."""
        check_tensor("cu_seqlens", self.cu_seqlens, integers=True)
        if self.cu_seqlens.ndim != 1:
            raise ShapeError(f"cu_seqlens must be one-dimensional, got shape {tuple(self.cu_seqlens.shape)}")
        cuts = self.on_host
        if len(cuts) == 0 or int(cuts[0]) != 0 or bool((cuts.diff() < 0).any()):
            raise ShapeError(
                "cu_seqlens must start at 0 and never decrease (cumulative sequence starts, one "
                f"more than sequences), got {cuts.tolist()[:8]}"
            )
        if self.group_ids is not None:
            check_group_ids(self.group_ids, len(self))
        if self.turns is not None:
            if not isinstance(self.turns, Segments):
                raise BadValueError(f"turns is a {type(self.turns).__name__}, not `Segments`")
            self.turns.check()
            ends = self.turns.on_host
            if not bool(torch.isin(cuts, ends).all()) or int(ends[-1]) != int(cuts[-1]):
                raise ShapeError(
                    "turns must cut the same tokens at least where sequences do: sequence cuts "
                    f"{cuts.tolist()[:8]}, turn cuts {ends.tolist()[:8]}"
                )
        return True

    def with_groups(self, group_ids: Int[Tensor, " b"]) -> Segments:
        """Return the segments with these prompt groups.

        Raises: `ShapeError` unless there is one per sequence; `BadValueError` if the segments have
            other groups already.
        """
        check_group_ids(group_ids, len(self))
        if self.group_ids is not None and not torch.equal(self.group_ids, group_ids):
            raise BadValueError(
                f"group_ids {group_ids.tolist()[:8]} contradict those of the segments, "
                f"{self.group_ids.tolist()[:8]}; give them once"
            )
        return replace(self, group_ids=group_ids)

    def with_turns(self, turn_ids: Int[Tensor, " n"]) -> Segments:
        """Return the segments, cut into turns wherever `turn_ids` change within a segment.

        Example:
            >>> s = Segments.from_lengths([3, 1]).with_turns(torch.tensor([0, 0, 1, 1]))
            >>> s.turns.lengths
            tensor([2, 1, 1])
        """
        check_tensor("turn_ids", turn_ids, integers=True)
        if turn_ids.shape != (self.num_tokens,):
            raise ShapeError(f"turn_ids has shape {tuple(turn_ids.shape)} for {self.num_tokens} tokens; give one each")
        changes = (turn_ids.diff() != 0).nonzero().squeeze(-1) + 1
        return replace(self, turns=Segments(torch.cat([self.cu_seqlens, changes.to(self.cu_seqlens)]).unique()))

    def to(self, device: torch.device | str) -> Segments:
        """Return the segments on another device; a copy to an accelerator does not wait."""
        waits = torch.device(device).type == "cpu"  # what is read on the host must have arrived
        ids = None if self.group_ids is None else self.group_ids.to(device, non_blocking=not waits)
        turns = None if self.turns is None else self.turns.to(device)
        moved = Segments(self.cu_seqlens.to(device, non_blocking=not waits), turns=turns, group_ids=ids)
        if not transformed():
            moved.__dict__["on_host"] = self.on_host
        return moved

    def __len__(self) -> int:
        return len(self.cu_seqlens) - 1

    @cached
    def on_host(self) -> Int[Tensor, " cuts"]:
        """`cu_seqlens` in host memory: the one transfer that checks and sizes of tensors need."""
        return self.cu_seqlens.detach().cpu()

    @cached
    def num_tokens(self) -> int:
        """Tokens in the stream (see `on_host`)."""
        return int(self.on_host[-1])

    @cached
    def longest(self) -> int:
        """Tokens of the longest segment, 0 if there is none (see `on_host`)."""
        return int(self.on_host.diff().max()) if len(self) else 0

    @cached
    def lengths(self) -> Int[Tensor, " b"]:
        """Tokens per segment."""
        return self.cu_seqlens.diff()

    @cached
    def seq_ids(self) -> Int[Tensor, " n"]:
        """Index of the segment of each token."""
        rows = torch.arange(len(self), device=self.cu_seqlens.device)
        return torch.repeat_interleave(rows, self.lengths, output_size=self.num_tokens)

    @cached
    def position(self) -> Int[Tensor, " n"]:
        """Index of each token inside its segment, from 0."""
        steps = torch.arange(self.num_tokens, device=self.cu_seqlens.device)
        return steps - self.spread(self.cu_seqlens[:-1])

    @cached
    def groups(self) -> Groups:
        """Prompt groups: reductions over sequences, not tokens."""
        ids = self.group_ids
        if ids is None:
            ids = torch.arange(len(self), device=self.cu_seqlens.device)
        return Groups.from_ids(ids)

    def rows(self, sequences: Int[Tensor, " s"]) -> Int[Tensor, " k"]:
        """Positions in the stream of all tokens of the given segments, in the given order."""
        starts, lengths = self.cu_seqlens[:-1][sequences], self.lengths[sequences]
        new_starts = _cumulative(lengths)
        steps = torch.arange(int(new_starts[-1]), device=self.cu_seqlens.device)
        return steps + torch.repeat_interleave(starts - new_starts[:-1], lengths)

    def narrowed(self, rows: Int[Tensor, " k"]) -> Segments:
        """Keep only the tokens at `rows` (ascending); segments, turns and groups stay.

        Example:
            >>> Segments.from_lengths([2, 3]).narrowed(torch.tensor([0, 2, 4])).lengths
            tensor([1, 2])
        """
        cuts = torch.searchsorted(rows, self.cu_seqlens.to(rows.dtype))
        turns = None if self.turns is None else self.turns.narrowed(rows)
        return Segments(cuts, turns=turns, group_ids=self.group_ids)

    # -- reductions: one number per segment ---------------------------------------------------

    def sum(self, x: Float[Tensor, " n"]) -> Float[Tensor, " b"]:
        """Sum over each segment, added up in float64. Gradient: to `x`.

        Float32 terms added one by one lose three digits over 30,000 tokens.
        """
        total = torch.segment_reduce(x.double(), "sum", offsets=self.cu_seqlens, unsafe=True)
        return total.to(x.dtype)

    def total(self, x: Float[Tensor, " n"]) -> Float[Tensor, " b"]:
        """Sum over each segment in float64, without gradient; on a host by numpy, whose reductions are faster."""
        if asked():
            from offdrift.compiled.passes import segment_sums

            if (sums := segment_sums(x, self.cu_seqlens)) is not None:
                return sums
        x = x.detach()
        if x.device.type != "cpu" or transformed():
            return torch.segment_reduce(x.double(), "sum", offsets=self.cu_seqlens, unsafe=True)
        return self._reduced(np.add, at_least_float32(x).numpy())

    def largest(self, x: Float[Tensor, " n"]) -> Float[Tensor, " b"]:
        """Largest value of each segment in float64, without gradient; 0 where it is empty."""
        if x.device.type != "cpu" or transformed():
            return self.max(x.detach().double())
        return self._reduced(np.maximum, x.detach().numpy())

    def any(self, x: Bool[Tensor, " n"]) -> Bool[Tensor, " b"]:
        """Mark the segments in which some token is marked; False where a segment is empty. Gradient: none.

        Example:
            >>> Segments.from_lengths([2, 0, 1]).any(torch.tensor([False, True, False]))
            tensor([ True, False, False])
        """
        if x.device.type != "cpu" or transformed():
            return self.sum(x.float()) > 0
        return self._reduced(np.logical_or, x.numpy()).bool()

    def _reduced(self, how: np.ufunc, x: Shaped[np.ndarray, " n"]) -> Float[Tensor, " b"]:
        """A reduction over each segment on the host, in float64; 0 where it is empty."""
        filled = self.lengths > 0
        starts = self.cu_seqlens[:-1][filled].numpy()
        # Told to add in float64, numpy converts twice as fast as torch would before.
        dtype = np.float64 if how is np.add else None
        reduced = torch.from_numpy(how.reduceat(x, starts, dtype=dtype) if len(starts) else np.zeros(0)).double()
        if len(starts) == len(self):
            return reduced
        return reduced.new_zeros(len(self)).masked_scatter_(filled, reduced)

    def mean(self, x: Float[Tensor, " n"]) -> Float[Tensor, " b"]:
        """Mean over each segment; 0 where it is empty. Gradient: to `x`."""
        return self.sum(x) / self.lengths.clamp(min=1).to(x.dtype)

    def log_mean_exp(self, x: Float[Tensor, " n"]) -> Float[Tensor, " b"]:
        """log of the mean of e^x over each segment, at any size of x; 0 where it is empty.

        Gradient: to `x`, in proportion to e^x.
        """
        top = self.max(x.detach()).clamp(min=torch.finfo(x.dtype).min)  # -inf: no NaN below
        mean = self.mean((x - self.spread(top)).exp())
        return mean.where(self.lengths > 0, 1.0).log() + top

    def max(self, x: Float[Tensor, " n"], *, empty: float = 0.0) -> Float[Tensor, " b"]:
        """Largest value of each segment. Gradient: to the maximal entries, shared on ties."""
        reduced = torch.segment_reduce(x, "max", offsets=self.cu_seqlens, unsafe=True)
        return reduced.where(self.lengths > 0, empty)

    def min(self, x: Float[Tensor, " n"], *, empty: float = 0.0) -> Float[Tensor, " b"]:
        """Smallest value of each segment. Gradient: to the minimal entries, shared on ties."""
        reduced = torch.segment_reduce(x, "min", offsets=self.cu_seqlens, unsafe=True)
        return reduced.where(self.lengths > 0, empty)

    # -- one number per token -----------------------------------------------------------------

    def spread(self, x: Shaped[Tensor, " b"]) -> Shaped[Tensor, " n"]:
        """Give every token the number of its segment. Gradient: to `x`, summed per segment."""
        if (x.requires_grad and torch.is_grad_enabled()) or transformed():
            return _Spread.apply(x, self)
        if x.device.type == "cpu" and x.dtype != torch.bfloat16:  # numpy's copies are four times as fast
            return torch.from_numpy(np.repeat(x.detach().numpy(), self.lengths.numpy()))
        return _Spread.forward(x, self)  # where no gradient is taken: `apply` reads a signature in every call

    def prefix_sum(self, x: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """Sum over the tokens of the segment up to and including this one. Gradient: to `x`.

        Computed in float64, so that one long stream does not cost short sequences their digits.
        """
        running = x.double().cumsum(0)
        before = torch.cat([running.new_zeros(1), running])[self.cu_seqlens[:-1]]
        return (running - self.spread(before)).to(x.dtype)

    def prefix_min(self, x: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """Smallest value of the segment up to and including this token. Gradient: to `x`.

        A doubling scan: log2(longest segment) vector steps, no loop over tokens.
        """
        reach, longest = 1, self.longest
        while reach < longest:
            inside = self.position[reach:] >= reach
            merged = torch.minimum(x[reach:], x[:-reach])
            x = torch.cat([x[:reach], merged.where(inside, x[reach:])])
            reach *= 2
        return x


@dataclass(frozen=True)
class Groups:
    """Sequences that answer the same prompt, in any order.

    `index` holds, for each of `b` sequences, a dense group number in `[0, g)`.
    """

    index: Int[Tensor, " b"]
    sizes: Int[Tensor, " g"]

    @staticmethod
    def from_ids(ids: Int[Tensor, " b"]) -> Groups:
        """Groups from arbitrary integer prompt ids."""
        _, index, sizes = torch.unique(ids, return_inverse=True, return_counts=True)
        return Groups(index, sizes)

    def __len__(self) -> int:
        return len(self.sizes)

    def sum(self, x: Float[Tensor, " b"]) -> Float[Tensor, " g"]:
        """Sum over each group. Gradient: to `x`."""
        return x.new_zeros(len(self)).index_add(0, self.index, x)

    def mean(self, x: Float[Tensor, " b"]) -> Float[Tensor, " g"]:
        """Mean over each group. Gradient: to `x`."""
        return self.sum(x) / self.sizes.to(x.dtype)

    def spread(self, x: Shaped[Tensor, " g"]) -> Shaped[Tensor, " b"]:
        """Give every sequence the number of its group. Gradient: to `x`."""
        return x[self.index]


def check_group_ids(group_ids: Int[Tensor, " b"], sequences: int) -> None:
    """Raise unless there is one integer per sequence: `BadValueError` or `ShapeError`."""
    check_tensor("group_ids", group_ids, integers=True)
    if group_ids.shape != (sequences,):
        raise ShapeError(
            f"group_ids has shape {tuple(group_ids.shape)} for {sequences} sequences; give one prompt id per sequence"
        )


def _whole(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex())


def _cumulative(lengths: Int[Tensor, " b"]) -> Int[Tensor, " cuts"]:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


class _Spread(torch.autograd.Function):
    """Repeat per segment; the backward is a segment sum, 75 times faster than indexing's."""

    @staticmethod
    def forward(x: Tensor, segments: Segments) -> Tensor:
        return torch.repeat_interleave(x, segments.lengths, output_size=segments.num_tokens)

    @staticmethod
    def setup_context(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: Tensor) -> None:
        ctx.segments = inputs[1]  # type: ignore[attr-defined]

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: torch.autograd.function.FunctionCtx, grad: Tensor
    ) -> tuple[Tensor, None]:
        return ctx.segments.sum(grad.contiguous()), None  # type: ignore[attr-defined]


def cumulative(lengths: Shaped[Tensor, " b"]) -> Int[Tensor, " cuts"]:
    """Cuts of consecutive segments with these lengths, or running counts of truths; first 0."""
    cuts = lengths.new_zeros(len(lengths) + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, dtype=torch.int64, out=cuts[1:])
    return cuts
