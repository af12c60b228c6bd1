"""Factors on a pair of transformers engines: what each must show, and planted causes that it must see."""

import json
import math

import pytest
import torch

from offdrift.check.bench import EngineSpec, Pair
from offdrift.check.check import check
from offdrift.check.factors import FACTORS
from offdrift.check.factors.base import Setting, recorded_alike, self_difference
from offdrift.check.measure import measure
from offdrift.engines.hf import TransformersEngine
from offdrift.engines.routing import at_predictions
from offdrift.records.provenance import Sampling
from offdrift.records.rollouts import FullVocab, HiddenStates
from tests.check.benches import BFLOAT16, FLOAT32, NULL, ROUNDED, bench_of, prompts_of, run
from tests.engines.contract import Forgetful
from tests.engines.models import VOCAB
from tests.engines.oracles import logp_rows

PROMPTS = prompts_of(12)
VLLM_ONLY = {"prefix_caching", "chunked_prefill", "kv_cache_dtype", "compiled"}
NOISE = 1e-9
"""Mean KL of two float32 engines, at most, nats."""


@pytest.fixture(scope="module")
def dense():
    with bench_of() as bench:
        yield bench


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_every_factor_runs_or_says_why_not(kind):
    with bench_of(kind, sampling=Sampling(max_tokens=6)) as bench:
        before = [w.clone() for w in bench.model.parameters()]
        found = check(bench, BFLOAT16, FLOAT32, factors=FACTORS, noise=False)
        after = list(bench.model.parameters())
    rows = {row["factor"]: row for row in found["factors"]}
    assert list(rows) == [f.name for f in FACTORS]
    assert len(rows) == 25
    without = VLLM_ONLY | ({"routing"} if kind == "dense" else set())
    assert {n for n, row in rows.items() if row["status"] == "not offered"} == without
    assert {n for n, row in rows.items() if row["status"] == "ran"} == set(rows) - without
    assert all(row["why"] for n, row in rows.items() if n in without)
    for name in set(rows) - without - {"tokenization"}:
        assert rows[name]["kl_mean"] >= 0, name
        assert rows[name]["baseline_kl_mean"] > 0, name
        assert rows[name]["changed"], name
    json.dumps(found, allow_nan=False)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in bench.model.modules())


def test_the_rollout_engines_rounding_goes_with_its_dtype(dense):
    row = run("rollout_dtype", dense, ROUNDED)
    assert row.kl_mean < NOISE < 1e-5 < row.baseline_kl_mean
    assert row.detail["self_kl_mean"] == pytest.approx(row.baseline_kl_mean, rel=1e-3)
    assert row.detail["self_tokens"] == 12 * 12
    back = run("rollout_dtype", dense, NULL)
    assert back.changed == "bfloat16 instead of float32"
    assert back.kl_mean > 1e-5 > NOISE > back.baseline_kl_mean


def test_float16_in_both_engines_takes_most_of_the_mismatch_away(dense):
    row = run("float16", dense, ROUNDED)
    assert row.changed == "float16 in both engines instead of bfloat16 and float32"
    assert row.kl_mean < row.baseline_kl_mean / 5
    half = EngineSpec("transformers", "float16")
    assert run("float16", dense, Pair(half, half)).changed == "bfloat16 in both engines instead of float16"


def test_an_8_bit_grid_is_another_policy_at_equal_weights(dense):
    row = run("quantization", dense, NULL)
    assert row.changed == "weights on the int8 grid instead of float32"
    assert row.kl_mean > 1e-5 > NOISE > row.baseline_kl_mean
    coarse = EngineSpec("transformers", "float32", {"quantization": "int8"})
    back = run("quantization", dense, Pair(coarse, FLOAT32))
    assert back.changed == "weights in float32 instead of on the int8 grid"
    assert back.kl_mean < NOISE < 1e-5 < back.baseline_kl_mean


def test_repeats_of_an_engine_that_ignores_its_seed_differ(dense, monkeypatch):
    row = run("repeats", dense, ROUNDED)
    assert row.detail["same_tokens_frac"] == 1
    assert row.detail["self_abs_log_ratio_max"] == 0
    draw = TransformersEngine.generate
    seeds = iter(range(100))
    monkeypatch.setattr(
        TransformersEngine, "generate", lambda self, *a, seed, **k: draw(self, *a, seed=next(seeds), **k)
    )
    with bench_of() as bench:
        row = run("repeats", bench, ROUNDED)
    assert row.detail["same_tokens_frac"] < 0.5


