"""Figures: the numbers that were given, gaps where there are none, labels apart, nothing executed."""

import json
import math
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from offdrift.errors import BadValueError, OffdriftError, RecordError, ShapeError
from offdrift.show.charts import Chart, Series, chart_data, points, styled
from offdrift.show.figures import figure_page, write_figure
from offdrift.show.png import palette, picture_of, spread
from tests.show.test_colors import DARK, LIGHT

NAN, INF = math.nan, math.inf
X = [1, 10, 100, 1000]
LINES = [
    Series("rising", X, [1e-3, 1e-2, 0.1, 1.0]),
    Series("flat", X, [0.5, 0.5, NAN, 0.5], low=[0.4, 0.3, 0.2, 0.1], high=[0.6] * 4),
    Series("strong", X, [2.0, INF, 4.0, 8.0], dash="dash", strong=True),
]
PANEL = Chart(
    "Bounds",
    "reward",
    LINES,
    x_title="T (tokens)",
    log_x=True,
    log=True,
    lines=[(1.0, "range")],
    upright=[(50, "here")],
)


def draw(*charts: Chart, title: str = "A figure", caption: str = "") -> list[dict]:
    """The charts as the page's script has them, with their columns in place."""
    page = figure_page(charts, title=title, caption=caption)
    block = re.search(r'<script type="application/json" id="report-data">(.*?)</script>', page)
    assert block is not None
    data = json.loads(block[1])
    for chart in data["charts"]:
        for series in chart["series"]:
            series |= {k: data["columns"][series[k]] for k in ("x", "y", "low", "high", "texts") if k in series}
    return data["charts"]


# -- what is drawn ----------------------------------------------------------------------------


def test_both_files_are_written_and_say_the_same_each_time(tmp_path):
    first = write_figure(tmp_path / "deep" / "a.b", [PANEL], title="Title", caption="Caption")
    assert [p.name for p in first] == ["a.b.png", "a.b.html"]
    again = write_figure(tmp_path / "again", [PANEL], title="Title", caption="Caption")
    for one, other in zip(first, again, strict=True):
        assert one.read_bytes() == other.read_bytes()
    assert sorted(p.name for p in first[0].parent.iterdir()) == ["a.b.html", "a.b.png"]
    size = np.frombuffer(first[0].read_bytes()[16:24], dtype=">i4")  # IHDR: width, height
    assert size.tolist() == [900, 660]


def test_the_page_draws_the_numbers_and_gaps_where_there_are_none():
    (chart,) = draw(PANEL)
    lines = {s["name"]: s for s in chart["series"]}
    assert lines["rising"]["x"] == X
    assert lines["rising"]["y"] == [1e-3, 1e-2, 0.1, 1.0]
    assert lines["flat"]["y"] == [0.5, 0.5, None, 0.5]
    assert lines["strong"]["y"] == [2.0, None, 4.0, 8.0]
    assert lines["strong"]["dash"] == "dash"
    assert chart["series"][0]["name"] == "strong", "behind the others"
    assert lines["flat"]["low"] == [0.4, 0.3, None, 0.1]
    assert lines["flat"]["high"] == [0.6, 0.6, None, 0.6]
    assert (chart["log"], chart["log_x"], chart["lines"], chart["upright"]) == (
        True,
        True,
        [[1, "range"]],
        [[50, "here"]],
    )


def test_columns_that_charts_share_are_stored_once():
    data = chart_data(styled([PANEL, PANEL]))
    assert len(data["charts"]) == 2
    columns = [tuple(c) for c in data["columns"]]
    assert len(columns) == len(set(columns)) == 6  # x, three y, low, high


def test_one_name_is_one_color_in_every_chart():
    other = Chart("Other", "", [Series("new", X, X), Series("flat", X, X)])
    colors = {s["name"]: s["color"] for chart in draw(PANEL, other) for s in chart["series"]}
    assert colors == {"rising": "arm-0", "flat": "arm-1", "strong": "arm-2", "new": "arm-3"}
    many = Chart("", "", [Series(f"{i}", X, X) for i in range(20)])
    assert len({(s["color"], s["dash"]) for s in draw(many)[0]["series"]}) == 20


