"""Corrupt, truncated and hostile logs: named by file and line, skipped, never run, never silent."""

import gzip
import io
import json
import os
import pickle
import re
import struct
import subprocess
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offdrift.errors import RecordError
from offdrift.records.readers import detect, pieces, read
from offdrift.records.readers.pickles import load_pickle
from offdrift.records.recorder import write_log
from tests.records.samples import LOGS, one, ragged, read_all

GOOD = '{"logp_rollout": [-1.0, -2.0], "logp": [-1.5, -2.5]}'

WRONG = {
    '{"logp_rollout": [-1.0, -2.0], "logp": [-1.5, -2': "not JSON",
    "not json at all": "not JSON",
    "[1, 2]": "a JSON list, expected an object",
    "17": "a JSON int, expected an object",
    '{"logp_rollout": [-1.0, -2.0], "logp": [-1.5]}': "unequal length .*logp_rollout 2, logp 1",
    '{"logp_rollout": "abc", "logp": [-1.5]}': "logp_rollout is 'abc' .str., expected a list",
    '{"logp_rollout": [-1.0, "x"], "logp": [-1.5, -2.5]}': "logp_rollout holds 'x' .str.",
    '{"logp_rollout": [[-1.0], [-2.0]], "logp": [-1.5, -2.5]}': "logp_rollout holds",
    '{"logp_rollout": [-1.0, {}], "logp": [-1.5, -2.5]}': "logp_rollout holds",
    '{"logp_rollout": 5, "logp": [-1.5, -2.5]}': "logp_rollout is 5 .int., expected a list",
    '{"logp_rollout": [-1.0, -2.0], "logp": [-1.5, -2.5], "step": ' + "9" * 40 + "}": "step",
    '{"logp_rollout": [-1.0, -2.0], "logp": [-1.5, -2.5], "reward": {"a": 1}}': "reward is {'a': 1}",
    '{"reward": 1.0}': "none of .* is there",
    "[" * 100000: "not JSON",
}  # fmt: skip


@pytest.mark.parametrize("line", WRONG, ids=range(len(WRONG)))
def test_a_bad_line_is_named_and_the_others_are_kept(tmp_path: Path, line: str) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join([GOOD, "", line, GOOD]) + "\n")
    _, (batch,), bad = read_all(path)
    reason = WRONG[line]
    assert [(b.file, b.row) for b in bad] == [(str(path), 3)]
    assert re.search(reason, bad[0].reason), bad[0].reason
    assert batch.row.tolist() == [1, 4]
    assert batch.num_tokens == 4


@pytest.mark.parametrize("token", ["1e400", "9" * 40, "NaN", "null", "-Infinity"])
def test_a_token_that_no_integer_can_hold_is_a_hole(tmp_path: Path, token: str) -> None:
    rows = [GOOD[:-1] + f', "tokens": [1, {t}]}}' for t in ("2", token)]
    (tmp_path / "log.jsonl").write_text("\n".join(rows))
    _, (batch, hole), bad = read_all(tmp_path)
    assert bad == []
    assert batch.num_tokens == 2
    assert batch.tokens.tolist() == [1, 2]
    assert hole.num_tokens == 2
    assert hole.tokens is None


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(GOOD.encode() + b"\n\xff\xfe{}\n" + GOOD.encode())
    _, (batch,), bad = read_all(path)
    assert [b.row for b in bad] == [2]
    assert batch.row.tolist() == [1, 3]


