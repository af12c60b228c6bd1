"""The run folder: whole files, line files that survive a kill, and cutting back for a resume."""

import json

import pytest

from offdrift.errors import CheckpointError, RecordError
from offdrift.train.run_folder import RunFolder, plain


def test_numbers_that_json_cannot_say_become_null():
    assert plain({"a": float("nan"), "b": [float("inf"), 1.5], "c": (1, "x")}) == {"a": None, "b": [None, 1.5], "c": [1, "x"]}  # fmt: skip


def test_a_half_written_last_line_is_dropped(tmp_path):
    arm = RunFolder(tmp_path).arm("a")
    for i in (1, 2):
        arm.append("metrics", {"update": i, "x": float("nan")})
    with (arm.path / "metrics.jsonl").open("a") as f:
        f.write('{"update": 3, "x"')
    assert arm.rows("metrics") == [{"update": 1, "x": None}, {"update": 2, "x": None}]


def test_cutting_back_forgets_what_came_after_and_repeats_the_evaluation(tmp_path):
    arm = RunFolder(tmp_path).arm("a")
    for i in range(5):
        for name in ("metrics", "samples", "eval", "findings"):
            arm.append(name, {"update": i})
    (arm.path / "log").mkdir()
    for i in range(5):
        for part in ("", "-rank1"):
            (arm.path / "log" / f"batch-{i:06d}{part}.parquet").touch()
    (arm.path / "log" / "batch-notes.parquet").touch()
    arm.cut_back(2, batch=3)
    assert [r["update"] for r in arm.rows("metrics")] == [0, 1, 2]
    assert [r["update"] for r in arm.rows("samples")] == [0, 1, 2]
    assert [r["update"] for r in arm.rows("findings")] == [0, 1, 2]
    assert [r["update"] for r in arm.rows("eval")] == [0, 1]
    left = [f"batch-{i:06d}{part}.parquet" for i in range(3) for part in ("", "-rank1")]
    assert sorted(f.name for f in (arm.path / "log").iterdir()) == sorted([*left, "batch-notes.parquet"])


def test_an_arm_is_finished_when_its_summary_is_whole(tmp_path):
    arm = RunFolder(tmp_path).arm("a")
    assert arm.summary() is None
    arm.path.mkdir(parents=True)
    (arm.path / "summary.json").write_text('{"arm": "a"')
    assert arm.summary() is None
    arm.finish({"arm": "a", "kl_mean": float("nan")})
    assert arm.summary() == {"arm": "a", "kl_mean": None}


def test_the_head_carries_its_format_and_a_broken_one_is_refused(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.create({"name": "x"})
    assert run.head() == {"format": 1, "name": "x"}
    (run.path / "run.json").write_text("{")
    with pytest.raises(CheckpointError, match="no run to resume"):
        run.head()


def test_a_line_that_cannot_be_written_names_the_file_and_the_way_out(tmp_path):
    (tmp_path / "arms").write_text("in the way")
    with pytest.raises(RecordError, match=r"metrics.jsonl: .*continue with --resume"):
        RunFolder(tmp_path).arm("a").append("metrics", {"update": 1})


def test_line_files_are_json_lines(tmp_path):
    arm = RunFolder(tmp_path).arm("a")
    arm.append("samples", {"update": 1, "prompt": "a\nb\u2028c"})
    (line,) = (arm.path / "samples.jsonl").read_text().split("\n")[:-1]
    assert json.loads(line)["prompt"] == "a\nb\u2028c"
