"""Speculative decoding: the law that is sampled is the target's own, whatever the drafter proposes."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from offdrift.engines.hf import TransformersEngine
from offdrift.engines.hf_decode import filters_of
from offdrift.engines.hf_speculative import verified
from offdrift.errors import EngineError
from offdrift.records.provenance import Eviction, Sampling
from offdrift.records.rollouts import ACCEPTED, FREE, REDRAWN, concatenate
from tests.engines.contract import PLAIN, PROMPTS, SAMPLINGS, EngineContract
from tests.engines.models import SMALLER, VOCAB, tiny
from tests.engines.oracles import logp_rows


def drafter_of(kind: str, noise: float):
    """The model with noisy weights: proposals that are often right, and often not."""
    model, g = tiny(kind), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            p += noise * p.std() * torch.randn(p.shape, generator=g) if p.ndim > 1 else 0.0
    return model


@pytest.fixture(scope="class", params=[("dense", 0.15), ("moe", 0.1)], ids=["dense", "moe"])
def built(request):
    kind, noise = request.param
    model = tiny(kind)
    return model, TransformersEngine(model, drafter=drafter_of(kind, noise), draft_tokens=3), True


class TestContract(EngineContract):
    """All of it: evidence, log-probs, frequencies, weights."""

    REPEATED = 1e-5  # a pass that verifies multiplies matrices of other heights than one that follows


# -- the law --------------------------------------------------------------------------------------

EIGHTHS = torch.tensor([[4, 2, 2], [2, 2, 4], [2, 4, 2], [4, 2, 2]]) / 8
"""Laws of the drafter, of the first token and behind each first token: with the target's below, ratios are quarters."""
TARGETS = torch.tensor([[[1, 5, 2], [6, 1, 1], [2, 4, 2], [0, 3, 5]], [[4, 2, 2], [0, 0, 8], [3, 3, 2], [2, 1, 5]]]) / 8
BEHIND = torch.tensor([3.0, 4.0, 1.0]) / 8
"""The target's third token."""


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("limit", [0, 1, 2])
def test_two_proposals_and_a_token_behind_them_have_the_law_of_the_target_exactly(target: Tensor, limit: int):
    """Summed over all proposals and a grid of uniform numbers on which every piece of the rule is constant."""
    judge, redraw = (torch.arange(4) + 0.5) / 4, (torch.arange(120) + 0.5) / 120
    cells = torch.cartesian_prod(torch.arange(3.0), torch.arange(3.0), judge, judge, redraw)
    first, second = cells[:, 0].long(), cells[:, 1].long()
    p = torch.stack([target[0].expand(len(cells), 3), target[1 + first], BEHIND.expand(len(cells), 3)], 1)
    q = torch.stack([EIGHTHS[0].expand(len(cells), 3), EIGHTHS[1 + first]], 1)
    # One number to draw from is used in a window.
    uniforms = torch.stack([cells[:, [2, 3, 3]], cells[:, 4:].expand(-1, 3)], 2).double()
    proposed = torch.stack([first, second], 1)
    result = verified(p.log(), q.log(), proposed, uniforms, torch.full((len(cells),), limit))
    assert result.accepted.max() == (limit if (p[:, 0] >= 0).all() else 0)
    weight = EIGHTHS[0][first].double() * EIGHTHS[1 + first, second] / (4 * 4 * 120)
    law = torch.zeros(3, 3, 3, dtype=torch.float64)
    for sequence in product(range(3), repeat=3):
        chance = weight.clone()
        rows = [target[0], target[1 + sequence[0]], BEHIND]
        for place, token in enumerate(sequence):
            # Behind the window's end, the target draws on.
            inside = (result.tokens[:, place] == token).double()
            chance *= torch.where(result.accepted >= place, inside, rows[place][token].double())
        law[sequence] = chance.sum()
    expected = target[0][:, None, None] * target[1:4][:, :, None] * BEHIND
    torch.testing.assert_close(law, expected.double(), atol=1e-12, rtol=0)
    for i in range(2):
        torch.testing.assert_close(result.overlap[:, i], torch.minimum(p[:, i], q[:, i]).sum(-1))


