"""The run folder: whole files, line files that survive a kill, and cutting back for a resume."""

import json
import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from offdrift.errors import CheckpointError, RecordError
from offdrift.records.atomic import write_json
from offdrift_lab.cli.train import _run_folder
from offdrift_lab.train.loop import context
from offdrift_lab.train.loop.run_folder import RunFolder, plain
from offdrift_lab.train.settings.places import base_recipe, own_recipes, recipe_file
from tests_lab.train.conftest import small_recipe


def test_numbers_that_json_cannot_say_become_null():
    assert plain({"a": float("nan"), "b": [float("inf"), 1.5], "c": (1, "x")}) == {"a": None, "b": [None, 1.5], "c": [1, "x"]}  # fmt: skip


def test_a_half_written_last_line_is_dropped(tmp_path):
    arm = RunFolder(tmp_path).arm("a")
    for i in (1, 2):
        arm.append("metrics", {"update": i, "x": float("nan")})
    with (arm.path / "metrics.jsonl").open("a") as f:
        f.write('{"update": 3, "x"')
    assert arm.rows("metrics") == [{"update": 1, "x": None}, {"update": 2, "x": None}]


def test_the_oldest_batches_go_first_whatever_the_clock_did(tmp_path):
    arm = RunFolder(tmp_path).arm("a")
    for name in ("rollouts", "log"):
        (arm.path / name).mkdir(parents=True)
        for i in range(4):
            file = arm.path / name / f"batch-{i:06d}.parquet"
            pq.write_table(pa.table({"x": [i]}), file)
            os.utime(file, (1e9 - 86400 * i, 1e9 - 86400 * i))  # the clock is set back by a day after each
    size = file.stat().st_size
    arm.trim(4 * size + size // 2, needed={0})
    left = sorted(f"{f.parent.name} {int(f.stem[6:])}" for f in arm.path.rglob("*.parquet"))
    assert left == ["log 2", "log 3", "rollouts 0", "rollouts 3"]


def test_a_new_process_removes_what_a_killed_one_was_writing_and_nothing_else(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    folder = RunFolder(tmp_path)
    folder.create({})
    half = [f".run.json.{gone.pid}.tmp", f"arms/a/log/.batch-000001.parquet.{os.getpid()}.tmp"]
    whole = [f".report.html.{os.getppid()}.tmp", ".notes.tmp", "arms/a/log/batch-000000.parquet"]
    for name in (*half, *whole):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "arms/a/checkpoints/.partial-000004/model").mkdir(parents=True)
    (tmp_path / "arms/a/checkpoints/batch-000002").mkdir()
    folder.clean()
    left = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file())
    assert left == sorted([*whole, "run.json"])
    assert [p.name for p in (tmp_path / "arms/a/checkpoints").iterdir()] == ["batch-000002"]


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


@pytest.fixture
def three(tmp_path, monkeypatch):
    """Three runs of one recipe: the second started last, and the dates of their files say the opposite."""
    monkeypatch.chdir(tmp_path)
    recipe = small_recipe()
    for name, hour in [("small", 1), ("small-2", 3), ("small-3", 2)]:
        folder = RunFolder(Path("runs") / name)
        monkeypatch.setattr(context, "datetime", SimpleNamespace(now=lambda zone, hour=hour: datetime(2026, 1, 1, hour, tzinfo=zone)))  # fmt: skip
        context.begin(recipe, folder, resume=False)
        os.utime(folder.path / "run.json", (1e9 - hour, 1e9 - hour))
    return recipe


def test_of_several_unfinished_runs_none_is_guessed(three):
    RunFolder(Path("runs/small-3")).arm("trm_max").append("metrics", {"update": 4})
    with pytest.raises(CheckpointError, match="3 runs of small have not finished") as refusal:
        _run_folder(three, None, resume=True)
    assert str(refusal.value).splitlines()[1:] == [
        "  --out runs/small-2  started 2026-01-01T03:00:00+00:00, trm_max at update 0",
        "  --out runs/small-3  started 2026-01-01T02:00:00+00:00, trm_max at update 4",
        "  --out runs/small  started 2026-01-01T01:00:00+00:00, trm_max at update 0",
    ]
    assert _run_folder(three, Path("runs/small-3"), resume=True) == Path("runs/small-3")


def test_the_run_that_has_not_finished_is_continued_whatever_the_dates_of_files_say(three):
    for name in ("small", "small-2"):
        RunFolder(Path("runs") / name).arm("trm_max").finish({"arm": "trm_max"})
    assert _run_folder(three, None, resume=True) == Path("runs/small-3")
    RunFolder(Path("runs/small-3")).arm("trm_max").finish({"arm": "trm_max"})
    assert _run_folder(three, None, resume=True) == Path("runs/small-2"), "all finished: the one that started last"


def test_a_run_of_a_changed_recipe_is_passed_over_where_one_of_this_recipe_is_there(three):
    changed = small_recipe(batches=8)
    context.begin(changed, RunFolder(Path("runs/small-4")), resume=False)
    assert _run_folder(changed, None, resume=True) == Path("runs/small-4")
    other = _run_folder(small_recipe(batches=10), None, resume=True)
    with pytest.raises(CheckpointError, match=r"started with another recipe \(batches differ\)"):
        context.begin(small_recipe(batches=10), RunFolder(other), resume=True)
    assert _run_folder(three, None, resume=False) == Path("runs/small-5"), "a new run takes a folder of its own"


def test_a_run_that_an_earlier_version_started_goes_on_though_settings_have_come(three):
    folder = RunFolder(Path("runs/small-2"))
    head = folder.head()
    del head["recipe"]["lag"]["queue"]  # as if it were of today
    write_json(folder.path / "run.json", head)
    assert context.begin(three, folder, resume=True)["recipe"] == head["recipe"]
    head["recipe"]["batches"] += 1
    head["recipe"]["lag"]["gone"] = 1  # a setting that this version does not have: what stands there is compared
    write_json(folder.path / "run.json", head)
    with pytest.raises(CheckpointError, match=r"another recipe \(batches, lag differ"):
        context.begin(three, folder, resume=True)


def test_the_recipes_of_the_package_are_there_by_name_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = own_recipes()
    names = sorted(file.name for file in own.glob("*.toml"))
    assert len(names) > 20
    for name in names:
        for path in (name, name.removesuffix(".toml"), f"recipes/{name}"):
            assert recipe_file(Path(path)) == own / name
    for path in ("nowhere", "mine/tiny.toml", str(tmp_path / "tiny.toml"), "../tiny.toml"):
        assert recipe_file(Path(path)) == Path(path)
    Path("recipes").mkdir()
    Path("recipes/tiny.toml").write_text("")
    assert recipe_file(Path("recipes/tiny.toml")) == Path("recipes/tiny.toml"), "a file that is there is meant"
    assert base_recipe("tiny", Path("mine/sweep.toml"))[0] == Path("recipes/tiny.toml")
    Path("recipes/tiny.toml").unlink()
    assert base_recipe("tiny", Path("mine/sweep.toml"))[0] == own / "tiny.toml"
    assert base_recipe("nowhere", Path("mine/sweep.toml"))[0] is None


def test_a_model_that_a_full_disk_cuts_short_is_named_with_the_way_back(tmp_path):
    arm = RunFolder(tmp_path).arm("a")
    full = pytest.raises(RecordError, match=r"cannot write .*a/model: No space left on device; .*--resume")
    with full, arm.storing("model"):
        raise OSError(28, "No space left on device")
    with arm.storing("model") as path:
        assert path == arm.path / "model"
