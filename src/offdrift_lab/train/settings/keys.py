"""Keys of recipes and sweep files, read off the sources of their parts: a typo is refused before PyTorch is loaded.

The parts themselves (`Recipe`, `Sweep`) need the method table, and so PyTorch. Their fields stand in the sources as
annotations, which need nothing. What this check passes, the parts still check in full.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from offdrift.errors import RecipeError
from offdrift.setting import parse_setting
from offdrift_lab.train.settings.places import read_settings

STANDS_FOR_ARMS = ("method", "override")
"""Keys of a recipe that stand for one arm: no fields."""
OF_RECIPES = ("set", "values")
"""Tables of a sweep file whose keys are a recipe's."""


class SettingKey(NamedTuple):
    """A field of a part."""

    part: str | None
    """Section that its table is; None for a plain value or a table of any keys."""
    several: bool
    """It holds a table of such parts, by names of the user's."""


@cache
def parts() -> dict[str, dict[str, SettingKey]]:
    """Fields of every part, by its name and by the key that stands for them in a file."""
    sources = [path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parents[1].rglob("*.py"))]
    trees = [ast.parse(source) for source in sources if re.search(r"^class \w+\(Section\)", source, re.MULTILINE)]
    classes = {node.name: node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}
    known: dict[str, dict[str, SettingKey]] = {}

    def fields(name: str) -> dict[str, SettingKey]:
        if name not in known:
            node, known[name] = classes[name], {}
            for base in node.bases:
                if isinstance(base, ast.Name) and base.id in classes:
                    known[name] |= fields(base.id)
            for line in node.body:
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                    known[name][_alias(line) or line.target.id] = _key(ast.unparse(line.annotation), classes)
        return known[name]

    return {name: fields(name) for name in classes}


def _alias(line: ast.AnnAssign) -> str | None:
    """The key of a field whose own name Python does not allow, or reserves."""
    words = line.value.keywords if isinstance(line.value, ast.Call) else []
    return next((str(ast.literal_eval(word.value)) for word in words if word.arg == "alias"), None)


def _key(annotation: str, classes: Mapping[str, ast.ClassDef]) -> SettingKey:
    part = next((word for word in re.findall(r"\w+", annotation) if word in classes), None)
    return SettingKey(part, annotation.startswith("dict["))


def check_keys(file: Path, changes: Sequence[str] = (), *, part: str = "Recipe", name: str = "a recipe") -> None:
    """Refuse keys that no part of a file of settings has.

    Args:
        file: TOML.
        changes: "dotted.key=value" pairs of `--set`, which belong to a recipe.
        part: the part that the file is.
        name: of that part, for the message.

    Raises: `RecipeError` naming the key, the file or `--set`, and the keys that there are; or a file that cannot be
        read, or is not TOML.
    """
    content = read_settings(file, "sweep" if part == "Sweep" else "recipe")
    if part == "Recipe":
        content = {key: value for key, value in content.items() if key not in STANDS_FOR_ARMS}
    _check(content, part, (), str(file), name)
    settings = [(f"--set {x}", x.partition("=")[0], parse_setting(x.partition("=")[2])) for x in changes if "=" in x]
    for table in OF_RECIPES if part == "Sweep" else ():
        given = content.get(table)
        settings += [(f"{file}, [{table}]", *pair) for pair in given.items()] if isinstance(given, dict) else []
    for source, path, value in settings:
        keys = [key.strip() for key in path.split(".")]
        if all(keys) and keys[0] not in STANDS_FOR_ARMS:
            _check(_nested(keys, value), "Recipe", (), source, "a recipe")


def _nested(keys: Sequence[str], value: Any) -> dict[str, Any]:
    """A value behind dotted keys as tables."""
    return {keys[0]: value if len(keys) == 1 else _nested(keys[1:], value)}


def _check(content: Mapping[str, Any], part: str, above: tuple[str, ...], source: str, name: str) -> None:
    fields = parts()[part]
    for key, value in content.items():
        if key not in fields:
            near = get_close_matches(key, fields, 1)
            hint = f", for instance {near[0]}" if near else ""
            raise RecipeError(
                f"{source}: unknown key {'.'.join((*above, key))!r}{hint}; "
                f"{'.'.join(above) or name} has {', '.join(fields)}"
            )
        inner, several = fields[key]
        if inner is None or not isinstance(value, dict):
            continue
        for own, table in value.items() if several else [("", value)]:
            if isinstance(table, dict):
                _check(table, inner, (*above, key, own) if several else (*above, key), source, name)
