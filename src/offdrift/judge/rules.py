"""`Rules`: thresholds, rules and fixes, read from TOML. Data, so that a user can change any of it.

The built-in tables are `rules.toml` and `fixes.toml` beside this file. A user's file holds any of

    [thresholds]            kl_large = 0.1                  another value of a known threshold
    [rules.NAME]            severity = "watch"              a key of a known rule, changed
                            enabled = false                 a known rule, switched off
    [rules.NEW]             symptom = "..." ...             a rule of one's own
    [fixes.NAME]            do = "...", snippets.verl = ""  a fix of one's own, or a known one changed

A rule's condition compares readings, joined by `all` and `any`. A comparison with a missing reading
does not hold.

    {metric = "kl", above = "kl_large"}        a reading against a threshold, or a number
    {metric = "kl_same_ckpt", missing = true}  a reading that could not be made
    {any = [...]}, {all = [...]}               joined
"""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Collection, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

from offdrift.errors import RecipeError
from offdrift.judge.findings import Confidence, Evidence, Relation, Severity
from offdrift.judge.readings import READINGS
from offdrift.judge.readings.view import Reading
from offdrift.methods import METHODS
from offdrift.texts import read_toml

HERE = Path(__file__).parent
TABLES = ("thresholds", "rules", "fixes")
LETTERS = ("A", "A/B", "D", "B", "C", "E", "F", "")
"""Order of findings: the survey's order of fixes, which repairs the engines first."""


RELATIONS: dict[str, Relation] = {
    "below": "<",
    "at_most": "<=",
    "above": ">",
    "at_least": ">=",
    "is": "=",
    "missing": "missing",
}
HOLDS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "=": operator.eq}


@dataclass(frozen=True)
class Threshold:
    """A named number that readings are compared with."""

    value: float
    unit: str = "1"
    source: str = ""
    about: str = ""


@dataclass(frozen=True)
class Compared:
    """One reading against one threshold, or a test that it is missing."""

    reading: str
    relation: Relation
    threshold: str | float | None = None
    """A name of the thresholds, a number, or None for `missing`."""

    def holds(
        self, reading: Mapping[str, float], limits: Mapping[str, Threshold], source: str = ""
    ) -> tuple[Evidence, ...] | None:
        """The evidence that it holds, or None."""
        value = reading.get(self.reading)
        metrics = reading.metrics if isinstance(reading, Reading) else {}
        metric = metrics.get(self.reading, self.reading)
        if self.relation == "missing":
            return (Evidence(metric, None, "missing", None, source=source),) if value is None else None
        named = limits[self.threshold] if isinstance(self.threshold, str) else Threshold(float(self.threshold or 0.0))
        if value is None or not HOLDS[self.relation](value, named.value):
            return None
        return (Evidence(metric, value, self.relation, named.value, named.unit, named.source or source),)

    def describe(self, limits: Mapping[str, Threshold]) -> str:
        """The condition in one line, with the numbers that stand behind names."""
        if self.relation == "missing":
            return f"{self.reading} missing"
        value = limits[self.threshold].value if isinstance(self.threshold, str) else self.threshold
        return f"{self.reading} {self.relation} {value:g}"


@dataclass(frozen=True)
class Joined:
    """Several conditions: all of them, or any."""

    how: Literal["all", "any"]
    parts: tuple[Compared | Joined, ...]

    def holds(
        self, reading: Mapping[str, float], limits: Mapping[str, Threshold], source: str = ""
    ) -> tuple[Evidence, ...] | None:
        """The evidence of the parts that hold; None if too few do."""
        each = [part.holds(reading, limits, source) for part in self.parts]
        holding = [evidence for evidence in each if evidence is not None]
        if not holding or (self.how == "all" and len(holding) < len(each)):
            return None
        return tuple(dict.fromkeys(e for evidence in holding for e in evidence))

    def describe(self, limits: Mapping[str, Threshold]) -> str:
        """The condition in one line, with the numbers that stand behind names."""
        texts = [f"({p.describe(limits)})" if isinstance(p, Joined) else p.describe(limits) for p in self.parts]
        return f" {'and' if self.how == 'all' else 'or'} ".join(texts)


Condition = Compared | Joined


@dataclass(frozen=True)
class Fix:
    """The smallest change that helps, in words and as configuration."""

    do: str
    method: str | None = None
    """The row of `METHODS` that it turns on."""
    snippets: Mapping[str, str] = field(default_factory=dict)
    """By framework; `python` and `shell` for any."""