def test_the_golden_numbers_of_the_definition():
    p, q = torch.tensor([0.4, 0.4, 0.2]), torch.tensor([0.6, 0.3, 0.1])
    assert float(torch.minimum(p, q).sum()) == pytest.approx(0.8)
    rest = (p - q).clamp(min=0)
    assert (rest / rest.sum()).tolist() == pytest.approx([0, 0.5, 0.5])
    for u, drawn in ((0.0, 1), (0.49, 1), (0.51, 2), (0.999, 2)):
        uniforms = torch.tensor([[[0.7, u], [0.0, 0.0]]]).double()
        one = verified(p.log().repeat(1, 2, 1), q.log()[None, None], torch.tensor([[0]]), uniforms, torch.tensor([1]))
        assert (one.accepted.item(), one.tokens[0, 0].item()) == (0, drawn)


FEW = SMALLER | {"vocab_size": 5}


def few(seed: int, width: float = 0.2):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(**FEW | {"initializer_range": width}, tie_word_embeddings=False)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config).eval()


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_tokens=4),
        Sampling(max_tokens=4, temperature=0.6, stop_token_ids=(2,)),
        Sampling(max_tokens=4, temperature=1.5, top_p=0.85),
        Sampling(max_tokens=4, top_k=3, min_p=0.05),
    ],
    ids=["plain", "cold", "top_p", "top_k"],
)
def test_whole_responses_have_the_law_of_the_target(sampling: Sampling):
    """Frequencies of all responses of up to four tokens over five, against the products of the target's chances."""
    target, drafter, count = few(0), few(0), 20_000
    with torch.no_grad():
        for p, other in zip(drafter.parameters(), few(1).parameters(), strict=True):
            p += 0.5 * other if p.ndim > 1 else 0.0
    engine = TransformersEngine(target, drafter=drafter, draft_tokens=2, batch_size=4000)
    rollouts = engine.generate([[1, 3]] * count, sampling, seed=3)
    responses = rollouts.tokens.split(rollouts.lengths.tolist())
    codes = torch.tensor([sum((t + 1) * 6**i for i, t in enumerate(r.tolist())) for r in responses])
    law: dict[int, float] = {}
    for sequence in product(range(5), repeat=4):
        stop = next((i + 1 for i, t in enumerate(sequence) if t in sampling.stop_token_ids), 4)
        with torch.no_grad():
            scores = target(input_ids=torch.tensor([[1, 3, *sequence[:-1]]])).logits[0, 1:]
        for apply in filters_of(sampling):
            scores = apply(None, scores)
        logp = scores.log_softmax(-1)
        chance = sum(float(logp[i, t]) for i, t in enumerate(sequence[:stop]))
        law[sum((t + 1) * 6**i for i, t in enumerate(sequence[:stop]))] = math.exp(chance)
    assert sum(law.values()) == pytest.approx(1, abs=1e-5)
    counts = {code: int((codes == code).sum()) for code in law}
    assert sum(counts.values()) == count
    assert all(counts[code] == 0 for code, chance in law.items() if chance == 0)
    # Cells of few expected responses are one.
    often = [code for code, chance in law.items() if chance * count >= 10]
    cells = [(counts[code], law[code] * count) for code in often]
    rest = sum(law[code] for code in law if code not in often) * count
    if rest >= 10:
        cells.append((sum(counts[code] for code in law if code not in often), rest))
    chi2, freedom = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells), len(cells) - 1
    # Wilson and Hilferty: a chance of 1e-4 beyond.
    assert chi2 < freedom * (1 - 2 / (9 * freedom) + 3.72 * (2 / (9 * freedom)) ** 0.5) ** 3, (chi2, freedom)
    # The drafter is no copy: it is rejected often, and accepted as often as the two laws overlap.
    speculation = rollouts.speculation
    judged = speculation.origin != FREE
    accepted = (speculation.origin == ACCEPTED)[judged].double()
    assert 0.3 < accepted.mean() < 0.9
    chance = speculation.overlap[judged].double()
    error = (chance * (1 - chance)).sum().sqrt() / len(chance)
    assert abs(accepted.mean() - chance.mean()) < 4 * error


