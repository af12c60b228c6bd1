"""Every guarantee against enumeration: it holds, it is tight where it says so, and no more is true."""

import math

import pytest
import torch
from torch import Tensor

from offdrift.certificate.bounds import sequence_kl, unified
from offdrift.certificate.guarantees import masked_guarantee, three_policy
from offdrift.certificate.regions import sample_ratio_error
from offdrift.errors import BadValueError
from offdrift_lab.exact import TabularPolicy, divergences, perturbed, random_policies, returns, worst_rewards
from offdrift_lab.exact.policy import token_kl

SIZES = [(2, 1), (2, 2), (2, 4), (3, 3)]
PAIRS = 60


def filtered(policy: TabularPolicy) -> TabularPolicy:
    """Tokens below 0.2 cannot be drawn, as under top-p."""
    kept = [level.where(level >= 0.2, 0.0) for level in policy.levels]
    return TabularPolicy(tuple(level / level.sum(-1, keepdim=True) for level in kept))


def families(vocab: int, horizon: int, seed: int):
    g = torch.Generator().manual_seed(seed)
    size = {"vocab": vocab, "horizon": horizon, "generator": g}
    mu, other = random_policies(PAIRS, **size), random_policies(PAIRS, **size)
    sharp = random_policies(PAIRS, spread=6.0, **size)
    yield "unrelated", mu, other
    yield "far", mu, perturbed(mu, scale=1.0, generator=g)
    yield "near", mu, perturbed(mu, scale=0.05, generator=g)
    yield "sparse", mu, perturbed(mu, scale=4.0, touched=0.15, generator=g)
    yield "nearly deterministic", sharp, perturbed(sharp, scale=2.0, generator=g)
    yield "rollout filtered", filtered(mu), other
    yield "current filtered", other, filtered(mu)
    yield "one position", mu, mu.with_level(seed % horizon, other)


FAMILIES = 8


def by_token(mu: TabularPolicy, pi: TabularPolicy) -> tuple[Tensor, Tensor]:
    """log w_t and KL(c_t) at every token of every sequence, `[pairs, sequences, T]`."""
    log_w, kl = [], []
    vocab, horizon = mu.vocab, mu.horizon
    for t, (a, b) in enumerate(zip(mu.levels, pi.levels)):
        repeats = vocab ** (horizon - t - 1)
        ratio = (b.log() - a.log()).where(a > 0, 0.0).flatten(1)
        log_w.append(ratio.repeat_interleave(repeats, 1))
        kl.append(token_kl(a, b).repeat_interleave(repeats * vocab, 1))
    return torch.stack(log_w, -1), torch.stack(kl, -1)


def cases(seed: int):
    for vocab, horizon in SIZES:
        for family, mu, pi in families(vocab, horizon, seed):
            yield f"{family}, v={vocab}, T={horizon}", mu, pi


def test_the_error_never_exceeds_the_kl_of_whole_sequences():
    checked, largest = 0, 0.0
    for where, mu, pi in cases(0):
        error = returns(mu, pi, worst_rewards(mu, pi)).error.abs()
        limit = divergences(mu, pi).kl_seq
        assert bool((error <= limit * (1 + 1e-9) + 1e-14).all()), where
        largest = max(largest, float((error / limit).where(limit > 1e-9, 0.0).max()))
        checked += len(error)
    assert checked == len(SIZES) * FAMILIES * PAIRS
    assert largest > 0.6


def test_its_constant_cannot_be_improved():
    # A token that mu all but never draws and pi draws with probability p, after which they disagree:
    # Error = (p - q) TV(second) and KL_seq = -log(1 - p) + O(q log q), both p in the limit.
    p, q, far = 0.005, 1e-8, 1e-4
    one = torch.tensor([[[1 - q, q]]], dtype=torch.float64), torch.tensor([[[1 - p, p]]], dtype=torch.float64)
    same = [0.5, 0.5]
    mu = TabularPolicy((one[0], torch.tensor([[same, [far, 1 - far]]], dtype=torch.float64)))
    pi = TabularPolicy((one[1], torch.tensor([[same, [1 - far, far]]], dtype=torch.float64)))
    error = float(returns(mu, pi, worst_rewards(mu, pi)).error)
    limit = sequence_kl(horizon=2, kl_seq=float(divergences(mu, pi).kl_seq))
    assert error == pytest.approx((p - q) * (1 - 2 * far), rel=1e-9)
    assert 0.99 < error / limit <= 1
    # and the other sign, with the complementary reward
    other = float(returns(mu, pi, 1 - worst_rewards(mu, pi)).error)
    assert other == pytest.approx(-error, rel=1e-9)


def test_at_the_papers_numbers_it_is_400_times_smaller_than_the_unified_bound():
    numbers = {"horizon": 4096, "delta": 1e-4, "eps": 5e-3, "kl_seq": 0.01, "tv_seq": 0.05}
    assert unified(**numbers).value == pytest.approx(4.096)
    assert unified(**numbers, constants="sharp").value == 0.01


def adversarial_rewards(mu: TabularPolicy, pi: TabularPolicy, masked: Tensor) -> Tensor:
    """The reward in [0, 1] at which gain - L'_masked + E_mu[(1 - M) R] is smallest."""
    log_w, _ = by_token(mu, pi)
    law, m = mu.law(), masked.double()
    weight = pi.law() - law - law * m * log_w.expm1().sum(-1) + law * (1 - m)
    return (weight < 0).double()