def test_the_colors_are_those_of_the_report():
    # their contrast in both themes is tested with the report's style sheet
    for theme, colors in (("light", LIGHT), ("dark", DARK)):
        own = palette()[theme]
        assert own == {name: colors[name] for name in own}
        assert {"page", "card", "ink", "soft", "arm-7", "k9"} <= set(own)
    assert len({LIGHT[f"arm-{i}"] for i in range(8)}) == 8
    picture = np.unique(_pixels(picture_of([PANEL], title="", caption="")).reshape(-1, 3), axis=0)
    shown = {f"#{r:02x}{g:02x}{b:02x}" for r, g, b in picture}
    assert {LIGHT["arm-0"], LIGHT["arm-1"], LIGHT["card"], LIGHT["soft"]} <= shown


def _pixels(png: bytes) -> np.ndarray:
    import io

    from matplotlib.image import imread

    return (imread(io.BytesIO(png), format="png")[..., :3] * 255).round().astype(int)


def test_on_a_log_axis_what_is_not_above_zero_is_a_gap():
    series = Series("a", [0, 1, 2, 3], [1.0, 0.0, -1.0, 2.0], low=[0.5, 0, 0, -1], high=[2, 1, 1, 3])
    log = points(Chart("", "", [series], log_x=True, log=True), series)
    assert (log["x"], log["y"]) == ([None, 1, 2, 3], [None, None, None, 2.0])
    assert log["low"] == [None, None, None, 0.5], "a band that reaches 0 goes down to what is shown"
    plain = points(Chart("", "", [series]), series)
    assert (plain["y"], plain["low"]) == ([1.0, 0.0, -1.0, 2.0], [0.5, 0, 0, -1])


@pytest.mark.parametrize(
    "series",
    [
        [],
        [Series("empty", [], [])],
        [Series("nothing", [1, 2], [NAN, INF])],
        [Series("one", [1], [2])],
        [Series("dots", [1, 2, 3], [1, 5, NAN], kind="dots", low=[0, 4, 1], high=[2, 6, 2])],
        [Series("band", [1, 2, 3], low=[1, NAN, 1], high=[2, 6, 2])],
        [Series("steps", [1, 2, 3], [1, None, 2], kind="steps")],
        [Series("bars", ["a", "b"], [1, 2], kind="bars"), Series("more", ["a", "b"], [2, None], kind="bars")],
        [Series("array", np.arange(1, 9), np.arange(8.0))],
        [Series(f"{i}", X, [10.0**i] * 4) for i in range(13)],
        [Series("same", [3, 3], [7, 7])],
    ],
    ids=lambda s: s[0].name if s else "none",
)
@pytest.mark.parametrize("log", [False, True])
def test_any_content_is_drawn(series: list[Series], log: bool):
    texts = any(isinstance(x, str) for s in series for x in s.x)
    chart = Chart("Any", "y", series, x_title="x", log_x=log and not texts, log=log)
    assert picture_of([chart], title="t", caption="").startswith(b"\x89PNG")
    assert all(chart["series"] for chart in draw(chart)), "an empty chart is not for the script"


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_any_number_of_panels(count: int):
    panels = [Chart(f"P{i}", "y", [LINES[0]]) for i in range(count)]
    assert len(draw(*panels)) == count
    assert picture_of(panels, title="t", caption="c").startswith(b"\x89PNG")


# -- labels -----------------------------------------------------------------------------------


