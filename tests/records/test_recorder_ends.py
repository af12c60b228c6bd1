"""How recording ends: interrupts, processes of `multiprocessing`, a writer that is gone."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from offdrift.errors import RecordError
from offdrift.records import recorder as module
from offdrift.records.recorder import Recorder
from tests.records.test_recorder import SOON, Disk, at, disk, end_the_writer, steps_in, thrice, until

__all__ = ["disk"]


def test_closing_again_after_an_interrupt_waits_for_what_is_being_written(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(tmp_path, seconds=0)
    for step in range(3):
        recorder.add(at(step))
    assert disk.asked.wait(SOON)

    def interrupted(*_: object) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as ctrl_c:
        ctrl_c.setattr(recorder._own._changed, "wait_for", interrupted)
        with pytest.raises(KeyboardInterrupt):
            recorder.close()
    with pytest.raises(RecordError, match="is closed"):
        recorder.add(at(3))
    threading.Timer(0.05, disk.released.set).start()
    module._close_all()  # as at the end of the process
    assert (recorder.written, recorder.dropped) == (3, 0)
    assert steps_in(tmp_path) == thrice(range(3))


def test_a_loop_that_changes_its_directory_keeps_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    recorder = Recorder("log", seconds=600)
    recorder.add(at(0))
    monkeypatch.chdir(tmp_path / "elsewhere")
    recorder.close()
    assert steps_in(tmp_path / "log") == thrice([0])
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_two_threads_that_close_both_wait(tmp_path: Path, disk: Disk) -> None:
    recorder = Recorder(tmp_path)
    recorder.add(at(0))
    seen: list[int] = []

    def close() -> None:
        recorder.close()
        seen.append(recorder.written)

    threads = [threading.Thread(target=close) for _ in range(2)]
    for thread in threads:
        thread.start()
    until(lambda: recorder.closed and disk.asked.is_set())
    assert seen == []
    disk.released.set()
    for thread in threads:
        thread.join(SOON)
    assert seen == [1, 1]


def test_closing_tells_what_was_lost_with_the_writer_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end_the_writer(monkeypatch)
    recorder = Recorder(tmp_path, seconds=0)
    recorder.add(at(0))
    until(lambda: recorder.closed)
    with pytest.raises(RecordError, match="1 batches are lost: SystemExit"):
        recorder.close()
    recorder.close()
    assert (recorder.written, recorder.dropped) == (0, 1)


def test_no_thread_outlives_closing(tmp_path: Path) -> None:
    def writers() -> list[threading.Thread]:
        return [t for t in threading.enumerate() if t.name == "offdrift-recorder"]

    before = len(writers())
    for folder, fails in ((tmp_path / "kept", False), (tmp_path / "gone", True)):
        recorder = Recorder(folder, seconds=600)
        recorder.add(at(0))
        assert len(writers()) == before + 1
        if fails:
            folder.rmdir()
            folder.write_text("in the way")
            with pytest.raises(RecordError, match="is a file"):
                recorder.close()
        else:
            recorder.close()
        assert len(writers()) == before


PROCESSES = """
import multiprocessing, sys
from tests.records.test_recorder import at
from offdrift.records.recorder import Recorder

def begin(folder, step):
    global recorder  # nothing but the end of the process closes it
    recorder = Recorder(folder, rank=step)
    recorder.add(at(step))

def grandchild(folder):
    begin(folder, 2)
    child = multiprocessing.get_context("fork").Process(target=recorder.add, args=(at(3),))
    child.start()
    child.join()

if __name__ == "__main__":
    for target, given in ((begin, (1,)), (grandchild, ())):
        process = multiprocessing.get_context("fork").Process(target=target, args=(sys.argv[1], *given))
        process.start()
        process.join()
        assert process.exitcode == 0
"""


def test_processes_of_multiprocessing_write_what_waits(tmp_path: Path) -> None:
    program, folder = tmp_path / "program.py", tmp_path / "log"
    program.write_text(PROCESSES, encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, str(program), str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=SOON, env=env)
    assert done.returncode == 0, done.stderr
    assert sorted(steps_in(folder)) == thrice([1, 2, 3])
    assert not [p for p in folder.iterdir() if p.name.startswith(".")]
