"""Tables of an arm, which merge over the recipe's key by key, and values of the recipe that no arm reads.

    [replay]
    support = false
    arms.a.replay = { distill = 0.1 }        # a: support = false, distill = 0.1

Recipes are merged before they are checked, so that what is stored of a run are the settings that its arms had. Earlier
versions read an arm's table in place of the recipe's: `replaced` is that reading, for the runs that they stored.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from offdrift.errors import RecipeError
from offdrift_lab.train.features.fusion import MixtureSettings
from offdrift_lab.train.features.quantization import QuantizedSettings
from offdrift_lab.train.settings.rollout import ReplaySettings
from offdrift_lab.train.settings.sections import OldPolicySettings

TABLES: dict[str, type[BaseModel]] = {
    "old_policy": OldPolicySettings,
    "replay": ReplaySettings,
    "fusion": MixtureSettings,
    "quantized": QuantizedSettings,
}
"""Tables that a recipe and its arms may have, and what an arm may say in them."""
ABSENT = "absent"
"""What an arm says in place of a value that the recipe has and the arm shall not have."""
PIPELINE = {"pipeline.schedule": "schedule", "pipeline.rules": "rules"}
"""What of `[pipeline]` an arm may change, and the arm's name of it."""


def merged(content: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe's plain values with every arm's tables merged over the recipe's.

    Example:
        >>> arms = {"a": {"method": "none", "replay": {"distill": 0.1}}}
        >>> merged({"replay": {"support": False}, "arms": arms})["arms"]["a"]["replay"]
        {'support': False, 'distill': 0.1}
    """
    content = dict(content)
    arms = content.get("arms")
    if not isinstance(arms, Mapping):
        return content
    content["arms"] = {name: _with_tables(arm, content) for name, arm in arms.items()}
    return content


def _with_tables(arm: Any, recipe: Mapping[str, Any]) -> Any:
    if not isinstance(arm, Mapping):
        return arm
    tables = {}
    for name, kind in TABLES.items():
        if isinstance(arm.get(name), Mapping):
            of_recipe = recipe.get(name)
            keys = {key for f, field in kind.model_fields.items() for key in (f, field.alias or f)}
            below = {k: x for k, x in of_recipe.items() if k in keys} if isinstance(of_recipe, Mapping) else {}
            tables[name] = _over(below, arm[name], kind)
    return {**arm, **tables}


def _over(below: Mapping[str, Any], above: Mapping[str, Any], kind: type[BaseModel] | None) -> dict[str, Any]:
    """Values of two tables, of the second where both have one; tables in them likewise."""
    aliases = {} if kind is None else {field: info.alias for field, info in kind.model_fields.items() if info.alias}
    result = {aliases.get(key, key): value for key, value in below.items()}
    for key, value in above.items():
        key = aliases.get(key, key)
        if value == ABSENT:
            result.pop(key, None)
        elif isinstance(value, Mapping):
            before = result.get(key)
            result[key] = _over(before if isinstance(before, Mapping) else {}, value, None)
        else:
            result[key] = value
    return result


def replaced(content: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe's plain values as earlier versions read them: an arm's table in place of the recipe's."""
    content = dict(content)
    arms = content.get("arms")
    if not isinstance(arms, Mapping):
        return content
    try:
        content["arms"] = {
            name: arm
            | {
                table: kind.model_validate(arm[table]).model_dump(mode="json", by_alias=True)
                for table, kind in TABLES.items()
                if isinstance(arm.get(table), Mapping)
            }
            for name, arm in arms.items()
        }
    except (ValidationError, TypeError):  # the recipe's own check says what is wrong
        return content
    return content


def refuse_unread(
    content: Mapping[str, Any],
    source: str,
    *,
    changes: Collection[str],
    chosen: Collection[str],
    without_old: Collection[str],
) -> None:
    """Refuse values of the recipe's tables that no arm reads.

    Args:
        content: a recipe's plain values, before they are merged.
        source: what they are of.
        changes: dotted keys that the command line has set: one of the chosen arms has to read them.
        chosen: arms that are trained.
        without_old: arms whose method reads no old policy.

    Raises: `RecipeError` naming the value, the arms, and what to set in its place.
    """
    arms = content.get("arms")
    if not isinstance(arms, Mapping):
        return
    for path, own, value in _values(content):
        asked = any(f"{path}.".startswith(f"{key}.") or key.startswith(f"{path}.") for key in changes)
        readers = {name: arm for name, arm in arms.items() if name in chosen or not asked}
        reasons = {
            name: "has one of its own" if _has(arm, own) else "reads no old policy"
            for name, arm in readers.items()
            if _has(arm, own) or (path.startswith("old_policy.") and name in without_old)
        }
        if readers and reasons.keys() == readers.keys():
            setting = own if path == "pipeline.schedule" else path
            words = ", ".join(f"arms.{name} {reason}" for name, reason in reasons.items())
            raise RecipeError(
                f"{source}: {path} = {json.dumps(value)} does nothing, since no arm reads it: {words}; leave it out, "
                f"or set arms.NAME.{setting}"
            )


def _values(content: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Values of the recipe that an arm may have of its own: dotted path, path within an arm, and the value."""
    for table, kind in TABLES.items():
        aliases = {field: info.alias for field, info in kind.model_fields.items() if info.alias}
        keys = {*kind.model_fields, *aliases.values()}
        for path, value in _leaves(content.get(table), table):
            first = path.split(".")[1]
            if first in keys:
                yield path, path.replace(f".{first}", f".{aliases.get(first, first)}", 1), value
    pipeline = content.get("pipeline")
    for path, own in PIPELINE.items():
        key = path.removeprefix("pipeline.")
        if isinstance(pipeline, Mapping) and key in pipeline:
            for leaf, value in _leaves({own: pipeline[key]}, ""):
                yield f"pipeline{leaf}", leaf.removeprefix("."), value


def _leaves(table: Any, path: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(table, Mapping):
        return
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{path}.{key}")
        else:
            yield f"{path}.{key}", value


def _has(arm: Any, path: str) -> bool:
    """Whether an arm has a value of its own at a dotted path; keys of it may be dotted, too, as those of rules are."""
    written = {own.removeprefix("."): value for own, value in _leaves(arm, "")}
    written = {_canonical(own): value for own, value in written.items()}
    return any(path == own or path.startswith(f"{own}.") for own in written)


def _canonical(path: str) -> str:
    table, _, rest = path.partition(".")
    kind = TABLES.get(table)
    first, dot, more = rest.partition(".")
    if kind is None or first not in kind.model_fields:
        return path
    return f"{table}.{kind.model_fields[first].alias or first}{dot}{more}"
