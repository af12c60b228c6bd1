"""Write the tables of docs/diagnosis.md and of this folder's README from stored results.

    python -m benchmarks.field.tables

Reads `field-held-out.json`, `field-before.json`, `field-reported-first.json` and `field-reported-later.json` in
benchmarks/results, and `field-dev.json` and `field-clean.json` where they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.field.score import summary

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "docs" / "diagnosis.md", ROOT / "benchmarks" / "field" / "README.md")
BEGIN, END = "<!-- field: made by benchmarks/field/tables.py -->", "<!-- field: end -->"
ROWS = {
    "right": "right cause first",
    "right or honestly abstaining": "right, or a question that this log cannot answer",
    "right or abstaining": "right, or any question",
    "missed": "missed",
    "wrong": "wrong",
    "confidently wrong": "of those, confidently",
    "fix applicable": "first fix applies",
    "false alarms": "clean logs with a finding above watch",
    "invented": "finding above watch where the format shows nothing",
}


def stored(name: str) -> dict[str, Any] | None:
    """The results of a run of the benchmark, where there are any."""
    file = RESULTS / f"field-{name}.json"
    return json.loads(file.read_text("utf-8")) if file.is_file() else None


def of_share(share: Mapping[str, Any]) -> str:
    """A count of a number, with its interval."""
    if not share["of"]:
        return ""
    return f"{share['count']} of {share['of']} ({100 * share['low']:.0f} to {100 * share['high']:.0f} %)"


def table() -> str:
    """The table of what the audit says of both halves and of clean logs, now and before its diagnosis was rewritten."""
    held = stored("held-out") or {"logs": []}
    columns = {"held out": summary(held["logs"])}
    columns |= {f"of it {size}": summary(r for r in held["logs"] if r["size"] == size) for size in ("large", "small")}
    more = {
        "26 kinds more, each before rules were mended for it": ("reported-first", "reported-later"),
        "development": ("dev",),
        "clean logs": ("clean",),
        "development, before": ("before",),
    }
    for words, names in more.items():
        if logs := [record for name in names for record in (stored(name) or {"logs": []})["logs"]]:
            columns[words] = summary(logs)
    lines = ["| | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    for key, words in ROWS.items():
        lines.append(f"| {words} | " + " | ".join(of_share(c[key]) for c in columns.values()) + " |")
    return "\n".join(lines)


def main() -> None:
    text = table()
    for page in PAGES:
        before, _, rest = page.read_text("utf-8").partition(BEGIN)
        _, found, after = rest.partition(END)
        assert found, f"{page} lacks {BEGIN} ... {END}"
        page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", "utf-8")


if __name__ == "__main__":
    main()
