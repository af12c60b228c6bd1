"""A log read in pieces, by any number of workers, interrupted or not, gives one result."""

import json
import os
from pathlib import Path

import pytest
import torch

from offdrift.audit import stream
from offdrift.audit.conclude import conclude, read_audit, write_audit
from offdrift.audit.partial import AuditPartial, Job
from offdrift.audit.stream import audit, in_processes
from offdrift.errors import RecordError
from offdrift.records.readers import detect, pieces
from offdrift.records.recorder import write_log
from tests.audit.logs import drawn as logged


@pytest.fixture(scope="module")
def log(tmp_path_factory) -> Path:
    """Three files of three steps each."""
    folder = tmp_path_factory.mktemp("log")
    for i in range(3):
        write_log(logged(seed=i), folder / f"batch-{i}.parquet")
    return folder


@pytest.fixture(scope="module")
def whole(log, tmp_path_factory) -> AuditPartial:
    """What one process makes of the log."""
    return audit(*planned(log), folder=tmp_path_factory.mktemp("whole"))


def planned(log: Path, piece_bytes: int = 6000) -> tuple[Job, list]:
    found = detect([str(log)])
    return Job(found), pieces(found, piece_bytes=piece_bytes)


def test_workers_give_what_one_process_gives_to_the_last_bit(log, whole, tmp_path):
    job, plan = planned(log)
    assert len(plan) >= 3
    assert audit(job, plan, folder=tmp_path, run=in_processes(2)).to_bytes() == whole.to_bytes()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
def test_ray_gives_what_one_process_gives_to_the_last_bit(log, whole, tmp_path):
    pytest.importorskip("ray")
    from offdrift.audit.stream import on_ray

    assert audit(*planned(log), folder=tmp_path, run=on_ray("local")).to_bytes() == whole.to_bytes()


