"""What the pages of an audit and of a check have in common."""

from __future__ import annotations

import os
from pathlib import PurePath
from typing import Any

from offdrift.show.findings import WORDS, in_order, verdict_of
from offdrift.show.headline import PAIR_WORDS, unit_of
from offdrift.show.json_access import Fields, at, items, mapping, number, text
from offdrift.show.numbers import short
from offdrift.show.sanitize import clipped
from offdrift.stats.metrics import METRICS


def count_words(audit: Fields) -> list[str]:
    """How much was read, in words: sequences, tokens, steps, files."""
    counts = mapping(audit.get("counts"))
    totals = [(key, number(counts.get(key))) for key in ("sequences", "tokens", "steps")]
    words = [f"{n:,.0f} {key if n != 1 else key[:-1]}" for key, n in totals if n is not None]
    files = number(at(audit, "source", "files"))
    return words + ([] if files is None else [f"{files:,.0f} file{'' if files == 1 else 's'}"])


def common_context(fields: Fields) -> dict[str, Any]:
    """What the pages of an audit and of a check show alike."""
    framework = text(at(fields, "source", "framework"))
    level, words = verdict_of(fields.get("verdict"))
    return {
        "verdict": words,
        "level": level,
        "words": WORDS,
        "findings": in_order(fields.get("findings"), framework),
        "counts": count_words(fields),
        "created": text(fields.get("created")),
        "version": text(fields.get("offdrift")),
        "framework": framework,
        "title": title_of(fields),
        "pair_words": PAIR_WORDS,
    }


def title_of(audit: Fields) -> str:
    """What the log is called: its file, or the folder that all of its files are in.

    Example:
        >>> title_of({"source": {"paths": ["runs/a/log/0.parquet", "runs/a/log/1.parquet"]}})
        'a/log'
    """
    paths = [PurePath(text(p)) for p in items(at(audit, "source", "paths"))]
    if not paths:
        return "a log"
    alone = len(paths) == 1 or len({p.anchor for p in paths}) > 1
    name = paths[0] if alone else PurePath(os.path.commonpath([p.parent for p in paths]))
    return clipped("/".join(name.parts[-2:]) or str(paths[0]), 200)


def all_numbers(overall: Fields, length: str = "token") -> list[dict[str, str]]:
    """Every metric of the whole log with unit, formula and better direction, in the table's order.

    Args:
        length: what lengths of responses are counted in.
    """
    order = {name: i for i, name in enumerate(METRICS)}
    better = {"worse": "lower", "better": "higher", "neither": ""}
    table = []
    for name in sorted(overall, key=lambda n: (order.get(n, len(order)), n)):
        value, row = number(overall[name]), METRICS.get(name)
        table.append(
            {
                "name": name,
                "value": short(value),
                "sort": "" if value is None else repr(value),
                "unit": unit_of(name, length),
                "formula": row.formula if row else "",
                "better": better[row.larger_is] if row else "",
            }
        )
    return table
