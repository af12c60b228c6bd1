"""The diagnosis out of sample: runs with faults that its rules were not made with, and what the proposed fixes do.

    python -m benchmarks.out_of_sample --runs 100 --seed 1 [--vllm 6] [--jobs 16] [--folder runs/out_of_sample]

Each run of the trainer on a tiny model has no fault, one or two (`out_of_sample_cases`), random in kind and size. Its
log is audited as `offdrift audit` does. Then the first finding's fix is applied, the run is repeated with the same
seed, and both are compared. A run that is done is not done again: the same command goes on after an interruption, or
on another machine that has the folder. Writes `results/out_of_sample.json` after every run.

`--jobs N` runs N at a time, each on one thread of the CPU (a GPU is not used: its arithmetic would be another). vLLM's
runs come after the others, one at a time, and wait for a machine that has vLLM: `--only vllm` runs them alone.

Applied means: the finding's snippet for this trainer is put into the recipe (`offdrift.judge.apply`), and where the
fix's sentence asks for a repair outside the recipe (code that records log-probs, the synchronization, kernels), faults
of that kind, and only those, are taken away.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import multiprocessing
import os
import shutil
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from benchmarks.measure import machine
from benchmarks.out_of_sample_cases import REPAIRS, RandomCase, draw, recipe_changes, spoil
from tests.judge import planted_real as planted
from tests.judge.reported import Reported, audited, logged

from offdrift.engines import make_engine
from offdrift.errors import OffdriftError
from offdrift.judge import Context, load_rules
from offdrift.judge.apply import apply_fix
from offdrift.records.atomic import plain, write_json
from offdrift_lab.train.loop.run_folder import ArmFolder
from offdrift_lab.train.settings.recipe import Recipe, check_recipe

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "out_of_sample.json"
BATCHES = 20
"""Rules that look for trends ask for 20 steps."""
EVALUATED = 128
CURVES = ("reward/mean", "optim/grad_norm")
Row = dict[str, Any]


Job = tuple[RandomCase, Path]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100, help="runs of the transformers engine")
    parser.add_argument("--vllm", type=int, default=0, help="further runs whose responses vLLM draws")
    parser.add_argument("--seed", type=int, default=0, help="of the faults; another seed is another sample")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each a process of one thread")
    parser.add_argument("--only", choices=("transformers", "vllm"), help="run those of one engine; the others stay")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "out_of_sample", help="where runs are kept")
    parser.add_argument("--json", type=Path, default=RESULTS, help="the file that is written")
    parser.add_argument("--summarize", action="store_true", help="only write the file, from the runs that are there")
    args = parser.parse_args()
    if args.jobs < 1:
        parser.error(f"--jobs {args.jobs} must be at least 1: that many runs go on at a time")
    prepare()
    cases = [(draw(i, args.seed), args.folder / f"{args.seed}-{i:03d}") for i in range(args.runs)]
    cases += [(draw(i, args.seed, "vllm"), args.folder / f"{args.seed}-vllm-{i:03d}") for i in range(args.vllm)]
    head = {"machine": machine("transformers"), "seed": args.seed, "batches": BATCHES, "asked_for": len(cases)}
    if not args.summarize:
        for _ in run_all(chosen(cases, args.only), args.seed, args.jobs):
            store(args.json, head, cases)
    there = store(args.json, head, cases)
    print(f"{there} of {len(cases)} runs in {args.json}")


def prepare() -> None:
    """One thread of the CPU for each process, and no warnings of engines that are spoiled on purpose."""
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("accelerate").setLevel(logging.ERROR)


def store(file: Path, head: Row, cases: Sequence[Job]) -> int:
    """Write the rows that are there, in the order of the cases, whole or not at all; returns how many."""
    rows = [json.loads(f.read_text()) for _, folder in cases if (f := folder / "row.json").is_file()]
    lines = ",\n".join(json.dumps(plain(small(row))) for row in rows)
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text(f'{json.dumps(head)[:-1]},\n"runs": [\n{lines}\n]}}\n', encoding="utf-8")
    part.replace(file)
    return len(rows)


def small(row: Row) -> Row:
    """A row without its curves, which stay in the run's folder."""
    kept = {k: {n: x for n, x in v.items() if n not in CURVES} for k in ("first", "fixed") if (v := row[k]) is not None}
    return row | kept


def of_vllm(case: RandomCase) -> bool:
    """Whether vLLM draws the case's responses."""
    return case.recipe.get("rollout.engine") == "vllm"


