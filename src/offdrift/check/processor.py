"""Detect native bfloat16 on this processor, and estimate how long a check takes here."""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence

import torch

from offdrift.check.factors.base import Cost, Factor

NATIVE = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
"""What torch calls the instructions of x86 processors that multiply bfloat16."""
SIZE, ROWS = 1024, 64
"""Of the product that is timed: about what a layer of a small model multiplies."""

TYPICAL: dict[Cost, float] = {"cheap": 10.0, "engine": 30.0, "compile": 120.0}
"""Seconds of a factor on SmolLM2-135M and one CPU core with AVX-512 and bfloat16."""
BASE = 90.0
"""Seconds of what every check does, on the same."""
PARAMETERS = 135e6
START = 5.0
"""Seconds of a factor at least, whatever the model's size."""


def native_bfloat16() -> bool:
    """Whether bfloat16 is multiplied by instructions of its own: GPUs, x86 with AVX-512 BF16 or AMX, and others."""
    if torch.cuda.is_available() or platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    return any(getattr(torch.cpu, name)() for name in NATIVE)


def slowdown() -> float:
    """Time of a bfloat16 matrix product over that of a float32 one; 1 where the processor has native bfloat16."""
    return 1.0 if native_bfloat16() else max(2.0, _seconds(torch.bfloat16) / _seconds(torch.float32))


def _seconds(dtype: torch.dtype) -> float:
    """Shortest of five products."""
    x, w = torch.ones(ROWS, SIZE, dtype=dtype), torch.ones(SIZE, SIZE, dtype=dtype)
    taken = []
    for _ in range(5):
        start = time.perf_counter()
        torch.nn.functional.linear(x, w)
        taken.append(time.perf_counter() - start)
    return min(taken)


def expected_minutes(factors: Sequence[Factor], parameters: int, slow: float, *, half: bool) -> str:
    """Time of a check in words, from what SmolLM2-135M takes: "3 min".

    Args:
        slow: how much longer half precision takes here (`slowdown`).
        half: whether an engine of the pair is in half precision; else only the factor that changes the dtype is.
    """
    scale = parameters / PARAMETERS
    seconds = max(START, BASE * scale) * (slow if half else 1.0)
    for factor in factors:
        slower = slow if half or "dtype" in factor.name or "head" in factor.name else 1.0
        seconds += max(START if factor.cost != "cheap" else 1.0, TYPICAL[factor.cost] * scale) * slower
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
