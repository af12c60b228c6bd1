"""Sums that tell the causes of drift apart: `DriftStats.of(lp).plus(signature(lp))`.

They say what drift looks like: tilted (a temperature left out), shifted (log-probs off by one), one-sided (a filter),
in few tokens (router flips), or tokens that were drawn from another distribution than was logged. They cost about as
much again as `DriftStats.of`, so they are asked for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from offdrift.logprobs import LogProbs
from offdrift.numerics import PASS, clamped
from offdrift.ratios import stopped_log_ratio
from offdrift.segments import Segments
from offdrift.stats.drift import SECOND

SIDE = 1e-3
"""Nats beyond which a log-ratio counts as positive or negative."""
CLIP = (math.log(0.8), math.log(1.2))
"""Where PPO's clip at 0.2 begins, in nats."""
SUM_LIMIT, MEAN_LIMIT, WORST_LIMIT = math.log(2.0), 0.01, 0.05
"""What `{on}/acceptance_sum`, `_mean` and `_worst` hold |sum l|, |mean l| and max l^2 / 2 against."""

FAR = 2.0
"""Nats: a response with a token so far off is looked at for a shift by one token."""
PAIRED = 16
"""Tokens of such a response at least."""
OWN, NEIGHBOR = 0.5, 0.8
"""Of a shifted response log-probs correlate less with the same token's than this, and more with a neighbor's."""

Named = dict[str, Tensor]


@dataclass(frozen=True)
class PerSequence:
    """Sums of one ratio in each sequence; 0 in a sequence without tokens."""

    lengths: Int[Tensor, " b"]
    total: Float[Tensor, " b"]
    """sum l, nats."""
    excess: Float[Tensor, " b"]
    """sum of e^l - 1, l limited at 20: a sequence with such a token decides `ratio_mean_z` alone,
    however far beyond the limit it lies."""
    worst: Float[Tensor, " b"]
    """max |l|, nats."""

    @staticmethod
    def of(logprobs: LogProbs, on: str) -> PerSequence:
        """The sums of every sequence, in float64."""
        raw = stopped_log_ratio(logprobs, on=on)  # type: ignore[arg-type]
        return PerSequence.sums(logprobs.segments, raw, clamped(raw).expm1(), raw.abs())

    @staticmethod
    def sums(
        segments: Segments, raw: Float[Tensor, " n"], excess: Float[Tensor, " n"], size: Float[Tensor, " n"]
    ) -> PerSequence:
        """Sum l, e^l - 1 and |l| of every token in each sequence."""
        return PerSequence(segments.lengths, segments.total(raw), segments.total(excess), segments.largest(size))

    def select(self, first: int, last: int) -> PerSequence:
        """Sequences `first` up to but not including `last`."""
        parts = (x[first:last] for x in (self.lengths, self.total, self.excess, self.worst))
        return PerSequence(*parts)

    @staticmethod
    def cat(parts: Sequence[PerSequence]) -> PerSequence:
        """The sequences of all parts, in order."""
        columns = zip(*((p.lengths, p.total, p.excess, p.worst) for p in parts), strict=True)
        return PerSequence(*map(torch.cat, columns))

    def accepted(self) -> dict[str, Bool[Tensor, " b"]]:
        """Mark the sequences with tokens that each of `stats.metrics.GATES` lets through."""
        filled = self.lengths > 0
        return {
            "sum": filled & (self.total.abs() <= SUM_LIMIT),
            "mean": filled & (self.total.abs() <= MEAN_LIMIT * self.lengths),
            "worst": filled & (self.worst.square() / 2 <= WORST_LIMIT),
        }


