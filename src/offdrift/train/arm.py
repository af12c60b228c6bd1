"""State of one arm while it trains: model, optimizer, old policy, method and counters.

The order of an update's steps is in `loop`.
"""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType, gather_object
from torch import Tensor, nn

from offdrift.advantages import ADVANTAGES
from offdrift.certificate import TrustRegion
from offdrift.engines.grids import on_grid, put_on_grid
from offdrift.engines.routing import router_biases
from offdrift.engines.verify_sync import check_sync
from offdrift.judge import Context, Finding, Watcher, num_experts
from offdrift.methods import Method, override
from offdrift.methods.schedules import LengthSurge, LossScale, SurgeState
from offdrift.records.rollouts import Rollouts
from offdrift.train import recipe
from offdrift.train.align import Alignment
from offdrift.train.context import Event, EventKind, RunContext
from offdrift.train.critic import Critic, ValueHead
from offdrift.train.drafter import Drafter
from offdrift.train.lora import add_adapters, merged_weights
from offdrift.train.old_policy import OldPolicy, make_old_policy
from offdrift.train.perturb import Perturbation
from offdrift.train.problems import digest
from offdrift.train.quantized import Survival, noise_size, noisy_norms, norm_readers, scale_invariantly
from offdrift.train.recipe import Recipe
from offdrift.train.run_folder import ArmFolder, Position, checkpoints, load_checkpoint, save_checkpoint
from offdrift.train.sharded import anywhere, is_sharded, whole_weights
from offdrift.train.source import Source

MIB = 2**20


