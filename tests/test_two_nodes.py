"""Audits, sweeps and pipelines on a cluster of two nodes, started by the commands of deploy/compose.yaml, on loopback."""

import json
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from tests_lab.cli.test_sweep import BASE, SWEEP

from offdrift.audit.partial import Job
from offdrift.audit.stream import audit
from offdrift.records.readers import detect, pieces
from offdrift.records.recorder import write_log
from tests.audit.logs import drawn
from tests.forked import forked
from tests.two_nodes import ADDRESS, ROOT, TwoNodes, two_nodes

pytestmark = pytest.mark.slow

AUDIT = f"""
import json, sys
from pathlib import Path
import ray
import offdrift.audit.stream as stream
from offdrift.audit.partial import Job
from offdrift.records.readers import detect, pieces
log, out = sys.argv[1:]
ray.init("{ADDRESS}", log_to_driver=False, logging_level="ERROR")
print(json.dumps([node["NodeName"] for node in ray.nodes() if node["Alive"]]))
job = Job(detect([log]))
part = stream.audit(job, pieces(job.found, piece_bytes=6000), folder=Path(out), run=stream.on_ray("{ADDRESS}"))
Path(out, "whole.npz").write_bytes(part.to_bytes())
"""
SWEEPING = "sweep s.toml --json --set batches=10 --set log.eval_every=10"
PIPELINE = """
[pipeline]
schedule = "one_step_off"
resources = { rollout = 1 }
update_rounds = 3
"""


@pytest.fixture(scope="module")
def cluster():
    pytest.importorskip("ray")
    with two_nodes('--resources={"rollout": 1}') as nodes:
        yield nodes


@pytest.fixture(scope="module")
def reference(cluster, tmp_path_factory) -> dict:
    """The table of the sweep in one process, without a cluster."""
    folder = prepared(tmp_path_factory.mktemp("alone"))
    alone(cluster, SWEEPING, folder)
    return table(folder / "runs/s")


@pytest.fixture
def folder(tmp_path) -> Path:
    return prepared(tmp_path)


def prepared(folder: Path) -> Path:
    """A folder with a recipe, one with a pipeline, and a sweep."""
    (folder / "base.toml").write_text(BASE)
    (folder / "p.toml").write_text(
        BASE.replace("lag = { sync_every = 1 }", "").partition("[arms.trm_max]")[0] + PIPELINE
    )
    shutil.copy(ROOT / "recipes/digits.py", folder)
    (folder / "s.toml").write_text(SWEEP.replace("seeds = 1", "seeds = 2"))
    return folder


def command(text: str) -> list[str]:
    return [sys.executable, "-m", "offdrift", *shlex.split(text)]


