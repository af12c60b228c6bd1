"""Every estimator on the hand-sized batch FX-G, against the methods table's numbers."""

import pytest
import torch
from torch import Tensor

from offdrift.advantages import ADVANTAGES, advantages, generalized_advantage, returns_to_go
from offdrift.segments import Segments
from tests.oracles.fixtures import FX_G_REWARDS, FX_G_SEGMENTS, double

LENGTHS = [3, 2, 4, 2]
GROUPS = torch.tensor([5, 5, 5, 9])
VALUES = [[0.5, 0.6, 0.7], [0.4, 0.3], [0.2, 0.3, 0.4, 0.5], [0.8, 0.9]]
LOGP_OLD = [[-0.1, -0.5, -1.0], [-0.3, -0.7], [-0.2, -0.4, -0.9, -1.2], [-0.6, -0.1]]
SUM_PI_SQUARED = [[0.85, 0.5, 0.3], [0.6, 0.4], [0.7, 0.5, 0.35, 0.3], [0.45, 0.85]]
WEIGHT = [[1.0, 0.5, 2.0], [1.2, 0.8], [0.9, 1.1, 1.0, 0.7], [1.0, 1.0]]
COMPONENTS = [[1.0, 1.0], [0.0, 1.0], [0.0, 0.0], [1.0, 1.0]]


def flat(rows: list) -> Tensor:
    return double([x for row in rows for x in row])


def spread(per_sequence: list) -> Tensor:
    return flat([[x] * n for x, n in zip(per_sequence, LENGTHS)])


SCORES = {"logp_old": flat(LOGP_OLD), "sum_pi_squared": flat(SUM_PI_SQUARED)}

# how -> inputs beside the rewards, expected per token
GOLDEN = {
    "grpo": ({}, spread([0.999998, -0.999998, 0.0, 0.999999])),
    "grpo_vectorized": ({}, spread([0.999998, -0.999998, 0.0, 0.999999])),
    "dr_grpo": ({}, spread([0.5, -0.5, 0.0, 1.0])),
    "batch_mean": ({}, spread([0.375, -0.625, -0.125, 0.375])),
    "rloo": ({}, spread([0.75, -0.75, 0.0, 1.0])),
    "rloo_vectorized": ({}, spread([0.75, -0.75, 0.0, 0.0])),
    "opo": ({}, spread([0.444444, -0.555556, -0.05555556, 1.0])),
    "gpg": ({}, spread([0.666667, -0.666667, 0.0, 1.333333])),
    "reinforce_plus_plus_baseline": ({}, spread([0.52664, -1.404374, -0.438867, 1.492147])),
    "gdpo": (
        {"components": double(COMPONENTS), "component_weights": double([1.0, 0.5])},
        spread([0.992821, -0.383557, -1.071746, 1.037818]),
    ),
    "reinforce_plus_plus": ({}, spread([0.924995, -1.61874, -0.346873, 0.924995])),
    "remax": ({"greedy_rewards": double([0.2, 0.2, 0.2, 0.6])}, spread([0.8, -0.2, 0.3, 0.4])),
    "gae": (
        {"values": flat(VALUES), "lam": 0.95},
        flat(
            [
                [1.292863, 0.989238, 0.669633],
                [-1.906009, -1.586404],
                [0.614172, 0.274826, -0.08237952, -0.458386],
                [0.274826, -0.08237952],
            ]
        ),
    ),
    "optimal_token_baseline": (
        SCORES,
        flat(
            [[0.676376, 0.592115, 0.22989], [-0.323624, -0.407885], [0.176376, 0.09211531, -0.27011, 0.5], [1.0, 1.0]]
        ),
    ),
}
GOLDEN["tir_optimal_token_baseline"] = GOLDEN["optimal_token_baseline"]  # equal if all is trained
OTB_WEIGHTED = flat(
    [[0.748864, 0.702678, 0.123889], [-0.251136, -0.297322], [0.248864, 0.202678, -0.376111, 0.5], [1.0, 1.0]]
)
OTB = ("optimal_token_baseline", "tir_optimal_token_baseline")


def check(got: Tensor, expected: Tensor) -> None:
    assert len(got) > 0
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)


def on_fx_g(how: str, **inputs) -> Tensor:
    return advantages(double(FX_G_REWARDS), FX_G_SEGMENTS, how=how, **inputs)


@pytest.mark.parametrize("how", GOLDEN)
def test_estimator_on_fx_g(how):
    inputs, expected = GOLDEN[how]
    check(on_fx_g(how, **inputs), expected)


def test_every_estimator_has_a_golden_here():
    assert set(GOLDEN) | {"grpo_passk", "opob", "rl_zvp"} == set(ADVANTAGES)


