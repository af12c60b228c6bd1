"""The critic of PPO: a value of every prefix, learned beside the policy from the same batches.

    V(s_t) = w . h_t + b,   h_t the last hidden state of a model of its own that has read the prompt and y_<t

It begins as a copy of the policy's weights with a value of 0 everywhere. With `critic.shared` there is no such model:
h_t is the state that the policy's own output head reads, one optimizer takes one step for both, and the value's loss
moves the policy's body, too:

    loss = policy loss + coef * mean over tokens of the value's loss
"""

from __future__ import annotations

import contextlib
import copy
import math
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from offdrift.advantages.base import Credit
from offdrift.advantages.token import generalized_advantage
from offdrift.engines.score import chunks, left_right_padded, score
from offdrift.errors import EngineError
from offdrift.records.rollouts import Rollouts
from offdrift.segments import Segments
from offdrift_lab.train.features.base import Feature, Metrics
from offdrift_lab.train.loop.sharded import clip_gradients, in_step, is_sharded
from offdrift_lab.train.settings import recipe
from offdrift_lab.train.settings.recipe import Recipe

SUMS = tuple(
    f"critic/{name}" for name in ("vf", "vf_clipped", "value", "return", "return_squared", "error", "error_squared")
)
"""Sums over tokens that the metrics of the critic are made of; `error` is the return minus the value before."""


class ValueModel(nn.Module):
    """A language model's body with one number per position in place of its logits."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.body = copy.deepcopy(model.base_model)
        self.head = nn.Linear(model.config.get_text_config().hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, rollouts: Rollouts) -> Float[Tensor, " n"]:
        """Value before each response token."""
        inputs = left_right_padded(rollouts, device=self.head.weight.device)
        states = self.body(
            input_ids=inputs.ids, attention_mask=inputs.attention, position_ids=inputs.positions, use_cache=False
        ).last_hidden_state
        # The state at the last prompt token precedes the first response token.
        first = int(rollouts.prompt_cu_seqlens.diff().max()) - 1
        # A sum over the only column, since sharded modules should return no views.
        return self.head(states[inputs.rows, first + inputs.columns].to(self.head.weight.dtype)).sum(-1)


class ValueHead(nn.Linear):
    """One number per hidden state of the policy; 0 at first."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model.config.get_text_config().hidden_size, 1)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, input: Float[Tensor, "n h"]) -> Float[Tensor, " n"]:
        """Value before each response token, from the state there. Gradient: to the head, and to the policy's body."""
        return super().forward(input.to(self.weight.dtype)).squeeze(-1)


class Critic(NamedTuple):
    """A value model, prepared by accelerate, with its optimizer and settings; or a head on the policy's body."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    settings: recipe.CriticSettings
    policy: nn.Module | None = None
    """The policy whose states the head reads, where the critic is shared; its optimizer is then the policy's."""

    @staticmethod
    def start(model: PreTrainedModel, settings: recipe.CriticSettings, accelerator: Accelerator) -> Critic:
        """A critic that begins at the policy's weights."""
        critic = ValueModel(model).to(accelerator.device)
        optimizer = torch.optim.AdamW(critic.parameters(), lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.0)
        prepared, optimizer = accelerator.prepare(critic, optimizer)
        return Critic(prepared, optimizer, settings)

    @torch.no_grad()
    def values(self, rollouts: Rollouts, *, token_budget: int, half: torch.dtype | None = None) -> Float[Tensor, " n"]:
        """Value before every response token, on the host. Gradient: none."""
        self.model.eval()
        values = torch.zeros(len(rollouts.tokens))
        if self.policy is not None:
            self.policy.eval()
        for sequences, _ in in_step(self.model, chunks(rollouts, token_budget=token_budget)):
            piece = rollouts.select(sequences)
            read = piece if self.policy is None else score(self.policy, piece, with_states=True, half=half).states
            values[rollouts.segments.rows(sequences)] = self.model(read).float().cpu()
        return values

    def returns(
        self, rewards: Float[Tensor, " r"], values: Float[Tensor, " n"], segments: Segments
    ) -> Float[Tensor, " n"]:
        """Targets of the values: generalized advantages before whitening, plus the values themselves."""
        gamma, lam = self.settings.gamma, self.settings.lam
        token_rewards = Credit(rewards=rewards, segments=segments).token_rewards
        return generalized_advantage(token_rewards, values, segments, gamma=gamma, lam=lam) + values


