"""Read the pieces of a log on a Ray cluster, through Ray Data; the only file that imports ray.

Every node must be able to open the files by the names given here. Parts come back to this process, which merges them in
order, so the result is that of one process, to the last bit.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch

from offdrift.audit.partial import Job, work
from offdrift.audit.stream import Run
from offdrift.errors import EngineError
from offdrift.records.readers import Piece


def on_ray(address: str) -> Run:
    """Pieces as tasks of the Ray cluster at "auto", "host:port" or "ray://host:port"; "local" starts one and ends it.

    Raises: `EngineError` if Ray is missing, or no cluster answers at the address.
    """
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise EngineError(
            f"--ray needs Ray ({error}); install it with `pip install offdrift[ray]`, or use --workers"
        ) from error

    def run(job: Job, pieces: list[Piece]) -> Iterator[bytes]:
        """The parts in the order of the pieces; a part that is early waits here for its turn."""
        if not pieces:
            return
        ours = not ray.is_initialized()
        if ours:
            try:
                ray.init(address=address, log_to_driver=False, include_dashboard=False if address == "local" else None)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise EngineError(
                    f"no Ray cluster answers at --ray {address} ({error}); start one with `ray start --head`, "
                    "or give --ray local"
                ) from error
        try:
            ray.data.DataContext.get_current().enable_progress_bars = False
            logging.getLogger("ray.data").setLevel(logging.ERROR)  # the command shows progress itself
            shared = ray.put(job)
            rows = ray.data.from_items(
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
        finally:
            if ours:
                ray.shutdown()

    return run


def _part(row: dict[str, Any], job: Any) -> dict[str, Any]:
    import ray

    torch.set_num_threads(1)
    piece = Piece(**{name: value for name, value in row.items() if name != "index"})
    return {"index": row["index"], "part": work(piece, ray.get(job)).to_bytes()}
