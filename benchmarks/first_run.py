"""What the recipe that `make train` runs ends at over seeds, on vectors that sum in other orders.

    offdrift sweep recipes/backwards-seeds.toml                                      # AVX-512, where the processor has it
    ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 offdrift sweep recipes/backwards-seeds.toml --out runs/avx2
    python benchmarks/first_run.py "AVX-512=runs/backwards-seeds/sweep.json" "AVX2=runs/avx2/sweep.json"

Writes `recipes/backwards.spread.json`, which reports of that recipe show beside their one run, and
`benchmarks/results/first_run.json`, which adds in how many seeds each arm ended highest. A sweep that has not ended
counts with the seeds that all arms have finished. `benchmarks/results/figures.json` may stand for the sweep that it read.
"""

import argparse
import json
import tomllib
from pathlib import Path
from statistics import median

NAME = "backwards"
LEFT_OUT = ("name", "arms", "log", "seed", "delta")
"""What a run may have otherwise and still end at the same rewards."""
RESULTS = Path(__file__).parent / "results/first_run.json"
Ends = dict[str, dict[str, float]]
"""By arm and seed, the held-out reward after the last update."""


def ends_of(path: Path) -> Ends:
    """Rewards of a sweep's results, of the seeds that every arm has finished."""
    document = json.loads(path.read_text("utf-8"))
    ends: Ends = {}
    if "sweeps" in document:
        for arm, row in document["sweeps"][f"{NAME}-seeds"]["arms"].items():
            ends[arm] = dict(row["held_out_by_seed"])
    for run in document.get("runs", []):
        if run["status"] == "finished":
            ends.setdefault(run["arm"], {})[str(run["seed"])] = run["value"]
    seeds = set.intersection(*(set(row) for row in ends.values()))
    return {arm: {seed: row[seed] for seed in sorted(seeds, key=int)} for arm, row in ends.items()}


def summary(ends: Ends) -> dict[str, dict[str, float | int]]:
    """Median, ends of the range and seeds in which the arm ended highest, for each arm."""
    seeds = list(next(iter(ends.values())))
    best = [max(ends, key=lambda arm: ends[arm][seed]) for seed in seeds]
    return {
        arm: {
            "seeds": len(seeds),
            "median": median(row.values()),
            "lowest": min(row.values()),
            "highest": max(row.values()),
            "highest_arm_in": best.count(arm),
        }
        for arm, row in ends.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", nargs="+", metavar="VECTORS=FILE", help="what was capped, and results of the sweep")
    recipes = Path(__file__).parents[1] / "recipes"
    recipe = tomllib.loads((recipes / f"{NAME}.toml").read_text("utf-8"))
    pairs = [word.partition("=")[::2] for word in parser.parse_args().measured]
    measured = [{"vectors": vectors, "arms": ends_of(Path(file))} for vectors, file in pairs]
    document = {
        "settings": {key: value for key, value in recipe.items() if key not in LEFT_OUT},
        "methods": {arm: row["method"] for arm, row in recipe["arms"].items()},
        "measured": measured,
    }
    (recipes / f"{NAME}.spread.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    table = {str(row["vectors"]): summary(row["arms"]) for row in measured}
    RESULTS.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
