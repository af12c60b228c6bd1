"""Batches for objectives, and what their tests check in the same way; every `check_*` asserts."""

from dataclasses import replace

import torch
from torch import Tensor

from offdrift.aggregate import AggregateName, aggregate, normalizer_of
from offdrift.batch_info import NO_INFO, BatchInfo
from offdrift.logprobs import LogProbs
from offdrift.objectives.base import Objective
from offdrift.segments import Segments
from tests.oracles.fixtures import ADVANTAGES, LOGP_ROLLOUT, MASK, MISMATCH, STALENESS, double, ragged

E_OLD = [[-1.0, 0.0], [-0.5, -0.7], [-51.0, -1.0]]
E_CURRENT = [[-0.3, 0.0], [-0.4, -0.9], [-1.0, -51.0]]
E_MASK = torch.tensor([[1, 0], [1, 1], [1, 1]])
E_ADVANTAGES = [[1.0, 0.0], [0.0, 0.0], [-1.0, -1.0]]


def fx_e() -> tuple[LogProbs, Tensor]:
    """FX-E: a sequence of one token, one without advantage, and log-ratios of +50 and -50."""
    leaf = double(E_CURRENT).requires_grad_()
    lp = LogProbs.pack(double(E_OLD), leaf, double(E_OLD), mask=E_MASK)
    return lp, lp.like_caller(double(E_ADVANTAGES))


def fx_a_with_turns() -> tuple[LogProbs, Tensor]:
    """FX-A packed, its turns [0, 0, 1, 1] and [0, 1, 1] recorded, and its advantages."""
    segments = Segments.from_lengths([4, 3], turns=Segments.from_lengths([2, 2, 1, 2]))
    kept = MASK.bool()
    mu = double(LOGP_ROLLOUT)[kept]
    old = mu + double(MISMATCH)[kept]
    leaf = (old + double(STALENESS)[kept]).requires_grad_()
    return LogProbs.pack(mu, leaf, old, segments=segments), double(ADVANTAGES)[kept]


def batch(seed: int, *, drift: float = 0.3) -> tuple[LogProbs, Tensor, Tensor]:
    """Six ragged sequences of three prompts (three answers, two, one), rewards and advantages."""
    drawn = ragged(seed, drift=drift)
    segments = replace(drawn.segments, group_ids=torch.tensor([7, 1, 7, 4, 1, 7]))
    lp = LogProbs.pack(drawn.logp_rollout, drawn.logp, drawn.logp_old, segments=segments)
    rewards = torch.rand(6, generator=torch.Generator().manual_seed(100 + seed), dtype=torch.float64)
    return lp, lp.segments.spread(rewards - rewards.mean()), rewards


def piece(lp: LogProbs, sequences: list[int]) -> tuple[LogProbs, Tensor]:
    """Some sequences of a batch, and where their tokens were."""
    s, chosen = lp.segments, torch.tensor(sequences)
    rows = s.rows(chosen)
    cut = Segments.from_lengths(s.lengths[chosen], group_ids=s.group_ids[chosen])
    return LogProbs.pack(lp.logp_rollout[rows], lp.current[rows], lp.old[rows], segments=cut), rows


def per_sequence(value: list, lp: LogProbs) -> list:
    """One number per sequence, as padded rows that give it to every token."""
    return [[x] * int(lp.segments.lengths.max()) for x in value]


def packed(rows: list, lp: LogProbs) -> Tensor:
    """Rows padded at the end, as a packed tensor."""
    return torch.cat([double(row[:n]) for row, n in zip(rows, lp.segments.lengths.tolist(), strict=True)])


def loss_and_grad(
    objective: Objective,
    lp: LogProbs,
    advantages: Tensor,
    batch_info: BatchInfo = NO_INFO,
    *,
    how: AggregateName = "token_mean",
    normalizer: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The aggregated loss and its gradient with respect to the packed `logp`."""
    got = objective(lp, advantages, batch_info)
    tokens = got.loss if got.regularizer is None else got.loss + got.regularizer
    normalizer = normalizer_of(lp.segments, how=how) if normalizer is None else normalizer
    loss = aggregate(tokens, lp.segments, how=how, normalizer=normalizer)
    (grad,) = torch.autograd.grad(loss, lp.current, retain_graph=True)
    return loss.detach(), grad


def check_golden(
    objective: Objective,
    batch: tuple[LogProbs, Tensor],
    how: AggregateName = "token_mean",
    *,
    loss: float,
    grad: list | None = None,
    tokens: list | None = None,
    batch_info: BatchInfo = NO_INFO,
) -> None:
    """Values of the methods table, rounded to six decimals (or digits); padded at the end."""
    lp, advantages = batch
    got_loss, got_grad = loss_and_grad(objective, lp, advantages, batch_info, how=how)
    got = objective(lp, advantages, batch_info)
    of_tokens = got.loss if got.regularizer is None else got.loss + got.regularizer
    check_close(got_loss, double([loss]).squeeze())
    for x, expected in ((got_grad, grad), (of_tokens.detach(), tokens)):
        if expected is not None:
            check_close(x, packed(expected, lp))


def check_close(got: Tensor, expected: Tensor) -> None:
    assert got.shape == expected.shape
    limit = (1e-6 * expected.abs()).where(expected.abs() > 10, 1e-6)
    assert ((got - expected).abs() <= limit).all(), (got, expected)


def check_loss_and_gradient(lp: LogProbs, got: Tensor, expected: Tensor, *, rtol: float = 1e-9) -> Tensor:
    """Assert that two losses per token agree, in value and in the gradient of a weighted sum."""
    assert got.shape == expected.shape == lp.current.shape
    torch.testing.assert_close(got, expected, rtol=rtol, atol=1e-12)
    mix = torch.linspace(1, 2, len(got), dtype=got.dtype)
    grads = [torch.autograd.grad((x * mix).sum(), lp.current, retain_graph=True)[0] for x in (got, expected)]
    torch.testing.assert_close(grads[0], grads[1], rtol=rtol, atol=1e-12)
    return grads[0]
