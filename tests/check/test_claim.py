"""`--claim equal`: proved bit for bit, refused over one flipped bit, and a digest that two machines can compare."""

import hashlib
import struct

import pytest
import torch

from offdrift.check.bench import Bench, EngineSpec
from offdrift.check.check import check
from offdrift.check.claim import claimed_equal, digest
from offdrift.check.measure import measure
from offdrift.errors import BadValueError
from offdrift.records.provenance import Sampling
from tests.check.benches import BFLOAT16, FLOAT32, bench_of

EQUAL = EngineSpec("transformers", "float16", {"batch_invariant": True})
SAMPLING = Sampling(max_tokens=10)


def checked(made: type[Bench] = Bench, rollout: EngineSpec = EQUAL, train: EngineSpec = EQUAL) -> dict:
    with bench_of(count=6, made=made, sampling=SAMPLING) as bench:
        return check(bench, rollout, train, noise=False, claim="equal")


def flipped(x: torch.Tensor, *at: int) -> torch.Tensor:
    """The number at these places with its last bit flipped."""
    bits = x.clone().view(torch.int32)
    bits[at] ^= 1
    return bits.view(torch.float32)


class OneBit(Bench):
    """An engine that reports one log-prob with its last bit flipped: request 2, token 3."""

    def rollouts(self, spec, **how):
        found = super().rollouts(spec, **how)
        return found.with_(logp_rollout=flipped(found.logp_rollout, 23))


class OneBitOfADistribution(Bench):
    """The same of a token that was not drawn: request 1, token 4."""

    def rollouts(self, spec, **how):
        found = super().rollouts(spec, **how)
        other = (int(found.tokens[14]) + 1) % 64
        return found.with_(evidence=type(found.evidence)(flipped(found.evidence.logp, 14, other)))


class OneBitOfAWeight(Bench):
    def engine(self, spec):
        fresh = spec.kind not in self._engines
        made = super().engine(spec)
        if fresh:
            with torch.no_grad():
                weight = made.model.model.layers[1].mlp.up_proj.weight
                weight.view(torch.int16)[3, 5] ^= 64  # of float16's ten bits of mantissa
        return made


def test_equal_engines_are_proved_equal_and_two_runs_have_one_digest():
    one, two = checked(), checked()
    claim = one["claim"]
    assert claim["equal"] is True
    assert claim["whole"] is True
    assert (claim["tokens"], claim["equal_tokens"]) == (60, 60)
    assert (claim["kl"], claim["kl_low"], claim["kl_high"]) == (0, 0, 0)
    assert claim["digest_rollout"] == claim["digest_train"] == two["claim"]["digest_rollout"]
    assert one["verdict"]["text"].startswith(f"Equal: 60 of 60 tokens, KL = 0, digest {claim['digest_rollout']}")
    assert one["verdict"]["details"][0] == "Over the whole vocabulary."
    assert one["passed"] is True
    assert "bisect" not in one


@pytest.mark.parametrize(
    ("made", "request_", "token", "drawn"), [(OneBit, 2, 3, True), (OneBitOfADistribution, 1, 4, False)]
)
def test_one_flipped_bit_is_found_where_it_is(made, request_, token, drawn):
    found = checked(made)
    claim = found["claim"]
    assert claim["equal"] is False
    assert claim["equal_tokens"] == 59
    assert (claim["first"]["request"], claim["first"]["token"]) == (request_, token)
    assert claim["first"]["drawn_token"] is drawn
    assert (claim["digest_rollout"] == claim["digest_train"]) is not drawn
    assert found["passed"] is False
    assert found["verdict"]["level"] == "act"
    assert f"first difference at request {request_}, token {token}" in found["verdict"]["text"]
    assert "--bisect" in found["verdict"]["steps"][0]


def test_one_bit_of_a_weight_is_traced_to_its_module():
    found = checked(OneBitOfAWeight)
    first = found["claim"]["first"]
    assert found["passed"] is False
    assert first["module"] == first["within"] == "model.layers.1.mlp.up_proj"
    assert found["verdict"]["text"].endswith(", in module model.layers.1.mlp.up_proj.")
    assert "first in module model.layers.1.mlp.up_proj" in found["verdict"]["details"][0]
    assert "model.layers.1.mlp.up_proj" in found["verdict"]["steps"][0]


def test_engines_that_round_differently_have_an_interval_and_a_module():
    found = checked(rollout=BFLOAT16, train=FLOAT32)
    claim = found["claim"]
    assert claim["equal"] is False
    assert 0 < claim["kl_low"] < claim["kl"] < claim["kl_high"] < 1e-2
    assert claim["kl"] == pytest.approx(found["baseline"]["kl_mean"], rel=1e-6)
    assert claim["first"]["module"]
    assert found["passed"] is False


def test_the_digest_is_the_documented_one_and_that_of_everything():
    with bench_of(count=2, sampling=Sampling(max_tokens=3)) as bench:
        drawn = bench.rollouts(FLOAT32)
    prompts = [drawn.prompt_tokens[:1].tolist(), drawn.prompt_tokens[1:3].tolist()]
    responses = [drawn.tokens[:3].tolist(), drawn.tokens[3:].tolist()]
    data = b"offdrift-equal-1\n"
    for prompt, response in zip(prompts, responses, strict=True):
        data += struct.pack(f"<{len(prompt) + 2 + len(response)}q", len(prompt), *prompt, len(response), *response)
    data += struct.pack("<6f", *drawn.logp_rollout.tolist())
    assert digest(drawn, drawn.logp_rollout) == hashlib.sha256(data).hexdigest()
    negative = drawn.logp_rollout.clone()
    negative[2] = -0.0
    positive = negative.clone()
    positive[2] = 0.0
    assert digest(drawn, negative) == digest(drawn, positive)
    swapped = drawn.with_(tokens=drawn.tokens.flip(0))
    assert digest(swapped, drawn.logp_rollout) != digest(drawn, drawn.logp_rollout)
    with pytest.raises(BadValueError, match="token 2"):
        digest(drawn, negative.index_fill(0, torch.tensor([2]), float("nan")))


def test_without_distributions_the_claim_says_what_it_is_about():
    with bench_of(count=4, sampling=SAMPLING) as bench:
        drawn = bench.rollouts(EQUAL, evidence="sampled")
        claim = claimed_equal(bench, drawn, measure(bench, drawn, EQUAL), EQUAL)
    assert claim.equal
    assert not claim.whole
    assert "of the drawn tokens alone" in str(claim)
