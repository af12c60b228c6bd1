"""Which tokens of a log can be compared: no placeholder, no hole, nothing that is not a number.

Logs hold numbers where there was nothing to log. A log-prob above 0 cannot be one (+1.0 marks padding
in some frameworks); one of -9999 or less is how engines write minus infinity into JSON; a response of
8 or more exact zeros, to which another policy gives less than 1/e, was filled in. Such tokens are
counted by field and left out, never compared.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from offdrift.integrations.logs.columns import Lists
from offdrift.integrations.logs.fields import LOGPS
from offdrift.logprobs import POSITIVE_SLACK

LOWEST = -9999.0
"""What inference engines write for minus infinity; no sampled token is that unlikely."""

ZEROS = 8
"""Tokens from which on a response of exact zeros is no coincidence: one token can be certain."""


def scored(lists: Mapping[str, Lists]) -> tuple[Bool[Tensor, " n"] | None, dict[str, int]]:
    """Tokens that may train and that every field scores (None: all), and the others by field.

    Args:
        lists: fields of equal length, `mask` among them if the log has one.
    """
    mask = lists.get("mask")
    trains = None if mask is None else mask.values != 0
    filled_in = _filled_in({name: lists[name] for name in LOGPS if name in lists})
    unscored, drop = {}, None if trains is None or bool(trains.all()) else ~trains
    for name, x in lists.items():
        holes = [h for h in (_holes(name, x), filled_in.get(name)) if h is not None]
        if not holes:
            continue
        hole = holes[0] if len(holes) == 1 else holes[0] | holes[1]
        counted = hole if trains is None or name == "mask" else hole & trains
        unscored[name] = int(counted.sum())
        drop = hole if drop is None else drop | hole
    return None if drop is None else ~drop, {name: n for name, n in unscored.items() if n}


def _holes(name: str, x: Lists) -> Bool[Tensor, " n"] | None:
    """Tokens without a usable value; None if there are none, which one pass tells."""
    values = x.values
    if not values.dtype.is_floating_point or len(values) == 0:
        return x.missing
    low, high = (float(v) for v in torch.aminmax(values))
    if name in LOGPS:
        # NaN fails every comparison.
        if low > LOWEST and high <= POSITIVE_SLACK:
            return None
        return ~((values > LOWEST) & (values <= POSITIVE_SLACK))
    if abs(low) < float("inf") and abs(high) < float("inf"):
        return None
    return ~values.isfinite()


def _filled_in(logps: Mapping[str, Lists]) -> dict[str, Bool[Tensor, " n"]]:
    """Tokens of responses whose log-probs are all 0, where another policy found them unlikely."""
    if len(logps) < 2:
        return {}
    zero = {name: _zero_rows(x) for name, x in logps.items()}
    rows = torch.stack(list(zero.values())).any(0).nonzero().squeeze(-1).tolist()
    unlikely = torch.zeros_like(next(iter(zero.values())))
    for row in rows:
        parts = [x.values[x.cuts[row] : x.cuts[row + 1]] for x in logps.values()]
        unlikely[row] = any(float(part.nan_to_num(0.0).sum()) < -1.0 for part in parts)
    lengths = next(iter(logps.values())).lengths
    found = {name: z & unlikely for name, z in zero.items()}
    return {name: torch.repeat_interleave(z, lengths) for name, z in found.items() if z.any()}


def _zero_rows(x: Lists) -> Bool[Tensor, " b"]:
    lengths = x.lengths
    zero = torch.zeros_like(lengths, dtype=torch.bool)
    long = (lengths >= ZEROS).nonzero().squeeze(-1)
    first, last = x.cuts[:-1][long], x.cuts[1:][long] - 1
    # Nearly every row is ruled out by its ends.
    maybe = long[(x.values[first] == 0) & (x.values[last] == 0)]
    for row in maybe.tolist():
        zero[row] = not bool(x.values[x.cuts[row] : x.cuts[row + 1]].any())
    return zero


def response_positions(cuts: Int[Tensor, " cuts"]) -> Int[Tensor, " n"]:
    """Place of every token in its row, from 0."""
    return torch.arange(int(cuts[-1])) - torch.repeat_interleave(cuts[:-1], cuts.diff())
