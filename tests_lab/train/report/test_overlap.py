"""A run with workers, read back: what its rows hold is in the table of metrics, and whoever reads them copes."""

import gc
import io
import json
import warnings

import pytest
from rich.console import Console
from tests.show.screens import flat, printed

from offdrift.audit.watch import Metrics
from offdrift.judge import Context
from offdrift.stats import METRICS
from offdrift_lab.train.loop.loop import train
from offdrift_lab.train.loop.run_folder import RunFolder
from offdrift_lab.train.report.diagnosis import LiveDiagnosis
from offdrift_lab.train.report.overlap import drift_by_lag
from offdrift_lab.train.report.page import write_report
from offdrift_lab.train.report.stored import overlap_numbers, read_run
from offdrift_lab.train.report.view import LiveProgress, run_summary
from tests_lab.train.conftest import small_recipe
from tests_lab.train.loop.test_loop import rows

NAMES = {"sync": "sync", "beside": "one_step_off"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory):
    """Two schedules, six updates each; what was shown of them."""
    folder, screen = tmp_path_factory.mktemp("runs") / "beside", io.StringIO()
    recipe = small_recipe(
        lag={},
        pipeline={"workers": 1, "slots": 16, "update_rounds": 2},
        rollout={"prompts": 4, "samples": 4, "max_tokens": 6, "evidence": "full"},
        log={"eval_every": 6, "eval_prompts": 4, "trackers": ["tensorboard"]},
        arms={name: {"method": "token_tis", "schedule": schedule} for name, schedule in NAMES.items()},
    )
    with warnings.catch_warnings(), LiveProgress(Console(file=screen, width=200), every=1) as watch:
        warnings.simplefilter("ignore", ResourceWarning)  # Ray drops its processes while they are still ending
        table = train(recipe, folder, watch=watch)
        gc.collect()
    return folder, table, screen.getvalue()


def test_the_table_of_metrics_has_every_number_that_a_pipeline_logs(run):
    for name in NAMES:
        for row in rows(run[0], name):
            logged = {key for key in row if key.startswith("pipeline/")}
            assert logged == {key for key in METRICS if key.startswith("pipeline/")} | {"pipeline/lag_counts"}


def test_the_summary_says_what_the_rows_say(run):
    folder, table, _ = run
    for summary, name in zip(table, NAMES, strict=True):
        expected = overlap_numbers(RunFolder(folder).arm(name).rows("metrics"))
        assert {key: summary[key] for key in expected} == expected
    sync, beside = table
    assert (sync["lag_mean"], sync["lag_max"], sync["stale_frac"]) == (0, 0, 0)
    assert beside["lag_max"] == 1
    assert beside["lag_mean"] == pytest.approx(5 / 6), "all but the first batch are one update old"


def test_drift_by_lag_is_that_of_the_metrics(run):
    """The mean over lags, weighted by tokens, is the mean over updates, weighted by tokens."""
    for arm in read_run(run[0]).arms:
        drift = drift_by_lag(arm)
        tokens = [row["batch/tokens"] for row in arm.metrics]
        kl = [row["divergence/kl_rollout_current_mean"] for row in arm.metrics]
        assert sum(drift.tokens) == sum(tokens)
        assert not drift.sampled
        whole = sum(k * n for k, n in zip(drift.kl, drift.tokens, strict=True)) / sum(tokens)
        assert whole == pytest.approx(
            sum(k * n for k, n in zip(kl, tokens, strict=True)) / sum(tokens), rel=1e-4, abs=1e-9
        )
    assert drift.lags == [0, 1]
    assert drift.kl[1] > drift.kl[0]


def test_lists_are_no_numbers_to_whoever_follows_the_run(run):
    folder, _, shown = run
    assert "6/6" in shown
    file = folder / "arms" / "beside" / "metrics.jsonl"
    followed = list(Metrics(file, "beside").poll())
    assert len(followed) == 6
    assert "pipeline/lag_counts" not in followed[-1].numbers
    assert followed[-1].numbers["pipeline/stale_frac"] == 1
    files = RunFolder(folder).arm("beside")
    assert (
        LiveDiagnosis.of(files.rows("metrics"), files.rows("eval"), Context()).summary()
        == read_run(folder).arms[1].summary["findings"]
    )


def test_trackers_get_the_numbers(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (file,) = run[0].rglob("beside/**/events.out.tfevents*")
    events = EventAccumulator(str(file))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert {key for key in METRICS if key.startswith("pipeline/")} <= tags
    assert "pipeline/lag_counts" not in tags


def test_the_page_and_the_table_show_the_run(run):
    folder, _, _ = run
    page = write_report(folder).read_text("utf-8")
    assert "Generation beside training" in page
    assert "One worker drew responses" in page
    said = flat(printed(run_summary(read_run(folder), width=80), 80))
    for words in ("One step off", "Workers idle", "Trainer idle", "largest 1, limit 1", "0.83"):
        assert words in said, words


def test_a_row_that_lacks_what_a_schedule_logs_is_shown(run, tmp_path):
    folder, _, _ = run
    (tmp_path / "arms" / "beside").mkdir(parents=True)
    (tmp_path / "run.json").write_text((folder / "run.json").read_text("utf-8"))
    kept = [{k: v for k, v in row.items() if not k.startswith("pipeline/")} for row in rows(folder, "beside")[:2]]
    kept += [{k: None if k.startswith("pipeline/") else v for k, v in rows(folder, "beside")[2].items()}]
    lines = "".join(json.dumps(row) + "\n" for row in kept)
    (tmp_path / "arms" / "beside" / "metrics.jsonl").write_text(lines, "utf-8")
    assert "one_step_off" in write_report(tmp_path).read_text("utf-8")
    assert "one_step_off" in printed(run_summary(read_run(tmp_path), width=80), 80)
