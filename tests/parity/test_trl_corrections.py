"""What TRL puts around its loss, against our gates, weights and penalties.

The off-policy sequence mask, importance ratios between vLLM and the trainer (which TRL computes here
by itself, from our log-probs), and the KL to the reference.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from offdrift.correction import Correction, Gate, Weight
from offdrift.errors import BadValueError
from offdrift.methods import METHODS, override
from offdrift.penalty import KLPenalty
from tests.parity.peers import Batch, agree, differ, ours, random_batch, same
from tests.parity.trl_trainer import HORIZON, LOSSES, Trainer, sequence_batch

SEEDS = range(3)


# -- off-policy sequence mask ---------------------------------------------------------------------


def opsm(delta: float, on: str = "full") -> Gate:
    return Gate(statistic="ratio", on=on, unit="seq_mean", low=math.exp(-delta), advantage="negative")


def test_the_row_of_the_sequence_mask():
    assert METHODS["opsm"].correction.gates == (opsm(0.5),)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("delta", [0.5, 0.05])
def test_sequence_mask(trl, delta, seed):
    """dis.06: between the current policy and what the engine says, unlike slime's recomputed."""
    batch = sequence_batch(seed, sequences=30)
    trainer = Trainer(trl.grpo, batch, off_policy_mask_threshold=delta)
    inputs = {**trainer.given(), "sampling_per_token_logps": batch.rollout}
    row = override(METHODS["opsm"], {"gate.low": math.exp(-delta)})
    mine = ours(row, batch)
    agree(mine, *trainer.loss(inputs))
    assert 0 < int(mine.keep.sum()) < batch.tokens
    mask = trl.grpo.get_off_policy_mask(batch.advantages[:, :1], batch.logp, batch.rollout, batch.mask, delta)
    assert torch.equal(mine.keep, mask.bool() & batch.mask.bool())


def test_sequence_mask_without_the_engines_log_probs(trl):
    batch = sequence_batch(1, sequences=30)
    trainer = Trainer(trl.grpo, batch, off_policy_mask_threshold=0.05)
    theirs = trainer.loss(trainer.given())
    row = replace(METHODS["opsm"], correction=Correction() & opsm(0.05, on="staleness"))
    agree(ours(row, batch), *theirs)
    assert 0 < int(ours(row, batch).keep.sum()) < batch.tokens
    differ(ours(METHODS["opsm"], batch).gradient, theirs[1])


def test_sequence_mask_by_the_sign_of_each_token(trl):
    """With an advantage per token, only the negative tokens of a sequence are masked, in both."""
    batch = random_batch(2, far=False, sequences=30)
    trainer = Trainer(trl.grpo, batch, off_policy_mask_threshold=0.02)
    inputs = {**trainer.given(), "sampling_per_token_logps": batch.rollout}
    row = override(METHODS["opsm"], {"gate.low": math.exp(-0.02)})
    mine = ours(row, batch)
    agree(mine, *trainer.loss(inputs))
    kept = mine.keep.sum(-1)
    assert int(((kept > 0) & (kept < batch.mask.sum(-1))).sum()) >= 2


# -- vLLM's importance ratios ---------------------------------------------------------------------


def vllm_weight(mode: str, low: float | None, high: float | None) -> Weight:
    unit, _, outside = mode.partition("_")
    return Weight(on="mismatch", unit=unit, floor=low, cap=high, outside=outside)


MODES = ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
LIMITS = [(None, 3.0), (0.9, 1.2), (0.95, None)]


def generated(trl, batch: Batch, **fields: Any) -> tuple[Trainer, dict[str, Tensor], Batch]:
    """TRL's own inputs of the loss, and the batch with the advantages it computed."""
    trainer = Trainer(trl.grpo, batch, use_vllm=True, **fields)
    inputs = trainer.generated()
    advantages = inputs["advantages"][:, None].expand_as(batch.logp)
    return trainer, inputs, replace(batch, advantages=advantages)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("low", "high"), LIMITS)
