"""Off a terminal a long step writes a line now and then; a short one does not."""

import io
import os
import subprocess
import sys
import time

from rich.console import Console
from rich.progress import Progress

from offdrift.cli.lines import SILENCE_S, ProgressLines, TaskLines
from offdrift.cli.waiting import Waiting


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def lines(**options) -> tuple[ProgressLines, list[str], Clock]:
    written, clock = [], Clock()
    return ProgressLines(written.append, clock=clock, **options), written, clock


def test_stages_are_written_when_a_line_is_due():
    tell, written, clock = lines()
    for i in range(100):
        tell(f"part {i}", i, 100)
        clock.now += 0.1
    assert len(written) == 3
    assert written[0] == "25/100 part 25"
    tell("a note", 0, 0)
    assert written[-1] == "a note"


def test_a_stage_that_lasts_says_how_long():
    tell, written, clock = lines()
    tell("loading", 0, 1)
    times = []
    for _ in range(600):
        clock.now += 0.2
        before = len(written)
        tell.due()
        times += [clock.now] * (len(written) - before)
    assert written[0] == "loading: 3 s so far"
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    assert max(gap for gap, at in zip(gaps, times, strict=True) if at < 10 * SILENCE_S) < 3
    assert max(gaps) < 0.1 * 120 + 1
    assert len(written) < 40


def test_every_stage_is_written_where_each_takes_seconds():
    tell, written, _ = lines(every=True)
    tell("drawing", 0, 3)
    tell("scoring", 1, 3)
    tell("loading", 0, 1)
    assert written == ["0/3 drawing", "1/3 scoring", "loading"]


def test_a_thread_watches_and_ends():
    written = []
    with ProgressLines(written.append) as tell:
        tell("sleeping", 0, 1)
        time.sleep(SILENCE_S + 1.0)
    assert written[0].startswith("sleeping: ")
    count = len(written)
    time.sleep(0.5)
    assert len(written) == count


def test_plan_says_what_it_does_when_it_is_piped(tmp_path):
    command = [
        sys.executable,
        "-m",
        "offdrift",
        "plan",
        "-s",
        "sync",
        "--this-split",
        "--bounds",
        "1",
        "--set",
        "run.updates=2",
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "COLUMNS": "100"})
    assert done.returncode == 0, done.stderr
    assert "simulating the schedules" in done.stderr.splitlines()
    quiet = subprocess.run([*command, "--quiet"], capture_output=True, text=True, cwd=tmp_path)
    assert quiet.stderr == ""


def test_a_bar_that_cannot_be_drawn_says_how_far_it_is():
    bar, written, clock = Progress(), [], Clock()
    tell = TaskLines(bar, written.append, clock=clock)
    task = bar.add_task("random \\[pairs]", total=2000)
    for _ in range(10):
        clock.now += 1.0
        bar.update(task, advance=100)
        tell.due()
    assert written[0].startswith("300/2,000 random [pairs]")
    assert len(written) == 3


SLEEPING = """
import sys, time
from offdrift.cli.app import Screen
screen = Screen(quiet="-q" in sys.argv)
screen.doing("thinking")
time.sleep({seconds})
screen.note("done")
time.sleep({seconds})
screen.shown()
"""


def slept(seconds: float, *words: str) -> list[str]:
    program = [sys.executable, "-c", SLEEPING.format(seconds=seconds), *words]
    done = subprocess.run(program, capture_output=True, text=True, env={**os.environ, "RANK": "0"})
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()


def test_what_is_being_done_is_said_until_something_is_shown():
    *before, last = slept(SILENCE_S + 1)
    assert last == "done", "no line after the output"
    assert before
    assert all(line.startswith("thinking: ") for line in before)
    assert slept(SILENCE_S + 0.5, "-q") == []


def test_a_terminal_shows_what_is_being_done_on_a_line_that_vanishes():
    stream = io.StringIO()
    waiting = Waiting(Console(file=stream, force_terminal=True, width=60, legacy_windows=False))
    waiting.begin("thinking")
    waiting.end()
    assert stream.getvalue() == "", "too short to be said"
    waiting.begin("thinking")
    end = time.monotonic() + 60
    while "thinking" not in stream.getvalue() and time.monotonic() < end:
        time.sleep(0.05)
    waiting.end()
    shown = stream.getvalue()
    assert "thinking" in shown
    assert shown.endswith("\x1b[2K"), "the line is erased"
    time.sleep(0.3)
    assert stream.getvalue() == shown, "nothing is drawn afterwards"
