"""Rollouts, output heads and logs on disk: bits, shared memory, and files that are not what they claim."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save

from offdrift.divergence.head import Head
from offdrift.errors import EvidenceError, RecordError, ShapeError
from offdrift.records import FullVocab, HiddenStates, Provenance, Rollouts, Sampling, TopK, store
from offdrift.records.batch import Logged
from offdrift.records.provenance import Eviction
from offdrift.records.readers import detect
from offdrift.records.recorder import write_log
from offdrift.records.rollouts import Retention, Routes, Support, concatenate, pack_sequences
from offdrift.records.schema import BY_TOKEN
from tests.records.samples import one, ragged, rollouts, same_groups

PROVENANCE = Provenance(
    engine="vllm",
    engine_version="0.32",
    model="tiny",
    dtype="bfloat16",
    quantization="fp8",
    sampling=Sampling(max_tokens=5, temperature=0.7, stop_token_ids=(1, 2)),
)


SUPPORT = Support.of(torch.rand(6, 11, generator=torch.Generator().manual_seed(1)) < 0.5)
"""Of six tokens, over a vocabulary of 11."""


def made(evidence: str = "full", sequences: int = 3) -> Rollouts:
    g = torch.Generator().manual_seed(sequences)
    tokens, cu = pack_sequences([[5, 6], [7], [8, 9, 10]][:sequences])
    prompts, prompt_cu = pack_sequences([[1, 2], [], [3]][:sequences])
    rows = torch.randn(len(tokens), 11, generator=g).log_softmax(-1)
    torch.rand(len(tokens), generator=g)
    top = rows.topk(4)
    return Rollouts(
        tokens=tokens,
        logp_rollout=rows.gather(1, tokens.long()[:, None])[:, 0],
        cu_seqlens=cu,
        rollout_version=torch.arange(len(tokens)),
        prompt_tokens=prompts,
        prompt_cu_seqlens=prompt_cu,
        group_ids=torch.tensor([4, 4, 9])[:sequences],
        finish=("stop", "length", "stop")[:sequences],
        provenance=PROVENANCE,
        evidence={"full": FullVocab(rows), "topk": TopK(top.indices, top.values), "none": None}[evidence],
        rewards=torch.tensor([0.0, 1.0, 0.5])[:sequences],
        components={
            "right": torch.tensor([0.0, 1.0, 0.0])[:sequences],
            "short": torch.tensor([0.5, 0.0, 0.25])[:sequences],
        },
        greedy_rewards=torch.tensor([1.0, 0.0, 1.0])[:sequences],
        support=SUPPORT.select(torch.arange(len(tokens))),
        prompts=("a", "<script>", "c")[:sequences],
        completions=("x\ud800y", "\x00", "naïve 你好")[:sequences],
        workers=("worker-0", "worker-1", "worker-0")[:sequences],
        queue_seconds=torch.tensor([0.5, 0.0, 3.25])[:sequences],
        generation_seconds=torch.tensor([2.0, 0.125, 7.5])[:sequences],
        mix_alpha=torch.tensor([0.5, 0.0, 0.25])[:sequences],
        mix_kl=torch.rand(len(tokens), generator=g),
    )


def left_out(rollouts: Rollouts) -> torch.Tensor:
    return rollouts.support.left_out(slice(None), 11)


def test_a_support_is_what_it_was_made_of():
    kept = torch.tensor([[True, False, True], [False, False, True]])
    support = Support.of(kept)
    assert (support.ids.tolist(), support.cu_seqlens.tolist()) == ([0, 2, 2], [0, 2, 3])
    assert support.ids.dtype == torch.int32
    assert torch.equal(support.left_out(slice(None), 3), ~kept)
    assert support.left_out(slice(1, 2), 4).tolist() == [[True, True, False, True]]
    assert support.left_out(slice(2, 2), 3).shape == (0, 3)
    twice = support.select(torch.tensor([1, 0, 1]))
    assert (twice.ids.tolist(), twice.cu_seqlens.tolist()) == ([2, 0, 2, 2], [0, 1, 3, 4])
    for bad in (support, Support(torch.tensor([-1]).int(), torch.tensor([0, 1]))):
        with pytest.raises(EvidenceError, match=r"support has token (2|-1), the model has 2 tokens"):
            bad.left_out(slice(None), 2)


def same(a: Rollouts, b: Rollouts, *, ulps: int = 0) -> int:
    """Assert that all is equal, log-probs up to so many units in the last place of their numbers."""
    tensors = [f.name for f in fields(b) if isinstance(getattr(b, f.name), torch.Tensor)]
    for name in tensors:
        rtol = ulps * torch.finfo(torch.float32).eps * name.startswith("logp")
        torch.testing.assert_close(getattr(a, name), getattr(b, name), check_dtype=False, rtol=rtol, atol=0)
    assert (a.finish, a.prompts, a.workers, a.provenance) == (b.finish, b.prompts, b.workers, b.provenance)
    assert type(a.evidence) is type(b.evidence)
    torch.testing.assert_close(a.components or {}, b.components or {}, rtol=0, atol=0)
    if a.evidence is not None:
        rtol = ulps * torch.finfo(b.evidence.logp.dtype).eps
        torch.testing.assert_close(a.evidence.logp, b.evidence.logp, rtol=rtol, atol=0)
    if isinstance(a.evidence, TopK):
        assert torch.equal(a.evidence.ids.long(), b.evidence.ids.long())
    if b.support is not None:
        assert a.support.ids.dtype == b.support.ids.dtype == torch.int32
        assert torch.equal(a.support.ids, b.support.ids)
        assert torch.equal(a.support.cu_seqlens, b.support.cu_seqlens)
    assert (a.support is None) == (b.support is None)
    return len(tensors)


@pytest.mark.parametrize("evidence", ["full", "topk", "none"])
def test_what_is_read_is_what_was_written(tmp_path, evidence):
    before = made(evidence)
    after = store.read(store.write(before, tmp_path / "new" / "x.parquet"))
    assert same(after, before) == 13
    assert after.completions == ("x?y", "\x00", "naïve 你好")  # a lone surrogate is no text


def test_parts_and_wholes():
    whole = made()
    parts = [whole.select(torch.tensor([i])) for i in (0, 1, 2)]
    assert same(concatenate(parts), whole) == 13
    back = whole.select(torch.tensor([2, 0]))
    assert back.tokens.tolist() == [8, 9, 10, 5, 6]
    assert (back.greedy_rewards.tolist(), back.components["short"].tolist()) == ([1.0, 1.0], [0.25, 0.5])
    assert (back.workers, back.queue_seconds.tolist()) == (("worker-0", "worker-0"), [3.25, 0.5])
    assert back.generation_seconds.tolist() == [7.5, 2.0]
    assert back.mix_alpha.tolist() == [0.25, 0.5]
    assert torch.equal(back.mix_kl, whole.mix_kl[[3, 4, 5, 0, 1]])
    assert back.prompt_tokens.tolist() == [3, 1, 2]
    assert torch.equal(back.evidence.logp[3:], whole.evidence.logp[:2])
    rows = torch.tensor([3, 4, 5, 0, 1])
    assert torch.equal(left_out(back), left_out(whole)[rows])
    assert concatenate([whole, whole.with_(support=None)]).support is None
    with pytest.raises(ShapeError, match="different provenance"):
        concatenate([whole, whole.with_(provenance=Provenance(**{**PROVENANCE.__dict__, "dtype": "float16"}))])


@pytest.mark.parametrize(("dtype", "width"), [(torch.uint8, 1), (torch.int16, 2)])
def test_routes_are_stored_selected_and_joined(tmp_path: Path, dtype: torch.dtype, width: int) -> None:
    """Prompts of 2, 0 and 1 tokens, responses of 2, 1 and 3: 3, 0 and 3 positions, of 2 layers with 4 experts each."""
    experts = torch.arange(48).view(6, 2, 4).to(dtype) + (200 if width == 1 else 300)
    before = made("none").with_(routes=Routes(experts, torch.tensor([0, 3, 3, 6])))
    assert before.routes is not None
    assert before.routes.bytes_per_position == 8 * width
    path = store.write(before, tmp_path / "x.parquet")
    after = store.read(path)
    assert after.routes is not None
    assert after.routes.experts.dtype == dtype
    assert torch.equal(after.routes.experts, experts)
    assert after.routes.cu_seqlens.tolist() == [0, 3, 3, 6]
    back = after.select(torch.tensor([2, 1, 0])).routes
    assert back is not None
    assert torch.equal(back.experts, experts[[3, 4, 5, 0, 1, 2]])
    parts = concatenate([after.select(torch.tensor([i])) for i in range(3)]).routes
    assert parts is not None
    assert torch.equal(parts.experts, experts)
    assert parts.cu_seqlens.tolist() == [0, 3, 3, 6]
    assert concatenate([after, after.with_(routes=None)]).routes is None
    # A file whose routes are those of other sequences.
    store.write(before.with_(routes=Routes(experts, torch.tensor([0, 2, 3, 6]))), path)
    with pytest.raises(RecordError, match="do not cover every prompt"):
        store.read(path)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32])
def test_retention_is_stored_selected_and_joined(tmp_path: Path, dtype: torch.dtype) -> None:
    """Prompts of 2, 0 and 1 tokens, responses of 2, 1 and 3: 3, 0 and 3 positions, of 2 layers with 2 heads each."""
    until = torch.arange(24).view(6, 2, 2).to(dtype) + (0 if dtype == torch.int16 else 40_000)
    eviction = Eviction("attention", 8, 4)
    before = made("none").with_(retention=Retention(until, torch.tensor([0, 3, 3, 6])))
    before = before.with_(provenance=replace(before.provenance, eviction=eviction))
    assert before.retention is not None
    assert before.retention.bytes_per_position == 4 * dtype.itemsize
    path = store.write(before, tmp_path / "x.parquet")
    after = store.read(path)
    assert after.provenance == before.provenance
    assert after.retention is not None
    assert after.retention.visible_until.dtype == dtype
    assert torch.equal(after.retention.visible_until, until)
    back = after.select(torch.tensor([2, 1, 0])).retention
    assert back is not None
    assert torch.equal(back.visible_until, until[[3, 4, 5, 0, 1, 2]])
    parts = concatenate([after.select(torch.tensor([i])) for i in range(3)]).retention
    assert parts is not None
    assert torch.equal(parts.visible_until, until)
    assert parts.cu_seqlens.tolist() == [0, 3, 3, 6]
    assert concatenate([after, after.with_(retention=None)]).retention is None
    store.write(before.with_(retention=Retention(until, torch.tensor([0, 2, 3, 6]))), path)
    with pytest.raises(RecordError, match="do not cover every prompt"):
        store.read(path)


def test_workers_and_times_that_a_part_lacks_are_unknown_of_the_whole(tmp_path: Path) -> None:
    names = ("workers", "queue_seconds", "generation_seconds")
    for name in names:
        without = made().with_(**{name: None})
        whole = concatenate([made(), without])
        assert [n for n in names if getattr(whole, n) is None] == [name]
        assert [n for n in names if getattr(without.select(torch.tensor([1])), n) is None] == [name]
        after = store.read(store.write(without, tmp_path / f"{name}.parquet"))
        assert [n for n in names if getattr(after, n) is None] == [name]


def test_a_log_of_rollouts_names_their_workers_and_times(tmp_path: Path) -> None:
    drawn = made("none")
    log = Logged.of(drawn, step=torch.tensor([3, 3, 4]), logp=drawn.logp_rollout)
    for path in (store.write(drawn, tmp_path / "rollouts.parquet"), write_log(log, tmp_path / "log.parquet")):
        back = one(path)
        assert back.workers == ("worker-0", "worker-1", "worker-0")
        assert back.queue_seconds.tolist() == [0.5, 0.0, 3.25]
        assert back.generation_seconds.tolist() == [2.0, 0.125, 7.5]
        assert {replace(Provenance.from_text(t), recorded=()) for t in back.drawn_by} == {drawn.provenance}


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


def with_header(table: pa.Table, header: object) -> pa.Table:
    return table.replace_schema_metadata({store.KEY: json.dumps(header)})


def header_of(table: pa.Table) -> dict[str, Any]:
    return json.loads(table.schema.metadata[store.KEY])


def replaced(table: pa.Table, name: str, values: pa.Array) -> pa.Table:
    return table.set_column(table.column_names.index(name), name, values)


SHORT = pa.array([[-1.0]] * 3, pa.large_list(pa.float32()))
SHORT_IDS = pa.array([[1]] * 3, pa.large_list(pa.int32()))

BYTES: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "truncated": ("corrupt or incomplete", lambda data: data[: len(data) // 2]),
    "garbage": ("corrupt or incomplete", lambda data: b"not parquet at all" * 10),
    "flipped": ("corrupt or incomplete", lambda data: data[:200] + bytes(255 - b for b in data[200:260]) + data[260:]),
}
TABLES: dict[str, tuple[str, Callable[[pa.Table], pa.Table]]] = {
    "foreign": ("not of this library", lambda t: pa.table({"x": [1]})),
    "lying": ("does not hold what its header says", lambda t: t.drop_columns(["logp_rollout"])),
    "misaligned": ("logp_rollout and tokens have different lengths", lambda t: replaced(t, "logp_rollout", SHORT)),
    "ids": ("support_ids have other lengths", lambda t: replaced(t, "support_ids", SHORT_IDS)),
    "counts": ("support_ids have other lengths", lambda t: replaced(t, "support_counts", SHORT_IDS)),
    "header": ("does not hold what its header says", lambda t: t.replace_schema_metadata({store.KEY: b"[1"})),
    "future": ("record format 99", lambda t: with_header(t, {**header_of(t), "format": 99})),
}


@pytest.mark.parametrize("how", [*BYTES, *TABLES, "missing"])
def test_a_file_that_is_not_what_it_claims_is_refused_by_name(tmp_path, how):
    path = store.write(made(), tmp_path / "x.parquet")
    words = "cannot read"
    if how in BYTES:
        words, change = BYTES[how]
        path.write_bytes(change(path.read_bytes()))
    elif how in TABLES:
        words, change = TABLES[how]
        pq.write_table(change(pq.read_table(path)), path)
    else:
        path.unlink()
    with pytest.raises(RecordError, match=words) as refused:
        store.read(path)
    assert str(path) in str(refused.value)


@pytest.mark.parametrize("write", [lambda path: store.write(made(), path), lambda path: write_log(ragged(1), path)])
def test_a_folder_that_cannot_be_written_is_named(tmp_path, write):
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match=r"cannot write .*x.parquet"):
        write(tmp_path / "file" / "x.parquet")


# -- hidden states and their output heads ---------------------------------------------------------

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
    assert same(after.with_(evidence=None), before.with_(evidence=None)) == 13
    a, b = after.evidence, before.evidence
    assert a.states.dtype == a.head.weight.dtype == a.head.bias.dtype == dtype
    for x, y in ((a.states, b.states), (a.head.weight, b.head.weight), (a.head.bias, b.head.bias)):
        assert torch.equal(bits(x), bits(y))
    assert (a.head.scale, a.head.soft_cap, a.head.round_to) == (0.25, 30.0, dtype)


def test_a_plain_head_comes_back_plain(tmp_path):
    plain = Head(torch.randn(11, 4).T.contiguous().T)  # not contiguous
    back = store.read(store.write(hidden(of=plain), tmp_path / "x.parquet")).evidence.head
    assert torch.equal(back.weight, plain.weight)
    assert (back.bias, back.scale, back.soft_cap, back.round_to) == (None, 1.0, None, None)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_states_are_fixed_size_lists(tmp_path, dtype):
    path = store.write(hidden(dtype), tmp_path / "x.parquet")
    kind = {torch.float32: pa.float32(), torch.float16: pa.float16(), torch.bfloat16: pa.uint16()}
    states = pa.field("element", pa.list_(kind[dtype], 4))
    assert pq.read_schema(path).field("evidence_states").type == pa.large_list(states)


@pytest.mark.parametrize("batch", [made(), *map(hidden, DTYPES)], ids=["full", *map(str, DTYPES)])
def test_reading_shares_memory_with_the_decoded_buffers(tmp_path, monkeypatch, batch):
    path = store.write(batch, tmp_path / "x.parquet")
    buffers, original = [], store._tensor

    def noted(a: pa.Array) -> torch.Tensor:
        buffers.append(a.buffers()[1].address + a.offset * a.type.bit_width // 8)
        return original(a)

    monkeypatch.setattr(store, "_tensor", noted)
    r = store.read(path)
    evidence = r.evidence.logp if isinstance(r.evidence, FullVocab) else r.evidence.states
    addresses = {t.data_ptr() for t in (r.tokens, r.logp_rollout, r.cu_seqlens, evidence)}
    assert addresses <= set(buffers)
    assert len(addresses) == 4


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
        back = store.read(tmp_path / f"{i}.parquet").evidence.head
        assert torch.equal(back.weight, each.weight)
        assert back.scale == each.scale


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


def a_head(**rest: Any) -> Callable[[], bytes]:
    """A file of a head whose weight has `width` columns, or no weight."""
    width = rest.pop("width", 4)
    tensors = {"weight": torch.zeros(3, width)} if width else {"bias": torch.zeros(3)}
    about = {"scale": 1.0, "soft_cap": None, "round_to": None, **rest}
    return lambda: save(tensors, metadata={"head": json.dumps(about)})


HEADS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "no head": ("does not hold an output head", lambda: b"{}"),
    "no weight": ("does not hold an output head: KeyError", a_head(width=0)),
    "no such dtype": ("does not hold an output head: KeyError", a_head(round_to="load")),
    "bad scale": ("does not hold an output head: .*scale is -1.0", a_head(scale=-1.0)),
    "another width": ("states of 4 numbers, but a head for 5", a_head(width=5)),
}
HEAD_BYTES: dict[str, Callable[[bytes], bytes]] = {
    "flipped": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "cut": lambda data: data[:-1],
}
STATED: dict[str, tuple[str, dict[str, Any]]] = {
    "another hash": ("heads/0000.*copy the folder", {"head": "0" * 64}),
    "outside": ("'../../etc/passwd', which is no SHA-256", {"head": "../../etc/passwd"}),
    "lying width": ("does not hold 2 float32 per token", {"width": 2}),
    "lying dtype": ("does not hold 4 bfloat16 per token", {"dtype": "bfloat16"}),
    "unknown dtype": ("does not hold what its header says", {"dtype": "save"}),
}


@pytest.mark.parametrize("how", [*HEADS, *HEAD_BYTES, *STATED, "missing", "misaligned"])
def test_evidence_that_is_not_what_it_claims_is_refused_by_name(tmp_path, how):
    path = store.write(hidden(), tmp_path / "x.parquet")
    (file,) = (tmp_path / "heads").iterdir()
    table, changes = pq.read_table(path), {}
    if how in HEADS:
        words, make = HEADS[how]
        name = hashlib.sha256(make()).hexdigest()
        file.with_name(f"{name}.safetensors").write_bytes(make())
        changes = {"head": name}
    elif how in HEAD_BYTES:
        words = "heads/.*safetensors.* is corrupt"
        file.write_bytes(HEAD_BYTES[how](file.read_bytes()))
    elif how in STATED:
        words, changes = STATED[how]
    elif how == "missing":
        words = "heads/.*safetensors .No such file.*copy the folder heads/"
        file.unlink()
    else:
        words = "evidence_states and tokens have different lengths"
        short = pa.array([[[0.0] * 4]] * 3, pa.large_list(pa.list_(pa.float32(), 4)))
        table = replaced(table, "evidence_states", short)
    header = header_of(table)
    pq.write_table(with_header(table, {**header, "evidence": {**header["evidence"], **changes}}), path)
    with pytest.raises(RecordError, match=words) as refused:
        store.read(path)
    assert str(path) in str(refused.value) or str(tmp_path / "heads") in str(refused.value)


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
    back = store.read(path)
    assert isinstance(back.evidence, kind)
    # Computed elsewhere: another processor adds up a softmax in another order.
    later = ("support", "components", "greedy_rewards", "workers", "queue_seconds", "generation_seconds", "mix_alpha")
    assert same(back, made(name).with_(**dict.fromkeys((*later, "mix_kl"))), ulps=4) == 8


# -- logs in the plain schema ---------------------------------------------------------------------


def assert_same(a: Logged, b: Logged) -> None:
    for f in fields(Logged):
        x, y = getattr(a, f.name), getattr(b, f.name)
        if isinstance(x, torch.Tensor) and f.name != "group_ids":
            assert torch.equal(x, y.to(x.dtype)), f.name
        elif f.name not in ("group_ids", "trainable", "divergences"):
            assert x == y, f.name
    assert a.divergences.keys() == b.divergences.keys()
    assert all(torch.equal(x, b.divergences[k]) for k, x in a.divergences.items())


@pytest.mark.parametrize("sequences", [1, 2, 30])
def test_a_log_comes_back_as_it_was(tmp_path, sequences):
    batch = ragged(sequences)
    back = one(write_log(batch, tmp_path / "log.parquet"))
    assert_same(batch, back)
    # Ids of one step keep their meaning, and those of two steps do not meet.
    assert same_groups(back.group_ids, batch.step * 1000 + batch.segments.group_ids)


def test_what_a_log_lacks_is_not_made_up(tmp_path):
    full = ragged(5)
    bare = {name: getattr(full, name) for name in ("cu_seqlens", "step", "row", "response_lengths", "logp_rollout")}
    back = one(write_log(Logged(**bare), tmp_path / "log.parquet"))
    assert_same(Logged(**bare), back)
    assert back.group_ids is None


def test_half_precision_is_written_as_float32_and_lone_surrogates_as_question_marks(tmp_path):
    batch = ragged(2)
    half = batch.logp.bfloat16()
    batch = replace(batch, logp=half, completions=("ok", "bad \ud800"))
    back = one(write_log(batch, tmp_path / "log.parquet"))
    assert torch.equal(back.logp, half.float())
    assert back.completions == ("ok", "bad ?")


def test_a_reader_decodes_a_log_without_copies_and_the_framework_is_remembered(tmp_path):
    path = write_log(ragged(8), tmp_path / "log.parquet", framework="verl")
    schema = pq.read_schema(path)
    lists = [schema.field(name).type for f in BY_TOKEN if (name := f.column) in schema.names]
    assert len(lists) == 8
    assert all(not kind.value_field.nullable for kind in lists)
    detected = detect([str(path)])
    assert (detected.format, detected.framework) == ("plain", "verl")


def test_a_file_without_a_response_is_read(tmp_path):
    none = rollouts().select(torch.zeros(0, dtype=torch.int64))
    assert store.read(store.write(none, tmp_path / "none.parquet")).num_sequences == 0
