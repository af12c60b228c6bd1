"""Logs of each framework: `table` lists them all, a module says what is special about the rows of one framework."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def first_trained(mask: list[Any]) -> int:
    """Index of the first token that trains. The token at 0 has no context, so it never counts."""
    try:
        return mask.index(1, 1)
    except ValueError:
        return len(mask)


def prompt_id(tokens: Any) -> str:
    """What equal prompts share."""
    return str(tokens.tolist() if hasattr(tokens, "tolist") else tokens)


def response_of(row: Mapping[str, Any], columns: Mapping[str, str], end: int | None = None) -> dict[str, Any]:
    """Fields of the response, of a row whose lists cover the prompt as well.

    The response begins with the first token that trains, and ends before `end`. Its group is its prompt.
    """
    begin = first_trained(row[columns["mask"]][:end])
    values = {name: row.get(column) for name, column in columns.items()}
    response = {name: x[begin:end] if isinstance(x, list) else x for name, x in values.items()}
    if values["tokens"] is not None:
        response["group_id"] = prompt_id(values["tokens"][:begin])
    return response
