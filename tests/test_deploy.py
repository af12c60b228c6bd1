"""Files of deploy/ are what the documentation says; two nodes of a cluster are started by their commands, on loopback."""

import json
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from offdrift.audit.partial import Job
from offdrift.audit.stream import audit
from offdrift.records.readers import detect, pieces
from offdrift.records.recorder import write_log
from tests.audit.logs import drawn

ROOT = Path(__file__).parents[1]
COMPOSE = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]
CLUSTER = yaml.safe_load((ROOT / "deploy" / "cluster.yaml").read_text())


def words(command: str) -> list[str]:
    """A command of compose as words, its variables with their defaults."""
    return shlex.split(command.replace("${CPUS:-1}", "1"))


def test_compose_publishes_nothing_and_all_its_services_share_paths_and_a_token():
    assert set(COMPOSE) == {"head", "node", "audit"}
    for service in COMPOSE.values():
        assert "ports" not in service
        assert [v.rpartition("}:")[2] for v in service["volumes"]] == ["/logs:ro", "/audits"]
        assert service["environment"]["RAY_AUTH_MODE"] == "token"
    assert words(COMPOSE["node"]["command"])[2] == "--address=head:6379"
    assert words(COMPOSE["audit"]["command"])[-1] == "head:6379"


def test_the_cluster_file_starts_what_compose_starts():
    for name, key in (("head", "head_start_ray_commands"), ("node", "worker_start_ray_commands")):
        own = {w.partition("=")[0] for w in words(COMPOSE[name]["command"])} - {"--num-cpus", "--block"}
        assert own <= {w.partition("=")[0] for w in shlex.split(CLUSTER[key][-1])}
        assert "RAY_AUTH_MODE=token" in CLUSTER[key][-1]
    assert {"cluster_name", "provider", "auth", "min_workers", "max_workers"} <= set(CLUSTER)


def test_the_job_array_reads_its_slice(tmp_path):
    """The script of a job array, with a stand-in on the path that prints what it is called with."""
    fake = tmp_path / "offdrift"
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    fake.chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "16"}
    done = subprocess.run(
        ["bash", ROOT / "deploy" / "slurm-audit.sh", "s3://b/x y", "out"], env=env, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == ["audit", "s3://b/x y", "--out", "out", "--workers", "8", "--slice", "3/16", "--quiet"]  # fmt: skip


ISOLATED = ["unshare", "--net"] if os.name == "posix" and hasattr(os, "geteuid") and os.geteuid() == 0 else ["unshare", "--map-root-user", "--net"]  # fmt: skip
"""A network of its own, which has nothing but loopback: nodes of a Ray cluster listen on every address they have."""

CLUSTER_OF_TWO = """
import json, os, signal, socket, subprocess, sys, time
commands, log, out = json.loads(sys.argv[1])
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
nodes = []
def start(command):
    nodes.append(subprocess.Popen(command, start_new_session=True, stdout=sys.stderr, stderr=sys.stderr))
try:
    start(commands[0])
    for _ in range(240):
        try:
            socket.create_connection(("127.0.0.1", 6379), 1).close()
            break
        except OSError:
            time.sleep(0.5)
    start(commands[1])
    import ray
    ray.init("127.0.0.1:6379", log_to_driver=False, logging_level="ERROR")
    for _ in range(240):
        alive = [n for n in ray.nodes() if n["Alive"]]
        if len(alive) == 2:
            break
        time.sleep(0.5)
    import offdrift.audit.stream as stream
    from offdrift.audit.partial import Job
    from offdrift.records.readers import detect, pieces
    job = Job(detect([log]))
    plan = pieces(job.found, piece_bytes=6000)
    from pathlib import Path
    part = stream.audit(job, plan, folder=Path(out), run=stream.on_ray("127.0.0.1:6379"))
    Path(out, "whole.npz").write_bytes(part.to_bytes())
    print(json.dumps({"nodes": len(alive), "pieces": len(plan)}))
finally:
    for node in reversed(nodes):
        os.killpg(node.pid, signal.SIGTERM)
    for node in nodes:
        try:
            node.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(node.pid, signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux") or not shutil.which("unshare"), reason="needs unshare and ip")
def test_two_nodes_started_by_the_commands_of_compose_give_what_one_process_gives(tmp_path):
    pytest.importorskip("ray")
    if subprocess.run([*ISOLATED, "true"], capture_output=True).returncode:
        pytest.skip("no network namespace may be made here")
    for i in range(3):
        write_log(drawn(seed=i), tmp_path / "log" / f"batch-{i}.parquet")
    ray = str(Path(sys.executable).with_name("ray"))
    commands = []
    for name in ("head", "node"):
        own = words(COMPOSE[name]["command"].replace("head:6379", "127.0.0.1:6379"))
        commands.append([ray, *own[1:], "--node-ip-address=127.0.0.1"])
    commands[0].append(f"--temp-dir=/tmp/ray-{os.getpid()}")  # names of sockets may not be long
    env = {
        **os.environ, **{k: str(v) for k, v in COMPOSE["head"]["environment"].items() if "$" not in str(v)},
        "RAY_AUTH_TOKEN": secrets.token_hex(32), "PYTHONPATH": str(ROOT / "src"),
    }  # fmt: skip
    out = tmp_path / "out"
    given = json.dumps([commands, str(tmp_path / "log"), str(out)])
    begun = time.monotonic()
    process = subprocess.Popen(
        [*ISOLATED, sys.executable, "-c", CLUSTER_OF_TWO, given], env=env, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        stdout, stderr = process.communicate(timeout=240)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
        shutil.rmtree(f"/tmp/ray-{os.getpid()}", ignore_errors=True)
    assert process.returncode == 0, stderr[-2000:]
    report = json.loads(stdout.splitlines()[-1])
    assert report["nodes"] == 2
    assert report["pieces"] >= 3
    job = Job(detect([str(tmp_path / "log")]))
    whole = audit(job, pieces(job.found, piece_bytes=6000), folder=tmp_path / "alone")
    assert (out / "whole.npz").read_bytes() == whole.to_bytes()
    assert time.monotonic() - begun < 240
