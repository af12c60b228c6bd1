"""The command line as a person uses it: in a subprocess, reading what it prints."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SMALL = ["--set", "warm_start.steps=0", "--set", "batches=4", "--set", "rollout.prompts=2", "--set", "rollout.samples=2", "--set", "log.eval_prompts=2", "--set", "lag.sync_every=1", "--set", "log.checkpoint_every=1"]  # fmt: skip


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "140", "TERM": "dumb", "NO_COLOR": "1", **more}


def offdrift(*words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "offdrift", *words]
    return subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=180)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["methods", "trm_mx"], 1, "MethodError: no method 'trm_mx'; did you mean trm_max"),
        (["train", "nowhere.toml"], 1, "RecipeError: cannot read recipe nowhere.toml"),
        (["train", "recipes/tiny.toml", "--set", "foo=1"], 1, "unknown key 'foo'"),
        (
            ["train", "recipes/tiny.toml", "--set", "arms.none.override.aggregate=x"],
            1,
            "arms.none: aggregate='x' is not one of",
        ),
        (["train", "recipes/tiny.toml", "--arms", "nope"], 2, "tiny has the arms none, trm_max"),
        (["train", "recipes/tiny.toml", "--set", "method=gpso"], 1, "did you mean gspo"),
        (["train", "recipes/tiny.toml", "--set", "override.gate.high=1"], 1, "override changes the values of method"),
        (["bound", "--T", "0", "--delta", "1"], 1, "horizon"),
        (["report", "nowhere"], 1, "RecordError"),
        (["train", "no[/x]where[b].toml"], 1, "cannot read recipe no[/x]where[b].toml"),
    ],
)
def test_a_mistake_is_one_message_without_a_traceback(words, code, said):
    done = offdrift(*words)
    assert done.returncode == code
    assert said in re.sub(r"\s*│?\n│?\s*", " ", done.stderr), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_train_interrupt_and_resume(tmp_path):
    run = tmp_path / "run"
    # Long enough that the second arm is still at it when the signal comes, on a busy machine too.
    longer = [w.replace("batches=4", "batches=48") for w in SMALL]
    words = ["train", "recipes/tiny.toml", *longer, "--out", str(run), "--arms", "none,trm_max"]
    command = [sys.executable, "-u", "-m", "offdrift", *words]
    with subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as started:  # fmt: skip
        assert started.stdout is not None
        seen = []
        for line in started.stdout:
            seen.append(line)
            if "trm_max  L = -A" in line:  # the second arm begins
                started.send_signal(signal.SIGINT)
    output = "".join(seen)
    assert started.returncode == 130, output
    printed = output.replace("\n", "")
    assert f"--arms none,trm_max --out {run} --resume" in printed, "the way back repeats the flags"
    assert "--set batches=48" in printed
    assert "Traceback" not in output
    refused = offdrift(*words)
    assert refused.returncode == 2
    assert "already holds a run" in refused.stderr
    done = offdrift(*words, "--resume")
    assert done.returncode == 0, done.stderr
    assert "already finished" in done.stderr
    assert str(run / "report.html") in done.stdout.replace("\n", "")
    table = json.loads((run / "run.json").read_text())["table"]
    assert [row["arm"] for row in table] == ["none", "trm_max"]
    assert (run / "report.html").stat().st_size > 1_000_000
    again = offdrift("report", str(run))
    assert again.returncode == 0
    assert "Held-out reward" in again.stdout


@pytest.mark.parametrize(("own", "policy"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")])
def test_threads_that_wait_leave_the_core_to_others_unless_the_user_says_otherwise(own, policy):
    """OpenMP itself prints what it read when torch is imported after the command line began."""
    code = "import sys; sys.argv[1:] = ['--help']\nfrom offdrift import cli\ntry: cli.main()\nexcept SystemExit: import torch"
    kept = {k: v for k, v in environment(OMP_DISPLAY_ENV="TRUE").items() if k != "OMP_WAIT_POLICY"}
    done = subprocess.run([sys.executable, "-c", code], env=kept | own, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert f"OMP_WAIT_POLICY = '{policy}'" in done.stderr
