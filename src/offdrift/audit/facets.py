"""`Facets`: metrics by length, position, sign of the advantage, policy lag and token class, by worker and by engine.

A token falls into one cell of the product of all axes, so that every sum is scattered once and then added up along
each axis. Only the tables by axis are kept: parts whose logs hold different fields add up. What has names that are
known from the log alone (`NAMED`) is no such axis: the sums of its sequences are added up.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from offdrift.errors import BadValueError
from offdrift.numerics import BLOCK, NEAR, at_least_float32, clamped
from offdrift.records.batch import Logged
from offdrift.stats import METRICS
from offdrift.stats.drift import SECOND, TOKEN_LOGS
from offdrift.stats.signature import PerSequence

LENGTH_CUTS = tuple(64 * 2**i for i in range(11))
"""Longest response of each length bucket; the last bucket has no end."""
POSITIONS = 13
"""Position buckets before the open one: 0-15, then doubling."""
POSITION_STARTS = torch.tensor([0, *(16 * 2**i for i in range(POSITIONS))])
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

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """Buckets along each axis."""
        return tuple(len(AXES[name]) for name in self.axes)

    @functools.cached_property
    def stride(self) -> dict[str, int]:
        """Distance in the flat table between neighboring buckets of each axis."""
        return {name: math.prod(self.shape[i + 1 :]) for i, name in enumerate(self.axes)}

    def of_tokens(self, batch: Logged) -> Int[Tensor, " n"]:
        """The cell of every token."""
        assert batch.logp_rollout is not None
        lengths, stride = batch.cu_seqlens.diff(), self.stride
        of_length = length_bucket(batch.response_lengths) * stride["length"]
        if batch.position is None:
            cell = self._by_position(batch, of_length)
        else:
            cell = _repeated(of_length, lengths)
            # 0 for 0-15, 1 for 16-31, ...: the exponent of a float32.
            exponent = (batch.position.int() | 15).float().view(torch.int32).bitwise_right_shift_(23)
            cell.add_(exponent.sub_(127 + 3).clamp_(max=POSITIONS), alpha=stride["position"])
        if batch.advantages is not None:
            values = at_least_float32(batch.advantages).numpy()
            sign = (values > 0).view(np.int8) - (values < 0).view(np.int8)  # 0 of NaN
            cell.add_(torch.from_numpy(sign), alpha=stride["advantage"]).add_(stride["advantage"])
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

    def _by_position(self, batch: Logged, of_length: Int[Tensor, " b"]) -> Int[Tensor, " n"]:
        """The cell by length and position where no token was left out: of each run that shares it, then repeated."""
        inside = batch.cu_seqlens.diff()[:, None] > POSITION_STARTS
        starts = (batch.cu_seqlens[:-1, None] + POSITION_STARTS)[inside]
        cells = (of_length[:, None] + torch.arange(len(POSITION_STARTS)) * self.stride["position"])[inside]
        return _repeated(cells, torch.diff(starts, append=batch.cu_seqlens[-1:]))

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
        """Count the sequences that have at least one token in each bucket, by or-ing the tokens' bits."""
        starts = cuts[:-1][cuts.diff() > 0].numpy()
        met = np.bitwise_or.reduceat(torch.from_numpy(self.bits).index_select(0, cell).numpy(), starts)
        octets = met.view(np.uint8).reshape(-1, 8)
        return np.unpackbits(octets, axis=1, bitorder="little").sum(0, dtype=np.float64)

    @functools.cached_property
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
    x = at_least_float32(logp).numpy()  # numpy compares ten times as fast
    first, second, third = (below.view(np.uint8) for below in (x <= likely, x < unsure, x < rare))
    return torch.from_numpy(first + second + third).int()


def _repeated(x: Int[Tensor, " runs"], lengths: Int[Tensor, " runs"]) -> Int[Tensor, " n"]:
    """Each value so many times, as int32; numpy repeats four times as fast."""
    return torch.from_numpy(np.repeat(x.int().numpy(), lengths.numpy()))


CHUNK = 2**20
"""Tokens that are summarized at once: temporaries stay at some tens of MiB however large a piece is."""


def by_step(batch: Logged) -> Logged:
    """Return the batch with its sequences sorted by step; the sort is stable."""
    if bool((batch.step.diff() >= 0).all()):
        return batch
    return batch.select(torch.sort(batch.step, stable=True).indices)


