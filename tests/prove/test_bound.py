"""The bounds as a table and as a figure: which horizon, which minimum, attained where, and the questions backwards."""

import json
import math

import numpy as np
import pytest

from offdrift.certificate import Bound, all_bounds, tightest
from offdrift.certificate.bounds import LABELS
from offdrift.errors import BadValueError
from offdrift.prove.bound import answer_rows, answer_table, bound_chart, bound_rows, bound_table, write_bound_chart
from offdrift.show.charts import Chart
from offdrift.show.numbers import short
from tests.show.screens import printed

TABLE_1 = {"horizon": 4096, "delta": 1e-4, "eps": 5e-3, "kl_seq": 0.01, "tv_seq": 0.05}


def shown(width: int = 100, **given: object) -> str:
    return printed(bound_table(**given), width)  # type: ignore[arg-type]


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
    assert "B* = 0.01 with sharp constants (Sequence KL), 4.096 with the paper's (Mixed TV)" in text
    assert "gain above B* certifies" in text
    assert numbers(text, "Pointwise") == ["2.039"]
    paper = shown(**TABLE_1, constants=["paper"])
    assert "Not below the reward's range, 1" in paper
    assert max(map(len, text.splitlines())) <= 100


def test_rows_are_the_bounds():
    rows = {r["bound"]: r for r in bound_rows(**TABLE_1, mean_tv=1e-3, reward_range=2.0)}
    assert list(rows) == [name for name in LABELS if name not in ("two_sided", "variance", "sequence_hellinger")]
    compared = 0
    for constants in ("paper", "sharp"):
        for b in all_bounds(**TABLE_1, mean_tv=1e-3, reward_range=2.0, constants=constants):
            assert rows[b.name][constants] == b.value
            compared += 1
    assert compared == 10 + 12
    assert rows["pointwise"]["paper"] is None
    assert [n for n, r in rows.items() if "paper" in r["attains"]] == ["mixed_tv"]
    assert rows["sequence_kl"]["paper"] is None
    assert rows["sequence_kl"]["sharp"] == 2 * 0.01
    assert [n for n, r in rows.items() if "sharp" in r["attains"]] == ["sequence_kl"]
    assert rows["unified"]["paper"] == rows["mixed_tv"]["paper"]
    assert rows["unified"]["sharp"] == rows["sequence_kl"]["sharp"]


FURTHER = {"chi2": 2.5e-4, "reward_sd": 0.22, "hellinger_seq": 2.5e-3, "kl_rewarded": 5e-4, "kl_unrewarded": 9.5e-3}


def test_rows_beyond_the_paper_are_shown_with_their_premises():
    rows = {r["bound"]: r for r in bound_rows(**TABLE_1, mean_tv=1e-3, **FURTHER)}
    assert list(rows) == list(LABELS)
    # (1 + chi)^T at T chi = 1.024: e^(4096 log 1.00025) - 2.024
    want = 0.22 * (math.exp(4096 * math.log1p(2.5e-4)) - 2.024) ** 0.5
    assert rows["variance"]["sharp"] == pytest.approx(want, rel=1e-9)
    assert rows["sequence_hellinger"]["sharp"] == pytest.approx(0.0925)
    assert (rows["two_sided"]["sharp"], rows["two_sided"]["below"]) == (9.5e-3, 5e-4)
    assert [n for n, r in rows.items() if "sharp" in r["attains"]] == ["two_sided"]
    for width in (80, 120):
        text = shown(width=width, **TABLE_1, **FURTHER, narrow=width < 96)
        assert max(map(len, text.splitlines())) <= width
        words = " ".join(text.split())
        assert "max χ² = 0.00025 sd(R) = 0.22 ΣH² = 0.0025 E[RΣk3] = 0.0005 nats E[(1−R)Σk3] = 0.0095 nats" in words
        assert "B* = 0.0095 with sharp constants (Two-sided), 4.096 with the paper's (Mixed TV)" in words
        assert "From below alone: J(π) − J(μ) ≥ L′ − 0.0005 (Two-sided)." in words
        assert "KL_seq, TV_seq, ΣH², E[RΣk3] and E[(1−R)Σk3] at every T." in words
    assert "From below" not in shown(**TABLE_1, **FURTHER, constants=["paper"])
    assert "sd(R) = 0.5 (derived)" in shown(horizon=8, delta=0.1, chi2=0.1)
    assert "sd(R)" not in shown(horizon=8, delta=0.1, hellinger_seq=0.1)


