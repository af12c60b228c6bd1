"""Intervals for the expectations that a certificate takes, from the rows of a batch.

Each expectation spends its own share of alpha, so that all intervals hold together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from offdrift.certificate.batch import HostEvidence
from offdrift.certificate.confidence import (
    Estimate,
    asymptotic,
    betting,
    betting_any,
    clopper_pearson,
    cluster_means,
    power,
    power_any,
)
from offdrift.certificate.control import CONTROL_FROM, LOWEST, SHARE
from offdrift.certificate.regions import TrustRegion
from offdrift.errors import BadValueError
from offdrift.numerics import LOG_RATIO_LIMIT

SHARES = {
    "gain": 7 / 8,
    "surrogate": 1 / 72,
    "surrogate_masked": 1 / 72,
    "rejected_reward": 1 / 72,
    "acceptance": 1 / 72,
    "prefix_kl": 1 / 144,
    "prefix_error": 1 / 144,
    "prefix_shift": 1 / 72,
    "kl_seq": 1 / 72,
    "shift": 1 / 144,
    "mean_ratio": 1 / 144,
    "unseen": 1 / 72,
}
"""Parts of alpha, the same for every batch: nearly all for the direct guarantee, which can win; together 1."""

OF_REWARDS = ("gain", "surrogate", "surrogate_masked", "rejected_reward", "prefix_error")
"""Estimates in units of the reward."""

K3_CAP = 4.0
"""Where k3 of a sequence is cut, nats: fixed before any batch is seen. It is subtracted, so that cutting raises
upper ends."""

LARGEST_PLAN = 2**17
"""Prompts of a batch that is planned: a few seconds of work."""

Column = Float[np.ndarray, " b"]


def unit_rewards(rewards: Column, reward_range: tuple[float, float]) -> Column:
    """Rewards rescaled from their stated range to [0, 1].

    Records keep rewards in float32, in which 1.1 is 1.1000000238: what lies outside by such rounding is at the end.

    Raises: `BadValueError` for an impossible range and for rewards that are NaN or outside of it.

    Example:
        >>> unit_rewards(np.array([-1.0, 1.0]), (-1.0, 1.0))
        array([0., 1.])
    """
    low, high = reward_range
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise BadValueError(f"reward_range = {reward_range}; give the smallest and the largest possible reward")
    rounding = float(np.finfo(np.float32).eps) * max(abs(low), abs(high))
    wrong = ~((rewards >= low - rounding) & (rewards <= high + rounding))
    if wrong.any():
        where = int(np.flatnonzero(wrong)[0])
        raise BadValueError(
            f"reward of sequence {where} is {rewards[where]}, outside [{low:g}, {high:g}]; give "
            "reward_range=(smallest possible, largest possible), and results are rescaled"
        )
    return ((rewards - low) / (high - low)).clip(0, 1)


def reward_columns(host: HostEvidence, rewards: Column, accepted: Bool[np.ndarray, " b"]) -> dict[str, Column]:
    """Per sequence, what is averaged to the gain and the surrogates; rewards in [0, 1].

    gain              R (prod_t w_t - 1)
    surrogate         R sum_t (w_t - 1)
    surrogate_masked  M R sum_t (w_t - 1)
    """
    surrogate = rewards * host["excess"]
    return {
        "gain": rewards * (_ratio(host) - 1),
        "surrogate": surrogate,
        "surrogate_masked": np.where(accepted, surrogate, 0.0),
    }


def _ratio(host: HostEvidence) -> Column:
    """w = prod_t w_t of each sequence, limited above, which only lowers its mean: E_mu[w] <= 1 if mu drew it."""
    return np.exp(np.minimum(host["log_product"], LOG_RATIO_LIMIT))


def has_control(host: HostEvidence) -> bool:
    """Whether every sequence has its control variate."""
    return bool(np.isfinite(host["control"]).all())


def gains(host: HostEvidence, rewards: Column) -> list[tuple[Column, float]]:
    """Variables whose mean is the gain, with what they cannot fall below.

    R (w - 1), and where the evidence is exact also R (w - 1) - S / 2, with S of `certificate.control`.
    """
    direct = rewards * (_ratio(host) - 1)
    if not has_control(host):
        return [(direct, -1.0)]
    return [(direct, -1.0), (direct - SHARE * host["control"], LOWEST)]


class Variable(NamedTuple):
    """Values averaged over sequences to estimate an expectation, and their range, known beforehand."""

    values: Column
    low: float
    high: float
    sides: str
    """Which ends of its interval are used: "both", "low" or "high"."""


def variables(
    host: HostEvidence, rewards: Column | None, accepted: Bool[np.ndarray, " b"], region: TrustRegion
) -> dict[str, Variable]:
    """The variable behind each of `estimates`, a number per sequence, and its range.

    The ranges are known beforehand: `kl_seq` and `shift` are limited by the region, which is the
    premise they serve; `prefix_kl`, `prefix_error` and `prefix_shift` stop at the region's edge whatever the
    policies do. `mean_ratio` is at most 1 whatever the policies are, if the recorded one drew: what tests the record.

    Args:
        host: the batch.
        rewards: in [0, 1]; None leaves out what needs them.
        accepted: sequences of the accepted region.
    """
    most = region.horizon * region.delta if region.delta else 0.0
    widest = region.token_tv * region.total_weight
    result = {
        "acceptance": Variable(accepted.astype(np.float64), 0.0, 1.0, "both"),
        "prefix_kl": Variable(host["prefix_kl"], 0.0, most, "high"),
        "prefix_shift": Variable(host["prefix_shift"], 0.0, widest, "high"),
        "kl_seq": Variable(host["kl_sum"], 0.0, most, "high"),
        "shift": Variable(host["shift"], 0.0, widest, "high"),
        "mean_ratio": Variable(_ratio(host), 0.0, math.inf, "low"),
    }
    if rewards is not None:
        of_rewards = reward_columns(host, rewards, accepted)
        result |= {
            "prefix_error": Variable(_prefix_error(host, rewards, accepted), -math.inf, most, "high"),
            "gain": Variable(of_rewards["gain"], -1.0, math.inf, "low"),
            "surrogate": Variable(of_rewards["surrogate"], -float(region.horizon), math.inf, "low"),
            "surrogate_masked": Variable(of_rewards["surrogate_masked"], *_masked_range(region), "low"),
            "rejected_reward": Variable(np.where(accepted, 0.0, rewards), 0.0, 1.0, "high"),
        }
    return result


def estimates(
    host: HostEvidence,
    rewards: Column | None,
    accepted: Bool[np.ndarray, " b"],
    region: TrustRegion,
    *,
    alpha: float,
    anytime: bool = False,
) -> dict[str, Estimate]:
    """Every expectation with its interval, over prompt groups.

    Args:
        host, rewards, accepted, region: as in `variables`.
        alpha: what all intervals together may spend.
        anytime: intervals that hold at every moment of a sample that grows, its prompts in order of arrival. The number
            of prompts is then not fixed beforehand, and decides nothing.
    """
    result = {}
    prompts = len(host["length"]) if host.group_ids is None else len(np.unique(host.group_ids))
    control = has_control(host) and (anytime or prompts >= CONTROL_FROM)
    for name, x in variables(host, rewards, accepted, region).items():
        # A sum of rounded terms may pass its range's end by a rounding.
        means = np.clip(_draws(x.values, host, anytime), x.low, x.high)
        share = alpha * SHARES[name]
        if name == "gain" and rewards is not None and control:
            both = [(np.maximum(_draws(v, host, anytime), low), low) for v, low in gains(host, rewards)]
            result[name] = betting_any(both, alpha=share, anytime=anytime)
        elif name == "acceptance" and len(means) == len(x.values) and not anytime:
            # One sequence per prompt: a binomial, whose interval is exact.
            result[name] = clopper_pearson(int(accepted.sum()), len(means), alpha=share)
        else:
            result[name] = betting(means, low=x.low, high=x.high, alpha=share, sides=x.sides, anytime=anytime)
    return result


def _prefix_error(host: HostEvidence, rewards: Column, accepted: Bool[np.ndarray, " b"]) -> Column:
    """Per sequence, what is averaged to the most by which L'_masked overstates the accepted gain.

        KL of the accepted prefix - (1 - M R) sum_t k3(w_t) of it - M R k3(prod_t w_t)

    The KL and the sum have the same mean, so that of the whole is at least E[M R (sum_t k3(w_t) - k3(w))], which
    is L'_masked - E[M R (w - 1)] by the identity; where pi draws nothing mu cannot, and nothing is cut, it is
    equal. It lies below the KL of the prefix, which the region limits.
    """
    answered = np.where(accepted, rewards, 0.0)
    log_w = np.where(accepted, np.minimum(host["log_product"], math.log(1e9)), 0.0)
    sequence_k3 = np.minimum(np.expm1(log_w) - log_w, K3_CAP)
    return host["prefix_kl"] - (1 - answered) * np.minimum(host["prefix_k3"], K3_CAP) - answered * sequence_k3


def normal_intervals(
    host: HostEvidence, rewards: Column, accepted: Bool[np.ndarray, " b"], *, alpha: float
) -> dict[str, Estimate]:
    """Estimate means of gain and surrogates with normal intervals: asymptotic, not a guarantee."""
    columns: Mapping[str, Column] = reward_columns(host, rewards, accepted)
    return {k: asymptotic(cluster_means(x, host.group_ids), alpha=alpha) for k, x in columns.items()}


def power_curve(host: HostEvidence, rewards: Column, *, alpha: float, control: bool = False) -> dict[int, float]:
    """By number of prompts, the probability that a fresh batch like this one certifies a gain: `confidence.power`.

    From a quarter of the prompts that there are, doubled until it is all but certain, and up to 256 times as many or
    `LARGEST_PLAN`, whichever comes first.

    Args:
        host: the batch.
        rewards: in [0, 1].
        alpha: what all intervals of the planned batch together may spend.
        control: with control variates where a sample has `CONTROL_FROM` prompts; the batch must have them.
    """
    of_gain = gains(host, rewards) if control else [(rewards * (_ratio(host) - 1), -1.0)]
    both = [(np.maximum(cluster_means(x, host.group_ids), low), low) for x, low in of_gain]
    share = alpha * SHARES["gain"]
    mean, size = both[0][0].mean(), len(both[0][0])

    def chance(n: int) -> float:
        if control and n >= CONTROL_FROM:
            return power_any(both, n, alpha=share)
        return power(both[0][0], n, low=-1.0, high=math.inf, alpha=share)

    return _curve(chance, size, rises=mean > 0)


PLANNED_DRAWS, ENOUGH = 4096, 0.8
"""Differences that stand for those of fresh answers, and the probability from which on a plan is enough."""


def fresh_curve(host: HostEvidence, rewards: Column, *, alpha: float) -> dict[int, float]:
    """By number of prompts, the probability that fresh answers of both policies certify a gain: an estimate.

    Answers of mu are the batch's, a prompt's together; those of pi are drawn from the batch by their ratios w, a
    prompt's together. The two are of another prompt each, so that what is hard about a prompt does not cancel, as it
    does in a paired difference: real answers do better. Where w varies much, the answers of pi are a guess.

    Args:
        host: the batch.
        rewards: in [0, 1].
        alpha: of the comparison.
    """
    rng, ids = np.random.default_rng(0), host.group_ids
    ids = np.arange(len(rewards)) if ids is None else ids
    _, group, sizes = np.unique(ids, return_inverse=True, return_counts=True)
    of_mu = cluster_means(rewards, ids)
    log_w = np.minimum(host["log_product"], LOG_RATIO_LIMIT)
    w = np.exp(log_w - log_w.max())
    start = np.concatenate([[0.0], np.bincount(group, weights=w).cumsum()])
    order = np.argsort(group, kind="stable")
    along = w[order].cumsum()
    picked = rng.choice(len(sizes), PLANNED_DRAWS, p=np.diff(start) / start[-1])
    answers = int(np.median(sizes))
    where = start[picked, None] + np.diff(start)[picked, None] * rng.random((PLANNED_DRAWS, answers))
    of_pi = rewards[order][np.searchsorted(along, where).clip(max=len(rewards) - 1)].mean(1)
    difference = of_pi - rng.choice(of_mu, PLANNED_DRAWS)
    chance = partial(power, difference, low=-1.0, high=1.0, alpha=alpha)
    return _curve(chance, len(of_mu), rises=difference.mean() > 0)


def _curve(chance: Callable[[int], float], prompts: int, *, rises: bool) -> dict[int, float]:
    """Chances of samples of several sizes, from a quarter of so many prompts on; no larger ones if the mean falls."""
    curve: dict[int, float] = {}
    for doubled in range(-2, 9):
        size = max(1, round(prompts * 2.0**doubled))
        curve[size] = chance(size)
        if curve[size] > 0.99 or 2 * size > LARGEST_PLAN or (doubled >= 0 and not rises):
            break
    return curve


def unseen(host: HostEvidence, outside: Bool[np.ndarray, " b"], *, alpha: float, anytime: bool = False) -> float:
    """The largest probability that a fresh prompt's sequences include one outside the region.

    Exact over prompts: a prompt counts once, however many of its sequences leave. It also limits
    the probability that a fresh sequence leaves.
    """
    left = _draws(outside.astype(np.float64), host, anytime) > 0
    share = alpha * SHARES["unseen"]
    if anytime:
        return betting(left.astype(np.float64), alpha=share, sides="high", anytime=True).high
    return clopper_pearson(int(left.sum()), len(left), alpha=share, sides="high").high


def _draws(x: Column, host: HostEvidence, anytime: bool) -> Float[np.ndarray, " g"]:
    """The mean of each prompt: in order of arrival, or in one that owes nothing to how files and prompts were numbered.

    Bets are valid for independent, identically distributed draws in any order fixed beforehand; a
    shuffle keeps a drift along the files from passing for one. A sample that grows can not be shuffled:
    what came first stays first.
    """
    means = cluster_means(x, host.group_ids)
    if not anytime:
        return np.random.default_rng(0).permutation(means)
    if host.group_ids is None:
        return means
    return means[np.unique(host.group_ids, return_index=True)[1].argsort()]


def _masked_range(region: TrustRegion) -> tuple[float, float]:
    """Range of sum_t (w_t - 1) of an accepted sequence, and of the 0 of a rejected one."""
    if region.tau is None:
        return -float(region.horizon), math.inf
    high = region.horizon * math.expm1(region.tau) if region.tau < 700 else math.inf
    return region.horizon * math.expm1(-region.tau), high
