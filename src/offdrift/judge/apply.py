"""A proposed fix, applied: the recipe that a run's diagnosis asks for."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

from offdrift.errors import RecipeError
from offdrift.judge.findings import HALF
from offdrift.texts import parse_toml

OF_ARMS = ("old_policy", "replay", "fusion", "quantized")
"""Parts of a recipe that an arm may have of its own: where it has, that one counts."""


def apply_fix(recipe: Mapping[str, Any], snippet: str, arm: str) -> dict[str, Any]:
    """A recipe with the changes of a finding's snippet for this trainer (`Finding.snippets["offdrift"]`).

    `method` and `override` replace the arm's own, with the gates that it took from another row; tables are merged
    into the recipe's, and into the arm's where it has one of its own. A number with the comment "half of yours"
    becomes half of the recipe's.

    Args:
        recipe: a recipe's plain values, arms included; it is left as it is. Settings that are absent have their
            defaults, so take `Recipe.model_dump(by_alias=True)` where a fix may halve one.
        snippet: TOML.
        arm: name of the arm to repair.

    Returns: plain values for `check_recipe`, which refuses what does not fit together. Equal to `recipe` where every
    setting is as the fix wants it.

    Raises: `RecipeError` if there is no such arm, the snippet is no TOML, or a number to be halved is not there.

    Example:
        >>> apply_fix({"optim": {"lr": 4e-3}, "arms": {"a": {"method": "none"}}}, "method = 'grpo'\\n[optim]\\n"
        ...           "lr = 5e-5  # half of yours", "a")
        {'optim': {'lr': 0.002}, 'arms': {'a': {'method': 'grpo', 'override': {}, 'gates_of': None}}}
    """
    repaired = copy.deepcopy(dict(recipe))
    arms = repaired.get("arms") or {}
    if arm not in arms:
        raise RecipeError(f"arm {arm!r}: the recipe has {', '.join(arms) or 'none'}; name one of its arms")
    try:
        changes = parse_toml(snippet)
    except ValueError as e:
        raise RecipeError(f"the fix's snippet is not valid TOML: {e}; see src/offdrift/judge/fixes.toml") from e
    own = arms[arm]
    halved = set(re.findall(rf"^\s*(\w+)\s*=.*#.*{HALF}", snippet, re.MULTILINE))
    for value in changes.pop("arms", {}).values():
        changes |= value
    override = changes.pop("override", {})
    if (method := changes.pop("method", None)) is not None:
        own |= {"method": method, "override": override, "gates_of": None}
    elif override:
        own["override"] = {**own.get("override", {}), **override}
    for name, value in changes.items():
        place = own if name in OF_ARMS and own.get(name) is not None else repaired
        place[name] = _merged(place.get(name), value, halved, name)
    return repaired


def _merged(old: Any, new: Any, halved: set[str], path: str) -> Any:
    """The values of a table, replaced one by one; the name of a halved number is its last key."""
    if isinstance(new, dict):
        before = dict(old or {})
        return before | {key: _merged(before.get(key), value, halved, f"{path}.{key}") for key, value in new.items()}
    if path.rpartition(".")[2] not in halved:
        return new
    if not isinstance(old, (int, float)):
        raise RecipeError(f"{path} = {old!r}: the fix halves it; set it to a number in the recipe first")
    return old / 2
