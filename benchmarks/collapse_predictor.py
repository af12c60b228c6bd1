"""Do four rolling features predict a collapse, and what do signals of the stack add? (The survey's problem 2.)

    python -m benchmarks.collapse_predictor --runs 60 --seed 0 [--jobs 2] [--also runs/out_of_sample]

Tiny runs with random learning rate, lag and quantization (`--runs`; what is done is not done again), and whatever runs
lie beneath the folders of `--also`, healthy and spoiled. Every scale is a twentieth of the conjecture's: a collapse is
a fall of 30 % that lasts 5 updates, and is to be predicted 10 updates ahead. Predictors are judged on the updates of
runs whose seed they did not see, with intervals over runs. Writes `results/collapse_predictor.json`.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import shutil
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from benchmarks.measure import in_processes, machine
from benchmarks.out_of_sample import unchecked
from tests.judge import planted_real as planted

from offdrift_lab.evidence.predictor import LoggedRun, compare_predictors, smoothed_collapse
from offdrift_lab.train.loop.run_folder import ArmFolder

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "collapse_predictor.json"
RECOVERY, HORIZON, WINDOW = 5, 10, 5
"""Updates; the conjecture has 100 and 200, and no window."""
SMOOTHED = 4
"""Updates over whose mean rewards a fall is looked for: single batches scatter by a tenth."""
RECORDED = ("raw_logprobs", "misaligned", "one_sided_filter")
"""Faults of what is logged and not of what is trained, as far as the method reads none of it."""
BATCHES = 24
"""Of two updates each."""
LR = (-5.3, -3.3)
"""Powers of ten between which learning rates are drawn: from those where no run collapses to those where all do."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=60, help="runs of the sweep")
    parser.add_argument("--seed", type=int, default=0, help="of the settings; another seed is another sample")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "collapse", help="where the sweep's runs are")
    parser.add_argument("--also", type=Path, nargs="*", default=[], help="folders of further runs")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each in a process")
    parser.add_argument("--json", type=Path, default=RESULTS, help="the file that is written")
    parser.add_argument("--summarize", action="store_true", help="only judge the runs that are there")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    if not args.summarize:
        sweep(args.runs, args.seed, args.folder, args.jobs)
    content = {"machine": machine("transformers"), "seed": args.seed, **judged([args.folder, *args.also])}
    rows = ",\n".join(json.dumps(row) for row in content.pop("runs"))
    args.json.write_text(f'{json.dumps(content)[:-1]},\n"runs": [\n{rows}\n]}}\n', encoding="utf-8")
    for name in ("comparison", "with_spoiled_logs"):
        print(name, json.dumps(content[name]))


def sweep(runs: int, seed: int, root: Path, jobs: int) -> None:
    """Train the runs that are not there yet."""
    left = [i for i in range(runs) if not (root / f"{seed}-{i:03d}" / "done.json").is_file()]
    started, over = time.perf_counter(), 0
    # One run of each warm start first: it makes what the others take from the cache.
    first = [i for n, i in enumerate(left) if drawn(i, seed)[1] not in {drawn(j, seed)[1] for j in left[:n]}]
    for part in (first, [i for i in left if i not in first]):
        for _, line in in_processes(partial(trained, seed, root), part, min(jobs, max(1, len(part)))):
            over += 1
            minutes = (time.perf_counter() - started) / over * (len(left) - over) / 60
            print(f"{over:3d}/{len(left)} {line} | {minutes:.0f} min left", flush=True)


def trained(seed: int, root: Path, number: int) -> str:
    """Train a run of the sweep; returns what became of it, in a line."""
    warnings.simplefilter("ignore")
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    folder = root / f"{seed}-{number:03d}"
    shutil.rmtree(folder, ignore_errors=True)
    settings, start = drawn(number, seed)
    recipe = planted.recipe_of(planted.Case("", None, settings), seed=5000 + 500 * seed + number // 3, batches=BATCHES)
    with unchecked():
        arm = planted.train_spoiled(recipe, {}, folder, start_seed=start)
    for name in ("log", "rollouts", "model", "checkpoints"):
        shutil.rmtree(arm / name, ignore_errors=True)
    (folder / "done.json").write_text(json.dumps({"settings": settings, "start": start}), encoding="utf-8")
    fell = smoothed_collapse(ArmFolder(arm).rows("metrics"), smooth=SMOOTHED, recovery=RECOVERY)
    return (
        f"lr {settings['optim.lr']:.1e} lag {settings['lag.sync_every']} {settings['rollout.quantization']:6s} "
        f"{'collapses at ' + str(fell.step) if fell.how else 'does not':16s}"
    )


def drawn(number: int, seed: int) -> tuple[dict[str, Any], int]:
    """Settings of a run of the sweep, and the seed of its warm start."""
    rng = random.Random(f"collapse {seed} {number}")
    settings = {
        "optim.lr": 10 ** rng.uniform(*LR),
        "lag.sync_every": rng.choice((1, 2, 4, 8)),
        "rollout.quantization": rng.choice(("none", "int8", "nvfp4")),
        "rollout.prompts": 8,
        "rollout.samples": 6,
        "optim.minibatches": 2,
        "log.tokens": False,
        "log.eval_prompts": 1,
        f"arms.{planted.ARM}": {"method": rng.choice(("ppo_clip", "ppo_clip", "decoupled_token_is"))},
    }
    return settings, rng.choice((0, 1))


def judged(folders: list[Path]) -> dict[str, Any]:
    """The comparison of the predictors, and the runs that it is of."""
    table, runs, honest = [], [], []
    for folder in sorted({f for root in folders for f in root.rglob("arms/*") if (f / "summary.json").is_file()}):
        rows = ArmFolder(folder).rows("metrics")
        recipe = json.loads((folder.parents[1] / "run.json").read_text(encoding="utf-8"))["recipe"]
        fell = smoothed_collapse(rows, smooth=SMOOTHED, recovery=RECOVERY)
        runs.append(LoggedRun(rows, recipe["seed"]))
        honest.append(is_honest(folder))
        table.append({
            "folder": "/".join(folder.parts[-5:-2]), "seed": recipe["seed"], "updates": len(rows),
            "collapse": fell.step, "how": fell.how, "lr": recipe["optim"]["lr"], "lag": recipe["lag"],
            "quantization": recipe["rollout"]["quantization"], "honest": honest[-1],
        })  # fmt: skip
    scale = {"recovery": RECOVERY, "horizon": HORIZON, "window": WINDOW, "smooth": SMOOTHED}
    kept = [run for run, is_so in zip(runs, honest) if is_so]
    return {
        "scale": scale,
        "comparison": compare_predictors(kept, **scale),
        "with_spoiled_logs": compare_predictors(runs, **scale),
        "runs": table,
    }


def is_honest(arm: Path) -> bool:
    """Whether a run's log-probs are those of the policy that drew: features of any others measure the fault."""
    row = arm.parents[2] / "row.json"
    if not row.is_file():
        return (arm.parents[1] / "done.json").is_file()
    content = json.loads(row.read_text(encoding="utf-8"))
    gone = content["repaired"] if arm.parents[1].name == "fixed" else []
    return not any(p["cause"] in RECORDED and p["how"] not in gone for p in content["case"]["plants"])


if __name__ == "__main__":
    main()
