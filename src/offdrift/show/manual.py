"""The documentation in a terminal: pages are Markdown files and a notebook that come with the package."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from rich import box
from rich.console import Group, RenderableType
from rich.markdown import Markdown
from rich.table import Table
from rich.text import Text

from offdrift.show.formulas import with_plain_formulas

PACKAGE = Path(__file__).parents[1]
FOR_A_BROWSER = re.compile(r"<!--.*?-->|</?(?:details|summary|picture|source|img|a|p|div)\b[^>]*>", re.DOTALL)
FIRST = ("start", "logs", "how-to", "diagnosis", "check", "python", "faq")
"""Pages that stand first in the list: what somebody reads who is new."""


def pages() -> dict[str, Path]:
    """Return the file of every page by its name ("rules", "integrations/trl"), those for newcomers first.

    Pages are inside the package when it is installed, beside `src` in a checkout.
    """
    inside = PACKAGE / "docs"
    folder = inside if inside.is_dir() else PACKAGE.parents[1] / "docs"
    files = sorted([*folder.glob("**/*.md"), *folder.glob("*.ipynb")])
    names = {f.relative_to(folder).with_suffix("").as_posix(): f for f in files}
    return {name: names[name] for name in sorted(names, key=lambda n: (n not in FIRST, n))}


def page_text(file: Path) -> str:
    """Return the Markdown of a page; of a notebook its text, its code, and what that printed."""
    text = file.read_text("utf-8")
    if file.suffix == ".md":
        return text
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] != "code":
            parts.append(source)
            continue
        parts.append(f"```{'sh' if source.startswith('!') else 'python'}\n{source.removeprefix('!')}\n```")
        if printed := "".join("".join(output["text"]) for output in cell["outputs"]).rstrip():
            parts.append(f"```text\n{printed}\n```")
    return "\n\n".join(parts) + "\n"


def title(file: Path) -> str:
    """Return the first heading of a page, without marks."""
    heading = next((line for line in page_text(file).splitlines() if line.startswith("# ")), f"# {file.stem}")
    return re.sub(r"[`*]|<[^>]*>", "", heading[2:]).strip()


def page_list(found: Mapping[str, Path]) -> RenderableType:
    """Every page with its title."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("page", no_wrap=True)
    table.add_column("title", overflow="fold")
    for name, file in found.items():
        table.add_row(Text(name), Text(title(file)))
    return Group(table)


def rendered(text: str) -> RenderableType:
    """Markdown for a terminal: formulas as text, without the comments and tags that only a browser reads."""
    return Markdown(FOR_A_BROWSER.sub("", with_plain_formulas(text)))
