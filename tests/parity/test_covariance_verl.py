"""Clip-Cov and KL-Cov: loss and gradient of verl's functions, called in this process, in float64.

Where verl differs on purpose (it chooses on every rank by itself, and clamps no log-ratio), a test
asserts the difference.
"""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from offdrift.batch_info import NO_INFO
from offdrift.logprobs import LogProbs
from offdrift.objectives.covariance import CovClipped, CovPenalized, covariance, token_keys
from tests.objectives.checks import loss_and_grad

SEEDS = range(6)
AGGREGATES = {
    "token-mean": "token_mean",
    "seq-mean-token-sum": "seq_mean_token_sum",
    "seq-mean-token-mean": "seq_mean_token_mean",
}
PADDING_1E8 = 1e-7
"""verl adds 1e-8 to the length of a sequence under seq-mean-token-mean."""


@pytest.fixture(scope="module")
def verl():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from verl.trainer.ppo import core_algos
    return core_algos


class Padded:
    """A random ragged batch with holes, as padded matrices and as packed log-probs."""

    def __init__(self, seed: int, drift: float = 0.3, rows: int = 6, width: int = 9):
        g = torch.Generator().manual_seed(seed)
        draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
        self.mask = (torch.rand(rows, width, generator=g) < 0.7).long()
        self.mask[:, 0] = 1
        self.old = -3 * torch.rand(rows, width, generator=g, dtype=torch.float64) - 0.5
        self.logp = (self.old + drift * draw(rows, width)).clamp(max=-1e-3).requires_grad_()
        self.advantages = 2 * draw(rows, 1).expand(rows, width) + 0.3 * draw(rows, width)
        # Recorded log-probs enter our keys and nothing of verl's.
        self.lp = LogProbs.pack(self.old - 0.1, self.logp, self.old, mask=self.mask)
        self.packed_advantages = self.lp.like_caller(self.advantages)

    @property
    def tokens(self) -> int:
        return int(self.mask.sum())


def config(**policy_loss):
    return SimpleNamespace(
        clip_ratio=0.2,
        clip_ratio_low=policy_loss.pop("eps_low", 0.2),
        clip_ratio_high=policy_loss.pop("eps_high", 0.2),
        policy_loss=SimpleNamespace(**policy_loss),
        global_batch_info={},
    )


def theirs(function, batch: Padded, how: str, rows=slice(None), **options) -> tuple[Tensor, Tensor]:
    arguments = (x[rows] for x in (batch.old, batch.logp, batch.advantages, batch.mask))
    loss, _ = function(*arguments, loss_agg_mode=how, config=config(**options))
    (grad,) = torch.autograd.grad(loss, batch.logp)
    assert (grad[batch.mask == 0] == 0).all()
    return loss.detach(), batch.lp.like_caller(grad)


def same(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], how: str = "") -> None:
    rtol = PADDING_1E8 if how == "seq-mean-token-mean" else 1e-9
    assert actual[1].numel() > 20
    assert actual[1].norm() > 1e-3
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=1e-10)


@pytest.mark.parametrize("how", AGGREGATES)
@pytest.mark.parametrize("seed", SEEDS)
def test_kl_cov(verl, seed, how):
    batch = Padded(seed)
    for fraction, coef in ((2e-4, 1.0), (0.1, 0.1), (0.5, 1.0), (1.0, 2.0)):
        expected = theirs(verl.compute_policy_loss_kl_cov, batch, how, kl_cov_ratio=fraction, ppo_kl_coef=coef)
        objective = CovPenalized(fraction=fraction, coef=coef)
        got = loss_and_grad(objective, batch.lp, batch.packed_advantages, how=AGGREGATES[how])
        same(got, expected, how)


