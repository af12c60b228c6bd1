"""Does a finding foretell what its level says? Levels of live findings against what became of the runs.

    python -m benchmarks.severity --out DIR --workers 14 --minutes 9     train runs; what is there is not trained again
    python -m benchmarks.severity --pack DIR FILE.json.gz                one file of all of them
    python -m benchmarks.severity --table [FILE.json.gz]                 results/severity.json and the table of the docs

Runs of the trainer on tiny models (`severity_cells`), seed by seed: what there is at any time is a sample of all
settings. Of each run are stored: every finding with the update at which it was told, the held-out reward every four
updates, and the metrics that rules read, so that other rules can judge the same runs. The table is made by
`severity_tables`.
"""

from __future__ import annotations

import argparse
import fcntl
import gzip
import json
import logging
import math
import multiprocessing
import os
import shutil
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import Empty
from typing import Any

SEEDS = 60
"""More than any machine here trains in the time that it is lent."""
FIRST_SEED = 100
"""Other seeds than those that recipes were chosen with."""
AHEAD = 8
"""Seeds whose warm starts are made before the runs of the first."""
DIGITS = 4
"""Significant digits of a stored metric."""
LARGEST_PACK = 15 << 20
UNREAD = ("throughput/", "certificate/", "variance_proxy/", "rollout/", "current/", "old/", "error_tokens/", "grid/")
"""Metrics that no rule reads."""
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder of the runs")
    parser.add_argument("--workers", type=int, default=1, help="processes, each of one thread")
    parser.add_argument("--minutes", type=float, default=9.0, help="no run goes on after that")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many")
    parser.add_argument("--first", type=int, default=FIRST_SEED, help="the first seed")
    parser.add_argument("--cells", default="", help="only cells whose name has this in it")
    parser.add_argument("--pack", type=Path, nargs=2, metavar=("DIR", "FILE"), help="one file of a folder's runs")
    parser.add_argument(
        "--table", type=Path, nargs="?", const=Path(), help="the table; of FILE, else of the stored one"
    )
    args = parser.parse_args()
    if args.out is not None:
        train_all(args)
    if args.pack is not None:
        pack(*args.pack)
    if args.table is not None:
        from benchmarks.severity_tables import write

        write(None if args.table == Path() else args.table)


def units(seeds: range, wanted: str = "") -> Iterator[tuple[str, int, int]]:
    """What is to be done, in order: ("start", family, seed) makes a seed's warm start, ("run", cell, seed) trains."""
    from benchmarks.severity_cells import FAMILIES, GRID, start_of

    chosen = [i for i, cell in enumerate(GRID) if wanted in f"{cell.family} {cell.name}"]
    families = [i for i, name in enumerate(FAMILIES) if any(GRID[j].family == name for j in chosen)]

    def starts(at: int) -> Iterator[tuple[str, int, int]]:
        if at < len(seeds) and (at == 0 or start_of(seeds[at]) != start_of(seeds[at - 1])):
            yield from (("start", family, seeds[at]) for family in families)

    for at in range(AHEAD):
        yield from starts(at)
    for at, seed in enumerate(seeds):
        yield from starts(at + AHEAD)
        yield from (("run", cell, seed) for cell in chosen)


def train_all(args: argparse.Namespace) -> None:
    """Work through the units with so many processes until all are done or the time is over."""
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    os.environ.setdefault("OFFDRIFT_CACHE", str((args.out / "cache").resolve()))
    (args.out / "runs").mkdir(parents=True, exist_ok=True)
    (args.out / "locks").mkdir(exist_ok=True)
    started = time.time()
    context = multiprocessing.get_context("spawn")
    todo, told = context.Queue(), context.Queue()
    for unit in units(range(args.first, args.first + args.seeds), args.cells):
        todo.put(unit)
    deadline = started + 60 * args.minutes
    workers = [context.Process(target=work, args=(args.out, todo, told, deadline)) for _ in range(args.workers)]
    for worker in workers:
        worker.start()
    count = 0
    while any(worker.is_alive() for worker in workers) or not told.empty():
        try:
            line = told.get(timeout=1.0)
        except Empty:
            continue
        count += "run" in line[:4]
        print(f"{time.time() - started:5.0f} s {count:4d} runs | {line}", flush=True)
    todo.cancel_join_thread()
    print(f"{len(list((args.out / 'runs').glob('*.json')))} runs in {args.out}", flush=True)


class OutOfTime(Exception):
    """The time is over in the middle of a run."""


