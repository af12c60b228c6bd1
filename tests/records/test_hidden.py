"""Hidden states and their output heads on disk: bits, sharing, and heads that are not what they claim."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save

from offdrift.divergence.head import Head
from offdrift.errors import RecordError, ShapeError
from offdrift.records import FullVocab, HiddenStates, Rollouts, TopK, store
from offdrift.records.rollouts import concatenate
from tests.records.test_store import made, same

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
DATA = Path(__file__).parent / "data"


def head(dtype: torch.dtype = torch.float32, seed: int = 0, **changes) -> Head:
    g = torch.Generator().manual_seed(seed)
    weight, bias = torch.randn(11, 4, generator=g).to(dtype), torch.randn(11, generator=g).to(dtype)
    return replace(Head(weight, bias, 0.25, 30.0, dtype), **changes)


def hidden(dtype: torch.dtype = torch.float32, of: Head | None = None) -> Rollouts:
    g = torch.Generator().manual_seed(7)
    states = torch.randn(6, 4, generator=g).to(dtype)
    states[0, 0], states[5, 3] = -0.0, torch.finfo(dtype).smallest_normal / 2
    return made("none").with_(evidence=HiddenStates(states, of or head(dtype)))


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view({4: torch.int32, 2: torch.int16}[x.dtype.itemsize])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_of_states_and_head_comes_back(tmp_path, dtype):
    before = hidden(dtype)
    after = store.read(store.write(before, tmp_path / "new" / "x.parquet"))
    assert same(after.with_(evidence=None), before.with_(evidence=None)) == 8
    a, b = after.evidence, before.evidence
    assert a.states.dtype == a.head.weight.dtype == a.head.bias.dtype == dtype
    for x, y in ((a.states, b.states), (a.head.weight, b.head.weight), (a.head.bias, b.head.bias)):
        assert torch.equal(bits(x), bits(y))
    assert (a.head.scale, a.head.soft_cap, a.head.round_to) == (0.25, 30.0, dtype)


def test_a_plain_head_comes_back_plain(tmp_path):
    plain = Head(torch.randn(11, 4).T.contiguous().T)  # not contiguous
    found = store.read(store.write(hidden(of=plain), tmp_path / "x.parquet")).evidence.head
    assert torch.equal(found.weight, plain.weight)
    assert (found.bias, found.scale, found.soft_cap, found.round_to) == (None, 1.0, None, None)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_states_are_fixed_size_lists_and_share_memory_with_the_decoded_buffers(tmp_path, monkeypatch, dtype):
    path = store.write(hidden(dtype), tmp_path / "x.parquet")
    kind = {torch.float32: pa.float32(), torch.float16: pa.float16(), torch.bfloat16: pa.uint16()}
    assert pq.read_schema(path).field("evidence_states").type == pa.large_list(
        pa.field("element", pa.list_(kind[dtype], 4))
    )
    buffers = []
    original = store._tensor
    monkeypatch.setattr(store, "_tensor", lambda a: buffers.append(a.buffers()[1].address) or original(a))  # fmt: skip
    assert store.read(path).evidence.states.data_ptr() in buffers


def test_a_dtype_that_no_engine_computes_in_is_refused(tmp_path):
    with pytest.raises(RecordError, match=r"x.parquet.*float64.*float32, float16, bfloat16"):
        store.write(hidden(torch.float64, head()), tmp_path / "x.parquet")
    assert list(tmp_path.iterdir()) == []


def test_equal_heads_are_one_file_and_others_are_not(tmp_path):
    heads = [head(), head(), head(seed=1), head(scale=0.5), head(bias=None), head(torch.bfloat16)]
    for i, each in enumerate(heads):
        store.write(hidden(of=each), tmp_path / f"{i}.parquet")
    files = list((tmp_path / "heads").iterdir())
    assert len(files) == 5
    for f in files:
        assert f.name == f"{hashlib.sha256(f.read_bytes()).hexdigest()}.safetensors"
    for i, each in enumerate(heads):
        found = store.read(tmp_path / f"{i}.parquet").evidence.head
        assert torch.equal(found.weight, each.weight)
        assert found.scale == each.scale


def test_a_head_that_is_there_is_not_written_again_unless_it_is_cut_short(tmp_path):
    path = store.write(hidden(), tmp_path / "x.parquet")
    (file,) = (tmp_path / "heads").iterdir()
    node = file.stat().st_ino
    store.write(hidden(), path)
    assert file.stat().st_ino == node
    file.write_bytes(file.read_bytes()[:50])
    store.write(hidden(), path)
    assert store.read(path).evidence.states.shape == (6, 4)


def test_parts_and_wholes_share_their_head():
    whole = hidden()
    parts = [whole.select(torch.tensor([i])) for i in (0, 1, 2)]
    assert [len(p.evidence.states) for p in parts] == [2, 1, 3]
    assert all(p.evidence.head is whole.evidence.head for p in parts)
    back = concatenate(parts).evidence
    assert torch.equal(back.states, whole.evidence.states)
    turned = whole.select(torch.tensor([2, 0])).evidence.states
    assert torch.equal(turned, whole.evidence.states[[3, 4, 5, 0, 1]])
    # Equal in content is enough: two files that were read share no tensor.
    assert len(concatenate([whole, hidden()]).tokens) == 12
    for other in (head(seed=1), head(bias=None), head(scale=1.0), head(torch.bfloat16)):
        with pytest.raises(ShapeError, match="different output heads"):
            concatenate([whole, hidden(of=other)])


def broken(folder: Path, how: str) -> Path:
    path = store.write(hidden(), folder / "x.parquet")
    (file,) = (folder / "heads").iterdir()
    table = pq.read_table(path)
    stated = json.loads(table.schema.metadata[store.KEY])

    def restate(**changes) -> None:
        header = {**stated, "evidence": {**stated["evidence"], **changes}}
        pq.write_table(table.replace_schema_metadata({store.KEY: json.dumps(header)}), path)

    def another(data: bytes) -> None:
        name = hashlib.sha256(data).hexdigest()
        (folder / "heads" / f"{name}.safetensors").write_bytes(data)
        restate(head=name)

    if how == "missing":
        file.unlink()
    elif how == "flipped":
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    elif how == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    elif how == "another hash":
        restate(head="0" * 64)
    elif how == "outside":
        restate(head="../../etc/passwd")
    elif how == "no head":
        another(b"{}")
    elif how == "no weight":
        another(save({"bias": torch.zeros(3)}, metadata={"head": json.dumps({"scale": 1.0, "soft_cap": None, "round_to": None})}))  # fmt: skip
    elif how == "no such dtype":
        another(save({"weight": torch.zeros(3, 4)}, metadata={"head": json.dumps({"scale": 1.0, "soft_cap": None, "round_to": "load"})}))  # fmt: skip
    elif how == "bad scale":
        another(save({"weight": torch.zeros(3, 4)}, metadata={"head": json.dumps({"scale": -1.0, "soft_cap": None, "round_to": None})}))  # fmt: skip
    elif how == "another width":
        another(save({"weight": torch.zeros(3, 5)}, metadata={"head": json.dumps({"scale": 1.0, "soft_cap": None, "round_to": None})}))  # fmt: skip
    elif how == "lying width":
        restate(width=2)
    elif how == "lying dtype":
        restate(dtype="bfloat16")
    elif how == "unknown dtype":
        restate(dtype="save")
    elif how == "misaligned":
        rows = [[[0.0] * 4]] * 3
        short = pa.array(rows, pa.large_list(pa.list_(pa.float32(), 4)))
        at = table.column_names.index("evidence_states")
        table = table.set_column(at, "evidence_states", short)
        restate()
    return path


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("missing", "heads/.*safetensors .No such file.*copy the folder heads/"),
        ("flipped", "heads/.*safetensors.* is corrupt"),
        ("cut", "heads/.*safetensors.* is corrupt"),
        ("another hash", "heads/0000.*copy the folder"),
        ("outside", "'../../etc/passwd', which is no SHA-256"),
        ("no head", "does not hold an output head"),
        ("no weight", "does not hold an output head: KeyError"),
        ("no such dtype", "does not hold an output head: KeyError"),
        ("bad scale", "does not hold an output head: .*scale is -1.0"),
        ("another width", "states of 4 numbers, but a head for 5"),
        ("lying width", "does not hold 2 float32 per token"),
        ("lying dtype", "does not hold 4 bfloat16 per token"),
        ("unknown dtype", "does not hold what its header says"),
        ("misaligned", "evidence_states and tokens have different lengths"),
    ],
)
def test_evidence_that_is_not_what_it_claims_is_refused_by_name(tmp_path, how, words):
    path = broken(tmp_path, how)
    with pytest.raises(RecordError, match=words) as refused:
        store.read(path)
    said = str(refused.value)
    assert str(path) in said or str(tmp_path / "heads") in said


def test_a_killed_writer_leaves_no_half_head(tmp_path, monkeypatch):
    def killed(self, data):
        with self.open("wb") as f:
            f.write(data[:20])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_bytes", killed)
    with pytest.raises(KeyboardInterrupt):
        store.write(hidden(), tmp_path / "x.parquet")
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


@pytest.mark.parametrize(("name", "kind"), [("full", FullVocab), ("topk", TopK)])
def test_files_of_the_first_format_are_still_read(name, kind):
    path = DATA / f"format-1-{name}.parquet"
    assert json.loads(pq.read_schema(path).metadata[store.KEY])["format"] == 1 < store.FORMAT
    found = store.read(path)
    assert isinstance(found.evidence, kind)
    # Computed elsewhere: another processor adds up a softmax in another order.
    assert same(found, made(name), ulps=4) == 8
