"""Regimes of the testbeds that docs/evidence.toml names: model size, length, drift and learning rate, of one run each.

    python benchmarks/regimes.py [--only NAME ...] [--folder runs/regimes] [--unrun]

Of every testbed the run of its first seed and one arm: parameters, mean tokens of a response, mean KL per token between
the policy that is trained and the one that drew (k3, nats, over all updates), learning rate and cause of drift: the
engine, or the oldest weights that a response is drawn with, in updates. Long recipes are cut to `BATCHES`; what was run is stored beside the numbers. A
testbed is stored as soon as it is measured, and the same command goes on where it ended. `--unrun` stores what needs no run of
those that are not measured yet: `updates` is 0 there.
"""

import argparse
import json
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch

from offdrift.models import load_model
from offdrift_lab.train.loop.loop import train
from offdrift_lab.train.loop.run_folder import ArmFolder
from offdrift_lab.train.settings.recipe import Recipe, load_recipe
from offdrift_lab.train.sweep.sweep import load_sweep

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "regimes.json"
BATCHES = 8
"""Batches at most, of a recipe that is no sweep, unless its weights are older."""

BITS = {"int8": "8 bits", "fp8": "FP8", "nvfp4": "4 bits"}


class Testbed(NamedTuple):
    """A run that stands for a testbed."""

    file: str
    arm: str
    values: tuple[tuple[str, Any], ...] = ()
    """Of the sweep's grid; without them, its first combination."""
    changes: tuple[str, ...] = ()
    """Settings of the recipe, "dotted.key=value"."""


TESTBEDS = {
    "digits": Testbed("sweep.toml", "none"),
    "codes, lag 1": Testbed("staleness-lags.toml", "none", (("lag.sync_every", 2),)),
    "codes, lag 63": Testbed("staleness.toml", "none"),
    "codes, lag 399": Testbed("staleness-400.toml", "none"),
    "codes, epochs": Testbed("epochs.toml", "none", (("optim.epochs", 4), ("optim.minibatches", 4))),
    "codes, lag 15": Testbed("lag-law.toml", "none", (("lag.sync_every", 16), ("optim.lr", 4e-4))),
    "codes, noise .4": Testbed("mismatch-noise.toml", "strong", (("optim.lr", 2e-4),)),
    "codes, noise 1": Testbed("mismatch-fatal.toml", "noise_1", (("optim.lr", 4e-4),)),
    "codes, 4 bits": Testbed("mismatch-lr.toml", "none", (("optim.lr", 8e-4), ("rollout.quantization", "nvfp4"))),
    "backwards, lag 31": Testbed("backwards-seeds.toml", "none"),
    "backwards, lag 15": Testbed("figures-lag.toml", "token_is"),
    "backwards, 4 bits": Testbed("figures-dtype.toml", "token_is"),
    "backwards, experts": Testbed("figures-moe.toml", "token_is", changes=("batches=8",)),
    "copies, lag 7": Testbed("figures-long-lag.toml", "token_is", changes=("batches=8",)),
    "turns": Testbed("turns-seeds.toml", "none"),
    "factorial": Testbed("factorial.toml", "none", (("rollout.quantization", "int8"), ("rollout.dtype", "float32"))),
    "experts": Testbed("replay.toml", "none", changes=("rollout.prompts=4",)),
    "sums": Testbed("tiny.toml", "none", changes=("rollout.prompts=8",)),
    "sums, stale": Testbed("stale.toml", "none", changes=("rollout.prompts=8",)),
    "sums, lag 63": Testbed("staleness-sums.toml", "none"),
    "sums, top-p": Testbed(
        "tiny.toml",
        "none",
        changes=("rollout.prompts=8", "lag.sync_every=1", "rollout.quantization=none", "rollout.top_p=0.9"),
    ),
}


def recipe_of(testbed: Testbed) -> Recipe:
    """The recipe of the run that stands for a testbed.

    Raises: `StopIteration` if the sweep has no such run.
    """
    path = ROOT / "recipes" / testbed.file
    text = path.read_text(encoding="utf-8")
    if "sweep.schema.json" not in text.splitlines()[0]:
        changes = list(testbed.changes)
        full = load_recipe(path, changes=changes)
        batches, sync_every = full.batches, full.lag.sync_every
        return load_recipe(
            path, changes=[*changes, f"batches={min(max(BATCHES, sync_every), batches)}"], arm=testbed.arm
        )
    wanted = set(testbed.values)
    cells = load_sweep(path, changes=testbed.changes).cells
    return next(c.recipe for c in cells if c.setting.arm == testbed.arm and wanted <= set(c.setting.values))


def settings_of(recipe: Recipe) -> dict[str, Any]:
    """Learning rate and cause of drift of a recipe of one arm, which need no run."""
    (arm,) = recipe.arms.values()
    of_batch = recipe.optim.epochs * recipe.optim.minibatches
    oldest = max(recipe.lag.sync_every, of_batch) - 1 + recipe.lag.queue
    engine = [BITS[recipe.rollout.quantization]] if recipe.rollout.quantization in BITS else []
    engine += [recipe.rollout.dtype] if recipe.rollout.dtype != "float32" else []
    engine += [f"noise {arm.quantized.noise.start:g}"] if arm.quantized and arm.quantized.noise else []
    causes = [f"engine, {', '.join(engine)}"] if engine else []
    causes += [f"lag of up to {oldest} update{'s' * (oldest > 1)}"] if oldest else []
    causes += ["filter"] if recipe.rollout.top_p < 1 else []
    return {"lr": recipe.optim.lr, "cause": "; ".join(causes)}


def unrun(testbed: Testbed) -> dict[str, Any]:
    """Regime of a testbed that is not run: without lengths and drift."""
    recipe = recipe_of(testbed)
    model, _ = load_model(recipe.model, seed=0)
    parameters = sum(p.numel() for p in model.parameters())
    return {**described(testbed), "updates": 0, "parameters": parameters, **settings_of(recipe)}


def described(testbed: Testbed) -> dict[str, Any]:
    return {
        "file": testbed.file,
        "arm": testbed.arm,
        "values": dict(testbed.values),
        "changes": list(testbed.changes),
    }


def measured(testbed: Testbed, folder: Path) -> dict[str, Any]:
    """Run a testbed and return its regime."""
    recipe = recipe_of(testbed)
    if not (folder / "arms" / testbed.arm / "summary.json").is_file():
        train(recipe, folder, resume=(folder / "run.json").exists())
    rows = ArmFolder(folder / "arms" / testbed.arm).rows("metrics")
    head = json.loads((folder / "run.json").read_text("utf-8"))
    return {
        **described(testbed),
        "updates": len(rows),
        "parameters": head["model"]["parameters"],
        "tokens": fmean(r["response/length_mean"] for r in rows),
        "kl": fmean(r["full/k3"] for r in rows),
        **settings_of(recipe),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(TESTBEDS), default=list(TESTBEDS))
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "regimes")
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--unrun", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = json.loads(options.json.read_text("utf-8")) if options.json.exists() else {}
    for name in options.only:
        if options.unrun and name not in found:
            found[name] = unrun(TESTBEDS[name])
        elif not options.unrun and not found.get(name, {}).get("updates"):
            found[name] = measured(TESTBEDS[name], options.folder / name.replace(", ", "-").replace(" ", "-"))
            print(name, json.dumps(found[name]), flush=True)
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
