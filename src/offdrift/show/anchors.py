"""Names of places on a page: readable, the same each time, and made of a few safe characters whatever the text was."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

LONGEST = 60
"""Characters of a text that go into a name."""


def anchor(kind: str, name: str) -> str:
    """The name of a place: its kind, then the letters and digits of what stands there.

    Example:
        >>> anchor("finding", "pearson_low"), anchor("method", "GSPO (eps=0.1)"), anchor("run", "<>")
        ('finding-pearson_low', 'method-gspo-eps-0-1', 'run')
    """
    return re.sub(r"[^a-z0-9_]+", "-", f"{kind} {name[:LONGEST]}".lower()).strip("-")


class Anchors:
    """Names of places on one page, none twice: a second place of one name has "-2" behind it.

    Example:
        >>> names = Anchors()
        >>> names("run", "a"), names("run", "a"), names("run", "b")
        ('run-a', 'run-a-2', 'run-b')
    """

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def __call__(self, kind: str, name: object) -> str:
        """A name that no place has, which from now on is taken."""
        first = name_of = anchor(kind, str(name))
        count = 1
        while name_of in self._taken:
            count += 1
            name_of = f"{first}-{count}"
        self._taken.add(name_of)
        return name_of


def on_page(findings: Iterable[Mapping[str, Any]], page: str) -> list[dict[str, Any]]:
    """Findings with the place on a page where each stands, as `page`.

    Args:
        findings: of `Finding.as_dict`, in their order.
        page: file name of the page that shows them.

    Example:
        >>> [f["page"] for f in on_page([{"rule": "not_finite"}, {"rule": "not_finite"}], "report.html")]
        ['report.html#finding-not_finite', 'report.html#finding-not_finite-2']
    """
    names = Anchors()
    return [{**f, "page": f"{page}#{names('finding', f.get('rule', ''))}"} for f in findings]
