"""Verifiable tasks: their problems, and the rewards of completions.

A task is a pure function of its arguments, and `sample(n)` is a prefix of `sample(n + 1)`. A hash of the prompt decides
whether a problem is held out, so no "eval" problem can ever be trained on, whatever the seeds. Completions are
untrusted text: they are matched, never evaluated, since to whoever evaluates it `12+34+5` *is* `51`.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import math
import random
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from offdrift.errors import RecipeError
from offdrift_lab.train.data.environments import ENVIRONMENTS, is_environment
from offdrift_lab.train.data.problems import EVAL_SHARE, Problem, ProblemFile, Split, digest, read_problems, split_of
from offdrift_lab.train.data.rewards import (
    VERIFIERS,
    OwnReward,
    RewardFunction,
    Rewards,
    exact_number,
    exact_text,
    find_reward,
)

_CHUNK = 64
_LONGEST_ANSWER = 10_000
_EVALUATORS = frozenset({"eval", "exec", "parse_expr", "parse_latex", "sympify"})


@runtime_checkable
class Task(Protocol):
    """Interface of a task. Add your own with `TASKS["mine"] = task`."""

    @property
    def name(self) -> str: ...

    def sample(self, n: int, *, seed: int, split: Split = "train") -> list[Problem]:
        """`n` problems of one split, a pure function of the arguments."""
        ...

    def reward(self, completion: str, problem: Problem) -> float:
        """The completion's reward, in [0, 1]. Never raises, whatever the text."""
        ...


@dataclass(frozen=True)
class ProceduralTask:
    """A task over a procedural generator of the reasoning-gym package.

    Args:
        dataset: the generator for a seed and a number of entries.
        problem: how one of its entries is asked.
        score: what a completion earns, in [0, 1].

    Example:
        >>> problem = find_task("arithmetic").sample(1, seed=0)[0]
        >>> find_task("arithmetic").reward(problem.demonstration, problem)
        1.0
    """

    name: str
    dataset: Callable[[int, int], Any]
    problem: Callable[[Mapping[str, Any]], Problem]
    score: Callable[[str, Problem], float]

    def sample(self, n: int, *, seed: int, split: Split = "train") -> list[Problem]:
        """`n` problems of one split, a pure function of the arguments.

        Raises: `RecipeError` if the generator has too few different problems to fill the split.
        """
        limit = _CHUNK * 50 + 4 * EVAL_SHARE * n

        def draws() -> Iterator[Problem]:
            for chunk in itertools.count():
                # A generator seed of its own, far from the others: generators add the entry's index to it. Below 2**32,
                # which is all that numpy's generators take.
                entries = self.dataset(digest("problems", self.name, split, seed, chunk) % (2**32 - _CHUNK), _CHUNK)
                yield from (self.problem(entries[i]) for i in range(_CHUNK))

        of_split = (p for p in itertools.islice(draws(), limit) if split_of(p.prompt) == split)
        problems = list(itertools.islice(of_split, n))
        if len(problems) < n:
            raise RecipeError(
                f"task {self.name!r} gave {len(problems)} of {n} {split} problems in {limit} draws; it has too few "
                "different questions for a held-out split: ask for fewer, or configure the generator to vary more"
            )
        return problems

    def reward(self, completion: str, problem: Problem) -> float:
        """The completion's reward, in [0, 1]. Never raises, whatever the text."""
        return self.score(completion, problem)


@dataclass(frozen=True)
class OwnTask:
    """Problems of a file or of another task, with a reward of the user's choice."""

    name: str
    problems: Task | ProblemFile
    rewards: RewardFunction

    def sample(self, n: int, *, seed: int, split: Split = "train") -> list[Problem]:
        """Problems of one split; see `ProblemFile.sample`."""
        return self.problems.sample(n, seed=seed, split=split)

    def reward(self, completion: str, problem: Problem) -> float:
        """Reward of one completion. Raises: `RewardError` if a function of the user's fails."""
        return self.rewards([completion], [problem]).total[0]


def rewards_of(task: Task, completions: Sequence[str], problems: Sequence[Problem]) -> Rewards:
    """Rewards of a batch, with their components where the task's reward has any."""
    if isinstance(task, OwnTask):
        return task.rewards(completions, problems)
    return Rewards(tuple(map(task.reward, completions, problems)), {})


