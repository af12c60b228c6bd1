"""Read files larger than memory with any number of workers, and merge the parts of the result in order.

Each piece's part is on disk before it counts, so an audit that was interrupted, or is given more files, reads only what
it has not read. A part belongs to a file's name, size and date: a file that changed is read again.

Workers are processes of this machine (`in_processes`) or of a Ray cluster (`on_ray`), every node of which must be able
to open the files by the names given here. Parts come back to this process, which merges them in order, so the result is
that of one process, to the last bit. No other file imports ray.
"""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from offdrift.audit.partial import BAD_ROWS_KEPT, Job, Part, Unread, work
from offdrift.engines.isolation import ray_cluster
from offdrift.errors import RecordError
from offdrift.records.atomic import remove_half_written, write_atomically
from offdrift.records.readers import Piece, fingerprint
from offdrift.texts import read_bytes

LAYOUT = 5
"""Layout of stored parts; a part of another layout is made again."""

Run = Callable[[Job, list[Piece]], Iterator[bytes]]
"""Parts of the given pieces, as bytes, in the pieces' order."""


def in_process(job: Job, pieces: list[Piece]) -> Iterator[bytes]:
    """One piece after another, here."""
    for piece in pieces:
        yield work(piece, job).to_bytes()


def in_processes(workers: int) -> Run:
    """Several pieces at once, each in a process of its own with one thread."""

    def run(job: Job, pieces: list[Piece]) -> Iterator[bytes]:
        # "spawn": a forked process would inherit this one's locked thread pools.
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(workers, context, initializer=_begin_worker)
        try:
            yield from pool.map(_work, pieces, [job] * len(pieces))
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    return run


def audit(
    job: Job,
    pieces: list[Piece],
    *,
    folder: Path,
    run: Run = in_process,
    watch: Callable[[int, Part], None] = lambda done, so_far: None,
) -> Part:
    """Everything that the pieces say, merged in their order.

    Args:
        folder: where parts are kept, `parts/KEY.npz`; what is there is not read again.
        run: who reads the pieces.
        watch: called after each piece with how many are done and the merged part.

    Raises: `RecordError` if there is nothing to read, or the folder cannot be written.
    """
    if not pieces:
        raise RecordError("there is nothing to read: no file holds a row")
    remove_half_written(folder)
    places = [folder / "parts" / f"{_key(piece, job)}.npz" for piece in pieces]
    kept = [place.exists() for place in places]
    fresh = run(job, [piece for piece, there in zip(pieces, kept) if not there])
    skipped = job.found.skipped
    total = Part(Unread.of(skipped, {}), skipped[:BAD_ROWS_KEPT])
    for done, (piece, place, there) in enumerate(zip(pieces, places, kept), start=1):
        part = None
        if there:
            with suppress(OSError, RecordError):  # one that cannot be read is made again
                part = Part.from_bytes(read_bytes(place))
        if part is None:
            made = work(piece, job).to_bytes() if there else next(fresh)
            write_atomically(place, lambda tmp, made=made: Path(tmp).write_bytes(made))
            part = Part.from_bytes(made)
        total = total.merge(part)
        watch(done, total)
    return total


def _key(piece: Piece, job: Job) -> str:
    """What a part depends on, and nothing else."""
    about = {
        "layout": LAYOUT,
        "version": version("offdrift"),
        "piece": asdict(piece),
        "file": fingerprint(piece.file),
        "columns": dict(job.found.columns),
        "without": list(job.found.without),
        "rate": job.sample_rate,
        "limit": job.found.limit,
    }
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:32]


def _begin_worker() -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle


def _work(piece: Piece, job: Job) -> bytes:
    return work(piece, job).to_bytes()


def on_ray(address: str) -> Run:
    """Pieces as tasks of the Ray cluster at "auto", "host:port" or "ray://host:port"; "local" starts one and ends it.

    Raises: `EngineError` if Ray is missing, or no cluster answers at the address.
    """

    def run(job: Job, pieces: list[Piece]) -> Iterator[bytes]:
        """The parts in the order of the pieces; a part that is early waits here for its turn."""
        if not pieces:
            return
        with ray_cluster(address) as ray:
            from ray import data

            data.DataContext.get_current().enable_progress_bars = False
            logging.getLogger("ray.data").setLevel(logging.ERROR)  # the command shows progress itself
            shared = ray.put(job)
            rows = data.from_items(
                [{"index": i, **asdict(piece)} for i, piece in enumerate(pieces)],
                override_num_blocks=len(pieces),  # a block is a task: one piece each
            )
            early: dict[int, bytes] = {}
            turn = 0
            for row in rows.map(lambda row: _part(row, shared)).iter_rows():
                early[row["index"]] = row["part"]
                while turn in early:
                    yield early.pop(turn)
                    turn += 1

    return run


def _part(row: dict[str, Any], job: Any) -> dict[str, Any]:
    import ray

    torch.set_num_threads(1)
    piece = Piece(**{name: value for name, value in row.items() if name != "index"})
    return {"index": row["index"], "part": work(piece, ray.get(job)).to_bytes()}
