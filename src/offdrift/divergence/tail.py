"""Sharp limits of KL and TV on tokens of which only the total probability is known.

The tail of a token's context: `size` tokens on which the current policy pi is known, and the rollout
policy mu only by

    0 <= mu_a <= c        sum_a mu_a = r        r_lo <= r <= r_hi

with c the k-th largest probability of mu. All sums below are over the tail, s = sum pi_a. KL is taken
with terms mu log(mu / pi) - mu + pi >= 0, whose sum over all tokens is KL(mu || pi).

Least KL. Convex: mu_a = min(c, lambda pi_a) with lambda such that they sum to r (water-filling).

Least TV. With e = sum (pi_a - c)+, the sum of |mu_a - pi_a| is 2 sum (pi_a - mu_a)+ + r - s, at least
2 e + r - s; and 2 sum (mu_a - pi_a)+ + s - r, at least s - r. The larger of the two, e + |r - (s - e)|,
is attained: at min(c, pi_a), plus or minus what is missing where there is room. Both least values are
smallest at the r nearest to s - e, because there mu_a = min(c, pi_a).

Most KL, most TV. Convex functions are largest at a vertex: m = floor(r / c) tokens at c, one at the
rest r - m c. What a token adds, c log(c / pi_a) - c or c - 2 min(c, pi_a), falls with pi_a; and both
mu log(1 / pi) and -min(mu, pi) are largest in sum when mu ascends as pi descends. So the m least likely
tokens under pi are full, and the next one has the rest. With theta its pi, for every r at once,

    sum mu_a log(mu_a / pi_a) <= r log(c / theta) + c sum (log(theta / pi_a))+ - x log(c / x)

x = r - m c, with equality for the r that has this theta (linear programming duality gives the line,
the last term is what a token that is not full falls short of it). In r it is convex between multiples
of c, so only ends of r and the last multiple need a look.

Most, if |log(mu_a / pi_a)| <= L besides: the terms are pi_a f(mu_a / pi_a) with f convex, and a convex f
lies below its chord on [e^-L, e^L]. With h = tanh(L / 2) the chords sum to

    KL <= L h s + (L / tanh(L) - 1) (r - s)        TV <= h (r + s) / 2

Everything is float64 on values that are sorted once; a sort of the tail's logits is the price, about
three times that of a log-sum-exp on CPUs whose numpy sorts by vector instructions.

Shape suffixes: n tokens, w width of the widest tail.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from offdrift.divergence.exact import terms

FLOOR = -700.0
"""Where the exponential of a float64 ends. Less likely tokens of pi count as this likely in sums."""

TIE = 1e-12
"""Relative difference of two float64 sums that is taken for rounding."""


@dataclass(frozen=True)
class Tail:
    """Tails of n tokens: pi on every token in them, and what is known of mu there."""

    log_pi: Float[Tensor, "n w"]
    """Ascending; row i holds `size[i]` >= w - 1 tokens, then +inf. float64."""
    cumulative: Float[Tensor, "n w"]
    """Running sums of pi."""
    size: Int[Tensor, " n"]
    log_c: Float[Tensor, " n"]
    """The most that mu can have on one token; 0 if nothing is known."""
    r_lo: Float[Tensor, " n"]
    r_hi: Float[Tensor, " n"]
    """What mu has in all: between these."""

    @property
    def mass(self) -> Float[Tensor, " n"]:
        """s: what pi has in all."""
        return self.first(self.size)

    def first(self, count: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
        """What pi has on its `count` least likely tokens."""
        return _at(self.cumulative, count - 1).where(count > 0, 0.0)

    def up_to(self, log_p: Float[Tensor, " n"]) -> Int[Tensor, " n"]:
        """How many tokens pi gives at most this log-probability."""
        count = torch.searchsorted(self.log_pi, log_p[:, None].contiguous(), right=True)
        return torch.minimum(count.squeeze(1), self.size)

    @property
    def empty(self) -> Bool[Tensor, " n"]:
        """Where mu has nothing."""
        return self.r_hi <= 0


Pair = tuple[Float[Tensor, " n"], Float[Tensor, " n"]]


def least(tail: Tail) -> Pair:
    """The smallest KL and the smallest TV that the tail can have."""
    c, s = tail.log_c.exp(), tail.mass
    within = tail.up_to(tail.log_c)
    excess = (s - tail.first(within) - c * (tail.size - within)).clamp(min=0.0)
    r = (s - excess).clamp(tail.r_lo, tail.r_hi)
    tv = (excess + (r - (s - excess)).abs()) / 2

    free = _below_water(tail, r)
    full = tail.size - free
    free_mass = tail.first(free)
    # Below the water mu is proportional to pi, so there the sum of terms is the term of the sums.
    lumped = (r - c * full).clamp(min=0.0).log()[:, None], free_mass.log()[:, None]
    kl = terms(*lumped)[0].squeeze(1)
    above = s - free_mass - c * full - c * _log_excess(tail, free, full)
    kl = kl + above.where(full > 0, 0.0)

    possible = tail.size - tail.up_to(torch.full_like(s, -math.inf))
    # More than those tokens can hold has to be where pi has nothing.
    kl = kl.where(tail.r_lo <= c * possible * (1 + TIE), math.inf)
    return torch.where(tail.empty, s, kl), tv


def most(tail: Tail) -> Pair:
    """The largest KL and the largest TV that the tail can have."""
    r, s = tail.r_hi, tail.mass
    log_c = torch.minimum(tail.log_c, r.log())
    c = log_c.exp()
    m = torch.minimum((r / c).long(), tail.size)
    log_theta = _at(tail.log_pi, torch.minimum(m, tail.size - 1))
    below = (log_theta[:, None] - tail.log_pi).clamp_(min=0.0).sum(1)
    slope = log_c - log_theta - 1

    def at(r: Tensor, x: Tensor) -> Tensor:
        return s + slope * r + c * below - (x * log_c - torch.xlogy(x, x))

    x = (r - m * c).clamp(min=0.0)
    last = torch.maximum(m * c, tail.r_lo)  # the last multiple of c, or the lower end
    kl = torch.maximum(at(r, x), at(last, (last - m * c).clamp(min=0.0)))
    kl = kl + (r - tail.r_lo) * (-slope).clamp(min=0.0)
    kl = kl.where(tail.log_pi[:, 0] > -math.inf, math.inf)  # mu may draw what pi cannot

    within = torch.minimum(tail.up_to(log_c), m)
    overlap = tail.first(within) + c * (m - within) + torch.minimum(x, log_theta.exp())
    overlap = overlap - (r - tail.r_lo) / 2  # TV changes by at most half of what r does
    tv = (s + r) / 2 - overlap.clamp(min=0.0)
    return torch.where(tail.empty, s, kl), torch.where(tail.empty, s / 2, tv)


def most_under_cap(tail: Tail, cap: float) -> tuple[Pair, Bool[Tensor, " n"]]:
    """The largest KL and TV if |log(mu / pi)| <= cap on every token, and where that cannot be.

    It cannot be where no mu within the cap agrees with what is known: pi_a e^-L > c for some token,
    or sum pi_a e^-L > r_hi, or sum min(c, pi_a e^L) < r_lo.
    """
    s, c = tail.mass, tail.log_c.exp()
    largest = (s.log() + cap).exp()
    r = torch.minimum(tail.r_hi, largest)
    h = math.tanh(cap / 2)
    growth = cap / math.tanh(cap) - 1 if cap > 0 else 0.0
    kl = (cap * h * s + growth * (r - s)).clamp(min=0.0)
    tv = h * (r + s) / 2

    low = tail.up_to(tail.log_c - cap)  # these stay below c whatever mu does within the cap
    room = (tail.first(low).log() + cap).exp() + c * (tail.size - low)
    likeliest = _at(tail.log_pi, tail.size - 1).where(tail.size > 0, -math.inf)
    refuted = (
        (room * (1 + TIE) < tail.r_lo)
        | ((s.log() - cap).exp() > tail.r_hi * (1 + TIE))
        | (likeliest - cap > tail.log_c + TIE)
    )
    return (kl, tv), refuted


def _below_water(tail: Tail, r: Float[Tensor, " n"]) -> Int[Tensor, " n"]:
    """On how many tokens lambda pi stays below c. They are the least likely ones.

    Token j meets c at lambda = c / pi_j, where all of mu sums to c (size - j) + c / pi_j (pi_1 + ...
    + pi_j). That falls with j, so the count is found bit by bit.
    """
    count = torch.zeros_like(tail.size)
    for bit in reversed(range(tail.log_pi.shape[1].bit_length())):
        trial = count + 2**bit
        meets = (tail.log_c - _at(tail.log_pi, trial - 1)).exp()
        total = tail.log_c.exp() * (tail.size - trial) + meets * tail.first(trial)
        count = torch.where((trial <= tail.size) & (total >= r), trial, count)
    return count


def _log_excess(tail: Tail, free: Int[Tensor, " n"], full: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Sum of log(pi_a / c) over the `full` likeliest tokens of the tail."""
    start = _at(tail.log_pi, free)
    over = (tail.log_pi - start[:, None]).clamp_(min=0.0)
    over[:, -1].masked_fill_(tail.size < over.shape[1], 0.0)  # no token of the tail
    return over.sum(1) + full * (start - tail.log_c)


