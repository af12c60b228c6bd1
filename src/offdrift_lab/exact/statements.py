"""Values and bounds of each statement of docs/certificates.md that goes beyond Table 1, for enumerated pairs.

A statement says `value <= bound` for every pair of policies and every reward in [0, 1]. `value` is
computed for the worst rewards, which are known in closed form: all values are linear in the rewards,
so the worst reward is 1 where its weight is positive. `offdrift_lab.exact.search` hunts for violations, as it
does for Table 1.

Notation: mu draws, pi is judged, `w_t` the ratio of token t, `w` their product, `Error = J(pi) - J(mu) -
E_mu[R sum_t (w_t - 1)]`, `k3(u) = u - 1 - log u`. Sums are taken of `x_t = w_t - 1` and `w - 1`, which
keep their digits where drift is small.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from offdrift.certificate.bounds import HELLINGER, unified
from offdrift.certificate.bounds import variance as variance_bound
from offdrift_lab.exact.policy import TabularPolicy, divergences, k3, token_kl, weights_by_sequence

TIS_CAP = 1.2
"""Cap of the token weights in the statement about truncated importance sampling."""
CLIP = 0.2
"""Range of PPO's clip on both sides."""


@dataclass(frozen=True)
class Sides:
    """`value <= bound` for each of `p` pairs, where `applies`."""

    value: Float[Tensor, " p"]
    bound: Float[Tensor, " p"]
    applies: Bool[Tensor, " p"]


Weigh = Callable[[Float[Tensor, "p c v"]], Float[Tensor, "p c v"]]


def changes(mu: TabularPolicy, pi: TabularPolicy) -> list[Float[Tensor, "p c v"]]:
    """x_t = w_t - 1 for every context and token of every position; 0 where mu cannot draw the token."""
    return [torch.where(m > 0, (p - m) / m.where(m > 0, 1.0), 0.0) for m, p in zip(mu.levels, pi.levels, strict=True)]


def token_sum(mu: TabularPolicy, pi: TabularPolicy, of: Weigh) -> Float[Tensor, "p y"]:
    """sum_t of(x_t) of every sequence, numbered in base v."""
    total = mu.levels[0].new_zeros(mu.pairs, 1)
    for x in changes(mu, pi):
        total = (total[..., None] + of(x)).flatten(1)
    return total


def products(mu: TabularPolicy, pi: TabularPolicy) -> tuple[Float[Tensor, "p y"], Float[Tensor, "p y"]]:
    """Compute w - 1 of every sequence, and what the sum of x_t leaves out of it, sum_t (w_<t - 1) x_t."""
    excess = left_out = mu.levels[0].new_zeros(mu.pairs, 1)
    for x in changes(mu, pi):
        before = excess[..., None]
        left_out = (left_out[..., None] + before * x).flatten(1)
        excess = (before + x + before * x).flatten(1)
    return excess, left_out


def mean(law: Float[Tensor, "p y"], x: Float[Tensor, "p y"]) -> Float[Tensor, " p"]:
    """Expectation over sequences; one that cannot be drawn does not count, whatever x is there."""
    return (law * x.where(law > 0, 0.0)).sum(1)


def full_support(mu: TabularPolicy, pi: TabularPolicy) -> Bool[Tensor, " p"]:
    """Mark the pairs where pi draws nothing that mu cannot."""
    covered = [~((m == 0) & (p > 0)).flatten(1).any(1) for m, p in zip(mu.levels, pi.levels, strict=True)]
    return torch.stack(covered).all(0)


def stopped(
    mu: TabularPolicy, pi: TabularPolicy, limit: Float[Tensor, " p"]
) -> tuple[TabularPolicy, Bool[Tensor, "p y"]]:
    """pi', which is pi while every context so far has KL <= limit, and mu from the first other one on.

    Returns: pi', and of every sequence whether all its contexts meet the limit (M = 1).
    """
    inside = torch.ones(mu.pairs, 1, dtype=torch.bool)
    levels = []
    for m, p in zip(mu.levels, pi.levels, strict=True):
        inside = inside & (token_kl(m, p) <= limit[:, None])
        levels.append(torch.where(inside[..., None], p, m))
        inside = inside.repeat_interleave(mu.vocab, dim=1)
    return TabularPolicy(tuple(levels)), inside


