"""State of one arm while it trains: model, optimizer, old policy, method and counters.

The order of an update's steps is in `loop`.
"""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, gather_object
from torch import Tensor, nn

from offdrift.advantages import ADVANTAGES
from offdrift.certificate import TrustRegion
from offdrift.certificate.control import CONTROL_FROM
from offdrift.engines.verify_sync import check_sync
from offdrift.judge import Context, Watcher, num_experts
from offdrift.methods import Method, override
from offdrift.methods.load import displayed
from offdrift.records.rollouts import Rollouts
from offdrift_lab.train.data.source import Source
from offdrift_lab.train.features.base import Feature
from offdrift_lab.train.features.critic import Critic, OwnCritic, SharedCritic
from offdrift_lab.train.features.lora_adapters import engine_weights
from offdrift_lab.train.features.table import features_of
from offdrift_lab.train.loop.context import Event, EventKind, RunContext
from offdrift_lab.train.loop.old_policy import OldPolicy, make_old_policy
from offdrift_lab.train.loop.run_folder import ArmFolder, Position, checkpoints, load_checkpoint, save_checkpoint
from offdrift_lab.train.loop.sharded import anywhere
from offdrift_lab.train.loop.trackers import Labels, open_trackers
from offdrift_lab.train.report.diagnosis import LiveDiagnosis
from offdrift_lab.train.settings import recipe
from offdrift_lab.train.settings.optim import OptimSettings
from offdrift_lab.train.settings.recipe import Recipe

MIB = 2**20


F = TypeVar("F", bound=Feature)


