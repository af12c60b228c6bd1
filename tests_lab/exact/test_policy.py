"""Tabular policies: laws of contexts, construction, drift."""

import pytest
import torch

from offdrift.errors import BadValueError, ShapeError
from offdrift_lab.exact import TabularPolicy, perturbed, random_policies, tilted_pair


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_context_laws_by_hand():
    # P(0) = .4; then P(0|0) = .1, P(0|1) = .8
    first = torch.tensor([[[0.4, 0.6]]], dtype=torch.float64)
    second = torch.tensor([[[0.1, 0.9], [0.8, 0.2]]], dtype=torch.float64)
    laws = TabularPolicy((first, second)).context_laws()
    want = [[1.0], [0.4, 0.6], [0.04, 0.36, 0.48, 0.12]]
    assert len(laws) == 3
    for law, row in zip(laws, want, strict=True):
        assert law[0].tolist() == pytest.approx(row)


def test_random_policies_are_distributions_of_the_asked_size():
    policy = random_policies(7, vocab=3, horizon=4, generator=_generator())
    assert (policy.pairs, policy.vocab, policy.horizon) == (7, 3, 4)
    assert [tuple(level.shape) for level in policy.levels] == [(7, 1, 3), (7, 3, 3), (7, 9, 3), (7, 27, 3)]
    assert torch.allclose(policy.law().sum(1), torch.ones(7, dtype=torch.float64))
    assert policy.law().shape == (7, 81)


def test_spread_goes_from_uniform_to_deterministic():
    flat = random_policies(5, vocab=3, horizon=2, spread=0.0, generator=_generator())
    sharp = random_policies(5, vocab=3, horizon=2, spread=50.0, generator=_generator())
    assert torch.allclose(flat.law(), torch.full((5, 9), 1 / 9, dtype=torch.float64))
    assert float(sharp.levels[1].amax(-1).mean()) > 0.98


def test_perturbation_touches_the_share_of_contexts_it_is_asked_to():
    policy = random_policies(400, vocab=2, horizon=4, generator=_generator())
    contexts = 400 * (1 + 2 + 4 + 8)
    for touched in (0.0, 0.1, 1.0):
        drifted = perturbed(policy, scale=1.0, touched=touched, generator=_generator())
        moved = sum(int((a != b).any(-1).sum()) for a, b in zip(policy.levels, drifted.levels, strict=True))
        assert moved / contexts == pytest.approx(touched, abs=0.02)


def test_each_policy_can_drift_by_its_own_size():
    policy = random_policies(3, vocab=2, horizon=3, generator=_generator())
    sizes = torch.tensor([0.0, 1e-3, 1.0], dtype=torch.float64)
    drifted = perturbed(policy, scale=sizes, generator=_generator())
    moved = (policy.law() - drifted.law()).abs().amax(1)
    assert float(moved[0]) < 1e-15
    assert 1e-6 < float(moved[1]) < 1e-2 < float(moved[2])


def test_perturbation_keeps_tokens_that_cannot_be_drawn():
    policy = TabularPolicy.independent([[0.0, 1.0], [0.5, 0.5]])
    drifted = perturbed(policy, scale=1.0, generator=_generator())
    assert drifted.levels[0].tolist() == [[[0.0, 1.0]]]
    assert drifted.levels[1].tolist() != policy.levels[1].tolist()


def test_with_level_replaces_one_position():
    mu, pi = tilted_pair(0.2, horizon=3)
    swapped = mu.with_level(1, pi)
    assert [float(level[0, 0, 1]) for level in swapped.levels] == pytest.approx([0.5, 0.7, 0.5])


@pytest.mark.parametrize("eps", [-0.1, 0.51])
def test_tilt_must_leave_a_coin(eps: float):
    with pytest.raises(BadValueError, match=f"eps = {eps}"):
        tilted_pair(eps, horizon=2)


def test_what_is_not_a_tree_of_distributions_is_refused():
    row = torch.tensor([[[0.5, 0.5]]], dtype=torch.float64)
    with pytest.raises(ShapeError, match=r"levels\[1\] has shape \(1, 1, 2\), expected \(1, 2, 2\)"):
        TabularPolicy((row, row))
    with pytest.raises(ShapeError, match="levels is empty"):
        TabularPolicy(())
    for bad in ([0.5, 0.6], [-0.5, 1.5]):
        with pytest.raises(BadValueError, match=r"levels\[0\]"):
            TabularPolicy((torch.tensor([[bad]], dtype=torch.float64),))
