"""The page of an audit: chosen numbers, honest charts, small, and without trust in what was logged."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from offdrift.errors import RecordError
from offdrift.methods import METHODS
from offdrift.report.audit_charts import along, over_time
from offdrift.report.audit_methods import FAMILIAR, length_curves, tried, untried
from offdrift.report.audit_page import render_audit, write_audit_page
from offdrift.report.headline import headlines
from offdrift.report.heatmap import heats
from offdrift.report.histogram import bars_of, histogram_chart, place
from offdrift.report.limits import limits_of
from offdrift.report.plots import MAX_POINTS, Columns
from offdrift.stats.summary import METRICS
from tests.report.hostile import PAYLOADS, SHOWN
from tests.report.synthetic_audit import audit, hostile, little
from tests.report.test_colors import contrast
from tests.report.test_page import Parsed, _hash, parse

VIEWS = Path(__file__).parents[2] / "src/offdrift/report/views.css"
ALL = "".join(PAYLOADS)


@pytest.fixture(scope="module")
def content() -> dict[str, Any]:
    return audit(steps=4)


@pytest.fixture(scope="module")
def good(content: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Parsed:
    return parse(write_audit_page(content, tmp_path_factory.mktemp("good")))


@pytest.fixture(scope="module")
def bad(content: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Parsed:
    return parse(write_audit_page(hostile(content, ALL), tmp_path_factory.mktemp("bad")))


# -- texts from elsewhere ------------------------------------------------------------------------


def test_hostile_texts_add_no_element_and_no_attribute(good: Parsed, bad: Parsed) -> None:
    assert {tag for tag, _ in bad.tags} <= {tag for tag, _ in good.tags}
    names = {name for _, attributes in bad.tags for name in attributes}
    assert names <= {name for _, attributes in good.tags for name in attributes}
    assert not any(name.startswith("on") for name in names)
    assert [tag for tag, _ in bad.tags].count("script") == 3
    assert [tag for tag, _ in bad.tags].count("img") == 0


PLACES = (
    "mask tokens outside [0.5, 5].", "at the same weights.", "with the learning rate.",
    "truncated at 2.", "0.001 nat.", "arXiv:2510.26788", "snippet ", "column ", "/data/", "inside a string",
    "112.jsonl", "Think step by step.", "no routing was logged", "in both engines", "no length is favored", "so the answer is",
    "decoupled_geo_rs", "the log lacks", "the gain 0.004", "every token are there", "(0.1 to 0.5)",
)  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_hostile_texts_are_shown_as_text(bad: Parsed, place: str) -> None:
    """Of a prompt, a completion, a file name, a reason, a column, a finding: all as they are."""
    assert f"{place}{''.join(SHOWN)}" in "".join(bad.text)


def test_hostile_names_of_metrics_and_tokens_are_shown_as_text(bad: Parsed) -> None:
    shown = "".join(SHOWN)
    assert sum(shown in text for text in bad.text) > 100
    assert bad.text.count(shown) >= 3, "as option, as metric, as tab"


def test_data_for_the_script_is_json_without_markup(bad: Parsed) -> None:
    block = bad.raw["script"][0]
    assert not re.search("[<>&\u2028\u2029]", block)
    data = json.loads(block)
    assert len(data["charts"]) == 19
    drawn = [s["name"] for c in data["charts"] for s in c["series"]]
    texts = [t for c in data["columns"].values() for t in c if isinstance(t, str)]
    assert len(drawn) > 40
    assert len(texts) > 100
    assert not any(re.search("<[a-z/]", text) for text in [*drawn, *texts]), "plotly reads markup"


def test_the_policy_lets_the_two_scripts_and_the_style_sheet_apply_and_nothing_else(
    good: Parsed, bad: Parsed
) -> None:
    policies = [
        a["content"] for p in (good, bad) for tag, a in p.tags
        if tag == "meta" and a.get("http-equiv") == "Content-Security-Policy"
    ]  # fmt: skip
    assert len(policies) == 2
    assert policies[0] == policies[1], "the policy depends on no logged text"
    directives = dict(part.strip().split(" ", 1) for part in policies[0].split(";"))
    assert directives["script-src"].split() == [_hash(s) for s in good.raw["script"][1:]]
    assert directives["style-src-elem"].split() == [_hash(good.raw["style"][0]), _hash("")]
    assert {directives[k] for k in ("default-src", "base-uri", "form-action")} == {"'none'"}
    assert "unsafe" not in directives["script-src"] + directives["style-src-elem"]


def test_the_page_refers_to_nothing_outside_itself(good: Parsed) -> None:
    links = [a[k] for _, a in good.tags for k in ("src", "href", "action", "srcset") if k in a]
    assert links == ["data:,", "#verdict"]
    assert not re.search(r"url\(|@import", good.raw["style"][0])


@pytest.mark.parametrize("which", ["good", "bad"])
def test_every_id_is_unique_and_every_reference_resolves(
    which: str, request: pytest.FixtureRequest
) -> None:
    parsed: Parsed = request.getfixturevalue(which)
    ids = [a["id"] for _, a in parsed.tags if "id" in a]
    keys = ("aria-labelledby", "aria-controls", "for")
    references = [a[k] for _, a in parsed.tags for k in keys if k in a]
    assert len(ids) == len(set(ids))
    assert len(references) > 30
    assert set(references) <= set(ids)


# -- size and shape ------------------------------------------------------------------------------


def test_a_run_of_a_hundred_million_tokens_is_a_page_under_ten_megabytes() -> None:
    """More steps, metrics, files and text than the audit stores."""
    large = audit(steps=2)
    step = {name: 0.123456789 + i for i, name in enumerate(METRICS)} | large["steps"][0]
    long = "word " * 10_000
    sequence = {
        "tokens": [" token"] * 5000, "log_ratio": [0.123456789] * 5000, "logp_rollout": [-0.123456789] * 5000,
        "kl": [1e-3] * 5000, "prompt": long, "completion": long, "length": 32_000, "first": 0,
    }  # fmt: skip
    large |= {
        "steps": [step | {"step": i} for i in range(2100)],
        "worst": {"sequences": [sequence] * 100, "tokens": [{"context": long, "token": 1}] * 1000},
        "bad_rows": [{"file": "f", "row": i, "reason": long} for i in range(100)],
        "findings": large["findings"] * 3,
    }  # fmt: skip
    large["source"]["paths"] = [f"/data/{i}" for i in range(100_000)]
    assert len(METRICS) > 100
    html = render_audit(large)
    assert len(html.encode()) < 10e6
    block = re.search(r'id="report-data">(.*?)</script>', html, re.S)
    assert block is not None
    data = json.loads(block.group(1))
    assert max(map(len, data["columns"].values())) == MAX_POINTS
    assert len(data["explore"]) >= len(METRICS)
    assert len(data["heat"]) == 20
    assert {len(heat["values"]) for heat in data["heat"]} == {600}


@pytest.mark.parametrize("value", [None, [], {}, "x", 3, [None], [{}], {"a": None}, float("nan"), [["x"]]], ids=str)  # fmt: skip
def test_all_keys_may_be_null_or_of_another_kind(content: dict[str, Any], value: object) -> None:
    assert "</html>" in render_audit(dict.fromkeys(content, value))


def test_any_key_may_be_missing(content: dict[str, Any]) -> None:
    assert len(content) == 20
    small = content | {"methods": content["methods"][:3]}
    for key in small:
        rest = {k: v for k, v in small.items() if k != key}
        assert "</html>" in render_audit(rest), key


@pytest.mark.parametrize("value", [None, "x", [], {}])
def test_any_key_of_a_row_may_be_null_or_of_another_kind(content: dict[str, Any], value: object) -> None:  # fmt: skip
    def damaged(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{**rows[0], key: value} for key in rows[0]]

    names = ("questions", "steps", "methods", "findings", "bad_rows")
    groups = ("worst", "facets")
    broken: dict[str, Any] = {name: damaged(content[name]) for name in names}
    for group in groups:
        broken[group] = {name: damaged(rows) for name, rows in content[group].items()}
    count = sum(len(broken[n]) for n in names) + sum(len(r) for g in groups for r in broken[g].values())  # fmt: skip
    assert count > 200
    html = render_audit({**content, **broken})
    assert "</html>" in html
    assert html.count('<article class="finding') == 1


def test_a_log_without_log_probs_is_still_a_page() -> None:
    html = render_audit(little())
    assert "Mean reward" in html
    assert "cannot tell whether there is drift" in html
    assert "KL per token" not in html
    assert 'id="chart-ratios"' not in html
    assert "the log holds no rollout log-probs" in html
    assert "No verdict was recorded" in render_audit({})


def test_the_same_audit_is_the_same_page_and_no_other_file_is_left(tmp_path: Path) -> None:
    page = write_audit_page(little(), tmp_path)
    assert page == tmp_path / "report.html"
    assert page.read_text("utf-8") == render_audit(little())
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]
    with pytest.raises(RecordError, match="cannot write"):
        write_audit_page(little(), page)


def test_the_page_says_everything_of_the_first_screen(good: Parsed) -> None:
    text = " ".join("".join(good.text).split())
    order = ["qwen3-30b-a3b-math/rollouts", "The engines disagree from step 107", "KL per token",
             "Effective sample size", "Correlation of probabilities", "Fix", "rollout_is_threshold: 2.0",
             "What this log cannot answer", "Over the run", "Ratios of the sampled tokens", "KL by position",
             "Acceptance by response length", "What each method would have done", "The worst sequences",
             "Certificate", "All numbers", "Where the numbers come from", "3 rows could not be read"]  # fmt: skip
    at = 0
    for part in order:
        found = text.find(part, at)
        assert found >= 0, part
        at = found
    first = next(a for tag, a in good.tags if a.get("role") == "tab")
    assert first["aria-selected"] == "true"
    assert good.text[good.text.index("verl")] == "verl"


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
    assert mine.said


def test_a_correlation_is_never_rounded_up_to_one() -> None:
    (_, h) = headlines({"overall": {"full/k3": 0.0, "full/pearson": 0.9999999}})
    assert h.text == "0.99999"


def test_the_line_in_miniature_goes_from_corner_to_corner() -> None:
    steps = [{"step": i, "full/k3": v} for i, v in enumerate((0.0, None, 1.0, 2.0))]
    (h,) = headlines({"overall": {"full/k3": 1.0}, "steps": steps})
    assert h.path == "M0.0 22.0M66.7 12.0L100.0 2.0"


# -- charts ---------------------------------------------------------------------------------------


def test_exact_divergences_are_preferred_and_said() -> None:
    steps = [{"step": i, "full/k3": 0.2, "divergence/kl_rollout_current_mean": 0.1} for i in (1, 2)]
    columns = Columns()
    (kl,) = [c for c in over_time({"steps": steps, "overall": {}}, columns) if c.id == "kl"]
    (series,) = kl.series
    assert columns.held[series.y] == [0.1, 0.1]
    assert "exact for full" in kl.meaning


def test_every_bucket_is_drawn_under_its_name(content: dict[str, Any]) -> None:
    columns = Columns()
    charts = {c.id: c for c in along(content, columns)}
    assert set(charts) == {"by-position", "trap", "by-length", "by-lag", "by-advantage", "by-token_class"}  # fmt: skip
    for name, chart in charts.items():
        if name != "trap":
            facet = content["facets"][name.removeprefix("by-")]
            assert columns.held[chart.categories] == [b["label"].replace("<", "&lt;").replace(">", "&gt;") for b in facet]  # fmt: skip
            drawn = {s.name: columns.held[s.y] for s in chart.series}
            assert set(drawn) == {"mismatch", "full", "staleness"}
            assert drawn["full"] == pytest.approx([b["full/k3"] for b in facet], rel=1e-4)


def test_a_bucket_without_a_label_is_called_by_its_ends() -> None:
    rows = [{"low": 1, "high": 63, "full/k3": 0.1}, {"low": 64, "high": None, "full/k3": 0.1}]
    columns = Columns()
    along({"facets": {"length": rows}}, columns)
    assert columns.held["length:label"] == ["1–63", "64+"]


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
    assert histogram_chart({"full": histogram}, Columns()).series == ()


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


def test_methods_with_one_gate_share_one_curve() -> None:
    rows = [{"name": n, "acceptance_by_length": c} for n, c in
            (("a", [0.9, 0.8]), ("decoupled_geo_rs", [0.9, 0.8]), ("flat", [1.0, 1.0]), ("steep", [1.0, 0.1]), ("none", None))]  # fmt: skip
    assert length_curves(tried({"methods": rows})) == [
        ("steep", (1.0, 0.1)),
        ("decoupled_geo_rs (+1 alike)", (0.9, 0.8)),
    ]


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
              for block in re.findall(r":root \{(.*?)\n *\}", VIEWS.read_text("utf-8"), flags=re.S)]  # fmt: skip
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
