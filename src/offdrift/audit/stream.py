"""Read files larger than memory with any number of workers, and merge the parts of the result in order.

Each piece's part is on disk before it counts, so an audit that was interrupted, or is given more files, reads only what
it has not read. A part belongs to a file's name, size and date: a file that changed is read again.

Workers are processes of this machine (`in_processes`) or of a Ray cluster (`on_ray`), every node of which must be able
to open the files by the names given here. Parts come back to this process in any order; it stores each at once and
merges them in the order of the log, so the result is that of one process, to the last bit. Slices of a log
(`slice_of`) that other machines read leave their parts in the same folder, or in one that is copied there.
"""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from offdrift.audit.partial import BAD_ROWS_KEPT, AuditPartial, Job, Unread, work
from offdrift.errors import EngineError, RecordError
from offdrift.records.atomic import remove_half_written, write_atomically
from offdrift.records.readers import Piece, fingerprint
from offdrift.texts import read_bytes

LAYOUT = 10
"""Layout of stored parts; a part of another layout is made again."""

Run = Callable[[Job, list[Piece]], Iterator[tuple[int, bytes]]]
"""Parts of the given pieces as bytes, each with its piece's place in the list; in any order."""


def in_process(job: Job, pieces: list[Piece]) -> Iterator[tuple[int, bytes]]:
    """One piece after another, here."""
    for i, piece in enumerate(pieces):
        yield i, work(piece, job).to_bytes()


def in_processes(workers: int) -> Run:
    """Several pieces at once, each in a process of its own with one thread."""

    def run(job: Job, pieces: list[Piece]) -> Iterator[tuple[int, bytes]]:
        # "spawn": a forked process would inherit this one's locked thread pools.
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(workers, context, initializer=_begin_worker)
        try:
            places = {pool.submit(_work, piece, job): i for i, piece in enumerate(pieces)}
            for done in as_completed(list(places)):
                yield places.pop(done), done.result()
        except BrokenProcessPool as error:
            raise EngineError(
                "a process that read the log was killed, most often for lack of memory; what was read is stored, and "
                f"the same command goes on: give fewer than --workers {workers} if it happens again"
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    return run


def audit(
    job: Job,
    pieces: list[Piece],
    *,
    folder: Path,
    run: Run = in_process,
    watch: Callable[[int, AuditPartial], None] = lambda done, so_far: None,
) -> AuditPartial:
    """Everything that the pieces say, merged in their order.

    Args:
        folder: where parts are kept, `parts/KEY.npz`; what is there is not read again.
        run: who reads the pieces; a part that arrives before its turn is stored at once, and waits there.
        watch: called after each piece with how many are done and the merged part.

    Raises: `RecordError` if there is nothing to read, or the folder cannot be written.
    """
    if not pieces:
        raise RecordError("there is nothing to read: no file holds a row")
    remove_half_written(folder)
    places = [folder / "parts" / f"{_key(piece, job)}.npz" for piece in pieces]
    stored = [place.exists() for place in places]
    missing = [i for i, there in enumerate(stored) if not there]
    fresh = run(job, [pieces[i] for i in missing])
    skipped = job.found.skipped
    total = AuditPartial(Unread.of(skipped, {}), skipped[:BAD_ROWS_KEPT])
    for i, (piece, place) in enumerate(zip(pieces, places)):
        while not stored[i]:
            which, made = next(fresh)
            _store(places[missing[which]], made)
            stored[missing[which]] = True
        part = None
        with suppress(OSError, RecordError):  # one that cannot be read is made again
            part = AuditPartial.from_bytes(read_bytes(place))
        if part is None:
            part = work(piece, job)
            _store(place, part.to_bytes())
        total = total.merge(part)
        watch(i + 1, total)
    return total


def slice_of(pieces: list[Piece], part: int, of: int) -> list[Piece]:
    """The pieces of one slice, `part` from 1 to `of`: neighbors, so that none is read over another's rows.

    The slices of one log hold each piece once, and what an audit stores of them is what it stores of the whole.

    Example:
        >>> pieces = [Piece("log.jsonl", i, i + 1, "jsonl") for i in range(5)]
        >>> [[piece.start for piece in slice_of(pieces, part, 3)] for part in (1, 2, 3)]
        [[0], [1, 2], [3, 4]]
    """
    return pieces[(part - 1) * len(pieces) // of : part * len(pieces) // of]


def _store(place: Path, part: bytes) -> None:
    write_atomically(place, lambda tmp: Path(tmp).write_bytes(part))


def _key(piece: Piece, job: Job) -> str:
    """Hash of everything that a stored partial result depends on. The result is reused while the hash is unchanged."""
    about = {
        "layout": LAYOUT,
        "version": version("offdrift"),
        "piece": asdict(piece),
        "files": [fingerprint(each.file) for each in piece.each],
        "columns": dict(job.found.columns),
        "without": list(job.found.without),
        "rate": job.sample_rate,
        "limit": job.found.limit,
    } | ({"also": job.also} if job.also else {})
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

    def run(job: Job, pieces: list[Piece]) -> Iterator[tuple[int, bytes]]:
        if not pieces:
            return
        from offdrift.engines.cluster import ray_cluster  # few audits need it

        with ray_cluster(address) as ray:
            from ray import data

            data.DataContext.get_current().enable_progress_bars = False
            logging.getLogger("ray.data").setLevel(logging.ERROR)  # the command shows progress itself
            shared = ray.put(job)
            rows = data.from_items(
                [{"index": i, "piece": json.dumps(asdict(piece))} for i, piece in enumerate(pieces)],
                override_num_blocks=len(pieces),  # a block is a task: one piece each
            )
            try:
                for row in rows.map(lambda row: _part(row, shared)).iter_rows():
                    yield row["index"], row["part"]
            except ray.exceptions.RayError as error:
                raise EngineError(
                    f"the Ray cluster at --ray {address} ended the audit ({str(error).splitlines()[0]}); what was read "
                    "is stored, and the same command goes on, with or without --ray"
                ) from error

    return run


def _part(row: dict[str, Any], job: Any) -> dict[str, Any]:
    import ray

    torch.set_num_threads(1)
    fields = json.loads(row["piece"])
    piece = Piece(**{**fields, "more": tuple(Piece(**each) for each in fields["more"])})
    return {"index": row["index"], "part": work(piece, ray.get(job)).to_bytes()}
