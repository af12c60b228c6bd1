"""Programs in processes of their own that begin with everything imported.

Most of what a test with `python -m offdrift train` costs is importing torch and transformers: five seconds of a core in
every process, thirteen in two and their launcher. Here one process has imported them, once per session, and does nothing
but fork. What is forked runs the module as `python -m` would, with its own environment, folder and output, and can be
killed, interrupted and waited for. `tests/test_cli.py` starts whole interpreters, and `tests_lab/train/loop/test_sharded.py`
uses PyTorch's launcher.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch.distributed import TCPStore

ROOT = Path(__file__).parents[1]
QUIET = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "COLUMNS": "140", "TERM": "dumb", "NO_COLOR": "1"}
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.preloaded"])


class Forked:
    """Like `subprocess.Popen([sys.executable, "-m", *words])`, with output in files beside each other."""

    def __init__(self, words: Sequence[str], output: Path, *, cwd: Path = ROOT, **environment: str) -> None:
        self.out, self.err = output.with_suffix(".out"), output.with_suffix(".err")
        more = {**os.environ, **QUIET, **environment}
        self.process = CONTEXT.Process(target=_run, args=(list(words), more, str(cwd), str(self.out), str(self.err)))
        self.process.start()
        assert self.process.pid is not None
        self.pid = self.process.pid

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def lines(self, file: Path) -> Iterator[str]:
        """Those of `out` or `err` as they are written, to the end of the process."""
        place, ended = 0, False
        while not ended:
            ended = not self.process.is_alive()
            text = file.read_text() if file.exists() else ""
            *whole, _ = text[place:].split("\n")
            for line in whole:
                place += len(line) + 1
                yield line
            time.sleep(0.01)

    def wait(self, timeout: float) -> subprocess.CompletedProcess[str]:
        """How it ended; a process that is late is killed, and the test fails."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.process.kill()
            raise subprocess.TimeoutExpired(str(self.out), timeout)
        return subprocess.CompletedProcess([], self.process.exitcode, self.out.read_text(), self.err.read_text())


def forked(words: str | Sequence[str], cwd: Path, printed: Path | None = None, **environment: str) -> Forked:
    """`offdrift WORDS` in a folder; what it prints goes to files in another, which is the same unless it is named."""
    folder = Path(tempfile.mkdtemp(prefix="printed-", dir=printed or cwd))
    return Forked(
        ["offdrift", *(words.split() if isinstance(words, str) else words)], folder / "of", cwd=cwd, **environment
    )


def pair(words: Sequence[str], output: Path, *, timeout: float = 240) -> list[str]:
    """What a program prints in two processes that find each other; both must end well.

    They start as `torch.distributed.run --nproc_per_node 2` starts them, which keeps the store of addresses, too.
    """
    store = TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    begun = []
    for rank in "01":
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        more = {"ACCELERATE_USE_CPU": "true", "GLOO_SOCKET_IFNAME": "lo", **place, **ranks}
        begun.append(Forked(words, output.with_name(f"{output.name}-{rank}"), **more))
    done = [process.wait(timeout) for process in begun]
    assert [end.returncode for end in done] == [0, 0], "".join(end.stderr[-3000:] for end in done)
    return [end.stdout for end in done]


def _run(words: list[str], environment: dict[str, str], cwd: str, out: str, err: str) -> None:
    """In the process that was forked: what an interpreter does between its start and its end."""
    for number, path in ((1, out), (2, err)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.path.insert(0, cwd)
    sys.argv[1:] = words[1:]
    try:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # which multiprocessing leaves out
