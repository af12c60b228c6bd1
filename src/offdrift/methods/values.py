"""The numbers of a method: every part with its values, and the paths that change them."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from typing import Any

from offdrift.methods.method import Method
from offdrift.methods.override import PLAIN, SINGLE


def by_path(row: Method) -> dict[str, Any]:
    """Every part by the path that `override` knows it by."""
    found: dict[str, Any] = {"objective": row.objective}
    for role, several in (("gate", row.correction.gates), ("weight", row.correction.weights)):
        for i, part in enumerate(several):
            found[role if len(several) == 1 else f"{role}.{i}"] = part
    return found | {role: part for role in SINGLE if (part := getattr(row, role)) is not None}


def parts(row: Method) -> list[dict[str, Any]]:
    """Every part with its role, its path, its formula and its values."""
    return [
        {
            "role": path.partition(".")[0],
            "path": path,
            "type": type(part).__name__,
            "formula": part.formula,
            "values": plain(part),
        }
        for path, part in by_path(row).items()
    ]


def settings(row: Method) -> dict[str, Any]:
    """Every value that `override` can change, by path.

    Example:
        >>> from offdrift.methods import method
        >>> settings(method("trm_max"))["gate.high"]
        0.05
    """
    given = {name: getattr(row, name) for name in PLAIN}
    for path, part in by_path(row).items():
        for field in fields(part):
            value = getattr(part, field.name)
            if field.init and not is_dataclass(value):
                given[f"{path}.{field.name}"] = plain(value)
    return given


def plain(x: Any) -> Any:
    """A part as nested dicts and lists of numbers and text, ready for JSON."""
    if is_dataclass(x) and not isinstance(x, type):
        return {f.name: plain(getattr(x, f.name)) for f in fields(x)}
    if isinstance(x, float) and not math.isfinite(x):
        return str(x)
    return [plain(v) for v in x] if isinstance(x, tuple) else x
