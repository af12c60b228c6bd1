"""Names in files become no paths outside their folder, links are not written through, and reading runs no code."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from tests_lab.train.sweeps import BASE

from offdrift.errors import OffdriftError, RecipeError, RecordError
from offdrift.records import store
from offdrift.records.schema import ROLLOUTS_KEY
from offdrift_lab.train.loop.run_folder import RunFolder
from offdrift_lab.train.settings.recipe import load_recipe
from offdrift_lab.train.sweep.sweep import load_sweep
from tests.fuzz.readers import a_run, a_sweep, command
from tests.records.samples import rollouts

UP = (
    "../x",
    "../../../etc/x",
    "/etc/x",
    "a/b",
    "a\\b",
    "..",
    ".",
    ".hidden",
    "",
    "a\u0000b",
    "a\nb",
    "x" * 20 + "/../y",
)


def with_head(path: Path, name: object) -> None:
    """A batch whose header names this output head."""
    store.write(rollouts(), path)
    table = pq.read_table(path)
    header = json.loads(table.schema.metadata[ROLLOUTS_KEY])
    header["evidence"] = {"kind": "HiddenStates", "width": 1, "dtype": "float32", "head": name}
    pq.write_table(table.replace_schema_metadata({ROLLOUTS_KEY: json.dumps(header)}), path)


@pytest.mark.parametrize(
    "name", ["../../precious", "../heads/../../precious", "/tmp/precious", 3, None, ["a"], {"a": 1}, "a" * 64]
)
def test_a_head_that_a_header_names_is_deleted_nowhere_else(tmp_path: Path, name: object) -> None:
    run = tmp_path / "run"
    (run / "heads").mkdir(parents=True)
    precious = tmp_path / "precious.safetensors"
    precious.write_bytes(b"mine")
    with_head(run / "batch-000001.parquet", name)
    with pytest.raises(RecordError):
        store.read(run / "batch-000001.parquet")
    assert store.delete(run / "batch-000001.parquet") > 0
    assert precious.read_bytes() == b"mine"
    assert not (run / "batch-000001.parquet").exists()


def test_a_damaged_batch_can_be_deleted_and_stands_in_no_ones_way(tmp_path: Path) -> None:
    arm = RunFolder(tmp_path).arm("a")
    for i in range(3):
        store.write(rollouts(), arm.path / f"rollouts/batch-{i:06d}.parquet")
    (arm.path / "rollouts/batch-000000.parquet").write_bytes(b"PAR1 damaged")
    arm.trim(1, needed=set())
    assert [file.name for file in (arm.path / "rollouts").glob("*.parquet")] == ["batch-000002.parquet"]


@pytest.mark.parametrize("name", UP)
def test_names_of_recipes_arms_and_sweeps_are_names_of_folders(tmp_path: Path, name: str) -> None:
    quoted = json.dumps(name)
    file = tmp_path / "r.toml"
    file.write_text(BASE.replace('name = "base"', f"name = {quoted}"))
    with pytest.raises(RecipeError, match="name"):
        load_recipe(file)
    file.write_text(BASE.replace("[arms.none]", f"[arms.{quoted}]"))
    with pytest.raises(RecipeError, match="arms"):
        load_recipe(file)
    (tmp_path / "base.toml").write_text(BASE)
    for line in (f'name = {quoted}\nrecipe = "base"', f'name = "s"\nrecipe = "base"\narms = [{quoted}]'):
        file.write_text(line)
        with pytest.raises(RecipeError, match=r"name|arms"):
            load_sweep(file)


PROGRAM = (
    "import pathlib\npathlib.Path(__file__).with_name('pwned').write_text('x')\ndef f(completion):\n    return 0.0\n"
)


def test_what_is_read_or_checked_runs_no_code(tmp_path: Path) -> None:
    """Recipes may name code: it is imported when a run starts, and by nothing that only reads."""
    (tmp_path / "evil.py").write_text(PROGRAM)
    line = 'reward = "evil.py:f"\n'
    (tmp_path / "r.toml").write_text(line + BASE)
    assert load_recipe(tmp_path / "r.toml").reward == f"{tmp_path}/evil.py:f"
    a_sweep(tmp_path)
    for name in ("base.toml", "s.toml"):
        text = (tmp_path / name).read_text()
        (tmp_path / name).write_text(line + text if name == "base.toml" else text + "\n[set]\n" + line)
    for words in (
        "report {x}/out",
        "sweep {x}/s.toml --report --out {x}/out",
        "sweep {x}/s.toml --dry-run --out {x}/o2",
    ):
        with contextlib.suppress(OffdriftError):  # the runs are of another recipe now
            command(words, tmp_path)
    assert not (tmp_path / "pwned").exists()


def test_a_page_replaces_a_link_and_writes_through_none(tmp_path: Path) -> None:
    a_run(tmp_path)
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / "run/report.html").symlink_to(precious)
    command("report {x}/run", tmp_path)
    assert precious.read_text() == "mine"
    assert not (tmp_path / "run/report.html").is_symlink()


def test_links_in_a_run_lead_nowhere_that_matters(tmp_path: Path) -> None:
    """A run that was sent: its files may be links to files of the reader's."""
    a_run(tmp_path)
    secret = tmp_path / "secret"
    secret.write_text("root:PLANTED:0:0\n")
    for name in ("metrics.jsonl", "samples.jsonl", "summary.json"):
        file = tmp_path / "run/arms/none" / name
        file.unlink()
        file.symlink_to(secret)
    (tmp_path / "run/arms/loop").symlink_to(tmp_path / "run/arms")
    command("report {x}/run", tmp_path)
    assert "PLANTED" not in (tmp_path / "run/report.html").read_text()


@pytest.mark.skipif(os.geteuid() == 0 and not hasattr(os, "mkfifo"), reason="needs pipes")
def test_a_checkpoint_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    from offdrift.errors import CheckpointError
    from offdrift_lab.train.loop.old_policy import read_weights

    os.mkfifo(tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError, match="it is a pipe"):
        read_weights(tmp_path / "w.safetensors")
