"""Recursions agree with enumeration to rounding; long horizons with closed forms."""

import math

import pytest
import torch
from torch.distributions import Binomial

from offdrift.errors import BadValueError, ShapeError
from offdrift_lab.exact import markov
from offdrift_lab.exact.markov import (
    Automaton,
    MarkovPolicy,
    counter,
    drift_flip,
    drift_noise,
    drift_tilt,
    from_logits,
    last_tokens,
    markov_divergences,
    markov_returns,
    pattern,
    product,
    prompts,
    random_markov,
    return_gradient,
    shifted,
    state_error_weights,
    walk,
)
from offdrift_lab.exact.policy import TabularPolicy, divergences, returns


def tabular(policy: MarkovPolicy, start: int = 0) -> TabularPolicy:
    """The same policies with every context written down, from one starting state."""
    levels, states = [], torch.tensor([start])
    for t in range(policy.horizon):
        levels.append(policy.tokens[:, t if policy.tokens.shape[1] > 1 else 0][:, states])
        states = policy.automaton.next_state[states].flatten()
    return TabularPolicy(tuple(levels))


def final_states(machine: Automaton, start: int, horizon: int) -> torch.Tensor:
    """The last state of each of the v^horizon sequences, numbered in base v."""
    states = torch.tensor([start])
    for _ in range(horizon):
        states = machine.next_state[states].flatten()
    return states


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _coin(*heads: float, horizon: int) -> MarkovPolicy:
    """Independent coins, one policy per probability."""
    p = torch.tensor(heads, dtype=torch.float64)
    return MarkovPolicy(counter(2, 1), torch.stack([1 - p, p], -1)[:, None, None], horizon)


MACHINES = {
    "memoryless": counter(3, 1),
    "parity": counter(2, 2),
    "count modulo 3": counter(3, 3, token=2),
    "last two": last_tokens(2, 2),
    "majority": walk(3, 2),
    "pattern": pattern(2, [1, 0, 1]),
    "product": product(counter(2, 2), last_tokens(2)),
}


@pytest.mark.parametrize("stationary", [True, False])
@pytest.mark.parametrize("name", MACHINES)
def test_agrees_with_enumeration(name: str, stationary: bool):
    machine, horizon, g = MACHINES[name], 5, _generator(3)
    mu = random_markov(machine, 6, horizon=horizon, stationary=stationary, generator=g)
    pi = shifted(mu, drift_noise(mu, generator=g), scale=0.6)
    rewards = torch.rand(6, machine.states, generator=g, dtype=torch.float64)
    start = int(machine.start.argmax())
    tree_mu, tree_pi = tabular(mu, start), tabular(pi, start)
    per_sequence = rewards[:, final_states(machine, start, horizon)]
    want, got = returns(tree_mu, tree_pi, per_sequence), markov_returns(mu, pi, rewards)
    for field in ("rollout", "current", "surrogate", "error"):
        assert torch.allclose(getattr(got, field), getattr(want, field), rtol=0, atol=1e-13), field
    if machine.states > 1:  # with one state, every sequence has the same reward
        assert float(want.error.abs().max()) > 1e-3
    exact, d = divergences(tree_mu, tree_pi), markov_divergences(mu, pi)
    for field in ("kl_max", "tv_max", "kl_seq", "mean_tv"):
        assert torch.allclose(getattr(d, field), getattr(exact, field), rtol=0, atol=1e-12), field
    assert torch.allclose(d.mean_kl.sum(1), d.kl_seq)
    law_mu, law_pi = tree_mu.law(), tree_pi.law()
    assert torch.allclose(d.hellinger, 1 - (law_mu * law_pi).sqrt().sum(1), rtol=0, atol=1e-12)
    assert bool((exact.tv_seq <= d.tv_seq_high + 1e-12).all())
    weights = state_error_weights(mu, pi)
    worst = markov_returns(mu, pi, (weights > 0).double()).error
    assert torch.allclose(worst, weights.clamp(min=0).sum(1), rtol=0, atol=1e-13)
    assert bool((worst >= got.error.abs() - 1e-13).all())


