"""Real training runs with a planted cause: the trainer, an engine that does something wrong, a tiny model.

A plant changes the recipe (precision, lag, learning rate, model) or stands between the trainer and
its engine and spoils what passes: log-probs, sampling, or weights. What the trainer then logs is
what a user's run with that fault would log.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from offdrift.engines import Engine, make_engine
from offdrift.engines.verify_sync import SyncReport, verify_sync
from offdrift.judge import Context
from offdrift.models import load_model
from offdrift.records.provenance import Sampling
from offdrift.records.rollouts import EvidenceKind, FullVocab, Rollouts
from offdrift.segments import Segments
from offdrift_lab.train.data.warmstart import warm_start
from offdrift_lab.train.loop.loop import train
from offdrift_lab.train.settings.recipe import Recipe, check_recipe

Weights = Iterable[tuple[str, Tensor]]


@dataclass
class Spoiled:
    """An engine behind something that spoils it."""

    inner: Engine
    sampling: Callable[[Sampling], Sampling] = lambda sampling: sampling
    rollouts: Callable[[Rollouts], Rollouts] = lambda rollouts: rollouts
    arrives: Callable[[str, Tensor, Tensor], Tensor] = lambda name, held, given: given
    """What the engine holds of a weight after a synchronization, from what it held and was given."""
    begins: Callable[[Any], None] = lambda model: None
    """What is done to the engine's model when the run begins."""
    armed: bool = False
    """Off while the trainer proves that the engine takes weights."""
    held: dict[str, Tensor] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def vocab_size(self) -> int:
        return self.inner.vocab_size

    @property
    def version(self) -> int:
        return self.inner.version

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, seed: int, evidence: EvidenceKind = "sampled"
    ) -> Rollouts:
        if not self.armed:
            return self.inner.generate(prompts, sampling, seed=seed, evidence=evidence)
        drawn = self.inner.generate(prompts, self.sampling(sampling), seed=seed, evidence=evidence)
        return self.rollouts(drawn)

    def load_weights(self, weights: Weights, *, version: int) -> None:
        given = {name: w.detach().clone() for name, w in weights}
        if self.armed and self.held:
            given = {k: self.arrives(k, self.held[k], w) for k, w in given.items()}
        self.held = given
        self.inner.load_weights(given.items(), version=version)

    def close(self) -> None:
        self.inner.close()


def untempered(rollouts: Rollouts) -> Rollouts:
    """The log-probs as they were before the temperature: the classic bug."""
    assert isinstance(rollouts.evidence, FullVocab)
    temperature = rollouts.provenance.sampling.temperature
    raw = (rollouts.evidence.logp * temperature).log_softmax(-1)
    logp = raw.gather(1, rollouts.tokens.long()[:, None]).squeeze(1)
    return rollouts.with_(logp_rollout=logp, evidence=FullVocab(raw))


def late(rollouts: Rollouts) -> Rollouts:
    """Every log-prob stands one token too late; the first of a response is repeated."""
    first = Segments(rollouts.cu_seqlens).cu_seqlens[:-1]
    shifted = rollouts.logp_rollout.roll(1)
    shifted[first] = rollouts.logp_rollout[first]
    return rollouts.with_(logp_rollout=shifted, evidence=None)


def filtered(top_p: float) -> Callable[[Sampling], Sampling]:
    """The engine filters, the trainer does not know."""
    return lambda sampling: replace(sampling, top_p=top_p)


def unrecorded(rollouts: Rollouts) -> Rollouts:
    """What the filters left over is not recorded, so that the trainer cannot know it."""
    return rollouts.with_(support=None)


def nothing(name: str, held: Tensor, given: Tensor) -> Tensor:
    """The engine says that it took the weights, and keeps its own."""
    return held


def all_but_the_head(name: str, held: Tensor, given: Tensor) -> Tensor:
    """The tied embedding and head stay as they were."""
    return held if "embed_tokens" in name else given


