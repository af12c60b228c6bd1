"""What is known of a run beside its log: what the user says, and what a run of ours says of itself."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from offdrift.judge import Context


def known(
    path: str,
    framework: str,
    *,
    method: str | None = None,
    temperature: float | None = None,
    mixture_of_experts: bool | None = None,
) -> Context:
    """The context of a diagnosis.

    Args:
        path: the log; the `run.json` of a run of this library is looked for in the folders above it.
        framework: whose configuration fixes are written in.
        method: row of `METHODS` that the run trains with; what is given here stands above `run.json`.
        temperature: of the rollouts.
        mixture_of_experts: whether the model routes tokens to experts.

    Example:
        >>> known("log.jsonl", "verl", temperature=0.7).temperature
        0.7
    """
    context = _from_run(Path(path), Context(framework=framework))
    given = {
        "method": method,
        "temperature": temperature,
        "mixture_of_experts": mixture_of_experts,
    }
    return replace(context, **{name: value for name, value in given.items() if value is not None})


def _from_run(path: Path, context: Context) -> Context:
    for folder in (path, *path.absolute().parents[:4]):
        head = _run_of(folder)
        if head is not None:
            break
    else:
        return context
    recipe = head.get("recipe", {})
    arms: dict[str, Any] = recipe.get("arms", {})
    mine = [arm for name, arm in arms.items() if name in path.absolute().parts]
    arm = mine[0] if mine else next(iter(arms.values())) if len(arms) == 1 else {}
    return replace(
        context,
        method=arm.get("method"),
        temperature=recipe.get("rollout", {}).get("temperature"),
        mixture_of_experts=head.get("model", {}).get("experts"),
    )


def _run_of(folder: Path) -> dict[str, Any] | None:
    with suppress(OSError, ValueError):
        held = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        return held if isinstance(held, dict) and "recipe" in held else None
    return None
