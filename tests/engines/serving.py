"""A real vLLM server for tests: started on a free port of this machine, ended by its process id."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.engines.models import need_vllm

START_S = 300
"""Seconds that a start may take on a busy machine; 20 to 30 on a quiet one."""
LAUNCH = """
import multiprocessing, runpy
import vllm.utils.system_utils as system
system.get_mp_context = lambda: multiprocessing.get_context("fork")
runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
"""
"""vLLM imported once: its engine is forked from the server, and its worker runs in the engine, where both would
otherwise import it again. Not `vllm serve`: the CPU build lacks the package metadata that it reads first."""
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "TORCH_COMPILE_DISABLE": "1", "OMP_NUM_THREADS": "1",
}  # fmt: skip


@contextmanager
def serving(folder: str, logs: Path, *flags: str) -> Iterator[str]:
    """The address of a vLLM server on this checkpoint."""
    need_vllm("uvicorn", "watchfiles", "prometheus_fastapi_instrumentator", "model_hosting_container_standards")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = logs / "server.log"
    words = [sys.executable, "-c", LAUNCH, "--model", folder, "--host", "127.0.0.1", "--port", str(port), *flags]
    with log.open("w") as out:
        server = subprocess.Popen(words, env=os.environ | ENVIRONMENT, stdout=out, stderr=out, start_new_session=True)
    try:
        _wait(server, f"http://127.0.0.1:{port}/health", log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        os.killpg(server.pid, signal.SIGKILL)  # its session: the server and its engine, and nothing else
        server.wait(15)


def _wait(server: subprocess.Popen, health: str, log: Path) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        if server.poll() is not None:
            break
        try:
            with urllib.request.urlopen(health, timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    pytest.fail(f"the server did not start:\n{log.read_text()[-3000:]}", pytrace=False)
