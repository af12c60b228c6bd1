"""What a kind of fault is, the vocabulary of causes and fixes, and what plants share."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from benchmarks.field.scene import Batch, Run
from benchmarks.field.world import Array, LogitHook, Side, Tokens, Where, log_softmax

CAUSES = {
    "none": "nothing is wrong",
    "engine-never-updated": "the engine keeps old weights, whatever it says",
    "engine-weights": "the engine holds other weights than it claims: scrambled, partial, scaled, restored",
    "worker": "one of several workers differs from the others",
    "stale-as-logged": "the policy is as old as the log says",
    "stale-unlogged": "the policy is older than the weights that train, and nothing logs it",
    "versions-wrong": "the versions in the log contradict what was drawn",
    "old-policy": "old log-probs are not of the weights that sampled",
    "record": "recorded log-probs are not of what was drawn",
    "record-distribution": "recorded log-probs are of the distribution before temperature, filters or penalties",
    "misaligned": "log-probs stand beside other tokens: shifted, rolled, of another response",
    "missing": "log-probs are missing or filled in",
    "unit": "log-probs in another unit, sign, base or resolution",
    "temperature": "one side divides by a temperature that the other does not",
    "filter": "one side draws from a part of the vocabulary: top-p, top-k, min-p, banned tokens, grammars",
    "penalty": "one side penalizes tokens that the response holds already",
    "inputs": "the sides read different prompts, histories, images or token ids",
    "position": "the sides differ by place or length: positions, padding, long contexts",
    "turn": "the sides differ from the second turn on",
    "precision": "rounding, of about equal size everywhere",
    "routing": "experts are chosen differently",
    "cache": "what the engine keeps of earlier tokens is old or compressed",
    "trainer-noise": "two forward passes of the trainer differ",
    "vocabulary": "a part of the vocabulary has wrong logits, or does not exist",
    "update-size": "updates on one batch move the policy far",
    "mask": "tokens train that the policy did not draw",
    "ends": "log-probs are wrong at the end of some responses",
}
"""Plain, detector-neutral causes and what they mean."""

FIXES = {
    "nothing": "leave it as it is",
    "repair-sync": "repair what carries weights to the engine, and check it against a checkpoint",
    "restart-worker": "take one worker out and load it anew",
    "sync-more": "synchronize more often, or take less stale data",
    "fix-versions": "log the version at the time of drawing",
    "score-old-first": "score old log-probs at the weights that sampled, before the first update",
    "record-drawn": "record the processed log-prob of the drawn token",
    "align": "align log-probs with their tokens",
    "record-all": "record every log-prob, mask what was not drawn",
    "convert": "convert to natural logarithms at full resolution",
    "same-sampling": "apply the same temperature, filters and penalties on both sides, or none",
    "same-inputs": "give both sides the same token ids, positions and images",
    "raise-precision": "raise precision, of the head first",
    "replay-routing": "replay the engine's experts in the trainer",
    "reset-cache": "reset caches with each synchronization, or raise their precision",
    "no-dropout": "switch off what makes the trainer's passes differ",
    "repair-engine": "update or repair the engine's kernel",
    "smaller-updates": "smaller or fewer updates on a batch",
    "measure": "measure: the deciding measurement is named",
}
"""Plain, detector-neutral fixes."""

Plant = Callable[[Run, bool], None]

IN_SAMPLE = frozenset(
    {
        "adapter-never-delivered", "engine-stalled-as-logged", "first-sync-scrambles", "other-weights-at-rate-zero",
        "most-likely-token-recorded", "logits-shifted", "repetition-penalty", "label-of-the-last-token",
        "context-differs", "trainer-in-train-mode", "garbage-near-the-end", "trainer-tempered", "engine-tempered",
        "clean-bfloat16", "clean-lag-32-heavy", "clean-sharpening", "clean-one-missing", "clean-lag-unlogged",
        "clean-straddling",
    }
)  # fmt: skip
"""Kinds like the published sample of faults, which whoever writes rules knows: never held out."""


def is_held_out(name: str) -> bool:
    """Whether a kind is held out: the first byte of the SHA-256 of its name is below 160, and it is not of the sample.

    A combination is held out where one of its two parts is.
    """
    parts = name.split("+")
    return any(p not in IN_SAMPLE and hashlib.sha256(p.encode()).digest()[0] < 160 for p in parts)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of fault, or a clean control.

    `plant(run, large)` changes a healthy run. `right` holds the causes that are right to name first; where the format
    lacks one of `tells`, `without` (if any) takes its place and abstention is right, too. A format that lacks one of
    `needs` cannot show the fault at all.
    """

    name: str
    planted: str
    source: str
    plant: Plant
    right: frozenset[str]
    fixes: frozenset[str]
    clean: bool = False
    abstain: bool = False
    """Whether abstention is right in every format."""
    tells: frozenset[str] = frozenset()
    without: frozenset[str] = frozenset()
    needs: frozenset[str] = frozenset()
    world: Mapping[str, Any] = field(default_factory=dict)
    run: Mapping[str, Any] = field(default_factory=dict)
    sizes: tuple[str, ...] = ("small", "large")

    def __post_init__(self) -> None:
        unknown = sorted(((self.right | self.without) - CAUSES.keys()) | (self.fixes - FIXES.keys()))
        if unknown:
            raise ValueError(f"{self.name}: {', '.join(unknown)} is in neither CAUSES nor FIXES")

    def visible(self, fields: frozenset[str]) -> bool:
        """Whether a log with these fields can show the fault."""
        return self.needs <= fields and "mu" in fields and bool(fields & {"old", "current"})

    def accepted(self, fields: frozenset[str]) -> tuple[frozenset[str], bool]:
        """Causes that are right in a log with these fields, and whether abstention is."""
        told = self.tells <= fields
        return (self.right if told else self.without or self.right), self.abstain or not told


