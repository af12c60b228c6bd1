"""Prompts of a check: the user's file, or the bundled ones, short and of many kinds.

Engines differ most where distributions are flat and agree where they are sharp.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from offdrift.errors import RecordError

Prompt = str | tuple[dict[str, str], ...]
"""Text, or the messages of a conversation (`role` and `content`)."""


def read_prompts(path: Path, *, limit: int | None = None) -> list[Prompt]:
    """At most `limit` prompts of a file: one per line, or JSON lines with a `prompt`.

    A .jsonl or .json file has one JSON object per line, whose `prompt` is text or a list of messages.
    In other files each line is a prompt, unchanged. Empty lines are skipped.

    Raises: `RecordError` naming the file, the line and what is wrong with it.
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
    """Token ids of prompts; text becomes a user message where the tokenizer has a chat template, if `chat`.

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


BUNDLED = tuple(read_prompts(Path(__file__).with_name("prompts.jsonl")))
