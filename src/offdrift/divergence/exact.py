"""Exact divergences of two policies over the full vocabulary: the definition, and its form for plain operators.

`fused` runs both in pieces; call that on anything large, because `definition` holds about twenty
`[tokens, vocab]` tensors at once. The sums are arranged so that rounding cannot drown a small
divergence. With `x = log pi - log mu`,

    KL(mu || pi) = sum_a mu (e^x - 1 - x)        TV(mu, pi) = 1/2 sum_a mu |e^x - 1|
    KL(pi || mu) = sum_a mu (x e^x - e^x + 1)    chi2       = sum_a mu (e^x - 1)^2

No term is negative, and an error in a log-normalizer enters squared or relative to the sum: a KL of
1e-9 nats survives float32, where `sum mu (log mu - log pi)` is noise below 1e-6. Near x = 0 the
brackets come from one series, elsewhere from mu, pi and pi^2 / mu, which are also right where mu or
pi is 0. The price is a second sweep: no term is known before both normalizers are.

Functions that are compiled are `no_type_check`: run-time argument checkers cannot be.

Shape suffixes: n tokens, v vocabulary.
"""

from __future__ import annotations

import math
from typing import NamedTuple, no_type_check

import torch
from jaxtyping import Float, Int
from torch import Tensor


class ExactDivergences(NamedTuple):
    """Divergences, entropies and log-probs of two distributions over the whole vocabulary, at every token.

    Rollout policy mu, current policy pi; nats where it is a KL, an entropy or a log-prob. Each
    field has one number per token, float32 or better.
    """

    kl_rollout_current: Float[Tensor, " n"]
    """KL(mu || pi) = sum mu log(mu / pi); +inf where pi cannot draw a token of mu's."""
    kl_current_rollout: Float[Tensor, " n"]
    """KL(pi || mu); +inf where mu cannot draw a token of pi's."""
    tv: Float[Tensor, " n"]
    """TV = 1/2 sum |mu - pi|, in [0, 1]; NaN if it was not asked for."""
    chi2: Float[Tensor, " n"]
    """E_mu[(pi / mu)^2] - 1 = sum pi^2 / mu - 1; +inf where mu cannot draw a token of pi's."""
    entropy_rollout: Float[Tensor, " n"]
    """-sum mu log mu."""
    entropy: Float[Tensor, " n"]
    """-sum pi log pi."""
    sum_pi_squared: Float[Tensor, " n"]
    """sum pi^2."""
    logp_rollout: Float[Tensor, " n"] | None = None
    """log mu(token), if tokens were given."""
    logp: Float[Tensor, " n"] | None = None
    """log pi(token), if tokens were given."""


SERIES_BELOW = 0.25
"""|log pi - log mu| under which the series is used; 6 terms leave a relative error of 1e-8 there."""


@torch.no_grad()
def definition(
    logits_rollout: Float[Tensor, "n v"],
    logits: Float[Tensor, "n v"],
    tokens: Int[Tensor, " n"],
    temperature: Float[Tensor, ""] | float = 1.0,
) -> ExactDivergences:
    """Every exact divergence of every row, and the log-probs of its drawn token.

    The equations stand at the fields of `ExactDivergences`. Tokens that both policies filtered do
    not exist; 0 log 0 = 0; what one policy cannot draw and the other can makes the KL from the other
    infinite. A row that is no distribution (NaN, +inf, or -inf everywhere, in either argument) gives
    NaN in every field, never an error.

    Args:
        logits_rollout: scores of the rollout policy, any float dtype, as it was sampled (after
            temperature and filters: -inf is a token it could not draw). Only their differences
            within a row matter, so normalized log-probs are equally welcome.
        logits: scores of the current policy, before its temperature.
        tokens: the drawn tokens, of which the log-probs are wanted.
        temperature: what the current policy's logits are divided by, > 0.

    Returns: float32 or better. Gradient: none, it is evidence.

    Example:
        >>> mu, pi = torch.tensor([[0.5, 0.5, 0.0]]).log(), torch.tensor([[0.25, 0.5, 0.25]]).log()
        >>> found = definition(mu, pi, torch.tensor([0]))
        >>> found.kl_rollout_current, found.kl_current_rollout, found.tv
        (tensor([0.3466]), tensor([inf]), tensor([0.2500]))

    Reference: Li et al., Trust Region Masking, arXiv:2512.23075v5, eq. 23 (KL) and
    Definition 2.2 (TV).
    """
    log_mu, log_pi = log_policies(logits_rollout, logits, temperature)
    mu, pi = log_mu.exp(), log_pi.exp()
    terms = (*all_terms(log_mu, log_pi, mu, pi), -weighted(mu, log_mu), -weighted(pi, log_pi), pi * pi)
    return _fields([x.sum(-1) for x in terms], log_mu, log_pi, tokens)


