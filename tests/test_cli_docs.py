"""`offdrift docs`: pages that messages name can be read wherever the package is installed."""

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from offdrift.show import manual
from tests.command import command

ROOT = Path(__file__).parents[1]
NOT_OURS = {"NAME", "algo/rollout_corr"}
"""A placeholder, and a page of verl."""


def test_every_page_of_the_folder_is_listed_with_its_title(monkeypatch, capsys):
    found = manual.pages()
    files = [f for kind in ("md", "ipynb") for f in (ROOT / "docs").glob(f"**/*.{kind}")]
    assert {f"docs/{name}" for name in found} == {str(f.relative_to(ROOT).with_suffix("")) for f in files}
    listed = command(monkeypatch, capsys, "docs", width=200).stdout
    assert [name for name in found if name not in listed] == []
    assert manual.title(found["rules"]) == "Rules of the diagnosis"
    assert next(iter(found)) in manual.FIRST


@pytest.mark.parametrize("name", ["rules", "docs/rules.md", "rules.md"])
def test_a_page_is_printed_as_it_is_written(monkeypatch, capsys, name):
    assert command(monkeypatch, capsys, "docs", name).stdout == (ROOT / "docs" / "rules.md").read_text("utf-8")
    told = json.loads(command(monkeypatch, capsys, "docs", name, "--json").stdout)
    assert told["page"] == "rules"


@pytest.mark.parametrize("name", ["first-audit", "docs/first-audit.ipynb"])
def test_a_notebook_is_a_page_too(monkeypatch, capsys, name):
    shown = command(monkeypatch, capsys, "docs", name).stdout
    assert shown.startswith(f"# {manual.title(manual.pages()['first-audit'])}\n")
    assert "\n```sh\noffdrift " in shown
    assert "```text\n" in shown


@pytest.mark.parametrize(
    ("name", "page"), [("rulez", "rules"), ("trl", "integrations/trl"), ("certificate", "certificates")]
)
def test_a_name_that_is_not_one_gets_the_nearest(monkeypatch, capsys, name, page):
    done = command(monkeypatch, capsys, "docs", name)
    assert done.code == 1
    assert f"did you mean {page}?" in done.stderr


def test_a_terminal_gets_no_tags():
    out = Console(width=80, record=True, file=io.StringIO())
    out.print(manual.rendered("# Title\n<!-- made by a machine -->\n<img src='x.png'>\n\nText with `code` and a < b."))
    text = out.export_text()
    assert "Title" in text
    assert "a < b" in text
    assert "machine" not in text
    assert "x.png" not in text


def test_every_page_that_the_source_names_exists():
    """A message that names docs/NAME.md leads somewhere by `offdrift docs NAME`."""
    named = {
        (file.name, page)
        for folder in ("offdrift", "offdrift_lab")
        for suffix in ("py", "toml", "j2")
        for file in (ROOT / "src" / folder).rglob(f"*.{suffix}")
        for page in re.findall(r"\bdocs/([\w/-]+)\.md", file.read_text("utf-8"))
    }
    assert len(named) > 40
    assert {(file, page) for file, page in named if page not in manual.pages() and page not in NOT_OURS} == set()
