"""Environments: tasks of several turns. The model writes, the environment answers, until the episode is over.

    task = "calculator"               # a tool that works out one operation at a time
    task = "guess"                    # a hidden number, and the answers "higher" and "lower"
    task = "adventure"                # a text game: rooms, a key and a door
    task = "game.py:Game"             # a class of your own, or "module:Class"

An environment has problems like a task, split alike, and starts an episode of a problem as often as it is asked to.
What the model writes is untrusted text: it is matched, never evaluated.
"""

from __future__ import annotations

import math
import operator
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from offdrift.errors import EpisodeError, RecipeError
from offdrift_lab.train.data.problems import EVAL_SHARE, Problem, Split, digest, split_of
from offdrift_lab.train.data.rewards import exact_number, imported, last_number, own_traceback, shortened


@dataclass(frozen=True)
class Answer:
    """Reply of an environment to one turn of the model."""

    text: str = ""
    """What the model reads before its next turn; not read where the episode is over."""
    reward: float = 0.0
    """Earned by the turn. An episode earns the sum."""
    done: bool = False
    """Whether the episode is over."""


@runtime_checkable
class Episode(Protocol):
    """One run through a problem."""

    def answer(self, text: str) -> Answer:
        """Answer the next turn of the model, `text`."""
        ...


@runtime_checkable
class Environment(Protocol):
    """Interface of an environment. Name a class of yours in the recipe, or add it with `ENVIRONMENTS["mine"] = it`.

    Args:
        name: of the task.
        stops: texts with which a turn ends, beside the model's own end of a response; they are part of the turn.
    """

    @property
    def name(self) -> str: ...

    @property
    def stops(self) -> tuple[str, ...]: ...

    def sample(self, n: int, *, seed: int, split: Split = "train") -> list[Problem]:
        """`n` problems of one split, a pure function of the arguments."""
        ...

    def start(self, problem: Problem) -> Episode:
        """An episode; the same turns get the same answers whenever it is played."""
        ...


def drawn(name: str, problem: Callable[[random.Random], Problem], n: int, seed: int, split: Split) -> list[Problem]:
    """`n` different problems of one split, drawn one after the other from a generator of the seed's own.

    Raises: `RecipeError` if there are too few different problems to fill the split.
    """
    rng, limit = random.Random(digest("environment", name, split, seed)), 1000 + 40 * EVAL_SHARE * n
    problems: dict[str, Problem] = {}
    for _ in range(limit):
        if len(problems) == n:
            break
        new = problem(rng)
        if split_of(new.prompt) == split:
            problems.setdefault(new.prompt, new)
    if len(problems) < n:
        setting = "rollout.prompts" if split == "train" else "log.eval_prompts"
        raise RecipeError(
            f"environment {name!r} gave {len(problems)} of {n} different {split} problems in {limit} draws; ask for "
            f"fewer: lower {setting}"
        )
    return list(problems.values())


