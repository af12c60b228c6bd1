"""Problems, and the file they may come from.

    {"prompt": "What is 2 + 3?", "answer": "5"}

One JSON object a line: `prompt` is a text or a list of chat messages, `answer` a text or a number. `demonstration`, a
completion that earns the full reward, serves a supervised start. `split` may be "train" or "eval"; without it a hash
of the prompt holds out one line in ten for good. Every other field reaches the reward function under its name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from offdrift.errors import RecipeError
from offdrift.texts import LARGEST_DATA, read_bytes

Split = Literal["train", "eval"]

EVAL_SHARE = 10
"""One prompt in this many belongs to the held-out split."""

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Problem:
    """One question with the answer that a verifier expects."""

    prompt: str
    answer: str
    demonstration: str | tuple[str, ...] | None = None
    """A completion that earns the full reward, for a supervised start; None if there is none. For an environment one
    text per turn."""
    chat: bool | Literal["if_template"] = False
    """Ask it as a user's turn of the model's chat template rather than as plain text; "if_template": where the
    tokenizer has one."""
    messages: tuple[Mapping[str, str], ...] = field(default=(), repr=False, compare=False)
    """The turns of a chat before the response, in place of one user's turn."""
    metadata: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)


def split_of(prompt: str) -> Split:
    """Return the split of a prompt, fixed by its hash: "eval" for one prompt in `EVAL_SHARE`."""
    return "train" if digest(prompt) % EVAL_SHARE else "eval"


def digest(*parts: object) -> int:
    """A 64-bit hash that is the same on every machine."""
    key = "\x1f".join(map(str, parts)).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big")


@dataclass(frozen=True)
class ProblemFile:
    """The problems of a file, by split."""

    path: Path
    problems: Mapping[Split, Sequence[Problem]]
    sha256: str

    def sample(self, n: int, *, seed: int, split: Split = "train") -> list[Problem]:
        """`n` different lines of a split, a pure function of the arguments; of "eval" at most all that there are.

        Raises: `RecipeError` if a batch needs more training prompts than the file has.
        """
        problems = self.problems[split]
        if split == "train" and n > len(problems):
            raise RecipeError(
                f"rollout.prompts = {n}, but {self.path} has {len(problems)} training prompts; lower rollout.prompts, "
                "or add lines"
            )
        g = torch.Generator().manual_seed(digest("file", seed, split) % 2**63)
        return [problems[i] for i in torch.randperm(len(problems), generator=g)[:n].tolist()]


def read_problems(path: Path) -> ProblemFile:
    """Read and check a file of problems.

    Raises: `RecipeError` naming the file, the line, and what was expected.
    """
    try:
        content = read_bytes(path, limit=LARGEST_DATA)
    except OSError as error:
        raise RecipeError(
            f"task = {str(path)!r}: {error.strerror}; expected a file with a JSON object a line"
        ) from error
    splits: dict[Split, list[Problem]] = {"train": [], "eval": []}
    for number, line in enumerate(content.splitlines(), 1):
        if line.strip():
            split, problem = _read_line(line, f"{path}, line {number}")
            splits[split].append(problem)
    for split, problems in splits.items():
        if not problems:
            raise RecipeError(
                f"task = {str(path)!r} has no {split} problems; without `split` one line in {EVAL_SHARE} is held "
                f'out: add lines, or "split": "{split}" to some'
            )
    return ProblemFile(path, splits, hashlib.sha256(content).hexdigest())


def _read_line(line: bytes, where: str) -> tuple[Split, Problem]:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RecipeError(f"{where} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise RecipeError(f'{where}: expected an object such as {{"prompt": ..., "answer": ...}}, got {fields!r:.60}')
    prompt, answer = fields.pop("prompt", None), fields.pop("answer", "")
    messages: tuple[Mapping[str, str], ...] = ()
    if isinstance(prompt, list):
        messages = tuple(_message(m, where) for m in prompt)
        prompt = messages[-1]["content"] if messages else ""
    if not isinstance(prompt, str) or not prompt:
        raise RecipeError(
            f"{where}: prompt = {prompt!r:.60}; expected a text that is not empty, or a list of messages with role and "
            "content"
        )
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise RecipeError(f"{where}: answer = {answer!r:.60}; expected a text or a number")
    demonstration = fields.pop("demonstration", None)
    if demonstration is not None and not isinstance(demonstration, str):
        raise RecipeError(f"{where}: demonstration = {demonstration!r:.60}; expected a text")
    split = fields.pop("split", None) or split_of(json.dumps([dict(m) for m in messages]) if messages else prompt)
    if split not in ("train", "eval"):
        raise RecipeError(f'{where}: split = {split!r:.60}; expected "train" or "eval"')
    chat = True if messages else "if_template"
    return split, Problem(prompt, str(answer), demonstration, chat=chat, messages=messages, metadata=fields)


def _message(message: object, where: str) -> Mapping[str, str]:
    if not isinstance(message, dict) or message.get("role") not in ROLES or not isinstance(message.get("content"), str):
        raise RecipeError(
            f'{where}: {message!r:.80} in prompt; expected {{"role": ..., "content": ...}} with a role of '
            f"{', '.join(ROLES)}"
        )
    return {"role": message["role"], "content": message["content"]}
