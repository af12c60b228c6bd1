"""Execute the runs of a sweep: in this process, in several, or on a Ray cluster.

Everywhere a run is `run_cell`, which stores what it does and what stops it. Of runs with one warm start the first makes
it, and the others wait for it.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from offdrift.engines.cluster import Common, in_common, is_alive, ray_cluster, room, this_node
from offdrift.errors import EngineError, RecordError
from offdrift.records.atomic import write_json
from offdrift_lab.train.sweep.sweep import NODES, Cell, Grid, Progress, Report, nodes_of, run_cell

POLL_S = 0.5
"""Seconds between two looks at what runs on a cluster report."""
GRACE_S = 20.0
"""Seconds in which a run that is interrupted may end by itself."""


def run_sweep(
    grid: Grid,
    *,
    jobs: int | None = None,
    ray: str | None = None,
    cpus: float | int = 1,
    gpus: float | int = 0,
    report: Report = lambda progress: None,
) -> None:
    """Run what is not finished: what was cut goes on from its last checkpoint, what failed is tried again.

    A run that fails stores its error, and the others go on. Interrupt at any time; nothing but the updates since the
    last checkpoints is lost.

    Args:
        jobs: runs at a time. Absent: one, in this process; on Ray, as many as the cluster has room for.
        ray: "auto", "host:port" or "ray://host:port" of a Ray cluster whose nodes all see the sweep's folder under its
            name; "local" starts one here and ends it.
        cpus, gpus: what a run takes of the cluster.
        report: called with every update of every run.

    Raises: `RecordError` if the folder cannot be written; `EngineError` if no cluster answers, or it has no node for
        a run.
    """
    waiting = [cell for cell in grid.cells if cell.status != "finished"]
    if ray is not None:
        if waiting:
            _on_ray(grid, waiting, ray, report, jobs=jobs, cpus=cpus, gpus=gpus)
    elif (jobs or 1) > 1:
        _in_processes(waiting, jobs or 1, report)
    else:
        for cell in waiting:
            run_cell(cell, lambda update, text, cell=cell: report(Progress(cell, update, text)))
            report(Progress(cell, done=True))


def next_cell(waiting: list[Cell], running: Iterable[Cell], made: set[str]) -> Cell | None:
    """Take the first run off the list whose warm start nobody is making; None if there is none.

    Args:
        made: warm starts that a run has made.
    """
    under_way = {cell.start for cell in running} - made - {""}
    cell = next((c for c in waiting if c.start not in under_way), None)
    if cell is not None:
        waiting.remove(cell)
    return cell


# -- processes of this machine -----------------------------------------------------------------------


def _serve(pipe: Connection, threads: int) -> None:
    """A process of a sweep: runs cells until there are none, and says what it does."""
    import torch

    torch.set_num_threads(threads)
    # Ctrl-C in a terminal reaches every process; this one ends when the sweep says so.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.default_int_handler)

    def watch(update: int, text: str) -> None:
        try:
            pipe.send((update, text))
        except OSError:  # the sweep is gone
            raise KeyboardInterrupt from None

    with suppress(KeyboardInterrupt, EOFError, OSError):
        while (cell := pipe.recv()) is not None:
            try:
                run_cell(cell, watch)
                pipe.send(None)
            except RecordError as e:
                pipe.send(e)


def _in_processes(waiting: list[Cell], jobs: int, report: Report) -> None:
    """Run cells in so many processes."""
    context = multiprocessing.get_context("spawn")
    threads = int(os.environ.get("OMP_NUM_THREADS") or max(1, (os.cpu_count() or 1) // jobs))
    busy: dict[Connection, tuple[Any, Cell]] = {}
    idle: list[tuple[Connection, Any]] = []
    made: set[str] = set()

    def begin() -> None:
        while len(busy) < jobs and (cell := next_cell(waiting, (c for _, c in busy.values()), made)) is not None:
            if not idle:
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs, threads))
                process.start()
                theirs.close()
                idle.append((ours, process))
            pipe, process = idle.pop()
            busy[pipe] = process, cell
            pipe.send(cell)

    try:
        begin()
        while busy:
            for pipe in wait(list(busy)):
                assert isinstance(pipe, Connection)
                process, cell = busy[pipe]
                try:
                    message = pipe.recv()
                except (EOFError, OSError):
                    process.join()
                    _died(cell, f"exit status {process.exitcode}")
                    message = None
                    del busy[pipe]
                else:
                    if isinstance(message, RecordError):
                        raise message
                    if message is None:
                        idle.append((pipe, busy.pop(pipe)[0]))
                if message is None:
                    made.add(cell.start)
                    report(Progress(cell, done=True))
                else:
                    report(Progress(cell, *message))
            begin()
    finally:
        processes = [process for process, _ in busy.values()]
        for process in processes:
            process.terminate()
        for pipe, process in idle:
            with suppress(OSError):
                pipe.send(None)
            processes.append(process)
        for process in processes:
            process.join(timeout=GRACE_S)
            if process.is_alive():
                process.kill()
                process.join()


def _died(cell: Cell, how: str) -> None:
    """Record a run whose process is gone as a failed one."""
    write_json(cell.folder / "error.json", {"error": f"its process ended with {how}, as when memory runs out"})


# -- a Ray cluster -----------------------------------------------------------------------------------


class Board:
    """An actor to which runs report and from which the sweep reads: the last report of each."""

    def __init__(self) -> None:
        self.last: dict[Path, tuple[int, str]] = {}

    def put(self, folder: Path, update: int, text: str) -> None:
        """Note how far a run is."""
        self.last[folder] = update, text

    def take(self) -> dict[Path, tuple[int, str]]:
        """Return the updates reported since the last call, by folder of the run, and clear them."""
        last, self.last = self.last, {}
        return last


def run_remotely(common: tuple[str, ...], pickled: bytes, board: Any, threads: int) -> None:
    """Run a cell as a task of Ray, if its node has all in `Common`; the cell comes pickled, as what another version of
    the software reads in it would be nothing to go by."""
    import torch

    torch.set_num_threads(threads)
    Common(*common).check()
    cell: Cell = pickle.loads(pickled)
    noted = {**this_node()._asdict(), "since": datetime.now(UTC).isoformat(timespec="seconds")}
    write_json(cell.folder / NODES, {"nodes": [*nodes_of(cell), noted]})
    run_cell(cell, lambda update, text: board.put.remote(cell.folder, update, text))


def _on_ray(
    grid: Grid,
    waiting: list[Cell],
    address: str,
    report: Report,
    *,
    jobs: int | None,
    cpus: float | int,
    gpus: float | int,
) -> None:
    """Run cells as tasks of a cluster."""
    with ray_cluster(address) as ray, in_common(grid.folder) as common:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        errors = ray.exceptions
        remote = ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=0)(run_remotely)
        # Here: on another node it would be lost with it.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        boards = ray.remote(num_cpus=0, scheduling_strategy=here)(Board)
        board = boards.remote()
        running: dict[Any, Cell] = {}
        made: set[str] = set()
        noted = {cell.folder: len(nodes_of(cell)) for cell in waiting}

        def reported() -> dict[Path, tuple[int, str]]:
            nonlocal board
            try:
                return ray.get(board.take.remote())
            except errors.RayActorError:  # progress is lost, and no more: what runs have done is in their folders
                board = boards.remote()
                return {}

        def begin() -> None:
            amounts = {"CPU": float(cpus), "GPU": float(gpus)}
            what = f"a run of --cpus {cpus:g} --gpus {gpus:g}"
            most = min(jobs or len(waiting) + len(running), room(ray, amounts, what=what, way_out="lower them"))
            while len(running) < most and (cell := next_cell(waiting, running.values(), made)) is not None:
                task = remote.remote(tuple(common), pickle.dumps(cell), board, max(1, int(cpus)))
                running[task] = cell

        with _cancelled(ray, running):
            begin()
            while running:
                done, _ = ray.wait(list(running), num_returns=1, timeout=POLL_S)
                by_folder = {cell.folder: cell for cell in running.values()}
                for folder, (update, text) in reported().items():
                    if folder in by_folder:
                        report(Progress(by_folder[folder], update, text))
                for task in done:
                    cell = running.pop(task)
                    try:
                        ray.get(task)
                    except errors.RayTaskError as e:
                        cause = e.cause
                        if isinstance(cause, RecordError):
                            raise cause from None
                        if ABSENT in str(cause):
                            raise EngineError(
                                "a node of the Ray cluster cannot import offdrift; install the command's version on "
                                f"all nodes: pip install 'offdrift[train,ray]=={common.version}'"
                            ) from None
                        write_json(cell.folder / "error.json", {"error": str(cause), "traceback": str(e)})
                    except errors.RayError as e:
                        _lost(ray, nodes_of(cell)[noted[cell.folder] :], cell, e)
                    made.add(cell.start)
                    report(Progress(cell, done=True))
                begin()


ABSENT = "failed to import on the worker"
"""In what Ray says where a node lacks the function's module."""


def _lost(ray: Any, nodes: list[dict[str, Any]], cell: Cell, error: Exception) -> None:
    """Record a run whose worker, or the node that it was on, is gone.

    Args:
        nodes: where this cluster has begun the run; empty if its worker died before it said so.
    """
    last = nodes[-1:]
    gone = [node for node in last if not is_alive(ray, str(node["id"]))]
    if not gone and not isinstance(error, ray.exceptions.NodeDiedError):
        _died(cell, type(error).__name__)
        return
    name = f", {last[0]['name']}," if last else ""
    how = f"the node of the Ray cluster that it was on{name} is gone ({type(error).__name__})"
    left = "its folder has what it trained up to its last checkpoint, from which the same command goes on"
    write_json(cell.folder / "error.json", {"error": f"{how}; {left}"})


@contextmanager
def _cancelled(ray: Any, running: dict[Any, Cell]) -> Iterator[None]:
    """Interrupt what is still running when the block ends, and kill what has not ended after a while."""
    try:
        yield
    finally:
        for task in running:
            ray.cancel(task)
        if running:
            _, left = ray.wait(list(running), num_returns=len(running), timeout=GRACE_S)
            for task in left:
                ray.cancel(task, force=True)
