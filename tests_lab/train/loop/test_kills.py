"""Rollout workers and trainers killed with SIGKILL, and a run in a cluster that is there before it and after it."""

import importlib
import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from tests.forked import Forked

from offdrift.records import store
from offdrift_lab.train.loop.run_folder import ArmFolder

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
RECIPE = """
name = "killed"
model = "tiny-qwen3"
batches = 12
[rollout]
dtype = "float32"
prompts = 4
samples = 4
max_tokens = 12
[pipeline]
schedule = "verl_partial"
workers = 2
cpus = {cpus}
slots = 8
steps = 2
{more}
[optim]
lr = 1e-3
[log]
eval_every = 1000
eval_prompts = 4
checkpoint_every = 3
[arms.arm]
method = "token_tis"
"""


@pytest.fixture(scope="module")
def kills():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield importlib.import_module("kill_workers")


@pytest.mark.slow
def test_killed_workers_lose_nothing(kills, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    (run,) = kills.stress(["areal"], kills=3, trainer_kills=0, seed=1, updates=24)
    assert run["worker kills"] == 3
    assert run["lost workers"] >= 1  # one that is killed behind the last batch is not missed
    assert run["groups"] == 24 * kills.PROMPTS


# -- what the script would notice


def lines_of(updates=2):
    """A journal without a fault, by a schedule that takes groups in their order."""
    lines = []
    for number in range(4 * updates):
        keys = [[number, place, 0] for place in range(4)]
        lines += [{"finished": key, "tokens": [number, key[1]]} for key in keys]
        lines.append({"taken": number, "keys": keys, "tokens": [[number, place] for place in range(4)]})
        if number == 3:
            lines.append({"checkpoint": 1})
    return lines


def faulty(change):
    lines = lines_of()
    change(lines)
    return lines


FAULTS = {
    "trained on twice": lambda x: x.append(x[4]),
    "7 groups were trained on": lambda x: x.remove(next(line for line in x if line.get("taken") == 7)),
    "was left out": lambda x: x[-1].update(taken=8),
    "had finished and was drawn again": lambda x: x.insert(9, x[0]),
    "had finished and were lost": lambda x: x.insert(9, {"finished": [9, 0, 0], "tokens": [1]}),
    "is not what had finished": lambda x: x[0].update(tokens=[5]),
    "is not whole": lambda x: (x[4]["keys"].pop(), x[4]["tokens"].pop()),
    "has other groups": lambda x: (x[4].update(taken=7), x[-1].update(taken=0)),
}


def test_a_journal_without_a_fault_passes(kills):
    found = kills.check(lines_of(), updates=2, schedule_name="sync")
    assert (found["groups"], found["responses"]) == (8, 32)


@pytest.mark.parametrize("words", FAULTS)
def test_a_fault_in_a_journal_is_told(kills, words):
    with pytest.raises(AssertionError, match=words):
        kills.check(faulty(FAULTS[words]), updates=2, schedule_name="sync")


def test_what_a_killed_trainer_did_after_its_checkpoint_does_not_count(kills):
    lines = lines_of()
    at = lines.index({"checkpoint": 1}) + 1
    again = [{"begin": 1}, *lines[at:]]
    assert kills.effective([[{"begin": 0}, *lines], again]) == lines
    assert kills.effective([[{"begin": 0}, *lines[:3]], [{"begin": 0}, *lines]]) == lines
    with pytest.raises(AssertionError, match="which none has taken"):
        kills.effective([[{"begin": 0}, *lines], [{"begin": 2}]])


# -- trainers


IMPATIENT = {"RAY_gcs_rpc_server_reconnect_timeout_s": "20"}
"""Seconds for which agents of Ray look for a server that is gone: a minute, unless it is told otherwise."""


def start(folder: Path, recipe: Path, *words: str, **environment: str) -> Forked:
    words = ("offdrift", "train", str(recipe), "--out", str(folder), *words)
    printed = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent)) / "printed"
    return Forked(words, printed, **environment)


