"""Off a terminal a long step writes a line now and then; a short one does not."""

import os
import subprocess
import sys
import time

from offdrift.cli.lines import SILENCE_S, ProgressLines


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
    assert done.stderr.splitlines()[0] == "simulating the schedules"
    quiet = subprocess.run([*command, "--quiet"], capture_output=True, text=True, cwd=tmp_path)
    assert quiet.stderr == ""
