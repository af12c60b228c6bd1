"""The checks of a synchronisation, where the contract does not reach: the right claim each time."""

import math
from dataclasses import replace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from offdrift.engines.hf import TransformersEngine
from offdrift.engines.read_back import arrived
from offdrift.engines.sync_units import Units, weight_groups
from offdrift.engines.verify_sync import (
    CONTEXT,
    FLOAT32_CAP,
    HALF_CAP,
    LOADS,
    QUANTIZED_CAP,
    check_sync,
    examine_sync,
    precision_cap,
    verify_sync,
)
from offdrift.errors import SyncError
from offdrift.records.provenance import Provenance, Sampling
from tests.engines.contract import PLAIN, PROMPTS, Forgetful
from tests.engines.models import tiny


class Deaf:
    """An engine whose `load_weights` does nothing at all."""

    def __init__(self, engine):
        self._engine = engine

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def load_weights(self, weights, *, version):
        pass


class Spoiled(Deaf):
    """An engine that takes every weight, but whose log-probs are off by a constant."""

    def __init__(self, engine, by):
        super().__init__(engine)
        self.by = by
        self.load_weights = engine.load_weights

    def generate(self, *args, **kwargs):
        rollouts = self._engine.generate(*args, **kwargs)
        return rollouts.with_(logp_rollout=rollouts.logp_rollout + self.by)


def gpt2():
    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 32}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None))


def moved(model):
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.3 * weight.roll(1, 0))
    return model


@pytest.mark.parametrize(
    ("model", "counts"),
    [
        # Per layer: q, k, v, o; gate, up, down (experts: two fused, one router);
        # norms of q, k, input, mlp; then the last norm. The tied head counts once.
        (lambda: tiny("dense"), {"embeddings": 1, "attention": 8, "mlp": 6, "norms": 9}),
        (lambda: tiny("moe"), {"embeddings": 2, "attention": 8, "mlp": 6, "norms": 9}),
        # Tokens and positions; c_attn and c_proj, c_fc and c_proj, ln_1, ln_2, ln_f, with biases.
        (gpt2, {"embeddings": 2, "attention": 4, "mlp": 4, "norms": 6}),
    ],
    ids=["dense", "moe", "gpt2"],
)
def test_every_weight_is_in_the_group_of_what_it_does(model, counts):
    model = model()
    groups = weight_groups(model)
    assert {name: len(weights) for name, weights in groups.items()} == counts
    grouped = [id(w) for weights in groups.values() for w in weights]
    assert sorted(grouped) == sorted(id(w) for w in model.parameters())


@pytest.mark.parametrize(
    ("dtype", "quantization", "trainer", "cap"),
    [
        ("float32", None, torch.float32, FLOAT32_CAP),
        ("float32", None, torch.bfloat16, HALF_CAP),
        ("bfloat16", None, torch.float32, HALF_CAP),
        ("float16", None, torch.float32, HALF_CAP),
        ("float32", "int8", torch.float32, QUANTIZED_CAP),
        ("bfloat16", "kv_fp8", torch.bfloat16, QUANTIZED_CAP),
    ],
)
def test_the_cap_is_that_of_the_coarser_side(dtype, quantization, trainer, cap):
    provenance = Provenance("e", "1", "m", dtype, quantization, PLAIN)
    assert precision_cap(provenance, torch.nn.Linear(1, 1, dtype=trainer)) == cap


def test_the_probe_drops_filters_and_stops_and_keeps_the_temperature():
    # Filters would show as a difference that is not the weights'; a stop on every token as one
    # token per prompt; a forgotten temperature as tenths of a nat.
    sampling = Sampling(100, temperature=0.7, top_k=3, top_p=0.5, stop_token_ids=tuple(range(64)))
    report = verify_sync(TransformersEngine(tiny("dense")), tiny("dense"), PROMPTS, sampling, seed=0)
    assert report.tokens == 8 * 16
    assert report.noise < 1e-5
    assert report.unverified == ()