def chunks(batch: Logged, *, tokens: int = CHUNK) -> Iterator[Logged]:
    """Runs of whole sequences of about so many tokens each; one longer sequence is a run of its own.

    Where they are cut depends on the batch alone, never on the machine.
    """
    goals = torch.tensor(range(tokens, batch.num_tokens, tokens), dtype=torch.int64)
    inner = torch.searchsorted(batch.cu_seqlens, goals)
    inner = inner[batch.cu_seqlens[inner] < batch.num_tokens]  # no run without a token at the end
    bounds = sorted({0, *inner.tolist(), batch.num_sequences})
    for first, last in pairwise(bounds):
        yield batch.cut(first, last)


def runs(batch: Logged, width: int) -> Iterator[tuple[int, Logged]]:
    """Each run of steps that share `step // width`, with that number; the batch is in order of steps."""
    keys, counts = torch.unique_consecutive(torch.div(batch.step, width, rounding_mode="floor"), return_counts=True)
    ends = counts.cumsum(0).tolist()
    for key, first, last in zip(keys.tolist(), [0, *ends], ends):
        yield key, batch.cut(first, last)


LANES = 4
"""Copies of a table into which neighboring tokens are counted in turn, and which are added up at the end. Neighbors
are mostly of one bucket, and one sum at a time would wait for the sum before it: four cost half as much."""


@functools.lru_cache(maxsize=4)
def lanes(size: int, tokens: int) -> Int[Tensor, " tokens"]:
    """Return an offset per token that spreads its bucket index (below `size`) over parallel counting lanes in turn.

    Example:
        >>> lanes(10, 6)
        tensor([ 0, 10, 20, 30,  0, 10], dtype=torch.int32)
    """
    return torch.arange(tokens, dtype=torch.int32).remainder_(LANES).mul_(size)


SUMS = ("excess", "excess_sq", "l_limited", "abs", "excess_abs")
APART = 3
"""Of these, the first are added up for tokens that fell and for the others; the sizes are differences of such sums."""
TOKEN_METRICS = (
    "k1", "k3", "abs_log_ratio_mean", "abs_log_ratio_max", "chi2_token", "ess_frac", "tv_sampled", "ratio_mean",
)  # fmt: skip
SEQUENCE_METRICS = ("acceptance_sum", "acceptance_mean", "acceptance_worst")
DIVERGENCES = tuple(name for name in METRICS if name.startswith("divergence/") and name.endswith("_mean"))

