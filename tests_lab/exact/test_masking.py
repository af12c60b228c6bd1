"""Masks leave the pair where it is, and a vanishing rejection removes a share of ||A|| T: by enumeration."""

import itertools
import math

import pytest
import torch

from offdrift.errors import BadValueError
from offdrift_lab.exact.masking import (
    CRITERIA,
    MASKS,
    accepted_sums,
    compare_masks,
    flipped_pairs,
    limit_of,
    masks,
    rare_pair,
    surrogate_weights,
    vanishing,
    worst_shortfall,
)
from offdrift_lab.exact.policy import TabularPolicy, divergences

TAU, DELTA = 0.2, 0.05


@pytest.fixture(scope="module")
def pair():
    g = torch.Generator().manual_seed(3)
    return flipped_pairs(6, vocab=2, horizon=4, noise=0.05, flip=2.0, touched=0.3, generator=g)


def by_hand(mu, pi, p, mask, rewards):
    """L'_M of one pair, one sequence and one token at a time."""
    law, terms = {}, {}
    for y in itertools.product(range(2), repeat=4):
        probability, ratios, kls, context = 1.0, [], [], 0
        for t, token in enumerate(y):
            first, second = mu.levels[t][p, context].tolist(), pi.levels[t][p, context].tolist()
            probability *= first[token]
            ratios.append(second[token] / first[token])
            kls.append(sum(a * math.log(a / b) for a, b in zip(first, second, strict=True)))
            context = 2 * context + token
        law[y] = probability
        kept = {
            "none": [True] * 4,
            "token": [abs(math.log(w)) <= TAU for w in ratios],
            "sequence": [all(kl <= DELTA for kl in kls)] * 4,
        }[mask]
        terms[y] = sum(w - 1 for w, m in zip(ratios, kept, strict=True) if m)
    mean = sum(law[y] * float(rewards[int("".join(map(str, y)), 2)]) for y in law)
    return sum(law[y] * (float(rewards[int("".join(map(str, y)), 2)]) - mean) * terms[y] for y in law)


