"""Forward passes in a fixed order: bits that no batch changes, and the same numbers as the model's own kernels."""

import copy

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM, Qwen3Config, Qwen3ForCausalLM

from offdrift.engines import hf_fixed_order, make_engine
from offdrift.engines.hf_fixed_order import (
    TILE,
    batch_invariant,
    check_invariance,
    invariance_gap,
    is_batch_invariant,
    sharded_linear,
    tensor_parallel,
    tiled_linear,
)
from offdrift.engines.score import divergences, score
from offdrift.errors import EngineError, ShapeError
from offdrift.records.provenance import Sampling
from tests.engines.models import SIZES, VOCAB, tiny

HALVES = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}
PROMPTS = [[4 + i, 13, 5 + i % 7, 9, 10][: 1 + i % 5] for i in range(7)] * 2
PLAIN = Sampling(max_tokens=12)
FILTERED = Sampling(max_tokens=TILE + 8, temperature=0.7, top_p=0.9, stop_token_ids=(5, 6))


@pytest.mark.parametrize("kind", ["dense", "moe"])
@pytest.mark.parametrize("dtype", HALVES)
def test_a_sequence_has_the_same_logits_alone_padded_and_cached(kind, dtype):
    model = tiny(kind).to(getattr(torch, dtype))
    assert invariance_gap(model) > 0, "the model's own kernels are invariant here: this would test nothing"
    assert invariance_gap(batch_invariant(model)) == 0


@pytest.mark.parametrize("threads", [1, 2])
def test_bits_do_not_depend_on_the_number_of_threads(threads):
    model, ids = batch_invariant(tiny("dense")), torch.arange(60).view(3, 20)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        torch.set_num_threads(threads)
        assert torch.equal(model(input_ids=ids).logits, expected)
    torch.set_num_threads(before)


@pytest.mark.parametrize(("kind", "sampling"), [("dense", FILTERED), ("moe", PLAIN)], ids=["dense", "moe"])
@pytest.mark.parametrize("dtype", HALVES)
def test_engine_and_trainer_give_the_same_bits(kind, dtype, sampling):
    """Drawn token by token from a cache, five at a time; scored whole, together, alone, and in another order."""
    trainer = batch_invariant(tiny(kind))
    engine = make_engine("transformers", tiny(kind), dtype=dtype, batch_invariant=True, batch_size=5)
    rollouts = engine.generate(PROMPTS, sampling, seed=0, evidence="full")
    for sequences in (torch.arange(14), torch.tensor([3]), torch.tensor([7, 1, 12])):
        part = rollouts.select(sequences)
        scored = score(trainer, part, temperature=sampling.temperature, half=HALVES[dtype])
        assert torch.equal(scored.logp, part.logp_rollout)
        assert torch.equal(scored.logits, part.evidence.logp)
        assert all((d.hi == 0).all() for d in divergences(part, scored.logits).values())
    again = engine.rescore(rollouts.select(torch.tensor([11])), evidence="full")
    assert torch.equal(again.logp_rollout, rollouts.select(torch.tensor([11])).logp_rollout)


def test_without_the_mode_neither_side_has_the_others_bits():
    rollouts = make_engine("transformers", tiny("dense"), batch_invariant=True).generate(PROMPTS, PLAIN, seed=0)
    assert not torch.equal(score(tiny("dense"), rollouts).logp, rollouts.logp_rollout)
    rollouts = make_engine("transformers", tiny("dense")).generate(PROMPTS, PLAIN, seed=0)
    assert not torch.equal(score(batch_invariant(tiny("dense")), rollouts).logp, rollouts.logp_rollout)


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_numbers_and_gradients_are_those_of_the_models_own_kernels(kind):
    rollouts = make_engine("transformers", tiny(kind)).generate(PROMPTS, FILTERED, seed=0)
    own, fixed = tiny(kind), batch_invariant(tiny(kind))
    gradients = []
    for model in (own, fixed):
        scored = score(model, rollouts, temperature=0.7)
        scored.logp.sum().backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        torch.testing.assert_close(scored.entropy, score(own, rollouts, temperature=0.7).entropy, rtol=1e-4, atol=1e-5)
    assert gradients[0].keys() == gradients[1].keys()
    for name, g in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], g, rtol=0, atol=1e-5 * float(g.abs().max()), msg=name)


