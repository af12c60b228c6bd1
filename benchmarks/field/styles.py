"""What runs of one kind differ by: the policy's size and sharpness, the engine's rounding."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from benchmarks.field.kinds.base import Kind, Plant
from benchmarks.field.scene import Log, Run, simulate
from benchmarks.field.world import BFLOAT16, BFLOAT16_HEAD32, World


def number(*parts: object) -> int:
    """A seed from words and numbers."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:4], "big")


def styled(kind: Kind, size: str, seed: int, **settings: Any) -> Run:
    """A healthy run in the style of a seed, with what the kind needs of it; `settings` replace the run's."""
    g = np.random.default_rng(number(kind.name, size, seed))
    style = {
        "vocab": int(g.choice([48, 64, 96, 160])),
        "width": int(g.choice([20, 24, 32])),
        "sharp": float(g.choice([2.5, 3.5, 4.5])),
        "rate": float(g.choice([0.005, 0.008])),
        "drift": float(g.choice([0.3, 0.6])),
        "mean_length": float(g.choice([24, 36])),
    }
    world = World(number(kind.name, size, seed, "world"), **{**style, **kind.world})
    run = Run(world, number(kind.name, size, seed, "run"), **{**kind.run, **settings})
    run.engine.numerics = BFLOAT16 if g.random() < 0.5 else BFLOAT16_HEAD32
    return run


def planted(kind: Kind, size: str, seed: int, plant: Plant | None = None, **settings: Any) -> Run:
    """The run of a kind; with `plant` in place of its own, of its twin."""
    run = styled(kind, size, seed, **settings)
    (plant or kind.plant)(run, size == "large")
    return run


def made(kind: Kind, size: str, seed: int, plant: Plant | None = None, **settings: Any) -> Log:
    """The log of a kind, or of its twin."""
    return simulate(planted(kind, size, seed, plant, **settings))