def test_the_parts_are_every_tensor_and_every_expert_and_unions_are_larger_parts():
    model = tiny("moe")
    units = Units.of(model)
    tensors = dict(model.named_parameters())
    experts = [n for n in tensors if "experts" in n]
    assert len(experts) == 4
    assert len(units.parts) == len(tensors) - 4 + 4 * 8
    assert [sum(p.split("[")[0] == n for p in units.parts) for n in tensors] == list(units.counts)
    sizes = torch.bincount(units.rows).tolist()
    assert sizes[: len(units.parts)] == [1] * len(units.parts)
    assert sizes == sorted(sizes)
    assert sizes[-1] == len(units.parts)
    named = {name: {units.parts[i] for i in units.parts_of(row).tolist()} for row, name in enumerate(units.unions)}
    both = {f"model.layers.0.mlp.experts.{w}_proj[3]" for w in ("gate_up", "down")}
    assert named["model.layers.0.mlp.experts[3]"] == both
    assert named["norms"] == {n for n in tensors if "norm" in n}
    assert named["model.layers.1"] == {p for p in units.parts if p.startswith("model.layers.1.")}


def test_an_engine_that_takes_nothing_is_caught_at_once():
    engine = Deaf(TransformersEngine(tiny("dense")))
    with pytest.raises(SyncError, match=r"right after load_weights.*no single group explains it"):
        verify_sync(engine, moved(tiny("dense")), PROMPTS, PLAIN, seed=0)
    # With the weights it already has, only perturbing them can tell.
    with pytest.raises(SyncError, match=r"keeps old weights.*: all weights \(differ by"):
        verify_sync(engine, tiny("dense"), PROMPTS, PLAIN, seed=0)


@pytest.mark.parametrize(("group", "kind"), [("attention", "dense"), ("mlp", "dense"), ("mlp", "moe")])
def test_a_group_that_is_taken_wrongly_is_named_by_what_agrees_without_it(group, kind):
    class Garbling(Deaf):
        def load_weights(self, weights, *, version):
            bad = {id(w) for w in weight_groups(model)[group]}
            self._engine.load_weights(((n, w.flip(-1) if id(w) in bad else w) for n, w in weights), version=version)

    model = tiny(kind)
    with pytest.raises(SyncError, match=f"without the {group} weights they agree"):
        verify_sync(Garbling(TransformersEngine(model)), model, PROMPTS, PLAIN, seed=0)
    exact = tiny(kind)
    assert all(map(torch.equal, model.parameters(), exact.parameters()))


@pytest.mark.parametrize("by", [-2e-3, float("nan")])
def test_log_probs_off_by_a_constant_are_a_mismatch(by):
    model = tiny("dense")
    engine = Spoiled(TransformersEngine(model), by)
    with pytest.raises(SyncError, match=r"cap at this precision is 0\.001"):
        verify_sync(engine, model, PROMPTS, PLAIN, seed=0)


def test_weights_that_nothing_reads_are_reported_as_unverified():
    # Attention that writes nothing: whatever its other weights are, no log-prob moves.
    model = tiny("dense")
    for layer in model.model.layers:
        layer.self_attn.o_proj.forward = lambda x: x.new_zeros(*x.shape[:-1], 64)
    report = verify_sync(TransformersEngine(model), model, PROMPTS, PLAIN, seed=0)
    attention = tuple(n for n, _ in model.named_parameters() if "self_attn" in n or "input_layernorm" in n)
    assert len(attention) == 14
    assert report.unverified == attention
    assert report.together == {}
    assert "noise hides, or nothing reads, model.layers.0.self_attn.q_proj.weight" in str(report)


def test_a_failing_engine_leaves_the_trainer_its_weights_and_modes():
    class Broken(Deaf):
        loads = 0

        def load_weights(self, weights, *, version):
            self.loads += 1
            if self.loads == 2:
                raise RuntimeError("lost connection")
            self._engine.load_weights(weights, version=version)

    model = tiny("dense").train()
    model.model.layers[0].eval()
    modes = [m.training for m in model.modules()]
    engine = Broken(TransformersEngine(model))
    with pytest.raises(RuntimeError, match="lost connection"):
        verify_sync(engine, model, PROMPTS, PLAIN, seed=0)
    assert all(map(torch.equal, model.parameters(), tiny("dense").parameters()))
    assert all(map(torch.equal, engine.model.parameters(), model.parameters()))
    assert [m.training for m in model.modules()] == modes
    assert engine.loads == 3


