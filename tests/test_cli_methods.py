"""`offdrift methods` as a person types it: what is printed where, and the exit status."""

import json
import re
from collections.abc import Callable
from functools import partial

import pytest

from offdrift.methods import METHODS
from offdrift.methods.situations import SITUATIONS, USED_BY
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


@pytest.mark.parametrize("name", SITUATIONS)
def test_a_situation_begins_with_three_suggestions_and_what_speaks_for_them(offdrift, name):
    done = offdrift("methods", "--for", name, width=80)
    heading, *numbered = done.stdout.partition("weights  a number")[0].strip().split("\n  ")
    assert heading.startswith("Begin with")
    text = said(" ".join(numbered))
    for number, s in enumerate(SITUATIONS[name].suggested, 1):
        assert f"{number}. {s.method} {s.evidence} ({s.where})" in text
    rows = json.loads(offdrift("methods", "--for", name, "--json").stdout)
    assert set(rows) == set(SITUATIONS[name].methods)
    first = list(rows)[:3]
    assert first == [s.method for s in SITUATIONS[name].suggested]
    assert all(rows[n]["suggested"]["evidence"] for n in first)
    assert not any("suggested" in row for n, row in rows.items() if n not in first)


def test_words_are_searched_in_all_that_is_said_of_a_row(offdrift):
    rows = json.loads(offdrift("methods", "--search", "QUANTIZED rollouts", "--json").stdout)
    assert {"tbpo"} <= set(rows) < {*METHODS, *SYSTEMS}
    both = json.loads(offdrift("methods", "--search", "clip", "--for", "moe", "--json").stdout)
    assert "espo" in both
    assert set(both) < set(SITUATIONS["moe"].methods)
    assert offdrift("methods", "--search", "nothing is called this").code == 1


def test_methods_that_most_frameworks_have_are_marked(offdrift):
    lines = offdrift("methods", width=200).stdout.splitlines()
    marked = {line.split()[0] for line in lines if line.split()[1:2] == ["★"]}
    assert marked == set(USED_BY)
    assert "used by" in offdrift("methods", "gspo").stdout


@pytest.mark.parametrize("width", [80, 120, 200])
@pytest.mark.parametrize("words", [[], ["gspo"], ["fipo"], ["keep_routing"], ["--help"], ["--for", "async"]])
def test_it_fits_the_terminal(offdrift, width, words):
    lines = offdrift("methods", *words, width=width).stdout.splitlines()
    assert len(lines) > 14
    assert max(len(line.rstrip()) for line in lines) <= width


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["methods", "trm_mx"], 1, "MethodError: no method 'trm_mx'; did you mean trm_max"),
        (["methods", "--for", "slow"], 1, "--for 'slow' is not one of: stale; moe; quantized; async; dense"),
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


CODE = """
import offdrift as od

@od.objective(on="staleness")
def fading{name}(ratio, advantages, *, width: float = 1.0):
    return -advantages * {detached} / (1 + width * (ratio - 1) ** 2)

def mine(width: float = 1.0):
    return od.Method(objective=fading{name}(width=width), aggregate="token_mean", summary="a surrogate that fades")
"""
SUMMARY, PASSED = "a surrogate that fades", "all 13 laws hold, or are not asked"
MEANING = "derivative: the gradient is the derivative of the loss, gates and weights held fixed"
GOOD, WRONG = CODE.format(name="", detached="ratio"), CODE.format(name="_wrong", detached="ratio.detach() * ratio")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(GOOD)
    (tmp_path / "wrong.py").write_text(WRONG)
    return tmp_path


def test_a_method_in_a_file_has_a_page_like_any_other(offdrift, folder):
    done = offdrift("methods", "mine.py:mine")
    assert done.code == 0
    assert SUMMARY in done.stdout
    assert "L = fading(ratio(staleness)), width=1.0" in done.stdout
    assert "override.objective.width" in done.stdout
    assert "override.width " in done.stdout
    assert str(folder / "mine.py") in done.stdout.replace("\n", "").replace(" ", "")
    row = json.loads(offdrift("methods", "mine.py:mine", "--json").stdout)["mine.py:mine"]
    assert (row["family"], row["sign"], row["settings"]["width"]) == ("your own code", "symmetric", 1.0)
    assert row["code"]["attribute"] == "mine"


def test_laws_that_hold_are_listed_and_the_command_ends_well(offdrift, folder):
    done = offdrift("methods", "mine.py:mine", "--check")
    assert done.code == 0
    assert PASSED in done.stdout
    told = json.loads(offdrift("methods", "mine.py:mine", "--check", "--json").stdout)
    assert told["holds"]
    assert [law["holds"] for law in told["laws"].values()] == [True] * 13
    assert told["code"]["file"] == str(folder / "mine.py")


def test_a_law_that_fails_is_shown_with_its_meaning_and_the_smallest_batch(offdrift, folder):
    done = offdrift("methods", "wrong.py:mine", "--check")
    assert done.code == 3
    assert "1 of 13" in done.stdout
    assert MEANING in done.stdout
    assert "smallest batch" in done.stdout
    told = json.loads(offdrift("methods", "wrong.py:mine", "--check", "--json").stdout)
    assert not told["holds"]
    failure = told["laws"]["derivative"]["failure"]
    # d/dx of r_stopped r / (1 + (r - 1)^2) lacks one of the two factors r: half of it at r near 1
    (logp,), (old,), (advantage,) = (failure["batch"][k] for k in ("logp", "logp_old", "advantages"))
    numbers = [float(x) for x in re.findall(r"-?\d+\.\d+", failure["words"])]
    assert abs(logp[0] - old[0]) < 0.01
    assert numbers[0] == pytest.approx(-advantage[0], rel=0.01)
    assert numbers[1] == pytest.approx(-2 * advantage[0], rel=0.01)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["methods", "--check"], 2, "--check holds one method to the laws; name it, as in mine.py:mine"),
        (["methods", "gone.py:mine", "--check"], 1, "gone.py:mine: there is no file"),
        (["methods", "r3", "--check"], 1, "no method 'r3'"),
        (["methods", "mine.py:gone"], 1, "mine.py has no 'gone'; its methods are mine"),
    ],
)
def test_a_check_without_a_method_is_refused(offdrift, folder, words, code, message):
    done = offdrift(*words)
    assert done.code == code
    assert message in said(done.stderr)


def test_a_row_of_the_table_can_be_held_to_them_too(offdrift):
    told = json.loads(offdrift("methods", "trm_max", "--check", "--json").stdout)
    assert told["holds"]
    assert told["code"] is None


def test_code_that_fails_is_a_law_that_fails(offdrift, folder):
    (folder / "raises.py").write_text(
        GOOD.replace("fading", "raising").replace("* ratio /", "* ratio.view(-1, 1000) /")
    )
    done = offdrift("methods", "raises.py:mine", "--check", "--json")
    assert done.code == 3
    words = json.loads(done.stdout)["laws"]["pieces"]["failure"]["words"]
    assert re.search(r"it raises MethodError: raising: .*raises\.py, line 6: RuntimeError", words)
