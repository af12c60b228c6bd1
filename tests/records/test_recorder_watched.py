"""`offdrift watch` on a folder that a recorder is writing to: every step once, and what goes wrong."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
import torch

from offdrift.audit.watch import Log
from offdrift.cli import watch as watch_command
from offdrift.records.recorder import Recorder, record
from tests.command import command

SEQUENCES, TIME = 64, 16


def step_of(recorder: Recorder, step: int, *, drift: float = 0.01) -> None:
    """A step whose log-ratio (current against rollout) has standard deviation `drift`."""
    generator = torch.Generator().manual_seed(step)
    rollout = -torch.rand(SEQUENCES, TIME, generator=generator) - 0.5
    moved = drift * torch.randn(SEQUENCES, TIME, generator=generator)
    record(
        recorder, step=step, logp_rollout=rollout, logp=(rollout + moved).clamp(max=0), mask=torch.ones(SEQUENCES, TIME)
    )


def test_each_step_is_given_once_and_whole_while_the_log_is_written(tmp_path: Path) -> None:
    log = Log([str(tmp_path)])
    assert list(log.poll()) == []  # nothing is there yet
    rows = []
    with Recorder(tmp_path, seconds=600) as recorder:
        for step in range(1, 10):
            step_of(recorder, step)
            if step % 3 == 0:
                # A file may end in the middle of a step: the other half comes with the next one.
                assert recorder.flush()
                step_of(recorder, step)
                rows += list(log.poll())
    rows += [*log.poll(), *log.finish()]
    assert [r.numbers["step"] for r in rows] == list(range(1, 10))
    halves = [SEQUENCES * (2 if step % 3 == 0 else 1) for step in range(1, 10)]
    assert [r.numbers["sequences"] for r in rows] == halves
    assert (log.bad_rows, log.late_rows) == (0, 0)


def test_what_a_writer_has_not_finished_is_not_read(tmp_path: Path) -> None:
    with Recorder(tmp_path) as recorder:
        step_of(recorder, 1)
    (whole,) = tmp_path.iterdir()
    data = whole.read_bytes()
    (tmp_path / f".{whole.name}.1.tmp").write_bytes(data[: len(data) // 2])
    (tmp_path / f".{whole.name}.claim").write_bytes(b"")
    log = Log([str(tmp_path)])
    rows = [*log.poll(), *log.finish()]
    assert [(r.numbers["step"], r.numbers["sequences"]) for r in rows] == [(1, SEQUENCES)]
    assert log.bad_rows == 0


def test_the_command_follows_a_recorder_and_finds_an_engine_that_breaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From step 21 on the engines differ by half a nat per token."""

    def train() -> None:
        with Recorder(tmp_path, seconds=0.05) as recorder:
            for step in range(1, 41):
                step_of(recorder, step, drift=0.01 if step <= 20 else 0.5)
                time.sleep(0.01)

    class Clock:
        """It stands still while the recorder writes, however long that takes, then ticks."""

        now, sleep = 0.0, staticmethod(time.sleep)

        def monotonic(self) -> float:
            self.now += not training.is_alive()
            return self.now

    training = threading.Thread(target=train)
    training.start()
    monkeypatch.setattr(watch_command, "time", Clock())
    words = ("watch", str(tmp_path), "--every", "0.05", "--until-idle", "2", "--json")
    done = command(monkeypatch, capsys, *words)
    training.join()
    assert (done.code, done.stderr) == (0, "")
    said = [json.loads(line) for line in done.stdout.splitlines()]
    steps = [row for row in said if row["kind"] == "step"]
    assert [row["step"] for row in steps] == list(range(1, 41))
    assert {row["sequences"] for row in steps} == {SEQUENCES}
    # E[k3] of a normal log-ratio x with deviation s, to fourth order: s^2 / 2 + s^4 / 8.
    assert steps[0]["full/k3"] == pytest.approx(0.01**2 / 2, rel=0.2)
    assert steps[-1]["full/k3"] == pytest.approx(0.5**2 / 2 + 0.5**4 / 8, rel=0.2)
    found = [i for i, row in enumerate(said) if row["kind"] == "finding"]
    assert found
    broken = next(i for i, row in enumerate(said) if row.get("step") == 21)
    assert min(found) > broken
