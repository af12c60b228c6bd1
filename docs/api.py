"""What users build on: the names that a new version may add to and does not take away without saying so.

    python docs/api.py               # writes docs/api.json; refuses if a name would disappear
    python docs/api.py --breaking    # lets names go; CHANGELOG.md must then say what to use instead

`make docs` runs the first. Everything that is not in the list may change between any two versions.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel
from typer.main import get_command

import offdrift
from offdrift.cli import COMMANDS, application
from offdrift.cli.exit_codes import ExitCode
from offdrift.judge import load_rules
from offdrift.methods import METHODS
from offdrift.records.schema import ARGUMENTS, FIELDS
from offdrift.stats import METRICS
from offdrift_lab.schedules import SCHEDULES
from offdrift_lab.train.settings.recipe import Recipe
from offdrift_lab.train.sweep.sweep import Sweep

ROOT = Path(__file__).parents[1]
FILE = ROOT / "docs" / "api.json"
ROOMS = (
    *(
        f"offdrift.{room}"
        for room in ["advantages", "certificate", "correction", "engines", "judge", "methods", "objectives", "records", "stats"]
    ),
    "offdrift_lab.exact",
    "offdrift_lab.schedules",
)  # fmt: skip
"""Packages whose own names are for users."""


def api() -> dict[str, list[str]]:
    """Every promised name by kind, sorted; functions with their parameters."""
    rules = load_rules()
    kinds: dict[str, Any] = {
        "offdrift": [called(offdrift, name) for name in dir(offdrift) if is_public(offdrift, name)],
        **{room: exported(room) for room in ROOMS},
        "imported by path in the docs": imported_in_docs(),
        "commands": [
            f"{name} {option}" for name in COMMANDS for option in options(get_command(application(name)), name)
        ],
        "exit statuses": [f"{code.value} {code.name}" for code in ExitCode],
        "methods": METHODS,
        "schedules": SCHEDULES,
        "metrics": METRICS,
        "rules": rules.rules,
        "log columns": [f.column for f in FIELDS if f.column],
        "record arguments": [f.name for f in ARGUMENTS],
        "recipe settings": fields(Recipe),
        "sweep settings": fields(Sweep),
    }
    return {kind: sorted({*names}) for kind, names in kinds.items()}


def is_public(module: Any, name: str) -> bool:
    return not name.startswith("_") and not inspect.ismodule(getattr(module, name))


def called(module: Any, name: str) -> str:
    """A name; of a function, with its parameters."""
    value = getattr(module, name)
    return f"{name}({', '.join(inspect.signature(value).parameters)})" if inspect.isfunction(value) else name


def exported(path: str) -> list[str]:
    """Names that a package defines or hands on from its own modules."""
    module = importlib.import_module(path)
    names = [name for name in dir(module) if is_public(module, name)]
    return [name for name in names if str(getattr(getattr(module, name), "__module__", path)).startswith("offdrift")]


def imported_in_docs() -> list[str]:
    """Names that examples of the documentation import by path."""
    files = [
        ROOT / "README.md",
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("docs/integrations/*.md"),
        *ROOT.glob("examples/*.py"),
    ]
    lines = [
        m
        for f in files
        for m in re.findall(r"^\s*from (offdrift(?:_lab)?\.[\w.]+) import ([\w, ]+)$", f.read_text("utf-8"), re.M)
    ]
    return [f"{module}.{name.split()[0]}" for module, names in lines for name in names.split(",")]


def options(command: Any, name: str) -> Iterator[str]:
    """Options and arguments of a command, and of those below it."""
    for sub, below in getattr(command, "commands", {}).items():
        if sub == name or command.name == name:
            yield from (f"{sub} {option}".removeprefix(f"{name} ") for option in options(below, sub))
    if not hasattr(command, "commands"):
        for parameter in command.params:
            yield max(parameter.opts, key=len) if parameter.param_type_name == "option" else parameter.name.upper()


def fields(model: type[BaseModel], before: str = "") -> list[str]:
    """Settings of a recipe as dotted keys."""
    names = []
    for name, field in model.model_fields.items():
        key = f"{before}{field.alias or name}"
        names.append(key)
        kinds = [field.annotation, *get_args(field.annotation)]
        for kind in kinds:
            if inspect.isclass(kind) and issubclass(kind, BaseModel):
                middle = ".NAME." if field.annotation is not kind and "dict" in str(field.annotation) else "."
                names += fields(kind, f"{key}{middle}")
    return names


def gone(old: dict[str, list[str]], new: dict[str, list[str]]) -> list[str]:
    """What was promised and is no longer there; a parameter that was added to the end of a function is no loss."""

    def parts(name: str) -> tuple[str, set[str]]:
        head, _, parameters = name.partition("(")
        return head, {*parameters.rstrip(")").split(", ")} - {""}

    def kept(kind: str, name: str) -> bool:
        head, wanted = parts(name)
        return any(other == head and wanted <= there for other, there in map(parts, new.get(kind, ())))

    return [f"{kind}: {name}" for kind, names in old.items() for name in names if not kept(kind, name)]


def main(*words: str) -> None:
    """Write the list. Raises: `SystemExit` naming what would disappear, without --breaking."""
    new = api()
    lost = gone(json.loads(FILE.read_text("utf-8")), new) if FILE.exists() else []
    if lost and "--breaking" not in words:
        sys.exit(
            "these names would disappear:\n  "
            + "\n  ".join(lost)
            + "\nkeep them (an old name may lead to the new one), "
            "or run `python docs/api.py --breaking` and say in CHANGELOG.md under Breaking what to use instead"
        )
    FILE.write_text(json.dumps(new, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(FILE)


if __name__ == "__main__":
    main(*sys.argv[1:])
