"""Files of deploy/ are what the documentation says; `test_two_nodes` starts two nodes by their commands."""

import json
import os
import re
import shlex
import subprocess
import tomllib

import yaml

from offdrift.alarms.live_metrics import LiveMetrics
from offdrift.stats.metrics import METRICS
from tests.alarms.receivers import FINDING
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


DASHBOARD = json.loads((ROOT / "deploy" / "grafana.json").read_text())
ALERTS = yaml.safe_load((ROOT / "deploy" / "prometheus-alerts.yaml").read_text())


def served() -> dict[str, set[str]]:
    """Labels by name of every metric that `offdrift watch --prometheus` serves."""
    live = LiveMetrics("run")
    live.show("log", {"step": 1, **dict.fromkeys(METRICS, 0.5)}, [FINDING])
    lines = [line for line in live.text().splitlines() if not line.startswith("#")]
    return {line.partition("{")[0]: set(re.findall(r'(\w+)="', line)) for line in lines}


def queries() -> list[str]:
    """Every expression of the dashboard and of the alerts."""
    variables = [v["query"]["query"] for v in DASHBOARD["templating"]["list"] if v["type"] == "query"]
    panels = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    return [*variables, *panels, *(rule["expr"] for rule in ALERTS["groups"][0]["rules"])]


def test_dashboard_and_alerts_ask_for_metrics_and_labels_that_are_served():
    metrics, asked = served(), set()
    for query in queries():
        names = re.findall(r"offdrift_\w+", query)
        assert names, query
        labels = {*re.findall(r"(\w+)=", query), *re.findall(r", (\w+)\)$", query)}
        for name in names:
            assert name in metrics, query
            assert labels <= metrics[name], query
        asked |= set(names)
    assert len(asked) > 15
    texts = json.dumps([DASHBOARD, ALERTS])
    labels = set(re.findall(r"\{\{ ?\$labels\.(\w+) ?\}\}", texts)) | set(re.findall(r"\{\{(\w+)\}\}", texts))
    assert labels <= metrics["offdrift_finding_step"]


def test_the_dashboard_is_one_that_grafana_imports():
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 10
    cells = set()
    for panel in panels:
        place = panel["gridPos"]
        own = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not own & cells, f"{panel['title']} covers another panel"
        assert max(x for x, _ in own) < 24
        cells |= own
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert all(target["datasource"] == panel["datasource"] for target in panel["targets"])
    assert [v["name"] for v in DASHBOARD["templating"]["list"]] == ["datasource", "run", "source"]
    assert "id" not in DASHBOARD, "a number of another Grafana"


def test_the_image_is_built_from_what_the_package_offers():
    """The Dockerfile installs extras that there are, under the pins, and compose starts its program by Ray's commands."""
    lines = (ROOT / "deploy" / "Dockerfile").read_text().splitlines()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extras,) = (line.removeprefix("ARG EXTRAS=").split(",") for line in lines if line.startswith("ARG EXTRAS="))
    assert set(extras) <= set(project["optional-dependencies"])
    (torch,) = (line.removeprefix("ARG TORCH=") for line in lines if line.startswith("ARG TORCH="))
    assert torch in (ROOT / "Makefile").read_text()
    (entry,) = (json.loads(line.removeprefix("ENTRYPOINT ")) for line in lines if line.startswith("ENTRYPOINT "))
    assert entry[0] in project["scripts"]
    for service in COMPOSE.values():
        assert (ROOT / "deploy" / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
        assert service["entrypoint"] == []