_CALL = re.compile(r"\[ *(-?\d{1,9}) *([-+*]) *(-?\d{1,9}) *\]\Z", re.ASCII)
_OPERATIONS: Mapping[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def calculated(text: str) -> str:
    """The value of the call that a text ends with, or "error".

    Example:
        >>> calculated("so [12*34]"), calculated("[-3 - 4]"), calculated("[12*34+5]")
        ('408', '-7', 'error')
    """
    call = _CALL.search(text[-64:])
    return "error" if call is None else str(_OPERATIONS[call[2]](int(call[1]), int(call[3])))


@dataclass(frozen=True)
class Calculator:
    """`12*34+5=`, played as `[12*34]` 408 `[408+5]` 413 `413`: the tool does one operation per call.

    A turn that ends with "]" is a call; any other is the result, and earns 1 if its last number is right.

    Example:
        >>> episode = Calculator().start(Problem("12*34+5=", "413"))
        >>> episode.answer("[12*34]").text, episode.answer("413").reward
        ('408\\n', 1.0)
    """

    name: str = "calculator"
    stops: tuple[str, ...] = ("]",)
    instructions: str = (
        "You have a calculator. It takes one operation (+, - or *) on two whole numbers, written in square brackets, "
        "such as [12*34], and answers with the value. Write one call and nothing else, and wait for its value. When "
        "you know the result, write the number alone."
    )

    def sample(self, n: int, *, seed: int, split: Split = "train") -> list[Problem]:
        """`n` problems of one split, a pure function of the arguments."""

        def problem(rng: random.Random) -> Problem:
            a, b, c = rng.randrange(2, 100), rng.randrange(2, 100), rng.randrange(1, 100)
            prompt, product, result = f"{a}*{b}+{c}=", a * b, a * b + c
            messages = ({"role": "system", "content": self.instructions}, {"role": "user", "content": prompt})
            turns = (f"[{a}*{b}]", f"[{product}+{c}]", str(result))
            return Problem(prompt, str(result), turns, "if_template", messages)

        return drawn(self.name, problem, n, seed, split)

    def start(self, problem: Problem) -> Calculation:
        """An episode."""
        return Calculation(problem)


@dataclass(frozen=True)
class Calculation:
    """An episode of `Calculator`."""

    problem: Problem

    def answer(self, text: str) -> Answer:
        """The value of a call, or the reward of a result."""
        if text.endswith("]"):
            return Answer(f"{calculated(text)}\n")
        return Answer(reward=exact_number(text, self.problem), done=True)


@dataclass(frozen=True)
class Guess:
    """`guess 20-35:`, with a hidden number: the answers are "higher" and "lower", and the right number earns 1.

    Halving the range finds one of 16 numbers in at most five turns, and in 3.4 on average.

    Example:
        >>> episode = Guess().start(Problem("guess 20-35:", "30"))
        >>> episode.answer("27").text, episode.answer("30").reward
        ('higher\\n', 1.0)
    """

    name: str = "guess"
    stops: tuple[str, ...] = ()
    numbers: int = 16
    instructions: str = (
        "I think of a whole number in a range, and you guess it. Write one number and nothing else; I answer higher or "
        "lower until you name mine."
    )

    def sample(self, n: int, *, seed: int, split: Split = "train") -> list[Problem]:
        """`n` problems of one split, a pure function of the arguments; the number is not in the prompt."""

        def problem(rng: random.Random) -> Problem:
            low = rng.randrange(2000 - self.numbers)
            high, number = low + self.numbers - 1, low + rng.randrange(self.numbers)
            prompt = f"guess {low}-{high}:"
            messages = ({"role": "system", "content": self.instructions}, {"role": "user", "content": prompt})
            turns, guess = [], -1
            while guess != number:
                guess = (low + high) // 2
                turns.append(str(guess))
                low, high = (guess + 1, high) if number > guess else (low, guess - 1)
            return Problem(prompt, str(number), tuple(turns), "if_template", messages)

        return drawn(self.name, problem, n, seed, split)

    def start(self, problem: Problem) -> Guessing:
        """An episode."""
        return Guessing(int(problem.answer))


@dataclass(frozen=True)
class Guessing:
    """An episode of `Guess`."""

    number: int

    def answer(self, text: str) -> Answer:
        """Reply "higher", "lower" or success to the last number of the turn; no number ends the episode."""
        written = (last_number(text) or "").lstrip("-")
        if not written.isdecimal() or len(written) > 9:
            return Answer(done=True)
        guess = int(written)
        if guess == self.number:
            return Answer(reward=1.0, done=True)
        return Answer("higher\n" if guess < self.number else "lower\n")


Room = tuple[int, int]
"""Column and row of a room; `_STEPS` go from one to the next."""
_COLUMNS, _ROWS = "abcd", "1234"
_STEPS: Mapping[str, Room] = {"go east": (1, 0), "go west": (-1, 0), "go north": (0, 1), "go south": (0, -1)}
_ROOM = re.compile(f"[{_COLUMNS}][{_ROWS}]")


def room_name(room: Room) -> str:
    """`a1` is the room in the south-west, `d4` the one in the north-east."""
    return _COLUMNS[room[0]] + _ROWS[room[1]]


def shortest_way(start: Room, end: Room) -> list[str]:
    """The fewest commands from one room to another: along the letters first, then along the numbers."""
    east, north = end[0] - start[0], end[1] - start[1]
    return ["go east"] * east + ["go west"] * -east + ["go north"] * north + ["go south"] * -north


@dataclass(frozen=True)
class Adventure:
    """`room a1, key a2, door b2:`, played as `go north` `take key` `go east` `open door`; the open door earns 1.

    The house has 4 x 4 rooms. The game answers a move with the room that it leads to and what is there, and any other
    text than a command with "what?". The demonstrations are the shortest games.

    Args:
        turns: of the longest problem that is drawn, played without a detour.

    Example:
        >>> game = Adventure().start(Problem("room a1, key a2, door b2:", ""))
        >>> [game.answer(text).text for text in ("go west", "go north", "take key", "go east")]
        ['wall\\n', 'room a2: key\\n', 'taken\\n', 'room b2: door\\n']
        >>> game.answer("open door").reward
        1.0
    """

    name: str = "adventure"
    stops: tuple[str, ...] = ()
    turns: int = 8
    instructions: str = (
        "You are in a house of 4 x 4 rooms, a1 to d4: letters go from west to east, numbers from south to north. Fetch "
        "the key, then open the door. Write one command and nothing else: go north, go south, go east, go west, take "
        "key, or open door. I answer with what happens."
    )

    def sample(self, n: int, *, seed: int, split: Split = "train") -> list[Problem]:
        """`n` problems of one split, a pure function of the arguments."""
        house = [(column, row) for column in range(len(_COLUMNS)) for row in range(len(_ROWS))]

        def problem(rng: random.Random) -> Problem:
            while True:
                room, key, door = rng.sample(house, 3)
                turns = (*shortest_way(room, key), "take key", *shortest_way(key, door), "open door")
                if len(turns) <= self.turns:
                    break
            prompt = f"room {room_name(room)}, key {room_name(key)}, door {room_name(door)}:"
            messages = ({"role": "system", "content": self.instructions}, {"role": "user", "content": prompt})
            return Problem(prompt, ", ".join(turns), turns, "if_template", messages)

        return drawn(self.name, problem, n, seed, split)

    def start(self, problem: Problem) -> Adventuring:
        """An episode."""
        rooms = [(_COLUMNS.index(name[0]), _ROWS.index(name[1])) for name in _ROOM.findall(problem.prompt)]
        return Adventuring(*rooms)


@dataclass
class Adventuring:
    """An episode of `Adventure`."""

    room: Room
    key: Room | None
    """None once the player has it."""
    door: Room

    def answer(self, text: str) -> Answer:
        """Execute the command of the turn: move, take the key, open the door; anything else has no effect."""
        command = " ".join(text.lower().split()).rstrip(".!")
        if command in _STEPS:
            column, row = self.room[0] + _STEPS[command][0], self.room[1] + _STEPS[command][1]
            if not (0 <= column < len(_COLUMNS) and 0 <= row < len(_ROWS)):
                return Answer("wall\n")
            self.room = column, row
            here = ": key" * (self.room == self.key) + ": door" * (self.room == self.door)
            return Answer(f"room {room_name(self.room)}{here}\n")
        if command == "take key":
            if self.room != self.key:
                return Answer("no key here\n")
            self.key = None
            return Answer("taken\n")
        if command == "open door":
            if self.room != self.door:
                return Answer("no door here\n")
            return Answer("locked\n") if self.key else Answer(reward=1.0, done=True)
        return Answer("what?\n")


ENVIRONMENTS: dict[str, Environment] = {"calculator": Calculator(), "guess": Guess(), "adventure": Adventure()}
"""Environments by name: sized for the tiny models, and asked in words where the model has a chat template."""


def is_environment(task: str) -> bool:
    """Whether a recipe's `task` names an environment: a row of `ENVIRONMENTS`, "module:Class" or "file.py:Class"."""
    family, colon, _ = task.rpartition(":")
    return task in ENVIRONMENTS or bool(colon and family != "reasoning_gym" and not task.endswith(".jsonl"))


def check_turns(task: str, max_turns: int | None, *, reward: str | None) -> None:
    """Refuse a recipe with turns and no environment, or with an environment and no turns.

    Args:
        max_turns: `rollout.max_turns`.
        reward: what the recipe says that a completion earns.

    Raises: `ValueError` naming the field, its value and the way out.
    """
    if not is_environment(task):
        if max_turns is not None:
            raise ValueError(
                f"rollout.max_turns = {max_turns} does nothing with task = {task!r}, whose responses are single; leave "
                f"it out, or choose an environment: {', '.join(sorted(ENVIRONMENTS))}"
            )
        return
    if max_turns is None:
        raise ValueError(
            f"task = {task!r} is played in turns; say how many there are before an episode is cut off, for instance "
            "rollout.max_turns = 4"
        )
    if reward is not None:
        raise ValueError(
            f"reward = {reward!r} scores single responses, and the environment {task!r} rewards its episodes itself; "
            "leave it out"
        )


def find_environment(task: str, *, folder: Path | None = None) -> Environment:
    """The environment that a recipe names. A class of the user's is tried on a first problem.

    Args:
        folder: where files and modules are looked for besides the working folder.

    Raises: `RecipeError` if there is none, or it lacks what an environment has; `EpisodeError` if its code fails.
    """
    if task in ENVIRONMENTS:
        return ENVIRONMENTS[task]
    module_name, _, name = task.rpartition(":")
    module = imported(module_name, f"task = {task!r}", [Path.cwd(), *([] if folder is None else [folder])])
    kind = getattr(module, name, None)
    if not callable(kind):
        classes = [n for n, x in vars(module).items() if isinstance(x, type) and x.__module__ == module.__name__]
        raise RecipeError(
            f"task = {task!r}: {module_name} has no class {name!r}; it has {', '.join(classes) or 'none'}"
        )
    environment: Any = guarded(kind, task)
    if lacking := [x for x in ("name", "stops", "sample", "start") if not hasattr(environment, x)]:
        raise RecipeError(
            f"task = {task!r}: {name} has no {lacking[0]!r}; an environment has name, stops, sample and start "
            "(docs/tasks.md)"
        )
    first, again = (guarded(environment.sample, task, n=2, seed=0, split="train") for _ in range(2))
    if not all(isinstance(p, Problem) for p in first) or len(first) != 2:
        raise RecipeError(f"task = {task!r}: sample(2, seed=0) gave {shortened(first)}; expected a list of 2 `Problem`")
    if first != again:
        raise RecipeError(
            f"task = {task!r}: sample(2, seed=0) gave other problems when it was asked again; draw them from `seed` "
            "alone, or no run can be repeated or resumed"
        )
    demonstration = first[0].demonstration
    turns = demonstration if isinstance(demonstration, tuple) else ("",)
    episode = start(environment, first[0])
    for i in range(len(turns)):
        if ask(environment, episode, first[0], turns[: i + 1]).done:
            break
    return environment


def start(environment: Environment, problem: Problem) -> Episode:
    """An episode. Raises: `EpisodeError` if it cannot be started."""
    return guarded(environment.start, environment.name, problem)


def ask(environment: Environment, episode: Episode, problem: Problem, turns: Sequence[str]) -> Answer:
    """The answer to the last of an episode's turns.

    Raises: `EpisodeError` with the traceback and the episode if the environment fails, or answers with anything else.
    """
    shown = "".join(f"\nturn {i}: {shortened(text)}" for i, text in enumerate(turns))
    where = f"\nprompt: {shortened(problem.prompt)}{shown}\n--resume continues a run from its newest checkpoint."
    try:
        answer = episode.answer(turns[-1])
    except Exception as error:
        raise EpisodeError(f"environment {environment.name} failed: {own_traceback(error)}{where}") from error
    if not isinstance(answer, Answer) or not isinstance(answer.text, str) or not math.isfinite(answer.reward):
        raise EpisodeError(
            f"environment {environment.name} answered {shortened(answer)}; expected an `Answer` with a text and a "
            f"finite reward{where}"
        )
    return answer


def guarded(function: Callable[..., Any], name: str, *values: Any, **named: Any) -> Any:
    """Call the user's function and return its result. Raises: `EpisodeError` with its traceback if it fails."""
    try:
        return function(*values, **named)
    except Exception as error:
        raise EpisodeError(f"environment {name} failed: {own_traceback(error)}") from error
