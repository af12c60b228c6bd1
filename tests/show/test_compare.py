"""Two audits side by side: differences with their sign, the better one by the table, equal steps."""

import json
from pathlib import Path
from typing import Any

import pytest

from offdrift.audit.compare import (
    ComparedNumber,
    common_kl,
    comparison_view,
    differences,
    in_common,
    methods,
    overall,
    render_comparison,
    sentence,
    write_comparison,
)
from offdrift.show.headline import LATELY, all_numbers, headlines
from offdrift.show.numbers import short
from offdrift.show.packed import unpack
from offdrift.stats.metrics import METRICS
from tests.show.parsed import parse
from tests.show.screens import printed
from tests.show.synthetic_audit import audit, little

NAMES = ("baseline", "float16")


@pytest.fixture(scope="module")
def pair() -> tuple[dict[str, Any], dict[str, Any]]:
    return audit(steps=4), audit(steps=3, seed=1)


def test_the_better_one_follows_the_direction_of_the_metric() -> None:
    cases = [(1.0, 2.0, "worse", "a"), (2.0, 1.0, "worse", "b"), (1.0, 2.0, "better", "b"), (2.0, 1.0, "better", "a"),
             (1.0, 2.0, "neither", ""), (1.0, 1.0, "worse", ""), (1.0, None, "worse", "")]  # fmt: skip
    for a, b, larger_is, winner in cases:
        assert ComparedNumber("m", a, b, larger_is, "", short).winner == winner, (a, b, larger_is)


def test_differences_have_a_sign() -> None:
    changes = [ComparedNumber("m", a, b, "worse", "", short).change for a, b in ((1.0, 3.0), (3.0, 1.0), (1.0, 1.0), (1.0, None))]  # fmt: skip
    assert changes == ["+2.00", "−2.00", "0", "–"]


def test_an_estimate_below_0_of_what_cannot_be_is_neither_better_nor_written_as_a_size() -> None:
    a, b = ({"overall": {"mismatch/chi2_seq": x, "mismatch/k1": -0.01}} for x in (-0.981, -0.5))
    found = {c.name: c for c in overall(a, b)}
    chi2 = found["mismatch/chi2_seq"]
    assert chi2.winner == ""
    assert [chi2.write(x) for x in (chi2.a, chi2.b, 0.25)] == ["≈ 0 (noise: −0.981)", "≈ 0 (noise: −0.500)", "0.250"]
    assert (chi2.a, chi2.b) == (-0.981, -0.5), "as they were stored"
    assert found["mismatch/k1"].write(-0.01) == "−0.0100", "a mean of log-ratios may be negative"
    row = next(r for r in all_numbers(a["overall"]) if r["name"] == "mismatch/chi2_seq")
    assert row["value"] == "≈ 0 (noise: −0.981)"


def test_every_metric_that_both_have_is_compared_the_telling_first(pair: tuple) -> None:
    a, b = pair
    found = overall(a, b)
    assert len(found) == len(a["overall"]) > 25
    assert [c.name for c in found[:4]] == ["mismatch/k3", "mismatch/ess_frac", "mismatch/pearson", "mismatch/chi2_token"]  # fmt: skip
    for c in found:
        assert (c.a, c.b) == (a["overall"][c.name], b["overall"][c.name])
        assert c.larger_is == METRICS[c.name].larger_is
    assert overall(a, little())[0].name == "reward/mean"
    assert overall(a, {}) == []


def test_the_first_screen_tells_a_number_that_got_worse_than_its_average() -> None:
    steps = [{"step": i, "mismatch/k3": 0.006 * i} for i in range(1, 17)]
    kl, *_ = headlines({"overall": {"mismatch/k3": 0.028}, "steps": steps})
    assert kl.text == "0.0280"
    assert kl.level == "act"
    assert kl.comparison == LATELY.format("0.0840", "above 0.05: find the cause")
    flat = [{**row, "mismatch/k3": 0.028} for row in steps]
    (kl,) = headlines({"overall": {"mismatch/k3": 0.028}, "steps": flat})[:1]
    assert (kl.level, kl.comparison) == ("watch", "between 0.02 and 0.05: watch it")
    (kl,) = headlines({"overall": {"mismatch/k3": 0.028}, "steps": steps[-8:]})[:1]
    assert kl.level == "watch", "a few steps are their own average"


def run(*kls: float, first: int = 1, tokens: float = 1.0) -> dict[str, Any]:
    steps = [{"step": first + i, "tokens": tokens * (i + 1), "full/k3": kl} for i, kl in enumerate(kls)]  # fmt: skip
    return {"steps": steps, "overall": {"full/k3": sum(kls) / len(kls)}}


