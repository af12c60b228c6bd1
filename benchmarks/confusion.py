"""Planted cause against reported cause: does the diagnosis name what was done to a run?

    python -m benchmarks.confusion [--seeds 2] [--kinds generated,real] [--batches 16] [--runs DIR]
    python -m benchmarks.confusion --kinds "clean generated" --seeds 30
    python -m benchmarks.confusion --kinds "clean real" --seeds 6 --runs DIR

Every case of `tests/judge/planted.py` (exact draws from explicit distributions) and of
`tests/judge/planted_real.py` (the trainer on tiny models) is run with several seeds, read back
from its log, tallied and judged as `offdrift audit` does. Writes `results/confusion.json` and the
tables of docs/diagnosis.md, which are made from that file alone (`--render`). With `--runs`, training
runs are kept there and judged again without being trained again: for work on the rules.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import shutil
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from benchmarks.measure import machine
from tests.judge import planted, planted_real
from tests.judge.reported import CAUSES, CLEAN, Reported, audited, logged

from offdrift.errors import SyncError
from offdrift.judge import Context
from offdrift_lab.train.loop.arm import LiveDiagnosis
from offdrift_lab.train.loop.run_folder import ArmFolder

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "confusion.json"
PAGE = ROOT / "docs" / "diagnosis.md"
BEGIN, END = "<!-- confusion: made by benchmarks/confusion.py -->", "<!-- confusion: end -->"
KINDS = ("generated", "real")
CLEAN_KINDS = {"clean generated": "generated", "clean real": "of the trainer"}
CLEAN_STEPS, CLEAN_BATCHES = 30, 40
"""Longer than the planted runs: rules that look for trends ask for 20 steps."""
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--batches", type=int, default=16, help="rollout batches of a real run")
    parser.add_argument("--runs", type=Path, help="keep training runs here, and use what is there")
    parser.add_argument("--render", action="store_true", help="only write the page again")
    given = parser.parse_args()
    if not given.render:
        measure(given.kinds.split(","), range(given.seeds), given.batches, given.runs)
    stored = json.loads(RESULTS.read_text(encoding="utf-8"))
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    PAGE.write_text(
        before + BEGIN + "\n\n" + render(stored["runs"]) + "\n" + END + rest.split(END)[1], encoding="utf-8"
    )
    print(render(stored["runs"]))


def measure(kinds: Sequence[str], seeds: Sequence[int], batches: int, runs: Path | None) -> None:
    """Run every case; what is not asked for keeps its stored rows."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    held = json.loads(RESULTS.read_text(encoding="utf-8"))["runs"] if RESULTS.exists() else []
    rows: list[Row] = [r for r in held if r["kind"] not in kinds]
    makers = {
        "generated": generated,
        "real": lambda s: real(s, batches, runs),
        "clean generated": clean_generated,
        "clean real": lambda s: clean_real(s, runs),
    }
    for kind in kinds:
        for row in makers[kind](seeds):
            rows.append({"kind": kind, **row})
            right = "   " if row["reported"] == row["planted"] else "***"
            print(
                f"{right} {row['case']:32s} {row['planted']:24s} {' '.join(row['causes'])}  ({row['seconds']} s)",
                flush=True,
            )
    RESULTS.write_text(
        json.dumps({"machine": machine("transformers"), "runs": rows}, indent=1) + "\n", encoding="utf-8"
    )


def generated(seeds: Sequence[int]) -> Iterator[Row]:
    """Exact draws from explicit distributions."""
    for case in planted.CASES:
        for seed in seeds:
            start = time.perf_counter()
            context = Context(mixture_of_experts=case.mixture_of_experts)
            said = audited(planted.run(case, seed=seed), context)
            yield _row(case.name, case.cause, seed, said, None, start)


def real(seeds: Sequence[int], batches: int, runs: Path | None) -> Iterator[Row]:
    """Runs of the trainer, audited from their logs, and what the trainer itself says of them."""
    with tempfile.TemporaryDirectory() as scratch:
        for case in planted_real.CASES:
            for seed in seeds:
                yield _trained(case, seed, batches, runs or Path(scratch))


def clean_generated(seeds: Sequence[int]) -> Iterator[Row]:
    """Other seeds of the clean cases alone: does any rule fire?"""
    for seed in seeds:
        for case in planted.CASES:
            if case.cause is None:
                start = time.perf_counter()
                context = Context(mixture_of_experts=case.mixture_of_experts)
                longer = replace(case, steps=max(case.steps, CLEAN_STEPS))
                said = audited(planted.run(longer, seed=100 + seed), context)
                yield _row(case.name, None, seed, said, None, start)


def clean_real(seeds: Sequence[int], runs: Path | None) -> Iterator[Row]:
    """The same of the trainer, each from one of two warm starts; what cannot start is told and left out."""
    with tempfile.TemporaryDirectory() as scratch:
        for seed in range(2, 2 + len(seeds)):
            for case in planted_real.CASES:
                if case.cause is None:
                    try:
                        folder = runs or Path(scratch)
                        yield _trained(case, seed, CLEAN_BATCHES, folder, start_seed=seed % 2)
                    except SyncError as e:
                        print(f"    {case.name} {seed}: {e}", flush=True)


