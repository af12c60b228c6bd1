"""The plain schema in JSON lines and Parquet: names, kinds, mapping, and what a log does not say."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from offdrift.audit.partial import Job, work
from offdrift.errors import RecordError
from offdrift.records.readers import detect, pieces
from offdrift.records.recorder import write_log
from tests.records.samples import flat, one, ragged, read_all, same_groups, unscored

ROWS: list[dict[str, Any]] = [
    {
        "step": 1, "tokens": [4, 5], "logp_rollout": [-0.5, -1.0], "logp": [-0.25, -1.5], "reward": 1, "group_id": 3,
        "advantages": 0.5, "rollout_version": 8, "version": 9, "truncated": False,
    },
    {
        "step": 1, "tokens": [6], "logp_rollout": [-2.0], "logp": [-2.5], "reward": 0.5, "group_id": 4,
        "advantages": -1, "rollout_version": 9, "version": 9, "truncated": True,
    },
]  # fmt: skip


def lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def written(tmp_path: Path, kind: str, rows: list[dict[str, Any]]) -> Path:
    return (lines if kind == "jsonl" else parquet)(tmp_path / f"log.{kind}", rows)


both = pytest.mark.parametrize("kind", ["jsonl", "parquet"])


@both
def test_numbers_and_lists(tmp_path: Path, kind: str) -> None:
    batch = one(written(tmp_path, kind, ROWS))
    assert flat([batch]) == {
        "lengths": [2, 1],
        "step": [1, 1],
        "row": [1, 2],
        "response_lengths": [2, 1],
        "logp_rollout": [-0.5, -1.0, -2.0],
        "logp": [-0.25, -1.5, -2.5],
        "advantages": [0.5, 0.5, -1.0],
        "rewards": [1.0, 0.5],
        "rollout_version": [8, 8, 9],
        "version": [9, 9],
        "tokens": [4, 5, 6],
        "truncated": [0, 1],
        "group_ids": flat([batch])["group_ids"],
        "in_response": [0, 1, 0],
    }
    assert same_groups(batch.group_ids, torch.tensor([0, 1]))


def test_both_containers_hold_the_same(tmp_path: Path) -> None:
    batch = ragged(20)
    table = pq.read_table(write_log(batch, tmp_path / "a.parquet"))
    path = lines(tmp_path / "b.jsonl", table.to_pylist())
    assert flat([one(path)]) == flat([one(tmp_path / "a.parquet")])
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert flat([one(tmp_path / "c.jsonl.gz")]) == flat([one(path)])
    with pa.CompressedOutputStream(str(tmp_path / "d.jsonl.zst"), "zstd") as f:
        f.write(path.read_bytes())
    assert flat([one(tmp_path / "d.jsonl.zst")]) == flat([one(path)])


@pytest.mark.parametrize("kind", [pa.float16(), pa.float32(), pa.float64()])
@pytest.mark.parametrize("make", [pa.list_, pa.large_list, lambda kind: pa.list_(kind, 2)])
def test_every_arrow_list_of_floats(tmp_path: Path, kind: pa.DataType, make: Any) -> None:
    rows = [[-0.5, -1.0], [-0.25, -2.0]]
    pq.write_table(pa.table({"logp_rollout": pa.array(rows, make(kind))}), tmp_path / "a.parquet")
    batch = one(tmp_path / "a.parquet")
    assert batch.logp_rollout.dtype == torch.float32
    assert batch.logp_rollout.tolist() == [-0.5, -1.0, -0.25, -2.0]


@both
def test_mapped_columns(tmp_path: Path, kind: str) -> None:
    rows = [{"mu": r["logp_rollout"], "info": {"pi": r["logp"], "r": r["reward"]}} for r in ROWS]
    path = written(tmp_path, kind, rows)
    with pytest.raises(RecordError, match=r"no log that is known.*holds mu, info.*--columns"):
        detect([str(path)])
    columns = {"logp_rollout": "mu", "logp": "info.pi", "rewards": "info.r"}
    batch = one(path, columns=columns)
    assert batch.logp.tolist() == [-0.25, -1.5, -2.5]
    assert batch.rewards.tolist() == [1.0, 0.5]
    assert "logp from info.pi" in detect([str(path)], columns=columns).description


@both
def test_mappings_that_mean_nothing(tmp_path: Path, kind: str) -> None:
    path = str(written(tmp_path, kind, ROWS))
    with pytest.raises(RecordError, match="'probs' is no field; the fields are logp_rollout"):
        detect([path], columns={"probs": "logp"})
    with pytest.raises(RecordError, match=r"logp=mine, but .* has no mine; it has step"):
        detect([path], columns={"logp": "mine"})


def test_a_mapped_column_of_the_wrong_type(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", [{**r, "text": "x"} for r in ROWS])
    with pytest.raises(RecordError, match="logp=text, but that column is string"):
        detect([str(path)], columns={"logp": "text"})


def test_layouts_of_their_own_are_not_mapped(tmp_path: Path) -> None:
    row = {"inference_logprobs": [0, -1.0], "trainer_logprobs": [0, -2.0], "loss_mask": [0, 1], "r": 2.0}
    path = str(lines(tmp_path / "a.jsonl", [row]))
    with pytest.raises(RecordError, match="logp cannot be mapped in prime-rl's token exports"):
        detect([path], columns={"logp": "trainer_logprobs"})
    batch = one(path, columns={"reward": "r"})
    assert batch.rewards.tolist() == [2.0]


@both
def test_a_step_in_the_name_of_the_file(tmp_path: Path, kind: str) -> None:
    rows = [{k: v for k, v in r.items() if k != "step"} for r in ROWS]
    path = written(tmp_path, kind, rows)
    assert one(path).step.tolist() == [0, 0]
    (tmp_path / "step_12").mkdir()
    moved = path.rename(tmp_path / "step_12" / path.name)
    assert one(moved).step.tolist() == [12, 12]


@both
def test_equal_prompts_are_a_group_within_a_step(tmp_path: Path, kind: str) -> None:
    rows = [{"step": s, "prompt": p, "logp_rollout": [-1.0]} for s, p in ((1, "a"), (1, "b"), (1, "a"), (2, "a"))]
    batch = one(written(tmp_path, kind, rows))
    assert same_groups(batch.group_ids, torch.tensor([0, 1, 0, 2]))


@both
def test_groups_may_be_texts_and_may_be_missing(tmp_path: Path, kind: str) -> None:
    rows = [{"group_id": g, "logp_rollout": [-1.0]} for g in ["x", None, "x", None]]
    batch = one(written(tmp_path, kind, rows))
    assert same_groups(batch.group_ids, torch.tensor([0, 1, 0, 2]))


@both
def test_an_unknown_reward_is_nan_and_not_zero(tmp_path: Path, kind: str) -> None:
    rows = [{"reward": r, "logp_rollout": [-1.0]} for r in [1.0, None, 0.0]]
    batch = one(written(tmp_path, kind, rows))
    assert batch.rewards[[0, 2]].tolist() == [1.0, 0.0]
    assert bool(batch.rewards[1].isnan())
    assert one(written(tmp_path, kind, [{"reward": None, "logp_rollout": [-1.0]}])).rewards is None


@both
def test_masked_tokens_are_left_out_whatever_they_hold(tmp_path: Path, kind: str) -> None:
    rows = [{"logp_rollout": [-1.0, 0.0, -9999.0, -2.0], "logp": [-1.5, None, 5.0, -2.5], "mask": [1, 0, 0, 1]}]
    batch = one(written(tmp_path, kind, rows))
    assert batch.logp_rollout.tolist() == [-1.0, -2.0]
    assert batch.in_response.tolist() == [0, 3]
    assert batch.response_lengths.tolist() == [4]
    assert batch.unscored == {}
    assert batch.trainable.tolist() == [2]


@both
def test_known_spellings(tmp_path: Path, kind: str) -> None:
    row = {"rollout_log_probs": [-1.0, -2.0], "old_log_probs": [-1.5, -2.5], "response_mask": [1, 1]}
    path = written(tmp_path, kind, [row])
    assert "logp_old from old_log_probs" in detect([str(path)]).description
    batch = one(path)
    assert batch.logp_old.tolist() == [-1.5, -2.5]


def test_a_field_that_later_lines_have(tmp_path: Path) -> None:
    # Far more lines than a first look reads.
    plain = {"logp_rollout": [-1.0] * 50, "completion": "x" * 500}
    rows = [plain] * 2000 + [{**plain, "logp": [-1.0] * 50}]
    batch = one(lines(tmp_path / "a.jsonl", rows))
    assert batch.num_sequences == 2001
    assert unscored(batch) == {"logp/absent": 100000}


def test_conversations_are_texts(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "user", "content": "there"}]
    rows = [{"prompt": messages, "completion": "x", "logp_rollout": [-1.0]}]
    for kind in ("jsonl", "parquet"):
        assert one(written(tmp_path, kind, rows)).prompts == ("hi\nthere",)


@both
def test_a_log_without_log_probs_still_has_rewards_and_lengths(tmp_path: Path, kind: str) -> None:
    rows = [{"completion": "é" * n, "reward": n} for n in (3, 1)]
    batch = one(written(tmp_path, kind, rows))
    assert batch.num_tokens == 0
    assert batch.response_lengths.tolist() == [3, 1]
    assert batch.length_unit == "character"


@both
def test_columns_of_numbers_that_are_not_read_are_named(tmp_path: Path, kind: str) -> None:
    row = {
        "completion": "yes", "note": "x", "ids": ["a"], "nothing": None, "reward": 1.0,
        "vllm_lp": [-1.0], "fsdp_lp": [-1.5], "sc": 0.5, "gs": 3, "info": {"tries": 2, "who": "y"},
    }  # fmt: skip
    path = str(written(tmp_path, kind, [row]))
    hint = "not used: vllm_lp, fsdp_lp, sc, gs, info.tries; map with --columns"
    assert hint in detect([path]).description
    mapped = {"logp_rollout": "vllm_lp", "logp": "fsdp_lp", "group_id": "gs"}
    assert "not used: sc, info.tries; map" in detect([path], columns=mapped).description
    many = {"completion": "yes", **{f"n{i}": i for i in range(10)}}
    said = detect([str(written(tmp_path, kind, [many]))]).description
    assert "not used: n0, n1, n2, n3, n4, n5, n6, n7 and 2 more; map" in said
    assert "not used" not in detect([str(written(tmp_path, kind, ROWS))]).description


IMPOSSIBLE = [
    ("position", [0, -3], "position holds -3"), ("position", [0, 2**40], "position holds 1099511627776"),
    ("step", -1, "step holds -1"), ("step", 2**60, "step holds"), ("version", -2, "version holds -2"),
    ("rollout_version", -9, "rollout_version holds -9"), ("rollout_version", [8, 2**31], "rollout_version holds 2147483648"),
    ("response_length", -5, "response_length holds -5"), ("response_length", 2**31, "response_length holds 2147483648"),
    ("updates_before", -1, "updates_before holds -1"),
]  # fmt: skip


@both
@pytest.mark.parametrize(("name", "value", "words"), IMPOSSIBLE)
def test_an_integer_that_cannot_be_costs_its_row_by_name(
    tmp_path: Path, kind: str, name: str, value: Any, words: str
) -> None:
    """What is indexed by a place, a lag or a length would end the audit, or be nonsense in its numbers."""
    right = {"position": [0, 1], "step": 1, "version": 9, "response_length": 2, "updates_before": 0}
    good = {**ROWS[0], **right, "rollout_version": [8, 8] if isinstance(value, list) else 8}
    path = written(tmp_path, kind, [good, {**good, name: value}, good])
    found, batches, bad = read_all(path)
    assert [b.row for b in bad] == [2]
    assert words in bad[0].reason
    assert f"--columns {name}= leaves the column out" in bad[0].reason
    assert sum(b.num_sequences for b in batches) == 2
    counted = [work(piece, Job(found)) for piece in pieces(found)]
    assert sum(part.unread.rows for part in counted) == 1


@both
def test_an_integer_that_cannot_be_is_none_where_nothing_trains(tmp_path: Path, kind: str) -> None:
    """AReaL writes -1 for the version of a prompt's tokens."""
    row = {
        "logp_rollout": [-1.0, -2.0],
        "logp": [-1.0, -2.0],
        "mask": [0, 1],
        "rollout_version": [-5, 1],
        "position": [-1, 0],
    }
    assert one(written(tmp_path, kind, [row])).rollout_version.tolist() == [1]  # type: ignore[union-attr]
