"""Factors that only vLLM has, on the real engine."""

import pytest
import torch

import offdrift.engines.vllm.engine as vllm_engine_module
from offdrift.check.bench import EngineSpec, Pair
from offdrift.check.measure import measure
from offdrift.engines.vllm.taps import runner_of
from offdrift.records.provenance import Sampling
from tests.check import benches
from tests.engines.models import FP8_CACHE, need_vllm, no_wide_vectors

pytestmark = pytest.mark.vllm

# Several engines are there at once: the default cache, 1 GiB each, would be most of what the tests hold.
PAIR = Pair(EngineSpec("vllm", "bfloat16", {"kv_cache_mib": 128}), EngineSpec("transformers", "float32"))


def bench_of(kind):
    need_vllm()
    return benches.bench_of(kind, count=8, sampling=Sampling(max_tokens=16))


@pytest.fixture(scope="module")
def moe():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with bench_of("moe") as bench:
        yield bench
    torch.set_num_threads(threads)


def run(name, bench):
    return benches.run(name, bench, PAIR)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["repeats", "batch", "prefix_caching"])
def test_what_should_not_matter_is_measured_against_the_engine_itself(moe, name):
    row = run(name, moe)
    assert row.status == "ran"
    assert row.detail["self_tokens"] == 8 * 16
    assert row.detail["self_kl_mean"] < 1e-3
    assert row.detail.get("same_tokens_frac", 1) == 1
    # 8 prompts of 160 tokens, of which one block of 128 each is kept.
    assert row.detail.get("cached_tokens", 1024) == 1024


def test_routing_of_the_real_engine_is_replayed(moe):
    row = run("routing", moe)
    # How many near ties the rounding of this processor turns, it may be none.
    assert 0 <= row.detail["flip_frac"] < 0.2
    assert row.kl_mean < row.baseline_kl_mean or row.detail["flip_frac"] == 0
    assert row.detail["positions"] == 8 * 15 + sum(map(len, benches.prompts_of(8)))


@pytest.mark.slow
def test_a_tied_head_that_the_reload_leaves_behind_is_named(monkeypatch):
    """Planted, because vLLM leaves it behind only where its kernels multiply with packed copies,
    which depends on the processor."""

    def head_left_behind(llm):
        head = runner_of(llm, "model").model.lm_head
        held = head.cpu_linear if hasattr(head, "cpu_linear") else torch.nn.functional.linear
        head.cpu_linear = lambda x, weight, bias: held(x, old, bias)

    with bench_of("dense") as bench:
        clean = run("weight_sync", bench)
        assert clean.detail["stale"] == []
        old = bench.model.lm_head.weight.detach().bfloat16().clone()
        monkeypatch.setattr(vllm_engine_module, "repacked", head_left_behind)
        row = run("weight_sync", bench)
        assert row.detail["stale"] == ["model.embed_tokens.weight"]
        assert row.kl_mean > 1.5 * clean.kl_mean


@pytest.mark.slow
def test_every_other_engine_is_the_same_weights_and_moves_as_its_change_should(moe):
    rows = {n: run(n, moe) for n in ("chunked_prefill", "rollout_dtype", "rollout_lm_head")}
    assert all(row.status == "ran" for row in rows.values())
    cache = run("kv_cache_dtype", moe)
    assert cache.status == ("ran" if FP8_CACHE else "not offered")
    assert not FP8_CACHE or cache.kl_mean > 2 * cache.baseline_kl_mean
    assert rows["rollout_dtype"].kl_mean < 1e-9
    assert rows["rollout_lm_head"].kl_mean == pytest.approx(rows["rollout_lm_head"].baseline_kl_mean, rel=0.5)
    assert rows["chunked_prefill"].detail["self_kl_mean"] < 1e-3
    assert run("rollout_attention", moe).why == "vLLM has one attention backend on CPUs"


@pytest.mark.slow
def test_a_cache_in_fp8_is_not_offered_on_a_processor_without_wide_vectors(monkeypatch):
    with bench_of("dense") as bench:
        baseline = measure(bench, bench.rollouts(PAIR.rollout), PAIR.train)
        no_wide_vectors(monkeypatch)
        row = benches.FACTOR["kv_cache_dtype"].run(bench, PAIR, baseline)
    assert row.status == "not offered"
    assert row.why.startswith("not offered on this machine: FP8 KV cache")
