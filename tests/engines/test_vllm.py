"""The vLLM engine: the contract, and what only it promises."""

import gc
import sys
import warnings
from contextlib import nullcontext

import pytest
import torch

import offdrift.engines.vllm.engine as vllm_engine_module
from offdrift.engines.generate import request_seed
from offdrift.engines.grids import instruction_set, on_grid, warn_of_saturation
from offdrift.engines.score import score
from offdrift.engines.verify_sync import QUANTIZED_CAP, examine_sync, verify_sync
from offdrift.engines.vllm.taps import runner_of
from offdrift.errors import EngineError, NotOfferedError, SyncError
from offdrift.records.provenance import Sampling
from tests.engines.contract import PLAIN, PROMPTS, EngineContract
from tests.engines.models import CACHE_MIB, FP8_CACHE, no_wide_vectors, tiny

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    # Where `EXACT_INT8` is not: the warning has a test of its own.
    pytest.mark.filterwarnings("default:quantization = .w8a8. on a processor with:UserWarning"),
]

EXACT_INT8 = bool({"vnni", "amx"} & set(instruction_set().split("+")))
"""Whether int8 products are added without saturation here."""

SMALL = {"max_model_len": 64, "kv_cache_mib": CACHE_MIB}
"""Of an engine that a test makes for itself."""


@pytest.fixture(
    scope="class",
    params=[("dense", "float32"), ("moe", "float32"), ("dense", "bfloat16")],
    ids=["dense-fp32", "moe-fp32", "dense-bf16"],
)
def built(request, vllm_engine):
    kind, dtype = request.param
    return tiny(kind), vllm_engine(kind, dtype=dtype), dtype == "float32"


class TestContract(EngineContract):
    """All of it."""


@pytest.fixture
def dense(vllm_engine):
    return vllm_engine("dense", dtype="float32")


# -- synchronisation: vLLM's own reload is wrong on CPUs ------------------------------------------


@pytest.mark.parametrize(
    ("kind", "message"),
    [("dense", r"keeps old weights.*: model\.embed_tokens\.weight \(differ by"), ("moe", "without the mlp weights")],
    ids=["tied head", "experts"],
)
def test_the_plain_reload_is_caught_and_the_group_named(vllm_engine, kind, message, monkeypatch):
    model, engine = tiny(kind), vllm_engine(kind, dtype="float32")
    with monkeypatch.context() as patch:
        patch.setattr(vllm_engine_module, "repacked", lambda llm: None)
        with pytest.raises(SyncError, match=message) as caught:
            verify_sync(engine, model, PROMPTS, PLAIN, seed=0)
    assert "self_attn" not in str(caught.value)
    assert "norm" not in str(caught.value)
    engine.load_weights(model.named_parameters(), version=0)
    assert verify_sync(engine, model, PROMPTS, PLAIN, seed=0).noise < 1e-5


def test_cached_prefixes_of_old_weights_are_dropped(dense):
    # A prompt longer than a cache block of 128, so that keys and values are kept between calls.
    model, ahead = tiny("dense"), tiny("dense")
    with torch.no_grad():
        for weight in ahead.parameters():
            weight.add_(0.3 * weight.roll(1, 0))
    prompt = [[i % 64 for i in range(3, 153)]]
    sampling = Sampling(max_tokens=1)
    old = dense.generate(prompt, sampling, seed=0, evidence="full").evidence.logp
    cached = dense.cached_tokens
    dense.generate(prompt, sampling, seed=0)
    assert dense.cached_tokens >= cached + 128
    try:
        dense.load_weights(ahead.named_parameters(), version=1)
        new = dense.generate(prompt, sampling, seed=0, evidence="full").evidence.logp
    finally:
        dense.load_weights(model.named_parameters(), version=0)
    truth = ahead(input_ids=torch.tensor(prompt)).logits[0, -1:].log_softmax(-1).detach()
    torch.testing.assert_close(new, truth, atol=1e-4, rtol=0)
    assert (old - truth).abs().max() > 0.1


