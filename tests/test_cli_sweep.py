"""`offdrift sweep` as a shell sees it: exit statuses, what is checked first, and that nothing is lost."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.test_cli import environment, shell

SWEEP = """
name = "s"
recipe = "base"
seeds = 1
[set]
batches = 6
[compare]
metric = "reward/mean"
"""
BASE = """
name = "base"
model = "tiny-qwen3"
rollout = { prompts = 2, samples = 2, max_tokens = 4 }
lag = { sync_every = 1 }
log = { eval_every = 6, eval_prompts = 2, checkpoint_every = 1, trackers = [], tokens = false }
warm_start = { steps = 0 }
batches = 6
[arms.none]
method = "none"
[arms.trm_max]
method = "trm_max"
"""


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "base.toml").write_text(BASE)
    (tmp_path / "s.toml").write_text(SWEEP)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("nowhere.toml", 1, "cannot read sweep nowhere.toml"),
        ("s.toml --set batchez=3", 1, "unknown key 'batchez'"),
        ("s.toml --jobs 0", 2, "--jobs"),
        ("s.toml --chart a.pdf", 2, "a chart is a .html, .svg or .png"),
        ("s.toml --dry-run --json", 0, "2 settings, 1 seed, 2 runs (2 waiting)"),
    ],
)
def test_everything_is_checked_before_anything_runs(folder, words, code, said):
    done = shell(f"sweep {words}", folder)
    assert done.returncode == code, done.stdout + done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not (folder / "runs").exists()
    if code == 0:
        assert [row["baseline"] for row in json.loads(done.stdout)["settings"]] == [None, "none"]


def wait_for(begun, process) -> None:
    for _ in range(1200):
        if begun() or process.poll() is not None:
            return
        time.sleep(0.05)


@pytest.mark.slow
def test_ctrl_c_loses_nothing_and_a_worker_that_is_killed_is_one_failed_run(folder):
    options = "sweep s.toml --jobs 2 --set batches=60 --set log.eval_every=60"
    words = [sys.executable, "-m", "offdrift", *options.split()]

    def start() -> subprocess.Popen:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(words, cwd=folder, env=environment(), **pipes)

    def lines(arm: str) -> int:
        files = folder.glob(f"runs/s/runs/{arm}/recipe/seed-0/arms/*/metrics.jsonl")
        return sum(len(file.read_text().splitlines()) for file in files)

    def workers() -> list[int]:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        return [int(p) for p in children if "spawn_main" in Path(f"/proc/{p}/cmdline").read_text()]

    process = start()
    wait_for(lambda: lines("none") >= 4, process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, out + err
    assert "--jobs 2" in err
    assert "Continue with" in err
    before = {f: f.read_text() for f in folder.glob("runs/s/runs/*/recipe/*/arms/*/metrics.jsonl")}

    before_kill = lines("none") + 1
    process = start()
    wait_for(lambda: lines("none") > before_kill and workers(), process)
    os.kill(workers()[0], signal.SIGKILL)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 1, out + err
    document = json.loads((folder / "runs/s/sweep.json").read_text())
    assert sorted(run["status"] for run in document["runs"]) == ["failed", "finished"]
    (failed,) = [run for run in document["runs"] if run["status"] == "failed"]
    assert "exit status -9" in failed["error"]
    assert "Failed: runs/" in " ".join(out.split())
    # What had been trained before Ctrl-C was not trained again: its rows are those of then, up to the checkpoint.
    for file, text in before.items():
        kept = text.splitlines()[:-2]
        assert file.read_text().splitlines()[: len(kept)] == kept

    done = shell("sweep s.toml --set batches=60 --set log.eval_every=60 --json", folder)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert {run["status"] for run in document["runs"]} == {"finished"}
    assert (folder / "runs/s/sweep.html").stat().st_size > 10_000
    assert [row["n"] for row in document["settings"]] == [1, 1]
    assert document["versions"][0]["torch"]