def test_groups_without_a_spread_are_pushed_by_entropy():
    """arXiv:2509.21880, eq. 5, by hand: all right, all wrong, mixed, and a sequence alone; alpha 0.1, entropies in nats."""
    segments = Segments.from_lengths([2, 1, 3, 1, 1, 1, 1], group_ids=torch.tensor([4, 4, 9, 9, 6, 6, 2]))
    rewards = double([1.0, 1.0, 0.25, 0.25, 1.0, 0.0, 1.0])
    entropy = double([0.5, 2.0, 1.5, 0.2, 1.2, 0.7, 0.4, 9.0, 9.0, 9.0])
    standardized = 0.5 / (0.5**0.5 + 1e-6)
    expected = [0.05, 0.2, 0.15, -0.1, 0.0, -0.05, 0.0, standardized, -standardized, 1 / (1 + 1e-6)]
    got = advantages(rewards, segments, how="rl_zvp", entropy=entropy)
    torch.testing.assert_close(got, double(expected), rtol=0, atol=1e-12)
    # Of the kept alone: the third group's wrong answer is rejected, and what is left of it is one sequence.
    keep = torch.tensor([1, 1, 1, 1, 1, 0, 1]).bool()
    kept = advantages(rewards, segments, how="rl_zvp", entropy=entropy, keep=keep, baseline_over="kept")
    torch.testing.assert_close(kept[7], double(1 / (1 + 1e-6)), rtol=0, atol=1e-12)
    # From another reward on, a quarter of the answer is right.
    partly = advantages(rewards, segments, how="rl_zvp", entropy=entropy, right_from=0.25, zvp_alpha=1.0)
    torch.testing.assert_close(partly[3:7], double([0.2, 1.2, 0.7, 0.4]), rtol=0, atol=1e-12)


def test_best_of_a_group_leads_by_half_its_reward_range():
    segments = Segments.from_lengths(LENGTHS[:3], group_ids=GROUPS[:3])
    rewards = double(FX_G_REWARDS[:3])
    check(advantages(rewards, segments, how="grpo_passk"), double([0.999998] * 3 + [0.0] * 6))


def test_best_of_several_groups_in_any_order():
    rewards = double([0.2, 3.0, 1.0, 1.0, 0.5])
    segments = Segments.from_lengths([1] * 5, group_ids=torch.tensor([1, 2, 1, 2, 1]))
    # leads of 2 and 0.5 over deviations of sqrt(2) and of 0.2, 1.0 and 0.5
    check(advantages(rewards, segments, how="grpo_passk"), double([0.0, 1.414213, 1.237176, 0.0, 0.0]))


@pytest.mark.parametrize("how", OTB)
def test_mismatch_weights_enter_the_token_baseline_squared(how):
    check(on_fx_g(how, **SCORES, weight=flat(WEIGHT)), OTB_WEIGHTED)


def with_a_masked_token(how: str) -> Tensor:
    """FX-G with the third sequence's second column masked: its tokens stand at 0, 2, 3."""
    dropped = 3 + 2 + 1
    keep = torch.arange(11) != dropped
    segments = Segments.from_lengths([3, 2, 3, 2], group_ids=GROUPS)
    position = torch.tensor([0, 1, 2, 0, 1, 0, 2, 3, 0, 1])
    inputs = {name: x[keep] for name, x in SCORES.items()}
    return advantages(double(FX_G_REWARDS), segments, how=how, position=position, **inputs)


def test_token_baseline_per_column_with_a_masked_token():
    expected = [[0.676376, 0.616093, 0.201019], [-0.323624, -0.383907], [0.176376, -0.298981, 3.855018e-09], [1.0, 1.0]]
    got = with_a_masked_token("optimal_token_baseline")
    check(got, flat(expected))
    assert got[7].item() == pytest.approx(3.855018e-09, abs=1e-14)


def test_token_baseline_per_trainable_token_with_a_masked_token():
    expected = [[0.676376, 0.568164, 0.296322], [-0.323624, -0.431836], [0.176376, 0.068164, -0.203678], [1.0, 1.0]]
    check(with_a_masked_token("tir_optimal_token_baseline"), flat(expected))


def test_opob_on_three_weighted_sequences():
    segments = Segments.from_lengths([1, 1, 1], group_ids=torch.zeros(3).long())
    got = advantages(
        double([1.0, 0.0, 0.5]),
        segments,
        how="opob",
        weight=double([1.0, 2.0, 0.5]),
        grad_norm_squared=double([4.0, 1.0, 9.0]),
    )
    check(got, double([0.5, -0.5, 4.878049e-10]))
    assert got[2].item() == pytest.approx(4.878049e-10, abs=1e-15)


def test_opob_without_norms_takes_the_sum_of_the_score_norms():
    total = [0.891505, 0.525193, 1.456371]  # the last E of each sequence of group a
    b = (1.0 * total[0] + 0.5 * total[2]) / sum(total)
    got = on_fx_g("opob", **SCORES)
    check(got, spread([1.0 - b, -b, 0.5 - b, 0.0]))


def test_gae_before_whitening():
    rewards = flat([[0, 0, 1.0], [0, 0], [0, 0, 0, 0.5], [0, 1.0]])
    raw = generalized_advantage(rewards, flat(VALUES), FX_G_SEGMENTS, lam=0.95)
    expected = [[0.46575, 0.385, 0.3], [-0.385, -0.3], [0.28525, 0.195, 0.1, 0.0], [0.195, 0.1]]
    check(raw, flat(expected))


def test_returns_of_reinforce_plus_plus():
    rewards = flat([[0, 0, 1.0], [0, 0], [0, 0, 0, 0.5], [0, 1.0]])
    check(returns_to_go(rewards, FX_G_SEGMENTS), spread([1.0, 0.0, 0.5, 1.0]))
