"""Enumeration agrees with the toy of the methods table and with a loop over sequences."""

import itertools
import math

import pytest
import torch

from offdrift.errors import BadValueError, ShapeError
from offdrift_lab.exact import TabularPolicy, divergences, perturbed, random_policies, returns, worst_rewards
from offdrift_lab.exact.markov import (
    drift_noise,
    last_tokens,
    product,
    random_markov,
    shifted,
    state_error_weights,
    walk,
)
from offdrift_lab.exact.policy import error_weights, over_prompts, token_kl
from tests_lab.exact.test_markov import final_states, tabular

# Two independent binary tokens, P(1) = .6, .3 under mu and .5, .4 under pi; reward
# (2 y1 + 3 y2 + y1 y2) / 6. Methods table, keys toy.*.
MU = TabularPolicy.independent([[0.4, 0.6], [0.7, 0.3]])
PI = TabularPolicy.independent([[0.5, 0.5], [0.6, 0.4]])
REWARDS = torch.tensor([[0.0, 3.0, 2.0, 6.0]], dtype=torch.float64) / 6


def test_toy_returns():
    r = returns(MU, PI, REWARDS)
    assert float(r.current - r.rollout) == pytest.approx(0.02, abs=1e-8)
    assert float(r.surrogate) == pytest.approx(0.02166667, abs=1e-8)
    assert float(r.error) == pytest.approx(-0.00166667, abs=1e-8)  # minus toy.Delta


def test_toy_divergences():
    d = divergences(MU, PI)
    kl = [0.02013551, 0.02160085]
    assert float(d.kl_max) == pytest.approx(max(kl), abs=1e-8)
    assert float(d.kl_seq) == pytest.approx(sum(kl), abs=1e-8)
    assert float(d.tv_max) == pytest.approx(0.1)
    assert d.mean_tv[0].tolist() == pytest.approx([0.1, 0.1])
    assert float(d.tv_seq) == pytest.approx(0.12)


def _by_loop(mu: TabularPolicy, pi: TabularPolicy, rewards: torch.Tensor, i: int) -> dict:
    """Every quantity from its definition, sequence by sequence, with ratios, for one pair."""
    v, horizon = mu.vocab, mu.horizon
    out = dict.fromkeys(("rollout", "current", "surrogate", "kl_seq", "tv_seq"), 0.0)
    kl_max = tv_max = 0.0
    mean_tv = [0.0] * horizon
    for number, tokens in enumerate(itertools.product(range(v), repeat=horizon)):
        context, p_mu, p_pi, ratio_sum = 0, 1.0, 1.0, 0.0
        for t, token in enumerate(tokens):
            a, b = mu.levels[t][i, context].tolist(), pi.levels[t][i, context].tolist()
            kl_max = max(kl_max, sum(x * math.log(x / y) for x, y in zip(a, b)))
            tv_max = max(tv_max, sum(abs(x - y) for x, y in zip(a, b)) / 2)
            # Every sequence below a context adds its share of that context's probability.
            below = v ** (horizon - t)
            mean_tv[t] += p_mu * sum(abs(x - y) for x, y in zip(a, b)) / 2 / below
            p_mu, p_pi = p_mu * a[token], p_pi * b[token]
            ratio_sum += b[token] / a[token] - 1
            context = context * v + token
        reward = float(rewards[i, number])
        out["rollout"] += p_mu * reward
        out["current"] += p_pi * reward
        out["surrogate"] += p_mu * reward * ratio_sum
        out["kl_seq"] += p_mu * math.log(p_mu / p_pi)
        out["tv_seq"] += abs(p_mu - p_pi) / 2
    return out | {"kl_max": kl_max, "tv_max": tv_max, "mean_tv": mean_tv}