def value_loss(
    values: Float[Tensor, " n"],
    old: Float[Tensor, " n"],
    returns: Float[Tensor, " n"],
    *,
    clip: float | None = None,
) -> Float[Tensor, " n"]:
    """PPO's loss of each value, before averaging.

        1/2 max((v - R)^2, (clamp(v, old - clip, old + clip) - R)^2)

    Args:
        values: the critic's values now.
        old: its values when the batch arrived.
        returns: their targets.
        clip: how far a value may move before it gains nothing by moving on; None: 1/2 (v - R)^2.

    Gradient: to `values`.

    Example:
        >>> value_loss(torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([1.0]), clip=0.2)
        tensor([0.3200])

    Reference: Proximal Policy Optimization, arXiv:1707.06347; the clipped form is of its authors' code.
    """
    error = (values - returns).square()
    if clip is not None:
        error = torch.maximum(error, (values.clamp(old - clip, old + clip) - returns).square())
    return error / 2


def value_terms(
    values: Float[Tensor, " n"], old: Float[Tensor, " n"], returns: Float[Tensor, " n"], *, clip: float | None
) -> tuple[Float[Tensor, ""], Float[Tensor, " sums"]]:
    """The summed `value_loss` of some tokens, and their part of `SUMS`. Gradient: of the loss, to `values`."""
    losses = value_loss(values, old, returns, clip=clip)
    limited = (values - old).abs() > (math.inf if clip is None else clip)
    error = returns - old
    terms = (losses, limited, old, returns, returns.square(), error, error.square())
    return losses.sum(), torch.stack([x.detach().double().sum() for x in terms])


