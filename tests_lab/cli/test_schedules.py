"""`offdrift schedules` as a person types it."""

import json
from functools import partial

import pytest
from tests.command import command

from offdrift_lab.schedules import SCHEDULES


@pytest.fixture
def offdrift(monkeypatch, capsys):
    """The command line in this process, in a terminal of the given width."""
    return partial(command, monkeypatch, capsys)


def test_json_has_every_row_and_its_numbers(offdrift):
    rows = json.loads(offdrift("schedules", "--json").stdout)
    assert list(rows) == list(SCHEDULES)
    assert {name: row["max_lag"] for name, row in rows.items()} == {n: s.max_lag for n, s in SCHEDULES.items()}
    assert rows["areal"]["admission"] == {"rule": "BoundedStaleness", "eta": 4}
    assert list(json.loads(offdrift("schedules", "dora", "--json").stdout)) == ["dora"]


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("words", [[], *([name] for name in SCHEDULES)])
def test_it_fits_the_terminal(offdrift, width, words):
    lines = offdrift("schedules", *words, width=width).stdout.splitlines()
    assert len(lines) > 14
    assert max(len(line.rstrip()) for line in lines) <= width


def test_words_say_what_the_rules_are(offdrift):
    """Rows that differ in a rule differ in its words."""
    rows = json.loads(offdrift("schedules", "--json").stdout)
    parts = {"admission": "admission", "dispatch": "dispatch", "too old": "too_old", "consumption": "consumption"}
    compared = 0
    for a in SCHEDULES:
        for b in SCHEDULES:
            for words, part in parts.items():
                same = getattr(SCHEDULES[a], part) == getattr(SCHEDULES[b], part)
                assert (rows[a]["rules"][words] == rows[b]["rules"][words]) == same
                compared += 1
    assert compared == 4 * len(SCHEDULES) ** 2


def test_an_unknown_name_is_one_message(offdrift):
    done = offdrift("schedules", "arael")
    assert done.code == 1
    assert "unknown schedule 'arael'; did you mean areal" in " ".join(done.stderr.split())
    assert done.stdout == ""
