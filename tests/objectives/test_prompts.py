"""Prompt groups of a step, against a plain loop over ids."""

import pytest
import torch

from offdrift.errors import EvidenceError
from offdrift.objectives.base import StepPrompts, prompt_ids
from offdrift.segments import Segments

REDUCTIONS = {"sum": torch.sum, "mean": torch.mean, "max": torch.amax}


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_reductions_agree_with_a_loop_over_prompts(name, seed, dtype):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(-3, 3, (17,), generator=g)
    x = torch.randn(17, generator=g, dtype=torch.float64) - 5  # all negative: 0 must not win a max
    mine = ids[[4, 9, 1]].to(dtype)
    prompts = StepPrompts.of(ids, mine)
    got = getattr(prompts, name)(x)
    expected = [REDUCTIONS[name](x[ids == i], dim=0).item() for i in ids]
    assert len(set(ids.tolist())) > 3
    assert prompts.spread(got).tolist() == pytest.approx(expected, rel=1e-12)
    assert prompts.here(got).tolist() == pytest.approx([expected[i] for i in (4, 9, 1)], rel=1e-12)


def test_slots_beyond_the_last_prompt_are_empty():
    prompts = StepPrompts.of(torch.tensor([7, 3, 7, 7]), torch.tensor([3]))
    x = torch.tensor([1.0, -2.0, 3.0, 5.0])
    assert prompts.sizes.tolist() == [1, 3, 0, 0]
    assert prompts.sum(x).tolist() == [-2, 9, 0, 0]
    assert prompts.mean(x).tolist() == [-2, 3, 0, 0]
    assert prompts.max(x).tolist() == [-2, 5, 0, 0]


def test_sequences_without_a_prompt_are_refused():
    segments = Segments.from_lengths([2, 1], group_ids=torch.tensor([8, 8]))
    assert prompt_ids(segments).tolist() == [8, 8]
    with pytest.raises(EvidenceError, match="group_ids"):
        prompt_ids(Segments.from_lengths([2, 1]))