@dataclass(frozen=True)
class Rule:
    """One symptom, what shows it, what causes it, and what to do."""

    cause: str
    symptom: str
    explanation: str
    fix: str
    """A name of the fixes."""
    refuted_by: str
    when: Condition
    letter: str = ""
    severity: Severity = "watch"
    confidence: Confidence = "medium"
    source: str = ""
    suppressed_by: tuple[str, ...] = ()
    """Rules that explain the same numbers better."""
    follows: tuple[str, ...] = ()
    """Rules that name causes of what this one sees: it stands behind those of them that fired, however urgent it is."""
    raised_by: tuple[Condition, ...] = ()
    """Each that holds raises the confidence by one level."""
    transient: bool = False
    """Whether a single occurrence counts: a spike is over before it becomes typical."""
    whole: bool = False
    """Whether it is about the whole log: told without a step, and only if it held at every one."""
    lasting: bool = False
    """Whether what it is about does not come and go: of a whole run it is told if that shows it, or half of the steps
    do, and not for a few steps by which a heavy tail may pass for it."""
    data: bool = False
    """Whether it is about what the log lacks: told before what was concluded from the rest."""
    enabled: bool = True


@dataclass(frozen=True)
class Rules:
    """Everything the diagnosis knows."""

    thresholds: Mapping[str, Threshold]
    rules: Mapping[str, Rule]
    fixes: Mapping[str, Fix]

    @property
    def limits(self) -> dict[str, float]:
        """Thresholds as numbers."""
        return {name: t.value for name, t in self.thresholds.items()}


def load_rules(path: Path | None = None) -> Rules:
    """The built-in rules, with a user's TOML file, if there is one, merged over them.

    Raises: `RecipeError` naming the file, the table, the key and the value that is wrong, and what it could be.

    Example:
        >>> rules = load_rules()
        >>> rules.thresholds["kl_large"].value, rules.rules["token_drift"].letter
        (0.05, 'C')
    """
    return _built_in() if path is None else _parse(_merged(_tables(), _toml(path), str(path)), str(path))


@cache
def _built_in() -> Rules:
    return _parse(_tables(), "the built-in rules")


def _tables() -> dict[str, Any]:
    return {**_toml(HERE / "rules.toml"), **_toml(HERE / "fixes.toml")}


def _toml(path: Path) -> dict[str, Any]:
    try:
        return read_toml(path)
    except OSError as e:
        raise RecipeError(f"{path} cannot be read: {e.strerror or e}") from e
    except ValueError as e:
        raise RecipeError(f"{path} cannot be read as TOML: {e}") from e


def _merged(base: dict[str, Any], changes: dict[str, Any], file: str) -> dict[str, Any]:
    """The user's tables over the built-in ones, key by key; a rule's conditions are replaced whole."""
    _check_keys(file, changes, TABLES)
    merged = dict(base)
    for table in TABLES:
        rows = _of_kind(f"{file}: [{table}]", changes.get(table, {}), dict)
        if table == "thresholds":
            _check_keys(f"{file}: [thresholds]", rows, base[table])
        merged[table] = base[table] | {name: _over(base[table].get(name), row) for name, row in rows.items()}
    return merged


def _over(old: Any, new: Any) -> Any:
    """A row over another: a bare value replaces that of a threshold, snippets are joined, all else is replaced."""
    if not isinstance(old, dict):
        return new
    if not isinstance(new, dict):
        return {**old, "value": new}
    joined = {k: v for k, v in old.items() if not (k in ("all", "any") and {"all", "any"} & new.keys())} | new
    if isinstance(new.get("snippets"), dict):
        joined["snippets"] = {**old.get("snippets", {}), **new["snippets"]}
    return joined


def _parse(tables: Mapping[str, Any], file: str) -> Rules:
    thresholds = {n: _threshold(f"{file}: [thresholds] {n}", n, row) for n, row in tables["thresholds"].items()}
    fixes = {n: _fix(f"{file}: [fixes.{n}]", row) for n, row in tables["fixes"].items()}
    rules = {n: _rule(f"{file}: [rules.{n}]", row, thresholds, fixes) for n, row in tables["rules"].items()}
    for name, rule in rules.items():
        for key in ("suppressed_by", "follows"):
            for other in getattr(rule, key):
                _in_table(f"{file}: [rules.{name}] {key}", other, sorted(rules))
    order = {n: (not r.data, LETTERS.index(r.letter), i) for i, (n, r) in enumerate(rules.items())}
    ordered = {n: rules[n] for n in sorted(order, key=order.__getitem__) if rules[n].enabled}
    return Rules(MappingProxyType(thresholds), MappingProxyType(ordered), MappingProxyType(fixes))


def _threshold(where: str, name: str, row: Any) -> Threshold:
    row = row if isinstance(row, dict) else {"value": row}
    _check_keys(where, row, [f.name for f in fields(Threshold)])
    value = _of_kind(f"{where}.value", row.get("value"), (int, float))
    if name.startswith("window_") and not 1 <= value < math.inf:
        raise RecipeError(f"{where}.value = {value!r} must be at least 1: it is a number of steps")
    texts = {k: _of_kind(f"{where}.{k}", v, str) for k, v in row.items() if k != "value"}
    return Threshold(float(value), **texts)


