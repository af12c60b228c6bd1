"""The drafter of speculative decoding in a run: it learns from the policy's rollouts, so that it keeps up with it.

While the policy trains, a drafter that stays as it is proposes what the policy said at the start. `learn` distills it,
every few updates, on the batch that the trainer is busy with: target probabilities that the engine recorded anyway, and
the drafter's own forward passes.

Reference: ReSpec, arXiv:2510.26475 (drafters that are distilled during RL, by rollouts weighted by their rewards).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from offdrift.divergence.losses import kl_rollout_current
from offdrift.engines.output_head import logits_in_pieces
from offdrift.engines.score import chunks, score
from offdrift.errors import CheckpointError, EngineError
from offdrift.models import save_for_engine
from offdrift.records.rollouts import FullVocab, HiddenStates, Rollouts
from offdrift_lab.train.features.base import Feature
from offdrift_lab.train.loop.old_policy import read_weights, write_weights
from offdrift_lab.train.settings.recipe import Recipe
from offdrift_lab.train.settings.rollout import SIBLINGS, SpeculativeSettings

FILE = "drafter.safetensors"
"""File of the drafter's weights and AdamW's moments in a checkpoint."""
BETAS = (0.9, 0.95)
MAX_GRAD_NORM = 1.0


def distillation_loss(drafter: PreTrainedModel, rollouts: Rollouts) -> Float[Tensor, " n"]:
    """Divergence of the drafter q from the distribution mu that sampled each token, nats.

        KL(mu || q) = sum_a mu(a) log(mu(a) / q(a))      where the rollouts' evidence has all of mu
        log mu(y) - log q(y)                             elsewhere: of the sampled token, the same in expectation

    mu is tempered and filtered as it was sampled; q is the drafter's law at the same temperature, without filters, so
    that mass outside of what the filters left over counts against it.

    Gradient: to the drafter's parameters.
    """
    temperature, evidence = rollouts.provenance.sampling.temperature, rollouts.evidence
    scores = score(drafter, rollouts.with_(support=None), temperature=temperature, keep_graph=True)
    if isinstance(evidence, FullVocab):
        return kl_rollout_current(evidence.logp.to(scores.logits.device), scores.logits)
    if isinstance(evidence, HiddenStates):
        pieces = logits_in_pieces(evidence.to(scores.logits.device), temperature=temperature, support=rollouts.support)
        return torch.cat([kl_rollout_current(logits, scores.logits[piece]) for piece, logits in pieces])
    return rollouts.logp_rollout.to(scores.logp.device) - scores.logp


def reward_weights(rewards: Float[Tensor, " b"], reward_range: tuple[float, float]) -> Float[Tensor, " b"]:
    """Weight of each response in the distillation: (r - low) / (high - low), its reward as a share of the range.

    The policy moves towards what earns, and the drafter is to be there first. ReSpec's abstract says that updates are
    weighted by rollout rewards; this form of it is this library's.

    Example:
        >>> reward_weights(torch.tensor([0.0, 1.0, 0.5]), (-1.0, 1.0))
        tensor([0.5000, 1.0000, 0.7500])
    """
    low, high = reward_range
    return (rewards - low) / (high - low)


class Drafter:
    """The drafter of an arm: a float32 model with its optimizer, from which the engine's copy takes its weights.

    Args:
        model: the weights to start from; copied.
        settings: `rollout.speculative`.
        reward_range: the recipe's.
        token_budget: padded tokens of a forward pass.

    Reference: ReSpec, arXiv:2510.26475.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        settings: SpeculativeSettings,
        *,
        reward_range: tuple[float, float],
        token_budget: int,
    ) -> None:
        self.model = copy.deepcopy(model).requires_grad_(True)
        self.settings, self.reward_range, self.token_budget = settings, reward_range, token_budget
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=settings.lr, betas=BETAS, weight_decay=0.0)
        self.version = 0
        """Version of the weights whose rollouts it has last learned from."""
        self.updated = 0
        """Updates that the trainer had taken when the batch was done that it has last learned from."""

    def due(self, updates: int) -> bool:
        """Whether it learns from the batch with which the trainer completes so many updates."""
        return self.settings.every is not None and updates - self.updated >= self.settings.every

    def learn(self, rollouts: Rollouts, updates: int) -> dict[str, Tensor]:
        """Distill the drafter on a batch: `settings.steps` steps of AdamW.

            loss = sum_i w_i sum_t KL_it / sum_i w_i n_i      n_i tokens of response i

        w_i is 1, or with `weighting = "reward"` that of `reward_weights`; a batch whose weights are all 0 teaches
        nothing.

        Args:
            updates: of the trainer once this batch is done.

        Returns: sums of `speculative/kl` over the batch's tokens, before the first step.

        Raises: `EngineError` if the gradient is not finite; no step is then taken.
        """
        weights = torch.ones(rollouts.num_sequences)
        if self.settings.weighting == "reward":
            assert rollouts.rewards is not None
            weights = reward_weights(rollouts.rewards, self.reward_range)
        total = float((weights * rollouts.lengths).double().sum())
        kl = torch.zeros((), dtype=torch.float64)
        for step in range(self.settings.steps if total > 0 else 1):
            self.optimizer.zero_grad(set_to_none=True)
            for sequences in chunks(rollouts, token_budget=self.token_budget):
                losses = distillation_loss(self.model, rollouts.select(sequences))
                if step == 0:
                    kl += losses.detach().double().sum().cpu()
                share = weights[sequences].repeat_interleave(rollouts.lengths[sequences]).to(losses.device)
                (losses * share / max(total, 1e-12)).sum().backward()
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
            if not bool(norm.isfinite()):
                raise EngineError(
                    f"the gradient norm of the drafter is {norm.item()}; its step was not taken. Lower "
                    "rollout.speculative.lr, or look at the log-probs of the last batch"
                )
            if total > 0:
                self.optimizer.step()
        self.version, self.updated = int(rollouts.rollout_version.max()), updates
        return {"speculative/kl": kl, "speculative/kl/n": torch.tensor(float(len(rollouts.tokens)))}

    def save(self, folder: Path) -> None:
        """Store weights, moments and counters in a checkpoint. Raises: `RecordError` if they cannot be written."""
        tensors = {"counters": torch.tensor([self.version, self.updated])}
        for name, p in self.model.named_parameters():
            tensors |= {f"weight.{name}": p} | {f"{key}.{name}": x for key, x in self.optimizer.state[p].items()}
        write_weights(tensors, folder / FILE)

    def load(self, folder: Path) -> None:
        """Take back what `save` stored. Raises: `CheckpointError` if it is not there, or of another drafter."""
        tensors = read_weights(folder / FILE)
        keys = {key for key in tensors if not key.startswith(("weight.", "counters"))}
        try:
            with torch.no_grad():
                for name, p in self.model.named_parameters():
                    p.copy_(tensors[f"weight.{name}"])
                    own = {key.split(".")[0]: tensors[key] for key in keys if key.split(".", 1)[1] == name}
                    # AdamW counts its steps on the host.
                    self.optimizer.state[p] = {k: x if k == "step" else x.to(p.device) for k, x in own.items()}
        except (KeyError, RuntimeError) as e:
            raise CheckpointError(
                f"{folder / FILE} is not of this recipe's drafter ({e}); resume from another checkpoint, or start over"
            ) from e
        self.version, self.updated = tensors["counters"].tolist()


