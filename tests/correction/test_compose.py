"""Composition: order of gates is irrelevant, parts report what they touched."""

import pytest

from offdrift.correction import Correction, Gate, Weight
from offdrift.errors import MethodError
from tests.oracles.fixtures import ragged


def test_and_adds_gates_once_and_keeps_the_weight():
    weight = Weight(on="mismatch", cap=2.0)
    one = Gate(statistic="k2", on="full", unit="seq_max", high=0.3)
    other = Gate(statistic="ratio", on="mismatch", unit="token", low=0.8, high=1.2)
    c = Correction(weights=(weight,)) & one & Correction((one, other))
    assert c.gates == (one, other)
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


def test_nothing_configured_changes_nothing():
    got = Correction()(ragged(1))
    assert got.keep.all()
    assert (got.weight == 1).all()
    assert not got.limited.any()