def test_a_run_that_went_on_longer_is_judged_on_the_steps_in_common() -> None:
    """Steps 1 and 2 with 1 and 2 tokens: (0.1 + 2 * 0.4) / 3 = 0.3 against (0.2 + 2 * 0.2) / 3 = 0.2."""
    long, shorter = run(0.1, 0.4, 9.0), run(0.2, 0.2)
    assert in_common(long, shorter, "full/k3") == pytest.approx((0.3, 0.2))
    assert sentence(long, shorter, NAMES) == (
        "float16 drifts less: over the steps in common its KL per token (full/k3) is 0.200 nat "
        "against 0.300 nat, a factor of 1.5."
    )
    apart = run(0.5, first=10)
    assert in_common(shorter, apart, "full/k3") == pytest.approx((0.2, 0.5)), "no step in common: all"


def test_only_the_same_measure_is_compared() -> None:
    """The exact KL of one log and the sampled one of the other are not held against each other."""
    exact = {"overall": {"divergence/kl_rollout_current_mean": 5.0, "full/k3": 0.1}}
    assert common_kl(exact, run(0.2)) == "full/k3"
    assert in_common(exact, run(0.2), "full/k3") == (0.1, 0.2)
    assert common_kl(exact, exact) == "divergence/kl_rollout_current_mean"


def test_runs_that_cannot_be_compared_are_called_that() -> None:
    assert "no measure of drift in common" in sentence(run(0.1), little(), NAMES)
    assert "no measure of drift in common" in sentence({}, {}, NAMES)
    assert sentence(run(0.1), run(0.1), NAMES) == "Both runs have the same KL per token (full/k3): 0.100 nat."  # fmt: skip


def test_the_differences_as_data(pair: tuple) -> None:
    a, b = pair
    found = json.loads(json.dumps(differences(a, b), allow_nan=False))
    assert found["kl"]["metric"] == "mismatch/k3"
    entry = found["metrics"]["mismatch/k3"]
    assert entry["difference"] == pytest.approx(b["overall"]["mismatch/k3"] - a["overall"]["mismatch/k3"])  # fmt: skip
    assert entry["better"] == ("a" if entry["difference"] > 0 else "b")
    assert len(found["methods"]) == len(methods(a, b)) > 90
    empty = differences({}, {})
    assert empty.pop("verdicts") == {name: {"level": "", "judged_by": ""} for name in "ab"}
    assert empty == {"kl": {"metric": None, "a": None, "b": None}, "metrics": {}, "methods": {}}


def test_series_of_both_runs_lie_over_each_other(pair: tuple, tmp_path: Path) -> None:
    page = parse(write_comparison(*pair, NAMES, tmp_path / "c.html"))
    data = json.loads(page.raw["script"][0])
    charts = {c["id"]: c for c in data["charts"]}
    assert len(charts) == 14
    for chart in charts.values():
        assert [s["name"] for s in chart["series"]] == list(NAMES)
        assert [s["dash"] for s in chart["series"]] == ["solid", "dash"]
    kl = charts["kl-mismatch"]["series"]
    assert [data["columns"][s["x"]] for s in kl] == [[1, 2, 3, 4], [1, 2, 3]]
    for s, content in zip(kl, pair):
        assert data["columns"][s["y"]] == pytest.approx([r["mismatch/k3"] for r in content["steps"]], rel=1e-4)  # fmt: skip


def test_long_runs_are_on_the_page_whole(tmp_path: Path) -> None:
    page = parse(write_comparison(run(*[0.1, 0.3] * 2500), run(*[0.2] * 30), NAMES, tmp_path / "c.html"))
    columns = json.loads(page.raw["script"][0])["columns"]
    packed = [unpack(c) for c in columns if isinstance(c, dict)]
    assert {len(c) for c in columns if isinstance(c, list)} == {30}
    assert list(range(1, 5001)) in packed
    assert any(c == pytest.approx([0.1, 0.3] * 2500, rel=2**-15) for c in packed)


@pytest.mark.parametrize("other", [{}, little(), dict.fromkeys(audit(steps=1), "x")], ids=["nothing", "little", "text"])  # fmt: skip
def test_one_of_the_two_may_hold_next_to_nothing(pair: tuple, other: dict) -> None:
    for a, b in ((pair[0], other), (other, pair[0]), (other, other)):
        assert "</html>" in render_comparison(a, b, NAMES)


@pytest.mark.parametrize("width", [80, 120])
def test_the_terminal_shows_both_and_fits(pair: tuple, width: int) -> None:
    text = printed(comparison_view(*pair, NAMES, width), width)
    assert max(map(len, text.splitlines())) <= width
    for part in ("drifts less", "baseline  ▲ Act", "float16  ▲ Act", "mismatch/k3", "difference", "decoupled_token_icepop", "baseline → float16"):  # fmt: skip
        assert part in text, part