@pytest.mark.parametrize("mode", MODES)
def test_vllm_ratios(trl, mode, low, high, seed):
    """dis.52, dis.53: TRL's limits are on both sides, if both are given."""
    trainer, inputs, batch = generated(
        trl,
        sequence_batch(seed, sequences=20, far=high is not None),
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=low,
        vllm_importance_sampling_clip_max=high,
    )
    weight = vllm_weight(mode, low, high)
    row = replace(METHODS["grpo"], correction=Correction() & weight)
    mine = ours(row, batch)
    # Ours is never below e^-20 = 2e-9 unless it is masked.
    ratio = inputs["importance_sampling_ratio"] * batch.mask
    same(mine.weight, ratio.where(ratio == 0, ratio.clamp(min=math.exp(-20))))
    agree(mine, *trainer.loss(inputs))
    assert 0 < int(weight(batch.pack()).limited.sum()) < batch.tokens
    same(batch.advantages[:, 0], trainer.batch.advantages[:, 0] - trainer.batch.advantages[:, 0].mean())


@pytest.mark.parametrize("loss_type", ["gspo", "luspo", "cispo", "sapo", "dr_grpo"])
def test_other_losses_under_trls_default_ratio(trl, loss_type):
    """dis.62: on by default, a whole sequence dropped above 3; off by default with us."""
    name, fields, changes = LOSSES.get(loss_type, (loss_type, {}, {}))
    if loss_type in ("gspo", "luspo"):
        objective = METHODS[loss_type].objective
        fields = {
            "importance_sampling_level": "sequence",
            "epsilon_low": objective.eps_low,
            "epsilon_high": objective.eps_high,
        }
    trainer, inputs, batch = generated(
        trl, sequence_batch(3, sequences=20), **fields, loss_type="grpo" if loss_type == "gspo" else loss_type
    )
    assert trainer.trainer.vllm_importance_sampling_mode == "sequence_mask"
    row = override(METHODS[name], changes)
    weight = vllm_weight("sequence_mask", None, 3.0)
    assert METHODS["decoupled_seq_mis"].correction.weights == (weight,)  # the row has TRL's default
    row = replace(row, correction=row.correction & weight)
    agree(ours(row, batch, horizon=HORIZON), *trainer.loss(inputs))


def test_ratios_beyond_20_nats(trl):
    """Without an upper limit TRL weighs such a token by e^30.5, and we by e^20."""
    _, inputs, batch = generated(
        trl,
        sequence_batch(0, far=True),
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_min=0.5,
        vllm_importance_sampling_clip_max=None,
    )
    packed = batch.pack()
    mine = packed.unpack(Weight(on="mismatch", floor=0.5)(packed).weight)
    same(mine, (inputs["importance_sampling_ratio"] * batch.mask).clamp(max=math.exp(20)))
    assert float(inputs["importance_sampling_ratio"].max()) == pytest.approx(math.exp(30.5))


def test_what_the_engine_could_not_score(trl):
    """TRL counts a token without a log-prob as ratio 1; we refuse it, by sequence and token."""
    batch = sequence_batch(0)
    hurt = replace(batch, rollout=batch.rollout.index_fill(1, torch.tensor([4]), math.nan))
    _, inputs, _ = generated(trl, hurt, vllm_importance_sampling_mode="token_truncate")
    assert inputs["importance_sampling_ratio"][:, 4].tolist() == [1.0] * batch.sequences
    with pytest.raises(BadValueError, match="logp_rollout of sequence 0 is nan at trainable token 4"):
        hurt.pack()
    replace(hurt, mask=hurt.mask.index_fill(1, torch.tensor([4]), 0)).pack()


@pytest.mark.parametrize("seed", SEEDS)
def test_vespo_with_truncated_ratios(trl, seed):
    trainer, inputs, batch = generated(
        trl,
        sequence_batch(seed, far=True),
        loss_type="vespo",
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_max=2.0,
    )
    agree(ours(METHODS["vespo"], batch), *trainer.loss(inputs))


def test_vespo_with_masked_ratios(trl):
    """TRL takes a masked token's ratio as 1e-8, so that its whole sequence vanishes; we truncate."""
    trainer, inputs, batch = generated(
        trl,
        sequence_batch(1),
        loss_type="vespo",
        vllm_importance_sampling_mode="token_mask",
        vllm_importance_sampling_clip_max=1.2,
    )
    gradient = trainer.loss(inputs)[1]
    mine = ours(override(METHODS["vespo"], {"weight.cap": 1.2}), batch)
    masked = ((inputs["importance_sampling_ratio"] == 0) & (batch.mask > 0)).any(-1)
    assert 0 < int(masked.sum()) < batch.sequences - 1
    same(mine.gradient[~masked], gradient[~masked])
    assert float(gradient[masked].abs().max()) < 1e-8
    differ(mine.gradient[masked], gradient[masked], by=1e-5)


