"""verl's published speed-ups beside simulated ones: one set of parameters for all rows, and how far they depend on it.

    python benchmarks/plan_verl.py [--grid] [--json FILE]

Published: verl, docs/advance/fully_async.md and one_step_off.md (Qwen2.5-Math-7B, H20). A row states what its two runs
have measured: generation and step of the colocated run, training of the asynchronous one. One number per row is
solved, the mean length of a response, so that the colocated pool draws 512 groups in the published time. Everything
else is examples/verl.toml, the same for all rows. Predicted is the asynchronous step.

`--grid` varies what is assumed: sigma, the spread of lengths, and t1 / t0, how much a decoding step grows with every
response that runs beside the others.
"""

import argparse
import json
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from offdrift_lab.plan.phases import Phases, read_phases
from offdrift_lab.plan.simulate import simulate
from offdrift_lab.schedules import SCHEDULES, Schedule, override

FILE = Path(__file__).parents[1] / "examples" / "verl.toml"
STEP = 512
"""Groups of a step."""
FETCH = 25.0
"""Seconds in which the trainer takes a step's groups out of the queue, one by one. Not published as such: its `gen` is
21 to 33 s in all nine asynchronous rows with staleness of 0.3 or more, on 32 to 128 devices, whatever the load."""
BAR = 0.15
UPDATES, QUICK = 12, 3
"""Steps that are simulated for the table; and for the grid, and a test."""


class Row(NamedTuple):
    """Published seconds per step of 512 groups, and the split of the devices."""

    name: str
    devices: int
    rollout: int
    """Devices that draw in the asynchronous run."""
    cap: int
    """Longest response, tokens."""
    gen: float
    """Generation of the colocated run, and its step."""
    colocated: float
    train: float
    """update_actor of the asynchronous run, with its old_log_prob if it has one."""
    step: float
    """The asynchronous step, and in it the time that the trainer waits for groups."""
    wait: float
    total: float
    """Published speed-up of the whole run, 400 steps of the fully asynchronous ones."""
    early: float | None
    """The same of its first 200 steps."""
    schedule: Schedule


def verl(staleness: float, every: int = 4) -> Schedule:
    """verl's trainer as it was configured: it takes 128 groups at a time, and publishes after four such updates."""
    name = "verl_partial" if staleness else "verl_stream"
    return override(
        SCHEDULES[name], {"sync_every": every, "consumption.take": "batch", "admission.staleness": staleness}
    )


ONE_STEP = SCHEDULES["one_step_off"]
ROWS = (
    Row("32, partial, 0.5", 32, 16, 28_672, 357.41, 790.10, 269.80, 294.77, 21.26, 2.66, 1.70, verl(0.5)),
    Row("64, partial, 0.5", 64, 32, 28_672, 150.72, 365.28, 156.98, 189.26, 28.46, 1.92, 2.03, verl(0.5)),
    Row("128, partial, 0.5", 128, 64, 28_672, 177.85, 356.30, 113.16, 150.63, 33.14, 2.35, 2.65, verl(0.5)),
    Row("128, partial, 0.3", 128, 64, 28_672, 177.85, 356.30, 103.22, 146.11, 38.88, 2.35, 2.63, verl(0.3)),
    Row("128, partial, 0.1", 128, 64, 28_672, 177.85, 356.30, 109.12, 171.30, 58.17, 2.04, 2.08, verl(0.1)),
    Row("128, stream, 0", 128, 64, 28_672, 177.85, 356.30, 98.77, 231.34, 128.47, 1.58, 1.85, verl(0.0)),
    Row("16, one step off, FSDP2", 16, 4, 20_480, 247.0, 749.0, 445.0, 520.0, 45.0, 1.24, None, ONE_STEP),
    Row("16, one step off, Megatron", 16, 4, 8_192, 162.0, 699.0, 467.0, 566.0, 59.0, 1.40, None, ONE_STEP),
)
SIGMAS = (0.5, 0.7, 0.9, 1.3)
RATIOS = (0.001, 0.01)
"""t1 / t0 that the grid tries; t0 itself only scales the solved length."""