def bits(count: int) -> Callable[[str, Tensor, Tensor], Tensor]:
    """Matrices of the layers on a symmetric grid of that many bits per output channel."""
    steps = 2 ** (count - 1) - 1

    def rounded(name: str, held: Tensor, given: Tensor) -> Tensor:
        return given if given.ndim < 2 or "embed_tokens" in name else _grid(given, steps)

    return rounded


def coarse_router(name: str, held: Tensor, given: Tensor) -> Tensor:
    """Only the routers are rounded, to 7 values per expert: tokens change experts, nothing else does."""
    return _grid(given, 3) if name.endswith("mlp.gate.weight") else given


def flipping(share: float) -> Callable[[Any], None]:
    """The routers of the last layer see the opposite of a few tokens: those go to other experts."""

    def begin(model: Any) -> None:
        g = torch.Generator().manual_seed(0)

        def opposite(module: Any, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            hidden = given[0]
            flips = torch.rand(*hidden.shape[:-1], 1, generator=g) < share
            return (hidden.where(~flips, -hidden), *given[1:])

        model.model.layers[-1].mlp.gate.register_forward_pre_hook(opposite)

    return begin


def _grid(weight: Tensor, steps: int) -> Tensor:
    """Each row on a symmetric grid of 2 steps + 1 values."""
    step = weight.abs().amax(-1, keepdim=True).clamp(min=1e-12) / steps
    return (weight / step).round() * step


@dataclass(frozen=True)
class Case:
    """One planted run: its cause, None for a clean one, and what is spoiled."""

    name: str
    cause: str | None
    recipe: dict[str, Any] = field(default_factory=dict)
    """Changes of the recipe, by dotted path."""
    spoil: dict[str, Any] = field(default_factory=dict)
    """What `Spoiled` does."""


ARM = "planted"
PPO = {"optim.minibatches": 2, f"arms.{ARM}": {"method": "ppo_clip"}}
"""Two updates per batch: only then does a log say how far an update moves the policy."""
MOE = {"model": "tiny-qwen3-moe"}
SMALL = {"task": "digits", "warm_start.steps": 0, "rollout.prompts": 8, "rollout.max_tokens": 10}
"""Untrained, so that no warm start is needed; rewards vary all the same (tests give the task)."""
CASES = (
    Case("float32", None),
    Case("float32, experts", None, MOE),
    Case("bfloat16", None, {"rollout.dtype": "bfloat16"}),
    Case("int8", None, {"rollout.dtype": "bfloat16", "rollout.quantization": "int8"}),
    Case("bfloat16, experts", None, {**MOE, "rollout.dtype": "bfloat16"}),
    Case("4 bits", "precision", {}, {"arrives": bits(4)}),
    Case("3 bits", "unexplained", {}, {"arrives": bits(3)}),
    Case("router in 3 bits, experts", "router_flips", MOE, {"arrives": coarse_router}),
    Case("router flips at 2 %, experts", "router_flips", MOE, {"begins": flipping(0.02)}),
    Case("4 updates behind", "stale_engine", {"lag.sync_every": 4}),
    Case("8 updates behind", "stale_engine", {"lag.sync_every": 8}),
    Case("16 updates behind", "stale_engine", {"lag.sync_every": 16}),
    Case("temperature 0.7, engine raw", "raw_logprobs", {"rollout.temperature": 0.7}, {"rollouts": untempered}),
    Case("temperature 1.3, engine raw", "raw_logprobs", {"rollout.temperature": 1.3}, {"rollouts": untempered}),
    Case("top-p 0.9", "one_sided_filter", {}, {"sampling": filtered(0.9), "rollouts": unrecorded}),
    Case("off by one", "misaligned", {"rollout.evidence": "sampled"}, {"rollouts": late}),
    Case("no weights arrive", "wrong_weights", {}, {"arrives": nothing}),
    Case("the head does not arrive, learning rate x 3", "wrong_weights", {"optim.lr": 3e-4}, {"arrives": all_but_the_head}),
    Case("two updates per batch", None, PPO),
    Case("learning rate x 10", "optimizer_amplification", {**PPO, "optim.lr": 1e-3}),
    Case("learning rate x 30", "optimizer_amplification", {**PPO, "optim.lr": 3e-3}),
    Case("the head does not arrive, learning rate x 10", "wrong_weights", {"optim.lr": 1e-3}, {"arrives": all_but_the_head}),
)  # fmt: skip
"""bfloat16 and int8 are planted, too, but what they do to these models is below every threshold of
the survey ("this is fine - continue training"): silence is the right answer, so they count as clean."""


def recipe_of(case: Case, *, seed: int, batches: int) -> Recipe:
    """The recipe of tiny.toml, shortened, at float32 and lag 0, with the case's changes."""
    content: dict[str, Any] = {
        "name": "planted",
        "model": "tiny-qwen3",
        "task": "arithmetic",
        "seed": seed,
        "batches": batches,
        "warm_start": {"steps": 900},
        "rollout": {"dtype": "float32", "prompts": 16, "samples": 8, "max_tokens": 14, "evidence": "full"},
        "optim": {"lr": 1e-4},
        "log": {"eval_every": 1000, "eval_prompts": 8, "checkpoint_every": 1000, "trackers": []},
        "arms": {ARM: {"method": "none"}},
    }  # fmt: skip
    for path, value in case.recipe.items():
        part, _, key = path.partition(".")
        if key:
            content.setdefault(part, {})[key] = value
        else:
            content[part] = value
    return check_recipe(content, source=case.name)


def context_of(case: Case) -> Context:
    """What a user tells an audit beside the log: the kind of model and the sampling temperature."""
    return Context(
        mixture_of_experts="moe" in case.recipe.get("model", ""),
        temperature=case.recipe.get("rollout.temperature", 1.0),
    )


def run(case: Case, folder: Path, *, seed: int = 0, batches: int = 32, start_seed: int | None = None) -> Path:
    """Train under the plant; returns the arm's folder.

    Args:
        start_seed: seed of the warm start, if it is another than the run's: starts are cached, so
            that many runs of few starts are cheap.
    """
    return train_spoiled(recipe_of(case, seed=seed, batches=batches), case.spoil, folder, start_seed=start_seed)


def train_spoiled(recipe: Recipe, spoil: dict[str, Any], folder: Path, *, start_seed: int | None = None) -> Path:
    """Train a recipe of one arm whose engine is spoiled so; returns the arm's folder."""
    with ExitStack() as spoiling:
        if spoil:
            spoiling.enter_context(_spoiling(spoil))
        if start_seed is not None:
            start = partial(_started, start_seed)
            spoiling.enter_context(patch("offdrift_lab.train.loop.context.warm_start", start))
            drawn = partial(_drawn, start_seed)
            spoiling.enter_context(patch("offdrift_lab.train.loop.context.load_model", drawn))
        train(recipe, folder)
    (arm,) = recipe.arms
    return folder / "arms" / arm


def _started(start_seed: int, *args: Any, **options: Any) -> Any:
    return warm_start(*args, **{**options, "seed": start_seed})


def _drawn(start_seed: int, *args: Any, **options: Any) -> Any:
    """The initial weights are a part of the start."""
    return load_model(*args, **{**options, "seed": start_seed})


@contextmanager
def _spoiling(spoil: dict[str, Any]) -> Iterator[None]:
    """Put `Spoiled` before every engine, armed once the trainer has proved it and checks no more."""

    def make(*args: Any, **options: Any) -> Spoiled:
        return Spoiled(make_engine(*args, **options), **spoil)

    def verify(engine: Spoiled, *args: Any, **options: Any) -> SyncReport:
        report = verify_sync(engine, *args, **options)
        engine.armed = True
        engine.begins(getattr(engine.inner, "model", None))
        return report

    with (
        patch("offdrift_lab.train.loop.context.make_engine", make),
        patch("offdrift_lab.train.loop.context.verify_sync", verify),
        patch("offdrift_lab.train.loop.arm.check_sync", lambda *args, **options: None),
    ):
        yield
