"""Surrogates under routing replay, against sums over sequences and experts written out by hand."""

import itertools

import pytest
import torch

from offdrift.errors import BadValueError, ShapeError
from offdrift_lab.exact.routing import (
    SCHEMES,
    Mixture,
    ascended,
    experiment,
    noise,
    random_mixture,
    replayed,
    under,
)

VOCAB, HORIZON, EXPERTS = 2, 2, 3


def worlds(pairs=3, top_k=2, mismatch=0.8, update=0.4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    old = random_mixture(pairs, vocab=VOCAB, horizon=HORIZON, experts=EXPERTS, top_k=top_k, generator=generator)
    mu = old.moved(noise(old, router=mismatch, experts=0.0, generator=generator))
    pi = old.moved(noise(old, router=update, experts=update, generator=generator))
    return mu, old, pi, torch.rand(pairs, VOCAB**HORIZON, generator=generator, dtype=torch.float64)


def by_hand(gating, selecting, experts, top_k, p, t, context):
    """P(token | context): gates of one router on the experts that another one selects, of plain numbers."""
    chosen = sorted(range(EXPERTS), key=lambda z: -selecting[t][p, context, z].item())[:top_k]
    weights = {z: gating[t][p, context, z].exp().item() for z in chosen}
    law = [0.0] * VOCAB
    for z, weight in weights.items():
        logits = experts[t][p, context, z].exp()
        for a in range(VOCAB):
            law[a] += weight / sum(weights.values()) * (logits[a] / logits.sum()).item()
    return law


def roles(scheme, mu, old, pi):
    """Whose gates and whose selection a scheme's forward pass has."""
    return {"own": (pi, pi), "r3": (pi, mu), "r2": (pi, old), "reference": (old, old)}[scheme]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_surrogate_and_distances_are_those_of_sums_over_sequences(scheme, top_k):
    mu, old, pi, rewards = worlds(top_k=top_k)
    result = replayed(mu, old, pi, rewards)[scheme]
    for p in range(3):
        surrogate = alpha_0 = alpha_1 = 0.0
        for number, (a, b) in enumerate(itertools.product(range(VOCAB), repeat=HORIZON)):
            share, ratios = 1.0, 0.0
            for t, context, token in ((0, 0, a), (1, a, b)):
                drew = by_hand(mu.router, mu.router, mu.experts, top_k, p, t, context)
                gates, selection = roles(scheme, mu, old, pi)
                now = by_hand(gates.router, selection.router, pi.experts, top_k, p, t, context)
                gates, selection = roles(scheme, mu, old, old)
                before = by_hand(gates.router, selection.router, old.experts, top_k, p, t, context)
                share *= drew[token]
                ratios += now[token] / drew[token]
                alpha_0 = max(alpha_0, sum(abs(x - y) for x, y in zip(now, before, strict=True)) / 2)
                alpha_1 = max(alpha_1, sum(abs(x - y) for x, y in zip(drew, before, strict=True)) / 2)
            surrogate += share * rewards[p, number].item() * (ratios - HORIZON)
        assert float(result.surrogate[p]) == pytest.approx(surrogate, rel=1e-9)
        assert float(result.alpha_0[p]) == pytest.approx(alpha_0, rel=1e-9)
        assert float(result.alpha_1[p]) == pytest.approx(alpha_1, rel=1e-9)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_gradient_is_that_of_finite_differences(scheme):
    mu, old, pi, rewards = worlds()
    result = replayed(mu, old, pi, rewards)
    step, columns = 1e-6, {}
    for name in ("own", scheme):
        parts = []
        for i, parameter in enumerate(pi.parameters()):
            for place in itertools.product(*map(range, parameter.shape[1:])):
                values = []
                for sign in (step, -step):
                    change = [torch.zeros_like(x) for x in pi.parameters()]
                    change[i][(slice(None), *place)] = sign
                    values.append(replayed(mu, old, pi.moved(change), rewards)[name].surrogate)
                parts.append((values[0] - values[1]) / (2 * step))
        columns[name] = torch.stack(parts, 1)
    routers = sum(x[0].numel() for x in pi.router)
    norm = columns[scheme].norm(dim=1)
    cosine = (columns["own"] * columns[scheme]).sum(1) / (columns["own"].norm(dim=1) * norm)
    torch.testing.assert_close(result[scheme].cosine, cosine, rtol=1e-6, atol=1e-6)
    share = columns[scheme][:, :routers].square().sum(1) / norm.square()
    torch.testing.assert_close(result[scheme].router_share, share, rtol=1e-5, atol=1e-9)


def test_replay_hides_the_mismatch_of_selection_and_leaves_the_policy_that_draws_alone():
    mu, old, pi, rewards = worlds(pairs=50, top_k=1)
    result = replayed(mu, old, pi, rewards)
    # One expert of weight 1: mu and old on mu's expert are the same policy, but differ where they choose for themselves.
    assert float(result["r3"].alpha_1.max()) < 1e-12
    assert float(result["own"].alpha_1.median()) > 0.1
    assert float(result["r3"].alpha_0.median()) < float(result["own"].alpha_0.median())
    assert not torch.allclose(result["r3"].surrogate, result["own"].surrogate, rtol=0.1)


@pytest.mark.parametrize(("scheme", "top_k"), [("reference", 1), ("reference", 2), ("r3", 1), ("r2", 1)])
def test_no_gradient_reaches_a_router_that_is_frozen_or_weighs_one_expert(scheme, top_k):
    mu, old, pi, rewards = worlds(top_k=top_k)
    assert float(replayed(mu, old, pi, rewards)[scheme].router_share.abs().max()) == 0


@pytest.mark.parametrize("scheme", SCHEMES)
def test_without_mismatch_and_update_every_scheme_computes_the_same_policy(scheme):
    _, old, _, rewards = worlds()
    result = replayed(old, old, old, rewards)[scheme]
    for value in (result.surrogate, result.alpha_0, result.alpha_1):
        assert float(value.abs().max()) < 1e-12


def test_variance_is_that_of_many_drawn_sequences():
    mu, old, pi, rewards = worlds(pairs=1)
    result = replayed(mu, old, pi, rewards)["r3"]
    law = mu.policy().law()[0].detach()
    advantage = rewards[0] - (law * rewards[0]).sum()
    each = []
    for number in range(VOCAB**HORIZON):
        moving = pi.moved([torch.zeros_like(x) for x in pi.parameters()])
        policy = under("r3", moving, mu=mu, old=old)
        a, b = divmod(number, VOCAB)
        drew = mu.policy().levels
        ratios = policy.levels[0][0, 0, a] / drew[0][0, 0, a].detach()
        ratios = ratios + policy.levels[1][0, a, b] / drew[1][0, a, b].detach()
        gradients = torch.autograd.grad(ratios * advantage[number], moving.parameters(), materialize_grads=True)
        each.append(torch.cat([g.flatten() for g in gradients]))
    drawn = torch.multinomial(law, 200_000, replacement=True, generator=torch.Generator().manual_seed(1))
    counts = torch.bincount(drawn, minlength=len(law)).double() / len(drawn)
    gradients = torch.stack(each)
    mean = (counts[:, None] * gradients).sum(0)
    variance = (counts[:, None] * (gradients - mean).square()).sum()
    assert float(result.variance[0]) == pytest.approx(float(variance), rel=0.02)


def test_ascent_is_a_step_along_the_gradient_and_raises_its_surrogate():
    mu, old, _, rewards = worlds(pairs=20)
    for scheme in SCHEMES:
        pi, value = ascended(scheme, mu, old, rewards, steps=30, lr=0.5)
        start = replayed(mu, old, old, rewards)[scheme].surrogate
        assert bool((replayed(mu, old, pi, rewards)[scheme].surrogate > start).all())
        torch.testing.assert_close(value, (pi.policy().law() * rewards).sum(1).detach())


def test_experiment_reports_what_the_parts_compute():
    rows = experiment(40, experts=4, top_k=2, mismatch=0.3, update=0.3, steps=5, seed=0)
    assert [row["scheme"] for row in rows] == list(SCHEMES)
    own, r3, r2, reference = rows
    assert (own["surrogate_error"], own["variance_ratio"]) == (0, 1)
    assert own["cosine"] == pytest.approx(1)
    assert r3["alpha_1_seen"] < own["alpha_1_seen"] == r2["alpha_1_seen"] == reference["alpha_1_seen"]
    assert reference["router_share"] == 0 < r3["router_share"]
    assert reference["gain"] < own["gain"]
    still = experiment(4, experts=4, top_k=2, mismatch=0.3, update=0.0, steps=1, seed=0)
    assert still[2]["surrogate_error"] is not None  # the engine's routes differ, so L is not 0
    assert experiment(4, experts=4, top_k=2, mismatch=0.0, update=0.0, steps=1, seed=0)[0]["surrogate_error"] is None


def test_what_does_not_fit_is_refused():
    with pytest.raises(ShapeError, match=r"router\[0\] has shape \(1, 1, 3\) and experts\[0\] \(1, 1, 2, 2\)"):
        Mixture((torch.zeros(1, 1, 3),), (torch.zeros(1, 1, 2, 2),), 1)
    with pytest.raises(BadValueError, match="top_k = 4; there are 3 experts"):
        Mixture((torch.zeros(1, 1, 3),), (torch.zeros(1, 1, 3, 2),), 4)
    mu, old, pi, _ = worlds()
    with pytest.raises(BadValueError, match="'r4'; choose from own, r3, r2, reference"):
        under("r4", pi, mu=mu, old=old)
