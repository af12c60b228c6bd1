"""`offdrift bound` as a person uses it: examples that run, answers that hold, mistakes that are named."""

from __future__ import annotations

import json
import re
import shlex

import pytest
from typer.testing import CliRunner, Result

from offdrift.certificate import all_bounds, tightest
from offdrift.cli import app
from offdrift.errors import OffdriftError

TABLE_1 = "--T 4096 --delta 1e-4 --eps 5e-3 --kl-seq 0.01 --tv-seq 0.05"


def bound(words: str, width: int = 120, monkeypatch: pytest.MonkeyPatch | None = None) -> Result:
    if monkeypatch is not None:
        monkeypatch.setenv("COLUMNS", str(width))
    return CliRunner().invoke(app, ["bound", *shlex.split(words)])


def answers(words: str) -> dict[str, dict]:
    done = bound(words + " --json")
    assert done.exit_code == 0, done.output
    return {row["constants"]: row for row in json.loads(done.stdout)}


def test_the_table_and_where_it_becomes_vacuous(monkeypatch):
    for width, present in ((120, True), (80, False)):
        done = bound(TABLE_1, width, monkeypatch)
        assert done.exit_code == 0
        text = " ".join(done.stdout.split())
        assert "Vacuous from no T (sharp), T = 1,000 (paper)" in text
        assert "TV to token 3, KL to token 51, TV_seq to token 4,096" in text
        assert ("eq. 12" in text) is present
        assert "…" not in text
    paper = bound(TABLE_1 + " --constants paper", 120, monkeypatch).stdout
    assert "4.096" in paper
    assert "sharp" not in paper


def test_json_is_the_rows_as_before():
    rows = json.loads(bound(TABLE_1 + " --json").stdout)
    assert [r["bound"] for r in rows][-1] == "unified"
    assert len(rows) == 11
    assert rows[-1]["paper"] == pytest.approx(4.096)
    assert rows[-1]["vacuous_from"] == {"paper": 1000, "sharp": None}


def test_each_question_is_answered():
    for constants, row in answers("--T 4096 --target 1 --solve delta").items():
        value = tightest(all_bounds(horizon=4096, delta=row["value"], constants=constants)).value
        assert value == pytest.approx(1, rel=1e-9)
    for constants, row in answers("--T 4096 --delta 1e-2 --target 1 --solve eps").items():
        value = tightest(all_bounds(horizon=4096, delta=1e-2, eps=row["value"], constants=constants)).value
        assert value == pytest.approx(1, rel=1e-9)
    for constants, row in answers("--T 4096 --delta 1e-2 --solve kl_seq").items():
        value = tightest(all_bounds(horizon=4096, delta=1e-2, kl_seq=row["value"], constants=constants)).value
        assert value == pytest.approx(1, rel=1e-9)
    found = answers("--delta 1e-4 --solve T")
    assert (found["sharp"]["value"], found["paper"]["value"]) == (9999, 383)
    assert list(answers("--delta 1e-4 --solve T --constants sharp")) == ["sharp"]


def test_bounds_beyond_the_paper_and_their_questions_backwards():
    rows = {r["bound"]: r for r in json.loads(bound("--T 3 --delta inf --chi2 0.1 --reward-sd 0.2 --json").stdout)}
    assert rows["variance"]["sharp"] == pytest.approx(0.2 * 0.031**0.5)
    assert rows["unified"]["sharp"] == rows["variance"]["sharp"]
    assert rows["variance"]["paper"] is None
    far = "--T 1000 --delta inf --target 0.1 --solve"
    for words, want, row in (
        ("--T 2 --delta inf --target 0.1 --solve chi2 --reward-sd 0.2", 0.5, "variance"),
        ("--T 2 --delta inf --target 0.1 --solve reward_sd --chi2 0.5", 0.2, "variance"),
        (f"{far} hellinger_seq", 0.1 / 37, "sequence_hellinger"),
        (f"{far} kl_rewarded --kl-unrewarded 0.01", 0.1, "two_sided"),
        (f"{far} kl_unrewarded --kl-rewarded 0.01", 0.1, "two_sided"),
    ):
        found = answers(words)["sharp"]
        assert (found["value"], found["attained_by"]) == (pytest.approx(want), row)
    # .05 sqrt(2^T - 1 - T): .05 at T = 2, .1 at T = 3.
    longest = answers("--delta inf --chi2 1 --reward-sd 0.05 --solve T --target 0.0999")["sharp"]
    assert (longest["value"], longest["attained_by"]) == (2, "variance")
    anything = answers("--T 2 --delta inf --target 0.1 --solve reward_sd --chi2 0.01")["sharp"]
    assert (anything["any"], anything["value"]) == (True, None)