def _at(x: Float[Tensor, "n w"], index: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
    return x.gather(1, index.clamp(0, x.shape[1] - 1)[:, None]).squeeze(1)


def sorted_tail(
    scores: Float[Tensor, "n v"], known: Int[Tensor, "n k"], is_known: Bool[Tensor, "n k"], temperature: float | int
) -> tuple[Float[Tensor, "n k"], Float[Tensor, "n w"], Float[Tensor, "n w"]]:
    """log pi of the known tokens; ascending log pi of the others, +inf after them; running sums.

    Args:
        scores: logits, float32 or float64; overwritten.
        known: ids outside the tail.
        is_known: False where an entry of `known` repeats another; its log pi is -inf.
    """
    top = scores.amax(1, keepdim=True).double()
    at_known = ((scores.gather(1, known).double() - top) / temperature).masked_fill(~is_known, -math.inf)
    _ascending_(scores.scatter_(1, known, math.inf))
    # All but the columns that are known tokens in every row; at least one column.
    width = max(1, scores.shape[1] - (known.shape[1] - 1))
    log_pi = scores[:, :width].to(torch.float64, copy=True).contiguous()
    log_pi.sub_(top).div_(temperature)
    cumulative = log_pi.clamp(min=FLOOR).exp_().cumsum_(1)
    size = scores.shape[1] - is_known.sum(1)
    tail_mass = _at(cumulative, size - 1).where(size > 0, 0.0)[:, None]
    total = at_known.exp().sum(1, keepdim=True) + tail_mass
    return at_known - total.log(), log_pi.sub_(total.log()), cumulative.div_(total)


def _ascending_(x: Float[Tensor, "n v"]) -> None:
    """Sort each row in place. On CPUs numpy's sort of bare values is many times faster."""
    if x.device.type == "cpu":
        x.numpy().sort(-1)
    else:
        x.copy_(x.sort(-1).values)
