"""Composition: order of gates is irrelevant, parts report what they touched."""

import itertools

import pytest
import torch

from offdrift.correction import Correction, Gate, Weight
from offdrift.errors import MethodError
from tests.oracles.fixtures import ragged

GATES = [
    Gate(statistic="k2", on="full", unit="seq_max", high=0.3),
    Gate(statistic="ratio", on="mismatch", unit="token", low=0.8, high=1.2),
    Gate(statistic="k3", on="staleness", unit="seq_mean", high=0.05),
]


def test_order_of_gates_cannot_matter():
    lp = ragged(3, sequences=30)
    results = [Correction(tuple(p))(lp).keep for p in itertools.permutations(GATES)]
    assert len(results) == 6
    assert all(torch.equal(results[0], r) for r in results)
    assert 0 < results[0].sum() < results[0].numel()


def test_joint_decision_is_the_conjunction_of_each_gate_alone():
    lp = ragged(4, sequences=30)
    got = Correction(tuple(GATES))(lp)
    alone = [g.keep(lp) for g in GATES]
    assert torch.equal(got.keep, alone[0] & alone[1] & alone[2])
    assert [torch.equal(~k, got.rejected_by[g]) for g, k in zip(GATES, alone)] == [True] * 3


def test_and_adds_gates_once_and_keeps_the_weight():
    weight = Weight(on="mismatch", cap=2.0)
    c = Correction(weights=(weight,)) & GATES[0] & Correction((GATES[0], GATES[1]))
    assert c.gates == (GATES[0], GATES[1])
    assert c.weights == (weight,)


def test_two_weights_are_refused():
    with pytest.raises(MethodError, match="two weights"):
        Correction(weight=Weight(on="mismatch")) & Correction(weight=Weight(on="full"))


def test_nothing_configured_changes_nothing():
    got = Correction()(ragged(1))
    assert got.keep.all()
    assert (got.weight == 1).all()
    assert not got.limited.any()