def test_the_target_is_the_reward_range_unless_told():
    told = answers("--T 100 --reward-range 5 --solve delta --target 5")
    assert answers("--T 100 --reward-range 5 --solve delta") == told
    assert answers("--T 100 --solve delta")["sharp"]["value"] == pytest.approx(told["sharp"]["value"], rel=1e-9)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--T 0 --delta 0.1", "horizon = 0"),
        ("--T -5 --delta 0.1", "horizon = -5"),
        ("--T 10 --delta nan", "delta = nan"),
        ("--T 10 --delta inf --chi2 -1", "chi2 = -1"),
        ("--T 10 --delta inf --chi2 1 --reward-sd 0.6", "reward_sd = 0.6; rewards in a range of 1"),
        ("--T 10 --delta 1 --solve reward_sd", "solving for reward_sd needs chi2"),
        ("--T 10 --delta -1", "delta = -1"),
        ("--T 10 --delta 0.1 --eps 1.5", "eps = 1.5; a total variation lies in [0, 1]"),
        ("--T 10 --delta 0.1 --reward-range 0", "reward_range = 0"),
        ("--T 10 --delta 0.1 --kl-seq 0.1 --kl-rate 0.1", "kl_seq and kl_rate are both given"),
        ("--T 10 --delta 0.1 --kl-rate nan", "kl_rate = nan"),
        ("--T 10 --solve delta --target nan", "target = nan"),
        ("--T 10 --solve delta --target -1", "target = -1"),
        ("--T 0 --solve delta", "horizon = 0"),
        ("--T 10 --delta 0.1 --solve delta", "delta is given and solved for"),
        ("--T 10 --delta 0.1 --solve kl_seq --kl-rate 0.1", "kl_seq is solved for"),
        ("--delta 0.1 --solve T --target 0", "target = 0"),
        ("--T 0 --delta 0.1 --plot nowhere", "horizon = 0"),
    ],
)
def test_numbers_that_cannot_be_are_our_errors(words, said):
    done = bound(words)
    assert isinstance(done.exception, OffdriftError), done.output
    assert said in str(done.exception)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--delta 0.1", "give --T"),
        ("--T 10", "give --delta"),
        ("--T 10 --delta 0.1 --target 1", "--target belongs to --solve"),
        ("--T 10 --delta 0.1 --reward-sd 0.1", "--reward-sd belongs to --chi2"),
        ("--T 10 --delta 0.1 --solve T", "--T is given and solved for"),
        ("--T 10 --solve eps", "give --delta"),
        ("--T 10 --solve delta --plot x", "leave out --solve"),
        ("--T 10 --delta 0.1 --constants half", "half"),
        ("--T 1.5 --delta 0.1", "'--T'"),
    ],
)
def test_a_command_that_makes_no_sense_says_what_is_missing(words, said):
    done = bound(words)
    assert done.exit_code == 2
    assert said in re.sub(r"\s*│?\n│?\s*", " ", done.output)


def test_the_plot_is_two_files(tmp_path, monkeypatch):
    done = bound(f"{TABLE_1} --plot {tmp_path / 'bounds'}", monkeypatch=monkeypatch)
    assert done.exit_code == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bounds.html", "bounds.png"]
    assert str(tmp_path / "bounds.png") in done.stdout
    silent = bound(f"--T 20 --delta 0.01 --json --plot {tmp_path / 'two'}")
    assert json.loads(silent.stdout)[-1]["bound"] == "unified"
    assert (tmp_path / "two.html").exists()


def test_every_example_of_the_help_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    examples = [line.strip() for line in bound("--help").stdout.splitlines() if line.startswith("  offdrift bound ")]
    assert len(examples) == 5
    for example in examples:
        done = bound(example.removeprefix("offdrift bound"))
        assert done.exit_code == 0, done.output
    assert (tmp_path / "bounds.png").exists()
