"""Charts as files of their own: a picture for a README or a paper, and a page that answers to the mouse."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from offdrift.errors import BadValueError, OffdriftError
from offdrift.show.charts import Chart, chart_data, styled


def write_figure(stem: Path, charts: Sequence[Chart], *, title: str, caption: str = "") -> tuple[Path, Path]:
    """Write `stem.png` and `stem.html`, each whole or not at all, and say where they are.

    The page needs nothing but itself and follows the reader's light or dark theme.

    Args:
        stem: path without its ending; folders are made, earlier files replaced.
        charts: one or more; series of one name have one color in all of them.
        title: what the figure shows, in one line.
        caption: what the reader should see in it, and where the numbers are from.

    Returns: paths of the picture and of the page.

    Raises: `BadValueError` without charts; `RecordError` if a file cannot be written;
        `OffdriftError` if matplotlib or plotly is not installed.

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
    try:
        from offdrift.records.atomic import write_atomically
        from offdrift.show.html import write_document
        from offdrift.show.png import png_of
    except ModuleNotFoundError as e:
        raise OffdriftError(f"figures need {e.name}, which is not installed; pip install 'offdrift[train]'") from e
    if not charts:
        raise BadValueError("a figure without charts; give at least one")
    picture, page = (stem.with_name(stem.name + ending) for ending in (".png", ".html"))
    drawn = png_of(charts, title=title, caption=caption)
    text = figure_page(charts, title=title, caption=caption)
    write_atomically(picture, lambda partial: Path(partial).write_bytes(drawn))
    return picture, write_document(text, page)


def figure_page(charts: Sequence[Chart], *, title: str, caption: str = "") -> str:
    """The page as text, the same for the same charts."""
    from offdrift.show.html import render_document

    charts = styled(charts)
    legend = {s.name: s for chart in reversed(charts) for s in reversed(chart.series)}
    order = dict.fromkeys(s.name for chart in charts for s in chart.series)
    context = {"title": title, "caption": caption, "charts": charts, "legend": [legend[name] for name in order]}
    return render_document("figure.html.j2", context, data=chart_data(charts))
