"""Alarms on their way: each once, in order, never in the way of the watch."""

import threading
import time

import pytest

from offdrift.alarms.alarm import Alarm
from offdrift.alarms.command import Command
from offdrift.alarms.place import Delivery
from offdrift.alarms.sender import Sender
from offdrift.alarms.sent import SentAlarms
from offdrift.alarms.webhook import Webhook
from tests.alarms.receivers import FINDING, answer, in_turn, receiver


def alarm(step: int = 1, severity: str = "act") -> Alarm:
    return Alarm("/runs/a", "none", {**FINDING, "step": step, "severity": severity})


@pytest.fixture
def sent(tmp_path):
    return SentAlarms(tmp_path / "sent.txt")


def test_alarms_arrive_in_order_and_those_below_the_level_are_not_sent(sent, tmp_path):
    sender = Sender(Command(f'echo "$OFFDRIFT_STEP $OFFDRIFT_LEVEL" >> {tmp_path}/out', level="act"), sent)
    for step, severity in enumerate(("stop", "info", "act", "watch", "stop")):
        sender.add(alarm(step, severity))
    assert sender.close(20) == []
    assert (tmp_path / "out").read_text().split("\n") == ["0 stop", "2 act", "4 stop", ""]
    assert (sender.arrived, sender.failed) == (3, 0)


def test_an_alarm_that_arrived_is_not_sent_by_the_next_watch(sent, tmp_path):
    place = Command(f"echo x >> {tmp_path}/out", level="act")
    for expected in (0, 1):
        sender = Sender(place, SentAlarms(sent.file))
        sender.add(alarm())
        news = sender.close(20)
        assert [kind for kind, _ in news] == ["note"] * expected
        assert sender.before == expected
    assert (tmp_path / "out").read_text() == "x\n"
    other = Sender(Command(f"echo y >> {tmp_path}/out", level="act"), SentAlarms(sent.file))
    other.add(alarm())
    other.close(20)
    assert (tmp_path / "out").read_text() == "x\ny\n"


def test_an_alarm_that_did_not_arrive_is_sent_by_the_next_watch(sent):
    with receiver(in_turn(answer(403), answer(403), answer(200))) as received:
        for expected in (1, 0):
            sender = Sender(Webhook(received.url, waits=()), SentAlarms(sent.file))
            for step in range(2 * expected or 1):
                sender.add(alarm(step))
            warnings = [words for kind, words in sender.close(20) if kind == "warning"]
            assert len(warnings) == 2 * expected
    assert [body["step"] for body in received.bodies] == [0, 1, 0]


def test_a_failure_is_said_once_and_counted(sent):
    sender = Sender(Command("echo told; exit 1", level="act"), sent)
    for step in range(4):
        sender.add(alarm(step))
    news = sender.close(30)
    assert [words for kind, words in news if kind == "output"] == ["told"] * 4
    first, last = (words for kind, words in news if kind == "warning")
    assert "status 1" in first
    assert "4 of 4 alarms" in last


def test_adding_never_waits_and_closing_ends_in_time(sent):
    sender = Sender(Command("sleep 30", level="act"), sent)
    begun = time.monotonic()
    for step in range(100):
        sender.add(alarm(step))
    assert time.monotonic() - begun < 1
    news = sender.close(0.3)
    assert time.monotonic() - begun < 10
    assert "100 of 100 alarms" in news[-1][1]


def test_a_fault_of_a_place_does_not_end_the_alarms_that_follow(sent):
    class Faulty:
        name, key, level = "faulty", "faulty", "info"

        def __init__(self) -> None:
            self.steps = []

        def send(self, sent_alarm: Alarm, stop: threading.Event) -> Delivery:
            self.steps.append(sent_alarm.finding["step"])
            if len(self.steps) == 1:
                raise ZeroDivisionError("of a place")
            return Delivery()

    place = Faulty()
    sender = Sender(place, sent)
    for step in range(3):
        sender.add(alarm(step))
    news = sender.close(20)
    assert place.steps == [0, 1, 2]
    assert "ZeroDivisionError: of a place" in news[0][1]
    assert sender.arrived == 2


def test_a_memory_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    sender = Sender(Command("true", level="act"), SentAlarms(tmp_path / "file" / "sent.txt"))
    sender.add(alarm())
    ((kind, words),) = sender.close(20)
    assert kind == "warning"
    assert "sent.txt" in words