def combined(a: Kind, b: Kind) -> Kind:
    """Both faults in one run; either may be named first."""

    def plant(run: Run, large: bool) -> None:
        a.plant(run, large)
        b.plant(run, large)

    return Kind(
        name=f"{a.name}+{b.name}",
        planted=f"{a.planted}; and {b.planted}",
        source=f"{a.source}; {b.source}",
        plant=plant,
        right=a.right | b.right,
        fixes=a.fixes | b.fixes,
        abstain=a.abstain or b.abstain,
        tells=a.tells | b.tells,
        without=(a.without or a.right) | (b.without or b.right),
        world={**a.world, **b.world},
        run={**a.run, **b.run},
        sizes=("large",),
    )


def causes(*names: str) -> frozenset[str]:
    """A set of names."""
    return frozenset(names)


def divide_by(temperature: float) -> LogitHook:
    """Divide logits."""
    return lambda z, where: z / temperature


def keep_top_p(share: float) -> LogitHook:
    """Keep the likeliest tokens that together have `share`."""

    def hook(z: Array, where: Where) -> Array:
        p = np.exp(log_softmax(z))
        order = np.argsort(-p, -1)
        ranked = np.take_along_axis(p, order, -1)
        keep = np.empty(p.shape, bool)
        np.put_along_axis(keep, order, ranked.cumsum(-1) - ranked < share, -1)
        return np.where(keep, z, -np.inf)

    return hook


def keep_top_k(k: int) -> LogitHook:
    """Keep the k likeliest tokens."""
    return lambda z, where: np.where(z >= np.sort(z, -1)[:, -k][:, None], z, -np.inf)


def rescored(run: Run, batch: Batch, side: Side, *, feed: Tokens | None = None, labels: Tokens | None = None) -> Array:
    """Log-probs of `labels` (the drawn tokens) under a side that reads the true prompts and `feed` (the drawn tokens)."""
    feed, labels = batch.tokens if feed is None else feed, batch.tokens if labels is None else labels
    walked = run.world.walk(
        side, batch.step, batch.prompts, batch.worker, batch.turn, feed=feed, labels=labels, generator=run.generator
    )
    return walked.logp


def perturb(
    run: Run, size: float, key: int, names: tuple[str, ...] = ()
) -> Callable[[dict[str, Array]], dict[str, Array]]:
    """Add noise of relative size to weights, the same at every call."""
    g = np.random.default_rng([run.seed, 29, key])
    noise = {n: x.std() * g.standard_normal(x.shape) for n, x in run.world.start.items() if not names or n in names}
    return lambda weights: {n: x + size * noise[n] if n in noise else x for n, x in weights.items()}
