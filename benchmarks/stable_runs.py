"""Gain of the effective sample size over learning rate and lag, where a stale run's stability is to be told.

    python benchmarks/stable_runs.py [--json FILE]

The 152 stored runs of `offdrift lab lag-law` (codes and sums; stable: at least 70 % of the reward is kept). AUROC of the
effective sample size (ESS) and of predictors that anybody has before a run: -(lr x lag), -lr, -lag. Then logistic
regressions on log lr and log lag without and with log ESS, each run judged by what runs of other seeds taught (four folds of
seeds). Intervals: bootstrap of whole settings (an arm with its lag and rate), whose four seeds are alike.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from offdrift_lab.evidence.predictor import auroc_interval, held_out

RESULTS = Path(__file__).parent / "results" / "stable_runs.json"
STORED = Path(__file__).parent / "results" / "lag_law_grids.json"
SUMS_RATE = 5e-5
"""Learning rate of recipes/staleness-sums.toml, which its settings do not name."""


def rate_of(run: dict[str, Any]) -> float:
    named = re.search(r"optim\.lr=([0-9.e-]+)", run["setting"])
    return float(named[1]) if named else SUMS_RATE


def judged(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """AUROC with intervals of every predictor, and what ESS adds to learning rate and lag."""
    y = np.array([run["stable"] for run in runs])
    rate, lag = np.array([rate_of(r) for r in runs]), np.array([r["lag"] for r in runs])
    ess = np.array([r["ess"] for r in runs])
    settings = np.unique([f"{r['family']} {r['setting']}" for r in runs], return_inverse=True)[1]
    alone = {"ESS": ess, "-(lr x lag)": -rate * lag, "-lr": -rate, "-lag": -lag}
    bounds = auroc_interval(list(alone.values()), y, settings)
    found: dict[str, Any] = {"runs": len(runs), "stable": int(y.sum()), "settings": int(settings.max()) + 1}
    found["alone"] = dict(zip(alone, bounds, strict=False))
    seeds = np.array([r["seed"] for r in runs])
    if y.all() or len(np.unique(seeds)) < 4:
        return found
    trivial = np.log(np.stack([rate, lag], 1))
    without, with_ess = trivial, np.column_stack([trivial, np.log(ess)])
    p = [held_out(x, y, seeds, folds=4) for x in (without, with_ess)]
    found["held out"] = dict(zip(("lr and lag", "with ESS", "ESS adds"), auroc_interval(p, y, settings), strict=True))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    runs = json.loads(STORED.read_text("utf-8"))["runs"]
    codes = [r for r in runs if r["family"] == "codes"]
    found = {
        "all": judged(runs),
        "codes": judged(codes),
        "codes, uncorrected": judged([r for r in codes if r["arm"] == "none"]),
    }
    options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
