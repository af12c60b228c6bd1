"""`offdrift methods` as a person types it: what is printed where, and the exit status."""

import json
import re
from collections.abc import Callable
from functools import partial

import pytest

from offdrift.methods import METHODS
from offdrift.methods.table import SYSTEMS
from tests.command import Done, command


@pytest.fixture
def offdrift(monkeypatch, capsys) -> Callable[..., Done]:
    """The command line in this process, in a terminal of the given width."""
    return partial(command, monkeypatch, capsys)


def said(text: str) -> str:
    """What was said, without frames and line breaks."""
    return re.sub(r"[\s│]+", " ", text)


def test_json_has_every_row_and_every_number(offdrift):
    rows = json.loads(offdrift("methods", "--json").stdout)
    assert set(rows) == {*METHODS, *SYSTEMS}
    assert rows["trm_max"]["parts"][1]["values"]["high"] == 0.05
    assert rows["trm_max"]["formula"].startswith("L = -A ratio(full); keep if seq_max kl(full)")
    assert rows["r3"]["kind"] == "system"
    one = json.loads(offdrift("methods", "R3", "--json").stdout)
    assert list(one) == ["r3"]


def test_filters_are_joined(offdrift):
    done = offdrift("methods", "--unit", "sequence", "--ratio", "full", "--stop-gradient", "yes", "--sign", "by-sign", "--json")  # fmt: skip
    assert set(json.loads(done.stdout)) == {"vespo"}
    done = offdrift("methods", "--unit", "sequence", "--sign", "by-outcome", "--json")
    assert set(json.loads(done.stdout)) == {"topr"}
    done = offdrift("methods", "--evidence", "exact", "--bias", "O(drift)", "--kind", "trust region masking")
    assert done.code == 0
    assert {"trm_max", "trm_avg"} <= set(done.stdout.split())
    assert "trm_max_k2" not in done.stdout.split()


@pytest.mark.parametrize("width", [80, 120, 200])
@pytest.mark.parametrize("words", [[], ["gspo"], ["keep_routing"], ["--help"]])
def test_it_fits_the_terminal(offdrift, width, words):
    lines = offdrift("methods", *words, width=width).stdout.splitlines()
    assert len(lines) > 14
    assert max(len(line.rstrip()) for line in lines) <= width


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["methods", "trm_mx"], 1, "MethodError: no method 'trm_mx'; did you mean trm_max"),
        (["methods", "--unit", "tokn"], 1, "--unit 'tokn' is not one of: token; prefix;"),
        (["methods", "--unit", "prefix", "--ratio", "mismatch"], 1, "drop --ratio for 3"),
        (["methods", "r3", "--unit", "token"], 2, "give a name or filters"),
    ],
)
def test_a_mistake_is_one_message_that_says_what_to_do(offdrift, words, code, message):
    done = offdrift(*words)
    assert done.code == code
    assert message in said(done.stderr)
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