@dataclass
class Arm:
    """One arm while it trains."""

    run: RunContext
    name: str
    files: ArmFolder
    method: Method
    """Method of the next step; adaptive methods change it."""
    model: nn.Module
    optimizer: torch.optim.Optimizer
    critic: Critic | None
    """Where the advantage estimator reads values."""
    old_settings: recipe.OldPolicy
    old_policy: OldPolicy
    diagnosis: LiveDiagnosis
    version: int
    """Optimizer steps taken."""
    loss_scale: LossScale
    """Of the next step, where the trainer computes in float16."""
    align: Alignment | None = None
    """The last update's gradient, where the recipe keeps gradients apart."""
    perturb: Perturbation | None = None
    """Noise in the layers' inputs, where the loss is to see it."""
    drafter: Drafter | None = None
    """What proposes tokens to the engine, where something does."""
    noisy_paths: Sequence[str] = ()
    """Norms that the engine is given with noise."""
    published_sigma: float | None = None
    """Standard deviation of the noise that the engine has."""
    switched: bool = False
    """Whether a surge of lengths has changed the method."""
    surge: SurgeState = field(default_factory=SurgeState)
    """What the length guard has seen."""
    last_time: float = field(default_factory=time.perf_counter)
    """When the last update was recorded, seconds."""

    @property
    def recipe(self) -> Recipe:
        """The run's recipe, after a surge with the method that the length guard changes to."""
        return self.run.recipe.after_surge() if self.switched else self.run.recipe

    @property
    def estimator(self) -> str:
        """Name of the advantage estimator."""
        return self.run.recipe.estimator(self.method)

    @property
    def replay(self) -> recipe.Replay:
        """What the arm's passes repeat."""
        return self.run.recipe.replay_of(self.name)

    @property
    def quantized(self) -> recipe.Quantized:
        """What the arm does about the grid of the rollouts."""
        return self.run.recipe.quantized_of(self.name)

    @property
    def region(self) -> TrustRegion:
        """The trust region that every update's certificate is about."""
        return TrustRegion(horizon=self.run.sampling.max_tokens, delta=self.run.recipe.delta)

    @property
    def compares_old(self) -> bool:
        """Whether steps compare whole distributions of the old and the current policy."""
        return any(name.endswith("old_current") for name in self.method.divergences) or self.measures_alphas

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
    def advantages_read_gates(self) -> bool:
        """Whether advantages depend on what gates and weights decide before a batch's first update."""
        kept = self.run.recipe.optim.baseline_over == "kept"
        return kept or "weight" in ADVANTAGES[self.estimator].reads

    @property
    def learning_rate(self) -> float:
        """Of the next step: what the schedule and the length guard say."""
        return self.run.recipe.optim.learning_rate(self.version, self.run.recipe.updates) * self.surge.scale

    def learn(self, row: Mapping[str, Any]) -> None:
        """Move on the loss scale and the length guard, if there are any, after a step with these metrics."""
        mean_length = row["response/length_mean"] or math.nan  # null in a stored row
        if (skipped := row.get("optim/skipped")) is not None:
            self.loss_scale = self.loss_scale.after(skipped=bool(skipped))
        settings = self.run.recipe.optim.length_guard
        if settings is not None and mean_length > 0:  # not NaN
            rule = LengthSurge(**settings.model_dump(exclude={"switch_to"}))
            self.surge = rule.after(self.surge, mean_length)

    def switch(self) -> None:
        """Before a batch: take the method that the recipe names for the time after a surge, if there has been one."""
        settings = self.run.recipe.optim.length_guard
        if settings is None or settings.switch_to is None or self.switched or self.surge.surge is None:
            return
        self.switched = True
        self.method = self.recipe.row(self.name)
        self.announce(f"responses became longer: the method is {settings.switch_to} from now on")

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The trainer's weights as engines take them."""
        model = self.run.accelerator.unwrap_model(self.model)
        return merged_weights(model) if self.run.recipe.lora is not None else whole_weights(model)

    def publish(self, source: Source | None = None) -> None:
        """Give the engine the trainer's weights, and make sure that it took them, unless the source's workers take
        them in their own time."""
        run, begin = self.run, time.perf_counter()
        model, quantized = run.accelerator.unwrap_model(self.model), self.quantized
        # Where the trainer's passes are not on the engine's grid anyway, they are while the two are compared. Adapters
        # have no place on it.
        other = run.recipe.lora is not None or quantized.forward
        with self.noisy(model), on_grid(model, None if other else run.recipe.grid):
            if source is None:
                run.engine.load_weights(self.weights(), version=self.version)
            if source is None or source.publish(self.weights(), self.version):
                check_sync(run.engine, model, run.probes, run.sampling, seed=run.recipe.seed, baseline=run.synced)
        self.old_policy.published(self.model, self.version)
        if source is not None:
            source.seconds["publish"] += time.perf_counter() - begin

    def teach_drafter(self, rollouts: Rollouts, source: Source) -> dict[str, Tensor]:
        """Distill the drafter on the batch at hand, if it is due, and give it to the engine; sums for the metrics."""
        updates = self.version + self.run.recipe.updates // self.run.recipe.batches
        if self.drafter is None or not self.drafter.due(updates):
            return {}
        begin = time.perf_counter()
        sums = self.drafter.learn(rollouts, updates)
        self.hand_over_drafter()
        source.seconds["distill"] += time.perf_counter() - begin
        return sums

    def hand_over_drafter(self) -> None:
        """Give the engine the drafter's weights, if there is one."""
        if self.drafter is not None:
            engine: Any = self.run.engine
            engine.load_drafter(self.drafter.model.named_parameters(), version=self.drafter.version)

    @property
    def noise_sigma(self) -> float | None:
        """Standard deviation of the noise in the norms that the engine is given now; None where it gets none."""
        settings = self.quantized.noise
        return None if settings is None else noise_size(self.version, self.run.recipe.updates, settings)

    def noisy(self, model: nn.Module) -> AbstractContextManager[None]:
        """The model with QeRL's noise in its norms, if the arm has it; the same in every process."""
        sigma = self.noise_sigma
        if sigma is None:
            return nullcontext()
        seed = digest("noise", self.run.recipe.seed, self.version)
        self.published_sigma = sigma
        return noisy_norms(model, self.noisy_paths, sigma=sigma, seed=seed)

    def survival(self) -> Survival | None:
        """The engine's matrices before a step; None where they are on no grid, or spread over processes."""
        run = self.run
        if run.recipe.grid is None or is_sharded(run.accelerator.unwrap_model(self.model)):
            return None
        return Survival.of(run.recipe.grid, run.matrices, self.weights())

    def keep_old_weights(self, rollouts: Rollouts | None, source: Source) -> None:
        """Before the trainer moves on: keep weights that this batch or one to come still refers to."""
        after = self.version + self.run.recipe.updates // self.run.recipe.batches
        versions = source.in_flight(after)
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
            for part in (self.align, self.perturb, self.drafter):
                if part is not None:
                    part.save(folder)

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
        self.run.watch(Event(kind, self.name, self.version, total, text, metrics))

    def announce(self, stage: str) -> None:
        """Tell the run's watcher what the arm is busy with."""
        self.run.watch(Event("stage", self.name, text=stage))


