"""Claims about the speed of schedules, simulated: one step off, periodic asynchrony, Seer, faster rollouts, weight transfer.

    python benchmarks/plan_claims.py [--json FILE]

Two clusters: the example of `offdrift plan`, and verl's Qwen2.5-Math-7B on 128 devices (examples/verl.toml). Each number is
the time of an update of one schedule over that of another under the same phase times. Beside them the bound that no
schedule on the same split of devices can pass: where drawing takes a share g of a synchronous update, what draws beside
training is at most 1 / max(g, 1 - g) times as fast, 2 at best.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from offdrift_lab.plan.phases import EXAMPLE, Phases, read_phases
from offdrift_lab.plan.simulate import simulate
from offdrift_lab.schedules import SCHEDULES

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "plan_claims.json"
FORWARD = 1 / 3
"""Of a pass forward and backward, what a forward pass alone takes: the old policy's log-probs."""
UPDATES = 24
WEIGHTS = 7.6e9 * 2
"""Bytes of a model of 7.6 billion parameters in bfloat16."""
TRANSFER = 0.3
"""Seconds in which the source broadcasts them."""


def changed(phases: Phases, **parts: dict[str, object]) -> Phases:
    """The phases with some values replaced."""
    return phases.model_copy(
        update={part: getattr(phases, part).model_copy(update=values) for part, values in parts.items()}
    )


def seconds(name: str, phases: Phases) -> float:
    """Seconds of an update of a schedule."""
    return simulate(SCHEDULES[name], phases).seconds


def speeds(phases: Phases) -> dict[str, Any]:
    """Speed-ups on one cluster."""
    phases = changed(phases, run={"updates": UPDATES, "warmup": 4})
    outcome = simulate(SCHEDULES["sync"], phases)
    sync, drawing = outcome.seconds, outcome.trainer["idle"]
    fast = changed(phases, rollout={"t0": phases.rollout.t0 / 2, "t1": phases.rollout.t1 / 2})
    scored = changed(fast, trainer={"group": phases.trainer.group * (1 + FORWARD)})
    quick = changed(phases, sync={"push": TRANSFER, "load": 0.0})
    return {
        "share of drawing": drawing,
        "bound of drawing beside training": 1 / max(drawing, 1 - drawing),
        "one step off": sync / seconds("one_step_off", phases),
        "periodic": sync / seconds("periodic", phases),
        "Seer's order and slices": sync / seconds("seer", phases),
        "rollouts twice as fast": sync / seconds("sync", fast),
        "rollouts twice as fast, old policy scored": sync / seconds("sync", scored),
        "weights in .3 s": sync / seconds("sync", quick),
        "seconds of weights now": phases.sync.push + phases.sync.load,
        "seconds of an update": sync,
    }


def found() -> dict[str, Any]:
    """All numbers that docs/evidence.md has of these claims."""
    return {
        "gigabytes per second of the broadcast": WEIGHTS / TRANSFER / 1e9,
        "example": speeds(EXAMPLE),
        "verl, 128 devices": speeds(read_phases(ROOT / "examples" / "verl.toml")),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    numbers = found()
    options.json.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(numbers, indent=1))


if __name__ == "__main__":
    main()
