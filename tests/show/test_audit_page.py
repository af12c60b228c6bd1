"""The page of an audit: chosen numbers, honest charts, small, and without trust in what was logged."""

import html
import json
import re
from typing import Any

import pytest

from offdrift.audit.coverage import LOG, questions
from offdrift.audit.method_table import READ, TITLE
from offdrift.audit.page import alpha_rows, render_audit, write_audit_page
from offdrift.audit.view import audit_view, invest_words, regime_words, unanswered
from offdrift.show.charts import MAX_POINTS
from offdrift.stats.metrics import METRICS
from tests.show.parsed import Parsed, parse
from tests.show.screens import printed
from tests.show.synthetic_audit import audit, little


@pytest.fixture(scope="module")
def content() -> dict[str, Any]:
    return audit(steps=4)


@pytest.fixture(scope="module")
def good(content: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Parsed:
    return parse(write_audit_page(content, tmp_path_factory.mktemp("good")))


def test_mismatch_and_staleness_stand_beside_each_other_with_their_evidence(content: dict[str, Any]) -> None:
    assert alpha_rows(content) == [
        ("mismatch α1 = TV(μ, π_old)", ["0.0123", "0.0450", "0.310", "exact"]),
        ("staleness α0 = TV(π_old, π)", ["0.00450", "–", "at least 0.120", "sampled"]),
    ]
    page = html.unescape(render_audit(content))
    assert "Mismatch or staleness" in page
    assert "Where to invest: mismatch" in page
    assert "at least 0.120" in page
    assert "Where to invest: mismatch" in " ".join(printed(audit_view(content, width=80), width=80).split())
    assert "Mismatch or staleness" not in render_audit({**content, "alphas": None})


def test_where_nothing_is_wrong_nothing_is_to_be_invested_in(content: dict[str, Any]) -> None:
    """A larger part of a bound is no reason to repair what does not drift."""
    healthy = {**content, "verdict": {"level": "ok", "text": "No drift that matters."}, "findings": []}
    assert (invest_words(content) != "", invest_words(healthy)) == (True, "")
    assert "Where to invest" not in render_audit(healthy)
    assert "Where to invest" not in printed(audit_view(healthy), width=100)


@pytest.mark.parametrize(("name", "level", "said"), [("TV low, chi2 low", "act", False), ("TV low, chi2 low", "watch", True), ("TV high, chi2 low", "act", True)])  # fmt: skip
def test_a_calm_regime_is_not_told_beside_an_urgent_verdict(name: str, level: str, said: bool) -> None:
    about = {"regime": {"name": name, "meaning": "what fits it"}, "verdict": {"level": level}}
    assert regime_words(about) == (f"Regime: {name} (what fits it)" if said else "")


def test_screen_and_page_head_the_table_of_corrections_alike(content: dict[str, Any]) -> None:
    """Kept is not good: both say so, and why no correction is suggested."""
    why = "repair first, a correction would hide it: run both engines in float32"
    audited = {**content, "suggestion": {"method": None, "why": why}}
    page = " ".join(html.unescape(render_audit(audited)).split())
    screen = " ".join(printed(audit_view(audited, width=110), width=110).split())
    for words in (TITLE, READ, f"No correction suggested:{{}} {why}"):
        assert words.format("</b>") in page
        assert words.format("") in screen


# -- size and shape ------------------------------------------------------------------------------


@pytest.mark.slow
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
        "worst": {"sequences": [sequence] * 30, "tokens": [{"context": long, "token": 1}] * 200},
        "bad_rows": [{"file": "f", "row": i, "reason": long} for i in range(100)],
        "findings": large["findings"] * 3,
    }  # fmt: skip
    large["source"]["paths"] = [f"/data/{i}" for i in range(100_000)]
    assert len(METRICS) > 100
    html = render_audit(large)
    assert len(html.encode()) < 2e6
    block = re.search(r'id="report-data">(.*?)</script>', html, re.S)
    assert block is not None
    data = json.loads(block.group(1))
    longest = max(c["points"] for c in data["columns"] if isinstance(c, dict))
    assert MAX_POINTS < longest <= 2100
    assert len(data["explore"]) >= len(METRICS)
    assert len(data["heat"]) == 20
    assert {len(heat["values"]) for heat in data["heat"]} == {600}