def signature(
    logprobs: LogProbs,
    *,
    advantages: Float[Tensor, " n"] | None = None,
    position: Int[Tensor, " n"] | None = None,
    per_sequence: dict[str, PerSequence] | None = None,
) -> Named:
    """Sums for the rows of `stats.metrics.shape`, and for `staleness/clip_frac`, by name.

    Tokens that the engine did not score are in none of them.

    ratio_mean_z: a token drawn from mu as it was logged has E[e^l - 1 | its prefix] = 0 under any
    second policy, so the sum s of a sequence has mean 0 and sequences are independent given their
    prompts: z = sum s / sqrt(sum s^2) is about standard normal however tokens of a sequence depend
    on each other. Where a few sequences carry sum s^2 (ratios of several nats) it is not: the mass
    that the right tail would have brought is unseen, and z leans to the negative.

    Args:
        logprobs: the batch.
        advantages: of each token; without them either side of the clip counts.
        position: of each token in its response, where tokens between others were left out.
        per_sequence: sums by ratio, if they are known already.

    Example:
        >>> from offdrift.stats.drift import DriftStats
        >>> from offdrift.stats.metrics import summarize
        >>> lp = LogProbs.pack(torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-0.5, -1.0, -1.5]),
        ...                    segments=Segments.from_lengths([3]))
        >>> summarize(DriftStats.of(lp).plus(signature(lp)))["full/slope"]
        0.5

    Reference: E[e^l] = 1 is the normalization of an importance weight; errors clustered by sequence
    as in Liang and Zeger, Biometrika 73, 1986.
    """
    sums: Named = {}
    with torch.no_grad():
        if logprobs.unscored is not None:
            advantages = None if advantages is None else logprobs.select_scored(advantages)
            position = logprobs.select_scored(logprobs.segments.position if position is None else position)
            logprobs = logprobs.scored
        if not len(logprobs.logp_rollout):
            return sums
        starts = _starts(logprobs.segments, position)
        for on, second in SECOND.items():
            if getattr(logprobs, "logp_old" if second == "old" else "logp") is None:
                continue
            raw = stopped_log_ratio(logprobs, on=on)  # type: ignore[arg-type]
            sums |= _tokens(on, logprobs.logp_rollout, raw, starts)
            s = (per_sequence or {}).get(on) or PerSequence.of(logprobs, on)
            sums |= {f"{on}/excess": s.excess.sum(), f"{on}/excess2": s.excess.square().sum()}
            sums |= {f"{on}/accepted_{gate}": x.count_nonzero() for gate, x in s.accepted().items()}
            if raw.device.type == "cpu":  # which sequences are looked at is known on the host alone
                shifted = shifted_sequences(logprobs.segments, logprobs.logp_rollout, raw, s.worst)
                sums |= {f"{on}/shifted": shifted, f"{on}/shifted/n": (s.lengths >= PAIRED).count_nonzero()}
        if logprobs.logp is not None and logprobs.logp_old is not None:
            raw = stopped_log_ratio(logprobs, on="staleness")
            low, high = raw < CLIP[0], raw > CLIP[1]
            if advantages is not None:
                low, high = low & (advantages < 0), high & (advantages > 0)
            sums["staleness/clipped"] = (low | high).count_nonzero()
            sums["staleness/clipped/n"] = logprobs.segments.cu_seqlens[-1]
    return sums


def shifted_sequences(
    segments: Segments, x: Float[Tensor, " n"], raw: Float[Tensor, " n"], worst: Float[Tensor, " b"]
) -> Int[Tensor, ""]:
    """Count sequences whose second log-probs are those of the token before or behind.

    In each sequence of at least `PAIRED` tokens with a log-ratio beyond `FAR`: the correlation of x = log mu and
    y = x + l is below `OWN` for the same token, and above `NEIGHBOR` for one of its neighbors.

    Args:
        x, raw: log mu and the log-ratio of every token.
        worst: max |l| of every sequence.
    """
    far = (worst > FAR) & (segments.lengths >= PAIRED)
    if not bool(far.any()):
        return far.count_nonzero()
    tokens = torch.repeat_interleave(far, segments.lengths)
    part = Segments.from_lengths(segments.lengths[far])
    first = x[tokens].double()
    second = first + clamped(raw[tokens]).double()
    first, second = (v - part.spread(part.total(v) / part.lengths) for v in (first, second))
    begins, ends = part.cu_seqlens[:-1], part.cu_seqlens[1:] - 1
    before, behind = second.roll(1).index_fill(0, begins, 0.0), second.roll(-1).index_fill(0, ends, 0.0)
    size = (part.total(first.square()) * part.total(second.square())).sqrt().clamp_min(1e-12)
    same, earlier, later = (part.total(first * v) / size for v in (second, before, behind))
    return ((same < OWN) & (torch.maximum(earlier, later) > NEIGHBOR)).count_nonzero()


