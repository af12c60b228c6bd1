"""Clip-Cov and KL-Cov: loss and gradient of verl's functions, called in this process, in float64.

Where verl differs on purpose (it chooses on every rank by itself, and clamps no log-ratio), a test
asserts the difference.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from offdrift.batch_info import NO_INFO, BatchInfo
from offdrift.methods import Method
from offdrift.objectives.covariance import CovClipped, CovPenalized, covariance, token_keys
from tests.parity.peers import MODES, Batch, agree, ours, random_batch, same, verl_loss

SEEDS = range(6)
HOW = ("token_mean", "seq_mean_token_sum", "seq_mean_token_mean")


def theirs(verl, name: str, batch: Batch, how: str, counts: Batch | None = None, **policy_loss):
    """Loss and gradient of verl's loss, over the counts of a batch."""
    counted = batch if counts is None else counts
    config = SimpleNamespace(
        clip_ratio=0.2,
        clip_ratio_low=policy_loss.pop("eps_low", 0.2),
        clip_ratio_high=policy_loss.pop("eps_high", 0.2),
        policy_loss=SimpleNamespace(**policy_loss),
        global_batch_info={"batch_num_tokens": counted.tokens, "global_batch_size": counted.sequences},
    )
    return verl_loss(verl, name, batch, config, how)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("seed", SEEDS)
def test_kl_cov(verl, seed, how):
    batch = random_batch(seed, far=False)
    for fraction, coef in ((2e-4, 1.0), (0.1, 0.1), (0.5, 1.0), (1.0, 2.0)):
        row = Method(objective=CovPenalized(fraction=fraction, coef=coef), aggregate=how)
        agree(ours(row, batch), *theirs(verl, "kl_cov", batch, MODES[how], kl_cov_ratio=fraction, ppo_kl_coef=coef))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("seed", SEEDS)
def test_clip_cov_where_all_candidates_are_taken(verl, seed, how):
    batch, chosen = random_batch(seed, far=False), 0
    for low, high in ((1.0, 5.0), (0.1, 5.0), (-1.0, 0.5), (50.0, 60.0)):
        limits = {"eps_low": 0.1, "eps_high": 0.3}
        fields = {"clip_cov_ratio": 1.0, "clip_cov_lb": low, "clip_cov_ub": high, **limits}
        objective = CovClipped(fraction=1.0, cov_low=low, cov_high=high, **limits)
        agree(
            ours(Method(objective=objective, aggregate=how), batch),
            *theirs(verl, "clip_cov", batch, MODES[how], **fields),
        )
        packed = batch.pack()
        chosen += int((objective(packed, packed.like_caller(batch.advantages)).loss == 0).sum())
    assert chosen > 10


@pytest.mark.parametrize("seed", SEEDS)
def test_clip_cov_with_our_order_given_to_verl(verl, seed, monkeypatch):
    batch = random_batch(seed, far=False)
    packed = batch.pack()
    advantages = packed.like_caller(batch.advantages)
    objective = CovClipped(fraction=0.1, cov_low=-0.5, seed=seed)
    observed = objective.observe(packed, advantages, NO_INFO)
    cov = covariance(observed["advantages"], observed["logp"], observed)
    candidates = (cov > -0.5) & (cov < 5.0) & observed["key"].isfinite()
    # verl lists candidates row by row, which is the packed order.
    order = token_keys(packed, seed=seed)[candidates].argsort()
    assert len(order) > int(0.1 * batch.tokens) > 1
    monkeypatch.setattr(verl.core_algos.torch, "randperm", lambda n: order if n == len(order) else None)
    fields = {"clip_cov_ratio": 0.1, "clip_cov_lb": -0.5, "clip_cov_ub": 5.0}
    expected = theirs(verl, "clip_cov", batch, "token-mean", **fields)
    agree(ours(Method(objective=objective, aggregate="token_mean"), batch), *expected)


def test_verl_chooses_per_micro_batch_and_the_step_depends_on_the_split(verl):
    """Ours is that of the whole step, whatever the split (tests of the objective)."""
    batch = random_batch(0, far=False)
    options = {"kl_cov_ratio": 0.1, "ppo_kl_coef": 1.0}
    whole, _ = theirs(verl, "kl_cov", batch, "token-sum", **options)
    halves = [batch.rows(rows) for rows in (slice(0, 7), slice(7, None))]
    parts = [theirs(verl, "kl_cov", part, "token-sum", batch, **options)[0] for part in halves]
    assert (torch.stack(parts).sum() - whole).abs() > 1e-3


def test_verl_clamps_no_log_ratio(verl):
    batch = random_batch(1, far=False)
    batch = replace(batch, rollout=batch.rollout.clone(), old=batch.old.clone(), logp=batch.logp.clone())
    batch.logp[0, 0], batch.old[0, 0] = -0.5, -30.5
    loss, gradient = theirs(verl, "kl_cov", batch, "token-sum", kl_cov_ratio=1.0, ppo_kl_coef=1.0)
    mine = ours(
        Method(objective=CovPenalized(fraction=1.0), aggregate="token_mean"),
        batch,
        batch_info=BatchInfo(observed="this_batch"),
        normalizer=1.0,
    )
    a = float(batch.advantages[0, 0])
    at = lambda x: -a * torch.tensor(x, dtype=torch.float64).exp().item() + x  # noqa: E731
    assert (mine.loss - loss).item() == pytest.approx(at(20.0) - at(30.0), rel=1e-9)
    assert (bool(gradient[0, 0] != 0), bool(mine.gradient[0, 0] == 0)) == (True, True)
    same(mine.gradient[1:], gradient[1:])