def masked_surrogate(mu: TabularPolicy, pi: TabularPolicy) -> Sides:
    """J(pi) - J(mu) >= L'_masked - B*' - E_mu[(1 - M) R], with every row of Table 1 for (mu, pi').

    The limit is half of the largest KL of the pair, so that some context is outside.
    """
    kl_max = divergences(mu, pi).kl_max
    limit = torch.where(kl_max < torch.inf, kl_max / 2, 0.05)
    prime, inside = stopped(mu, pi, limit)
    d = divergences(mu, prime)
    # J(pi) - J(mu) - L'_masked + E[(1 - M) R]: accepted sequences count by their weight in the error, the
    # others by pi(y) >= 0, where the worst reward is 0.
    overstated = ((-weights_by_sequence(mu, pi)[1]).clamp(min=0) * (inside & (mu.law() > 0))).sum(1)
    columns = zip(d.kl_max.tolist(), d.tv_max.tolist(), d.kl_seq.tolist(), d.tv_seq.tolist(), strict=True)
    rows = [
        unified(
            horizon=mu.horizon,
            delta=delta,
            eps=min(eps, 1.0),
            kl_seq=kl_seq,
            tv_seq=min(tv_seq, 1.0),
            mean_tv=d.mean_tv[i].detach().clamp(max=1).numpy(),
            constants="sharp",
        ).value
        for i, (delta, eps, kl_seq, tv_seq) in enumerate(columns)
    ]
    assert bool((d.kl_max <= limit * (1 + 1e-12)).all())  # the premise holds by construction
    return Sides(overstated, torch.tensor(rows, dtype=torch.float64), torch.ones_like(kl_max, dtype=torch.bool))


def variance(mu: TabularPolicy, pi: TabularPolicy) -> Sides:
    """|Error| <= sd_mu(R) sqrt(sum_t E_mu[(w_<t - 1)^2 chi2(c_t)]), where pi draws nothing mu cannot.

    For the rewards of largest error, whose standard deviation is at most 1/2.
    """
    error, reward_sd = _worst_error(mu, pi)
    law, before = mu.levels[0].new_ones(mu.pairs, 1), mu.levels[0].new_zeros(mu.pairs, 1)
    total = mu.levels[0].new_zeros(mu.pairs)
    for m, x in zip(mu.levels, changes(mu, pi), strict=True):
        total = total + (law * before.square() * (m * x.square()).sum(-1)).sum(1)
        law, now = (law[..., None] * m).flatten(1), before[..., None]
        before = (now + x + now * x).flatten(1)
    return Sides(error, reward_sd * total.sqrt(), full_support(mu, pi))


def variance_limit(mu: TabularPolicy, pi: TabularPolicy) -> Sides:
    """|Error| <= sd_mu(R) sqrt((1 + chi)^T - 1 - T chi), chi the largest chi2 of a context: a row of `ROWS`."""
    error, reward_sd = _worst_error(mu, pi)
    squares = [(m * x.square()).sum(-1).amax(1) for m, x in zip(mu.levels, changes(mu, pi), strict=True)]
    chi2 = torch.stack(squares).amax(0)
    bound = [
        variance_bound(horizon=mu.horizon, chi2=chi, reward_sd=sd)
        for chi, sd in zip(chi2.tolist(), reward_sd.tolist(), strict=True)
    ]
    return Sides(error, error.new_tensor(bound), full_support(mu, pi))


def _worst_error(mu: TabularPolicy, pi: TabularPolicy) -> tuple[Float[Tensor, " p"], Float[Tensor, " p"]]:
    """The largest error over all rewards, and the standard deviation of that reward under mu."""
    weights = weights_by_sequence(mu, pi)[1]
    share = mean(mu.law(), (weights > 0).double())
    return weights.clamp(min=0).sum(1), (share * (1 - share)).clamp(min=0).sqrt()


