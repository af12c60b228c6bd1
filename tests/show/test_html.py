"""Compiled templates are kept as compiled modules are: of this source alone, and only where Python may write."""

import sys
from importlib.util import cache_from_source
from pathlib import Path

import pytest
from jinja2 import DictLoader, Environment

from offdrift.show import html


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of compiled templates of a package in a folder of its own."""
    monkeypatch.setattr(html, "_ASSETS", tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    return Path(cache_from_source(str(tmp_path / "x.py"))).parent


def rendered(source: str) -> str:
    loader = DictLoader({"page": source})
    return Environment(loader=loader, bytecode_cache=html.CompiledTemplates()).get_template("page").render()


def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    sources, compile_template = [], Environment.compile

    def compiled(self, source, *arguments, **options):
        sources.append(source)
        return compile_template(self, source, *arguments, **options)

    monkeypatch.setattr(Environment, "compile", compiled)
    return sources


def test_a_template_is_compiled_once_and_again_when_it_or_what_was_kept_changed(kept, monkeypatch):
    sources = compilations(monkeypatch)
    assert [rendered("{{ 1 + 1 }}"), rendered("{{ 1 + 1 }}"), rendered("{{ 1 + 2 }}")] == ["2", "2", "3"]
    assert sources == ["{{ 1 + 1 }}", "{{ 1 + 2 }}"]
    (file,) = kept.iterdir()
    for damaged in (b"", file.read_bytes()[:-9], b"x" + file.read_bytes()):
        file.write_bytes(damaged)
        assert rendered("{{ 1 + 2 }}") == "3"
    assert len(sources) == 5


def test_nothing_is_kept_where_python_keeps_nothing_or_nobody_may_write(kept, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert rendered("{{ 1 + 1 }}") == "2"
    assert not kept.exists()
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    kept.write_bytes(b"")  # where the folder would be
    assert rendered("{{ 1 + 1 }}") == "2"