def work(root: Path, todo: Any, told: Any, deadline: float) -> None:
    """A process: take units until there are none, or no time."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in ("accelerate", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    while time.time() < deadline:
        try:
            kind, number, seed = todo.get(timeout=2.0)
        except Empty:
            break
        begun = time.perf_counter()
        try:
            line = warm(root, number, seed, deadline) if kind == "start" else run(root, number, seed, deadline)
        except OutOfTime:
            break
        except Exception:  # a run that fails is told and left out: the others go on
            line = f"FAILED {kind} {number} {seed}: {traceback.format_exc(limit=-3)}"
        if line:
            told.put(f"{line} ({time.perf_counter() - begun:.1f} s)")


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """One process at a time."""
    with file.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def warm(root: Path, family: int, seed: int, deadline: float) -> str:
    """Make a warm start and leave it in the cache, unless that is done."""
    from benchmarks.severity_cells import FAMILIES, Cell, start_of

    name = list(FAMILIES)[family]
    done = root / "locks" / f"{name}-{start_of(seed)}.done"
    with locked(root / "locks" / f"{name}-{start_of(seed)}"):
        if done.exists():
            return ""
        log = {**FAMILIES[name]["log"], "eval_prompts": 1, "eval_samples": 1, "eval_every": 1}
        folder = root / "starts" / f"{name}-{seed}"
        trained(Cell(name, "start", "none", {"batches": 1, "optim.warmup": 0, "log": log}), seed, folder, deadline)
        shutil.rmtree(folder, ignore_errors=True)
        done.touch()
    return f"start {name} {start_of(seed)}"


def run(root: Path, number: int, seed: int, deadline: float) -> str:
    """Train one run and store it; "" if it is there."""
    from benchmarks.severity_cells import FAMILIES, GRID, start_of

    cell = GRID[number]
    slug = f"{cell.family}-{cell.name}-{seed}".replace(", ", "-").replace(" ", "_")
    file = root / "runs" / f"{slug}.json"
    if file.exists():
        return ""
    warm(root, list(FAMILIES).index(cell.family), seed, deadline)
    folder = root / "work" / slug
    arm = trained(cell, seed, folder, deadline)
    stored = {
        "family": cell.family,
        "cell": cell.name,
        "method": cell.method,
        "seed": seed,
        "start": start_of(seed),
        **read(arm),
    }
    part = file.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps(stored, separators=(",", ":")), encoding="utf-8")
    part.replace(file)
    shutil.rmtree(folder, ignore_errors=True)
    rewards = [reward for _, reward in stored["held_out"]]
    levels = {f["severity"]: f["update"] for f in reversed(stored["findings"])}
    return f"run {slug}: {rewards[0]:.2f}, best {max(rewards):.2f}, last {rewards[-1]:.2f}; {levels}"


def trained(cell: Any, seed: int, folder: Path, deadline: float) -> Path:
    """Train a cell; returns the arm's folder. Raises: `OutOfTime` at the deadline."""
    from benchmarks.severity_cells import ARM
    from tests.judge import planted_real as planted

    from offdrift_lab.train.loop.loop import train
    from offdrift_lab.train.settings.recipe import check_recipe

    shutil.rmtree(folder, ignore_errors=True)

    parent = os.getppid()

    def watch(event: Any) -> None:
        if time.time() > deadline or os.getppid() != parent:  # whoever asked for it is gone
            raise OutOfTime

    recipe = check_recipe(cell.content(seed), source=cell.name)
    with ExitStack() as spoiling:
        if cell.spoil is not None:
            spoiling.enter_context(planted._spoiling(cell.spoil()))
        train(recipe, folder, watch=watch)
    return folder / "arms" / ARM


def read(arm: Path) -> Row:
    """What is stored of a run."""
    head = json.loads((arm.parents[1] / "run.json").read_text(encoding="utf-8"))
    metrics, evals, findings = (
        [json.loads(line) for line in (arm / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
        if (arm / f"{name}.jsonl").exists()
        else []
        for name in ("metrics", "eval", "findings")
    )
    names = dict.fromkeys(k for row in metrics for k, x in row.items() if _is_read(k, x))
    return {
        "context": head["contexts"][arm.name],
        "held_out": [[row["update"], round(row["reward"], 4)] for row in evals],
        "eval_samples": evals[0]["prompts"] * evals[0]["samples"],
        "findings": [{k: f[k] for k in ("rule", "severity", "update")} for f in findings],
        "metrics": {name: [_short(row.get(name)) for row in metrics] for name in names},
    }


def _is_read(name: str, value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not name.startswith(UNREAD)


def _short(value: Any) -> float | int | None:
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return int(value) if value == int(value) and abs(value) < 1e9 else float(f"{value:.{DIGITS}g}")


def pack(folder: Path, file: Path) -> None:
    """One gzipped JSON of all runs; the metrics of the last ones are left out where they would be too many."""
    from benchmarks.measure import machine

    runs = [json.loads(f.read_text(encoding="utf-8")) for f in sorted((folder / "runs").glob("*.json"))]
    runs.sort(key=lambda r: (r["seed"], r["family"], r["cell"]))
    kept = len(runs)
    while True:
        for row in runs[kept:]:
            row.pop("metrics", None)
        content = {"machine": machine("transformers"), "runs": runs}
        data = gzip.compress(json.dumps(content, separators=(",", ":")).encode(), 9, mtime=0)
        if len(data) <= LARGEST_PACK or not kept:
            break
        kept = int(0.95 * kept * LARGEST_PACK / len(data))
    part = file.with_suffix(".part")
    part.write_bytes(data)
    part.replace(file)
    print(f"{len(runs)} runs, {kept} of them with metrics: {len(data) / 2**20:.1f} MiB in {file}")


if __name__ == "__main__":
    main()
