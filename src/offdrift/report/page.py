"""The report of a run: one HTML page that needs nothing but itself.

Built from the run folder alone, so it can be rebuilt at any time, also while the run goes on. What a
model wrote is never trusted: every text goes through the template's autoescape, data reaches the
scripts as escaped JSON, and the page's Content-Security-Policy lets exactly two scripts run (by
their hash) and nothing be loaded, so that markup which slipped through could still do nothing.
"""

from __future__ import annotations

import base64
import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from offdrift.report.charts import SYMBOLS, all_charts
from offdrift.report.stored import Arm, Run, Sample, read_run
from offdrift.report.table import COLUMNS, duration, fixed, short, verdict
from offdrift.report.text import visible, visible_token
from offdrift.rollouts.store import write_atomically

FILE_NAME = "report.html"
SAMPLES_PER_ARM = 8
TOKENS_PER_SAMPLE = 600

KL_EDGES = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
"""Where the color of a token changes (nats): half decades, the same on every page."""

GLYPHS = dict(zip(SYMBOLS, "●■◆▲✚★⬢⬟"))
"""The plotted marker symbols as text, for legend and table."""

_HERE = Path(__file__).parent


def write_report(run_dir: Path) -> Path:
    """Write `report.html` of a run, finished or not, and say where it is.

    The file appears whole or not at all; an earlier report is replaced.

    Args:
        run_dir: folder of the run (`run.json`, `arms/<arm>/...`).

    Returns: path of the page.
    Raises: `RecordError` if the folder is not a run, or cannot be written.
    """
    html = render(read_run(run_dir))
    path = run_dir / FILE_NAME
    write_atomically(path, lambda partial: Path(partial).write_text(html, encoding="utf-8"))
    return path


def render(run: Run) -> str:
    """The page of a run as text."""
    style, script = (_HERE / "page.css").read_text("utf-8"), (_HERE / "page.js").read_text("utf-8")
    plotly = get_plotlyjs()
    charts = all_charts(run.arms)
    shown = [(arm, pick_samples(arm.samples, SAMPLES_PER_ARM)) for arm in run.arms]
    return (
        _environment()
        .get_template("page.html.j2")
        .render(
            run=run,
            verdict=verdict(run),
            columns=COLUMNS,
            charts=charts,
            shown=shown,
            data={
                "charts": [chart for chart in charts if chart["data"]],
                "samples": [[_token_numbers(s) for s in samples] for _, samples in shown],
            },
            recipe=list(flatten(run.recipe)),
            policy=content_security_policy(scripts=(plotly, script), styles=(style,)),
            # Trusted text of this package; everything else on the page is escaped.
            plotly=Markup(plotly),
            script=Markup(script),
            style=Markup(style),
        )
    )


def content_security_policy(*, scripts: Sequence[str], styles: Sequence[str]) -> str:
    """A policy under which only these inline scripts and style sheets apply, and nothing loads.

    Style *attributes* are allowed: plotly positions its drawings with them. `data:` images are how
    it saves a chart as a picture.

    Reference: Content Security Policy Level 3, section 2.3.1, https://www.w3.org/TR/CSP3/.
    """
    script_hashes = " ".join(map(_hash, scripts))
    style_hashes = " ".join(map(_hash, (*styles, "")))  # "": the empty sheet that plotly fills
    return (
        f"default-src 'none'; script-src {script_hashes}; style-src-elem {style_hashes}; "
        "style-src-attr 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


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


def kl_level(kl: float | None) -> int:
    """Color step of a token, 0 (below the first edge, or unknown) to the number of edges.

    Example:
        >>> kl_level(0.0), kl_level(2e-5), kl_level(0.5), kl_level(None)
        (0, 1, 9, 0)
    """
    return 0 if kl is None else bisect_right(KL_EDGES, kl)


def flatten(tree: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    """A nested mapping as dotted keys and texts.

    Example:
        >>> list(flatten({"optim": {"lr": 0.001}, "arms": ["none"], "seed": None}))
        [('optim.lr', '0.001'), ('arms', '["none"]'), ('seed', 'null')]
    """
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{path}.")
        else:
            yield path, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _shown_as_text(value: object) -> object:
    """What jinja prints: the package's own markup as it is, any other text without hidden signs."""
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    return visible(value)


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown_as_text,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "short": short,
        "fixed": fixed,
        "duration": duration,
        "token": visible_token,
    }
    environment.globals |= {
        "kl_level": kl_level,
        "kl_labels": [f"{edge:.0e}".replace("e-0", "e−") for edge in KL_EDGES],
        "glyph": lambda i: GLYPHS[SYMBOLS[i % len(SYMBOLS)]],
        "num_colors": len(SYMBOLS),
        "token_limit": TOKENS_PER_SAMPLE,
        "grade_of": _grade,
    }
    return environment


def _token_numbers(sample: Sample) -> list[list[str]]:
    """What the page says about each shown token: KL, TV, log-prob, weight."""
    columns = zip(sample.kl, sample.tv, sample.logp_rollout, sample.weight)
    return [[short(v) for v in row] for row in list(columns)[:TOKENS_PER_SAMPLE]]


def _grade(arms: Sequence[Arm]) -> str:
    """The grades of evidence that the run's divergences have."""
    return ", ".join(sorted({grade for arm in arms if (grade := arm.label("grade"))}))


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
