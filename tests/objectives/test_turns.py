"""ST-PPO and turn-level PPO: values of the methods table, any split of a step, and the laws."""

from dataclasses import replace

import pytest
import torch

from offdrift.batch_info import BatchInfo
from offdrift.logprobs import LogProbs
from offdrift.objectives.clipped import Clipped
from offdrift.objectives.turns import TurnNormalized
from offdrift.segments import Segments
from tests.objectives.checks import check_golden, fx_a_with_turns, packed
from tests.oracles.fixtures import double

MEAN = "seq_mean_token_mean"
TOKENS = TurnNormalized(unit="token", eps_low=0.1, eps_high=0.1)


def test_turn_ppo_values_of_the_methods_table():
    expected = {
        "loss": -0.271975,
        "tokens": [[-1.191246, -1.191246, -0.927743, -0.927743], [0.430354, 0.558139, 0.558139, 0]],
        "grad": [[-0.148906, -0.148906, -0.115968, -0.115968], [0.07172566, 0.09302317, 0.09302317, 0]],
    }
    check_golden(Clipped(unit="turn"), fx_a_with_turns(), MEAN, **expected)
    # |C| <= 1 here: ST-PPO is turn-level PPO
    check_golden(TurnNormalized(), fx_a_with_turns(), MEAN, **expected)


def test_st_ppo_values_of_the_methods_table():
    lp, a = fx_a_with_turns()
    got = TOKENS(lp, a)
    assert got.clipped.tolist() == [False, True, False, True, True, False, False]
    seen = TOKENS.observe(lp, a, BatchInfo())
    assert seen["sequences"].item() == 2
    assert (seen["log_squares"] / 2).exp().item() / 2 == pytest.approx(0.229564, abs=1e-6)
    vector = packed([[0, 0.168732, 0, 0.138146], [-0.07172566, 0, 0]], lp)
    assert seen["log_squares"].exp().item() / 4 == pytest.approx(vector.square().sum().item(), abs=1e-6)
    plain = Clipped(eps_low=0.1, eps_high=0.1)(lp, a)
    torch.testing.assert_close(got.loss, plain.loss, rtol=0, atol=0)  # scale 1


def test_renorm_divides_by_the_mean_clipped_ratio_of_the_turn():
    """Turns (1.54, 1) and (1.54 with A < 0, 1) and (1.1, 1): the clip acts in the first alone, where
    (1.2 + 1) / 2 = 1.1; 1.54 / 1.1 = 1.4 is still clipped at 1.2, and 1 becomes 1 / 1.1."""
    r, a = double([1.54, 1.0, 1.54, 1.0, 1.1, 1.0]), double([1.0, 1.0, -1.0, -1.0, 1.0, 1.0])
    old = double([-2.0] * 6)
    leaf = (old + r.log()).requires_grad_()
    segments = Segments.from_lengths([4, 2], turns=Segments.from_lengths([2, 2, 2]))
    lp = LogProbs.pack(old, leaf, old, segments=segments)
    got = TurnNormalized(unit="token", mode="renorm")(lp, a)
    expected = double([-1.2, -1 / 1.1, 1.54, 1.0, -1.1, -1.0])
    torch.testing.assert_close(got.loss, expected, rtol=1e-12, atol=0)
    got.loss.sum().backward()
    torch.testing.assert_close(leaf.grad, expected.where(expected != -1.2, 0.0), rtol=1e-12, atol=0)
    assert got.clipped.tolist() == [True, False, False, False, False, False]
    assert TurnNormalized(unit="token", mode="renorm").observe(lp, a, BatchInfo()) == {}


def test_an_empty_sequence_counts_as_one_sequence():
    lp, a = fx_a_with_turns()
    wider = replace(lp, segments=Segments.from_lengths([4, 0, 3, 0]))
    seen = TOKENS.observe(wider, a, BatchInfo())
    assert seen["sequences"].item() == 4
    torch.testing.assert_close(seen["log_squares"], TOKENS.observe(lp, a, BatchInfo())["log_squares"])
