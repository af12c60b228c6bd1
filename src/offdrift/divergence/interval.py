"""Certified intervals of KL and TV when only the top k of the rollout policy were recorded.

Known at every token: the rollout policy mu on a set S (its top k, and the token it drew), and the
current policy pi everywhere. Unknown: how mu spreads the rest of its mass, r = 1 - mu(S), over the
other tokens. But each of those has at most the k-th largest probability, so the unknown is a small
polytope, and the ends of the interval are the least and the most that KL and TV can be on it (`Tail`).
They are sharp: some mu that agrees with the record attains each of them, up to what rounding hides.

What an engine records is rounded, and r is a difference of rounded numbers. So every mass of mu is
itself an interval as wide as rounding makes it (`rounding`), and each end takes the value in it that is safe.

The lower end rejects rigorously and nearly completely. The upper end accepts rigorously and rarely:
mu could have all of r on tokens that pi thinks all but impossible. With `tail_log_ratio_cap=` the
upper end rules that out by assumption; the grade is then *capped interval*, and says so.

The tail of a token's context (`Tail`): `size` tokens on which pi is known, and mu only by

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

Reference: DPPO, arXiv:2602.04879, which lumps the tail into one token; the divergences: Li et al.,
arXiv:2512.23075v5, Def. 2.2.

Shape suffixes: n tokens, w width of the widest tail.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from offdrift.divergence.evidence import Divergence
from offdrift.divergence.exact import terms
from offdrift.divergence.head import check_positive
from offdrift.errors import BadValueError, ShapeError

KL, TV = "kl_rollout_current", "tv_rollout_current"

CHUNK = {"cpu": 2**20}
"""Entries of `logits` worked on at a time: 8 MiB per temporary."""

CHUNK_ELSEWHERE = 2**26
"""The same on accelerators, 512 MiB per temporary: there a chunk costs some 350 launches whatever its size."""

ROUNDING = 128
"""Machine epsilons of float32 (of float64 for float64 records) by which a recorded log-prob may be off
whatever the vocabulary and its own size: 1.5e-5."""

LANES = 8
"""Into how many partial sums an engine's softmax adds its V terms, at least: AVX2 has 8 lanes of float32,
AVX-512 16, GPUs hundreds. (ARM's NEON has 4: there the worst case is twice what is allowed for here.)

A lane adds V / 8 terms, and each addition rounds by up to half an epsilon of the sum so far, so log Z may
be off by V / 16 epsilons: 9,496 at 151,936 tokens (1.1e-3 nat), 16,384 at 262,144 (2.0e-3). Not by chance
less: beside a few likely tokens, terms of one size all round in one direction. torch's own log-softmax is
off by 99% of this on AVX2 for 8 tokens 13.5 nats above 32,000 equal ones. What is common to all log-probs
of a token's record, such as an error of log Z, is allowed to be large here but costs KL little: see `_conditional`."""

OWN = 2e-8
"""Relative error of what is computed here, in float64; the series in `exact.terms` is most of it."""

OWN_ABSOLUTE = 1e-13
"""Its absolute error, from sums over a vocabulary and differences of them."""


@torch.no_grad()
def topk_divergences(
    topk_ids: Int[Tensor, "n k"],
    topk_logp: Float[Tensor, "n k"],
    tokens: Int[Tensor, " n"],
    logp_rollout: Float[Tensor, " n"],
    logits: Float[Tensor, "n v"],
    *,
    temperature: float | int = 1.0,
    one_support: bool = False,
    tail_log_ratio_cap: float | int | None = None,
) -> tuple[Divergence, Divergence]:
    """Intervals that contain KL(mu || pi) and TV(mu, pi), from the top k of mu.

        lo = min D(mu, pi)    hi = max D(mu, pi)    over all mu that agree with the record:
        mu as recorded on S;   0 <= mu_a <= the k-th largest elsewhere;   sum mu = 1
        and, for hi under a cap L, |log mu_a - log pi_a| <= L elsewhere

    Under a cap, `hi` is the smaller of the uncapped end and of the sum of the terms' chords, and
    `refuted` marks tokens where no mu within the cap agrees with the record: `hi` is uncapped there.

    Args:
        topk_ids: ids of the k likeliest tokens under mu, no id twice; k may be 0.
        topk_logp: their log mu, nats, of the distribution that was sampled; -inf is probability 0.
        tokens: the drawn tokens; one that is among the top k counts once.
        logp_rollout: their log mu, nats.
        logits: scores of the current policy, before its temperature.
        temperature: what the current policy's logits are divided by, > 0.
        one_support: whether mu is 0 wherever `logits` are -inf, as where one recorded support is imposed on both
            policies. Otherwise mu may have its tail there, and the upper end of KL is +inf.
        tail_log_ratio_cap: L, nats; None assumes nothing. `offdrift check` measures it.

    Returns: "kl_rollout_current" in nats and "tv_rollout_current", of grade interval, or capped
        interval; float32 or better, rounded outwards. A row with NaN in it gives NaN, and so does
        a record that no distribution could have left (masses above 1, a drawn token likelier than
        the top k, more left over than the other tokens can hold). Gradient: none, it is evidence.

    Raises:
        ShapeError: the arguments describe different tokens.
        BadValueError: a cap that is negative or not finite, a temperature that is not positive.

    Example:
        >>> mu = torch.tensor([[0.7, 0.2, 0.1]]).log()
        >>> pi = torch.tensor([[0.6, 0.3, 0.1]]).log()
        >>> drawn = torch.tensor([0])
        >>> record = (drawn[:, None], mu[:, :1], drawn, mu[:, 0])
        >>> kl, tv = topk_divergences(*record, pi)
        >>> kl.lo, kl.hi, tv.lo, tv.hi
        (tensor([0.0216]), tensor([0.4375]), tensor([0.1000]), tensor([0.3000]))
        >>> kl, _ = topk_divergences(*record, pi, tail_log_ratio_cap=0.5)
        >>> kl.hi, kl.assumes
        (tensor([0.0487]), '|log mu - log pi| <= 0.5 nats outside the top 1')

    Reference: see the module.
    """
    _check(topk_ids, topk_logp, tokens, logp_rollout, logits)
    check_positive(temperature=temperature)
    cap = tail_log_ratio_cap
    if cap is not None and (isinstance(cap, bool) or not 0 <= cap < math.inf):
        raise BadValueError(
            f"tail_log_ratio_cap={cap} must be finite and not negative (nats); None assumes nothing about the tail"
        )
    record = _record(topk_ids, topk_logp, tokens, logp_rollout, vocab=logits.shape[1])
    rows = max(1, CHUNK.get(logits.device.type, CHUNK_ELSEWHERE) // logits.shape[1])
    pieces = zip(logits.split(rows), *(x.split(rows) for x in record), strict=True)
    ends = (_ends(z, _Record(*r), temperature, cap, one_support) for z, *r in pieces)
    kl_lo, kl_hi, tv_lo, tv_hi, refuted = map(torch.cat, zip(*ends, strict=True))

    dtype = torch.promote_types(topk_logp.dtype, logits.dtype)
    dtype = torch.promote_types(dtype, torch.float32)
    kl = (KL, _down(kl_lo, dtype), _up(kl_hi, dtype))
    tv = (TV, _down(tv_lo, dtype).clamp(max=1.0), _up(tv_hi, dtype).clamp(max=1.0))
    if cap is None:
        return Divergence.interval(*kl), Divergence.interval(*tv)
    assumes = f"|log mu - log pi| <= {cap} nats outside the top {topk_ids.shape[1]}"
    return (
        Divergence.capped(*kl, assumes=assumes, refuted=refuted),
        Divergence.capped(*tv, assumes=assumes, refuted=refuted),
    )


class _Record(NamedTuple):
    """Record of mu: bounds on the log-probs of S, and on what lies outside."""

    ids: Int[Tensor, "n s"]
    is_known: Bool[Tensor, "n s"]
    """False where the drawn token is among the top k already."""
    log_mu_lo: Float[Tensor, "n s"]
    log_mu_hi: Float[Tensor, "n s"]
    log_weight_lo: Float[Tensor, "n s"]
    """The same but for what all log-probs of one record have in common, an error of log Z."""
    log_weight_hi: Float[Tensor, "n s"]
    log_c: Float[Tensor, " n"]
    """The most that one token outside S can have."""


def _record(
    topk_ids: Int[Tensor, "n k"],
    topk_logp: Float[Tensor, "n k"],
    tokens: Int[Tensor, " n"],
    logp_rollout: Float[Tensor, " n"],
    *,
    vocab: int,
) -> _Record:
    ids = torch.cat([topk_ids, tokens[:, None]], dim=1).long()
    is_known = torch.ones_like(ids, dtype=torch.bool)
    is_known[:, -1] = ~(topk_ids == tokens[:, None]).any(1)
    log_mu = torch.cat([topk_logp, logp_rollout[:, None]], dim=1).double()
    log_mu = log_mu.masked_fill(~is_known, -math.inf)
    parts = zip(*(rounding(x, vocab=vocab) for x in (topk_logp, logp_rollout[:, None])), strict=True)
    each, shared = (torch.cat(part, dim=1) for part in parts)
    slack = each + shared
    lo, hi = log_mu - slack, (log_mu + slack).clamp(max=0.0)
    nothing = hi.new_zeros(len(hi), 1)
    log_c = torch.cat([nothing, hi[:, :-1]], dim=1).amin(1)
    return _Record(
        ids, is_known, lo, log_mu_hi=hi, log_weight_lo=log_mu - each, log_weight_hi=log_mu + each, log_c=log_c
    )


def rounding(logp: Float[Tensor, "*shape"], *, vocab: int) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
    """Bound the rounding error of recorded log-probs against those that were sampled, nats, float64.

    Returns what each may be off by itself, and what all of one record may be off by together:

        eps (128 + |log mu|)                 float32 or float64: the number
        ... + |log mu| 2^-8                  bfloat16 (2^-11 in float16): half a unit in its last place
        eps V / 16                           the sum over the vocabulary: `LANES`

    Half precision is taken for a float32 result that was rounded once when it was stored, as engines do
    whose log-softmax is float32. Log-probs that were *computed* in half precision are off by far more.

    Example:
        >>> x = torch.tensor([-1.0])
        >>> each, shared = rounding(x, vocab=151_936)
        >>> each.float(), shared.float()
        (tensor([1.5378e-05]), tensor([0.0011]))
    """
    size = logp.double().abs().clamp(max=2.0**16)
    exact = torch.promote_types(logp.dtype, torch.float32)
    eps = torch.finfo(exact).eps
    each = eps * (ROUNDING + size)
    if logp.dtype != exact:
        each = each + torch.finfo(logp.dtype).eps / 2 * size
    return each, torch.full_like(each, eps * vocab / (2 * LANES))


def _ends(
    logits: Float[Tensor, "n v"], record: _Record, temperature: float | int, cap: float | int | None, one_support: bool
) -> tuple[Tensor, ...]:
    """Least and most KL, least and most TV, float64; where the cap is refuted."""
    log_mu_lo, log_mu_hi = record.log_mu_lo, record.log_mu_hi
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    log_pi, tail, consistent = _tail(scores, record, temperature, one_support)

    kl_lo, tv_lo = least(tail)
    kl_hi, tv_hi = most(tail)
    refuted = torch.zeros_like(consistent)
    if cap is not None:
        (kl_cap, tv_cap), refuted = most_under_cap(tail, float(cap))
        kl_hi = torch.where(refuted, kl_hi, torch.minimum(kl_hi, kl_cap))
        tv_hi = torch.where(refuted, tv_hi, torch.minimum(tv_hi, tv_cap))

    # Every term of S is convex in mu's mass, and 0 where the two masses are equal.
    near = terms(log_pi.clamp(log_mu_lo, log_mu_hi), log_pi)
    low, high = terms(log_mu_lo, log_pi), terms(log_mu_hi, log_pi)
    far = (torch.maximum(a, b) for a, b in zip(low, high, strict=True))
    (kl_near, tv_near), (kl_far, tv_far) = ((kl.sum(1), tv.sum(1)) for kl, tv in (near, far))
    least_of_s, most_of_s = _conditional(log_pi, record)
    kl_near, kl_far = torch.fmax(kl_near, least_of_s), torch.fmin(kl_far, most_of_s)
    ends = (kl_near + kl_lo, kl_far + kl_hi, tv_near + tv_lo, tv_far + tv_hi)
    return *(x.where(consistent, math.nan) for x in ends), refuted & consistent


def _conditional(log_pi: Float[Tensor, "n s"], record: _Record) -> tuple[Tensor, Tensor]:
    """Least and most of the KL terms of S, by the chain rule; NaN where it says nothing.

        sum_S terms(mu_a, pi_a) = terms(mu(S), pi(S)) + mu(S) KL(mu(. | S) || pi(. | S))

    What shifts all recorded log-probs alike changes mu(S) but not mu(. | S).
    """
    lo, hi = record.log_weight_lo, record.log_weight_hi
    log_mu_lo = lo - hi.logsumexp(1, keepdim=True)
    log_mu_hi = (hi - lo.logsumexp(1, keepdim=True)).clamp(max=0.0)
    log_pi = log_pi.masked_fill(~record.is_known, -math.inf)
    log_pi_s = log_pi.logsumexp(1, keepdim=True)
    log_pi = log_pi - log_pi_s
    mass_lo = record.log_mu_lo.logsumexp(1, keepdim=True)
    mass_hi = record.log_mu_hi.logsumexp(1, keepdim=True).clamp(max=0.0)

    within, of_s = log_pi.clamp(log_mu_lo, log_mu_hi), log_pi_s.clamp(mass_lo, mass_hi)
    near, near_s = terms(within, log_pi)[0], terms(of_s, log_pi_s)[0]
    far = torch.maximum(terms(log_mu_lo, log_pi)[0], terms(log_mu_hi, log_pi)[0])
    far_s = torch.maximum(terms(mass_lo, log_pi_s)[0], terms(mass_hi, log_pi_s)[0])
    least_of_s = near_s.squeeze(1) + mass_lo.exp().squeeze(1) * near.sum(1)
    most_of_s = far_s.squeeze(1) + mass_hi.exp().squeeze(1) * far.sum(1)
    return least_of_s, most_of_s


def _tail(
    scores: Float[Tensor, "n v"], record: _Record, temperature: float | int, one_support: bool
) -> tuple[Float[Tensor, "n s"], Tail, Bool[Tensor, " n"]]:
    """log pi on S, the tail, and which rows any distribution could have left."""
    ids, is_known, log_mu_lo, log_mu_hi, *_, log_c = record
    log_pi, rest, cumulative, size = sorted_tail(scores, ids, is_known, temperature, one_support)
    room = size * log_c.exp()
    r_lo, r_hi = (-x.logsumexp(1).expm1() for x in (log_mu_hi, log_mu_lo))
    consistent = (r_hi >= 0) & (r_lo <= room * (1 + TIE) + TIE) & (log_mu_lo[:, -1] <= log_c)
    consistent &= ~log_pi.isnan().any(1)
    r_hi = torch.minimum(r_hi, room).clamp(min=0.0)
    r_lo = torch.minimum(r_lo.clamp(min=0.0), r_hi)
    return log_pi, Tail(rest, cumulative, size, log_c=log_c, r_lo=r_lo, r_hi=r_hi), consistent


def _down(x: Float[Tensor, " n"], dtype: torch.dtype) -> Float[Tensor, " n"]:
    """A lower end in `dtype`: never above `x`."""
    x = (x * (1 - OWN) - OWN_ABSOLUTE).clamp(min=0.0)
    y = x.to(dtype)
    return torch.where(y > x, y.nextafter(torch.full_like(y, -math.inf)), y)


def _up(x: Float[Tensor, " n"], dtype: torch.dtype) -> Float[Tensor, " n"]:
    """An upper end in `dtype`: never below `x`."""
    x = x * (1 + OWN) + OWN_ABSOLUTE
    y = x.to(dtype)
    return torch.where(y < x, y.nextafter(torch.full_like(y, math.inf)), y)


def _check(topk_ids: Tensor, topk_logp: Tensor, tokens: Tensor, logp_rollout: Tensor, logits: Tensor) -> None:
    n = len(tokens)
    if topk_ids.shape != topk_logp.shape or {len(topk_ids), len(logp_rollout), len(logits)} != {n}:
        raise ShapeError(
            f"topk_ids {tuple(topk_ids.shape)}, topk_logp {tuple(topk_logp.shape)}, tokens "
            f"{tuple(tokens.shape)}, logp_rollout {tuple(logp_rollout.shape)} and logits "
            f"{tuple(logits.shape)} must describe the same tokens, and the first two the same k"
        )


FLOOR = -700.0
"""Where the exponential of a float64 ends. Less likely tokens of pi count as this likely in sums."""

TIE = 1e-12
"""Relative difference of two float64 sums that is taken for rounding."""


@dataclass(frozen=True)
class Tail:
    """Tails of n tokens: pi on every token in them, and what is known of mu there."""

    log_pi: Float[Tensor, "n w"]
    """Ascending; row i holds `size[i]` tokens, then +inf. float64."""
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
        """Mass of pi on its `count` least likely tokens."""
        return _at(self.cumulative, count - 1).where(count > 0, 0.0)

    def up_to(self, log_p: Float[Tensor, " n"]) -> Int[Tensor, " n"]:
        """Count the tokens to which pi gives at most this log-probability."""
        count = torch.searchsorted(self.log_pi, log_p[:, None].contiguous(), right=True)
        return torch.minimum(count.squeeze(1), self.size)

    @property
    def empty(self) -> Bool[Tensor, " n"]:
        """Mark tails in which mu has nothing."""
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
    over.masked_fill_(torch.arange(over.shape[1], device=over.device) >= tail.size[:, None], 0.0)  # no token there
    return over.sum(1) + full * (start - tail.log_c)


def _at(x: Float[Tensor, "n w"], index: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
    return x.gather(1, index.clamp(0, x.shape[1] - 1)[:, None]).squeeze(1)


def sorted_tail(
    scores: Float[Tensor, "n v"],
    known: Int[Tensor, "n k"],
    is_known: Bool[Tensor, "n k"],
    temperature: float | int,
    one_support: bool = False,
) -> tuple[Float[Tensor, "n k"], Float[Tensor, "n w"], Float[Tensor, "n w"], Int[Tensor, " n"]]:
    """log pi of the known tokens; ascending log pi of the others, +inf after them; running sums; how many they are.

    Args:
        scores: logits, float32 or float64; overwritten.
        known: ids outside the tail.
        is_known: False where an entry of `known` repeats another; its log pi is -inf.
        one_support: whether tokens of score -inf are none of the others, either.
    """
    top = scores.amax(1, keepdim=True).double()
    at_known = ((scores.gather(1, known).double() - top) / temperature).masked_fill(~is_known, -math.inf)
    scores.scatter_(1, known, math.inf)
    size = scores.shape[1] - is_known.sum(1)
    if one_support:
        absent = scores == -math.inf
        size = size - absent.sum(1)
        scores.masked_fill_(absent, math.inf)
    _ascending_(scores)
    # All but the columns that are known tokens in every row; at least one column.
    width = max(1, scores.shape[1] - (known.shape[1] - 1))
    log_pi = scores[:, :width].to(torch.float64, copy=True).contiguous()
    log_pi.sub_(top).div_(temperature)
    cumulative = log_pi.clamp(min=FLOOR).exp_().cumsum_(1)
    tail_mass = _at(cumulative, size - 1).where(size > 0, 0.0)[:, None]
    total = at_known.exp().sum(1, keepdim=True) + tail_mass
    return at_known - total.log(), log_pi.sub_(total.log()), cumulative.div_(total), size


def _ascending_(x: Float[Tensor, "n v"]) -> None:
    """Sort each row in place. On CPUs numpy's sort of bare values is many times faster."""
    if x.device.type == "cpu":
        x.numpy().sort(-1)
    else:
        x.copy_(x.sort(-1).values)
