"""The same loss and gradient as verl's `vanilla`, `gspo` and `geo_mean`, called in this process.

Where verl differs a test asserts by how much and says why: it adds 1e-8 to lengths it divides by,
limits a geometric log-ratio to 10 (`gspo`), and does not limit log-ratios at all (`geo_mean`).
"""

from __future__ import annotations

import math
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from offdrift.aggregate import AggregateName, aggregate, normalizer_of
from offdrift.logprobs import LogProbs
from offdrift.objectives.base import Objective
from offdrift.objectives.clipped import Clipped, GeometricClipped
from tests.oracles.fixtures import double

HOW: dict[str, AggregateName] = {
    "token-mean": "token_mean",
    "seq-mean-token-sum": "seq_mean_token_sum",
    "seq-mean-token-mean": "seq_mean_token_mean",
}
"""verl's name -> ours."""
OFF = 1e30
"""A dual clip that never acts; verl cannot switch it off."""


@pytest.fixture(scope="module")
def verl():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from verl.trainer.ppo import core_algos
        from verl.workers.config import ActorConfig
    return SimpleNamespace(losses=core_algos.POLICY_LOSS_REGISTRY, config=ActorConfig)


def batch(seed: int, *, per: str, drift: float = 0.3) -> tuple[Tensor, ...]:
    """logp_old, logp, advantages and mask, padded [12, 15], lengths 1 to 15, in float64."""
    g = torch.Generator().manual_seed(seed)
    shape = (12, 15)
    lengths = torch.randint(1, 16, (12, 1), generator=g)
    mask = torch.arange(15) < lengths
    logp_old = -5 - 3 * torch.rand(shape, generator=g, dtype=torch.float64)
    logp = logp_old + drift * torch.randn(shape, generator=g, dtype=torch.float64)
    a = torch.randn(shape, generator=g, dtype=torch.float64)
    if per == "sequence":
        a = a[:, :1].expand(shape).contiguous()
    return logp_old, logp, a, mask


def theirs(verl, name: str, how: str, batch: tuple[Tensor, ...], **limits: float):
    logp_old, logp, a, mask = batch
    config = verl.config(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio=0.2, **limits)
    leaf = logp.clone().requires_grad_()
    loss, _ = verl.losses[name](logp_old, leaf, a, mask.double(), how, config)
    (grad,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), grad


def ours(objective: Objective, how: str, batch: tuple[Tensor, ...]):
    logp_old, logp, a, mask = batch
    leaf = logp.clone().requires_grad_()
    lp = LogProbs.pack(logp_old, leaf, logp_old, mask=mask)
    got = objective(lp, lp.like_caller(a))
    norm = normalizer_of(lp.segments, how=HOW[how])
    loss = aggregate(got.loss, lp.segments, how=HOW[how], normalizer=norm)
    (grad,) = torch.autograd.grad(loss, leaf)
    assert got.clipped is not None
    assert 3 < int(got.clipped.sum()) < 0.9 * int(mask.sum())
    return loss.detach(), grad


def same(got, expected, atol: float = 1e-9):
    assert got[1].numel() == 180
    assert got[1].norm() > 1e-3
    torch.testing.assert_close(got[0], expected[0], rtol=0, atol=atol)
    torch.testing.assert_close(got[1], expected[1], rtol=0, atol=atol)


# verl's seq-mean-token-mean divides by T + 1e-8: a relative difference of up to 1e-8
CLOSE = {"token-mean": 1e-9, "seq-mean-token-sum": 1e-9, "seq-mean-token-mean": 2e-8}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("dual_clip", [None, 1.3])
@pytest.mark.parametrize("seed", range(3))
def test_vanilla_is_ppo_with_a_dual_clip(verl, seed, dual_clip, how):
    b = batch(seed, per="token")
    got = ours(Clipped(eps_low=0.1, eps_high=0.25, dual_clip=dual_clip), how, b)
    c = OFF if dual_clip is None else dual_clip
    expected = theirs(verl, "vanilla", how, b, clip_ratio_low=0.1, clip_ratio_high=0.25, clip_ratio_c=c)
    same(got, expected, CLOSE[how])


def test_vanilla_and_ppo_limit_log_ratios_at_the_same_20_nats(verl):
    b = batch(3, per="token", drift=20.0)
    logp_old, logp, a, mask = b
    b = (logp_old - 100, logp - 100, a, mask)
    assert int(((logp - logp_old).abs()[mask] > 20).sum()) > 10
    got = ours(Clipped(dual_clip=3.0), "token-mean", b)
    expected = theirs(verl, "vanilla", "token-mean", b, clip_ratio_c=3.0)
    same(got, expected)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("per", ["sequence", "token"])
