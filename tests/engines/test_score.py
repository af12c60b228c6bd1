"""Scoring: log-probs and entropies against one unpadded forward pass per sequence."""

import copy
from dataclasses import replace

import pytest
import torch

from offdrift.divergence.head import Head
from offdrift.divergence.hidden import hidden_divergences
from offdrift.engines.generate import Draws, rollouts_from
from offdrift.engines.output_head import head_input, head_of
from offdrift.engines.score import divergences, left_right_padded, score
from offdrift.errors import EvidenceError
from offdrift.records import FullVocab, HiddenStates, Provenance, Rollouts, Sampling, TopK
from tests.engines.models import SMALLER

PROMPTS = [[3], [4, 5, 6], [7, 8]]
RESPONSES = [[0, 0, 9, 2], [1], [5, 0, 0]]  # id 0 is the pad id of the model below


def rollouts(**changes) -> Rollouts:
    tokens, lengths = torch.tensor([t for r in RESPONSES for t in r]), torch.tensor([len(r) for r in RESPONSES])
    provenance = Provenance("t", "0", "m", "float32", None, Sampling(max_tokens=4))
    draws = Draws(tokens, lengths, torch.full((len(tokens),), -1.0), None)
    return rollouts_from([draws], PROMPTS, version=0, provenance=provenance).with_(**changes)


@pytest.fixture(scope="module")
def model():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes = SMALLER | {"vocab_size": 16, "initializer_range": 0.3, "pad_token_id": 0}
    return Qwen3ForCausalLM(Qwen3Config(**sizes)).eval()


def last_states(model) -> torch.Tensor:
    """What the model's output head consumes at every response token, packed."""
    at = left_right_padded(rollouts())
    with head_input(model) as consumed, torch.no_grad():
        score(model, rollouts())
    return consumed.last[at.rows, at.columns]


def one_by_one(model, temperature: float) -> torch.Tensor:
    """Log-softmax rows of every response token, from forward passes without any padding."""
    found = []
    for p, r in zip(PROMPTS, RESPONSES):
        logits = model(torch.tensor([p + r])).logits[0, len(p) - 1 : -1] / temperature
        found.append(logits.log_softmax(-1))
    return torch.cat(found)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_padding_changes_nothing_and_a_sampled_pad_id_is_a_token(model, temperature):
    with torch.no_grad():
        got = score(model, rollouts(), temperature=temperature)
        rows = one_by_one(model, temperature)
    tokens = rollouts().tokens
    torch.testing.assert_close(got.logp, rows[range(8), tokens], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got.entropy, -(rows.exp() * rows).sum(-1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got.logits.log_softmax(-1), rows, rtol=1e-4, atol=1e-5)


def test_gradient_flows_through_logp_alone(model):
    got = score(model, rollouts())
    assert got.logp.requires_grad
    assert not got.entropy.requires_grad
    assert not got.logits.requires_grad


def test_identical_policies_have_no_divergence_and_perturbed_ones_have(model):
    with torch.no_grad():
        rows = one_by_one(model, 1.0)
        logits = score(model, rollouts()).logits
    same = divergences(rollouts(evidence=FullVocab(rows)), logits)
    assert {str(d.grade) for d in same.values()} == {"exact"}
    assert float(same["kl_rollout_current"].lo.max()) < 1e-6
    other = divergences(rollouts(evidence=FullVocab(rows.roll(1, dims=1))), logits)
    expected = (rows.roll(1, 1).exp() * (rows.roll(1, 1) - logits.log_softmax(-1))).sum(-1)
    torch.testing.assert_close(other["kl_rollout_current"].lo, expected, rtol=1e-4, atol=1e-5)


def test_top_k_evidence_gives_intervals_around_the_exact_value(model):
    with torch.no_grad():
        rows = one_by_one(model, 1.0).roll(1, dims=1)
        logits = score(model, rollouts()).logits
    top = rows.topk(4)
    drawn = rows[range(8), rollouts().tokens]
    exact = divergences(rollouts(evidence=FullVocab(rows)), logits)
    found = divergences(rollouts(evidence=TopK(top.indices, top.values), logp_rollout=drawn), logits)
    assert found.keys() == exact.keys()
    for name, d in found.items():
        assert str(d.grade) == "interval"
        assert d.name == name
        assert (d.lo <= exact[name].lo + 1e-5).all()
        assert (d.hi >= exact[name].lo - 1e-5).all()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_hidden_states_give_what_the_full_rows_give(model, temperature, monkeypatch):
    import offdrift.engines.output_head as heads

    monkeypatch.setattr(heads, "CHUNK", {"cpu": 16 * 3})  # three tokens at a time
    stale = copy.deepcopy(model)
    with torch.no_grad():
        for weight in stale.parameters():
            weight.add_(0.1 * weight.roll(1, 0))
        rows = score(stale, rollouts(), temperature=temperature).logits.log_softmax(-1)
        logits = score(model, rollouts(), temperature=temperature).logits
    sampling = Sampling(max_tokens=4, temperature=temperature)
    provenance = replace(rollouts().provenance, sampling=sampling)
    evidence = HiddenStates(last_states(stale), head_of(stale))
    assert evidence.states.shape == (8, 32)
    found = divergences(rollouts(evidence=evidence, provenance=provenance), logits)
    exact = divergences(rollouts(evidence=FullVocab(rows), provenance=provenance), logits)
    assert found.keys() == exact.keys() == {"kl_rollout_current", "tv_rollout_current"}
    assert exact["kl_rollout_current"].lo.min() > 1e-3
    for name, d in found.items():
        assert str(d.grade) == "exact"
        torch.testing.assert_close(d.lo, exact[name].lo, rtol=1e-4, atol=1e-6)
    # Nor does it matter that the current policy's side is given by its logits.
    both = hidden_divergences(
        evidence.states,
        evidence.head,
        last_states(model),
        head_of(model),
        temperature_rollout=temperature,
        temperature=temperature,
    )
    torch.testing.assert_close(both.kl_rollout_current, found["kl_rollout_current"].lo, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(both.tv, found["tv_rollout_current"].lo, rtol=1e-4, atol=1e-6)


def test_no_evidence_gives_none_and_another_vocabulary_is_refused(model):
    logits = torch.zeros(8, 16)
    assert divergences(rollouts(), logits) == {}
    with pytest.raises(EvidenceError, match="covers 9 tokens, the model has 16"):
        divergences(rollouts(evidence=FullVocab(torch.zeros(8, 9))), logits)
    states = HiddenStates(torch.zeros(8, 4), Head(torch.zeros(9, 4)))
    with pytest.raises(EvidenceError, match="covers 9 tokens, the model has 16"):
        divergences(rollouts(evidence=states), logits)
