"""Rigorous ends of KL and TV when only the top k of the rollout policy were recorded.

Known at every token: the rollout policy mu on a set S (its top k, and the token it drew), and the
current policy pi everywhere. Unknown: how mu spreads the rest of its mass, r = 1 - mu(S), over the
other tokens, on which pi has mass s. Lumping the rest into one bucket can only lose divergence (data
processing), so the lumped KL and TV are lower ends. Upwards, the rest of TV is at most the two tail
masses, (r + s) / 2, while KL has no upper end unless mu provably puts nothing outside S.

What an engine records is rounded, and r is a difference of rounded numbers. So every mass of mu is
itself an interval, `ROUNDING` wide: lower ends take the value in it that is nearest to pi's, the
upper end of TV the one that is farthest.

A lower end rejects rigorously and nearly completely; an upper end of TV accepts rigorously and
rarely. The grade is *interval*.

Reference: data processing: Cover and Thomas, Elements of Information Theory, 2nd ed., section 2.8;
lumping the tail: DPPO, arXiv:2602.04879. The divergences: Li et al., arXiv:2512.23075v5, Def. 2.2.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from offdrift.divergence.evidence import Divergence
from offdrift.divergence.exact import terms
from offdrift.errors import ShapeError

CHUNK = 2**20
"""Entries of `logits` worked on at a time (4 MiB per temporary)."""

ROUNDING = 128
"""Machine epsilons of the recorded log-probs' dtype by which one of them, or a sum of their
probabilities, may be off: 1.5e-5 in float32. Softmax kernels that add 151,936 numbers in sequence
were seen off by 74."""


@torch.no_grad()
def topk_divergences(
    topk_ids: Int[Tensor, "n k"],
    topk_logp: Float[Tensor, "n k"],
    tokens: Int[Tensor, " n"],
    logp_rollout: Float[Tensor, " n"],
    logits: Float[Tensor, "n v"],
    *,
    temperature: float = 1.0,
) -> tuple[Divergence, Divergence]:
    """Intervals that contain KL(mu || pi) and TV(mu, pi), from the top k of mu.

        KL_lo = sum_S mu log(mu / pi) + r log(r / s)     KL_hi = KL_lo if mu's tail is empty else inf
        TV_lo = (sum_S |mu - pi| + |r - s|) / 2          TV_hi = TV_lo + min(r, s)

    with r and s what mu and pi have outside S. mu's tail is empty if S is the whole vocabulary, or
    if one of the top k has probability 0 (then so has everything below it).

    Args:
        topk_ids: ids of the k likeliest tokens under mu, no id twice; k may be 0.
        topk_logp: their log mu, nats, of the distribution that was sampled; -inf is probability 0.
        tokens: the drawn tokens; one that is among the top k counts once.
        logp_rollout: their log mu, nats.
        logits: scores of the current policy, before its temperature.
        temperature: what the current policy's logits are divided by, > 0.

    Returns: "kl_rollout_current" in nats and "tv_rollout_current", of grade interval, float32 or
        better. A row with NaN in it gives NaN. Gradient: none, it is evidence.

    Raises: `ShapeError` if the arguments describe different tokens.

    Example:
        >>> mu = torch.tensor([[0.7, 0.2, 0.1]]).log()
        >>> pi = torch.tensor([[0.6, 0.3, 0.1]]).log()
        >>> drawn = torch.tensor([0])
        >>> kl, tv = topk_divergences(drawn[:, None], mu[:, :1], drawn, mu[:, 0], pi)
        >>> kl.lo, kl.hi, tv.lo, tv.hi
        (tensor([0.0216]), tensor([inf]), tensor([0.1000]), tensor([0.4000]))

    Reference: see the module.
    """
    _check(topk_ids, topk_logp, tokens, logp_rollout, logits)
    known_ids = torch.cat([topk_ids, tokens[:, None]], dim=1).long()
    repeated = (topk_ids == tokens[:, None]).any(1)
    log_mu = torch.cat([topk_logp, logp_rollout[:, None]], dim=1).double()
    log_mu[:, -1].masked_fill_(repeated, -math.inf)
    log_pi = _bucketed_current(logits, known_ids, repeated, temperature)

    num_known = topk_ids.shape[1] + (~repeated).long()
    empty_tail = (num_known == logits.shape[1]) | (topk_logp == -math.inf).any(1)
    slack = ROUNDING * max(torch.finfo(x.dtype).eps for x in (topk_logp, logp_rollout))
    log_mu_lo, log_mu_hi = _bucketed_rollout(log_mu, empty_tail, slack)
    kl_lo, tv_lo = _lower_ends(log_mu_lo, log_mu_hi, log_pi)
    kl_hi, tv_hi = _upper_ends(log_mu_lo, log_mu_hi, log_pi, empty_tail)
    dtype = torch.promote_types(topk_logp.dtype, logits.dtype)
    dtype = torch.promote_types(dtype, torch.float32)
    return (
        Divergence.interval("kl_rollout_current", kl_lo.to(dtype), kl_hi.to(dtype)),
        Divergence.interval("tv_rollout_current", tv_lo.to(dtype), tv_hi.to(dtype)),
    )


def _lower_ends(
    log_mu_lo: Float[Tensor, "n s"], log_mu_hi: Float[Tensor, "n s"], log_pi: Float[Tensor, "n s"]
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """KL and TV of the buckets, each with the mass of mu that agrees best with pi's."""
    # Every term is convex in mu's mass and 0 where the two masses are equal.
    kl, tv = terms(log_pi.clamp(log_mu_lo, log_mu_hi), log_pi)
    return kl.sum(1), tv.sum(1).clamp(max=1.0)


