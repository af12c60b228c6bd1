"""`offdrift plan` as a person types it."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from tests.audit.logs import drawn
from tests.command import command

from offdrift.records.recorder import write_log
from offdrift_lab.plan.compare import BOUNDS
from offdrift_lab.schedules import SCHEDULES
from tests_lab.plan.test_measured import a_run

CLUSTER = """
[rollout]
workers = 3
slots = 4
[lengths]
mean = 60
sigma = 0.8
cap = 400
[trainer]
devices = 3
group = 0.3
update = 0.1
[sync]
push = 0.1
load = 0.1
[batch]
groups = 4
samples = 2
[run]
updates = 8
warmup = 4
"""


@pytest.fixture
def offdrift(monkeypatch, capsys, tmp_path):
    """The command line in this process, with `cluster.toml` in the working folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    return partial(command, monkeypatch, capsys)


def told(done) -> dict:
    assert done.code == 0, done.stderr
    return json.loads(done.stdout)


def test_json_is_the_document_and_nothing_else(offdrift):
    document = told(offdrift("plan", "cluster.toml", "--json"))
    assert (document["kind"], document["phases"]["name"]) == ("plan", "cluster")
    assert [row["schedule"] for row in document["schedules"]] == list(SCHEDULES)
    best = document["recommended"]
    # The file states the workers: only bounds are tried.
    assert {row["workers"] for row in document["sweep"]} == {3}
    assert {row["bound"] for row in document["sweep"]} == set(BOUNDS)
    assert best in [*document["schedules"], *document["sweep"]]
    assert document["drift"] is document["correction"] is None


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("words", [["cluster.toml"], ["cluster.toml", "--sweep-workers", "-s", "areal", "-s", "sync"]])
def test_it_fits_the_terminal_and_answers(offdrift, width, words):
    done = offdrift("plan", *words, width=width)
    assert done.code == 0
    lines = done.stdout.splitlines()
    assert max(len(line.rstrip()) for line in lines) <= width
    text = " ".join(done.stdout.split())
    for start in ("Schedule: ", "Speed: ", "Lag: ", "Drift: unknown", "▶", "● no other row is faster"):
        assert start in text
    assert "next: offdrift audit RUN" in done.stderr


def test_options_choose_what_is_simulated(offdrift):
    few = told(offdrift("plan", "cluster.toml", "-s", "one_step_off", "--bounds", "1, 3,", "--json"))
    assert [row["schedule"] for row in few["schedules"]] == ["one_step_off"]
    assert [row["bound"] for row in few["sweep"]] == [1, 3]
    assert few["baselines"]["sync"]["groups_per_s"] > 0
    wide = told(offdrift("plan", "cluster.toml", "-s", "areal", "--bounds", "2", "--sweep-workers", "--json"))
    assert len({row["workers"] for row in wide["sweep"]}) > 2
    other = told(offdrift("plan", "cluster.toml", "-s", "areal", "--seed", "7", "--json"))
    same = told(offdrift("plan", "cluster.toml", "-s", "areal", "--seed", "7", "--json"))
    assert other == same
    assert other["phases"]["run"]["seed"] == 7
    assert other["schedules"][0]["seconds"] != wide["schedules"][0]["seconds"]
    fast = told(offdrift("plan", "cluster.toml", "--tolerance", "0", "--json"))
    slow = told(offdrift("plan", "cluster.toml", "--tolerance", "1", "--json"))
    assert fast["recommended"]["groups_per_s"] > slow["recommended"]["groups_per_s"]
    assert slow["recommended"]["lag_mean"] == 0


def test_without_workers_in_the_file_splits_are_tried(offdrift, tmp_path):
    (tmp_path / "free.toml").write_text(CLUSTER.replace("workers = 3\n", "").replace("slots = 4", "slots = 2"))
    free = told(offdrift("plan", "free.toml", "-s", "areal", "--bounds", "2", "--json"))
    assert len({row["workers"] for row in free["sweep"]}) > 2
    fixed = told(offdrift("plan", "free.toml", "-s", "areal", "--bounds", "2", "--this-split", "--json"))
    assert {row["workers"] for row in fixed["sweep"]} == {8}


def test_one_update_has_no_error_to_state(offdrift, tmp_path):
    (tmp_path / "one.toml").write_text(CLUSTER.replace("updates = 8", "updates = 1"))
    document = told(offdrift("plan", "one.toml", "-s", "areal", "--json"))
    assert {row["error"] for row in document["schedules"]} == {None}
    assert "±" not in offdrift("plan", "one.toml", "-s", "areal").stdout


@pytest.mark.parametrize("bounds", ["-1", "1,x", "1.5", "1;2"])
def test_bounds_are_whole_numbers(offdrift, bounds):
    done = offdrift("plan", "cluster.toml", f"--bounds={bounds}")
    assert done.code == 2
    assert bounds in done.stderr
    assert "whole numbers of updates, such as 1,2,4" in " ".join(done.stderr.replace("│", " ").split())
    assert done.stdout == ""


