"""Routes and their replay, against transformers' own router logits, one sequence at a time."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from offdrift.engines.hf import TransformersEngine
from offdrift.engines.routing import flip_rate, flips, replayed, route_lengths, routers, routes_of
from offdrift.engines.score import score
from offdrift.errors import EngineError
from offdrift.judge import num_experts
from offdrift.records.rollouts import Routes
from offdrift.segments import cumulative
from tests.engines.contract import PLAIN, PROMPTS
from tests.engines.models import VOCAB, tiny

RAGGED = replace(PLAIN, stop_token_ids=tuple(range(0, VOCAB, 8)))


@pytest.fixture(scope="module")
def drawn():
    return TransformersEngine(tiny("moe")).generate(PROMPTS * 2, RAGGED, seed=0, evidence="full")


@torch.no_grad()
def router_logits(model, rollouts):
    """Of every position but the last, `[positions, layers, experts]`, by unpadded forwards."""
    found = []
    prompts = rollouts.prompt_tokens.split(rollouts.prompt_cu_seqlens.diff().tolist())
    for prompt, response in zip(prompts, rollouts.tokens.split(rollouts.lengths.tolist())):
        ids = torch.cat([prompt, response])[None]
        layers = model(input_ids=ids, output_router_logits=True).router_logits
        found.append(torch.stack(layers, dim=1)[:-1])
    return torch.cat(found)


def routes_by_hand(model, rollouts):
    """The two largest router logits at every position but the last."""
    return router_logits(model, rollouts).topk(2).indices


MINE, THEIRS = ([[0, 3], [1, 2], [0, 1]], [[2, 0], [1, 2], [2, 0]])
"""Chosen experts out of 4, of three tokens: memberships 1001, 0110, 1100 and 1010, 0110, 1010."""


def test_the_flip_rate_counts_memberships_of_all_experts():
    """By hand: expert 0 never differs, 1 at one token of 3, 2 at two, 3 at one: (0 + 1 + 2 + 1) / 3 / 4."""
    one, other = torch.tensor(MINE)[:, None], torch.tensor(THEIRS)[:, None]
    assert flip_rate(one, other, experts=4).flatten().tolist() == [0.5, 0.0, 0.5]
    assert flip_rate(one, other, experts=4).mean().item() == pytest.approx(1 / 3)
    assert flips(one, other).float().mean().item() == pytest.approx(2 / 3)


def test_one_exchanged_expert_is_two_of_all_experts_and_one_decision():
    """The share of decisions is K/2 times the survey's delta, which its 1e-3 is about."""
    one = torch.arange(8).expand(50, 3, 8).clone()
    other = one.clone()
    other[7, 1, 3] = 100
    assert flips(one, other).float().mean().item() == pytest.approx(1 / 150)
    delta = flip_rate(one, other, experts=128).mean().item()
    assert delta == pytest.approx(2 / 128 / 150)
    assert flip_rate(one, other, experts=128).shape == (50, 3)


def test_experts_that_there_are_not_are_refused():
    one = torch.tensor([[[0, 9]]])
    with pytest.raises(EngineError, match="expert 9 was chosen, but experts=8"):
        flip_rate(one, one, experts=8)


def test_the_number_of_experts_is_read_from_the_model():
    assert num_experts(tiny("moe")) == 8
    assert num_experts(tiny("dense")) == 0


def test_routes_are_those_of_every_position_in_the_order_of_the_batch(drawn):
    model = tiny("moe")
    truth = routes_by_hand(model, drawn)
    assert truth.shape == (int(route_lengths(drawn).sum()), 2, 2)
    assert len(set(drawn.lengths.tolist())) > 3
    for budget in (8192, 20):
        routes = routes_of(model, drawn, token_budget=budget).experts
        assert routes.shape == truth.shape
        assert not flips(routes, truth).any()
    # The test can tell: routes one position off differ nearly everywhere.
    assert flips(truth.roll(1, 0), truth).float().mean() > 0.3


@pytest.mark.slow
@pytest.mark.vllm
def test_vllm_says_the_same_in_float32_and_flips_only_near_ties_in_bfloat16(vllm_engine, drawn):
    logits = router_logits(tiny("moe"), drawn)
    truth = logits.topk(2).indices
    exact = vllm_engine("moe", dtype="float32").routes(drawn).experts
    assert exact.shape == truth.shape
    assert not flips(exact, truth).any()
    rounded = flips(vllm_engine("moe", dtype="bfloat16").routes(drawn).experts, truth)
    # How many ties fall the other way depends on the order in which a processor sums.
    best = logits.topk(3).values
    margin = best[..., 1] - best[..., 2]
    spread = logits.std(-1)
    assert (margin[rounded] < 0.1 * spread[rounded]).all()
    assert rounded.float().mean() < 0.2


@pytest.mark.vllm
def test_vllm_routes_prompts_that_are_in_its_cache(vllm_engine, drawn):
    engine = vllm_engine("moe", dtype="float32")
    long = engine.generate([[i % 60 for i in range(160)]] * 2, PLAIN, seed=0)
    assert not flips(engine.routes(long).experts, routes_by_hand(tiny("moe"), long)).any()
    assert not flips(engine.routes(long).experts, routes_by_hand(tiny("moe"), long)).any()


