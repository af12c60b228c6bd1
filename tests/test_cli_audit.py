"""`offdrift audit`, `watch` and `compare`, as a person runs them."""

import dataclasses
import json
import math
import os
from pathlib import Path

import pytest
import torch

from offdrift.audit.charts import over_time
from offdrift.audit.entry import OF_METRICS
from offdrift.audit.method_table import tried
from offdrift.cli import audit as audit_command
from offdrift.records.batch import Logged
from offdrift.records.recorder import write_log
from offdrift.show.headline import headlines
from tests.audit.logs import asynchronous
from tests.audit.logs import drawn as logged
from tests.audit.test_proof import log as proof_log
from tests.command import command


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)

    def go(*words: str, width: int = 120):
        return command(monkeypatch, capsys, *words, width=width)

    return go


@pytest.fixture
def log(tmp_path: Path) -> Path:
    for i in range(2):
        write_log(logged(seed=i, steps=4, sequences=40), tmp_path / "log" / f"batch-{i}.parquet")
    return tmp_path / "log"


def test_an_audit_says_what_it_detected_and_leaves_numbers_and_a_page(run, log, tmp_path):
    done = run("audit", str(log), "--out", "found")
    assert done.code == 0
    assert "2 files" in done.stderr
    told = json.loads((tmp_path / "found" / "audit.json").read_text())
    assert told["counts"]["sequences"] == 80
    page = (tmp_path / "found" / "report.html").read_text()
    assert page.startswith("<!doctype html>") or page.startswith("<!DOCTYPE html>")
    assert "report.html" in done.stdout.replace("\n", "")
    again = run("audit", str(log), "--out", "found", "--json")
    assert json.loads(again.stdout) == json.loads((tmp_path / "found" / "audit.json").read_text())


OWN = """
import offdrift as od
from pathlib import Path
Path("ran").touch()

@od.weight(on="mismatch")
def capped_by_a_file(ratio, *, most: float = 2.0):
    return ratio.clamp(max=most)

def mine(most: float = 2.0):
    return od.Method(objective=od.Clipped(), correction=od.Correction() & capped_by_a_file(most=most))

def broken():
    @od.weight(on="mismatch")
    def raises_in_a_file(ratio):
        return ratio[:, None].expand(-1, 2).inverse()
    return od.Method(objective=od.Clipped(), correction=od.Correction() & raises_in_a_file())

def writes():
    @od.statistic
    def written_in_place(log_ratio):
        return log_ratio.add_(7)
    gate = od.Gate(statistic="written_in_place", on="mismatch", unit="token", high=6.0)
    return od.Method(objective=od.Clipped(), correction=od.Correction() & gate)
"""


def test_a_method_of_ones_own_that_writes_into_its_arguments_changes_no_other_row(run, log, tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    alone = json.loads(run("audit", str(log), "--out", "alone", "--json").stdout)["methods"]
    words = ("audit", str(log), "--out", "found", "--json", "--also", "mine.py:writes")
    rows = {row["name"]: row for row in json.loads(run(*words).stdout)["methods"]}
    assert rows.pop("mine.py:writes")["kept_tokens"] < 0.5
    assert rows == {row["name"]: row for row in alone}


@pytest.mark.parametrize("workers", ["1", "2"])
def test_methods_of_ones_own_are_in_the_table(run, log, tmp_path, workers):
    (tmp_path / "mine.py").write_text(OWN)
    words = ("audit", str(log), "--out", "found", "--workers", workers, "--json")
    done = run(*words, "--also", "mine.py:mine", "--also", "mine.py:broken")
    assert done.code == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout)["methods"]}
    numbers = ("kept_tokens", "weight_mean", "weight_max", "limited_frac", "ess_frac", "acceptance_by_length")
    ours, library = rows["mine.py:mine"], rows["decoupled_token_is"]
    assert [ours[n] for n in numbers] == [library[n] for n in numbers]
    assert 1 < ours["weight_max"] < 2
    assert ours["code"]["file"] == str(tmp_path / "mine.py")
    assert ours["family"] == "your own code"
    assert "mine.py, line 16: RuntimeError" in rows["mine.py:broken"]["why_not"]
    assert "mine.py:mine" in (tmp_path / "found" / "report.html").read_text()
    assert "mine.py:mine" in run(*words[:-1], "--also", "mine.py:mine").stdout
    # Stored parts are counted again if the file changes, and where it is not asked for nobody runs it.
    assert len(json.loads(run(*words).stdout)["methods"]) == len(rows) - 2
    (tmp_path / "ran").unlink()
    compared = run("compare", "found", "found")
    assert compared.code == 0
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--also", "gspo"], "every method of the table is tried anyway"),
        (["--also", "grpo2"], "no method 'grpo2'; did you mean grpo"),
        (["--also", "grpo2"], "a method of yours is named as in --also mine.py:mine"),
        (["--also", "gone.py:mine"], "gone.py:mine: there is no file"),
        (["--also", "mine.py:mine", "--also", "a/mine.py:mine"], "names of two files look alike"),
        (["--method", "gone.py:mine"], "gone.py:mine: there is no file"),
    ],
)
def test_a_method_that_cannot_be_tried_is_refused(run, log, tmp_path, words, message):
    for folder in (tmp_path, tmp_path / "a"):
        folder.mkdir(exist_ok=True)
        (folder / "mine.py").write_text("import offdrift\nmine = offdrift.method('gspo')")
    done = run("audit", str(log), *words)
    assert done.code == 1
    assert message in " ".join(done.stderr.split())


