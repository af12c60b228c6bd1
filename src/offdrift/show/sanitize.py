"""Texts from elsewhere, made visible: what a reader sees is what is there.

Escaping keeps a text from being markup. This keeps it from deceiving, or breaking what shows it:
control characters, marks that reorder their neighbors, and half surrogates have no look.
"""

from __future__ import annotations

import unicodedata

HIDDEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode categories without a look: control, format, surrogate, line and paragraph separator."""

KEPT = frozenset("\n\t\u200c\u200d")
"""Of those, what layout, scripts and emoji need."""


def visible(text: str) -> str:
    """The text with characters that have no look, or reorder others, written as their code.

    Example:
        >>> visible("a\\u202eb")
        'a\\\\u202eb'
    """
    return "".join(f"\\u{ord(c):04x}" if unicodedata.category(c) in HIDDEN and c not in KEPT else c for c in text)


def visible_token(text: str) -> str:
    """A token as it is shown: a newline also as a sign, an empty token as one."""
    return visible(text).replace("\n", "↵\n") or "∅"


MAX_TEXT = 4000
"""Characters of one text that a page holds."""


def clipped(words: str, limit: int = MAX_TEXT) -> str:
    """A text, cut where it is longer than a page should hold, saying so.

    Example:
        >>> clipped("abcdef", 4)
        'abcd… (2 more characters)'
    """
    return words if len(words) <= limit else f"{words[:limit]}… ({len(words) - limit:,} more characters)"
