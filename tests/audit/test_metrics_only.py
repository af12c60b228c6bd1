"""Audits and watches of metrics alone: what they say, what they leave open, and that both see the same."""

import json
import re
from pathlib import Path

import pytest

from offdrift.audit.conclude import read_audit
from offdrift.audit.metrics_only import MISSING, QUESTIONS, conclude_metrics
from offdrift.audit.watch import Log, sources
from offdrift.judge import Context
from offdrift.judge.metric_names import metric_names
from offdrift.records.readers.metrics import find_metrics
from tests.audit.test_follow import Clock
from tests.command import command
from tests.records.metric_files import write_events, write_lines, write_wandb

FAR = [
    {"step": i, "rollout_corr/kl": 0.3, "rollout_corr/k3_kl": 0.3, "rollout_corr/chi2_token": 0.9} for i in range(30)
]
"""Metrics of verl of policies that are far apart."""
NEAR = [{"step": i, "rollout_corr/kl": 0.001, "rollout_corr/k3_kl": 0.001, "critic/score/mean": 0.5} for i in range(30)]
TRL = [{"step": i, "sampling/sampling_logp_difference/mean": 0.01, "reward": 0.5, "kl": 9.0} for i in range(30)]
"""Metrics of TRL, whose `kl` is to the reference policy."""
TOKENS = [q.text for q in QUESTIONS if not q.metrics]


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    return lambda *words: command(monkeypatch, capsys, *words)


def concluded(tmp_path: Path, rows: list[dict], **context) -> dict:
    log = find_metrics([str(write_lines(tmp_path, rows))])
    assert log is not None
    return conclude_metrics(log, context=Context(framework=log.framework, **context))


@pytest.mark.parametrize("rows", [FAR, NEAR, TRL], ids=["far", "near", "trl"])
def test_it_says_first_that_tokens_are_missing_and_answers_nothing_that_needs_them(tmp_path, rows):
    audit = concluded(tmp_path, rows)
    assert audit["evidence"] == "metrics"
    assert audit["coverage"]["sentences"][0] == MISSING
    assert audit["verdict"]["text"].startswith(MISSING)
    asked = {q["question"]: q for q in audit["questions"]}
    how = metric_names().records[audit["source"]["framework"]]
    for question in TOKENS:
        assert not asked[question]["answered"]
        assert how in asked[question]["log"]
    assert how in audit["verdict"]["steps"][-1]
    assert audit["suggestion"]["method"] is None
    assert not audit.keys() & {"histograms", "worst", "shapes"}


def test_drift_is_found_by_the_rules_and_no_cause_is_sure(tmp_path):
    audit = concluded(tmp_path, FAR)
    assert audit["verdict"]["level"] in ("act", "stop")
    causes = [f for f in audit["findings"] if f["letter"]]
    assert causes
    for finding in causes:
        assert (finding["confidence"] == "high", finding["fact"]) == (False, False)


def test_averages_without_drift_are_no_proof_of_none(tmp_path):
    audit = concluded(tmp_path, NEAR)
    assert audit["verdict"]["level"] == "ok"
    assert "averages show no drift" in audit["verdict"]["text"]


def test_a_mean_log_ratio_bounds_the_kl_and_the_kl_to_the_reference_is_not_taken_for_it(tmp_path):
    audit = concluded(tmp_path, TRL)
    assert audit["verdict"]["level"] == "ok"
    assert "no drift" not in audit["verdict"]["text"]
    assert any("0.01 nat: the KL is at most that" in x for x in audit["coverage"]["remarks"])
    assert not {name for name in audit["overall"] if name.endswith(("/k1", "/k3"))}
    far = [{**row, "sampling/sampling_logp_difference/mean": 0.4} for row in TRL]
    assert [f["rule"] for f in concluded(tmp_path, far)["findings"]] == ["mean_gap"]


def test_long_runs_keep_their_extremes(tmp_path):
    rows = [{"step": i, "training/rollout_probs_diff_max": float(i == 2101), "actor/lr": 1.0} for i in range(2501)]
    audit = concluded(tmp_path, rows)
    assert audit["steps_per_point"] == 2
    assert len(audit["steps"]) == 1251
    assert audit["overall"]["mismatch/prob_diff_max"] == 1.0
    assert [row["step"] for row in audit["steps"] if row["mismatch/prob_diff_max"]] == [2100]


