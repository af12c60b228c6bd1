"""Commands as forks of a process that has imported what they need, so that starting one costs next to nothing."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

RECORDER = ("torch", "offdrift.records.recorder")
IMPORTED = (
    "offdrift.audit.stream",
    "offdrift_lab.cli.train",
    "offdrift.engines.hf",
    "offdrift_lab.train.loop.loop",
    "offdrift_lab.train.report.page",
    "offdrift_lab.train.sweep.sweep_results",
    "reasoning_gym",
)


def serve() -> list[str] | None:
    """Fork a process for every line of standard input; returns in each of them with its arguments, and None at the end.

    The command line names the modules to import first. Answers on standard output with the process's number, and with its status when it has ended.
    """
    for module in sys.argv[2:]:
        importlib.import_module(module)
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            output = os.open(order["output"], os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            for stream in (1, 2):
                os.dup2(output, stream)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            return order["words"]
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    return None


class Forge:
    """The process that forks commands, one at a time: a script that, called with --serve, calls `serve`.

    Args:
        modules: what the commands import.
    """

    def __init__(self, script: str, modules: Sequence[str] = IMPORTED) -> None:
        unprivileged = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
        command = [*unprivileged, sys.executable, script, "--serve", *modules]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self.pid, self.status = 0, None

    def start(self, words: list[str], output: Path) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"words": words, "output": str(output)}) + "\n")
        self.process.stdin.flush()
        self.pid, self.status = int(self._line(120.0)), None

    def wait(self, seconds: float) -> int | None:
        """The status of the command once it has ended; None if it is still there after so long."""
        if self.status is None and (line := self._line(seconds)):
            self.status = int(line)
        return self.status

    def _line(self, seconds: float) -> str:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, seconds))
        return self.process.stdout.readline() if ready else ""

    def close(self) -> None:
        assert self.process.stdin is not None
        if self.status is None and self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self.process.stdin.close()
        self.process.wait()