def _starts(segments: Segments, position: Tensor | None) -> Int[Tensor, " s"]:
    """Tokens without a predecessor in the batch: first ones, and those behind a gap."""
    first = segments.cu_seqlens[:-1][segments.lengths > 0]
    if position is None:
        return first
    behind = torch.cat([position.new_ones(1, dtype=torch.bool), position.diff() != 1])
    behind[first] = True
    return behind.nonzero().squeeze(-1)


def _tokens(on: str, x: Tensor, raw: Tensor, starts: Tensor) -> Named:
    """Moments of x = log mu and y = x + l, over tokens and over neighbors."""
    n = len(x)
    moments = [_moments(x[a : a + PASS + 1], raw[a : a + PASS + 1], PASS) for a in range(0, n, PASS)]
    xs, xx, xl, ys, yy, before, after, positive, negative = torch.stack(moments).sum(0)
    sums = {"x": xs, "x2": xx, "xl": xl, "positive": positive, "negative": negative}
    # Neighbors: all of the stream, less what the cut between two sequences would pair.
    ends = torch.cat([starts[1:] - 1, starts.new_full((1,), n - 1)])
    x_first, x_last = x[starts].double(), x[ends].double()
    y_first, y_last = (v + clamped(raw[at]) for v, at in ((x_first, starts), (x_last, ends)))
    x_later, xx_later = xs - x_first.sum(), xx - x_first.square().sum()
    x_earlier, xx_earlier = xs - x_last.sum(), xx - x_last.square().sum()
    y_later, yy_later = ys - y_first.sum(), yy - y_first.square().sum()
    y_earlier, yy_earlier = ys - y_last.sum(), yy - y_last.square().sum()
    before = before - torch.dot(x_first[1:], y_last[:-1])
    after = after - torch.dot(x_last[:-1], y_first[1:])
    pairs = xs.new_full((), n - len(starts))
    names = ("n", "x", "xx", "y", "yy", "xy")
    for where, values in (
        ("before", (pairs, x_later, xx_later, y_earlier, yy_earlier, before)),
        ("after", (pairs, x_earlier, xx_earlier, y_later, yy_later, after)),
    ):
        sums |= {f"{where}/{name}": v for name, v in zip(names, values, strict=True)}
    return {f"{on}/{name}": v for name, v in sums.items()}


def _moments(x_over: Tensor, raw_over: Tensor, size: int) -> Float[Tensor, " sums"]:
    """Sums of a block; it comes with the token behind it, whose neighbor is its last one."""
    l_over = clamped(raw_over)
    y_over = x_over + l_over
    x, y, l, raw = x_over[:size], y_over[:size], l_over[:size], raw_over[:size]  # noqa: E741
    added = [x.sum(), torch.dot(x, x), torch.dot(x, l), y.sum(), torch.dot(y, y)]
    if raw.device.type == "cpu":  # numpy compares ten times as fast, and takes neighbors' products three times as fast
        a, b, r = x_over.numpy(), y_over.numpy(), raw.numpy()
        more = [np.dot(a[1:], b[:-1]), np.dot(a[:-1], b[1:]), np.count_nonzero(r > SIDE), np.count_nonzero(r < -SIDE)]
        return torch.cat([torch.stack(added).double(), torch.tensor([float(v) for v in more], dtype=torch.float64)])
    added += [torch.dot(x_over[1:], y_over[:-1]), torch.dot(x_over[:-1], y_over[1:])]
    return torch.stack([v.double() for v in (*added, (raw > SIDE).count_nonzero(), (raw < -SIDE).count_nonzero())])
