"""A Ray cluster of several machines: joined, asked for room, and each node checked before it works.

Work on several machines takes for granted that all have the same software and see the same files under the same paths.
Where it is not so much goes wrong without a word: a folder of the same name that is not shared takes the results with
it. `Common` is what the command's own machine has, and a node checks it before it does anything.
"""

from __future__ import annotations

import logging
import os
import socket
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from offdrift.engines.isolation import quiet, sigterm_kept, start_local_ray
from offdrift.errors import EngineError, RecordError

CALL_S = 10.0
"""Seconds in which a Ray cluster must take a connection."""


@contextmanager
def ray_cluster(address: str) -> Iterator[Any]:
    """The module `ray`, connected to a cluster until the block ends.

    Args:
        address: "auto", "host:port" or "ray://host:port"; "local" starts Ray here, on loopback, and ends it. Where Ray
            has been initialized in this process, that cluster is taken, and left as it is.

    Raises: `EngineError` if Ray is missing, or no cluster answers at the address.
    """
    try:
        import ray
    except ImportError as error:
        raise EngineError(f"--ray needs Ray ({error}); install it with `pip install offdrift[ray]`") from error
    ours = not ray.is_initialized()
    if ours:
        join(address, f"--ray {address}", "give --ray local")
    try:
        yield ray
    finally:
        if ours:
            ray.shutdown()


def join(address: str, setting: str, otherwise: str) -> None:
    """Connect this process to a Ray cluster.

    Args:
        address: as of `ray_cluster`.
        setting: where the address stands, in words, and what else may be done about it: for the message.

    Raises: `EngineError` if none answers.
    """
    import ray

    logging.getLogger("ray").setLevel(logging.ERROR)  # what it tells of itself
    quiet(ray)
    try:
        if address == "local":
            start_local_ray(logging_level=logging.ERROR)
            return
        _call(address)
        with sigterm_kept():
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except EngineError:
        raise
    except Exception as error:  # Ray's own, of a dozen classes, a bare Exception among them
        raise EngineError(
            f"no Ray cluster answers at {setting} ({error}); start one with `ray start --head`, or {otherwise}"
        ) from error


def _call(address: str) -> None:
    """Raise `ConnectionError` unless something listens at an address; Ray itself tries for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdecimal():
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=CALL_S).close()
        except OSError as error:
            raise ConnectionError(str(error.strerror or error)) from error


def room(ray: Any, wanted: Mapping[str, float], *, what: str, way_out: str) -> int:
    """Count how many workers of this size fit into the cluster when it is empty.

    Args:
        wanted: what one takes of a node, by Ray's name of the resource, as {"CPU": 4.0}.
        what: that one with its settings, in words, and what can be done: for the message.

    Raises: `EngineError` if no node has room for one, with the most that one has of each resource.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    wanted = {name: amount for name, amount in wanted.items() if amount > 0}
    count = sum(min((int(node.get(name, 0) // amount) for name, amount in wanted.items()), default=1) for node in nodes)
    if not count:
        most = ", ".join(f"{max((node.get(name, 0) for node in nodes), default=0):g} {name}" for name in wanted)
        raise EngineError(
            f"no node of the Ray cluster has room for {what}: the most that one has is {most}; {way_out}, or add a node"
        )
    return count


class Node(NamedTuple):
    """A machine of a cluster, as records name it."""

    name: str
    """By `ray start --node-name`; without one, its address."""
    host: str
    address: str
    id: str
    """Ray's own, new whenever the node is started."""


def this_node() -> Node:
    """The node that a task or an actor runs on."""
    import ray

    node_id = ray.get_runtime_context().get_node_id()
    facts: Mapping[str, Any] = next((node for node in ray.nodes() if node["NodeID"] == node_id), {})
    address = str(facts.get("NodeManagerAddress", ""))
    return Node(str(facts.get("NodeName") or address), socket.gethostname(), address, node_id)


def is_alive(ray: Any, node: str) -> bool:
    """Whether a node, by its id, is in the cluster."""
    return any(n["NodeID"] == node and n["Alive"] for n in ray.nodes())


class Common(NamedTuple):
    """Folder, marker file and version that a command and all nodes working for it must share."""

    place: str
    """The folder in which the command was started: paths may be relative to it."""
    mark: str
    """A file that the command has just written where results go."""
    version: str
    """Of offdrift."""

    def check(self) -> None:
        """Go to the command's folder on a node, which must have all of it.

        Raises: `RecordError` naming the node, what it lacks, and what to do.
        """
        own, host = version("offdrift"), socket.gethostname()
        if own != self.version:
            raise RecordError(
                f"the node {host} has offdrift {own}, and the command has {self.version}; install the same version on "
                f"all nodes: pip install 'offdrift[train,ray]=={self.version}'"
            )
        try:
            os.chdir(self.place)
        except OSError as e:
            raise RecordError(
                f"a node of the cluster, {host}, has no folder {self.place} ({e.strerror}); share it with all nodes, "
                "under the same path"
            ) from e
        if not Path(self.mark).exists():
            folder = Path(self.mark).parent.absolute()
            raise RecordError(
                f"the node {host} does not see what the command has written to {folder}: it has a folder {self.place} "
                "of its own, and results there would be lost; share it with all nodes, or give an --out that is shared"
            )


@contextmanager
def in_common(folder: Path) -> Iterator[Common]:
    """Write a marker file and yield what nodes must check to prove that they share the results folder.

    Args:
        folder: where results go; a file is written there and removed at the end.

    Raises: `RecordError` if it cannot be written.
    """
    # A name that no node has looked for: network file systems remember for a while what was not there.
    mark = folder / f".cluster-{uuid.uuid4().hex}.{os.getpid()}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        mark.touch()
    except OSError as e:
        raise RecordError(f"cannot write {folder}: {e.strerror or e}; choose another --out") from e
    try:
        yield Common(os.getcwd(), str(mark), version("offdrift"))
    finally:
        mark.unlink(missing_ok=True)
