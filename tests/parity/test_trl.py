"""TRL's own loss, called on a bare trainer, against the rows and compositions that it amounts to.

`GRPOTrainer._compute_loss` runs as it is, on a trainer that was never constructed: it has the numbers
that the method reads and a forward pass that returns our log-probs. Importance ratios of vLLM come
from the real `_generate_and_score_completions`, with generation, scoring and rewards put in.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from offdrift.correction import Correction, Gate, Weight
from offdrift.errors import BadValueError
from offdrift.kl import KLPenalty
from offdrift.loss import policy_loss
from offdrift.methods import METHODS, Method, override
from offdrift.objectives import Clipped, Reinforce
from offdrift.stats.summary import summarize
from tests.parity.peers import Batch, agree, differ, ours, random_batch, same, theirs

SEEDS = range(3)
HORIZON = 31
OLD, REF = object(), object()
"""Stand for the models that TRL runs forward."""


@functools.cache
def load_trl() -> SimpleNamespace:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl.experimental.gmpo.gmpo_trainer import GMPOTrainer
        from trl.trainer.grpo_trainer import GRPOTrainer
    return SimpleNamespace(grpo=GRPOTrainer, gmpo=GMPOTrainer)


@pytest.fixture(scope="module")
def trl():
    return load_trl()


ONE_PROCESS = SimpleNamespace(
    device=torch.device("cpu"),
    num_processes=1,
    process_index=0,
    gather=lambda x: x,
    reduce=lambda x, reduction: x,
)
ARGS = {
    "delta": None,
    "use_bias_correction_kl": False,
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.25,  # exact in float32, see the test of the published 1.05
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
    "steps_per_generation": 1,
    "gradient_accumulation_steps": 1,
    "per_device_train_batch_size": None,
    "gradient_checkpointing_kwargs": None,
}
FIELDS = {
    "loss_type": "grpo",
    "importance_sampling_level": "token",
    "epsilon_low": 0.2,
    "epsilon_high": 0.2,
    "beta": 0.0,
    "off_policy_mask_threshold": None,
    "use_vllm": False,
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0,
    "vllm_importance_sampling_clip_min": None,
    "current_gradient_accumulation_steps": 1,
    "max_completion_length": HORIZON,
    "aux_loss_enabled": False,
    "top_entropy_quantile": 1.0,
    "_entropy_bonus_enabled": False,
    "accelerator": ONE_PROCESS,
    "model": SimpleNamespace(training=True, is_gradient_checkpointing=False),
    "ref_model": REF,
    "num_iterations": 1,
    "environment_factories": None,
    "environments": None,
    "tools": None,
    "pad_to_multiple_of": None,
    "mask_truncated_completions": False,
    "_tokenizer": SimpleNamespace(pad_token_id=0),
    "multi_objective_aggregation": "sum_then_normalize",
    "reward_weights": torch.ones(1, dtype=torch.float64),
    "reward_func_names": ["reward"],
    "scale_rewards": "none",
}


class Trainer:
    """A bare trainer and the batch that its forward passes return."""

    def __init__(self, base: type, batch: Batch, **changes: Any) -> None:
        self.batch = batch
        self.trainer = trainer = object.__new__(base)
        args = {name: changes.pop(name, value) for name, value in ARGS.items()}
        for name, value in {**FIELDS, **changes}.items():
            setattr(trainer, name, value)
        trainer.args = SimpleNamespace(**args)
        trainer.num_generations = batch.sequences
        trainer._metrics = defaultdict(functools.partial(defaultdict, list))
        trainer._logs = defaultdict(functools.partial(defaultdict, list))
        trainer._logs.update({name: [] for name in ("prompt", "completion", "advantages")})
        trainer._pending_extra_logs, trainer._pending_metrics = {}, {}
        trainer._get_per_token_logps_and_entropies = self.forward
        trainer._generate = self.generate
        trainer._calculate_rewards = lambda *_: batch.advantages[:, :1]

    def forward(self, model: Any, *_: Any, **__: Any) -> tuple[Tensor, Tensor, None]:
        known = {id(self.trainer.model): self.batch.old, id(REF): self.batch.ref}
        logps = known.get(id(model), model)
        return logps, torch.zeros_like(logps), None

    def generate(self, prompts: list) -> tuple:
        """Completions as long as their last trainable token; holes are what tools returned."""
        b, t = self.batch.mask.shape
        last = (self.batch.mask * torch.arange(1, t + 1)).amax(-1).clamp(min=1).tolist()
        prompt, ids = [[1]] * b, [[1] * n for n in last]
        holes = [row[:n].tolist() for row, n in zip(self.batch.mask, last, strict=True)]
        logps = [row[:n].tolist() for row, n in zip(self.batch.rollout, last, strict=True)]
        return prompt, ids, holes, [""] * b, logps, {}, None, None

    def generated(self) -> dict[str, Tensor]:
        """What TRL itself makes of a generation: old log-probs, ratios, advantages, ..."""
        prompts = [{"prompt": ""} for _ in range(self.batch.sequences)]
        return self.trainer._generate_and_score_completions(prompts)

    def given(self) -> dict[str, Tensor]:
        """The inputs of the loss, put together by hand."""
        batch, prompt = self.batch, torch.ones(self.batch.sequences, 1, dtype=torch.int64)
        by_token = (batch.advantages != batch.advantages[:, :1]) & (batch.mask > 0)
        return {
            "prompt_ids": prompt,
            "prompt_mask": prompt,
            "completion_ids": torch.ones_like(batch.mask),
            "completion_mask": batch.mask,
            "advantages": batch.advantages if by_token.any() else batch.advantages[:, 0],
            "old_per_token_logps": batch.old,
            "ref_per_token_logps": batch.ref,
            "num_items_in_batch": batch.mask.sum(),
        }

    def loss(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return theirs(lambda leaf: self.trainer._compute_loss(leaf, inputs), self.batch)


def sequence_batch(seed: int, **options: Any) -> Batch:
    """One advantage per sequence, also where tokens are masked; no staleness beyond 20 nats.

    TRL exponentiates log-ratios as they are; see the token made by hand below.
    """
    batch = random_batch(seed, per_token=False, **{"far": False, **options})
    far = (batch.logp - batch.old).abs() > 20
    mean = (batch.advantages * batch.mask).sum(-1) / batch.mask.sum(-1).clamp(min=1)
    fields = {"logp": batch.logp.where(~far, batch.old - 0.1)}
    return replace(batch, advantages=mean[:, None].expand_as(batch.logp).clone(), **fields)


# -- loss types -----------------------------------------------------------------------------------

LOSSES: dict[str, tuple[str, dict, dict]] = {
    "grpo": ("grpo", {}, {}),
    "bnpo": ("ppo_clip", {}, {}),
    "dr_grpo": ("dr_grpo", {}, {}),
    "dapo": ("dapo", {"epsilon_high": 0.28}, {}),
    "cispo": ("cispo_upper", {"epsilon_high": 5.0}, {}),
    "sapo": ("sapo", {}, {"objective.tau_negative": 1.25}),
}
"""TRL's loss type -> our row, TRL's settings, changes of the row."""


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
    trainer = Trainer(
        trl.grpo, batch, loss_type=loss_type, importance_sampling_level="sequence", **fields
    )
    row = replace(
        METHODS[name], objective=Clipped(unit="geometric", eps_low=0.002, eps_high=0.0025)
    )
    assert METHODS[name].objective.unit == "geometric"
    agree(ours(replace(row, aggregate=how), batch, horizon=HORIZON), *trainer.loss(trainer.given()))


def test_the_row_of_luspo_has_the_numbers_of_the_test_above():
    assert METHODS["luspo"].objective == Clipped(unit="geometric", eps_low=0.002, eps_high=0.0025)
    assert METHODS["luspo"].aggregate == "seq_mean_token_sum"


@pytest.mark.parametrize("seed", SEEDS)
def test_sequence_level_cispo(trl, seed):
    batch = sequence_batch(seed)
    trainer = Trainer(
        trl.grpo, batch, loss_type="cispo", importance_sampling_level="sequence", epsilon_high=1.02
    )
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
            trl.grpo, part, loss_type=loss_type, current_gradient_accumulation_steps=len(parts),
            **options,
        )  # fmt: skip
        rows.append(trainer.loss({**trainer.given(), "num_items_in_batch": items})[1])
    return torch.cat(rows)


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo"])
def test_microbatches_of_equal_size(trl, loss_type):
    batch = sequence_batch(5)
    parts = [batch.rows(slice(0, 7)), batch.rows(slice(7, None))]
    # The generation spans one accumulation window: as many steps as micro-batches.
    gradient = accumulated(
        trl, parts, loss_type, batch.mask.sum(), steps_per_generation=2, epsilon_high=0.28
    )
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


# -- off-policy sequence mask ---------------------------------------------------------------------


def opsm(delta: float, on: str = "full") -> Gate:
    return Gate(
        statistic="ratio", on=on, unit="seq_mean", low=math.exp(-delta), advantage="negative"
    )


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
    mask = trl.grpo.get_off_policy_mask(
        batch.advantages[:, :1], batch.logp, batch.rollout, batch.mask, delta
    )
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
        trl, sequence_batch(seed, sequences=20, far=high is not None),
        vllm_importance_sampling_mode=mode, vllm_importance_sampling_clip_min=low,
        vllm_importance_sampling_clip_max=high,
    )  # fmt: skip
    weight = vllm_weight(mode, low, high)
    row = replace(METHODS["grpo"], correction=Correction() & weight)
    mine = ours(row, batch)
    # Ours is never below e^-20 = 2e-9 unless it is masked.
    ratio = inputs["importance_sampling_ratio"] * batch.mask
    same(mine.weight, ratio.where(ratio == 0, ratio.clamp(min=math.exp(-20))))
    agree(mine, *trainer.loss(inputs))
    assert 0 < int(weight(batch.pack()).limited.sum()) < batch.tokens
    same(
        batch.advantages[:, 0],
        trainer.batch.advantages[:, 0] - trainer.batch.advantages[:, 0].mean(),
    )


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
        trl, sequence_batch(3, sequences=20), **fields,
        loss_type="grpo" if loss_type == "gspo" else loss_type,
    )  # fmt: skip
    assert trainer.trainer.vllm_importance_sampling_mode == "sequence_mask"
    row = override(METHODS[name], changes)
    weight = vllm_weight("sequence_mask", None, 3.0)
    row = replace(row, correction=row.correction & weight)
    agree(ours(row, batch, horizon=HORIZON), *trainer.loss(inputs))


def test_ratios_beyond_20_nats(trl):
    """Without an upper limit TRL weighs such a token by e^30.5, and we by e^20."""
    _, inputs, batch = generated(
        trl, sequence_batch(0, far=True), vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_min=0.5, vllm_importance_sampling_clip_max=None,
    )  # fmt: skip
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
    with pytest.raises(
        BadValueError, match="logp_rollout of sequence 0 is nan at trainable token 4"
    ):
        hurt.pack()
    replace(hurt, mask=hurt.mask.index_fill(1, torch.tensor([4]), 0)).pack()


@pytest.mark.parametrize("seed", SEEDS)
def test_vespo_with_truncated_ratios(trl, seed):
    trainer, inputs, batch = generated(
        trl, sequence_batch(seed, far=True), loss_type="vespo",
        vllm_importance_sampling_mode="token_truncate", vllm_importance_sampling_clip_max=2.0,
    )  # fmt: skip
    agree(ours(METHODS["vespo"], batch), *trainer.loss(inputs))


def test_vespo_with_masked_ratios(trl):
    """TRL takes a masked token's ratio as 1e-8, so that its whole sequence vanishes; we truncate."""
    trainer, inputs, batch = generated(
        trl, sequence_batch(1), loss_type="vespo",
        vllm_importance_sampling_mode="token_mask", vllm_importance_sampling_clip_max=1.2,
    )  # fmt: skip
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
        fields = {
            "epsilon_low": 3e-4,
            "epsilon_high": 4e-4,
            "importance_sampling_level": "sequence",
        }
        base = trl.grpo
    trainer = Trainer(base, batch, beta=0.3, **fields)
    agree(ours(replace(METHODS[name], penalty=k3(0.3)), batch), *trainer.loss(trainer.given()))


def test_neither_gates_nor_weights_touch_the_kl(trl):
    """dis.61: in TRL as with us; `gate_scope="all"` is verl's."""
    trainer, inputs, batch = generated(
        trl, sequence_batch(2, sequences=20), beta=0.3, off_policy_mask_threshold=0.05
    )
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
    trainer = Trainer(
        trl.grpo, batch, beta=0.001, use_bias_correction_kl=True, off_policy_mask_threshold=0.5
    )
    inputs = {**trainer.given(), "sampling_per_token_logps": batch.rollout}
    assert METHODS["deepseek_v32"].penalty == KLPenalty(estimator="k3_corrected", coef=0.001)
    agree(ours(METHODS["deepseek_v32"], batch), *trainer.loss(inputs))
