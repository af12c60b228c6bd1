"""From rollouts to a batch: all that its updates read and that must be known before the first changes the weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from offdrift.advantages import ADVANTAGES, advantages
from offdrift.advantages.optimal import norm_agreement
from offdrift.batch_info import BatchInfo
from offdrift.certificate.samples import unit_rewards
from offdrift.engines.retention import retention_sums
from offdrift.errors import EngineError
from offdrift.logprobs import LogProbs
from offdrift.methods.method import Interpolated, RolloutAsOld
from offdrift.penalty import penalized_rewards
from offdrift.records.rollouts import OLD_STATUS, Rollouts, concatenate
from offdrift.train.arm import Arm
from offdrift.train.buffer import Picked
from offdrift.train.lora import adapters_off
from offdrift.train.models import resident
from offdrift.train.old_policy import PolicyScores, gradient_norms, score_batch


@dataclass(frozen=True)
class Batch:
    """Input of a step: rollouts, their advantages, and scores of the old and reference policy."""

    rollouts: Rollouts
    advantages: Float[Tensor, " n"]
    old: PolicyScores | None = None
    """Scores under the old policy, where the method reads it."""
    logp_ref: Float[Tensor, " n"] | None = None
    """log-probs under the reference policy, nats."""
    tail_log_ratio_cap: float | None = None
    """Assumed limit of |log-ratio| in the tail of top-k evidence, nats; see `engines.score.divergences`."""
    old_status: Int[Tensor, " n"] | None = None
    """Source of each old log-prob, as indices into `OLD_STATUS`; None if the method reads none."""
    old_is_current: bool = False
    """The weights that drew the batch are those of its only update: the step's own forward pass is the
    old policy's, and no other is made."""
    old_logits: Callable[[Rollouts], Tensor] | None = None
    """The old policy's tempered logits of a piece, `[n, v]`, where the method compares whole
    distributions of the old and the current policy: one more forward pass per piece."""
    values: Float[Tensor, " n"] | None = None
    """The critic's values when the batch arrived, where there is one."""
    returns: Float[Tensor, " n"] | None = None
    """Targets of the values."""
    sample_weight: Float[Tensor, " b"] | None = None
    """Weight of each sequence's loss, where a buffer picked by priority."""
    sums: Mapping[str, Tensor] = field(default_factory=dict)
    """What metrics of the whole batch are made of, wherever its minibatches are cut; adds over processes."""
    uses: float = 0.0
    """Mean number of updates that were taken before on its groups' batches."""
    independent: bool = True
    """See `Picked`."""
    replays: bool = False
    """Whether passes of the step send tokens to the experts of `rollouts.routes`."""
    distill: float = 0.0
    """Weight of Shadow Mask Distillation, for rollouts whose retention is replayed; 0: none."""
    distill_by: Literal["exact", "k3"] = "exact"
    """Its divergence: over the vocabulary, or estimated from sampled tokens."""

    @staticmethod
    def joined(parts: Sequence[Batch]) -> Batch:
        """Parts of one step, scored in the same way, as one batch."""

        def together(name: str, join: Callable[[list[Any]], Any]) -> Any:
            values = [getattr(part, name) for part in parts]
            return None if values[0] is None else join(values)

        tensors = ("advantages", "logp_ref", "old_status", "values", "returns", "sample_weight")
        sums = {k: torch.stack([p.sums[k] for p in parts]).sum(0) for k in parts[0].sums}
        counts = [len(part.advantages) for part in parts]
        rows = torch.arange(sum(counts)).split(counts)
        return replace(
            parts[0],
            rollouts=concatenate([part.rollouts for part in parts]),
            old=together("old", lambda scores: PolicyScores.joined(list(zip(rows, scores)), sum(counts))),
            sums=sums,
            **{name: together(name, torch.cat) for name in tensors},
        )

    @property
    def picked(self) -> Picked:
        """What was drawn or picked, from which the batch was made."""
        return Picked(self.rollouts, self.sample_weight, self.uses, self.independent)

    def units(self, *, whole_prompts: bool) -> Int[Tensor, " b"]:
        """A number per sequence; sequences of one number are in one step: a prompt's, or each by itself."""
        return self.rollouts.group_ids if whole_prompts else torch.arange(self.rollouts.num_sequences)

    def select(self, sequences: Tensor) -> Batch:
        """Some of the sequences, as a batch of their own."""
        rows = self.rollouts.segments.rows(sequences)
        return replace(
            self,
            rollouts=self.rollouts.select(sequences),
            advantages=self.advantages[rows],
            old=None if self.old is None else self.old.select(rows),
            logp_ref=None if self.logp_ref is None else self.logp_ref[rows],
            old_status=None if self.old_status is None else self.old_status[rows],
            values=None if self.values is None else self.values[rows],
            returns=None if self.returns is None else self.returns[rows],
            sample_weight=None if self.sample_weight is None else self.sample_weight[sequences],
        )