def _fix(where: str, row: Any) -> Fix:
    row = _of_kind(where, row, dict)
    _check_keys(where, row, [f.name for f in fields(Fix)])
    if (method := row.get("method")) is not None:
        _in_table(f"{where} method", method, sorted(METHODS))
    snippets = _of_kind(f"{where} snippets", row.get("snippets", {}), dict)
    checked = {k: _of_kind(f"{where} snippets.{k}", v, str).strip() + "\n" for k, v in snippets.items()}
    return Fix(_of_kind(f"{where} do", row.get("do"), str), method, checked)


def _rule(where: str, row: Any, limits: Mapping[str, Threshold], fixes: Mapping[str, Fix]) -> Rule:
    row = dict(_of_kind(where, row, dict))
    _check_keys(where, row, [*(f.name for f in fields(Rule) if f.name != "when"), "all", "any"])
    conditions = {key: row.pop(key) for key in ("all", "any") if key in row}
    if not conditions:
        raise RecipeError(f"{where} has no condition; give it all = [...] or any = [...]")
    when = _joined(where, conditions, limits)
    for f in fields(Rule):
        if f.type in ("str", "bool") and (f.default is MISSING or f.name in row):
            _of_kind(f"{where} {f.name}", row.get(f.name), str if f.type == "str" else bool)
    _in_table(f"{where} fix", row["fix"], sorted(fixes))
    words = {"severity": get_args(Severity), "confidence": get_args(Confidence), "letter": LETTERS}
    for key, choices in words.items():
        if key in row and row[key] not in choices:
            raise RecipeError(f"{where} {key} = {row[key]!r} must be one of {', '.join(map(repr, choices))}")
    others: dict[str, Any] = {
        key: tuple(_of_kind(f"{where} {key}", s, str) for s in _of_kind(f"{where} {key}", row.pop(key, []), list))
        for key in ("suppressed_by", "follows")
    }
    raised = _of_kind(f"{where} raised_by", row.pop("raised_by", []), list)
    return Rule(
        **row,
        when=when,
        **others,
        raised_by=tuple(_condition(f"{where} raised_by", c, limits) for c in raised),
    )


def _joined(where: str, conditions: Mapping[str, Any], limits: Mapping[str, Threshold]) -> Condition:
    parts = []
    for how, entries in conditions.items():
        if not _of_kind(f"{where} {how}", entries, list):
            raise RecipeError(f"{where} {how} = [] never says anything; give it a condition")
        inner = tuple(_condition(f"{where} {how}", e, limits) for e in entries)
        parts.append(Joined("all" if how == "all" else "any", inner))
    return parts[0] if len(parts) == 1 else Joined("all", tuple(parts))


def _condition(where: str, entry: Any, limits: Mapping[str, Threshold]) -> Condition:
    entry = _of_kind(where, entry, dict)
    if entry.keys() & {"all", "any"}:
        _check_keys(where, entry, ("all", "any"))
        return _joined(where, entry, limits)
    _check_keys(where, entry, ("metric", *RELATIONS))
    metric = _in_table(f"{where} metric", entry.get("metric"), sorted(READINGS))
    relations = [key for key in entry if key != "metric"]
    if len(relations) != 1:
        raise RecipeError(f"{where}: {metric!r} needs exactly one of {', '.join(RELATIONS)}; it has {relations}")
    (relation,), value = relations, entry[relations[0]]
    if relation == "missing":
        if value is not True:
            raise RecipeError(f"{where}: missing = {value!r} must be true; to ask that {metric!r} is there, compare it")
        return Compared(metric, "missing")
    if isinstance(value, str):
        _in_table(f"{where} {metric} {relation}", value, sorted(limits))
    else:
        value = float(_of_kind(f"{where} {metric} {relation}", value, (int, float)))
    return Compared(metric, RELATIONS[relation], value)


def _suggestion(word: object, choices: Collection[str]) -> str:
    """The nearest of the choices as a question, and all of them."""
    near = difflib.get_close_matches(str(word), choices, n=1)
    return (f"did you mean {near[0]!r}? " if near else "") + f"Known: {', '.join(choices)}"


def _check_keys(where: str, row: Iterable[str], choices: Collection[str]) -> None:
    """Refuse a key that is not one of these."""
    for key in row:
        if key not in choices:
            raise RecipeError(f"{where}: unknown key {key!r}; {_suggestion(key, choices)}")


def _in_table(where: str, value: Any, choices: Collection[str]) -> str:
    """The value, if it is a name in a table."""
    if not isinstance(value, str) or value not in choices:
        raise RecipeError(f"{where} = {value!r} is not known; {_suggestion(value, choices)}")
    return value


def _of_kind(where: str, value: Any, expected: type | tuple[type, ...]) -> Any:
    """The value, if it is of this kind; a tuple of types stands for a number."""
    number = isinstance(expected, tuple)
    wrong = not isinstance(value, expected) or (number and isinstance(value, bool))
    if wrong or (number and value != value):
        kinds = {str: "text", dict: "a table", list: "a list", bool: "true or false"}
        word = "a number" if isinstance(expected, tuple) else kinds[expected]
        raise RecipeError(f"{where} = {value!r} must be {word}")
    return value
