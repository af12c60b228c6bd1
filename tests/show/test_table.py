"""The table's cells and the verdict, against sentences and numbers worked out by hand."""

from __future__ import annotations

import re

import pytest

from offdrift.show.numbers import duration, fixed, percent, short
from offdrift.train.stored import COLUMNS, Arm, Run, verdict


def arm(
    name: str,
    after: float | None = None,
    *,
    before: float | None = None,
    acceptance: float | None = None,
    prompts: int | None = None,
    finished: bool = True,
) -> Arm:
    summary = {"reward_before": before, "reward_after": after, "acceptance": acceptance}
    evals = () if prompts is None else ({"update": 8, "reward": after, "prompts": prompts},)
    return Arm(name, finished, summary, evals=evals)


def sentence(*arms: Arm) -> str:
    return verdict(Run("run", {}, "", None, {}, {}, arms))


# Two means of 0.5 over 50 prompts each: sqrt(0.25 / 50 + 0.25 / 50) = 0.1, twice that is 0.2.
# 0.7 and 0.5 over 100: sqrt(0.21 / 100 + 0.25 / 100) = 0.067823, twice that is 0.136.
@pytest.mark.parametrize(
    ("arms", "expected"),
    [
        ((), "No arm"),
        ((arm("a"),), "No held-out reward"),
        ((arm("a", 0.5),), "a ended at 0.500"),
        ((arm("a", 0.5, before=0.25),), "from 0.250 to 0.500"),
        (
            (arm("a", 0.5), arm("b", 0.75), arm("c", 0.6), arm("d")),
            "b ended with the highest .* 0.750, 0.150 ahead of c\\.",
        ),
        ((arm("a", 0.5), arm("b", 0.5), arm("c", 0.25)), "a and b ended level, .* 0.500"),
        ((arm("a", 0.0), arm("b", 0.0), arm("c")), "a and b ended level, at 0.000"),
        ((arm("a", 0.7, prompts=100), arm("b", 0.5, prompts=100)), "0.700, 0.200 ahead of b\\."),
        (
            (arm("a", 0.6, prompts=100), arm("b", 0.5, prompts=100)),
            "0.100 ahead of b .*noise of 100 .* errors are 0.140",
        ),
        ((arm("a", -3.0, prompts=100), arm("b", -4.0, prompts=100)), "−3.000, 1.000 ahead of b\\."),
        ((arm("a", 0.5, acceptance=0.7), arm("b", acceptance=0.6999)), "0.500 .*; b accepted 69.9 % .* 70 % "),
        (
            (arm("a", acceptance=0.5), arm("b", acceptance=0.25), arm("c", acceptance=0.0)),
            "No held-out reward .*; a accepted 50.0 %, b accepted 25.0 % and c accepted 0.0 % ",
        ),
        ((arm("a", 0.5), arm("b", finished=False)), "So far .b still running.: a ended at 0.500"),
        ((arm("a", finished=False), arm("b", finished=False)), "So far .a and b still running.: no held-out reward"),
    ],
)
def test_the_verdict_says_what_the_numbers_say(arms: tuple[Arm, ...], expected: str) -> None:
    assert re.search(expected, sentence(*arms))


def test_every_column_explains_itself() -> None:
    assert len(COLUMNS) == 9
    for column in COLUMNS:
        assert column.meaning.endswith("."), column.id
        assert column.better.split()[0] in {"higher", "lower", "watch:"}, column.id
    assert {c.unit for c in COLUMNS if c.id in {"kl_mean", "kl_max", "ppl_gap"}} == {"nat"}


def test_an_arm_without_numbers_has_a_dash_in_every_cell() -> None:
    cells = [column.cell(Arm("a", True)) for column in COLUMNS]
    assert [cell.text for cell in cells] == ["–"] * 9
    assert not any(cell.note or cell.flagged for cell in cells)


@pytest.mark.parametrize(
    ("column", "summary", "text", "note", "flagged"),
    [
        ("reward", {"reward_before": 0.25, "reward_after": 0.5}, "0.250 → 0.500", "+0.250", False),
        ("reward", {"reward_before": 0.5, "reward_after": 0.25}, "0.500 → 0.250", "−0.250", False),
        ("reward", {"reward_before": 0.5}, "0.500", "", False),
        ("kl_mean", {"kl_mean": 0.00123, "grade": "exact"}, "0.00123", "exact", False),
        ("kl_max", {"kl_max": 0.0000456}, "4.56e−5", "", False),
        ("acceptance", {"acceptance": 0.7}, "70.0 %", "", False),
        ("acceptance", {"acceptance": 0.69}, "69.0 %", "below 70 %", True),
        ("ess", {"ess_frac": 0.9}, "90.0 %", "", False),
        ("ppl_gap", {"log_ppl_gap": 0.0125}, "0.0125", "", False),
        ("bound", {"bound": 4.1}, "4.10", "", False),
        ("precondition", {"falsified_updates": 0, "updates": 64}, "not falsified", "in 64 updates", False),
        ("precondition", {"falsified_updates": 3, "updates": 64}, "falsified", "at 3 of 64 updates", True),
        ("speed", {"tokens_per_s": 2413.4, "seconds": 78.5}, "2,413", "1 min 18 s", False),
    ],
)
def test_cells(column: str, summary: dict, text: str, note: str, flagged: bool) -> None:
    (cell,) = [c.cell(Arm("a", True, summary)) for c in COLUMNS if c.id == column]
    assert (cell.text, cell.note, cell.flagged) == (text, note, flagged)


def test_numbers_are_printed_for_people() -> None:
    assert [short(v) for v in (0.0, 1.0, 12345.0, 9999.0, 0.001, 0.00099, 100.0)] == [
        "0", "1.00", "1.23e4", "9999", "0.00100", "9.90e−4", "100",
    ]  # fmt: skip
    assert (fixed(1.23456), percent(0.99999), percent(0.7)) == ("1.235", "99.9 %", "70.0 %")
    assert [duration(v) for v in (0.4, 59.6, 3599.0, 3600.0)] == ["0.4 s", "1 min 0 s", "59 min 59 s", "1 h 0 min"]
