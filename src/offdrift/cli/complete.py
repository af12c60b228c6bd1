"""Completion of names by a shell: methods, pages, recipes, schedules, rules. Nothing here waits for torch.

`offdrift --install-completion` switches it on. A completion that fails offers nothing; the command itself says why.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable
from pathlib import Path

SHOW = Path(__file__).parents[1] / "show"


def starting(names: Iterable[str], incomplete: str) -> list[str]:
    """Return the names that start with what was typed so far.

    Example:
        >>> starting(["gspo", "grpo", "tis"], "g")
        ['gspo', 'grpo']
    """
    return [name for name in names if name.startswith(incomplete)]


def method_names(incomplete: str) -> list[str]:
    """Return the names of methods and systems that start so."""
    return starting(_rows(), incomplete)


def rows_of_methods(incomplete: str) -> list[str]:
    """Return the names of methods alone, for options that take no system."""
    return starting((name for name, row in _rows().items() if row["kind"] == "method"), incomplete)


def _rows() -> dict[str, dict[str, str]]:
    return json.loads((SHOW / "methods.json").read_text("utf-8"))["rows"]


def page_names(incomplete: str) -> list[str]:
    """Return the pages of the documentation that start so."""
    from offdrift.show.manual import pages

    return starting(pages(), incomplete)


def rule_names(incomplete: str) -> list[str]:
    """Return the names of diagnosis rules that start so."""
    with open(Path(__file__).parents[1] / "judge" / "rules.toml", "rb") as file:
        return starting(sorted(tomllib.load(file)["rules"]), incomplete)
