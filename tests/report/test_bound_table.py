"""The bound table says which horizon, which minimum, attained where, and fits a terminal."""

import io
import json

import numpy as np
import pytest
from rich.console import Console

from offdrift.certificate import all_bounds
from offdrift.report.bound_table import LABELS, bound_rows, bound_table

TABLE_1 = {"horizon": 4096, "delta": 1e-4, "eps": 5e-3, "kl_seq": 0.01, "tv_seq": 0.05}


def shown(**given: object) -> str:
    console = Console(file=io.StringIO(), width=100, color_system=None)
    console.print(bound_table(**given))  # type: ignore[arg-type]
    return console.file.getvalue()  # type: ignore[attr-defined]


def numbers(text: str, label: str) -> list[str]:
    """The numbers in the row with this label, marks stripped."""
    (line,) = [x for x in text.splitlines() if x.strip().startswith(label + "  ")]
    return [w for w in line.split() if w[0].isdigit() and ("." in w or "e" in w)]


def test_table_1_is_printed_to_every_digit():
    text = shown(**TABLE_1)
    # label: the paper's printed KL+TV column, and where it stands among the numbers of the row
    printed = {
        "Classical TV": ("839", 0),
        "Coupling": ("79.9", 1),
        "Pinsker-Marginal KL": ("35.0", 0),
        "Pinsker-Marginal TV": ("24.7", 0),
        "Mixed KL": ("8.2", 0),
        "Mixed TV": ("4.1", 0),
        "Adaptive": ("24.7", 0),
        "Unified B*": ("4.1", 0),
    }
    for label, (want, column) in printed.items():
        value = float(numbers(text, label)[column].replace(",", ""))
        assert f"{value:.{1 if '.' in want else 0}f}" == want, label
    assert numbers(text, "Classical KL")[0] == "1,677.312"
    assert "≤ 24.711" in text
    assert "horizon T = 4,096 tokens" in text
    assert "B* = 2.039 with sharp constants (Pointwise), 4.096 with the paper's (Mixed TV)" in text
    assert "Vacuous: not below the reward range of 1." in text
    assert max(map(len, text.splitlines())) <= 100


def test_rows_are_the_bounds():
    rows = {r["bound"]: r for r in bound_rows(**TABLE_1, mean_tv=1e-3, reward_range=2.0)}
    assert list(rows) == list(LABELS)
    compared = 0
    for constants in ("paper", "sharp"):
        for b in all_bounds(**TABLE_1, mean_tv=1e-3, reward_range=2.0, constants=constants):
            assert rows[b.name][constants] == b.value
            compared += 1
    assert compared == 10 + 11
    assert rows["pointwise"]["paper"] is None
    assert [n for n, r in rows.items() if "paper" in r["attains"]] == ["mixed_tv"]
    assert [n for n, r in rows.items() if "sharp" in r["attains"]] == ["pointwise"]
    assert rows["unified"]["paper"] == rows["mixed_tv"]["paper"]
    assert rows["unified"]["sharp"] == rows["pointwise"]["sharp"]


def test_the_worst_case_adaptive_row_never_attains_the_minimum():
    # One divergence only: adaptive at eps everywhere equals Pinsker-Marginal and is not counted.
    rows = {r["bound"]: r for r in bound_rows(horizon=64, delta=1e-6, kl_seq=64e-6)}
    assert rows["adaptive"]["worst_case"]
    assert rows["adaptive"]["attains"] == []
    assert rows["adaptive"]["paper"] == pytest.approx(rows["pinsker_marginal_kl"]["paper"])
    assert rows["unified"]["paper"] == rows["pinsker_marginal_kl"]["paper"]
    assert "adaptive_kl" not in rows
    assert len(rows) == 10


def test_mean_tv_gives_the_adaptive_rows():
    mean_tv = np.linspace(0, 1e-4, 64)
    rows = {r["bound"]: r for r in bound_rows(horizon=64, delta=1e-6, mean_tv=mean_tv)}
    assert rows["adaptive"]["attains"] == ["paper", "sharp"]
    assert not rows["adaptive"]["worst_case"]
    assert not rows["unified"]["vacuous"]
    text = shown(horizon=64, delta=1e-6, mean_tv=mean_tv)
    assert "A surrogate gain above B* certifies an improvement." in text
    assert "≤ adaptive" not in text


def test_vacuous_does_not_depend_on_the_unit_of_reward():
    for reward_range in (1e-3, 1.0, 1e6):
        large = bound_rows(**TABLE_1, reward_range=reward_range)
        small = bound_rows(horizon=8, delta=1e-6, reward_range=reward_range)
        assert {r["vacuous"] for r in large} == {True}
        assert {r["vacuous"] for r in small} == {False}


@pytest.mark.parametrize(
    "given",
    [
        {"horizon": 16, "delta": float("inf"), "eps": 5e-4},
        {"horizon": 1, "delta": 1e-6},
        {"horizon": 10**7, "delta": 1e-9, "eps": 1e-6, "kl_seq": 1e-3},
        {"horizon": 8192, "delta": 8.0},
        {"horizon": 8, "delta": 0.0},
        {"horizon": 8, "delta": 1e-12},
    ],
)
def test_any_size_fits_and_is_json(given: dict):
    text = shown(**given)
    assert max(map(len, text.splitlines())) <= 100
    assert "…" not in text
    assert "nan" not in text
    rows = bound_rows(**given)
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows
    assert rows[-1]["bound"] == "unified"


def test_tightened_premises_are_said():
    text = shown(horizon=8, delta=0.02, eps=0.5)
    assert "eps = 0.5 exceeds sqrt(delta/2) = 0.1, which holds too and was used" in text
    assert "max TV ε = 0.1 (derived)" in text


def test_an_exact_surrogate_is_called_exact():
    assert "The surrogate is exact" in shown(horizon=1, delta=0.3)
    assert "horizon T = 1 token " in shown(horizon=1, delta=0.3)