class Drafting(Feature):
    """`rollout.speculative`: an arm's drafter, which the engine has from its start on, and anew whenever it learned."""

    drafter: Drafter

    def __init__(self, settings: SpeculativeSettings) -> None:
        self.settings = settings

    @classmethod
    def of(cls, recipe: Recipe, arm: str) -> Drafting | None:
        settings = recipe.rollout.speculative
        return None if settings is None or settings.model == SIBLINGS else cls(settings)

    def start(self, arm: Any) -> None:
        recipe = arm.run.recipe
        self.drafter = Drafter(
            arm.run.drafter, self.settings, reward_range=recipe.reward_range, token_budget=recipe.optim.token_budget
        )
        self._engine = arm.run.engine
        self._give()

    def _give(self) -> None:
        """Give the engine the drafter's weights."""
        self._engine.load_drafter(self.drafter.model.named_parameters(), version=self.drafter.version)

    def drawn(self, arm: Any, batch: Any, source: Any) -> Mapping[str, Tensor]:
        """Distill the drafter on the batch at hand, if it is due."""
        updates = arm.version + arm.steps_per_batch
        if not self.drafter.due(updates):
            return {}
        begin = time.perf_counter()
        sums = self.drafter.learn(batch.rollouts, updates)
        self._give()
        source.seconds["distill"] += time.perf_counter() - begin
        return sums

    def save(self, folder: Path) -> None:
        self.drafter.save(folder)

    def load(self, folder: Path) -> None:
        self.drafter.load(folder)
        self._give()

    def finished(self, arm: Any) -> None:
        with arm.files.storing("drafter") as path:
            save_for_engine(self.drafter.model, arm.run.tokenizer, path)