PLANTED = {"log-probs off": {"off": 0.05}, "weights apart": {"apart": 0.1}}


@pytest.mark.parametrize(("plant", "rule"), [(None, None), ("log-probs off", "worker_record"), ("weights apart", "worker_apart")])  # fmt: skip
def test_a_broken_worker_of_an_asynchronous_run_stands_out(run, tmp_path, plant, rule):
    for seed in range(2):
        write_log(asynchronous(seed, **PLANTED.get(plant, {})), tmp_path / "log" / f"batch-{seed}.parquet")
    done = run("audit", "log", "--out", "found")
    told = json.loads((tmp_path / "found" / "audit.json").read_text())
    workers = {row["label"]: row for row in told["facets"]["worker"]}
    assert list(workers) == [f"worker-{i}" for i in range(8)]
    assert sum(row["tokens"] for row in workers.values()) == told["counts"]["tokens"]
    assert [f["rule"] for f in told["findings"]] == ([rule] if rule else [])
    page = (tmp_path / "found" / "report.html").read_text()
    assert "by rollout worker" in page
    assert "Tokens by policy lag" in page
    if rule:
        assert {e["metric"].rpartition(" of ")[2] for e in told["findings"][0]["evidence"]} == {"worker-7"}
        assert "of worker-7" in done.stdout
        assert max(workers.values(), key=lambda row: row["worst_frac"])["label"] == "worker-7"
        assert workers["worker-7"]["worst_frac"] > 0.8
    # Mixed versions are shown, and why nothing is certified.
    assert 0.2 < told["overall"]["version_lag/mixed_frac"] < 0.7
    assert len(told["facets"]["lag"]) == 3
    assert told["certificate"]["certified"] is False


def test_a_batch_that_took_what_finished_first_is_no_sample_and_one_of_several_versions_no_one_policy(run, tmp_path):
    def certificate(log: Logged) -> str:
        exact = {f"{d}_rollout_old": torch.rand(log.num_tokens) / 1e3 for d in ("kl", "tv")}
        write_log(dataclasses.replace(log, divergences=exact), tmp_path / "log.parquet")
        return json.loads(run("audit", "log.parquet", "--json", "--out", "o").stdout)["certificate"]["why_not"]

    log = asynchronous()
    assert "takes first what has finished first (selected)" in certificate(log)
    assert "no one rollout policy" in certificate(dataclasses.replace(log, selected=None))
    drawn_by = log.version.repeat_interleave(log.cu_seqlens.diff())
    assert certificate(dataclasses.replace(log, selected=None, rollout_version=drawn_by)) is None


