"""Sweeps whose runs are written down instead of made."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from offdrift_lab.train.loop.run_folder import RunFolder
from offdrift_lab.train.sweep.sweep import Grid, load_sweep

BASE = """
name = "base"
model = "tiny-qwen3"
task = "arithmetic"
batches = 4
rollout = { prompts = 2, samples = 2, max_tokens = 4 }
lag = { sync_every = 1 }
log = { eval_every = 2, eval_prompts = 2, checkpoint_every = 1, samples_every = 2, trackers = [], tokens = false }
[warm_start]
steps = 0
[arms.none]
method = "none"
[arms.trm_max]
method = "trm_max"
"""


def sweep_of(folder: Path, text: str = "", base: str = BASE, changes: Sequence[str] = ()) -> Grid:
    """The sweep of a file with these lines, in a folder that has its recipe."""
    (folder / "base.toml").write_text(base)
    (folder / "s.toml").write_text(f'name = "s"\nrecipe = "base"\n{text}')
    return load_sweep(folder / "s.toml", folder / "out", changes=changes)


def fill(grid: Grid, reward) -> None:
    """Runs as if they had been made: `reward(setting, seed, update)` at every update and evaluation."""
    for cell in grid.cells:
        head = {
            "recipe": cell.recipe.model_dump(mode="json", by_alias=True),
            "versions": {"torch": "1"},
            "seconds": 3.0,
        }
        RunFolder(cell.folder).create(head)
        for update in range(cell.recipe.updates + 1):
            value = reward(cell.setting, cell.seed, update)
            kl = {"divergence/kl_rollout_current_mean": 0.01}
            if update:
                cell.files.append("metrics", {"update": update, "reward/mean": value, "optim/grad_norm": 1.0, **kl})
            if update % cell.recipe.log.eval_every == 0:
                cell.files.append("eval", {"update": update, "reward": value})
        cell.files.finish({"arm": cell.setting.arm})


def reward(setting, seed, update):
    """Seeds differ much, arms little; trm_max gains with every update."""
    gain = 0.01 * update + 0.002 * seed if setting.arm == "trm_max" else 0.0
    return 0.2 * seed + 0.1 + gain