Tables = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Facets:
    """Sums, maxima and logs of sums by bucket, under `axis/column`."""

    sums: Mapping[str, np.ndarray] = field(default_factory=dict)
    maxima: Mapping[str, np.ndarray] = field(default_factory=dict)
    logs: Mapping[str, np.ndarray] = field(default_factory=dict)
    named: Mapping[str, Mapping[str, Facets]] = field(default_factory=dict)
    """For each of `NAMED`, by name: of the sequences of that name, one bucket under `axis/column`; see `_by_name`."""

    @staticmethod
    def of(batch: Logged) -> tuple[Facets, dict[str, PerSequence]]:
        """Summarize one batch, also by sequence for each of its ratios to the rollout policy."""
        if batch.logp_rollout is None or not batch.num_tokens:
            return Facets(_by_length(batch, {}), named=_by_name(batch, {})), {}
        sums, maxima, logs, per_sequence = _summed(batch)
        sums = {**_by_length(batch, per_sequence), **sums}
        return Facets(sums, maxima, logs, _by_name(batch, per_sequence)), per_sequence

    def merge(self, other: Facets) -> Facets:
        """The sums of both."""
        return Facets(
            joined(np.add, self.sums, other.sums),
            joined(np.maximum, self.maxima, other.maxima),
            joined(np.logaddexp, self.logs, other.logs),
            joined(lambda a, b: fewest(joined(Facets.merge, a, b)), self.named, other.named),
        )

    def rows(self) -> dict[str, list[dict[str, Any]]]:
        """One table by axis: a row for each bucket with anything in it, by length for every bucket."""
        tables = {}
        for name, axis in AXES.items():
            rows = (self._row(name, axis, i) for i in range(len(axis)))
            tables[name] = [r for r in rows if name == "length" or r["sequences"]]
        for kind in NAMED:
            tables[kind] = [
                own._row(kind, Axis((name,), (None,), (None,)), 0)
                for name, own in sorted(self.named.get(kind, {}).items())
            ]
        tables["drawn_by"] = [{**row, **_stated(row["label"])} for row in tables["drawn_by"]]
        return tables

    def _row(self, name: str, axis: Axis, i: int) -> dict[str, Any]:
        prefix = f"{name}/"
        numbers, largest, logs = (
            {k.removeprefix(prefix): float(x[i]) for k, x in tables.items() if k.startswith(prefix)}
            for tables in (self.sums, self.maxima, self.logs)
        )
        row = {
            "label": axis.labels[i],
            "low": axis.lows[i],
            "high": axis.highs[i],
            "sequences": int(numbers.get("sequences", 0)),
            "tokens": int(numbers.get("tokens", 0)),
        }
        # The sums under the names that the table of metrics knows.
        ratios = [key.removesuffix("/excess") for key in numbers if key.endswith("/excess")]
        for key, worst in largest.items():
            on = key.removesuffix("/abs_max")
            n, excess = numbers[f"{on}/n"], numbers[f"{on}/excess"]
            numbers[f"{on}/w"] = n + excess
            if name not in NAMED:
                numbers[f"{on}/w2"] = n + 2 * excess + numbers[f"{on}/excess_sq"]
            numbers[f"{on}/k3"] = excess - numbers[f"{on}/l_limited"]
            numbers[f"{on}/l_max"] = numbers[f"{on}/-l_min"] = worst
            if (error := _error_of_k3(numbers, on)) is not None:
                row[f"{on}/k3_se"] = error
        numbers |= logs
        names = [f"{on}/{m}" for on in ratios for m in (*TOKEN_METRICS, *SEQUENCE_METRICS, "ratio_mean_z")]
        for metric in (*names, *DIVERGENCES, "reward/mean", "version_lag/mean"):
            try:
                row[metric] = METRICS[metric].value(numbers)
            except (KeyError, ZeroDivisionError, ValueError):  # not of this axis; an empty bucket
                continue
        return row


def _error_of_k3(numbers: Mapping[str, float], on: str) -> float | None:
    """Standard error of the mean k3 over tokens, clustered by sequence, from sums over sequences with tokens.

    sqrt(b / (b - 1) sum_i (S_i - k3 T_i)^2) / n,   S_i the sum of k3 over sequence i, T_i its tokens

    None for fewer than two sequences, and where the sums were not taken.
    """
    n, b = numbers[f"{on}/n"], numbers.get(f"{on}/b", 0.0)
    if b < 2 or f"{on}/k3_sq" not in numbers:
        return None
    mean = numbers[f"{on}/k3"] / n
    square = numbers[f"{on}/k3_sq"] - 2 * mean * numbers[f"{on}/k3_length"] + mean**2 * numbers[f"{on}/length_sq"]
    return math.sqrt(b / (b - 1) * max(square, 0.0)) / n


def joined(how: Callable[[Any, Any], Any], mine: Mapping[Any, Any], others: Mapping[Any, Any]) -> dict[Any, Any]:
    """The entries of both, combined where both have one."""
    return {**mine, **{k: how(mine[k], x) if k in mine else x for k, x in others.items()}}


def _by_length(batch: Logged, per_sequence: Mapping[str, PerSequence]) -> dict[str, np.ndarray]:
    """Sum sequences, tokens and rewards in buckets of response length."""
    bucket = length_bucket(batch.response_lengths)

    def count(weights: Tensor | None = None) -> np.ndarray:
        double = None if weights is None else weights.double()
        return torch.bincount(bucket, double, len(AXES["length"])).double().numpy()

    sums = {"length/sequences": count(), "length/tokens": count(batch.cu_seqlens.diff())}
    if batch.rewards is not None:
        finite = batch.rewards.isfinite()
        sums["length/reward"] = count(batch.rewards.where(finite, 0.0))
        sums["length/reward/n"] = count(finite)
    for on, s in per_sequence.items():
        sums[f"length/{on}/b"] = count(s.lengths > 0)
        for gate, accepted in s.accepted().items():
            sums[f"length/{on}/accepted_{gate}"] = count(accepted)
    return sums


