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
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from offdrift.compiled.build import library
from offdrift.compiled.calls import call, in_memory
from offdrift.numerics import asked

Statistic = Literal["itself", "ratio", "k2", "k3", "abs_log_ratio", "ratio_error"]
"""Of a log-ratio: names of `correction.statistics`, or the number itself."""

SUMS, MAXIMA, LOGS = 14, 3, 2
"""Columns of `token_sums`: `drift.TOKEN_SUMS`, `TOKEN_MAXIMA` and `TOKEN_LOGS`."""

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


def token_sums(first: Float[Tensor, " n"], raw: Float[Tensor, " n"]) -> tuple[Tensor, Tensor, Tensor] | None:
    """Sums, maxima and logs of sums over the tokens of a log-ratio, as `drift` names them; float64.

    Args:
        first: log-prob under the first policy of the ratio, nats.
        raw: the log-ratio, nats.
    """
    if (run := _pass("token_sums", first, raw)) is None:
        return None
    out = torch.empty(SUMS + MAXIMA + LOGS, dtype=torch.float64)
    first, raw = first.detach().contiguous(), raw.detach().contiguous()
    run((first, raw, len(raw), _threads(len(raw)), out))
    added, largest, in_logs = out.split([SUMS, MAXIMA, LOGS])
    return added, largest, in_logs


def segment_sums(x: Float[Tensor, " n"], cuts: Int[Tensor, " cuts"], of: Statistic) -> Float[Tensor, " b"] | None:
    """Sum over each segment of a number of its tokens, float64; 0 where a segment is empty."""
    if (run := _pass("segment_sums", x)) is None:
        return None
    if not (len(cuts) and cuts.is_cpu):
        return None
    out = torch.empty(len(cuts) - 1, dtype=torch.float64)
    x, cuts = x.detach().contiguous(), cuts.long().contiguous()
    done = run((get_args(Statistic).index(of), x, len(x), cuts, len(out), _threads(len(x)), out))
    return out if done else None  # the plain way says what is wrong with such cuts


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
    x = log_ratio.detach().contiguous()
    weight, limited = torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)
    run((x, len(x), _threads(len(x)), limits, weight, limited))
    return weight, limited


def weight_sums(weight: Float[Tensor, " n"]) -> tuple[Float[Tensor, " sums"], Float[Tensor, " maxima"]] | None:
    """Sums of w, w^2 and of w other than 1; maxima of w and of -w; float64."""
    if (run := _pass("weight_sums", weight)) is None:
        return None
    out = torch.empty(5, dtype=torch.float64)
    x = weight.detach().contiguous()
    run((x, len(x), _threads(len(x)), out))
    return out[:3], out[3:]


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