def chosen(cases: Sequence[Job], only: str | None) -> list[Job]:
    """The runs of that engine (all, if None) that are left, and that can run here."""
    left = [
        (case, folder)
        for case, folder in cases
        if only in (None, "vllm" if of_vllm(case) else "transformers") and not (folder / "row.json").is_file()
    ]
    if find_spec("vllm") is not None:
        return left
    if skipped := sum(of_vllm(case) for case, _ in left):
        print(
            f"left out: {skipped}, whose responses vLLM draws, which is not installed here; the same command with "
            "--only vllm runs them where it is"
        )
    return [(case, folder) for case, folder in left if not of_vllm(case)]


def run_all(left: Sequence[Job], seed: int, jobs: int) -> Iterator[Row]:
    """Run what is left, and say after each how it went."""
    started = time.perf_counter()
    for n, (case, row) in enumerate(in_turn(left, seed) if jobs == 1 else at_once(left, seed, jobs), 1):
        fixed = row["fixed"]
        after = "" if fixed is None else f" -> {row['fix']} ({row['applied']}) k3 {fixed['k3']:.2g}"
        each = (time.perf_counter() - started) / n
        print(
            f"{n:3d}/{len(left)} {' + '.join(case.causes) or 'clean':36s} | {' '.join(row['causes']) or 'clean'} "
            f"| k3 {row['first']['k3']:.2g}{after} | {each * (len(left) - n) / 60:.0f} min left",
            flush=True,
        )
        yield row


def in_turn(left: Sequence[Job], seed: int) -> Iterator[tuple[RandomCase, Row]]:
    """One run after the other, in this process."""
    for case, folder in left:
        with one_vllm_engine() if of_vllm(case) else nullcontext():
            yield case, run(case, folder, seed)


def at_once(left: Sequence[Job], seed: int, jobs: int) -> Iterator[tuple[RandomCase, Row]]:
    """So many runs at a time, in the order in which they end; those of vLLM last, one by one.

    The first run of each start makes it, and the others find it: they wait until it is there.
    """
    parallel = [job for job in left if not of_vllm(job[0])]
    starts = {(case.recipe.get("model"), case.start): (case, folder) for case, folder in reversed(parallel)}
    waves = [list(starts.values()), [job for job in parallel if job not in starts.values()]]
    spawned = multiprocessing.get_context("spawn")  # a fork of a process that has computed hangs in its threads
    with ProcessPoolExecutor(jobs, mp_context=spawned, initializer=prepare) as pool:
        for wave in waves:
            futures = {pool.submit(run, case, folder, seed): case for case, folder in wave}
            for future in as_completed(futures):
                if (error := future.exception()) is None:
                    yield futures[future], future.result()
                else:  # the others go on, and the same command tries this one again
                    print(f"run {futures[future].number} failed: {error!r}", flush=True)
    yield from in_turn([job for job in left if of_vllm(job[0])], seed)


def run(case: RandomCase, folder: Path, seed: int) -> Row:
    """A case's row, stored."""
    row = run_and_repair(case, folder, 1000 + 200 * seed + case.number)
    write_json(folder / "row.json", row)
    return row


def run_and_repair(case: RandomCase, folder: Path, seed: int) -> Row:
    """A case's run, what is reported of it, and the same run after the first finding's fix."""
    recipe = recipe_of(case, seed)
    first, reported = train_and_audit(recipe, case, folder / "first", seed)
    row: Row = {
        "case": asdict(case),
        "seed": seed,
        "causes": list(reported.causes),
        "rules": [f.rule for f in reported.findings],
        "severities": [f.severity for f in reported.findings],
        "first": first,
        "fix": None,
        "applied": "no finding",
        "repaired": [],
        "fixed": None,
    }
    if not reported.findings:
        return row
    rules = load_rules()
    row["fix"] = rules.rules[reported.findings[0].rule].fix
    try:
        repaired, after = repair(row["fix"], recipe, case)
    except OffdriftError as e:
        return row | {"applied": "refused", "refusal": str(e)}
    row["repaired"] = [p.how for p in case.plants if p not in repaired.plants]
    same_recipe = after.model_dump() == recipe.model_dump()
    if row["repaired"]:
        row["applied"] = "repair"
    elif not same_recipe:
        row["applied"] = "configuration"
    else:
        row["applied"] = "nothing to change" if "offdrift" in rules.fixes[row["fix"]].snippets else "no setting"
    if row["applied"] in ("repair", "configuration"):
        row["fixed"], again = train_and_audit(after, repaired, folder / "fixed", seed)
        row["causes_after"] = list(again.causes)
    return row