def test_a_linear_layer_has_the_gradients_of_its_definition():
    g = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*s, generator=g, dtype=torch.float64) for s in ((2, 3, 5), (4, 5), (4,)))
    inputs = tuple(t.requires_grad_() for t in (x, weight, bias))
    torch.testing.assert_close(tiled_linear(*inputs), torch.nn.functional.linear(*inputs))
    assert torch.autograd.gradcheck(tiled_linear, inputs)
    assert tiled_linear(x[:, :0], weight).shape == (2, 0, 4)


def test_copies_are_changed_as_well_and_use_their_own_weights():
    model = batch_invariant(batch_invariant(tiny("dense")))
    copied = copy.deepcopy(model)
    assert is_batch_invariant(copied)
    assert len(copied._forward_pre_hooks) == 1
    with torch.no_grad():
        copied.lm_head.weight.mul_(2)
        ids = torch.tensor([[4, 5]])
        assert not torch.equal(copied(input_ids=ids).logits, model(input_ids=ids).logits)
    assert not is_batch_invariant(tiny("dense"))


def test_the_order_ends_with_the_forward_pass_also_on_errors(monkeypatch):
    model, x = batch_invariant(tiny("dense")), torch.ones(1, 2)

    def fail(*arguments):
        raise ZeroDivisionError

    monkeypatch.setattr(hf_fixed_order, "tiled_linear", fail)
    with pytest.raises(ZeroDivisionError):
        model(input_ids=torch.tensor([[4]]))
    assert torch.nn.functional.linear(x, x).item() == 2
    monkeypatch.undo()
    model(input_ids=torch.tensor([[4]]))
    assert model._fixed_orders == []


def test_what_has_no_fixed_order_is_refused(monkeypatch):
    layers = {"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True, "sliding_window": 4}
    with pytest.raises(EngineError, match=r"sliding_attention.*leave it out"):
        batch_invariant(Qwen3ForCausalLM(Qwen3Config(**SIZES, **layers)))
    with pytest.raises(EngineError, match=r"sliding window of 4"):
        batch_invariant(MistralForCausalLM(MistralConfig(**SIZES, sliding_window=4)))
    monkeypatch.setattr(hf_fixed_order, "_in_tiles", lambda x, weight: x @ weight.t())
    with pytest.raises(EngineError, match=r"cannot be had: logits of Qwen3ForCausalLM in torch.float32 on cpu"):
        check_invariance(batch_invariant(tiny("dense")))
    with pytest.raises(EngineError, match="cannot be had"):
        make_engine("transformers", tiny("dense"), batch_invariant=True)


def test_dropout_in_attention_is_refused():
    config = Qwen3Config(**SIZES, attention_dropout=0.1)
    model = batch_invariant(Qwen3ForCausalLM(config)).train()
    with pytest.raises(EngineError, match="attention_dropout"):
        model(input_ids=torch.arange(VOCAB)[None])


# -- across devices -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_a_tree_gives_the_same_bits_for_1_2_4_and_8_devices(kind, dtype):
    model = tiny(kind).to(getattr(torch, dtype))
    ids = torch.arange(60).view(3, 20)

    def logits(shards, tree):
        with torch.no_grad(), tensor_parallel(model, shards=shards, tree=tree) as layers:
            assert layers == (4 if kind == "dense" else 2)
            return model(input_ids=ids).logits

    one = logits(1, True)
    assert all(torch.equal(logits(k, True), one) for k in (2, 4, 8))
    assert not all(torch.equal(logits(k, False), logits(1, False)) for k in (2, 4, 8))
    with torch.no_grad():
        assert torch.equal(logits(1, False), model(input_ids=ids).logits), "one device is no split"
    torch.testing.assert_close(one.float(), logits(1, False).float(), rtol=0, atol=0.5 if dtype != "float32" else 1e-5)


def test_a_sharded_layer_is_the_layer():
    g = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*s, generator=g, dtype=torch.float64) for s in ((3, 16), (5, 16)))
    for shards in (1, 2, 4, 8):
        for tree in (True, False):
            torch.testing.assert_close(sharded_linear(x, weight, shards=shards, tree=tree), x @ weight.t())


@pytest.mark.parametrize(("columns", "shards"), [(12, 2), (16, 3), (16, 16), (16, 0)])
def test_columns_that_make_no_tree_are_refused(columns, shards):
    with pytest.raises(ShapeError, match="devices"):
        sharded_linear(torch.ones(1, columns), torch.ones(1, columns), shards=shards, tree=True)
