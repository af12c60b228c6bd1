"""A census of the source: how many files and helpers there are, and which of them earn their place.

    python -m tests.house.census            # the table
    python -m tests.house.census --list     # and every file and helper behind it

Counts files, lines, private helpers that are called once, files with one importer, formatter pragmas,
and local names that describe by riddle. `tests/house/test_census.py` holds the ceilings.
"""

import argparse
import ast
import re
import subprocess
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
RIDDLES = {"found", "given", "said", "held", "told", "seen", "known", "mine"}
SMALL = 120
"""Lines below which a file with one importer belongs in its importer, unless it is a boundary."""


@dataclass(frozen=True)
class Census:
    """What there is in `src/`: every module, and who imports whom."""

    modules: dict[str, Path]
    trees: dict[str, ast.Module] = field(repr=False)

    @cached_property
    def importers(self) -> dict[str, set[str]]:
        """Who imports each module, wherever in the file the import stands."""
        who: dict[str, set[str]] = defaultdict(set)
        for module, tree in self.trees.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.Import):
                    targets = {alias.name for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module:
                    names = {f"{node.module}.{alias.name}" for alias in node.names}
                    targets = {n for n in names if n in self.modules} or {node.module}
                else:
                    continue
                for target in targets & self.modules.keys():
                    who[target].add(module)
        return who

    @cached_property
    def lines(self) -> dict[str, int]:
        """Lines of each module."""
        return {m: len(p.read_text(encoding="utf-8").splitlines()) for m, p in self.modules.items()}

    @cached_property
    def functions(self) -> list[tuple[str, ast.FunctionDef]]:
        """Every function and method, with its module."""
        return [
            (module, node)
            for module, tree in self.trees.items()
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef)
        ]

    @cached_property
    def called_once(self) -> list[str]:
        """Private functions and methods whose name stands once in their module beside its definition."""
        once = []
        uses: dict[str, Counter[str]] = {}
        for module, tree in self.trees.items():
            uses[module] = Counter(
                node.id if isinstance(node, ast.Name) else node.attr
                for node in ast.walk(tree)
                if isinstance(node, ast.Name | ast.Attribute)
            )
        for module, function in self.functions:
            name = function.name
            if name.startswith("_") and not name.startswith("__") and uses[module][name] == 1:
                once.append(f"{module}.{name}")
        return once

    @cached_property
    def riddles(self) -> list[str]:
        """Functions with a local whose name does not say what it is."""
        return [
            f"{module}.{function.name}"
            for module, function in self.functions
            if RIDDLES
            & {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        ]

    @cached_property
    def small(self) -> list[str]:
        """Files of fewer than `SMALL` lines that one file imports."""
        return [
            m
            for m, n in sorted(self.lines.items())
            if n < SMALL
            and len(self.importers[m]) == 1
            and self.modules[m].name not in ("__init__.py", "__main__.py")
            and not m.startswith("offdrift.cli.")  # one file per command
        ]

    def pragmas(self, pattern: str = r"# fmt: skip") -> list[str]:
        """Lines that the formatter is told to leave alone."""
        return [
            f"{module}:{number}"
            for module, path in self.modules.items()
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
            if re.search(pattern, line)
        ]

    def long_lines(self, limit: int = 120) -> list[str]:
        """Lines longer than `limit` characters."""
        return self.pragmas(rf"^.{{{limit + 1},}}$")


def census(source: Path = SOURCE) -> Census:
    """Read every module under `source`."""
    modules, trees = {}, {}
    for path in sorted(source.rglob("*.py")):
        name = ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
        modules[name] = path
        trees[name] = ast.parse(path.read_text(encoding="utf-8"))
    return Census(modules, trees)


def imported_by(*modules: str) -> list[str]:
    """Modules of ours that are loaded once these are imported, in a fresh interpreter."""
    program = (
        f"import sys, {', '.join(modules)}; print(*sorted(m for m in sys.modules if m.split('.')[0] == 'offdrift'))"
    )
    run = [sys.executable, "-c", program]
    return subprocess.run(run, capture_output=True, text=True, check=True).stdout.split()


AUDIT = ("offdrift.cli.audit", "offdrift.audit.stream", "offdrift.audit.conclude")
"""What `offdrift audit --json` imports."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="print what is behind the numbers")
    options = parser.parse_args()
    c = census()
    functions = len(c.functions)
    table = [
        ("modules", len(c.modules), []),
        ("lines of src", sum(c.lines.values()), []),
        ("lines of tests", sum(census(ROOT / "tests").lines.values()), []),
        ("longest file, lines", max(c.lines.values()), []),
        ("functions", functions, []),
        ("private helpers called once", f"{len(c.called_once)} ({len(c.called_once) / functions:.1%})", c.called_once),
        ("functions with a local named by a riddle", f"{len(c.riddles)} ({len(c.riddles) / functions:.1%})", c.riddles),
        (f"files under {SMALL} lines with one importer", len(c.small), c.small),
        ("# fmt: skip", len(c.pragmas()), c.pragmas()),
        ("lines over 120 characters", len(c.long_lines()), c.long_lines()),
        ("modules that an audit imports", len(imported_by(*AUDIT)), []),
    ]  # fmt: skip
    for name, value, rows in table:
        print(f"{name:45s} {value}")
        if options.list:
            print(*(f"    {row}" for row in rows), sep="\n")


if __name__ == "__main__":
    main()