def test_no_weights_at_all_are_refused(dense):
    with pytest.raises(EngineError, match="no weights were given"):
        dense.load_weights(iter(()), version=9)
    assert dense.version == 0
    dense.load_weights(tiny("dense").named_parameters(), version=0)


@pytest.mark.parametrize(
    ("options", "label"),
    [({"quantization": "fp8_per_channel"}, "fp8_per_channel"), ({"kv_cache_dtype": "fp8"}, "kv_fp8")],
    ids=["weights", "cache"],
)
def test_fp8_drifts_but_takes_new_weights(vllm_engine, options, label):
    if "kv_cache_dtype" in options and not FP8_CACHE:
        with pytest.raises(NotOfferedError, match="not offered on this machine: FP8 KV cache"):
            vllm_engine("dense", **options)
        return
    engine = vllm_engine("dense", **options)
    report = verify_sync(engine, tiny("dense"), PROMPTS, PLAIN, seed=0)
    assert engine.generate(PROMPTS, PLAIN, seed=0).provenance.quantization == label
    # bf16 alone is about 0.015 here.
    assert 0.05 < report.noise < report.cap == QUANTIZED_CAP


@pytest.fixture(scope="module")
def exact_int8(vllm_engine):
    """W8A8 with everything else in float32."""
    return vllm_engine("dense", dtype="float32", quantization="w8a8")


def test_w8a8_multiplies_the_numbers_of_the_grid_before_and_after_new_weights(exact_int8):
    model, ahead = tiny("dense"), tiny("dense")
    with torch.no_grad():
        for weight in ahead.parameters():
            weight.add_(0.1 * weight.roll(1, 0))
    for version, trainer in ((1, ahead), (2, model)):
        exact_int8.load_weights(trainer.named_parameters(), version=version)
        rollouts = exact_int8.generate(PROMPTS, PLAIN, seed=1, evidence="full")
        assert rollouts.provenance.quantization == "w8a8"
        assert rollouts.provenance.instructions == instruction_set()
        mu = rollouts.evidence.logp.double()

        def kl(policy, mu=mu, rollouts=rollouts):
            pi = score(policy, rollouts).logits.detach().double().log_softmax(-1)
            return float((mu.exp() * (mu - pi)).sum(-1).median())

        assert kl(trainer) > 1e-4
        with on_grid(trainer, "w8a8"):
            assert kl(trainer) < 1e-7 or not EXACT_INT8


def test_every_group_of_weights_reaches_the_int8_engine(exact_int8):
    model = tiny("dense")
    with on_grid(model, "w8a8"):
        report = verify_sync(exact_int8, model, PROMPTS, PLAIN, seed=0)
    assert report.unverified == ()
    assert report.noise < 0.01 or not EXACT_INT8


def test_a_reload_of_int8_weights_without_its_repair_is_noticed(exact_int8, monkeypatch):
    model = tiny("dense")
    monkeypatch.setattr(vllm_engine_module, "reloadable", lambda dtype, quantized: nullcontext())
    torch.set_default_dtype(torch.float32)
    try:
        with pytest.raises((SyncError, EngineError)):
            verify_sync(exact_int8, model, PROMPTS, PLAIN, seed=0)
    finally:
        monkeypatch.undo()
        exact_int8.load_weights(model.named_parameters(), version=0)


def test_int8_experts_take_new_weights(checkpoints):
    """vLLM's reload packs integers itself; packed again, they are no weights of its kernel."""
    if "amx" not in instruction_set():
        pytest.skip("vLLM's int8 experts on a CPU were seen to start with AMX only")
    engine = vllm_engine_module.VLLMEngine(checkpoints["moe"], dtype="bfloat16", quantization="experts_int8", **SMALL)
    try:
        experts = [m for m in runner_of(engine.llm).model.modules() if hasattr(m, "w13_weight")]
        assert {m.w13_weight.dtype for m in experts} == {torch.int8}
        assert examine_sync(engine, tiny("moe"), PROMPTS, PLAIN, seed=0, again=False).proved == 25
    finally:
        engine.close()


