"""Rewards: verifiers by name, and functions of the user's own.

    reward = "number"                 # the last number of the completion is the answer
    reward = "math"                   # the last formula of the completion equals the answer (math-verify)
    reward = "rewards.py:score"       # a function in a file, or "module:function"

A function says by the names of its parameters what it wants, for one sample or for a whole batch:

    def score(completion, answer): ...                                   # any of the fields of a sample
    def score(prompts, completions, answer, **columns): ...              # lists, as TRL's reward functions take
    def compute_score(data_source, solution_str, ground_truth, extra_info=None): ...    # as verl's

It returns a number, or numbers by name: the reward is then the entry `reward` or `score`, or else the sum of all.
Completions are untrusted text: match them, never evaluate them.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import offdrift
from offdrift.errors import RecipeError, RewardError
from offdrift_lab.train.data.math_answers import MathVerifier
from offdrift_lab.train.data.problems import Problem

TOTALS = ("reward", "score")
"""Entries of a returned mapping that are the reward itself."""

_NUMBER = re.compile(r"(?:(?<![\d)])-)?\d+(?:[.,]\d+)*", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,40}\Z")
_LONGEST_NUMBER = 32
_SHOWN = 400
"""Characters of a prompt or completion in an error."""


@dataclass(frozen=True)
class Rewards:
    """Rewards of several completions."""

    total: tuple[float, ...]
    components: Mapping[str, tuple[float, ...]]
    """Named parts, where a function returns them: one number per completion."""


RewardFunction = Callable[[Sequence[str], Sequence[Problem]], Rewards]
"""What scores completions of problems."""


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


def exact_text(completion: str, problem: Problem) -> float:
    """1 if the completion is the answer, but for case and white space; otherwise 0.

    Example:
        >>> exact_text(" Paris\\n", Problem("The capital of France?", "paris"))
        1.0
    """
    return float(" ".join(completion.split()).casefold() == " ".join(problem.answer.split()).casefold())


VERIFIERS: dict[str, Callable[[str, Problem], float]] = {
    "number": exact_number,
    "exact": exact_text,
    "math": MathVerifier(),
}
"""Verifiers by the name that a recipe's `reward` gives."""


def find_reward(spec: str, *, folder: Path | None = None) -> RewardFunction:
    """The reward that a recipe names.

    Args:
        spec: a name in `VERIFIERS`, "module:function", or "file.py:function".
        folder: where files and modules are looked for besides the working folder.

    Raises: `RecipeError` if there is no such function, or it cannot be called with what a sample has.
    """
    if spec in VERIFIERS:
        return ByVerifier(VERIFIERS[spec])
    module_name, colon, name = spec.rpartition(":")
    if not colon or not module_name or not name:
        raise RecipeError(
            f"reward = {spec!r}: expected one of {', '.join(map(repr, VERIFIERS))}, 'judge', "
            '"module:function", or "file.py:function"'
        )
    module = imported(module_name, f"reward = {spec!r}", [Path.cwd(), *([] if folder is None else [folder])])
    function = getattr(module, name, None)
    if not callable(function):
        functions = [n for n, f in vars(module).items() if inspect.isfunction(f) and not n.startswith("_")]
        raise RecipeError(
            f"reward = {spec!r}: {module_name} has no function {name!r}; it has {', '.join(functions) or 'none'}"
        )
    return OwnReward(spec, function)


def imported(name: str, setting: str, folders: Sequence[Path]) -> ModuleType:
    """Import a module, or a file by its path, that a recipe's setting asks for.

    Raises: `RecipeError` that begins with the setting, with the traceback of the user's code if that failed.
    """
    try:
        if name.endswith(".py"):
            path = next((p for p in (folder / Path(name).expanduser() for folder in folders) if p.is_file()), None)
            if path is None:
                raise RecipeError(
                    f"{setting}: there is no file {name} in {' or '.join(map(str, dict.fromkeys(folders)))}"
                )
            spec = importlib.util.spec_from_file_location(f"offdrift_own_{path.stem}", path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module  # dataclasses and pickles of the file look for it there
            spec.loader.exec_module(module)
            return module
        for folder in folders:
            if str(folder) not in sys.path:
                sys.path.append(str(folder))
        return importlib.import_module(name)
    except RecipeError:
        raise
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0] and error.name != name:
            raise RecipeError(f"{setting} imports {error.name!r}, which is not installed") from error
        raise RecipeError(
            f"{setting}: there is no module {name!r}; give a file (FILE.py:NAME), or start the run where the module "
            "can be imported"
        ) from error
    except Exception as error:
        raise RecipeError(f"{setting} cannot be imported: {own_traceback(error)}") from error


@dataclass(frozen=True)
class ByVerifier:
    """Completions scored one by one by a function that never raises."""

    score: Callable[[str, Problem], float]

    def __call__(self, completions: Sequence[str], problems: Sequence[Problem]) -> Rewards:
        return Rewards(tuple(map(self.score, completions, problems)), {})