@no_type_check
def _fields(
    sums: list[Float[Tensor, " n"]],
    log_mu: Float[Tensor, "n v"],
    log_pi: Float[Tensor, "n v"],
    tokens: Int[Tensor, " n"],
) -> ExactDivergences:
    """The first seven fields as a result: one policy's NaN makes every field NaN."""
    kl, kl_back, tv, chi2, *others = sums
    others += [_picked(log_mu, tokens), _picked(log_pi, tokens)]
    nan_or_0 = 0.0 * tv  # also in those that the other policy alone would decide
    return ExactDivergences(kl, kl_back, tv.clamp(max=1.0), chi2, *[nan_or_0 + x for x in others])


@no_type_check
def log_policies(
    logits_rollout: Float[Tensor, "n v"], logits: Float[Tensor, "n v"], temperature: Float[Tensor, ""] | float
) -> tuple[Float[Tensor, "n v"], Float[Tensor, "n v"]]:
    """log mu and log pi in one dtype, float32 or better."""
    dtype = torch.promote_types(logits_rollout.dtype, logits.dtype)
    return log_policy(logits_rollout.to(dtype), 1.0), log_policy(logits.to(dtype), temperature)


@no_type_check
def log_policy(scores: Float[Tensor, "n v"], temperature: Float[Tensor, ""] | float) -> Float[Tensor, "n v"]:
    """Log-softmax of scores / temperature, with a normalizer that is a pairwise sum.

    torch's own adds in sequence: over 151,936 float32 entries it is off by up to 1e-5, this by less
    than 1e-6.
    """
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    # Divided after the largest is subtracted: no overflow, and no `[tokens, vocab]` temporary, which
    # torch's compiler makes when it recognizes the softmax of a quotient.
    below_top = (scores - scores.amax(-1, keepdim=True)) / temperature
    return below_top - below_top.exp().sum(-1, keepdim=True).log()


@no_type_check
def weighted(p: Float[Tensor, "n v"], x: Float[Tensor, "n v"]) -> Float[Tensor, "n v"]:
    """p x, with 0 where p is 0 and x -inf."""
    return p * x.clamp(min=torch.finfo(x.dtype).min)


