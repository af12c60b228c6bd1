"""Control variates: their mean is 0 by enumeration, they keep their limit, and certificates with them are seldom false."""

import itertools
import math

import numpy as np
import pytest
import torch

from offdrift.certificate.batch import BatchEvidence
from offdrift.certificate.certify import certify
from offdrift.certificate.confidence import Looks, betting, betting_any
from offdrift.certificate.control import CONTROL_FROM, LOWEST, RATIO_CAP, SHARE, SUM_CAP, control_sums, ratio_means
from offdrift.certificate.plan import plan
from offdrift.certificate.regions import TrustRegion
from offdrift.logprobs import LogProbs
from offdrift.segments import Segments

VOCAB, T = 3, 4


def policies(seed, spread):
    """Two random policies over all contexts, [position, context, token]."""
    g = torch.Generator().manual_seed(seed)
    mu, pi = [], []
    for t in range(T):
        logits = torch.randn(VOCAB**t, VOCAB, generator=g, dtype=torch.float64)
        mu.append(logits.softmax(-1))
        pi.append((logits + spread * torch.randn(VOCAB**t, VOCAB, generator=g, dtype=torch.float64)).softmax(-1))
    return mu, pi


def enumerated(mu, pi):
    """Every sequence with its probability under mu, its log-ratios and conditional means."""
    law, log_w, means = [], [], []
    for sequence in itertools.product(range(VOCAB), repeat=T):
        context, p = 0, 1.0
        for t, token in enumerate(sequence):
            m, q = mu[t][context], pi[t][context]
            p *= float(m[token])
            log_w.append(float((q[token] / m[token]).log()))
            means.append(float(ratio_means(m.log()[None], q.log()[None])[0]))
            context = context * VOCAB + token
        law.append(p)
    return np.array(law), torch.tensor(log_w), torch.tensor(means, dtype=torch.float64)


@pytest.mark.parametrize(("seed", "spread"), [(0, 0.3), (1, 1.0), (2, 2.5)])
def test_the_sum_has_mean_zero_and_keeps_its_limit(seed, spread):
    law, log_w, means = enumerated(*policies(seed, spread))
    sums = control_sums(log_w, means, Segments.from_lengths([T] * len(law))).numpy()
    assert law @ sums == pytest.approx(0.0, abs=1e-7)
    assert sums.max() <= SUM_CAP + 1e-9
    assert sums.std() > 0.05
    # A mean that is off by a hundredth is no control variate.
    off = control_sums(log_w, means - 0.01, Segments.from_lengths([T] * len(law))).numpy()
    assert abs(law @ off) > 1e-3


def test_the_limit_is_met_where_ratios_are_large():
    log_w = torch.full((40,), math.log(RATIO_CAP))
    sums = control_sums(log_w, torch.ones(40), Segments.from_lengths([40]))
    assert SUM_CAP - 2 * RATIO_CAP <= float(sums) <= SUM_CAP
    assert LOWEST == -1.0 - SHARE * SUM_CAP


def batch(mu, pi, rewards, prompts, seed, control=True, shift=0.0):
    """A batch of so many prompts, one answer each, drawn from the enumerated law."""
    law, log_w, means = enumerated(mu, pi)
    rows = np.random.default_rng(seed).choice(len(law), prompts, p=law / law.sum())
    at = (torch.from_numpy(rows)[:, None] * T + torch.arange(T)).flatten()
    rollout = torch.full((len(at),), -9.0, dtype=torch.float64)
    lp = LogProbs.pack(rollout, rollout + log_w[at].double(), segments=Segments.from_lengths([T] * prompts))
    region = TrustRegion(horizon=T, delta=math.inf)
    given = means[at] + shift if control else None
    return BatchEvidence.of(lp, torch.from_numpy(rewards[rows]), region=region, ratio_means=given)


def test_certificates_with_control_variates_are_seldom_false():
    mu, pi = policies(3, 0.8)
    law, log_w, _ = enumerated(mu, pi)
    w = log_w.double().view(-1, T).sum(1).exp().numpy()
    rewards = np.random.default_rng(0).random(len(law)).round()
    gain = float(law @ (rewards * (w - 1)))

    def false(shift: float) -> int:
        """Certificates above the gain, of 100."""
        drawn = (batch(mu, pi, rewards, CONTROL_FROM, seed, shift=shift) for seed in range(100))
        return sum(certify(b, alpha=0.2).gain_low > gain for b in drawn)

    assert false(0.0) <= 20
    assert false(0.5) > 50  # means that are wrong by a half make a control variate that lifts every certificate


@pytest.mark.parametrize(
    ("prompts", "anytime", "taken"),
    [(CONTROL_FROM - 1, False, False), (CONTROL_FROM, False, True), (CONTROL_FROM - 1, True, True)],
)
def test_small_batches_are_certified_by_ratios_alone(prompts, anytime, taken):
    """A number of prompts that is fixed beforehand decides; that of a sample that grows is not."""
    mu, pi = policies(3, 0.8)
    rewards = np.random.default_rng(0).random(VOCAB**T).round()
    looks = Looks(anytime=anytime)
    lows = {c: certify(batch(mu, pi, rewards, prompts, 0, control=c), looks=looks).gain_low for c in (True, False)}
    assert (lows[True] != lows[False]) is taken


def test_mixing_takes_the_better_of_two_and_costs_log_two():
    g = np.random.default_rng(1)
    noisy, quiet = g.choice([-0.9, 1.1], 500), 0.1 + g.choice([-0.02, 0.02], 500)
    alone = betting(quiet, low=-1.0, high=math.inf, alpha=0.05, sides="low").low
    half = betting(quiet, low=-1.0, high=math.inf, alpha=0.025, sides="low").low
    both = betting_any([(noisy, -1.0), (quiet, -1.0)], alpha=0.05).low
    assert half - 0.01 < both <= alone
    assert betting_any([(noisy, -1.0)], alpha=0.05).low == pytest.approx(
        betting(noisy, low=-1.0, high=math.inf, alpha=0.05, sides="low").low, abs=1e-6
    )


def test_control_variates_bring_the_certificate_closer_and_a_plan_knows():
    mu, pi = policies(4, 0.5)
    law, log_w, _ = enumerated(mu, pi)
    w = log_w.double().view(-1, T).sum(1).exp().numpy()
    rewards = (w > 0.7).astype(float)
    gain = float(law @ (rewards * (w - 1)))
    found = {c: certify(batch(mu, pi, rewards, 2048, 0, control=c)).gain_low for c in (True, False)}
    assert found[False] < found[True] < gain
    of_plan = plan(batch(mu, pi, rewards, 128, 0))
    assert of_plan is not None
    assert set(of_plan.curves) == {"direct", "control", "fresh"}
    assert max(of_plan.curves["control"]) <= max(of_plan.curves["direct"])
    without = plan(batch(mu, pi, rewards, 128, 0, control=False))
    assert without is not None
    assert set(without.curves) == {"direct", "fresh"}