def test_several_prompts_are_averaged_and_maxima_are_over_all():
    parity, share = counter(2, 2), [0.2, 0.3, 0.5]
    machine, horizon, g = prompts(parity, share), 4, _generator(5)
    mu = random_markov(machine, 3, horizon=horizon, generator=g)
    pi = shifted(mu, drift_noise(mu, generator=g))
    rewards = torch.rand(3, machine.states, generator=g, dtype=torch.float64)
    got, d = markov_returns(mu, pi, rewards), markov_divergences(mu, pi)
    error, kl, kl_max = torch.zeros(3).double(), torch.zeros(3).double(), torch.zeros(3).double()
    for prompt, weight in enumerate(share):
        start = prompt * parity.states
        trees = tabular(mu, start), tabular(pi, start)
        each = returns(*trees, rewards[:, final_states(machine, start, horizon)])
        exact = divergences(*trees)
        error, kl = error + weight * each.error, kl + weight * exact.kl_seq
        kl_max = torch.maximum(kl_max, exact.kl_max)
    assert torch.allclose(got.error, error, rtol=0, atol=1e-14)
    assert torch.allclose(d.kl_seq, kl, rtol=1e-12)
    assert torch.allclose(d.kl_max, kl_max, rtol=1e-12)


def test_the_gradient_of_the_return_is_that_of_autograd():
    for stationary in (True, False):
        machine, g = pattern(3, [0, 2]), _generator(6)
        base = random_markov(machine, 4, horizon=7, stationary=stationary, generator=g)
        rewards = torch.rand(4, machine.states, generator=g, dtype=torch.float64)
        logits = base.tokens.log().requires_grad_()
        policy = from_logits(machine, logits, 7)
        value = markov_returns(policy, policy, rewards).rollout.sum()
        (want,) = torch.autograd.grad(value, logits)
        got = return_gradient(base, rewards)
        assert torch.allclose(got, want, rtol=0, atol=1e-14)
        assert float(got.abs().max()) > 1e-3


def test_parity_of_a_thousand_biased_coins():
    # E[(-1)^heads] = (1 - 2p)^T; J(odd) = (1 - (1-2p)^T) / 2, L' = T (p - q) (1-2p)^(T-1).
    horizon, p, q = 1000, 5e-4, 6e-4
    machine = counter(2, 2)
    rows = torch.tensor([[1 - p, p], [1 - q, q]], dtype=torch.float64)
    mu, pi = (MarkovPolicy(machine, row.expand(1, 1, 2, 2), horizon) for row in rows)
    odd = torch.tensor([[0.0, 1.0]], dtype=torch.float64)
    r = markov_returns(mu, pi, odd)
    j = [(1 - (1 - 2 * x) ** horizon) / 2 for x in (p, q)]
    surrogate = horizon * (q - p) * (1 - 2 * p) ** (horizon - 1)
    assert float(r.rollout) == pytest.approx(j[0], rel=1e-12)
    assert float(r.current) == pytest.approx(j[1], rel=1e-12)
    assert float(r.surrogate) == pytest.approx(surrogate, rel=1e-12)
    assert float(r.error) == pytest.approx(j[1] - j[0] - surrogate, rel=1e-9)


def test_tiny_drift_keeps_its_digits():
    # Two coins, drift e each, reward "both agree": the error is 2 e^2, far below 2^-53.
    drift = 2.0**-40
    machine, horizon = counter(2, 2), 2
    coin = torch.full((1, 1, 2, 2), 0.5, dtype=torch.float64)
    tilt = torch.tensor([-drift, drift], dtype=torch.float64)
    mu, pi = MarkovPolicy(machine, coin, horizon), MarkovPolicy(machine, coin + tilt, horizon)
    agree = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    assert float(markov_returns(mu, pi, agree).error) == 2 * drift**2
    assert float(markov_divergences(mu, pi).hellinger) == pytest.approx(drift**2, rel=1e-6)