def test_a_head_that_depends_on_the_size_of_the_batch_is_seen(dense, monkeypatch):
    clean = run("batch", dense, NULL)
    assert clean.detail["self_tokens"] == 8 * 12
    assert clean.detail["self_kl_mean"] < NOISE
    init = TransformersEngine.__init__

    def planted(self, *arguments, **options):
        init(self, *arguments, **options)
        head = self.model.get_output_embeddings()
        head.register_forward_hook(lambda _, __, out: out * (1.05 if len(out) > 1 else 1.0))

    monkeypatch.setattr(TransformersEngine, "__init__", planted)
    with bench_of() as bench:
        row = run("batch", bench, NULL)
    assert row.detail["self_kl_mean"] > 1e-4
    assert row.kl_mean < NOISE < row.baseline_kl_mean
    with bench_of() as bench:
        bench.prompts = bench.prompts[:1]
        assert run("batch", bench, NULL).why == "there is one prompt only"


@pytest.mark.parametrize("side", ["rollout", "train"])
def test_kernels_and_heads_are_changed_on_one_side(dense, side):
    attention = run(f"{side}_attention", dense, NULL)
    assert attention.changed == "eager instead of sdpa"
    assert attention.kl_mean < NOISE
    head = run(f"{side}_lm_head", dense, NULL)
    assert "output head in bfloat16 instead of float32" in head.changed
    body = run(f"{side}_dtype", dense, NULL)
    assert NOISE < head.kl_mean < body.kl_mean


def test_a_filter_on_one_side_costs_the_mass_that_it_removed(dense):
    row = run("top_p", dense, NULL)
    drawn = dense.rollouts(FLOAT32, sampling=Sampling(max_tokens=12, top_p=0.95), evidence="full")
    kept = drawn.evidence.logp.isfinite()
    truth = logp_rows(dense.model, drawn, Sampling(max_tokens=12))
    # KL(mu restricted to its nucleus || mu) = -log of the nucleus' mass.
    expected = -truth.exp().where(kept, 0.0).sum(-1).log()
    assert len(expected) == 12 * 12
    assert row.kl_mean == pytest.approx(float(expected.mean()), rel=1e-3)
    assert row.baseline_kl_mean < NOISE


@pytest.mark.parametrize("asked", [1.0, 0.5], ids=["demonstrated at 0.7", "as asked"])
def test_raw_log_probs_are_off_by_the_temperature(asked):
    with bench_of(sampling=Sampling(max_tokens=12, temperature=asked)) as bench:
        row = run("raw_logprobs", bench, NULL)
        cold = Sampling(max_tokens=12, temperature=asked if asked < 1 else 0.7)
        drawn = bench.rollouts(FLOAT32, sampling=cold, evidence="full")
        raw = logp_rows(bench.model, drawn, Sampling(max_tokens=12))
    tempered = (raw / cold.temperature).log_softmax(-1)
    # KL(recorded || trainer): raw against tempered; what was drawn against what was recorded.
    recorded = (raw.exp() * (raw - tempered)).sum(-1).mean()
    sampled = (tempered.exp() * (tempered - raw)).sum(-1).mean()
    assert row.kl_mean == pytest.approx(float(recorded), rel=1e-3)
    assert row.detail["sampled_to_recorded_kl_mean"] == pytest.approx(float(sampled), rel=1e-3)
    assert row.baseline_kl_mean < NOISE
    assert f"temperature {cold.temperature:g}" in row.changed


def test_temperature_weighs_differences_of_logits(dense):
    row = run("temperature", dense, ROUNDED)
    assert row.changed == "temperature 0.7 instead of 1 in both engines"
    assert row.kl_mean > row.baseline_kl_mean > 1e-5


@pytest.mark.parametrize("shift", [-1, 0, 1])
def test_log_probs_that_are_off_by_one_are_detected(shift, monkeypatch):
    draw = TransformersEngine.generate

    def misaligned(self, *arguments, **options):
        rollouts = draw(self, *arguments, **options)
        return rollouts.with_(logp_rollout=rollouts.logp_rollout.roll(shift))

    monkeypatch.setattr(TransformersEngine, "generate", misaligned)
    with bench_of() as bench:
        row = run("off_by_one", bench, ROUNDED)
    names = {0: "correlation", 1: "correlation_before", -1: "correlation_after"}
    assert row.detail["detected"] == (shift != 0)
    assert row.detail[names[shift]] > 0.99
    assert all(abs(row.detail[n]) < 0.7 for s, n in names.items() if s != shift)
    assert row.kl_mean > 1


class Merging:
    """A tokenizer that reads "ab" as one token, which nobody sampled."""

    pad_token_id = 0

    def decode(self, ids, *, skip_special_tokens):
        assert not skip_special_tokens
        return "".join(chr(i + 97) for i in ids)

    def encode(self, text, *, add_special_tokens):
        assert not add_special_tokens
        return [ord(c) - 97 for c in text.replace(chr(97 + 5), "")]


