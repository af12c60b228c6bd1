"""`exact.definition` and its gradients for ordinary operators: the same numbers in fewer passes.

A compiler reads every entry once however long the formula is; an operator at a time, each operation
is another pass over memory, and a choice entry by entry (`torch.where`) costs as much as an
exponential. Here every exponential is taken once, nothing is chosen, and where all entries have
|x| < SERIES_BELOW, x = log pi - log mu, only the series is summed:

    sum mu (x e^x - e^x + 1) = sum (pi - mu) x - KL(mu || pi)

Elsewhere the other way of writing the terms is added, with mu and pi set to 0 where the series holds.

Shape suffixes: n tokens, v vocabulary.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from offdrift.divergence.exact import SERIES_BELOW, ExactDivergences, fields, weighted


@torch.no_grad()
def divergences(
    logits_rollout: Float[Tensor, "n v"],
    logits: Float[Tensor, "n v"],
    tokens: Int[Tensor, " n"],
    temperature: Float[Tensor, ""],
) -> ExactDivergences:
    """What `exact.definition` says of these rows."""
    dtype = torch.promote_types(logits_rollout.dtype, logits.dtype)
    log_mu, mu = policy(logits_rollout.to(dtype), None)
    log_pi, pi = policy(logits.to(dtype), temperature)
    kl, kl_back, tv, chi2 = _sums(log_mu, mu, log_pi, pi)
    tv = tv + 0 * (mu[:, 0] + pi[:, 0])  # NaN of a row that is no distribution
    entropies = (_entropy(log_mu, mu), _entropy(log_pi, pi))
    return fields(kl, kl_back, tv, chi2, *entropies, (pi * pi).sum(-1), log_mu, log_pi, tokens)


def policy(
    scores: Float[Tensor, "n v"], temperature: Float[Tensor, ""] | None
) -> tuple[Float[Tensor, "n v"], Float[Tensor, "n v"]]:
    """Log-probabilities and probabilities, float32 or better, from one exponential."""
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    log_p = scores - scores.amax(-1, keepdim=True)
    if temperature is not None and temperature != 1:
        log_p /= temperature
    p = log_p.exp()
    total = p.sum(-1, keepdim=True)
    log_p -= total.log()
    p /= total
    return log_p, p


def entropy(logits: Float[Tensor, "n v"], temperature: Float[Tensor, ""]) -> tuple[Tensor]:
    """The entropy of every row, nats."""
    return (_entropy(*policy(logits, temperature)),)


def _entropy(log_p: Float[Tensor, "n v"], p: Float[Tensor, "n v"]) -> Float[Tensor, " n"]:
    return -weighted(p, log_p).sum(-1)


def _sums(
    log_mu: Float[Tensor, "n v"], mu: Float[Tensor, "n v"], log_pi: Float[Tensor, "n v"], pi: Float[Tensor, "n v"]
) -> tuple[Float[Tensor, " n"], ...]:
    """The sums of `exact.all_terms` over the vocabulary."""
    x = log_pi - log_mu
    if not x.numel() or x.abs().amax() < SERIES_BELOW:
        return _near(mu, x)
    x.nan_to_num_(nan=0.0, posinf=math.inf, neginf=-math.inf)  # neither can draw that token
    lowest, highest = x.amin(-1), x.amax(-1)
    far = (x.abs() >= SERIES_BELOW).to(x.dtype)
    x.nan_to_num_(posinf=0.0, neginf=0.0)
    x_far = x * far
    sums = _near(mu, x - x_far)
    mu, pi = mu * far, pi * far
    squared = x.add_(log_pi).exp_().mul_(far)  # pi^2 / mu
    moved = pi - mu
    kl = torch.addcmul(moved, mu, x_far, value=-1).sum(-1)
    kl_back = pi.mul_(x_far).sub_(moved).sum(-1)
    chi2 = squared.sub_(moved, alpha=2).sub_(mu).sum(-1)
    beyond = (kl, kl_back, moved.abs_().sum(-1) / 2, chi2)
    # A token that one policy alone can draw.
    lost, new = (torch.where(one.isinf(), math.inf, 0.0) for one in (lowest, highest))
    return tuple(a + b + c for a, b, c in zip(sums, beyond, (lost, new, 0.0, new), strict=True))


def _near(mu: Float[Tensor, "n v"], x: Float[Tensor, "n v"]) -> tuple[Float[Tensor, " n"], ...]:
    """The same where every x is below the limit, by the same series."""
    first, *rest = (x.new_tensor(1 / math.factorial(i)) for i in (6, 5, 4, 3, 2))
    series = torch.add(first, x, alpha=1 / math.factorial(7))
    for coefficient in rest:
        series = torch.addcmul(coefficient, series, x)
    curved = series.mul_(x).mul_(x)  # e^x - 1 - x
    rise = x + curved
    kl = curved.mul_(mu).sum(-1)
    moved = mu * rise
    chi2 = rise.mul_(moved).sum(-1)
    both = torch.mul(moved, x, out=rise).sum(-1)
    return kl, both - kl, moved.abs_().sum(-1) / 2, chi2


@torch.no_grad()
def write_kl_rollout_current(
    upstream: Tensor, _: Tensor, out: Tensor, logits: Tensor, rollout: Tensor, temperature: Tensor
) -> tuple[()]:
    moved = policy(logits, temperature)[1].sub_(policy(rollout, None)[1])
    return _write(out, upstream, moved, logits, temperature)


@torch.no_grad()
def write_kl_current_rollout(
    upstream: Tensor, kl: Tensor, out: Tensor, logits: Tensor, rollout: Tensor, temperature: Tensor
) -> tuple[()]:
    dtype = torch.promote_types(logits.dtype, rollout.dtype)
    log_pi, pi = policy(logits.to(dtype), temperature)
    log_mu, _ = policy(rollout.to(dtype), None)
    kl = torch.where(kl == math.inf, math.nan, kl)
    slope = log_pi.sub_(log_mu).sub_(kl[:, None]).mul_(pi)
    return _write(out, upstream, slope, logits, temperature)


@torch.no_grad()
def write_entropy(upstream: Tensor, entropy: Tensor, out: Tensor, logits: Tensor, temperature: Tensor) -> tuple[()]:
    log_pi, pi = policy(logits, temperature)
    slope = log_pi.add_(entropy[:, None]).mul_(pi).neg_()
    return _write(out, upstream, slope, logits, temperature)


def _write(out: Tensor, upstream: Tensor, slope: Tensor, logits: Tensor, temperature: Tensor) -> tuple[()]:
    """The chain rule, with 0 where nothing is to be learned, even if the slope is NaN there."""
    out.copy_(slope.mul_((upstream / temperature)[:, None]))
    filtered = logits == -math.inf
    if filtered.any():
        out.masked_fill_(filtered, 0.0)
    out[upstream == 0] = 0.0
    return ()
