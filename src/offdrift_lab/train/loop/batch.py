"""From rollouts to a batch: all that its updates read and that must be known before the first changes the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from offdrift.advantages import ADVANTAGES, advantages
from offdrift.batch_info import BatchInfo
from offdrift.engines.retention import retention_sums
from offdrift.errors import EngineError
from offdrift.logprobs import LogProbs
from offdrift.methods import Method
from offdrift.methods.method import Interpolated, RolloutAsOld
from offdrift.models import resident
from offdrift.penalty import penalized_rewards
from offdrift.records.rollouts import Rollouts, concatenate
from offdrift.records.schema import OLD_STATUS
from offdrift.segments import Groups
from offdrift_lab.train.data.buffer import Picked
from offdrift_lab.train.data.source import Source
from offdrift_lab.train.features.lora_adapters import adapters_off
from offdrift_lab.train.loop.arm import Arm
from offdrift_lab.train.loop.old_policy import PolicyScores, gradient_norms, score_batch


@dataclass(frozen=True, kw_only=True)
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
    """Whether parts of it are still to come."""

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
        """Rollouts from which the batch was made, with their weights and uses."""
        return Picked(self.rollouts, self.sample_weight, self.uses, self.independent)

    def minibatch(self, sequences: Tensor | None) -> Batch:
        """Select the sequences of one step; None: all of them."""
        return self if sequences is None else self.select(sequences)

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


@dataclass(kw_only=True)
class StreamedBatch:
    """A batch whose parts come one by one: its only step goes through them, and they are one batch afterwards."""

    coming: Iterator[Batch]

    def minibatch(self, sequences: Tensor | None) -> StreamedBatch:
        """Return the whole batch: a streamed batch is trained on in one step."""
        return self

    def units(self, *, whole_prompts: bool) -> None:
        """Nothing: it is never cut."""


def next_batch(arm: Arm, source: Source) -> Batch | StreamedBatch:
    """The next batch of a source, scored, or one that is scored as it comes; weights are kept that it refers to."""
    if source.streams:  # groups come while the only step takes their gradient
        arm.keep_old_weights(None, source)
        return StreamedBatch(coming=(make_batch(arm, picked, part=True) for picked in source.parts()))
    batch = make_batch(arm, source.next(arm.version))
    sums = dict(batch.sums)
    for feature in arm.features:
        sums |= feature.drawn(arm, batch, source)
    arm.keep_old_weights(batch.rollouts, source)
    return replace(batch, sums=sums)


@dataclass
class Scores:
    """Scores of a batch under every policy that the arm's method and estimator read."""

    trainer: PolicyScores | None = None
    """The trainer as it is when the batch arrives."""
    old: PolicyScores | None = None
    logp_ref: Float[Tensor, " n"] | None = None
    values: Float[Tensor, " n"] | None = None
    norms: Float[Tensor, " b"] | None = None
    """Squared norms of the responses' gradients, where they are taken exactly."""

    @property
    def of_trainer(self) -> PolicyScores:
        """The trainer's, which are there where they are read."""
        assert self.trainer is not None
        return self.trainer


def make_batch(arm: Arm, picked: Picked, *, part: bool = False) -> Batch:
    """Score rollouts under every policy that the arm's method and estimator read, and take their advantages.

    Gradient: none.

    Args:
        part: whether the batch of the step has other parts, which all have to be scored alike.
    """
    recipe, method, replay = arm.run.recipe, arm.method, arm.replay
    rollouts, sums = replayed_rollouts(arm, picked.rollouts)
    cap = recipe.rollout.tail_log_ratio_cap
    options: dict[str, Any] = {
        "token_budget": recipe.optim.token_budget,
        "tail_log_ratio_cap": cap,
        "half": arm.half,
        "replays": replay.routes == "rollout",
    }
    scores, old_is_current = Scores(), in_step_is_old(arm, rollouts, part=part)
    if method.scores_old and not old_is_current:
        exact = any(name.endswith("rollout_old") for name in method.divergences) or arm.measures_alphas
        noted = {"note_routes": True, "note_gates": replay.freeze_gates} if replay.routes == "old" else {}
        scores.old = arm.old_policy.score(arm.model, rollouts, arm.version, exact=exact, **options, **noted)
        if noted:
            rollouts, options["replays"] = rollouts.with_(routes=scores.old.routes), True
    score_others(arm, rollouts, scores, options)
    advantages, returns = token_advantages(arm, rollouts, scores)
    sums |= norm_sums(arm, rollouts, scores, advantages)

    def old_logits(piece: Rollouts) -> Tensor:
        return arm.old_policy.logits(arm.model, piece, arm.version, half=arm.half, replays=replay.routes == "rollout")

    return Batch(
        rollouts=rollouts,
        advantages=advantages,
        old=scores.old,
        logp_ref=scores.logp_ref,
        tail_log_ratio_cap=cap,
        old_status=status_of_old(method, rollouts, scores.old, old_is_current=old_is_current),
        old_is_current=old_is_current,
        old_logits=old_logits if arm.compares_old else None,
        values=scores.values,
        returns=returns,
        sample_weight=picked.sample_weight,
        sums=sums,
        uses=picked.earlier_uses,
        independent=picked.independent,
        replays=options["replays"],
        distill=replay.distill,
        distill_by=replay.distill_by,
    )


