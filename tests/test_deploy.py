"""Files of deploy/ are what the documentation says; `test_two_nodes` starts two nodes by their commands."""

import os
import shlex
import subprocess

import yaml

from tests.two_nodes import COMPOSE, ROOT, words

CLUSTER = yaml.safe_load((ROOT / "deploy" / "cluster.yaml").read_text())


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
