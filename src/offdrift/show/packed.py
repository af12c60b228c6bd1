"""Long columns of numbers as a page holds them: every value, in a fraction of the space that their digits would take.

The doubles are rounded to as many binary digits as a reader can tell apart, their bytes are sorted by significance (all
first bytes, then all second ones, ...), so that like stands beside like, and the whole is compressed (zlib, RFC 1950)
and written in base64. Any browser undoes that with `DecompressionStream`, also on a page opened from a file.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

MANTISSA_BITS = 14
"""Binary digits kept of a value that is not whole: it moves by at most 1 in 32,768 of itself, or 4.5 decimal digits."""
DOUBLE_BITS = 52


def pack(values: Sequence[float | int | None]) -> dict[str, Any]:
    """A column of numbers, None where there is none.

    A column of whole numbers alone is kept exactly, as the differences of neighbors: the steps of a run take next to
    nothing. Of other columns whole numbers are exact, too, and the rest is within 2^-15 of itself.

    Args:
        values: finite numbers, below 2^53 where they are whole.

    Returns: `points`, their count; `sums`, whether the numbers are differences that must be added up; `packed`.

    Example:
        >>> column = pack([0.5, None, 3.0, 0.123456789])
        >>> column["points"], column["sums"], unpack(column)
        (4, False, [0.5, None, 3.0, 0.12345504760742188])
        >>> unpack(pack(range(1, 10_001))) == list(range(1, 10_001)), len(pack(range(10_000))["packed"]) < 200
        (True, True)
    """
    numbers = np.array([np.nan if v is None else v for v in values], dtype=np.float64)
    is_integer = numbers == np.round(numbers)
    sums = bool(is_integer.all()) and len(numbers) > 0
    if sums:
        numbers = np.diff(numbers, prepend=0.0)
    else:
        numbers = np.where(is_integer | np.isnan(numbers), numbers, _rounded(numbers))
    planes = numbers.astype("<f8").view(np.uint8).reshape(len(numbers), 8).T.tobytes()
    return {"points": len(numbers), "sums": sums, "packed": compressed(planes)}


def unpack(column: Mapping[str, Any]) -> list[float | None]:
    """The values of a column of `pack`, as a page's script reads them."""
    planes = zlib.decompress(base64.b64decode(column["packed"]))
    numbers = np.frombuffer(planes, np.uint8).reshape(8, column["points"]).T.copy().view("<f8").ravel()
    return [None if np.isnan(v) else float(v) for v in (np.cumsum(numbers) if column["sums"] else numbers)]


def compressed(data: bytes) -> str:
    """Bytes as base64 of their zlib stream."""
    return base64.b64encode(zlib.compress(data, 9)).decode("ascii")


def _rounded(numbers: np.ndarray) -> np.ndarray:
    """Doubles with `MANTISSA_BITS` binary digits behind the first, the nearest; a carry moves into the exponent."""
    drop = DOUBLE_BITS - MANTISSA_BITS
    bits = np.ascontiguousarray(numbers).view(np.uint64) + np.uint64(1 << (drop - 1))
    return (bits & ~np.uint64((1 << drop) - 1)).view(np.float64)
