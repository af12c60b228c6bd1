"""JSON Schema of recipes and sweep files, for editors: keys, types, choices, and what each setting is.

Editors that know TOML (Even Better TOML, Taplo, PyCharm) complete and check a file whose first line names its schema:

    #:schema recipe.schema.json

The schema knows keys and types. What contradicts another setting is found by `offdrift train` alone.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Mapping
from typing import Any

from offdrift.methods import METHODS
from offdrift_lab.schedules import SCHEDULES
from offdrift_lab.train.features.fusion import MixtureSettings
from offdrift_lab.train.features.quantization import QuantizedSettings
from offdrift_lab.train.settings.arm_tables import ABSENT
from offdrift_lab.train.settings.keys import STANDS_FOR_ARMS
from offdrift_lab.train.settings.recipe import ArmSettings, Recipe
from offdrift_lab.train.settings.rollout import ReplaySettings
from offdrift_lab.train.settings.sections import OldPolicySettings, PipelineSettings, Section
from offdrift_lab.train.sweep.sweep import Sweep

ARM_TABLES = {
    "old_policy": OldPolicySettings,
    "replay": ReplaySettings,
    "fusion": MixtureSettings,
    "quantized": QuantizedSettings,
}
"""Tables of an arm that are merged over the recipe's."""
DIALECT = "http://json-schema.org/draft-07/schema#"
"""Draft 7: what editors of TOML read."""


def recipe_schema() -> dict[str, Any]:
    """Return the JSON Schema of a recipe.

    Example:
        >>> schema = recipe_schema()
        >>> schema["properties"]["batches"]["description"]
        'Rollout batches to train on, per arm.'
    """
    schema = _schema(Recipe, "A recipe of `offdrift train`")
    fields = _definition(schema, "ArmSettings")["properties"]
    for table, settings in ARM_TABLES.items():
        name = f"{settings.__name__}OfArm"
        schema["definitions"][name] = _may_be_absent(_definition(schema, settings.__name__))
        about = {key: text for key, text in fields[table].items() if key == "description"}
        fields[table] = about | {"allOf": [{"$ref": f"#/definitions/{name}"}]}
    # One method at the top stands for an arm of its name: `arms` may then be missing.
    schema["properties"] |= {name: fields[name] for name in STANDS_FOR_ARMS}
    schema["required"] = [name for name in schema["required"] if name != "arms"]
    schema["anyOf"] = [{"required": ["arms"]}, {"required": ["method"]}]
    return schema


def _may_be_absent(table: Mapping[str, Any]) -> dict[str, Any]:
    """A table of an arm: "absent" takes a value of the recipe away; none must be there, since the recipe has it."""
    about = {name: entry.get("description", "") for name, entry in table["properties"].items()}
    fields = {
        name: {"description": about[name], "anyOf": [entry, {"const": ABSENT}]}
        for name, entry in table["properties"].items()
    }
    return {key: value for key, value in table.items() if key != "required"} | {"properties": fields}


def sweep_schema() -> dict[str, Any]:
    """Return the JSON Schema of a sweep file: `seeds` may be a number, values of settings are lists."""
    schema = _schema(Sweep, "A sweep file of `offdrift sweep`")
    seeds = schema["properties"]["seeds"]
    about = {name: seeds.pop(name) for name in ("description", "default", "title") if name in seeds}
    schema["properties"]["seeds"] = about | {"anyOf": [seeds, {"type": "integer", "minimum": 1}]}
    return schema


def _schema(model: type[Section], title: str) -> dict[str, Any]:
    content = model.model_json_schema(by_alias=True)
    content = {"$schema": DIALECT, **content, "title": title}
    # Settings are spread over the rooms of the trainer: each class by the name of its definition.
    rooms = [m for name, m in sys.modules.items() if name.startswith("offdrift_lab.train.") and m is not None]
    classes = (c for room in rooms for c in vars(room).values() if isinstance(c, type))
    models = {c.__name__: c for c in classes if issubclass(c, Section)}
    for name, table in {model.__name__: content, **content.get("$defs", {})}.items():
        if name in models:
            _describe(table, models[name])
    _choices(content)
    return _draft_7(content)


def _describe(table: dict[str, Any], model: type[Section]) -> None:
    """Add what stands below each field in the source as its description."""
    texts = attribute_docstrings(model)
    for name, field in model.model_fields.items():
        entry = table.get("properties", {}).get(field.alias or name)
        if entry is None:
            continue
        entry.pop("title", None)
        if name in texts:
            entry["description"] = texts[name]
            if "$ref" in entry:  # beside a reference, draft 7 ignores everything else
                entry["allOf"] = [{"$ref": entry.pop("$ref")}]


def attribute_docstrings(model: type[Section]) -> dict[str, str]:
    """Return the text below each field of a class and of the classes it is made from, on one line."""
    texts: dict[str, str] = {}
    for kind in reversed(model.__mro__):
        if not issubclass(kind, Section):
            continue
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        assert isinstance(node, ast.ClassDef)
        for line, below in zip(node.body, node.body[1:], strict=False):
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and isinstance(below, ast.Expr):
                texts[line.target.id] = " ".join(str(ast.literal_eval(below.value)).split())
    return texts


def _choices(content: dict[str, Any]) -> None:
    """Offer the names of methods and schedules, beside what code of the user's is called by."""
    places = {(ArmSettings.__name__, "method"): METHODS, (ArmSettings.__name__, "gates_of"): METHODS}
    places |= {(PipelineSettings.__name__, "schedule"): SCHEDULES, (ArmSettings.__name__, "schedule"): SCHEDULES}
    for (part, name), table in places.items():
        entry = _definition(content, part)["properties"].get(name)
        if entry is not None:
            kinds = [{"enum": sorted(table)}, {"type": "string", "pattern": "[:/.]"}]
            nothing = [kind for kind in entry.get("anyOf", ()) if kind == {"type": "null"}]
            kept = {key: value for key, value in entry.items() if key not in ("type", "anyOf")}
            content["$defs"][part]["properties"][name] = kept | {"anyOf": [*kinds, *nothing]}


def _definition(schema: Mapping[str, Any], part: str) -> dict[str, Any]:
    return schema.get("$defs", schema.get("definitions", {})).get(part, {"properties": {}})


def _draft_7(value: Any) -> Any:
    """A schema of the newest draft in the words of draft 7: `definitions`, and lists of fixed items."""
    if isinstance(value, list):
        return [_draft_7(x) for x in value]
    if isinstance(value, str):
        return value.replace("#/$defs/", "#/definitions/")
    if not isinstance(value, dict):
        return value
    names = {"$defs": "definitions", "prefixItems": "items"}
    return {names.get(key, key): _draft_7(x) for key, x in value.items()}
