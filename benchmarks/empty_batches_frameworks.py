"""Optimizer steps of TRL and verl on batches without a gradient, by their own code on tiny models."""

import importlib.metadata
import itertools
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from offdrift.models import TINY_SHAPE, save_for_engine, tiny_tokenizer
from offdrift.step_policy import StepPolicy, guard

WITH, EMPTY = 6, 12
"""Steps with a gradient, then steps without."""


def tiny_model() -> Qwen3ForCausalLM:
    """Two layers; always the same weights."""
    shape = {**TINY_SHAPE, "hidden_size": 64, "intermediate_size": 128}
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**shape, num_hidden_layers=2, tie_word_embeddings=True, initializer_range=0.1))


def weights(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def summary(norms: list[float], at: list[Tensor]) -> dict[str, Any]:
    """Gradient norms of the steps, and how far the steps without a gradient moved the weights, in usual steps."""
    moves = [(b - a).norm().item() for a, b in itertools.pairwise(at)]
    usual = sorted(moves[WITH // 2 : WITH])[len(moves[WITH // 2 : WITH]) // 2]
    empty = [i for i, norm in enumerate(norms) if norm == 0]
    return {
        "grad_norm_of_empty_steps": sorted({norms[i] for i in empty}),
        "empty_steps": len(empty),
        "usual_step": usual,
        "moved": (at[-1] - at[empty[0]]).norm().item() / usual if empty else 0.0,
    }


def trl(policy: StepPolicy | None) -> dict[str, Any]:
    """GRPOTrainer, AdamW as it comes: the reward is the share of digits, and from the seventh step on 1 for all."""
    warnings.simplefilter("ignore")
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    at: list[Tensor] = []

    class Watch(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            at.append(weights(kwargs["model"]))
            if policy is not None:
                guard(kwargs["optimizer"], policy)

        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            at.append(weights(kwargs["model"]))

    def reward(completions: list[str], trainer_state: Any = None, **_: Any) -> list[float]:
        if len(at) > WITH:
            return [1.0] * len(completions)
        return [sum(c.isdigit() for c in text) / 12 for text in completions]

    with tempfile.TemporaryDirectory() as folder:
        save_for_engine(tiny_model(), tiny_tokenizer(), Path(folder) / "start")
        trainer = GRPOTrainer(
            model=str(Path(folder) / "start"),
            reward_funcs=reward,
            args=GRPOConfig(
                output_dir=folder,
                use_cpu=True,
                bf16=False,
                report_to="none",
                save_strategy="no",
                disable_tqdm=True,
                logging_steps=1,
                learning_rate=1e-3,
                lr_scheduler_type="constant",
                max_completion_length=12,
                per_device_train_batch_size=8,
                num_generations=4,
                gradient_checkpointing=False,
                max_steps=WITH + EMPTY,
            ),
            train_dataset=Dataset.from_dict({"prompt": ["1+2=", "20+3=", "4*5=", "77-8="] * 16}),
            processing_class=tiny_tokenizer(),
            callbacks=[Watch()],
        )
        trainer.train()
        norms = [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]
    return summary(norms, at)


def verl(policy: StepPolicy | None) -> dict[str, Any]:
    """FSDPEngine's zero_grad and step, verl's optimizer and aggregation; then a response mask that rejects all."""
    warnings.simplefilter("ignore")
    from verl.trainer.ppo.core_algos import agg_loss
    from verl.workers.config.optimizer import FSDPOptimizerConfig, build_optimizer
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    # What a step reads of an engine: no process group is needed for it.
    engine = object.__new__(FSDPEngine)
    engine.module, engine.scaler, engine._qat_enabled = tiny_model(), None, False
    engine.optimizer_config = FSDPOptimizerConfig(lr=1e-3)
    engine.optimizer = build_optimizer(engine.module.parameters(), engine.optimizer_config)
    if policy is not None:
        guard(engine.optimizer, policy)
    random = torch.Generator().manual_seed(0)
    norms, at = [], [weights(engine.module)]
    for step in range(WITH + EMPTY):
        ids = torch.randint(2, TINY_SHAPE["vocab_size"], (8, 12), generator=random)
        advantage = torch.randn(8, 1, generator=random)
        logp = engine.module(ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        mask = torch.full_like(logp, float(step < WITH))  # rejection sampling sets rows of it to 0
        engine.optimizer_zero_grad()
        agg_loss(loss_mat=-logp * advantage, loss_mask=mask, loss_agg_mode="token-mean").backward()
        norms.append(engine.optimizer_step())
        at.append(weights(engine.module))
    config = engine.optimizer_config
    return {**summary(norms, at), "betas": list(config.betas), "weight_decay": config.weight_decay}


def frameworks() -> dict[str, Any]:
    """Each framework by itself, and with a guard that skips empty steps."""
    found: dict[str, Any] = {}
    for name, run in (("trl", trl), ("verl", verl)):
        found[name] = {"version": importlib.metadata.version(name), "step": run(None), "skip": run(StepPolicy("skip"))}
    return found