@pytest.mark.parametrize("write", [write_lines, write_wandb, write_events])
def test_the_command_audits_metrics_compares_them_and_fails_as_asked(run, tmp_path, write):
    for name, rows in {"far": FAR, "near": NEAR}.items():
        (tmp_path / name).mkdir()
        write(tmp_path / name, rows)
    done = run("audit", "far", "--out", "a", "--fail-on", "act")
    assert done.code == 3
    assert MISSING in re.sub(r"\s+", " ", done.stdout)
    assert run("audit", "near", "--out", "b", "--fail-on", "watch").code == 0
    assert read_audit(tmp_path / "b")["source"]["framework"] == "verl"
    assert MISSING in (tmp_path / "a/report.html").read_text()
    assert run("compare", "a", "b").code == 0
    assert json.loads(run("audit", "near", "--dry-run", "--json").stdout)["detected"].startswith(
        "found metrics of verl"
    )
    sliced = run("audit", "near", "--slice", "1/2", "--out", "c")
    assert (sliced.code, "--slice 1/2" in sliced.stderr) == (1, True)


@pytest.mark.parametrize("write", [write_lines, write_wandb, write_events])
def test_watch_and_audit_see_the_same(run, tmp_path, write):
    write(tmp_path, FAR)
    lines = run("watch", str(tmp_path), "--until-idle", "0.1", "--every", "0.05", "--json")
    told = [json.loads(line) for line in lines.stdout.splitlines()]
    assert MISSING in lines.stderr
    assert [x["step"] for x in told if x["kind"] == "step"] == list(range(30))
    audit = json.loads(run("audit", str(tmp_path), "--json", "--out", str(tmp_path / "out")).stdout)
    watched = {x["rule"]: x["confidence"] for x in told if x["kind"] == "finding"}
    assert {f["rule"]: f["confidence"] for f in audit["findings"]}.items() <= watched.items()
    assert run("watch", str(tmp_path), "--until-idle", "0.1", "--every", "0.05", "--fail-on", "act").code == 3


def test_metrics_that_grow_are_given_once_a_later_step_appears(tmp_path):
    clock = Clock()
    (follow,) = sources(tmp_path)
    assert isinstance(follow, Log)
    follow = Log([str(tmp_path)], clock=clock, settle=10)
    assert list(follow.poll()) == []  # nothing is there yet
    file = write_lines(tmp_path, NEAR[:2])
    (row,) = follow.poll()
    assert (row.source, row.numbers["step"], row.numbers["mismatch/k3"]) == ("metrics", 0, 0.001)
    with file.open("a") as f:
        f.write(json.dumps({"step": 1, "actor/lr": 0.5}) + '\n{"step": 2, "actor')
    assert list(follow.poll()) == []
    with file.open("a") as f:
        f.write('/lr": 0.25}\n')
    (row,) = follow.poll()
    assert (row.numbers["step"], row.numbers["mismatch/k3"], row.numbers["optim/lr"]) == (1, 0.001, 0.5)
    clock.now = 11
    assert [r.numbers["step"] for r in follow.poll()] == [2]
    assert list(follow.finish()) == []


def test_a_file_of_another_program_that_has_the_name_of_ours_is_none_of_ours(tmp_path):
    write_lines(tmp_path, [{"step": 3, "mismatch_kl/all/mean": 0.5}])
    (follow,) = sources(tmp_path)
    assert isinstance(follow, Log)
    assert list(follow.poll()) == []
    (row,) = follow.finish()
    assert row.numbers == {"step": 3, "full/k3": 0.5}


def test_a_loss_that_is_not_finite_is_told_and_shown(run, tmp_path):
    rows = [{"step": i, "actor/pg_loss": float("inf"), "actor/grad_norm": float("nan")} for i in range(9)]
    write_lines(tmp_path, rows)
    done = run("watch", str(tmp_path), "--until-idle", "0", "--every", "0.05", "--fail-on", "stop")
    assert done.code == 3
    assert "not a finite number" in done.stdout
    lines = run("watch", str(tmp_path), "--until-idle", "0", "--every", "0.05", "--json").stdout.splitlines()
    assert json.loads(lines[0]) == {**json.loads(lines[0]), "step": 0, "optim/loss": None, "optim/grad_norm": None}
    assert "broken_numbers" in [f["rule"] for f in concluded(tmp_path, rows)["findings"]]