def test_tokens_that_do_not_survive_text_are_counted(dense):
    row = run("tokenization", dense, NULL)
    assert row.detail["changed_sequences"] == 0
    assert math.isnan(row.kl_mean)
    with bench_of() as bench:
        bench.tokenizer = Merging()
        row = run("tokenization", bench, NULL)
        drawn = bench.rollouts(FLOAT32)
    responses = drawn.tokens.split(drawn.lengths.tolist())
    lost = [r for r in responses if 5 in r.tolist()]
    assert 0 < len(lost) < 12
    assert row.detail["changed_sequences"] == len(lost)
    assert row.detail["first_difference_min"] == min(r.tolist().index(5) for r in lost)
    assert row.detail["sequence_logp_gap_max"] > 0.1


@pytest.mark.parametrize("asked", [1.0, 0.8], ids=["as drawn", "without the filter"])
def test_the_first_sequences_of_a_draw_have_the_kl_that_they_have_alone(asked):
    with bench_of(sampling=Sampling(max_tokens=12, top_p=asked)) as bench:
        baseline = measure(bench, bench.rollouts(BFLOAT16), FLOAT32)
        setting = Setting(bench, BFLOAT16, FLOAT32, baseline)
        for count in (1, 8, 12):
            alone = measure(bench, setting.drawn.select(torch.arange(count)), FLOAT32)
            assert setting.drawn_kl_of(count) == pytest.approx(alone.kl_mean, rel=1e-4)
        assert setting.drawn_kl_of(12) == pytest.approx(setting.scored.kl_mean, rel=1e-9)


def test_records_are_alike_only_to_the_last_bit(dense):
    full = dense.rollouts(BFLOAT16)
    hidden = dense.rollouts(BFLOAT16, evidence="hidden")
    assert recorded_alike(full, full)
    assert recorded_alike(hidden, hidden.with_(logp_rollout=hidden.logp_rollout.clone()))
    assert self_difference(full, full)["self_kl_max"] == 0
    bit = torch.zeros(full.evidence.logp.shape)
    bit[-1, -1] = 1e-6
    others = [
        full.with_(evidence=FullVocab(full.evidence.logp + bit)),
        full.with_(logp_rollout=full.logp_rollout - bit[:, -1]),
        full.with_(tokens=full.tokens.roll(1)),
        hidden,
    ]
    assert not any(recorded_alike(full, other) for other in others)
    states = hidden.evidence.states.clone()
    states[0, 0] += 1
    moved = hidden.with_(evidence=HiddenStates(states, hidden.evidence.head))
    assert not recorded_alike(hidden, moved)


@pytest.mark.parametrize("planted", [False, True])
def test_a_mask_from_the_pad_id_hides_a_token_that_was_sampled(planted):
    with bench_of() as bench:
        drawn = bench.rollouts(FLOAT32)
        inner = torch.ones(144, dtype=torch.bool)
        inner[drawn.cu_seqlens[1:] - 1] = False
        counts = torch.bincount(drawn.tokens[inner], minlength=VOCAB)
        prompted = torch.bincount(drawn.prompt_tokens, minlength=VOCAB)
        pad = int((counts + prompted).argmin() if planted else counts.argmax())
        bench.tokenizer.pad_token_id = pad
        row = run("pad_id", bench, NULL)
        truth = logp_rows(bench.model, drawn, Sampling(max_tokens=12))
    assert row.detail["planted"] == planted == (int(counts[pad] + prompted[pad]) == 0)
    assert row.detail["in_responses"] == counts[pad]
    assert row.detail["in_prompts"] == prompted[pad]
    assert row.detail["probability_mean"] == pytest.approx(float(truth[:, pad].exp().mean()), rel=1e-3)
    assert row.baseline_kl_mean < NOISE
    assert row.kl_mean > 1e-3


def test_the_first_token_in_train_mode_is_right_and_the_later_ones_are_not(dense):
    row = run("gradient_checkpointing", dense, NULL)
    assert row.detail["first_token_kl_mean"] < NOISE
    assert row.detail["later_tokens_kl_mean"] > 0.1
    assert row.baseline_kl_mean < NOISE
    assert not dense.model.training
    assert not dense.model.is_gradient_checkpointing


def test_padding_does_not_leak_into_a_score(dense):
    row = run("train_batch", dense, NULL)
    assert row.detail["self_kl_mean"] < NOISE
    assert row.kl_mean < NOISE


