"""The figures: valid for plotly, one trace an arm, and only what was recorded."""

from __future__ import annotations

from pathlib import Path

import plotly.graph_objects as go
import pytest

from offdrift.train.charts import QUANTITIES, all_charts, line_chart, moving_mean, reward_chart
from offdrift.train.stored import Arm, read_run
from tests.show.synthetic import write_run

KL = next(q for q in QUANTITIES if q.id == "kl_mean")
ACCEPTANCE = next(q for q in QUANTITIES if q.id == "acceptance")


def arm(key: str, values: list[float | None], name: str = "a") -> Arm:
    return Arm(name, True, metrics=tuple({"update": u, key: v} for u, v in enumerate(values)))


def test_every_chart_of_a_run_is_a_valid_figure(tmp_path: Path) -> None:
    charts = all_charts(read_run(write_run(tmp_path)).arms)
    assert [c["id"] for c in charts] == [
        "reward", "acceptance", "kl_mean", "kl_max", "bound", "gain_low", "ppl_gap", "ess", "length", "version_lag",
    ]  # fmt: skip
    figures = [go.Figure(data=chart["data"], layout=chart["layout"]) for chart in charts]
    assert [len(figure.data) for figure in figures] == [12, *9 * [4]]
    assert all(chart["meaning"].endswith(".") for chart in charts)


def test_reward_is_drawn_raw_smoothed_and_held_out() -> None:
    one = Arm(
        "a",
        True,
        metrics=tuple({"update": u, "reward/mean": r} for u, r in [(0, 0.0), (2, 0.3), (3, 0.6)]),
        evals=({"update": 0, "reward": 0.1}, {"update": 4, "reward": 0.7}),
    )
    raw, smooth, held_out = reward_chart([one])["data"]
    assert (raw["x"], raw["y"]) == ([0, 2, 3], [0.0, 0.3, 0.6])
    assert smooth["y"] == pytest.approx([0.3, 0.3, 0.3])
    assert (held_out["x"], held_out["y"], held_out["mode"]) == ([0, 4], [0.1, 0.7], "markers")
    assert (raw["opacity"] < 1, raw["hoverinfo"]) == (True, "skip")


def test_the_moving_mean_is_the_mean_of_its_window() -> None:
    # windows of 0 1 4 9 16: (0 1 4) (0 1 4 9) (0 1 4 9 16) (1 4 9 16) (4 9 16)
    expected = [5 / 3, 14 / 4, 30 / 5, 30 / 4, 29 / 3]
    assert moving_mean([0.0, 1.0, 4.0, 9.0, 16.0], 5) == pytest.approx(expected)
    assert moving_mean([2.0], 5) == [2.0]
    assert moving_mean([], 5) == []


def test_a_log_axis_leaves_out_what_it_cannot_show() -> None:
    chart = line_chart(KL, [arm(KL.key, [0.0, 1e-3, None, 2e-3])])
    assert (chart["data"][0]["x"], chart["data"][0]["y"]) == ([1, 3], [1e-3, 2e-3])
    assert chart["layout"]["yaxis"]["type"] == "log"
    assert line_chart(KL, [arm(KL.key, [0.0, 0.0])])["data"] == []
    assert line_chart(ACCEPTANCE, [arm(ACCEPTANCE.key, [0.0, 0.0])])["data"][0]["y"] == [0.0, 0.0]


def test_arms_keep_their_number_when_another_recorded_nothing() -> None:
    arms = [arm(KL.key, [0.1, 0.2], "a"), Arm("empty", False), arm(KL.key, [0.3, 0.4], "c")]
    traces = line_chart(KL, arms)["data"]
    assert [(t["name"], t["meta"]["arm"]) for t in traces] == [("a", 0), ("c", 2)]


def test_acceptance_has_its_line_at_70_percent() -> None:
    (line,) = line_chart(ACCEPTANCE, [arm(ACCEPTANCE.key, [0.9, 0.8])])["layout"]["shapes"]
    assert (line["y0"], line["y1"]) == (0.7, 0.7)
    assert "shapes" not in line_chart(KL, [])["layout"]


def test_axes_have_ticks_where_there_are_values() -> None:
    def axes(values: list[float | None]) -> tuple[object, object, object]:
        layout = line_chart(KL, [arm(KL.key, values)])["layout"]
        return layout["xaxis"].get("dtick"), layout["yaxis"]["dtick"], layout["yaxis"].get("range")

    assert axes([1.1e-5, 1.9e-5]) == (1, "D2", [-5, -4])
    assert axes([1e-4, 1e-4]) == (1, "D2", [-4, -3])
    assert axes([2e-5, 1.9e-3, *[1e-4] * 6, 1e-4]) == (1, "D2", [-5, -2])
    assert axes([2e-5, 2e-3, *[1e-4] * 7, 1e-4]) == (None, 1, None)
    assert axes([]) == (1, 1, None)


def test_a_single_point_is_a_marker() -> None:
    assert line_chart(KL, [arm(KL.key, [0.1])])["data"][0]["mode"] == "markers"
    assert line_chart(KL, [arm(KL.key, [0.1, 0.1])])["data"][0]["mode"] == "lines"


def test_markup_in_an_arm_name_is_text_for_plotly() -> None:
    name = '<a href="https://example.org">\ud800</a>'
    trace = line_chart(KL, [arm(KL.key, [0.1, 0.2], name)])["data"][0]
    assert trace["name"] == '&lt;a href="https://example.org"&gt;\\ud800&lt;/a&gt;'
