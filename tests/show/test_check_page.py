"""The page of a check: what was measured, what makes the difference, and no trust in any text."""

import html
import math
import re
from typing import Any

import pytest

from offdrift.check.page import check_headlines, factor_chart, render_check, write_check_page
from offdrift.check.view import BUDGETS, threshold_rows
from tests.show.parsed import Parsed, parse
from tests.show.synthetic_audit import SNIPPETS, check


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Parsed:
    return parse(write_check_page(check(), tmp_path_factory.mktemp("good")))


def words(parsed: Parsed) -> str:
    return " ".join("".join(parsed.text).split())


def test_it_says_what_was_measured_and_what_to_do(good: Parsed) -> None:
    text = words(good)
    for part in ("SmolLM2-135M", "rollout: vllm 0.11.0 bfloat16", "train: transformers 5.1.0 float32", "16 prompts",
                 "passed at a KL of 0.00200 nat", "KL per token 0.00112 nat", "trm_max gate.high = 0.061",
                 "these limits are calibrated to accept 99.0 % of clean sequences", "float32 instead of bfloat16", "1 factor not tried",
                 "the model has no experts", "✗ no", "✓ yes", "repeat_kl_mean"):  # fmt: skip
        assert part in text, part
    for snippet in SNIPPETS.values():
        assert snippet.strip() in "".join(good.text)


def test_nothing_to_train_with_has_no_limits_that_were_calibrated() -> None:
    content = check() | {"recommended": {"method": None, "why": "nothing to correct", "acceptance": 0.99}}
    page = render_check(content)
    assert "nothing to correct" in page
    assert "calibrated to accept" not in page


def test_a_missed_budget_is_no_defect() -> None:
    row = {"metric": "tv_p95", "value": 0.036, "relation": "<", "threshold": 1e-4, "holds": False, "missed": "outside", "level": "ok"}  # fmt: skip
    for kind, said, flagged in (("budget", "○ outside", 0), ("size", "✗ no", 1)):
        page = render_check({**check(), "thresholds": [{**row, "kind": kind}]})
        table = page[page.index('id="thresholds-title"') :]
        table = table[: table.index("</table>")]
        assert said in table
        assert table.count("flagged") == flagged
        assert (BUDGETS in page, ">Healthy</th>" in table) == (kind == "budget", kind == "size"), "a budget is no limit"


def test_factors_that_matter_are_marked(good: Parsed) -> None:
    """The largest effect first, by the planted ratios: 81, 0.04 (which halves it), 9.1, 4.4."""
    marks = [a["class"].split()[1] for tag, a in good.tags if tag == "td" and a.get("class") in ("number better", "number flagged")]  # fmt: skip
    assert marks == ["flagged", "better", "flagged", "flagged"]


def test_mistakes_that_nobody_made_stand_apart_from_settings() -> None:
    rows = check()["factors"][:2]
    page = render_check({**check(), "factors": [*rows, {**rows[0], "factor": "off_by_one", "ratio": 4.57e11, "why": "this pair is aligned"}]})  # fmt: skip
    page = page[page.index('id="factors-title"') : page.index('id="thresholds-title"')]
    settings, mistakes = page[: page.index("What common mistakes")], page[page.index("What common mistakes") :]  # fmt: skip
    assert settings.count('<th scope="row"') == 2
    assert mistakes.count('<th scope="row"') == 1
    assert "this pair is aligned" in mistakes
    assert "> 10⁴" in html.unescape(mistakes)


def test_a_metric_with_two_thresholds_is_one_row() -> None:
    row = {"metric": "kl_mean", "value": 0.03, "source": "tree", "missed": "larger", "kind": "size"}
    watch = {**row, "relation": "<", "threshold": 0.02, "level": "watch", "holds": False}
    act = {**row, "relation": "<=", "threshold": 0.05, "level": "act", "holds": True}
    (one,) = threshold_rows({"thresholds": [act, watch]})
    assert (one.healthy, one.otherwise, one.level) == ("< 0.02", "watch; act if > 0.05", "watch")
    assert (one.sources, one.missed, one.outside) == (("tree",), "larger", False)
    text = html.unescape(render_check({**check(), "thresholds": [act, watch]}))
    assert (
        len(re.findall("kl_<wbr>mean <a [^>]*>#</a><small>KL per token, nat</small><small>larger</small></th>", text))
        == 1
    )
    assert "watch; act if > 0.05" in text


def test_only_what_ran_is_drawn_beside_the_unchanged_pair() -> None:
    content = check()
    chart = factor_chart(content)
    ran = [f for f in content["factors"] if f["status"] == "ran"]
    assert len(ran) == 9
    ran.sort(key=lambda f: abs(math.log(f["ratio"])), reverse=True)
    assert chart.categories == [f["factor"] for f in ran]
    assert chart.series[0].y == [f["kl_mean"] for f in ran]
    assert [at for at, _ in chart.lines] == [0.00112]
    # The axis has eight decades below the largest, about 0.09: what lies below is at its bottom.
    first, *others = content["factors"]
    tiny = factor_chart({**content, "factors": [{**first, "kl_mean": 1e-14}, *others]})
    assert math.log10(max(tiny.series[0].y) / min(tiny.series[0].y)) == pytest.approx(7.8, abs=0.01)
    assert not factor_chart({}).series


@pytest.mark.parametrize(
    ("baseline", "metrics"),
    [
        ({"kl_mean": 0.1, "tv_max": 0.2, "pearson": 0.9, "mismatch/k3": 1.0}, ["kl_mean", "tv_max", "pearson"]),
        ({"mismatch/k3": 0.1, "mismatch/ess_frac": 0.2}, ["mismatch/k3", "mismatch/ess_frac"]),
        ({"kl_mean": None}, []),
    ],
)  # fmt: skip
def test_the_three_numbers_follow_from_what_was_measured(baseline: dict, metrics: list[str]) -> None:  # fmt: skip
    assert [h.metric for h in check_headlines({"baseline": baseline})] == metrics


@pytest.mark.parametrize("value", [None, [], {}, "x", 3, [{}], [None]], ids=str)
def test_any_key_may_be_null_or_of_another_kind(value: object) -> None:
    whole: dict[str, Any] = check()
    assert len(whole) > 15
    assert "</html>" in render_check(dict.fromkeys(whole, value))
    rows = {k: [{**v[0], key: value} for key in v[0]] for k, v in whole.items() if isinstance(v, list)}  # fmt: skip
    assert sum(map(len, rows.values())) > 30
    assert "</html>" in render_check({**whole, **rows})
