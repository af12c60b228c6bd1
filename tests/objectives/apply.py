"""Applying an objective to a batch, and the laws that every objective obeys."""

from __future__ import annotations

import torch
from torch import Tensor

from offdrift.aggregate import AggregateName, aggregate, normalizer_of
from offdrift.batch_info import NO_INFO, BatchInfo
from offdrift.logprobs import LogProbs
from offdrift.objectives.base import Objective
from offdrift.segments import Segments
from tests.oracles.fixtures import ADVANTAGES, LOGP_ROLLOUT, MASK, MISMATCH, STALENESS, double

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
    turns = Segments.from_lengths([2, 2, 1, 2])
    segments = Segments.from_lengths([4, 3], turns=turns)
    kept = MASK.bool()
    mu = double(LOGP_ROLLOUT)[kept]
    old = mu + double(MISMATCH)[kept]
    leaf = (old + double(STALENESS)[kept]).requires_grad_()
    return LogProbs.pack(mu, leaf, old, segments=segments), double(ADVANTAGES)[kept]


def step(
    objective: Objective, lp: LogProbs, advantages: Tensor, how: AggregateName, batch_info: BatchInfo = NO_INFO
) -> tuple[float, Tensor, Tensor]:
    """Loss of the step, gradient with respect to each token's logp, and the loss of each token."""
    got = objective(lp, advantages, batch_info)
    loss = aggregate(got.loss, lp.segments, how=how, normalizer=normalizer_of(lp.segments, how=how))
    (grad,) = torch.autograd.grad(loss, lp.current, retain_graph=True)
    return loss.item(), grad, got.loss.detach()


def check_golden(
    objective: Objective,
    batch: tuple[LogProbs, Tensor],
    how: AggregateName,
    *,
    loss: float,
    grad: list | None = None,
    tokens: list | None = None,
    batch_info: BatchInfo = NO_INFO,
) -> None:
    """Assert the values of the methods table; padded lists, or packed ones for packed batches."""
    lp, advantages = batch
    got_loss, got_grad, got_tokens = step(objective, lp, advantages, how, batch_info)
    torch.testing.assert_close(got_loss, loss, rtol=1e-6, atol=1e-6)
    for got, expected in ((got_grad, grad), (got_tokens, tokens)):
        if expected is None:
            continue
        flat = lp.like_caller(double(expected)) if lp.kept is not None else packed(expected, lp)
        assert flat.numel() == lp.segments.num_tokens
        torch.testing.assert_close(got, flat, rtol=1e-6, atol=1e-6)


def packed(rows: list, lp: LogProbs) -> Tensor:
    """Rows padded at the end, as a packed tensor."""
    lengths = lp.segments.lengths.tolist()
    return torch.cat([double(row[:n]) for row, n in zip(rows, lengths, strict=True)])


def per_sequence(value: list, lp: LogProbs) -> list:
    """One number per sequence, as padded rows that give it to every token."""
    width = int(lp.segments.lengths.max())
    return [[x] * width for x in value]


def check_loss_and_gradient(lp: LogProbs, got: Tensor, expected: Tensor, *, rtol: float = 1e-9) -> Tensor:
    """Assert that two losses per token agree, in value and in the gradient of a weighted sum."""
    assert got.shape == expected.shape == lp.current.shape
    torch.testing.assert_close(got, expected, rtol=rtol, atol=1e-12)
    mix = torch.linspace(1, 2, len(got), dtype=got.dtype)
    grads = [torch.autograd.grad((x * mix).sum(), lp.current, retain_graph=True)[0] for x in (got, expected)]  # fmt: skip
    torch.testing.assert_close(grads[0], grads[1], rtol=rtol, atol=1e-12)
    return grads[0]


def advantages_of(lp: LogProbs, seed: int, *, per: str = "sequence") -> Tensor:
    """Random advantages, one per sequence or one per token, about half of them negative."""
    g = torch.Generator().manual_seed(1000 + seed)
    n = len(lp.segments) if per == "sequence" else lp.segments.num_tokens
    a = torch.randn(n, generator=g, dtype=torch.float64)
    return lp.segments.spread(a) if per == "sequence" else a


def check_laws(objective: Objective, lp: LogProbs, batch_info: BatchInfo = NO_INFO) -> None:
    """No advantage: no loss, no gradient. No gradient to the fixed policies, however far off."""
    got = objective(lp, torch.zeros_like(lp.current), batch_info)
    (grad,) = torch.autograd.grad(got.loss.sum(), lp.current)
    assert got.loss.numel() > 10
    assert (got.loss == 0).all()
    assert (grad == 0).all()
    assert got.clipped is not None
    assert not got.clipped.any()
    assert not got.clipped.requires_grad
    for sign in (1.0, -1.0):
        check_finite_and_still(objective, lp, sign, batch_info)


def check_finite_and_still(objective: Objective, lp: LogProbs, sign: float, batch_info: BatchInfo) -> None:
    """Log-ratios of +-1e4: loss and gradient stay finite, and only `logp` receives a gradient."""
    n = lp.segments.num_tokens
    for dtype in (torch.float32, torch.float64):
        far = torch.where(torch.arange(n) % 3 == 0, -10001.0, -1.0).to(dtype)
        near = torch.where(torch.arange(n) % 3 == 1, -10001.0, -1.0).to(dtype)
        mu, old, pi = (x.clone().requires_grad_() for x in (far, near, far.flip(0)))
        extreme = LogProbs.pack(mu, pi, old, segments=lp.segments)
        got = objective(extreme, torch.full((n,), sign, dtype=dtype), batch_info)
        assert got.loss.dtype == dtype
        assert got.loss.isfinite().all()
        got.loss.sum().backward()
        assert pi.grad is not None
        assert pi.grad.isfinite().all()
        assert mu.grad is None
        assert old.grad is None


def check_on_policy(
    objective: Objective, lp: LogProbs, advantages: Tensor, expected: Tensor, batch_info: BatchInfo = NO_INFO
) -> None:
    """Where all policies agree nothing is clipped and the gradient of the summed loss is as given."""
    leaf = lp.logp_rollout.clone().requires_grad_()
    same = LogProbs.pack(lp.logp_rollout, leaf, lp.logp_rollout, segments=lp.segments)
    got = objective(same, advantages, batch_info)
    assert got.clipped is not None
    assert not got.clipped.any()
    (grad,) = torch.autograd.grad(got.loss.sum(), leaf)
    assert grad.numel() > 10
    torch.testing.assert_close(grad, expected, rtol=1e-9, atol=1e-12)


def pieces(lp: LogProbs, advantages: Tensor, at: int) -> list[tuple[LogProbs, Tensor]]:
    """The batch cut into two after `at` sequences; each piece has its own leaf."""
    cut = int(lp.segments.cu_seqlens[at])
    lengths = lp.segments.lengths.tolist()
    found = []
    for tokens, part in ((slice(0, cut), lengths[:at]), (slice(cut, None), lengths[at:])):
        leaf = lp.current.detach()[tokens].clone().requires_grad_()
        piece = LogProbs.pack(lp.logp_rollout[tokens], leaf, lp.old[tokens], segments=Segments.from_lengths(part))
        found.append((piece, advantages[tokens]))
    return found