@pytest.mark.parametrize(
    ("group", "name"), [(None, None), ("embeddings", "model.embed_tokens.weight"), ("mlp", "mlp")], ids=str
)
def test_weights_that_stay_behind_are_named(group, name):
    with bench_of() as bench:
        spec = BFLOAT16
        if group is not None:
            made = bench.engine(spec)
            forgetful = Forgetful(made, bench.model, group)
            forgetful.rescore = made.rescore
            bench._engines[spec.kind] = (spec, forgetful)
        row = run("weight_sync", bench, ROUNDED)
    assert row.detail["stale"] == ([] if group is None else [name])
    assert row.detail["parts"] == len(list(bench.model.parameters()))
    assert row.detail["kl_mean_if_nothing_arrived"] > 20 * row.baseline_kl_mean
    # Two per cent of every weight: what did arrive is at the level of the same weights.
    if group is None:
        assert row.detail["proved"] > 0.8 * row.detail["parts"]
        assert f"of {row.detail['parts']} tensors arrived, each proved alone" in row.why
        assert row.kl_mean < 4 * row.baseline_kl_mean
    else:
        assert row.kl_mean > 4 * row.baseline_kl_mean


@pytest.mark.parametrize(
    "missing",
    ["model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.gate_proj.weight", "model.norm.weight"],
)
def test_one_tensor_that_never_arrives_is_named(missing):
    with bench_of() as bench:
        engine = bench.engine(BFLOAT16)
        load, own = engine.load_weights, dict(engine.model.named_parameters())
        kept = own[missing].detach().clone()

        def partial(weights, *, version):
            load(((n, kept if n == missing else w) for n, w in weights), version=version)

        engine.load_weights = partial
        row = run("weight_sync", bench, ROUNDED)
    assert row.detail["stale"] == [missing]
    assert row.ratio > 2


@pytest.mark.parametrize("spec", [FLOAT32, BFLOAT16], ids=str)
def test_the_sync_is_measured_against_the_model_that_holds_the_weights(dense, spec):
    """A trainer at another dtype has rounding of its own, which is not the synchronization's."""
    row = run("weight_sync", dense, Pair(BFLOAT16, spec))
    drawn = dense.rollouts(BFLOAT16).select(torch.arange(8))
    exact = measure(dense, drawn, FLOAT32).kl_mean
    assert row.baseline_kl_mean == pytest.approx(exact, rel=1e-3)
    assert row.baseline_kl_mean > 1e-5


def test_a_mixture_in_bfloat16_flips_and_replay_explains_the_tail():
    with bench_of("moe", sampling=Sampling(max_tokens=24)) as bench:
        row = run("routing", bench, ROUNDED)
        null = run("routing", bench, NULL)
    detail = row.detail
    assert detail["positions"] == 12 * 23 + sum(map(len, PROMPTS))
    assert len(detail["flip_frac_per_layer"]) == 2
    assert 0 < detail["flip_frac"] <= detail["flipped_tokens_frac"] < 0.2
    # A decision that differs exchanges one or two of its two experts, out of 8.
    assert detail["experts"] == 8
    assert 2 / 8 * detail["flip_frac"] <= detail["delta_router"] + 1e-9 <= 4 / 8 * detail["flip_frac"] + 2e-9
    assert detail["kl_mean_at_flips"] > detail["kl_mean_elsewhere"]
    assert row.kl_mean == detail["kl_mean_with_replay"] < row.baseline_kl_mean
    assert detail["kl_max_with_replay"] < detail["kl_max_without_replay"]
    assert null.detail["flip_frac"] == null.detail["delta_router"] == 0
    assert run("routing", bench_of(), ROUNDED).why == "needs a mixture of experts"


def test_a_token_is_predicted_at_the_position_before_it(dense):
    drawn = dense.rollouts(FLOAT32).select(torch.tensor([1, 2, 0]))
    # Prompts of 2, 3 and 1 tokens, responses of 12: 13, 14 and 12 positions.
    expected = [*range(1, 13), *range(13 + 2, 13 + 14), *range(27, 39)]
    assert drawn.prompt_cu_seqlens.tolist() == [0, 2, 5, 6]
    assert at_predictions(drawn, torch.arange(39)).tolist() == expected


def test_filters_that_were_asked_for_do_not_stand_between_engines():
    sampling = Sampling(max_tokens=12, temperature=0.7, top_p=0.8)
    with bench_of(sampling=sampling) as bench:
        row = run("rollout_dtype", bench, ROUNDED)
        raw = run("raw_logprobs", bench, ROUNDED)
        top_p = run("top_p", bench, ROUNDED)
    assert row.kl_mean < NOISE < 1e-5 < row.baseline_kl_mean < 0.05
    assert "top_p 0.8" in raw.changed
    assert "top_p 0.8 in the rollout engine" in top_p.changed
    assert top_p.kl_mean > 0.01