@pytest.mark.parametrize(("noise", "limit"), [(1e-9, FLOAT32_CAP / 10), (1e-5, 1e-4), (1.0, 1e-3)])
def test_a_later_difference_is_held_against_noise_and_cap(noise, limit):
    model = tiny("dense")
    engine = TransformersEngine(model)
    baseline = replace(verify_sync(engine, model, PROMPTS, PLAIN, seed=0), noise=noise)
    below = check_sync(Spoiled(engine, -0.9 * limit), model, PROMPTS, PLAIN, seed=1, baseline=baseline)
    assert math.isclose(below, 0.9 * limit, rel_tol=0.05)
    with pytest.raises(SyncError, match=f"the limit is {limit:.3g}"):
        check_sync(Spoiled(engine, -1.1 * limit), model, PROMPTS, PLAIN, seed=1, baseline=baseline)


@pytest.mark.parametrize(("share", "refused"), [(0.24, False), (0.6, True)])
def test_flips_of_a_few_tokens_are_no_stale_weights_and_shifts_of_most_are(share, refused):
    """Ten nats on a share of the tokens, as when a router chooses another expert, from the second load on."""

    class Flipping(Spoiled):
        def generate(self, *args, **kwargs):
            batch = self._engine.generate(*args, **kwargs)
            n = len(batch.tokens)
            flipped = torch.randperm(n, generator=torch.Generator().manual_seed(n + engine.calls)) < share * n
            engine.calls += 1
            return batch.with_(logp_rollout=batch.logp_rollout - 10 * flipped * (engine.calls > 1))

    model = tiny("moe")
    engine = Flipping(TransformersEngine(model, dtype="bfloat16"), 0.0)
    engine.calls = 0
    if refused:
        with pytest.raises(SyncError, match=r"something that no tensor, layer or group explains \(differ by 9\."):
            verify_sync(engine, model, PROMPTS, PLAIN, seed=0)
    else:
        assert verify_sync(engine, model, PROMPTS, PLAIN, seed=0).loads <= LOADS


@pytest.mark.parametrize("stale", [[], ["model.layers.1.mlp.gate_proj.weight"]])
def test_long_prompts_are_compared_whole_once_and_perturbed_loads_read_their_last_tokens(stale):
    """Every pass of a perturbed load is paid for each token of the prompts."""
    asked = []

    class Noting(Deaf):
        def generate(self, prompts, *args, **kwargs):
            asked.append({tuple(p) for p in prompts})
            return self._engine.generate(prompts, *args, **kwargs)

        def load_weights(self, weights, *, version):
            self._engine.load_weights(((n, old.get(n, w)) for n, w in weights), version=version)

    model = tiny("dense")
    old = {name: model.get_parameter(name).detach().clone() for name in stale}
    prompts = [[*range(3 + i, 3 + i + 2 * CONTEXT)] for i in range(3)]
    report = examine_sync(Noting(TransformersEngine(model, dtype="bfloat16")), model, prompts, PLAIN, seed=0)
    whole, *rest = asked
    assert whole == {tuple(p) for p in prompts}
    assert len(rest) > report.loads > 0
    assert set().union(*rest) == {tuple(p[-CONTEXT:]) for p in prompts}
    assert [unit.name for unit in report.stale] == stale


@pytest.mark.parametrize("sharpness", [1, 4, 10])
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_an_honest_engine_in_bfloat16_is_never_refused(kind, sharpness):
    """Perturbed weights are less sure of their tokens, so that noise grows with the effect."""
    model = tiny(kind)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(sharpness)
    engine = TransformersEngine(model, dtype="bfloat16")
    reports = [examine_sync(engine, model, PROMPTS, PLAIN, seed=seed) for seed in range(4)]
    assert [r.stale for r in reports] == [()] * 4
    assert all(r.loads <= LOADS for r in reports)
    for zero in (r.zero_update for r in reports):
        assert 0 < zero.mean <= zero.largest
        assert zero.mean**2 / 2 <= zero.kl <= zero.largest**2 / 2
        assert zero.mean < zero.cap == HALF_CAP
        assert zero.equal < zero.tokens
    assert sum(r.proved for r in reports) > 2 * sum(len(r.unverified) + len(r.together) for r in reports)


