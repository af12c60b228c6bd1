"""Audits and checks whose every text tries to become markup, script or a terminal's commands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def replaced(value: Any, change: Callable[[str], str]) -> Any:
    """The same content with every text in it changed; keys that code reads stay."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {k: replaced(v, change) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [replaced(v, change) for v in value]
    return value


def hostile(content: Mapping[str, Any], payload: str) -> dict[str, Any]:
    """The content with a payload behind every text, and as a key wherever a key is a name.

    Levels, statuses and what else is one of a few words stay: changed, they would hide what they
    are about.
    """
    changed = replaced(content, lambda words: words + payload)
    for a, b in zip(_findings(changed), _findings(content)):
        a |= {"severity": b["severity"], "snippets": {payload: f"snippet {payload}"}}
        a["evidence"] = [{"metric": payload, "value": 1.0, "relation": payload, "threshold": 2.0, "unit": payload, "source": payload}]  # fmt: skip
    if content.get("verdict"):
        changed["verdict"]["level"] = content["verdict"]["level"]
    for name in ("overall", "baseline", "counts", "certificate", "noise"):
        if isinstance(changed.get(name), dict):
            changed[name][payload] = 1.0
    if isinstance(changed.get("source"), dict):
        changed["source"] |= {"columns": {f"column {payload}": payload}, "paths": [f"/data/{payload}"]}
    for row in changed.get("steps") or []:
        row[payload] = 1.0
    for mine, its in zip(changed.get("factors") or [], content.get("factors") or []):
        mine["status"] = its["status"]
    for row in (changed.get("methods") or [])[::2]:
        row["why_not"] = None
    return changed


def _findings(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    return content.get("findings") or []
