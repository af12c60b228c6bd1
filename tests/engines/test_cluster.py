"""What a node of a cluster must have before it works, and what a cluster has room for."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from offdrift.engines.cluster import in_common, join, room
from offdrift.errors import EngineError, RecordError


@pytest.fixture
def common(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with in_common(Path("out")) as common:
        yield common
    assert not list((tmp_path / "out").iterdir())


def test_a_node_with_everything_goes_to_the_command_s_folder(common, tmp_path, monkeypatch):
    monkeypatch.chdir("/")
    common.check()
    assert os.getcwd() == str(tmp_path)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"version": "0.0.1"}, r"and the command has 0\.0\.1; install the same version on all nodes: pip install"),
        ({"place": "/nowhere"}, r"has no folder /nowhere \(No such file or directory\); share it with all nodes"),
        ({"mark": "out/.cluster-0.tmp"}, "does not see what the command has written to .*/out: it has a folder"),
    ],
)
def test_what_a_node_lacks_is_named(common, other, said):
    with pytest.raises(RecordError, match=said):
        common._replace(**other).check()


def test_a_folder_that_cannot_be_written_is_named():
    with pytest.raises(RecordError, match="cannot write /proc/nowhere"), in_common(Path("/proc/nowhere")):
        pass


def cluster(*resources: dict[str, float]) -> SimpleNamespace:
    """What `ray.nodes` says of nodes, the last of which is gone."""
    nodes = [{"Alive": i < len(resources) - 1, "Resources": of} for i, of in enumerate(resources)]
    return SimpleNamespace(nodes=lambda: nodes)


def test_room_is_counted_node_by_node():
    ray = cluster({"CPU": 4.0, "GPU": 1.0}, {"CPU": 7.0}, {"CPU": 64.0})
    count = lambda **wanted: room(ray, wanted, what="a run of --cpus", way_out="lower them")  # noqa: E731
    assert count(CPU=1.0) == 11
    assert count(CPU=3.0) == 3  # one on the first, two on the second: what is left over of both is no node
    assert count(CPU=1.0, GPU=1.0) == 1
    assert count(CPU=0.0) == 2
    said = "no node of the Ray cluster has room for a run of --cpus: the most that one has is 7 CPU; lower them, or add"
    with pytest.raises(EngineError, match=said):
        count(CPU=8.0)


def test_an_address_at_which_nothing_listens_is_named_at_once():
    pytest.importorskip("ray")
    said = r"no Ray cluster answers at RAY_ADDRESS=127.0.0.1:1 \(Connection refused\); start one .*, or unset it"
    with pytest.raises(EngineError, match=said):
        join("127.0.0.1:1", "RAY_ADDRESS=127.0.0.1:1", "unset it")