def test_the_worst_case_adaptive_row_never_attains_the_minimum():
    # One divergence only: adaptive at eps everywhere equals Pinsker-Marginal and is not counted.
    rows = {r["bound"]: r for r in bound_rows(horizon=64, delta=1e-6, kl_seq=64e-6)}
    assert rows["adaptive"]["worst_case"]
    assert rows["adaptive"]["attains"] == []
    assert rows["adaptive"]["paper"] == pytest.approx(rows["pinsker_marginal_kl"]["paper"])
    assert rows["unified"]["paper"] == rows["pinsker_marginal_kl"]["paper"]
    assert "adaptive_kl" not in rows
    assert len(rows) == 11


def test_mean_tv_gives_the_adaptive_rows():
    mean_tv = np.linspace(0, 1e-4, 64)
    rows = {r["bound"]: r for r in bound_rows(horizon=64, delta=1e-6, mean_tv=mean_tv)}
    assert rows["adaptive"]["attains"] == ["paper", "sharp"]
    assert not rows["adaptive"]["worst_case"]
    assert not rows["unified"]["vacuous"]
    text = shown(horizon=64, delta=1e-6, mean_tv=mean_tv)
    assert "gain above B* certifies" in text
    assert "≤ adaptive" not in text


def test_vacuous_does_not_depend_on_the_unit_of_reward():
    for reward_range in (1e-3, 1.0, 1e6):
        large = bound_rows(**TABLE_1 | {"kl_seq": 2.0, "delta": 1e-2}, reward_range=reward_range)
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
    assert "eps = 0.5 exceeds sqrt(delta/2) = 0.1" in text
    assert "max TV ε = 0.1 (derived)" in text
    assert "surrogate is exact" in shown(horizon=1, delta=0.3)


def test_it_says_from_which_horizon_on_it_is_vacuous():
    text = " ".join(shown(**TABLE_1).split())
    assert "at no T (sharp), T = 1,000 (paper), KL_seq and TV_seq at" in text
    assert "TV to token 3, KL to token 51, TV_seq to token 4,096." in text
    known = {"delta": 1e-4, "eps": 5e-3}
    last = bound_rows(**known, horizon=4096)[-1]
    for constants, horizon in last["vacuous_from"].items():
        after, before = (
            tightest(all_bounds(**known, horizon=horizon - less, constants=constants)).value for less in (0, 1)
        )
        assert before < 1 <= after
    assert last["vacuous_from"]["sharp"] == 10_000
    assert len(last["vacuous_from"]) == 2
    grown = shown(horizon=512, delta=1e-4, kl_rate=1e-6)
    assert "KL_seq = T kl_rate at" in " ".join(grown.split())
    assert "KL_seq = 0.000512 nats" in grown
    assert "no T" not in grown
    assert "up to 10^12 tokens" in shown(horizon=8, delta=0.0)
    # Nothing is known about positions beyond the array.
    positions = {"horizon": 8, "delta": 1e-6, "mean_tv": np.zeros(8)}
    assert "that range at" not in shown(**positions)
    assert bound_rows(**positions)[-1]["vacuous_from"] == {"paper": None, "sharp": None}


