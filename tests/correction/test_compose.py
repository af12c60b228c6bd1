"""Composition: order of gates is irrelevant, parts report what they touched."""

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


def test_and_adds_gates_once_and_keeps_the_weight():
    weight = Weight(on="mismatch", cap=2.0)
    c = Correction(weights=(weight,)) & GATES[0] & Correction((GATES[0], GATES[1]))
    assert c.gates == (GATES[0], GATES[1])
    assert c.weights == (weight,)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Weight(on="mismatch"), Weight(on="full")),
        (Weight(on="staleness"), Weight(on="staleness", cap=2.0)),
        (Weight(on="full", advantage="negative"), Weight(on="mismatch")),
        (Weight(on="full", advantage="negative"), Weight(on="full", cap=3.0, advantage="negative")),
    ],
)
def test_two_weights_on_one_ratio_are_refused(one, other):
    with pytest.raises(MethodError, match="count one ratio twice"):
        Correction() & one & other


def test_weights_on_different_ratios_multiply():
    lp = ragged(5)
    a = torch.ones_like(lp.logp_rollout)
    parts = [Weight(on="mismatch", cap=1.1), Weight(on="staleness", floor=0.9)]
    got = (Correction() & parts[0] & parts[1])(lp, a)
    each = [p(lp, a) for p in parts]
    torch.testing.assert_close(got.weight, each[0].weight * each[1].weight)
    assert torch.equal(got.limited, each[0].limited | each[1].limited)
    assert got.limited.any()


def test_weights_of_opposite_signs_share_a_ratio():
    lp = ragged(6)
    a = torch.randn(lp.logp_rollout.numel(), generator=torch.Generator().manual_seed(0)).double()
    up = Weight(on="full", cap=1.1, advantage="positive")
    down = Weight(on="full", cap=1.0, unit="sequence", advantage="negative")
    got = (Correction() & up & down)(lp, a)
    plain = Weight(on="full", cap=1.1)(lp).weight, Weight(on="full", cap=1.0, unit="sequence")(lp).weight
    torch.testing.assert_close(got.weight, plain[0].where(a > 0, plain[1]))


def test_nothing_configured_changes_nothing():
    got = Correction()(ragged(1))
    assert got.keep.all()
    assert (got.weight == 1).all()
    assert not got.limited.any()