@dataclass(kw_only=True)
class Arm:
    """One arm while it trains."""

    run: RunContext
    name: str
    files: ArmFolder
    method: Method
    """Method of the next step; adaptive methods change it."""
    model: nn.Module
    optimizer: torch.optim.Optimizer
    features: tuple[Feature, ...] = ()
    """What the run has beside these; see `train.features`."""
    old_settings: recipe.OldPolicySettings
    old_policy: OldPolicy
    version: int = 0
    """Optimizer steps taken."""
    switched: bool = False
    """Whether a surge of lengths has changed the method."""
    diagnosis: LiveDiagnosis = field(default_factory=lambda: LiveDiagnosis(Watcher()))
    last_time: float = field(default_factory=time.perf_counter)
    """When the last update was recorded, seconds."""

    @property
    def accelerator(self) -> Accelerator:
        return self.run.accelerator

    @property
    def inner(self) -> nn.Module:
        """The model without what accelerate wraps around it."""
        return self.accelerator.unwrap_model(self.model)

    @property
    def optim(self) -> OptimSettings:
        return self.run.recipe.optim

    @property
    def half(self) -> torch.dtype | None:
        """Precision of the forward passes; None: float32."""
        return self.run.half

    def feature(self, kind: type[F]) -> F | None:
        """The arm's feature of a kind, if it has it."""
        return next((x for x in self.features if isinstance(x, kind)), None)

    @property
    def critic(self) -> Critic | None:
        """The critic, where the advantage estimator reads values."""
        return next((x.critic for x in self.features if isinstance(x, (OwnCritic, SharedCritic))), None)

    @property
    def steps_per_batch(self) -> int:
        """Optimizer steps on a batch."""
        return self.run.recipe.updates // self.run.recipe.batches

    @property
    def recipe(self) -> Recipe:
        """The run's recipe, after a surge with the method that the length guard changes to."""
        return self.run.recipe.after_surge() if self.switched else self.run.recipe

    @property
    def estimator(self) -> str:
        """Name of the advantage estimator."""
        return self.run.recipe.estimator(self.method)

    @property
    def replay(self) -> recipe.ReplaySettings:
        """Recorded engine choices that the arm's forward passes repeat."""
        return self.run.recipe.replay_of(self.name)

    @property
    def quantized(self) -> recipe.QuantizedSettings:
        """Settings of the arm for rollouts with quantized weights."""
        return self.run.recipe.quantized_of(self.name)

    @property
    def region(self) -> TrustRegion:
        """The trust region that every update's certificate is about."""
        delta, eps = self.run.recipe.token_limits
        return TrustRegion(horizon=self.run.sampling.max_tokens, delta=delta, eps=eps)

    @property
    def control_variates(self) -> bool:
        """Whether steps have prompts and lag enough for certificates to gain by control variates."""
        recipe = self.run.recipe
        return recipe.rollout.prompts // recipe.optim.minibatches >= CONTROL_FROM and not self.always_fresh

    @property
    def compares_old(self) -> bool:
        """Whether steps compare whole distributions of the old and the current policy."""
        return self.method.compares_old or self.measures_alphas

    @property
    def measures_alphas(self) -> bool:
        """Whether mismatch and staleness are taken from whole distributions, whatever the method reads."""
        return self.run.recipe.certificate.alphas and self.method.scores_old

    @property
    def always_fresh(self) -> bool:
        """Whether every batch is drawn by the weights of its first update."""
        recipe = self.run.recipe
        if recipe.pipeline is not None:
            return recipe.schedule_of(self.name).max_lag == 0
        return recipe.lag.sync_every == 1 and recipe.lag.queue == 0 and recipe.buffer.capacity is None

    @property
    def logs_old_divergences(self) -> bool:
        """Whether every batch has divergences of the old from the rollout policy: the method reads them, or each batch
        is drawn by the weights of its only update."""
        optim = self.run.recipe.optim
        reads = any(name.endswith("rollout_old") for name in self.method.divergences) or self.measures_alphas
        return reads or (self.always_fresh and optim.epochs == optim.minibatches == 1)

    @property
    def penalty_in_reward(self) -> bool:
        """Whether the method's penalty on KL is taken off the reward."""
        return getattr(self.method.penalty, "place", None) == "reward"

    @property
    def advantages_read_gates(self) -> bool:
        """Whether advantages depend on what gates and weights decide before a batch's first update."""
        kept = self.run.recipe.optim.baseline_over == "kept"
        return kept or "weight" in ADVANTAGES[self.estimator].reads

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step: the schedule's, times the features' scales."""
        scale = math.prod(feature.rate_scale for feature in self.features)
        return self.optim.learning_rate(self.version, self.run.recipe.updates) * scale

    def learn(self, row: Mapping[str, Any]) -> None:
        """Let features see the row of a step."""
        for feature in self.features:
            feature.recorded(self, row)

    def switch(self, method: str) -> None:
        """Take the method of the recipe after a surge of lengths."""
        self.switched = True
        self.method = self.recipe.row(self.name)
        self.announce(f"responses became longer: the method is {method} from now on")

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The trainer's weights as engines take them."""
        return engine_weights(self.inner)

    def publish(self, source: Source | None = None) -> None:
        """Give the engine the trainer's weights, and make sure that it took them, unless the source's workers take
        them in their own time."""
        run, begin, model = self.run, time.perf_counter(), self.inner
        with ExitStack() as published:
            for feature in self.features:
                published.enter_context(feature.publishing(self, model))
            if source is None:
                run.engine.load_weights(self.weights(), version=self.version)
            if source is None or source.publish(self.weights(), self.version):
                check_sync(run.engine, model, run.probes, run.sampling, seed=run.recipe.seed, baseline=run.synced)
        self.old_policy.published(self.model, self.version)
        if source is not None:
            source.seconds["publish"] += time.perf_counter() - begin

    def keep_old_weights(self, rollouts: Rollouts | None, source: Source) -> None:
        """Before the trainer moves on: keep weights that this batch or one to come still refers to."""
        versions = source.in_flight(self.version + self.steps_per_batch)
        if self.compares_old and rollouts is not None:
            versions |= set(rollouts.rollout_version.unique().tolist())
        self.old_policy.retain(versions, self.model, self.version)

    def advance(self, method: Method) -> None:
        """Count an optimizer step; `method` is what the next step uses."""
        self.old_policy.stepped(self.model)
        self.version += 1
        self.method = method

    def save_checkpoint(self, next_batch: int, source: Source) -> None:
        """Store where the arm stands; the engine has the trainer's weights."""
        changed = self.method.changes(self.recipe.row(self.name))
        position = Position(next_batch, self.version, changed, self.switched, source.state())
        self.old_policy.retain(source.versions(), self.model, self.version)

        def also(folder: Path) -> None:
            self.old_policy.save(folder)
            source.save(folder)
            for feature in self.features:
                feature.save(folder)

        save_checkpoint(self.run.accelerator, self.files.path / "checkpoints", position, also=also)

    def trim(self, source: Source) -> None:
        """Delete the oldest batches on disk, where the recipe limits the space that they take."""
        run, limit = self.run, self.run.recipe.log.disk_mib
        if limit is None:
            return
        states = [json.loads(f.read_text()) for f in self.files.path.glob("checkpoints/batch-*/source-*.json")]
        states += gather_object([source.state()]) if run.shard.world > 1 else [source.state()]
        if run.accelerator.is_main_process:
            self.files.trim(limit * MIB, set().union(*map(Source.needed, states)))
        # Until then, no process writes a head whose batch is not there yet.
        run.accelerator.wait_for_everyone()

    def report(self, kind: EventKind, text: str = "", metrics: Mapping[str, Any] | None = None) -> None:
        """Tell the run's watcher what happened at the current update."""
        total = self.run.recipe.updates
        self.run.watch(Event(kind, self.name, self.version, total=total, text=text, metrics=metrics))

    def announce(self, stage: str) -> None:
        """Tell the run's watcher what the arm is busy with."""
        self.run.watch(Event("stage", self.name, text=stage))