@pytest.mark.vllm
def test_a_dense_vllm_has_no_routes(vllm_engine, drawn):
    with pytest.raises(EngineError, match="no router"):
        vllm_engine("dense", dtype="float32").routes(drawn)


def recorded(engine, rollouts):
    """Recorded routes and those of a second pass over the same tokens."""
    assert rollouts.routes.experts.dtype == torch.uint8
    assert torch.equal(rollouts.routes.cu_seqlens.diff(), route_lengths(rollouts))
    return rollouts.routes.experts, engine.routes(rollouts).experts


@pytest.mark.parametrize("batch_size", [64, 5])
def test_routes_are_recorded_while_drawing(batch_size):
    """Texts that several responses continue, branch and leave the batch: every position has its own experts."""
    engine = TransformersEngine(tiny("moe"), batch_size=batch_size, record_routes=True)
    prompts = [PROMPTS[i // 4] for i in range(4 * len(PROMPTS))]
    rollouts = engine.generate(prompts, RAGGED, seed=3)
    own, again = recorded(engine, rollouts)
    assert not flips(own, again).any()
    assert not flips(own, routes_by_hand(tiny("moe"), rollouts)).any()
    assert len(set(rollouts.lengths.tolist())) > 3
    assert rollouts.routes.bytes_per_position == 2 * 2  # layers x k, a byte each
    assert not flips(engine.rescore(rollouts, evidence="sampled").routes.experts, own).any()
    plain = TransformersEngine(tiny("moe"), batch_size=batch_size).generate(prompts, RAGGED, seed=3)
    assert plain.routes is None
    assert torch.equal(plain.tokens, rollouts.tokens)
    assert torch.equal(plain.logp_rollout, rollouts.logp_rollout)


def test_routes_that_cannot_be_recorded_are_refused():
    with pytest.raises(EngineError, match="no mixture of experts"):
        TransformersEngine(tiny("dense"), record_routes=True)
    with pytest.raises(EngineError, match="records routes, which streams do not"):
        TransformersEngine(tiny("moe"), record_routes=True).open_stream(PLAIN)


@pytest.mark.vllm
def test_vllm_records_routes_while_drawing(vllm_engine):
    engine = vllm_engine("moe", dtype="float32", record_routes=True)
    prompts = PROMPTS * 2 + [[i % 60 for i in range(160)]] * 3  # longer than a block of the prefix cache
    for seed in range(2):
        rollouts = engine.generate(prompts, RAGGED, seed=seed)
        own, again = recorded(engine, rollouts)
        assert not flips(own, again).any()
        assert not flips(own, routes_by_hand(tiny("moe"), rollouts)).any()
    assert engine.cached_tokens == 0


@torch.no_grad()
def test_replaying_its_own_routes_changes_nothing(drawn):
    model = tiny("moe")
    plain = score(model, drawn)
    with replayed(model, drawn, routes_of(model, drawn)):
        same = score(model, drawn)
    assert len(plain.logits) == len(drawn.tokens)
    torch.testing.assert_close(same.logits, plain.logits, atol=1e-5, rtol=0)
    assert all(not m._forward_hooks for m in model.modules())


@torch.no_grad()
def test_imposed_experts_are_weighed_by_the_models_own_router(drawn):
    # By hand: a router of two experts out of 8 that always picks the third and the fifth.
    model, by_hand = tiny("moe"), tiny("moe")
    lengths = route_lengths(drawn)
    routes = Routes(torch.tensor([2, 4]).expand(int(lengths.sum()), 2, 2), cumulative(lengths))

    class Fixed(nn.Module):
        def __init__(self, router) -> None:
            super().__init__()
            self.weight, self.normalized = router.weight, router.norm_topk_prob

        def forward(self, x):
            logits = x.reshape(-1, x.shape[-1]) @ self.weight.T
            p = logits.softmax(-1)[:, [2, 4]]
            p = p / p.sum(-1, keepdim=True) if self.normalized else p
            return logits, p, torch.tensor([2, 4]).expand(len(p), 2)

    for layer in by_hand.model.layers:
        layer.mlp.gate = Fixed(layer.mlp.gate)
    with replayed(model, drawn, routes):
        found = score(model, drawn).logits
    truth = score(by_hand, drawn).logits
    assert found.shape == (len(drawn.tokens), VOCAB)
    torch.testing.assert_close(found, truth, atol=1e-4, rtol=0)
    assert (found - score(model, drawn).logits).abs().mean() > 0.1


@torch.no_grad()
def test_what_cannot_be_read_or_replayed_is_refused(drawn):
    model = tiny("moe")
    routes = routes_of(model, drawn)
    assert routers(tiny("dense")) == []
    with pytest.raises(EngineError, match="no mixture of experts"):
        routes_of(tiny("dense"), drawn)
    fewer = replace(routes, experts=routes.experts[:, :1])
    with pytest.raises(EngineError, match="1 layers, the model has 2"), replayed(model, drawn, fewer):
        pass
    handle = routers(model)[0].register_forward_hook(lambda m, a, out: (out[0], out[1] ** 3, out[2]))
    with pytest.raises(EngineError, match="rule that is not known"), replayed(model, drawn, routes):
        score(model, drawn)
    handle.remove()
    routers(model)[0].register_forward_hook(lambda m, a, out: out[:2])
    with pytest.raises(EngineError, match="neither read nor replayed"):
        routes_of(model, drawn)
