"""Build the diagnosis context from command-line options and, for runs of this library, from `run.json`."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from offdrift.judge import Context

FOLDERS_ABOVE = 4
"""How far above a log its `run.json` is looked for."""


def run_context(
    path: str,
    framework: str,
    *,
    method: str | None = None,
    temperature: float | None = None,
    mixture_of_experts: bool | None = None,
) -> Context:
    """The context of a diagnosis. Options stand above what `run.json` says.

    Args:
        path: the log; the `run.json` of a run of this library is looked for in the folders above it.
        framework: whose configuration fixes are written in.
        method: row of `METHODS` that the run trains with.
        temperature: of the rollouts.
        mixture_of_experts: whether the model routes tokens to experts.

    Example:
        >>> run_context("log.jsonl", "verl", temperature=0.7).temperature
        0.7
    """
    options = {"method": method, "temperature": temperature, "mixture_of_experts": mixture_of_experts}
    stored = _from_run(Path(path)) | {k: v for k, v in options.items() if v is not None}
    return replace(Context(framework=framework), **stored)


def arms_of_run(path: str) -> int:
    """Arms of the run of this library that a log is from; 1 where there is none.

    Example:
        >>> arms_of_run("log.jsonl")
        1
    """
    return max(1, len(_run(Path(path)).get("recipe", {}).get("arms", {})))


def _run(path: Path) -> dict[str, Any]:
    """The nearest `run.json` above a log; empty where there is none."""
    for folder in (path, *path.absolute().parents[:FOLDERS_ABOVE]):
        with suppress(OSError, ValueError):
            content = json.loads((folder / "run.json").read_text(encoding="utf-8"))
            if isinstance(content, dict) and "recipe" in content:
                return content
    return {}


def _from_run(path: Path) -> dict[str, Any]:
    """What the nearest `run.json` says: fields of `Context`, nothing where there is no run."""
    run = _run(path)
    if not run:
        return {}
    recipe = run.get("recipe", {})
    arms: dict[str, Any] = recipe.get("arms", {})
    named = [arm for name, arm in arms.items() if name in path.absolute().parts]
    arm = named[0] if named else next(iter(arms.values())) if len(arms) == 1 else {}
    return {
        "method": arm.get("method"),
        "temperature": recipe.get("rollout", {}).get("temperature"),
        "mixture_of_experts": run.get("model", {}).get("experts"),
    }
