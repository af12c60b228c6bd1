"""What the page of an audit shows: three numbers, charts, limits, methods and tokens, each by hand."""

import math
import re
from pathlib import Path
from typing import Any

import pytest

from offdrift.audit.charts import along, bars_of, choices, explorable, histogram_chart, limits_of, over_time, place
from offdrift.audit.method_table import FAMILIAR, length_curves, tried, untried
from offdrift.audit.page import NO_TOKEN, heats, render_audit
from offdrift.audit.view import audit_view
from offdrift.methods import METHODS
from offdrift.show.headline import all_numbers, headlines
from tests.show.screens import printed
from tests.show.synthetic_audit import audit
from tests.show.test_colors import contrast

PLACES = "The log has no tokens: a number is a token's place in the response, from 0 on."
VIEWS = Path(__file__).parents[2] / "src/offdrift/show/assets/views.css"


@pytest.fixture(scope="module")
def content() -> dict[str, Any]:
    return audit(steps=4)


# -- the three numbers ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overall", "metrics"),
    [
        ({"mismatch/k3": 0.1, "divergence/kl_rollout_old_mean": 0.2, "full/k3": 1.0}, ["divergence/kl_rollout_old_mean"]),
        ({"mismatch/k3": 0.1, "mismatch/ess_frac": 0.5, "mismatch/pearson": 1.0, "mismatch/chi2_token": 1.0}, ["mismatch/k3", "mismatch/ess_frac", "mismatch/pearson"]),
        ({"full/k3": 0.1, "full/chi2_token": 0.5, "full/abs_log_ratio_max": 3.0}, ["full/k3", "full/chi2_token", "full/abs_log_ratio_max"]),
        ({"staleness/k3": 0.1, "reward/mean": 1.0}, ["staleness/k3", "reward/mean"]),
        ({"reward/mean": 1.0, "response/length_mean": 9.0, "response/length_max": 10.0, "version_lag/mean": 1.0}, ["reward/mean", "response/length_mean", "response/length_max"]),
        ({"mismatch/k3": None, "full/k3": float("nan")}, []),
    ],
)  # fmt: skip
def test_the_three_numbers_follow_from_what_was_logged(overall: dict, metrics: list[str]) -> None:
    assert [h.metric for h in headlines({"overall": overall})] == metrics


@pytest.mark.parametrize(
    ("metric", "value", "level"),
    [
        ("mismatch/k3", 0.02, "ok"), ("mismatch/k3", 0.021, "watch"), ("mismatch/k3", 0.05, "watch"), ("mismatch/k3", 0.051, "act"),
        ("mismatch/ess_frac", 0.5, "ok"), ("mismatch/ess_frac", 0.499, "act"),
        ("mismatch/pearson", 0.99, "ok"), ("mismatch/pearson", 0.989, "watch"), ("mismatch/pearson", 0.949, "act"),
    ],
)  # fmt: skip
def test_numbers_are_judged_by_the_thresholds_of_the_tree(metric: str, value: float, level: str) -> None:  # fmt: skip
    """methods.md, diag.step1: KL 0.02 and 0.05, ESS 0.5, Pearson 0.99 and 0.95."""
    found = headlines({"overall": {"mismatch/k3": 0.0, metric: value}})
    (mine,) = [h for h in found if h.metric == metric]
    assert mine.level == level
    assert mine.comparison


@pytest.mark.parametrize(("k3", "level"), [(2e-4, "ok"), (180.0, "act"), (None, "ok")])
def test_a_kl_that_cancels_has_no_tick_where_the_other_estimate_is_large(k3: float | None, level: str) -> None:
    overall = {"mismatch/k1": -6.8e-4, "mismatch/ratio_mean_z": 50.0} | ({} if k3 is None else {"mismatch/k3": k3})
    (h, *_) = headlines({"overall": overall})
    assert (h.metric, h.level) == ("mismatch/k1", level)
    assert ("which KL cannot be" in h.comparison) == (level == "act")


def test_a_correlation_is_never_rounded_up_to_one() -> None:
    (_, h) = headlines({"overall": {"full/k3": 0.0, "full/pearson": 0.9999999}})
    assert h.text == "0.99999"


