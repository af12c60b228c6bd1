"""Tasks: pure functions, disjoint splits, and verifiers that untrusted text can't move."""

from __future__ import annotations

import random
import re
import subprocess
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from reasoning_gym.factory import DATASETS

from offdrift.errors import RecipeError
from offdrift_lab.train.data import tasks
from offdrift_lab.train.data.problems import EVAL_SHARE, Problem, split_of
from offdrift_lab.train.data.rewards import exact_number
from offdrift_lab.train.data.tasks import TASKS, ProceduralTask, Task, evaluates, find_task

NAMES = [*TASKS, "reasoning_gym:gcd"]


@pytest.mark.parametrize("name", NAMES)
def test_sampling_is_a_pure_function_and_a_prefix(name: str) -> None:
    task = find_task(name)
    assert isinstance(task, Task)
    random.seed(0)
    first = task.sample(40, seed=7)
    random.seed(1)
    task.sample(5, seed=8)
    assert len(first) == 40
    assert task.sample(40, seed=7) == first
    assert task.sample(13, seed=7) == first[:13]


@pytest.mark.parametrize("name", NAMES)
def test_other_seeds_give_other_problems(name: str) -> None:
    """Neighboring seeds must not be one stream shifted by an entry."""
    task = find_task(name)
    batches = [{p.prompt for p in task.sample(32, seed=seed)} for seed in range(4)]
    shared = [len(a & b) for i, a in enumerate(batches) for b in batches[:i]]
    assert len(shared) == 6
    assert max(shared) <= 8


@pytest.mark.parametrize("name", NAMES)
def test_no_held_out_problem_is_ever_trained_on(name: str) -> None:
    task = find_task(name)
    train = {p.prompt for seed in range(5) for p in task.sample(100, seed=seed)}
    held_out = {p.prompt for seed in range(5) for p in task.sample(20, seed=seed, split="eval")}
    assert {split_of(prompt) for prompt in train} == {"train"}
    assert {split_of(prompt) for prompt in held_out} == {"eval"}
    assert len(train) > 100
    assert len(held_out) > 20
    assert not train & held_out


def test_the_held_out_share_is_what_it_says() -> None:
    """Binomial(10000, 1/10) has a standard deviation of 30."""
    held_out = sum(split_of(f"{i}+0+0=") == "eval" for i in range(10_000))
    assert abs(held_out - 10_000 / EVAL_SHARE) < 150


def test_arithmetic_is_the_sum_of_its_prompt() -> None:
    problems = find_task("arithmetic").sample(300, seed=0)
    terms = [tuple(map(int, re.fullmatch(r"(\d+)\+(\d+)\+(\d)=", p.prompt).groups())) for p in problems]  # type: ignore[union-attr]
    assert len(terms) == 300
    assert all(a < 100 and b < 100 for a, b, _ in terms)
    assert max(max(a, b) for a, b, _ in terms) > 95
    assert len({c for _, _, c in terms}) == 10
    for (a, b, c), problem in zip(terms, problems, strict=True):
        assert problem.answer == str(a + b + c)
        assert problem.demonstration == f"{a + b}+{c}={a + b + c}\n"
        assert not problem.chat


def test_every_demonstration_earns_the_full_reward() -> None:
    task = find_task("arithmetic")
    problems = task.sample(50, seed=3) + task.sample(50, seed=3, split="eval")
    assert [task.reward(p.demonstration or "", p) for p in problems] == [1.0] * 100


def test_backwards_is_shown_with_a_digit_in_six_wrong() -> None:
    """The answer earns 1 and nothing else does; mistakes fall on each of 6000 digits with probability 1/6 (standard
    deviation 29), to each of the nine other digits alike (111 +- 10)."""
    task = find_task("backwards")
    problems = task.sample(1000, seed=0)
    assert all(p.answer == p.prompt[:6][::-1] and p.prompt[6:] == "=" for p in problems)
    assert [task.reward(p.answer, p) for p in problems[:50]] == [1.0] * 50
    assert [task.reward(p.prompt[:6], p) for p in problems[:50] if p.prompt[:6] != p.answer] == [0.0] * 50
    pairs = [pair for p in problems for pair in zip(p.demonstration or "", p.answer, strict=True)]
    off = [(int(a) - int(b)) % 10 for a, b in pairs if a != b]
    assert abs(len(off) - 1000) < 150
    assert all(abs(off.count(k) - len(off) / 9) < 50 for k in range(1, 10))


def test_copies_are_shown_with_a_digit_in_114_wrong() -> None:
    """Mistakes fall on each of 114,000 digits with probability 1/114 (1000 +- 32), and a third of the demonstrations
    has none: (113/114)^114 = 0.366 (366 +- 15 of 1000)."""
    task = find_task("copies")
    problems = task.sample(1000, seed=0)
    assert all(p.answer == "".join(c + p.prompt[1:] for c in "bcdefghijklmnopqrst") for p in problems)
    off = [sum(a != b for a, b in zip(p.demonstration or "", p.answer, strict=True)) for p in problems]
    assert abs(sum(off) - 1000) < 150
    assert abs(off.count(0) - 366) < 75
    assert all(a.isdigit() == b.isdigit() for p in problems for a, b in zip(p.demonstration or "", p.answer))
    assert [task.reward(p.answer, p) for p in problems[:50]] == [1.0] * 50
    assert [task.reward(p.answer[:-1], p) for p in problems[:50]] == [0.0] * 50