def two_sided(mu: TabularPolicy, pi: TabularPolicy) -> dict[str, Sides]:
    """Error lies in [-min(E[R sum k3(w_t)], E[(1-R) k3(w)]), min(E[R k3(w)], E[(1-R) sum k3(w_t)])].

    All four ends, for the rewards of largest and of smallest error, and the worst case over R, which is
    1/2 E_mu|sum_t (w_t - 1) - (w - 1)| and attained. The ends with R alone hold for any supports: there,
    what pi draws beyond mu adds to the error from above, and E[R k3(w)] gets `missed` added.
    """
    law, (gain, left_out) = mu.law(), products(mu, pi)
    tokens, sequence_k3 = token_sum(mu, pi, k3), k3(gain)
    missed = (-mean(law, gain)).clamp(min=0)  # the probability that pi draws what mu cannot
    weights = weights_by_sequence(mu, pi)[1]
    high, low = (weights > 0).double(), (weights < 0).double()
    full = full_support(mu, pi)
    always = torch.ones_like(full)

    def reward_mean(rewards: Tensor, x: Tensor) -> Tensor:
        return mean(law, torch.where(rewards > 0, x, 0.0))

    largest, smallest = (weights * high).sum(1), (-weights * low).sum(1)
    measured = mean(law, high * left_out) + missed
    return {
        "upper end, E[R k3(w)]": Sides(measured, reward_mean(high, sequence_k3) + missed, always),
        "upper end, E[(1-R) sum k3(w_t)]": Sides(largest, reward_mean(1 - high, tokens), full),
        "lower end, E[R sum k3(w_t)]": Sides(smallest, reward_mean(low, tokens), full),
        "lower end, E[(1-R) k3(w)]": Sides(smallest, reward_mean(1 - low, sequence_k3), full),
        "worst case over R": Sides(largest, mean(law, left_out.abs()) / 2, full),
    }


def _truncated(x: Tensor) -> Tensor:
    beyond = (x.clamp(min=TIS_CAP - 1) + 1) / TIS_CAP
    return torch.where(x <= TIS_CAP - 1, x, TIS_CAP - 1 + TIS_CAP * beyond.log())


OBJECTIVES: dict[str, tuple[Weigh, Weigh]] = {
    "clipped surrogate": (lambda x: x.clamp(max=CLIP), lambda x: x.clamp(min=-CLIP)),
    "truncated weights": (_truncated, _truncated),
    "no weights": (torch.log1p, torch.log1p),
}
"""V of a token per unit of |A|, of x = w - 1: for right answers (A > 0) and, with the sign turned, for wrong ones."""


def trained_objectives(mu: TabularPolicy, pi: TabularPolicy) -> dict[str, Sides]:
    """E_mu[sum_t V(R, w_t)] - KL_seq lies below J(pi) - J(mu), if V <= (R - b)(w - 1) + (1 - R) k3(w).

    For b = 1/2 and V of a clipped surrogate, of truncated weights (`C + C log(w / C) - 1` above the cap) and of
    no weights at all (`log w`), where pi draws nothing mu cannot; for b = 0 and truncated weights always.
    """
    kl_seq, full, law = divergences(mu, pi).kl_seq, full_support(mu, pi), mu.law()
    gain = products(mu, pi)[0]
    sides = {}
    for name, (right, wrong) in OBJECTIVES.items():
        # The advantage of a sequence with R = 1 is 1/2 at every token, with R = 0 -1/2. The worst of the two.
        overstated = torch.maximum(token_sum(mu, pi, right) / 2 - gain, -token_sum(mu, pi, wrong) / 2)
        finite = full & (kl_seq < torch.inf)
        sides[name] = Sides(mean(law, overstated), kl_seq, finite)
    positive = mean(law, (token_sum(mu, pi, _truncated) - gain).clamp(min=0))
    return sides | {"truncated weights, no baseline": Sides(positive, kl_seq, torch.ones_like(full))}


def weighted_objectives(mu: TabularPolicy, pi: TabularPolicy) -> dict[str, Sides]:
    """E_mu[l sum_t V(R, w_t)] <= E_mu[l (R - b)(w - 1)] + E_mu[l ((1-b) sum_t k3(w_t) + b k3(w))] for any l >= 0.

    What aggregation and normalization make of the objectives above, b = 1/2. As l(y) may be anything, it holds for
    each sequence alone: here for the worst one, where l = 1, and the worse of R = 0 and R = 1.
    """
    kl_seq, full, law = divergences(mu, pi).kl_seq, full_support(mu, pi), mu.law()
    gain = products(mu, pi)[0]
    price = (token_sum(mu, pi, k3) + k3(gain)) / 2
    sides = {}
    for name, (right, wrong) in OBJECTIVES.items():
        excess = torch.maximum(token_sum(mu, pi, right) - gain, gain - token_sum(mu, pi, wrong)) / 2
        share = torch.where((law > 0) & (price > 1e-9), excess / price, -torch.inf)
        worst = share.nan_to_num(-torch.inf).argmax(1, keepdim=True)
        value, limit = ((law * x).gather(1, worst).squeeze(1) for x in (excess, price))
        sides[name] = Sides(value, limit, full & (kl_seq < torch.inf))
    return sides