@pytest.mark.parametrize(
    ("stated", "unit"),
    [("character", "character"), ("token", "token"), ("mixed", "character or token"), (None, "token"), ("<b>", "token")],
)  # fmt: skip
def test_lengths_are_said_in_the_unit_they_were_counted_in(stated: str | None, unit: str) -> None:
    content = audit(steps=4) | {"counts": {"length_unit": stated}}
    content["overall"] = {"response/length_mean": 51.7, "response/length_max": 60.0}
    shown = headlines(content)
    assert [(h.text, h.unit) for h in shown] == [("51.7", unit), ("60.0", unit)]
    assert all(f"[{unit}]" in h.meaning for h in shown)
    charts = {c.id: c for c in [*over_time(content), *along(content)]}
    assert charts["length"].unit.startswith(f"{unit}, ")
    assert f"[{unit}]" in charts["length"].meaning
    titles = [charts[c].x_title for c in ("by-length", "trap")]
    assert titles == [f"response length, {unit}"] * 2
    assert charts["by-position"].x_title == "token"
    table = {n["name"]: n["unit"] for n in all_numbers(content["overall"], unit)}
    assert set(table.values()) == {unit}
    assert f"51.7 {unit}" in printed(audit_view(content, 100))
    html = render_audit(content)
    assert f"<b>51.7</b> <small>{unit}</small>" in html


def test_the_line_in_miniature_goes_from_corner_to_corner() -> None:
    steps = [{"step": i, "full/k3": v} for i, v in enumerate((0.0, None, 1.0, 2.0))]
    (h,) = headlines({"overall": {"full/k3": 1.0}, "steps": steps})
    assert h.path == "M0.0 22.0M66.7 12.0L100.0 2.0"


# -- charts ---------------------------------------------------------------------------------------


def test_exact_divergences_are_preferred_and_said() -> None:
    steps = [{"step": i, "full/k3": 0.2, "divergence/kl_rollout_current_mean": 0.1} for i in (1, 2)]
    (kl,) = [c for c in over_time({"steps": steps, "overall": {}}) if c.id == "kl"]
    (series,) = kl.series
    assert series.y == [0.1, 0.1]
    assert "exact for full" in kl.meaning


def test_every_bucket_is_drawn_under_its_name(content: dict[str, Any]) -> None:
    charts = {c.id: c for c in along(content)}
    assert set(charts) == {"by-position", "trap", "by-length", "by-lag", "by-advantage", "by-token_class", "by-worker", "lags"}  # fmt: skip
    for name, chart in charts.items():
        if name not in ("trap", "lags"):
            facet = content["facets"][name.removeprefix("by-")]
            assert chart.categories == [b["label"] for b in facet]
            drawn = {s.name: s.y for s in chart.series}
            assert set(drawn) == {"mismatch", "full", "staleness"}
            assert drawn["full"] == [b["full/k3"] for b in facet]


def test_a_bucket_without_a_label_is_called_by_its_ends() -> None:
    rows = [{"low": 1, "high": 63, "full/k3": 0.1}, {"low": 64, "high": None, "full/k3": 0.1}]
    (chart,) = along({"facets": {"length": rows}})
    assert chart.categories == ["1–63", "64+"]


def test_empty_buckets_at_the_ends_are_left_out_with_their_share_of_each_curve() -> None:
    rows = [{"low": i, "high": i, "tokens": n, "full/k3": 0.1 if n else None} for i, n in enumerate((0, 5, 0, 7, 0))]  # fmt: skip
    methods = [{"name": "m", "acceptance_by_length": [None, 0.9, None, 0.5, None]}]
    charts = {c.id: c for c in along({"facets": {"length": rows}, "methods": methods})}
    assert charts["by-length"].categories == charts["trap"].categories == ["1–1", "2–2", "3–3"]
    assert list(charts["trap"].series[0].y) == [0.9, None, 0.5]
    assert charts["by-length"].series[0].y == [0.1, None, 0.1]


def test_bars_keep_every_token_and_stand_where_they_belong() -> None:
    edges = [-20.0, -1.0, -1e-6, 1e-6, 2e-6, 1.0, 20.0]
    bars = bars_of({"edges": edges, "counts": [0, 5, 7, 11, 13, 0]})
    assert sum(count for *_, count in bars) == 36
    assert (bars[0][0], bars[-1][1]) == (-1.0, 1.0)
    assert all(place(b) - place(a) > 0.06 for a, b, _ in bars[:-1]), "none too narrow to be seen"
    for log_ratio in (1e-4, 0.5, 30.0):
        assert place(-log_ratio) == -place(log_ratio)
        assert 10 ** place(log_ratio) == pytest.approx(1 + log_ratio / 1e-4)


@pytest.mark.parametrize("histogram", [
    {}, {"edges": [0, 1], "counts": [1, 2]}, {"edges": [1, 0], "counts": [1]}, {"edges": [0, None, 2], "counts": [1, 1]},
    {"edges": [0.0, 1.0], "counts": [0]}, {"edges": [0.0, 0.0, 0.0], "counts": [1, 1]}, {"edges": "x", "counts": [1]},
])  # fmt: skip
def test_a_histogram_that_cannot_be_one_is_not_drawn(histogram: dict) -> None:
    assert bars_of(histogram) == []
    assert histogram_chart({"full": histogram}).series == ()