# -- what is recorded -----------------------------------------------------------------------------


class Passes:
    """Forward passes of a model: rows and columns that it reads."""

    def __init__(self, model):
        self.shapes = []
        model.register_forward_pre_hook(
            lambda _, args, kw: self.shapes.append(tuple(kw["input_ids"].shape)), with_kwargs=True
        )


def test_a_drafter_with_the_targets_weights_is_always_accepted():
    engine = TransformersEngine(tiny("dense"), drafter=tiny("dense"), draft_tokens=3)
    passes = Passes(engine.model)
    rollouts = engine.generate(PROMPTS, replace(PLAIN, max_tokens=10), seed=0)
    origin = rollouts.speculation.origin.view(8, 10)
    # Windows of three proposals and a free token; two tokens are left for the last, of which one is proposed.
    expected = [ACCEPTED, ACCEPTED, ACCEPTED, FREE] * 2 + [ACCEPTED, FREE]
    assert origin.tolist() == [expected] * 8
    assert passes.shapes[1:] == [(8, 4), (8, 4), (8, 2)]
    sums = rollouts.speculation.sums(rollouts)
    assert (sums["speculative/passes"], sums["speculative/tokens"]) == (24, 80)
    judged = rollouts.speculation.origin != FREE
    torch.testing.assert_close(rollouts.speculation.overlap[judged], torch.ones(56), atol=1e-5, rtol=0)
    assert rollouts.speculation.overlap[~judged].isnan().all()


def test_passes_are_as_many_as_the_target_made():
    engine = TransformersEngine(tiny("dense"), drafter=drafter_of("dense", 0.3), draft_tokens=4)
    passes = Passes(engine.model)
    sampling = Sampling(max_tokens=24, stop_token_ids=tuple(range(0, VOCAB, 9)))
    rollouts = engine.generate(PROMPTS * 3, sampling, seed=1)
    assert len(set(rollouts.lengths.tolist())) > 5
    begins = rollouts.speculation.begins(rollouts.cu_seqlens)
    assert int(begins.sum()) == sum(rows for rows, _ in passes.shapes[1:])
    assert {REDRAWN, ACCEPTED, FREE} == set(rollouts.speculation.origin.tolist())
    # Fewer passes of fewer rows than plain decoding makes tokens.
    assert int(begins.sum()) < 0.8 * len(rollouts.tokens)


@pytest.mark.parametrize("name", ["plain", "all"])
def test_tokens_do_not_depend_on_what_is_drawn_beside_them(name):
    """Responses that end at other times leave the proposals of those that go on as they are."""
    sampling = replace(SAMPLINGS[name], max_tokens=9, stop_token_ids=tuple(range(9)))
    engines = [
        TransformersEngine(tiny("dense"), drafter=drafter_of("dense", 0.3), draft_tokens=4, batch_size=size)
        for size in (1, 5, 64)
    ]
    prompts = [p for p in PROMPTS for _ in range(4)]
    one, some, all_ = (engine.generate(prompts, sampling, seed=7, evidence="full") for engine in engines)
    assert len(set(one.lengths.tolist())) > 4
    for other in (some, all_):
        assert torch.equal(one.tokens, other.tokens)
        assert torch.equal(one.speculation.origin, other.speculation.origin)
        torch.testing.assert_close(one.evidence.logp, other.evidence.logp, atol=2e-5, rtol=0)


def test_long_responses_leave_rejected_columns_behind():
    """A drafter that is never right: the cache stays below twice what is read, and evidence is the target's."""
    engine = TransformersEngine(tiny("dense"), drafter=drafter_of("dense", 3.0), draft_tokens=4)
    widths = []
    engine.model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda _, args, kw: widths.append(kw["attention_mask"].shape[-1]), with_kwargs=True
    )
    sampling = Sampling(max_tokens=60)
    rollouts = engine.generate(PROMPTS, sampling, seed=2, evidence="full")
    truth = logp_rows(tiny("dense"), rollouts, sampling)
    torch.testing.assert_close(rollouts.evidence.logp.double(), truth, atol=1e-4, rtol=0)
    assert (rollouts.speculation.origin == REDRAWN).float().mean() > 0.7
    assert max(widths) < 2 * 63 + 5


