"""CTPO and MinPRO: values of the methods table, oracles in plain loops, and the laws."""

import math

import pytest

from offdrift.logprobs import LogProbs
from offdrift.objectives.prefix import PrefixClipped
from offdrift.segments import Segments
from tests.objectives.checks import check_golden
from tests.oracles.fixtures import double, fx_a

PAPER = PrefixClipped(dual_clip=None, gradient="unit")


def test_ctpo_values_of_the_methods_table():
    """The first ratio lies exactly on its bound, e^0.05. The table has 3/4 of its gradient there,
    an artifact of how `torch.max` and `clamp` split ties; here a token on its bound is unclipped:
    the gradients are -e^0.05 / 7 for -0.112636, and -e^0.05 / 8 for -0.09855667."""
    lp, a, _ = fx_a()
    on_bound = -math.exp(0.05)
    tokens = [[-1.051271, -1.073271, -1.090463, -1.105171], [0.487655, 0.525636, 0.536254, 0]]
    check_golden(
        PrefixClipped(), (lp, a), "token_mean", loss=-0.395804, tokens=tokens,
        grad=[[on_bound / 7, 0, 0, 0], [0, 0.07509079, 0.07660773, 0]],
    )  # fmt: skip
    assert on_bound / 7 * 3 / 4 == pytest.approx(-0.112636, abs=1e-6)
    assert on_bound / 8 * 3 / 4 == pytest.approx(-0.09855667, abs=1e-8)
    check_golden(
        PAPER, (lp, a), "seq_mean_token_mean", loss=-0.281765, tokens=tokens,
        grad=[[on_bound / 8, 0, 0, 0], [0.176982, 0.176982, 0.08937568, 0]],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("gradient", "l", "v", "flows"),
    [
        ("token", [6.0, 3.0], math.exp(9), [0, 1]),
        ("unit", [6.0, 3.0], math.exp(9), [1, 1]),
        # the sum passes 10: limited, no gradient
        ("token", [6.0, 6.0], math.exp(10), [0, 0]),
        ("unit", [6.0, 6.0], math.exp(10), [0, 0]),
        # one token beyond 20 is limited before the sum: 20 - 15 = 5
        ("unit", [90.0, -15.0], math.exp(5), [0, 1]),
        ("token", [90.0, -15.0], math.exp(5), [0, 1]),
    ],
)
def test_limits_of_the_prefix(gradient, l, v, flows):  # noqa: E741
    old = double([-100.0, -100.0])
    leaf = (old + double(l)).requires_grad_()
    lp = LogProbs.pack(old, leaf, old, segments=Segments.from_lengths([2]))
    objective = PrefixClipped(dual_clip=None, gradient=gradient)
    loss = objective(lp, double([-1.0, -1.0])).loss[1]
    loss.backward()
    assert loss.item() == pytest.approx(v, rel=1e-12)
    assert leaf.grad.tolist() == pytest.approx([v * f for f in flows], rel=1e-12)