def test_labels_are_apart_and_near_the_ends_of_their_lines():
    rng = np.random.default_rng(0)
    checked = 0
    for _ in range(300):
        n = int(rng.integers(1, 13))
        wanted, sizes = rng.random(n).tolist(), rng.uniform(0.02, 0.08, n).tolist()
        places = spread(wanted, sizes)
        ranks = sorted(range(n), key=lambda i: wanted[i])
        for low, high in pairwise(ranks):
            assert places[high] - places[low] >= (sizes[low] + sizes[high]) / 2 - 1e-12
            checked += 1
        assert min(p - s / 2 for p, s in zip(places, sizes)) >= -0.1 - 1e-12
        assert max(p + s / 2 for p, s in zip(places, sizes)) <= 1.1 + 1e-12
    assert checked > 1000
    assert spread([0.2, 0.8], [0.1, 0.1]) == pytest.approx([0.2, 0.8]), "nothing moved without need"
    assert spread([], []) == []


# -- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: Series("a", [1, 2], [1]), ShapeError, r"'a' has points of different counts.*'y': 1"),
        (lambda: Series("a", [1], [1], low=[0]), BadValueError, "one end of a band"),
        (lambda: Series("a", [1], [1], kind="dashed"), Exception, "kind"),
        (lambda: Chart("P", "", [LINES[0], LINES[0]]), BadValueError, "'P' has two series named 'rising'"),
        (lambda: Chart("P", "", [], log=True, lines=[(0.0, "m")]), BadValueError, "'m' has no"),
        (lambda: Chart("P", "", [], lines=[(NAN, "m")]), BadValueError, "no place at nan"),
        (lambda: Chart("P", "", [], log_x=True, upright=[(-1, "v")]), BadValueError, "'v' has no"),
        (lambda: Chart("P", "", [], log=True, y_range=(0.0, 1.0)), BadValueError, "'y_range' has no place at 0.0"),
        (lambda: write_figure(Path("x"), [], title=""), BadValueError, "without charts"),
    ],
)  # fmt: skip
def test_what_cannot_be_drawn_is_refused_by_name(make, error, said):
    with pytest.raises(error, match=said):
        make()


def test_a_place_that_cannot_be_written_is_our_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match="cannot write"):
        write_figure(tmp_path / "file" / "figure", [PANEL], title="")


@pytest.mark.parametrize("missing", ["matplotlib", "jinja2"])
def test_a_missing_package_is_named_with_the_way_to_get_it(missing, tmp_path, monkeypatch):
    for name in [m for m in sys.modules if m in ("offdrift.show.png", "offdrift.show.html")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "offdrift_lab.train.report.page", raising=False)
    for name in [m for m in sys.modules if m.split(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, name)

    class Nothing:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] == missing:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(sys, "meta_path", [Nothing(), *sys.meta_path])
    with pytest.raises(OffdriftError, match=rf"{missing}.*pip install 'offdrift\[train\]'"):
        write_figure(tmp_path / "x", [PANEL], title="")
    assert list(tmp_path.iterdir()) == []


def test_naming_a_figure_loads_no_drawing_library():
    program = "import sys, offdrift.show.charts; print([m for m in ('matplotlib', 'plotly', 'pyarrow') if m in sys.modules])"  # fmt: skip
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_markup_in_a_name_is_shown_and_not_obeyed():
    # plotly would print it bold
    chart = Chart("", "", [Series("<b>bold</b>", X, X)], x_title="<i>x</i>", lines=[(1, "<u>m</u>")])
    (shown,) = draw(chart)
    assert shown["series"][0]["name"] == "&lt;b&gt;bold&lt;/b&gt;"
    assert shown["x_title"] == "&lt;i&gt;x&lt;/i&gt;"
    assert shown["lines"][0][1] == "&lt;u&gt;m&lt;/u&gt;"
    # matplotlib would read a formula, and fail at this one
    bad = "$\\frac$"
    for chart in (
        Chart(bad, "", LINES),
        Chart("", bad, [Series(bad, X, X)], x_title=bad, lines=[(1, bad)]),
        Chart("", "", [Series(bad, X, X, kind="dots")], upright=[(2, bad)]),
        Chart("", "", [Series(bad, [bad, "x"], [1, 2], kind="bars")]),
    ):
        assert picture_of([chart], title=bad, caption=bad).startswith(b"\x89PNG")
