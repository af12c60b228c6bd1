"""Weights on FX-A: values of the methods table, caps and floors with exact numbers, no gradient."""

from dataclasses import replace

import pytest
import torch

from offdrift.correction import Weight
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
