"""One arm while it trains: credit, steps, records, evaluation."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from offdrift.advantages import ADVANTAGES
from offdrift.certificate import TrustRegion, certify
from offdrift.certificate.samples import unit_rewards
from offdrift.engines import make_engine
from offdrift.engines.verify_sync import check_sync
from offdrift.judge import Context, Finding
from offdrift.methods import Method
from offdrift.methods.anchor import Interpolated, RolloutAsOld
from offdrift.records.rollouts import OLD_STATUS, Rollouts
from offdrift.stats.metrics import summarize
from offdrift.train import checkpoint
from offdrift.train.assess import Assessment, assess, credit, reads_correction, reference_logp
from offdrift.train.context import Event, Workshop, has_experts
from offdrift.train.live import Live
from offdrift.train.models import save_for_engine
from offdrift.train.old_policy import OldPolicy, make_old_policy, named_weights
from offdrift.train.run_folder import ArmFolder
from offdrift.train.source import Source, batch_seed, rollout
from offdrift.train.step import Batch, Update, global_sum, reduce_sum, train_step
from offdrift.train.summary import summarize_arm
from offdrift.train.token_records import TokenLog, samples


@dataclass
class Learner:
    """One arm while it trains."""

    shop: Workshop
    name: str
    row: Method
    files: ArmFolder
    model: nn.Module
    optimizer: torch.optim.Optimizer
    version: int
    """Optimizer steps taken."""

    def __post_init__(self) -> None:
        self.tick = time.perf_counter()
        self.old_settings = self.shop.recipe.old_policy_of(self.name)
        self.old_policy = OldPolicy(self.shop.accelerator, self.files.path)
        if self.needs_old:
            self.old_policy = make_old_policy(
                self.old_settings, self.shop.accelerator, self.files.path / "snapshots"
            )
        context = Context(
            framework="offdrift",
            mixture_of_experts=has_experts(self.shop.model),
            method=self.shop.recipe.arms[self.name].method,
            temperature=self.shop.recipe.rollout.temperature,
        )
        self.live = Live.of(self.files, context)

    @property
    def estimator(self) -> str:
        """The advantage estimator of this arm."""
        return self.shop.recipe.estimator(self.row)

    @property
    def region(self) -> TrustRegion:
        """The trust region that every update's certificate is about."""
        return TrustRegion(horizon=self.shop.sampling.max_tokens, delta=self.shop.recipe.delta)

    @property
    def needs_old(self) -> bool:
        """Whether batches are scored by the old policy."""
        return bool(self.row.needs_old or self.exact_old or "entropy" in self.row.needs)

    @property
    def exact_old(self) -> bool:
        """Whether that scoring must compare whole distributions."""
        return any(name.endswith("rollout_old") for name in self.row.divergences)

    @property
    def compares_old(self) -> bool:
        """Whether steps compare whole distributions of the old and the current policy."""
        return any(name.endswith("old_current") for name in self.row.divergences)

    @property
    def needs_start(self) -> bool:
        """Whether credit depends on what the trainer says of a batch before its first update."""
        row = ADVANTAGES[self.estimator]
        reads = {"logp_old", "sum_pi_squared"} & {*row.needs, *row.reads}
        in_reward = self.row.penalty is not None and self.row.penalty.place == "reward"
        return bool(reads or in_reward or self.reads_correction)

    @property
    def reads_correction(self) -> bool:
        """Whether credit depends on what gates and weights decide before a batch's first update."""
        return reads_correction(self.estimator, self.shop.recipe.optim.baseline_over)

    def source(self, at: checkpoint.Position) -> Source:
        """This arm's batches, from where the run stands."""
        shop = self.shop
        return Source(
            engine=shop.engine,
            task=shop.task,
            tokenizer=shop.tokenizer,
            recipe=shop.recipe,
            sampling=shop.sampling,
            folder=self.files.rollouts,
            publish=self.publish,
            shard=shop.shard,
            start=at.batch,
            queued=at.waiting,
        )

    def publish(self) -> None:
        """Give the engine the trainer's weights, and make sure that it took them."""
        shop = self.shop
        weights = named_weights(shop.accelerator, self.model)
        shop.engine.load_weights(weights.items(), version=self.version)
        check_sync(
            shop.engine,
            shop.accelerator.unwrap_model(self.model),
            shop.probes(),
            shop.sampling,
            seed=shop.recipe.seed,
            baseline=shop.synced,
        )
        self.old_policy.published(self.model, self.version)

    def checkpoint(self, batch: int, source: Source, since: Method) -> None:
        """Store where the arm stands; the engine has the trainer's weights."""
        waiting, versions = source.waiting(), source.versions()
        changed = self.row.changes(since)
        position = checkpoint.Position(batch, self.version, waiting, changed)
        self.old_policy.retain(versions, self.model, self.version)
        checkpoint.save(
            self.shop.accelerator, self.files.checkpoints, position, also=self.old_policy.save
        )

    def resume(self, at: checkpoint.Position, source: Source) -> None:
        """Take back what the old policy had kept at a checkpoint."""
        if at.batch > 0:
            newest = checkpoint.found(self.files.checkpoints)[-1]
            self.old_policy.load(newest, source.versions() - {at.version})

    def learn(self, index: int, rollouts: Rollouts, *, in_flight: Iterable[int] = ()) -> None:
        """All optimizer steps on one batch.

        Args:
            in_flight: versions that batches after this one were, or will be, drawn from.
        """
        optim, log = self.shop.recipe.optim, self.shop.recipe.log
        if rollouts.rewards is not None:  # refused before a step is taken on it
            unit_rewards(rollouts.rewards.double().numpy(), self.shop.recipe.reward_range)
        batch, before = self._assessed(rollouts), self.version
        drawn_at = rollouts.rollout_version.unique().tolist() if self.compares_old else ()
        self.old_policy.retain({*in_flight, *drawn_at}, self.model, self.version)
        for epoch in range(optim.epochs):
            first_use = TokenLog(batch) if log.tokens and epoch == 0 else None
            for piece in self._minibatches(index, epoch, rollouts.num_sequences):
                shown = self.version % log.samples_every == 0
                part = batch.select(piece)
                update = self._step(part, view=shown or first_use is not None)
                self.old_policy.stepped(self.model)
                version = self.version
                self.version += 1
                self.row = update.method
                if first_use is not None and update.tokens is not None:
                    first_use.add(piece, update.tokens, version=version)
                self._record(index, part.rollouts, update, taken=version - before, shown=shown)
            if first_use is not None:
                first_use.write(self.files.log, index, self.shop.shard)

    def _assessed(self, rollouts: Rollouts) -> Batch:
        """The batch with its advantages, and what other policies say of it before its first update."""
        optim, cap = self.shop.recipe.optim, self.shop.recipe.rollout.tail_log_ratio_cap
        options = {"token_budget": optim.token_budget, "tail_log_ratio_cap": cap}
        gates = self.row.correction.gates
        start = old = ref = None
        if self.needs_start:
            exact = self.reads_correction and any(g.exact for g in gates)
            start = assess(self.model, rollouts, exact=exact, **options).at(self.version)
        same = self._old_is_current(rollouts)
        if self.needs_old and not same:
            old = self.old_policy.score(
                self.model, rollouts, self.version, exact=self.exact_old, **options
            )
        if self.row.penalty is not None:
            ref = reference_logp(self.shop.model, rollouts, token_budget=optim.token_budget)
        earned = credit(
            rollouts,
            self.row,
            how=self.estimator,
            baseline_over=optim.baseline_over,
            start=start,
            old=old,
            logp_ref=ref,
            version=self.version,
            total=lambda x: reduce_sum(self.shop.accelerator, x),
        )
        same = self.needs_old and same
        status = self._old_status(rollouts, old, same)
        logits = self._old_logits if self.compares_old else None
        return Batch(rollouts, earned, old, ref, cap, status, same, logits)

    def _old_logits(self, piece: Rollouts) -> Float[Tensor, "n v"]:
        """The old policy's tempered logits of a piece of a batch; the model is at `self.version`."""
        return self.old_policy.logits(self.model, piece, self.version)

    def _old_status(
        self, rollouts: Rollouts, old: Assessment | None, same: bool
    ) -> Int[Tensor, " n"] | None:
        """How each token's old log-prob was come by; None if the method reads none."""
        if old is not None:
            return old.status(rollouts.rollout_version)
        if not same and self.row.anchor is None:
            return None
        anchored = {None: "exact", RolloutAsOld: "missing", Interpolated: "approximated"}
        kind = None if self.row.anchor is None else type(self.row.anchor)
        return torch.full_like(rollouts.rollout_version, OLD_STATUS.index(anchored[kind]))

    def _old_is_current(self, rollouts: Rollouts) -> bool:
        """Whether the step's own forward pass is the old policy's: one update, by the weights that drew.

        Only where the old policy is exact then, and the same in every process.
        """
        optim = self.shop.recipe.optim
        exact = self.old_settings.source in ("sampling", "second_model", "batch_start")
        mine = bool((rollouts.rollout_version == self.version).all())
        behind = global_sum(self.shop.accelerator, float(not mine))
        return exact and optim.epochs == optim.minibatches == 1 and behind == 0

    def _step(self, part: Batch, *, view: bool) -> Update:
        """One optimizer step on a part of a batch."""
        shop, optim = self.shop, self.shop.recipe.optim
        # Dropout, if a model has any, must be the same in a resumed run.
        torch.manual_seed(batch_seed(shop.recipe.seed, self.version, shop.shard.rank))
        return train_step(
            shop.accelerator,
            self.model,
            self.optimizer,
            part,
            self.row,
            token_budget=optim.token_budget,
            max_grad_norm=optim.max_grad_norm,
            version=self.version,
            view=view,
            region=self.region,
        )

    def evaluate(self) -> None:
        """Mean reward of the current policy on held-out prompts, drawn at float32 by transformers."""
        shop = self.shop
        model = shop.accelerator.unwrap_model(self.model)
        prompts = shop.recipe.log.eval_prompts
        shop.watch(Event("stage", self.name, text=f"evaluating on {prompts} held-out prompts"))
        engine = make_engine("transformers", model, dtype="float32", batch_size=256)
        problems = shop.task.sample(
            shop.recipe.log.eval_prompts, seed=shop.recipe.seed, split="eval"
        )
        mine = problems[shop.shard.rank :: shop.shard.world]
        drawn = rollout(
            engine, mine, shop.task, shop.tokenizer, shop.sampling, samples=1,
            seed=batch_seed(shop.recipe.seed, 0, shop.shard.rank),
        )  # fmt: skip
        assert drawn.rewards is not None
        total = global_sum(shop.accelerator, float(drawn.rewards.double().sum()))
        row = {
            "update": self.version,
            "reward": total / len(problems),
            "prompts": len(problems),
        }
        if shop.accelerator.is_main_process:
            self.files.append("eval", row)
        shop.accelerator.log({"eval/reward": row["reward"]}, step=self.version)
        shop.watch(Event("eval", self.name, self.version, shop.recipe.updates, metrics=row))
        self.tick = time.perf_counter()

    def finish(self) -> dict[str, Any]:
        """Store the model and the arm's row of the table."""
        shop = self.shop
        model = shop.accelerator.unwrap_model(self.model)
        shop.accelerator.wait_for_everyone()
        metrics = self.files.rows("metrics")
        seconds = sum(m["throughput/seconds"] for m in metrics)
        summary = summarize_arm(
            self.name, self.row, shop.recipe.arms[self.name].method, metrics,
            self.files.rows("eval"), seconds=seconds, findings=self.live.summary(),
            old_policy=self.old_settings.source,
        )  # fmt: skip
        if shop.accelerator.is_main_process:
            save_for_engine(model, shop.tokenizer, self.files.path / "model")
            self.files.finish(summary)
        for tracker in shop.accelerator.trackers:
            tracker.finish()
        shop.accelerator.free_memory()
        shop.watch(Event("arm_done", self.name, self.version, shop.recipe.updates, metrics=summary))
        return summary

    def _minibatches(self, index: int, epoch: int, sequences: int) -> tuple[Tensor, ...]:
        optim, seed = self.shop.recipe.optim, self.shop.recipe.seed
        if optim.epochs == optim.minibatches == 1:
            return (torch.arange(sequences),)
        g = torch.Generator().manual_seed(batch_seed(seed, index, epoch))
        return torch.randperm(sequences, generator=g).tensor_split(optim.minibatches)

    def _record(
        self, index: int, rollouts: Rollouts, update: Update, *, taken: int, shown: bool
    ) -> None:
        """Store and show what an update did, after `taken` others on the same batch."""
        shop, now = self.shop, time.perf_counter()
        seconds, self.tick = now - self.tick, now
        assert update.evidence is not None
        # After a batch's first update the policy has learned from its prompts: nothing covers then.
        fresh = taken == 0
        proof = certify(update.evidence, reward_range=shop.recipe.reward_range, fresh=fresh)
        found = summarize(update.stats)
        row = {
            "update": self.version,
            "batch": index,
            "batch/updates_before": taken,
            "divergence/grade": update.stats.grade,
            **found,
            "optim/lr": shop.recipe.optim.lr * found["optim/lr_scale"],
            "old/status": next(
                (name for name in reversed(OLD_STATUS) if found.get(f"old/{name}_frac")), None
            ),
            **proof.as_metrics(),
            "certificate/fresh": fresh,
            "certificate/verdict": proof.verdict,
            "throughput/seconds": seconds,
            "throughput/tokens_per_s": found["batch/tokens"] / seconds,
        }
        if shop.accelerator.is_main_process:
            self.files.append("metrics", row)
            if shown and update.tokens is not None:
                for sample in samples(rollouts, update.tokens, self.version, shop.tokenizer):
                    self.files.append("samples", sample)
        numbers = {k: v for k, v in row.items() if isinstance(v, (int, float))}
        shop.accelerator.log(numbers, step=self.version)
        shop.watch(Event("update", self.name, self.version, shop.recipe.updates, metrics=row))
        for finding in self.live.update(row):
            self._found(finding)

    def _found(self, finding: Finding) -> None:
        shop, said = self.shop, finding.as_dict()
        if shop.accelerator.is_main_process:
            self.files.append("findings", {"update": self.version, **said})
        text = f"{self.name}: update {self.version}, {finding.severity}: {finding.symptom} {finding.fix}"
        shop.watch(Event("finding", self.name, self.version, shop.recipe.updates, text, said))
