"""Prompts of a check: the user's file, or the bundled ones.

The bundled prompts are short and of many kinds (facts, arithmetic, code, lists, dialogue, other
languages), because engines differ most where distributions are flat and agree where they are sharp.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from offdrift.errors import RecordError

Prompt = str | tuple[dict[str, str], ...]
"""Text, or the messages of a conversation (`role` and `content`)."""

BUNDLED: tuple[str, ...] = (
    "What is 17 * 23 + 4? Think step by step.",
    "Name three rivers that flow into the Black Sea.",
    "Write a Python function that returns the longest word of a sentence.",
    "Explain to a child why the moon changes its shape.",
    "A train leaves at 9:40 and arrives at 13:05. How long does it travel?",
    "Continue the story: The lighthouse keeper had not slept for three days when",
    "Translate into French: The library closes at six on Sundays.",
    "List the planets from the smallest to the largest.",
    "def fibonacci(n):\n    ",
    "What happens to the boiling point of water on a high mountain, and why?",
    "Solve for x: 3x - 7 = 2x + 11.",
    "Write a haiku about an empty railway station.",
    "Which is heavier, a liter of oil or a liter of water?",
    "Give me a recipe for lentil soup with five ingredients.",
    "Summarize in one sentence: Bees find flowers by color and scent, and tell each other where they are.",
    "SELECT name, count(*) FROM orders",
    "Is 91 a prime number? Show how you know.",
    "What are the arguments for and against a four-day week?",
    "Complete the sequence: 2, 6, 12, 20, 30,",
    "Write a polite email that moves a meeting from Tuesday to Thursday.",
    "Wie viele Einwohner hat Wien ungefähr?",
    "A bag holds 4 red and 6 blue marbles. Two are drawn. How likely are two red ones?",
    "What does the word 'serendipity' mean? Use it in a sentence.",
    '{"name": "Ada", "age": 36, "languages": [',
    "Describe the taste of a lemon without the word sour.",
    "Who wrote the first program for a machine that was never built?",
    "Sort these words by alphabet: pear, apple, quince, fig, cherry.",
    "The three most common mistakes in a job interview are",
    "Convert 72 degrees Fahrenheit to Celsius.",
    "¿Cuál es la capital de Australia?",
    "Write the first four lines of a song about a broken bicycle.",
    "If all bloops are razzies and some razzies are lazzies, are some bloops lazzies?",
)


def read_prompts(path: Path, *, limit: int | None = None) -> list[Prompt]:
    """Read prompts from a file: one per line, or JSON lines with a `prompt`.

    A .jsonl or .json file has one JSON object per line, whose `prompt` is text or a list of messages.
    In other files each line is a prompt, unchanged. Empty lines are skipped.

    Args:
        limit: number of prompts to read at most.

    Raises: `RecordError` naming the file, the line and what is wrong with it.

    Example:
        read_prompts(Path("prompts.txt"))
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise RecordError(f"{path}, line {line} is not UTF-8; save the file as UTF-8") from error
    except OSError as error:
        raise RecordError(
            f"cannot read {path}: {error.strerror or error}; give a text file, one prompt per line"
        ) from error
    as_json = path.suffix in (".jsonl", ".json")
    prompts: list[Prompt] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if limit is not None and len(prompts) >= limit:
            break
        if line.strip():
            prompts.append(_from_json(path, number, line) if as_json else line.rstrip("\r"))
    if not prompts:
        raise RecordError(f"{path} holds no prompts; write one per line")
    return prompts


def encoded(prompts: Sequence[Prompt], tokenizer: Any, *, vocab_size: int, chat: bool = True) -> list[list[int]]:
    """Token ids of prompts; text becomes a user message where the tokenizer has a chat template.

    Args:
        chat: False encodes text without the template.

    Raises: `RecordError` for a prompt without tokens, with tokens that the model does not have, or a
        conversation for a tokenizer that has no chat template.
    """
    encoded_prompts = []
    template = getattr(tokenizer, "chat_template", None)
    for i, prompt in enumerate(prompts, start=1):
        text = prompt
        if not isinstance(prompt, str) or (chat and template):
            if not template:
                raise RecordError(f"prompt {i} is a conversation, but the tokenizer has no chat template; give text")
            turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
            text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        ids = list(tokenizer.encode(str(text), add_special_tokens=False))
        if not ids:
            raise RecordError(f"prompt {i} ({str(prompt)[:40]!r}) has no tokens; write something")
        if max(ids) >= vocab_size:
            raise RecordError(
                f"prompt {i} has token id {max(ids)}, but the model has {vocab_size} tokens; the "
                "tokenizer belongs to another model"
            )
        encoded_prompts.append(ids)
    return encoded_prompts


def _from_json(path: Path, number: int, line: str) -> Prompt:
    where = f"{path}, line {number}"
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RecordError(f'{where} is no JSON ({error}); write {{"prompt": "..."}}') from error
    prompt = row.get("prompt") if isinstance(row, dict) else None
    characters = json.dumps(prompt, ensure_ascii=False) if "\\ud" in line.lower() else ""
    if any("\ud800" <= c <= "\udfff" for c in characters):
        raise RecordError(f'{where} has half a surrogate pair in its "prompt", which is no text')
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt:
        keys = ("role", "content")
        if all(isinstance(m, dict) and all(isinstance(m.get(k), str) for k in keys) for m in prompt):
            return tuple({k: m[k] for k in keys} for m in prompt)
    raise RecordError(
        f'{where} has no "prompt" that is text or a list of messages with role and content; '
        f"it has {sorted(row)[:8] if isinstance(row, dict) else type(row).__name__}"
    )
