"""Both sides of each statement of docs/certificates.md that goes beyond Table 1, for enumerated pairs.

A statement says `value <= bound` for every pair of policies and every reward in [0, 1]. `value` is
computed for the worst rewards, which are known in closed form: all values are linear in the rewards,
so the worst reward is 1 where its weight is positive. `offdrift.lab.search` attacks Table 1; this file
does the same for the masked surrogate without a premise, the variance, the two-sided identity, what is
trained, and Hellinger's distance.

Notation: mu draws, pi is judged, `w_t` the ratio of token t, `w` their product, `Error = J(pi) - J(mu) -
E_mu[R sum_t (w_t - 1)]`, `k3(u) = u - 1 - log u`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from offdrift.certificate.bounds import HELLINGER, unified
from offdrift.lab.policy import TabularPolicy, divergences, token_kl, weights_by_sequence

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


def ratios(mu: TabularPolicy, pi: TabularPolicy) -> list[Float[Tensor, "p c v"]]:
    """w_t for every context and token of every position; 1 where mu cannot draw the token."""
    return [torch.where(m > 0, p / m.where(m > 0, 1.0), 1.0) for m, p in zip(mu.levels, pi.levels, strict=True)]


def token_sum(mu: TabularPolicy, pi: TabularPolicy, of: Weigh) -> Float[Tensor, "p y"]:
    """sum_t of(w_t) of every sequence, numbered in base v."""
    total = mu.levels[0].new_zeros(mu.pairs, 1)
    for w in ratios(mu, pi):
        total = (total[..., None] + of(w)).flatten(1)
    return total


def sequence_ratio(mu: TabularPolicy, pi: TabularPolicy) -> Float[Tensor, "p y"]:
    """w, the product of the ratios of every sequence."""
    product = mu.levels[0].new_ones(mu.pairs, 1)
    for w in ratios(mu, pi):
        product = (product[..., None] * w).flatten(1)
    return product


def mean(law: Float[Tensor, "p y"], x: Float[Tensor, "p y"]) -> Float[Tensor, " p"]:
    """Expectation over sequences; one that cannot be drawn does not count, whatever x is there."""
    return (law * x.where(law > 0, 0.0)).sum(1)


def k3(ratio: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """u - 1 - log u, nats; infinite at 0."""
    return ratio - 1 - ratio.log()


def full_support(mu: TabularPolicy, pi: TabularPolicy) -> Bool[Tensor, " p"]:
    """Whether pi draws nothing that mu cannot."""
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
            mean_tv=d.mean_tv[i].clamp(max=1).numpy(),
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
    weights = weights_by_sequence(mu, pi)[1]
    worst = (weights > 0).double()
    share = mean(mu.law(), worst)
    return Sides(
        (weights * worst).sum(1),
        (share * (1 - share)).clamp(min=0).sqrt() * error_variance(mu, pi).sqrt(),
        full_support(mu, pi),
    )


def error_variance(mu: TabularPolicy, pi: TabularPolicy) -> Float[Tensor, " p"]:
    """sum_t E_mu[(w_<t - 1)^2 chi2(c_t)], chi2(c) = E_mu[w_t^2 | c] - 1."""
    law = ratio = mu.levels[0].new_ones(mu.pairs, 1)
    total = mu.levels[0].new_zeros(mu.pairs)
    for m, w in zip(mu.levels, ratios(mu, pi), strict=True):
        chi2 = (m * (w - 1).square()).sum(-1)
        total = total + (law * (ratio - 1).square() * chi2).sum(1)
        law, ratio = (law[..., None] * m).flatten(1), (ratio[..., None] * w).flatten(1)
    return total


def variance_limit(mu: TabularPolicy, pi: TabularPolicy) -> Sides:
    """sum_t E_mu[(w_<t - 1)^2 chi2(c_t)] <= (1 + chi)^T - 1 - T chi, chi the largest chi2 of a context."""
    squares = [(m * (w - 1).square()).sum(-1).amax(1) for m, w in zip(mu.levels, ratios(mu, pi), strict=True)]
    chi = torch.stack(squares).amax(0)
    limit = torch.expm1(mu.horizon * chi.log1p()) - mu.horizon * chi
    return Sides(error_variance(mu, pi), limit, full_support(mu, pi))


def two_sided(mu: TabularPolicy, pi: TabularPolicy) -> dict[str, Sides]:
    """Error lies in [-min(E[R sum k3(w_t)], E[(1-R) k3(w)]), min(E[R k3(w)], E[(1-R) sum k3(w_t)])].

    All four ends, for the rewards of largest and of smallest error, and the worst case over R, which is
    1/2 E_mu|sum_t (w_t - 1) - (w - 1)| and attained. The ends with R alone hold for any supports: there,
    what pi draws beyond mu adds to the error from above, and E[R k3(w)] gets `missed` added.
    """
    law, ratio = mu.law(), sequence_ratio(mu, pi)
    excess = token_sum(mu, pi, lambda w: w - 1)
    tokens, whole = token_sum(mu, pi, k3), k3(ratio)
    missed = (1 - mean(law, ratio)).clamp(min=0)  # the probability that pi draws what mu cannot
    weights = weights_by_sequence(mu, pi)[1]
    high, low = (weights > 0).double(), (weights < 0).double()
    full = full_support(mu, pi)
    always = torch.ones_like(full)

    def reward_mean(rewards: Tensor, x: Tensor) -> Tensor:
        return mean(law, torch.where(rewards > 0, x, 0.0))

    largest, smallest = (weights * high).sum(1), (-weights * low).sum(1)
    measured = mean(law, high * (ratio - 1 - excess)) + missed
    return {
        "upper end, E[R k3(w)]": Sides(measured, reward_mean(high, whole) + missed, always),
        "upper end, E[(1-R) sum k3(w_t)]": Sides(largest, reward_mean(1 - high, tokens), full),
        "lower end, E[R sum k3(w_t)]": Sides(smallest, reward_mean(low, tokens), full),
        "lower end, E[(1-R) k3(w)]": Sides(smallest, reward_mean(1 - low, whole), full),
        "worst case over R": Sides(largest, mean(law, (excess - ratio + 1).abs()) / 2, full),
    }


def trained_objectives(mu: TabularPolicy, pi: TabularPolicy) -> dict[str, Sides]:
    """E_mu[sum_t V(R, w_t)] - KL_seq lies below J(pi) - J(mu), if V <= (R - b)(w - 1) + (1 - R) k3(w).

    For b = 1/2 and V of a clipped surrogate, of truncated weights (`C + C log(w / C) - 1` above the cap) and of
    no weights at all (`log w`), where pi draws nothing mu cannot; for b = 0 and truncated weights always.
    """

    def truncated(w: Tensor) -> Tensor:
        return torch.where(w <= TIS_CAP, w, TIS_CAP + TIS_CAP * (w / TIS_CAP).log()) - 1

    objectives = {
        "clipped surrogate": (lambda w: w.clamp(max=1 + CLIP) - 1, lambda w: w.clamp(min=1 - CLIP) - 1),
        "truncated weights": (truncated, truncated),
        "no weights": (torch.log, torch.log),
    }
    kl_seq, full, law = divergences(mu, pi).kl_seq, full_support(mu, pi), mu.law()
    gain = sequence_ratio(mu, pi) - 1
    sides = {}
    for name, (right, wrong) in objectives.items():
        # The advantage of a sequence with R = 1 is 1/2 at every token, with R = 0 -1/2. The worst of the two.
        overstated = torch.maximum(token_sum(mu, pi, right) / 2 - gain, -token_sum(mu, pi, wrong) / 2)
        finite = full & (kl_seq < torch.inf)
        sides[name] = Sides(mean(law, overstated), kl_seq, finite)
    positive = mean(law, (token_sum(mu, pi, truncated) - gain).clamp(min=0))
    return sides | {"truncated weights, no baseline": Sides(positive, kl_seq, torch.ones_like(full))}


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
    "variance": variance,
    "variance from the largest chi-squared": variance_limit,
    "two-sided identity": two_sided,
    "trained objectives": trained_objectives,
    "Hellinger": hellinger,
}


def all_sides(mu: TabularPolicy, pi: TabularPolicy) -> dict[str, Sides]:
    """Both sides of every statement, by name."""
    sides: dict[str, Sides] = {}
    for name, statement in STATEMENTS.items():
        outcome = statement(mu, pi)
        sides |= {name: outcome} if isinstance(outcome, Sides) else {f"{name}: {k}": s for k, s in outcome.items()}
    return sides
