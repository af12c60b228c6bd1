"""The notebook without Jupyter: its cells run in order, and what they print is stored in it.

    python docs/notebook.py                 # runs docs/first-audit.ipynb in a fresh folder and stores what it printed
    python docs/notebook.py --check         # runs it, stores nothing; fails if a cell does

A cell is Python, or lines that begin with "!" and are commands, as Jupyter has them. `make docs` turns the notebook
into a page of the site, and a test runs it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from offdrift.show.manual import page_text

FILE = Path(__file__).parent / "first-audit.ipynb"


def cells(path: Path = FILE) -> list[dict[str, Any]]:
    """The cells of a notebook, each with its kind, its text and what it printed."""
    return json.loads(path.read_text("utf-8"))["cells"]


def printed(path: Path = FILE) -> Iterator[str | None]:
    """Run the cells in one room and this working folder; what each code cell printed, None for text.

    Raises: whatever a cell raises; `RuntimeError` with the output of a command that failed.
    """
    room: dict[str, Any] = {"__name__": "__main__"}
    for cell in cells(path):
        source = "".join(cell["source"])
        if cell["cell_type"] != "code":
            yield None
        elif source.startswith("!"):
            yield "".join(_command(line.removeprefix("!")) for line in source.replace("\\\n", " ").splitlines())
        else:
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(source, path.name, "exec"), room)
            yield out.getvalue()


def _command(line: str) -> str:
    """What a command prints, as in a terminal of 80 columns; this Python's programs are found first."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "COLUMNS": "80",
        "NO_COLOR": "1",
    }
    done = subprocess.run(line, shell=True, text=True, env=environment, stdout=-1, stderr=subprocess.STDOUT)
    if done.returncode:
        raise RuntimeError(f"`{line}` ended with status {done.returncode}:\n{done.stdout}")
    return "\n".join(text.rstrip() for text in done.stdout.splitlines()) + "\n"


def stored(cell: Mapping[str, Any]) -> str:
    """What the notebook says that a cell printed."""
    return "".join("".join(output["text"]) for output in cell.get("outputs", ()))


def page(path: Path = FILE) -> str:
    """The notebook as Markdown: text, code, and what it printed."""
    note = f"*This page is [a notebook]({path.name}): its cells ran as they stand here, and continuous integration runs them.*"
    title, rest = page_text(path).split("\n\n", 1)
    return f"{title}\n\n{note}\n\n{rest}"


def main(*words: str) -> None:
    """Run the notebook in a fresh folder; without --check store what it printed."""
    home = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            outputs = list(printed())
        finally:
            os.chdir(home)
    if "--check" in words:
        return
    notebook = json.loads(FILE.read_text("utf-8"))
    for number, (cell, text) in enumerate(zip(notebook["cells"], outputs, strict=True), 1):
        if text is not None:
            lines = text.splitlines(keepends=True)
            cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []
            cell["execution_count"] = number
    FILE.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
