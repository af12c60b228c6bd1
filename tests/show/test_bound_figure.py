"""The figure of the bounds draws the bounds: same numbers, same axes, thick minimum."""

from __future__ import annotations

import math

import numpy as np
import pytest

from offdrift.certificate import all_bounds
from offdrift.certificate.bounds import LABELS
from offdrift.errors import BadValueError
from offdrift.prove.bound import bound_panels, write_bound_chart

GIVEN = {"delta": 1e-4, "eps": 5e-3, "kl_seq": 0.01, "tv_seq": 0.05}


def test_every_point_is_a_bound():
    paper, sharp = bound_panels(horizon=300, reward_range=2.0, constants=("paper", "sharp"), **GIVEN)
    compared = 0
    for panel, constants in ((paper, "paper"), (sharp, "sharp")):
        lines = {s.name: dict(zip(s.x, s.y)) for s in panel.series}
        for horizon in (1, 2, 30, 300, 3000):
            rows = all_bounds(horizon=horizon, reward_range=2.0, constants=constants, **GIVEN)
            for row in rows:
                assert lines[LABELS[row.name]][horizon] == row.value
                compared += 1
            best = min(row.value for row in rows if row.unified)
            assert lines["Unified B*"][horizon] == best
        assert [s.name for s in panel.series if s.strong] == ["Unified B*"]
        assert panel.lines == [(2.0, "reward's range, 2")]
        assert panel.upright == [(300, "T = 300")]
        assert panel.log_x
        assert panel.log
    assert compared == 5 * (7 + 9)
    assert paper.y_range == sharp.y_range
    assert paper.y_range is not None
    values = np.concatenate([s.y for s in (*paper.series, *sharp.series)])
    assert paper.y_range[0] <= values[values > 0].min()
    assert values.max() <= paper.y_range[1]


def test_a_rate_lets_the_kl_of_sequences_grow():
    given = {"delta": 1e-4, "kl_rate": 1e-6}
    (panel,) = bound_panels(horizon=100, reward_range=1.0, constants=("sharp",), **given)
    line = next(s for s in panel.series if s.name == "Mixed KL")
    # 2 T sqrt(delta/2) sqrt(T kl_rate/2)
    want = [2 * t * math.sqrt(1e-4 / 2) * math.sqrt(t * 1e-6 / 2) for t in line.x]
    assert line.y == pytest.approx(want, rel=1e-12)
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