@pytest.mark.parametrize("value", [None, [], {}, "x", 3, [None], [{}], {"a": None}, float("nan"), [["x"]]], ids=str)  # fmt: skip
def test_all_keys_may_be_null_or_of_another_kind(content: dict[str, Any], value: object) -> None:
    assert "</html>" in render_audit(dict.fromkeys(content, value))


def test_any_key_may_be_missing(content: dict[str, Any]) -> None:
    assert len(content) == 21
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


def test_the_page_says_everything_of_the_first_screen(good: Parsed) -> None:
    text = " ".join("".join(good.text).split())
    order = ["qwen3-30b-a3b-math/rollouts", "The engines disagree from step 107", "KL per token",
             "Effective sample size", "Correlation of probabilities", "Fix", "rollout_is_threshold: 2.0",
             "What this log cannot answer", "Over the run", "Ratios of the sampled tokens", "KL by position",
             "Acceptance by response length", TITLE, "The worst sequences",
             "Certificate", "All numbers", "Where the numbers come from", "3 rows could not be read"]  # fmt: skip
    at = 0
    for part in order:
        found = text.find(part, at)
        assert found >= 0, part
        at = found
    first = next(a for tag, a in good.tags if a.get("role") == "tab")
    assert first["aria-selected"] == "true"
    assert good.text[good.text.index("verl")] == "verl"


def test_what_to_log_is_said_once_with_the_questions_it_is_for() -> None:
    asked = questions({"rewards"})
    found = unanswered({"questions": asked})
    still = [q for q in asked if not q["answered"]]
    assert len(still) == 10
    assert [q for q, _ in found.questions] == [q["question"] for q in still]
    # Every field that some question misses, once, however many miss it.
    assert sorted(x for x, _ in found.log) == sorted({x for q in still for x in q["log"].split("; ")})  # fmt: skip
    numbers = {x: [int(n) for n in which.removeprefix("for ").split(", ")] for x, which in found.log}  # fmt: skip
    assert numbers[LOG["logp_rollout"]] == [1, 2, 3, 4, 5, 7, 8, 9, 10]
    assert numbers[LOG["tokens"]] == [8]
    assert len(numbers) == len(LOG) - 1 == 10
    for x, which in numbers.items():
        assert which == [i for i, q in enumerate(still, 1) if x in q["log"].split("; ")]
    content = little() | {"questions": asked}
    page = html.unescape(render_audit(content))
    for shown in (page, printed(audit_view(content, 100), 2000)):
        for x, which in found.log:
            assert shown.count(x) == 1
            assert which in shown
        for q, because in found.questions:
            assert shown.count(q) == 1
            assert f"{because}." in shown


def test_one_open_question_has_no_number() -> None:
    asked = [{"question": "A?", "answered": False, "because": "no x", "log": "x"}]
    found = unanswered({"questions": asked})
    assert (found.questions, found.log) == ([("A?", "no x")], [("x", "")])
    page = render_audit(little() | {"questions": asked})
    assert "<dt>A?</dt>" in page
    assert "To answer it" in page


def test_a_frame_says_where_a_turn_begins():
    entry = {"step": 1, "first": 2, "length": 7, "log_ratio": [0.1] * 5, "tokens": [4, 5, 6, 7, 8], "turns": [0, 3, 5]}
    page = render_audit({"worst": {"sequences": [entry]}})
    assert re.findall(r'data-context="([^"]*)">(\d)', page) == [("turn 2", "5"), ("turn 3", "7")]
    assert "3 turns" in page
    single = render_audit({"worst": {"sequences": [entry | {"turns": [0]}]}})
    assert "data-context" not in single.partition("</style>")[2]
