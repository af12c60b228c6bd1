"""`Rules`: thresholds, rules and fixes, read from TOML. Data, so that a user can change any of it.

The built-in tables are `rules.toml` and `fixes.toml` beside this file. A user's file holds any of

    [thresholds]            kl_large = 0.1                  another value of a known threshold
    [rules.NAME]            severity = "watch"              a key of a known rule, changed
                            enabled = false                 a known rule, switched off
    [rules.NEW]             symptom = "..." ...             a rule of one's own
    [fixes.NAME]            do = "...", snippets.verl = ""  a fix of one's own, or a known one changed

Texts name thresholds in braces, so that they say the number that decides: `{kl_large}` is its value, and
`{acceptance_low:%}` its value in percent.

A rule's condition compares readings, joined by `all` and `any`. A comparison with a missing reading
does not hold.

    {metric = "kl", above = "kl_large"}        a reading against a threshold, or a number
    {metric = "kl_same_ckpt", missing = true}  a reading that could not be made
    {any = [...]}, {all = [...]}               joined
"""

from __future__ import annotations

import difflib
import hashlib
import math
import operator
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache, cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, get_args

from offdrift.errors import RecipeError
from offdrift.judge.findings import Confidence, Evidence, Relation, Severity
from offdrift.judge.readings import READINGS, worded
from offdrift.judge.readings.view import Reading
from offdrift.methods import METHODS
from offdrift.texts import parse_toml, read_text

if TYPE_CHECKING:
    from offdrift.judge.track_record import Track

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
LARGEST = 1 << 20
"""Bytes that a rules file may have: the built-in tables have a fifth of it."""
DIGITS = 12
"""Digits of a digest that a page shows."""
NAMED = re.compile(r"\{([a-z][a-z0-9_]*)(:%)?\}")
"""A threshold in a text."""
STORED = "as the run stored it"
"""Source of a threshold that has another value in the record of a run than in this version."""
LATER = ("where", "before")
"""Stand in braces for what is known when the rule fires: the place of the drift, and the finding that came before."""
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
        limit, unit, named = None, "1", ""
        # Words only for what holds: a run asks hundreds of conditions at every step, and few of them do.
        if self.relation != "missing":
            if value is None:
                return None
            known = limits[self.threshold] if isinstance(self.threshold, str) else None
            limit = float(self.threshold or 0.0) if known is None else known.value  # type: ignore[arg-type]
            if not HOLDS[self.relation](value, limit):
                return None
            if known is not None:
                unit, named = known.unit, known.source
        elif value is not None:
            return None
        metrics = reading.metrics if isinstance(reading, Reading) else {}
        metric = metrics.get(self.reading, self.reading)
        words, scale = worded(self.reading, metric)
        what = "" if words == metric else words
        if value is None:
            return (Evidence(metric, None, "missing", None, source=source, what=what),)
        source = named or source
        return (Evidence(metric, value, self.relation, limit, unit=unit, source=source, what=what, scale=scale),)

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
        holding = []
        for part in self.parts:
            evidence = part.holds(reading, limits, source)
            if evidence is not None:
                holding.append(evidence)
            elif self.how == "all":
                return None
        if not holding:
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
    decides: str = ""
    """The measurement that tells this cause from the others that it leaves open."""
    fact: bool = False
    """Whether arithmetic proves it: what else is certain is not, and has no high confidence without a measurement."""
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
    excluded_by: tuple[Condition, ...] = ()
    """Each that holds rules the cause out, as a setting that the log records: the rule then says nothing."""
    transient: bool = False
    """Whether a single occurrence counts: a spike is over before it becomes typical."""
    whole: bool = False
    """Whether it is about the whole log: told without a step, and only if it held at every one."""
    lasting: bool = False
    """Whether what it is about does not come and go: of a whole run it is told if that shows it, or its part since a
    change at one step, or half of the steps do, and not for a few steps by which a heavy tail may pass for it. Of
    metrics alone, it is told while it shows, too."""
    data: bool = False
    """Whether it is about what the log lacks: told before what was concluded from the rest."""
    enabled: bool = True


