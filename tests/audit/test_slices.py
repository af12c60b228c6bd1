"""A log read in slices, on any machines, in any order, with slices lost and sent again: the audit of the whole."""

import os
import random
import signal
import time

import pytest

from offdrift.audit import stream
from offdrift.audit.conclude import conclude
from offdrift.audit.forecast import forecast
from offdrift.audit.partial import AuditPartial, Job
from offdrift.audit.stream import audit, in_process, in_processes, slice_of
from offdrift.errors import EngineError, RecordError
from offdrift.records.readers import detect, pieces
from offdrift.records.recorder import write_log
from tests.audit.logs import asynchronous


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """Four files of an asynchronous run: all facets, lags and workers among them."""
    folder = tmp_path_factory.mktemp("log")
    for i in range(4):
        write_log(asynchronous(i), folder / f"batch-{i}.parquet")
    return folder


def planned(log, piece_bytes: int = 40000) -> tuple[Job, list]:
    found = detect([str(log)])
    return Job(found, sample_rate=1e-9), pieces(found, piece_bytes=piece_bytes)


def without_seconds(part: AuditPartial, job: Job) -> dict:
    result = conclude(part, job)
    return {name: x for name, x in result.items() if name not in ("source", "created")}


@pytest.mark.parametrize("of", [3, 1000])
def test_slices_in_any_order_give_the_audit_of_the_whole_to_the_last_bit(log, tmp_path, of):
    job, plan = planned(log)
    whole = audit(job, plan, folder=tmp_path / "whole")
    assert whole.tally.facets.rows()["lag"]
    assert whole.tally.facets.rows()["worker"]
    numbers = list(range(1, of + 1))
    random.Random(of).shuffle(numbers)
    shares = [slice_of(plan, i, of) for i in numbers]
    assert sorted(str(p) for share in shares for p in share) == sorted(map(str, plan))
    for share in shares:
        if share:
            audit(job, share, folder=tmp_path / "slices")
    read = []
    merged = audit(job, plan, folder=tmp_path / "slices", run=lambda job, left: (read.extend(left), iter(()))[1])
    assert read == []  # nothing is left to read
    assert merged.to_bytes() == whole.to_bytes()
    assert without_seconds(merged, job) == without_seconds(whole, job)


def test_a_lost_slice_is_read_by_whoever_merges(log, tmp_path, monkeypatch):
    job, plan = planned(log)
    whole = audit(job, plan, folder=tmp_path / "whole")
    for i in (1, 3):
        audit(job, slice_of(plan, i, 3), folder=tmp_path / "slices")
    read = []
    real = stream.work
    monkeypatch.setattr(stream, "work", lambda piece, job: read.append(piece) or real(piece, job))
    assert audit(job, plan, folder=tmp_path / "slices").to_bytes() == whole.to_bytes()
    assert read == slice_of(plan, 2, 3)


def test_parts_are_stored_as_they_arrive_and_merged_in_order(log, tmp_path):
    job, plan = planned(log)
    whole = audit(job, plan, folder=tmp_path / "whole")
    assert len(plan) > 3

    def backwards(job, left):
        yield from reversed(list(in_process(job, left)))

    assert audit(job, plan, folder=tmp_path / "back", run=backwards).to_bytes() == whole.to_bytes()

    def dies(job, left):
        """All but the first piece, and then the reader is gone."""
        yield from list(in_process(job, left))[1:]
        raise EngineError("gone")

    with pytest.raises(EngineError, match="gone"):
        audit(job, plan, folder=tmp_path / "died", run=dies)
    assert len(list((tmp_path / "died" / "parts").glob("*.npz"))) == len(plan) - 1
    assert audit(job, plan, folder=tmp_path / "died").to_bytes() == whole.to_bytes()


def _kill_itself(piece, job):
    if piece.file.endswith("batch-2.parquet"):
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    return stream.work(piece, job).to_bytes()


def test_a_worker_that_is_killed_loses_its_piece_alone_and_the_message_says_how_to_go_on(log, tmp_path, monkeypatch):
    job, plan = planned(log, piece_bytes=10**9)
    monkeypatch.setattr(stream, "_work", _kill_itself)
    with pytest.raises(EngineError, match=r"lack of memory.*same command goes on.*--workers 2"):
        audit(job, plan, folder=tmp_path, run=in_processes(2))
    assert list((tmp_path / "parts").glob("*.npz"))
    monkeypatch.undo()
    whole = audit(job, plan, folder=tmp_path / "whole")
    assert audit(job, plan, folder=tmp_path).to_bytes() == whole.to_bytes()


def test_a_forecast_of_all_pieces_is_exact_in_tokens_and_says_what_it_measured(log, tmp_path):
    job, plan = planned(log, piece_bytes=10**9)
    whole = audit(job, plan, folder=tmp_path)
    expected = forecast(job, plan[:3], workers=2)
    assert expected.measured_pieces == expected.pieces == 3
    assert expected.tokens == audit(job, plan[:3], folder=tmp_path / "three").tally.tokens
    all_of_it = forecast(job, plan)
    assert abs(all_of_it.tokens / whole.tally.tokens - 1) < 0.2
    assert all_of_it.slices == 1
    assert "4 pieces" in all_of_it.sentences()[0]
    with pytest.raises(RecordError, match="nothing to read"):
        forecast(job, [])


@pytest.mark.parametrize("text", ["0/3", "4/3", "3", "a/b", "1/0", "-1/2"])
def test_a_slice_that_is_none_is_refused_with_an_example(text):
    from offdrift.cli.audit import _slice

    with pytest.raises(Exception, match=rf"--slice {text}: give I/N .*3/8"):
        _slice(text)
