"""Gradient reaches log pi alone, and what gates and weights decided is a constant to it."""

from dataclasses import replace

import pytest
import torch

from offdrift.laws.batches import draw, packed, run, seen
from offdrift.laws.laws import all_leaves, frozen
from offdrift.loss import policy_loss
from offdrift.methods import METHODS
from tests.laws.rows import ROWS

every_row = pytest.mark.parametrize("name", METHODS)


@pytest.mark.parametrize("name", ROWS)
def test_only_the_current_policy_receives_a_gradient(name):
    for seed in (0, 2):
        given, leaves = all_leaves(draw(seed))
        batch_info = replace(given.batch_info, observed="this_batch")
        policy_loss(given.lp, ROWS[name], given.advantages, batch_info, normalizer=1.0).loss.backward()
        assert leaves.pop("pi").grad is not None
        assert len(leaves) == 13
        differentiated = getattr(ROWS[name].objective, "reads", None)  # through it, the current policy
        for field, leaf in leaves.items():
            assert (leaf.grad is not None) == (field == differentiated), field


@every_row
def test_what_is_reported_is_without_gradient(name):
    """Also behind the door, where a batch made by hand may carry a gradient on every policy."""
    row, (given, leaves) = METHODS[name], all_leaves(draw(1))
    bare = replace(given.lp, logp_rollout=leaves["mu"], logp_old=leaves["old"])
    batch_info = replace(given.batch_info, observed="this_batch")
    lp = bare if row.anchor is None else row.anchor(bare, batch_info)
    corrected = row.correction(lp, given.advantages, batch_info)
    assert not corrected.weight.requires_grad
    assert corrected.keep.dtype == corrected.limited.dtype == torch.bool
    parts = [x for s in seen(row, replace(given, lp=bare)).parts.values() for x in s.values()]
    assert not any(x.requires_grad for x in parts)
    assert len(parts) >= len([p for p in row.observers if p is row.lr_scale])
    result = policy_loss(bare, row, given.advantages, batch_info, normalizer=1.0)
    assert result.loss.requires_grad
    stats = (result.stats.sums, result.stats.maxima, *result.stats.by_position.values())
    assert not any(x.requires_grad for x in stats)


@pytest.mark.parametrize(
    "name", [n for n, r in METHODS.items() if r.correction.gates or r.correction.weights or r.anchor]
)
def test_the_gradient_is_the_one_with_decisions_frozen(name):
    compared = 0
    for seed in range(4):
        given = packed(draw(seed))
        got = run(METHODS[name], given)
        row, constant = frozen(METHODS[name], given)
        expected = run(row, constant)
        torch.testing.assert_close(got.loss, expected.loss, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(got.grad, expected.grad, rtol=1e-9, atol=1e-12)
        compared += int((got.grad != 0).sum())
    assert compared > 0