ANSWER_51 = Problem("12+34+5=", "51")
RIGHT = ("46+5=51\n", "51", "so it is 51.", "051", "51.0", "60-51", "(60)-51")
WRONG = (
    "",
    "46+5=",
    "46+5=52",
    "-51",
    "510",
    "151",
    "5.1",
    "1.51",
    "5 1",
    "51\n7",
    "__import__('os').abort()",
    "٥١",
    "51e9",
)
WRONG += ("12+34+5", "5" * 100_000, "0" * 100_000 + "51")
"""The first of the last three is worth 51 to whoever evaluates it."""


def test_the_last_number_must_be_the_answer() -> None:
    assert [exact_number(text, ANSWER_51) for text in RIGHT] == [1.0] * len(RIGHT)
    assert [exact_number(text, ANSWER_51) for text in WRONG] == [0.0] * len(WRONG)
    negative = Problem("5 - 9 =", "-4", chat=True)
    assert [exact_number(text, negative) for text in ("5 - 9 = -4", "The answer is 4")] == [1.0, 0.0]


@pytest.mark.parametrize("name", ["arithmetic", "chat-arithmetic", "reasoning_gym:gcd"])
@given(text=st.text(alphabet=st.characters(), max_size=200))
@example(text="\x00\ud800")
@example(text="<answer>" * 50)
@example(text="\\boxed{9**9**9**9}")
@settings(max_examples=60, deadline=None)
def test_no_text_breaks_a_verifier(name: str, text: str) -> None:
    task = find_task(name)
    reward = task.reward(text, Problem("12+34+5=", "51"))
    assert 0.0 <= reward <= 1.0
    if "51" not in text.replace(",", ""):
        assert reward < 1.0


HOSTILE = """
from offdrift_lab.train.data.problems import Problem
from offdrift_lab.train.data.rewards import exact_number
hostile = ["1" * 10**6, "1," * 10**6, "1.-" * 10**6, "-" * 10**6, "\\\\boxed{" * 10**5]
print([exact_number(text, Problem("12+34+5=", "51")) for text in hostile])
"""


def test_long_text_is_read_in_linear_time() -> None:
    """A linear pattern reads these in milliseconds; one that backtracks would not come back."""
    done = subprocess.run([sys.executable, "-c", HOSTILE], capture_output=True, text=True, timeout=300)
    assert (done.stdout.strip(), done.returncode) == (str([0.0] * 5), 0), done.stderr


def test_chat_arithmetic_asks_in_words() -> None:
    problem = find_task("chat-arithmetic").sample(1, seed=0)[0]
    assert problem.chat
    assert problem.demonstration is None
    question = re.search(r"(\d+) ([+-]) (\d+) =", problem.prompt)
    assert question
    left, operator, right = question.groups()
    sign = 1 if operator == "+" else -1
    assert problem.answer == str(int(left) + sign * int(right))


def test_a_reasoning_gym_task_uses_its_own_score() -> None:
    """decimal scoring of gcd gives partial credit to text that contains the answer."""
    task = find_task("reasoning_gym:gcd")
    problem = task.sample(1, seed=0)[0]
    assert task.reward(problem.answer, problem) == 1.0
    assert task.reward(f"I think <answer>{problem.answer}</answer>.", problem) == 1.0
    assert task.reward("none", problem) == 0.0
    assert problem.metadata


def test_scorers_that_run_completions_are_refused() -> None:
    """The list was read off the sources of reasoning-gym 0.1.25; newer ones are refused too."""
    evaluating = {"binary_matrix", "countdown", "intermediate_integration", "n_queens", "number_sorting"}
    evaluating |= {"polynomial_multiplication", "puzzle24", "simple_integration", "spiral_matrix", "string_insertion"}
    refused = {name for name, (dataset, _) in DATASETS.items() if evaluates(dataset.score_answer)}
    assert evaluating <= refused
    assert "chain_sum" not in refused
    with pytest.raises(RecipeError, match=r"spiral_matrix.*runs the completion as code"):
        find_task("reasoning_gym:spiral_matrix")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("arithmetics", r"task = 'arithmetics' is not known.*'arithmetic'.*reasoning_gym:NAME"),
        ("reasoning_gym:", r"not known"),
        ("reasoning_gym:nope", r"no data set 'nope'; it has .*chain_sum"),
        ("reasoning_gym:composite", r"cannot build it from its defaults \(Must specify"),
    ],
)
def test_unknown_tasks_are_refused_by_name(name: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        find_task(name)


def test_a_generator_with_too_few_questions_is_named() -> None:
    """One question is all there is, and it is in one of the splits."""
    one = {"question": "1+1=", "answer": "2"}
    task = ProceduralTask("one", lambda seed, size: [one] * size, tasks._question, exact_number)
    other = "eval" if split_of("1+1=") == "train" else "train"
    assert len(task.sample(3, seed=0, split=split_of("1+1="))) == 3
    with pytest.raises(RecipeError, match=r"'one' gave 0 of 3 "):
        task.sample(3, seed=0, split=other)


def test_a_scorer_that_chokes_gives_nothing() -> None:
    class Broken:
        def score_answer(self, answer: str, entry: dict) -> float:
            raise RecursionError(answer)

    class Generous:
        def score_answer(self, answer: str, entry: dict) -> float:
            return 7.0

    assert tasks._own_score(Broken(), "51", ANSWER_51) == 0.0
    assert tasks._own_score(Generous(), "51", ANSWER_51) == 1.0
