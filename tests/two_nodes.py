"""A Ray cluster of two nodes in a network of its own, started by the commands of deploy/compose.yaml.

Nodes of a cluster listen on every address that they have. Here they have loopback alone: they, and what is run beside
them, are in a namespace of network and processes, whose first process ends when the test does, however it ends. The
kernel then ends all others.
"""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

ROOT = Path(__file__).parents[1]
COMPOSE = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]
ADDRESS = "127.0.0.1:6379"
ADDRESSES = {"head": "127.0.0.1", "node": "127.0.0.2"}
"""Of their own, as those of two machines: by one address a command would join either."""
OWN = ["--net", "--pid", "--mount-proc", "--fork", "--kill-child"]
ROOTED = hasattr(os, "geteuid") and os.geteuid() == 0

HOLDER = """
import signal, subprocess, sys
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # whatever loses its parent becomes its child
print("up", flush=True)
sys.stdin.read()
"""
APART = 'mount -t tmpfs tmpfs "$1" && shift && exec "$@"'
"""A folder that a node has for itself, by a path that the others have, too."""


def words(command: str) -> list[str]:
    """A command of compose as words, its variables with their defaults."""
    return shlex.split(command.replace("${CPUS:-1}", "1"))


class TwoNodes:
    """See the module. Nodes are called by their service in the compose file, "head" and "node"."""

    def __init__(self, holder: subprocess.Popen, folder: Path) -> None:
        (inner,) = psutil.Process(holder.pid).children()
        user = [] if ROOTED else ["--user", "--preserve-credentials"]
        self.enter = ["nsenter", f"--target={inner.pid}", *user, "--net", "--pid", "--mount"]
        self.folder = folder
        self.apart = folder / "apart"
        """The second node has a folder of its own by this path."""
        self.apart.mkdir()
        self.nodes: dict[str, psutil.Popen] = {}
        self.started: list[psutil.Popen] = []
        self.env = {
            **os.environ, **{k: str(v) for k, v in COMPOSE["head"]["environment"].items() if "$" not in str(v)},
            "RAY_AUTH_TOKEN": secrets.token_hex(32), "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "140", "NO_COLOR": "1",
            "TERM": "dumb",
        }  # fmt: skip

    def popen(self, command: Sequence[str], cwd: Path, **more: str) -> psutil.Popen:
        """Start a program beside the nodes; its output is piped."""
        pipes: Mapping[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return psutil.Popen(
            [*self.enter, "env", f"--chdir={cwd}", *command], env=self.env | more, start_new_session=True, **pipes
        )

    def run(self, command: Sequence[str], cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
        """Run a program beside the nodes to its end."""
        process = self.popen(command, cwd, **more)
        try:
            out, err = process.communicate(timeout=180)
        finally:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def start(self, service: str, *options: str) -> None:
        """Begin to start a node by its command in the compose file, with more options."""
        own = words(COMPOSE[service]["command"].replace("head:6379", ADDRESS))
        command = [
            str(Path(sys.executable).with_name(own[0])),
            *own[1:],
            f"--node-ip-address={ADDRESSES[service]}",
            *options,
        ]
        command.append(f"--node-name={service}")
        if service == "head":
            command.append(f"--temp-dir={self.folder}")
        else:
            command = ["unshare", "--mount", "sh", "-c", APART, "sh", str(self.apart), *command]
        with self._log(service).open("w") as log:
            self.nodes[service] = psutil.Popen(
                [*self.enter, "env", f"--chdir={self.folder}", *command],
                env=self.env,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

        self.started.append(self.nodes[service])

    def wait(self) -> None:
        """Wait until all nodes that have been started are up."""
        for service, process in self.nodes.items():
            while "Ray runtime started" not in self._log(service).read_text():
                if process.poll() is not None:
                    raise AssertionError(self._log(service).read_text()[-2000:])
                time.sleep(0.1)

    def _log(self, service: str) -> Path:
        return self.folder / f"{service}.log"

    def kill(self, service: str) -> None:
        """Take a node away as a power cut does."""
        for process in [*self.nodes[service].children(recursive=True), self.nodes.pop(service)]:
            with suppress(psutil.NoSuchProcess):
                process.kill()


@contextmanager
def two_nodes(*options: str) -> Iterator[TwoNodes]:
    """Start the cluster; skips where no namespace may be made.

    Args:
        options: of the second node, such as its resources.
    """
    unshare = ["unshare", *([] if ROOTED else ["--map-root-user"]), *OWN]
    if not sys.platform.startswith("linux") or not all(map(shutil.which, ("unshare", "nsenter", "ip"))):
        pytest.skip("needs unshare, nsenter and ip")
    if subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("no namespace may be made here")
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # names of sockets may not be long
    holder = subprocess.Popen([*unshare, sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    cluster = None
    try:
        assert holder.stdout.readline() == b"up\n"
        cluster = TwoNodes(holder, folder)
        cluster.start("head")
        cluster.start("node", *options)  # waits for the head by itself, as in containers that start together
        cluster.wait()
        yield cluster
    finally:
        holder.stdin.close()
        holder.wait(20)
        holder.stdout.close()
        for process in [] if cluster is None else cluster.started:
            process.wait(20)
        shutil.rmtree(folder, ignore_errors=True)
