"""A trainer of TRL that was never constructed: it has what its loss reads, and a forward pass that
returns the log-probs of a batch. `_compute_loss` and `_generate_and_score_completions` are TRL's own.
"""

import functools
import warnings
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.parity.peers import Batch, random_batch, theirs

HORIZON = 31
REF = object()
"""Stands for the reference model."""


@functools.cache
def load_trl() -> SimpleNamespace:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl.experimental.gmpo.gmpo_trainer import GMPOTrainer
        from trl.trainer.grpo_trainer import GRPOTrainer
    return SimpleNamespace(grpo=GRPOTrainer, gmpo=GMPOTrainer)


ONE_PROCESS = SimpleNamespace(
    device=torch.device("cpu"), num_processes=1, process_index=0, gather=lambda x: x, reduce=lambda x, reduction: x
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

    TRL exponentiates log-ratios as they are; see the token made by hand in `test_trl`.
    """
    batch = random_batch(seed, per_token=False, **{"far": False, **options})
    far = (batch.logp - batch.old).abs() > 20
    mean = (batch.advantages * batch.mask).sum(-1) / batch.mask.sum(-1).clamp(min=1)
    fields = {"logp": batch.logp.where(~far, batch.old - 0.1)}
    return replace(batch, advantages=mean[:, None].expand_as(batch.logp).clone(), **fields)


LOSSES: dict[str, tuple[str, dict, dict]] = {
    "grpo": ("grpo", {}, {}),
    "bnpo": ("ppo_clip", {}, {}),
    "dr_grpo": ("dr_grpo", {}, {}),
    "dapo": ("dapo", {"epsilon_high": 0.28}, {}),
    "cispo": ("cispo_upper", {"epsilon_high": 5.0}, {}),
    "sapo": ("sapo", {}, {"objective.tau_negative": 1.25}),
}
"""TRL's loss type -> our row, TRL's settings, changes of the row."""
