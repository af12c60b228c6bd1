"""One arm while it trains: credit, steps, records, evaluation."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from offdrift.advantages import ADVANTAGES
from offdrift.certificate import TrustRegion, certify
from offdrift.certificate.samples import unit_rewards
from offdrift.diagnosis import Context, Finding
from offdrift.engines import make_engine
from offdrift.engines.sync import check_sync
from offdrift.methods import Method
from offdrift.rollouts.records import Rollouts
from offdrift.stats.summary import summarize
from offdrift.train import checkpoint
from offdrift.train.assess import assess, credit, reads_correction, reference_logp
from offdrift.train.folder import ArmFolder
from offdrift.train.live import Live
from offdrift.train.models import save_for_engine
from offdrift.train.samples import samples
from offdrift.train.setup import Event, Workshop, has_experts
from offdrift.train.source import Source, batch_seed, rollout
from offdrift.train.step import Batch, Update, global_sum, reduce_sum, train_step
from offdrift.train.summary import summarize_arm
from offdrift.train.tokenlog import TokenLog


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
        self.old_lag = 0
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
        """Whether a batch must be scored before its first update."""
        row, optim = ADVANTAGES[self.estimator], self.shop.recipe.optim
        reads = {"logp_old", "sum_pi_squared"} & {*row.needs, *row.reads}
        first = reads_correction(self.estimator, optim.baseline_over)
        in_reward = self.row.penalty is not None and self.row.penalty.place == "reward"
        entropy = "entropy" in self.row.needs
        # The mismatch on exact distributions is taken at the batch's start, too.
        return bool(self.row.needs_old or entropy or reads or first or in_reward or self.exact_old)

    @property
    def exact_old(self) -> bool:
        """Whether that scoring must compare whole distributions."""
        first = reads_correction(self.estimator, self.shop.recipe.optim.baseline_over)
        return any(g.exact and (first or g.on == "mismatch") for g in self.row.correction.gates)

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

    def learn(self, index: int, rollouts: Rollouts) -> None:
        """All optimizer steps on one batch.

        The old policy is the trainer at the start of the batch: where the engine lags behind it, the
        `mismatch` ratio contains that lag, which `old/version_lag` states.
        """
        optim, log = self.shop.recipe.optim, self.shop.recipe.log
        if rollouts.rewards is not None:  # refused before a step is taken on it
            unit_rewards(rollouts.rewards.double().numpy(), self.shop.recipe.reward_range)
        self.old_lag = self.version - int(rollouts.rollout_version.min())
        batch, before = self._assessed(rollouts), self.version
        for epoch in range(optim.epochs):
            first_use = TokenLog(batch) if log.tokens and epoch == 0 else None
            for piece in self._minibatches(index, epoch, rollouts.num_sequences):
                shown = self.version % log.samples_every == 0
                part = batch.select(piece)
                update = self._step(part, view=shown or first_use is not None)
                fresh, version = self.version == before, self.version
                self.version += 1
                self.row = update.method
                if first_use is not None and update.tokens is not None:
                    first_use.add(piece, update.tokens, version=version)
                self._record(index, part.rollouts, update, fresh=fresh, shown=shown)
            if first_use is not None:
                first_use.write(self.files.log, index, self.shop.shard)

    def _assessed(self, rollouts: Rollouts) -> Batch:
        """The batch with its advantages, and what must be known of it before its first update."""
        optim, cap = self.shop.recipe.optim, self.shop.recipe.rollout.tail_log_ratio_cap
        old = (
            assess(
                self.model,
                rollouts,
                token_budget=optim.token_budget,
                exact=self.exact_old,
                tail_log_ratio_cap=cap,
            )
            if self.needs_old
            else None
        )
        ref = (
            reference_logp(self.shop.model, rollouts, token_budget=optim.token_budget)
            if self.row.penalty is not None
            else None
        )
        earned = credit(
            rollouts,
            self.row,
            how=self.estimator,
            baseline_over=optim.baseline_over,
            old=old,
            logp_ref=ref,
            version=self.version,
            total=lambda x: reduce_sum(self.shop.accelerator, x),
        )
        return Batch(rollouts, earned, old, ref, cap)

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
        self, index: int, rollouts: Rollouts, update: Update, *, fresh: bool, shown: bool
    ) -> None:
        shop, now = self.shop, time.perf_counter()
        seconds, self.tick = now - self.tick, now
        assert update.evidence is not None
        # After a batch's first update the policy has learned from its prompts: nothing covers then.
        proof = certify(update.evidence, reward_range=shop.recipe.reward_range, fresh=fresh)
        found = summarize(update.stats)
        row = {
            "update": self.version,
            "batch": index,
            "divergence/grade": update.stats.grade,
            **found,
            "optim/lr": shop.recipe.optim.lr * found["optim/lr_scale"],
            "old/version_lag": self.old_lag if self.needs_old else None,
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


def named_weights(accelerator: Accelerator, model: nn.Module) -> dict[str, Tensor]:
    """The weights by name, of the model inside accelerate's wrapper."""
    return {n: p.detach() for n, p in accelerator.unwrap_model(model).named_parameters()}
