"""Names that a shell completes, through the shell's own call of the program."""

import os
import subprocess
import sys

import pytest

from offdrift.cli import complete
from offdrift.judge import load_rules
from offdrift.methods import METHODS


def completed(tmp_path, words: str) -> list[str]:
    """What bash is offered for the last of these words."""
    env = {**os.environ, "_OFFDRIFT_COMPLETE": "complete_bash", "COMP_WORDS": words}
    env["COMP_CWORD"] = str(words.count(" "))
    done = subprocess.run([sys.executable, "-m", "offdrift"], env=env, capture_output=True, text=True, cwd=tmp_path)
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("offdrift methods gsp", {"gspo"}),
        ("offdrift methods keep_", {"keep_routing"}),
        ("offdrift audit log --method trm_m", {"trm_max"}),
        ("offdrift docs integrations/t", {"integrations/trl"}),
        ("offdrift rules stale_eng", {"stale_engine"}),
        ("offdrift schedules are", {"areal"}),
        ("offdrift train backw", {"backwards"}),
        ("offdrift train mi", {"mine.toml", "mix/"}),
        ("offdrift sweep lag-law", {"lag-law", "lag-law-short"}),
        ("offdrift wat", {"watch"}),
    ],
)
def test_a_shell_is_offered_names(tmp_path, words, names):
    (tmp_path / "mine.toml").write_text("")
    (tmp_path / "mix").mkdir()
    (tmp_path / "mix.txt").write_text("")
    assert set(completed(tmp_path, words)) >= names
    assert "mix.txt" not in completed(tmp_path, words)


def test_names_are_those_of_the_tables():
    assert set(complete.rows_of_methods("")) == set(METHODS)
    assert set(complete.rows_of_methods("")) < set(complete.method_names(""))
    assert set(complete.rule_names("")) >= set(load_rules().rules)


def test_completion_waits_for_no_torch(tmp_path):
    code = "import sys; from offdrift.cli import complete as c; c.method_names('g'), c.page_names('r'), c.rule_names('s'); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("short", "long"), [("-V", "--version"), ("-h", "--help")])
def test_the_short_options_do_what_the_long_ones_do(tmp_path, short, long):
    told = [
        subprocess.run([sys.executable, "-m", "offdrift", *words], capture_output=True, text=True, cwd=tmp_path).stdout
        for words in ((short,), (long,), ("demo", short), ("demo", long))
    ]
    assert told[0] == told[1] != ""
    assert short == "-V" or told[2] == told[3] != ""