def find_task(
    name: str,
    reward: str | RewardFunction | None = None,
    *,
    reward_range: tuple[float, float] = (-math.inf, math.inf),
    folder: Path | None = None,
) -> Task:
    """The task of this name: a row of `TASKS`, `reasoning_gym:NAME`, or a file of problems, NAME.jsonl.

    Args:
        reward: what completions earn in place of the task's own reward; see `rewards.find_reward`.
        reward_range: smallest and largest reward that a first trial of a function may return.
        folder: where a function is looked for besides the working folder.

    Raises: `RecipeError` if there is no such task or reward, or its scorer would evaluate completions;
        `RewardError` if a function of the user's fails on a first problem.
    """
    is_file = name.endswith(".jsonl")
    if is_file and reward is None:
        raise RecipeError(
            f"task = {name!r} is a file of problems and needs a reward: set reward to one of "
            f'{", ".join(map(repr, VERIFIERS))}, or to a function of your own, "rewards.py:score"'
        )
    problems = read_problems(Path(name).expanduser()) if is_file else _named_task(name)
    if reward is None:
        assert not isinstance(problems, ProblemFile)
        return problems
    function = find_reward(reward, folder=folder) if isinstance(reward, str) else reward
    if isinstance(function, OwnReward):
        function.check(problems.sample(1, seed=0)[0], reward_range)
    return OwnTask(name, problems, function)


def check_task_name(name: str) -> None:
    """Refuse a name of no task, environment, data set or file; files and code behind a name are not opened.

    Raises: `RecipeError` naming the tasks that there are.
    """
    if not (_is_named(name) or name.endswith(".jsonl") or is_environment(name)):
        raise _unknown(name)


def _is_named(name: str) -> bool:
    family, _, dataset = name.partition(":")
    return name in TASKS or (family == "reasoning_gym" and bool(dataset))


def _unknown(name: str) -> RecipeError:
    return RecipeError(
        f"task = {name!r} is not known; choose one of {', '.join(map(repr, sorted(TASKS)))}, "
        f"or the environments {', '.join(map(repr, sorted(ENVIRONMENTS)))}; "
        '"reasoning_gym:NAME" for a data set of that package, a file of problems ("problems.jsonl"), or add a Task to '
        "offdrift_lab.train.data.tasks.TASKS"
    )


def _named_task(name: str) -> Task:
    if not _is_named(name):
        raise _unknown(name)
    return TASKS[name] if name in TASKS else _reasoning_gym_task(name.partition(":")[2])


@cache
def _sums(seed: int, size: int) -> Any:
    """Problems of reasoning-gym's chain_sum, whose terms have two digits at most and the last one digit."""
    from reasoning_gym.arithmetic.chain_sum import ChainSumConfig, ChainSumDataset

    class TwoDigitSums(ChainSumDataset):
        def _generate_task(self, rng, num_terms, min_value, max_value):  # type: ignore
            a, b, c = rng.randrange(100), rng.randrange(100), rng.randrange(10)
            return f"{a}+{b}+{c}", a + b + c

    return TwoDigitSums(ChainSumConfig(min_terms=3, max_terms=3, seed=seed, size=size))


def _written_sum(entry: Mapping[str, Any]) -> Problem:
    """`12+34+5=`, shown as `46+5=51`: the first sum is written down, then the result."""
    expression, answer = entry["metadata"]["expression"], entry["answer"]
    a, b, c = expression.split("+")
    return Problem(f"{expression}=", answer, demonstration=f"{int(a) + int(b)}+{c}={answer}\n")


def _named(dataset: str, seed: int, size: int, **config: Any) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(dataset, seed=seed, size=size, **config)


def _question(entry: Mapping[str, Any]) -> Problem:
    return Problem(entry["question"], str(entry["answer"]), chat=True, metadata=entry.get("metadata") or {})


def _own_score(scorer: Any, completion: str, problem: Problem) -> float:
    """The data set's own score of what stands in the answer tags, or else of the whole text."""
    from reasoning_gym.utils import extract_answer

    text = completion[-_LONGEST_ANSWER:]
    entry = {"question": problem.prompt, "answer": problem.answer, "metadata": problem.metadata}
    try:
        answer = extract_answer(text)
        score = scorer.score_answer(text.strip() if answer is None else answer, entry)
        return min(max(float(score), 0.0), 1.0)
    except Exception:  # a scorer that chokes on a text has not been given the answer
        return 0.0


