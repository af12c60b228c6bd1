"""Siblings draft for each other: exact laws, independent responses, proposals that are accepted."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from offdrift.engines.generate import Request
from offdrift.engines.hf import TransformersEngine
from offdrift.engines.hf_decode import DrawRecorder, uniform_numbers
from offdrift.engines.hf_siblings import LEAST_CHANCE, SiblingDrafter, SiblingIndex, drawn
from offdrift.engines.hf_speculative import NUMBERS, speculate
from offdrift.errors import EngineError
from offdrift.records.provenance import Sampling
from offdrift.records.rollouts import ACCEPTED, FREE
from tests.engines.models import tiny
from tests.engines.oracles import logp_rows
from tests.engines.test_speculative import Passes, few

PROMPT, COUNT = [1, 3], 1500


def chances(target, sampling: Sampling) -> dict[tuple[int, ...], float]:
    """Probability of every response, from the target's own passes."""
    sequences = list(product(range(5), repeat=sampling.max_tokens))
    with torch.no_grad():
        ids = torch.tensor([[*PROMPT, *sequence[:-1]] for sequence in sequences])
        logp = (target(input_ids=ids).logits[:, 1:] / sampling.temperature).log_softmax(-1)
    law: dict[tuple[int, ...], float] = {}
    for row, sequence in zip(logp.tolist(), sequences, strict=True):
        stop = next((i + 1 for i, t in enumerate(sequence) if t in sampling.stop_token_ids), len(sequence))
        law[sequence[:stop]] = math.exp(sum(row[i][t] for i, t in enumerate(sequence[:stop])))
    return law


def check_frequencies(seen: dict, law: dict, count: int) -> None:
    """Chi-squared of frequencies against a law, beyond a chance of 1e-4; cells of few expected draws are one."""
    often = [x for x in law if law[x] * count >= 10]
    cells = [(seen.get(x, 0), law[x] * count) for x in often]
    rest = count - sum(expected for _, expected in cells)
    if rest >= 10:
        cells.append((count - sum(n for n, _ in cells), rest))
    chi2, freedom = sum((n - expected) ** 2 / expected for n, expected in cells), len(cells) - 1
    assert freedom > 7
    assert chi2 < freedom * (1 - 2 / (9 * freedom) + 3.72 * (2 / (9 * freedom)) ** 0.5) ** 3, (chi2, freedom)


def draw(target, sampling: Sampling, groups: list[int], seed: int):
    """Responses to one prompt whose siblings are those of their group."""
    request = Request([PROMPT] * len(groups), sampling, "sampled", seed)
    uniforms = uniform_numbers(len(groups), NUMBERS * sampling.max_tokens, seed).view(len(groups), -1, NUMBERS)
    drafter = SiblingDrafter(SiblingIndex(), groups, vocab_size=5, device=torch.device("cpu"))
    return speculate(target, drafter, request, DrawRecorder("sampled"), uniforms, tokens=3)


@pytest.mark.parametrize(
    "sampling",
    [Sampling(max_tokens=4), Sampling(max_tokens=4, temperature=1.4, stop_token_ids=(2,))],
    ids=["plain", "stops"],
)
def test_responses_have_the_law_of_the_target_whatever_siblings_propose(sampling):
    target = few(0)
    drawn_now = draw(target, sampling, [0] * COUNT, seed=3)
    seen: dict[tuple[int, ...], int] = {}
    for response in drawn_now.tokens.split(drawn_now.lengths.tolist()):
        seen[tuple(response.tolist())] = seen.get(tuple(response.tolist()), 0) + 1
    check_frequencies(seen, chances(target, sampling), COUNT)
    judged = drawn_now.speculation.origin != FREE
    accepted = (drawn_now.speculation.origin == ACCEPTED)[judged].double()
    overlap = drawn_now.speculation.overlap[judged].double()
    assert judged.double().mean() > 0.35
    assert 0.5 < accepted.mean() < 1
    error = (overlap * (1 - overlap)).sum().sqrt() / len(overlap)
    assert abs(accepted.mean() - overlap.mean()) < 4 * error


