"""Costly tests take turns: every case comes once in few consecutive runs, and what costs little always runs."""

import subprocess
import sys

import pytest

from tests import sampling
from tests.sampling import MOST, taking_turns

pytest_plugins = ("pytester",)
SOURCE = """
import pytest

@pytest.mark.parametrize("a", range(3))
@pytest.mark.parametrize("b", range(4))
def test_many(a, b): pass

@pytest.mark.parametrize("a", range(3))
def test_few(a): pass

def test_single(): pass

def test_new(): pass
"""


@pytest.fixture
def items(pytester):
    return pytester.getitems(SOURCE)


def costs(items, **seconds) -> dict[str, float]:
    file = sampling.file_of(items[0].nodeid)
    return {f"{file}::test_{name}": value for name, value in seconds.items()}


def names(items) -> list[str]:
    return [item.name for item in items]


@pytest.mark.parametrize(("seconds", "turns"), [(0.3, 1), (0.75, 1), (1, 2), (2, 3), (3, 4), (5, 7), (400, MOST)])
@pytest.mark.parametrize("costly", ["many", "few", "single"])
def test_consecutive_runs_take_every_case_once_and_the_rest_always_runs(items, costly, seconds, turns):
    of = costs(items, few=0.5) | costs(items, **{costly: seconds})
    runs = [names(taking_turns(items, str(turn), of)[0]) for turn in range(7, 7 + turns)]
    taken = sorted(name for run in runs for name in run if costly in name)
    assert taken == sorted(name for name in names(items) if costly in name)
    sizes = [len(run) for run in runs]
    assert max(sizes) - min(sizes) <= 1
    for run in runs:
        assert {name for name in names(items) if costly not in name} <= set(run)
        assert run == [name for name in names(items) if name in run]


def test_what_is_left_out_is_the_rest_and_without_sample_nothing_is(items):
    of = costs(items, many=3, single=60)
    run, left_out = taking_turns(items, "12", of)
    assert sorted(names(run) + names(left_out)) == sorted(names(items))
    assert len(left_out) >= 8
    for turn in (None, ""):
        assert taking_turns(items, turn, of) == (items, [])


def test_tests_of_one_case_share_the_commits_evenly(pytester):
    items = pytester.getitems("\n".join(f"def test_{i}(): pass" for i in range(300)))
    of = dict.fromkeys((item.nodeid for item in items), 60.0)
    sizes = [len(taking_turns(items, str(turn), of)[0]) for turn in range(MOST)]
    assert sum(sizes) == 300
    assert min(sizes) > 20


def test_seconds_are_measured_and_read_again(tmp_path):
    """Of all the cases of a test, fixtures included; what takes less than a second is no row."""
    (tmp_path / "test_it.py").write_text(
        "import time, pytest\n"
        "@pytest.fixture(scope='module')\ndef slow(): time.sleep(.8)\n"
        "@pytest.mark.parametrize('case', 'a[]')\ndef test_long(slow, case): time.sleep(.2)\n"
        "def test_short(): pass\n"
    )
    code = (
        "import sys, pathlib, pytest; from tests.sampling import Costs\n"
        "sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', '--noconftest', sys.argv[1]],"
        " plugins=[Costs(pathlib.Path(sys.argv[1]) / 'costs.txt')]))"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True, timeout=60)
    ((name, seconds),) = sampling.read_costs(tmp_path / "costs.txt").items()
    assert name.endswith("test_it.py::test_long")
    assert 1 <= seconds <= 30


def test_the_recorded_tests_are_there():
    """A row whose test is gone does nothing: `make costs` writes the file anew."""
    gone = [name for name in sampling.read_costs() if not defined(*name.split("::")[:2])]
    assert len(gone) <= 20, gone


def defined(file: str, name: str) -> bool:
    path = sampling.COSTS.parent.parent / file
    return path.exists() and (file.startswith("src/") or name in path.read_text())
