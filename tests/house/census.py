"""A census of the source: what makes a house hard to read, counted.

    python -m tests.house.census            # the table
    python -m tests.house.census --list     # and what is behind the numbers

Modules and lines are shown and have no limit. `tests/house/test_census.py` holds the limits of the rest.
"""

import argparse
import ast
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
RIDDLES = {"own", "drawn", "whole", "kept", "wanted", "shown", "apart", "found", "given", "said", "held", "told"}
RIDDLES |= {"seen", "known", "mine"}
"""Words that do not say what a variable holds, or what a function does."""
HEADLESS = re.compile(r"(What|Whether|How|Of|The same|Both|Which|Where)\b")
"""Openings of docstrings that neither name a thing nor say what is done. "Whether" is fine for a truth value."""
BODY, BRANCHES, POSITIONAL = 60, 20, 6
NAMED_BY_PATH = re.compile(r"\boffdrift(?:_lab)?(?:\.\w+)+\.(\w+)\b")
"""What users are told to name by its whole path, in another framework's configuration or in a loop of their own."""
KERNELS = re.compile(r"offdrift\.divergence\.kernels")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def branches(function: ast.AST) -> int:
    """Count the ways through a function: 1, and one for each if, loop, handler, with, comprehension and and/or."""
    count = 1
    for node in ast.walk(function):
        if isinstance(node, ast.BoolOp):
            count += len(node.values) - 1
        elif isinstance(
            node, ast.If | ast.For | ast.While | ast.ExceptHandler | ast.With | ast.IfExp | ast.comprehension
        ):
            count += 1
    return count


