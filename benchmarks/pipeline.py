"""Generation beside training against both in turn: wall clock of the same updates, side by side in one run.

    python benchmarks/pipeline.py [--updates 48] [--rounds 3] [--set rollout.engine=vllm] [--folder RUNS] [--json FILE]

One core per side: the trainer has one thread, and so has the rollout worker. Arms take turns, `rounds` times, so that
what else the machine does falls on all of them. "alternate" is the trainer without [pipeline]; "sync" the same order of
work with a worker on Ray: their ratio is what the pipeline costs. Overlap pays where generation takes about as long as
training; the share of time that the worker draws in "sync" says how long it takes. Rewards are of held-out prompts.
"""

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from measure import machine

from offdrift_lab.train.loop.loop import train
from offdrift_lab.train.loop.run_folder import ArmFolder
from offdrift_lab.train.settings.recipe import load_recipe

ARMS = ("alternate", "sync", "one_step_off", "verl_stale", "verl_partial", "areal")
SKIPPED = 4
"""First updates of a run, in which queues fill and memory is touched for the first time."""


def measured(arm: str, updates: int, more: list[str], folder: Path) -> dict[str, float]:
    """Seconds per update of one arm, and its held-out reward."""
    changes = [f"batches={updates}", f"log.eval_every={updates}", "log.checkpoint_every=1000", *more]
    recipe = load_recipe("recipes/async.toml", changes=changes)
    own = recipe.arms["sync"].model_copy(update={"schedule": None if arm == "alternate" else arm})
    pipeline = None if arm == "alternate" else recipe.pipeline
    train(recipe.model_copy(update={"arms": {arm: own}, "pipeline": pipeline}), folder)
    files = ArmFolder(folder / "arms" / arm)
    rows = files.rows("metrics")[SKIPPED:]
    result = {
        "seconds": sum(row["throughput/seconds"] for row in rows) / len(rows),
        "reward": files.rows("eval")[-1]["reward"],
        "lag": statistics.mean(row["version_lag/mean"] for row in rows),
    }
    for name in ("worker_idle", "trainer_idle", "sync_seconds"):
        if f"pipeline/{name}" in rows[0]:
            result[name] = statistics.mean(row[f"pipeline/{name}"] for row in rows)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], help="a setting of recipes/async.toml, as in the command")
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--folder", type=Path, help="keep the runs here")
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    runs: dict[str, list[dict[str, float]]] = {arm: [] for arm in options.arms.split(",")}
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        for turn in range(options.rounds):
            for arm, of_arm in runs.items():
                of_arm.append(measured(arm, options.updates, options.set, folder / f"{arm}-{turn}"))
                print(turn, arm, {name: round(x, 4) for name, x in of_arm[-1].items()}, flush=True)
    table = {
        arm: {name: statistics.median(run[name] for run in of_arm) for name in of_arm[0]}
        for arm, of_arm in runs.items()
    }
    for arm, row in table.items():
        row["speedup"] = statistics.median(a["seconds"] / b["seconds"] for a, b in zip(runs["sync"], runs[arm]))
        print(f"{arm:14} {row['seconds']:.3f} s per update, {row['speedup']:.2f} x sync, reward {row['reward']:.3f}")
    document = {
        "machine": machine("ray", "transformers"),
        "updates": options.updates,
        "rounds": options.rounds,
        "set": options.set,
        "arms": table,
    }
    if options.json is not None:
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
