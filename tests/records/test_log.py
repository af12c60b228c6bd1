"""The plain schema on disk: what is written comes back, bit by bit, from the same memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from offdrift.errors import RecordError
from offdrift.records.batch import Logged
from offdrift.records.log import write_log
from offdrift.records.schema import BY_TOKEN
from tests.records.samples import one, ragged, read_all, same_groups

FIELDS = ("cu_seqlens", "step", "row", "response_lengths", "logp_rollout", "logp_old", "logp", "logp_ref", "advantages", "rewards", "rollout_version", "version", "entropy", "tokens", "old_status", "truncated")  # fmt: skip


def assert_same(a: Logged, b: Logged) -> None:
    for name in FIELDS:
        x, y = getattr(a, name), getattr(b, name)
        if x is None:
            assert y is None
        else:
            assert torch.equal(x, y.to(x.dtype)), name
    assert a.divergences.keys() == b.divergences.keys()
    assert all(torch.equal(x, b.divergences[k]) for k, x in a.divergences.items())
    assert (a.prompts, a.completions) == (b.prompts, b.completions)


@pytest.mark.parametrize("sequences", [1, 2, 30])
def test_a_batch_comes_back_as_it_was(tmp_path: Path, sequences: int) -> None:
    batch = ragged(sequences)
    back = one(write_log(batch, tmp_path / "log.parquet"))
    assert_same(batch, back)
    # Ids of one step keep their meaning, and those of two steps do not meet.
    steps = batch.step * 1000 + batch.segments.group_ids
    assert same_groups(back.group_ids, steps)
    assert back.position is None
    assert back.unscored == {}


def test_what_a_batch_lacks_is_not_made_up(tmp_path: Path) -> None:
    full = ragged(5)
    batch = Logged(
        cu_seqlens=full.cu_seqlens,
        step=full.step,
        row=full.row,
        response_lengths=full.response_lengths,
        logp_rollout=full.logp_rollout,
    )
    back = one(write_log(batch, tmp_path / "log.parquet"))
    assert_same(batch, back)
    assert back.group_ids is None


def test_dropped_tokens_stay_dropped_and_the_others_keep_their_places(tmp_path: Path) -> None:
    full = ragged(12)
    keep = torch.arange(full.num_tokens) % 3 != 1
    batch = Logged(
        cu_seqlens=torch.cat([torch.zeros(1).long(), keep.cumsum(0)])[full.cu_seqlens],
        step=full.step,
        row=full.row,
        response_lengths=full.response_lengths,
        logp_rollout=full.logp_rollout[keep],
        position=full.in_response[keep],
    )
    back = one(write_log(batch, tmp_path / "log.parquet"))
    assert_same(batch, back)
    assert torch.equal(back.in_response, batch.in_response)
    assert len(back.in_response) == int(keep.sum()) > 100


def test_a_batch_without_a_token(tmp_path: Path) -> None:
    full = ragged(3, longest=1)
    assert full.num_tokens == 0
    back = one(write_log(full, tmp_path / "log.parquet"))
    assert back.num_sequences == 3
    assert back.num_tokens == 0


def test_half_precision_is_written_as_float32(tmp_path: Path) -> None:
    batch = ragged(4)
    assert batch.logp is not None
    half = batch.logp.bfloat16()
    back = one(write_log(replace(batch, logp=half), tmp_path / "log.parquet"))
    assert back.logp is not None
    assert torch.equal(back.logp, half.float())


def test_lone_surrogates_of_a_tokenizer_do_not_stop_the_log(tmp_path: Path) -> None:
    batch = replace(ragged(2), completions=("ok", "bad \ud800"))
    assert one(write_log(batch, tmp_path / "log.parquet")).completions == ("ok", "bad ?")


def test_a_reader_decodes_without_copies_and_the_framework_is_remembered(tmp_path: Path) -> None:
    path = write_log(ragged(8), tmp_path / "log.parquet", framework="verl")
    schema = pq.read_schema(path)
    lists = [schema.field(name).type for f in BY_TOKEN if (name := f.column) in schema.names]
    assert len(lists) == 8
    assert all(not kind.value_field.nullable for kind in lists)
    found, _, _ = read_all(path)
    assert (found.format, found.framework) == ("plain", "verl")


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match=r"cannot write .*log.parquet"):
        write_log(ragged(1), tmp_path / "file" / "log.parquet")
