"""LN-TRM on FX-A, by the numbers of the methods table, and its edges."""

import pytest
import torch

from offdrift.correction import LengthNeutralGate
from offdrift.errors import MethodError
from offdrift.segments import Segments
from tests.oracles.fixtures import double, fx_a

GATE = LengthNeutralGate(high=0.2, eps=0.05, delta=0.01)


def test_weights_score_and_decision_of_eq_98_and_99():
    lp, _, _ = fx_a()
    omega = GATE.position_weights(lp.segments)
    expected = double([0.122474, 0.1, 0.05, 0, 0.1, 0.05, 0])
    torch.testing.assert_close(omega, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(lp.segments.sum(omega), double([0.272474, 0.15]), rtol=0, atol=1e-6)
    torch.testing.assert_close(GATE.score(lp), double([0.206679, 0.155071]), rtol=0, atol=1e-6)
    assert GATE.keep(lp).int().tolist() == [0] * 4 + [1] * 3


def test_a_weight_is_at_most_one():
    s = Segments.from_lengths([400])
    omega = LengthNeutralGate(eps=0.05, delta=0.5).position_weights(s)
    assert omega[0] == 1.0
    assert omega[-2].item() == pytest.approx(0.05)


@pytest.mark.parametrize("parts", [{"eps": 0.0}, {"delta": -1.0}, {"high": -0.1}])
def test_parameters_that_mean_nothing_are_refused(parts):
    with pytest.raises(MethodError, match="eps="):
        LengthNeutralGate(**parts)