def test_w8a8_of_a_mixture_and_of_no_folder_are_refused(checkpoints, tmp_path):
    with pytest.raises(EngineError, match="fused tensor of experts"):
        vllm_engine_module.VLLMEngine(checkpoints["moe"], quantization="w8a8", **SMALL)
    tiny("dense").config.save_pretrained(tmp_path)
    with pytest.raises(EngineError, match="has no safetensors files"):
        vllm_engine_module.VLLMEngine(str(tmp_path), quantization="w8a8", **SMALL)


@pytest.mark.filterwarnings("default::UserWarning")
def test_int8_without_vnni_is_warned_of():
    with pytest.warns(UserWarning, match="processor with avx2: without VNNI"):
        warn_of_saturation("avx2")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_saturation("avx512+vnni")
        warn_of_saturation(None)


@pytest.mark.skipif(not FP8_CACHE, reason="FP8 KV cache requires AVX-512 or AMX")
def test_scales_of_an_fp8_cache_follow_the_weights(vllm_engine):
    engine = vllm_engine("dense", kv_cache_dtype="fp8")
    drift = {}
    for factor in (1.0, 1e3, 1e-3):  # small values lose their bits at a scale of 1, large ones are cut off
        model = tiny("dense")
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.v_proj.weight.div_(factor)
                layer.self_attn.o_proj.weight.mul_(factor)
        engine.load_weights(model.named_parameters(), version=1)
        rollouts = engine.generate(PROMPTS, PLAIN, seed=1, evidence="full")
        mu = rollouts.evidence.logp.double()
        pi = score(model, rollouts).logits.detach().double().log_softmax(-1)
        drift[factor] = float((mu.exp() * (mu - pi)).sum(-1).mean())
    assert max(drift.values()) < 2 * min(drift.values()) < 0.05


def test_an_fp8_cache_on_a_processor_without_wide_vectors_is_not_offered(checkpoints, dense, monkeypatch):
    no_wide_vectors(monkeypatch)
    with pytest.raises(NotOfferedError, match=r"not offered on this machine: FP8 KV cache.*AVX-512"):
        vllm_engine_module.VLLMEngine(checkpoints["dense"], kv_cache_dtype="fp8", **SMALL)
    gc.collect()
    assert len(dense.generate(PROMPTS, PLAIN, seed=0).tokens) == 96


# -- requests -------------------------------------------------------------------------------------


def test_a_response_does_not_depend_on_what_else_is_in_the_batch(dense):
    together = dense.generate(PROMPTS, PLAIN, seed=1)
    first = dense.generate(PROMPTS[:3], PLAIN, seed=1)
    assert torch.equal(together.tokens[:36], first.tokens)


