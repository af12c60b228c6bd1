"""The generated pages are what the tables in the code say."""

import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = runpy.run_path(str(DOCS / "generate.py"))["PAGES"]


@pytest.mark.parametrize("name", PAGES)
def test_page_is_what_the_table_says(name):
    stored = (DOCS / name).read_text(encoding="utf-8")
    assert stored == PAGES[name](), "run `make docs` (after a new method, `python docs/generate.py methods`)"
    assert stored.count("\n") > 10


def test_every_dependency_is_justified_and_pinned():
    import tomllib

    root = DOCS.parent
    project = tomllib.loads((root / "pyproject.toml").read_text())
    wanted = [*project["project"]["dependencies"]]
    for extra in project["project"]["optional-dependencies"].values():
        wanted += extra
    names = {w.split(">")[0].split("[")[0].lower() for w in wanted} - {"offdrift"}
    assert len(names) > 15
    justified = (DOCS / "dependencies.md").read_text().lower()
    pinned = (root / "constraints.txt").read_text().lower().replace("_", "-")
    assert [n for n in names if n not in justified] == []
    assert [n for n in names if f"\n{n}==" not in pinned] == []