def test_open_ends_of_a_histogram_are_drawn() -> None:
    assert bars_of({"edges": [None, -1.0, 1.0, None], "counts": [1, 2, 3]}) == [(-2.0, -1.0, 1.0), (-1.0, 1.0, 2.0), (1.0, 2.0, 3.0)]  # fmt: skip
    assert bars_of({"edges": [-1.0, 1.0], "counts": [1, 2, 3]})[0] == (-2.0, -1.0, 1.0)


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("decoupled_token_is", {}, [("mismatch", 2.0), ("staleness", 0.8), ("staleness", 1.2)]),
        ("decoupled_token_is", {"weight.cap": 3.0}, [("mismatch", 3.0), ("staleness", 0.8), ("staleness", 1.2)]),
        ("decoupled_geo_rs(0.99_1.01)", {"gate.low": 0.99, "gate.high": 1.01}, [("mismatch", 0.99), ("mismatch", 1.01), ("staleness", 0.8), ("staleness", 1.2)]),
        ("trm_ratio", {}, [("full", math.exp(-0.1)), ("full", math.exp(0.1))]),
        ("trm_max_k2", {}, [("full", math.exp(-math.sqrt(0.1))), ("full", math.exp(math.sqrt(0.1)))]),
        ("trm_max", {}, []),
        ("no_such_method", {}, []),
    ],
)  # fmt: skip
def test_the_limits_of_a_method_stand_in_the_histogram(name: str, settings: dict, expected: list) -> None:  # fmt: skip
    """Token TIS caps at 2; |log w| <= 0.1; k2 = l^2 / 2 <= 0.05, so |l| <= sqrt(0.1)."""
    limits = limits_of(name, settings)
    assert [limit["on"] for limit in limits] == [on for on, _ in expected]
    assert [limit["ratio"] for limit in limits] == pytest.approx([r for _, r in expected])
    assert [limit["x"] for limit in limits] == pytest.approx([place(math.log(r)) for _, r in expected])  # fmt: skip


def test_the_limits_of_every_method_can_be_drawn() -> None:
    found = {name: limits_of(name, {"no.such": 1}) for name in METHODS}
    assert sum(bool(limits) for limits in found.values()) > 40
    assert all(math.isfinite(limit["x"]) for limits in found.values() for limit in limits)


# -- methods and tokens ---------------------------------------------------------------------------


def test_the_suggested_method_comes_first_and_what_cannot_be_tried_stands_apart(content: dict[str, Any]) -> None:  # fmt: skip
    methods = tried(content)
    assert methods[0].name == "decoupled_token_icepop"
    assert [m.suggested for m in methods].count(True) == 1
    assert [m.name for m in methods[1:4]] == [n for n in FAMILIAR if n != methods[0].name][:3]
    reasons = untried(content)
    assert len(methods) + sum(map(len, reasons.values())) == len(METHODS)
    assert "trm_max" in reasons["needs exact divergences, which the log lacks"]


def test_a_method_suggested_with_other_settings_is_the_row_that_has_them() -> None:
    names = ("decoupled_geo_rs", "decoupled_geo_rs(0.99_1.01)", "decoupled_token_is")
    rows = [{"name": n, "kept_tokens": 0.5} for n in names]
    said = {"method": "decoupled_geo_rs", "row": "decoupled_geo_rs(0.99_1.01)"}
    found = {m.name: m.suggested for m in tried({"methods": rows, "suggestion": said})}
    assert found == {names[0]: False, names[1]: True, names[2]: False}
    del said["row"]  # as stored before rows had names
    assert [m.suggested for m in tried({"methods": rows, "suggestion": said})] == [True, False, False]  # fmt: skip


def test_a_part_that_a_method_lacks_has_no_number() -> None:
    """100 % of the tokens kept is no merit of a method that drops none; a weight that masks may drop some."""
    parts = {"kept_tokens": 1.0, "kept_sequences": 1.0, "weight_max": 2.0, "ess_frac": 0.9}
    rows = [
        {"name": "weights", "gates": "", "weights": "weight token ratio(full), truncate above 2", **parts},
        {"name": "masks", "gates": "", "weights": "weight token ratio(full), mask above 5", **parts},
        {"name": "gates", "gates": "gate k2", "weights": "", **parts, "kept_tokens": 0.4},
        {"name": "nothing", "gates": "", "weights": "", **parts},
    ]
    shown = {m.name: {key for key in parts if m.values[key] is not None} for m in tried({"methods": rows})}
    assert shown == {
        "weights": {"weight_max", "ess_frac"},
        "masks": {"kept_tokens", "kept_sequences", "weight_max", "ess_frac"},
        "gates": {"kept_tokens", "kept_sequences", "ess_frac"},
        "nothing": {"ess_frac"},
    }


