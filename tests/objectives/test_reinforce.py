"""The two plain policy gradients: closed forms, and that they agree where the ratio is 1."""

import pytest
import torch

from offdrift.objectives import ImportanceSampled, Reinforce
from tests.oracles.fixtures import double, fx_a


def test_reinforce_on_fx_a():
    lp, advantages, leaf = fx_a()
    loss = Reinforce()(lp, advantages).loss
    loss.sum().backward()
    assert loss.mean().item() == pytest.approx(0.370714, abs=1e-6)
    assert leaf.grad.tolist() == [[-1.0] * 4, [0.5] * 3 + [0.0]]


def test_algorithm_1_on_fx_a():
    lp, advantages, leaf = fx_a()
    loss = ImportanceSampled()(lp, advantages).loss
    # first sequence alone, divided by the two sampled sequences
    (loss[:4].sum() / 2).backward()
    assert (loss[:4].sum() / 2).item() == pytest.approx(-2.028511, abs=1e-6)
    expected = double([[-0.580917, -0.642013, -0.580917, -0.224664], [0, 0, 0, 0]])
    torch.testing.assert_close(leaf.grad, expected, rtol=0, atol=1e-6)
