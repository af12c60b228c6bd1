"""Logit fusion: teacher and student decode in lock-step, and what is recorded is the mixture's."""

import pytest
import torch

from offdrift.engines import hf_decode
from offdrift.engines.hf import TransformersEngine
from offdrift.engines.hf_decode import FusedForward
from offdrift.errors import EngineError
from offdrift.records import Sampling
from offdrift.records.rollouts import Rollouts, TopK
from tests.engines.contract import PROMPTS, SAMPLINGS
from tests.engines.models import VOCAB, tiny
from tests.engines.oracles import processed

ALPHAS = [0.5, 0.0, 1.0, 0.25, 0.5, 0.9, 0.1, 0.5]
# Stops, so that responses end at different places, leave the batch, and the caches close ranks.
STOPS = tuple(range(20))


@pytest.fixture(scope="module")
def engine() -> TransformersEngine:
    """A dense student, and a mixture of experts as its teacher: caches and layers differ."""
    return TransformersEngine(tiny("dense"), teacher=tiny("moe"))


@torch.no_grad()
def mixture(rollouts: Rollouts, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """log pi_mix of every token of the vocabulary, and KL(pi_mix || pi_S) on what the filters left over: from
    unpadded forwards of one sequence at a time, filters by their definitions."""
    student, teacher = tiny("dense"), tiny("moe")
    rows, kls = [], []
    prompts = rollouts.prompt_tokens.split(rollouts.prompt_cu_seqlens.diff().tolist())
    responses = rollouts.tokens.split(rollouts.lengths.tolist())
    for prompt, response, alpha in zip(prompts, responses, rollouts.mix_alpha.double(), strict=True):
        text = torch.cat([prompt, response])[None]
        own, theirs = (m(input_ids=text).logits[0, len(prompt) - 1 : -1].double() for m in (student, teacher))
        for l_s, l_t in zip(own, theirs, strict=True):
            # The geometric mean of the two distributions, normalized.
            logp = processed(alpha * l_t.log_softmax(-1) + (1 - alpha) * l_s.log_softmax(-1), sampling)
            kept = logp > -torch.inf
            alone = (l_s[kept] / sampling.temperature).log_softmax(-1)
            rows.append(logp)
            kls.append((logp[kept].exp() * (logp[kept] - alone)).sum())
    return torch.stack(rows), torch.stack(kls)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_evidence_log_probs_and_kl_are_those_of_the_mixture(engine, sampling):
    sampling = Sampling(**{**vars(sampling), "stop_token_ids": STOPS})
    prompts, alphas = [p for p in PROMPTS for _ in range(3)], [a for a in ALPHAS for _ in range(3)]
    rollouts = engine.generate(prompts, sampling, seed=3, evidence="full", alphas=alphas)
    assert len(set(rollouts.lengths.tolist())) > 3
    rows, kl = mixture(rollouts, sampling)
    torch.testing.assert_close(rollouts.evidence.logp.double(), rows, atol=1e-4, rtol=0)
    at_token = rows.gather(1, rollouts.tokens[:, None]).squeeze(1)
    torch.testing.assert_close(rollouts.logp_rollout.double(), at_token, atol=1e-4, rtol=0)
    torch.testing.assert_close(rollouts.mix_kl.double(), kl, atol=1e-4, rtol=1e-4)
    assert rollouts.mix_alpha.tolist() == torch.tensor(alphas).tolist()
    shares = rollouts.mix_alpha[rollouts.segments.seq_ids]
    assert (rollouts.mix_kl[shares == 0] < 1e-6).all()
    assert (rollouts.mix_kl[shares > 0.2].mean() > 0.05) or sampling.filtered
    assert rollouts.provenance.teacher == "Qwen3MoeForCausalLM"
    assert (rollouts.support is not None) == sampling.filtered


def test_the_share_moves_with_its_response_when_the_batch_closes_ranks(engine, monkeypatch):
    """And the same tokens come from any batch: alone, together, or with other prompts beside them."""
    sampling = Sampling(max_tokens=12, stop_token_ids=STOPS)
    options = {"seed": 5, "evidence": "full"}
    together = engine.generate(PROMPTS, sampling, alphas=ALPHAS, **options)
    moved = []
    monkeypatch.setattr(
        FusedForward, "reorder", lambda *args, inner=FusedForward.reorder: (moved.append(1), inner(*args))
    )
    again = engine.generate(PROMPTS, sampling, alphas=ALPHAS, **options)
    assert moved
    assert torch.equal(again.tokens, together.tokens)
    monkeypatch.setattr(hf_decode, "KEPT_SHARE", 0.0)  # nobody leaves
    lazy = engine.generate(PROMPTS, sampling, alphas=ALPHAS, **options)
    assert torch.equal(lazy.tokens, together.tokens)
    torch.testing.assert_close(lazy.logp_rollout, together.logp_rollout, atol=1e-5, rtol=0)


def test_one_prompt_with_two_shares_is_two_texts(engine):
    drawn = engine.generate([PROMPTS[2]] * 6, Sampling(max_tokens=4), seed=1, evidence="full", alphas=[0.0, 1.0] * 3)
    first = drawn.evidence.logp[drawn.cu_seqlens[:-1]]
    assert torch.equal(first[0], first[2])
    assert torch.equal(first[1], first[5])
    assert not torch.allclose(first[0], first[1], atol=0.1)


def test_without_a_share_the_student_draws_alone(engine):
    sampling = Sampling(max_tokens=8)
    alone = engine.generate(PROMPTS, sampling, seed=2, evidence="full")
    unmixed = engine.generate(PROMPTS, sampling, seed=2, evidence="full", alphas=[0.0] * len(PROMPTS))
    assert torch.equal(alone.tokens, unmixed.tokens)
    assert torch.equal(alone.logp_rollout, unmixed.logp_rollout)
    assert (alone.mix_alpha, alone.mix_kl, alone.provenance.teacher) == (None, None, None)
    assert (unmixed.mix_kl == 0).all()


def test_frequencies_are_those_of_the_mixture(engine):
    count = 4000
    drawn = engine.generate([PROMPTS[1]] * count, Sampling(max_tokens=1), seed=0, evidence="full", alphas=[0.6] * count)
    expected = drawn.evidence.logp[0].double().exp()
    counts = torch.bincount(drawn.tokens, minlength=VOCAB).double()
    z = (counts - count * expected) / (count * expected * (1 - expected)).sqrt()
    assert z.abs().max() < 4.5
    alone = (
        engine.generate([PROMPTS[1]], Sampling(max_tokens=1), seed=0, evidence="full").evidence.logp[0].double().exp()
    )
    assert ((counts - count * alone) / (count * alone * (1 - alone)).sqrt()).abs().max() > 10


def test_updates_move_the_student_and_leave_the_teacher(engine):
    moved = tiny("dense")
    with torch.no_grad():
        for weight in moved.parameters():
            weight.mul_(1.1)
    sampling, options = Sampling(max_tokens=1), {"seed": 0, "evidence": "full"}
    before = engine.generate(PROMPTS[:2], sampling, alphas=[1.0, 0.5], **options).evidence.logp
    engine.load_weights(moved.named_parameters(), version=1)
    after = engine.generate(PROMPTS[:2], sampling, alphas=[1.0, 0.5], **options).evidence.logp
    engine.load_weights(tiny("dense").named_parameters(), version=0)
    torch.testing.assert_close(after[0], before[0])
    assert not torch.allclose(after[1], before[1], atol=1e-2)


def test_rescoring_follows_the_mixture_or_the_student_alone(engine):
    sampling = Sampling(max_tokens=8, temperature=0.8)
    drawn = engine.generate(PROMPTS, sampling, seed=4, evidence=5, alphas=ALPHAS)
    assert isinstance(drawn.evidence, TopK)
    again = engine.rescore(drawn, evidence=5)
    torch.testing.assert_close(again.logp_rollout, drawn.logp_rollout, atol=1e-5, rtol=0)
    torch.testing.assert_close(again.mix_kl, drawn.mix_kl, atol=1e-5, rtol=0)
    alone = TransformersEngine(tiny("dense")).rescore(drawn, evidence=5)
    assert (alone.mix_alpha, alone.mix_kl, alone.provenance.teacher) == (None, None, None)
    shares = drawn.mix_alpha[drawn.segments.seq_ids]
    torch.testing.assert_close(alone.logp_rollout[shares == 0], drawn.logp_rollout[shares == 0], atol=1e-5, rtol=0)
    assert (alone.logp_rollout - drawn.logp_rollout)[shares > 0].abs().mean() > 0.1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alphas": [0.5]}, r"alphas must be 8 numbers in \[0, 1\].*got 1 "),
        ({"alphas": [1.5] * 8}, r"from 1\.5 to 1\.5"),
        ({"alphas": [float("nan")] * 8}, r"numbers in \[0, 1\]"),
        ({"alphas": [0.5] * 8, "evidence": "hidden"}, r'ask for "full", "sampled" or a number'),
    ],
)
def test_requests_that_no_mixture_answers_are_refused(engine, options, message):
    with pytest.raises(EngineError, match=message):
        engine.generate(PROMPTS, Sampling(max_tokens=2), seed=0, **options)


def test_engines_without_a_fitting_teacher_say_so():
    with pytest.raises(EngineError, match="no teacher to mix in; construct a transformers engine with teacher=MODEL"):
        TransformersEngine(tiny("dense")).generate(PROMPTS, Sampling(max_tokens=2), seed=0, alphas=[0.5] * 8)
    wider = tiny("moe")
    wider.resize_token_embeddings(VOCAB + 8)
    with pytest.raises(EngineError, match=r"teacher's vocabulary has 72 tokens, the model's 64"):
        TransformersEngine(tiny("dense"), teacher=wider)
