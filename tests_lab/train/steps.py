"""A step of a model outside of a run, with what a test says of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from offdrift_lab.train.features.base import Feature
from offdrift_lab.train.features.critic import Critic, SharedCritic
from offdrift_lab.train.features.loss_scale import LossScale, LossScaling
from offdrift_lab.train.features.perturb import LayerNoise, Perturbation
from offdrift_lab.train.loop.step import Learner, Update, train_step
from offdrift_lab.train.settings.optim import OptimSettings, PerturbSettings


def learner(
    accelerator: Any,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    method: Any,
    *,
    token_budget: int = 16384,
    max_grad_norm: float = 1.0,
    loss_scale: float | None = None,
    critic: Critic | None = None,
    perturb: Perturbation | None = None,
    features: tuple[Feature, ...] = (),
    **options: Any,
) -> Learner:
    """What a step needs, with features for a loss scale, a shared critic and noise in layers."""
    if loss_scale is not None:
        scaling = LossScaling()
        scaling.scale = LossScale(value=loss_scale)
        features = (*features, scaling)
    if critic is not None:
        shared = SharedCritic(critic.settings)
        shared.head = critic.model
        features = (*features, shared)
    if perturb is not None:
        noise = LayerNoise(PerturbSettings())
        noise.noise = perturb
        features = (*features, noise)
    optim = OptimSettings(token_budget=token_budget, max_grad_norm=max_grad_norm)
    return Learner(
        accelerator=accelerator,
        model=model,
        optimizer=optimizer,
        method=method,
        features=features,
        optim=optim,
        **options,
    )


def stepped(
    accelerator: Any, model: nn.Module, optimizer: Any, batch: Any, method: Any, *, view: bool = False, **options: Any
) -> Update:
    """A step on a batch; options of `learner`."""
    return train_step(learner(accelerator, model, optimizer, method, **options), batch, view=view)
