"""verl's policy losses, called in-process, against our objectives with the same numbers.

Where verl differs a test asserts by how much and says why: it limits a geometric log-ratio to 10 (`gspo`),
does not limit log-ratios at all (`geo_mean`, `dro`), adds 1e-8 to lengths it divides by, and aggregates
`sapo` in one way whatever it is asked.
"""

import math
from dataclasses import replace

import pytest
import torch

from offdrift.methods import Method
from offdrift.objectives import Clipped
from offdrift.objectives.base import Objective
from offdrift.objectives.clipped import GeometricClipped, Soft
from offdrift.objectives.regression import Quadratic
from tests.parity.peers import MODES, Batch, actor, agree, differ, one_sequence, ours, random_batch, same, verl_loss

HOW = ("token_mean", "seq_mean_token_sum", "seq_mean_token_mean")
NEVER = 1e30
"""A dual clip that never acts; verl cannot switch it off."""
GSPO = {"clip_ratio_low": 0.03, "clip_ratio_high": 0.04}
CLIPS = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.25}


def dro(verl, beta: float):
    from verl.workers.config import PolicyLossConfig

    return {"policy_loss": PolicyLossConfig(dro_beta=beta)}


def by_sequence(batch: Batch) -> Batch:
    """One advantage to a sequence."""
    return replace(batch, advantages=batch.advantages[:, :1].expand_as(batch.logp).clone())


LOSSES = [
    ("vanilla", Clipped(eps_low=0.1, eps_high=0.25), {**CLIPS, "clip_ratio_c": NEVER}),
    ("vanilla", Clipped(eps_low=0.1, eps_high=0.25, dual_clip=1.3), {**CLIPS, "clip_ratio_c": 1.3}),
    ("gspo", Clipped(unit="geometric", gradient="token", eps_low=0.03, eps_high=0.04), GSPO),
    ("sapo", Soft(tau_positive=1.0, tau_negative=1.05), {"tau_pos": 1.0, "tau_neg": 1.05}),
    ("sapo", Soft(tau_positive=0.5, tau_negative=3.0), {"tau_pos": 0.5, "tau_neg": 3.0}),
    ("dro", Quadratic(beta=0.1), {"beta": 0.1}),
    ("dro", Quadratic(beta=2.0), {"beta": 2.0}),
]
"""verl's loss, our objective, and the numbers that verl is given."""


def compared(verl, name: str, objective: Objective, fields: dict, how: str, batch: Batch) -> None:
    fields = dro(verl, fields["beta"]) if name == "dro" else fields
    theirs = verl_loss(verl, name, batch, actor(verl, batch, **fields), MODES[how])
    agree(ours(Method(objective=objective, aggregate=how), batch), *theirs)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize(("name", "objective", "fields"), LOSSES)
def test_losses(verl, name, objective, fields, per_token, how, seed):
    """Log-ratios beyond 20 nats are limited by both in `vanilla`, and saturate in `sapo`."""
    batch = random_batch(seed, far=name in ("vanilla", "sapo"), per_token=per_token)
    if name == "sapo" and how != "seq_mean_token_mean":
        asked, forced = (verl_loss(verl, "sapo", batch, actor(verl, batch), MODES[x]) for x in (how, HOW[-1]))
        assert all(torch.equal(a, b) for a, b in zip(asked, forced, strict=True))
        return
    compared(verl, name, objective, fields, how, batch)


def test_gspo_of_the_paper_is_verls_only_where_a_sequence_has_one_advantage(verl):
    row = Method(objective=Clipped(unit="geometric", eps_low=0.03, eps_high=0.04), aggregate="token_mean")
    batch = random_batch(0, far=False)
    one = by_sequence(batch)
    agree(ours(row, one), *verl_loss(verl, "gspo", one, actor(verl, one, **GSPO), "token-mean"))
    differ(ours(row, batch).gradient, verl_loss(verl, "gspo", batch, actor(verl, batch, **GSPO), "token-mean")[1])


