"""Engines by description, and a bench that makes each of them when it is asked for."""

from pathlib import Path

import pytest
import torch

from offdrift.check import bench as pair
from offdrift.check.bench import Bench, EngineSpec, checkpoint_of
from offdrift.errors import EngineError
from offdrift.models import tiny_tokenizer
from offdrift.records.provenance import Sampling
from offdrift.records.rollouts import FullVocab, HiddenStates
from tests.check.benches import BFLOAT16, FLOAT32
from tests.engines.models import tiny

PROMPTS = [[4, 13, 5], [7, 8], [9, 10, 11, 12]]


@pytest.fixture
def bench():
    with Bench(tiny("dense"), tiny_tokenizer(), PROMPTS, sampling=Sampling(max_tokens=6)) as made:
        yield made


@pytest.mark.parametrize(
    ("text", "kind", "dtype", "options"),
    [
        ("vllm", "vllm", "bfloat16", {}),
        ("transformers", "transformers", "float32", {}),
        ("transformers:bf16", "transformers", "bfloat16", {}),
        (" vllm:fp16 , a = 1 ", "vllm", "float16", {"a": 1}),
        ("vllm:bfloat16,x=true,y=0.5,z=fp8,w=FALSE", "vllm", "bfloat16", {"x": True, "y": 0.5, "z": "fp8", "w": False}),
    ],
)  # fmt: skip
def test_a_description_is_read_and_written(text, kind, dtype, options):
    spec = EngineSpec.parse(text)
    assert (spec.kind, spec.dtype, dict(spec.options)) == (kind, dtype, options)
    assert EngineSpec.parse(str(spec)) == spec
    assert hash(EngineSpec.parse(str(spec))) == hash(spec)


def test_options_are_ordered_so_that_equal_engines_are_one():
    a, b = EngineSpec.parse("vllm:bf16,b=1,a=2"), EngineSpec.parse("vllm:bf16,a=2,b=1")
    assert a == b
    assert str(a) == str(b) == "vllm:bfloat16,a=2,b=1"
    assert a.with_(b=3, dtype="float32") == EngineSpec("vllm", "float32", {"a": 2, "b": 3})
    assert a.options["b"] == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [("sglang:bfloat16", "'sglang'"), ("vllm:int4", "'int4'"), ("vllm,kv", "'kv'"), ("vllm,=3", "'=3'"), ("", "''")],
)
def test_what_cannot_be_read_is_named(text, words):
    with pytest.raises(EngineError, match=words):
        EngineSpec.parse(text)


def test_a_draw_is_made_once(bench):
    first = bench.rollouts(FLOAT32)
    assert bench.rollouts(FLOAT32) is first
    again = bench.rollouts(FLOAT32, repeat=1)
    assert again is not first
    assert torch.equal(again.tokens, first.tokens)
    assert not torch.equal(bench.rollouts(FLOAT32, seed=1).tokens, first.tokens)
    shorter = bench.rollouts(FLOAT32, prompts=PROMPTS[:1], sampling=Sampling(max_tokens=2))
    assert shorter.num_sequences == 1
    assert len(shorter.tokens) == 2


def test_evidence_is_full_where_it_fits_hidden_states_beyond_and_full_under_a_filter(bench, monkeypatch):
    assert isinstance(bench.rollouts(FLOAT32).evidence, FullVocab)
    monkeypatch.setitem(pair.FULL_ENTRIES, "transformers", 10)
    assert isinstance(bench.rollouts(FLOAT32, repeat=1).evidence, HiddenStates)
    filtered = bench.rollouts(FLOAT32, sampling=Sampling(max_tokens=6, top_p=0.9))
    assert isinstance(filtered.evidence, FullVocab)
    assert bench.rollouts(FLOAT32, evidence="sampled").evidence is None


def test_old_draws_go_when_there_are_too_many_and_the_first_one_stays(bench, monkeypatch):
    first = bench.rollouts(FLOAT32)
    monkeypatch.setattr(pair, "KEPT_BYTES", 2 * first.evidence.logp.nbytes)
    second = bench.rollouts(FLOAT32, seed=1)
    bench.rollouts(FLOAT32, seed=2)
    assert bench.rollouts(FLOAT32) is first
    assert bench.rollouts(FLOAT32, seed=1) is not second


def test_one_engine_of_a_kind_is_alive(bench):
    first = bench.engine(FLOAT32)
    assert bench.engine(FLOAT32) is first
    second = bench.engine(BFLOAT16)
    assert second.dtype == "bfloat16"
    with pytest.raises(EngineError, match="closed"):
        first.generate(PROMPTS, Sampling(max_tokens=1), seed=0)
    bench.close()
    with pytest.raises(EngineError, match="closed"):
        second.generate(PROMPTS, Sampling(max_tokens=1), seed=0)


def test_the_training_engine_is_the_model_itself_or_a_copy_at_another_dtype(bench):
    assert bench.train_model(FLOAT32) is bench.model
    half = bench.train_model(BFLOAT16)
    assert bench.train_model(EngineSpec.parse("transformers:bf16")) is half
    dtypes = {p.dtype for p in half.parameters()}
    assert dtypes == {torch.bfloat16}
    assert {p.dtype for p in bench.model.parameters()} == {torch.float32}
    # Rotary frequencies stay as they are: rounded, they would be another model.
    assert {b.dtype for b in half.buffers()} == {torch.float32}
    assert bench.train_model(FLOAT32) is bench.model


def test_heads_and_kernels_of_the_training_engine_can_be_others_without_touching_the_model(bench):
    ids, before = torch.tensor([[4, 5, 6]]), bench.model.config._attn_implementation
    mixed = bench.train_model(BFLOAT16.with_(head_dtype="fp32", attn_implementation="eager"))
    assert mixed(input_ids=ids).logits.dtype == torch.float32
    assert bench.train_model(BFLOAT16)(input_ids=ids).logits.dtype == torch.bfloat16
    assert mixed.config._attn_implementation == "eager"
    assert bench.model.config._attn_implementation == before != "eager"


def test_options_that_an_engine_does_not_have_are_named(bench):
    with pytest.raises(EngineError, match="no_such_thing"):
        bench.engine(FLOAT32.with_(no_such_thing=1))
    with pytest.raises(EngineError, match="transformers:bfloat16"):
        bench.train_model(EngineSpec("vllm", "bfloat16"))
    with pytest.raises(EngineError, match="kv_cache_dtype"):
        bench.train_model(FLOAT32.with_(kv_cache_dtype="fp8"))


@pytest.mark.parametrize("given", [False, True])
def test_a_checkpoint_is_written_once_and_goes_with_the_bench_and_a_given_one_stays(given, tmp_path):
    saved: list[str] = []
    model = tiny("dense")
    assert checkpoint_of(model) is None
    model.save_pretrained(tmp_path)
    model.config.name_or_path = str(tmp_path)
    assert checkpoint_of(model) == str(tmp_path)
    folder = str(tmp_path) if given else None
    with Bench(model, None, PROMPTS, sampling=Sampling(max_tokens=1), folder=folder, save=saved.append) as made:
        folder = made.folder
        assert made.folder == folder
        assert Path(folder).is_dir()
    assert saved == ([] if given else [folder])
    assert Path(folder).exists() == given