def start_arm(run: RunContext, name: str, *, resume: bool) -> tuple[Arm, Source]:
    """An arm and its source of batches, at the shared start or at the arm's newest checkpoint.

    The engine has the arm's weights afterwards.
    """
    arm = new_arm(run, name)
    position = restored(arm) if resume else None
    if run.accelerator.is_main_process:
        if position is None:
            arm.files.clear()
        else:
            arm.files.cut_back(position.version, batch=position.batch)
    run.accelerator.wait_for_everyone()
    if position is not None:
        run.watch(Event("resume", name, position.version, run.recipe.updates, f"from batch {position.batch}"))
        arm.version, arm.switched = position.version, position.switched
        arm.method = override(arm.recipe.row(name), position.method)
    labels = Labels(run.folder.path.name, name, displayed(arm.recipe.arms[name].method), arm.version)
    open_trackers(run.accelerator, run.recipe, labels)
    arm.diagnosis = LiveDiagnosis.of(arm.files.rows("metrics"), arm.files.rows("eval"), diagnosed(run, name), run.rules)
    for row in arm.files.rows("metrics"):
        arm.learn(row)
    arm.announce("giving the engine the arm's weights")
    arm.publish()
    arm.report("arm", arm.recipe.row(name).describe())
    source = source_of(arm, start=0 if position is None else position.batch)
    if position is not None:
        newest = checkpoints(arm.files.path / "checkpoints")[-1]
        source.load(position.source, newest)
        arm.old_policy.load(newest, anywhere(arm.model, source.versions()) - {position.version})
        for feature in arm.features:
            feature.load(newest)
    source.begin(arm.weights())
    return arm, source


def new_arm(run: RunContext, name: str) -> Arm:
    """An arm at the run's shared start, with its features, its model and optimizer prepared."""
    accelerator, files, optim = run.accelerator, run.folder.arm(name), run.recipe.optim
    features = features_of(run.recipe, name)
    model = run.model if any(x.shares_model for x in features) else copy.deepcopy(run.model)
    if accelerator.distributed_type != DistributedType.FSDP:  # which moves it part by part
        model.to(accelerator.device)
    for feature in features:
        feature.prepare(run, model)
    beside = [p for feature in features for module in feature.modules() for p in module.parameters()]
    trained = [p for p in model.parameters() if p.requires_grad] + beside
    optimizer = torch.optim.AdamW(trained, lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay)
    model, optimizer = accelerator.prepare(model, optimizer)
    # Before and after a surge of lengths, if the recipe makes a difference.
    stages = (run.recipe, run.recipe.after_surge())
    keeper = next((r for r in stages if r.row(name).scores_old), None)
    settings = (keeper or run.recipe).old_policy_of(name)
    old_policy = OldPolicy(accelerator, files.path)
    if keeper is not None:
        old_policy = make_old_policy(settings, accelerator, files.path / "snapshots")
    arm = Arm(
        run=run,
        name=name,
        files=files,
        method=run.recipe.row(name),
        model=model,
        optimizer=optimizer,
        features=features,
        old_settings=settings,
        old_policy=old_policy,
    )
    for feature in features:
        feature.start(arm)
    return arm


def restored(arm: Arm) -> Position | None:
    """Read the arm's newest checkpoint into model and optimizer; where it stands, None if there is none."""
    exclusive = not any(feature.shares_model for feature in arm.features)
    return load_checkpoint(arm.accelerator, arm.files.path / "checkpoints", whole=exclusive)


def diagnosed(run: RunContext, name: str) -> Context:
    """Context of an arm for the diagnosis: facts that its metrics do not show."""
    rollout, replay = run.recipe.rollout, run.recipe.replay_of(name)
    return Context(
        framework="offdrift",
        mixture_of_experts=num_experts(run.model) > 1,
        method=run.recipe.arms[name].method,
        temperature=rollout.temperature,
        filter_replayed=replay.support if rollout.filtered else None,
        filtered=rollout.filtered,
        cache_replayed=None if rollout.kv is None else replay.kv,
    )


def source_of(arm: Arm, *, start: int) -> Source:
    """The arm's source of batches, from a batch on."""
    run, name = arm.run, arm.name
    inputs = run.recipe.inputs_of(name)
    options: dict[str, Any] = {
        "engine": run.engine,
        "task": run.task,
        "tokenizer": run.tokenizer,
        "recipe": run.recipe,
        "sampling": run.sampling,
        "folder": arm.files.path / "rollouts",
        "shard": run.shard,
        "start": start,
        "greedy": "greedy_rewards" in inputs,
        "by_component": "components" in inputs,
        "mixture": run.recipe.mixture_of(name),
    }
    if run.recipe.pipeline is None:
        return Source(**options)
    from offdrift_lab.train.pipeline.source import PipelineSource

    engine: Any = run.engine
    return PipelineSource(**options, workers=engine.workers, schedule=run.recipe.schedule_of(name))
