"""How the benchmarks here measure: time side by side, memory of the process, and on what machine."""

import ctypes
import multiprocessing
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeVar

import torch

Unit, Result = TypeVar("Unit"), TypeVar("Result")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
"""Parameters of glibc's `mallopt`."""
IS_MAPPED = 2
"""Flag in the word before a block of glibc's that has a mapping of its own."""

LIBC = ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None
if LIBC is not None:
    LIBC.malloc.restype, LIBC.malloc.argtypes, LIBC.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
    LIBC.mallopt(M_ARENA_MAX, 1)  # threads that start from now on share one heap


def interleaved_medians(
    arms: dict[str, Callable[[], object]], *, repeats: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Median seconds of each arm in its own steady state, all arms in turn under the same weather.

    One call before each timed one is not counted: it takes back from the system the memory that the
    arm before it made the allocator give up, which is that arm's doing and not this one's.
    """
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(repeats):
        for name, run in arms.items():
            run()
            start = clock()
            run()
            seconds[name].append(clock() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def peak_mib(run: Callable[[], object]) -> float:
    """The most MiB that the process held at once during the call, beyond what it held before.

    Counted by the kernel over all threads: torch's own counts are those of the calling thread. Meanwhile
    glibc maps every block of 64 KiB or more by itself, because what it had kept of freed memory is taken
    (untouched, so it counts nowhere). Smaller blocks count only where the heap grows. Right to half a MiB.
    A first call is not counted: what it leaves behind for good, such as caches, is no peak.

    Raises: `OSError` where there is no Linux with glibc.
    """
    status = Path("/proc/self/status")
    if LIBC is None:
        raise OSError("peak memory is read from /proc and glibc: run this benchmark on Linux")

    def mib(name: str) -> float:
        return int(status.read_text().partition(f"{name}:")[2].split()[0]) / 1024

    run()
    LIBC.mallopt(M_MMAP_THRESHOLD, 2**16)
    gaps = []
    try:
        for power in range(30, 15, -1):
            while True:
                gap = LIBC.malloc(2**power)
                if ctypes.c_size_t.from_address(gap - 8).value & IS_MAPPED:
                    LIBC.free(gap)
                    break
                gaps.append(gap)
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before = mib("VmRSS")
        run()
        return mib("VmHWM") - before
    finally:
        for gap in gaps:
            LIBC.free(gap)
        # What glibc arrives at by itself once large blocks were freed.
        LIBC.mallopt(M_MMAP_THRESHOLD, 2**25)
        LIBC.mallopt(M_TRIM_THRESHOLD, 2**26)


def in_processes(work: Callable[[Unit], Result], units: Iterable[Unit], jobs: int) -> Iterator[tuple[Unit, Result]]:
    """Every unit of work with its result, as they end: so many at a time, each in a process of one thread.

    With one job in this process, in order. `work` is a function of a module; what it raises ends the iteration.
    """
    if jobs == 1:
        for unit in units:
            yield unit, work(unit)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        waiting = {pool.submit(work, unit): unit for unit in units}
        try:
            for done in as_completed(waiting):
                yield waiting[done], done.result()
        finally:
            pool.shutdown(cancel_futures=True)


def machine(*packages: str) -> dict[str, str | int]:
    """What a number is worth depends on: processor, threads, versions, commit."""
    facts: dict[str, str | int] = {
        "processor": _processor(),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "simd": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "commit": _commit(),
    }
    for package in ("torch", "offdrift", *packages):
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = "absent"
    return facts


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _commit() -> str:
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(git, capture_output=True, text=True, check=False)
    except OSError:  # no git
        return "unknown"
    return done.stdout.strip() or "unknown"
