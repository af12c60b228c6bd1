"""The report of a run: one self-contained HTML page, built from the run folder alone, also while the run goes on.

Text that a model wrote is never trusted, see `offdrift.show.html`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from offdrift.show.charts import SYMBOLS, chart_data
from offdrift.show.html import render_document, write_document
from offdrift.show.numbers import flatten, kl_labels, kl_level, short
from offdrift.train.charts import all_charts
from offdrift.train.stored import Run, Sample, read_run
from offdrift.train.table import COLUMNS, verdict

FILE_NAME = "report.html"
SAMPLES_PER_ARM = 8
TOKENS_PER_SAMPLE = 600


GLYPHS = dict(zip(SYMBOLS, "●■◆▲✚★⬢⬟"))
"""The plotted marker symbols as text, for legend and table."""


def write_report(run_dir: Path) -> Path:
    """Write `report.html` of a run, finished or not, and say where it is.

    The file appears whole or not at all; an earlier report is replaced.

    Args:
        run_dir: folder of the run (`run.json`, `arms/<arm>/...`).

    Returns: path of the page.
    Raises: `RecordError` if the folder is not a run, or cannot be written.
    """
    return write_document(render(read_run(run_dir)), run_dir / FILE_NAME)


def render(run: Run) -> str:
    """The page of a run as text."""
    charts = all_charts(run.arms)
    shown = [(arm, pick_samples(arm.samples, SAMPLES_PER_ARM)) for arm in run.arms]
    context = {
        "run": run,
        "verdict": verdict(run),
        "columns": COLUMNS,
        "charts": charts,
        "shown": shown,
        "recipe": list(flatten(run.recipe)),
        "kl_level": kl_level,
        "kl_labels": kl_labels(),
        "glyph": lambda i: GLYPHS[SYMBOLS[i % len(SYMBOLS)]],
        "num_colors": len(SYMBOLS),
        "token_limit": TOKENS_PER_SAMPLE,
        "grade_of": lambda arms: ", ".join(sorted({arm.label("grade") for arm in arms} - {""})),
    }
    data = {
        **chart_data(charts),
        # KL, TV, log-prob and weight of every shown token.
        "samples": [
            [
                [
                    [short(v) for v in row]
                    for row in itertools.islice(zip(s.kl, s.tv, s.logp_rollout, s.weight), TOKENS_PER_SAMPLE)
                ]
                for s in samples
            ]
            for _, samples in shown
        ],
    }
    return render_document("report.html.j2", context, data=data, styles=("page.css",))


def pick_samples(samples: Sequence[Sample], limit: int) -> list[Sample]:
    """The latest samples, newest first, always with the one of largest KL among all.

    Args:
        limit: how many at most.
    """
    newest = list(reversed(samples))
    picked = newest[:limit]
    worst = max(newest, key=lambda s: s.kl_max, default=None)
    if worst is not None and not any(s is worst for s in picked):
        picked[-1] = worst
    return picked
