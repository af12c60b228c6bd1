"""How the benchmarks here measure: time side by side, memory at the allocator, and on what machine."""

import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or the profiler prints its own life to stderr

import torch
from torch.profiler import ProfilerActivity, profile


def interleaved_medians(arms: dict[str, Callable[[], object]], *, repeats: int) -> dict[str, float]:
    """Median seconds of each arm in its own steady state, all arms in turn under the same weather.

    One call before each timed one is not counted: it takes back from the system the memory that the
    arm before it made the allocator give up, which is that arm's doing and not this one's.
    """
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(repeats):
        for name, run in arms.items():
            run()
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def peak_mib(run: Callable[[], object]) -> float:
    """The most MiB that torch's allocator held at once during the call, beyond what it held before.

    Taken from the allocator's own events, so that neither reused pages nor other threads blur it.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak / 2**20


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
    done = subprocess.run(git, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"
