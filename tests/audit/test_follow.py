"""Following a log while it is written."""

import json

import pytest
import torch

from offdrift.audit.watch import Log, Metrics, sources
from offdrift.records.recorder import Recorder, record
from tests.records.test_dumps import rank_dump


def line(step: int, reward: float = 1.0, shift: float = 0.1) -> str:
    row = {"step": step, "logp_rollout": [-1.0, -2.0], "logp_old": [-1.0 - shift, -2.0], "reward": reward}
    return json.dumps(row) + "\n"


class Clock:
    """Time that passes when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_step_is_given_once_a_later_one_appears(tmp_path):
    log, clock = tmp_path / "log.jsonl", Clock()
    follow = Log([str(log)], clock=clock)
    assert list(follow.poll()) == []  # the file is not there yet
    log.write_text(line(1))
    assert list(follow.poll()) == []
    with log.open("a") as f:
        f.write(line(1, reward=0.0))  # a step may come in several readings
    assert list(follow.poll()) == []
    with log.open("a") as f:
        f.write(line(2))
    (row,) = follow.poll()
    assert row.numbers["step"] == 1
    assert row.numbers["reward/mean"] == 0.5
    assert row.numbers["mismatch/k1"] == pytest.approx(0.05)
    assert list(follow.poll()) == []


@pytest.mark.parametrize("finished", [True, False])
def test_the_last_step_is_given_when_nothing_more_comes(tmp_path, finished):
    log, clock = tmp_path / "log.jsonl", Clock()
    log.write_text(line(1))
    follow = Log([str(log)], clock=clock, settle=10)
    assert list(follow.poll()) == []
    clock.now = 0 if finished else 11
    assert [r.numbers["step"] for r in (follow.finish() if finished else follow.poll())] == [1]
    assert list(follow.finish()) == []


def test_half_a_line_waits_for_its_end(tmp_path):
    log = tmp_path / "log.jsonl"
    text = line(1) + line(2)
    log.write_text(text[:-20])
    follow = Log([str(log)])
    assert list(follow.poll()) == []
    log.write_text(text + line(3))
    rows = list(follow.poll())
    assert [r.numbers["step"] for r in rows] == [1, 2]
    assert follow.bad_rows == 0


def test_a_row_of_a_step_that_was_given_is_counted_as_a_bad_line_is_and_not_given_again(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text(line(1) + line(2))
    follow = Log([str(log)])
    assert len(list(follow.poll())) == 1
    with log.open("a") as f:
        f.write(line(1) + "nonsense\n" + line(3))
    assert [r.numbers["step"] for r in follow.poll()] == [2]
    assert (follow.late_rows, follow.bad_rows) == (1, 1)


def test_a_run_of_ours_is_followed_by_its_metrics(tmp_path):
    arm = tmp_path / "arms" / "none"
    arm.mkdir(parents=True)
    (tmp_path / "run.json").write_text("{}")
    assert sources(tmp_path) == []  # a run whose first arm has not written yet
    metrics = arm / "metrics.jsonl"
    metrics.write_text('{"update": 1, "full/k3": 0.5, "divergence/grade": "exact", "x": null}\n{"upd')
    (source,) = sources(tmp_path)
    assert isinstance(source, Metrics)
    (row,) = source.poll()
    assert row.source == "none"
    assert row.numbers == {"step": 1, "update": 1, "full/k3": 0.5}
    with metrics.open("a") as f:
        f.write('ate": 2}\n')
    (row,) = source.poll()
    assert row.numbers["step"] == 2


def test_metrics_that_were_cut_back_are_read_again(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"update": 1}\n{"update": 2}\n')
    source = Metrics(file, "arm")
    assert len(list(source.poll())) == 2
    file.write_text('{"update": 1}\n')
    assert [r.numbers["step"] for r in source.poll()] == [1]


def test_a_log_that_was_written_anew_is_read_from_its_beginning(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text(line(1) + line(1) + line(2))
    follow = Log([str(log)])
    assert [r.numbers["step"] for r in follow.poll()] == [1]
    log.write_text(line(3) + line(4))
    assert [r.numbers["step"] for r in follow.poll()] == [2, 3]


def aged(step: int, version: int, drawn: int) -> str:
    row = {**json.loads(line(step)), "version": version, "rollout_version": drawn}
    return json.dumps(row) + "\n"


@pytest.mark.parametrize(
    ("versions", "lags"),
    [
        ([(5, 5), (5, 5), (5, 5)], [0, 0, 0]),  # nothing is trained, or nobody counts
        ([(5, 5), (6, 6), (7, 6)], [0, 0, 1]),
        ([(5, 4), (5, 3), (5, 2)], [1, 2, 3]),
    ],
)
def test_versions_that_stand_still_are_an_age(tmp_path, versions, lags):
    log = tmp_path / "log.jsonl"
    log.write_text("".join(aged(i + 1, *pair) for i, pair in enumerate(versions)))
    follow = Log([str(log)])
    rows = [*follow.poll(), *follow.finish()]
    assert [r.numbers.get("version_lag/mean") for r in rows] == lags


def test_a_step_waits_for_the_files_of_other_ranks_and_memory_for_none(tmp_path):
    """Two ranks record the same steps, the second always a file later; all steps are whole."""
    follow_clock = Clock()
    follow = Log([str(tmp_path)], clock=follow_clock)
    recorders = [Recorder(tmp_path, rank=rank, seconds=600) for rank in (0, 1)]
    rows, most = [], 0
    for block in range(4):
        for recorder in recorders:
            for step in range(5 * block + 1, 5 * block + 6):
                logp = torch.full((4, 6), -1.0)
                record(recorder, step=step, logp_rollout=logp, logp=logp - 0.01, mask=torch.ones(4, 6))
            recorder.flush()
            follow_clock.now += 4
            rows += follow.poll()
            most = max(most, len(follow.open))
    assert len(rows) > 5, "not only at the end"
    assert most < 20, "what was given is forgotten"
    rows += follow.finish()
    for recorder in recorders:
        recorder.close()
    assert [(r.numbers["step"], r.numbers["sequences"]) for r in rows] == [(i, 8) for i in range(1, 21)]
    assert follow.late_rows == 0


@pytest.mark.parametrize("late", [False, True])
def test_a_pipelines_last_stage_takes_the_place_of_the_stages_before_it(tmp_path, late):
    """miles writes the samples of a rollout once per stage; the last one has the log-probs."""
    clock, folder = Clock(), tmp_path / "train_data"
    follow = Log([str(tmp_path)], clock=clock, settle=10)
    rows = []
    for rollout in (7, 8):
        stages = [{"log_probs": None, "ref_log_probs": None}, {}]
        for rank, lacks in enumerate(stages):
            path = folder / f"{rollout}_{rank}.pt"
            rank_dump(path, rank, [0, 1, 2], data=lacks, rollout_id=rollout)
            rows += follow.poll()
            clock.now += 11 if late and rollout == 7 else 4
            rows += follow.poll()
    rows += follow.finish()
    assert [(r.numbers["step"], r.numbers["sequences"]) for r in rows] == [(7, 3), (8, 3)]
    # What comes after the wait is too late, and is said to be: the wait has an end.
    assert ["mismatch/k1" in r.numbers for r in rows] == [not late, True]
    assert follow.late_rows == (3 if late else 0)
    assert follow.rows == (9 if late else 6)
