"""Whether the adapters know the frameworks of today: `make currency`.

    python packaging/currency.py [--write] [--offline]

For every framework of which a wheel is published: its newest release is downloaded, without its dependencies, and the
arguments of each function that an adapter replaces or wraps are read from its source and compared with
tests/adapters/signatures.toml. Of the others, the date of the source that was read is said. The report is markdown,
which a workflow can file; it ends with 1 if an argument came, went or was renamed, and with 2 if a newer release than
any that was tested is out and nothing that is replaced has changed.

`--write` renews the table of docs/integrations/README.md from docs/integrations/versions.toml; `--offline` asks no
index and says of every framework what is recorded.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "integrations" / "README.md"
VERSIONS = ROOT / "docs" / "integrations" / "versions.toml"
SIGNATURES = ROOT / "tests" / "adapters" / "signatures.toml"
BEGINS = "<!-- What ran against the real thing, written by `make currency`. -->"
ENDS = "<!-- End of what ran. -->"


def recorded(path: Path, key: str) -> list[dict[str, Any]]:
    """The rows of one of the two files."""
    return tomllib.loads(path.read_text())[key]


def table() -> str:
    """What ran against the real thing, as markdown."""
    lines = [
        "| framework | releases | source | date | what ran against it | what its own log can show |",
        "|---|---|---|---|---|---|",
    ]
    for row in (*recorded(VERSIONS, "framework"), *recorded(VERSIONS, "trainer")):
        cells = (row["name"], ", ".join(row["releases"]), row["source"], row["date"], row["how"], row["log"])
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def page() -> str:
    """The page with its table renewed."""
    before, _, rest = PAGE.read_text().partition(BEGINS)
    _, _, after = rest.partition(ENDS)
    return f"{before}{BEGINS}\n\n{table()}\n\n{ENDS}{after}"


def arguments(source: str, name: str) -> list[str] | None:
    """Arguments of a function (or fields of a class) as its source has them; None if it is not there."""
    holder: ast.AST = ast.parse(source)
    for part in name.split("."):
        found = [node for node in ast.iter_child_nodes(holder) if getattr(node, "name", None) == part]
        if not found:
            return None
        holder = found[0]
    if isinstance(holder, ast.ClassDef):
        return [n.target.id for n in holder.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]
    if not isinstance(holder, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    own = holder.args
    several = [f"{stars}{a.arg}" for stars, a in (("*", own.vararg), ("**", own.kwarg)) if a is not None]
    return [a.arg for a in (*own.posonlyargs, *own.args, *own.kwonlyargs) if a.arg != "self"] + several


def changes(rows: list[dict[str, Any]], files: Mapping[str, str]) -> Iterator[str]:
    """What the sources of a release say otherwise than the recorded signatures, in sentences.

    Args:
        rows: signatures of the framework's newest recorded wheel.
        files: its sources by path.
    """
    for row in rows:
        if row["file"] not in files:
            yield f"`{row['file']}` is gone, where `{row['name']}` was"
            continue
        now = arguments(files[row["file"]], row["name"])
        if now is None:
            yield f"`{row['name']}` is gone from `{row['file']}`"
            continue
        came, went = [a for a in now if a not in row["arguments"]], [a for a in row["arguments"] if a not in now]
        if came or went:
            said = " and ".join(f"{what} {', '.join(x)}" for what, x in (("has new", came), ("lost", went)) if x)
            yield f"`{row['name']}` {said}"


def download(distribution: str, folder: Path) -> tuple[str, dict[str, str]] | None:
    """The newest release of a wheel and its sources by path; None if none can be had."""
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--ignore-requires-python")
    if subprocess.run((*pip, "--dest", str(folder), distribution), capture_output=True, check=False).returncode:
        return None
    wheels = list(folder.glob("*.whl"))
    if not wheels:
        return None
    with zipfile.ZipFile(wheels[0]) as wheel:
        sources = {
            name: wheel.read(name).decode("utf-8", "replace") for name in wheel.namelist() if name.endswith(".py")
        }
    # Wheels of a platform may hold their packages in a folder that the installer empties.
    return wheels[0].name.split("-")[1], {re.sub(r"^[^/]*\.data/[^/]*lib/", "", name): x for name, x in sources.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--offline", action="store_true")
    options = parser.parse_args()
    if options.write:
        PAGE.write_text(page())
    print("| framework | tested | newest | signatures |\n|---|---|---|---|")
    moved = newer = False
    for row in recorded(VERSIONS, "framework"):
        tested, own = (
            row["releases"][-1],
            [s for s in recorded(SIGNATURES, "function") if s["framework"] == row["name"]],
        )
        wheels = [s for s in own if s["source"] == "wheel"]
        newest, said = "-" if wheels else "not published", f"recorded {row['date']}"
        if wheels and not options.offline:
            with tempfile.TemporaryDirectory() as folder:
                found = download(row.get("distribution", row["name"]), Path(folder))
            newest, said = ("could not be had", "not compared") if found is None else (found[0], "")
            if found is not None:
                last = wheels[-1]["version"]
                said = "; ".join(changes([s for s in wheels if s["version"] == last], found[1])) or "unchanged"
                moved |= said != "unchanged"
                newer |= found[0] not in row["releases"]
        print(f"| {row['name']} | {tested} | {newest} | {said} |")
    for row in recorded(VERSIONS, "trainer"):
        newest, said = "not published", f"recorded {row['date']}"
        if row["source"] == "wheel" and not options.offline:
            with tempfile.TemporaryDirectory() as folder:
                found = download(row.get("distribution", row["name"]), Path(folder))
            newest = found[0] if found is not None else "could not be had"
            newer |= found is not None and newest not in row["releases"]
        print(f"| {row['name']} | {row['releases'][-1]} | {newest} | {said} |")
    return 1 if moved else 2 if newer else 0


if __name__ == "__main__":
    sys.exit(main())
