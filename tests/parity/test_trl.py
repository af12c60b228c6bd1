"""TRL's own loss of every type, called in-process, against the rows that it amounts to.

Importance ratios between engines and the KL to a reference are in `test_trl_corrections`.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from offdrift.correction import Correction, Weight
from offdrift.loss import policy_loss
from offdrift.methods import METHODS, Method, override
from offdrift.objectives import Clipped, Reinforce
from offdrift.objectives.clipped import GeometricClipped
from offdrift.stats.metrics import summarize
from tests.parity.peers import Batch, agree, differ, ours, random_batch, same
from tests.parity.trl_trainer import HORIZON, LOSSES, Trainer, sequence_batch

SEEDS = range(3)


# -- loss types -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("loss_type", LOSSES)
def test_token_level_losses(trl, loss_type, per_token, seed):
    name, fields, changes = LOSSES[loss_type]
    batch = random_batch(seed, far=False) if per_token else sequence_batch(seed)
    trainer = Trainer(trl.grpo, batch, loss_type=loss_type, **fields)
    inputs = trainer.given()
    assert inputs["advantages"].ndim == 1 + per_token
    row = override(METHODS[name], changes)
    agree(ours(row, batch, horizon=HORIZON), *trainer.loss(inputs))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("loss_type", "name", "how"),
    [
        ("grpo", "gspo", "seq_mean_token_mean"),
        ("luspo", "luspo", "seq_mean_token_sum"),
        ("bnpo", "gspo", "token_mean"),
        ("dapo", "gspo", "token_mean"),
        ("dr_grpo", "gspo", "fixed"),
    ],
)
def test_sequence_level_losses(trl, loss_type, name, how, seed):
    """dis.11: TRL differentiates the geometric mean, as the row `gspo` does, and verl does not."""
    batch = sequence_batch(seed)
    fields = {"epsilon_low": 0.002, "epsilon_high": 0.0025}
    trainer = Trainer(trl.grpo, batch, loss_type=loss_type, importance_sampling_level="sequence", **fields)
    row = replace(METHODS[name], objective=Clipped(unit="geometric", eps_low=0.002, eps_high=0.0025))
    assert METHODS[name].objective.unit == "geometric"
    agree(ours(replace(row, aggregate=how), batch, horizon=HORIZON), *trainer.loss(trainer.given()))


def test_the_rows_have_the_numbers_that_trl_was_given():
    for name in ("grpo", "ppo_clip", "dr_grpo"):
        assert METHODS[name].objective == Clipped()
    assert METHODS["dapo"].objective == Clipped(eps_high=0.28)
    assert METHODS["luspo"].objective == Clipped(unit="geometric", eps_low=0.002, eps_high=0.0025)
    assert METHODS["gmpo"].objective == GeometricClipped(eps_low=0.4, eps_high=0.4)
    assert METHODS["cispo_upper"].correction.weights == (Weight(on="staleness", cap=5.0),)


@pytest.mark.parametrize("seed", SEEDS)
def test_sequence_level_cispo(trl, seed):
    batch = sequence_batch(seed)
    trainer = Trainer(trl.grpo, batch, loss_type="cispo", importance_sampling_level="sequence", epsilon_high=1.02)
    weight = Weight(on="staleness", unit="geometric", cap=1.02)
    method = Method(objective=Reinforce(), correction=Correction() & weight, aggregate="token_mean")
    agree(ours(method, batch), *trainer.loss(trainer.given()))
    assert 0 < int(weight(batch.pack()).limited.sum()) < batch.tokens


@pytest.mark.parametrize("seed", SEEDS)
def test_vespo_without_an_engine_of_its_own(trl, seed):
    batch = sequence_batch(seed, far=True).bypass
    trainer = Trainer(trl.grpo, batch, loss_type="vespo")
    agree(ours(METHODS["vespo"], batch), *trainer.loss(trainer.given()))


@pytest.mark.parametrize("seed", SEEDS)
def test_gmpo(trl, seed):
    batch = sequence_batch(seed)
    trainer = Trainer(trl.gmpo, batch, epsilon_low=0.4, epsilon_high=0.4)
    agree(ours(METHODS["gmpo"], batch), *trainer.loss(trainer.given()))


def test_without_old_log_probs_the_ratio_is_one_and_has_a_gradient(trl):
    batch = sequence_batch(4)
    trainer = Trainer(trl.grpo, batch)
    inputs = trainer.given()
    del inputs["old_per_token_logps"]
    current = replace(batch, old=batch.logp)
    agree(ours(METHODS["grpo"], current), *trainer.loss(inputs))


def test_the_published_temperature_is_rounded_to_float32_by_trl(trl):
    batch = sequence_batch(0)
    trainer = Trainer(trl.grpo, batch, loss_type="sapo", sapo_temperature_neg=1.05)
    theirs = trainer.loss(trainer.given())
    rounded = float(torch.tensor(1.05, dtype=torch.float32))
    agree(ours(override(METHODS["sapo"], {"objective.tau_negative": rounded}), batch), *theirs)
    assert 1e-9 < float((ours(METHODS["sapo"], batch).loss - theirs[0]).abs()) < 1e-7


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_beyond_20_nats_trl_goes_on_and_we_stop(trl, sign):
    """A ratio of e^25: TRL's loss and gradient are that large, ours are e^20 and 0."""
    far, near = torch.tensor([[-25.0]]).double(), torch.tensor([[0.0]]).double()
    fields = {"rollout": far, "old": far, "logp": near, "ref": near, "advantages": near - sign}
    batch = Batch(**fields, mask=torch.ones(1, 1, dtype=torch.int64))
    trainer = Trainer(trl.grpo, batch)
    loss, gradient = trainer.loss(trainer.given())
    mine = ours(METHODS["grpo"], batch)
    if sign < 0:  # a push up beyond the clip: neither has a gradient
        same(loss, mine.loss)
        assert not gradient.any()
        assert not mine.gradient.any()
    else:
        assert float(loss) == float(gradient) == pytest.approx(math.exp(25))
        assert float(mine.loss) == pytest.approx(math.exp(20))
        assert not mine.gradient.any()


