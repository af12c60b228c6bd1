"""Every bound for measured drift against the length of responses."""

import itertools
import math

import pytest

from offdrift.certificate import all_bounds
from offdrift.certificate.inverse import vacuous_horizon
from offdrift.errors import BadValueError
from offdrift_lab.exact.lengths import LENGTHS, MEASURED, Drift, length_chart, length_rows, passes


@pytest.mark.parametrize("drift", MEASURED, ids=lambda d: d.name)
def test_where_bounds_pass_one_is_the_first_length_that_does(drift):
    for which, constants in (("sharp", "sharp"), ("paper", "paper")):
        assert passes(drift, which) == vacuous_horizon(delta=drift.delta, kl_rate=drift.kl_rate, constants=constants)
    first = passes(drift, "others")
    assert first is not None

    def smallest(length: int) -> float:
        rows = all_bounds(horizon=length, delta=drift.delta, kl_seq=length * drift.kl_rate, constants="sharp")
        return min(b.value for b in rows if b.unified and b.name != "sequence_kl")

    assert smallest(first) >= 1 > smallest(first - 1)


def test_the_smallest_bound_is_the_smallest_and_grows_with_the_length():
    for row in length_rows(MEASURED):
        for entry in row["lengths"]:
            assert entry["sharp"]["value"] == min(entry["bounds"].values())
            assert entry["sharp"]["value"] == entry["bounds"][entry["sharp"]["bound"]]
            assert entry["others"]["bound"] != "sequence_kl"
            assert entry["sharp"]["value"] <= entry["others"]["value"] <= entry["paper"]["value"]
        values = [entry["sharp"]["value"] for entry in row["lengths"]]
        assert all(a < b for a, b in itertools.pairwise(values))
        below = [entry["tokens"] for entry in row["lengths"] if entry["sharp"]["value"] < 1]
        assert all(tokens < (row["passes"]["sharp"] or math.inf) for tokens in below)


def test_the_mean_of_a_drift_is_at_most_its_maximum():
    with pytest.raises(BadValueError, match=r"mean token KL 0\.2, largest 0\.1"):
        Drift("odd", 0.2, 0.1, "")
    with pytest.raises(BadValueError, match="give one drift"):
        length_rows([])


def test_the_chart_has_a_line_per_drift_with_both_lengths():
    chart = length_chart(length_rows([Drift("bf16", 1.42e-3, 0.029, "")]))
    (series,) = chart.series
    assert series.name == "bf16: 705 (30)"
    assert list(series.x) == list(LENGTHS)