def regions_of(mu: TabularPolicy, pi: TabularPolicy, delta: float, tau: float):
    """Two accepted regions with their sharp B_A, per pair: KL below delta, and |log w| below tau."""
    log_w, kl = by_token(mu, pi)
    inside = (kl <= delta).cumprod(-1).bool()
    prefix_kl = (mu.law() * kl.where(inside, 0.0).sum(-1)).sum(1)
    yield "KL", inside[..., -1], prefix_kl
    error = sample_ratio_error(horizon=mu.horizon, tau=tau, constants="sharp")
    yield "ratio", (log_w.abs() <= tau).all(-1), torch.full_like(prefix_kl, error)


@pytest.mark.parametrize("constants", ["paper", "sharp"])
def test_masked_guarantee_holds_without_a_precondition(constants):
    checked, partly = 0, 0
    for where, mu, pi in cases(2):
        filtered = "rollout filtered" in where
        if filtered and constants == "paper":  # it assumes supp(pi) inside supp(mu)
            continue
        law, (log_w, _), tv = mu.law(), by_token(mu, pi), divergences(mu, pi).tv_seq
        for name, accepted, error in regions_of(mu, pi, delta=0.1, tau=0.3):
            if constants == "paper" and name == "ratio":
                limit = sample_ratio_error(horizon=mu.horizon, tau=0.3)
                error = torch.full_like(error, limit)
            rewards = adversarial_rewards(mu, pi, accepted)
            surrogate = (law * accepted * rewards * log_w.expm1().sum(-1)).sum(1)
            found = returns(mu, pi, rewards)
            rejected = (law * ~accepted * (rewards if constants == "sharp" else 1.0)).sum(1)
            share = (law * ~accepted).sum(1)
            partly += int(((share > 0.01) & (share < 0.99)).sum())
            for i in range(PAIRS):
                guarantee = masked_guarantee(
                    error=float(error[i]),
                    rejected=min(1.0, float(rejected[i])),
                    tv_seq=float(tv[i]) if constants == "paper" else None,
                    constants=constants,
                )
                gain = float(found.current[i] - found.rollout[i])
                assert gain >= guarantee.gain(float(surrogate[i])) - 1e-12, (where, name, i)
                checked += 1
    assert checked == 2 * len(SIZES) * (FAMILIES - (constants == "paper")) * PAIRS
    assert partly > 700


def test_the_sharp_price_bounds_one_side_only():
    # pi moves to a rejected sequence that mu rarely draws: the gain is far above L'_masked + r.
    mu, pi = TabularPolicy.independent([[0.99, 0.01]]), TabularPolicy.independent([[0.5, 0.5]])
    rewards = torch.tensor([[0.0, 1.0]], dtype=torch.float64)
    found = returns(mu, pi, rewards)
    gain, r, tv = float(found.current - found.rollout), 0.01, 0.49
    assert gain == pytest.approx(0.49)
    assert gain > 0 + 0 + r  # L'_masked = B_A = 0: nothing accepted has a reward
    assert gain <= r + tv
    # and the price itself is attained: a policy that gives up what was rejected
    gone = TabularPolicy.independent([[1.0, 0.0]])
    lost = returns(mu, gone, rewards)
    assert float(lost.current - lost.rollout) == pytest.approx(-r)


def test_masked_guarantee_of_the_golden():
    # bound.G1
    assert masked_guarantee(error=0.05, rejected=0.10, tv_seq=0.02).gain(0.30) == pytest.approx(0.13)
    sharp = masked_guarantee(error=0.05, rejected=0.10, constants="sharp")
    assert sharp.gain(0.30) == pytest.approx(0.15)
    assert sharp.scaled(2.0).gain(0.60) == pytest.approx(0.30)
    assert sharp.provided == ()


def test_three_policy_of_the_goldens():
    # bound.three_policy
    unit = three_policy(advantage=1.0, gamma=0.9, tv_mismatch=0.0, tv_staleness=1.0)
    assert unit.error == pytest.approx(180)
    split = three_policy(advantage=1.0, gamma=0.9, tv_mismatch=0.002, tv_staleness=0.001)
    assert split.error == pytest.approx(0.54)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: masked_guarantee(error=-1.0, rejected=0.0, tv_seq=0.0), "error = -1"),
        (lambda: masked_guarantee(error=0.0, rejected=1.1, tv_seq=0.0), "rejected = 1.1"),
        (lambda: masked_guarantee(error=0.0, rejected=0.1), "tv_seq = None"),
        (lambda: masked_guarantee(error=0.0, rejected=0.1, tv_seq=math.nan), "tv_seq = nan"),
        (lambda: three_policy(advantage=1.0, gamma=1.0, tv_mismatch=0.0, tv_staleness=0.0), "gamma"),
        (lambda: three_policy(advantage=-1.0, gamma=0.5, tv_mismatch=0.0, tv_staleness=0.0), "advantage"),
        (lambda: three_policy(advantage=1.0, gamma=0.5, tv_mismatch=2.0, tv_staleness=0.0), "tv_mismatch"),
    ],
)  # fmt: skip
def test_impossible_numbers_are_refused_by_name(call, match):
    with pytest.raises(BadValueError, match=match):
        call()
