"""Scatter of a shipped recipe's runs over seeds, as it was measured and stored beside the recipe.

A run is one seed. `recipes/NAME.spread.json`, which `benchmarks/first_run.py` writes, holds what the arms of the recipe
of that name ended at over several, on processors whose vectors sum in other orders.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from statistics import median
from typing import Any

from offdrift.show.json_access import mapping, number, rows, text
from offdrift.show.numbers import fixed
from offdrift.texts import read_json
from offdrift_lab.train.report.stored import Run
from offdrift_lab.train.settings.places import own_recipes

ENDING = ".spread.json"
ONE_SEED = "This is one seed. Held-out reward that the same recipe ended at with others:"
"""Stands above the lines of a spread."""


def spread(run: Run) -> dict[str, str]:
    """For each arm of a run of a shipped recipe, what it ended at over seeds; empty for other recipes and settings.

    Returns: by arm, as "over 8 seeds (AVX-512): median 0.133, from 0.004 to 0.570".
    """
    stored: Mapping[str, Any] = {}
    with suppress(OSError, ValueError):
        if run.name.isidentifier():
            stored = mapping(read_json(own_recipes() / f"{run.name}{ENDING}"))
    if not stored or not _holds(mapping(stored.get("settings")), run.recipe):
        return {}
    arms, methods = mapping(run.recipe.get("arms")), mapping(stored.get("methods"))
    words = {}
    for name, settings in arms.items():
        same = mapping(settings).get("method") == methods.get(name) and not mapping(mapping(settings).get("override"))
        measured = [_words(m, name) for m in rows(stored.get("measured"))] if same else []
        if any(measured):
            words[name] = "; ".join(filter(None, measured))
    return words


def _words(measured: Mapping[str, Any], arm: str) -> str:
    ends = [v for x in mapping(mapping(measured.get("arms")).get(arm)).values() if (v := number(x)) is not None]
    on = text(measured.get("vectors"))
    if len(ends) < 2:
        return f"1 seed ({on}): {fixed(ends[0])}" if ends else ""
    return f"over {len(ends)} seeds ({on}): median {fixed(median(ends))}, from {fixed(min(ends))} to {fixed(max(ends))}"


def _holds(wanted: Mapping[str, Any], recipe: Mapping[str, Any]) -> bool:
    """Whether a recipe has every one of these settings; tables are compared key by key."""
    return all(
        _holds(value, mapping(recipe.get(key))) if isinstance(value, Mapping) else recipe.get(key) == value
        for key, value in wanted.items()
    )