def colocated_seconds(phases: Phases, devices: int, batches: int) -> float:
    """Seconds in which the colocated pool draws a step's groups."""
    pool = changed(
        phases,
        rollout={"workers": devices // phases.rollout.devices},
        batch={"groups": STEP},
        trainer={"group": 0.0, "update": 0.0},
        sync={"push": 0.0},
        run={"updates": batches, "warmup": 0},
    )
    return simulate(SCHEDULES["sync"], pool).seconds


def changed(phases: Phases, **parts: dict[str, object]) -> Phases:
    """The phases with some values replaced."""
    return phases.model_copy(
        update={part: getattr(phases, part).model_copy(update=values) for part, values in parts.items()}
    )


@lru_cache(maxsize=64)
def solved(phases: Phases, devices: int, gen: float, batches: int) -> float:
    """The mean length at which a pool of so many devices draws a step's groups in the published time."""
    mean = 2000.0
    for _ in range(5):
        seconds = colocated_seconds(changed(phases, lengths={"mean": mean}), devices, batches)
        mean = min(mean * gen / seconds, 0.7 * phases.lengths.cap)
    return mean


def predicted(phases: Phases, row: Row, updates: int) -> dict[str, float | str | None]:
    """A row's asynchronous step, simulated over so many of them, beside what was published."""
    every = row.schedule.sync_every
    fetch = FETCH if every > 1 else 0.0
    phases = changed(phases, lengths={"cap": row.cap})
    mean = solved(phases, row.devices, row.gen, updates)
    own = changed(
        phases,
        lengths={"mean": mean},
        rollout={"workers": row.rollout // phases.rollout.devices},
        batch={"groups": STEP // every},
        trainer={"group": (row.train + fetch) / STEP, "update": 0.0},
        run={"updates": every * updates, "warmup": every * max(1, updates // 3)},
    )
    outcome = simulate(row.schedule, own)
    step = every * outcome.seconds
    return {
        "row": row.name,
        "mean_length": mean,
        "step": step,
        "published_step": row.step,
        "speedup": row.colocated / step,
        "published_by_step": row.colocated / row.step,
        "published_total": row.total,
        "published_early": row.early,
        "error_by_step": row.step / step - 1,
        "error": row.colocated / step / row.total - 1,
        "wait": step * outcome.trainer["idle"] + fetch,
        "published_wait": row.wait,
    }


def table(phases: Phases, updates: int, rows: tuple[Row, ...] = ROWS) -> list[dict[str, float | str | None]]:
    return [predicted(phases, row, updates) for row in rows]


def main(argv: list[str] | None = None) -> dict[str, object]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", action="store_true", help="also vary what is assumed")
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    options = parser.parse_args(argv)
    phases = read_phases(FILE)
    rows = table(phases, UPDATES)
    for r in rows:
        print(
            "{row:27s} {speedup:.2f} x; published {published_total:.2f} ({error:+.0%}), by step {published_by_step:.2f} "
            "({error_by_step:+.0%}); wait {wait:.0f} s, published {published_wait:.0f}; "
            "mean length {mean_length:.0f}".format(**r)
        )
    # Few steps of two rows, which a test compares with.
    quick = table(phases, QUICK, ROWS[1:3])
    found: dict[str, object] = {"updates": UPDATES, "bar": BAR, "fetch": FETCH, "rows": rows, "quick": quick}
    if options.grid:
        found["grid"] = grid = []
        for sigma in SIGMAS:
            for ratio in RATIOS:
                other = changed(phases, lengths={"sigma": sigma}, rollout={"t1": ratio * phases.rollout.t0})
                some = table(other, QUICK, (*ROWS[:3], ROWS[6]))
                grid.append({"sigma": sigma, "ratio": ratio, "speedups": {r["row"]: r["speedup"] for r in some}})
                print(f"sigma {sigma}, t1/t0 {ratio}: " + " ".join(f"{r['speedup']:.2f}" for r in some), flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return found


if __name__ == "__main__":
    main()
