"""The page of a run: whole, self-contained, without trust in what was stored; its charts hold only what was recorded."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from offdrift.errors import RecordError
from offdrift.judge import load_rules
from offdrift.methods.describe import trained_return
from offdrift.show.charts import points
from offdrift_lab.train.report.page import (
    QUANTITIES,
    all_charts,
    held_out_chart,
    line_chart,
    moving_mean,
    pick_samples,
    render,
    reward_chart,
    write_report,
)
from offdrift_lab.train.report.stored import Sample, StoredArm, read_run
from tests.show.parsed import Parsed, parse
from tests.show.synthetic import ARMS, write_lines, write_run
from tests.show.synthetic_audit import finding


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Parsed:
    return parse(write_report(write_run(tmp_path_factory.mktemp("good"))))


def test_the_page_shows_every_arm_sample_and_recipe_key(good: Parsed) -> None:
    text = "".join(good.text)
    buttons = [a for tag, a in good.tags if tag == "button" and "data-group" in a]
    samples = [a["data-sample"] for _, a in good.tags if "data-sample" in a]
    assert len(buttons) == len(ARMS)
    assert samples == [f"{arm},{i}" for arm in range(4) for i in range(8)]
    for expected in (*ARMS, "rollout.dtype", "bfloat16", "transformers", "3,412,096 parameters"):
        assert expected in text


def test_a_failed_write_keeps_the_earlier_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_report(write_run(tmp_path, updates=4))
    before, files = path.read_bytes(), sorted(p.name for p in tmp_path.iterdir())

    (tmp_path / "run.json").write_text('{"format": 1, "name": "changed"}')

    def full_disk(*_: object) -> None:
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(RecordError, match="no space left"):
        write_report(tmp_path)
    assert path.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == files


@pytest.mark.parametrize("arms", [0, 1, 2])
def test_a_run_with_next_to_nothing_is_a_page(tmp_path: Path, arms: int) -> None:
    (tmp_path / "run.json").write_text('{"format": 1}')
    for i in range(arms):
        write_lines(tmp_path / f"arms/arm{i}/metrics.jsonl", [{"update": 0, "reward/mean": None}] * i)
    parsed = parse(write_report(tmp_path))
    text = "".join(parsed.text)
    assert [a.get("class") for _, a in parsed.tags].count("badge") == arms, "running"
    assert ("No arm has" in text) == (arms == 0)
    assert text.count("Not recorded.") == (8 if arms else 0) + 2
    assert text.count("No value above 0") == (3 if arms else 0)
    assert json.loads(parsed.raw["script"][0])["charts"] == []


def sample(update: int, kl: float) -> Sample:
    return Sample(update, "", None, None, "", ("a",), (kl,), (None,), (None,), (None,))


def test_the_latest_samples_are_picked_and_the_worst_is_always_among_them() -> None:
    samples = [sample(0, 0.1), sample(1, 0.9), sample(2, 0.2), sample(3, 0.3)]
    assert [s.update for s in pick_samples(samples, 2)] == [3, 1]
    assert [s.update for s in pick_samples(samples, 3)] == [3, 2, 1]
    assert [s.update for s in pick_samples(samples, 9)] == [3, 2, 1, 0]
    assert pick_samples([], 2) == []


def test_the_last_new_batch_of_every_arm_says_what_it_proves(tmp_path):
    """Of the latest update whose batch was new to the policy; whatever it says is escaped."""
    folder = write_run(tmp_path / "run")
    planted = {
        "update": 1001, "certificate/fresh": True, "certificate/verdict": "J improves <b>surely</b>",
    }  # fmt: skip
    learned = {"update": 1002, "certificate/fresh": False, "certificate/verdict": "not this one"}
    name = next((folder / "arms").iterdir()).name
    head = json.loads((folder / "run.json").read_text("utf-8"))
    assert "its steps raise" not in write_report(folder).read_text("utf-8"), "an older run did not store it"
    head["trained_return"] = {name: trained_return("seq_mean_token_mean", "grpo")}
    (folder / "run.json").write_text(json.dumps(head), "utf-8")
    with open(folder / "arms" / name / "metrics.jsonl", "a") as f:
        f.writelines(json.dumps(row) + "\n" for row in (planted, learned))
    page = write_report(folder).read_text("utf-8")
    assert page.count("J improves &lt;b&gt;surely&lt;/b&gt;") == 1
    assert "not this one" not in page
    assert "is about J, the mean reward" in page
    assert page.count("What its steps raise (grpo): E[(R / sigma - b) / |y|], not J = E[R]") == 1
    assert StoredArm("b", finished=True, metrics=({"update": 1},)).proved is None


def test_findings_of_a_run_are_a_table_of_arms_below_the_curves_the_most_severe_first_and_open(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    late = finding(rule="late", severity="watch", symptom="Reward stands still")
    grows = finding(rule="grows", severity="act", symptom="KL grows", step=7)
    ends = finding(rule="ends", severity="stop", symptom="Length explodes", step=9)
    write_lines(run / "arms/none/findings.jsonl", [late, grows])
    write_lines(run / "arms/trm_max/findings.jsonl", [grows, ends])
    page = render(read_run(run))
    assert page.index('id="charts"') < page.index('id="findings"') < page.index('id="samples"')
    table = page[page.index('class="numbers matrix"') : page.index("</table>", page.index('class="numbers matrix"'))]
    rows = re.findall(r'<th scope="row">(.*?)<small>', table)
    assert rows == ["Length explodes", "KL grows", "Reward stands still"]
    links = re.findall(r'<td><a href="#([^"]+)">', table)
    assert links == ["finding-trm_max-ends", "finding-none-grows", "finding-trm_max-grows", "finding-none-late"]
    details = re.findall(r'<details class="finding [^"]*" id="([^"]+)"( open)?>', page)
    assert details == [(links[0], " open"), *((name, "") for name in links[1:])]


def test_a_run_opens_on_a_verdict_of_at_most_15_words(tmp_path: Path) -> None:
    page = render(read_run(write_run(tmp_path)))
    (words,) = re.findall(r'<p class="verdict">(.*?)</p>', page)
    assert len(words.split()) <= 15, words
    assert words.startswith("trm_max ended with")
    assert "of 256 held-out prompts" in page


KL = next(q for q in QUANTITIES if q.id == "kl_mean")
ACCEPTANCE = next(q for q in QUANTITIES if q.id == "acceptance")


def arm(key: str, values: list[float | None], name: str = "a") -> StoredArm:
    return StoredArm(name, True, metrics=tuple({"update": u, key: v} for u, v in enumerate(values)))


def test_every_chart_of_a_run_has_its_lines_and_says_what_they_mean(tmp_path: Path) -> None:
    charts = all_charts(read_run(write_run(tmp_path)).arms)
    assert [c.id for c in charts] == [
        "held_out", "reward", "acceptance", "kl_mean", "kl_max", "bound", "gain_low", "ppl_gap", "ess", "length", "version_lag",
    ]  # fmt: skip
    assert [len(c.series) for c in charts] == [4, 8, *9 * [4]]
    assert all(c.meaning.endswith(".") for c in charts)


def test_reward_is_drawn_raw_smoothed_and_held_out() -> None:
    one = StoredArm(
        "a",
        True,
        metrics=tuple({"update": u, "reward/mean": r} for u, r in [(0, 0.0), (2, 0.3), (3, 0.6)]),
        evals=({"update": 0, "reward": 0.1}, {"update": 4, "reward": 0.7}),
    )
    raw, smooth = reward_chart([one]).series
    (held_out,) = held_out_chart([one]).series
    assert (raw.x, raw.y, raw.faint) == ([0, 2, 3], [0.0, 0.3, 0.6], True)
    assert smooth.y == pytest.approx([0.3, 0.3, 0.3])
    assert (held_out.x, held_out.y, held_out.kind) == ([0, 4], [0.1, 0.7], "points")


def test_the_moving_mean_is_the_mean_of_its_window() -> None:
    # windows of 0 1 4 9 16: (0 1 4) (0 1 4 9) (0 1 4 9 16) (1 4 9 16) (4 9 16)
    expected = [5 / 3, 14 / 4, 30 / 5, 30 / 4, 29 / 3]
    assert moving_mean([0.0, 1.0, 4.0, 9.0, 16.0], 5) == pytest.approx(expected)
    assert moving_mean([2.0], 5) == [2.0]
    assert moving_mean([], 5) == []


def test_a_log_axis_leaves_out_what_it_cannot_show() -> None:
    chart = line_chart(KL, [arm(KL.key, [0.0, 1e-3, None, 2e-3])])
    drawn = points(chart, chart.series[0])
    assert (drawn["x"], drawn["y"]) == ([0, 1, 3], [None, 1e-3, 2e-3])
    assert chart.log
    assert chart.gaps.startswith("Gaps: 1 value of 0 or below")
    assert line_chart(KL, [arm(KL.key, [0.1, 0.2])]).gaps == ""
    assert line_chart(KL, [arm(KL.key, [0.0, 0.0])]).series == ()
    assert line_chart(ACCEPTANCE, [arm(ACCEPTANCE.key, [0.0, 0.0])]).series[0].y == [0.0, 0.0]


def test_arms_keep_their_color_when_another_recorded_nothing() -> None:
    arms = [arm(KL.key, [0.1, 0.2], "a"), StoredArm("empty", False), arm(KL.key, [0.3, 0.4], "c")]
    series = line_chart(KL, arms).series
    assert [(s.name, s.color, s.group) for s in series] == [("a", "arm-0", "0"), ("c", "arm-2", "2")]


def test_acceptance_has_its_line_where_the_rules_have_it() -> None:
    assert line_chart(ACCEPTANCE, []).lines == [(0.7, "70%")]
    half = replace(arm("gate/acceptance_seq", [0.9, 0.8]), limits=load_rules().limits | {"acceptance_low": 0.5})
    assert line_chart(ACCEPTANCE, [half]).lines == [(0.5, "50%")]
    assert line_chart(KL, []).lines == ()
