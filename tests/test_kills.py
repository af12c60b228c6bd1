"""Commands struck at random points keep what they have acknowledged: a few of the strikes of benchmarks/kills.py."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ALLOWED = subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode == 0


@pytest.fixture(scope="module")
def kills():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield importlib.import_module("kills")


@pytest.mark.slow
@pytest.mark.skipif(not ALLOWED, reason="a mount namespace of one's own is refused here")
@pytest.mark.parametrize(
    ("subjects", "harms", "strikes"), [("record", "kill,term,full", 3), ("train", "kill,full", 2), ("audit", "term", 1)]
)
def test_nothing_that_was_acknowledged_is_lost(tmp_path, subjects, harms, strikes):
    words = [sys.executable, str(ROOT / "benchmarks/kills.py"), "--subjects", subjects, "--harms", harms]
    words += ["--strikes", str(strikes), "--seed", "7", "--json", str(tmp_path / "kills.json")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *sys.path])}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    document = json.loads((tmp_path / "kills.json").read_text())
    assert document["faults"] == []
    assert document["counts"]["all"]["struck"] == strikes
    assert set(document["counts"]) == {"all", *(f"{subjects} {harm}" for harm in harms.split(","))}


def test_what_comes_after_the_checkpoint_is_not_acknowledged(kills, tmp_path):
    arm = tmp_path / "arms/a"
    (arm / "checkpoints/batch-000002").mkdir(parents=True)
    (arm / "checkpoints/batch-000002/position.json").write_text('{"batch": 2, "version": 2}')
    (arm / "metrics.jsonl").write_text("".join(json.dumps({"update": i}) + "\n" for i in (1, 2, 3)) + '{"upd')
    for i in range(3):
        (arm / "log").mkdir(exist_ok=True)
        (arm / f"log/batch-{i:06d}.parquet").write_bytes(bytes([i]))
    kept = kills.kept_of_run(tmp_path)
    assert sorted(kept) == ["a log/batch-000000.parquet", "a log/batch-000001.parquet", "a update 1", "a update 2"]
    (arm / "summary.json").write_text("{}")
    assert len(kills.kept_of_run(tmp_path)) == 6


def test_a_row_that_is_cut_off_in_the_middle_of_a_file_is_noticed(kills, tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"update": 1}\n{"upda\n{"update": 3}\n')
    with pytest.raises(json.JSONDecodeError):
        kills.rows(file)


def test_times_are_left_out_of_comparisons_and_nothing_else_is(kills):
    row = {"reward/mean": 1.0, "throughput/seconds": 2.0, "update": 3, "pipeline/idle_frac": 0.5}
    assert kills.timeless(row) == {"reward/mean": 1.0, "update": 3}


def test_counts_are_by_subject_and_harm_and_in_all(kills):
    trials = [
        {"subject": "train", "harm": "kill", "struck": 0},
        {"subject": "train", "harm": "kill", "struck": 1, "acknowledged": 4, "refused": 0},
        {"subject": "record", "harm": "full", "fault": "lost"},
    ]
    table = kills.counted(trials)
    expected = {"trials": 2, "struck": 1, "acknowledged": 4, "faults": 0, "refused": 0, "given up": 0}
    assert table["train kill"] == expected
    assert table["all"]["faults"] == table["record full"]["faults"] == 1
