"""Generation beside training, as the page and the terminal show it: from what was stored, in sums that are right."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from offdrift_lab.train.report.overlap import OVERLAP, drift_by_lag
from offdrift_lab.train.report.page import overlap_charts, write_report
from offdrift_lab.train.report.stored import Run, StoredArm, overlap_numbers, read_run, summary_numbers, verdict
from offdrift_lab.train.report.view import run_summary
from tests.show.hostile import PAYLOADS, SHOWN
from tests.show.parsed import Parsed, parse
from tests.show.screens import flat, printed
from tests.show.synthetic import ARMS, SCHEDULES, overlap, write_run, write_token_log

ROWS = [
    {"update": 1, "throughput/seconds": 1.0, "response/length_mean": 5.0, "pipeline/worker_idle": 0.5,
     "pipeline/trainer_idle": 0.2, "pipeline/lag_counts": [4], "pipeline/mixed_frac": 0.0,
     "pipeline/wasted_tokens": 0.0, "pipeline/sync_seconds": 0.1, "pipeline/sync_bytes": 2e6},
    {"update": 2, "throughput/seconds": 1.0},
    {"update": 3, "throughput/seconds": 2.0, "response/length_mean": 10.0, "pipeline/worker_idle": 0.1,
     "pipeline/trainer_idle": None, "pipeline/lag_counts": [0, 6, None, 6], "pipeline/mixed_frac": 0.5,
     "pipeline/wasted_tokens": 60.0, "pipeline/sync_seconds": 0.3, "pipeline/sync_bytes": 2e6,
     "pipeline/dropped_groups": 3.0, "pipeline/lost_workers": 1.0, "pipeline/restarted": 2.0},
]  # fmt: skip


def arm(name: str = "a", rows: list[dict] = ROWS, **schedule: object) -> StoredArm:
    return StoredArm(name, True, summary=overlap_numbers(rows), metrics=tuple(rows), schedule=schedule)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return overlap(write_run(tmp_path_factory.mktemp("beside"), updates=8))


@pytest.fixture(scope="module")
def page(folder: Path) -> Parsed:
    return parse(write_report(folder))


def test_idle_is_of_time_lag_of_responses_and_waste_of_tokens():
    """By hand: 1 s and 3 s; 4 + 12 responses; 4 x 5 + 12 x 10 tokens trained on."""
    got = overlap_numbers(ROWS)
    assert got["worker_idle"] == pytest.approx((0.5 * 1 + 0.1 * 3) / 4)
    assert got["trainer_idle"] == 0.2, "what is missing has no weight"
    assert got["lag_mean"] == pytest.approx((6 * 1 + 6 * 3) / 16)
    assert got["lag_max"] == 3
    assert got["stale_frac"] == 12 / 16
    assert got["mixed_frac"] == pytest.approx(0.5 * 12 / 16)
    assert got["wasted_frac"] == pytest.approx(60 / (60 + 140))
    assert got["sync_seconds"] == pytest.approx(0.2)
    assert got["updates_per_minute"] == pytest.approx(45.0)
    assert (got["dropped_groups"], got["redrawn_groups"], got["lost_workers"], got["restarted"]) == (3, 0, 1, 2)


@pytest.mark.parametrize("counts", [None, "text", {"0": 3}, 4])
def test_a_run_without_lag_counts_has_no_such_numbers(counts):
    rows = [{"update": 1, "pipeline/lag_counts": counts}]
    assert overlap_numbers(rows) == {}
    assert not {"worker_idle", "lag_mean"} & summary_numbers(rows, []).keys()


@pytest.mark.parametrize("counts", [[], [None], ["x", None], [0, 0]])
def test_counts_without_a_response_are_unknown(counts):
    got = overlap_numbers([{"update": 1, "pipeline/lag_counts": counts}])
    assert got["lag_mean"] is got["lag_max"] is got["stale_frac"] is got["updates_per_minute"] is None
    assert [c.cell(arm(rows=[{"pipeline/lag_counts": counts}])).text for c in OVERLAP if c.id == "lag"] == ["–"]


def test_every_schedule_has_its_title_and_its_limit_in_optimizer_steps(folder):
    head = json.loads((folder / "run.json").read_text("utf-8"))
    schedules = {a.name: a.schedule for a in read_run(folder).arms}
    assert {n: s["name"] for n, s in schedules.items()} == SCHEDULES
    assert [s["max_lag"] for s in schedules.values()] == [0, 1, None, None]
    assert schedules["trm_max"]["title"] == "One step off"
    head["recipe"]["optim"] |= {"epochs": 2, "minibatches": 3}
    head["recipe"]["pipeline"]["rules"] = {"too_old": {"action": "drop", "limit": 5}}
    head["recipe"]["arms"]["trm_max"]["rules"] = {"admission.eta": 4}
    copy = folder.parent / "copy"
    (copy / "arms").mkdir(parents=True)
    for name in SCHEDULES:
        (copy / "arms" / name).symlink_to(folder / "arms" / name)
    (copy / "run.json").write_text(json.dumps(head), "utf-8")
    arms = {a.name: a for a in read_run(copy).arms}
    assert [a.schedule["max_lag"] for a in arms.values()] == [0, 24, 30, 30]
    assert all(a.schedule["changed"] for a in arms.values())


@pytest.mark.parametrize(
    "part",
    [
        {"schedule": "no such row"},
        {"schedule": 3},
        {"rules": {"admission.eta": "x"}},
        {"rules": {"sync_every": {"a": 1}}},
        {"rules": [1]},
        {"rules": {"": 0}},
    ],
)
def test_a_schedule_that_this_version_does_not_know_is_a_name(folder, tmp_path, part):
    head = json.loads((folder / "run.json").read_text("utf-8"))
    head["recipe"]["arms"]["none"] |= part
    (tmp_path / "run.json").write_text(json.dumps(head), "utf-8")
    (tmp_path / "arms" / "none").mkdir(parents=True)
    first = next(a for a in read_run(tmp_path).arms if a.name == "none")
    assert first.schedule["name"] == str(part.get("schedule", "sync"))
    assert ("max_lag" in first.schedule) == (part == {"rules": [1]}), "no rules are none that changed"
    assert parse(write_report(tmp_path)).text


def test_a_lag_above_the_proved_limit_is_marked():
    lag = next(c for c in OVERLAP if c.id == "lag")
    cells = [lag.cell(arm(max_lag=limit)) for limit in (2, 3, None)]
    assert [c.flagged for c in cells] == [True, False, False]
    assert [c.note for c in cells] == ["largest 3, limit 2", "largest 3, limit 3", "largest 3, no limit"]
    assert lag.cell(arm()).note == "largest 3"


def test_the_page_has_a_row_an_arm_and_five_charts(page):
    text = "".join(page.text)
    assert "Generation beside training" in text
    assert "2 workers drew responses" in text
    for words in (*SCHEDULES.values(), "verl, fully asynchronous: partial rollouts", "largest 1, limit 1", "no limit"):
        assert words in text, words
    drawn = {chart["id"]: chart for chart in json.loads(page.raw["script"][0])["charts"]}
    ids = ["lags", "drift_by_lag", "worker_idle", "trainer_idle", "stored_groups"]
    assert [len(drawn[i]["series"]) for i in ids] == [4] * 5
    cells = [a for tag, a in page.tags if tag == "td" and a.get("data-label") == "Workers idle"]
    assert len(cells) == len(ARMS)
    references = [a["aria-describedby"] for _, a in page.tags if "aria-describedby" in a]
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(ids) == len(set(ids))
    assert set(references) <= set(ids)


def test_a_run_without_a_pipeline_has_no_such_section(tmp_path):
    text = "".join(parse(write_report(write_run(tmp_path, updates=2))).text)
    assert "Generation beside training" not in text
    assert "Schedule" not in printed(run_summary(read_run(tmp_path)), 140)


def test_the_bars_are_shares_and_the_drift_is_the_logs(folder):
    lags, drift, *_ = overlap_charts(read_run(folder).arms)
    assert all(sum(series.y) == pytest.approx(1.0) for series in lags.series)
    assert lags.categories == ["0", "1", "2", "3"]
    by_name = {series.name: series for series in drift.series}
    assert by_name["none"].x == [0]
    # 12 tokens of lag 0 at the first update; at the second every other one has a lag of 1
    assert by_name["trm_max"].x == [0, 1]
    assert by_name["trm_max"].y == pytest.approx([0.0, 0.01])
    assert by_name["trm_max"].texts == ["0 nat, 18 tokens", "0.01 nat, 6 tokens"]
    assert "exact" in drift.meaning


def test_without_exact_divergences_drift_is_estimated_and_said_to_be(folder, tmp_path):
    write_token_log(tmp_path, 2, [0, 1, 2, 2, 1, 0], exact=False)
    got = drift_by_lag(replace(arm(), folder=tmp_path))
    assert (got.lags, got.tokens, got.sampled) == ([0, 1, 2], [2, 2, 2], True)
    assert got.kl == pytest.approx([0.0, 0.1051709 - 0.1, 0.2214028 - 0.2], rel=1e-4)
    assert "k3" in overlap_charts([replace(arm(), folder=tmp_path)])[1].meaning


def test_a_damaged_log_is_left_out(folder, tmp_path):
    assert drift_by_lag(StoredArm("a", True)).lags == drift_by_lag(StoredArm("a", True, folder=tmp_path)).lags == []
    whole = write_token_log(tmp_path, 2, [0, 1, 2, 2, 1, 0]).read_bytes()
    (tmp_path / "log" / "batch-000003.parquet").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "log" / "batch-000004.parquet").write_bytes(b"no Parquet")
    assert drift_by_lag(StoredArm("a", True, folder=tmp_path)).tokens == [2, 2, 2]


def test_what_a_recipe_calls_its_schedule_is_text(folder, tmp_path):
    head = json.loads((folder / "run.json").read_text("utf-8"))
    for name, payload in zip(SCHEDULES, PAYLOADS):
        head["recipe"]["arms"][name]["schedule"] = payload
        (tmp_path / "arms" / name).mkdir(parents=True)
    (tmp_path / "run.json").write_text(json.dumps(head), "utf-8")
    page = write_report(tmp_path).read_text("utf-8")
    assert not any(payload in page.split("<section")[3] for payload in PAYLOADS[:3])
    assert all(shown in "".join(parse(tmp_path / "report.html").text) for shown in SHOWN[: len(SCHEDULES)])


def many(run: Run, count: int) -> Run:
    named = (replace(run.arms[i % 4], name=f"{run.arms[i % 4].name}_{i}") for i in range(count))
    return replace(run, arms=tuple(named))


@pytest.mark.parametrize(("width", "count"), [(80, 4), (80, 17), (100, 6), (120, 30), (140, 17), (200, 17), (40, 2)])
def test_the_table_of_many_arms_is_readable_in_any_terminal(folder, width, count):
    """No cell is cut, and no line is longer than the terminal."""
    run = many(read_run(folder), count)
    text = printed(run_summary(run, width=width), width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    for arm in run.arms:
        assert arm.name in flat(text)
    assert len(re.findall(r"0\.\d{3} → 0\.\d{3}", text)) >= count, "every arm's reward in one piece"


def test_a_narrow_table_keeps_what_matters_most_and_names_the_rest(folder):
    run = read_run(folder)
    lines = printed(run_summary(many(run, 17), width=80), 80).splitlines()
    row = next(line for line in lines if "trm_max_13" in line)
    assert "one_step_off" in row
    assert len(re.findall(r"\d %", row)) == 2, "idle shares"
    assert re.search(r" 0\.\d\d$", row.rstrip()), "mean lag"
    rest = next(line for line in lines if line.startswith("KL mean, KL max"))
    assert "Acceptance" in rest
    assert sum(arm in line for arm in ("none_0", "trm_max_1") for line in lines[:12]) == 2, "a line an arm"


def test_the_verdict_counts_arms_that_are_too_many_to_name():
    arms = tuple(StoredArm(f"arm{i}", True, {"reward_after": 0.5}) for i in range(8))
    run = Run("demo", {}, "", None, {}, {}, arms)
    assert verdict(run) == "8 arms ended level, at 0.500 in held-out reward."
    assert "arm0, arm1, arm2, arm3, arm4 and arm5 ended level" in verdict(replace(run, arms=arms[:6]))
