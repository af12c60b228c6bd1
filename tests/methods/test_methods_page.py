"""docs/methods.md: all rows, all numbers, and tables that Markdown can read."""

import re
import runpy
from functools import cache
from pathlib import Path

import pytest

from offdrift.advantages import ADVANTAGES
from offdrift.methods import METHODS
from offdrift.methods import describe as axes
from offdrift.methods.table import FAMILIES, SYSTEMS
from offdrift.penalty import ESTIMATORS

GENERATE = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "generate.py"))
BAR = re.compile(r"(?<!\\)\|")


@cache
def page() -> str:
    return GENERATE["methods_page"]()


def sections() -> dict[str, list[str]]:
    """Lines by the heading above them."""
    found: dict[str, list[str]] = {"": []}
    for line in page().splitlines():
        if line.startswith("#"):
            found[line.lstrip("# ")] = heading = []
        else:
            heading = found[[*found][-1]]
            heading.append(line)
    return found


def test_every_line_of_a_table_has_as_many_cells_as_its_heading():
    tables = [[]]
    for line in page().splitlines():
        if line.startswith("|"):
            tables[-1].append(len(BAR.findall(line)))
        elif tables[-1]:
            tables.append([])
    sizes = [len(t) for t in tables if t]
    assert all(len(set(t)) == 1 for t in tables if t)
    assert sum(sizes) > 2 * len(METHODS) + len(SYSTEMS)


def test_every_method_is_in_its_family_and_in_the_numbers():
    found = sections()
    numbers = "\n".join(found["Formulas and values"])
    for name, row in METHODS.items():
        family = next(title for title, rows in FAMILIES.items() if name in rows)
        heading = family[0].upper() + family[1:]
        mine = [line for line in found[heading] if line.startswith(f"| `{name}`<br>")]
        assert len(mine) == 1, name
        assert re.search(rf"\| {axes.stop_gradient(row)}(<br>\(survey: no; [^|]+\))? \|", mine[0])
        assert ("**experimental**" in mine[0]) == (row.status == "unverified")
        assert f"| `{name}` |" in numbers
    assert "`gate.high=0.05`" in numbers
    assert "`weight.1.cap=101`" in numbers


@pytest.mark.parametrize(
    ("headings", "names"),
    [
        (("In the engine", "Around the loss"), SYSTEMS),
        (("Estimators of the KL to a reference",), ESTIMATORS),
        (("Estimators of the advantage",), ADVANTAGES),
    ],
)
def test_the_other_tables_are_whole(headings, names):
    lines = [line for heading in headings for line in sections()[heading] if line.startswith("| `")]
    assert [re.match(r"\| `([^`]+)`", line)[1] for line in lines] == list(names)  # type: ignore[index]
    assert len(lines) >= 9


def test_cells_show_what_is_written():
    assert GENERATE["cell"]("a|b <i> 2*3*4 x_1_ `c` ~d~") == r"a\|b \<i> 2\*3\*4 x\_1\_ \`c\` \~d\~"
    assert GENERATE["code"]("|x|") == r"`\|x\|`"
