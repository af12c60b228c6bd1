"""Rules in the record of a run: what is stored, and by which rules a command judges that run later.

`run.json`, `sweep.json`, `audit.json`, `check.json` and a plan store

    "rules"     {"file": name of the user's file, "sha256": of its content, "text": the content}; empty texts for the
                built-in rules
    "limits"    every threshold by its name, so that another version of this library judges by the same numbers
    "judged_by" one sentence that says by which rules; pages and terminal show it

A run that is shown again is judged by these, unless `--rules` names a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from offdrift.errors import RecipeError
from offdrift.judge.findings import number
from offdrift.judge.rules import DIGITS, LARGEST, Rules, load_rules, parse_rules
from offdrift.texts import read_json

LEVELS_ABOVE = 4
"""How far above a log the `run.json` or `rules.json` of its run is looked for."""
FILES = ("run.json", "rules.json")
"""Records of a run: of this library's trainer, and of an adapter in another trainer."""


class Chosen(NamedTuple):
    """Rules, and where they are from."""

    rules: Rules
    words: str
    """One sentence for pages and terminal."""
    given: bool = False
    """Whether `--rules` chose them, in place of what the record holds."""


def stored_rules(document: Mapping[str, Any], where: str) -> Rules | None:
    """Return the rules that a record stores; None if it stores none, as those of earlier versions.

    Args:
        document: content of a record, of unknown origin.
        where: its path, for messages.

    Raises: `RecipeError` if the record is damaged: the digest is not that of the text, or the text is not a rules file.
    """
    about, limits = document.get("rules"), _numbers(document.get("limits"))
    if not isinstance(about, Mapping):
        return _without_file(limits) if limits else None
    file, text, digest = (value if isinstance(value := about.get(k), str) else "" for k in ("file", "text", "sha256"))
    if len(text) > LARGEST:
        raise RecipeError(f"{where}: rules.text has {len(text):,} characters, which no rules file needs; {WAY_OUT}")
    if not (file or text or digest):
        return _without_file(limits)
    rules = replace(parse_rules(text, f"{file}, stored in {where}", limits=limits), file=file or where)
    if digest != rules.sha256:
        raise RecipeError(
            f"{where}: rules.sha256 = {digest[:DIGITS]!r} is not that of rules.text ({rules.sha256[:DIGITS]!r}): one "
            f"of them was changed after the run; {WAY_OUT}"
        )
    return rules


def _without_file(limits: Mapping[str, float]) -> Rules:
    """The built-in rules with stored values of thresholds."""
    built_in = load_rules()
    same = all(built_in.limits.get(name, value) == value for name, value in limits.items())
    return built_in if same else replace(parse_rules("", "", limits=limits), file="")


WAY_OUT = "give the file with --rules"


def choose_rules(path: Path | None, document: Mapping[str, Any], where: str, *, record: str = "the run") -> Chosen:
    """Return the rules to judge a record by: those of `--rules`, else the stored ones, else the built-in ones.

    Args:
        path: of `--rules`; None without.
        document: the record; empty where there is none.
        where: its path, for messages.
        record: what it is the record of, for the sentence.

    Raises: `RecipeError` as `load_rules` and `stored_rules`. A damaged record does not stop `--rules`.
    """
    if path is None:
        stored = stored_rules(document, where)
        if stored is None:
            return Chosen(load_rules(), f"Judged by {load_rules().title}.")
        if stored is load_rules():
            return Chosen(stored, f"Judged by {stored.title}.")
        earlier = "" if stored.file else " of an earlier version"
        return Chosen(stored, f"Judged by {stored.title}{earlier}, as stored with {record}.")
    given = load_rules(path)
    words = f"Judged by {given.title}, given with --rules"
    with suppress(RecipeError):
        stored = stored_rules(document, where)
        if stored is not None and stored.sha256 != given.sha256:
            words += f"; {record} was started with {stored.title}"
    return Chosen(given, f"{words}.", given=True)


def record_above(path: str | Path) -> tuple[dict[str, Any], str]:
    """The record of the run that a log is of, and its path; empty where there is none.

    Looked for in the folder itself and those above it; what is not whole is passed over.
    """
    for folder in (Path(path), *Path(path).absolute().parents[:LEVELS_ABOVE]):
        for name in FILES:
            with suppress(OSError, ValueError):
                content = read_json(folder / name)
                if isinstance(content, dict) and ("rules" in content or "recipe" in content):
                    return content, str(folder / name)
    return {}, ""


def _numbers(limits: object) -> dict[str, float]:
    """The finite numbers of a stored table of thresholds; empty for what is no table."""
    if not isinstance(limits, Mapping):
        return {}
    return {name: value for name in limits if (value := number(limits, name)) is not None}