def test_what_a_small_kl_of_sequences_takes_is_said_beside_it():
    """0.01 over 4,096 tokens is 2.4e-6 nat per token; delta alone gives T delta, and 34.9 by the paper."""
    text = " ".join(shown(**TABLE_1).split())
    assert "KL_seq = 0.01 is 2.44e-06 nats per token." in text
    assert "KL δ alone, B* = 0.4096 (sharp), 34.95 (paper)." in text
    last = bound_rows(**TABLE_1)[-1]
    assert last["kl_per_token"] == 0.01 / 4096
    # (4/3) T^1.5 delta is the paper's closed form, an upper end of the sum.
    assert last["from_delta"]["sharp"] == pytest.approx(4096 * 1e-4, rel=1e-12)
    assert 0.998 < last["from_delta"]["paper"] / (4 / 3 * 4096**1.5 * 1e-4) < 1
    alone = bound_rows(horizon=4096, delta=1e-4)[-1]
    assert (alone["kl_per_token"], alone["from_delta"]) == (None, None)
    assert "alone" not in shown(horizon=4096, delta=1e-4)
    assert bound_rows(horizon=8, delta=math.inf, eps=0.1)[-1]["from_delta"] is None


def test_a_narrow_terminal_loses_columns_not_letters():
    text = shown(width=80, **TABLE_1, narrow=True)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert numbers(text, "Pinsker-Marginal TV") == ["24.711", "12.355"]
    assert "eq." not in text


# -- the questions backwards ------------------------------------------------------------------


def test_answers_keep_the_target():
    given = {"delta": 1e-2, "eps": 5e-2, "tv_seq": 0.5}
    compared = 0

    def best(tokens: int, constants: str, known: dict) -> Bound:
        return tightest(all_bounds(horizon=tokens, constants=constants, **known))

    for solve in ("delta", "eps", "kl_seq"):
        asked = {n: None if n == solve else v for n, v in given.items()}
        for row in answer_rows(solve, target=0.3, horizon=1000, **asked):
            at = best(1000, row["constants"], asked | {solve: row["value"]})
            assert at.name == row["attained_by"]
            assert 0.3 * (1 - 1e-9) <= at.value <= 0.3
            assert not row["any"]
            compared += 1
    for row in answer_rows("T", target=0.5, **given):
        after, before = (best(row["value"] + n, row["constants"], given).value for n in (1, 0))
        assert before < 0.5 <= after
        compared += 1
    assert compared == 8


def test_any_value_is_said_and_is_json():
    rows = answer_rows("delta", target=0.5, horizon=10, eps=1e-3, mean_tv=1e-4)
    assert [(r["value"], r["any"]) for r in rows] == [(None, True)] * 2
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows
    assert answer_rows("eps", target=5.0, horizon=1, delta=0.5)[0]["any"]
    assert answer_rows("T", target=5, delta=0.0, constants=["paper"])[0]["any"]
    with pytest.raises(BadValueError, match="kl_seq is solved for and kl_rate gives it"):
        answer_rows("kl_seq", target=0.5, horizon=10, delta=0.1, kl_rate=0.1)


def test_an_answer_is_a_table():
    rows = answer_rows("delta", target=0.1, horizon=8192)
    text = printed(answer_table(rows, target=0.1, horizon=8192), 80)
    assert "Largest token KL δ with B* ≤ 0.1 at T = 8,192" in text
    assert f"{rows[1]['value']:.6g}" in text
    assert "Pinsker-Marginal KL" in text


# -- the figure ----------------------------------------------------------------------------------


GIVEN = {name: x for name, x in TABLE_1.items() if name != "horizon"}


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
    assert "can the surrogate" in page.read_text("utf-8")


def test_the_caption_says_what_was_taken_to_hold(tmp_path):
    page = write_bound_chart(tmp_path / "a.html", horizon=4096, **GIVEN)
    text = page.read_text("utf-8")
    assert "at T = 1,000 (the paper&#39;s constants) and at no T (sharp" in text
    assert "as a limit" in text
    page = write_bound_chart(tmp_path / "b.html", horizon=64, delta=0.0)
    assert "at no T (the paper&#39;s constants) and at no T (sharp" in page.read_text("utf-8")
