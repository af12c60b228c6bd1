"""`offdrift sweep` as a shell sees it: exit statuses, what is checked first, and that nothing is lost."""

import json
import shutil
import signal
import time
from pathlib import Path

import psutil
import pytest
from tests.command import command
from tests.forked import Forked, forked

from tests_lab.train.loop.test_kills import IMPATIENT

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
reward = "digits.py:digits"
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
    shutil.copy(Path(__file__).parents[2] / "recipes/digits.py", tmp_path)
    (tmp_path / "s.toml").write_text(SWEEP)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("nowhere.toml", 1, "cannot read sweep nowhere.toml"),
        ("s.toml --set batchez=3", 1, "unknown key 'batchez'"),
        ("s.toml --jobs 0", 2, "--jobs"),
        ("s.toml --set task=summs --dry-run", 1, "task = 'summs' is not known"),
        ("s.toml --chart a.pdf", 2, "a chart is a .html, .svg or .png"),
        ("s.toml --dry-run --json", 0, "2 settings, 1 seed, 2 runs (2 waiting)"),
    ],
)
def test_everything_is_checked_before_anything_runs(folder, monkeypatch, capsys, words, code, said):
    monkeypatch.chdir(folder)
    done = command(monkeypatch, capsys, "sweep", *words.split())
    assert done.code == code, done.stdout + done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not (folder / "runs").exists()
    if code == 0:
        assert [row["baseline"] for row in json.loads(done.stdout)["settings"]] == [None, "none"]


def wait_for(begun, process: Forked) -> None:
    for _ in range(6000):
        if begun() or process.poll() is not None:
            return
        time.sleep(0.05)