@pytest.mark.parametrize("mask", MASKS)
def test_surrogates_are_what_sequences_say_one_at_a_time(pair, mask):
    mu, pi = pair
    rewards = torch.rand(6, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    m = masks(mu, pi, tau=TAU, delta=DELTA)
    ours = (surrogate_weights(mu, m.of(mask), m.ratios) * rewards).sum(1)
    for p in range(6):
        assert float(ours[p]) == pytest.approx(by_hand(mu, pi, p, mask, rewards[p]), abs=1e-12)


def test_the_worst_reward_is_found_among_all_corners(pair):
    mu, pi = pair
    m = masks(mu, pi, tau=TAU, delta=DELTA)
    weights, gain = surrogate_weights(mu, m.of("token"), m.ratios), pi.law() - mu.law()
    corners = torch.tensor(list(itertools.product((0.0, 1.0), repeat=16)), dtype=torch.float64)
    largest = ((gain - weights) @ corners.T).abs().amax(1)
    assert torch.allclose(worst_shortfall(weights, gain), largest, atol=1e-12)


def test_a_mask_moves_neither_the_largest_kl_nor_the_bound_and_loses_the_guarantee(pair):
    mu, pi = pair
    rewards = torch.rand(6, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows = {r.mask: r for r in compare_masks(mu, pi, rewards, tau=TAU, delta=DELTA, constants="sharp", steps=3)}
    d = divergences(mu, pi)
    for row in rows.values():
        assert torch.equal(row.kl_max, d.kl_max)
        assert torch.equal(row.bound, rows["none"].bound)
    assert bool((rows["none"].error <= rows["none"].bound).all()), "the bound is the full surrogate's"
    assert float(rows["sequence"].kl_max_kept.max()) <= DELTA < float(rows["token"].kl_max_kept.max())
    assert float(rows["token"].kl_max_after.median()) > DELTA
    masked = torch.maximum(rows["token"].error, rows["sequence"].error)
    assert bool((masked > rows["none"].error).all())


def test_with_nothing_to_reject_all_surrogates_are_one():
    g = torch.Generator().manual_seed(0)
    mu, pi = flipped_pairs(4, vocab=3, horizon=3, noise=0.01, flip=0.0, touched=0.0, generator=g)
    rewards = torch.rand(4, 27, generator=g, dtype=torch.float64)
    rows = compare_masks(mu, pi, rewards, tau=1.0, delta=1.0, steps=2)
    for row in rows:
        assert torch.allclose(row.error, rows[0].error)
        assert torch.allclose(row.gain_after, rows[0].gain_after)
        assert bool((row.kept > 1 - 1e-12).all())


def enumerated(mu, pi, inside):
    """E_mu[M] and E_mu[(1 - M) sum_t w_t 1(last state)] of a Markov pair, one sequence at a time."""
    machine, kept, removed = mu.automaton.next_state, 0.0, [0.0, 0.0]
    for y in itertools.product(range(2), repeat=mu.horizon):
        state, probability, total, accepted = 0, 1.0, 0.0, True
        for token in y:
            first = float(mu.tokens[0, 0, state, token])
            probability *= first
            total += float(pi.tokens[0, 0, state, token]) / first
            accepted &= bool(inside[state, token])
            state = int(machine[state, token])
        kept += probability * accepted
        removed[state] += 0.0 if accepted else probability * total
    return kept, removed


@pytest.mark.parametrize("criterion", CRITERIA)
def test_the_recursion_is_the_sum_over_all_sequences(criterion):
    mu, pi, inside = rare_pair(7, rejected=0.03, delta=0.05, criterion=criterion)
    a, b = accepted_sums(mu, pi, inside)
    _, everything = accepted_sums(mu, pi, torch.ones_like(inside))
    kept, removed = enumerated(mu, pi, inside)
    assert float(a.sum()) == pytest.approx(kept, abs=1e-12) == pytest.approx(0.97, abs=1e-12)
    assert (everything - b)[0].tolist() == pytest.approx(removed, abs=1e-12)
    assert float(everything.sum()) == pytest.approx(7, abs=1e-12), "E_mu[w_t] = 1"


@pytest.mark.parametrize("criterion", CRITERIA)
def test_what_masking_removes_stays_of_order_t_while_rejection_goes_to_0(criterion):
    limit = limit_of(criterion, 0.05)
    for rejected in (1e-3, 1e-6, 1e-9):
        v = vanishing(2048, rejected=rejected, delta=0.05, criterion=criterion)
        assert v.rejected == pytest.approx(rejected, rel=1e-6)
        assert v.share == pytest.approx(limit, rel=2e-3 + 2 * rejected / limit)
    assert vanishing(4096, rejected=1e-9, delta=0.05, criterion=criterion).removed == pytest.approx(
        2 * v.removed, rel=1e-3
    )


@pytest.mark.parametrize("delta", [1e-4, 0.05, 1.0, 3.0])
def test_every_accepted_context_of_the_family_is_within_the_trust_region(delta):
    mu, pi, inside = rare_pair(64, rejected=1e-9, delta=delta)
    kl = (mu.tokens * (mu.tokens / pi.tokens).log()).sum(-1)[0, 0]
    assert float(kl[0]) <= delta < float(kl[1])
    assert inside.tolist() == [[True, True], [False, False]]
    assert float(kl[0]) == pytest.approx(delta, rel=1e-3), "it uses all of it"


def test_no_first_token_removes_more_than_the_limit():
    """At an accepted context: of all q with KL(p || q) <= delta, as p goes to 0, the largest is 1 - e^-delta."""
    q = torch.linspace(1e-6, 1 - 1e-6, 200_001, dtype=torch.float64)
    for delta in (0.05, 0.5):
        for p, over in ((1e-3, 0.02), (1e-6, 1e-4)):
            kl = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
            assert float(q[kl <= delta].max()) < limit_of("kl", delta) + over


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"horizon": 1, "rejected": 1e-3, "delta": 0.05}, "horizon = 1"),
        ({"horizon": 8, "rejected": 0.0, "delta": 0.05}, "rejected = 0.0"),
        ({"horizon": 8, "rejected": 1e-3, "delta": 0.0}, "delta = 0.0"),
        ({"horizon": 2, "rejected": 0.5, "delta": 0.05}, "give a smaller share"),
        ({"horizon": 8, "rejected": 1e-3, "delta": 0.05, "criterion": "tv"}, "'tv'"),
    ],
)
def test_a_family_that_cannot_be_is_refused(words, said):
    with pytest.raises(BadValueError, match=said):
        rare_pair(**words)


def test_a_mask_by_another_name_is_refused():
    fair = TabularPolicy.independent([[0.5, 0.5]])
    with pytest.raises(BadValueError, match="'turn'"):
        masks(fair, fair, tau=1.0, delta=1.0).of("turn")
