"""Verifiable tasks: their problems, and the rewards of completions.

A task is a pure function of its arguments: the same `(n, seed, split)` gives the same problems on any machine,
and `sample(n)` is a prefix of `sample(n + 1)`. A hash of the prompt decides whether a problem is held out, so
no "eval" problem can ever be trained on, whatever the seeds.

Completions are untrusted text. They are matched, never evaluated: a verifier that evaluates what it reads
(symbolic ones do) rewards a repetition of the question, since `12+34+5` *is* `51`.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Literal, Protocol, runtime_checkable

from offdrift.errors import RecipeError

Split = Literal["train", "eval"]

EVAL_SHARE = 10
"""One prompt in this many belongs to the held-out split."""

_CHUNK = 64
_LONGEST_NUMBER = 32
_LONGEST_ANSWER = 10_000
_NUMBER = re.compile(r"(?:(?<![\d)])-)?\d+(?:[.,]\d+)*", re.ASCII)
_EVALUATORS = frozenset({"eval", "exec", "parse_expr", "parse_latex", "sympify"})


@dataclass(frozen=True)
class Problem:
    """One question with the answer that a verifier expects."""

    prompt: str
    answer: str
    demonstration: str | None = None
    """A completion that earns the full reward, for a supervised start; None if there is none."""
    chat: bool = False
    """Ask it as a user's turn of the model's chat template rather than as plain text."""
    metadata: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)


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
        problems: list[Problem] = []
        entries: Any = None
        limit = _CHUNK * 50 + 4 * EVAL_SHARE * n
        for draw in range(limit):
            if len(problems) == n:
                break
            chunk, entry = divmod(draw, _CHUNK)
            if entry == 0:
                # A generator seed of its own, far from the others: generators add the entry's index
                # to it. Below 2**32, which is all that numpy's generators take.
                chunk_seed = _digest("problems", self.name, split, seed, chunk) % (2**32 - _CHUNK)
                entries = self.dataset(chunk_seed, _CHUNK)
            problem = self.problem(entries[entry])
            if split_of(problem.prompt) == split:
                problems.append(problem)
        if len(problems) < n:
            raise RecipeError(
                f"task {self.name!r} gave {len(problems)} of {n} {split} problems in {limit} draws; it has too few "
                "different questions for a held-out split: ask for fewer, or configure the generator to vary more"
            )
        return problems

    def reward(self, completion: str, problem: Problem) -> float:
        """The completion's reward, in [0, 1]. Never raises, whatever the text."""
        return self.score(completion, problem)


def split_of(prompt: str) -> Split:
    """Which split a prompt belongs to, for good: "eval" for one prompt in `EVAL_SHARE`."""
    return "train" if _digest(prompt) % EVAL_SHARE else "eval"


def last_number(completion: str) -> str | None:
    """The last number written in a text, or None.

    A minus counts as a sign unless it follows a digit or a closing bracket.

    Example:
        >>> last_number("46+5=51"), last_number("60-9"), last_number("so -9."), last_number("?")
        ('51', '9', '-9', None)
    """
    numbers = _NUMBER.findall(completion)
    return numbers[-1] if numbers else None


def exact_number(completion: str, problem: Problem) -> float:
    """1 if the last number of the completion is the answer, exactly; otherwise 0.

    Scored by reasoning-gym's decimal comparison without its partial credit: `051` and `51.0` are
    51, `510` is not. Numbers longer than any answer earn 0 unread.
    """
    from reasoning_gym.utils import compute_decimal_reward

    number = last_number(completion)
    if number is None or len(number) > _LONGEST_NUMBER:
        return 0.0
    return float(compute_decimal_reward(number, problem.answer) == 1.0)


def find_task(name: str) -> Task:
    """The task of this name: a row of `TASKS`, or `reasoning_gym:NAME`.

    Raises: `RecipeError` if there is no such task, or its scorer would evaluate completions.
    """
    if name in TASKS:
        return TASKS[name]
    family, _, dataset = name.partition(":")
    if family == "reasoning_gym" and dataset:
        return _reasoning_gym_task(dataset)
    raise RecipeError(
        f"task = {name!r} is not known; choose one of {', '.join(map(repr, sorted(TASKS)))}, "
        '"reasoning_gym:NAME" for a data set of that package, or add a Task to '
        "offdrift.train.tasks.TASKS"
    )


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
            "verifier to offdrift.train.tasks.TASKS"
        )
    try:
        scorer = _named(dataset, 0, 1)
    except Exception as error:
        raise RecipeError(
            f"task = {name!r}: reasoning-gym cannot build it from its defaults ({error}); add a "
            "ProceduralTask with your own configuration to offdrift.train.tasks.TASKS"
        ) from error
    return ProceduralTask(name, partial(_named, dataset), _question, partial(_own_score, scorer))


def evaluates(function: Callable[..., Any]) -> bool:
    """Whether a function's own body calls `eval`, `exec` or a parser that does."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    names = (f.id if isinstance(f, ast.Name) else getattr(f, "attr", "") for f in calls)
    return not _EVALUATORS.isdisjoint(names)


def _digest(*parts: object) -> int:
    key = "\x1f".join(map(str, parts)).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big")


_CHAT_SUMS = partial(_named, "chain_sum", min_terms=2, max_terms=2, min_digits=1, max_digits=2)

TASKS: dict[str, Task] = {
    "arithmetic": ProceduralTask("arithmetic", _sums, _written_sum, exact_number),
    "chat-arithmetic": ProceduralTask("chat-arithmetic", _CHAT_SUMS, _question, exact_number),
}
"""Tasks by name. `arithmetic` is sized for the tiny models, `chat-arithmetic` for a chat model."""
