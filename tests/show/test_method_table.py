"""The method table as a person reads it: at every width, all of it, and nothing broken."""

import json
import re

import pytest

from offdrift.methods import METHODS
from offdrift.methods.describe import catalog_text
from offdrift.methods.table import SYSTEMS
from offdrift.show.method_table import ABOUT, WIDE, find, method_list, method_page, select, shown, stored
from offdrift_lab.train.settings.recipe import load_recipe
from tests.show.screens import flat, printed

WIDTHS = (60, 80, 100, 112, 120, 160, 200, 240)
ROWS = stored()["rows"]


def listed(width: int, **wanted: str) -> str:
    return printed(method_list(select(ROWS, **wanted), width=width), width)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_list_fits_and_holds_every_row_once(width):
    lines = listed(width).splitlines()
    assert max(map(len, lines)) <= width
    first = [line.split()[0] for line in lines if line and not line.startswith(" ")]
    for name in ROWS:
        assert first.count(name) == 1 + (name == "none") * 0, name
    assert len(ROWS) == len(METHODS) + len(SYSTEMS)


@pytest.mark.parametrize("width", [60, 80, 100])
def test_below_its_axes_a_row_says_what_it_does(width):
    text = flat(listed(width))
    for name, row in ROWS.items():
        assert flat(row["summary"]) in text, name
    assert "token · full · sampled · bias O(drift)" in text


@pytest.mark.parametrize(("width", "most"), [(112, 5), (120, 5), (160, 3), (200, 2)])
def test_no_row_is_wrapped_to_death(width, most):
    """How many lines the tallest row takes, and that its first line says something."""
    height, tallest = 0, 0
    for line in listed(width).splitlines()[2:]:
        if line.startswith(" "):
            height += 1
        else:
            height = 1
        tallest = max(tallest, height)
    assert 1 < tallest <= most


@pytest.mark.parametrize("width", [w for w in WIDTHS if w >= WIDE])
def test_columns_line_up(width):
    lines = listed(width).splitlines()
    assert re.split(r"  +", lines[0].strip()) == ["method", "what it does", "unit", "ratio", "evidence", "bias"]
    at = lines[0].index("bias")
    row = next(line for line in lines if line.startswith("full_is"))
    assert row[at:].strip() == "none"
    assert row[lines[0].index("ratio") :].startswith("full ")


def test_families_have_a_line_that_fits_in_eighty_columns():
    families = {row["family"] for row in ROWS.values()}
    assert families == set(ABOUT)
    for title, about in ABOUT.items():
        assert len(f"{title}  {about}") <= 80
        assert f"{title}  {about}" in listed(80)


def test_systems_and_experimental_rows_are_marked():
    text = listed(240)
    lines = {line.split()[0]: line for line in text.splitlines() if line and line[0] != " "}
    unverified = {n for n, row in ROWS.items() if row["status"] == "unverified"}
    assert len(unverified) > 5
    assert {n for n, line in lines.items() if "(experimental)" in line} == unverified
    for name in SYSTEMS:
        assert re.search(r"  system( \(|$| )", lines[name]), name
    assert f"{len(METHODS)} methods, {len(SYSTEMS)} systems." in text


def test_a_choice_of_one_is_counted_as_one():
    text = listed(80, unit="prefix", stop_gradient="no")
    assert "1 method." in text
    assert "system" not in text.replace("systems", "")
    assert "1 system." in flat(listed(80, reference="2510.11370"))


def test_what_looks_like_markup_is_shown():
    assert "[0.5, 5]" in listed(80, reference="IcePop")
    row = {**ROWS["none"], "summary": "a [bold]b[/bold] [/x] :smile:"}
    for width in (80, 120):
        assert "a [bold]b[/bold] [/x] :smile:" in printed(method_list({"none": row}, width=width), width)
    assert "a [bold]b[/bold]" in printed(method_page(row), 80)


@pytest.mark.parametrize("name", ROWS)
def test_a_page_says_all_there_is(name):
    row = find(name)
    text = printed(method_page(row), 80)
    assert max(map(len, text.splitlines())) <= 80
    said = flat(text)
    for key in ("summary", "mechanism", "target", "fails", "reference", "is_treatment"):
        assert flat(row[key]) in said, key
    assert f"{row['status']}: " in said
    if row["kind"] == "system":
        assert ("a system, not a method: nothing here runs it" in said) == (row["command"] is None)
        assert flat(row["command"] or "a system, not a method") in said
        assert flat(row["where"]) in said
        assert ", ".join(row["related"]) in said
        assert "--set method=" not in said
        return
    assert ("EXPERIMENTAL: the formula is unverified" in said) == (row["status"] == "unverified")
    for part in row["parts"]:
        assert flat(part["formula"]).removeprefix("weight ") in said
    for path, value in row["settings"].items():
        assert re.search(rf"override\.{re.escape(path)} +{re.escape(shown(value))}\s", text), path
    for word in (*row["unit"], *row["ratio"], *row["evidence"]):
        assert f"{word}: " in said
    assert row["aggregate"] in said


@pytest.mark.parametrize("name", METHODS)
def test_the_commands_of_a_page_run(name):
    said = flat(printed(method_page(find(name)), 80))
    command = re.search(r"offdrift train (\S+) --set (method=\S+) .*--set (override\.\S+)", said)
    assert command is not None
    path, chosen, change = command.groups()
    recipe = load_recipe(path, changes=[chosen])
    assert list(recipe.arms) == [name]
    assert recipe.arms[name].build().describe() == METHODS[name].describe()
    changed = load_recipe(path, changes=[chosen, change]).arms[name].build()
    assert changed != METHODS[name], "the change that the page shows is one"


def test_a_page_lists_the_divergences_that_a_method_reads():
    """An audit asks for them: who reads the page first must learn it there."""
    reading = {name: row for name, row in METHODS.items() if row.divergences}
    assert len(reading) > 5
    for name, row in reading.items():
        said = flat(printed(method_page(find(name)), 80))
        assert all(divergence in said.partition("needs ")[2] for divergence in row.divergences), name


def test_a_page_has_color_on_a_terminal_only():
    assert "\x1b[" in printed(method_page(find("tbpo")), 80, color=True)
    assert "\x1b[" not in printed(method_page(find("tbpo")), 80)


def test_the_stored_table_is_the_table_in_the_code():
    """If this fails, `make docs` writes the table again."""
    assert stored() == json.loads(catalog_text())