def test_methods_with_one_gate_share_one_curve() -> None:
    rows = [{"name": n, "acceptance_by_length": c} for n, c in
            (("a", [0.9, 0.8]), ("decoupled_geo_rs", [0.9, 0.8]), ("flat", [1.0, 1.0]), ("steep", [1.0, 0.1]), ("none", None))]  # fmt: skip
    assert length_curves(tried({"methods": rows})) == [
        ("steep", (1.0, 0.1)),
        ("decoupled_geo_rs (+1 alike)", (0.9, 0.8)),
    ]


def test_a_dashed_line_says_what_it_is(content: dict[str, Any]) -> None:
    labels = [label for chart in over_time(content) for _, label in chart.lines]
    assert len(labels) >= 4
    assert all(re.search(r"[a-z]{3}", label) for label in labels), labels


def test_a_page_of_a_log_without_tokens_says_what_its_numbers_are() -> None:
    worst = {"sequences": [{"log_ratio": [0.0, -0.3], "tokens": None}], "tokens": [{"token": None, "position": 3}]}
    page = render_audit({"worst": worst})
    assert PLACES in page
    assert NO_TOKEN in page
    assert heats({"worst": worst})[0].as_data["places"] is True
    worst = {"sequences": [{"log_ratio": [0.0, -0.3], "tokens": [1, 2]}], "tokens": [{"token": 3, "position": 3}]}
    assert PLACES not in render_audit({"worst": worst})
    assert heats({"worst": worst})[0].as_data["places"] is False
    assert NO_TOKEN not in render_audit({"worst": worst})


def test_tokens_are_texts_where_there_are_texts_and_ids_otherwise(content: dict[str, Any]) -> None:
    texts, ids = heats(content)[:2]
    assert (texts.ids, ids.ids) == (False, True)
    assert texts.cells[0][0] == " We"
    assert ids.cells[0][0].isdigit()
    bare = heats({"worst": {"sequences": [{"log_ratio": [0.0, -0.3, 5.0], "first": 7}]}})[0]
    assert bare.cells == (("7", "k0"), ("8", "n3"), ("9", "p5")), "without tokens, their places"
    kl_only = heats({"worst": {"sequences": [{"kl": [2e-5], "tokens": ["x"]}]}})[0]
    assert kl_only.cells == (("x", "k1"),)


def test_the_colors_of_the_log_ratio_can_be_read_and_grow_away_from_the_middle() -> None:
    blocks = [dict(re.findall(r"--([np]\d(?:-ink)?|stop|act|watch|stop-back|act-back|watch-back): (#[0-9a-f]{6})", block))
              for block in re.findall(r":root(?::not\(\.paper\))? \{(.*?)\n *\}", VIEWS.read_text("utf-8"), flags=re.S)]  # fmt: skip
    assert len(blocks) == 2
    count = 0
    for theme, card in zip(blocks, ("#ffffff", "#181b20")):
        pairs = [(f"{c}{i}-ink", f"{c}{i}") for c in "np" for i in range(1, 6)]
        pairs += [(x, f"{x}-back") for x in ("stop", "act", "watch")]
        for ink, back in pairs:
            assert contrast(theme[ink], theme[back]) >= 4.5, (ink, theme[back])
            count += 1
        for side in "np":
            away = [contrast(card, theme[f"{side}{i}"]) for i in range(1, 6)]
            assert away == sorted(away)
            assert away[0] > 1.05
    assert count == 26


def test_rewards_of_0_and_1_have_no_band_and_others_have() -> None:
    def chart(low: float, high: float) -> list[str]:
        steps = [{"step": i, "reward/mean": 0.5, "quantiles": {"reward": {"p05": low, "p95": high}}} for i in range(3)]
        (reward,) = (c for c in over_time({"steps": steps}) if c.id == "reward")
        return [s.name for s in reward.series]

    assert chart(0.0, 1.0) == ["mean"]
    assert chart(0.25, 1.0) == ["5 % to 95 %", "mean"]


def test_any_metric_offers_only_those_with_values() -> None:
    steps = [{"step": i, "mismatch/k1": None, "mismatch/k2": float("nan"), "reward/mean": 0.5} for i in range(3)]
    assert [*explorable({"steps": steps})] == ["reward/mean"]


@pytest.mark.parametrize(("value", "words"), [(-0.01, "equal to 0 within its error"), (-0.2, "which KL cannot be")])
def test_an_estimate_of_kl_below_0_is_not_judged_as_above_a_threshold(value: float, words: str) -> None:
    (kl,) = headlines({"overall": {"mismatch/k1": value}})
    assert words in kl.comparison
    assert "above 0.05" not in kl.comparison


def test_every_method_of_the_table_with_limits_can_be_chosen():
    drawn = [name for name in METHODS if limits_of(name)]
    assert list(choices({"methods": [{"name": name} for name in METHODS]})) == drawn
    assert len(drawn) > 60
