"""How far the stand-in for OPOB's gradient norms is off, early and late in a run, and what exact norms cost.

    python benchmarks/opob_norms.py [--batches 48] [--warm-start 300] [--json PATH]

Trains the method `vcpo` with `optim.gradient_norms = "exact"` on the recipe recipes/tiny.toml, and for as many batches
with "proxy" for the time that they take. Reported are the means over the first and the last quarter of the updates of
Kendall's tau within prompts (`opob/norm_rank_corr`), of the distance between the two baselines (`opob/baseline_shift`),
and, beside it, of the reward.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from measure import machine

from offdrift_lab.train.loop.loop import train
from offdrift_lab.train.settings.recipe import load_recipe

RECIPE = Path(__file__).parents[1] / "recipes/tiny.toml"
METRICS = ("opob/norm_rank_corr", "opob/baseline_shift", "reward/mean", "response/length_mean")


def rows(norms: str, *, batches: int, warm_start: int, folder: Path) -> list[dict[str, Any]]:
    """The metrics of every update of a run with these gradient norms."""
    changes = ["method=vcpo", f"batches={batches}", f"optim.gradient_norms={norms}", f"warm_start.steps={warm_start}"]
    recipe = load_recipe(RECIPE, changes=[*changes, "log.eval_every=1000", "log.tokens=false", "log.trackers=[]"])
    train(recipe, folder / norms)
    return [json.loads(x) for x in (folder / norms / "arms/vcpo/metrics.jsonl").read_text().splitlines()]


def main(words: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=48)
    parser.add_argument("--warm-start", type=int, default=300)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(words)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        options = {"batches": asked.batches, "warm_start": asked.warm_start, "folder": Path(folder)}
        exact, proxy = rows("exact", **options), rows("proxy", **options)
    quarter = max(1, len(exact) // 4)
    seconds = [statistics.median(r["throughput/seconds"] for r in run) for run in (exact, proxy)]
    result = {
        "machine": machine(),
        "command": f"python benchmarks/opob_norms.py --batches {asked.batches} --warm-start {asked.warm_start}",
        "responses_per_update": 256,
        "first": {name: statistics.fmean(r[name] for r in exact[:quarter]) for name in METRICS},
        "last": {name: statistics.fmean(r[name] for r in exact[-quarter:]) for name in METRICS},
        "seconds_per_update": {"exact": seconds[0], "proxy": seconds[1]},
    }
    print(json.dumps(result, indent=1))
    if asked.json:
        asked.json.write_text(json.dumps(result, indent=1) + "\n")
    return result


if __name__ == "__main__":
    main()