NAMED: Mapping[str, tuple[str, int]] = {"worker": ("workers", 80), "drawn_by": ("drawn_by", 2000)}
"""Axes whose buckets have names: the field of the log that holds them, and how many characters of them count. Longer
names that begin alike are one."""
NAMES = 256
"""Names with a row of their own along each axis, the first in their order."""
OTHERS, UNNAMED = "(others)", "(no name)"
"""Rows of the names beyond, and of the responses for which the log gives none."""


def name_of(kind: str, name: str) -> str:
    """Label of a row for the name in the log (a worker, or another kind in `NAMED`), shortened to the kind's limit."""
    return name[: NAMED[kind][1]] or UNNAMED


def fewest(names: Mapping[str, Facets]) -> dict[str, Facets]:
    """The first `NAMES` in order; those beyond are one. However parts are merged, the same are left."""
    ordered = sorted(names.keys() - {OTHERS})
    beyond = [names[name] for name in (*ordered[NAMES:], *([OTHERS] if OTHERS in names else []))]
    smallest = {name: names[name] for name in ordered[:NAMES]}
    return smallest | ({OTHERS: functools.reduce(Facets.merge, beyond)} if beyond else {})


def _by_name(batch: Logged, per_sequence: Mapping[str, PerSequence]) -> dict[str, dict[str, Facets]]:
    """Sum statistics over the sequences of each worker, or of another name in `NAMED`. A response that several workers
    drew counts for the worker that ended it.

    k3 is the sum of e^l - 1, l limited at 20 nats, less that of l: as in `PerSequence`.
    """
    axes: dict[str, dict[str, Facets]] = {}
    for kind, (field_name, _) in NAMED.items():
        if (texts := getattr(batch, field_name)) is not None:
            axes[kind] = _of_names(batch, per_sequence, kind, texts)
    return axes


def _stated(text: str) -> dict[str, Any]:
    """A short label, and provenance as plain data; None where the log has words of its own."""
    from offdrift.records.provenance import Provenance

    try:
        provenance = Provenance.from_text(text)
    except BadValueError:
        return {"label": text[:80], "provenance": None}
    return {"label": str(provenance), "provenance": asdict(provenance)}


def _of_names(
    batch: Logged, per_sequence: Mapping[str, PerSequence], kind: str, texts: Sequence[str]
) -> dict[str, Facets]:
    names, index = np.unique([name_of(kind, text) for text in texts], return_inverse=True)
    if len(names) > NAMES:  # what `fewest` would make one is one before it is counted
        rank = np.cumsum(names != OTHERS) - 1
        beyond = (names == OTHERS) | (rank >= NAMES)
        index = np.where(beyond, min(rank[-1] + 1, NAMES), rank)[index]
        names = np.array([*names[~beyond], OTHERS])
    place, lengths = torch.from_numpy(index), batch.cu_seqlens.diff().double()

    def added(x: Tensor) -> np.ndarray:
        return torch.bincount(place, x.double(), len(names)).numpy()

    sums = {"sequences": added(torch.ones(len(index))), "tokens": added(lengths)}
    if batch.rewards is not None:
        finite = batch.rewards.isfinite()
        sums |= {"reward": added(batch.rewards.where(finite, 0.0)), "reward/n": added(finite)}
    if batch.lag is not None:
        sums |= {"version_lag": added(batch.segments.sum(batch.lag.double())), "version_lag/n": added(lengths)}
    for name, x in batch.divergences.items():
        sums |= {f"divergence/{name}": added(batch.segments.sum(x.double())), f"divergence/{name}/n": added(lengths)}
    maxima = {}
    for on, s in per_sequence.items():
        k3, tokens = s.excess - s.total, s.lengths.double()
        columns = {
            "n": tokens, "b": tokens > 0, "excess": s.excess, "excess2": s.excess.square(), "l_limited": s.total,
            "k3_sq": k3.square(), "k3_length": k3 * tokens, "length_sq": tokens.square(),
            **{f"accepted_{gate}": accepted for gate, accepted in s.accepted().items()},
        }  # fmt: skip
        sums |= {f"{on}/{name}": added(x) for name, x in columns.items()}
        largest = torch.zeros(len(names), dtype=s.worst.dtype).scatter_reduce_(0, place, s.worst, "amax")
        maxima[f"{on}/abs_max"] = largest.double().numpy()
    by_kind: dict[str, Facets] = {}
    for i, name in enumerate(names):
        added_up, largest = ({f"{kind}/{k}": x[[i]] for k, x in table.items()} for table in (sums, maxima))
        by_kind[str(name)] = Facets(added_up, largest)
    return fewest(by_kind)


