"""Completion of names by a shell: recipes, sweeps and schedules of the package. Nothing here waits for torch."""

from __future__ import annotations

from pathlib import Path

from offdrift.cli.complete import starting
from offdrift_lab.schedules.table import SCHEDULES
from offdrift_lab.train.settings.places import own_recipes


def schedule_names(incomplete: str) -> list[str]:
    """Return the names of schedules that start so."""
    return starting(SCHEDULES, incomplete)


def recipe_names(incomplete: str) -> list[str]:
    """Return recipes of the package, and TOML files and folders at that path, that start so."""
    return _files("recipe", incomplete)


def sweep_names(incomplete: str) -> list[str]:
    """Return sweep files of the package, and TOML files and folders at that path, that start so."""
    return _files("sweep", incomplete)


def _files(kind: str, incomplete: str) -> list[str]:
    head = f"#:schema ./{kind}.schema.json"
    ours = [f.stem for f in sorted(own_recipes().glob("*.toml")) if f.read_text("utf-8").startswith(head)]
    prefix = incomplete[: incomplete.rfind("/") + 1]
    there = sorted(Path(prefix or ".").iterdir()) if Path(prefix or ".").is_dir() else []
    names = [f"{prefix}{p.name}{'/' * p.is_dir()}" for p in there if p.suffix == ".toml" or p.is_dir()]
    return starting([*ours, *names], incomplete)
