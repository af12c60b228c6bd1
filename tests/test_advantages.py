"""Advantages on FX-G against the methods table, and bad rewards refused by name."""

import pytest
import torch

from offdrift.advantages import ADVANTAGES, advantages
from offdrift.errors import BadValueError, ShapeError
from offdrift.segments import Segments
from tests.oracles.fixtures import FX_G_REWARDS, FX_G_SEGMENTS, double

EXPECTED = {
    "group_mean": [0.5, -0.5, 0.0, 1.0],
    "group_mean_std": [0.999998, -0.999998, 0.0, 0.999999],
    "leave_one_out": [0.75, -0.75, 0.0, 1.0],
}


@pytest.mark.parametrize("how", EXPECTED)
def test_estimator_on_fx_g_spread_to_tokens(how):
    got = advantages(double(FX_G_REWARDS), FX_G_SEGMENTS, how=how)
    expected = [v for v, n in zip(EXPECTED[how], [3, 2, 4, 2]) for _ in range(n)]
    torch.testing.assert_close(got, double(expected), rtol=0, atol=1e-6)


def test_leave_one_out_is_the_reward_minus_the_mean_of_the_others():
    rewards = double([0.3, 1.0, 0.0, 0.7])
    s = Segments.from_lengths([1, 1, 1, 1], group_ids=torch.zeros(4).long())
    others = [(rewards.sum() - r) / 3 for r in rewards]
    expected = rewards - torch.stack(others)
    torch.testing.assert_close(ADVANTAGES["leave_one_out"](rewards, s), expected)


@pytest.mark.parametrize("how", EXPECTED)
def test_equal_rewards_teach_nothing(how):
    s = Segments.from_lengths([2, 2, 1], group_ids=torch.zeros(3).long())
    assert advantages(double([0.7, 0.7, 0.7]), s, how=how).abs().max() < 1e-6


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_names_its_sequence(bad):
    with pytest.raises(BadValueError, match="reward of sequence 2"):
        advantages(double([0.0, 1.0, bad]), Segments.from_lengths([1, 1, 1]))


def test_one_reward_per_sequence():
    with pytest.raises(ShapeError, match="2 rewards for 3 sequences"):
        advantages(double([0.0, 1.0]), Segments.from_lengths([1, 1, 1]))


@pytest.mark.parametrize("how", EXPECTED)
@pytest.mark.parametrize(("reward", "size"), [(10.1, 6), (100.3, 8), (0.1, 3)])
def test_rounding_of_equal_float32_rewards_is_not_an_advantage(how, reward, size):
    s = Segments.from_lengths([1] * size, group_ids=torch.zeros(size).long())
    assert (advantages(torch.full((size,), reward), s, how=how) == 0).all()