def test_gspo_beyond_10_nats_is_limited_there_in_verl_and_at_20_here(verl):
    """Log-ratios of 12 and 16 in the mean 14, A = -1: e^14 here, e^10 there."""
    batch = one_sequence(old=[-100.0, -100.0], logp=[-88.0, -84.0], advantage=-1.0)
    loss, gradient = verl_loss(verl, "gspo", batch, actor(verl, batch), "token-mean")
    assert loss.item() == pytest.approx(math.exp(10))
    assert gradient.tolist() == [[0.0, 0.0]]
    mine = ours(Method(objective=Clipped(unit="geometric", gradient="token"), aggregate="token_mean"), batch)
    assert mine.loss.item() == pytest.approx(math.exp(14))
    assert mine.gradient.tolist()[0] == pytest.approx([math.exp(14) / 2] * 2)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_geo_mean_is_gmpo(verl, seed, per_token):
    """As it is, the 1e-8 that verl adds to the lengths shows in the eighth digit, and is all that differs."""
    batch = random_batch(seed, far=False, per_token=per_token)
    batch = replace(batch, advantages=batch.advantages.where(batch.advantages != 0, 0.5))
    if per_token:  # not pushed, and left out of the geometric mean
        batch.advantages[:, 1::4] = 0.0
    config = actor(verl, batch, clip_ratio_low=0.1, clip_ratio_high=0.2)
    floats = replace(batch, mask=batch.mask.double())  # an integer mask would round some of the 1e-8 away
    theirs = verl_loss(verl, "geo_mean", floats, config, "token-mean")
    objective = GeometricClipped(eps_low=0.1, eps_high=0.2)
    mine = ours(Method(objective=objective, aggregate="seq_mean_token_mean"), batch)
    torch.testing.assert_close(mine[:2], theirs, rtol=0, atol=2e-8)
    leaf = batch.logp.clone().requires_grad_()
    lp = batch.pack(leaf)
    packed = lp.like_caller(batch.advantages)
    rows = (lp.segments.mean(packed) != 0).nonzero().squeeze(-1)
    mean, lengths = lp.segments.mean(packed)[rows], lp.segments.lengths.double()[rows]
    shrink = lengths / (lengths + 1e-8)
    log_g = (lp.segments.mean(objective(lp, packed).loss)[rows] / -mean).log()
    loss = (-mean * shrink * (log_g * shrink).exp()).sum() / len(batch.mask)
    (gradient,) = torch.autograd.grad(loss, leaf)
    torch.testing.assert_close((loss.detach(), gradient), theirs, rtol=0, atol=1e-12)
    assert int((gradient != 0).sum()) > 20


def test_geo_mean_of_a_log_ratio_of_fifty_explodes_in_verl_and_is_limited_here(verl):
    """mean(50, -0.2) = 24.9 there, mean(20, -0.2) = 9.9 here."""
    batch = one_sequence(old=[-51.0, -1.0], logp=[-1.0, -51.0], advantage=-1.0)
    loss, gradient = verl_loss(verl, "geo_mean", batch, actor(verl, batch), "token-mean")
    assert loss.item() == pytest.approx(math.exp(24.9), rel=1e-6)
    assert gradient.tolist()[0] == pytest.approx([math.exp(24.9) / 2, 0.0], rel=1e-6)
    mine = ours(Method(objective=GeometricClipped(eps_low=0.2, eps_high=0.2), aggregate="seq_mean_token_mean"), batch)
    assert mine.loss.item() == pytest.approx(math.exp(9.9))
    assert mine.gradient.tolist() == [[0.0, 0.0]]


def test_dro_weights_multiply_push_and_pull_alike_and_no_log_ratio_is_limited(verl):
    batch = random_batch(2, far=False)
    weights = torch.rand(batch.mask.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    plain, weighted = (
        verl_loss(verl, "dro", batch, actor(verl, batch, **dro(verl, 0.7)), "token-sum", w)[1] for w in (None, weights)
    )
    mine = ours(Method(objective=Quadratic(beta=0.7), aggregate="token_mean"), batch, normalizer=1.0).gradient
    same(mine, plain)
    same(mine * weights, weighted)
    far = replace(batch, old=batch.old - 300.0, logp=batch.logp - 300.0 * (batch.logp < -1))
    assert float(((far.logp - far.old) * far.mask).max()) > 100
    compared(verl, "dro", Quadratic(beta=0.1), {"beta": 0.1}, "token_mean", far)


def test_a_float_mask_makes_sequence_means_of_verl_too_small(verl):
    """verl divides by T + 1e-8, which an integer mask rounds away."""
    batch = random_batch(0, far=False)
    mine = ours(Method(objective=Soft(), aggregate="seq_mean_token_mean"), batch).gradient
    floats = replace(batch, mask=batch.mask.double())
    _, theirs = verl_loss(verl, "sapo", floats, actor(verl, batch), "seq-mean-token-mean")
    lengths = floats.mask.sum(1, keepdim=True)
    torch.testing.assert_close(mine * lengths / (lengths + 1e-8), theirs, rtol=1e-12, atol=1e-18)
    assert int(((mine - theirs).abs() > 1e-9 * mine.abs()).sum()) > 20
