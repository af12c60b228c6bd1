"""Predictions of `offdrift plan` beside real runs: phase times from one run, every other schedule foretold.

    python benchmarks/plan_real.py RUNS... [--json FILE]

RUNS are folders of `benchmarks/pipeline.py --folder RUNS`, which hold RUNS/SCHEDULE-TURN, each of one arm. Every run of
"sync" is a source: from its phase times alone, seconds per update, idle shares and lag of all runs beside it are
simulated, and stand beside what those have measured. Nothing is fitted to the runs that are foretold. Shares are as
in the runs' metrics: what a worker waits between an engine's steps is idle, and so is a trainer that waits for weights.

A run whose engine took more than 1.5 times the source's seconds per token shared its cores with something else; it is
listed, marked, and left out of the largest error.
"""

import argparse
import json
from pathlib import Path

from offdrift.show.json_access import read_lines
from offdrift_lab.plan.measured import SKIPPED, gather, seconds_of
from offdrift_lab.plan.simulate import simulate
from offdrift_lab.schedules import SCHEDULES

BAR = 0.15
"""Largest error of the seconds per update."""


def measured(arm: Path) -> dict[str, float]:
    """Means over the updates of an arm, without its first ones; the lag is that of a response's oldest token."""
    table = read_lines(arm / "metrics.jsonl")[0][SKIPPED:]
    keys = {
        "seconds": "throughput/seconds",
        "worker_idle": "pipeline/worker_idle",
        "trainer_idle": "pipeline/trainer_idle",
    }
    counts = [(lag, n) for row in table for lag, n in enumerate(row["pipeline/lag_counts"])]
    return {
        "updates": len(table),
        **{name: sum(row[key] for row in table) / len(table) for name, key in keys.items()},
        "lag": sum(lag * n for lag, n in counts) / sum(n for _, n in counts),
        "engine_per_token": sum(s.drawn for s in seconds_of(arm, workers=1))
        / sum(row["batch/tokens"] for row in table),
    }


def predicted(name: str, source: Path, updates: int) -> dict[str, float]:
    """The same of a simulation."""
    phases = gather([source], [f"run.updates={updates}", f"run.warmup={SKIPPED}"]).phases
    outcome = simulate(SCHEDULES[name], phases, name=name)
    return {
        "seconds": outcome.seconds,
        "worker_idle": outcome.worker["idle"],
        "trainer_idle": outcome.trainer["idle"] + outcome.trainer["sync"],
        "lag": outcome.lag_mean,
    }


def compared(runs: Path, source: str) -> dict[str, object]:
    """All finished runs of a folder, from the phase times of one of them."""
    arms = [file.parent for file in sorted(runs.glob("*/arms/*/summary.json")) if file.parent.name in SCHEDULES]
    pace = measured(runs / source / "arms" / "sync")["engine_per_token"]
    rows = []
    for arm in arms:
        run = measured(arm)
        ours = predicted(arm.name, runs / source, int(run["updates"]))
        rows.append(
            {
                "run": arm.parents[1].name,
                "measured": run,
                "predicted": ours,
                "error": ours["seconds"] / run["seconds"] - 1,
                "disturbed": run["engine_per_token"] > 1.5 * pace,
            }
        )
    phases = gather([runs / source]).phases.model_dump(mode="json", include={"rollout", "trainer", "sync"})
    worst = max(abs(row["error"]) for row in rows if not row["disturbed"])
    return {"runs": runs.name, "source": source, "phases": phases, "rows": rows, "worst": worst}


def main(argv: list[str] | None = None) -> list[dict[str, object]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    options = parser.parse_args(argv)
    tables = [
        compared(runs, source.name) for runs in options.runs for source in sorted(runs.glob("sync-*"))
    ]  # fmt: skip
    for table in tables:
        print(f"{table['runs']}, phase times of {table['source']}: largest error {table['worst']:.1%}, bar {BAR:.0%}")
        for row in table["rows"]:
            run, ours = row["measured"], row["predicted"]
            print(
                f"  {row['run']:16s} {run['seconds']:.3f} s, predicted {ours['seconds']:.3f} ({row['error']:+.1%}); "
                + "; ".join(f"{k} {run[k]:.3f}, {ours[k]:.3f}" for k in ("worker_idle", "trainer_idle", "lag"))
                + ("; disturbed" if row["disturbed"] else "")
            )
    if options.json:
        options.json.write_text(json.dumps({"bar": BAR, "tables": tables}, indent=1) + "\n")
    return tables


if __name__ == "__main__":
    main()
