"""A task and a recipe small enough to train on in a test, with rewards that really vary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from offdrift.train import arm, loop, models
from offdrift.train.models import tiny_qwen3_config
from offdrift.train.problems import Problem
from offdrift.train.recipe import Recipe, check_recipe
from offdrift.train.tasks import TASKS


@dataclass(frozen=True)
class Digits:
    """Prompts are sums; a completion earns the share of its characters that are digits."""

    name: str = "digits"

    def sample(self, n: int, *, seed: int, split: str = "train") -> list[Problem]:
        shift = 500 if split == "eval" else 0
        return [Problem(f"{(seed * 31 + i + shift) % 977}+{i % 10}=", "0") for i in range(n)]

    def reward(self, completion: str, problem: Problem) -> float:
        return sum(c.isdigit() for c in completion) / max(1, len(completion))


@pytest.fixture(autouse=True, scope="package")
def digits():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TASKS, "digits", Digits())
        yield


def short_arms(patch: pytest.MonkeyPatch) -> None:
    """Train a smaller model, and leave out what takes most of a short arm's time: other tests cover it."""
    config = tiny_qwen3_config()
    config.hidden_size, config.intermediate_size, config.num_hidden_layers = 32, 64, 2
    config.layer_types, config.initializer_range = config.layer_types[:2], 0.15
    patch.setattr(models, "tiny_qwen3_config", lambda: config)
    patch.setattr(arm, "check_sync", lambda *args, **options: None)
    patch.setattr(loop, "evaluate", lambda arm: None)


def small_recipe(**changes: Any) -> Recipe:
    """Six batches of 4 x 4 short responses, engine two updates behind, checkpoints often."""
    content: dict[str, Any] = {
        "name": "small",
        "model": "tiny-qwen3",
        "task": "digits",
        "batches": 6,
        "rollout": {"prompts": 4, "samples": 4, "max_tokens": 6},
        "lag": {"sync_every": 2},
        "optim": {"lr": 2e-4},
        "log": {"eval_every": 2, "eval_prompts": 4, "checkpoint_every": 2, "samples_every": 2, "trackers": []},
        "arms": {"trm_max": {"method": "trm_max", "override": {"gate.high": 0.004}}},
    }  # fmt: skip
    for path, value in changes.items():
        part, _, key = path.partition("__")
        if key:
            content.setdefault(part, {})[key] = value
        else:
            content[part] = value
    return check_recipe(content, source="test")
