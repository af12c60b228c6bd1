"""The numbers of a method: every part with its values, and the paths that change them."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from typing import Any

from offdrift.methods.method import Method
from offdrift.methods.override import PLAIN, SINGLE


def parts(row: Method) -> list[dict[str, Any]]:
    """Every part with its role, the path `override` knows it by, its formula and its values."""
    found = [(role, role, getattr(row, role)) for role in SINGLE if getattr(row, role) is not None]
    for role, several in (("gate", row.correction.gates), ("weight", row.correction.weights)):
        for i, part in enumerate(several):
            found.append((role, role if len(several) == 1 else f"{role}.{i}", part))
    order = ("objective", "gate", "weight", *SINGLE)
    return [
        {
            "role": role,
            "path": path,
            "type": type(part).__name__,
            "formula": part.formula,
            "values": plain(part),
        }
        for role, path, part in sorted(found, key=lambda x: order.index(x[0]))
    ]


def settings(row: Method) -> dict[str, Any]:
    """Every value that `override` can change, by path.

    Example:
        >>> from offdrift.methods import method
        >>> settings(method("trm_max"))["gate.high"]
        0.05
    """
    given = {name: getattr(row, name) for name in PLAIN}
    for part in parts(row):
        values = {k: v for k, v in part["values"].items() if not isinstance(v, dict)}
        given |= {f"{part['path']}.{name}": value for name, value in values.items()}
    return given


def plain(x: Any) -> Any:
    """A part as nested dicts and lists of numbers and text, ready for JSON."""
    if is_dataclass(x) and not isinstance(x, type):
        return {f.name: plain(getattr(x, f.name)) for f in fields(x)}
    if isinstance(x, float) and not math.isfinite(x):
        return str(x)
    return [plain(v) for v in x] if isinstance(x, tuple) else x
