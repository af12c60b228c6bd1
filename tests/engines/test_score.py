"""Scoring: log-probs and entropies against one unpadded forward pass per sequence."""

import copy
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from offdrift.divergence.head import Head
from offdrift.divergence.hidden import hidden_divergences
from offdrift.divergence.losses import kl_rollout_current
from offdrift.engines.generate import Generation, rollouts_from
from offdrift.engines.output_head import head_input, head_of
from offdrift.engines.score import divergences, left_right_padded, score
from offdrift.errors import EvidenceError
from offdrift.records import FullVocab, HiddenStates, Provenance, Rollouts, Sampling, TopK
from offdrift.records.rollouts import Support, pack_sequences
from tests.engines.models import SMALLER

PROMPTS = [[3], [4, 5, 6], [7, 8]]
RESPONSES = [[0, 0, 9, 2], [1], [5, 0, 0]]  # id 0 is the pad id of the model below


def rollouts(**changes) -> Rollouts:
    tokens, lengths = torch.tensor([t for r in RESPONSES for t in r]), torch.tensor([len(r) for r in RESPONSES])
    provenance = Provenance("t", "0", "m", "float32", None, Sampling(max_tokens=4))
    draws = Generation(tokens, lengths, torch.full((len(tokens),), -1.0), None)
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


# -- on the support that the sampler recorded ------------------------------------------------------------

MU, PI = [0.5, 0.3, 0.15, 0.05], [0.4, 0.3, 0.2, 0.1]
"""Golden policies of four tokens; top-p 0.9 keeps the first three."""


class Fixed(torch.nn.Module):
    """A model with the same logits at every place."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(logits)

    def forward(self, input_ids, *, logits_to_keep, **_):
        return SimpleNamespace(logits=self.logits.expand(len(input_ids), logits_to_keep, -1))


def drawn_from(tokens: list[int], kept: list[list[int]], logp: torch.Tensor) -> Rollouts:
    """One response, with the ids that were kept at each of its tokens."""
    provenance = Provenance("t", "0", "m", "float32", None, Sampling(max_tokens=4, top_p=0.9))
    ids, cuts = pack_sequences(kept)
    draws = Generation(torch.tensor(tokens), torch.tensor([len(tokens)]), logp, None, Support(ids.int(), cuts))
    return rollouts_from([draws], [[1]], version=0, provenance=provenance)


def test_golden_log_probs_ratios_and_divergences_on_the_support():
    pi = torch.tensor(PI, dtype=torch.float64)
    filtered = torch.tensor([0.5, 0.3, 0.15, 0.0], dtype=torch.float64) / 0.95
    drawn = drawn_from([0, 1, 2], [[0, 1, 2]] * 3, filtered[:3].log().float())
    drawn = drawn.with_(evidence=FullVocab(filtered.log().expand(3, 4)))
    with torch.no_grad():
        got = score(Fixed(pi.log()), drawn)
        without = (score(Fixed(pi.log()), drawn.with_(support=None)).logp - drawn.logp_rollout).exp()
    on_support = pi[:3] / 0.9
    torch.testing.assert_close(got.logp.exp(), torch.tensor([0.444444, 0.333333, 0.222222]).double(), rtol=0, atol=1e-6)
    ratios = (got.logp - drawn.logp_rollout).exp()
    torch.testing.assert_close(ratios, torch.tensor([0.844444, 1.055556, 1.407407]).double(), rtol=0, atol=1e-6)
    assert float((filtered[:3] * ratios).sum()) == pytest.approx(1.0)
    torch.testing.assert_close(got.entropy, -(on_support * on_support.log()).sum().expand(3))
    torch.testing.assert_close(got.sum_pi_squared, on_support.square().sum().expand(3))
    assert got.logits.isinf().tolist() == [[False, False, False, True]] * 3
    d = divergences(drawn, got.logits)
    kl = (filtered[:3] * (filtered[:3] / on_support).log()).sum()
    torch.testing.assert_close(d["kl_rollout_current"].lo, kl.expand(3))
    torch.testing.assert_close(d["tv_rollout_current"].lo, (filtered[:3] - on_support).abs().sum().expand(3) / 2)
    # Half of the method is worse than none: without the trainer's half every ratio is too small, by the kept mass.
    torch.testing.assert_close(without, torch.tensor([0.76, 0.95, 1.266667]).double(), rtol=0, atol=1e-6)
    assert float((filtered[:3] * without).sum()) == pytest.approx(0.9)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradients_flow_through_kept_columns_alone_and_are_those_of_finite_differences(temperature):
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(6, generator=g, dtype=torch.float64)
    kept = [[0, 2, 5], [2, 3], [5]]
    drawn = drawn_from([2, 3, 5], kept, torch.zeros(3))
    weights = torch.tensor([1.0, -0.5, 2.0]).double()

    def loss(x: torch.Tensor) -> torch.Tensor:
        model = Fixed(x)
        got = score(model, drawn, temperature=temperature, keep_graph=True)
        kl = kl_rollout_current(torch.zeros(3, 6).double().masked_fill(got.logits.isinf(), -torch.inf), got.logits)
        total = (weights * got.logp).sum() + kl.sum()
        total.backward()
        return total.detach(), model.logits.grad

    _, gradient = loss(logits.clone())
    for j in range(6):
        step = torch.zeros(6, dtype=torch.float64)
        step[j] = 1e-6
        slope = (loss(logits + step)[0] - loss(logits - step)[0]) / 2e-6
        assert float(gradient[j]) == pytest.approx(float(slope), abs=1e-8)
    assert gradient[[1, 4]].tolist() == [0.0, 0.0]  # kept nowhere
    assert (gradient[[0, 2, 3, 5]].abs() > 1e-3).all()


@pytest.mark.parametrize("k", [1, 2, 4])
def test_top_k_evidence_on_the_support_has_finite_ends_around_the_exact_value(k):
    mu, pi = torch.tensor([MU, PI], dtype=torch.float64)
    filtered = (mu * torch.tensor([1.0, 1.0, 1.0, 0.0])).log().log_softmax(-1)
    top = filtered.topk(k)
    drawn = drawn_from([0], [[0, 1, 2]], filtered[:1])
    logits = score(Fixed(pi.log()), drawn).logits
    found = divergences(drawn.with_(evidence=TopK(top.indices[None], top.values[None])), logits)
    exact = divergences(drawn.with_(evidence=FullVocab(filtered[None])), logits)
    for name, d in found.items():
        assert d.lo <= exact[name].lo + 1e-12 <= d.hi + 2e-12
        # After the top 1, most is all of the rest, 0.4737, on the token of pi = 0.2222; after two nothing is open.
        highest = {
            "kl_rollout_current": (0.5 * math.log(9 / 7.6) + 0.45 * math.log(0.9 * 0.45 / (0.2 * 0.95))) / 0.95,
            "tv_rollout_current": 1 / 3,
        }
        most = highest[name] if k == 1 else float(exact[name].lo)
        assert float(d.hi) == pytest.approx(most, abs=1e-6)
    # Only with the same support on both sides: elsewhere the tail might be what the trainer cannot draw.
    open_end = divergences(drawn.with_(evidence=TopK(top.indices[None], top.values[None]), support=None), logits)
    assert open_end["kl_rollout_current"].hi.isinf().all() == (k < 4)


def test_a_support_of_another_vocabulary_is_refused():
    drawn = drawn_from([0], [[0, 4]], torch.zeros(1))
    with pytest.raises(EvidenceError, match="support has token 4, the model has 4 tokens"):
        score(Fixed(torch.zeros(4)), drawn)


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