def test_watch_finds_the_worker_that_breaks_by_its_last_steps(run, tmp_path):
    """From step 11 on the log-probs of one of four workers are off."""
    for i in range(30):
        log = asynchronous(i, sequences=64, workers=4, off=0.05 if i >= 10 else 0.0)
        step = torch.full((64,), i + 1)
        write_log(dataclasses.replace(log, step=step, version=step + 9), tmp_path / "log" / f"log-{i:02d}.parquet")
    done = run("watch", "log", "--every", "0.05", "--until-idle", "0.2", "--json")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    found = [line for line in lines if line["kind"] == "finding" and line["rule"].startswith("worker")]
    assert {e["metric"].rpartition(" of ")[2] for f in found for e in f["evidence"]} == {"worker-3"}
    assert all(10 < f["step"] <= 20 for f in found)


def test_columns_of_any_name_are_mapped(run, tmp_path):
    rows = [{"lp": [-1.0, -2.0], "t": {"lp": [-1.5, -2.0]}, "score": i} for i in range(4)]
    Path("log.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    done = run("audit", "log.jsonl", "--columns", "logp_rollout=lp,logp_old=t.lp,reward=score", "--json", "--out", "o")
    told = json.loads(done.stdout)
    assert told["overall"]["mismatch/k1"] == pytest.approx(0.25)
    assert told["overall"]["reward/mean"] == 1.5


def test_fail_on_makes_a_drifting_run_fail_and_a_clean_one_pass(run, tmp_path):
    write_log(logged(drift=0.0, sequences=60), tmp_path / "clean.parquet")
    write_log(logged(drift=2.0, sequences=60), tmp_path / "bad.parquet")
    assert run("audit", "clean.parquet", "--fail-on", "act").code == 0
    assert run("audit", "bad.parquet", "--fail-on", "act").code == 3


@pytest.fixture
def arms(tmp_path):
    """A run of two arms, of which `bad` drifts."""
    for arm, drift in (("bad", 2.0), ("clean", 1e-4)):
        write_log(logged(drift=drift, sequences=60), tmp_path / "run" / "arms" / arm / "log" / "batch-0.parquet")
    (tmp_path / "run" / "run.json").write_text(json.dumps({"recipe": {"arms": {"bad": {}, "clean": {}}}}))
    return tmp_path / "run"


def test_a_run_of_several_arms_is_audited_and_compared(run, arms, tmp_path):
    done = run("audit", "run")
    assert done.code == 0
    stored = json.loads((tmp_path / "audits" / "run" / "arms.json").read_text())
    alone = json.loads((tmp_path / "audits" / "run" / "clean" / "audit.json").read_text())
    assert [*stored["arms"]] == ["bad", "clean"]
    assert stored["arms"]["clean"]["overall"] == alone["overall"]
    assert (stored["verdict"]["arm"], stored["verdict"]["level"]) == ("bad", stored["arms"]["bad"]["verdict"]["level"])
    assert stored["comparison"]["kl"] == "mismatch/k3"
    kl = {arm: row["metrics"]["mismatch/k3"] for arm, row in stored["comparison"]["arms"].items()}
    assert kl == {arm: stored["arms"][arm]["overall"]["mismatch/k3"] for arm in ("bad", "clean")}
    assert kl["bad"] > 3 * kl["clean"]
    lines = [line.split() for line in done.stdout.splitlines()]
    of_arms = [line for line in lines if line[:1] in (["bad"], ["clean"])]
    assert [line[:3] for line in of_arms[:2]] == [["bad", "■", "Stop"], ["clean", "✓", "OK"]]
    causes, none = (" ".join(line[1:]) for line in of_arms[2:])
    assert causes.startswith("a cause that")
    assert none == f"–; suggested: {stored['arms']['clean']['suggestion']['method']}"
    assert "Details:audits/run/bad/report.html#finding-" in "".join(done.stdout.split())
    assert (tmp_path / "audits" / "run" / "arms.html").is_file()
    assert (tmp_path / "audits" / "run" / "bad" / "report.html").is_file()
    (tmp_path / "audits" / "run" / "arms.html").unlink()
    again = run("report", "audits/run", "--json")
    assert json.loads(again.stdout) == stored
    assert (tmp_path / "audits" / "run" / "arms.html").is_file()


def test_a_run_of_several_arms_is_shown_by_other_rules_and_keeps_its_record(run, arms, tmp_path):
    run("audit", "run")
    stored = (tmp_path / "audits" / "run" / "arms.json").read_bytes()
    (tmp_path / "calm.toml").write_text("[thresholds]\nkl_large = 1e9\n")
    shown = json.loads(run("report", "audits/run", "--rules", "calm.toml", "--json").stdout)
    assert "calm.toml" in shown["arms"]["bad"]["judged_by"]
    assert shown["arms"]["bad"]["limits"]["kl_large"] == 1e9
    assert (tmp_path / "audits" / "run" / "arms.json").read_bytes() == stored


def test_the_worst_arm_decides_the_exit_status(run, arms):
    assert run("audit", "run", "--fail-on", "act").code == 3
    assert run("audit", "run/arms/clean", "--fail-on", "act").code == 0
    told = run("audit", "run", "--fail-on", "act", "--json")
    assert told.code == 3
    assert json.loads(told.stdout)["kind"] == "arms"


def test_a_run_of_several_arms_stands_alone(run, arms, tmp_path):
    write_log(logged(), tmp_path / "other.parquet")
    done = run("audit", "run", "other.parquet")
    assert done.code == 1
    assert "audit it alone" in done.stderr.replace("\n", " ")
    sliced = run("audit", "run", "--slice", "1/2")
    assert sliced.code == 1
    assert "slice the log of one" in sliced.stderr.replace("\n", " ")
    planned = run("audit", "run", "--dry-run", "--json")
    assert json.loads(planned.stdout)["files"] == 2
    for log in arms.glob("arms/*/log/*"):
        log.unlink()
        log.parent.rmdir()
    empty = run("audit", "run")
    assert empty.code == 1
    assert "no arm logged its tokens" in empty.stderr.replace("\n", " ")


def test_audits_of_the_arms_of_a_run_share_a_probability_of_error(run, tmp_path):
    """An audit certifies one policy; whoever audits every arm looks as often, and the run says how many there are."""
    for arm in ("none", "tis"):
        write_log(evidence(), tmp_path / "run" / "arms" / arm / "log" / "batch-0.parquet")
    (tmp_path / "run" / "run.json").write_text(json.dumps({"recipe": {"arms": {"none": {}, "tis": {}}}}))

    def told(*words: str) -> dict:
        done = run("audit", "run/arms/none", *words, "--json")
        assert done.code == 0, done.stderr
        return json.loads(done.stdout)["certificate"]

    assert (told()["of"], told()["alpha"], told()["alpha_total"]) == (2, 0.025, 0.05)
    assert "whichever of 2 policies is shown" in told()["verdict"]
    assert (told("--of", "1")["of"], told("--of", "1")["alpha"]) == (1, 0.05)
    third = told("--of", "5", "--look", "3")
    assert (third["of"], third["look"]) == (5, 3)
    assert third["alpha"] == pytest.approx(0.05 * 6 / math.pi**2 / 9 / 5)
    assert run("audit", "run/arms/none", "--of", "0").code == 2


def evidence():
    """A log that certifies: exact divergences, rewards, prompts, versions."""
    whole = proof_log()
    return dataclasses.replace(whole, prompts=tuple(f"prompt {i // 3}" for i in range(whole.num_sequences)))


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("audit", "absent.jsonl"), "absent.jsonl"),
        (("audit", "x", "--columns", "logp_rollout"), "logp_rollout"),
        (("audit", "x", "--fail-on", "never"), "never"),
        (("watch", "x", "--fail-on", "never"), "never"),
        (("watch", "absent"), "absent"),
        (("report", "absent.jsonl"), "absent.jsonl"),
        (("compare", "x", "y"), "offdrift audit"),
    ],
)
def test_what_cannot_be_is_named(run, words, named):
    done = run(*words)
    assert done.code in (1, 2)
    assert named in done.stderr.replace("\n", " ")


