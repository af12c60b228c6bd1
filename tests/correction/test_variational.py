"""VESPO's kernel: values of the methods table, its peaks, its tails."""

import math

import pytest
import torch

from offdrift.correction import VariationalWeight
from offdrift.errors import MethodError
from offdrift.logprobs import LogProbs
from offdrift.segments import Segments
from tests.oracles.fixtures import double, fx_a


@pytest.mark.parametrize(
    ("sign", "expected"), [(1.0, [0.901551, 1.0, 0.388227, 0.04264499]), (-1.0, [0.176266, 1.0, 1.22453, 0.646253])]
)
def test_kernel(sign, expected):
    got = VariationalWeight().kernel(double([-1.0, 0.0, 0.5, 1.0]), double([sign] * 4))
    torch.testing.assert_close(got, double(expected), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("sign", "peak"), [(1.0, 2 / 3), (-1.0, 3 / 2), (0.0, 2 / 3)])
def test_it_peaks_at_k_over_lambda(sign, peak):
    near = double([math.log(peak) + x for x in (-1e-3, 0.0, 1e-3)])
    low, top, high = VariationalWeight().kernel(near, double([sign] * 3)).tolist()
    assert top > low
    assert top > high


def test_fx_a():
    lp, a, _ = fx_a()
    got = VariationalWeight()(lp, a)
    expected = double([1.17774] * 4 + [0.777891] * 3)
    torch.testing.assert_close(got.weight, expected, rtol=0, atol=1e-6)
    assert not got.limited.any()


@pytest.mark.parametrize("drift", [5.0, -50.0, 998.0, -1e4])
def test_both_tails_vanish_and_say_so(drift):
    first = double([-999.0])
    lp = LogProbs.pack(first, first + drift, first, segments=Segments.from_lengths([1]))
    got = VariationalWeight()(lp, double([1.0]))
    assert got.weight.item() < 1e-3
    assert got.limited.all()


def test_what_it_needs():
    with pytest.raises(MethodError, match="sign of the advantage"):
        VariationalWeight()(fx_a()[0])
    with pytest.raises(MethodError, match="lam_negative=0"):
        VariationalWeight(lam_negative=0.0)


def test_anchored_in_the_rollout_policy_nothing_is_truncated():
    old, rollout = double([-1.0, -3.0]), double([-3.0, -1.0])  # log rho = 2, -2
    lp = LogProbs.pack(rollout, old, segments=Segments.from_lengths([2]))
    plain = VariationalWeight(anchor="rollout")(lp, double([1.0, 1.0])).weight  # +2 - 2 = 0
    torch.testing.assert_close(plain, double([1.0, 1.0]))