def _summed(batch: Logged) -> tuple[Tables, Tables, Tables, dict[str, PerSequence]]:
    """Sums, maxima and logs of sums by bucket, and sums by sequence: one pass, in blocks that stay in cache."""
    totals = CellTotals(batch)
    for block in chunks(batch, tokens=4 * BLOCK):  # some sixty calls on each
        totals.add(block)
    return *totals.by_axis(), {on: PerSequence.cat(x) for on, x in totals.parts.items()}


class CellTotals:
    """Sums, maxima and logs of sums by cell of the facets, to which blocks of a batch are added."""

    def __init__(self, batch: Logged) -> None:
        self.cells, second = Cells.known(batch), seconds(batch)
        self.size = math.prod(self.cells.shape)
        self.present, self.parts = np.zeros(64), {on: [] for on in second}
        self.tokens, self.exact = self.table(1, LANES), {name: self.table(1, LANES) for name in batch.divergences}
        # `SUMS` of tokens within `NEAR`, those that fell apart from the others, and the count and logs of those beyond.
        self.near = {on: self.table(APART, 2 * LANES) for on in second}
        self.far = {on: self.table(len(SUMS) + 1) for on in second}
        self.far_logs = {on: LogTable.empty(self.size, x.dtype) for on, x in second.items()}
        self.largest = {on: self.table(1, LANES, x.dtype) for on, x in second.items()}

    def table(self, rows: int = 1, copies: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
        """Zeros by cell."""
        return torch.zeros(rows, copies * self.size, dtype=dtype)

    def add(self, block: Logged) -> None:
        """Add a block's tokens to their cells."""
        assert block.logp_rollout is not None
        place, rollout = self.cells.of_tokens(block), at_least_float32(block.logp_rollout)
        self.present += self.cells.sequences(place, block.cu_seqlens)
        copies = lanes(self.size, 1 << (block.num_tokens - 1).bit_length())[: block.num_tokens]
        lane = place + copies
        cell = lane.long()
        self.tokens += torch.bincount(cell, minlength=LANES * self.size)
        for on, policy in seconds(block).items():
            raw = policy - rollout
            limited, size_of_l = clamped(raw), raw.abs()
            excess = limited.expm1().double()  # the one exponential of a token
            self.parts[on].append(PerSequence.sums(block.segments, raw, excess, size_of_l))
            self.largest[on][0].scatter_reduce_(0, cell, size_of_l, "amax")
            within = size_of_l.numpy() <= NEAR
            if not bool(within.all()):
                beyond = torch.from_numpy(np.flatnonzero(~within))
                where = place[beyond].long()
                _scatter(self.far[on], _values(excess[beyond], limited[beyond], size_of_l[beyond]), where)
                self.far[on][-1].scatter_add_(0, where, torch.ones_like(excess[beyond]))
                self.far_logs[on].add(raw[beyond], where)
                for x in (excess, limited, size_of_l):
                    x[beyond] = 0.0
            fell = torch.from_numpy((raw.numpy() < 0).view(np.int8))
            signed = torch.add(lane, fell, alpha=LANES * self.size).long()
            _scatter(self.near[on], _values(excess, limited, size_of_l), signed)
        for name, x in block.divergences.items():
            self.exact[name][0].scatter_add_(0, cell, x.double())

    def by_axis(self) -> tuple[Tables, Tables, Tables]:
        """Sums, maxima and logs of sums along each axis of the facets."""
        cells = self.cells
        (counted,) = tokens = _whole(self.tokens)
        sums = {f"{axis}/sequences": counts for axis, counts in cells.named(self.present).items()}
        maxima, logs = {}, {}
        names = [*self.near, *(f"divergence/{name}" for name in self.exact)]
        for axis, (count,) in cells.along(tokens).items():
            sums |= {f"{axis}/tokens": count, **{f"{axis}/{name}/n": count for name in names}}
        for on, far in self.far.items():
            within = torch.cat([_of_both_signs(self.near[on]), (counted - far[-1])[None]])
            for axis, columns in cells.along((within + far)[: len(SUMS)]).items():
                sums |= {f"{axis}/{on}/{k}": x for k, x in zip(SUMS, columns, strict=True)}
            for axis, (most,) in cells.along(self.largest[on].view(LANES, -1).amax(0)[None], np.maximum).items():
                maxima[f"{axis}/{on}/abs_max"] = most
            near_logs = _near_logs(within)
            for axis, columns in cells.log_added(torch.logaddexp(self.far_logs[on].logs(), near_logs)).items():
                logs |= {f"{axis}/{on}/{k}": x for k, x in zip(TOKEN_LOGS, columns, strict=True)}
        for name, total in self.exact.items():
            sums |= {f"{axis}/divergence/{name}": x for axis, (x,) in cells.along(_whole(total)).items()}
        for column in ("sequences", "tokens"):  # of all sequences, scored or not: `_by_length`
            del sums[f"length/{column}"]
        return sums, maxima, logs


def _values(excess: Tensor, limited: Tensor, size_of_l: Tensor) -> Iterator[Tensor]:
    """`SUMS` of each token, one after another, so that each is added up while it is in cache."""
    yield excess
    yield excess * excess
    yield limited.double()
    yield size_of_l.double()
    yield excess.abs()


def _scatter(table: Float[Tensor, "k cells"], values: Iterable[Float[Tensor, " n"]], cell: Int[Tensor, " n"]) -> None:
    """Add up values by cell, in place."""
    for row, x in zip(table, values):
        row.scatter_add_(0, cell, x)


def _whole(table: Float[Tensor, "k lanes_cells"]) -> Float[Tensor, "k cells"]:
    """A table whose lanes are added up."""
    return table.view(len(table), LANES, -1).sum(1)


def _of_both_signs(table: Float[Tensor, "k lanes_cells"]) -> Float[Tensor, "sums cells"]:
    """`SUMS` from those that are kept of tokens that did not fall and of those that did."""
    others, fell = table.view(APART, 2, LANES, -1).sum(2).unbind(1)
    return torch.cat([others + fell, (others - fell)[[SUMS.index("l_limited"), SUMS.index("excess")]]])


def _near_logs(table: Float[Tensor, "k cells"]) -> Float[Tensor, "2 cells"]:
    """Logs of the sums of e^l and e^2l, from sums of e^l - 1 and of its square; -inf in empty cells."""
    excess, squared, n = table[SUMS.index("excess")], table[SUMS.index("excess_sq")], table[-1]
    return torch.stack([n + excess, n + 2 * excess + squared]).clamp_(min=0).log()


@dataclass(frozen=True)
class LogTable:
    """Sums of e^l and of e^2l in each cell, at any size of l: the cell's largest l is taken out."""

    top: Float[Tensor, " cells"]
    scaled: Float[Tensor, "2 cells"]

    @staticmethod
    def empty(cells: int, dtype: torch.dtype) -> LogTable:
        """Nothing in any cell; `dtype` is that of the log-ratios."""
        top = torch.full((cells,), torch.finfo(dtype).min, dtype=dtype)
        return LogTable(top, torch.zeros(2, cells, dtype=torch.float64))

    def add(self, log_ratio: Float[Tensor, " n"], cell: Int[Tensor, " n"]) -> None:
        """Add tokens, in place."""
        before = self.top.clone()
        self.top.scatter_reduce_(0, cell, log_ratio, "amax")
        shrunk = (before - self.top).double().exp()
        self.scaled.mul_(torch.stack([shrunk, shrunk * shrunk]))
        x = (log_ratio - self.top.index_select(0, cell)).exp_().double()
        self.scaled[0].scatter_add_(0, cell, x)
        self.scaled[1].scatter_add_(0, cell, x.square_())

    def logs(self) -> Float[Tensor, "2 cells"]:
        """Logs of both sums; -inf in empty cells."""
        top = self.top.double()
        return self.scaled.log() + torch.stack([top, 2 * top])


def seconds(batch: Logged) -> dict[str, Tensor]:
    """Log-probs of the second policy of each ratio to the rollout policy that a batch knows."""
    policies = {"old": batch.logp_old, "current": batch.logp}
    return {on: at_least_float32(x) for on, name in SECOND.items() if (x := policies[name]) is not None}
