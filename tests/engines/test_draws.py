"""Requests that no engine should answer, and the packing of what was drawn."""

import inspect

import pytest
import torch

from offdrift.engines.generate import Generation, check_request, rollouts_from
from offdrift.errors import EngineError
from offdrift.records.provenance import Provenance, Sampling
from offdrift.records.rollouts import FullVocab, Support, TopK

OK = Sampling(max_tokens=4, stop_token_ids=(9,))


def provenance(sampling=OK):
    return Provenance("e", "1", "m", "float32", None, sampling)


@pytest.mark.parametrize(
    ("prompts", "sampling", "evidence", "message"),
    [
        ([], OK, "sampled", "prompts is empty"),
        ([[1], []], OK, "sampled", r"prompts\[1\] has no tokens"),
        ([[1], [2, 10]], OK, "sampled", r"prompts\[1\] has token id 10, .* 10"),
        ([[-1]], OK, "sampled", r"prompts\[0\] has token id -1"),
        ([[1]], Sampling(4, temperature=0.0), "sampled", "temperature = 0.0.*top_k=1"),
        ([[1]], Sampling(4, temperature=float("nan")), "sampled", "temperature = nan"),
        ([[1]], Sampling(4, top_p=0.0), "sampled", "top_p = 0.0"),
        ([[1]], Sampling(4, top_p=1.5), "sampled", "top_p = 1.5"),
        ([[1]], Sampling(4, top_k=-1), "sampled", "top_k = -1"),
        ([[1]], Sampling(4, min_p=-0.1), "sampled", "min_p = -0.1"),
        ([[1]], Sampling(4, min_p=1.0), "sampled", "min_p = 1.0"),
        ([[1]], Sampling(0), "sampled", "max_tokens = 0"),
        ([[1]], Sampling(4, stop_token_ids=(10,)), "sampled", "stop_token_ids has 10"),
        ([[1]], OK, 0, "evidence = 0"),
        ([[1]], OK, 11, "evidence = 11"),
        ([[1]] * 700, Sampling(4000), "full", "could take 107 MiB"),  # 700*4000*10*4 / 2**20
        ([[1]] * 7000, Sampling(4000), "hidden", "could take 160 MiB"),  # 7000*4000*6 / 2**20
    ],
)
def test_a_senseless_request_is_refused_by_name(prompts, sampling, evidence, message):
    with pytest.raises(EngineError, match=message):
        check_request(prompts, sampling, evidence, vocab_size=10, state_bytes=6, limit_mib=100)


def test_evidence_of_no_known_kind_is_refused():
    # Not through the annotated signature, which the test run checks: as an unchecked caller would.
    with pytest.raises(EngineError, match="got 'all'"):
        inspect.unwrap(check_request)([[1]], OK, "all", vocab_size=10, state_bytes=6, limit_mib=100)


def test_chunks_are_joined_in_order():
    first = Generation(
        tokens=torch.tensor([1, 9, 5]),
        lengths=torch.tensor([2, 1]),
        logp=torch.tensor([-1.0, -2.0, -3.0]),
        evidence=TopK(torch.tensor([[1], [2], [3]]), torch.tensor([[-0.1], [-0.2], [-0.3]])),
        support=Support(torch.tensor([1, 9, 0, 5]).int(), torch.tensor([0, 1, 2, 4])),
    )
    second = Generation(
        tokens=torch.tensor([9]),
        lengths=torch.tensor([1]),
        logp=torch.tensor([-4.0]),
        evidence=TopK(torch.tensor([[4]]), torch.tensor([[-0.4]])),
        support=Support(torch.tensor([8, 9]).int(), torch.tensor([0, 2])),
    )
    prompts = [[3, 4], [5], [3, 4]]
    rollouts = rollouts_from([first, second], prompts, version=6, provenance=provenance())
    assert rollouts.tokens.tolist() == [1, 9, 5, 9]
    assert rollouts.cu_seqlens.tolist() == [0, 2, 3, 4]
    assert rollouts.finish == ("stop", "length", "stop")
    assert rollouts.group_ids.tolist() == [0, 1, 0]
    assert rollouts.rollout_version.tolist() == [6] * 4
    assert rollouts.logp_rollout.tolist() == [-1.0, -2.0, -3.0, -4.0]
    assert rollouts.evidence.ids.tolist() == [[1], [2], [3], [4]]
    assert rollouts.support.ids.tolist() == [1, 9, 0, 5, 8, 9]
    assert rollouts.support.cu_seqlens.tolist() == [0, 1, 2, 4, 6]
    assert rollouts.prompt_tokens.tolist() == [3, 4, 5, 3, 4]


def test_a_lone_chunk_of_rows_is_not_copied():
    rows = torch.zeros(1, 4).log_softmax(-1)
    draws = Generation(torch.tensor([1]), torch.tensor([1]), rows[:, 1].clone(), FullVocab(rows))
    rollouts = rollouts_from([draws], [[1]], version=0, provenance=provenance())
    assert rollouts.evidence.logp.data_ptr() == rows.data_ptr()


@pytest.mark.parametrize("bad", [float("nan"), -float("inf")])
def test_a_log_prob_that_cannot_be_is_refused_with_its_sequence(bad):
    logp = torch.tensor([-1.0, -1.0, bad, -1.0])
    draws = Generation(torch.tensor([1, 1, 1, 1]), torch.tensor([2, 2]), logp, None)
    with pytest.raises(EngineError, match=rf"'e' .* log-prob {bad} \(sequence 1\)"):
        rollouts_from([draws], [[1], [2]], version=0, provenance=provenance())
