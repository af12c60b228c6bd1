"""Rollouts on disk: a round trip without copies, atomic writes, and files that are not what they claim."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from offdrift.errors import RecordError, ShapeError
from offdrift.records import FullVocab, Provenance, Rollouts, Sampling, TopK, store
from offdrift.records.rollouts import concatenate, pack_sequences

PROVENANCE = Provenance(engine="vllm", engine_version="0.32", model="tiny", dtype="bfloat16", quantization="fp8", sampling=Sampling(max_tokens=5, temperature=0.7, stop_token_ids=(1, 2)))  # fmt: skip


def made(evidence: str = "full", sequences: int = 3) -> Rollouts:
    g = torch.Generator().manual_seed(sequences)
    tokens, cu = pack_sequences([[5, 6], [7], [8, 9, 10]][:sequences])
    prompts, prompt_cu = pack_sequences([[1, 2], [], [3]][:sequences])
    rows = torch.randn(len(tokens), 11, generator=g).log_softmax(-1)
    top = rows.topk(4)
    return Rollouts(
        tokens=tokens,
        logp_rollout=-torch.rand(len(tokens), generator=g),
        cu_seqlens=cu,
        rollout_version=torch.arange(len(tokens)),
        prompt_tokens=prompts,
        prompt_cu_seqlens=prompt_cu,
        group_ids=torch.tensor([4, 4, 9])[:sequences],
        finish=("stop", "length", "stop")[:sequences],
        provenance=PROVENANCE,
        evidence={"full": FullVocab(rows), "topk": TopK(top.indices, top.values), "none": None}[evidence],
        rewards=torch.tensor([0.0, 1.0, 0.5])[:sequences],
        prompts=("a", "<script>", "c")[:sequences],
        completions=("x\ud800y", "\x00", "naïve 你好")[:sequences],
    )


TENSORS = ("tokens", "logp_rollout", "cu_seqlens", "rollout_version", "prompt_tokens", "prompt_cu_seqlens", "group_ids", "rewards")  # fmt: skip


def same(a: Rollouts, b: Rollouts, *, ulps: int = 0) -> int:
    """Assert that all is equal, evidence up to so many units in the last place of its numbers."""
    for name in TENSORS:
        torch.testing.assert_close(getattr(a, name), getattr(b, name), check_dtype=False, rtol=0, atol=0)  # fmt: skip
    assert (a.finish, a.prompts, a.provenance) == (b.finish, b.prompts, b.provenance)
    assert type(a.evidence) is type(b.evidence)
    if a.evidence is not None:
        rtol = ulps * torch.finfo(b.evidence.logp.dtype).eps
        torch.testing.assert_close(a.evidence.logp, b.evidence.logp, rtol=rtol, atol=0)
    if isinstance(a.evidence, TopK):
        assert torch.equal(a.evidence.ids.long(), b.evidence.ids.long())
    return len(TENSORS)


@pytest.mark.parametrize("evidence", ["full", "topk", "none"])
def test_what_is_read_is_what_was_written(tmp_path, evidence):
    before = made(evidence)
    after = store.read(store.write(before, tmp_path / "new" / "x.parquet"))
    assert same(after, before) == 8
    assert after.completions == ("x?y", "\x00", "naïve 你好")  # a lone surrogate is no text


def test_reading_shares_memory_with_the_decoded_buffers(tmp_path, monkeypatch):
    store.write(made(), tmp_path / "x.parquet")
    buffers = []
    original = store._tensor
    monkeypatch.setattr(store, "_tensor", lambda a: buffers.append(a.buffers()[1].address + a.offset * a.type.bit_width // 8) or original(a))  # fmt: skip
    r = store.read(tmp_path / "x.parquet")
    addresses = {t.data_ptr() for t in (r.tokens, r.logp_rollout, r.cu_seqlens, r.evidence.logp)}
    assert addresses <= set(buffers)
    assert len(addresses) == 4


def test_parts_and_wholes():
    whole = made()
    parts = [whole.select(torch.tensor([i])) for i in (0, 1, 2)]
    assert same(concatenate(parts), whole) == 8
    back = whole.select(torch.tensor([2, 0]))
    assert back.tokens.tolist() == [8, 9, 10, 5, 6]
    assert back.prompt_tokens.tolist() == [3, 1, 2]
    assert torch.equal(back.evidence.logp[3:], whole.evidence.logp[:2])
    with pytest.raises(ShapeError, match="different provenance"):
        concatenate([whole, whole.with_(provenance=Provenance(**{**PROVENANCE.__dict__, "dtype": "float16"}))])  # fmt: skip


def test_a_killed_writer_leaves_the_old_file(tmp_path, monkeypatch):
    path = store.write(made(), tmp_path / "x.parquet")
    before = path.read_bytes()

    def killed(table, where, **options):
        Path(where).write_bytes(b"half a fi")
        raise KeyboardInterrupt

    monkeypatch.setattr(store.pq, "write_table", killed)
    with pytest.raises(KeyboardInterrupt):
        store.write(made(sequences=2), path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["x.parquet"]


def corrupt(tmp_path, how: str):
    path = store.write(made(), tmp_path / "x.parquet")
    data = path.read_bytes()
    if how == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif how == "garbage":
        path.write_bytes(b"not parquet at all" * 10)
    elif how == "flipped":
        path.write_bytes(data[:200] + bytes(255 - b for b in data[200:260]) + data[260:])
    elif how == "missing":
        path.unlink()
    elif how == "foreign":
        pq.write_table(pa.table({"x": [1]}), path)
    elif how == "lying":
        table = pq.read_table(path)
        pq.write_table(table.drop_columns(["logp_rollout"]), path)
    elif how == "misaligned":
        table = pq.read_table(path)
        short = pa.array([[-1.0], [-1.0], [-1.0]], pa.large_list(pa.float32()))
        table = table.set_column(table.column_names.index("logp_rollout"), "logp_rollout", short)
        pq.write_table(table, path)
    elif how == "header":
        pq.write_table(pq.read_table(path).replace_schema_metadata({store.KEY: b"[1"}), path)
    elif how == "future":
        table = pq.read_table(path)
        header = {**json.loads(table.schema.metadata[store.KEY]), "format": 99}
        pq.write_table(table.replace_schema_metadata({store.KEY: json.dumps(header)}), path)
    return path


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("truncated", "corrupt or incomplete"),
        ("garbage", "corrupt or incomplete"),
        ("flipped", "corrupt or incomplete"),
        ("missing", "cannot read"),
        ("foreign", "not of this library"),
        ("lying", "does not hold what its header says"),
        ("misaligned", "logp_rollout and tokens have different lengths"),
        ("header", "does not hold what its header says"),
        ("future", "record format 99"),
    ],
)
def test_a_file_that_is_not_what_it_claims_is_refused_by_name(tmp_path, how, words):
    path = corrupt(tmp_path, how)
    with pytest.raises(RecordError, match=words) as refused:
        store.read(path)
    assert str(path) in str(refused.value)


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match="cannot write"):
        store.write(made(), tmp_path / "file" / "x.parquet")
