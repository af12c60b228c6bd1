"""Ends of responses: what a record shows of them, and what is a finding."""

import pytest
import torch

from offdrift.check.ends import candidates_of, end_findings, ends_of, recorded_ends
from offdrift.engines import make_engine
from offdrift.models import load_model, tiny_tokenizer
from offdrift.records.provenance import Sampling

END, BREAK = 1, 16


@pytest.fixture(scope="module")
def drawn():
    """Sixteen responses of eight tokens without an end."""
    model, _ = load_model("tiny-qwen3", seed=0)
    engine = make_engine("transformers", model, dtype="float32")
    rollouts = engine.generate([[4 + i] for i in range(16)], Sampling(8), seed=0)
    tokens = rollouts.tokens.masked_fill((rollouts.tokens == END) | (rollouts.tokens == BREAK), 5)
    return rollouts.with_(tokens=tokens)


def asked(drawn, *stops: int, limit: int = 8):
    from dataclasses import replace

    sampling = Sampling(limit, stop_token_ids=stops)
    return drawn.with_(provenance=replace(drawn.provenance, sampling=sampling))


def with_token(drawn, sequence: int, place: int, token: int):
    tokens = drawn.tokens.clone()
    tokens[int(drawn.cu_seqlens[sequence]) + place] = token
    return drawn.with_(tokens=tokens)


def rules(found, served=None) -> list[str]:
    return [finding.rule for finding in end_findings(found, served, tiny_tokenizer())]


def test_responses_of_full_length_and_those_that_end_at_a_stop_token_are_clean(drawn):
    assert recorded_ends(asked(drawn, END)) == {"early": 0, "beyond": 0}
    assert recorded_ends(asked(with_token(drawn, 3, 7, END), END)) == {"early": 0, "beyond": 0}
    ended = torch.arange(16)
    same_end = with_token(drawn, 0, 7, END).select(ended[:1])
    assert recorded_ends(asked(same_end, END, limit=20)) == {"early": 0, "beyond": 0}
    assert rules(recorded_ends(asked(drawn, END))) == []


def test_a_response_that_stops_at_another_token_is_found(drawn):
    found = recorded_ends(asked(with_token(drawn, 0, 7, BREAK).select(torch.tensor([0])), END, limit=20))
    assert found == {"early": 1, "beyond": 0, "sequence": 0, "place": 7, "token": BREAK}
    (finding,) = end_findings(found, None, tiny_tokenizer())
    assert (finding.rule, finding.severity) == ("ends_differ", "act")
    assert str(BREAK) in finding.symptom


def test_a_response_that_goes_on_behind_an_end_is_found(drawn):
    found = recorded_ends(asked(with_token(drawn, 5, 2, END), END))
    assert found == {"early": 0, "beyond": 1, "sequence": 5, "place": 2, "token": END}
    assert rules(found) == ["ends_differ"]


def test_a_server_with_an_end_of_its_own_and_without_the_trainers_is_two_findings():
    clean = {"early": 0, "beyond": 0}
    assert rules(clean, {"asked": 5, "extra": [BREAK], "missing": [END]}) == ["ends_differ"] * 2
    assert rules(clean, {"asked": 5, "extra": [], "missing": []}) == []


def test_the_ends_of_a_checkpoint_are_the_tokenizers_and_those_of_its_generation_config():
    model, tokenizer = load_model("tiny-qwen3", seed=0)
    assert ends_of(model, tokenizer) == (END,)
    model.generation_config.eos_token_id = [END, 7]
    assert ends_of(model, tokenizer) == (END, 7)


def test_a_server_is_asked_about_ends_breaks_and_special_tokens():
    tokenizer = tiny_tokenizer()
    asked_about = candidates_of(tokenizer, (END,))
    assert asked_about[0] == END
    assert {*tokenizer.all_special_ids, *tokenizer.encode("\n")} <= set(asked_about)
    assert len(asked_about) == len(set(asked_about)) <= 48
