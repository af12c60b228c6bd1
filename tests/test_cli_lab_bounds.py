"""`offdrift lab bounds`: what a person sees, and what a program reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

import jaxtyping
import pytest

from offdrift.lab import pairs
from offdrift.lab import search as adversary
from tests.command import Done, command


@pytest.fixture
def offdrift(monkeypatch, capsys) -> Callable[..., Done]:
    """`offdrift lab bounds` in this process, in a wide terminal, with horizons up to 16."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    monkeypatch.setattr(pairs, "HORIZONS", (16,))
    monkeypatch.setattr(adversary, "arenas", lambda: [adversary.tree(2, t) for t in (2, 7)])
    return partial(command, monkeypatch, capsys, "lab", "bounds", width=170)


def test_no_violation_in_a_table_a_figure_and_a_file(offdrift, tmp_path):
    stem = tmp_path / "deep" / "bounds"
    done = offdrift("--pairs", "500", "--adversarial-steps", "2", "--restarts", "1", "--out", str(stem))
    assert done.code == 0, done.stderr
    for word in (
        "Coupling",
        "Sequence KL",
        "Masked, ratio region",
        "Variance (9)",
        "Hellinger (13)",
        "sharp",
        "paper",
        "T=16",
        "T=7",
    ):
        assert word in done.stdout, word
    assert "No violation in 500 random pairs and 2 searches." in done.stdout
    assert stem.with_suffix(".png").stat().st_size > 10_000
    assert "plotly" in stem.with_suffix(".html").read_text().lower()
    stored = json.loads(stem.with_suffix(".json").read_text())
    assert stored["pairs"] == 500
    assert stored["violations"] == 0
    assert stored["complete"]
    assert len(stored["random"]) == len(stored["searched"]) == 41
    assert sum(rows[0]["checked"] for rows in stored["by_drift"].values()) == 500
    assert sum(rows[0]["checked"] for rows in stored["by_horizon"].values()) == 500


def test_a_planted_constant_is_found_and_fails(offdrift):
    done = offdrift("--pairs", "1500", "--plant", "0.9", "--adversarial-steps", "0", "--json")
    assert done.code == 3
    found = json.loads(done.stdout)
    assert found["violations"] > 0
    assert found["factor"] == 0.9
    wrong = {r["bound"] for r in found["random"] if r["violations"]}
    assert {"coupling", "two-sided identity: worst case over R"} <= wrong
    assert found["searched"] == []
    done = offdrift("--pairs", "1500", "--plant", "0.9", "--adversarial-steps", "0")
    assert done.code == 3
    assert "violations in 1,500 random pairs and 0 searches (every bound times 0.9)" in done.stdout


def test_an_interrupt_shows_what_was_checked(offdrift, monkeypatch):
    whole = pairs.batches

    def cut(count: int, *, seed: int):
        for i, batch in enumerate(whole(count, seed=seed)):
            if i == 20:
                raise KeyboardInterrupt
            yield batch

    monkeypatch.setattr(pairs, "batches", cut)
    done = offdrift("--pairs", "1000")
    assert done.code == 130
    assert "interrupted" in done.stderr
    assert "No violation in" in done.stdout
    assert "1,000 random pairs" not in done.stdout


def test_an_interrupt_before_the_first_pair(offdrift, monkeypatch, tmp_path):
    def cut(count: int, *, seed: int):
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(pairs, "batches", cut)
    done = offdrift("--out", str(tmp_path / "none"))
    assert done.code == 130
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--pairs", "0"), "'--pairs'"),
        (("--plant", "0"), "--plant 0"),
        (("--plant", "nan"), "--plant nan"),
        (("--adversarial-steps", "-1"), "'--adversarial-steps'"),
        (("--restarts", "0"), "'--restarts'"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_runs(offdrift, words, says):
    done = offdrift(*words)
    assert done.code == 2
    assert says in done.stderr
    assert done.stdout == ""
