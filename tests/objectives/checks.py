"""What the tests of several objectives check in the same way; every `check_*` asserts."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from offdrift.aggregate import aggregate, normalizer_of
from offdrift.batch_info import NO_INFO, BatchInfo, Observed
from offdrift.logprobs import LogProbs
from offdrift.segments import Segments
from tests.oracles.fixtures import LOGP_ROLLOUT, MASK, MISMATCH, STALENESS, double, ragged

SPLITS = [[[0, 1, 2, 3, 4, 5]], [[0, 2, 4], [1, 3, 5]], [[5], [3], [0], [1], [4], [2]]]


def token_losses(objective, lp, advantages, batch_info=NO_INFO) -> Tensor:
    got = objective(lp, advantages, batch_info)
    return got.loss if got.regularizer is None else got.loss + got.regularizer


def loss_and_grad(objective, lp, advantages, batch_info=NO_INFO, *, how="token_mean", normalizer=None):
    """The aggregated loss and its gradient with respect to the packed `logp`."""
    tokens = token_losses(objective, lp, advantages, batch_info)
    normalizer = normalizer_of(lp.segments, how=how) if normalizer is None else normalizer
    loss = aggregate(tokens, lp.segments, how=how, normalizer=normalizer)
    (grad,) = torch.autograd.grad(loss, lp.current)
    return loss.detach(), grad


def check_golden(objective, lp, advantages, *, tok, loss, grad, how="token_mean") -> None:
    """Against numbers of the methods table, rounded to 6 decimals, on FX-A."""
    got_loss, got_grad = loss_and_grad(objective, lp, advantages, how=how)
    close = {"rtol": 0, "atol": 1e-6}
    assert got_grad.numel() == 7
    expected = lp.like_caller(double(tok))
    torch.testing.assert_close(token_losses(objective, lp, advantages), expected, **close)
    torch.testing.assert_close(got_loss, double(loss), **close)
    torch.testing.assert_close(got_grad, lp.like_caller(double(grad)), **close)


def check_finite_far_away(objective, batch_info=NO_INFO) -> None:
    """Log-ratios of +-1e4 under either sign of the advantage: loss and gradient are numbers."""
    logp_rollout, logp_old = torch.tensor([[-1.0, -999.0] * 2, [-1.0, -1e4] * 2])
    logp = torch.tensor([-1e4, -1.0, -1e4, -1.0], requires_grad=True)
    segments = Segments.from_lengths([1, 1, 2], group_ids=torch.tensor([0, 0, 1]))
    lp = LogProbs.pack(logp_rollout, logp, logp_old, segments=segments)
    for sign in (1.0, -1.0):
        loss, grad = loss_and_grad(objective, lp, torch.full((4,), sign), batch_info)
        assert loss.isfinite()
        assert grad.isfinite().sum() == 4


def check_gradient_reaches_logp_alone(objective, batch_info=NO_INFO) -> None:
    """On FX-A, with a leaf behind every policy."""
    logp_old = (double(LOGP_ROLLOUT) + double(MISMATCH)).requires_grad_()
    logp_rollout = double(LOGP_ROLLOUT).requires_grad_()
    logp = (logp_old.detach() + double(STALENESS)).requires_grad_()
    lp = LogProbs.pack(logp_rollout, logp, logp_old, mask=MASK, group_ids=torch.tensor([3, 3]))
    advantages = lp.segments.spread(double([1.0, -0.5]))
    got = objective(lp, advantages, batch_info)
    token_losses(objective, lp, advantages, batch_info).sum().backward()
    assert logp.grad is not None
    assert logp.grad[0].abs().sum() > 0
    assert logp_old.grad is None
    assert logp_rollout.grad is None
    assert got.clipped is None or not got.clipped.requires_grad


def piece(lp: LogProbs, sequences: list[int]) -> tuple[LogProbs, Tensor]:
    """Some sequences of a batch, and where their tokens were."""
    s, chosen = lp.segments, torch.tensor(sequences)
    rows = s.rows(chosen)
    assert s.group_ids is not None
    cut = Segments.from_lengths(s.lengths[chosen], group_ids=s.group_ids[chosen])
    packed = LogProbs.pack(lp.logp_rollout[rows], lp.current[rows], lp.old[rows], segments=cut)
    return packed, rows


def batch(seed: int, *, drift: float = 0.3) -> tuple[LogProbs, Tensor, Tensor]:
    """Six ragged sequences of three prompts (three answers, two, one), rewards and advantages."""
    drawn = ragged(seed, drift=drift)
    segments = replace(drawn.segments, group_ids=torch.tensor([7, 1, 7, 4, 1, 7]))
    lp = LogProbs.pack(drawn.logp_rollout, drawn.logp, drawn.logp_old, segments=segments)
    g = torch.Generator().manual_seed(100 + seed)
    rewards = torch.rand(6, generator=g, dtype=torch.float64)
    return lp, lp.segments.spread(rewards - rewards.mean()), rewards


def check_any_split_gives_the_same(objective, seed: int, *, how="token_mean") -> int:
    """Loss and gradient of a step in pieces equal those of the whole; returns how many splits."""
    lp, advantages, rewards = batch(seed)
    whole_batch_info = BatchInfo(rewards=rewards)
    loss, grad = loss_and_grad(objective, lp, advantages, whole_batch_info, how=how, normalizer=1.0)
    for split in SPLITS:
        pieces = [(*piece(lp, s), rewards[s]) for s in split]
        seen = [
            Observed({objective: objective.observe(p, advantages[rows], BatchInfo(rewards=r))}) for p, rows, r in pieces
        ]
        merged = seen[0]
        for other in seen[1:]:
            merged = merged.merge(other)
        total, gradient = torch.zeros_like(loss), torch.zeros_like(grad)
        for p, rows, r in pieces:
            batch_info = BatchInfo(rewards=r, observed=merged)
            part, part_grad = loss_and_grad(objective, p, advantages[rows], batch_info, how=how, normalizer=1.0)
            total, gradient[rows] = total + part, part_grad
        torch.testing.assert_close(total, loss, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradient, grad, rtol=1e-11, atol=1e-12)
    assert len(grad) > 6
    return len(SPLITS)
