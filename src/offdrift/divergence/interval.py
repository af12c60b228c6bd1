"""Certified intervals of KL and TV when only the top k of the rollout policy were recorded.

Known at every token: the rollout policy mu on a set S (its top k, and the token it drew), and the
current policy pi everywhere. Unknown: how mu spreads the rest of its mass, r = 1 - mu(S), over the
other tokens. But each of those has at most the k-th largest probability, so the unknown is a small
polytope, and the ends of the interval are the least and the most that KL and TV can be on it (`tail`).
They are sharp: some mu that agrees with the record attains each of them, up to what rounding hides.

What an engine records is rounded, and r is a difference of rounded numbers. So every mass of mu is
itself an interval as wide as rounding makes it (`rounding`), and each end takes the value in it that is safe.

The lower end rejects rigorously and nearly completely. The upper end accepts rigorously and rarely:
mu could have all of r on tokens that pi thinks all but impossible. With `tail_log_ratio_cap=` the
upper end rules that out by assumption; the grade is then *capped interval*, and says so.

Reference: DPPO, arXiv:2602.04879, which lumps the tail into one token; the divergences: Li et al.,
arXiv:2512.23075v5, Def. 2.2.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from offdrift.divergence.evidence import Divergence
from offdrift.divergence.exact import terms
from offdrift.divergence.head import check_positive
from offdrift.divergence.tail import TIE, Tail, least, most, most_under_cap, sorted_tail
from offdrift.errors import BadValueError, ShapeError

KL, TV = "kl_rollout_current", "tv_rollout_current"

CHUNK = {"cpu": 2**20}
"""Entries of `logits` worked on at a time: 8 MiB per temporary."""

CHUNK_ELSEWHERE = 2**24
"""The same on accelerators."""

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
    ends = (_ends(z, _Record(*r), temperature, cap) for z, *r in pieces)
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
    """What is recorded of mu: bounds on the log-probs of S, and on what lies outside."""

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
    own, shared = (torch.cat(part, dim=1) for part in parts)
    slack = own + shared
    lo, hi = log_mu - slack, (log_mu + slack).clamp(max=0.0)
    nothing = hi.new_zeros(len(hi), 1)
    log_c = torch.cat([nothing, hi[:, :-1]], dim=1).amin(1)
    return _Record(ids, is_known, lo, hi, log_mu - own, log_mu + own, log_c)


def rounding(logp: Float[Tensor, "*shape"], *, vocab: int) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
    """How far recorded log-probs may be from those that were sampled, nats, float64.

    Returns what each may be off by itself, and what all of one record may be off by together:

        eps (128 + |log mu|)                 float32 or float64: the number
        ... + |log mu| 2^-8                  bfloat16 (2^-11 in float16): half a unit in its last place
        eps V / 16                           the sum over the vocabulary: `LANES`

    Half precision is taken for a float32 result that was rounded once when it was stored, as engines do
    whose log-softmax is float32. Log-probs that were *computed* in half precision are off by far more.

    Example:
        >>> x = torch.tensor([-1.0])
        >>> own, shared = rounding(x, vocab=151_936)
        >>> own.float(), shared.float()
        (tensor([1.5378e-05]), tensor([0.0011]))
    """
    size = logp.double().abs().clamp(max=2.0**16)
    exact = torch.promote_types(logp.dtype, torch.float32)
    eps = torch.finfo(exact).eps
    own = eps * (ROUNDING + size)
    if logp.dtype != exact:
        own = own + torch.finfo(logp.dtype).eps / 2 * size
    return own, torch.full_like(own, eps * vocab / (2 * LANES))


def _ends(
    logits: Float[Tensor, "n v"], record: _Record, temperature: float | int, cap: float | int | None
) -> tuple[Tensor, ...]:
    """Least and most KL, least and most TV, float64; where the cap is refuted."""
    log_mu_lo, log_mu_hi = record.log_mu_lo, record.log_mu_hi
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    log_pi, tail, consistent = _tail(scores, record, temperature)

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
    scores: Float[Tensor, "n v"], record: _Record, temperature: float | int
) -> tuple[Float[Tensor, "n s"], Tail, Bool[Tensor, " n"]]:
    """log pi on S, the tail, and which rows any distribution could have left."""
    ids, is_known, log_mu_lo, log_mu_hi, *_, log_c = record
    log_pi, rest, cumulative = sorted_tail(scores, ids, is_known, temperature)
    size = scores.shape[1] - is_known.sum(1)
    room = size * log_c.exp()
    r_lo, r_hi = (-x.logsumexp(1).expm1() for x in (log_mu_hi, log_mu_lo))
    consistent = (r_hi >= 0) & (r_lo <= room * (1 + TIE) + TIE) & (log_mu_lo[:, -1] <= log_c)
    consistent &= ~log_pi.isnan().any(1)
    r_hi = torch.minimum(r_hi, room).clamp(min=0.0)
    r_lo = torch.minimum(r_lo.clamp(min=0.0), r_hi)
    return log_pi, Tail(rest, cumulative, size, log_c, r_lo, r_hi), consistent


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