@pytest.mark.parametrize("how", AGGREGATES)
@pytest.mark.parametrize("seed", SEEDS)
def test_clip_cov_where_all_candidates_are_taken(verl, seed, how):
    batch, chosen = Padded(seed), 0
    for low, high in ((1.0, 5.0), (0.1, 5.0), (-1.0, 0.5), (50.0, 60.0)):
        limits = {"eps_low": 0.1, "eps_high": 0.3}
        expected = theirs(
            verl.compute_policy_loss_clip_cov, batch, how,
            clip_cov_ratio=1.0, clip_cov_lb=low, clip_cov_ub=high, **limits,
        )  # fmt: skip
        objective = CovClipped(fraction=1.0, cov_low=low, cov_high=high, **limits)
        got = loss_and_grad(objective, batch.lp, batch.packed_advantages, how=AGGREGATES[how])
        same(got, expected, how)
        chosen += int((objective(batch.lp, batch.packed_advantages).loss == 0).sum())
    assert chosen > 10


@pytest.mark.parametrize("seed", SEEDS)
def test_clip_cov_with_our_order_given_to_verl(verl, seed, monkeypatch):
    batch = Padded(seed)
    objective = CovClipped(fraction=0.1, cov_low=-0.5, seed=seed)
    seen = objective.observe(batch.lp, batch.packed_advantages, NO_INFO)
    cov = covariance(seen["advantages"], seen["logp"], seen)
    candidates = (cov > -0.5) & (cov < 5.0) & seen["key"].isfinite()
    # verl lists candidates row by row, which is the packed order.
    order = token_keys(batch.lp, seed=seed)[candidates].argsort()
    assert len(order) > int(0.1 * batch.tokens) > 1

    def randperm(n):
        assert n == len(order)
        return order

    monkeypatch.setattr(verl.torch, "randperm", randperm)
    expected = theirs(
        verl.compute_policy_loss_clip_cov, batch, "token-mean",
        clip_cov_ratio=0.1, clip_cov_lb=-0.5, clip_cov_ub=5.0,
    )  # fmt: skip
    same(loss_and_grad(objective, batch.lp, batch.packed_advantages), expected)
    chosen = objective(batch.lp, batch.packed_advantages).loss == 0
    assert int(chosen.sum()) == int(0.1 * batch.tokens)


def test_verl_chooses_per_micro_batch_and_the_step_depends_on_the_split(verl):
    """Ours is that of the whole step, whatever the split (tests of the objective)."""
    batch = Padded(0)
    options = {"kl_cov_ratio": 0.1, "ppo_kl_coef": 1.0}
    whole, _ = theirs(verl.compute_policy_loss_kl_cov, batch, "token-sum", **options)
    parts = [
        theirs(verl.compute_policy_loss_kl_cov, batch, "token-sum", rows=rows, **options)[0]
        for rows in (slice(0, 3), slice(3, None))
    ]
    assert (torch.stack(parts).sum() - whole).abs() > 1e-3


def test_verl_clamps_no_log_ratio(verl):
    batch = Padded(1)
    far = batch.logp.detach().clone()
    far[0, 0], batch.old[0, 0] = -0.5, -30.5
    batch.logp = far.requires_grad_()
    batch.lp = LogProbs.pack(batch.old, batch.logp, batch.old, mask=batch.mask)
    options = {"kl_cov_ratio": 1.0, "ppo_kl_coef": 1.0}
    loss, grad = theirs(verl.compute_policy_loss_kl_cov, batch, "token-sum", **options)
    ours, our_grad = loss_and_grad(CovPenalized(fraction=1.0), batch.lp, batch.packed_advantages, normalizer=1.0)
    a = batch.packed_advantages[0].item()
    at = lambda x: -a * torch.tensor(x, dtype=torch.float64).exp().item() + x  # noqa: E731
    assert (ours - loss).item() == pytest.approx(at(20.0) - at(30.0), rel=1e-9)
    assert (grad[0] != 0, our_grad[0] == 0) == (True, True)
    torch.testing.assert_close(our_grad[1:], grad[1:], rtol=1e-9, atol=1e-10)