def test_a_file_without_one_good_row(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(GOOD + "\n")
    found = detect([str(path)])
    path.write_text("garbage\n" * 3)
    batches, bad = read(pieces(found)[0], found)
    assert batches == ()
    assert [b.row for b in bad] == [1, 2, 3]
    with pytest.raises(RecordError, match="holds no row that can be read: line 1"):
        detect([str(path)])


def test_empty_files_are_no_rows(tmp_path: Path) -> None:
    (tmp_path / "0.jsonl").write_text("")
    (tmp_path / "1.jsonl").write_text(GOOD)
    _, batches, bad = read_all(tmp_path)
    assert (len(batches), bad) == (1, [])
    with pytest.raises(RecordError, match="holds nothing"):
        detect([str(tmp_path / "0.jsonl")])


@pytest.mark.parametrize("keep", [0, 3, 100, -100, -1])
def test_a_truncated_parquet_file_is_one_bad_row(tmp_path: Path, keep: int) -> None:
    write_log(ragged(20), tmp_path / "1.parquet")
    whole = write_log(ragged(20), tmp_path / "2.parquet").read_bytes()
    (tmp_path / "2.parquet").write_bytes(whole[:keep])
    _, batches, bad = read_all(tmp_path)
    assert len(batches) == 1
    assert [(Path(b.file).name, b.row) for b in bad] == [("2.parquet", 0)]
    assert "no whole Parquet file" in bad[0].reason


def test_a_damaged_row_group_costs_its_own_rows(tmp_path: Path) -> None:
    table = pq.read_table(write_log(ragged(40), tmp_path / "a.parquet"))
    path = tmp_path / "b.parquet"
    pq.write_table(table, path, row_group_size=10, compression="zstd")
    place = pq.read_metadata(path).row_group(2).column(table.column_names.index("logp"))
    data = bytearray(path.read_bytes())
    begin = place.data_page_offset + 30
    data[begin : begin + 200] = b"\xa5" * 200
    path.write_bytes(bytes(data))
    _, batches, bad = read_all(path)
    assert [b.row for b in bad] == [21]
    assert bad[0].reason.startswith("rows 21 to 30 cannot be decoded")
    rows = [r for b in batches for r in b.row.tolist()]
    assert rows == [*range(1, 21), *range(31, 41)]


def test_ragged_rows_of_parquet(tmp_path: Path) -> None:
    rows = [[-1.0, -2.0], [-1.0], None, [], [-3.0]]
    other = [[-1.0, -2.0], [-1.0, -2.0], None, [], [-4.0]]
    table = pa.table({"logp_rollout": rows, "logp": other})
    pq.write_table(table, tmp_path / "a.parquet")
    _, (batch,), bad = read_all(tmp_path / "a.parquet")
    assert [b.row for b in bad] == [2, 3]
    assert "logp_rollout 1, logp 2" in bad[0].reason
    assert "none of logp_rollout, logp is there" in bad[1].reason
    assert batch.row.tolist() == [1, 4, 5]
    assert batch.cu_seqlens.tolist() == [0, 2, 2, 3]
    assert batch.logp.tolist() == [-1.0, -2.0, -4.0]


def test_a_compressed_file_that_was_cut_off(tmp_path: Path) -> None:
    rows = "".join(GOOD[:-1] + f', "completion": "{i * 7919}"}}\n' for i in range(5000))
    data = gzip.compress(rows.encode())
    (tmp_path / "a.jsonl.gz").write_bytes(data[: len(data) // 2])
    _, batches, bad = read_all(tmp_path)
    assert bad
    assert "cut off" in bad[-1].reason
    assert sum(b.num_sequences for b in batches) < 5000


def test_a_file_that_is_gone_is_an_error(tmp_path: Path) -> None:
    for suffix in ("jsonl", "parquet"):
        with pytest.raises(RecordError, match=f"no log at .*gone.{suffix}"):
            detect([str(tmp_path / f"gone.{suffix}")])
    path = write_log(ragged(3), tmp_path / "a.parquet")
    found = detect([str(path)])
    (piece,) = pieces(found)
    path.unlink()
    with pytest.raises(RecordError, match=r"cannot read .*a.parquet: No such file"):
        read(piece, found)
    with pytest.raises(RecordError, match=r"cannot read .*a.parquet: No such file"):
        pieces(found)


class Attack:
    """Pickles to a program that leaves a file behind."""

    def __init__(self, path: Path, call: Any = os.system) -> None:
        self.command, self.call = f"touch {path}", call

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return self.call, (self.command,)


@pytest.mark.parametrize("call", [os.system, subprocess.getoutput, eval, exec, print])
@pytest.mark.parametrize("suffix", ["pkl", "pt"])
def test_a_pickle_that_is_a_program_is_not_run(tmp_path: Path, suffix: str, call: Any) -> None:
    ran = tmp_path / "ran"
    path = tmp_path / f"global_step_1_training_input.{suffix}"
    payload = {"samples": [{"response_length": 1, "x": Attack(ran, call)}]}
    if suffix == "pkl":
        path.write_bytes(pickle.dumps(payload))
    else:
        torch.save(payload, path)
    with pytest.raises(RecordError, match=call.__name__):
        detect([str(path)])
    assert not ran.exists()
    # The same file among good ones costs one bad row.
    good = LOGS / ("skyrl/dumped_data" if suffix == "pkl" else "slime/train_data")
    for file in good.iterdir():
        (tmp_path / f"a{file.name}").write_bytes(file.read_bytes())
    _, batches, bad = read_all(tmp_path)
    assert (len(batches), len(bad)) == (1, 1)
    assert call.__name__ in bad[0].reason
    assert bad[0].file == str(path)
    assert not ran.exists()


NAMES = [
    ("skyrl.training_batch", "TensorBatch"),
    ("skyrl.training_batch", "_rebuild_tensor_batch"),
    ("torch", "device"),
    ("collections", "OrderedDict"),
]
ATTRIBUTES = ["state", "__setstate__", "__defaults__", "__init__", "__call__", "_call", "__class__"]


def named(name: tuple[str, str]) -> bytes:
    """Opcode GLOBAL."""
    return b"c" + "\n".join((*name, "")).encode()


@pytest.mark.parametrize("name", NAMES, ids=[n for _, n in NAMES])
@pytest.mark.parametrize("slots", [True, False])
def test_a_pickle_changes_nothing_that_outlives_it(name: tuple[str, str], slots: bool) -> None:
    """BUILD sets attributes of what lies on the stack, `state` or `(None, {"state": ...})`."""
    tried = 0
    for attribute in ATTRIBUTES:
        for value in (b"K\x07", b")", named(("torch", "device"))):
            pairs = b"}X" + struct.pack("<I", len(attribute)) + attribute.encode() + value + b"s"
            state = b"N" + pairs + b"\x86" if slots else pairs
            program = b"\x80\x04" + named(name) + state + b"b."
            with pytest.raises((RecordError, TypeError, AttributeError)):
                load_pickle(io.BytesIO(program))
            tried += 1
    assert tried == 21
    # Whoever reads after it reads what is there.
    sample = LOGS / "skyrl/dumped_data/global_step_7_training_input.pkl"
    assert one(sample).num_sequences == 3


def test_batches_are_only_made_the_way_skyrl_makes_them(tmp_path: Path) -> None:
    program = b"\x80\x04" + named(NAMES[0]) + b")R."
    path = tmp_path / "a.pkl"
    path.write_bytes(program)
    with pytest.raises(RecordError, match="in a way that SkyRL does not"):
        detect([str(path)])


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.binary(max_size=40), max_size=5), st.integers(0, 5))
def test_arbitrary_lines(tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], at: int) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "log.jsonl"
    lines = [x.replace(b"\n", b" ").replace(b"\r", b" ") for x in lines]
    lines.insert(min(at, len(lines)), GOOD.encode())
    path.write_bytes(b"\n".join(lines))
    _, batches, bad = read_all(path)
    lines[0] = lines[0].removeprefix(b"\xef\xbb\xbf")  # a byte order mark is no content
    blank = sum(not x.strip() for x in lines)
    assert sum(b.num_sequences for b in batches) + len(bad) + blank == len(lines)


NUMBER = st.one_of(st.floats(-20, 0), st.none(), st.just(1.0), st.just(-9999.0), st.text(max_size=2))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.lists(NUMBER, max_size=5), st.lists(NUMBER, max_size=5)), max_size=6))
def test_every_row_is_either_kept_or_named(tmp_path_factory: pytest.TempPathFactory, rows: Any) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "log.jsonl"
    rows = [*rows, ([-1.0], [-2.0])]
    path.write_text("\n".join(json.dumps({"logp_rollout": a, "logp": b}) for a, b in rows))
    _, (batch,), bad = read_all(path)
    assert sorted([*batch.row.tolist(), *(b.row for b in bad)]) == list(range(1, len(rows) + 1))
    kept = [rows[i - 1] for i in batch.row.tolist()]
    assert all(len(a) == len(b) for a, b in kept)

    def fine(x: Any) -> bool:
        return isinstance(x, float) and -9999 < x <= 1e-3

    expected = [(a, b) for row in kept for a, b in zip(*row, strict=True) if fine(a) and fine(b)]
    # Lists of five are too short to be taken for filled in.
    assert batch.num_tokens == len(expected)
    assert torch.equal(batch.logp, torch.tensor([b for _, b in expected]))
