"""`judge.stack.by_stack` in words, for terminals and pages."""

from __future__ import annotations

from offdrift.show.json_access import Fields, items, rows, text

NAMED = 2
"""Methods of the survey that a sentence names."""


def stack_words(stored: Fields) -> list[str]:
    """One sentence for each kind of stack of an audit or a check.

    Args:
        stored: the content of `audit.json` or `check.json`; what is malformed in it is passed over.

    Example:
        >>> row = {"stack": "moe", "known_by": "experts", "survey": ["icepop", "keep_routing"], "agrees": True}
        >>> stack_words({"stacks": [row]})
        ['Stack moe (experts): the survey begins with icepop or keep_routing, as this does.']
        >>> stack_words({"stacks": [{**row, "agrees": False, "differs": "do nothing"}]})
        ['Stack moe (experts): do nothing (the survey begins with icepop or keep_routing).']
    """
    sentences = []
    for row in rows(stored.get("stacks")):
        names = [name for x in items(row.get("survey")) if (name := text(x))]
        if not (kind := text(row.get("stack"))) or not names:
            continue
        known = f" ({fact})" if (fact := text(row.get("known_by"))) else ""
        why = text(row.get("differs"))
        picked = f"the survey begins with {' or '.join(names[:NAMED])}"
        end = f"{picked}, as this does" if row.get("agrees") is True else f"{why} ({picked})" if why else picked
        sentences.append(f"Stack {kind}{known}: {end}.")
    return sentences