@pytest.mark.parametrize(("vocab", "horizon"), [(2, 1), (2, 4), (3, 3), (5, 2)])
def test_agrees_with_a_loop_over_sequences(vocab: int, horizon: int):
    g = torch.Generator().manual_seed(vocab * 10 + horizon)
    mu = random_policies(3, vocab=vocab, horizon=horizon, generator=g)
    pi = perturbed(mu, scale=0.7, generator=g)
    rewards = torch.rand(3, vocab**horizon, generator=g, dtype=torch.float64)
    d, r = divergences(mu, pi), returns(mu, pi, rewards)
    for i in range(3):
        want = _by_loop(mu, pi, rewards, i)
        got = {n: float(getattr(r, n)[i]) for n in ("rollout", "current", "surrogate")}
        got |= {n: float(getattr(d, n)[i]) for n in ("kl_max", "tv_max", "kl_seq", "tv_seq")}
        assert d.mean_tv[i].tolist() == pytest.approx(want.pop("mean_tv"), abs=1e-12)
        assert got == pytest.approx(want, abs=1e-12)
        assert float(r.error[i]) == pytest.approx(want["current"] - want["rollout"] - want["surrogate"], abs=1e-12)


def test_the_worst_reward_is_the_worst_of_all_binary_rewards():
    g = torch.Generator().manual_seed(1)
    mu = random_policies(1, vocab=2, horizon=3, generator=g)
    pi = perturbed(mu, scale=1.0, generator=g)
    all_binary = torch.tensor(list(itertools.product((0.0, 1.0), repeat=8)), dtype=torch.float64)
    assert all_binary.shape == (256, 8)
    errors = (all_binary @ error_weights(mu, pi)[0]).abs()
    worst = returns(mu, pi, worst_rewards(mu, pi)).error
    assert float(worst) == pytest.approx(float(errors.max()), rel=1e-12)
    assert float(worst) > float(errors.median()) > 0


def test_tokens_that_one_policy_cannot_draw():
    # Rollout never draws 0 first, so what follows 0 counts for the maxima and not for the means.
    first = torch.tensor([[[0.0, 1.0]]], dtype=torch.float64)
    second = torch.tensor([[[1.0, 0.0], [0.5, 0.5]]], dtype=torch.float64)
    mu = TabularPolicy((first, second))
    pi = TabularPolicy.independent([[0.1, 0.9], [0.0, 1.0]])
    d = divergences(mu, pi)
    assert float(d.kl_max) == math.inf
    assert float(d.tv_max) == 1
    assert d.mean_tv[0].tolist() == pytest.approx([0.1, 0.5])
    assert float(d.tv_seq) == pytest.approx(0.5)  # (0, 0, .5, .5) against (0, .1, 0, .9)
    half = TabularPolicy.independent([[0.1, 0.9], [0.5, 0.5]])
    d = divergences(mu, half)
    assert float(d.kl_max) == pytest.approx(math.log(2))  # at the context that never occurs
    assert float(d.kl_seq) == pytest.approx(-math.log(0.9))
    never = torch.tensor([[[0.0, 1.0], [0.5, 0.5]]], dtype=torch.float64)
    d = divergences(mu, TabularPolicy((half.levels[0], never)))
    assert float(d.kl_max) == math.inf  # at that context too, where it costs the mean nothing
    assert float(d.kl_seq) == pytest.approx(-math.log(0.9))


def test_the_surrogate_has_the_gradient_of_the_return_on_policy():
    g = torch.Generator().manual_seed(4)
    mu = random_policies(1, vocab=2, horizon=3, generator=g)
    rewards = torch.rand(1, 8, generator=g, dtype=torch.float64)
    logits = [level.log().requires_grad_() for level in mu.levels]
    pi = TabularPolicy(tuple(x.softmax(-1) for x in logits))
    r = returns(mu, pi, rewards)
    first = torch.autograd.grad(r.surrogate.sum(), logits, retain_graph=True)
    second = torch.autograd.grad(r.current.sum(), logits)
    for a, b in zip(first, second, strict=True):
        assert torch.allclose(a, b, atol=1e-14)
        assert float(a.abs().max()) > 1e-4


def test_different_trees_are_refused():
    g = torch.Generator().manual_seed(5)
    mu = random_policies(2, vocab=2, horizon=3, generator=g)
    for vocab, horizon, pairs in ((3, 3, 2), (2, 2, 2), (2, 3, 1)):
        other = random_policies(pairs, vocab=vocab, horizon=horizon, generator=g)
        with pytest.raises(ShapeError, match=r"\(2, 2, 3\)"):
            divergences(mu, other)
    with pytest.raises(ShapeError, match=r"rewards has shape \(2, 4\), expected \(2, 8\)"):
        returns(mu, mu, torch.zeros(2, 4, dtype=torch.float64))


