"""The trainer's tokens per second beside busy processes, under different settings of its threads.

    python benchmarks/busy.py [--recipe recipes/tiny.toml] [--busy 0,1] [--batches 6] [--repeats 3] [--json PATH]

Two OpenMP teams that share cores wait for each other: a thread that spins at a barrier keeps the core
from the one it waits for. Every setting trains the recipe's first arm for a few batches in a process of
its own, all settings in turn, alone and beside processes that do nothing but multiply matrices on
one thread. The fair share of P busy processes on C cores is C / (C + P) of the speed alone, but never
less than a core: a setting should stay within 2x of it.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
SETTINGS = {
    "default of the command line": {},
    "active": {"OMP_WAIT_POLICY": "ACTIVE"},
    "passive": {"OMP_WAIT_POLICY": "PASSIVE"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
"""What is set in the environment; variables of OpenMP that the user has are taken away before."""
LOOP = "import torch; torch.set_num_threads(1); a = torch.rand(300, 300)\nwhile True: a @ a"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "tiny.toml")
    parser.add_argument("--busy", default="0,1", help="numbers of busy processes, comma-separated")
    parser.add_argument("--batches", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--settings", default=",".join(SETTINGS))
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    args = parser.parse_args()
    rows = []
    for count in map(int, args.busy.split(",")):
        speeds: dict[str, list[float]] = {name: [] for name in args.settings.split(",")}
        with busy(count):
            for _ in range(args.repeats):
                for name, measured in speeds.items():
                    measured.append(tokens_per_second(args.recipe, SETTINGS[name], args.batches))
        for name, measured in speeds.items():
            rows.append({"busy": count, "setting": name, "tokens_per_second": statistics.median(measured)})
            print(
                f"{count} busy  {name:28s} {statistics.median(measured):8.0f} tokens/s  {sorted(map(round, measured))}"
            )
    if args.json:
        from measure import machine

        args.json.write_text(json.dumps({"machine": machine("transformers"), "rows": rows}, indent=1) + "\n")


@contextmanager
def busy(count: int) -> Iterator[None]:
    """That many processes which do nothing but compute, until the block ends."""
    processes = [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in range(count)]
    try:
        time.sleep(3 if count else 0)  # torch is imported and the loop is running
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def tokens_per_second(recipe: Path, setting: dict[str, str], batches: int) -> float:
    """Response tokens drawn and trained on per second, from the run's own log; the first batch is not counted."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "KMP_", "GOMP_"))} | setting
    with tempfile.TemporaryDirectory() as folder:
        arm = next(iter(_arms(recipe)))
        changes = [f"batches={batches}", "warm_start.steps=0", "log.trackers=[]", "log.eval_every=1000"]
        sets = [part for change in changes for part in ("--set", change)]
        command = [
            sys.executable,
            "-m",
            "offdrift",
            "train",
            str(recipe),
            "--arms",
            arm,
            "--out",
            f"{folder}/run",
            "-q",
        ]
        subprocess.run([*command, *sets], check=True, env=environment, stdout=subprocess.DEVNULL)
        lines = Path(folder, "run", "arms", arm, "metrics.jsonl").read_text().splitlines()
        steps = [json.loads(line) for line in lines]
    return statistics.median(s["throughput/tokens_per_s"] for s in steps[1:])


def _arms(recipe: Path) -> list[str]:
    import tomllib

    return list(tomllib.loads(recipe.read_text())["arms"])


if __name__ == "__main__":
    main()