def _upper_ends(
    log_mu_lo: Float[Tensor, "n s"],
    log_mu_hi: Float[Tensor, "n s"],
    log_pi: Float[Tensor, "n s"],
    empty_tail: Bool[Tensor, " n"],
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """The most that KL and TV can be, whatever mu does inside its tail (the last bucket)."""
    # A convex term is largest at an end.
    low, high = terms(log_mu_lo, log_pi), terms(log_mu_hi, log_pi)
    kl, tv = torch.maximum(low[0], high[0]), torch.maximum(low[1], high[1])
    tail = (log_mu_hi[:, -1].exp() + log_pi[:, -1].exp()) / 2  # as if the two never overlapped
    tv_hi = (tv[:, :-1].sum(1) + tail).clamp(max=1.0)
    kl_hi = kl.sum(1)
    return torch.where(empty_tail | kl_hi.isnan(), kl_hi, math.inf), tv_hi


def _bucketed_rollout(
    log_mu: Float[Tensor, "n s"], empty_tail: Bool[Tensor, " n"], slack: float
) -> tuple[Float[Tensor, "n s+1"], Float[Tensor, "n s+1"]]:
    """The least and the most log-mass that mu can have on each known token, and outside them."""
    tail = -log_mu.logsumexp(1, keepdim=True).expm1()
    empty = empty_tail[:, None]
    lo = (tail - slack).clamp(0.0, 1.0).masked_fill(empty, 0.0)
    hi = (tail + slack).clamp(0.0, 1.0).masked_fill(empty, 0.0)
    known_lo, known_hi = log_mu - slack, (log_mu + slack).clamp(max=0.0)
    return torch.cat([known_lo, lo.log()], dim=1), torch.cat([known_hi, hi.log()], dim=1)


def _bucketed_current(
    logits: Float[Tensor, "n v"],
    known_ids: Int[Tensor, "n s"],
    repeated: Bool[Tensor, " n"],
    temperature: float,
) -> Float[Tensor, "n s+1"]:
    """log pi on each known token, and of the mass outside them: summed there, not 1 minus."""
    rows = max(1, CHUNK // logits.shape[1])
    chunks = zip(logits.split(rows), known_ids.split(rows), strict=True)
    log_pi = torch.cat([_bucketed_rows(z, ids, temperature) for z, ids in chunks])
    log_pi[:, -2].masked_fill_(repeated, -math.inf)
    return log_pi


def _bucketed_rows(
    logits: Float[Tensor, "n v"], known_ids: Int[Tensor, "n s"], temperature: float
) -> Float[Tensor, "n s+1"]:
    dtype = torch.promote_types(logits.dtype, torch.float32)
    scores = logits.to(dtype, copy=True).div_(temperature)
    known = scores.gather(1, known_ids).double()
    total = scores.logsumexp(1, keepdim=True).double()
    tail = scores.scatter_(1, known_ids, -math.inf).logsumexp(1, keepdim=True).double()
    return torch.cat([known, tail], dim=1) - total


def _check(
    topk_ids: Tensor, topk_logp: Tensor, tokens: Tensor, logp_rollout: Tensor, logits: Tensor
) -> None:
    n = len(tokens)
    if topk_ids.shape != topk_logp.shape or {len(topk_ids), len(logp_rollout), len(logits)} != {n}:
        raise ShapeError(
            f"topk_ids {tuple(topk_ids.shape)}, topk_logp {tuple(topk_logp.shape)}, tokens "
            f"{tuple(tokens.shape)}, logp_rollout {tuple(logp_rollout.shape)} and logits "
            f"{tuple(logits.shape)} must describe the same tokens, and the first two the same k"
        )
