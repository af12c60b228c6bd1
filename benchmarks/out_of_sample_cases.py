"""Runs with random faults for `benchmarks/out_of_sample.py`: causes, severities and combinations that nobody tuned on.

A case is plain data, a function of the seed and its number alone. Mechanisms and sizes are others than those of
`tests/judge/planted_real.py`, with which rules and thresholds were written, wherever there are others.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any

import torch
from tests.judge import planted_real as planted
from torch import Tensor

from offdrift.records.rollouts import Rollouts

REGIMES = ("synchronous dense", "asynchronous", "mixture of experts", "quantized")
"""The survey's four: what a user's pipeline is, before anything goes wrong in it."""
CLEAN_SHARE, DOUBLE_SHARE = 0.2, 0.25
ENTRIES = ("none", "none", "token_tis", "ppo_clip")
"""Methods of the runs before anything is repaired; ppo_clip takes two steps a batch."""


@dataclass(frozen=True)
class Plant:
    """A fault: its cause, how it is made, and how large it is."""

    cause: str
    how: str
    size: float = 0.0


@dataclass(frozen=True)
class RandomCase:
    """A run: what it is, and what is wrong with it."""

    number: int
    regime: str
    method: str
    start: int
    """Seed of the warm start."""
    recipe: dict[str, Any] = field(default_factory=dict)
    """Changes of the recipe of `planted_real`, by dotted path, beside those of the plants."""
    plants: tuple[Plant, ...] = ()

    @property
    def causes(self) -> tuple[str, ...]:
        """What is wrong."""
        return tuple(plant.cause for plant in self.plants)


def draw(number: int, seed: int, engine: str = "transformers") -> RandomCase:
    """The case of this number: the same for the same seed."""
    rng = random.Random(f"out of sample {seed} {number} {engine}")
    regime = "synchronous dense" if engine == "vllm" else rng.choice(REGIMES)
    method = rng.choice(ENTRIES)
    recipe: dict[str, Any] = {"optim.lr": 10 ** rng.uniform(-4.3, -3.8)}
    if regime == "asynchronous":
        recipe["lag.queue"] = 1
    if regime == "mixture of experts":
        recipe["model"] = "tiny-qwen3-moe"
    if regime == "quantized":
        recipe["rollout.quantization"] = "int8"
    if engine == "vllm":
        recipe |= {"rollout.engine": "vllm", "rollout.evidence": "sampled"}
    if method == "ppo_clip":
        recipe["optim.minibatches"] = 2
    kinds = [k for k in KINDS if fits(k, regime, engine)]
    chance = rng.random()
    count = 0 if chance < CLEAN_SHARE else 2 if chance > 1 - DOUBLE_SHARE else 1
    plants = [one(rng, kinds) for _ in range(count)]
    while count == 2 and not stand_together(*plants):
        plants = [one(rng, kinds) for _ in range(count)]
    for plant in plants:
        recipe |= recipe_changes(plant, recipe)
    start = 0 if regime == "mixture of experts" else rng.choice((0, 1))
    return RandomCase(number, regime, method, start, recipe, tuple(plants))


def one(rng: random.Random, kinds: Sequence[str]) -> Plant:
    """A fault: every cause alike, then its kinds alike."""
    cause = rng.choice(sorted({KINDS[k][0] for k in kinds}))
    return KINDS[rng.choice([k for k in kinds if KINDS[k][0] == cause])][1](rng)


def fits(kind: str, regime: str, engine: str) -> bool:
    """Whether a fault can be in such a run."""
    if engine == "vllm":
        return kind in ("misaligned", "wrong_weights", "stale_engine", "hidden_filter", "optimizer")
    if kind == "router_flips":
        return regime == "mixture of experts"
    return kind != "grid" or regime == "quantized"


def stand_together(a: Plant, b: Plant) -> bool:
    """Two faults of one cause are one, and log-probs of other tokens drown everything."""
    return a.cause != b.cause and "misaligned" not in (a.cause, b.cause)


def _log_uniform(rng: random.Random, low: float, high: float) -> float:
    return low * (high / low) ** rng.random()


KINDS: dict[str, tuple[str, Callable[[random.Random], Plant]]] = {
    "rounded": ("precision", lambda rng: Plant("precision", "rounded", rng.choice((2, 4, 5, 6)))),
    "noisy": ("precision", lambda rng: Plant("precision", "noisy", _log_uniform(rng, 0.05, 0.3))),
    "grid": ("precision", lambda rng: Plant("precision", "grid")),
    "untempered": (
        "raw_logprobs",
        lambda rng: Plant("raw_logprobs", "untempered", rng.uniform(*rng.choice(((0.5, 0.85), (1.15, 1.5))))),
    ),
    "hidden_filter": (
        "one_sided_filter",
        lambda rng: Plant("one_sided_filter", "hidden top-p", rng.uniform(0.6, 0.95)),
    ),
    "open_filter": (
        "one_sided_filter",
        lambda rng: Plant("one_sided_filter", rng.choice(("min-p", "top-k")), rng.uniform(0.05, 0.3)),
    ),
    "misaligned": ("misaligned", lambda rng: Plant("misaligned", rng.choice(("early", "other response")))),
    "router_flips": ("router_flips", lambda rng: Plant("router_flips", "flips", _log_uniform(rng, 0.005, 0.08))),
    "wrong_weights": (
        "wrong_weights",
        lambda rng: Plant("wrong_weights", rng.choice(("a layer", "stops", "attention")), rng.choice((2, 4, 6))),
    ),
    "stale_engine": (
        "stale_engine",
        lambda rng: Plant("stale_engine", rng.choice(("sync_every", "queue")), rng.choice((3, 5, 6, 10))),
    ),
    "optimizer": (
        "optimizer_amplification",
        lambda rng: Plant("optimizer_amplification", "learning rate", _log_uniform(rng, 6, 50)),
    ),
    "epochs": ("batch_reuse", lambda rng: Plant("batch_reuse", "epochs", rng.choice((3, 4)))),
}
"""Every fault that is drawn, and its size. What `size` is, `recipe_changes` and `spoil` say."""
NAMES: Mapping[str, tuple[str, ...]] = {
    "optimizer_amplification": ("optimizer_amplification",),
    "batch_reuse": ("batch_reuse", "clip_saturation"),
}
"""Causes by which a plant is rightly named, where there are several names: both of the second send the reader to the
same repair."""


def recipe_changes(plant: Plant, recipe: Mapping[str, Any]) -> dict[str, Any]:
    """What a fault is in the recipe; nothing where it stands between trainer and engine."""
    size = plant.size
    match plant.how:
        case "grid":
            return {"rollout.quantization": "nvfp4"}
        case "untempered":
            return {"rollout.temperature": size}
        case "min-p":
            return {"rollout.min_p": size, "replay.support": False}
        case "top-k":
            return {"rollout.top_k": 2 if size > 0.15 else 3, "replay.support": False}
        case "sync_every":
            return {"lag.sync_every": int(size)}
        case "queue":
            return {"lag.queue": int(size)}
        case "learning rate":
            return {"optim.lr": recipe["optim.lr"] * size, "optim.minibatches": 2}
        case "epochs":
            return {"optim.epochs": int(size), "optim.lr": 5 * recipe["optim.lr"]}
        case _:
            return {}


def spoil(plants: tuple[Plant, ...], seed: int) -> dict[str, Any]:
    """What `planted_real.Spoiled` does for these faults."""
    made: dict[str, list[Callable[..., Any]]] = {"rollouts": [], "arrives": [], "sampling": [], "begins": []}
    for p in plants:
        match p.how:
            case "untempered":
                made["rollouts"].append(planted.untempered)
            case "hidden top-p":
                made["sampling"].append(planted.filtered(p.size))
                made["rollouts"].append(planted.unrecorded)
            case "early":
                made["rollouts"].append(early)
            case "other response":
                made["rollouts"].append(reversed_responses)
            case "rounded":
                made["arrives"].append(partial(rounded, int(p.size)))
            case "noisy":
                made["arrives"].append(partial(noisy, p.size, torch.Generator().manual_seed(seed)))
            case "flips":
                made["begins"].append(planted.flipping(p.size))
            case "a layer":
                made["arrives"].append(partial(stays_if, f"layers.{int(p.size) // 2}."))
            case "attention":
                made["arrives"].append(partial(stays_if, "self_attn"))
            case "stops":
                made["arrives"].append(Stopping(int(p.size)))
    chained = {name: parts for name, parts in made.items() if parts}
    both: dict[str, Any] = {}
    for name, parts in chained.items():
        if name == "arrives":
            both[name] = lambda key, held, sent, parts=parts: reduce(lambda w, f: f(key, held, w), parts, sent)
        else:
            both[name] = lambda x, parts=parts: _in_turn(parts, x)
    return both


def _in_turn(parts: list[Callable[..., Any]], x: Any) -> Any:
    for part in parts:
        x = part(x)
    return x


def early(rollouts: Rollouts) -> Rollouts:
    """Every log-prob stands one token too early; the last of a response is repeated."""
    last = rollouts.cu_seqlens[1:].long() - 1
    shifted = rollouts.logp_rollout.roll(-1)
    shifted[last] = rollouts.logp_rollout[last]
    return rollouts.with_(logp_rollout=shifted, evidence=None)


def reversed_responses(rollouts: Rollouts) -> Rollouts:
    """The batch's log-probs in the order of another batch: responses of other lengths, one after the other."""
    parts = rollouts.logp_rollout.split((rollouts.cu_seqlens[1:] - rollouts.cu_seqlens[:-1]).tolist())
    return rollouts.with_(logp_rollout=torch.cat(parts[::-1]), evidence=None)