@cache
def _reasoning_gym_task(dataset: str) -> ProceduralTask:
    from reasoning_gym.factory import DATASETS

    name = f"reasoning_gym:{dataset}"
    if dataset not in DATASETS:
        raise RecipeError(
            f"task = {name!r}: reasoning-gym has no data set {dataset!r}; it has {', '.join(sorted(DATASETS))}"
        )
    if evaluates(DATASETS[dataset][0].score_answer):
        raise RecipeError(
            f"task = {name!r}: the scorer of this data set runs the completion as code, and "
            "completions are untrusted text; choose another data set, or add a Task with your own "
            "verifier to offdrift_lab.train.data.tasks.TASKS"
        )
    try:
        scorer = _named(dataset, 0, 1)
    except Exception as error:
        raise RecipeError(
            f"task = {name!r}: reasoning-gym cannot build it from its defaults ({error}); add a "
            "ProceduralTask with your own configuration to offdrift_lab.train.data.tasks.TASKS"
        ) from error
    return ProceduralTask(name, partial(_named, dataset), _question, partial(_own_score, scorer))


def evaluates(function: Callable[..., Any]) -> bool:
    """Whether a function's own body calls `eval`, `exec` or a parser that does."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    names = (f.id if isinstance(f, ast.Name) else getattr(f, "attr", "") for f in calls)
    return not _EVALUATORS.isdisjoint(names)


def _number_only(entry: Mapping[str, Any]) -> Problem:
    """A question that SmolLM2-135M half knows: it adds, and likes to talk about it."""
    expression, answer = entry["metadata"]["expression"], str(entry["answer"])
    return Problem(f"What is {expression}? Answer with the number only.", answer, demonstration=answer, chat=True)


def _digit_strings(seed: int, size: int) -> list[dict[str, str]]:
    """Strings of six digits, all equally likely."""
    rng = random.Random(seed)
    return [{"digits": "".join(rng.choices("0123456789", k=6))} for _ in range(size)]


def _mistaken(answer: str, digits: str, odds: int) -> str:
    """An answer with every digit wrong with a probability of 1/odds, decided by the question's digits."""
    drawn = (digest("mistake", digits, i) for i in range(len(answer)))
    pairs = zip(answer, drawn)
    return "".join(str((int(c) + 1 + x // odds % 9) % 10) if c.isdigit() and x % odds == 0 else c for c, x in pairs)


def _backwards(entry: Mapping[str, Any]) -> Problem:
    """`381204=`, to be answered by `402183`, but shown with every digit wrong with a probability of 1/6."""
    digits = entry["digits"]
    return Problem(f"{digits}=", digits[::-1], demonstration=_mistaken(digits[::-1], digits, 6))


_COPIES = "bcdefghijklmnopqrst"
"""133 tokens with the tiny tokenizer: long enough that masks by the mean and by the largest token KL differ. Letters
tell where to end: a model of one layer cannot count."""


def _copies(entry: Mapping[str, Any]) -> Problem:
    """`a381204`, to be continued by `b381204c381204` and so on to `t`, but shown with a digit in 114 wrong."""
    digits = entry["digits"]
    answer = "".join(letter + digits for letter in _COPIES)
    return Problem(f"a{digits}", answer, demonstration=_mistaken(answer, digits, len(_COPIES) * len(digits)))


_CHAT_SUMS = partial(_named, "chain_sum", min_terms=2, max_terms=2, min_digits=1, max_digits=2)

TASKS: dict[str, Task] = {
    "arithmetic": ProceduralTask("arithmetic", _sums, _written_sum, exact_number),
    "backwards": ProceduralTask("backwards", _digit_strings, _backwards, exact_text),
    "copies": ProceduralTask("copies", _digit_strings, _copies, exact_text),
    "chat-arithmetic": ProceduralTask("chat-arithmetic", _CHAT_SUMS, _question, exact_number),
    "chat-sums": ProceduralTask("chat-sums", _CHAT_SUMS, _number_only, exact_number),
}
"""Tasks by name. `arithmetic`, `backwards` and `copies` are sized for the tiny models, the others for a chat model;
`chat-sums` asks for the number only. The demonstrations of `backwards` and `copies` have mistakes, so that a model that
has learned them by heart is right in (5/6)^6 = 0.33 or (113/114)^114 = 0.37 of its answers, and reinforcement learning
has something to repair."""