def test_what_the_rollout_policy_cannot_draw():
    never = torch.tensor([[[[1.0, 0.0]]]], dtype=torch.float64)
    fair = torch.tensor([[[[0.5, 0.5]]]], dtype=torch.float64)
    mu, pi = MarkovPolicy(counter(2, 1), never, 3), MarkovPolicy(counter(2, 1), fair, 3)
    d = markov_divergences(pi, mu)
    assert float(d.kl_max) == float(d.kl_seq) == math.inf
    assert float(d.tv_seq_high) == pytest.approx(math.sqrt(1 - 1 / 8))


def test_states_that_neither_policy_reaches_do_not_count():
    # State 1 is entered by token 1 only, which is never drawn; there the policies disagree.
    machine = Automaton(torch.tensor([[0, 1], [1, 1]]), torch.tensor([1.0, 0.0], dtype=torch.float64))
    rows = [[[1.0, 0.0], [0.5, 0.5]], [[1.0, 0.0], [0.0, 1.0]], [[0.9, 0.1], [0.0, 1.0]]]
    mu, same, other = (MarkovPolicy(machine, torch.tensor([[row]], dtype=torch.float64), 4) for row in rows)
    d = markov_divergences(mu, same)
    assert float(d.kl_max) == float(d.tv_max) == float(d.kl_seq) == float(d.tv_seq_high) == 0
    d = markov_divergences(mu, other)  # the current policy goes there
    assert float(d.kl_max) == math.inf
    assert float(d.tv_max) == pytest.approx(0.5)
    assert float(d.kl_seq) == pytest.approx(-4 * math.log(0.9))


def test_a_reachable_state_counts_however_unlikely():
    # 1e-300 squared is 0 in float64; the state behind both tokens is reached all the same.
    machine = pattern(2, [1, 1])
    rows = torch.tensor([[1 - 1e-300, 1e-300]], dtype=torch.float64).expand(3, 2).clone()
    other = rows.clone()
    other[2] = torch.tensor([0.0, 1.0])
    rows[2] = torch.tensor([1.0, 0.0])
    mu, pi = MarkovPolicy(machine, rows[None, None], 4), MarkovPolicy(machine, other[None, None], 4)
    assert float(mu.laws()[0, -1, 2]) == 0
    d = markov_divergences(mu, pi)
    assert float(d.kl_max) == float(d.kl_seq) == math.inf
    assert float(d.tv_max) == 1


def test_tv_interval_holds_the_exact_value_at_a_thousand_tokens():
    mu, pi, heads = _coin(0.5, 0.2, 0.5, horizon=1000), _coin(0.501, 0.23, 0.6, horizon=1000), torch.arange(1001)
    # Whole sequences differ as their numbers of heads do, which are binomial.
    binomials = [Binomial(1000, policy.tokens[:, 0, 0, 1:]).log_prob(heads).exp() for policy in (mu, pi)]
    exact = (binomials[0] - binomials[1]).abs().sum(1) / 2
    d = markov_divergences(mu, pi)
    assert bool((exact <= d.tv_seq_high).all())
    assert float(d.tv_seq_high[0]) < 1.3 * float(exact[0])


def test_samples_follow_the_laws():
    machine, g = product(last_tokens(3), counter(3, 2)), _generator(8)
    policy = random_markov(machine, 2, horizon=6, stationary=False, generator=g)
    tokens, states = policy.sample(40_000, generator=g, row=1)
    assert tokens.shape == states.shape == (40_000, 6)
    assert torch.equal(machine.next_state[states[:, :-1], tokens[:, :-1]], states[:, 1:])
    laws = policy.laws()[1]
    compared = 0
    for t in range(6):
        share = torch.bincount(states[:, t], minlength=machine.states) / 40_000
        noise = (laws[t] * (1 - laws[t]) / 40_000).sqrt()
        assert bool(((share - laws[t]).abs() <= 5 * noise).all()), t
        compared += int((laws[t] > 0).sum())
    assert compared > 20
    again = policy.sample(100, generator=_generator(9), row=1)
    assert torch.equal(again[0], policy.sample(100, generator=_generator(9), row=1)[0])