def test_batches_keep_what_was_proposed_when_they_are_cut_and_joined():
    engine = TransformersEngine(tiny("dense"), drafter=drafter_of("dense", 0.3), batch_size=3)
    engine.load_drafter(drafter_of("dense", 0.4).named_parameters(), version=5)
    engine.load_weights(tiny("dense").named_parameters(), version=7)
    rollouts = engine.generate(PROMPTS, Sampling(max_tokens=6, stop_token_ids=tuple(range(8))), seed=0)
    assert set(rollouts.speculation.drafter_version.tolist()) == {5}
    assert rollouts.speculation.sums(rollouts)["speculative/lag"] == 2 * len(rollouts.tokens)
    back = concatenate([rollouts.select(torch.tensor([i])) for i in range(8)]).speculation
    assert torch.equal(back.origin, rollouts.speculation.origin)
    torch.testing.assert_close(back.overlap, rollouts.speculation.overlap, equal_nan=True)
    whole = rollouts.speculation.sums(rollouts)
    parts = [rollouts.select(torch.tensor(rows)) for rows in ([0, 3, 4], [1, 2, 5, 6, 7])]
    sums = [part.speculation.sums(part) for part in parts]
    for name, total in whole.items():
        assert float(total) == pytest.approx(sum(float(s[name]) for s in sums)), name


def test_new_weights_of_the_drafter_change_what_is_accepted_and_nothing_else():
    engine = TransformersEngine(tiny("dense"), drafter=drafter_of("dense", 0.5), draft_tokens=3)
    before = engine.generate(PROMPTS * 4, PLAIN, seed=0)
    engine.load_drafter(tiny("dense").named_parameters(), version=1)
    after = engine.generate(PROMPTS * 4, PLAIN, seed=0)
    rates = [float((r.speculation.origin == ACCEPTED).float().mean()) for r in (before, after)]
    assert rates[0] < 0.6 < 0.7 < rates[1]
    assert engine.version == 0
    truth = logp_rows(tiny("dense"), after, PLAIN).gather(1, after.tokens[:, None]).squeeze(1)
    torch.testing.assert_close(after.logp_rollout.double(), truth, atol=1e-4, rtol=0)


# -- refusals -------------------------------------------------------------------------------------


def test_what_a_drafter_cannot_do_is_refused():
    model = tiny("dense")
    with pytest.raises(EngineError, match="vocabulary has 5 tokens, the model's 64"):
        TransformersEngine(model, drafter=few(0))
    with pytest.raises(EngineError, match="draft_tokens = 0"):
        TransformersEngine(model, drafter=tiny("dense"), draft_tokens=0)
    for name, other in {"teacher": tiny("dense"), "eviction": Eviction("window", 8, 2)}.items():
        with pytest.raises(EngineError, match=f"{name} does not act beside a drafter"):
            TransformersEngine(model, drafter=tiny("dense"), **{name: other})
    with pytest.raises(EngineError, match="record_routes"):
        TransformersEngine(tiny("moe"), drafter=tiny("moe"), record_routes=True)
    engine = TransformersEngine(model, drafter=tiny("dense"))
    with pytest.raises(EngineError, match="construct one without it for streams"):
        engine.open_stream(PLAIN)
    with pytest.raises(EngineError, match="was given 3"):
        engine.load_drafter(list(model.named_parameters())[:3], version=1)
    with pytest.raises(EngineError, match="0 weights of a drafter"):
        TransformersEngine(model).load_drafter(model.named_parameters(), version=1)
    sliding = copy.deepcopy(model)
    sliding.config.use_sliding_window, sliding.config.sliding_window = True, 4
    sliding.config.layer_types = ["sliding_attention"] * 2
    with pytest.raises(EngineError, match="rejected proposals cannot be taken back"):
        TransformersEngine(sliding, drafter=model).generate(PROMPTS, PLAIN, seed=0)