@dataclass(frozen=True)
class Rules:
    """Everything the diagnosis knows."""

    thresholds: Mapping[str, Threshold]
    rules: Mapping[str, Rule]
    fixes: Mapping[str, Fix]
    file: str = ""
    """The user's file that was merged over the built-in tables; "" for these alone."""
    text: str = ""
    """Content of that file."""
    unchanged: frozenset[str] = frozenset()
    """Built-in rules whose condition and severity nobody changed."""

    @cached_property
    def tracks(self) -> Mapping[str, Track]:
        """Outcomes of runs in which an unchanged rule was told, by its name; read for the first finding."""
        from offdrift.judge.track_record import tracks

        return MappingProxyType({name: track for name, track in tracks().items() if name in self.unchanged})

    @property
    def limits(self) -> dict[str, float]:
        """Thresholds as numbers."""
        return {name: t.value for name, t in self.thresholds.items()}

    @property
    def sha256(self) -> str:
        """Digest of the user's file as UTF-8, in hexadecimal; "" for the built-in rules."""
        return hashlib.sha256(self.text.encode()).hexdigest() if self.file else ""

    @property
    def title(self) -> str:
        """The rules in words: the name of the user's file and the first digits of its digest.

        Example:
            >>> load_rules().title
            'the built-in rules'
        """
        return f"{Path(self.file).name} (sha256 {self.sha256[:DIGITS]})" if self.file else "the built-in rules"

    def as_record(self, words: str = "") -> dict[str, Any]:
        """The entries of a record: `rules`, `limits` and `judged_by`; see `offdrift.judge.rules_record`.

        Args:
            words: the sentence; default: the title.

        Example:
            >>> load_rules().as_record()["rules"]
            {'file': '', 'sha256': '', 'text': ''}
        """
        about = {"file": self.file, "sha256": self.sha256, "text": self.text}
        return {"rules": about, "limits": self.limits, "judged_by": words or f"Judged by {self.title}."}


def load_rules(path: Path | str | None = None) -> Rules:
    """The built-in rules, with a user's TOML file, if there is one, merged over them.

    Raises: `RecipeError` naming the file, the table, the key and the value that is wrong, and what it could be.

    Example:
        >>> rules = load_rules()
        >>> rules.thresholds["kl_large"].value, rules.rules["token_drift"].letter
        (0.05, 'C')
    """
    if path is None:
        return _built_in()
    try:
        text = read_text(Path(path), limit=LARGEST)
    except OSError as e:
        raise RecipeError(f"{path} cannot be read: {e.strerror or e}") from e
    except ValueError as e:
        raise RecipeError(f"{path} cannot be read as TOML: {e}") from e
    return parse_rules(text, str(path))


def parse_rules(text: str, file: str, *, limits: Mapping[str, float] = MappingProxyType({})) -> Rules:
    """The built-in rules with the text of a user's file merged over them.

    Args:
        file: its name, for messages.
        limits: values of thresholds that stand in place of the built-in ones, below those of the file: as a run that
            an earlier version made has stored them. Names that are not known are passed over.

    Raises: `RecipeError` as `load_rules`, also for a text that is not TOML.
    """
    tables = _tables()
    earlier = {
        name: {"value": value, "source": STORED}
        for name, value in limits.items()
        if name in tables["thresholds"] and value != tables["thresholds"][name]["value"]
    }
    tables = _merged(tables, {"thresholds": earlier}, file)
    try:
        changes = parse_toml(text)
    except ValueError as e:
        raise RecipeError(f"{file} cannot be read as TOML: {e}") from e
    rules, built_in = _parse(_merged(tables, changes, file), file), _built_in()
    same = frozenset(name for name in built_in.rules if _judges_alike(name, rules, built_in))
    return replace(rules, file=file, text=text, unchanged=same)


def _judges_alike(name: str, one: Rules, other: Rules) -> bool:
    """Whether a rule fires on the same readings in both, at the same severity."""
    if name not in one.rules or one.rules[name].severity != other.rules[name].severity:
        return False
    return len({_conditions(rules.rules[name], rules.thresholds) for rules in (one, other)}) == 1


def _conditions(rule: Rule, limits: Mapping[str, Threshold]) -> tuple[str, ...]:
    """All conditions on which a rule fires, with their numbers."""
    return (rule.when.describe(limits), *(c.describe(limits) for c in rule.excluded_by), *rule.suppressed_by)


@cache
def _built_in() -> Rules:
    rules = _parse(_tables(), "the built-in rules")
    return replace(rules, unchanged=frozenset(rules.rules))


def _tables() -> dict[str, Any]:
    files = (HERE / "rules.toml", HERE / "fixes.toml")
    return {name: table for file in files for name, table in parse_toml(read_text(file)).items()}