def test_two_audits_side_by_side(run, log, tmp_path):
    write_log(logged(drift=1.0, sequences=60), tmp_path / "other.parquet")
    run("audit", str(log), "--out", "a")
    run("audit", "other.parquet", "--out", "b")
    done = run("compare", "a", "b", "--out", "both.html")
    assert done.code == 0
    assert (tmp_path / "both.html").stat().st_size > 10_000
    told = json.loads(run("compare", "a", "b", "--json").stdout)
    assert told


def test_watch_follows_a_log_and_ends_when_it_is_idle(run, tmp_path):
    write_log(logged(drift=2.0, sequences=120, steps=6), tmp_path / "log" / "batch-0.parquet")
    done = run("watch", "log", "--until-idle", "0.3", "--every", "0.05", "--json")
    lines = [json.loads(x) for x in done.stdout.splitlines()]
    assert [x["step"] for x in lines if x["kind"] == "step"] == [0, 1, 2, 3, 4, 5]
    assert any(x["kind"] == "finding" for x in lines)
    assert run("watch", "log", "--until-idle", "0.3", "--every", "0.05", "--fail-on", "act").code == 3


def test_a_watch_without_an_end_says_how_it_ends_and_its_findings_have_a_whole_title(run, tmp_path):
    write_log(logged(drift=2.0, sequences=120, steps=6), tmp_path / "log" / "batch-0.parquet")
    endless = run("watch", "log", "--every", "0.05", "--fail-on", "act")
    assert endless.code == 3
    assert "--until-idle 60 ends it" in endless.stderr
    assert "log, step 2\n" in endless.stdout.replace(" \n", "\n")
    assert "--until-idle" not in run("watch", "log", "--until-idle", "0.2", "--every", "0.05").stderr