def test_damaged_bytes_are_refused_and_nothing_is_unpickled(whole):
    stored = whole.to_bytes()
    for damaged in (b"", b"not a zip", stored[: len(stored) // 2]):
        with pytest.raises(RecordError, match="cannot be read"):
            AuditPartial.from_bytes(damaged)


def test_an_interrupted_audit_continues_where_it_was(log, whole, tmp_path, monkeypatch):
    job, plan = planned(log)

    def stop_after_two(done: int, part: AuditPartial) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        audit(job, plan, folder=tmp_path / "cut", watch=stop_after_two)
    read = []
    real = stream.work
    monkeypatch.setattr(stream, "work", lambda piece, job: read.append(piece) or real(piece, job))
    again = audit(job, plan, folder=tmp_path / "cut")
    assert read == plan[2:]
    assert again.to_bytes() == whole.to_bytes()


def test_a_damaged_part_is_made_again(log, whole, tmp_path):
    job, plan = planned(log)
    audit(job, plan, folder=tmp_path)
    part = sorted((tmp_path / "parts").glob("*.npz"))[0]
    part.write_bytes(b"half a part")
    assert audit(job, plan, folder=tmp_path).to_bytes() == whole.to_bytes()


def test_a_file_that_changed_is_read_again(tmp_path):
    """Also where as many bytes as before stand at the same places: its date tells."""
    log, kept = tmp_path / "log.jsonl", tmp_path / "kept"
    results = []
    for old in (-1.1, -1.9):
        log.write_text(json.dumps({"logp_rollout": [-1.0], "logp_old": [old]}) + "\n")
        os.utime(log, (1e9, 1e9 - 1000 * old))
        results.append(audit(*planned(log), folder=kept).to_bytes())
    assert results[0] != results[1]
    assert results[1] == audit(*planned(log), folder=tmp_path / "fresh").to_bytes()


def test_nothing_to_read_says_so(log, tmp_path):
    with pytest.raises(RecordError, match="nothing to read"):
        audit(planned(log)[0], [], folder=tmp_path)


def test_rows_that_cannot_be_read_are_counted_and_told(tmp_path):
    good = {"logp_rollout": [-1.0, -2.0], "logp_old": [-1.1, -1.9], "reward": 1.0}
    lines = [json.dumps(good), "{half a line", json.dumps(good | {"logp_old": [-1.0]}), json.dumps(good)]
    log = tmp_path / "log.jsonl"
    log.write_text("\n".join(lines) + "\n")
    found = detect([str(log)])
    part = audit(Job(found), pieces(found), folder=tmp_path / "out")
    assert part.unread.rows == 2
    assert [b.row for b in part.bad] == [2, 3]
    told = conclude(part, Job(found))
    assert told["counts"]["bad_rows"] == 2
    assert told["counts"]["sequences"] == 2
    assert [b["row"] for b in told["bad_rows"]] == [2, 3]


def told_of(rows, tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = detect([str(log)])
    return conclude(audit(Job(found), pieces(found), folder=tmp_path / "out"), Job(found))["alphas"]


def test_an_audit_says_where_to_invest_or_what_the_log_lacks_for_it(tmp_path):
    """Half of mu's tokens have probability 1/2, and pi_old moves them by little, pi by much."""
    three = {"logp_rollout": [-0.7, -0.7], "logp_old": [-0.701, -0.699], "logp": [-0.9, -0.5]}
    told = told_of([three] * 3, tmp_path)
    assert (told["invest"], told["basis"], told["missing"]) == ("staleness", "mean", None)
    assert told["mismatch"]["mean"] == pytest.approx(0.0005, rel=1e-2)
    assert told["staleness"]["mean"] == pytest.approx((0.1805 + 0.2201) / 4, rel=1e-2)
    assert told["staleness"]["high"] is None
    exact = three | {"tv_rollout_old": [0.3, 0.1], "tv_old_current": [0.02, 0.04]}
    told = told_of([exact] * 3, tmp_path)
    assert (told["invest"], told["basis"]) == ("mismatch", "largest")
    assert (told["mismatch"]["low"], told["mismatch"]["mean"]) == pytest.approx((0.3, 0.2))
    assert "(exact)" in told["sentence"]
    told = told_of([{k: v for k, v in three.items() if k != "logp_old"}] * 3, tmp_path)
    assert (told["invest"], told["mismatch"], told["staleness"]) == (None, None, None)
    assert "(logp_old)" in told["sentence"]
    told = told_of([{k: v for k, v in three.items() if k != "logp"}] * 3, tmp_path)
    assert "(logp)" in told["missing"]
    assert told["mismatch"]["grade"] == "sampled"


def test_only_bad_rows_is_an_error_that_names_the_first(tmp_path):
    log = tmp_path / "log.jsonl"
    good = json.dumps({"logp_rollout": [-1.0], "logp_old": [-1.0]})
    log.write_text(good + "\n")
    found = detect([str(log)])
    log.write_text("{" + "x" * (len(good) - 1) + "\n")
    part = audit(Job(found), pieces(found), folder=tmp_path / "out")
    with pytest.raises(RecordError, match=r"log\.jsonl:1"):
        conclude(part, Job(found))


def test_the_stored_audit_comes_back(log, whole, tmp_path):
    told = conclude(whole, planned(log)[0])
    write_audit(told, tmp_path)
    assert read_audit(tmp_path) == json.loads(json.dumps(told))
    with pytest.raises(RecordError, match="holds no audit"):
        read_audit(tmp_path / "elsewhere")
    covered = {"said" if name == "sentences" else name: value for name, value in told["coverage"].items()}
    (tmp_path / "audit.json").write_text(json.dumps({**told, "format": 1, "coverage": covered}))
    assert read_audit(tmp_path) == json.loads(json.dumps(told)), "as 0.1 wrote it"
    (tmp_path / "audit.json").write_text(json.dumps({**told, "format": 99}))
    with pytest.raises(RecordError, match="format 99"):
        read_audit(tmp_path)


def test_the_tally_equals_one_pass_over_everything(log, whole):
    """Pieces cut files anywhere between rows; sums must not notice."""
    told = conclude(whole, planned(log)[0])
    lp = [logged(seed=i) for i in range(3)]
    ratio = torch.cat([x.logp_old - x.logp_rollout for x in lp]).double()
    assert told["counts"]["tokens"] == len(ratio)
    sampled = [m["sampled_sequences"] for m in told["methods"] if m["why_not"] is None]
    assert set(sampled) == {72}
    assert len(sampled) > 50
    assert told["overall"]["mismatch/k1"] == pytest.approx(float(-ratio.mean()), rel=1e-5)
    assert told["overall"]["mismatch/abs_log_ratio_max"] == pytest.approx(float(ratio.abs().max()), rel=1e-5)
