"""`Command`: a program of the user's that is started for each finding.

The command line is the user's and goes to the shell as it was typed. The finding goes beside it, as environment
variables and as JSON on stdin: it is never put into the command line, so that no text of a log can be run.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
import time

from offdrift.alarms.alarm import Alarm
from offdrift.alarms.place import Delivery
from offdrift.show.json_access import visible

PRINTED = 4000
"""Characters of a command's output that are shown: its last."""
LOOK_S = 0.02


class Command:
    """Runs a command line for each alarm, with what the alarm says in OFFDRIFT_* and as JSON on stdin.

    Args:
        line: for the shell.
        level: the least severe finding that it is run for.
        timeout: seconds after which a command and what it has started are ended.
    """

    def __init__(self, line: str, *, level: str, timeout: float | int = 60.0) -> None:
        self.line, self.level, self.timeout = line, level, timeout
        self.name = f"--on {level} {visible(line)!r}"
        self.key = f"command {line}"

    def send(self, alarm: Alarm, stop: threading.Event) -> Delivery:
        """Run the command and wait for it; `Delivery.printed` is what it wrote to stdout and stderr."""
        with tempfile.TemporaryFile() as finding, tempfile.TemporaryFile() as output:
            finding.write(json.dumps(alarm.as_dict()).encode() + b"\n")
            finding.seek(0)
            try:
                process = subprocess.Popen(
                    self.line,
                    shell=True,
                    stdin=finding,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **alarm.environment()},
                    start_new_session=True,  # Ctrl-C is for the watch
                )
            except (OSError, ValueError) as e:
                return Delivery(f"it cannot be started: {e}")
            status = self._wait(process, stop)
            output.seek(max(0, output.seek(0, os.SEEK_END) - PRINTED))
            printed = visible(output.read().decode("utf-8", "replace")).strip("\n")
        if status is None:
            why = "the watch ended" if stop.is_set() else f"it ran for more than {self.timeout:g} s"
            return Delivery(f"{why}, and it was ended", printed)
        return Delivery(f"it ended with status {status}" if status else "", printed)

    def _wait(self, process: subprocess.Popen[bytes], stop: threading.Event) -> int | None:
        """Exit status; None if the command was ended, with every process of its group."""
        end = time.monotonic() + self.timeout
        while process.poll() is None:
            if time.monotonic() >= end or stop.wait(LOOK_S):
                with contextlib.suppress(OSError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return None
        return process.returncode
