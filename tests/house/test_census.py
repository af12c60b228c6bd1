"""Ceilings on what makes a house hard to read; `make census` prints the numbers, with --list what is behind them."""

import pytest

from tests.house.census import AUDIT, Census, census, imported_by

CEILINGS = {
    "modules": 292,
    "longest file": 600,
    "share of private helpers called once": 0.12,
    "share of functions with a local named by a riddle": 0.003,
    "small files with one importer": 3,
    "formatter pragmas": 38,
    "lines over 120 characters": 0,
    "modules that an audit imports": 95,
}


@pytest.fixture(scope="module")
def source() -> Census:
    return census()


@pytest.mark.parametrize("name", CEILINGS)
def test_the_source_stays_below_its_ceilings(source: Census, name: str) -> None:
    functions = len(source.functions)
    value = {
        "modules": lambda: len(source.modules),
        "longest file": lambda: max(source.lines.values()),
        "share of private helpers called once": lambda: len(source.called_once) / functions,
        "share of functions with a local named by a riddle": lambda: len(source.riddles) / functions,
        "small files with one importer": lambda: len(source.small),
        "formatter pragmas": lambda: len(source.pragmas()),
        "lines over 120 characters": lambda: len(source.long_lines()),
        "modules that an audit imports": lambda: len(imported_by(*AUDIT)),
    }[name]()
    assert value <= CEILINGS[name]


def test_the_census_sees_what_it_counts(tmp_path) -> None:
    (tmp_path / "a.py").write_text(
        "import b\n\n\ndef _once():\n    found = 1\n    return found\n\n\ndef both():\n    return _once()  # fmt: skip\n"
    )
    (tmp_path / "b.py").write_text(f"x = '{'y' * 120}'\n")
    small = census(tmp_path)
    assert small.called_once == ["a._once"]
    assert small.riddles == ["a._once"]
    assert small.small == ["b"]
    assert small.pragmas() == ["a:10"]
    assert small.long_lines() == ["b:1"]
    assert small.lines == {"a": 10, "b": 1}
