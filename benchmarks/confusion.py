"""Planted cause against reported cause: does the diagnosis name what was done to a run?

    python -m benchmarks.confusion [--seeds 2] [--kinds generated,real] [--batches 16] [--runs DIR]

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
import shutil
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.measure import machine
from tests.judge import planted, planted_real
from tests.judge.reported import CAUSES, CLEAN, Reported, audited, logged

from offdrift.judge import Context
from offdrift.train.arm import LiveDiagnosis
from offdrift.train.run_folder import ArmFolder

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "confusion.json"
PAGE = ROOT / "docs" / "diagnosis.md"
BEGIN, END = "<!-- confusion: made by benchmarks/confusion.py -->", "<!-- confusion: end -->"
KINDS = ("generated", "real")
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
    PAGE.write_text(before + BEGIN + "\n\n" + render(stored["runs"]) + "\n" + END + rest.split(END)[1], encoding="utf-8")  # fmt: skip
    print(render(stored["runs"]))


def measure(kinds: Sequence[str], seeds: Sequence[int], batches: int, runs: Path | None) -> None:
    """Run every case; what is not asked for keeps its stored rows."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    held = json.loads(RESULTS.read_text(encoding="utf-8"))["runs"] if RESULTS.exists() else []
    rows: list[Row] = [r for r in held if r["kind"] not in kinds]
    makers = {"generated": generated, "real": lambda s: real(s, batches, runs)}
    for kind in kinds:
        for row in makers[kind](seeds):
            rows.append({"kind": kind, **row})
            right = "   " if row["reported"] == row["planted"] else "***"
            print(f"{right} {row['case']:32s} {row['planted']:24s} {' '.join(row['causes'])}  ({row['seconds']} s)", flush=True)  # fmt: skip
    RESULTS.write_text(json.dumps({"machine": machine("transformers"), "runs": rows}, indent=1) + "\n", encoding="utf-8")  # fmt: skip


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
                start = time.perf_counter()
                folder = (runs or Path(scratch)) / f"{case.name.replace(' ', '-')}-{seed}"
                arm = ArmFolder(folder / "arms" / planted_real.ARM)
                if arm.summary() is None:
                    shutil.rmtree(folder, ignore_errors=True)
                    planted_real.run(case, folder, seed=seed, batches=batches)
                context = planted_real.context_of(case)
                said = audited(logged(arm.log), context)
                live = list(
                    dict.fromkeys(f["cause"] for f in LiveDiagnosis.of(arm, context).summary())
                )
                yield _row(case.name, case.cause, seed, said, live, start)


def _row(
    name: str, cause: str | None, seed: int, said: Reported, live: list[str] | None, start: float
) -> Row:
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
    return "\n".join(parts)


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
