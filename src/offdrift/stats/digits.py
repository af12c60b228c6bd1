"""Sums that are the same to the last bit in any order and on any split.

A float64 is cut into digits of 26 bits at places that are the same for all numbers: x = sum_i d_i 2^(26 (place - i)).
A sum of numbers is the sum of their digits, place by place, which rounds nothing up to 2^27 numbers, so that no order
shows. The largest place and the next three are kept: at least 78 bits below the largest number. What is further down is
left out of every number alike. `compiled/passes.cpp` cuts the numbers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

WIDTH, PLACES = 26, 4


class Exact(NamedTuple):
    """Digits of sums by name: a row holds the largest place, then its digit and the next three."""

    names: tuple[str, ...] = ()
    digits: Float[Tensor, "n 5"] = torch.zeros(0, PLACES + 1, dtype=torch.float64)

    def merge(self, other: Exact, *, mine: Collection[str], theirs: Collection[str]) -> Exact:
        """The digits of both, of sums whose digits are known wherever there is such a sum.

        Args:
            mine, theirs: names of all sums on this side and on the other.
        """
        if self.names == other.names:
            return Exact(self.names, joined(self.digits, other.digits)) if self.names else NO_DIGITS
        left, right = dict(zip(self.names, self.digits)), dict(zip(other.names, other.digits))
        both = [name for name in self.names if name in right]
        alone = {k: x for k, x in left.items() if k not in theirs} | {k: x for k, x in right.items() if k not in mine}
        rows = [*(joined(left[k][None], right[k][None])[0] for k in both), *alone.values()]
        return Exact((*both, *alone), torch.stack(rows)) if rows else NO_DIGITS

    def only(self, names: Collection[str]) -> Exact:
        """The digits of these sums."""
        rows = [i for i, name in enumerate(self.names) if name in names]
        return Exact(tuple(self.names[i] for i in rows), self.digits[rows])


NO_DIGITS = Exact()


def settled(
    named: dict[str, Tensor], of: Callable[[Float[Tensor, "n 5"]], Float[Tensor, " n"]]
) -> tuple[dict[str, Tensor], Exact]:
    """Numbers of which some are given by their digits: all of them as numbers, and the digits.

    Args:
        of: makes numbers of digits, `rounded` or `rounded_logs`.
    """
    rows = {name: x for name, x in named.items() if x.ndim}
    if not rows:
        return named, NO_DIGITS
    exact = Exact(tuple(rows), torch.stack(list(rows.values())))
    return named | dict(zip(rows, of(exact.digits).unbind(), strict=True)), exact


@functools.lru_cache(maxsize=64)
def _places_in(names: tuple[str, ...], some: tuple[str, ...]) -> Int[Tensor, " some"]:
    where = {name: i for i, name in enumerate(names)}
    return torch.tensor([where[name] for name in some], dtype=torch.int64)


def replaced(
    names: tuple[str, ...],
    values: Float[Tensor, " n"],
    exact: Exact,
    of: Callable[[Float[Tensor, "n 5"]], Float[Tensor, " n"]],
) -> Float[Tensor, " n"]:
    """The numbers, those with digits made of them by `rounded` or `rounded_logs`."""
    if not exact.names:
        return values
    return values.index_copy(0, _places_in(names, exact.names), of(exact.digits))


def joined(a: Float[Tensor, "n 5"], b: Float[Tensor, "n 5"]) -> Float[Tensor, "n 5"]:
    """The digits of the sums of both."""
    top = torch.maximum(a[:, :1], b[:, :1])
    return torch.cat([top, _from(top, a) + _from(top, b)], 1)


def _from(top: Float[Tensor, "n 1"], x: Float[Tensor, "n 5"]) -> Float[Tensor, "n 4"]:
    """Digits from a place on that is at or above the row's own."""
    wide = torch.cat([torch.zeros_like(x[:, 1:]), x[:, 1:]], 1)
    return wide.gather(1, PLACES - (top - x[:, :1]).clamp(max=PLACES).long() + torch.arange(PLACES))


def rounded(x: Float[Tensor, "n 5"]) -> Float[Tensor, " n"]:
    """The sums as float64.

    Example:
        >>> rounded(torch.tensor([[0.0, 3.0, 2.0**25, 0.0, 0.0]], dtype=torch.float64))
        tensor([3.5000], dtype=torch.float64)
    """
    places = x[:, 0].clamp(-40, 40).numpy().astype(np.int32)  # beyond there is nothing, or no number
    return torch.from_numpy(np.ldexp(_leading(x).numpy(), WIDTH * places))


def rounded_logs(x: Float[Tensor, "n 5"]) -> Float[Tensor, " n"]:
    """Logs of the sums, at any size; -inf of nothing.

    Example:
        >>> rounded_logs(torch.tensor([[1000.0, 1.0, 0.0, 0.0, 0.0]], dtype=torch.float64)) / math.log(2)
        tensor([26000.], dtype=torch.float64)
    """
    pairs = zip(_leading(x).tolist(), x[:, 0].tolist(), strict=True)
    # One by one: a vector's logarithm may round otherwise at its end.
    return torch.tensor([_log(m) + place * WIDTH * math.log(2) for m, place in pairs], dtype=torch.float64)


def _log(x: float) -> float:
    return math.log(x) if x > 0 else -math.inf if x == 0 else math.nan


def _leading(x: Float[Tensor, "n 5"]) -> Float[Tensor, " n"]:
    """The sum in units of its largest place, from the smallest digit up."""
    total = x[:, PLACES]
    for i in range(PLACES - 1, 0, -1):
        total = total * 2.0**-WIDTH + x[:, i]
    return total