@pytest.mark.parametrize("seed", SEEDS)
def test_fraction_of_clipped_tokens(trl, seed):
    """dis.34: where the clip changed the loss, not wherever the ratio is outside."""
    batch = sequence_batch(seed)
    trainer = Trainer(trl.grpo, batch)
    trainer.loss(trainer.given())
    (fraction,) = trainer.trainer._metrics["train"]["clip_ratio/region_mean"]
    packed = batch.pack()
    out = policy_loss(packed, METHODS["grpo"], packed.like_caller(batch.advantages))
    mine = summarize(out.stats)["objective/clip_frac_active"]
    assert 0.02 < mine < 0.5
    assert mine == pytest.approx(fraction, rel=1e-6)


# -- several micro-batches ------------------------------------------------------------------------


def accumulated(trl, parts: list[Batch], loss_type: str, items: Tensor, **options: Any) -> Tensor:
    """The gradient that TRL accumulates over micro-batches, in the shape of the step."""
    rows = []
    for part in parts:
        trainer = Trainer(
            trl.grpo, part, loss_type=loss_type, current_gradient_accumulation_steps=len(parts), **options
        )
        rows.append(trainer.loss({**trainer.given(), "num_items_in_batch": items})[1])
    return torch.cat(rows)


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo"])
def test_microbatches_of_equal_size(trl, loss_type):
    batch = sequence_batch(5)
    parts = [batch.rows(slice(0, 7)), batch.rows(slice(7, None))]
    # The generation spans one accumulation window: as many steps as micro-batches.
    gradient = accumulated(trl, parts, loss_type, batch.mask.sum(), steps_per_generation=2, epsilon_high=0.28)
    row = override(METHODS[loss_type], {"objective.eps_high": 0.28})
    same(ours(row, batch, horizon=HORIZON).gradient, gradient)


@pytest.mark.parametrize(("loss_type", "cut"), [("bnpo", 7), ("grpo", 4)])
def test_a_mean_of_microbatch_means_depends_on_the_cut(trl, loss_type, cut):
    """dis.03: bnpo divides by its own micro-batch's tokens, grpo by its sequences; ours, the step's."""
    batch, name = sequence_batch(5), LOSSES[loss_type][0]
    parts = [batch.rows(slice(0, cut)), batch.rows(slice(cut, None))]
    gradient = accumulated(trl, parts, loss_type, batch.mask.sum())
    differ(ours(METHODS[name], batch).gradient, gradient, by=1e-4)
    counts = [p.tokens if loss_type == "bnpo" else p.sequences for p in parts]
    mine = [ours(METHODS[name], p, normalizer=2.0 * n) for p, n in zip(parts, counts, strict=True)]
    same(torch.cat([m.gradient for m in mine]), gradient)


# -- delta, the two-sided clip --------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("delta", [1.3, 1.5, 4.0])
def test_delta_is_the_dual_clip(trl, delta, seed):
    batch = sequence_batch(seed)
    batch = replace(batch, logp=(batch.old + 2 * (batch.logp - batch.old)).clamp(max=0.0))
    trainer = Trainer(trl.grpo, batch, loss_type="bnpo", delta=delta)
    row = override(METHODS["delta_clip"], {"objective.dual_clip": delta})
    agree(ours(row, batch), *trainer.loss(trainer.given()))


@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_a_delta_inside_the_clip_range(trl, advantage):
    """TRL cuts the ratio first, so that a delta below 1 + eps_high stops positive pushes, too.

    And a negative push between delta and 1 + eps_high is charged the clip's price, not delta's.
    TRL's documentation recommends a delta above 1 + eps; there the two are one function.
    """
    old, logp = torch.tensor([[-1.0]]).double(), torch.tensor([[-1.0]]).double() + math.log(1.15)
    advantages = torch.full((1, 1), advantage).double()
    fields = {"rollout": old, "old": old, "logp": logp, "ref": old, "advantages": advantages}
    batch = Batch(**fields, mask=torch.ones(1, 1, dtype=torch.int64))
    trainer = Trainer(trl.grpo, batch, loss_type="bnpo", delta=1.05)
    loss, gradient = trainer.loss(trainer.given())
    mine = ours(override(METHODS["delta_clip"], {"objective.dual_clip": 1.05}), batch)
    # min(1.05 A, 1.15 A): the cut ratio where A > 0, the whole one, with its gradient, where A < 0.
    cut = 1.05 if advantage > 0 else 1.15
    assert float(loss) == pytest.approx(-advantage * cut)
    assert float(gradient) == pytest.approx(0.0 if advantage > 0 else 1.15)
    assert float(mine.loss) == pytest.approx(-1.15 if advantage > 0 else 1.05)
    assert float(mine.gradient) == pytest.approx(-1.15 if advantage > 0 else 0.0)
