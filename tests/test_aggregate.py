"""Aggregation: the methods table's numbers, and that shares of a normalizer add up."""

import pytest
import torch

from offdrift.aggregate import aggregate, normalizer_of
from offdrift.errors import MethodError
from offdrift.segments import Segments

LOSSES = torch.tensor([1.0, 2, 3, 4, 10, 20, 30])
SEGMENTS = Segments.from_lengths([4, 3])
WHOLE = {"token_mean": 10.0, "seq_mean_token_sum": 35.0, "seq_mean_token_mean": 11.25, "fixed": 8.75}
# second sequence rejected: its losses are zero, the denominators keep counting it
REJECTED = {"token_mean": 10 / 7, "seq_mean_token_sum": 5.0, "seq_mean_token_mean": 1.25, "fixed": 1.25}


@pytest.mark.parametrize("how", WHOLE)
def test_values_of_the_methods_table(how):
    normalizer = normalizer_of(SEGMENTS, how=how, horizon=4)
    assert aggregate(LOSSES, SEGMENTS, how=how, normalizer=normalizer).item() == pytest.approx(WHOLE[how])
    kept = LOSSES * torch.tensor([1.0] * 4 + [0.0] * 3)
    assert aggregate(kept, SEGMENTS, how=how, normalizer=normalizer).item() == pytest.approx(REJECTED[how])


@pytest.mark.parametrize("how", WHOLE)
def test_any_split_into_pieces_gives_the_same_number(how):
    normalizer = sum(normalizer_of(Segments.from_lengths([n]), how=how, horizon=4) for n in (4, 3))
    pieces = [
        aggregate(x, Segments.from_lengths([len(x)]), how=how, normalizer=normalizer) for x in (LOSSES[:4], LOSSES[4:])
    ]
    assert sum(p.item() for p in pieces) == pytest.approx(WHOLE[how])


def test_an_empty_sequence_counts_as_sampled():
    s = Segments.from_lengths([1, 0])
    normalizer = normalizer_of(s, how="seq_mean_token_mean")
    got = aggregate(torch.tensor([4.0]), s, how="seq_mean_token_mean", normalizer=normalizer)
    assert got.item() == 2.0


def test_fixed_needs_its_horizon_and_names_are_checked():
    with pytest.raises(MethodError, match="horizon="):
        normalizer_of(SEGMENTS, how="fixed")
    with pytest.raises(Exception, match="mean"):
        aggregate(LOSSES, SEGMENTS, how="mean", normalizer=1.0)  # type: ignore[arg-type]