def body_lines(function: Function) -> int:
    """Count the lines of a function without signature and docstring."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return (function.end_lineno or 0) - body[0].lineno + 1 if body else 0


@dataclass(frozen=True)
class Census:
    """Every module below a folder, and who imports whom."""

    modules: dict[str, Path]
    trees: dict[str, ast.Module] = field(repr=False)

    @cached_property
    def by_kind(self) -> dict[type, list[tuple[str, ast.AST]]]:
        """Every node with its module, by its type."""
        found: dict[type, list[tuple[str, ast.AST]]] = defaultdict(list)
        for module, tree in self.trees.items():
            for node in ast.walk(tree):
                found[type(node)].append((module, node))
        return found

    def nodes(self, *kinds: type) -> Iterator[tuple[str, ast.AST]]:
        """Every node of these types, with its module."""
        for kind in kinds:
            yield from self.by_kind[kind]

    @cached_property
    def importers(self) -> dict[str, set[str]]:
        """Who imports each module, wherever in the file the import stands."""
        who: dict[str, set[str]] = defaultdict(set)
        for module, node in self.nodes(ast.Import, ast.ImportFrom):
            if isinstance(node, ast.Import):
                targets = {alias.name for alias in node.names}
            elif node.module:
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
    def functions(self) -> list[tuple[str, Function]]:
        """Every function and method, with its module."""
        return list(self.nodes(ast.FunctionDef, ast.AsyncFunctionDef))  # type: ignore[arg-type]

    @cached_property
    def long_bodies(self) -> list[str]:
        """Functions with a body of more than `BODY` lines, kernels apart."""
        return [
            f"{m}.{f.name} {body_lines(f)}" for m, f in self.functions if body_lines(f) > BODY and not KERNELS.match(m)
        ]

    @cached_property
    def branchy(self) -> list[str]:
        """Functions with more than `BRANCHES` branches, kernels and functions that are a command apart."""
        return [
            f"{m}.{f.name} {branches(f)}"
            for m, f in self.functions
            if branches(f) > BRANCHES and not KERNELS.match(m) and not (".cli." in m and f.name == m.split(".")[-1])
        ]

    @cached_property
    def positional(self) -> list[str]:
        """Calls with `POSITIONAL` or more positional arguments."""
        return [f"{m}:{n.lineno}" for m, n in self.nodes(ast.Call) if len(n.args) >= POSITIONAL]  # type: ignore[attr-defined]

    @cached_property
    def repeated_classes(self) -> list[str]:
        """Names of classes that a package has twice or more."""
        names = Counter((m.split(".")[0], n.name) for m, n in self.nodes(ast.ClassDef))  # type: ignore[attr-defined]
        return [f"{package}: {name} {count}" for (package, name), count in names.items() if count > 1]

    @cached_property
    def headless(self) -> list[str]:
        """Docstrings that open with a riddle."""
        rows = []
        for module, node in self.nodes(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module):
            text = ast.get_docstring(node) or ""  # type: ignore[arg-type]
            answer = getattr(getattr(node, "returns", None), "id", "")
            if HEADLESS.match(text) and not (text.startswith("Whether") and answer == "bool"):
                rows.append(f"{module}:{getattr(node, 'lineno', 1)} {text.splitlines()[0][:70]}")
        return rows

    @cached_property
    def docstrings(self) -> int:
        """Number of docstrings."""
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)
        return sum(bool(ast.get_docstring(node)) for _, node in self.nodes(*kinds))  # type: ignore[arg-type]

    @cached_property
    def called_once(self) -> list[str]:
        """Private functions and methods whose name stands once in their module beside its definition."""
        once = []
        uses: dict[str, Counter[str]] = defaultdict(Counter)
        for module, node in self.nodes(ast.Name, ast.Attribute):
            uses[module][node.id if isinstance(node, ast.Name) else node.attr] += 1  # type: ignore[attr-defined]
        for module, function in self.functions:
            name = function.name
            if name.startswith("_") and not name.startswith("__") and uses[module][name] == 1:
                once.append(f"{module}.{name}")
        return once

    @cached_property
    def riddles(self) -> list[str]:
        """Functions named by a riddle, or with a local whose name does not say what it is."""
        return [
            f"{module}.{function.name}"
            for module, function in self.functions
            if RIDDLES
            & {
                function.name,
                *(n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)),
            }
        ]

    @cached_property
    def circles(self) -> list[str]:
        """Modules that import each other, by whatever way and wherever in the file, as groups."""
        below = defaultdict(set)
        for module, importers in self.importers.items():
            for importer in importers:
                below[importer].add(module)
        reach: dict[str, set[str]] = {}
        for module in self.modules:
            todo, reached = list(below[module]), set()
            while todo:
                if (one := todo.pop()) not in reached:
                    reached.add(one)
                    todo += below[one]
            reach[module] = reached
        groups = {frozenset(o for o in reach[m] if m in reach[o]) for m in self.modules if m in reach[m]}
        # A module that is run as a program imports itself under its own name.
        return sorted(" ".join(sorted(group)) for group in groups if len(group) > 1)

    def only_tested(self, tests: "Census") -> list[str]:
        """Functions that nothing but tests names."""
        words = re.compile(r"\w+")
        used = {node.id for _, node in self.nodes(ast.Name)} | {node.attr for _, node in self.nodes(ast.Attribute)}  # type: ignore[attr-defined]
        used |= {alias.name for _, node in self.nodes(ast.ImportFrom) for alias in node.names}  # type: ignore[attr-defined]
        strings = (n.value for _, n in self.nodes(ast.Constant) if isinstance(n.value, str))  # type: ignore[attr-defined]
        used |= {text for text in strings if text.isidentifier()}
        tested = {w for p in tests.modules.values() for w in words.findall(p.read_text("utf-8"))}
        code = [
            *ROOT.glob("docs/*.py"),
            *ROOT.glob("benchmarks/**/*.py"),
            *ROOT.glob("examples/*.py"),
            ROOT / "docs/api.json",
        ]
        prose = [*ROOT.glob("docs/**/*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
        tables = SOURCE.glob("**/*.toml")
        promised = {w for p in code if p.is_file() for w in words.findall(p.read_text("utf-8"))}
        promised |= {w for p in prose for w in re.findall(r"\b(\w+)\(", p.read_text("utf-8"))}
        promised |= {w for p in (*prose, *tables) for w in NAMED_BY_PATH.findall(p.read_text("utf-8"))}
        only = tested - promised - used
        return [
            f"{m}.{f.name}"
            for m, f in self.functions
            if f.name in only and not f.name.startswith("__") and not f.decorator_list
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


PROSE = re.compile(r"[A-Za-z]+(?:[ ,]+[A-Za-z]+){3,}")


def prose_in_asserts(tests: Census) -> tuple[list[str], int]:
    """Return asserts that compare with four words or more in a row, and the number of asserts."""
    rows, count = [], 0
    for module, node in tests.nodes(ast.Assert):
        count += 1
        texts = (n.value for n in ast.walk(node.test) if isinstance(n, ast.Constant) and isinstance(n.value, str))  # type: ignore[attr-defined]
        if any(PROSE.search(text) for text in texts):
            rows.append(f"{module}:{node.lineno}")  # type: ignore[attr-defined]
    return rows, count


def imported_by(*modules: str) -> list[str]:
    """Modules of ours that are loaded once these are imported, in a fresh interpreter."""
    ours = "m.split('.')[0] in ('offdrift', 'offdrift_lab')"
    program = f"import sys, {', '.join(modules)}; print(*sorted(m for m in sys.modules if {ours}))"
    run = [sys.executable, "-c", program]
    return subprocess.run(run, capture_output=True, text=True, check=True).stdout.split()


AUDIT = ("offdrift.cli.audit", "offdrift.audit.stream", "offdrift.audit.conclude")
"""What `offdrift audit --json` imports."""
Row = tuple[str, float, list[str]]


def table(source: Census, tests: Census) -> list[Row]:
    """Return what is counted: name, value, and what is behind it."""
    functions = len(source.functions)
    prose, asserts = prose_in_asserts(tests)
    return [
        (f"bodies over {BODY} lines", len(source.long_bodies), source.long_bodies),
        (f"functions with more than {BRANCHES} branches", len(source.branchy), source.branchy),
        (f"calls with {POSITIONAL} or more positional arguments", len(source.positional), source.positional),
        ("class names repeated in a package", len(source.repeated_classes), source.repeated_classes),
        ("share of functions with a riddle for a name", len(source.riddles) / functions, source.riddles),
        ("share of docstrings that open with a riddle", len(source.headless) / source.docstrings, source.headless),
        ("prose in asserts, of a hundred", 100 * len(prose) / asserts, prose),
        ("circles of imports", len(source.circles), source.circles),
        ("functions that only tests name", len(only := source.only_tested(tests)), only),
        ("share of private helpers called once", len(source.called_once) / functions, source.called_once),
        ("formatter pragmas", len(source.pragmas()), source.pragmas()),
        ("lines over 120 characters", len(source.long_lines()), source.long_lines()),
        ("modules that an audit imports", len(audit := imported_by(*AUDIT)), audit),
        ("modules of the lab that an audit imports", len(lab := [m for m in audit if "_lab" in m]), lab),
    ]


def all_tests() -> Census:
    """Return the census of both trees of tests."""
    one, other = census(ROOT / "tests"), census(ROOT / "tests_lab")
    rename = lambda names, top: {f"{top}.{name}": value for name, value in names.items()}  # noqa: E731
    return Census(
        rename(one.modules, "tests") | rename(other.modules, "tests_lab"),
        rename(one.trees, "tests") | rename(other.trees, "tests_lab"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="print what is behind the numbers")
    options = parser.parse_args()
    source, tests = census(), all_tests()
    sizes = [
        ("modules", len(source.modules)),
        ("lines of src", sum(source.lines.values())),
        ("lines of tests", sum(tests.lines.values())),
        ("functions", len(source.functions)),
    ]
    for name, size in sizes:
        print(f"{name:50s} {size}")
    for name, value, rows in table(source, tests):
        print(f"{name:50s} {value:.3f}" if isinstance(value, float) else f"{name:50s} {value}")
        if options.list:
            print(*(f"    {row}" for row in rows), sep="\n")


if __name__ == "__main__":
    main()
