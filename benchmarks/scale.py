"""What an audit of 10^10 tokens takes, measured on slices and extrapolated.

    python benchmarks/scale.py [--tokens 40000000] [--files 8] [--folder FOLDER] [--json PATH] [--keep] [--s3]

Writes that many tokens of a plain log (12 bytes each: rollout and old log-probs, advantages) in files of equal size, and
then measures:

- **reading**: `audit.partial.work` of every piece in one process with one thread, in seconds that it kept a core busy;
- **memory**: peak resident memory of a process that audits 1, 2, 4, ... of the files: flat, or not;
- **merging**: seconds for each of 4, 16, 64 and 256 parts of as many files (copies of the measured parts, whose
  steps are set apart, so that the timeline grows as it would), with the bytes of a part;
- **Ray**: the same files on a local cluster, beside processes without it (`--ray`; needs cores to say anything of speed);
- **S3** (`--s3`; needs s3fs and moto): the same files in a bucket of a server on loopback, for the cost of the client.

The last table multiplies up to 10^10 tokens: seconds and merging in proportion to tokens, memory as measured. It assumes
that files are as large, that steps are at most 2000 points of the timeline (more are merged), and that the store serves
all readers at once. Everything that is written is removed, unless `--keep`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from measure import machine

from audit import make_log, resident_peak_kib
from offdrift.audit.partial import AuditPartial, Job, work
from offdrift.audit.stream import audit, in_processes, on_ray
from offdrift.audit.tally import Tally, Timeline
from offdrift.records.readers import detect, pieces
from offdrift.records.recorder import write_log

GOAL = 10**10
SAMPLE_MIB = 64
"""What `offdrift audit` tries every method of the table on, however large the log is."""


def write(folder: Path, tokens: int, files: int) -> list[Path]:
    """Files of one run, 32 steps each."""
    written = []
    for i in range(files):
        log = make_log(tokens // files, steps=32, seed=i)
        written.append(write_log(replace(log, step=log.step + 32 * i), folder / f"batch-{i:04d}.parquet"))
        print(f"wrote {i + 1} of {files} files", file=sys.stderr)
    return written


def planned(paths: list[str], tokens: int) -> tuple[Job, list[Any]]:
    """The job as it would be for `GOAL` tokens of such files: its methods are tried on the same few MiB."""
    found = detect(paths)
    whole = found.bytes * GOAL / tokens
    return Job(found, sample_rate=SAMPLE_MIB * 2**20 / whole), pieces(found)


def reading(job: Job, plan: list[Any]) -> tuple[list[bytes], dict[str, float]]:
    """All pieces in one process: their parts, and seconds for a token."""
    work(plan[0], job)
    parts, busy, wall, tokens = [], time.process_time(), time.perf_counter(), 0
    rates = []
    for piece in plan:
        begun = time.process_time()
        part = work(piece, job)
        own = 0 if part.tally is None else part.tally.tokens
        rates.append(own / (time.process_time() - begun))
        tokens += own
        parts.append(part.to_bytes())
    busy, wall = time.process_time() - busy, time.perf_counter() - wall
    return parts, {
        "tokens": tokens,
        "pieces": len(plan),
        "busy_seconds": busy,
        "wall_seconds": wall,
        "tokens_per_second_per_core": tokens / busy,
        "slowest_piece": min(rates),
        "median_piece": statistics.median(rates),
        "part_bytes": statistics.mean(map(len, parts)),
    }


def apart(part: AuditPartial, shift: int) -> AuditPartial:
    """A part as if its steps came `shift` later."""
    tally = part.tally
    assert tally is not None
    line = tally.timeline
    points = {key + shift // line.width: point for key, point in line.points.items()}
    moved = Timeline(line.width, points, line.steps + shift)
    return replace(part, tally=Tally(tally.counts, moved, tally.facets, tally.worst, tally.groups + shift))


def merging(parts: list[bytes]) -> list[dict[str, float]]:
    """Seconds to merge each of many parts, as an audit does at its end, decoding included."""
    rows = []
    for count in (4, 16, 64, 256):
        stored = [
            apart(AuditPartial.from_bytes(parts[i % len(parts)]), 1024 * (i // len(parts))).to_bytes()
            for i in range(count)
        ]
        busy = time.process_time()
        whole = reduce(AuditPartial.merge, map(AuditPartial.from_bytes, stored))
        busy = time.process_time() - busy
        assert whole.tally is not None
        points = len(whole.tally.timeline.points)
        rows.append({"parts": count, "seconds": busy, "ms_per_part": 1e3 * busy / count, "points": points, "whole_mib": len(whole.to_bytes()) / 2**20})  # fmt: skip
    return rows


def memory(files: list[Path], tokens: int) -> list[dict[str, float]]:
    """Peak memory of a process that audits the first 1, 2, 4, ... files; and of one that has only imported all."""
    rows, count = [], 0
    while count <= len(files):
        command = [sys.executable, __file__, "--peak", str(tokens), *map(str, files[:count])]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        rows.append(
            {"files": count, "tokens": tokens // len(files) * count, "peak_mib": float(done.stdout.split()[-1])}
        )
        count = 2 * count or 1
    return rows


def tell_peak(tokens: int, paths: list[str]) -> None:
    torch.set_num_threads(1)
    if paths:
        job, plan = planned(paths, tokens)
        with tempfile.TemporaryDirectory() as folder:
            audit(job, plan, folder=Path(folder))
    print(resident_peak_kib() / 1024)


def timed(run: Any, job: Job, plan: list[Any]) -> tuple[float, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        part = audit(job, plan, folder=Path(folder), run=run)
        return time.perf_counter() - begun, part.to_bytes()


def in_bucket(files: list[Path], tokens: int) -> dict[str, float]:
    """Reading the same files from an S3 server on loopback, in a process of its own."""
    import s3fs
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server._server.server_port}", "AWS_ACCESS_KEY_ID": "local",
        "AWS_SECRET_ACCESS_KEY": "local", "AWS_DEFAULT_REGION": "us-east-1", "NO_PROXY": "127.0.0.1",
    }  # fmt: skip
    try:
        fs = s3fs.S3FileSystem()
        fs.mkdir("scale")
        for file in files:
            fs.put(str(file), f"scale/{file.name}")
        job, plan = planned(["s3://scale"], tokens)
        wall = time.perf_counter()
        counted = sum(work(piece, job).tally.tokens for piece in plan)  # type: ignore[union-attr]
        wall = time.perf_counter() - wall
    finally:
        server.stop()
    return {"files": len(files), "tokens": counted, "wall_seconds": wall, "tokens_per_second": counted / wall}


def extrapolated(found: dict[str, Any]) -> dict[str, Any]:
    """10^10 tokens from what was measured."""
    read, merge = found["reading"], found["merging"][-1]
    times = GOAL / read["tokens"]
    count = round(times * read["pieces"])
    core_seconds, merge_seconds = times * read["busy_seconds"], count * merge["ms_per_part"] / 1e3
    return {
        "tokens": GOAL,
        "log_gib": times * found["log_bytes"] / 2**30,
        "pieces": count,
        "core_hours": core_seconds / 3600,
        "merge_minutes": merge_seconds / 60,
        "parts_gib": count * read["part_bytes"] / 2**30,
        "hours_by_cores": {str(n): (core_seconds / n + merge_seconds) / 3600 for n in (1, 8, 64, 256)},
    }


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=40_000_000)
    parser.add_argument("--files", type=int, default=8)
    parser.add_argument("--folder", type=Path, help="where the log is written; default: a temporary one")
    parser.add_argument("--keep", action="store_true", help="do not remove the log")
    parser.add_argument("--ray", action="store_true", help="also on a local Ray cluster")
    parser.add_argument("--s3", action="store_true", help="also from an S3 server on loopback")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    parser.add_argument("--peak", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.peak:
        tell_peak(int(args.peak[0]), args.peak[1:])
        return {}
    torch.set_num_threads(1)
    folder = args.folder or Path(tempfile.mkdtemp(prefix="offdrift-scale-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        files = write(folder, args.tokens, args.files)
        job, plan = planned([str(f) for f in files], args.tokens)
        parts, read = reading(job, plan)
        log_bytes = sum(f.stat().st_size for f in files)
        found: dict[str, Any] = {
            "machine": machine("pyarrow", "numpy", "ray", "s3fs"), "load_average": os.getloadavg(), "log_bytes": log_bytes,
            "reading": read, "merging": merging(parts),
        }  # fmt: skip
        keep(found | {"extrapolated": extrapolated(found)}, args.json)
        found["memory"] = memory(files, args.tokens)
        keep(found | {"extrapolated": extrapolated(found)}, args.json)
        seconds, one = timed(in_processes(args.workers), job, plan)
        found["processes"] = {
            "workers": args.workers,
            "wall_seconds": seconds,
            "tokens_per_second": read["tokens"] / seconds,
        }
        if args.ray and importlib.util.find_spec("ray"):
            seconds, ray = timed(on_ray("local"), job, plan)
            found["ray"] = {"wall_seconds": seconds, "tokens_per_second": read["tokens"] / seconds, "same_to_the_last_bit": ray == one}  # fmt: skip
        if args.s3 and importlib.util.find_spec("s3fs") and importlib.util.find_spec("moto"):
            found["s3"] = in_bucket(files[:2], args.tokens)
    finally:
        if not args.keep:
            shutil.rmtree(folder, ignore_errors=True)
    found["extrapolated"] = extrapolated(found)
    keep(found, args.json)
    print(json.dumps(found, indent=2))
    return found


def keep(found: dict[str, Any], path: Path | None) -> None:
    """Write what was measured so far."""
    if path is not None:
        path.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