def hellinger(mu: TabularPolicy, pi: TabularPolicy) -> Sides:
    """|Error| <= C sum_t E_mu[H^2(c_t)] for any two policies, H^2 = 1 - sum_y sqrt(mu pi)."""
    error = weights_by_sequence(mu, pi)[1]
    return Sides(
        torch.maximum(error.clamp(min=0).sum(1), (-error).clamp(min=0).sum(1)),
        HELLINGER * hellinger_sum(mu, pi),
        torch.ones(mu.pairs, dtype=torch.bool),
    )


def hellinger_sum(mu: TabularPolicy, pi: TabularPolicy) -> Float[Tensor, " p"]:
    """sum_t E_mu[1 - sum_y sqrt(mu(y|c_t) pi(y|c_t))], without cancellation: half of sum (sqrt pi - sqrt mu)^2."""
    laws = mu.context_laws()
    each = ((law * (p.sqrt() - m.sqrt()).square().sum(-1)).sum(1) / 2 for law, m, p in zip(laws, mu.levels, pi.levels))
    return torch.stack(list(each)).sum(0)


STATEMENTS: dict[str, Callable[[TabularPolicy, TabularPolicy], Sides | dict[str, Sides]]] = {
    "masked surrogate, no premise": masked_surrogate,
    "variance along sequences": variance,
    "variance from the largest chi-squared": variance_limit,
    "two-sided identity": two_sided,
    "trained objectives": trained_objectives,
    "weighted objectives": weighted_objectives,
    "Hellinger": hellinger,
}
SMOOTH = ("variance along sequences", "two-sided identity", "trained objectives", "Hellinger")
"""Statements with gradients on both sides, which can be climbed."""
LABELS = {
    "masked surrogate, no premise": "Masked, no premise (7)",
    "variance along sequences": "Variance (9)",
    "variance from the largest chi-squared": "Variance, max χ² (9)",
    "two-sided identity: upper end, E[R k3(w)]": "≤ E[R k3(w)] (10)",
    "two-sided identity: upper end, E[(1-R) sum k3(w_t)]": "≤ E[(1−R) Σk3] (10)",
    "two-sided identity: lower end, E[R sum k3(w_t)]": "≥ −E[R Σk3] (10)",
    "two-sided identity: lower end, E[(1-R) k3(w)]": "≥ −E[(1−R) k3(w)] (10)",
    "two-sided identity: worst case over R": "Worst reward (10)",
    "trained objectives: clipped surrogate": "Clipped surrogate (12)",
    "trained objectives: truncated weights": "Truncated weights (12)",
    "trained objectives: no weights": "No weights (12)",
    "trained objectives: truncated weights, no baseline": "Truncated, b = 0 (12)",
    "weighted objectives: clipped surrogate": "Weighted, clipped (14)",
    "weighted objectives: truncated weights": "Weighted, truncated (14)",
    "weighted objectives: no weights": "Weighted log w (14)",
    "Hellinger": "Hellinger (13)",
}
"""Every inequality of the statements, and its name on the screen; numbers as in docs/certificates.md."""


def all_sides(mu: TabularPolicy, pi: TabularPolicy, names: Collection[str] = tuple(STATEMENTS)) -> dict[str, Sides]:
    """Compute both sides of all statements, or of these, by the names of `LABELS`.

    Gradient: of `SMOOTH` ones, to both.
    """
    sides: dict[str, Sides] = {}
    for name in names:
        outcome = STATEMENTS[name](mu, pi)
        sides |= {name: outcome} if isinstance(outcome, Sides) else {f"{name}: {k}": s for k, s in outcome.items()}
    return sides