def replayed_rollouts(arm: Arm, rollouts: Rollouts) -> tuple[Rollouts, dict[str, Tensor]]:
    """Rollouts with what the arm's passes repeat of the engine's choices and without the rest; sums about those.

    Raises: `EngineError` if the engine did not record what the recipe asks for.
    """
    replay, kv = arm.replay, arm.run.recipe.rollout.kv
    rollouts = rollouts.with_(provenance=replace(rollouts.provenance, recorded=rollouts.recorded))
    if not replay.support:
        rollouts = rollouts.with_(support=None)
    if replay.records and rollouts.routes is None:
        raise EngineError(f'replay.routes = "{replay.routes}": the engine recorded no routes for a batch')
    if rollouts.retention is None:
        if kv is None:
            return rollouts, {}
        raise EngineError(f"rollout.kv.budget = {kv.budget}: the engine recorded no retention for a batch")
    sums = retention_sums(rollouts)
    return (rollouts if replay.kv else rollouts.with_(retention=None)), dict(sums)


def in_step_is_old(arm: Arm, rollouts: Rollouts, *, part: bool) -> bool:
    """Whether the step's own forward pass is the old policy's: one update, by the very weights that drew the batch, in
    every process."""
    optim = arm.optim
    if not arm.method.scores_old:
        return False
    stale = (rollouts.rollout_version != arm.version).any()
    exact_source = arm.old_settings.source in ("sampling", "second_model", "batch_start")
    in_step = optim.perturb is None and arm.run.sum(stale.double()) == 0 and (not part or arm.always_fresh)
    return exact_source and optim.epochs == optim.minibatches == 1 and bool(in_step)


def score_others(arm: Arm, rollouts: Rollouts, scores: Scores, options: dict[str, Any]) -> None:
    """Add the scores of trainer, reference policy and critic, and norms of gradients, as far as they are read."""
    method, optim, estimator = arm.method, arm.optim, ADVANTAGES[arm.estimator]
    budget, half = optim.token_budget, arm.half
    # The trainer as it is now: read by estimators, by a penalty in the reward, and by gates before the update.
    reads_trainer = {"logp_old", "sum_pi_squared", "entropy"} & {*estimator.needs, *estimator.reads}
    if reads_trainer or arm.penalty_in_reward or arm.advantages_read_gates:
        exact = arm.advantages_read_gates and any(g.exact for g in method.correction.gates)
        scores.trainer = score_batch(arm.model, rollouts, exact=exact, **options)
    if method.needs_reference:
        with resident(arm.run.model, arm.accelerator.device) as reference, adapters_off(reference):
            scores.logp_ref = score_batch(reference, rollouts, token_budget=budget, half=half).logp
    if arm.critic:
        scores.values = arm.critic.values(rollouts, token_budget=budget, half=half)
    if optim.gradient_norms == "exact" and "grad_norm_squared" in estimator.reads:
        scores.norms = gradient_norms(arm.inner, rollouts, replays=options["replays"])


