"""`override`: a method with single values changed, by dotted path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from offdrift.errors import MethodError
from offdrift.methods.method import Method

PLAIN = ("aggregate", "gate_scope", "advantage")
SINGLE = ("objective", "penalty", "anchor", "lr_scale")


def override(row: Method, changes: Mapping[str, Any]) -> Method:
    """The row with single values changed.

    Paths: `aggregate`, `advantage`, `gate_scope`, `objective.FIELD`, `penalty.FIELD`,
    `anchor.FIELD`, `lr_scale.FIELD`, and `weight.FIELD` or `gate.FIELD` (if there is one; else
    `gate.0.FIELD`, `gate.1.FIELD`, ...). Nested mappings are paths, too.

    Raises: `MethodError` naming the path and the fields there are.

    Example:
        >>> from offdrift.methods import method
        >>> override(method("trm_max"), {"gate.high": 0.1}).correction.gates[0].high
        0.1
    """
    for path, value in flattened(changes):
        row = _changed(row, path, value)
    return row


def flattened(changes: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of a nested mapping with its dotted path."""
    for key, value in changes.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _changed(row: Method, path: str, value: Any) -> Method:
    head, _, rest = path.partition(".")
    if path in PLAIN:
        return replace(row, **{path: value})
    if head in SINGLE and getattr(row, head) is not None:
        return replace(row, **{head: _with_field(getattr(row, head), rest, value, path)})
    several = {"gate": "gates", "weight": "weights"}.get(head)
    parts = list(getattr(row.correction, several)) if several else []
    if several and parts:
        i, name = _index(rest, len(parts), path, several)
        parts[i] = _with_field(parts[i], name, value, path)
        return replace(row, correction=replace(row.correction, **{several: tuple(parts)}))
    raise MethodError(
        f"{path!r} is not a part of this method ({row.describe()}); paths are "
        "aggregate, objective.FIELD, weight.FIELD, gate.FIELD, gate.0.FIELD, penalty.FIELD"
    )


def _index(rest: str, count: int, path: str, several: str) -> tuple[int, str]:
    """Which of several parts a path means, and which field of it."""
    index, _, name = rest.rpartition(".")
    one = several.removesuffix("s")
    if index == "" and count > 1:
        raise MethodError(f"{path!r}: this method has {count} {several}, say which: {one}.0.{name}, ...")  # fmt: skip
    i = int(index or 0) if (index or "0").isdigit() else count
    if i >= count:
        raise MethodError(f"{path!r}: {several} are numbered 0 to {count - 1}")
    return i, name


def _with_field(part: Any, name: str, value: Any, path: str) -> Any:
    assert is_dataclass(part)
    types = {f.name: str(f.type) for f in fields(part)}
    if name not in types:
        raise MethodError(f"{path!r}: {type(part).__name__} has no {name!r}, only {[*types]}")
    if "float" in types[name] and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    return replace(part, **{name: value})  # type: ignore[type-var]
