"""The charts of a run: one line an arm, and only what was recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from offdrift.show.charts import points
from offdrift.train.page import QUANTITIES, all_charts, line_chart, moving_mean, reward_chart
from offdrift.train.stored import Arm, read_run
from tests.show.synthetic import write_run

KL = next(q for q in QUANTITIES if q.id == "kl_mean")
ACCEPTANCE = next(q for q in QUANTITIES if q.id == "acceptance")


def arm(key: str, values: list[float | None], name: str = "a") -> Arm:
    return Arm(name, True, metrics=tuple({"update": u, key: v} for u, v in enumerate(values)))


def test_every_chart_of_a_run_has_its_lines_and_says_what_they_mean(tmp_path: Path) -> None:
    charts = all_charts(read_run(write_run(tmp_path)).arms)
    assert [c.id for c in charts] == [
        "reward", "acceptance", "kl_mean", "kl_max", "bound", "gain_low", "ppl_gap", "ess", "length", "version_lag",
    ]  # fmt: skip
    assert [len(c.series) for c in charts] == [12, *9 * [4]]
    assert all(c.meaning.endswith(".") for c in charts)


def test_reward_is_drawn_raw_smoothed_and_held_out() -> None:
    one = Arm(
        "a",
        True,
        metrics=tuple({"update": u, "reward/mean": r} for u, r in [(0, 0.0), (2, 0.3), (3, 0.6)]),
        evals=({"update": 0, "reward": 0.1}, {"update": 4, "reward": 0.7}),
    )
    raw, smooth, held_out = reward_chart([one]).series
    assert (raw.x, raw.y, raw.faint) == ([0, 2, 3], [0.0, 0.3, 0.6], True)
    assert smooth.y == pytest.approx([0.3, 0.3, 0.3])
    assert (held_out.x, held_out.y, held_out.kind) == ([0, 4], [0.1, 0.7], "dots")


def test_the_moving_mean_is_the_mean_of_its_window() -> None:
    # windows of 0 1 4 9 16: (0 1 4) (0 1 4 9) (0 1 4 9 16) (1 4 9 16) (4 9 16)
    expected = [5 / 3, 14 / 4, 30 / 5, 30 / 4, 29 / 3]
    assert moving_mean([0.0, 1.0, 4.0, 9.0, 16.0], 5) == pytest.approx(expected)
    assert moving_mean([2.0], 5) == [2.0]
    assert moving_mean([], 5) == []


def test_a_log_axis_leaves_out_what_it_cannot_show() -> None:
    chart = line_chart(KL, [arm(KL.key, [0.0, 1e-3, None, 2e-3])])
    drawn = points(chart, chart.series[0])
    assert (drawn["x"], drawn["y"]) == ([0, 1, 3], [None, 1e-3, 2e-3])
    assert chart.log
    assert line_chart(KL, [arm(KL.key, [0.0, 0.0])]).series == ()
    assert line_chart(ACCEPTANCE, [arm(ACCEPTANCE.key, [0.0, 0.0])]).series[0].y == [0.0, 0.0]


def test_arms_keep_their_color_when_another_recorded_nothing() -> None:
    arms = [arm(KL.key, [0.1, 0.2], "a"), Arm("empty", False), arm(KL.key, [0.3, 0.4], "c")]
    series = line_chart(KL, arms).series
    assert [(s.name, s.color, s.group) for s in series] == [("a", "arm-0", "0"), ("c", "arm-2", "2")]


def test_acceptance_has_its_line_at_70_percent() -> None:
    assert line_chart(ACCEPTANCE, []).lines == [(0.7, "70%")]
    assert line_chart(KL, []).lines == ()
