"""Tasks of `pretrained.py`: counting, which SmolLM2 can do in part, and running totals, which it is taught first.

A problem is a tuple of whole numbers. Every prompt of a task has the same number of tokens, every digit is a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

DIGIT, SPACE, COMMA, NEWLINE, COLON, END = 32, 216, 28, 198, 42, 2
"""Tokens of SmolLM2: "0", " ", ",", "\\n", ":", end of text."""
COUNT, FROM, TO = 9825, 429, 288
""""Count", " from", " to"."""
TOTALS_OF = (33343, 37651, 282)
""""Running", " totals", " of"."""
SHOTS = 2
NO_TOKEN = -1
"""Stands behind the end of a right answer."""

Problem = tuple[int, ...]


def digits(n: int, width: int = 0) -> list[int]:
    """Tokens of a number, with zeros before it up to a width."""
    return [DIGIT + int(digit) for digit in str(n).zfill(width)]


def listed(numbers: Sequence[int], width: int = 0) -> list[int]:
    """Tokens of a space and numbers with commas between them."""
    return [SPACE, *(token for i, n in enumerate(numbers) for token in ((COMMA,) * (i > 0) + (*digits(n, width),)))]


class Task(Protocol):
    """What a prompt asks, and what answers it."""

    width: int
    """Digits of a number at least."""

    def problem(self, generator: torch.Generator) -> Problem:
        """Draw a problem."""

    def held_out(self, problem: Problem) -> bool:
        """Return whether evaluation may use the problem; training may use the others."""

    def prompt(self, problem: Problem) -> list[int]:
        """Tokens of the prompt."""

    def numbers(self, problem: Problem) -> list[int]:
        """Numbers of the right answer, in order."""

    @property
    def longest(self) -> Problem:
        """A problem whose right answer has the most tokens."""


@dataclass(frozen=True)
class Count:
    """Count from a to a + k, after two examples that count `shot` numbers. A problem is (a, first of each example)."""

    k: int
    shot: int
    width: int = 2

    def problem(self, generator: torch.Generator) -> Problem:
        a = int(torch.randint(10, 100 - self.k, (1,), generator=generator))
        return a, *(int(x) for x in torch.randint(10, 100 - self.shot, (SHOTS,), generator=generator))

    def held_out(self, problem: Problem) -> bool:
        return sum(problem) % 5 == 0

    def prompt(self, problem: Problem) -> list[int]:
        a, *shots = problem
        examples = [t for s in shots for t in (*_counting(s, self.shot), *listed(range(s, s + self.shot + 1)), NEWLINE)]
        return examples + _counting(a, self.k)

    def numbers(self, problem: Problem) -> list[int]:
        return [*range(problem[0], problem[0] + self.k + 1)]

    @property
    def longest(self) -> Problem:
        return 10, 10, 10


def _counting(a: int, k: int) -> list[int]:
    """Tokens that ask for numbers from a to a + k."""
    return [COUNT, FROM, SPACE, *digits(a), TO, SPACE, *digits(a + k), COLON]


@dataclass(frozen=True)
class Totals:
    """Running totals of one-digit numbers, all written with three digits. A problem is the numbers.

    So every total stands equally far behind the number that it adds, which a few hundred supervised steps can teach.
    """

    terms: int
    width: int = 3

    def problem(self, generator: torch.Generator) -> Problem:
        return tuple(torch.randint(1, 10, (self.terms,), generator=generator).tolist())

    def held_out(self, problem: Problem) -> bool:
        return sum(n * n for n in problem) % 5 == 0

    def prompt(self, problem: Problem) -> list[int]:
        return [*TOTALS_OF, *listed(problem, self.width), COLON]

    def numbers(self, problem: Problem) -> list[int]:
        return [*accumulate(problem)]

    @property
    def longest(self) -> Problem:
        return (9,) * self.terms


def right_answer(task: Task, problem: Problem) -> list[int]:
    """Tokens of the right answer, with the end of its line."""
    return [*listed(task.numbers(problem), task.width), NEWLINE]


def problems(task: Task, count: int, generator: torch.Generator, *, held_out: bool) -> list[Problem]:
    """Problems that are held out, or that training may use."""
    found: list[Problem] = []
    while len(found) < count:
        one = task.problem(generator)
        if task.held_out(one) == held_out:
            found.append(one)
    return found


def prompts_of(task: Task, found: Sequence[Problem]) -> Tensor:
    """Tokens of the prompts, [n, P]."""
    return torch.tensor([task.prompt(one) for one in found])


def answers_of(task: Task, found: Sequence[Problem], length: int) -> Tensor:
    """Tokens of the right answers, [n, length], `NO_TOKEN` behind their ends."""
    rows = [right_answer(task, one) for one in found]
    return torch.tensor([row + [NO_TOKEN] * (length - len(row)) for row in rows])


def scored(tokens: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Prefix reward, exact, and length of responses [n, T] beside right answers [n, T].

    prefix = (numbers that are right before the first that is not) / (numbers)
    exact = 1 where every token is the right one, with the end of the line
    length = tokens up to the first end of a line or of the text, with it

    A number counts as right once its digits are there; one digit more makes the next number wrong.
    """
    correct = ((tokens == right) | (right == NO_TOKEN)).long().cumprod(1)
    digit = (right >= DIGIT) & (right < DIGIT + 10)
    ends = (digit & ~digit.roll(-1, 1)).long()  # the line ends behind the last digit, so nothing wraps around
    stops = (tokens == NEWLINE) | (tokens == END)
    first = torch.where(stops.any(1), stops.long().argmax(1), tokens.shape[1] - 1)
    return (correct * ends).sum(1) / ends.sum(1), correct[:, -1].float(), first + 1
