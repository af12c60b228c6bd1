"""The learning-rate guard, a function of the lengths so far."""

import pytest

from offdrift.judge import lr_guard
from offdrift.methods.schedules import LengthSurge


def history(*pieces):
    return [{"response/length_mean": float(x)} for n, x in pieces for _ in range(n)]


@pytest.mark.parametrize(
    ("rows", "factor"),
    [
        (history(), 1.0),
        (history((99, 100), (1, 900)), 1.0),  # not a hundred steps yet
        (history((100, 100), (1, 120)), 1.0),  # exactly 20 %
        (history((100, 100), (1, 121)), 0.5),
        (history((100, 100), (100, 121)), 0.5),  # one surge, not a hundred
        (history((100, 100), (101, 130), (100, 130)), 0.5),
        (history((100, 100), (101, 130), (5, 200)), 0.25),
    ],
)
def test_factor(rows, factor):
    assert lr_guard(rows) == factor


def test_it_never_ends_at_zero():
    rows = history(*((101, 100 * 1.3**k) for k in range(9)))
    assert lr_guard(rows) == 0.1


def test_calling_it_at_every_step_changes_nothing():
    rows = history((100, 100), (50, 130))
    factors = [lr_guard(rows[:i]) for i in range(len(rows) + 1)]
    assert factors == [1.0] * 101 + [0.5] * 50


def test_steps_without_a_length_are_passed_over():
    rows = [r for row in history((100, 100), (1, 121)) for r in (row, {"reward/mean": 1.0})]
    assert lr_guard(rows) == 0.5


def test_the_papers_periods():
    rows = history((50, 100), (60, 400), (200, 400))
    assert lr_guard(rows, LengthSurge()) == LengthSurge().periodic(310, 51)
