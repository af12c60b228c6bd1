"""Mathematical answers: what counts as equal, and what a hostile completion costs."""

from __future__ import annotations

import subprocess
import time

import pytest

from offdrift.errors import RecipeError
from offdrift_lab.train.data import math_answers
from offdrift_lab.train.data.math_answers import MathVerifier
from offdrift_lab.train.data.problems import Problem
from offdrift_lab.train.data.rewards import find_reward


@pytest.fixture(scope="module")
def verifier():
    made = MathVerifier()
    yield made
    made.close()


def score(verifier, answer, completion):
    return verifier(completion, Problem("?", answer))


EQUAL = [
    ("1/2", r"so \boxed{\frac{1}{2}}."), ("1/2", "$0.5$"), (r"\frac12", r"$\frac{2}{4}$"), ("1/2", "It is 1/2"),
    ("46", "$46.0$"), ("46", "the answer is 46"), ("46", "46.0"), ("-9", "so -9."), ("1000", "$1{,}000$"),
    ("1000", "1,000 of them"), (r"\{1,2\}", r"$\{2, 1\}$"), ("(0,1)", "$(0,1)$"), ("[0,1)", r"\boxed{[0, 1)}"),
    ("50%", r"$50\%$"), ("50\\%", "50%"), ("3 cm", r"$3\text{ cm}$"), ("x+1", "$1+x$"),
    ("3", "$x=3$"), (r"\sqrt{8}", r"$2\sqrt{2}$"), (r"\infty", r"$\infty$"), ("2", "$1$? No: $2$"),
    ("$\\pi$", r"\boxed{\pi}"),
]  # fmt: skip
DIFFERENT = [
    ("46", "64"), ("46", "460"), ("1/2", "2"), ("(0,1)", "$[0,1)$"), (r"\{1,2\}", r"$\{1,2,3\}$"),
    ("0.333", r"$\frac{1}{3}$"), ("x+1", "$x-1$"), ("2", "$2$? No: $3$"), ("51", "12+34+5"), ("51", "$12+34+6$"),
    ("46", ""), ("46", "no number here"), ("46", r"\boxed{"), ("46", r"$\frac{46}{$"), ("46", "\ud800 46x"[:1]),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "completion"), EQUAL)
def test_equal_however_it_is_written(verifier, answer, completion):
    assert score(verifier, answer, completion) == 1.0


@pytest.mark.parametrize(("answer", "completion"), DIFFERENT)
def test_what_is_not_the_answer_earns_nothing(verifier, answer, completion):
    assert score(verifier, answer, completion) == 0.0


def test_where_it_scores_wrong_the_page_of_tasks_says_so(verifier):
    """Units are dropped, a percentage in LaTeX is no fraction, and a sum that was not worked out is its result."""
    assert score(verifier, "3 cm", r"$3\text{ m}$") == 1.0
    assert score(verifier, "50%", "$0.5$") == 0.0
    assert score(verifier, "51", "$12+34+5$") == 1.0


@pytest.mark.parametrize("bomb", ["$9^{9^{9^{9}}}$", "$10^{10^{9}} - 10^{10^{9}} + 46$", "$" + "(" * 5000 + "$"])
def test_a_formula_that_costs_an_hour_earns_nothing_and_the_next_is_scored(verifier, monkeypatch, bomb):
    score(verifier, "1", "1")
    monkeypatch.setattr(math_answers, "SECONDS", 1.0)
    start = time.monotonic()
    assert score(verifier, "46", bomb) == 0.0
    assert time.monotonic() - start < 30
    monkeypatch.undo()
    assert score(verifier, "46", "$46$") == 1.0


def test_a_completion_is_never_evaluated(verifier, tmp_path):
    path = tmp_path / "written"
    code = f"__import__('pathlib').Path('{path}').write_text('x')"
    for text in (code, f"${code}$", f"\\boxed{{{code}}}", f"`{code}` 46"):
        score(verifier, "46", text)
    assert not path.exists()
    assert score(verifier, "46", "46") == 1.0


def test_a_child_that_was_killed_is_replaced(verifier):
    score(verifier, "1", "1")
    verifier._child.kill()
    verifier._child.wait()
    assert score(verifier, "1", "1") == 0.0
    assert score(verifier, "1", "1") == 1.0


def test_the_name_in_a_recipe_gives_it_and_a_missing_package_is_named(monkeypatch):
    assert find_reward("math")(["$0.5$", "3"], [Problem("?", "1/2")] * 2).total == (1.0, 0.0)
    real = subprocess.Popen
    broken = lambda command, **options: real([command[0], "-c", "import no_such_module"], **options)  # noqa: E731
    monkeypatch.setattr(subprocess, "Popen", broken)
    with pytest.raises(RecipeError, match=r"math-verify, which does not start: .*no_such_module"):
        MathVerifier()("1", Problem("?", "1"))