def test_watch_and_audit_write_a_fix_for_the_framework_of_the_log(run, tmp_path):
    assert run("demo", "log").code == 0
    watched = run("watch", "log", "--until-idle", "0.3", "--every", "0.05", width=200).stdout
    audited = run("audit", "log", width=200).stdout
    command = "offdrift check --rollout openai:http://HOST:PORT/v1"
    assert command in audited
    assert command in watched
    assert "sync_every" not in watched


def test_an_audit_of_an_arm_says_where_its_other_findings_are(run, log, tmp_path):
    assert OF_METRICS not in run("audit", str(log), "--out", "before", width=400).stdout
    (log.parent / "metrics.jsonl").write_text('{"update": 1}\n')
    assert OF_METRICS in run("audit", str(log), "--out", "after", width=400).stdout


def test_what_one_file_may_take_is_an_option(run, tmp_path):
    row = {"logp_rollout": [-1.0] * 4, "logp": [-1.5] * 4}
    lines = [{**row, "completion": "x" * n} for n in (3, 3 << 19)]
    Path("log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    few = json.loads(run("audit", "log.jsonl", "--max-file-mib", "64", "--json").stdout)
    assert few["counts"]["sequences"] == 1
    assert "more than 1 MiB" in few["bad_rows"][0]["reason"]
    both = json.loads(run("audit", "log.jsonl", "--json").stdout)
    assert (both["counts"]["sequences"], both["bad_rows"]) == (2, [])
    assert "--max-file-mib" in run("audit", "--help").stdout


def test_the_help_names_every_framework_whose_logs_are_read():
    from offdrift.records.readers.formats.table import SOURCES

    said = audit_command.audit.__doc__.lower()
    frameworks = {s.framework for s in SOURCES} - {"plain", "offdrift"}
    assert [name for name in frameworks if name not in said] == []


def test_a_field_is_left_out_by_mapping_it_to_nothing(run, tmp_path):
    rows = [{"logp_rollout": [-1.0, -2.0], "logp": [-1.5, -2.0], "entropy": [0.5, 0.5] if i else 0.5} for i in range(4)]
    Path("log.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    done = run("audit", "log.jsonl", "--out", "a", "--json")
    bad = json.loads(done.stdout)["bad_rows"]
    assert [b["row"] for b in bad] == [1]
    assert "--columns entropy= leaves the column out" in bad[0]["reason"]
    done = run("audit", "log.jsonl", "--out", "b", "--json", "--columns", "entropy=")
    told = json.loads(done.stdout)
    assert told["bad_rows"] == []
    assert "entropy" not in told["has"]
    done = run("audit", "log.jsonl", "--columns", "entropy=logp,reward=")
    assert done.code == 0


def test_a_column_of_single_numbers_is_no_list_per_token(run, tmp_path):
    rows = [{"logp_rollout": [-1.0], "logp": [-1.5], "extra": 0.5}] * 4
    Path("log.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    done = run("audit", "log.jsonl", "--columns", "entropy=extra")
    assert done.code == 1
    assert "one value per row" in " ".join(done.stderr.split())


def test_a_refused_payload_says_what_to_write_instead(run, tmp_path):
    class Sneaky:
        def __reduce__(self):
            return os.getpid, ()

    torch.save({"samples": [Sneaky()]}, "a.pt")
    done = run("audit", "a.pt")
    assert done.code == 1
    said = " ".join(done.stderr.split())
    assert "Copy or write the file again" not in said
    assert "plain schema" in said


def test_a_rules_file_moves_headline_findings_suggestion_status_and_json_together(run, tmp_path):
    """The same drifting log under the built-in rules, and under rules that allow any drift."""
    write_log(logged(drift=2.0, sequences=60), tmp_path / "log.parquet")
    loose = {
        "kl_clean": 100, "kl_large": 200, "kl_visible": 100, "kl_weights": 100, "chi2_moderate": 1e9, "chi2_heavy": 1e9,
        "chi2_toxic": 1e9, "chi2_last": 1e9, "chi2_seq_exploded": 1e300, "ess_half": 0, "ess_wasted": 0, "ess_left": 0,
        "pearson_clean": -1, "pearson_broken": -1, "ppl_near": 1e9, "ppl_far": 1e9, "prob_diff_visible": 2,
        "prob_diff_large": 2, "rs_soft": 1, "rs_hard": 1, "icepop_soft": 2, "icepop_hard": 2, "tail_heavy": 2,
        "clip_saturated": 2, "ratio_mean_high": 1e9, "ratio_mean_low": -1, "ratio_mean_z": 1e9, "ratio_mean_z_low": -1e9,
        "length_kept": 0, "acceptance_low": 0, "growth_with_lag": 1e9, "growth_at_lag_0": 1e9, "k1_negative": -1e9,
        "one_sided": 2, "kl_update": 1e9, "kl_flips": 100,
    }  # fmt: skip
    rules = "[thresholds]\n" + "".join(f"{name} = {value}\n" for name, value in loose.items())
    Path("loose.toml").write_text(rules)
    strict = run("audit", "log.parquet", "--fail-on", "watch", "--out", "a", "--json")
    tolerant = run("audit", "log.parquet", "--fail-on", "watch", "--out", "b", "--json", "--rules", "loose.toml")
    a, b = json.loads(strict.stdout), json.loads(tolerant.stdout)
    assert (strict.code, tolerant.code) == (3, 0)
    assert (a["verdict"]["level"] != "ok", b["verdict"]["level"]) == (True, "ok")
    assert {f["severity"] for f in b["findings"]} <= {"info"}
    assert {"act", "stop"} & {f["severity"] for f in a["findings"]}
    assert {h.level for h in headlines(b)} <= {"", "ok"}
    assert "act" in {h.level for h in headlines(a)}
    assert a["overall"] == b["overall"]
    assert (a["suggestion"]["rung"] != "none", b["suggestion"]["rung"]) == (True, "none")
    assert b["limits"]["kl_large"] == 200
    lines = [next(c for c in over_time(x) if c.id == "kl").lines for x in (a, b)]
    assert [value for ((value, _),) in lines] == [0.05, 200]
    flagged = [{key for m in tried(x) for key in m.values if m.flagged(key)} for x in (a, b)]
    assert flagged == [{"ess_frac", "kept_length_ratio"}, set()]


def test_fixes_are_written_in_the_configuration_that_is_asked_for(run, tmp_path):
    for seed in range(2):
        write_log(asynchronous(seed, **PLANTED["log-probs off"]), tmp_path / "log" / f"batch-{seed}.parquet")
    run("audit", "log", "--out", "own", "--quiet")
    done = run("audit", "log", "--out", "slime", "--framework", "slime", "--quiet")
    told = [json.loads((tmp_path / name / "audit.json").read_text()) for name in ("own", "slime")]
    assert [audit["source"]["framework"] for audit in told] == ["offdrift", "slime"]
    snippets = [f["snippets"] for f in told[1]["findings"]]
    assert any("slime" in s for s in snippets)
    assert "─ slime ─" in done.stdout
