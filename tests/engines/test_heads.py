"""Output heads: read from real model families, and evidence that must reproduce its log-probs."""

import math
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn

from offdrift.divergence.head import Head
from offdrift.engines.output_head import check_states, deviations, head_input, head_of, kept
from offdrift.errors import EngineError
from offdrift.records.rollouts import HiddenStates
from tests.engines.models import SMALLER

SIZES = SMALLER | {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "head_dim": 8, "initializer_range": 0.5}

FAMILIES = {
    # config, model, what its configuration says, scale, soft cap, bias
    "qwen3": ("Qwen3", {}, 1.0, None, False),
    "gemma2": ("Gemma2", {"final_logit_softcapping": 5.0}, 1.0, 5.0, False),
    "cohere": ("Cohere", {"logit_scale": 0.25}, 0.25, None, False),
    "granite": ("Granite", {"logits_scaling": 8.0}, 0.125, None, False),  # divides
    "hyperclova": ("HyperCLOVAX", {"logits_scaling": 8.0}, 8.0, None, False),  # multiplies
    "gptj": ("GPTJ", {"rotary_dim": 4}, 1.0, None, True),
}


def built(family: str):
    name, stated, *_ = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **stated)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    if model.get_output_embeddings().bias is not None:
        nn.init.normal_(model.get_output_embeddings().bias)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_head_of_a_family_is_what_its_logits_say(family, dtype):
    *_, scale, soft_cap, bias = FAMILIES[family]
    model = built(family).to(dtype)
    head = head_of(model)
    assert (head.scale, head.soft_cap, head.bias is not None) == (scale, soft_cap, bias)
    assert head.round_to == (None if dtype == torch.float32 else dtype)
    assert head.weight.data_ptr() == model.get_output_embeddings().weight.data_ptr()
    # On other tokens than those it was read from: the head's own logits are the model's.
    ids = torch.arange(31, 9, -1)[None]
    with torch.no_grad(), head_input(model) as seen:
        logits = model(input_ids=ids).logits[0].float()
    found = head.scores(seen.last[0], slice(0, 32))
    assert found.shape == (22, 32)
    limit = 4 * torch.finfo(dtype).eps * float(logits.abs().max())
    torch.testing.assert_close(found, logits, atol=limit, rtol=0)


class Wrong(nn.Module):
    """A model of one linear layer, with a head that is not what it says."""

    def __init__(self, head: nn.Module, after=lambda x: x) -> None:
        super().__init__()
        self.body, self.head, self.after = nn.Embedding(6, 4), head, after
        self.config = SimpleNamespace(logit_scale=0.5)

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids, use_cache=None):
        return SimpleNamespace(logits=self.after(self.head(self.body(input_ids))))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Wrong(nn.Linear(4, 6), lambda x: x * 0.7), "no scale or soft cap of its configuration"),
        (Wrong(nn.Linear(4, 6), lambda x: x[..., :5]), "5 logits come from a head of 6 rows"),
        (Wrong(nn.Sequential(nn.Linear(4, 6))), "its output head Sequential has no matrix"),
        (nn.Linear(2, 2), "Linear is not one: it names no output head"),
    ],
    ids=["unknown scale", "cut vocabulary", "no matrix", "no head"],
)
def test_a_head_that_cannot_be_recorded_is_refused_by_name(model, words):
    with pytest.raises(EngineError, match=words) as refused:
        head_of(model)
    assert 'evidence = "full"' in str(refused.value)


def test_a_stated_scale_that_the_model_ignores_is_not_believed():
    assert head_of(Wrong(nn.Linear(4, 6))).scale == 1.0
    assert head_of(Wrong(nn.Linear(4, 6), lambda x: x * 0.5)).scale == 0.5


def test_a_kept_head_does_not_follow_its_model():
    layer = nn.Linear(4, 6)
    head = head_of(Wrong(layer))
    copy, before = kept(head), layer.weight.detach().clone()
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    assert head.weight.abs().max() == 0
    assert torch.equal(copy.weight, before)
    assert copy.bias.abs().max() > 0


def evidence(n: int = 600):
    """States and log-probs that belong together, by the formula."""
    g = torch.Generator().manual_seed(1)
    head = Head(torch.randn(9, 5, generator=g), torch.randn(9, generator=g), 0.5, 4.0)
    states, tokens = torch.randn(n, 5, generator=g), torch.randint(9, (n,), generator=g)
    logits = 4.0 * torch.tanh(0.5 * (states.double() @ head.weight.T.double() + head.bias) / 4.0)
    logp = (logits / 0.7).log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)
    return HiddenStates(states, head), tokens, logp.float()


def test_deviations_are_those_of_the_formula(monkeypatch):
    import offdrift.engines.output_head as heads

    monkeypatch.setattr(heads, "CHUNK", {"cpu": 9 * 7})  # seven tokens at a time
    found, tokens, logp = evidence()
    off = torch.zeros(600)
    off[[3, 599]] = torch.tensor([0.25, -2.0])
    gaps = deviations(found, tokens, logp + off, temperature=0.7)
    torch.testing.assert_close(gaps, off.abs(), atol=5e-6, rtol=0)
    assert deviations(found, tokens, logp, temperature=1.0).mean() > 0.1


def test_sound_evidence_passes_and_gross_or_absent_numbers_do_not():
    found, tokens, logp = evidence()

    def check(states, logp=logp):
        check_states(states, tokens, logp, temperature=0.7, engine="e")

    check(found)
    other = Head(found.head.weight.roll(1, 0), found.head.bias, 0.5, 4.0)
    for wrong in (HiddenStates(found.states, other), HiddenStates(found.states.roll(1, 0), found.head)):
        with pytest.raises(EngineError, match=r"'e' .* nats per token \(limit 0.1\)"):
            check(wrong)
    with pytest.raises(EngineError, match="by nan nats"):
        check(HiddenStates(found.states.masked_fill(found.states > 1, math.nan), found.head))