@no_type_check
def _picked(x: Float[Tensor, "n v"], tokens: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Each row's entry at its token; NaN for a token that the vocabulary does not have."""
    inside = (tokens >= 0) & (tokens < x.shape[1])
    picked = x.gather(1, torch.where(inside, tokens, 0)[:, None]).squeeze(1)
    return torch.where(inside, picked, math.nan)


@no_type_check
def terms(
    log_mu: Float[Tensor, "n v"], log_pi: Float[Tensor, "n v"]
) -> tuple[Float[Tensor, "n v"], Float[Tensor, "n v"]]:
    """Per-entry terms whose sums over a partition are KL(mu || pi) and TV; none is negative.

        kl = pi - mu - mu (log pi - log mu)        tv = |mu - pi| / 2

    The entries may be tokens, or sets of tokens with their total mass.
    """
    kl, _, tv, _ = all_terms(log_mu, log_pi, log_mu.exp(), log_pi.exp())
    return kl, tv


@no_type_check
def all_terms(
    log_mu: Float[Tensor, "n v"], log_pi: Float[Tensor, "n v"], mu: Float[Tensor, "n v"], pi: Float[Tensor, "n v"]
) -> tuple[Float[Tensor, "n v"], Float[Tensor, "n v"], Float[Tensor, "n v"], Float[Tensor, "n v"]]:
    """Per-entry terms of KL(mu || pi), KL(pi || mu), TV and chi2; none is negative.

    pi - mu - mu x      mu - pi + pi x      |mu - pi| / 2      (mu - pi)^2 / mu
    """
    x = log_pi - log_mu
    near = x.abs() < SERIES_BELOW
    x = _nan_to(0.0, x)  # neither has mass there; a NaN of either policy is in `moved`
    curved = _expm1_minus(x)  # e^x - 1 - x
    rise = x + curved  # e^x - 1
    moved = torch.where(near, mu * rise, pi - mu)
    # p x, with 0 log 0 = 0. A token that only one policy has counts even where its exp underflows.
    largest = torch.finfo(x.dtype).max
    mu_x = _nan_to(-math.inf, mu * x.clamp(max=largest))
    pi_x = _nan_to(math.inf, pi * x.clamp(min=-largest))
    kl = torch.where(near, mu * curved, moved - mu_x)
    kl_back = torch.where(near, mu * (x * rise - curved), pi_x - moved)
    chi2 = torch.where(near, moved * rise, (log_pi + x).exp() - pi - moved)
    return kl, kl_back, moved.abs() / 2, chi2


@no_type_check
def _nan_to(value: float, x: Float[Tensor, "n v"]) -> Float[Tensor, "n v"]:
    return torch.where(x == x, x, value)  # twice as fast, compiled, as nan_to_num


@no_type_check
def _expm1_minus(x: Float[Tensor, "n v"]) -> Float[Tensor, "n v"]:
    """e^x - 1 - x for small x, by its Taylor series."""
    series = 1 / 6 + x * (1 / 24 + x * (1 / 120 + x * (1 / 720 + x * (1 / 5040))))
    return x * x * (1 / 2 + x * series)


# The same numbers in fewer passes, for ordinary operators. A compiler reads every entry once however long the
# formula is; an operator at a time, each operation is another pass over memory, and a choice entry by entry
# (`torch.where`) costs as much as an exponential. Here every exponential is taken once, nothing is chosen, and
# where all entries have |x| < SERIES_BELOW only the series is summed:
#
#     sum mu (x e^x - e^x + 1) = sum (pi - mu) x - KL(mu || pi)
#
# Elsewhere the other way of writing the terms is added, with mu and pi set to 0 where the series holds.


@torch.no_grad()
def plain_divergences(
    logits_rollout: Float[Tensor, "n v"],
    logits: Float[Tensor, "n v"],
    tokens: Int[Tensor, " n"],
    temperature: Float[Tensor, ""],
) -> ExactDivergences:
    """Compute `definition` for these rows."""
    dtype = torch.promote_types(torch.promote_types(logits_rollout.dtype, logits.dtype), torch.float32)
    # One piece of memory for all temporaries: a new one for each costs more than what is computed in it.
    room = torch.empty(7, *logits.shape, dtype=dtype, device=logits.device)
    below_mu, mass_mu = _masses(logits_rollout, None, room[0], out=room[1])
    below_pi, mass_pi = _masses(logits, temperature, room[2], out=room[3])
    totals = [x.sum(-1) for x in (mass_mu, mass_pi)]
    log_totals = [x.log() for x in totals]
    x = torch.sub(below_pi, below_mu, out=room[4])
    x += (log_totals[0] - log_totals[1])[:, None]
    if x.numel() and not max(-x.amin(), x.amax()) < SERIES_BELOW:
        log_pair = [y.sub_(total[:, None]) for y, total in zip((below_mu, below_pi), log_totals, strict=True)]
        policies = [y.div_(total[:, None]) for y, total in zip((mass_mu, mass_pi), totals, strict=True)]
        return _plain_far(log_pair, policies, x, tokens, room[5:])
    kl, kl_back, tv, chi2 = (y / totals[0] for y in _near(mass_mu, x, *room[5:]))
    moments = [torch.mul(*both, out=room[5]).sum(-1) for both in ((mass_mu, below_mu), (mass_pi, below_pi))]
    entropies = [log - moment / total for log, moment, total in zip(log_totals, moments, totals, strict=True)]
    squared = torch.mul(mass_pi, mass_pi, out=room[5]).sum(-1) / totals[1].square()
    logps = [_picked(y, tokens) - log for y, log in zip((below_mu, below_pi), log_totals, strict=True)]
    fields = (kl, kl_back, tv.clamp(max=1.0), chi2, *entropies, squared, *logps)
    return ExactDivergences(*fields)


def _masses(
    scores: Float[Tensor, "n v"],
    temperature: Float[Tensor, ""] | None,
    below: Float[Tensor, "n v"],
    *,
    out: Float[Tensor, "n v"],
) -> tuple[Float[Tensor, "n v"], Float[Tensor, "n v"]]:
    """Scores / temperature less the largest, written to `below`, and their exponentials."""
    if scores.dtype is below.dtype:
        torch.sub(scores, scores.amax(-1, keepdim=True), out=below)
    else:
        below.copy_(scores)
        below -= below.amax(-1, keepdim=True)
    if temperature is not None and temperature != 1:
        below /= temperature
    return below, torch.exp(below, out=out)


def _plain_far(
    log_pair: list[Float[Tensor, "n v"]],
    policies: list[Float[Tensor, "n v"]],
    x: Float[Tensor, "n v"],
    tokens: Int[Tensor, " n"],
    room: Float[Tensor, "2 n v"],
) -> ExactDivergences:
    """Compute the same where some |x| is beyond the series, or some entry is no number."""
    (log_mu, log_pi), (mu, pi) = log_pair, policies
    entropies = [plain_entropy(log_p, p) for log_p, p in zip(log_pair, policies, strict=True)]
    others = (*entropies, (pi * pi).sum(-1))
    nan_or_0 = 0 * (mu[:, 0] + pi[:, 0])  # NaN of a row that is no distribution
    kl, kl_back, tv, chi2 = _sums(mu, pi, log_pi, x, room)
    return _fields([kl, kl_back, tv + nan_or_0, chi2, *others], log_mu, log_pi, tokens)


def plain_policy(
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


def plain_entropy(log_p: Float[Tensor, "n v"], p: Float[Tensor, "n v"]) -> Float[Tensor, " n"]:
    return -weighted(p, log_p).sum(-1)


def _sums(
    mu: Float[Tensor, "n v"],
    pi: Float[Tensor, "n v"],
    log_pi: Float[Tensor, "n v"],
    x: Float[Tensor, "n v"],
    room: Float[Tensor, "2 n v"],
) -> tuple[Float[Tensor, " n"], ...]:
    """Compute the sums of `all_terms` over the vocabulary; takes x."""
    x.nan_to_num_(nan=0.0, posinf=math.inf, neginf=-math.inf)  # neither can draw that token
    lowest, highest = x.amin(-1), x.amax(-1)
    far = (x.abs() >= SERIES_BELOW).to(x.dtype)
    x.nan_to_num_(posinf=0.0, neginf=0.0)
    x_far = x * far
    sums = _near(mu, x - x_far, *room)
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


def _near(
    mu: Float[Tensor, "n v"], x: Float[Tensor, "n v"], series: Float[Tensor, "n v"], rise: Float[Tensor, "n v"]
) -> tuple[Float[Tensor, " n"], ...]:
    """Sum the terms where every x is below the limit, by the series of `all_terms`; works in the last two."""
    first, *rest = (x.new_tensor(1 / math.factorial(i)) for i in (6, 5, 4, 3, 2))
    torch.add(first, x, alpha=1 / math.factorial(7), out=series)
    for coefficient in rest:
        torch.addcmul(coefficient, series, x, out=series)
    curved = series.mul_(x).mul_(x)  # e^x - 1 - x
    torch.add(x, curved, out=rise)
    kl = curved.mul_(mu).sum(-1)
    moved = torch.mul(mu, rise, out=series)
    chi2 = rise.mul_(moved).sum(-1)
    both = torch.mul(moved, x, out=rise).sum(-1)
    return kl, both - kl, moved.abs_().sum(-1) / 2, chi2
