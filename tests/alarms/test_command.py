"""A command gets the finding as values, never as a part of its line, and cannot hold anything up."""

import json
import os
import threading
import time
from pathlib import Path

import pytest

from offdrift.alarms.alarm import Alarm
from offdrift.alarms.command import PRINTED, Command
from offdrift.alarms.place import Delivery
from tests.alarms.receivers import FINDING, HOSTILE

LATE, STOPPED = "it ran for more than 0.5 s, and it was ended", "the watch ended, and it was ended"


@pytest.fixture
def send(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def go(line: str, *, timeout: float = 20, stop: threading.Event | None = None, **changes) -> Delivery:
        alarm = Alarm("/runs/a", "none", {**FINDING, **changes}, "file:///runs/a")
        return Command(line, level="act", timeout=timeout).send(alarm, stop or threading.Event())

    return go


def test_the_finding_comes_as_variables_and_as_json_on_stdin(send, tmp_path):
    printed = send('cat > stdin.json; printf "%s|%s" "$OFFDRIFT_WHAT" "$OFFDRIFT_STEP"').printed
    assert printed == f"{FINDING['symptom']}|40"
    told = json.loads((tmp_path / "stdin.json").read_text())
    assert (told["what"], told["finding"]) == (FINDING["symptom"], FINDING)


def test_no_text_of_a_log_is_ever_run(send, tmp_path):
    delivery = send(
        'printf "%s" "$OFFDRIFT_WHAT" > what; cat > stdin.json', symptom=HOSTILE, cause=HOSTILE, rule=HOSTILE
    )
    assert delivery == Delivery()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["stdin.json", "what"]
    assert (tmp_path / "what").read_text().startswith("$(touch pwned) `touch pwned`; touch pwned &")
    assert json.loads((tmp_path / "stdin.json").read_text())["finding"]["symptom"] == HOSTILE


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("exit 3", "it ended with status 3"),
        ("no-such-program-at-all", "it ended with status 127"),
        ("a\0b", "it cannot be started: embedded null byte"),
    ],
)
def test_a_command_that_fails_is_a_problem_with_its_status(send, line, problem):
    assert send(line).problem == problem


def test_output_is_its_end_without_control_characters(send):
    printed = send(f"head -c {3 * PRINTED} /dev/zero | tr '\\0' a; printf '\\033[31mlast'").printed
    assert printed.endswith("\\u001b[31mlast")
    assert len(printed) < PRINTED + 20


def test_a_command_that_hangs_is_ended_with_what_it_has_started(send, tmp_path):
    begun = time.monotonic()
    delivery = send("sleep 30 & echo $! > child; sleep 30", timeout=0.5)
    assert time.monotonic() - begun < 10
    assert delivery.problem == LATE
    assert gone(int((tmp_path / "child").read_text()))


def test_the_end_of_the_watch_ends_it(send):
    stop, begun = threading.Event(), time.monotonic()
    threading.Timer(0.2, stop.set).start()
    assert send("sleep 30", stop=stop).problem == STOPPED
    assert time.monotonic() - begun < 10


def test_a_command_may_leave_something_running(send, tmp_path):
    begun = time.monotonic()
    assert send("sleep 20 & echo $! > child") == Delivery()
    assert time.monotonic() - begun < 10
    os.kill(int((tmp_path / "child").read_text()), 9)


def test_a_finding_larger_than_a_pipe_is_no_deadlock(send):
    assert send("true", snippets={"shell": "x" * 10**6}) == Delivery()


def gone(pid: int) -> bool:
    """Whether a process has ended, within two seconds; one that nobody has waited for has ended."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False