@pytest.mark.parametrize("seed", range(3))
def test_gspo_is_gspo_token(verl, seed, per, how):
    b = batch(seed, per=per)
    objective = Clipped(unit="geometric", gradient="token", eps_low=0.03, eps_high=0.04)
    got = ours(objective, how, b)
    expected = theirs(verl, "gspo", how, b, clip_ratio_low=0.03, clip_ratio_high=0.04)
    same(got, expected, CLOSE[how])


def test_gspo_of_the_paper_is_verls_only_where_a_sequence_has_one_advantage(verl):
    objective = Clipped(unit="geometric", eps_low=0.03, eps_high=0.04)
    limits = {"clip_ratio_low": 0.03, "clip_ratio_high": 0.04}
    b = batch(0, per="sequence")
    same(ours(objective, "token-mean", b), theirs(verl, "gspo", "token-mean", b, **limits))
    b = batch(0, per="token")
    got, expected = ours(objective, "token-mean", b), theirs(verl, "gspo", "token-mean", b, **limits)  # fmt: skip
    assert (got[1] - expected[1]).norm() > 0.1 * expected[1].norm()


def test_gspo_beyond_10_nats_is_limited_there_in_verl_and_at_20_here(verl):
    """One sequence, log-ratios of 12 and 16 in the mean 14, A = -1: e^14 here, e^10 there."""
    old, l = double([[-100.0, -100.0]]), double([[12.0, 16.0]])  # noqa: E741
    b = (old, old + l, -torch.ones_like(old), torch.ones_like(old, dtype=torch.bool))
    loss, grad = theirs(verl, "gspo", "token-mean", b)
    assert loss.item() == pytest.approx(math.exp(10))
    assert grad.tolist() == [[0.0, 0.0]]
    leaf = b[1].clone().requires_grad_()
    lp = LogProbs.pack(old, leaf, old, mask=b[3])
    mine = Clipped(unit="geometric", gradient="token")(lp, lp.like_caller(b[2])).loss.mean()
    assert mine.item() == pytest.approx(math.exp(14))
    (grad,) = torch.autograd.grad(mine, leaf)
    assert grad.tolist()[0] == pytest.approx([math.exp(14) / 2] * 2)


def geo_mean_as_in_verl(batch: tuple[Tensor, ...], eps_low: float, eps_high: float):
    """Our losses per sequence, with verl's 1e-8 put into both of its means."""
    logp_old, logp, a, mask = batch
    leaf = logp.clone().requires_grad_()
    lp = LogProbs.pack(logp_old, leaf, logp_old, mask=mask)
    packed = lp.like_caller(a)
    got = GeometricClipped(eps_low=eps_low, eps_high=eps_high)(lp, packed)
    mean = lp.segments.mean(packed)
    lengths = lp.segments.lengths.double()
    shrink = lengths / (lengths + 1e-8)
    log_g = (lp.segments.mean(got.loss) / -mean).log()
    loss = (-mean * shrink * (log_g * shrink).exp()).mean()
    (grad,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), grad


@pytest.mark.parametrize("per", ["sequence", "token"])
@pytest.mark.parametrize("seed", range(3))
def test_geo_mean_is_gmpo(verl, seed, per):
    b = batch(seed, per=per)
    if per == "token":
        b[2][:, 1::4] = 0.0  # not pushed, and left out of the geometric mean
    expected = theirs(verl, "geo_mean", "token-mean", b, clip_ratio_low=0.1, clip_ratio_high=0.2)
    objective = GeometricClipped(eps_low=0.1, eps_high=0.2)
    # As it is: the 1e-8 that verl adds to the lengths shows in the eighth digit ...
    same(ours(objective, "seq-mean-token-mean", b), expected, 2e-8)
    # ... and is all that differs.
    same(geo_mean_as_in_verl(b, 0.1, 0.2), expected, 1e-12)


def test_geo_mean_of_a_log_ratio_of_fifty_explodes_in_verl_and_is_limited_here(verl):
    """The third sequence of FX-E, alone: mean(50, -0.2) = 24.9 there, mean(20, -0.2) = 9.9 here."""
    old, logp = double([[-51.0, -1.0]]), double([[-1.0, -51.0]])
    b = (old, logp, -torch.ones_like(old), torch.ones_like(old, dtype=torch.bool))
    loss, grad = theirs(verl, "geo_mean", "token-mean", b)
    assert loss.item() == pytest.approx(math.exp(24.9), rel=1e-6)
    assert grad.tolist()[0] == pytest.approx([math.exp(24.9) / 2, 0.0], rel=1e-6)
    leaf = logp.clone().requires_grad_()
    lp = LogProbs.pack(old, leaf, old, mask=b[3])
    mine = GeometricClipped(eps_low=0.2, eps_high=0.2)(lp, lp.like_caller(b[2])).loss.mean()
    assert mine.item() == pytest.approx(math.exp(9.9))
    (grad,) = torch.autograd.grad(mine, leaf)
    assert grad.tolist() == [[0.0, 0.0]]