class OwnReward:
    """A function of the user's, called with the fields that its parameters name."""

    def __init__(self, spec: str, function: Callable[..., Any]) -> None:
        self.spec, self.function = spec, function
        parameters = inspect.signature(function).parameters.values()
        self.takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self.names = {p.name for p in named}
        self.required = {p.name for p in named if p.default is p.empty}
        self.batched = "completions" in self.names
        self.components: tuple[str, ...] = ()
        """Names of the components that the trial of `check` returned."""

    def check(self, problem: Problem, reward_range: tuple[float, float]) -> None:
        """Score two completions of a problem, the right answer and an empty one, before a run depends on it.

        Raises: `RecipeError` for a parameter that samples do not have, or a reward outside the range; `RewardError`
            as a call does.
        """
        fields = _batch_fields([""], [problem]) if self.batched else _fields("", problem)
        if unknown := sorted(self.required - set(fields)):
            raise RecipeError(
                f"reward = {self.spec!r} has a parameter {unknown[0]!r}, which samples do not have; they have "
                f"{', '.join(sorted(fields))}"
            )
        low, high = reward_range
        trial = self([problem.answer, ""], [problem] * 2)
        self.components = tuple(trial.components)
        for completion, reward in zip(("answer", "empty text"), trial.total):
            if not low <= reward <= high:
                raise RecipeError(
                    f"reward = {self.spec!r} gave {reward:g} for the {completion} of {shortened(problem.prompt)}, "
                    f"outside reward_range = [{low:g}, {high:g}]; set reward_range to what the function can return"
                )

    def __call__(self, completions: Sequence[str], problems: Sequence[Problem]) -> Rewards:
        """Rewards of a batch.

        Raises: `RewardError` with the traceback and the sample if the function fails, or returns no finite number.
        """
        if self.batched:
            results = self._call(_batch_fields(completions, problems), 0, completions, problems)
            if not isinstance(results, Sequence | Mapping) and hasattr(results, "tolist"):
                results = results.tolist()
            if not isinstance(results, Sequence) or len(results) != len(completions):
                raise RewardError(
                    f"reward function {self.spec} returned {shortened(results)} for {len(completions)} completions; "
                    "a function of `completions` returns a list with one reward each"
                )
        else:
            results = [
                self._call(_fields(c, p), i, completions, problems)
                for i, (c, p) in enumerate(zip(completions, problems, strict=True))
            ]
        parts = [self._parts(r, i, completions, problems) for i, r in enumerate(results)]
        names = list(parts[0][1])
        for i, (_, named) in enumerate(parts):
            if list(named) != names:
                raise self._error(
                    f"returned the entries {', '.join(named) or 'none'}, and {', '.join(names) or 'none'} before",
                    (i, completions, problems),
                )
        return Rewards(
            tuple(total for total, _ in parts), {name: tuple(named[name] for _, named in parts) for name in names}
        )

    def _call(self, fields: Mapping[str, Any], i: int, completions: Sequence[str], problems: Sequence[Problem]) -> Any:
        arguments = fields if self.takes_all else {name: fields[name] for name in self.names & set(fields)}
        try:
            return self.function(**arguments)
        except Exception as error:
            where = None if self.batched else (i, completions, problems)
            raise self._error(f"failed: {own_traceback(error)}", where) from error

    def _parts(
        self, result: Any, i: int, completions: Sequence[str], problems: Sequence[Problem]
    ) -> tuple[float, dict[str, float]]:
        """Reward and components of one result."""
        named = result if isinstance(result, Mapping) else {"reward": result}
        try:
            values = {str(name): float(x) for name, x in named.items()}
        except (TypeError, ValueError):
            values = {}
        if not values or not all(map(math.isfinite, values.values())):
            raise self._error(
                f"returned {shortened(result)}; expected a finite number, or finite numbers by name",
                (i, completions, problems),
            )
        if not isinstance(result, Mapping):
            return values["reward"], {}
        stated = next((values[name] for name in TOTALS if name in values), None)
        components = {name: x for name, x in values.items() if name not in TOTALS}
        if bad := next((name for name in components if not _NAME.match(name)), None):
            raise self._error(
                f"returned an entry named {shortened(bad)}; a name has letters, digits, '_', '-' or '.', at most 40",
                (i, completions, problems),
            )
        return (sum(components.values()) if stated is None else stated), components

    def _error(self, problem: str, sample: tuple[int, Sequence[str], Sequence[Problem]] | None) -> RewardError:
        lines = [f"reward function {self.spec} {problem}"]
        if sample is not None:
            i, completions, problems = sample
            lines += [
                f"prompt: {shortened(problems[i].prompt)}",
                f"completion: {shortened(completions[i])}",
                f"answer: {shortened(problems[i].answer)}",
            ]
        lines.append("Return 0.0 for what cannot be scored; --resume continues a run from its newest checkpoint.")
        return RewardError("\n".join(lines))


def _fields(completion: str, problem: Problem) -> dict[str, Any]:
    """Arguments that a reward function of one sample may take, under our names and verl's."""
    return {
        **problem.metadata,
        "completion": completion,
        "prompt": problem.prompt,
        "answer": problem.answer,
        "metadata": problem.metadata,
        "solution_str": completion,
        "ground_truth": problem.answer,
        "extra_info": problem.metadata,
        "data_source": problem.metadata.get("data_source", ""),
    }


def _batch_fields(completions: Sequence[str], problems: Sequence[Problem]) -> dict[str, Any]:
    """Arguments that a reward function of a batch may take, as lists; columns keep their names."""
    columns = {name: [p.metadata.get(name) for p in problems] for name in problems[0].metadata}
    return {
        **columns,
        "completions": list(completions),
        "prompts": [p.prompt for p in problems],
        "answer": [p.answer for p in problems],
    }


def own_traceback(error: BaseException) -> str:
    """An error of the user's code with the lines of its traceback that are theirs."""
    frames = traceback.extract_tb(error.__traceback__)
    packages = {Path(__file__).parents[2], Path(offdrift.__file__).parent}
    user_frames = [f for f in frames if packages.isdisjoint(Path(f.filename).parents) and "importlib" not in f.filename]
    return f"{type(error).__name__}: {error}\n" + "".join(traceback.format_list(user_frames)).rstrip()


def shortened(x: object) -> str:
    text = repr(x)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text):,} characters)"
