"""In which order parts are composed changes nothing: gates are joined by AND, weights multiply."""

import itertools
from dataclasses import replace

import pytest
import torch

from offdrift.correction import Correction, Gate, Weight
from offdrift.laws.batches import draw, packed, run
from offdrift.methods import METHODS
from tests.laws.reach import within_reach

MORE = (
    Gate(statistic="k2", on="full", unit="token", high=0.03),
    Gate(statistic="ratio", on="mismatch", unit="seq_mean", low=0.9, high=1.2, advantage="positive"),
)
"""A gate on tokens and one on sequences, so that one could see what the other has left."""


@pytest.mark.parametrize("name", METHODS)
def test_gates_are_joined_by_and_in_any_order(name):
    row = within_reach(name)
    gates = (*row.correction.gates, *MORE)
    rejecting = set()
    for seed in range(3):
        given = packed(draw(seed))
        batch_info = given.batch_info
        lp = given.lp if row.anchor is None else row.anchor(given.lp, batch_info)
        alone = [g.keep(lp, given.advantages, batch_info) for g in gates]
        together = torch.stack(alone).all(0)
        for order in itertools.permutations(range(len(gates))):
            joined = Correction()
            for i in order:
                joined = joined & gates[i]
            got = joined(lp, given.advantages, batch_info)
            assert torch.equal(got.keep, together)
            for i in order:
                assert torch.equal(got.rejected_by[gates[i]], ~alone[i])
        rejecting |= {i for i, keep in enumerate(alone) if not keep.all()}
    assert len(rejecting) == len(gates)


@pytest.mark.parametrize("name", METHODS)
def test_the_loss_does_not_depend_on_the_order_of_parts(name):
    row, kept, total = METHODS[name], 0, 0
    gates, weights = (*row.correction.gates, *MORE), row.correction.weights
    forward, backward = Correction(gates, weights), Correction(gates[::-1], weights[::-1])
    for seed in range(3):
        given = packed(draw(seed))
        one, other = (run(replace(row, correction=c), given) for c in (forward, backward))
        torch.testing.assert_close(one.loss, other.loss, rtol=1e-12, atol=0)
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=0)
        torch.testing.assert_close(one.result.corrected.weight, other.result.corrected.weight)
        kept, total = kept + int(one.keep.sum()), total + len(one.keep)
    assert 0 < kept < total


def test_weights_of_either_factor_multiply():
    one, other = Weight(on="mismatch", cap=2.0), Weight(on="staleness", cap=1.2)
    lp = packed(draw(0)).lp
    product = one(lp).weight * other(lp).weight
    for both in (Correction() & one & other, Correction() & other & one):
        torch.testing.assert_close(both(lp).weight, product)
    assert product.std() > 0.1
