"""Where logs are found: folders, globs, URLs."""

import json
import pickle
from pathlib import Path

import fsspec
import pytest

from offdrift.errors import RecordError
from offdrift.records import store
from offdrift.records.readers import detect, fingerprint, pieces, read
from offdrift.records.recorder import write_log
from tests.records.samples import LOGS, flat, one, ragged, read_all, rollouts

ROW = json.dumps({"logp_rollout": [-1.0]}) + "\n"


def test_folders_are_searched_in_the_order_of_steps(tmp_path: Path) -> None:
    for step in (10, 2, 1):
        (tmp_path / f"step_{step}").mkdir()
        (tmp_path / f"step_{step}" / "rank_0.jsonl").write_text(ROW)
    (tmp_path / "step_2" / "notes.txt").write_text("no log")
    (tmp_path / ".hidden.jsonl").write_text(ROW)
    found, batches, _ = read_all(tmp_path)
    assert len(found.files) == 3
    assert [b.step.tolist() for b in batches] == [[1], [2], [10]]
    assert found.bytes == 3 * len(ROW)


def test_globs_and_several_paths(tmp_path: Path) -> None:
    for name in ("a1", "a2", "b1"):
        (tmp_path / f"{name}.jsonl").write_text(ROW)
    assert len(detect([str(tmp_path / "a*.jsonl")]).files) == 2
    assert len(detect([str(tmp_path / "b1.jsonl"), str(tmp_path / "a*.jsonl")]).files) == 3
    # A file that is named twice is read once.
    found = detect([str(tmp_path), str(tmp_path / "a1.jsonl")])
    assert len(found.files) == 3
    assert "1 file named again by another path, counted once" in found.description
    assert "again" not in detect([str(tmp_path)]).description
    with pytest.raises(RecordError, match=r"no log at .*c\*"):
        detect([str(tmp_path / "c*")])


def test_object_stores(tmp_path: Path) -> None:
    store = fsspec.filesystem("memory")
    batch = ragged(20)
    local = write_log(batch, tmp_path / "1.parquet")
    for name in ("log/1.parquet", "log/2.parquet"):
        store.pipe(f"/{name}", local.read_bytes())
    sample = LOGS / "skyrl/dumped_data/global_step_7_training_input.pkl"
    store.pipe(f"/sky/{sample.name}", sample.read_bytes())
    store.pipe("/lines/1.jsonl", (ROW * 100).encode())
    expected = flat([one(local)])
    assert flat([one("memory://log/1.parquet")]) == expected
    for path in ("memory://log", "memory://log/*.parquet"):
        found, batches, bad = read_all(path, piece_bytes=2000)
        assert (len(found.files), bad) == (2, [])
        assert len(batches) > 4
        twice = flat(batches)
        assert twice["logp"] == expected["logp"] * 2
    assert one("memory://sky").num_sequences == 3
    _, batches, _ = read_all("memory://lines/1.jsonl", piece_bytes=500)
    assert sum(b.num_sequences for b in batches) == 100
    with pytest.raises(RecordError, match="no log at memory://gone"):
        detect(["memory://gone"])
    with pytest.raises(RecordError, match="cannot read nosuch://x"):
        detect(["nosuch://x/y.parquet"])


@pytest.mark.parametrize("place", ["memory://f/a.jsonl", "{}/a.jsonl"])
def test_a_fingerprint_changes_with_the_file(tmp_path: Path, place: str) -> None:
    path, prints = place.format(tmp_path), []
    for data in (b"1", b"12"):
        with fsspec.open(path, "wb") as f:
            f.write(data)
        prints.append(fingerprint(path))
        assert fingerprint(path) == prints[-1]
    assert prints[0] != prints[1]


def test_the_log_that_says_most_is_read_and_the_rest_is_named(tmp_path: Path) -> None:
    (tmp_path / "1.jsonl").write_text(json.dumps({"input": "a", "output": "b", "score": 1, "step": 1}))
    write_log(ragged(4), tmp_path / "logs" / "1.parquet")
    (tmp_path / "junk.jsonl").write_text("{}")
    found = detect([str(tmp_path)])
    assert found.framework == "offdrift"
    assert [Path(f).name for f in found.files] == ["1.parquet"]
    assert "not reading 1 file of verl's rollout dump" in found.description
    assert "junk.jsonl" in found.description


