"""Figures: charts as a page of their own or as a picture, for documents and posts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from offdrift.errors import BadValueError, OffdriftError
from offdrift.show.charts import Chart, chart_data, styled


def write_figure(stem: Path, charts: Sequence[Chart], *, title: str, caption: str = "") -> tuple[Path, Path]:
    """Write `stem.png` and `stem.html`, as `write_chart` does, and say where they are.

    Example:
        >>> import tempfile
        >>> from offdrift.show.charts import Series
        >>> squares = Series("T²", x=[1, 2, 4], y=[1.0, 4.0, 16.0])
        >>> chart = Chart("Growth", "bound", [squares], x_title="T (tokens)", log_x=True, log=True)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     files = write_figure(Path(folder) / "growth", [chart], title="Two words")
        >>> [f.name for f in files]
        ['growth.png', 'growth.html']
    """
    picture, page = (stem.with_name(stem.name + ending) for ending in (".png", ".html"))
    image, text = (_drawn(charts, kind, title=title, caption=caption) for kind in ("png", "html"))
    return _write(picture, image), _write(page, text)


def write_chart(path: Path, charts: Sequence[Chart], *, title: str, caption: str = "") -> Path:
    """Write a page (.html) or a picture (.svg, .png), whole or not at all, and say where it is.

    A page needs nothing but itself and follows the reader's light or dark theme.

    Args:
        path: its ending decides what is written; folders are made, an earlier file is replaced.
        charts: one or more; series of one name have one color in all of them.
        caption: what the reader should see in it, and where the numbers are from.

    Raises: `BadValueError` for another ending, or without charts; `RecordError` if the file cannot be
        written; `OffdriftError` if matplotlib or jinja2 is not installed.
    """
    return _write(path, _drawn(charts, chart_kind(path), title=title, caption=caption))


def chart_kind(path: Path) -> str:
    """Return "html", "svg" or "png", by a file's ending: ask before the work. Raises: `BadValueError` for another."""
    kind = path.suffix.lower().removeprefix(".")
    if kind not in ("html", "svg", "png"):
        raise BadValueError(f"{path} ends in {path.suffix or 'nothing'!r}; a chart is a .html, .svg or .png file")
    return kind


def _drawn(charts: Sequence[Chart], kind: str, *, title: str, caption: str) -> bytes:
    if not charts:
        raise BadValueError("a figure without charts; give at least one")
    try:
        if kind == "html":
            return figure_page(charts, title=title, caption=caption).encode()
        from offdrift.show.png import picture_of
    except ModuleNotFoundError as e:
        raise OffdriftError(f"figures need {e.name}, which is not installed; pip install 'offdrift[train]'") from e
    return picture_of(charts, kind=kind, title=title, caption=caption)


def _write(path: Path, content: bytes) -> Path:
    from offdrift.records.atomic import write_atomically  # which waits for torch

    write_atomically(path, lambda partial: Path(partial).write_bytes(content))
    return path


def figure_page(charts: Sequence[Chart], *, title: str, caption: str = "") -> str:
    """The page as text, the same for the same charts."""
    from offdrift.show.html import render_document

    charts = styled(charts)
    legend = {s.name: s for chart in reversed(charts) for s in reversed(chart.series)}
    order = dict.fromkeys(s.name for chart in charts for s in chart.series)
    context = {"title": title, "caption": caption, "charts": charts, "legend": [legend[name] for name in order]}
    return render_document("figure.html.j2", context, data=lambda columns: chart_data(charts, columns))
