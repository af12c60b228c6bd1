"""How long a plan takes: many workers, and many groups through the scheduler under its virtual clock.

    python benchmarks/plan_scale.py [--workers 10000] [--groups 100000] [--json PATH]

Every arm simulates whole updates of a schedule and counts all of its time: lengths, events, and every decision of the
scheduler. Seconds are those that the process kept a core busy, so that a busy machine costs nothing; seconds on the
wall stand beside them. Bars: 10,000 workers in less than 60 s, 100,000 groups in less than 30 s.
"""

import argparse
import json
import os
import time
from pathlib import Path

from measure import machine

from offdrift_lab.plan.phases import Phases
from offdrift_lab.plan.simulate import Simulation
from offdrift_lab.schedules import SCHEDULES

SAMPLES = 8
UPDATES = 10
"""Updates of the arm with many workers."""
NAMES = ("sync", "areal", "verl_partial", "roll_flash", "llama_rl", "dora")
"""Schedules that drain, interrupt, stream, draw again, push prompts, and keep several versions."""


def main(argv: list[str] | None = None) -> dict[str, object]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=10_000)
    parser.add_argument("--groups", type=int, default=100_000)
    parser.add_argument("--schedules", default=",".join(NAMES))
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    args = parser.parse_args(argv)
    rows = []
    for name in args.schedules.split(","):
        for what, phases, updates in (many_workers(args.workers), many_groups(args.groups)):
            rows.append({"schedule": name, "what": what, **timed(name, phases, updates)})
            print("{what:32s} {schedule:14s} {cpu_s:7.1f} s of a core, {wall_s:7.1f} s, {responses:,} responses".format(**rows[-1]))  # fmt: skip
    load = os.getloadavg()[0]
    found: dict[str, object] = {"machine": machine("simpy", "numpy"), "load": load, "rows": rows}
    print(f"{found['machine']}, load {load:.1f}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return found


def many_workers(workers: int) -> tuple[str, Phases, int]:
    """As many workers as given, each with room for 8 responses and 4 of them per update."""
    phases = Phases(
        rollout={"workers": workers, "slots": 8},
        trainer={"devices": workers, "group": 60 / max(1, workers // 2)},
        batch={"groups": max(1, workers // 2), "samples": SAMPLES},
    )
    return f"{workers:,} workers, {UPDATES} updates", phases, UPDATES


def many_groups(groups: int) -> tuple[str, Phases, int]:
    """So many groups of 8 in a hundred updates, on 100 workers of 64 slots."""
    batch = max(1, groups // 100)
    phases = Phases(
        rollout={"workers": 100, "slots": 64},
        trainer={"devices": 100, "group": 60 / batch},
        batch={"groups": batch, "samples": SAMPLES},
    )
    return f"{batch * 100:,} groups of {SAMPLES}", phases, 100


def timed(name: str, phases: Phases, updates: int) -> dict[str, float | int]:
    """Seconds to simulate so many updates."""
    wall, cpu = time.perf_counter(), time.process_time()
    run = Simulation(SCHEDULES[name], phases)
    run.until(updates)
    totals = run.scheduler.totals
    return {
        "groups": totals.groups_trained,
        "responses": totals.responses_trained,
        "cpu_s": time.process_time() - cpu,
        "wall_s": time.perf_counter() - wall,
    }


if __name__ == "__main__":
    main()
