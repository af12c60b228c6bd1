"""Make labelled logs, ask a detector about each, and score it.

    python -m benchmarks.field.run --kinds dev --seeds 2 --out /tmp/field --json results.json

An answer is kept in OUT as soon as it is there: a run that was stopped goes on where it was. `--formats N` asks about N
formats of each log, chosen by its name and seed; `--formats all` about every one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.field.detectors import named
from benchmarks.field.kinds import chosen, is_held_out
from benchmarks.field.kinds.base import Kind
from benchmarks.field.scene import Log, simulate
from benchmarks.field.score import Answer, Truth, fix_applies, outcome, tables, written
from benchmarks.field.styles import number, planted
from benchmarks.field.writers import FORMATS


def formats_of(kind: str, size: str, seed: int, formats: str) -> list[str]:
    """Formats to ask about: all, those that are listed, or so many, chosen by the log's name and seed."""
    if formats == "all":
        return list(FORMATS)
    if not formats.isdigit():
        return formats.split(",")
    # The order is the kind's, so that further seeds take further formats.
    order = sorted(FORMATS, key=lambda name: number(kind, size, name, "format"))
    n = int(formats)
    return [order[(seed * n + i) % len(order)] for i in range(min(n, len(order)))]


def truth_of(kind: Kind, fields: frozenset[str], versions: bool) -> Truth:
    """What is right to say of a kind in a format."""
    there = fields if versions else fields - {"versions"}
    right, abstain = kind.accepted(there)
    return Truth(kind.clean, kind.visible(there), right, abstain, kind.fixes)


def asked(
    kind: str, half: str, size: str, seed: int, formats: list[str], out: str, detector: str, keep: bool
) -> list[dict[str, Any]]:
    """Make one log in some formats, ask about each, keep the answers, and judge them by today's labels."""
    folder, about = Path(out), chosen("all")[kind]
    tag = hashlib.sha256(detector.encode()).hexdigest()[:8]
    scene, log, records = planted(about, size, seed), None, []
    for name in formats:
        case = f"{kind}/{size}-{seed}-{name}"
        kept = folder / "answers" / tag / f"{case}.json"
        if kept.exists():
            found = Answer.of(json.loads(kept.read_text()))
        else:
            log = log or simulate(scene)
            found = answered(detector, name, log, folder / "logs" / case, keep)
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(asdict(found)))
        truth = truth_of(about, FORMATS[name].fields, scene.versions)
        records.append(
            {
                "kind": kind, "half": half, "size": size, "seed": seed, "format": name, "clean": truth.clean,
                "visible": truth.visible, "right": sorted(truth.right), "abstain": truth.abstain,
                "outcome": outcome(truth, found), "fix_applies": fix_applies(truth, found),
                **{name: list(v) if isinstance(v, tuple) else v for name, v in asdict(found).items()},
            }
        )  # fmt: skip
    return records


def answered(detector: str, format: str, log: Log, place: Path, keep: bool) -> Answer:
    """Write a log and ask about it; a detector that breaks has answered, wrongly."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    FORMATS[format].write(log, place)
    try:
        return named(detector)(place)
    except Exception as error:
        return Answer(("broken",), confident=False, abstains=False, severity="stop", detail=repr(error)[:500])
    finally:
        if not keep:
            shutil.rmtree(place)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run what the command line asks for, print the totals, and return the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kinds", choices=("dev", "held-out", "all"), default="dev")
    parser.add_argument("--only", nargs="*", help="of these kinds, by name")
    parser.add_argument("--clean", action="store_true", help="clean controls alone")
    parser.add_argument("--sizes", default="small,large", help="small, large, or both with a comma")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--formats", default="2", help="how many per log, `all`, or names with commas between them")
    parser.add_argument("--out", required=True, help="folder of logs and answers")
    parser.add_argument("--json", help="file of the results")
    parser.add_argument("--detector", default="offdrift", help="`offdrift`, module:function, or a command with {log}")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="keep the logs")
    o = parser.parse_args(arguments)
    kinds = {n: k for n, k in chosen(o.kinds).items() if (not o.only or n in o.only) and (k.clean or not o.clean)}
    if not kinds:
        parser.error(f"no kind of {o.kinds} is called {' or '.join(o.only)}")
    work = [
        (
            n,
            "held-out" if is_held_out(n) else "dev",
            size,
            seed,
            formats_of(n, size, seed, o.formats),
            o.out,
            o.detector,
            o.keep,
        )
        for seed in range(o.first_seed, o.first_seed + o.seeds)
        for n, k in kinds.items()
        for size in k.sizes
        if size in o.sizes.split(",")
    ]
    records: list[dict[str, Any]] = []
    if o.jobs > 1:
        with ProcessPoolExecutor(o.jobs, mp_context=get_context("spawn")) as pool:
            for i, found in enumerate(pool.map(asked, *zip(*work, strict=True))):
                records += found
                tell(i, len(work), found)
    else:
        for i, case in enumerate(work):
            found = asked(*case)
            records += found
            tell(i, len(work), found)
    results = {
        "detector": o.detector,
        "kinds": {
            half: sorted(n for n in kinds if is_held_out(n) == (half == "held-out")) for half in ("dev", "held-out")
        },
        "seeds": o.seeds,
        "sizes": o.sizes,
        "formats": o.formats,
        "tables": tables(records),
        "unmapped": sorted({r["detail"] for r in records if "unmapped" in r["causes"]}),
        "logs": records,
    }
    if o.json:
        Path(o.json).write_text(json.dumps(results, indent=1) + "\n")
    print(written(results["tables"]["all"]))
    return results


def tell(i: int, n: int, found: list[dict[str, Any]]) -> None:
    """Print a line of progress."""
    said = ", ".join(f"{r['format']}: {r['outcome']}" for r in found)
    print(f"{i + 1}/{n} {found[0]['kind']} {found[0]['size']} {found[0]['seed']}: {said}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
