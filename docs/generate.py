"""Write docs/methods.md and docs/metrics.md from the tables in the code: `make docs`.

Nobody edits those two pages; a test fails when they differ from what this prints.
"""

from __future__ import annotations

from pathlib import Path

from offdrift.methods import METHODS
from offdrift.stats import METRICS

HERE = Path(__file__).parent


def methods_page() -> str:
    """Every row of the method table."""
    lines = [
        "# Methods",
        "",
        "Generated from `offdrift.methods.METHODS` by `make docs`. A method is a composition: an",
        "objective, gates, a weight and an aggregate; `on` says which of the three ratios a part reads",
        "(full: current to rollout policy, mismatch: old to rollout, staleness: current to old).",
        "",
        "| method | what it does | parts | when it fails | source |",
        "|---|---|---|---|---|",
    ]
    for name, row in METHODS.items():
        parts = "<br>".join(row.describe().split("; "))
        lines.append(f"| `{name}` | {row.summary} | {parts} | {row.fails} | {row.reference} |")
    return "\n".join(lines) + "\n"


def metrics_page() -> str:
    """Every metric that can be logged."""
    lines = [
        "# Metrics",
        "",
        "Generated from `offdrift.stats.METRICS` by `make docs`. `l` is the log-ratio of the pair named",
        "before the slash, in nats, on tokens drawn from the rollout policy; nothing is clipped but the",
        "exponent (at 20), and nothing depends on the correction that was chosen, except what `weight/`",
        "and `gate/` say about it. What cannot be known from a batch is NaN.",
        "",
        "| metric | unit | formula | larger is |",
        "|---|---|---|---|",
    ]
    for row in METRICS.values():
        formula = row.formula.replace("|", "\\|")
        lines.append(f"| `{row.name}` | {row.unit} | {formula} | {row.larger_is} |")
    return "\n".join(lines) + "\n"


PAGES = {"methods.md": methods_page, "metrics.md": metrics_page}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (HERE / name).write_text(page(), encoding="utf-8")
        print(HERE / name)
