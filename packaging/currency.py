"""Whether the adapters know the frameworks of today: `make currency`.

    python packaging/currency.py [--write] [--offline] [--sources FOLDER] [--keep FOLDER]

For every framework of which a wheel is published: its newest release is downloaded, without its dependencies, and the
arguments of each function that an adapter replaces or wraps are read from its source and compared with
tests/adapters/signatures.toml. Of the others, they are read from FOLDER/NAME of `--sources`, which
`packaging/upstream.py` fills; without it, the date of the source that was read is said. The report is markdown, which a
workflow can file. It ends with 1 if an argument came, went, moved or was renamed; with 3 if a framework could not be
compared, which proves nothing of it; and with 2 if all that is replaced is as it was, in a release or commit that is
newer than any that was tested.

`--write` renews the table of docs/integrations/README.md from docs/integrations/versions.toml; `--offline` asks no
index and says of every framework what is recorded; `--keep` unpacks the wheels into one folder, to be put before the
environment's packages, so that tests run against them.
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
MOVED, NEWER, NOT_COMPARED = 1, 2, 3


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


def targets(node: ast.Assign) -> set[str]:
    """Names that an assignment of a dict binds."""
    return {x.id for x in node.targets if isinstance(x, ast.Name)} if isinstance(node.value, ast.Dict) else set()


def arguments(source: str, name: str) -> list[str] | None:
    """Arguments of a function as its source has them; None if it is not there.

    Of a class, its fields; of a local dict that a function is called with, its keys.
    """
    holder: ast.AST = ast.parse(source)
    for part in name.split("."):
        found = [node for node in ast.iter_child_nodes(holder) if getattr(node, "name", None) == part]
        found = found or [node for node in ast.walk(holder) if isinstance(node, ast.Assign) and part in targets(node)]
        if not found:
            return None
        holder = found[0]
    if isinstance(holder, ast.Assign):
        keys = holder.value.keys if isinstance(holder.value, ast.Dict) else ()
        return [key.value for key in keys if isinstance(key, ast.Constant)]
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
        if not came and not went and now != row["arguments"]:
            yield f"`{row['name']}` has its arguments in another order: {', '.join(now)}"
        if came or went:
            said = " and ".join(f"{what} {', '.join(x)}" for what, x in (("has new", came), ("lost", went)) if x)
            yield f"`{row['name']}` {said}"


def download(distribution: str, keep: Path | None) -> tuple[str, dict[str, str]] | None:
    """The newest release of a wheel and its sources by path; None if none can be had.

    Nothing of it is built or run, and no dependency is asked for: a training framework's would be gigabytes.
    """
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--ignore-requires-python")
    with tempfile.TemporaryDirectory() as folder:
        asked = (*pip, "--only-binary", ":all:", "--dest", folder, distribution)
        wheels = [] if subprocess.run(asked, check=False).returncode else list(Path(folder).glob("*.whl"))
        if not wheels:
            return None
        with zipfile.ZipFile(wheels[0]) as wheel:
            names = {inside(name): name for name in wheel.namelist() if not name.endswith("/")}
            for place, name in names.items():
                # OpenRLHF's wheel brings a package called tests.
                if keep is not None and place.split("/")[0] not in ("tests", "test"):
                    (keep / place).parent.mkdir(parents=True, exist_ok=True)
                    (keep / place).write_bytes(wheel.read(name))
            python = {place: wheel.read(name) for place, name in names.items() if place.endswith(".py")}
        return wheels[0].name.split("-")[1], {place: text.decode("utf-8", "replace") for place, text in python.items()}


def newest_release(distribution: str) -> str | None:
    """The newest release that the index knows, with a wheel or without; None if it is not known."""
    pip = (sys.executable, "-m", "pip", "index", "versions", "--ignore-requires-python", distribution)
    said = subprocess.run(pip, capture_output=True, text=True, check=False).stdout
    found = re.match(r"\S+ \((\S+)\)", said)
    return found[1] if found else None


def inside(name: str) -> str:
    """Where the installer puts a file of a wheel; wheels of a platform may hold packages in a folder that it empties."""
    return re.sub(r"^[^/]*\.data/[^/]*lib/", "", name)


def checked_out(folder: Path, rows: list[dict[str, Any]]) -> tuple[str, dict[str, str]] | None:
    """The commit of a source and the files that rows name; None if it is not there."""
    git = ("git", "-C", str(folder), "rev-parse", "--short=9", "HEAD")
    found = subprocess.run(git, capture_output=True, text=True, check=False) if (folder / ".git").exists() else None
    if found is None or found.returncode:
        return None
    files = {row["file"]: folder / row["file"] for row in rows}
    return found.stdout.strip(), {name: file.read_text() for name, file in files.items() if file.is_file()}


def last_of(rows: list[dict[str, Any]], *, wheel: bool) -> list[dict[str, Any]]:
    """Signatures of the newest version that was recorded of wheels, or of sources."""
    kept = [row for row in rows if (row["source"] == "wheel") is wheel]
    newest = max((numbers(row["version"]) for row in kept), default=())
    return [row for row in kept if numbers(row["version"]) == newest]


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(x) for x in re.findall(r"\d+", version))


def judge(
    row: dict[str, Any], signatures: list[dict[str, Any]], options: argparse.Namespace
) -> Iterator[tuple[str, str, int]]:
    """Newest version, what became of the signatures, and the status that the report ends with for it.

    One for the wheel, and one for the source, where a framework has recorded signatures of either.
    """
    wheels, sources = last_of(signatures, wheel=True), last_of(signatures, wheel=False)
    published = bool(wheels) or row["source"].startswith("wheel")
    if published and options.offline:
        yield "-", f"recorded {row['date']}", 0
    elif published:
        yield from judge_wheel(row, wheels, options.keep)
    # A release whose wheel is compared supersedes signatures of an older source.
    if published and (not sources or numbers(sources[0]["version"]) < numbers(wheels[0]["version"])):
        return
    if options.sources is None:
        yield "not published", f"recorded {row['date']}", 0
    elif (found := checked_out(options.sources / row["name"], sources)) is None:
        yield "could not be had", "**not compared**", NOT_COMPARED
    else:
        said = "; ".join(changes(sources, found[1]))
        read = re.findall(r"\b[0-9a-f]{7,40}\b", row["source"])
        status = MOVED if said else 0 if any(found[0].startswith(c[:9]) for c in read) else NEWER
        yield found[0], said or ("unchanged" if sources else "none is recorded"), status


def judge_wheel(row: dict[str, Any], wheels: list[dict[str, Any]], keep: Path | None) -> Iterator[tuple[str, str, int]]:
    """The same of the newest release; without a recorded signature its number alone is asked for."""
    distribution = row.get("distribution", row["name"])
    last = newest_release(distribution)
    found = download(distribution, keep) if wheels and last is not None else None
    if last is None or (wheels and found is None):
        yield last or "could not be had", "**not compared**", NOT_COMPARED
        return
    newest, files = found or (last, {})
    said = "; ".join(changes(wheels, files))
    status = MOVED if said else 0 if newest in row["releases"] else NEWER
    yield newest, said or ("unchanged" if wheels else "none is recorded"), status
    if newest != last:
        yield last, "**not compared**: no wheel of it can be had", NOT_COMPARED


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--offline", action="store_true")
    parser.add_argument("--sources", type=Path)
    parser.add_argument("--keep", type=Path)
    options = parser.parse_args()
    if options.write:
        PAGE.write_text(page())
    print("| framework | tested | newest | signatures |\n|---|---|---|---|")
    statuses = set()
    signatures = recorded(SIGNATURES, "function")
    for row in (*recorded(VERSIONS, "framework"), *recorded(VERSIONS, "trainer")):
        own = [s for s in signatures if s["framework"] == row["name"]]
        for newest, said, status in judge(row, own, options):
            print(f"| {row['name']} | {row['releases'][-1]} | {newest} | {said} |", flush=True)
            statuses.add(status)
    return next((status for status in (MOVED, NOT_COMPARED, NEWER) if status in statuses), 0)


if __name__ == "__main__":
    sys.exit(main())