def _merged(base: dict[str, Any], changes: dict[str, Any], file: str) -> dict[str, Any]:
    """The user's tables over the built-in ones, key by key; a rule's conditions are replaced whole."""
    _check_keys(file, changes, TABLES)
    merged = dict(base)
    for table in TABLES:
        rows = _of_kind(f"{file}: [{table}]", changes.get(table, {}), dict)
        if table == "thresholds":
            _check_keys(f"{file}: [thresholds]", rows, base[table])
        merged[table] = base[table] | {name: _over(base[table].get(name), row, file) for name, row in rows.items()}
    return merged


def _over(old: Any, new: Any, file: str) -> Any:
    """A row over another: a bare value replaces that of a threshold, snippets are joined, all else is replaced.

    A threshold that another file changes has that file as its source, unless it names one.
    """
    if not isinstance(old, dict):
        return new
    if not isinstance(new, dict):
        return {**old, "value": new, "source": file}
    if "value" in new and "source" not in new:
        new = {**new, "source": file}
    joined = {k: v for k, v in old.items() if not (k in ("all", "any") and {"all", "any"} & new.keys())} | new
    if isinstance(new.get("snippets"), dict):
        joined["snippets"] = {**old.get("snippets", {}), **new["snippets"]}
    return joined


def _parse(tables: Mapping[str, Any], file: str) -> Rules:
    thresholds = {n: _threshold(f"{file}: [thresholds] {n}", n, row) for n, row in tables["thresholds"].items()}
    fixes = {n: _fix(f"{file}: [fixes.{n}]", row, thresholds) for n, row in tables["fixes"].items()}
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


def _fix(where: str, row: Any, limits: Mapping[str, Threshold]) -> Fix:
    row = _of_kind(where, row, dict)
    _check_keys(where, row, [f.name for f in fields(Fix)])
    if (method := row.get("method")) is not None:
        _in_table(f"{where} method", method, sorted(METHODS))
    snippets = _of_kind(f"{where} snippets", row.get("snippets", {}), dict)
    checked = {k: _of_kind(f"{where} snippets.{k}", v, str).strip() + "\n" for k, v in snippets.items()}
    do = _of_kind(f"{where} do", row.get("do"), str)
    return Fix(_with_limits(f"{where} do", do, limits), method, checked)


def _rule(where: str, row: Any, limits: Mapping[str, Threshold], fixes: Mapping[str, Fix]) -> Rule:
    row = dict(_of_kind(where, row, dict))
    _check_keys(where, row, [*(f.name for f in fields(Rule) if f.name != "when"), "all", "any"])
    conditions = {key: row.pop(key) for key in ("all", "any") if key in row}
    if not conditions:
        raise RecipeError(f"{where} has no condition; give it all = [...] or any = [...]")
    when = _joined(where, conditions, limits)
    for f in fields(Rule):
        if f.type in ("str", "bool") and (f.default is MISSING or f.name in row):
            value = _of_kind(f"{where} {f.name}", row.get(f.name), str if f.type == "str" else bool)
            if f.type == "str" and value:
                row[f.name] = _with_limits(f"{where} {f.name}", value, limits)
    _in_table(f"{where} fix", row["fix"], sorted(fixes))
    words = {"severity": get_args(Severity), "confidence": get_args(Confidence), "letter": LETTERS}
    for key, choices in words.items():
        if key in row and row[key] not in choices:
            raise RecipeError(f"{where} {key} = {row[key]!r} must be one of {', '.join(map(repr, choices))}")
    others: dict[str, Any] = {
        key: tuple(_of_kind(f"{where} {key}", s, str) for s in _of_kind(f"{where} {key}", row.pop(key, []), list))
        for key in ("suppressed_by", "follows")
    }
    for key in ("raised_by", "excluded_by"):
        entries = _of_kind(f"{where} {key}", row.pop(key, []), list)
        others[key] = tuple(_condition(f"{where} {key}", c, limits) for c in entries)
    return Rule(**row, when=when, **others)


def _with_limits(where: str, text: str, limits: Mapping[str, Threshold]) -> str:
    """A text with the values of the thresholds that it names in braces."""

    def value(match: re.Match[str]) -> str:
        if match[1] in LATER:
            return match[0]
        number = limits[_in_table(f"{where}: threshold in braces", match[1], sorted(limits))].value
        return f"{100 * number:g} %" if match[2] else f"{number:g}"

    return NAMED.sub(value, text)


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