def test_a_token_of_probability_zero_is_never_drawn():
    rows = torch.tensor([[[[0.0, 0.5, 0.0, 0.5, 0.0]]]], dtype=torch.float64)
    tokens, _ = MarkovPolicy(counter(5, 1), rows, 50).sample(2000, generator=_generator())
    assert sorted(set(tokens.flatten().tolist())) == [1, 3]
    lowest = torch.zeros(1, 1, dtype=torch.float64)  # the one uniform number at which it might be
    assert markov._draw(rows[0, 0].cumsum(-1), lowest).tolist() == [1]


def test_kinds_of_drift():
    mu = random_markov(last_tokens(3), 50, horizon=8, generator=_generator())
    flip = shifted(mu, drift_flip(mu, generator=_generator(1)), scale=3)
    moved = (flip.tokens - mu.tokens).abs().amax(-1) > 1e-9
    assert moved[:, 0].sum(-1).tolist() == [1] * 50
    tilt = shifted(mu, drift_tilt(mu, token=1), scale=0.1)
    assert bool((tilt.tokens[..., 1] > mu.tokens[..., 1]).all())
    assert (
        float(markov_divergences(mu, shifted(mu, drift_noise(mu, generator=_generator()), scale=0)).kl_seq.max())
        < 1e-14
    )


def test_the_machines_say_what_they_are_called():
    tokens = [1, 0, 1, 1, 0, 2, 1]

    def run(machine: Automaton) -> int:
        state = int(machine.start.argmax())
        for token in tokens:
            state = int(machine.next_state[state, token])
        return state

    assert run(counter(3, 2)) == 0  # four ones
    assert run(counter(3, 3, token=0)) == 2
    assert run(last_tokens(3, 2)) == 2 * 3 + 1
    assert run(walk(3, 2)) == 2 - 1  # -1 twice, +1 once
    assert run(pattern(3, [1, 1, 0])) == 3
    assert run(pattern(3, [2, 1, 2])) == 2
    assert run(product(counter(3, 2), counter(3, 3, token=0))) == 2


def test_what_cannot_be_a_pair_is_refused():
    machine = counter(2, 2)
    coin = torch.full((1, 1, 2, 2), 0.5, dtype=torch.float64)
    policy = MarkovPolicy(machine, coin, 4)
    with pytest.raises(BadValueError, match="horizon = 0"):
        MarkovPolicy(machine, coin, 0)
    with pytest.raises(ShapeError, match=r"tokens has shape \(1, 3, 2, 2\)"):
        MarkovPolicy(machine, coin.expand(1, 3, 2, 2), 4)
    with pytest.raises(BadValueError, match="not a distribution"):
        MarkovPolicy(machine, coin * 2, 4)
    with pytest.raises(ShapeError, match="different automata"):
        markov_divergences(policy, MarkovPolicy(last_tokens(2), coin, 4))
    with pytest.raises(ShapeError, match=r"\(1, 4\) and \(1, 5\)"):
        markov_returns(policy, MarkovPolicy(machine, coin, 5), torch.zeros(1, 2).double())
    with pytest.raises(BadValueError, match=r"rewards go from 0 to 1\.5"):
        markov_returns(policy, policy, torch.tensor([[0.0, 1.5]], dtype=torch.float64))
    with pytest.raises(BadValueError, match="vocabulary of 1 token"):
        last_tokens(1)
    with pytest.raises(BadValueError, match="leaves the 1 states"):
        Automaton(torch.tensor([[0, 1]]), torch.ones(1, dtype=torch.float64))
    with pytest.raises(BadValueError, match="start is not a law"):
        Automaton(torch.tensor([[0, 0]]), torch.tensor([0.5], dtype=torch.float64))
    with pytest.raises(ShapeError, match="start has 2 states"):
        Automaton(torch.tensor([[0, 0]]), torch.tensor([0.5, 0.5], dtype=torch.float64))
    with pytest.raises(ShapeError, match="vocabularies of 2 and 3"):
        product(counter(2, 1), counter(3, 1))
