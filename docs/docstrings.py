"""Docstrings as this library writes them, for a page: mkdocstrings reads `Examples:` where we write `Example:`."""

from __future__ import annotations

import re
from typing import Any

import griffe

LEADS = "Raises|Returns|Gradient|Reference|References|Source|Shapes|Units|Precondition|Provided"
"""Words that begin a paragraph with a colon behind them."""


def for_page(text: str) -> str:
    """A docstring in the words of the page's reader.

    Example:
        >>> for_page("Raises: `X` if a[0][1] is in docs/tasks.md.")
        '**Raises:** `X` if a[0]\\\\[1] is in [tasks](../tasks.md).'
    """
    text = re.sub(r"^([ \t]*)Example:[ \t]*$", r"\1Examples:", text, flags=re.MULTILINE)
    before, examples, rest = text.partition("Examples:\n")
    before = re.sub(rf"^([ \t]*)({LEADS}):(?=[ \t]+\S)", r"\1**\2:**", before, flags=re.MULTILINE)
    before = re.sub(r"docs/([\w-]+)\.md", r"[\1](../\1.md)", before)
    # "a[0][1]" is no reference to a heading called "1", but in code there is nothing to escape.
    parts = re.split(r"(`[^`]*`)", before)
    before = "".join(p if p.startswith("`") else p.replace("][", "]\\[") for p in parts)
    return before + examples + rest


class Docstrings(griffe.Extension):
    """Applies `for_page` to every docstring that is read."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """One object: of a module, a class, a function or an attribute."""
        if obj.docstring:
            obj.docstring.value = for_page(obj.docstring.value)