def rounded(steps: int, name: str, held: Tensor, sent: Tensor) -> Tensor:
    """The layers' matrices on a symmetric grid of 2 steps + 1 values per output channel."""
    if sent.ndim < 2 or "embed_tokens" in name:
        return sent
    step = sent.abs().amax(-1, keepdim=True).clamp(min=1e-12) / steps
    return (sent / step).round() * step


def noisy(size: float, generator: torch.Generator, name: str, held: Tensor, sent: Tensor) -> Tensor:
    """The layers' matrices with noise of that size, relative to each matrix's root mean square."""
    if sent.ndim < 2 or "embed_tokens" in name:
        return sent
    return sent + size * sent.pow(2).mean().sqrt() * torch.randn(sent.shape, generator=generator)


def stays_if(part: str, name: str, held: Tensor, sent: Tensor) -> Tensor:
    """Weights whose name has that part never arrive."""
    return held if part in name else sent


class Stopping:
    """Weights arrive so many times, and never again."""

    def __init__(self, times: int) -> None:
        self.times, self.first, self.seen_first = times, "", 0

    def __call__(self, name: str, held: Tensor, sent: Tensor) -> Tensor:
        self.first = self.first or name
        self.seen_first += name == self.first
        return sent if self.seen_first <= self.times else held


REPAIRS: Mapping[str, tuple[str, ...]] = {
    "align_tokens": ("early", "other response"),
    "record_what_was_sampled": ("untempered",),
    "temper_the_trainer": ("untempered",),
    "no_filter": ("hidden top-p", "min-p", "top-k"),
    "verify_the_sync": ("a layer", "stops", "attention"),
    "repair_the_worker": ("a layer", "stops", "attention"),
    "align_precision": ("rounded", "noisy", "grid"),
    "repair_the_systems": ("rounded", "noisy", "grid", "flips", "a layer", "stops", "attention"),
}
"""Faults that are gone where somebody does what a fix's sentence says, beyond the recipe: the code that records
log-probs, the synchronization, the kernels. Routing is not among them: its replay is a setting of the recipe."""
