"""Gates that aim at a share: random acceptance with a known density, and bounds that follow a target.

`RandomGate` turns tokens of the rollout policy into tokens of a policy nearer to the trained one, by rejecting some by
chance (`token_keys`, which need no generator). `FollowingGate` moves its own bounds until the share of sequences that
it accepts is the one asked for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from offdrift.batch_info import NO_INFO, BatchInfo, StepSums
from offdrift.errors import MethodError, check_choice, check_number, check_positive
from offdrift.logprobs import LogProbs
from offdrift.numerics import blocks, clamped, ratio
from offdrift.ratios import RatioName, stopped_log_ratio

GOLDEN = 0x9E3779B97F4A7C15


def token_keys(logprobs: LogProbs, *, seed: int = 0) -> Float[Tensor, " n"]:
    """A pseudo-random number in [0, 1) for every token, made from recorded values alone.

    It mixes the bits of log mu of the token, its position, all of log mu of its sequence, and the
    seed; thus neither micro-batches nor ranks nor the order of sequences change it. Sequences that
    agree in every bit of log mu have equal keys. Gradient: none.

    Example:
        >>> from offdrift.segments import Segments
        >>> lp = LogProbs.pack(torch.tensor([-1.0, -1.0]), segments=Segments.from_lengths([2]))
        >>> token_keys(lp)
        tensor([0.0499, 0.6963], dtype=torch.float64)

    Reference: Steele et al., "Fast splittable pseudorandom number generators", 2014 (the mixer).
    """
    segments = logprobs.segments
    bits = logprobs.logp_rollout.double().view(torch.int64)
    token_hash = (bits ^ (segments.position + 1) * _signed(GOLDEN)) * _signed(0xD1342543DE82EF95)
    # Integers wrap around, so a difference of running sums is exact however long the stream.
    running = torch.cat([token_hash.new_zeros(1), token_hash.cumsum(0)])
    sequence_hash = _mixed(running[segments.cu_seqlens].diff() + _signed((seed + 1) * GOLDEN))
    mixed = [_shifted(_mixed(x ^ w), 11) for x, w in blocks(token_hash, segments.spread(sequence_hash))]
    return torch.cat(mixed).double() * 2.0**-53


def _mixed(x: Int[Tensor, " k"]) -> Int[Tensor, " k"]:
    """Every bit of the result depends on every bit of x; one to one."""
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def _shifted(x: Int[Tensor, " k"], bits: int) -> Int[Tensor, " k"]:
    """Shift right, filling with zeros; torch repeats the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(x: int) -> int:
    """The 64-bit integer with the same last bits."""
    return (x + 2**63) % 2**64 - 2**63


@dataclass(frozen=True, kw_only=True)
class RandomGate:
    """Accept a token with probability a = min(1, w / limit), w its ratio; rejection sampling on a budget.

    Tokens that are accepted have the density first(y) a(y) / Z, Z = sum_y first(y) a(y). At `limit` >= max w they are
    distributed like the second policy; a smaller limit rejects fewer and leaves some of the distance. The weight that
    corrects for the rest, second / density, is Z max(w, limit): `Weight(floor=limit)` and a normalizer that counts
    rejected tokens, whose mean contains the factor Z already.

    Chance is `token_keys` of the log-probs rounded to float32: a token's number depends on its sequence and on `seed`
    only, not on how a step is split, and is the same whenever the sequence is met again.

    Args:
        on: which two policies are compared.
        limit: ratio from which a token is always accepted.
        seed: of the choice, a setting of the run and thus in its record.

    Example:
        >>> RandomGate(limit=2.0).formula
        'keep with probability min(1, ratio(full) / 2)'

    Reference: Optimal budgeted rejection sampling: Verine et al., 2023; Jackpot, arXiv:2602.06107.
    """

    on: RatioName = "full"
    limit: float = 1.0
    seed: int = 0

    exact = False
    unit = "token"

    def __post_init__(self) -> None:
        check_choice("on", self.on, get_args(RatioName))
        check_number("seed", self.seed)
        check_positive(self, "limit")

    @property
    def formula(self) -> str:
        """Rule for the tokens that are kept, in one line."""
        return f"keep with probability min(1, ratio({self.on}) / {self.limit:g})"

    def acceptance(self, logprobs: LogProbs) -> Float[Tensor, " n"]:
        """Probability a with which each token is accepted. Gradient: none."""
        return ratio(stopped_log_ratio(logprobs, on=self.on) - math.log(self.limit)).clamp(max=1)

    def keep(
        self, logprobs: LogProbs, advantages: Float[Tensor, " n"] | None = None, batch_info: BatchInfo = NO_INFO
    ) -> Bool[Tensor, " n"]:
        """Mark the tokens that take part. Gradient: none."""
        with torch.no_grad():
            rounded = replace(logprobs, logp_rollout=logprobs.logp_rollout.float().double())
            return token_keys(rounded, seed=self.seed) < self.acceptance(logprobs).double()