def test_siblings_are_independent_of_each_other():
    """The pair of answers to one prompt has the product of their laws, though one drafts for the other."""
    target, sampling, pairs = few(0), Sampling(max_tokens=3), COUNT
    drawn_now = draw(target, sampling, [i // 2 for i in range(2 * pairs)], seed=5)
    assert (drawn_now.speculation.origin == ACCEPTED).sum() > 200
    ends = drawn_now.tokens.view(pairs, 2, 3)[:, :, 1:].flatten(1).tolist()
    law: dict[tuple[int, ...], float] = {}
    for response, chance in chances(target, sampling).items():
        law[response[1:]] = law.get(response[1:], 0.0) + chance
    seen: dict[tuple[int, ...], int] = {}
    for pair in ends:
        seen[tuple(pair)] = seen.get(tuple(pair), 0) + 1
    check_frequencies(seen, {(*a, *b): law[a] * law[b] for a, b in product(law, law)}, pairs)


def test_a_greedy_policy_accepts_all_that_a_sibling_wrote_and_makes_fewer_passes():
    """At a temperature near 0 siblings are alike: the second wave reads the first one's answer in windows."""
    engine = TransformersEngine(tiny("dense"), drafter="siblings", draft_tokens=4)
    passes = Passes(engine.model)
    rollouts = engine.generate([[5, 9, 2]] * 4 + [[7, 1]] * 4, Sampling(max_tokens=16, top_k=1), seed=0)
    origin = rollouts.speculation.origin.view(8, 16)
    others = origin[[1, 2, 3, 5, 6, 7]]
    assert (others == ACCEPTED).double().mean() > 0.6
    ahead, behind = ([shape for shape in passes.shapes if shape[0] == rows] for rows in (2, 6))
    assert len(behind) < 0.5 * len(ahead)
    truth = logp_rows(tiny("dense"), rollouts, Sampling(max_tokens=16, top_k=1))
    torch.testing.assert_close(
        rollouts.logp_rollout.double(), truth.gather(1, rollouts.tokens[:, None]).squeeze(1), atol=1e-4, rtol=0
    )


def test_a_group_in_several_pieces_goes_on_drafting_and_another_call_starts_afresh():
    """Pieces of one request share the index: only the first answer of all is drawn without one."""
    sampling, engine = Sampling(max_tokens=8, top_k=1), TransformersEngine(tiny("dense"), drafter="siblings")
    engine.batch_size = 2
    first = engine.generate([[5, 9, 2]] * 6, sampling, seed=0)
    shares = [(part == ACCEPTED).double().mean() for part in first.speculation.origin.view(6, 8)]
    assert min(shares[1:]) >= 0.5 > shares[0]
    again = engine.generate([[5, 9, 2]] * 6, sampling, seed=0)
    assert torch.equal(first.speculation.origin, again.speculation.origin)
    assert first.provenance.draft_tokens == 4


def test_the_index_counts_by_the_longest_context_and_ends_a_window_that_is_not_accepted():
    index = SiblingIndex(longest=3)
    index.add(0, [9, 1], [2, 3, 2, 4])
    assert index.following(0, [8, 2]) == (1, {3: 0.5, 4: 0.5})
    assert index.following(0, [3, 2]) == (2, {4: 1.0})
    assert index.following(0, [1, 2]) == (2, {3: 1.0})
    assert index.following(0, [7]) is None
    assert index.following(1, [3, 2]) is None
    assert index.chance(2) == 0.5
    for _ in range(8):
        index.learn(2, False)
    assert index.chance(2) == pytest.approx(1 / 10)
    assert index.chance(2) < LEAST_CHANCE
    assert index.chance(1) == 0.5
    assert [drawn({4: 0.5, 2: 0.5}, u) for u in (0.0, 0.49, 0.5, 0.999999)] == [4, 4, 2, 2]


def test_what_siblings_cannot_do_is_refused():
    with pytest.raises(EngineError, match=r"drafter = .brothers."):
        TransformersEngine(tiny("dense"), drafter="brothers")
    engine = TransformersEngine(tiny("dense"), drafter="siblings")
    with pytest.raises(EngineError, match="0 weights of a drafter"):
        engine.load_drafter(tiny("dense").named_parameters(), version=1)
    with pytest.raises(EngineError, match="construct one without it for streams"):
        engine.open_stream(Sampling(max_tokens=4))
