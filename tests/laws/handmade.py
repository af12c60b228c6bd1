"""Batches made for one case at a time: a log-ratio where it is wanted, all else out of the way."""

import math
from collections.abc import Sequence as Many

import torch

from offdrift.laws.batches import DIVERGENCES, Batch

MU = -1.2
"""log mu of every token, unless its ratio needs room above."""
ASIDE = 0.03
"""What the log-ratio that is not asked for is, so that a part cannot read the wrong one."""


def made(
    on: str,
    l: Many[float],  # noqa: E741
    a: Many[float],
    *,
    lengths: Many[int] | None = None,
    turns: list[list[int]] | None = None,
    aside: float = ASIDE,
    mu: float = MU,
    columns: dict[str, Many[float]] | None = None,
) -> Batch:
    """A batch with the given log-ratios `on` two policies; by default one token per sequence.

    The other of mismatch and staleness is `aside`; the full ratio is their sum, unless it is asked
    for: then the mismatch is `aside`. Every sequence has a prompt of its own, and reward 0.5.
    """
    x = torch.tensor([*l], dtype=torch.float64)
    first = torch.full_like(x, aside) if on != "mismatch" else x
    total = {"full": x, "mismatch": x + aside, "staleness": x + aside}[on]
    start = torch.full_like(x, mu).minimum(-0.01 - first.clamp(min=0)).minimum(-0.01 - total)
    tokens = {"mu": start, "old": start + first, "pi": start + total, "ref": start}
    tokens["a"] = torch.tensor([*a], dtype=torch.float64)
    tokens["entropy"] = torch.ones_like(x)
    tokens["lag"] = torch.zeros_like(x)
    tokens |= {name: torch.zeros_like(x) for name in DIVERGENCES}
    tokens |= {k: torch.tensor([*v], dtype=torch.float64) for k, v in (columns or {}).items()}
    if turns is None:
        turns = [[n] for n in (lengths or [1] * len(x))]
    b = len(turns)
    assert sum(map(sum, turns)) == len(x) == len(tokens["a"])
    half = torch.full((b,), 0.5, dtype=torch.float64)
    return Batch(tokens=tokens, rewards=half, groups=torch.arange(b), turns=turns)


def solve(f, value: float, low: float, high: float) -> float:
    """Where a monotone f is `value`, between low and high."""
    rising = f(high) > f(low)
    for _ in range(200):
        middle = (low + high) / 2
        below = f(middle) < value
        low, high = (middle, high) if below == rising else (low, middle)
    return (low + high) / 2


def k3(l: float) -> float:  # noqa: E741
    return math.expm1(l) - l


def bernoulli_kl(p: float, q: float) -> float:
    """KL of "this token or not", never negative."""
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def binary_kl(p: float, l: float) -> float:  # noqa: E741
    """KL of "this token or not", p to q = p e^l, with the sign of the move; 1e-8 as in DPPO."""
    q = p * math.exp(l)
    kl = -p * l + (1 - p) * math.log((1 - p + 1e-8) / (1 - q + 1e-8))
    return math.copysign(kl, l)