@dataclass
class Parts:
    """A batch whose parts come one by one: `train_step` goes through them, and they are one batch afterwards."""

    arm: Arm
    picked: Iterator[Picked]
    batches: list[Batch] = field(default_factory=list)

    def __iter__(self) -> Iterator[Batch]:
        for picked in self.picked:
            self.batches.append(make_batch(self.arm, picked, part=True))
            yield self.batches[-1]

    def joined(self) -> Batch:
        """All of them."""
        return Batch.joined(self.batches)


def make_batch(arm: Arm, picked: Picked, *, part: bool = False) -> Batch:
    """Score rollouts under every policy that the arm's method and estimator read, and take their advantages.

    Gradient: none.

    Args:
        part: whether the batch of the step has other parts, which all have to be scored alike.

    Raises: `BadValueError` if a reward is outside the recipe's `reward_range`.
    """
    rollouts, weight = picked.rollouts, picked.sample_weight
    recipe, method, estimator = arm.run.recipe, arm.method, ADVANTAGES[arm.estimator]
    optim, cap = recipe.optim, recipe.rollout.tail_log_ratio_cap
    half, replay = arm.run.half, arm.replay
    rollouts = rollouts.with_(provenance=replace(rollouts.provenance, recorded=rollouts.recorded))
    if not replay.support:
        rollouts = rollouts.with_(support=None)
    if replay.records and rollouts.routes is None:
        raise EngineError(f'replay.routes = "{replay.routes}": the engine recorded no routes for a batch')
    sums: dict[str, Tensor] = {}
    if recipe.rollout.kv is not None and rollouts.retention is None:
        raise EngineError(
            f"rollout.kv.budget = {recipe.rollout.kv.budget}: the engine recorded no retention for a batch"
        )
    if rollouts.retention is not None:
        sums |= retention_sums(rollouts)
        rollouts = rollouts if replay.kv else rollouts.with_(retention=None)
    options: dict[str, Any] = {"token_budget": optim.token_budget, "tail_log_ratio_cap": cap, "half": half}
    options["replays"] = replay.routes == "rollout"
    trainer = old = logp_ref = status = None
    # The trainer as it is now: read by estimators, by a penalty in the reward, and by gates before the update.
    in_reward = method.penalty is not None and method.penalty.place == "reward"
    reads_trainer = {"logp_old", "sum_pi_squared", "entropy"} & {*estimator.needs, *estimator.reads}
    old_is_current = False
    if method.scores_old:
        # One update by the very weights that drew the batch, in every process.
        stale = (rollouts.rollout_version != arm.version).any()
        exact_source = arm.old_settings.source in ("sampling", "second_model", "batch_start")
        in_step = optim.perturb is None and arm.run.sum(stale.double()) == 0 and (not part or arm.always_fresh)
        old_is_current = exact_source and optim.epochs == optim.minibatches == 1 and bool(in_step)
        if not old_is_current:
            exact = any(name.endswith("rollout_old") for name in method.divergences) or arm.measures_alphas
            noted = {"note_routes": True, "note_gates": replay.freeze_gates} if replay.routes == "old" else {}
            old = arm.old_policy.score(arm.model, rollouts, arm.version, exact=exact, **options, **noted)
            if noted:
                rollouts, options["replays"] = rollouts.with_(routes=old.routes), True
    if reads_trainer or in_reward or arm.advantages_read_gates:
        exact = arm.advantages_read_gates and any(g.exact for g in method.correction.gates)
        trainer = score_batch(arm.model, rollouts, exact=exact, **options)
    if method.needs_reference:
        with resident(arm.run.model, arm.run.accelerator.device) as reference, adapters_off(reference):
            logp_ref = score_batch(reference, rollouts, token_budget=optim.token_budget, half=half).logp
    values = None if arm.critic is None else arm.critic.values(rollouts, token_budget=optim.token_budget, half=half)
    scores = (trainer, old, logp_ref, values)
    norms = None
    if optim.gradient_norms == "exact" and "grad_norm_squared" in estimator.reads:
        norms = gradient_norms(arm.run.accelerator.unwrap_model(arm.model), rollouts, replays=options["replays"])
        assert trainer is not None
        stand_in = rollouts.segments.sum(1 - 2 * trainer.logp.exp() + trainer.sum_pi_squared)
        sums |= {f"opob/{k}": x for k, x in norm_agreement(norms, stand_in, rollouts.segments.groups).items()}
    advantages, returns = token_advantages(arm, rollouts, *scores, norms)
    if norms is not None:
        apart = (token_advantages(arm, rollouts, *scores)[0] - advantages).abs()
        sums |= {"opob/shift": rollouts.segments.mean(apart).sum(), "opob/responses": torch.tensor(float(len(norms)))}
    if old is not None:
        status = old.status(rollouts.rollout_version)
    elif old_is_current or method.anchor is not None:
        by_anchor = {type(None): "exact", RolloutAsOld: "missing", Interpolated: "approximated"}
        status = torch.full_like(rollouts.rollout_version, OLD_STATUS.index(by_anchor[type(method.anchor)]))

    def old_logits(piece: Rollouts) -> Tensor:
        return arm.old_policy.logits(arm.model, piece, arm.version, half=half, replays=replay.routes == "rollout")

    compared = old_logits if arm.compares_old else None
    about_old = (old, logp_ref, cap, status, old_is_current, compared)
    about_draws = (picked.earlier_uses, picked.independent, options["replays"], replay.distill, replay.distill_by)
    return Batch(rollouts, advantages, *about_old, values, returns, weight, sums, *about_draws)


