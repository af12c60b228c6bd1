"""Pieces: however a log is cut, the rows are the same, in the same order, with the same numbers."""

import json
from itertools import pairwise
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from offdrift.records.readers import Piece, detect, pieces, read
from offdrift.records.recorder import write_log
from tests.records.samples import flat, ragged, read_all


@pytest.fixture
def logs(tmp_path: Path) -> dict[str, Path]:
    """One log as JSON lines, as one large row group, and as several."""
    batch = ragged(80)
    table = pq.read_table(write_log(batch, tmp_path / "one.parquet"))
    pq.write_table(table, tmp_path / "many.parquet", row_group_size=17)
    rows = [json.dumps(row) for row in table.to_pylist()]
    rows[50] = "broken"
    rows[70] = ""
    (tmp_path / "lines.jsonl").write_text("\n".join(rows) + "\n")
    return {path.stem: path for path in tmp_path.iterdir()}


@pytest.mark.parametrize("name", ["one", "many", "lines"])
@pytest.mark.parametrize("piece_bytes", [1, 5000, 30000])
def test_cuts_change_nothing(logs: dict[str, Path], name: str, piece_bytes: int) -> None:
    found = detect([str(logs[name])])
    cut = pieces(found, piece_bytes=piece_bytes)
    assert len(cut) == 80 if (name, piece_bytes) == ("one", 1) else len(cut) > 1
    assert cut == pieces(found, piece_bytes=piece_bytes)
    assert all(a.stop == b.start for a, b in pairwise(cut))
    _, whole, bad = read_all(logs[name])
    _, parts, bad_of_parts = read_all(logs[name], piece_bytes=piece_bytes)
    assert len(whole) == 1
    assert flat(parts) == flat(whole)
    assert bad_of_parts == bad
    assert [b.row for b in bad] == ([51] if name == "lines" else [])
    assert len(flat(whole)["lengths"]) == (78 if name == "lines" else 80)


@pytest.mark.parametrize("name", ["one", "many", "lines"])
def test_pieces_may_be_read_in_any_order_and_again(logs: dict[str, Path], name: str) -> None:
    found = detect([str(logs[name])])
    cut = pieces(found, piece_bytes=15000)
    forward = [read(p, found) for p in cut]
    backward = [read(p, found) for p in reversed(cut)][::-1]
    again = [read(p, found) for p in cut for _ in range(2)][1::2]
    expected = flat([b for r in forward for b in r.batches])
    for other in (backward, again):
        assert flat([b for r in other for b in r.batches]) == expected


def test_a_changed_file_is_not_read_on_where_the_old_one_stopped(tmp_path: Path) -> None:
    path = write_log(ragged(100, seed=1), tmp_path / "a.parquet")
    found = detect([str(path)])
    first, second = pieces(found, piece_bytes=30000)[:2]
    read(first, found)
    write_log(ragged(100, seed=2), path)
    (fresh,) = read(second, found).batches
    (expected,) = read(Piece(str(path), 0, 100, "plain"), found).batches
    assert fresh.prompts == expected.prompts[second.start : second.stop]
    assert fresh.rewards.tolist() == expected.rewards[second.start : second.stop].tolist()


def test_a_line_that_is_larger_than_a_piece(tmp_path: Path) -> None:
    rows = [json.dumps({"logp_rollout": [-1.0] * n}) for n in (1, 5000, 1, 1)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    _, batches, bad = read_all(tmp_path, piece_bytes=100)
    assert bad == []
    assert flat(batches)["lengths"] == [1, 5000, 1, 1]
    assert flat(batches)["row"] == [1, 2, 3, 4]


def test_unread_columns_do_not_count(tmp_path: Path) -> None:
    table = pq.read_table(write_log(ragged(50), tmp_path / "a.parquet"))
    wide = table.append_column("evidence", [[b"x" * 10000] * 50])
    pq.write_table(wide, tmp_path / "a.parquet")
    assert len(pieces(detect([str(tmp_path / "a.parquet")]), piece_bytes=200_000)) == 1


def test_a_range_of_sequences_is_the_same_sequences_selected() -> None:
    batch = ragged(12)
    part, chosen = batch.cut(3, 9), batch.select(torch.arange(3, 9))
    assert flat([part]) == flat([chosen])
    assert (
        part.cu_seqlens.tolist()
        == chosen.cu_seqlens.tolist()
        == (batch.cu_seqlens[3:10] - batch.cu_seqlens[3]).tolist()
    )
    assert part.num_tokens > 30
