"""Online DPO: numbers by hand, the naive formula by autograd, ties, and what a pair is."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from offdrift.batch_info import BatchInfo
from offdrift.errors import EvidenceError
from offdrift.logprobs import LogProbs
from offdrift.loss import policy_loss
from offdrift.methods import METHODS
from offdrift.segments import Segments
from offdrift.stats import summarize
from tests.oracles.fixtures import double

ROW = METHODS["online_dpo"]
LENGTHS, GROUPS = [2, 1, 3, 2, 2], torch.tensor([7, 7, 7, 4, 4])
# Sums of log pi - log ref: 0.4, 9, -0.2 | 1, 2.
ABOVE_REFERENCE = double([0.1, 0.3, 9.0, 0.0, -0.1, -0.1, 0.5, 0.5, 1.0, 1.0])


def batch(rewards: list[float], above=ABOVE_REFERENCE, **fields):
    leaf = (above - 10).requires_grad_()
    segments = Segments.from_lengths(LENGTHS, group_ids=GROUPS)
    lp = LogProbs.pack(leaf.detach(), leaf, logp_ref=torch.full_like(above, -10), segments=segments)
    lp = replace(lp, **fields)
    result = policy_loss(lp, ROW, torch.ones_like(above), BatchInfo(rewards=double(rewards)))
    (gradient,) = torch.autograd.grad(result.loss, leaf)
    return result, gradient


def test_the_best_and_the_worst_of_each_prompt_by_hand():
    """-log sigmoid(0.1 (0.4 + 0.2)) = 0.663597 for three answers, -log sigmoid(0.1 (2 - 1)) = 0.644397 for two."""
    result, gradient = batch([1.0, 0.5, 0.0, 0.0, 1.0])
    assert result.loss.item() == pytest.approx((3 * 0.663597 + 2 * 0.644397) / 5, abs=1e-6)
    first, second = 0.1 / (1 + math.exp(0.06)), 0.1 / (1 + math.exp(0.1))
    # Per token: the mean over a sequence of k tokens has each k-th of it; then k tokens move the sum.
    expected = [-3 * first] * 2 + [0] + [3 * first] * 3 + [2 * second] * 2 + [-2 * second] * 2
    torch.testing.assert_close(gradient, double(expected) / 5, rtol=1e-9, atol=1e-12)
    numbers = summarize(result.stats)
    assert (numbers["preference/pair_frac"], numbers["preference/accuracy"]) == pytest.approx((1, 1))
    assert numbers["preference/margin"] == pytest.approx((0.06 + 0.1) / 2)


def test_a_prompt_whose_answers_earn_alike_has_no_pair():
    result, gradient = batch([1.0, 1.0, 1.0, 1.0, 0.0])
    assert (gradient[:6] == 0).all()
    assert (gradient[6:] != 0).all()
    numbers = summarize(result.stats)
    assert numbers["preference/pair_frac"] == pytest.approx(0.5)
    assert numbers["preference/accuracy"] == 0  # sums 1 and 2, and the first earns more
    assert numbers["preference/margin"] == pytest.approx(-0.1)
    nothing, gradient = batch([1.0] * 5)
    assert nothing.loss == 0
    assert (gradient == 0).all()


def test_an_answer_without_a_token_to_train_is_not_chosen():
    """The best of three has none: the second best takes its place."""
    leaf = double([-9.7, -10.1]).requires_grad_()
    segments = Segments.from_lengths([0, 1, 1], group_ids=torch.tensor([3, 3, 3]))
    lp = LogProbs.pack(leaf.detach(), leaf, logp_ref=double([-10.0, -10.0]), segments=segments)
    result = policy_loss(lp, ROW, torch.ones(2), BatchInfo(rewards=double([1.0, 0.5, 0.0])))
    assert result.loss.item() == pytest.approx(2 / 3 * math.log(1 + math.exp(-0.04)))
    assert summarize(result.stats)["preference/pair_frac"] == pytest.approx(1)


def naive(above, rewards: list[float]):
    """Mean over sequences of the loss of their prompt; of several best or worst, the mean over all pairs."""
    sums, total = [x.sum() for x in above.split(LENGTHS)], 0.0
    for group in (7, 4):
        members = [i for i in range(5) if GROUPS[i] == group]
        most, least = max(rewards[i] for i in members), min(rewards[i] for i in members)
        pairs = [(i, j) for i, j in itertools.product(members, members) if rewards[i] == most > least == rewards[j]]
        losses = [-(0.1 * (sums[i] - sums[j])).sigmoid().log() for i, j in pairs]
        total = total + len(members) * sum(losses) / max(1, len(pairs))
    return total / 5


@pytest.mark.parametrize(
    "rewards", [[1.0, 0.5, 0.0, 0.0, 1.0], [1.0, 1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, -1.0, 3.0], [2.0, 2.0, 2.0, 1, 0]]
)
def test_loss_and_gradient_are_those_of_the_naive_formula(rewards):
    above = ABOVE_REFERENCE.clone().requires_grad_()
    expected = naive(above, rewards)
    result, gradient = batch(rewards)
    torch.testing.assert_close(result.loss, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, above)[0], rtol=1e-9, atol=1e-12)


def test_no_advantage_and_no_ratio_of_policies_is_read():
    stale = {"logp_rollout": double([-3.0] * 10), "logp_old": double([-1.0] * 10)}
    one, other = batch([1.0, 0.5, 0.0, 0.0, 1.0]), batch([1.0, 0.5, 0.0, 0.0, 1.0], **stale)
    torch.testing.assert_close(one[1], other[1], rtol=0, atol=0)
    assert not ROW.needs_old
    with pytest.raises(EvidenceError, match="logp_ref"):
        batch([1.0, 0.5, 0.0, 0.0, 1.0], logp_ref=None)


def test_with_two_answers_of_reward_0_or_1_it_raises_the_return_at_the_reference():
    """-E[grad L] = beta grad J over all pairs of draws from a policy of three responses, which is the reference."""
    logits = double([0.3, -0.5, 0.9]).requires_grad_()
    logp, rewards = logits.log_softmax(0), double([1.0, 0.0, 1.0])
    draws = torch.tensor(list(itertools.product(range(3), range(3))))
    ids = torch.arange(9).repeat_interleave(2)
    segments = Segments.from_lengths([1] * 18, group_ids=ids)
    drawn = logp[draws.flatten()]
    lp = LogProbs.pack(drawn.detach(), drawn, logp_ref=drawn.detach(), segments=segments)
    chance = logp.exp()[draws].prod(1).detach().repeat_interleave(2)
    info = BatchInfo(rewards=rewards[draws.flatten()], sample_weight=chance)
    loss = policy_loss(lp, ROW, torch.zeros(18, dtype=torch.float64), info).loss * 9
    value = (logp.exp() * rewards).sum()
    expected, gradient = (torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (0.1 * value, -loss))
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-12)
