"""The figure of the bounds draws the bounds: same numbers, same axes, thick minimum."""

from __future__ import annotations

import math

import pytest

from offdrift.certificate import all_bounds
from offdrift.certificate.bounds import LABELS
from offdrift.errors import BadValueError
from offdrift.prove.bound import bound_chart, write_bound_chart
from offdrift.show.charts import Chart
from offdrift.show.numbers import short

GIVEN = {"delta": 1e-4, "eps": 5e-3, "kl_seq": 0.01, "tv_seq": 0.05}


def lines_of(chart: Chart) -> dict[str, dict[int, float]]:
    """Points by the name of the bound; names end in the value at the marked horizon."""
    return {s.name.rpartition(": ")[0]: dict(zip(s.x, s.y)) for s in chart.series}


@pytest.mark.parametrize("shown", [("paper", "sharp"), ("sharp",), ("paper",)])
def test_every_point_is_a_bound(shown):
    main = "sharp" if "sharp" in shown else "paper"
    chart = bound_chart(horizon=300, reward_range=2.0, constants=shown, **GIVEN)
    lines = lines_of(chart)
    best = "B*, the smallest"
    for horizon in (1, 2, 30, 300, 3000):
        rows = all_bounds(horizon=horizon, reward_range=2.0, constants=main, **GIVEN)
        assert {LABELS[row.name] for row in rows} == set(lines) - {best, "B* with the paper's constants"}
        for row in rows:
            assert lines[LABELS[row.name]][horizon] == row.value
        assert lines[best][horizon] == min(row.value for row in rows if row.unified)
        if len(shown) == 2:
            paper = all_bounds(horizon=horizon, reward_range=2.0, constants="paper", **GIVEN)
            assert lines["B* with the paper's constants"][horizon] == min(r.value for r in paper if r.unified)
    assert ("B* with the paper's constants" in lines) is (len(shown) == 2)
    assert [s.name.partition(":")[0] for s in chart.series if s.strong] == [best]
    assert chart.lines == [(2.0, "reward's range, 2")]
    assert chart.upright == [(300, "T = 300")]
    assert chart.log_x
    assert chart.log
    # The legend reads downwards as the curves do at the marked horizon, and says what they are there.
    values = [dict(zip(s.x, s.y))[300] for s in chart.series]
    assert values == sorted(values, reverse=True)
    assert [s.name.rpartition(": ")[2] for s in chart.series] == [short(v) for v in values]


def test_the_axis_ends_above_what_is_of_use():
    """Two decades above the reward's range, or one above B*: the T^2 rows leave it, B* never does."""
    chart = bound_chart(horizon=4096, reward_range=1.0, constants=("sharp",), delta=0.029, kl_rate=1.42e-3)
    lines = lines_of(chart)
    assert chart.y_range is not None
    low, high = chart.y_range
    assert high == 100
    assert lines["Classical KL"][4096] == pytest.approx(4096 * 4095 * 0.029 / 2, rel=1e-12)
    assert lines["Classical KL"][4096] > high
    assert max(lines["B*, the smallest"].values()) == pytest.approx(40960 * 1.42e-3)
    assert 0 < low <= min(y for y in lines["B*, the smallest"].values() if y > 0)
    far = bound_chart(horizon=10**5, reward_range=1.0, constants=("sharp",), delta=0.1)
    assert far.y_range is not None
    assert far.y_range[1] >= 10 * 0.1 * 10**5


def test_a_rate_lets_the_kl_of_sequences_grow():
    given = {"delta": 1e-4, "kl_rate": 1e-6}
    line = lines_of(bound_chart(horizon=100, reward_range=1.0, constants=("sharp",), **given))["Mixed KL"]
    # 2 T sqrt(delta/2) sqrt(T kl_rate/2)
    want = {t: 2 * t * math.sqrt(1e-4 / 2) * math.sqrt(t * 1e-6 / 2) for t in line}
    assert line == pytest.approx(want, rel=1e-12)
    assert len(want) > 50


@pytest.mark.parametrize(
    "given",
    [
        {"horizon": 1, "delta": 0.0},
        {"horizon": 1, "delta": 5},
        {"horizon": 10**7, "delta": 1e-9, "mean_tv": 1e-6},
        {"horizon": 50, "delta": math.inf, "eps": 0.01},
    ],
)
def test_any_size_is_drawn(given: dict, tmp_path):
    picture, page = (write_bound_chart(tmp_path / name, **given) for name in ("bounds.png", "bounds.html"))
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "How far can the surrogate be" in page.read_text("utf-8")


def test_impossible_numbers_are_refused_by_name(tmp_path):
    with pytest.raises(BadValueError, match="horizon = 0"):
        write_bound_chart(tmp_path / "x.html", horizon=0, delta=0.1)
    with pytest.raises(BadValueError, match=r"eps = 1\.5"):
        write_bound_chart(tmp_path / "x.html", horizon=10, delta=0.1, eps=1.5)
    with pytest.raises(BadValueError, match="kl_seq and kl_rate are both given"):
        write_bound_chart(tmp_path / "x.html", horizon=10, delta=0.1, kl_seq=0.1, kl_rate=0.1)
    assert list(tmp_path.iterdir()) == []


def test_the_caption_says_what_was_taken_to_hold(tmp_path):
    page = write_bound_chart(tmp_path / "a.html", horizon=4096, **GIVEN)
    text = page.read_text("utf-8")
    assert "range at T = 1,000 (the paper&#39;s constants) and at no T (sharp constants)" in text
    assert "A given divergence of whole sequences is taken as a limit at every T." in text
    page = write_bound_chart(tmp_path / "b.html", horizon=64, delta=0.0)
    assert "range at no T (the paper&#39;s constants) and at no T (sharp constants)" in page.read_text("utf-8")
