"""The runs of `benchmarks/severity.py`: families of cheap recipes, and what is varied in them.

The base rate of collapse is a choice of this file. So each family has runs that hold and runs that collapse, of lag,
learning rate, mismatch and faults of the engine, each with several methods.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.judge import planted_real as planted

CODES = str(Path(__file__).parents[1] / "recipes" / "cipher.jsonl")
LOG = {
    "eval_every": 4,
    "eval_prompts": 256,
    "eval_samples": 2,
    "checkpoint_every": 1000,
    "tokens": False,
    "trackers": [],
}
ARM = "arm"
Content = dict[str, Any]

FAMILIES: Mapping[str, Content] = {
    # recipes/backwards.toml
    "backwards": {
        "model": "tiny-qwen3",
        "task": "backwards",
        "batches": 64,
        "warm_start": {"steps": 300, "batch_size": 64, "target": 2},
        "rollout": {"dtype": "float32", "quantization": "int8", "prompts": 8, "samples": 8, "max_tokens": 8, "evidence": "full"},
        "lag": {"sync_every": 32},
        "optim": {"lr": 4e-4, "warmup": 4},
        "log": LOG,
    },
    # recipes/staleness.toml and its neighbours, one update a batch
    "codes": {
        "model": "tiny-qwen3-draft",
        "task": CODES,
        "reward": "exact",
        "batches": 64,
        "warm_start": {"steps": 600, "batch_size": 64},
        "rollout": {"dtype": "float32", "prompts": 8, "samples": 8, "max_tokens": 8, "evidence": "full"},
        "lag": {"sync_every": 1},
        "optim": {"lr": 2e-4},
        "log": {**LOG, "eval_prompts": 40, "eval_samples": 12},
    },
    # recipes/staleness-sums.toml, of smaller batches
    "sums": {
        "model": "tiny-qwen3",
        "task": "arithmetic",
        "batches": 48,
        "warm_start": {"steps": 400, "batch_size": 64},
        "rollout": {"dtype": "float32", "quantization": "int8", "prompts": 8, "samples": 8, "max_tokens": 14, "evidence": "full"},
        "lag": {"sync_every": 8},
        "optim": {"lr": 1e-4},
        "log": LOG,
    },
}  # fmt: skip


def start_of(seed: int) -> int:
    """The warm start of a seed: two seeds share one, which takes longer than most runs from it."""
    return seed // 2


@dataclass(frozen=True)
class Cell:
    """One run of each seed: a family, changes of its recipe by dotted path, a method, and what spoils the engine."""

    family: str
    name: str
    method: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    arm: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the arm's table beside its method."""
    spoil: Callable[[], dict[str, Any]] | None = None

    def content(self, seed: int) -> Content:
        """The recipe's content."""
        base = FAMILIES[self.family]
        content = {key: dict(value) if isinstance(value, dict) else value for key, value in base.items()}
        for path, value in self.changes.items():
            part, _, key = path.partition(".")
            if key:
                content.setdefault(part, {})[key] = value
            else:
                content[part] = value
        content["warm_start"]["seed"] = start_of(seed)
        arms = {ARM: {"method": self.method, **self.arm}}
        return {"name": f"severity-{self.family}", "seed": seed, "delta": 0.05, **content, "arms": arms}


def _lag(family: str, lag: int, lr: float, *methods: str, **changes: Any) -> list[Cell]:
    """Cells of one lag and learning rate, one per method."""
    settings = {"lag.sync_every": lag, "optim.lr": lr, **{k.replace("__", "."): v for k, v in changes.items()}}
    return [Cell(family, f"lag {lag - 1}, lr {lr:g}, {method}", method, settings) for method in methods]


def _noise(size: float, lr: float, *methods: str) -> list[Cell]:
    """Cells of an engine whose norms carry constant noise."""
    noise = {"quantized": {"noise": {"start": size, "end": size, "stages": 64}}}
    return [Cell("codes", f"noise {size:g}, lr {lr:g}, {m}", m, {"optim.lr": lr}, noise) for m in methods]


def _fault(name: str, method: str, spoil: Callable[[], dict[str, Any]], **changes: Any) -> Cell:
    """A cell of an engine that does something wrong behind the trainer's back."""
    return Cell("codes", f"{name}, {method}", method, {k.replace("__", "."): v for k, v in changes.items()}, {}, spoil)


MINIBATCHES = {"batches": 16, "rollout__prompts": 16, "optim__minibatches": 4, "log__eval_every": 1}
"""Four updates a batch, an evaluation after each batch."""
CELLS = [
    *_lag("backwards", 32, 4e-4, "none", "token_tis", "trm_max", "bypass_ppo_clip"),
    *_lag("codes", 64, 2e-4, "none", "token_tis", "trm_max", "bypass_ppo_clip", "m2po", **MINIBATCHES),
    *_lag("codes", 32, 4e-4, "none", "token_tis", "trm_max"),
    *_lag("backwards", 8, 4e-4, "none", "token_tis"),
    *_noise(0.6, 4e-4, "none", "token_tis", "trm_max"),
    *_noise(1.0, 4e-4, "none", "token_tis"),
    *_lag("sums", 32, 1e-4, "none", "trm_max"),
    *_noise(0.3, 2e-4, "none"),
    *_lag("codes", 8, 2e-4, "none", "bypass_ppo_clip"),
    *_lag("codes", 1, 2e-4, "none"),
    *_lag("codes", 1, 1.6e-3, "none"),
    *_lag("codes", 4, 1e-3, "none", "token_tis"),
    *_lag("backwards", 32, 1e-4, "none"),
    *_lag("backwards", 1, 4e-4, "none"),
    *_lag("codes", 16, 2e-4, "decoupled_ppo", "gspo", **MINIBATCHES),
    *_lag("sums", 4, 4e-4, "none"),
    _fault("log-probs one place late", "token_tis", lambda: {"rollouts": planted.late}),
    _fault("raw log-probs at 0.7", "token_tis", lambda: {"rollouts": planted.untempered}, rollout__temperature=0.7),
    _fault("top-p 0.9 unrecorded", "none", lambda: {"sampling": planted.filtered(0.9), "rollouts": planted.unrecorded}),
    _fault("no weights arrive", "none", lambda: {"arrives": planted.nothing}),
    _fault("no weights arrive", "token_tis", lambda: {"arrives": planted.nothing}),
    _fault("3 bits", "none", lambda: {"arrives": planted.bits(3)}, optim__lr=4e-4),
    _fault("2 bits", "token_tis", lambda: {"arrives": planted.bits(2)}, optim__lr=4e-4),
]


def mixed(cells: list[Cell]) -> list[Cell]:
    """The cells with those of a family apart, so that a part of a seed's cells is a sample of all."""
    places: dict[str, list[float]] = {}
    counts = {family: sum(c.family == family for c in cells) for family in FAMILIES}
    keyed = []
    for cell in cells:
        seen = places.setdefault(cell.family, [])
        keyed.append(((len(seen) + 0.5) / counts[cell.family], cell))
        seen.append(keyed[-1][0])
    return [cell for _, cell in sorted(keyed, key=lambda pair: pair[0])]


GRID = mixed(CELLS)
