"""Numbers as people read them: significant digits, shares, durations, colour steps."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping


def short(value: float | None) -> str:
    """A measured number to three significant digits, as a power of ten where that is shorter.

    Example:
        >>> short(0.71234), short(0.00291), short(0.00012), short(-3.0), short(0.0), short(None)
        ('0.712', '0.00291', '1.20e−4', '−3.00', '0', '–')
    """
    if value is None:
        return "–"
    if value == 0:
        return "0"
    if not 1e-3 <= abs(value) < 1e4:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{mantissa}e{int(exponent)}".replace("-", "−")
    text = f"{value:.0f}" if abs(value) >= 999.5 else f"{value:#.3g}".rstrip(".")
    return text.replace("-", "−")


def never_negative(value: float | None) -> str:
    """The estimate of a size that cannot be below 0: one that is says how large its noise is.

    Example:
        >>> never_negative(0.25), never_negative(-0.981)
        ('0.250', '≈ 0 (noise: −0.981)')
    """
    return f"≈ 0 (noise: {short(value)})" if value is not None and value < 0 else short(value)


def fixed(value: float | None) -> str:
    """A reward: three decimals, so that a column of them can be compared.

    Example:
        >>> fixed(0.5), fixed(-0.25), fixed(None)
        ('0.500', '−0.250', '–')
    """
    return "–" if value is None else f"{value:.3f}".replace("-", "−")


def percent(value: float | None) -> str:
    """A share as a percentage, never rounded up to a 100 % that it is not.

    Example:
        >>> percent(0.61234), percent(0.9999), percent(1.0), percent(None)
        ('61.2 %', '99.9 %', '100 %', '–')
    """
    if value is None:
        return "–"
    return "100 %" if value == 1 else f"{math.floor(value * 1000 + 1e-6) / 10:.1f} %"


def duration(seconds: float | None) -> str:
    """A time for people.

    Example:
        >>> duration(1.25), duration(48.2), duration(301.0), duration(7260.0), duration(None)
        ('1.2 s', '48 s', '5 min 1 s', '2 h 1 min', '–')
    """
    if seconds is None:
        return "–"
    total = round(seconds)
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return f"{total // 60} min {total % 60} s"
    return f"{total // 3600} h {total % 3600 // 60} min"


def size_in_words(count: int) -> str:
    """A number of bytes in the largest unit of which there is one.

    Example:
        >>> size_in_words(300), size_in_words(1536), size_in_words(5 * 2**30)
        ('300 bytes', '1.5 KiB', '5.0 GiB')
    """
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count} bytes"


def counted(count: int, thing: str) -> str:
    """A count with its noun.

    Example:
        >>> counted(1, "file"), counted(2400, "piece")
        ('1 file', '2,400 pieces')
    """
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


KL_EDGES = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
"""Where the color of a token changes (nats): half decades, the same on every page."""


def kl_labels() -> list[str]:
    """Values at which the color of a token changes, as text."""
    return [f"{edge:.0e}".replace("e-0", "e−") for edge in KL_EDGES]


def kl_level(kl: float | None) -> int:
    """Color step of a token, 0 (below the first edge, or unknown) to the number of edges.

    Example:
        >>> kl_level(0.9e-5), kl_level(1e-5), kl_level(0.1), kl_level(None)
        (0, 1, 9, 0)
    """
    return 0 if kl is None else bisect_right(KL_EDGES, kl)


def flatten(tree: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    """A nested mapping as dotted keys and texts.

    Example:
        >>> list(flatten({"optim": {"lr": 0.001}, "arms": ["none"], "seed": None}))
        [('optim.lr', '0.001'), ('arms', '["none"]'), ('seed', 'null')]
    """
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{path}.")
        else:
            yield path, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
