"""The discounted bound on exact decision processes: against sums over time, and with bugs planted."""

import math

import pytest
import torch

from offdrift.certificate.guarantees import three_policy
from offdrift.errors import BadValueError, MethodError, ShapeError
from offdrift_lab.exact.three_policies import (
    Process,
    advice,
    batches,
    hard_process,
    judge,
    merged,
    random_triples,
    surrogate_error,
    tightness,
    violations,
)


@pytest.fixture(scope="module")
def triples():
    return random_triples(5, states=3, actions=2, gamma=0.7, generator=torch.Generator().manual_seed(0))


def long_sums(process, policy, p, steps=200):
    """J, the discounted law of states and Q, by summing over time."""
    gamma, law = process.gamma, process.start[p].clone()
    kernel = torch.einsum("sa,sat->st", policy[p], process.moves[p])
    j, d = 0.0, torch.zeros_like(law)
    for t in range(steps):
        d += (1 - gamma) * gamma**t * law
        j += gamma**t * float((law[:, None] * policy[p] * process.rewards[p]).sum())
        law = law @ kernel
    value = torch.zeros_like(law)
    for _ in range(steps):
        value = (policy[p] * process.rewards[p]).sum(-1) + gamma * kernel @ value
    q = process.rewards[p] + gamma * process.moves[p] @ value
    return j, d, q - value[:, None]


def test_returns_surrogate_and_error_are_sums_over_time(triples):
    process, mu, old, pi = triples
    error = surrogate_error(process, mu, pi)
    for p in range(5):
        j_mu, d, advantage = long_sums(process, mu, p)
        j_pi, _, _ = long_sums(process, pi, p)
        surrogate = j_mu + float((d[:, None] * pi[p] * advantage).sum()) / (1 - process.gamma)
        assert float(process.returns(pi)[p]) == pytest.approx(j_pi, abs=1e-9)
        assert float(error[p]) == pytest.approx(j_pi - surrogate, abs=1e-9)
    judged = judge(process, mu, old, pi)
    assert bool((judged.tv_whole <= judged.tv_mismatch + judged.tv_staleness + 1e-12).all())
    assert torch.equal(judged.without_mismatch, surrogate_error(process, old, pi).abs())


def test_no_bound_fails_and_a_tenth_of_each_does():
    judged = merged([part for *_, part in batches(1800, gammas=(0.5, 0.9), seed=1)])
    assert [violations(judged, name) for name in ("paper", "one_pair", "sharp")] == [0, 0, 0]
    planted = merged([part for *_, part in batches(1800, gammas=(0.5, 0.9), seed=1, factor=0.1)])
    assert all(violations(planted, name) for name in ("paper", "one_pair", "sharp"))


@pytest.mark.parametrize("gamma", [0.3, 0.9, 0.99])
@pytest.mark.parametrize("beta", [1e-3, 0.1, 0.5])
def test_the_sharp_constant_is_attained_so_that_no_smaller_one_holds(beta, gamma):
    judged = judge(*hard_process(beta, gamma))
    assert float(judged.advantage) == pytest.approx(1, abs=1e-9)
    assert float(judged.error.abs() / judged.sharp) == pytest.approx(1, abs=1e-9)
    assert violations(judged, "sharp") == 0
    assert violations(judge(*hard_process(beta, gamma), factor=0.999), "sharp") == 1
    # What the proof of the paper's gives away: |E_pi A| <= 2 beta, and paths that part once.
    assert float(tightness(judged, "paper")) == pytest.approx(
        2 * beta * (1 - gamma) / (1 - gamma + gamma * beta), rel=1e-9
    )


def test_with_the_same_inputs_the_sharp_bound_is_the_smaller_one():
    for gamma in (0.0, 0.5, 0.999):
        for alpha in (0.0, 1e-6, 0.2, 0.6, 1.0):
            inputs = {"advantage": 2.0, "gamma": gamma, "tv_mismatch": alpha, "tv_staleness": alpha / 2}
            paper, sharp = (three_policy(**inputs, constants=c).error for c in ("paper", "sharp"))
            assert 0 <= sharp <= paper
            assert math.isfinite(paper)
    with pytest.raises(MethodError, match="loose"):
        three_policy(advantage=1.0, gamma=0.9, tv_mismatch=0.1, tv_staleness=0.1, constants="loose")


def test_the_error_is_of_second_order_in_the_drift(triples):
    process, mu, *_ = triples
    noise = torch.randn(mu.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    sizes = [
        float(surrogate_error(process, mu, (mu.log() + scale * noise).softmax(-1)).abs().sum())
        for scale in (2e-3, 1e-3)
    ]
    assert sizes[0] / sizes[1] == pytest.approx(4, rel=0.05)


def test_the_larger_distance_is_the_one_to_lower_the_more_surely_the_larger_it_is():
    judged = merged([part for *_, part in batches(3000, gammas=(0.9,), seed=0)])
    rows = {row.low: row for row in advice(judged)}
    assert sum(row.triples for row in rows.values()) == 3000
    shares = [row.right / row.triples for row in rows.values()]
    assert shares == sorted(shares)
    assert shares[0] < 0.75 < 0.9 < rows[3.0].right / rows[3.0].triples
    assert all(row.left < row.left_other for row in rows.values())


def test_a_process_that_cannot_be_is_refused(triples):
    process, mu, old, pi = triples
    with pytest.raises(BadValueError, match="gamma = 1"):
        Process(process.moves, process.rewards, process.start, 1.0)
    with pytest.raises(ShapeError, match="no one process"):
        Process(process.moves, process.rewards[:, :2], process.start, 0.9)
    with pytest.raises(BadValueError, match="old holds a row"):
        judge(process, mu, 2 * old, pi)
    with pytest.raises(BadValueError, match=r"beta = 0\.7"):
        hard_process(0.7, 0.9)