def norm_sums(arm: Arm, rollouts: Rollouts, scores: Scores, advantages: Tensor) -> dict[str, Tensor]:
    """Sums about what exact norms of gradients changed, where they were taken."""
    norms = scores.norms
    if norms is None:
        return {}
    trainer = scores.of_trainer
    stand_in = rollouts.segments.sum(1 - 2 * trainer.logp.exp() + trainer.sum_pi_squared)
    sums = {f"opob/{k}": x for k, x in norm_agreement(norms, stand_in, rollouts.segments.groups).items()}
    by_stand_in, _ = token_advantages(arm, rollouts, replace(scores, norms=None))
    shift = rollouts.segments.mean((by_stand_in - advantages).abs()).sum()
    return sums | {"opob/shift": shift, "opob/responses": torch.tensor(float(len(norms)))}


def norm_agreement(
    exact: Float[Tensor, " b"], stand_in: Float[Tensor, " b"], groups: Groups
) -> dict[str, Float[Tensor, ""]]:
    """Compare the orders in which two measures of the sequences' gradients put the answers to a prompt.

        concordant = sum over pairs of one prompt of sign(x_i - x_j) sign(y_i - y_j),   tau = concordant / pairs

    tau is Kendall's rank correlation within prompts: 1 for the same order, 0 for none, -1 for the opposite one. Pairs
    that are equal in `exact` do not count.

    Returns: `concordant` and `pairs`; both add over pieces that hold whole groups. Gradient: none.

    Example:
        >>> import torch
        >>> groups = Groups.from_ids(torch.tensor([7, 7, 7, 8]))
        >>> x, y = torch.tensor([1.0, 2.0, 3.0, 9.0]), torch.tensor([1.0, 5.0, 4.0, 0.0])
        >>> [x.item() for x in norm_agreement(x, y, groups).values()]
        [1.0, 3.0]
    """
    alike = groups.index[:, None] == groups.index
    x, y = ((z[:, None] - z).sign() for z in (exact.double(), stand_in.double()))
    return {"concordant": (alike * x * y).sum() / 2, "pairs": (alike * x.abs()).sum() / 2}


def status_of_old(
    method: Method, rollouts: Rollouts, old: PolicyScores | None, *, old_is_current: bool
) -> Int[Tensor, " n"] | None:
    """Source of each old log-prob, as indices into `OLD_STATUS`; None if the method reads none."""
    if old is not None:
        return old.status(rollouts.rollout_version)
    if not old_is_current and method.anchor is None:
        return None
    by_anchor = {type(None): "exact", RolloutAsOld: "missing", Interpolated: "approximated"}
    return torch.full_like(rollouts.rollout_version, OLD_STATUS.index(by_anchor[type(method.anchor)]))


def token_advantages(
    arm: Arm, rollouts: Rollouts, scores: Scores
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"] | None]:
    """Advantage of every token, by the arm's estimator, from the scores of `make_batch`; and the critic's targets."""
    method, rewards, segments = arm.method, rollouts.rewards, rollouts.segments
    assert rewards is not None
    options: dict[str, Any] = {
        "how": arm.estimator,
        "baseline_over": arm.run.recipe.optim.baseline_over,
        "total": arm.run.sum,
        "greedy_rewards": rollouts.greedy_rewards,
        "right_from": arm.run.recipe.right,
        "zvp_alpha": arm.run.recipe.optim.zvp_alpha,
        "grad_norm_squared": scores.norms,
    }
    if rollouts.components is not None:
        weights = arm.run.recipe.optim.component_weights
        options["components"] = torch.stack(list(rollouts.components.values()), 1)
        options["component_weights"] = torch.tensor([weights.get(name, 1.0) for name in rollouts.components])
    if trainer := scores.trainer:  # the policy whose gradients the estimator weighs
        options |= {"logp_old": trainer.logp, "sum_pi_squared": trainer.sum_pi_squared, "entropy": trainer.entropy}
    if arm.advantages_read_gates:
        # Gates and weights as they decide before the batch's first update.
        trainer = scores.of_trainer
        old = scores.old or trainer
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
    if arm.penalty_in_reward and method.penalty is not None and scores.logp_ref is not None:
        trainer = scores.of_trainer
        kl = method.penalty(trainer.logp, scores.logp_ref, log_ratio=trainer.logp - rollouts.logp_rollout)
        rewards = penalized_rewards(rewards, segments, kl, method.penalty.coef)
    returns = None
    if arm.critic:
        values = scores.values
        assert values is not None
        options |= {"values": values, "gamma": arm.critic.settings.gamma, "lam": arm.critic.settings.lam}
        returns = arm.critic.returns(rewards, values, segments)
    return advantages(rewards, segments, **options), returns