def _trained(case: planted_real.Case, seed: int, batches: int, runs: Path, start_seed: int | None = None) -> Row:
    start = time.perf_counter()
    folder = runs / f"{case.name.replace(' ', '-')}-{seed}"
    arm = ArmFolder(folder / "arms" / planted_real.ARM)
    if arm.summary() is None:
        shutil.rmtree(folder, ignore_errors=True)
        planted_real.run(case, folder, seed=seed, batches=batches, start_seed=start_seed)
    context = planted_real.context_of(case)
    said = audited(logged(arm.path / "log"), context)
    seen = LiveDiagnosis.of(arm.rows("metrics"), arm.rows("eval"), context).summary()
    live = list(dict.fromkeys(f["cause"] for f in seen))
    return _row(case.name, case.cause, seed, said, live, start)


def _row(name: str, cause: str | None, seed: int, said: Reported, live: list[str] | None, start: float) -> Row:
    numbers = {k: said.overall.get(f"full/{k}") for k in ("k3", "pearson", "ess_frac")}
    return {
        "case": name,
        "planted": cause or CLEAN,
        "seed": seed,
        "reported": said.cause,
        "causes": list(said.causes),
        "rules": [f.rule for f in said.findings],
        "live": live,
        **{k: None if v is None else float(f"{v:.3g}") for k, v in numbers.items()},
        "seconds": round(time.perf_counter() - start, 1),
    }


def render(runs: Sequence[Row]) -> str:
    """Both matrices and the table of cases, as Markdown."""
    parts = []
    for kind in KINDS:
        mine = [r for r in runs if r["kind"] == kind]
        right = sum(r["reported"] == r["planted"] for r in mine)
        among = sum(r["planted"] in (r["causes"] or [CLEAN]) for r in mine)
        title = {"generated": "Generated runs", "real": "Runs of the trainer"}[kind]
        parts.append(
            f"### {title}\n\n{len(mine)} runs; the planted cause stands first in {right}, "
            f"and among the findings in {among}.\n\n{matrix(mine)}\n\n{cases(mine)}\n"
        )
    if any(r["kind"] in CLEAN_KINDS for r in runs):
        parts.append(f"### Clean runs, more seeds\n\n{clean(runs)}\n")
    return "\n".join(parts)


def clean(runs: Sequence[Row]) -> str:
    """How many clean runs have a finding, and how often that may be at most."""
    lines = [
        ["runs", "number", "with a finding", "at most, 95 % confidence", "rules that fired"],
        ["---", "---:", "---:", "---:", "---"],
    ]
    for kind, words in CLEAN_KINDS.items():
        # The clean ones among the planted runs are clean runs, too.
        mine = [r for r in runs if r["kind"] in (kind, kind.split()[1]) and r["planted"] == CLEAN]
        rules = Counter(rule for r in mine for rule in r["rules"])
        fired = sum(bool(r["rules"]) for r in mine)
        live = [r for r in mine if r["live"] is not None]
        lines.append(_clean_line(words, len(mine), fired, _counted(rules)))
        if live:
            fired = sum(bool(r["live"]) for r in live)
            causes = Counter(cause for r in live for cause in r["live"])
            lines.append(_clean_line(f"{words}, live", len(live), fired, _counted(causes)))
    return _table(lines)


def _clean_line(words: str, runs: int, fired: int, rules: str) -> list[str]:
    return [words, str(runs), str(fired), f"{100 * upper_limit(fired, runs):.1f} %", rules]


def upper_limit(hits: int, runs: int, confidence: float = 0.95) -> float:
    """The exact one-sided upper limit of a share (Clopper and Pearson), by bisection."""
    low, high = hits / runs, 1.0
    while high - low > 1e-9:
        p = (low + high) / 2
        below = sum(math.comb(runs, k) * p**k * (1 - p) ** (runs - k) for k in range(hits + 1))
        low, high = (p, high) if below > 1 - confidence else (low, p)
    return high


def matrix(runs: Sequence[Row]) -> str:
    """Rows planted, columns reported first."""
    counts = Counter((r["planted"], r["reported"]) for r in runs)
    there = {cause for pair in counts for cause in pair}
    rows = [c for c in (CLEAN, *CAUSES) if any(p == c for p, _ in counts)]
    columns = [c for c in (CLEAN, *CAUSES) if c in there]
    columns += sorted(there - {CLEAN, *CAUSES})
    lines = ["planted ↓ reported →", *columns], ["---"] + ["---:"] * len(columns)
    body = [[f"**{p}**", *(_cell(counts[p, q], p == q) for q in columns)] for p in rows]
    return _table([*lines, *body])


def _cell(count: int, diagonal: bool) -> str:
    return f"**{count}**" if count and diagonal else str(count or "")


def cases(runs: Sequence[Row]) -> str:
    """One row per case: how large its drift was, and what was said."""
    by_case: Mapping[str, list[Row]] = defaultdict(list)
    for r in runs:
        by_case[r["case"]].append(r)
    live = any(r["live"] is not None for r in runs)
    head = ["case", "planted", "k3, nat", "Pearson", "reported first", "also reported"]
    lines = [head + ["by the trainer, live"] * live, ["---"] * (len(head) + live)]
    for name, rows in by_case.items():
        first = Counter(r["reported"] for r in rows)
        also = Counter(c for r in rows for c in r["causes"][1:])
        lines.append([
            name, rows[0]["planted"], _span(rows, "k3"), _span(rows, "pearson"), _counted(first), _counted(also),
            *([_counted(Counter((r["live"] or [CLEAN])[0] for r in rows))] * live),
        ])  # fmt: skip
    return _table(lines)


def _span(rows: Sequence[Row], key: str) -> str:
    values = [r[key] for r in rows if r[key] is not None]
    low, high = f"{min(values):.2g}", f"{max(values):.2g}"
    return low if low == high else f"{low} to {high}"


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{cause} {n}" for cause, n in counts.items())


def _table(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


if __name__ == "__main__":
    main()