@dataclass(frozen=True, kw_only=True)
class FollowingGate:
    """Keep a sequence iff |S| <= width, and move the width after each step towards a share of accepted sequences.

        S = sum ("seq_sum") or mean ("seq_mean") of the log-ratios of a sequence
        q = the smallest |S| of the step that at least `target` of its sequences do not exceed
        width <- width^(1 - rate) q^rate

    A step is judged by the width that earlier steps left, so its own sequences do not decide about themselves. The
    width is `gate.width` in a run's settings and is stored with its checkpoints; pieces and ranks observe together.

    Args:
        on: which two policies are compared.
        unit: of S.
        width: of the first step, nats.
        target: share of sequences to accept, in (0, 1].
        rate: how fast the width follows, in [0, 1]; 0 holds it.
        narrowest: smallest width, nats: a step without drift would close the gate for good.

    Example:
        >>> FollowingGate(width=0.5).formula
        'keep if |log seq_sum ratio(mismatch)| <= 0.5, the width following 0.9 of the sequences'

    Reference: AC-MIS-PO (acceptance-controlled masked importance sampling), after a description: bounds are quantiles
    that run with training, so that a target share is accepted.
    """

    on: RatioName = "mismatch"
    unit: Literal["seq_sum", "seq_mean"] = "seq_sum"
    width: float = 1.0
    target: float = 0.9
    rate: float = 0.1
    narrowest: float = 1e-4

    exact = False
    statistic = "ratio"

    def __post_init__(self) -> None:
        check_choice("on", self.on, get_args(RatioName))
        check_choice("unit", self.unit, ("seq_sum", "seq_mean"))
        check_number("rate", self.rate)
        check_positive(self, "width", "target", "narrowest")
        if self.target > 1 or not 0 <= self.rate <= 1:
            raise MethodError(f"target={self.target} and rate={self.rate} are shares, at most 1")

    @property
    def formula(self) -> str:
        """Rule for the tokens that are kept, in one line."""
        return (
            f"keep if |log {self.unit} ratio({self.on})| <= {self.width:g}, the width following "
            f"{self.target:g} of the sequences"
        )

    def distance(self, logprobs: LogProbs) -> Float[Tensor, " b"]:
        """|S| of every sequence, nats. Gradient: none."""
        segments, x = logprobs.segments, clamped(stopped_log_ratio(logprobs, on=self.on))
        return (segments.sum(x) if self.unit == "seq_sum" else segments.mean(x)).abs()

    def keep(
        self, logprobs: LogProbs, advantages: Float[Tensor, " n"] | None = None, batch_info: BatchInfo = NO_INFO
    ) -> Bool[Tensor, " n"]:
        """Mark the tokens that take part. Gradient: none."""
        with torch.no_grad():
            return logprobs.segments.spread(self.distance(logprobs) <= self.width)

    def observe(self, logprobs: LogProbs, advantages: Float[Tensor, " n"] | None, batch_info: BatchInfo) -> StepSums:
        """|S| of every sequence that has a token; -1 for the others, which `next` leaves out. Gradient: none."""
        with torch.no_grad():
            empty = logprobs.segments.lengths == 0
            return {"distance": self.distance(logprobs).double().masked_fill(empty, -1.0)}

    def next(self, seen: StepSums) -> FollowingGate:
        """The gate of the next step: its width a step nearer to the quantile of this one."""
        distance = seen["distance"][seen["distance"] >= 0].sort().values
        if not len(distance):
            return self
        quantile = float(distance[math.ceil(self.target * len(distance) - 1e-9) - 1])
        width = self.width ** (1 - self.rate) * max(quantile, self.narrowest) ** self.rate
        return replace(self, width=max(width, self.narrowest))