def repair(fix: str, recipe: Recipe, case: RandomCase) -> tuple[RandomCase, Recipe]:
    """What is left of the faults, and the recipe, when somebody does what a fix says.

    Raises: `RecipeError` if the recipe does not take the snippet.
    """
    gone = [p for p in case.plants if p.how in REPAIRS.get(fix, ())]
    left = replace(case, plants=tuple(p for p in case.plants if p not in gone))
    content = recipe.model_dump(by_alias=True)
    if gone:  # settings that were a part of what is repaired go back
        plain = recipe_of(replace(case, recipe=without(case, gone), plants=left.plants), recipe.seed)
        content = plain.model_dump(by_alias=True)
    snippet = load_rules().fixes[fix].snippets.get("offdrift")
    if snippet is not None:
        content = apply_fix(content, snippet, planted.ARM)
    return left, check_recipe(content, source=fix)


def without(case: RandomCase, gone: Sequence[Any]) -> dict[str, Any]:
    """The recipe's changes without those that these faults made; raw log-probs are told by the temperature alone, which
    stays."""
    keys = {key for p in gone if p.how != "untempered" for key in recipe_changes(p, {"optim.lr": 1.0})}
    return {key: x for key, x in case.recipe.items() if key not in keys}


def recipe_of(case: RandomCase, seed: int) -> Recipe:
    """A case's recipe. Held-out rewards are drawn at temperature 1 without filters, whatever the run draws with."""
    changes = {
        "rollout.prompts": 8,
        "rollout.samples": 6,
        "log.eval_prompts": EVALUATED,
        "log.eval_temperature": 1.0,
        "log.eval_top_p": 1.0,
        **case.recipe,
        f"arms.{planted.ARM}": {"method": case.method},
    }
    return planted.recipe_of(planted.Case("", None, changes), seed=seed, batches=BATCHES)


def train_and_audit(recipe: Recipe, case: RandomCase, folder: Path, seed: int) -> tuple[Row, Reported]:
    """Train, audit the log, and keep metrics and rewards alone of what the run stored."""
    arm = ArmFolder(folder / "arms" / planted.ARM)
    shutil.rmtree(folder, ignore_errors=True)
    begun = time.process_time()
    with unchecked():
        planted.train_spoiled(recipe, spoil(case.plants, seed), folder, start_seed=case.start)
    context = Context(
        mixture_of_experts="moe" in recipe.model,
        temperature=recipe.rollout.temperature,
        filter_replayed=recipe.replay.support if recipe.rollout.filtered else None,
        method=recipe.arms[planted.ARM].method,
    )
    reported = audited(logged(arm.path / "log"), context)
    steps = arm.rows("metrics")
    rewards = [x["reward"] for x in arm.rows("eval")]
    numbers = {k: reported.overall.get(f"full/{k}") for k in ("k3", "pearson", "ess_frac")}
    row = {
        **{k: float("nan") if x is None else x for k, x in numbers.items()},
        "held_out": rewards,
        **{name: [_short(s.get(name)) for s in steps] for name in CURVES},
        "cpu_seconds": round(time.process_time() - begun, 1),
    }
    for name in ("log", "rollouts", "model", "checkpoints"):
        shutil.rmtree(arm.path / name, ignore_errors=True)
    return row, reported


def _short(x: Any) -> float | None:
    return float(f"{x:.4g}") if isinstance(x, (int, float)) and math.isfinite(x) else None


@contextmanager
def unchecked() -> Iterator[None]:
    """Without the trainer's proofs that its engine takes weights: most spoiled runs would end there, and they take a
    fifth of such a short run."""

    def loaded(engine: Any, model: Any, *args: Any, **options: Any) -> None:
        engine.load_weights(model.named_parameters(), version=engine.version)

    with (
        patch("offdrift_lab.train.loop.arm.check_sync", lambda *args, **options: None),
        patch("offdrift_lab.train.loop.context.verify_sync", loaded),
        patch("tests.judge.planted_real.verify_sync", loaded),
    ):
        yield


_ENGINES: dict[str, Any] = {}


@contextmanager
def one_vllm_engine() -> Iterator[None]:
    """All runs share one vLLM engine, which takes half a minute to start: each gives it its own weights."""

    def shared(name: str, *args: Any, **options: Any) -> Any:
        if name != "vllm":
            return make_engine(name, *args, **options)
        key = json.dumps(options, sort_keys=True)
        if key not in _ENGINES:
            _ENGINES[key] = Unclosed(make_engine(name, *args, **options))
        return _ENGINES[key]

    with ExitStack() as stack:
        for place in ("offdrift_lab.train.loop.context.make_engine", "tests.judge.planted_real.make_engine"):
            stack.enter_context(patch(place, shared))
        yield


class Unclosed:
    """An engine that outlives the runs that use it."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def close(self) -> None:
        """It stays open."""


if __name__ == "__main__":
    main()
