"""Warm start: supervised training on a task's demonstrations, so that RL begins with some rewards.

`warm_start` fits the task's demonstrations until a sampled completion is right about half of the time. Seeds differ by
hundreds of steps in when that happens, and accuracy then rises from 0.2 to 0.9 within a hundred: hence a target, not a
number of steps. Results are cached under a key of everything that shaped them: initial weights and configuration, the
batches, the hyperparameters and the library versions.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from jaxtyping import Int
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from offdrift.errors import RecipeError, RecordError
from offdrift.models import default_cache_dir
from offdrift.records.atomic import write_atomically
from offdrift.texts import check_file
from offdrift_lab.train.data.environments import Environment
from offdrift_lab.train.data.episodes import demonstrated
from offdrift_lab.train.data.prompts import prompt_ids
from offdrift_lab.train.data.tasks import Task

CODE_VERSION = 1
"""Raise it when the same arguments start to give another model."""

IGNORED = -100
Progress = Callable[[int, float], None]


@dataclass(frozen=True)
class _Plan:
    """The hyperparameters of one start; all of them are in its cache key."""

    steps: int
    batch_size: int
    lr: float
    target: float
    seed: int
    warmup_frac: float = 0.05
    final_lr_frac: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    window: int = 10
    """Batches over which the target must be reached on average."""
    landing: int = 20
    """After that, the steps over which the learning rate goes to zero: single steps at its height
    move accuracy by 0.1 and more."""

    def lr_at(self, step: int, *, landed: int = 0) -> float:
        """Linear warm-up, then linear decay to `final_lr_frac` of the peak; then the landing."""
        warmup = max(1, round(self.warmup_frac * self.steps))
        if step < warmup:
            return self.lr * (step + 1) / warmup
        left = (self.steps - step) / max(1, self.steps - warmup)
        cruise = self.lr * (self.final_lr_frac + (1 - self.final_lr_frac) * left)
        return cruise * (1 - landed / self.landing)


def warm_start(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task | Environment,
    *,
    steps: int,
    batch_size: int = 128,
    lr: float = 2e-3,
    target: float = 0.5,
    seed: int,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
) -> PreTrainedModel:
    """Fit the demonstrations of a task, in place, or take the result of an earlier identical start.

    Minimizes the mean over completion and end tokens of -log pi(token) with AdamW, on a fresh batch
    of problems at every step.

    Args:
        steps: at most this many optimizer steps; 0 leaves the model as it is.
        batch_size: demonstrations per step.
        lr: peak learning rate.
        target: when a completion sampled at temperature 1 is this likely to be the demonstration,
            on problems not seen before, the learning rate goes to zero over 20 more steps (which
            add another 0.1 to 0.2) and the start is over; above 1, never before `steps`.
        seed: of the problems drawn.
        cache_dir: where finished starts are kept; `default_cache_dir()` if not given.
        progress: called after every step with the steps done and the loss (nat per token).

    Returns: the same model, trained, in the mode (train or eval) that it came in.

    Raises: `RecipeError` if the task shows no demonstrations.
    """
    plan = _Plan(steps, batch_size, lr, target, seed)
    if steps == 0:
        return model
    file = (cache_dir or default_cache_dir()) / "warmstart" / _file_name(model, tokenizer, task, plan)
    if _restored(model, file):
        return model
    was_training = model.training
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=plan.betas, weight_decay=plan.weight_decay)
    chances: deque[float] = deque(maxlen=plan.window)
    landed = 0
    try:
        model.eval()  # without dropout, nothing draws from the host's random state
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = plan.lr_at(step, landed=landed)
            loss, chance = _step(model, optimizer, plan, *_batch(tokenizer, task, plan, step))
            chances.append(chance)
            if progress is not None:
                progress(step + 1, loss)
            full = len(chances) == plan.window
            landed += bool(landed or (full and sum(chances) >= plan.window * target))
            if landed == plan.landing:
                break
    finally:
        model.train(was_training)
    try:
        write_atomically(file, lambda part: save_file(_named(model), part))
    except RecordError as error:
        warnings.warn(
            f"the warm start is not cached and will be repeated next time: {error}; "
            "set OFFDRIFT_CACHE to a folder that can be written",
            stacklevel=2,
        )
    return model


def _step(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    plan: _Plan,
    tokens: Int[Tensor, "b t"],
    labels: Int[Tensor, "b t"],
) -> tuple[float, float]:
    """One update; the loss and the mean chance to sample the demonstration, both before it."""
    tokens, labels = tokens.to(model.device), labels.to(model.device)
    # -log pi of the labeled tokens, 0 elsewhere. No attention mask: padding stands on the right, where a causal
    # model cannot see it.
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1].float()
    losses = functional.cross_entropy(logits.transpose(1, 2), labels[:, 1:], ignore_index=IGNORED, reduction="none")
    loss = losses.sum() / (labels != IGNORED).sum()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), plan.clip_norm)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), losses.detach().sum(1).neg().exp().mean().item()


def _batch(
    tokenizer: PreTrainedTokenizerBase, task: Task | Environment, plan: _Plan, step: int
) -> tuple[Int[Tensor, "b t"], Int[Tensor, "b t"]]:
    """Prompts with their demonstrations, and the same tokens as labels where the model writes them."""
    # A seed that no step of the trainer uses, so that what it draws later is new.
    digest = hashlib.sha256(f"warm start {plan.seed} {step}".encode()).digest()
    problems = task.sample(plan.batch_size, seed=int.from_bytes(digest[:8], "big"))
    end_id = int(tokenizer.eos_token_id)  # type: ignore[arg-type]
    examples: list[list[tuple[int, bool]]] = []
    for problem in problems:
        if isinstance(task, Environment):
            examples.append(demonstrated(problem, task, tokenizer))
            continue
        if not isinstance(problem.demonstration, str):
            raise RecipeError(
                f"task {task.name!r} shows no demonstrations to start from; set the warm start's "
                "steps to 0 and begin with a model that already solves some of it"
            )
        answer = [*tokenizer.encode(problem.demonstration, add_special_tokens=False), end_id]
        prompt = prompt_ids(problem, tokenizer)
        examples.append([(token, i >= len(prompt)) for i, token in enumerate([*prompt, *answer])])
    tokens = torch.full((len(problems), max(map(len, examples))), end_id)
    labels = torch.full_like(tokens, IGNORED)
    for i, pairs in enumerate(examples):
        ids, trained = torch.tensor(pairs).T
        tokens[i, : len(pairs)] = ids
        labels[i, : len(pairs)] = ids.where(trained > 0, IGNORED)
    return tokens, labels


def _file_name(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, task: Task | Environment, plan: _Plan
) -> str:
    """A name that differs whenever the result could."""
    facts = {
        "code": CODE_VERSION,
        "torch": torch.__version__.split("+")[0].split(".")[:2],
        "transformers": transformers.__version__.split(".")[:2],
        "config": model.config.to_diff_dict(),
        "plan": asdict(plan),
    }
    key = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode())
    first, last = (_batch(tokenizer, task, plan, step) for step in (0, plan.steps - 1))
    for tensor in (*_named(model).values(), *first, *last):
        key.update(str((tuple(tensor.shape), tensor.dtype)).encode())
        key.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return f"{task.name.replace(':', '-').replace('/', '-')}-{key.hexdigest()[:32]}.safetensors"


def _named(model: PreTrainedModel) -> dict[str, Tensor]:
    """Every parameter once (a tied head is the embedding), on the host."""
    return {name: p.detach().cpu() for name, p in model.named_parameters()}


def _restored(model: PreTrainedModel, file: Path) -> bool:
    """Load a cached start into the model; False if there is none, or it is damaged."""
    if not file.is_file():
        return False
    try:
        check_file(file)
        weights = load_file(file)
        shapes = {name: p.shape for name, p in model.named_parameters()}
        if {name: w.shape for name, w in weights.items()} != shapes:
            raise SafetensorError("it holds the weights of another model")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weights[name])
    except (SafetensorError, OSError, RuntimeError) as error:
        warnings.warn(f"the cached warm start {file} cannot be read ({error}); training it again", stacklevel=3)
        return False
    return True