MISTAKES = {
    "unknown schedule 'arael'; did you mean areal": ["cluster.toml", "-s", "arael"],
    "cannot read nowhere.toml": ["nowhere.toml"],
    ". holds no run.json, no metrics.jsonl and no audit.json; give": ["."],
    "--set 'speed=3': expected part.key=value, for instance trainer.group=1.5": ["cluster.toml", "--set", "speed=3"],
    "unknown key 'rollout.gpus'": ["wrong.toml"],
    "nowhere holds no drift by lag": ["cluster.toml", "--drift", "nowhere"],
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_one_message(offdrift, tmp_path, words):
    (tmp_path / "wrong.toml").write_text("[rollout]\ngpus = 3\n")
    done = offdrift("plan", *MISTAKES[words])
    assert done.code == 1
    assert words in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.fixture
def audited(offdrift, tmp_path):
    """The audit of a run whose drift grows with the lag of its tokens, 0 to 4 updates."""
    for lag in range(5):
        batch = drawn(seed=lag, steps=1, sequences=60, drift=0.05 + 0.05 * lag)
        stale = replace(batch, rollout_version=torch.zeros_like(batch.rollout_version), version=batch.version + lag)
        write_log(stale, tmp_path / "log" / f"batch-{lag}.parquet")
    assert offdrift("audit", "log", "--out", "audited").code == 0
    return tmp_path / "audited"


def test_an_audit_adds_the_drift_to_expect(offdrift, audited):
    document = told(offdrift("plan", "cluster.toml", "--drift", "audited/audit.json", "--json"))
    drift = document["drift"]
    assert drift["kl"]["lags"] == [0, 4]
    assert drift["kl"]["b"] > 0
    assert "of 5 lags in audited/audit.json" in drift["source"]
    by_name = {row["schedule"]: row for row in document["schedules"]}
    assert by_name["sync"]["kl"] == pytest.approx(drift["kl"]["a"])
    assert by_name["areal"]["kl"] > by_name["one_step_off"]["kl"] > by_name["sync"]["kl"]
    assert document["correction"]["method"]
    shown = offdrift("plan", "cluster.toml", "--drift", "audited", width=140)
    text = " ".join(shown.stdout.split())
    assert "Drift: predicted KL" in text
    assert "Correction: " in text
    assert f"offdrift schedules {document['recommended']['schedule']}" in shown.stderr


def test_a_page_on_request(offdrift, audited, tmp_path):
    words = ("plan", "cluster.toml", "-s", "areal", "-s", "sync", "--drift", "audited", "--page", "out/plan.html")
    done = offdrift(*words)
    assert done.code == 0
    assert "page: out/plan.html" in done.stdout
    page = (tmp_path / "out" / "plan.html").read_text()
    assert "Throughput against predicted drift" in page
    assert told(offdrift(*words, "--json"))["kind"] == "plan"


def test_a_run_is_a_source_and_every_number_says_where_it_is_from(offdrift, tmp_path):
    a_run(tmp_path / "runs" / "made")
    words = ("plan", "runs/made", "cluster.toml", "--set", "trainer.devices=6", "-s", "sync", "-s", "one_step_off")
    document = told(offdrift(*words, "--json"))
    origins = document["origins"]
    assert origins["rollout.steps"]["source"] == "runs/made/arms/sync, 7 batches"
    assert origins["trainer.group"] == {"source": "--set", "how": "scaled from 3 to 6 devices"}
    assert document["phases"]["trainer"]["group"] == pytest.approx(0.15)
    stated = {
        f"{part}.{key}" for part, values in document["phases"].items() if part not in ("name", "run") for key in values
    }
    unsaid = stated - origins.keys() - document["assumed"].keys()
    read = {name for name in unsaid if (part := name.split("."))[0] and document["phases"][part[0]][part[1]]}
    # The kind of lengths that are said, crashes that never come, and a drafter that is not there: one token a pass.
    assert read == {"lengths.kind", "rollout.restart", "rollout.tokens_per_pass"}
    assert document["phases"]["rollout"]["tokens_per_pass"] == 1
    for width in (80, 118):
        done = offdrift(*words, width=width)
        lines = done.stdout.splitlines()
        assert max(len(line.rstrip()) for line in lines) <= width
        text = " ".join(done.stdout.split())
        assert "…" not in text
        for part in (
            "[1] runs/made/arms/sync, 7 batches.",
            "[2] cluster.toml.",
            "[3] --set.",
            "[assumed] In no source",
        ):
            assert part in text
        assert "Drift: unknown" in text
    page = offdrift(*words, "--page", "plan.html")
    assert page.code == 0
    html = (tmp_path / "plan.html").read_text()
    assert "[1] runs/made/arms/sync, 7 batches." in html


def test_a_source_that_has_measured_drift_is_asked_for_it(offdrift, audited):
    document = told(offdrift("plan", "cluster.toml", "audited", "-s", "areal", "-s", "sync", "--json"))
    assert "of 5 lags in audited/audit.json" in document["drift"]["source"]
    assert document["correction"]["method"]
    assert document["phases"]["lengths"]["kind"] == "histogram"
    assert document["origins"]["lengths.values"]["how"] == "the mean of each bucket"


def test_without_a_file_it_shows_the_example(offdrift):
    done = offdrift("plan", "-s", "sync", "-s", "periodic", "--this-split", "--bounds", "1", "--set", "run.updates=2")
    assert done.code == 0
    assert "example: a 7B model on 16 devices" in done.stdout
    assert "next: offdrift plan cluster.toml" in done.stderr