def finished(process: Forked) -> None:
    done = process.wait(300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.slow
def test_a_killed_trainer_goes_on_with_the_same_groups(tmp_path):
    """Killed while it writes a checkpoint, if that is caught: else when it has ended, which fails below."""
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.format(cpus=0.1, more="update_rounds = 2"))
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    finished(start(whole, recipe, **IMPATIENT))
    trainer, arm = start(cut, recipe, **IMPATIENT), cut / "arms/arm"
    while trainer.poll() is None and not any((arm / "checkpoints").glob(".partial-000006")):
        time.sleep(0.001)
    others = psutil.Process(trainer.pid).children(recursive=True)
    workers = [p for p in others if "RolloutWorker" in " ".join(p.cmdline())]
    trainer.send_signal(signal.SIGKILL)
    assert trainer.wait(60).returncode == -signal.SIGKILL
    assert len(workers) == 2
    assert not [p for p in psutil.wait_procs(workers, timeout=30)[1] if p.status() != psutil.STATUS_ZOMBIE]
    finished(start(cut, recipe, "--resume", **IMPATIENT))
    assert len(ArmFolder(arm).rows("metrics")) == 12
    for index in range(12):
        name = f"arms/arm/rollouts/batch-{index:06d}.parquet"
        first, second = store.read(whole / name), store.read(cut / name)
        assert first.prompts == second.prompts
        assert torch.equal(first.tokens, second.tokens)
        assert torch.equal(first.rollout_version, second.rollout_version)
        assert torch.equal(first.logp_rollout, second.logp_rollout)
    assert not [p for p in psutil.wait_procs(others, timeout=100)[1] if p.status() != psutil.STATUS_ZOMBIE]


# -- a cluster


def fixed_port() -> int:
    """A free port that the system gives nobody who asks for any: gRPC's servers share a port that two of them have,
    and half of the requests would reach another cluster, which has another token."""
    for port in random.sample(range(21_000, 32_000), 100):
        with socket.socket() as free, suppress(OSError):
            free.bind(("", port))
            return port
    raise AssertionError("no port between 21,000 and 32,000 is free")


@pytest.fixture
def cluster():
    """Where to find two machines of one core each, both here, with a token of their own."""
    address = f"127.0.0.1:{fixed_port()}"
    path = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # names of sockets have a hundred characters at most
    common = ["--block", "--node-ip-address=127.0.0.1", "--num-cpus=1", "--object-store-memory=200000000"]
    head = ["--head", f"--port={address.partition(':')[2]}", "--include-dashboard=false", f"--temp-dir={path}"]
    environment = {"RAY_ADDRESS": address, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    begin = ENVIRONMENT | environment
    del begin["RAY_ADDRESS"]
    nodes = []
    for own in (head, [f"--address={address}"]):
        command = [str(Path(sys.executable).with_name("ray")), "start", *own, *common]
        with (Path(path) / f"log-{len(nodes)}").open("w") as output:
            nodes.append(psutil.Popen(command, env=begin, stdout=output, stderr=subprocess.STDOUT))
        end = time.monotonic() + 120
        while "Ray runtime started" not in (text := (Path(path) / f"log-{len(nodes) - 1}").read_text()):
            assert nodes[-1].poll() is None, text
            assert time.monotonic() < end, text
            time.sleep(0.5)
    yield environment
    processes = [p for node in nodes for p in (*node.children(recursive=True), node)]
    for process in reversed(processes):
        if process.is_running():
            process.kill()
    psutil.wait_procs(processes, timeout=30)
    shutil.rmtree(path, ignore_errors=True)


STATE = """
import json, ray
ray.init(log_to_driver=False)
print(json.dumps([sum(node["Alive"] for node in ray.nodes()), ray.available_resources()["CPU"]]))
"""


@pytest.mark.slow
def test_a_run_joins_a_cluster_and_leaves_it(cluster, tmp_path):
    recipe, folder = tmp_path / "recipe.toml", tmp_path / "run"
    recipe.write_text(RECIPE.format(cpus=1, more=""))
    finished(start(folder, recipe, **cluster))
    names = {w for i in range(12) for w in store.read(folder / f"arms/arm/rollouts/batch-{i:06d}.parquet").workers}
    assert names == {"worker-0", "worker-1"}  # one core each: both machines drew
    done = subprocess.run(
        [sys.executable, "-c", STATE], env=ENVIRONMENT | cluster, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout.splitlines()[-1]) == [2, 2.0]  # alive, and nothing of the run is left