@pytest.mark.parametrize(
    ("kind", "dtype", "stale", "name"),
    [
        ("dense", "float32", "layers.1.self_attn", "model.layers.1.self_attn"),
        ("moe", "bfloat16", "layers.0.mlp.experts.down_proj", "model.layers.0.mlp.experts.down_proj"),
        ("moe", "bfloat16", "layers.0.self_attn.v_proj.weight", "model.layers.0.self_attn.v_proj.weight"),
        ("moe", "bfloat16", "layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.gate_up_proj"),
    ],
)
def test_one_stale_layer_or_tensor_of_a_group_is_enough(kind, dtype, stale, name):
    model = tiny(kind)
    engine = Forgetful(TransformersEngine(model, dtype=dtype), model, "mlp")
    engine._old = {n: w.detach().clone() for n, w in model.named_parameters() if stale in n}
    assert engine._old
    report = examine_sync(engine, model, PROMPTS, PLAIN, seed=0)
    assert [unit.name for unit in report.stale] == [name]


def test_tensors_that_are_shown_but_not_computed_with_are_found():
    class Showing(Deaf):
        def load_weights(self, weights, *, version):
            self.shown = {name: weight.detach().bfloat16() for name, weight in weights}

        def held_weights(self):
            return self.shown.items()

    model = tiny("dense")
    engine = Showing(TransformersEngine(model, dtype="bfloat16"))
    report = examine_sync(engine, model, PROMPTS, PLAIN, seed=0, again=False)
    assert report.stale
    assert not report.read_back


@pytest.mark.parametrize(("dtype", "options"), [("bfloat16", {"quantization": "int8"}), ("float32", {})])
def test_float32_and_rounded_weights_are_proved_by_what_they_do(dtype, options):
    model = tiny("dense")
    engine = TransformersEngine(model, dtype=dtype, **options)
    report = examine_sync(engine, model, PROMPTS, PLAIN, seed=0, again=False)
    assert (report.stale, report.read_back) == ((), False)


def test_tensors_are_read_back_only_by_name_and_bit_and_where_they_moved():
    model, engine = tiny("dense"), TransformersEngine(tiny("dense"), dtype="bfloat16")
    units = Units.of(model)
    elsewhere = [w.detach() + 1 for w in units.weights]
    assert arrived(engine, model, units, elsewhere)
    assert not arrived(engine, model, units, [*elsewhere[:-1], units.weights[-1].detach()])  # this one did not move
    shown = dict(engine.held_weights())
    name = next(iter(shown))
    for wrong in ({n: x for n, x in shown.items() if n != name}, {**shown, name: shown[name].clone()}):
        if name in wrong:
            wrong[name].view(torch.int16).view(-1)[0] ^= 1
        other = Deaf(engine)
        other.held_weights = wrong.items
        assert not arrived(other, model, units, elsewhere)


def test_the_cheap_check_counts_a_single_token_up_to_one_nat():
    class Flipped(Spoiled):
        def generate(self, *args, **kwargs):
            batch = self._engine.generate(*args, **kwargs)
            batch.logp_rollout[3] += self.by
            return batch

    model = tiny("dense")
    engine = TransformersEngine(model)
    baseline = replace(verify_sync(engine, model, PROMPTS, PLAIN, seed=0), noise=0.011, cap=0.25)
    gap = check_sync(Flipped(engine, -10.0), model, PROMPTS, PLAIN, seed=1, baseline=baseline)
    assert gap == pytest.approx(1 / 96, rel=0.01)
    for by in (-0.3, float("nan")):
        with pytest.raises(SyncError, match="nats per token after a synchronization"):
            check_sync(Spoiled(engine, by), model, PROMPTS, PLAIN, seed=1, baseline=baseline)
