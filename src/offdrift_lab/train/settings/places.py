"""Find files that a command line, a recipe or a sweep names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from offdrift.errors import RecipeError
from offdrift.texts import read_toml

PACKAGE = Path(__file__).parents[2]


def own_recipes() -> Path:
    """The folder of the recipes that come with the package: inside it when installed, beside `src` in a checkout."""
    inside = PACKAGE / "recipes"
    return inside if inside.is_dir() else PACKAGE.parents[1] / "recipes"


def recipe_file(path: Path) -> Path:
    """The recipe or sweep file that is meant by a path.

    A file that is there is meant as it is. One that is not there and has the name of one of the package's own, bare
    or in `recipes/`, with or without `.toml`, is that one: the commands of the documentation work wherever the
    package is installed. Any other path comes back as it is, for the reader to refuse.

    Example:
        >>> recipe_file(Path("tiny")).name, recipe_file(Path("mine/tiny.toml"))
        ('tiny.toml', PosixPath('mine/tiny.toml'))
    """
    user_copy = own_recipes() / f"{path.name.removesuffix('.toml')}.toml"
    return (
        user_copy if not path.is_file() and path.parent in (Path(), Path("recipes")) and user_copy.is_file() else path
    )


def read_settings(file: Path, kind: Literal["recipe", "sweep"]) -> dict[str, Any]:
    """Content of a recipe or a sweep file.

    Raises: `RecipeError` naming a file that cannot be read, with an example of one, or is not TOML.
    """
    try:
        return read_toml(file)
    except OSError as e:
        folder = own_recipes()
        example = (
            f"`offdrift train tiny` is an example, of those in {folder}"
            if kind == "recipe"
            else f"{folder / 'sweep.toml'} is an example"
        )
        raise RecipeError(f"cannot read {kind} {file}: {e.strerror}; {example}") from e
    except ValueError as e:
        raise RecipeError(f"{file} is not valid TOML: {e}") from e


def base_recipe(name: str, sweep: Path) -> tuple[Path | None, list[Path]]:
    """The recipe that a sweep file names: in the working folder, beside the sweep file, in recipes/, or the package's.

    Returns: the file, or None; and where it was looked for.
    """
    file = Path(name if name.endswith(".toml") else f"{name}.toml").expanduser()
    places = list(dict.fromkeys([file, sweep.parent / file, Path("recipes") / file, own_recipes() / file]))
    return next((place for place in places if place.is_file()), None), places


def found_beside(recipe: Path, value: str, *others: Path) -> str:
    """A task's, a reward's or a rules file as an absolute path: looked for in the working folder, then beside the
    recipe, then beside other files."""
    name, colon, function = (value, "", "") if value.endswith((".jsonl", ".toml")) else value.partition(".py:")
    name += ".py" if colon else ""
    if not name.endswith((".jsonl", ".toml", ".py")):
        return value
    path = Path(name).expanduser()
    places = [path.absolute(), *((file.parent / path).absolute() for file in (recipe, *others))]
    place = next((place for place in places if place.is_file()), places[0])
    return f"{place}:{function}" if colon else str(place)


def with_code_found(content: Mapping[str, Any], *folders: Path) -> dict[str, Any]:
    """A recipe's plain values in which methods in files have absolute paths, for every process and machine.

    Args:
        folders: where the files are looked for, in this order.

    Raises: `MethodError` for a file that is in none of them.
    """

    def with_files(table: Any, *keys: str) -> Any:
        from offdrift.methods.load import absolute

        if not isinstance(table, Mapping):
            return table
        named = {key: table[key] for key in keys if isinstance(table.get(key), str) and ":" in table[key]}
        return {**table, **{key: absolute(name, *folders) for key, name in named.items()}}

    values: dict[str, Any] = dict(with_files(content, "method"))
    if isinstance(arms := values.get("arms"), Mapping):
        values["arms"] = {name: with_files(arm, "method", "gates_of") for name, arm in arms.items()}
    if isinstance(optim := values.get("optim"), Mapping) and "length_guard" in optim:
        values["optim"] = {**optim, "length_guard": with_files(optim["length_guard"], "switch_to")}
    return values