def test_metrics_beside_a_log_are_no_log(tmp_path: Path) -> None:
    """The files of a run: a table of metrics with rewards, samples for people, checkpoints."""
    (tmp_path / "eval.jsonl").write_text(json.dumps({"update": 1, "reward": 0.5, "prompts": 512}))
    sample = {"update": 1, "prompt": "1+1=", "reward": 1.0, "tokens": ["2"], "kl": [0.1], "logp_rollout": [-1.0]}
    (tmp_path / "samples.jsonl").write_text(json.dumps(sample))
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "entropy": 2.0, "reward": 1.0}))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "random_states_0.pkl").write_bytes(pickle.dumps({"a": 1}))
    assert [Path(f).name for f in detect([str(tmp_path)]).files] == ["samples.jsonl"]
    store.write(rollouts(), tmp_path / "rollouts" / "1.parquet")
    assert detect([str(tmp_path)]).format == "offdrift-rollouts"
    write_log(ragged(4), tmp_path / "log" / "1.parquet")
    found = detect([str(tmp_path)])
    assert [Path(f).name for f in found.files] == ["1.parquet"]
    assert found.format == "plain"
    assert "metrics.jsonl" in found.description


def test_mapped_columns_choose_the_files_that_have_them(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"mu": [-1.0], "pi": [-1.5]}))
    (tmp_path / "b.jsonl").write_text(json.dumps({"other": 1}))
    found = detect([str(tmp_path)], columns={"logp_rollout": "mu", "logp": "pi"})
    assert [Path(f).name for f in found.files] == ["a.jsonl"]
    assert "b.jsonl" in found.description


def test_a_log_with_both_sides_is_read_before_one_with_one(tmp_path: Path) -> None:
    (tmp_path / "engine.jsonl").write_text(ROW)
    row = {"prompt_tokens": [1], "response_tokens": [2], "finish_reason": "stop", "logprobs": [-1.0]}
    (tmp_path / "traces.jsonl").write_text(json.dumps({**row, "logp": [-2.0]}))
    assert detect([str(tmp_path)]).framework == "open-instruct"


def test_a_file_is_counted_once_whatever_leads_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for step in (1, 2):
        (run / f"step_{step}.jsonl").write_text(ROW)
    (run / "latest.jsonl").symlink_to("step_2.jsonl")
    (run / "step_3.jsonl").hardlink_to(run / "step_1.jsonl")
    (tmp_path / "linked").symlink_to("run")
    (tmp_path / "copy.jsonl").write_text(ROW)  # equal content is another file
    monkeypatch.chdir(tmp_path)
    ways = [
        ["run"],
        ["run/*.jsonl", "run/step*"],
        ["run", str(run), "linked", "./run/../run/step_1.jsonl"],
        ["run", f"file://{run}/step_2.jsonl"],
        ["linked/latest.jsonl", "run/step_1.jsonl", "run/step_2.jsonl"],
    ]
    repeated = [2, 5, 11, 3, 1]
    for paths, n in zip(ways, repeated, strict=True):
        found = detect(paths)
        batches = [b for p in pieces(found) for b in read(p, found).batches]
        assert sum(b.num_sequences for b in batches) == 2, paths
        # The names that tell steps are those that are read.
        assert sorted(s for b in batches for s in b.step.tolist()) == [1, 2], found.files
        assert found.bytes == 2 * len(ROW)
        assert f"{n} file{'s' * (n > 1)} named again" in found.description, found.description
    assert len(detect(["run", "copy.jsonl"]).files) == 3


def test_one_file_named_twice_in_an_object_store() -> None:
    fsspec.filesystem("memory").pipe("/twice/1.jsonl", ROW.encode())
    found = detect(["memory://twice", "memory:///twice/1.jsonl"])
    assert len(found.files) == 1
    assert "1 file named again" in found.description


def test_damage_is_no_question_of_columns(tmp_path: Path) -> None:
    path = write_log(ragged(4), tmp_path / "1.parquet")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(RecordError, match=r"no log that can be read: .*no whole Parquet file") as e:
        detect([str(path)])
    assert ".." not in str(e.value)
    assert "columns" not in str(e.value)
    assert "leave it out" in str(e.value)
