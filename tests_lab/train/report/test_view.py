"""Progress off a terminal."""

import io
import time

from rich.console import Console

from offdrift_lab.train.loop.context import Event
from offdrift_lab.train.report import view
from offdrift_lab.train.report.view import LiveProgress


def test_a_count_that_goes_up_is_no_silence_and_a_wait_is_named(monkeypatch):
    monkeypatch.setattr(view, "SILENCE_S", 1.0)
    out = io.StringIO()
    with LiveProgress(Console(file=out, width=100)) as live:
        for step in range(1, 31):
            live(Event("warm_start", step=step, total=300, metrics={"loss": 1.0}))
            time.sleep(0.05)
        counted = out.getvalue()
        time.sleep(2.6)
    assert " loss 1.00 nat" in counted
    assert "so far" not in counted
    assert "warm start 30/300: " in out.getvalue()
