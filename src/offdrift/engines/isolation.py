"""Isolate the trainer from a backend in its process that seeds the world, replaces functions or compiles unasked."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import numpy as np
import torch


@contextmanager
def host_kept(*, compiling: bool = False) -> Iterator[None]:
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