def command_line(process: psutil.Process) -> str:
    """Empty of a process that has ended since it was listed."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # of a zombie too
        return ""


@pytest.mark.slow
def test_ctrl_c_loses_nothing_and_a_worker_that_is_killed_is_one_failed_run(folder):
    options = "sweep s.toml --jobs 2 --set batches=24 --set log.eval_every=24"

    def lines(arm: str) -> int:
        files = folder.glob(f"runs/s/runs/{arm}/recipe/seed-0/arms/*/metrics.jsonl")
        return sum(len(file.read_text().splitlines()) for file in files)

    def workers() -> list[psutil.Process]:
        return [p for p in psutil.Process(process.pid).children() if "spawn_main" in command_line(p)]

    process = forked(options, folder)
    wait_for(lambda: lines("none") >= 4, process)
    process.send_signal(signal.SIGINT)
    done = process.wait(60)
    assert done.returncode == 130, done
    assert "--jobs 2" in done.stderr
    assert "Continue with" in done.stderr
    before = {f: f.read_text() for f in folder.glob("runs/s/runs/*/recipe/*/arms/*/metrics.jsonl")}

    before_kill = lines("none") + 1
    process = forked(options, folder)
    wait_for(lambda: lines("none") > before_kill and workers(), process)
    workers()[0].kill()
    done = process.wait(240)
    assert done.returncode == 1, done
    document = json.loads((folder / "runs/s/sweep.json").read_text())
    assert sorted(run["status"] for run in document["runs"]) == ["failed", "finished"]
    (failed,) = [run for run in document["runs"] if run["status"] == "failed"]
    assert "exit status -9" in failed["error"]
    assert "Failed: runs/" in " ".join(done.stdout.split())
    # What had been trained before Ctrl-C was not trained again: its rows are those of then, up to the checkpoint.
    for file, text in before.items():
        kept = text.splitlines()[:-2]
        assert file.read_text().splitlines()[: len(kept)] == kept

    done = forked("sweep s.toml --set batches=24 --set log.eval_every=24 --json", folder).wait(240)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert {run["status"] for run in document["runs"]} == {"finished"}
    assert (folder / "runs/s/sweep.html").stat().st_size > 10_000
    assert [row["n"] for row in document["settings"]] == [1, 1]
    assert document["versions"][0]["torch"]


def numbers(folder: Path) -> dict[str, float]:
    return {run["folder"]: run["value"] for run in json.loads((folder / "sweep.json").read_text())["runs"]}


def left(processes: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    return [p for p in psutil.wait_procs(processes, timeout=seconds)[1] if command_line(p)]


@pytest.mark.slow
def test_on_ray_an_interrupt_a_kill_and_a_lost_worker_lose_nothing(folder):
    pytest.importorskip("ray")
    changes = "--set batches=24 --set log.eval_every=24"

    def start() -> Forked:
        return forked(f"sweep s.toml --ray local {changes}", folder, **IMPATIENT)

    def children() -> list[psutil.Process]:
        return psutil.Process(process.pid).children(recursive=True)

    def lines() -> int:
        files = folder.glob("runs/s/runs/*/recipe/seed-0/arms/*/metrics.jsonl")
        return sum(len(file.read_text().splitlines()) for file in files)

    def at_work() -> list[psutil.Process]:
        return [p for p in children() if "ray::run_remotely" in command_line(p)]

    process = start()
    wait_for(lambda: lines() >= 4, process)
    others = children()
    process.send_signal(signal.SIGINT)
    done = process.wait(120)
    assert done.returncode == 130, done
    assert f"offdrift sweep s.toml {changes} --ray local" in done.stderr
    assert left(others, 30) == []
    so_far = forked("report runs/s --json", folder).wait(60)
    assert so_far.returncode == 0, so_far.stderr
    assert {run["status"] for run in json.loads(so_far.stdout)["runs"]} <= {"begun", "waiting"}
    before = {f: f.read_text() for f in folder.glob("runs/s/runs/*/recipe/*/arms/*/metrics.jsonl")}

    reached = lines()
    process = start()
    wait_for(lambda: lines() > reached + 2 and at_work(), process)
    others, workers = children(), at_work()
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    assert workers
    assert left(workers, 30) == []  # a run that went on would write beside the next one

    process = start()
    wait_for(at_work, process)  # at once: a worker that is still starting cannot have finished its run
    at_work()[0].kill()
    done = process.wait(240)
    assert done.returncode == 1, done
    runs = json.loads((folder / "runs/s/sweep.json").read_text())["runs"]
    assert sorted(run["status"] for run in runs) == ["failed", "finished"]
    assert "its process ended with WorkerCrashedError" in next(run["error"] for run in runs if run["error"])
    for file, text in before.items():
        kept = text.splitlines()[:-2]
        assert file.read_text().splitlines()[: len(kept)] == kept

    assert forked(f"sweep s.toml {changes}", folder).wait(240).returncode == 0
    assert forked(f"sweep s.toml {changes} --out whole", folder).wait(240).returncode == 0
    assert numbers(folder / "runs/s") == numbers(folder / "whole")
    assert left(others, 100) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--ray 127.0.0.1:1", "no Ray cluster answers at --ray 127.0.0.1:1"),
        ("--ray local --gpus 1000", "no node of the Ray cluster has room for a run of --cpus 1 --gpus 1000"),
    ],
)
@pytest.mark.slow
def test_a_cluster_that_is_not_there_or_too_small_is_named(folder, words, said):
    pytest.importorskip("ray")
    done = forked(f"sweep s.toml {words}", folder).wait(240)
    assert done.returncode == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr


SWALLOWS = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGTERM)
    for _ in range(1000):
        pass
except BaseException:
    pass
def score(completion):
    return 0.0
"""


@pytest.mark.slow
@pytest.mark.parametrize("words", ["train base.toml --out runs/s", "sweep s.toml --set batches=6"])
def test_an_interrupt_that_a_library_swallows_ends_the_command_all_the_same(folder, words):
    (folder / "score.py").write_text(SWALLOWS)
    done = forked(f"{words} --set reward=score.py:score", folder).wait(240)
    assert done.returncode == 130, done.stderr
    assert "Continue with" in done.stderr
