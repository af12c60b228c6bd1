"""The buckets that tokens are sorted into: by length, position, advantage, lag and token class.

A token falls into one cell of the product of all axes, so that every sum is scattered once and then
added up along each axis.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from offdrift.records.batch import Logged

LENGTH_CUTS = tuple(64 * 2**i for i in range(11))
"""Longest response of each length bucket; the last bucket has no end."""
POSITIONS = 13
"""Position buckets before the open one: 0-15, then doubling."""
CLASSES = {"sure": (0.99, 1.0), "likely": (0.5, 0.99), "unsure": (0.05, 0.5), "rare": (0.0, 0.05)}
"""Tokens by the probability that the rollout policy gave them: what a log has without a tokenizer."""
LAGS = 9
"""Lags with a bucket of their own, from 0; then up to 16, up to 32, and beyond."""
LAG_BUCKET = torch.tensor([*range(LAGS), *[LAGS] * 8, *[LAGS + 1] * 16, LAGS + 2])
"""The bucket of each lag, the last entry for all beyond."""


@dataclass(frozen=True)
class Axis:
    """The buckets along one axis: labels, and the smallest and largest value of each."""

    labels: tuple[str, ...]
    lows: tuple[float | int | None, ...]
    highs: tuple[float | int | None, ...]

    def __len__(self) -> int:
        return len(self.labels)


def _doubling(lows: list[int], first: int) -> Axis:
    """Buckets that begin at `first` and then at `lows`, the last without an end."""
    starts = [first, *lows]
    labels = [f"{a}-{b - 1}" for a, b in zip(starts, lows)]
    return Axis((*labels, f"{starts[-1]}+"), tuple(starts), (*(b - 1 for b in lows), None))


AXES: dict[str, Axis] = {
    "length": _doubling([c + 1 for c in LENGTH_CUTS], 1),
    "position": _doubling([16 * 2**i for i in range(POSITIONS)], 0),
    "advantage": Axis(("negative", "zero", "positive"), (None, 0, 0), (0, 0, None)),
    "lag": Axis(
        (*map(str, range(LAGS)), "9-16", "17-32", "33+"), (*range(LAGS), 9, 17, 33), (*range(LAGS), 16, 32, None)
    ),
    "token_class": Axis(
        (*CLASSES, "last token"),
        (*(low for low, _ in CLASSES.values()), None),
        (*(high for _, high in CLASSES.values()), None),
    ),
}
"""The last token of a response is in no other class: what ends it is drawn under rules of its own."""


@dataclass(frozen=True)
class Cells:
    """The product of the axes that a log knows."""

    axes: tuple[str, ...]

    @staticmethod
    def known(batch: Logged) -> Cells:
        """All axes that the batch has the fields of."""
        absent = {"advantage": batch.advantages is None, "lag": batch.lag is None}
        return Cells(tuple(name for name in AXES if not absent.get(name)))

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Buckets along each axis."""
        return tuple(len(AXES[name]) for name in self.axes)

    @cached_property
    def stride(self) -> dict[str, int]:
        """How far apart neighbors along each axis are."""
        return {name: math.prod(self.shape[i + 1 :]) for i, name in enumerate(self.axes)}

    def of_tokens(self, batch: Logged) -> Int[Tensor, " n"]:
        """The cell of every token."""
        assert batch.logp_rollout is not None
        lengths, n, stride = batch.cu_seqlens.diff(), batch.num_tokens, self.stride

        def spread(x: Tensor) -> Tensor:
            return torch.repeat_interleave(x.int(), lengths, output_size=n)

        cell = spread(length_bucket(batch.response_lengths) * stride["length"])
        if batch.position is None:
            position = torch.arange(n, dtype=torch.int32).sub_(spread(batch.cu_seqlens[:-1]))
        else:
            position = batch.position.int()
        # 0 for 0-15, 1 for 16-31, ...: the exponent of a float32.
        exponent = (position | 15).float().view(torch.int32).bitwise_right_shift_(23)
        cell.add_(exponent.sub_(127 + 3).clamp_(max=POSITIONS), alpha=stride["position"])
        if batch.advantages is not None:
            cell.add_(batch.advantages.sign().int().add_(1), alpha=stride["advantage"])  # the sign of NaN is 0
        if "lag" in self.axes and batch.lag is not None:
            lag = batch.lag.clamp(max=len(LAG_BUCKET) - 1)
            cell.add_(LAG_BUCKET.index_select(0, lag), alpha=stride["lag"])
        cell.add_(_token_class(batch.logp_rollout), alpha=stride["token_class"])
        # The last token of each response, if it was scored, is in a class of its own.
        filled = lengths > 0
        last = (batch.cu_seqlens[1:] - 1)[filled]
        if batch.length_unit == "token" and batch.position is not None:
            last = last[batch.position[last] == batch.response_lengths[filled] - 1]
        classes = _token_class(batch.logp_rollout[last])
        cell.index_add_(0, last, (len(CLASSES) - classes) * stride["token_class"])
        return cell

    def along(self, tables: Tensor, how: np.ufunc = np.add) -> dict[str, np.ndarray]:
        """Tables of cells, `[k, cells]`, added up along each axis to `[k, buckets]`."""
        cells, every = tables.numpy().reshape(len(tables), *self.shape), range(len(self.axes))
        return {
            name: how.reduce(cells, axis=tuple(j + 1 for j in every if j != i)).astype(np.float64)
            for i, name in enumerate(self.axes)
        }

    def log_added(self, tables: Float[Tensor, "k cells"]) -> dict[str, np.ndarray]:
        """Tables of logs, `[k, cells]`, whose exponentials are added up along each axis."""
        cells, added = tables.numpy().reshape(len(tables), *self.shape), {}
        for i, name in enumerate(self.axes):
            others = tuple(j + 1 for j in range(len(self.axes)) if j != i)
            top = cells.max(others, keepdims=True)
            top = np.where(top > -np.inf, top, 0.0)  # an empty bucket
            with np.errstate(divide="ignore"):
                added[name] = np.log(np.exp(cells - top).sum(others)) + top.squeeze(others)
        return added

    def sequences(self, cell: Int[Tensor, " n"], cuts: Int[Tensor, " cuts"]) -> Float[np.ndarray, " bits"]:
        """How many sequences have a token in each bucket: their tokens' bits are or-ed together."""
        starts = cuts[:-1][cuts.diff() > 0].numpy()
        met = np.bitwise_or.reduceat(np.take(self.bits, cell.numpy()), starts)
        octets = met.view(np.uint8).reshape(-1, 8)
        return np.unpackbits(octets, axis=1, bitorder="little").sum(0, dtype=np.float64)

    @cached_property
    def bits(self) -> Int[np.ndarray, " cells"]:
        """A bit for each bucket of each axis: those that a cell is in."""
        cells, first = np.zeros(self.shape, dtype="<i8"), 0
        for i, size in enumerate(self.shape):
            own = np.left_shift(1, np.arange(size) + first, dtype="<i8")
            cells |= own.reshape([-1 if j == i else 1 for j in range(len(self.shape))])
            first += size
        return cells.reshape(-1)

    def named(self, bits: Float[np.ndarray, " bits"]) -> dict[str, np.ndarray]:
        """Numbers by bit as numbers by axis and bucket."""
        ends = np.cumsum(self.shape)
        return dict(zip(self.axes, np.split(bits[: ends[-1]], ends[:-1]), strict=True))


def length_bucket(lengths: Int[Tensor, " b"]) -> Int[Tensor, " b"]:
    """The bucket of each response by its length; one without tokens is in the first.

    Example:
        >>> length_bucket(torch.tensor([0, 64, 65, 10**6]))
        tensor([ 0,  0,  1, 11])
    """
    return torch.bucketize(lengths, torch.tensor(LENGTH_CUTS))


def _token_class(logp: Float[Tensor, " k"]) -> Int[Tensor, " k"]:
    likely, unsure, rare = (math.log(high) for _, high in list(CLASSES.values())[1:])
    at_most = [(logp <= likely), (logp < unsure), (logp < rare)]
    first, second, third = (x.view(torch.uint8) for x in at_most)
    return first.add_(second).add_(third).int()
