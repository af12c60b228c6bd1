"""The bias that flipped routes leave: against enumeration, and laws in delta and T."""

import itertools
import math

import pytest
import torch

from offdrift.errors import BadValueError
from offdrift_lab.exact.flips import (
    TASKS,
    dense_bias,
    explained,
    exponents,
    flip_bias,
    flip_cells,
    flip_experiment,
    make_world,
)
from offdrift_lab.exact.policy import token_kl
from offdrift_lab.exact.routing import random_mixture


@pytest.mark.parametrize("task", TASKS)
def test_the_bias_is_that_of_token_weights_by_enumeration(task):
    """E_mu[A sum_t w_t grad log pi] - grad J, one sequence at a time, by automatic differentiation."""
    world, phi = make_world(task, horizon=3, experts=4, top_k=2, pairs=1, seed=2).with_leaves(), 0.3
    own, other = world.own(), world.flipped().detach()
    mu = (1 - phi) * own.detach() + phi * other
    machine, vocab = world.machine.next_state, world.machine.vocab
    baseline, rewards = 0.37, world.rewards
    weighted = true = torch.zeros(())
    for y in itertools.product(range(vocab), repeat=3):
        state, drawn, ratios, logs = int(world.machine.start.argmax()), 1.0, [], []
        for token in y:
            context = world.context[state]
            drawn *= float(mu[0, context, token])
            ratios.append(float((own[0, context, token] / mu[0, context, token]).detach()))
            logs.append(own[0, context, token].log())
            state = int(machine[state, token])
        reward = float(rewards[state])
        weighted = weighted + drawn * (reward - baseline) * sum(w * x for w, x in zip(ratios, logs, strict=True))
        true = true + reward * sum(logs).exp()
    parameters = world.mixture.parameters()
    estimate = torch.autograd.grad(weighted, parameters, retain_graph=True)
    gradient = torch.autograd.grad(true, parameters)
    bias = torch.cat([(g - e).flatten() for g, e in zip(gradient, estimate, strict=True)]).norm()
    flips = flip_bias(world, phi)
    assert float(flips.bias) == pytest.approx(float(bias), rel=1e-9)
    assert float(flips.gradient) == pytest.approx(float(torch.cat([g.flatten() for g in gradient]).norm()), rel=1e-9)


def test_a_flip_changes_two_memberships_and_takes_the_next_best():
    mixture = random_mixture(3, experts=5, top_k=2, generator=torch.Generator().manual_seed(0))
    for own, other, logits in zip(mixture.routes(), mixture.next_best(), mixture.router, strict=True):
        assert bool(((own != other).sum(-1) == 2).all())
        order = logits.argsort(-1, descending=True)
        assert bool(other.gather(-1, order)[..., [0, 2]].all())
    whole = random_mixture(1, experts=2, top_k=2, generator=torch.Generator().manual_seed(0))
    with pytest.raises(BadValueError, match="all of them act"):
        whole.next_best()


def test_no_flip_no_bias_and_twice_the_flips_twice_the_bias():
    for task in TASKS:
        world = make_world(task, horizon=12, experts=6, top_k=2, pairs=4, seed=1)
        assert float(flip_bias(world, 0.0).bias.max()) < 1e-12
        one, two = flip_bias(world, 1e-6).bias, flip_bias(world, 2e-6).bias
        assert torch.allclose(two / one, torch.full_like(one, 2.0), rtol=1e-3)


def test_the_token_kl_is_that_of_known_routes():
    world = make_world("walk", horizon=2, experts=4, top_k=1, pairs=1, seed=0)
    phi, own, other = 0.25, world.own(), world.flipped()
    mu, first = (1 - phi) * own + phi * other, int(world.machine.start.argmax())
    kl = phi * token_kl(other, own)[0]
    second = sum(float(mu[0, first, v]) * float(kl[int(world.machine.next_state[first, v])]) for v in range(3))
    assert float(flip_bias(world, phi).kl_token) == pytest.approx((float(kl[first]) + second) / 2, rel=1e-9)


def test_where_drift_adds_up_the_bias_grows_with_length_and_where_it_is_forgotten_it_stops():
    slopes = {}  # at 32 and 64 steps the first whole lead beyond a standard deviation is 1.08 and 1.07 of it
    for task, lengths in (("threshold", (32, 64)), ("walk", (256, 512))):
        sizes = [
            float(flip_bias(make_world(task, horizon=t, experts=6, top_k=2, pairs=6, seed=0), 1e-5).bias.log().mean())
            for t in lengths
        ]
        slopes[task] = (sizes[1] - sizes[0]) / math.log(2)
    assert slopes["threshold"] == pytest.approx(1, abs=0.1)
    assert abs(slopes["walk"]) < 0.1


def test_the_experiment_fits_powers_and_compares_with_dense_drift_of_the_same_kl():
    plan = list(flip_cells(horizons=[16, 32], rates=[2e-5, 2e-3], counts=[4, 16], tasks=["chain"]))
    cells = list(flip_experiment(plan, pairs=6, seed=0))
    assert [(c.task, sweep) for c, sweep, _ in cells] == [(task, sweep) for task, _, sweep in plan]
    powers = {e.swept: e for e in exponents(cells)}
    assert set(powers) == {"delta", "T", "T_last", "K", "K_sparse"}
    assert powers["delta"].mean == pytest.approx(1, abs=1e-2)
    assert powers["T"].high < 0.6
    assert powers["K_sparse"].high < 0.5 < powers["K"].mean
    (row,) = explained(cells)
    assert row["dense_over_flips"] > 10
    world = make_world("chain", horizon=32, experts=8, top_k=2, pairs=6, seed=0)
    assert float(dense_bias(world, torch.zeros_like(world.own())).max()) < 1e-12


@pytest.mark.parametrize(
    ("words", "said"),
    [({"task": "maze"}, "'maze'"), ({"horizon": 1}, "horizon = 1"), ({"top_k": 9}, "top_k = 9")],
)
def test_a_world_that_cannot_be_is_refused(words, said):
    with pytest.raises(BadValueError, match=said):
        make_world(**({"task": "walk", "horizon": 4, "experts": 4, "top_k": 2, "pairs": 1, "seed": 0} | words))
    with pytest.raises(BadValueError, match="phi = 2"):
        flip_bias(make_world("walk", horizon=4, experts=4, top_k=2, pairs=1, seed=0), 2.0)
