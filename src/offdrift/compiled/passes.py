"""The passes of `passes.cpp` on tensors: each gives None where the plain way has to do it.

They take packed CPU tensors of one dtype, float32 or float64, outside of transformations of `torch.func`; no gradient.
All sums are float64, added up in an order that the tokens decide: no number depends on how many threads there are,
nor does any of a segment on what other segments are in the batch.

Beside the float64 value of a sum, relative errors are at most 1e-9 (float32 tokens, whose exponentials are a series
that ends there) or 1e-13; the plain ways add float32 tokens in float32, with 1e-7. So a statistic within that of a
gate's bound may be inside by one way and outside by the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from offdrift.compiled.build import library
from offdrift.compiled.calls import call, in_memory
from offdrift.numerics import asked

Statistic = Literal["itself", "ratio", "k2", "k3", "abs_log_ratio", "ratio_error"]
"""Of a log-ratio: names of `correction.statistics`, or the number itself."""

COLUMNS = {"ratio": 1, "k2": 2, "k3": 4, "ratio_error": 5, "abs_log_ratio": 14}
"""Where a row of `sweep` has the sum of each statistic; of `k2` twice that."""

ROW, SUMS, MAXIMA, DIGITS = 22, 25, 5, 5
"""Columns of a row; sums and maxima over a batch, and numbers of a sum, as `stats.digits` has it."""

THREADS_FROM = 2**18
"""Tokens from which threads are worth starting."""

DTYPES = {torch.float32: "float32", torch.float64: "float64"}


Run = Callable[..., int]
"""A function of the library for one dtype, called with a tuple of tensors and integers."""


def _pass(name: str, *tensors: Tensor) -> Run | None:
    """The pass of this name, or None where it is not asked for, not built, or not for such tensors."""
    x = tensors[0]
    if not asked() or x.dtype not in DTYPES or not in_memory(*tensors):
        return None
    if any(t.shape != x.shape or t.dtype != x.dtype or t.ndim != 1 for t in tensors):
        return None
    found = library("passes")
    return None if found is None else partial(call, getattr(found, f"{name}_{DTYPES[x.dtype]}"))


def _threads(n: int) -> int:
    return torch.get_num_threads() if n >= THREADS_FROM else 1


class RatioSums(NamedTuple):
    """A ratio of a batch and its sums, from one pass; all but the log-ratio is float64."""

    log_ratio: Float[Tensor, " n"]
    table: Float[Tensor, "b columns"]
    """A row of sums for each segment."""
    digits: Float[Tensor, "sums 5"]
    """Over all segments: `drift.TOKEN_SUMS`, `SEQUENCE_SUMS`, four of the policies, `TOKEN_LOGS`, `SEQUENCE_LOGS`."""
    maxima: Float[Tensor, " maxima"]
    """`drift.TOKEN_MAXIMA` and `SEQUENCE_MAXIMA`."""

    def segment_sums(self, of: Statistic) -> Float[Tensor, " b"]:
        """Sum over each segment of a statistic of its tokens; 0 where it is empty."""
        total = self.table[:, COLUMNS[of]]
        return total / 2 if of == "k2" else total


def sweep(first: Float[Tensor, " n"], second: Float[Tensor, " n"], cuts: Int[Tensor, " cuts"]) -> RatioSums | None:
    """Everything about the ratio of two policies that depends on nothing but their log-probs, in one pass.

    The log-ratio carries its exponential, which `limited_weights` takes from there.

    Args:
        first, second: log-probs of the tokens, nats; l = second - first.
        cuts: where the segments begin and end.
    """
    if (run := _pass("sweep", first, second)) is None or not (len(cuts) and cuts.is_cpu):
        return None
    first, second, cuts = first.detach().contiguous(), second.detach().contiguous(), cuts.long().contiguous()
    log_ratio, weight = torch.empty_like(first), torch.empty_like(first)
    table = torch.empty(len(cuts) - 1, ROW, dtype=torch.float64)
    out = torch.empty(SUMS * DIGITS + MAXIMA, dtype=torch.float64)
    n = len(first)
    if not run((first, second, n, cuts, len(table), _threads(n), log_ratio, weight, table, out)):
        return None  # the plain way says what is wrong with such cuts
    setattr(log_ratio, WEIGHT, weight)
    return RatioSums(log_ratio, table, out[:-MAXIMA].view(SUMS, DIGITS), out[-MAXIMA:])


WEIGHT = "_offdrift_weight"
"""Attribute of a log-ratio from `sweep`: e^l, which lives as long as it."""


def segment_sums(x: Float[Tensor, " n"], cuts: Int[Tensor, " cuts"]) -> Float[Tensor, " b"] | None:
    """Sum over each segment, float64; 0 where it is empty."""
    if (run := _pass("segment_sums", x)) is None or not (len(cuts) and cuts.is_cpu):
        return None
    out = torch.empty(len(cuts) - 1, dtype=torch.float64)
    x, cuts = x.detach().contiguous(), cuts.long().contiguous()
    done = run((x, len(x), cuts, len(out), _threads(len(x)), out))
    return out if done else None  # the plain way says what is wrong with such cuts


def digits(x: Float[Tensor, " n"]) -> Float[Tensor, " 5"] | None:
    """Digits of a sum."""
    if (run := _pass("digits", x)) is None:
        return None
    x, out = x.detach().contiguous(), torch.empty(DIGITS, dtype=torch.float64)
    run((x, len(x), out))
    return out


def digits_of_exp(x: Float[Tensor, " n"]) -> Float[Tensor, "2 5"] | None:
    """Digits of the sums of e^x and of its square, at any size."""
    if (run := _pass("digits_of_exp", x)) is None:
        return None
    x, out = x.detach().contiguous(), torch.empty(2, DIGITS, dtype=torch.float64)
    run((x, len(x), out))
    return out


def reweighted_tv(
    log_rho: Float[Tensor, " n"], log_ratio: Float[Tensor, " n"], cuts: Int[Tensor, " cuts"]
) -> Float[Tensor, " 5"] | None:
    """Digits of the sum over tokens of rho |e^l - 1| / 2."""
    if (run := _pass("reweighted_tv", log_rho, log_ratio)) is None or not (len(cuts) and cuts.is_cpu):
        return None
    x, y, cuts = log_rho.detach().contiguous(), log_ratio.detach().contiguous(), cuts.long().contiguous()
    table, out = torch.empty(len(cuts) - 1, dtype=torch.float64), torch.empty(DIGITS, dtype=torch.float64)
    return out if run((x, y, len(x), cuts, len(table), _threads(len(x)), table, out)) else None


def inside(
    log_ratio: Float[Tensor, " n"], of: Statistic, *, low: float | None, high: float | None
) -> Bool[Tensor, " n"] | None:
    """Mark the tokens with low <= statistic <= high; `ratio` is given as its log, as are its bounds."""
    if (run := _pass("inside", log_ratio)) is None:
        return None
    ends = (-math.inf if low is None else low, math.inf if high is None else high)
    bounds, x = torch.tensor(ends, dtype=torch.float64), log_ratio.detach().contiguous()
    marks = torch.empty_like(x, dtype=torch.bool)
    run((get_args(Statistic).index(of), x, len(x), _threads(len(x)), bounds, marks))
    return marks


def limited_weights(
    log_ratio: Float[Tensor, " n"], *, cap: float | None, floor: float | None, mask: bool
) -> tuple[Float[Tensor, " n"], Bool[Tensor, " n"]] | None:
    """Weights e^l, l within +-20, inside the limits, and marks of those that the limits changed.

    Args:
        cap, floor: limits of the ratio; None or 0 for none.
        mask: whether a weight outside becomes 0, else the limit.
    """
    if (run := _pass("limited_weights", log_ratio)) is None:
        return None
    log_cap, log_floor = (math.log(cap) if cap else math.inf), (math.log(floor) if floor else -math.inf)
    edges = (0.0, 0.0) if mask else (cap or 0.0, floor or 0.0)
    limits = torch.tensor([log_cap, log_floor, *edges], dtype=torch.float64)
    x, unlimited = log_ratio.detach().contiguous(), getattr(log_ratio, WEIGHT, None)
    weight, limited = torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)
    if unlimited is None and (exponentials := _pass("exponentials", x)) is not None:
        exponentials((x, len(x), _threads(len(x)), weight))
    run((x, weight if unlimited is None else unlimited, len(x), _threads(len(x)), limits, weight, limited))
    return weight, limited


def weight_sums(
    weight: Float[Tensor, " n"], cuts: Int[Tensor, " cuts"]
) -> tuple[Float[Tensor, "2 5"], Float[Tensor, ""], Float[Tensor, " maxima"]] | None:
    """Digits of the sums of w and w^2; how many are not 1; maxima of w and of -w; float64."""
    if (run := _pass("weight_sums", weight)) is None or not (len(cuts) and cuts.is_cpu):
        return None
    x, cuts = weight.detach().contiguous(), cuts.long().contiguous()
    table, out = torch.empty(len(cuts) - 1, 5, dtype=torch.float64), torch.empty(2 * DIGITS + 3, dtype=torch.float64)
    done = run((x, len(x), cuts, len(table), _threads(len(x)), table, out))
    return (out[: 2 * DIGITS].view(2, DIGITS), out[2 * DIGITS], out[2 * DIGITS + 1 :]) if done else None


def histogram(
    x: Float[Tensor, " n"], *, low: int, side: int
) -> tuple[Int[Tensor, " bins"], Float[Tensor, "2 bins"]] | None:
    """Counts, and sums and sums of squares, by bin of a `stats.histogram.Grid`; the bits of the plain way."""
    if (run := _pass("histogram", x)) is None:
        return None
    counts = torch.zeros(2 * side + 1, dtype=torch.int64)
    moments = torch.zeros(2, 2 * side + 1, dtype=torch.float64)
    x = x.detach().contiguous()
    run((x, len(x), low, side, counts, moments))
    return counts, moments