def critic_step(
    accelerator: Accelerator,
    critic: Critic,
    rollouts: Rollouts,
    old: Float[Tensor, " n"],
    returns: Float[Tensor, " n"],
    *,
    token_budget: int,
    max_grad_norm: float,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """One optimizer step of the critic on a minibatch: the mean of `value_loss` over all its tokens.

    Args:
        old: values when the batch arrived, per token.
        returns: their targets, per token.

    Returns: sums and maxima over all processes, for the metrics `critic/...`.

    Raises: `EngineError` if the gradient is not finite; the critic is left as it was.
    """
    world, model, clip = accelerator.num_processes, critic.model, critic.settings.clip
    tokens = len(old) if world == 1 else sum(gather_object([len(old)]))
    pieces = list(chunks(rollouts, token_budget=token_budget))
    passes = len(pieces) if world == 1 else max(gather_object([len(pieces)]))
    model.train()
    critic.optimizer.zero_grad(set_to_none=True)
    sums = torch.zeros(len(SUMS), dtype=torch.float64, device=accelerator.device)
    for i in range(passes):
        # As in the policy's step: processes with fewer pieces repeat their last without counting it.
        counts, sequences = float(i < len(pieces)), pieces[min(i, len(pieces) - 1)]
        rows = rollouts.segments.rows(sequences)
        with contextlib.nullcontext() if i == passes - 1 or is_sharded(model) else accelerator.no_sync(model):
            values = model(rollouts.select(sequences)).float()
            loss, terms = value_terms(values, old[rows].to(values.device), returns[rows].to(values.device), clip=clip)
            accelerator.backward(counts * loss * world / tokens)
        sums += counts * terms
    norm = clip_gradients(accelerator, model, max_grad_norm)
    if not bool(norm.isfinite()):
        raise EngineError(
            f"the critic's gradient norm is {norm.item()}; its step was not taken. Lower critic.lr, or look at the "
            "rewards of the last batch"
        )
    critic.optimizer.step()
    sums = sums.cpu() if world == 1 else torch.stack(gather_object([sums.cpu()])).sum(0)
    return dict(zip(SUMS, sums, strict=True)), {"critic/grad_norm": norm}


class OwnCritic(Feature):
    """A critic that is a model of its own, with an optimizer of its own, which steps on every minibatch."""

    critic: Critic

    def __init__(self, settings: recipe.CriticSettings) -> None:
        self.settings = settings

    @classmethod
    def of(cls, recipe: Recipe, arm: str) -> OwnCritic | None:
        return cls(recipe.critic) if "values" in recipe.inputs_of(arm) and not recipe.critic.shared else None

    def start(self, arm: Any) -> None:
        self.critic = Critic.start(arm.run.model, self.settings, arm.accelerator)

    def stepped(self, arm: Any, update: Any) -> Metrics:
        batch, optim = update.batch, arm.optim
        assert batch.values is not None
        assert batch.returns is not None
        limits = {"token_budget": optim.token_budget, "max_grad_norm": optim.max_grad_norm}
        return Metrics(
            *critic_step(arm.accelerator, self.critic, batch.rollouts, batch.values, batch.returns, **limits)
        )


class SharedCritic(Feature):
    """`critic.shared`: a head on the policy's body, whose loss is a term of the policy's, with its optimizer."""

    adds_term = True
    critic: Critic

    def __init__(self, settings: recipe.CriticSettings) -> None:
        self.settings = settings
        self.sums: Tensor | None = None
        """Sums over this process's tokens of the step, as `SUMS`."""

    @classmethod
    def of(cls, recipe: Recipe, arm: str) -> SharedCritic | None:
        return cls(recipe.critic) if "values" in recipe.inputs_of(arm) and recipe.critic.shared else None

    def prepare(self, run: Any, model: nn.Module) -> None:
        self.head: nn.Module = ValueHead(run.model).to(run.accelerator.device)

    def modules(self) -> tuple[nn.Module, ...]:
        return (self.head,)

    def start(self, arm: Any) -> None:
        self.head = arm.accelerator.prepare(self.head)
        self.critic = Critic(self.head, arm.optimizer, self.settings, policy=arm.model)

    def stepping(self, arm: Any) -> None:
        self.head.train()
        self.sums = torch.zeros(len(SUMS), dtype=torch.float64, device=arm.accelerator.device)

    def term(self, arm: Any, piece: Any, *, tokens: int, counts: bool) -> Tensor:
        """coef times the mean over the step's tokens of `value_loss`."""
        batch = piece.batch
        assert batch.values is not None
        assert batch.returns is not None
        values = self.head(piece.scored.states).float()
        old, returns = (x.to(values.device) for x in (batch.values, batch.returns))
        loss, terms = value_terms(values, old, returns, clip=self.settings.clip)
        assert self.sums is not None
        self.sums += counts * terms
        return self.settings.coef * loss * arm.accelerator.num_processes / tokens

    def stepped(self, arm: Any, update: Any) -> Metrics:
        """Sums over all processes, and the norm of the head's own gradient before it was clipped."""
        assert self.sums is not None
        gradients = [x.grad for x in self.head.parameters() if x.grad is not None]
        # Clipping has divided it by as much as the whole gradient.
        clipped = torch.nn.utils.get_total_norm(gradients).cpu()
        norm = clipped * (update.norm / arm.optim.max_grad_norm).clamp(min=1)
        sums = self.sums.cpu()
        if arm.accelerator.num_processes > 1:
            sums = torch.stack(gather_object([sums])).sum(0)
        return Metrics(dict(zip(SUMS, sums, strict=True)), {"critic/grad_norm": norm})