def test_long_lists_of_log_probs_are_fetched_in_pieces(dense, monkeypatch):
    whole = dense.generate(PROMPTS, PLAIN, seed=2, evidence="full")
    sizes = []
    draw = dense._draw
    monkeypatch.setattr(dense, "evidence_limit_mib", 1)
    monkeypatch.setattr(vllm_engine_module, "BYTES_PER_ENTRY", 2**20 // (3 * 12 * 65))
    monkeypatch.setattr(dense, "_draw", lambda r, params: (sizes.append(len(r.prompts)), draw(r, params))[1])
    pieces = dense.generate(PROMPTS, PLAIN, seed=2, evidence="full")
    assert sizes == [3, 3, 2]
    assert torch.equal(whole.tokens, pieces.tokens)
    torch.testing.assert_close(whole.evidence.logp, pieces.evidence.logp, atol=1e-5, rtol=0)


def test_every_request_of_every_seed_has_its_own_stream():
    seeds = {request_seed(seed, index) for seed in range(-5, 45) for index in range(100)}
    assert len(seeds) == 50 * 100
    assert 0 <= min(seeds) < max(seeds) < 2**63


@pytest.mark.parametrize(
    ("prompts", "sampling", "message"),
    [
        ([[1] * 250], Sampling(max_tokens=7), "250 tokens .*max_tokens = 7 exceed max_model_len = 256"),
        ([[1]], Sampling(max_tokens=5, temperature=2.5), r"temperature = 2.5, vLLM samples up to 2"),
    ],
    ids=["length", "temperature"],
)
def test_what_vllm_would_cut_or_refuse_is_refused_by_name(dense, prompts, sampling, message):
    with pytest.raises(EngineError, match=message):
        dense.generate(prompts, sampling, seed=0)


def test_the_longest_request_that_fits_is_not_cut(dense):
    assert dense.generate([[1] * 250], Sampling(max_tokens=6), seed=0).lengths.tolist() == [6]


def test_more_prompt_tokens_than_one_step_takes_are_drawn_in_turn(dense):
    # 200 x 30 tokens, a step takes 4096: the last prompt of a step may not be cut in two, because
    # vLLM cannot rewind the random stream of a request on CPUs.
    prompts = [[5 + i % 40] * 30 for i in range(200)]
    several = dense.generate(prompts, Sampling(max_tokens=2), seed=0)
    assert several.lengths.tolist() == [2] * 200


def test_tokens_can_be_followed_in_chunks_but_not_drawn(vllm_engine, dense):
    engine = vllm_engine("dense", dtype="float32", max_num_batched_tokens=32, max_num_seqs=8)
    prompts = [[(i * j) % 64 for i in range(150)] for j in range(1, 4)]
    drawn = dense.generate(prompts, PLAIN, seed=0, evidence="full")
    steps = []
    model = runner_of(engine.llm, "model").model
    handle = model.register_forward_pre_hook(lambda *_: steps.append(1))
    found = engine.rescore(drawn)
    handle.remove()
    assert len(steps) >= 3 * 150 / 32 + 11
    torch.testing.assert_close(found.evidence.logp, drawn.evidence.logp, atol=1e-4, rtol=0)
    with pytest.raises(EngineError, match="450 tokens exceed max_num_batched_tokens = 32"):
        engine.generate(prompts, PLAIN, seed=0)


def test_the_head_can_be_computed_in_float32(vllm_engine):
    plain = vllm_engine("dense", dtype="bfloat16")
    engine = vllm_engine("dense", dtype="bfloat16", head_dtype="float32")
    hidden = plain.generate(PROMPTS, PLAIN, seed=0, evidence="hidden")
    weight = tiny("dense").lm_head.weight.detach().bfloat16().float()
    truth = (hidden.evidence.states.float() @ weight.T).log_softmax(-1)
    rows = engine.rescore(hidden).evidence.logp
    assert rows.shape == (96, 64)
    torch.testing.assert_close(rows, truth, atol=1e-3, rtol=0)
    assert (plain.rescore(hidden).evidence.logp - truth).abs().max() > 5e-3


# -- construction ---------------------------------------------------------------------------------


def test_a_missing_vllm_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(EngineError, match="make install-vllm"):
        vllm_engine_module.VLLMEngine("anywhere")


def test_a_model_that_cannot_be_loaded_so_is_refused_with_the_options(checkpoints, dense):
    with pytest.raises(EngineError, match=r"cannot load .*'dtype': 'float7'"):
        vllm_engine_module.VLLMEngine(checkpoints["dense"], dtype="float7", **SMALL)
    assert len(dense.generate(PROMPTS, PLAIN, seed=0).tokens) == 96


def test_raw_log_probs_are_refused(checkpoints, dense, monkeypatch):
    import vllm

    whole = vllm.LLM
    monkeypatch.setattr(vllm, "LLM", lambda path, **kw: whole(path, **kw | {"logprobs_mode": "raw_logprobs"}))
    with pytest.raises(EngineError, match="raw_logprobs, not the log-probs"):
        vllm_engine_module.VLLMEngine(checkpoints["dense"], **SMALL)
    gc.collect()
    assert len(dense.generate(PROMPTS, PLAIN, seed=0).tokens) == 96


@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_one_engine_can_go_and_the_others_go_on(checkpoints, dense, how):
    other = vllm_engine_module.VLLMEngine(checkpoints["dense"], **SMALL)
    if how == "closed":
        other.close()
        other.close()
        with pytest.raises(EngineError, match="'vllm' is closed"):
            other.generate(PROMPTS, PLAIN, seed=0)
    else:
        del other
        gc.collect()
    assert torch.distributed.is_initialized()
    assert len(dense.generate(PROMPTS, PLAIN, seed=0).tokens) == 96