def start_arm(run: RunContext, name: str, *, resume: bool) -> tuple[Arm, Source]:
    """An arm and its source of batches, at the shared start or at the arm's newest checkpoint.

    The engine has the arm's weights afterwards.
    """
    accelerator, files = run.accelerator, run.folder.arm(name)
    checkpoint_folder = files.path / "checkpoints"
    lora, seed, of_critic = run.recipe.lora, run.recipe.seed, run.recipe.critic
    model = copy.deepcopy(run.model) if lora is None else add_adapters(run.model, lora, seed=seed)
    if accelerator.distributed_type != DistributedType.FSDP:  # which moves it part by part
        model.to(accelerator.device)
    if run.recipe.replay_of(name).freeze_router_bias:
        for bias in router_biases(model):
            bias.requires_grad_(False)
    quantized = run.recipe.quantized_of(name)
    noisy_paths = tuple(norm_readers(model)) if quantized.noise is not None else ()
    if quantized.scale != 1:
        scale_invariantly(model, quantized.scale)
    if quantized.forward:
        assert run.recipe.grid is not None
        put_on_grid(model, run.recipe.grid)
    # Before and after a surge of lengths, if the recipe makes a difference.
    stages = (run.recipe, run.recipe.after_surge())
    inputs = {x for r in stages for x in ADVANTAGES[r.estimator(r.row(name))].needs}
    head = ValueHead(run.model).to(accelerator.device) if "values" in inputs and of_critic.shared else None
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad] + ([] if head is None else list(head.parameters())),
        lr=run.recipe.optim.lr,
        betas=run.recipe.optim.betas,
        weight_decay=run.recipe.optim.weight_decay,
    )
    model, optimizer = accelerator.prepare(model, optimizer)
    critic = None
    if head is not None:
        critic = Critic(accelerator.prepare(head), optimizer, of_critic, policy=model)
    elif "values" in inputs:
        critic = Critic.start(run.model, of_critic, accelerator)
    stored = load_checkpoint(accelerator, checkpoint_folder, whole=lora is None) if resume else None
    position = stored or Position(0, 0)
    if accelerator.is_main_process:
        if stored is None:
            files.clear()
        else:
            files.cut_back(position.version, batch=position.batch)
    accelerator.wait_for_everyone()
    if stored is not None:
        run.watch(Event("resume", name, position.version, run.recipe.updates, f"from batch {position.batch}"))
    accelerator.init_trackers(name, config=None)
    method = override(stages[position.switched].row(name), position.method)
    keeper = next((r for r in stages if r.row(name).scores_old), None)
    settings = (keeper or run.recipe).old_policy_of(name)
    old_policy = OldPolicy(accelerator, files.path)
    if keeper is not None:
        old_policy = make_old_policy(settings, accelerator, files.path / "snapshots")
    context = Context(
        framework="offdrift",
        mixture_of_experts=num_experts(run.model) > 1,
        method=run.recipe.arms[name].method,
        temperature=run.recipe.rollout.temperature,
        filter_replayed=run.recipe.replay_of(name).support if run.recipe.rollout.filtered else None,
        cache_replayed=run.recipe.replay_of(name).kv if run.recipe.rollout.kv is not None else None,
    )
    diagnosis = LiveDiagnosis.of(files, context)
    arm = Arm(
        run,
        name,
        files,
        method,
        model,
        optimizer,
        critic,
        settings,
        old_policy,
        diagnosis,
        position.version,
        LossScale(),
    )
    if run.recipe.optim.align is not None:
        arm.align = Alignment(run.recipe.optim.align)
    if run.recipe.optim.perturb is not None:
        inner = accelerator.unwrap_model(model)
        arm.perturb = Perturbation(inner, run.recipe.optim.perturb, accelerator, seed=seed)
    if run.drafter is not None:
        assert run.recipe.rollout.speculative is not None
        arm.drafter = Drafter(
            run.drafter,
            run.recipe.rollout.speculative,
            reward_range=run.recipe.reward_range,
            token_budget=run.recipe.optim.token_budget,
        )
    arm.noisy_paths = noisy_paths
    arm.switched = position.switched
    for row in files.rows("metrics"):
        arm.learn(row)
    arm.announce("giving the engine the arm's weights")
    arm.publish()
    arm.report("arm", arm.recipe.row(name).describe())
    options: dict[str, Any] = {
        "engine": run.engine,
        "task": run.task,
        "tokenizer": run.tokenizer,
        "recipe": run.recipe,
        "sampling": run.sampling,
        "folder": files.path / "rollouts",
        "shard": run.shard,
        "start": position.batch,
        "greedy": "greedy_rewards" in inputs,
        "by_component": "components" in inputs,
        "mixture": run.recipe.mixture_of(name),
    }
    if run.recipe.pipeline is None:
        source = Source(**options)
    else:
        from offdrift.train.pipeline.source import PipelineSource

        engine: Any = run.engine
        source = PipelineSource(**options, workers=engine.workers, schedule=run.recipe.schedule_of(name))
    if stored is not None:
        newest = checkpoints(checkpoint_folder)[-1]
        source.load(stored.source, newest)
        old_policy.load(newest, anywhere(model, source.versions()) - {position.version})
        if arm.align is not None:
            arm.align.load(newest, accelerator.device)
        if arm.perturb is not None:
            arm.perturb.load(newest)
        if arm.drafter is not None:
            arm.drafter.load(newest)
    arm.hand_over_drafter()
    source.begin(arm.weights())
    return arm, source


@dataclass(frozen=True)
class LiveDiagnosis:
    """Diagnosis while an arm trains: metrics of each step in, new findings out, once each.

    Findings are a function of the metrics alone, so a resumed run rebuilds them from its stored rows.
    """

    watcher: Watcher

    @staticmethod
    def of(files: ArmFolder, context: Context) -> LiveDiagnosis:
        """The diagnosis after the rows that the arm has stored."""
        live = LiveDiagnosis(Watcher(context=context))
        for row in files.rows("metrics"):
            live.update(row)
        return live

    def update(self, row: Mapping[str, Any]) -> list[Finding]:
        """The findings that fire for the first time at this step."""
        # Only finite numbers: null in a stored row was NaN, and both mean unknown.
        numbers = {k: float(v) for k, v in row.items() if isinstance(v, (int, float)) and math.isfinite(v)}
        return self.watcher.update({"step": row["update"], **numbers})

    def summary(self) -> list[dict[str, Any]]:
        """All findings so far, in short."""
        keys = ("rule", "cause", "severity", "step", "steps")
        return [{key: getattr(finding, key) for key in keys} for finding in self.watcher.findings]
