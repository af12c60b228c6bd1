"""`override`: a method with single values changed, by dotted path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from offdrift.errors import MethodError
from offdrift.methods.method import Method

PLAIN = ("aggregate", "normalizer", "gate_scope", "advantage")
SINGLE = ("objective", "penalty", "anchor", "lr_scale")


def override(row: Method, changes: Mapping[str, Any]) -> Method:
    """The row with single values changed.

    Paths: `aggregate`, `normalizer`, `advantage`, `gate_scope`, `objective.FIELD`, `penalty.FIELD`,
    `anchor.FIELD`, `lr_scale.FIELD`, and `weight.FIELD` or `gate.FIELD` (if there is one; else
    `gate.0.FIELD`, `gate.1.FIELD`, ...). Nested mappings are paths, too.

    Raises: `MethodError` naming the path and the fields there are.

    Example:
        >>> from offdrift.methods import method
        >>> override(method("trm_max"), {"gate.high": 0.1}).correction.gates[0].high
        0.1
    """
    by_part: dict[str, dict[str, Any]] = {}
    for path, value in flattened(changes):  # all changes of a part at once: they may need each other
        part, _, name = path.rpartition(".")
        by_part.setdefault(part, {})[name] = value
    several = {"gates": list(row.correction.gates), "weights": list(row.correction.weights)}
    for part, values in by_part.items():
        row = _changed(row, part, values, several)
    # At once: weights of one method may have to agree with each other.
    correction = replace(row.correction, **{k: tuple(parts) for k, parts in several.items()})
    return row if correction == row.correction else replace(row, correction=correction)


def flattened(changes: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of a nested mapping with its dotted path."""
    for key, value in changes.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _changed(row: Method, part: str, values: Mapping[str, Any], several: dict[str, list[Any]]) -> Method:
    """The row with fields of one part changed; a gate or weight is changed in `several` instead."""
    path = ".".join(x for x in (part, next(iter(values))) if x)
    if not part and set(values) <= set(PLAIN):
        return replace(row, **values)
    if part in SINGLE and getattr(row, part) is not None:
        return replace(row, **{part: _with_fields(getattr(row, part), values, path)})
    head, _, index = part.partition(".")
    if parts := several.get(f"{head}s"):
        count, name = len(parts), path.rpartition(".")[2]
        if index == "" and count > 1:
            raise MethodError(f"{path!r}: this method has {count} {head}s, say which: {head}.0.{name}, ...")
        i = int(index or 0) if (index or "0").isdigit() else count
        if i >= count:
            raise MethodError(f"{path!r}: {head}s are numbered 0 to {count - 1}")
        parts[i] = _with_fields(parts[i], values, path)
        return row
    raise MethodError(
        f"{path!r} is not a part of this method ({row.describe()}); paths are "
        "aggregate, objective.FIELD, weight.FIELD, gate.FIELD, gate.0.FIELD, penalty.FIELD"
    )


def _with_fields(part: Any, values: Mapping[str, Any], path: str) -> Any:
    assert is_dataclass(part)
    types = {f.name: str(f.type) for f in fields(part) if f.init}
    changes = dict(values)
    for name, value in values.items():
        if name not in types:
            raise MethodError(f"{path!r}: {type(part).__name__} has no {name!r}, only {[*types]}")
        if isinstance(value, int) and not isinstance(value, bool) and "float" in types[name]:
            changes[name] = float(value)  # a number without a decimal point where a float is meant
    return replace(part, **changes)  # type: ignore[type-var]