# -- KL to the reference --------------------------------------------------------------------------


def k3(beta: float) -> KLPenalty:
    return KLPenalty(estimator="k3", coef=beta)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "cispo", "sapo"])
def test_kl(trl, loss_type, seed):
    name, fields, changes = LOSSES[loss_type]
    batch = sequence_batch(seed)
    trainer = Trainer(trl.grpo, batch, loss_type=loss_type, beta=0.3, **fields)
    row = replace(override(METHODS[name], changes), penalty=k3(0.3))
    agree(ours(row, batch, horizon=HORIZON), *trainer.loss(trainer.given()))


@pytest.mark.parametrize("name", ["gmpo", "gspo"])
def test_kl_of_sequence_losses(trl, name):
    batch = sequence_batch(1)
    fields = {"epsilon_low": 0.4, "epsilon_high": 0.4}
    base, fields = trl.gmpo, fields
    if name == "gspo":
        fields = {"epsilon_low": 3e-4, "epsilon_high": 4e-4, "importance_sampling_level": "sequence"}
        base = trl.grpo
    trainer = Trainer(base, batch, beta=0.3, **fields)
    agree(ours(replace(METHODS[name], penalty=k3(0.3)), batch), *trainer.loss(trainer.given()))


def test_neither_gates_nor_weights_touch_the_kl(trl):
    """dis.61: in TRL as with us; `gate_scope="all"` is verl's."""
    trainer, inputs, batch = generated(trl, sequence_batch(2, sequences=20), beta=0.3, off_policy_mask_threshold=0.05)
    correction = Correction() & opsm(0.05) & vllm_weight("sequence_mask", None, 3.0)
    row = replace(METHODS["grpo"], correction=correction, penalty=k3(0.3))
    loss, gradient = trainer.loss(inputs)
    mine = ours(row, batch)
    agree(mine, loss, gradient)
    assert 0 < int(mine.keep.sum()) < batch.tokens
    assert int((mine.weight[batch.mask > 0] == 0).sum()) > 0
    differ(ours(replace(row, gate_scope="all"), batch).gradient, gradient)


@pytest.mark.parametrize("seed", SEEDS)
def test_corrected_kl_of_one_engine(trl, seed):
    """With gradient through the ratio on both sides."""
    batch = sequence_batch(seed).bypass
    far = (batch.logp - batch.old).abs() > 20
    batch = replace(batch, logp=batch.logp.where(~far, batch.old))
    trainer = Trainer(trl.grpo, batch, beta=0.3, use_bias_correction_kl=True)
    penalty = KLPenalty(estimator="k3_corrected", coef=0.3)
    loss, gradient = trainer.loss(trainer.given())
    agree(ours(replace(METHODS["grpo"], penalty=penalty), batch), loss, gradient)
    stopped = replace(penalty, ratio_gradient=False)
    differ(ours(replace(METHODS["grpo"], penalty=stopped), batch).gradient, gradient)


def test_corrected_kl_between_two_engines(trl):
    """dis.38: TRL corrects by its policy's ratio, pi / pi_old; DeepSeek and we by pi / mu."""
    batch = sequence_batch(0)
    trainer = Trainer(trl.grpo, batch, beta=0.3, use_bias_correction_kl=True)
    loss, gradient = trainer.loss(trainer.given())
    row = replace(METHODS["grpo"], penalty=KLPenalty(estimator="k3_corrected", coef=0.3))
    differ(ours(row, batch).gradient, gradient)
    # The objective and its KL both read the staleness then.
    agree(ours(row, replace(batch, rollout=batch.old)), loss, gradient)


def test_deepseek(trl):
    """The recipe's parts in TRL: two engines apart from the KL, which agrees where they are one."""
    batch = sequence_batch(3, sequences=30).bypass
    trainer = Trainer(trl.grpo, batch, beta=0.001, use_bias_correction_kl=True, off_policy_mask_threshold=0.5)
    inputs = {**trainer.given(), "sampling_per_token_logps": batch.rollout}
    assert METHODS["deepseek_v32"].penalty == KLPenalty(estimator="k3_corrected", coef=0.001)
    agree(ours(METHODS["deepseek_v32"], batch), *trainer.loss(inputs))
