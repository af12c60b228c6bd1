"""Weights on FX-A and by kernel: values of the methods table, caps and floors with exact numbers, no gradient."""

import math
from dataclasses import replace

import pytest
import torch

from offdrift.correction import VariationalWeight, Weight
from offdrift.errors import MethodError
from offdrift.logprobs import LogProbs
from offdrift.segments import Segments
from tests.oracles.fixtures import double, fx_a

RHO = [1.105171, 0.951229, 1.491825, 0.40657, 1.020201, 1.0, 0.740818]


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({"unit": "token", "cap": 1.2}, [1.105171, 0.951229, 1.2, 0.40657, 1.020201, 1, 0.740818]),
        ({"unit": "token", "cap": 2.0}, RHO),
        ({"unit": "sequence", "cap": 2.0}, [0.637628] * 4 + [0.755784] * 3),
        ({"unit": "sequence", "cap": 0.7}, [0.637628] * 4 + [0.7] * 3),
        ({"unit": "geometric"}, [0.893597] * 4 + [0.91089] * 3),
        ({"unit": "sequence", "cap": 0.7, "outside": "mask"}, [0.637628] * 4 + [0] * 3),
        ({"unit": "token", "floor": 0.5, "cap": 5.0, "outside": "mask"}, [*RHO[:3], 0, *RHO[4:]]),
        ({"unit": "token", "floor": 0.8, "cap": 1.2}, [1.105171, 0.951229, 1.2, 0.8, 1.020201, 1, 0.8]),
    ],
)  # fmt: skip
def test_weights_of_the_methods_table(parts, expected):
    lp, _, _ = fx_a()
    got = Weight(on="mismatch", **parts)(lp)
    torch.testing.assert_close(got.weight, double(expected), rtol=0, atol=1e-6)
    assert not got.weight.requires_grad


TURNS = Segments.from_lengths([2, 2, 1, 2])
PREFIX = [1.161834, 1.491825, 1.733253, 0.778801, 0.878095, 1.072508, 0.810584]
LOW, HIGH = [0.97531, 0.965262, 0.957623, 0.951229], [1.051271, 1.073271, 1.090463, 1.105171]


@pytest.mark.parametrize(
    ("on", "parts", "expected"),
    [
        ("full", {"unit": "prefix"}, PREFIX),
        ("full", {"unit": "prefix_min"}, [1.161834, 1.491825, 1.349859, 0.522046, 0.878095, 1.072508, 0.66365]),
        ("mismatch", {"unit": "turn"}, [1.025315, 1.025315, 0.778801, 0.778801, 1.020201, 0.860708, 0.860708]),
        ("staleness", {"unit": "turn"}, [1.191246, 1.191246, 0.927743, 0.927743, 0.860708, 1.116278, 1.116278]),
        ("staleness", {"unit": "turn_arithmetic"}, [1.200565, 1.200565, 0.941986, 0.941986, 0.860708, 1.120802, 1.120802]),
        ("staleness", {"unit": "turn_product"}, [1.419068, 1.419068, 0.860708, 0.860708, 0.860708, 1.246077, 1.246077]),
        ("mismatch", {"unit": "worst"}, [0.40657] * 4 + [0.740818] * 3),
        ("mismatch", {"cap": 2.0, "normalize": True}, [1.151937, 0.991482, 1.554953, 0.423774, 1.063372, 1.042316, 0.772167]),
        ("mismatch", {"unit": "sequence", "cap": 2.0, "normalize": True}, [0.915204] * 4 + [1.084796] * 3),
        # cumulative ratio clipped to its widening band: both sides by hand from LOW and HIGH
        ("full", {"unit": "prefix", "floor": 0.97531, "cap": 1.051271, "growth": 0.5}, [*HIGH[:3], LOW[3], LOW[0], 1.072508, LOW[2]]),
    ],
)  # fmt: skip
def test_units_and_normalization_of_the_methods_table(on, parts, expected):
    lp, _, _ = fx_a()
    lp = replace(lp, segments=Segments(lp.segments.cu_seqlens, turns=TURNS))
    got = Weight(on=on, **parts)(lp).weight
    torch.testing.assert_close(got, double(expected), rtol=0, atol=2e-6)


def test_weights_that_are_all_zero_are_normalized_to_zero():
    lp = LogProbs.pack(double([-1.0]), double([-3.0]), segments=Segments.from_lengths([1]))
    got = Weight(on="full", floor=0.9, cap=1.1, outside="mask", normalize=True)(lp).weight
    assert got.tolist() == [0.0]


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"cap": 0.0}, "positive"),
        ({"cap": 1.0, "floor": 2.0}, "floor"),
        ({"saturation": 0.0}, "saturation"),
        ({"growth": 0.5, "cap": 0.9}, "widens limits around 1"),
        ({"unit": "group"}, "not one of"),
    ],
)
def test_limits_that_cannot_mean_anything_are_refused(parts, words):
    with pytest.raises((MethodError, Exception), match=f"{words}|[Tt]ype-check"):
        Weight(on="full", **parts)


def test_a_weight_that_depends_on_the_advantage_needs_one():
    with pytest.raises(MethodError, match="needs advantages"):
        Weight(on="full", advantage="positive")(fx_a()[0])


def test_saturation():
    q = double([0.2, 1.0, 4.0])
    lp = LogProbs.pack(double([-5.0] * 3), q.log() - 5.0, segments=Segments.from_lengths([3]))
    got = Weight(on="full", saturation=0.1)(lp).weight
    torch.testing.assert_close(got, double([0.666667, 0.909091, 0.97561]), rtol=0, atol=1e-6)


def test_untruncated_sequence_weights_are_unbiased_on_two_binary_tokens():
    """FX-T: E_mu[prod w f] = E_pi[f] = 2.4, chi2 = 0.09126984, by enumeration of four sequences."""
    mu, pi = [(0.4, 0.6), (0.7, 0.3)], [(0.5, 0.5), (0.6, 0.4)]
    rows = [(a, b) for a in (0, 1) for b in (0, 1)]
    first = double([[mu[0][a], mu[1][b]] for a, b in rows]).log()
    second = double([[pi[0][a], pi[1][b]] for a, b in rows]).log()
    lp = LogProbs.pack(first, second, mask=torch.ones(4, 2))
    weight = Weight(on="full", unit="sequence")(lp).weight.reshape(4, 2)[:, 0]
    law = first.sum(1).exp()
    f = double([2 * a + 3 * b + a * b for a, b in rows])
    assert (law * weight * f).sum().item() == pytest.approx(2.4, rel=1e-12)
    assert (law * weight**2).sum().item() - 1 == pytest.approx(0.09126984, abs=1e-8)


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