@pytest.mark.parametrize("wrong", [-0.1, 1.1, math.nan, math.inf])
def test_rewards_must_lie_where_the_bounds_expect_them(wrong: float):
    rewards = torch.full((1, 4), 0.5, dtype=torch.float64)
    rewards[0, 2] = wrong
    with pytest.raises(BadValueError, match=r"rewards go from .* outside \[0, 1\]"):
        returns(MU, PI, rewards)
    if math.isfinite(wrong):
        assert math.isfinite(float(returns(MU, PI, rewards, within=(-1, 2)).error))


@pytest.mark.parametrize("tilt", [0.4, 1e-2, 1e-5, 1e-9, 1e-15])
def test_a_small_kl_keeps_its_digits(tilt: float):
    # KL(fair || tilted) = -log(1 - 4 tilt^2) / 2, whatever is left of it beside 1.
    tilt = float(torch.tensor(0.5, dtype=torch.float64) + tilt) - 0.5  # as float64 has it
    fair = torch.tensor([0.5, 0.5], dtype=torch.float64)
    got = token_kl(fair, fair + torch.tensor([tilt, -tilt], dtype=torch.float64))
    assert float(got) == pytest.approx(-math.log1p(-4 * tilt**2) / 2, rel=1e-13)


def test_kl_is_the_same_on_both_sides_of_its_series():
    # Rows apart by just under and just over the switch, against 60 digits.
    from decimal import Decimal, localcontext

    compared = 0
    with localcontext() as context:
        context.prec = 60
        for x in (0.0099, 0.0101, -0.0099, -0.0101, 0.5, -0.9):
            rows = torch.tensor([[0.3, 0.7], [0.3 * (1 + x), 1 - 0.3 * (1 + x)]]).double()
            (a, b), (c, d) = [[Decimal(v) for v in row] for row in rows.tolist()]
            want = a * (a / c).ln() + b * (b / d).ln() + (c - a) + (d - b)
            assert float(token_kl(rows[0], rows[1])) == pytest.approx(float(want), rel=1e-12)
            compared += 1
    assert compared == 6


def test_a_million_sequences():
    # 2^20 sequences of one pair, against the recursion over a few states.
    g = torch.Generator().manual_seed(11)
    machine, horizon = product(walk(2, 2), last_tokens(2)), 20
    mu = random_markov(machine, 1, horizon=horizon, generator=g)
    pi = shifted(mu, drift_noise(mu, generator=g), scale=0.1)
    start = int(machine.start.argmax())
    weights = error_weights(tabular(mu, start), tabular(pi, start))
    assert weights.shape == (1, 2**20)
    ends = final_states(machine, start, horizon)
    by_state = torch.zeros(machine.states, dtype=torch.float64).index_add(0, ends, weights[0])
    want = state_error_weights(mu, pi)[0]
    assert torch.allclose(by_state, want, rtol=0, atol=1e-15)
    assert float(want.abs().max()) > 1e-4


def test_prompts_are_a_first_token_that_both_policies_draw_alike():
    g = torch.Generator().manual_seed(12)
    laws = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    mu = random_policies(3, vocab=3, horizon=2, generator=g)
    pi = perturbed(mu, scale=torch.tensor([0.1, 1.0, 0.5], dtype=torch.float64), generator=g)

    def joined(policy: TabularPolicy) -> TabularPolicy:
        return TabularPolicy((laws[None, None], *(x.reshape(1, -1, 3) for x in policy.levels)))

    got, want = over_prompts(divergences(mu, pi), laws), divergences(joined(mu), joined(pi))
    for name in ("kl_max", "tv_max", "kl_seq", "tv_seq"):
        assert float(getattr(got, name)) == pytest.approx(float(getattr(want, name)), rel=1e-12)
    assert torch.allclose(got.mean_tv, want.mean_tv[:, 1:], rtol=1e-12)
    assert float(want.mean_tv[0, 0]) == 0
