"""Functions of `[tokens, vocab]` matrices, run a few rows at a time: compiled if that pays, else plain.

Compiled, a chunk goes through one kernel that torch generates and that keeps nothing but its results; plain, through
the ordinary operators, whose temporaries then stay in the cache. The numbers agree to rounding. Whole rows of logits in
float32 or half precision on a CPU have something faster, `compiled.exact`; this is for blocks of scores from hidden
states, float64, other devices, and CPUs where that cannot be built.
"""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from offdrift.numerics import asked

T = TypeVar("T")

RowFunction = Callable[..., tuple[Any, ...]]
"""Takes matching rows of several tensors, then what all rows share; gives one number per row, as many
times as it likes, or writes its rows into one of its arguments."""

COMPILE_FROM = 2**24
"""Entries of one input from which torch's compiler pays: 10 to 20 s, once per process and dtype."""

LIBRARY_FROM = 2**14
"""The same for the library of `compiled`, 2 to 5 s once per machine: one row of a language model's vocabulary."""

COMPILED_CHUNK = 2**21
"""Entries per compiled call: 8 MiB of each input, read three times, stay in a last-level cache."""

PLAIN_CHUNK = {"cpu": 2**16}
"""Entries per plain call: temporaries of 256 KiB are reused in the cache of a core."""

PLAIN_CHUNK_ELSEWHERE = 2**23
"""The same on accelerators, where a call must be large enough to hide its launches."""

THREADS_FROM = 2**19
"""Entries from which the plain way on a CPU gives each thread rows of its own: 1 ms of work for each."""

INLINE_ALL: dict[str, Any] = {"realize_opcount_threshold": 10_000, "realize_reads_threshold": 10_000}
"""Compiler options under which no intermediate matrix is stored, however often it is read."""

VECTOR_BITS = {"AVX512": 512, "AVX2": 256}
"""Width of the vectors that torch uses on this processor, by the name that torch gives it."""

_broken: set[str] = set()
"""Device types on which compiling has failed in this process."""


def way(device: torch.device, entries: int, compiled: bool | None) -> Literal["compiled", "plain"]:
    """Choose how to compute an input of so many entries, as far as is known before it is tried."""
    if not compiled and device.type in _broken:
        return "plain"
    large = entries >= COMPILE_FROM
    return "compiled" if _wanted(compiled, large=large) and (compiled or large) else "plain"


def pays(entries: int, compiled: bool | None) -> bool:
    """Whether the library of `compiled` is wanted for an input of so many entries."""
    return _wanted(compiled, large=entries >= LIBRARY_FROM)


def _wanted(compiled: bool | None, *, large: bool) -> bool:
    """Whether to compile: as the caller says, else the user, else if the input is large."""
    if os.environ.get("TORCH_COMPILE_DISABLE") == "1":
        return False
    return asked(unasked=large) if compiled is None else compiled


def by_rows(
    function: RowFunction,
    rows: Sequence[Tensor],
    *shared: Tensor,
    compiled: bool | None,
    plain: RowFunction | None = None,
) -> tuple[Tensor, ...]:
    """`function(*rows, *shared)` in memory that does not grow with the number of rows.

    Args:
        rows: tensors with one row per token; the widest decides how many make a chunk. One that the
            function writes to is written in place.
        shared: tensors that every chunk sees whole.
        compiled: None compiles large inputs where that works; True compiles and lets a failure
            through; False never compiles. `TORCH_COMPILE_DISABLE=1` means False.
        plain: what gives the same numbers faster where nothing is compiled; absent: the function.
    """
    widest = max(rows, key=Tensor.numel)
    if len(widest) == 1 and compiled is None:
        compiled = False  # see `run`

    def run(compiled: bool) -> tuple[Tensor, ...]:
        if compiled:
            # Never a chunk of one row, for which the compiler would make a kernel of its own.
            return _in_chunks(_kernel(function), COMPILED_CHUNK, rows, shared, at_least=2)
        chunk = PLAIN_CHUNK.get(widest.device.type, PLAIN_CHUNK_ELSEWHERE)
        threads = torch.get_num_threads() if widest.device.type == "cpu" else 1
        if threads > 1 and len(widest) > 1 and widest.numel() >= THREADS_FROM:
            return _in_threads(threads, plain or function, chunk, rows, shared)
        return _in_chunks(plain or function, chunk, rows, shared)

    return compiled_or_plain(run, widest.device, widest.numel(), compiled)


def compiled_or_plain(run: Callable[[bool], T], device: torch.device, entries: int, compiled: bool | None) -> T:
    """`run(True)` or, where compiling does not pay or turns out not to work, `run(False)`."""
    if way(device, entries, compiled) == "plain":
        return run(False)
    try:
        return run(True)
    except Exception:
        if compiled:
            raise
        # No compiler, or one that fails: whatever the reason, the plain way is right, only slower.
        _broken.add(device.type)
        return run(False)


@cache
def _kernel(function: RowFunction) -> RowFunction:
    """The compiled function, for any shape; compiles at its first call for each dtype."""
    # torch's cache of generated code does not know for which vectors it was generated, and compiles it
    # for those of the moment: a kernel made with AVX-512 skips half of its entries on AVX2, one made
    # with AVX2 writes beyond its end on AVX-512. The width as an option is part of the cache's key.
    width = VECTOR_BITS.get(torch.backends.cpu.get_cpu_capability())
    # The bare function: argument checkers that tests wrap around it cannot be compiled.
    bare = inspect.unwrap(function)
    options: dict[str, Any] = INLINE_ALL | {"cpp.simdlen": width}
    return torch.compile(bare, dynamic=True, fullgraph=True, options=options)


def _in_threads(
    threads: int, function: RowFunction, chunk: int, rows: Sequence[Tensor], shared: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """`_in_chunks` with a share of the rows for each thread, whose operators stay on that thread.

    Threads that share every operator wait for each other some thirty times per chunk.
    """
    threads = min(threads, len(rows[0]))
    started = threading.Barrier(threads + 1)
    outer = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_num_threads())

    def share(*piece: Tensor) -> tuple[Tensor, ...]:
        torch.get_num_threads()  # a thread's first question sets its number to the common one
        torch.set_num_threads(1)  # this thread's, and the common one until all have started
        started.wait()
        with torch.inference_mode(outer[1]), torch.set_grad_enabled(outer[0]):
            return _in_chunks(function, chunk, piece, shared)

    pieces = zip(*(x.detach().tensor_split(threads) for x in rows), strict=True)
    with ThreadPoolExecutor(threads) as pool:
        try:
            shares = [pool.submit(share, *piece) for piece in pieces]
            started.wait()
        except BaseException:
            started.abort()  # or those that have started would wait for ever
            raise
        finally:
            torch.set_num_threads(outer[2])
        parts = [one.result() for one in shares]
    return tuple(torch.cat(numbers) for numbers in zip(*parts, strict=True))


def _in_chunks(
    function: RowFunction, chunk: int, rows: Sequence[Tensor], shared: Sequence[Tensor], *, at_least: int = 1
) -> tuple[Tensor, ...]:
    """Chunks of between one and two times `chunk` entries, and `at_least` so many rows if there are."""
    n = len(rows[0])
    width = max(x[0].numel() if n else 1 for x in rows)
    pieces = max(1, n // max(at_least, chunk // width))
    chunks = zip(*(x.tensor_split(pieces) for x in rows), strict=True)
    # The compiler would specialize on whatever tensor a view is a view of: detach, and there is none.
    parts = [function(*(x.detach() for x in piece), *shared) for piece in chunks]
    return tuple(torch.cat(numbers) for numbers in zip(*parts, strict=True))
