"""Weights on FX-A: values of the methods table, caps and floors with exact numbers, no gradient."""

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


def test_limited_counts_what_the_limits_changed_and_nothing_on_the_limit():
    l = torch.log(torch.tensor([0.25, 0.5, 1.0, 2.0, 4.0], dtype=torch.float64))  # noqa: E741
    lp = LogProbs.pack(l.clamp(max=0) * 0 - 5.0, l - 5.0, segments=Segments.from_lengths([5]))
    got = Weight(on="full", floor=0.5 - 1e-12, cap=2.0 + 1e-12)(lp)
    assert got.limited.tolist() == [True, False, False, False, True]
    torch.testing.assert_close(got.weight, double([0.5, 0.5, 1, 2, 2]), rtol=1e-9, atol=0)


def test_a_log_ratio_of_ten_thousand_has_a_finite_weight():
    lp = LogProbs.pack(torch.tensor([-1e4, -1.0]), torch.tensor([-1.0, -1e4]), segments=Segments.from_lengths([1, 1]))  # fmt: skip
    assert Weight(on="full")(lp).weight.tolist() == pytest.approx(
        [4.851652e8, 2.061154e-9], rel=1e-5
    )


@pytest.mark.parametrize(("parts", "words"), [({"cap": 0.0}, "positive"), ({"cap": 1.0, "floor": 2.0}, "floor")])  # fmt: skip
def test_limits_that_cannot_mean_anything_are_refused(parts, words):
    with pytest.raises(MethodError, match=words):
        Weight(on="full", **parts)