def token_advantages(
    arm: Arm,
    rollouts: Rollouts,
    trainer: PolicyScores | None,
    old: PolicyScores | None,
    logp_ref: Float[Tensor, " n"] | None,
    values: Float[Tensor, " n"] | None,
    norms: Float[Tensor, " b"] | None = None,
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"] | None]:
    """Advantage of every token, by the arm's estimator, from the scores of `make_batch`; and the critic's targets."""
    method, rewards, segments = arm.method, rollouts.rewards, rollouts.segments
    assert rewards is not None
    unit_rewards(rewards.double().numpy(), arm.run.recipe.reward_range)
    options: dict[str, Any] = {
        "how": arm.estimator,
        "baseline_over": arm.run.recipe.optim.baseline_over,
        "total": arm.run.sum,
        "greedy_rewards": rollouts.greedy_rewards,
        "right_from": arm.run.recipe.right,
        "zvp_alpha": arm.run.recipe.optim.zvp_alpha,
        "grad_norm_squared": norms,
    }
    if rollouts.components is not None:
        weights = arm.run.recipe.optim.component_weights
        options["components"] = torch.stack(list(rollouts.components.values()), 1)
        options["component_weights"] = torch.tensor([weights.get(name, 1.0) for name in rollouts.components])
    if trainer is not None:  # the policy whose gradients the estimator weighs
        options |= {"logp_old": trainer.logp, "sum_pi_squared": trainer.sum_pi_squared, "entropy": trainer.entropy}
    if arm.advantages_read_gates:
        assert trainer is not None
        # Gates and weights as they decide before the batch's first update.
        old = old or trainer
        logprobs = LogProbs.pack(rollouts.logp_rollout, trainer.logp, old.logp, segments=segments)
        current = {name.replace("rollout_old", "rollout_current"): d for name, d in trainer.divergences.items()}
        batch_info = BatchInfo(
            divergences={**current, **old.divergences},
            entropy=old.entropy,
            rewards=rewards,
            version_lag=arm.version - rollouts.rollout_version,
        )
        logprobs = logprobs if method.anchor is None else method.anchor(logprobs, batch_info)
        corrected = method.correction(logprobs, advantages(rewards, segments, how="dr_grpo"), batch_info)
        options["weight"] = corrected.weight
        options["keep"] = segments.sum(corrected.keep.to(trainer.logp.dtype)) > 0
    if logp_ref is not None and method.penalty is not None and method.penalty.place == "reward":
        assert trainer is not None
        kl = method.penalty(trainer.logp, logp_ref, log_ratio=trainer.logp - rollouts.logp_rollout)
        rewards = penalized_rewards(rewards, segments, kl, method.penalty.coef)
    returns = None
    if arm.critic is not None:
        assert values is not None
        options |= {"values": values, "gamma": arm.critic.settings.gamma, "lam": arm.critic.settings.lam}
        returns = arm.critic.returns(rewards, values, segments)
    return advantages(rewards, segments, **options), returns
