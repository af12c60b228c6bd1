"""Backends kept to themselves: in this process, from the trainer; on the network, from everybody else.

An engine may seed the world, replace functions or compile unasked. Ray listens on every address of the machine.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from offdrift.errors import EngineError

LOOPBACK = "127.0.0.1"


@contextmanager
def preserve_host_state(*, compiling: bool = False) -> Iterator[None]:
    """Run a backend (which may compile, if `compiling`), and undo what it does to its host.

    Restored: Python's, numpy's and torch's random states (all devices), `torch.set_num_threads`
    itself (vLLM replaces it) and the number of threads.
    """
    python, numpy, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    set_threads, threads = torch.set_num_threads, torch.get_num_threads()
    try:
        eager = nullcontext() if compiling else torch.compiler.set_stance("force_eager")
        with warnings.catch_warnings(), eager:
            # What vLLM's own imports deprecate is nothing that a caller could mend.
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(torch_state)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)


@contextmanager
def sigterm_kept() -> Iterator[None]:
    """Keep a handler of SIGTERM, if there is one: Ray replaces it by one that leaves the interpreter at once.

    A signal that comes while Ray's handler stands goes to the one that is kept.
    """
    handler = signal.getsignal(signal.SIGTERM)
    kept = threading.current_thread() is threading.main_thread() and handler not in (None, signal.SIG_DFL)
    try:
        yield
    except SystemExit as left:
        if kept and callable(handler) and left.code == signal.SIGTERM:
            signal.signal(signal.SIGTERM, handler)
            handler(signal.SIGTERM, None)
        raise
    finally:
        if kept:
            signal.signal(signal.SIGTERM, handler)


def quiet(ray: Any) -> None:
    """Keep what Ray tells of its nodes off standard output, where a command's own results are, as with --json.

    `log_to_driver=False` keeps the lines of workers off alone.
    """
    ray._private.worker._worker_logs_enabled = False


def start_local_ray(**options: Any) -> None:
    """Start Ray with this process as its driver; all of its servers listen on loopback only.

    By itself Ray listens on every address of the machine, whatever address it is given.

    Args:
        options: of `ray.init`, such as `num_cpus`.

    Raises: `ImportError` without Ray; `EngineError` if it does not start, as where the machine is too busy for its
        time limits.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray's workers would yield (nice 15) to every other process, also to the trainer that waits for them.
    os.environ.setdefault("RAY_worker_niceness", "0")
    import ray
    from ray._private import ray_constants as constants

    # Ray replaces 127.0.0.1 by the machine's address where it allows clusters of several machines. It has read the
    # variable when it was imported, and the processes that it starts read it now.
    name = constants.ENABLE_RAY_CLUSTERS_ENV_VAR
    before = os.environ.get(name), constants.ENABLE_RAY_CLUSTER
    os.environ[name], constants.ENABLE_RAY_CLUSTER = "0", False
    quiet(ray)
    try:
        for tries_left in (1, 0):
            try:
                with sigterm_kept():
                    ray.init(
                        address="local",
                        include_dashboard=False,
                        log_to_driver=False,
                        _node_ip_address=LOOPBACK,
                        **options,
                    )
                break
            except Exception as e:  # a start that times out is a bare Exception, other failures are of a dozen classes
                ray.shutdown()
                if tries_left:  # a cluster that starts at the same moment may have taken the port that Ray chose
                    continue
                first = next(iter(str(e).strip().splitlines()), type(e).__name__)
                raise EngineError(
                    f"Ray did not start on this machine, twice ({first[:200]}); it gives up where the machine is "
                    "busy or has little memory or /dev/shm: end other work, or do without Ray (--jobs in place of "
                    "--ray, --workers in place of audit --ray, a recipe without [pipeline])"
                ) from e
    finally:
        variable, constants.ENABLE_RAY_CLUSTER = before
        if variable is None:
            del os.environ[name]
        else:
            os.environ[name] = variable
