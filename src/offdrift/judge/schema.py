"""JSON Schema of a rules file, for editors: thresholds, readings, fixes and the keys of a rule."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_args

from offdrift.judge.findings import Confidence, Severity
from offdrift.judge.readings import READINGS
from offdrift.judge.rules import LETTERS, RELATIONS, Fix, Rule, Threshold, load_rules
from offdrift.methods import METHODS

DIALECT = "http://json-schema.org/draft-07/schema#"


def rules_schema() -> dict[str, Any]:
    """Return the JSON Schema of a file for `--rules`: every threshold with its unit and meaning, every rule by name.

    Example:
        >>> rules_schema()["properties"]["thresholds"]["properties"]["kl_large"]["description"]
        'nat; drift that has a cause Built in: 0.05.'
    """
    rules = load_rules()
    thresholds = {
        name: {
            "description": f"{'' if t.unit == '1' else t.unit + '; '}{t.about} Built in: {t.value:g}.",
            "anyOf": [{"type": "number"}, _table({key: {} for key in _names(Threshold)}, value={"type": "number"})],
        }
        for name, t in rules.thresholds.items()
    }
    of_rule = {name: _rule_key(name) for name in _names(Rule) if name != "when"}
    rule = _table(of_rule, all=_conditions(), any=_conditions())
    reference = {"$ref": "#/definitions/rule"}
    known = {name: {"description": row.symptom, "allOf": [reference]} for name, row in rules.rules.items()}
    texts = {key: {"type": "string"} for key in _names(Fix)}
    fix = _table(
        texts, method={"enum": sorted(METHODS)}, snippets={"type": "object", "additionalProperties": {"type": "string"}}
    )
    return {
        "$schema": DIALECT,
        "title": "Thresholds and rules for --rules",
        **_table(
            {
                "thresholds": _table(thresholds),
                "rules": {"type": "object", "properties": known, "additionalProperties": reference},
                "fixes": {"type": "object", "additionalProperties": fix},
            }
        ),
        "definitions": {
            "rule": rule,
            "condition": {
                "anyOf": [_comparison(), _table({"all": _conditions()}), _table({"any": _conditions()})],
            },
        },
    }


def _table(properties: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties | others, "additionalProperties": False}


def _names(kind: type) -> list[str]:
    return [f.name for f in fields(kind)]


def _conditions() -> dict[str, Any]:
    return {"type": "array", "minItems": 1, "items": {"$ref": "#/definitions/condition"}}


def _comparison() -> dict[str, Any]:
    number = {"anyOf": [{"type": "number"}, {"type": "string"}]}
    relations = {name: {"const": True} if name == "missing" else number for name in RELATIONS}
    return _table({"metric": {"enum": sorted(READINGS)}, **relations}) | {"required": ["metric"], "minProperties": 2}


def _rule_key(name: str) -> dict[str, Any]:
    """Schema of one key of a rule, by its type."""
    choices = {"severity": get_args(Severity), "confidence": get_args(Confidence), "letter": LETTERS}
    if name in choices:
        return {"enum": [*choices[name]]}
    if name in ("suppressed_by", "follows"):
        return {"type": "array", "items": {"type": "string"}}
    if name in ("raised_by", "excluded_by"):
        return _conditions() | {"minItems": 0}
    kind = next(f.type for f in fields(Rule) if f.name == name)
    return {"type": "boolean" if kind == "bool" else "string"}