def on_cluster(cluster: TwoNodes, text: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return cluster.run(command(text), cwd, **({"RAY_ADDRESS": ADDRESS} if text.startswith("train") else {}))


def alone(cluster: TwoNodes, text: str, cwd: Path) -> None:
    """Run a command without the cluster, of the same environment."""
    done = forked(text, cwd, **cluster.env).wait(240)
    assert done.returncode == 0, done.stderr


def table(folder: Path) -> dict:
    """What a sweep says, without what depends on when and where it ran."""
    document = json.loads((folder / "sweep.json").read_text())
    runs = [{k: v for k, v in run.items() if k not in ("seconds", "nodes")} for run in document["runs"]]
    return {"settings": document["settings"], "runs": runs}


def rollouts(arm: Path) -> dict[str, list]:
    """What a run's rollouts hold of tokens and numbers, by batch."""
    from offdrift.records.store import read

    batches = {file.name: read(file) for file in sorted(arm.glob("rollouts/*.parquet"))}
    return {
        name: [r.tokens.tolist(), r.logp_rollout.tolist(), r.rewards.tolist(), r.rollout_version.tolist(), r.workers]
        for name, r in batches.items()
    }


def test_both_nodes_are_there_and_an_audit_on_them_is_that_of_one_process(cluster, tmp_path):
    for i in range(3):
        write_log(drawn(seed=i), tmp_path / "log" / f"batch-{i}.parquet")
    out = tmp_path / "out"
    done = cluster.run([sys.executable, "-c", AUDIT, str(tmp_path / "log"), str(out)], tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert sorted(json.loads(done.stdout.splitlines()[-1])) == ["head", "node"]
    job = Job(detect([str(tmp_path / "log")]))
    plan = pieces(job.found, piece_bytes=6000)
    assert len(plan) >= 3
    assert (out / "whole.npz").read_bytes() == audit(job, plan, folder=tmp_path / "alone").to_bytes()


def test_a_sweep_runs_on_both_nodes_and_says_what_it_says_in_one_process(cluster, folder, reference):
    done = on_cluster(cluster, f"{SWEEPING} --ray {ADDRESS}", folder)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert {run["status"] for run in document["runs"]} == {"finished"}
    where = Counter(name for run in document["runs"] for name in run["nodes"])
    assert set(where) == {"head", "node"}
    assert where.total() == 4  # each run was on one node, from its beginning to its end
    assert not list(folder.glob("runs/s/.cluster-*"))
    assert table(folder / "runs/s") == reference


def test_a_rollout_worker_draws_on_the_node_that_has_its_resource_and_the_run_is_as_anywhere(cluster, folder):
    done = on_cluster(cluster, "train p.toml --out run", folder)
    assert done.returncode == 0, done.stderr
    (worker,) = [json.loads(line) for line in (folder / "run/workers.jsonl").read_text().splitlines()]
    assert (worker["worker"], worker["name"]) == ("worker-0", "node")
    assert (folder / "run/arms/none/summary.json").exists()
    alone(cluster, "train p.toml --out alone", folder)  # starts a Ray of its own, outside of the network of the nodes
    assert len(rollouts(folder / "run/arms/none")) == 6
    assert rollouts(folder / "run/arms/none") == rollouts(folder / "alone/arms/none")


def test_a_folder_that_a_node_does_not_share_ends_the_sweep_by_name(cluster, folder):
    """Without the check the node's runs would be written to a folder of its own, and count as never begun."""
    out = cluster.apart / "s"
    done = on_cluster(cluster, f"sweep s.toml --ray {ADDRESS} --out {out}", folder)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"does not see what the command has written to {out}" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert not list(out.glob(".cluster-*"))


def test_a_node_that_is_lost_takes_no_finished_run_with_it_and_the_same_command_makes_up_for_it(
    cluster, folder, reference
):

    def updates() -> dict[str, int]:
        files = folder.glob("runs/s/runs/*/recipe/*/arms/*/metrics.jsonl")
        return {
            str(f.relative_to(folder / "runs/s/runs")).partition("/arms")[0]: f.read_text().count("\n") for f in files
        }

    process = cluster.popen(command(f"{SWEEPING} --ray {ADDRESS}"), folder)
    while process.poll() is None and sum(n >= 3 for n in updates().values()) < 2:
        time.sleep(0.05)
    cluster.kill("node")
    out, err = process.communicate(timeout=240)
    assert process.returncode == 1, out + err
    assert out, err
    runs = {run["folder"]: run for run in json.loads(out)["runs"]}  # Ray says nothing between
    lost = [run for run in runs.values() if run["status"] == "failed"]
    assert lost
    assert all(run["nodes"] in (["node"], []) for run in lost)
    assert "the node of the Ray cluster that it was on, node, is gone" in lost[0]["error"]
    assert sum(run["status"] == "finished" for run in runs.values()) == 4 - len(lost)
    assert f"{SWEEPING.replace(' --json', '')} --ray {ADDRESS}" in err
    before = {f: f.read_bytes() for f in folder.glob("runs/s/runs/*/recipe/*/arms/*/metrics.jsonl")}
    finished = {folder / "runs/s" / name for name, run in runs.items() if run["status"] == "finished"}

    alone(cluster, SWEEPING, folder)  # the command goes on with or without a cluster
    for file, rows in before.items():
        if file.parents[2] in finished:
            assert file.read_bytes() == rows
    assert table(folder / "runs/s") == reference
