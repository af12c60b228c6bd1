"""Logs of each framework: `table` lists them all, the others translate rows."""

from __future__ import annotations

from typing import Any


def prompt_id(tokens: Any) -> str:
    """What equal prompts share."""
    return str(tokens.tolist() if hasattr(tokens, "tolist") else tokens)
