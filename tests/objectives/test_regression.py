"""DRO and OAPL: numbers of the methods table, closed forms, and any split of a step."""

import math

import pytest
import torch

from offdrift.batch_info import BatchInfo
from offdrift.logprobs import LogProbs
from offdrift.objectives.base import StepPrompts
from offdrift.objectives.regression import Quadratic, Regression, soft_value
from offdrift.segments import Segments
from tests.objectives.checks import batch, loss_and_grad, piece
from tests.oracles.fixtures import double

# -- DRO -------------------------------------------------------------------------------------------


def test_quadratic_is_not_clamped():
    lp = LogProbs.pack(
        double([-1.0]), double([-1001.0]).requires_grad_(), double([-1.0]), segments=Segments.from_lengths([1])
    )
    _, grad = loss_and_grad(Quadratic(beta=0.1), lp, double([0.0]))
    assert grad.item() == pytest.approx(-100.0, rel=1e-12)


# -- OAPL ------------------------------------------------------------------------------------------

REWARDS = double([1.0, 0.0, 0.0, 1.0])
S = [2.0, -1.0, 0.5, 0.0]  # log-ratio of each sequence


def four(lengths: list[int]) -> LogProbs:
    """Four answers to one prompt whose log-ratios sum to S, however many tokens they have."""
    ids = torch.tensor([5, 5, 5, 5])
    segments = Segments.from_lengths(lengths, group_ids=ids)
    per_token = segments.spread(double(S) / segments.lengths)
    logp_rollout = torch.full_like(per_token, -3.0)
    return LogProbs.pack(logp_rollout, (logp_rollout + per_token).requires_grad_(), segments=segments)


@pytest.mark.parametrize(("beta", "value"), [(0.1, 0.93069), (0.5, 0.71689), (1.0, 0.620115), (100.0, 0.50125)])
def test_values_of_the_methods_table(beta, value):
    ids = torch.tensor([5, 5, 5, 5])
    got = soft_value(REWARDS, StepPrompts.of(ids, ids), beta=beta)[0].item()  # oapl.V.*
    assert got == pytest.approx(value, abs=1e-6)
    assert got == pytest.approx(beta * math.log((math.exp(1 / beta) + 1) / 2), rel=1e-12)


def test_values_stay_finite_where_the_exponential_does_not():
    ids = torch.tensor([1, 2, 1, 2])
    got = soft_value(double([1e4, -1e4, 0.0, -2e4]), StepPrompts.of(ids, ids), beta=1e-3)
    # all weight on the best: max + beta ln(1/2)
    assert got[:2].tolist() == pytest.approx([1e4 - 1e-3 * math.log(2), -1e4 - 1e-3 * math.log(2)])
    assert got.isfinite().sum() == 4


@pytest.mark.parametrize("lengths", [[1, 1, 1, 1], [3, 1, 2, 4]])
@pytest.mark.parametrize(("beta", "expected"), [(1e-3, 0.263894), (1.0, 1.042013)])
def test_loss_of_the_methods_table(lengths, beta, expected):
    lp, batch_info = four(lengths), BatchInfo(rewards=REWARDS)
    loss, grad = loss_and_grad(  # oapl.loss.*
        Regression(beta=beta), lp, torch.zeros(sum(lengths)), batch_info, how="seq_mean_token_mean"
    )
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    # by hand: 2 beta (beta s - (R - V)) / 4 on every token of the sequence
    value = math.log((math.e + 1) / 2)
    by_hand = [2 * beta * (beta * s - (r - value)) / 4 for s, r in zip(S, REWARDS.tolist())]
    torch.testing.assert_close(grad, lp.segments.spread(double(by_hand)), rtol=1e-9, atol=1e-15)
    if beta == 1:  # oapl.grad.1
        table = double([0.810057, -0.189943, 0.560057, -0.189943])
        torch.testing.assert_close(grad, lp.segments.spread(table), rtol=0, atol=1e-6)


def test_targets_of_the_methods_table():
    lp, batch_info = four([1, 2, 1, 1]), BatchInfo(rewards=REWARDS)
    expected = double([0.379885, -0.620115, -0.620115, 0.379885])  # oapl.A
    torch.testing.assert_close(Regression().targets(lp, batch_info), expected, rtol=0, atol=1e-6)


def test_geometric_takes_the_mean_log_ratio():
    lp, batch_info = four([3, 1, 2, 4]), BatchInfo(rewards=REWARDS)
    loss, _ = loss_and_grad(
        Regression(beta=1.0, unit="geometric"), lp, torch.zeros(10), batch_info, how="seq_mean_token_mean"
    )
    value = math.log((math.e + 1) / 2)
    means = [s / n for s, n in zip(S, [3, 1, 2, 4])]
    squares = [(s - (r - value)) ** 2 for s, r in zip(means, REWARDS.tolist())]
    assert loss.item() == pytest.approx(sum(squares) / 4, rel=1e-12)


def test_a_lone_answer_is_pulled_to_the_rollout_policy():
    lp, _ = piece(batch(0)[0], [2])
    batch_info = BatchInfo(rewards=double([0.7]))
    assert Regression().targets(lp, batch_info).item() == pytest.approx(0.0, abs=1e-15)
    _, grad = loss_and_grad(Regression(beta=1.0), lp, lp.logp_rollout, batch_info)
    total = (lp.current - lp.logp_rollout).sum().item()
    assert grad.tolist() == pytest.approx([2 * total] * len(grad), rel=1e-9)
    assert len(grad) > 0


def test_advantages_are_not_read():
    lp, advantages, rewards = batch(1)
    batch_info = BatchInfo(rewards=rewards)
    first = loss_and_grad(Regression(), lp, advantages, batch_info)
    second = loss_and_grad(Regression(), lp, advantages * float("nan"), batch_info)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
