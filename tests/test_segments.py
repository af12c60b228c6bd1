"""Segments: every reduction against a loop over sequences, forward and backward."""

import pytest
import torch

from offdrift.errors import ShapeError
from offdrift.segments import Groups, Segments

LENGTHS = [[3, 1, 4], [1], [0, 2, 0, 3, 0], [7, 0], [5, 5, 5]]


def pieces(x: torch.Tensor, lengths: list[int]) -> list[torch.Tensor]:
    return list(x.split(lengths))


def values(lengths: list[int], seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(sum(lengths), generator=g, dtype=torch.float64)


REDUCTIONS = {
    "sum": lambda p: p.sum(),
    "mean": lambda p: p.mean() if len(p) else p.sum(),
    "max": lambda p: p.max() if len(p) else p.sum(),
    "min": lambda p: p.min() if len(p) else p.sum(),
}
PREFIXES = {"prefix_sum": lambda p: p.cumsum(0), "prefix_min": lambda p: p.cummin(0).values}


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reduction_is_a_loop_over_sequences(name, lengths):
    x, s = values(lengths), Segments.from_lengths(lengths)
    expected = torch.stack([REDUCTIONS[name](p) for p in pieces(x, lengths)])
    assert len(expected) == len(lengths) == len(s)
    torch.testing.assert_close(getattr(s, name)(x), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("name", PREFIXES)
def test_prefix_restarts_in_every_sequence(name, lengths):
    x, s = values(lengths), Segments.from_lengths(lengths)
    expected = torch.cat([PREFIXES[name](p) for p in pieces(x, lengths)])
    torch.testing.assert_close(getattr(s, name)(x), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("name", [*REDUCTIONS, *PREFIXES, "spread"])
def test_gradient_is_that_of_the_loop(name, lengths):
    s = Segments.from_lengths(lengths)
    x = (values(lengths) if name != "spread" else values([len(lengths)])).requires_grad_()
    assert torch.autograd.gradcheck(getattr(s, name), x)


def test_prefix_sum_keeps_the_digits_of_a_short_sequence_after_a_long_one():
    lengths = [100_000, 2]
    x = torch.full((100_002,), 123.456)
    x[-2:] = torch.tensor([1e-4, 2e-4])
    got = Segments.from_lengths(lengths).prefix_sum(x)[-1]
    assert got.item() == pytest.approx(3e-4, rel=1e-5)


def test_empty_segments_take_the_given_extreme():
    s = Segments.from_lengths([0, 2])
    x = torch.tensor([-3.0, -1.0])
    assert s.max(x, empty=9.0).tolist() == [9.0, -1.0]
    assert s.min(x).tolist() == [0.0, -3.0]


def test_no_tokens_at_all():
    s, x = Segments.from_lengths([0, 0]), torch.zeros(0)
    assert s.sum(x).tolist() == s.mean(x).tolist() == s.max(x).tolist() == [0.0, 0.0]
    assert s.spread(torch.ones(2)).numel() == s.prefix_min(x).numel() == 0


def test_ids_and_positions():
    s = Segments.from_lengths([2, 0, 3])
    assert s.seq_ids.tolist() == [0, 0, 2, 2, 2]
    assert s.position.tolist() == [0, 1, 0, 1, 2]


def test_turns_reduce_the_same_tokens_more_finely():
    turns = Segments.from_lengths([1, 2, 2])
    s = Segments.from_lengths([3, 2], turns=turns)
    x = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])
    assert s.sum(x).tolist() == [7.0, 24.0]
    assert s.turns.mean(x).tolist() == [1.0, 3.0, 12.0]


def test_groups_reduce_sequences_in_any_order():
    groups = Groups.from_ids(torch.tensor([7, 2, 7, 2, 2]))
    x = torch.tensor([1.0, 10.0, 3.0, 20.0, 30.0])
    assert groups.sizes.tolist() == [3, 2]
    assert groups.spread(groups.mean(x)).tolist() == [2.0, 20.0, 2.0, 20.0, 20.0]


def test_without_ids_every_sequence_is_its_own_group():
    assert Segments.from_lengths([1, 2]).groups.sizes.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Segments.from_lengths([3, -1]), "sequence 1 has length -1"),
        (lambda: Segments.from_lengths(torch.ones(2, 2).long()), "one-dimensional"),
        (lambda: Segments.from_lengths([1], group_ids=torch.tensor([1, 2])), "has shape .2,. for 1 seq"),
        (lambda: Segments.from_lengths([2, 1], turns=Segments.from_lengths([1, 2])), "turns must cut"),
        (lambda: Segments(torch.tensor([1, 2])).check(), "start at 0"),
        (lambda: Segments(torch.tensor([0, 3, 2])).check(), "never decrease"),
    ],
)
def test_impossible_cuts_are_refused_by_name(make, words):
    with pytest.raises(ShapeError, match=words):
        make()


def test_sums_of_float32_do_not_lose_digits_over_long_segments():
    x = torch.full((32768,), 1.7)
    s = Segments.from_lengths([32768])
    exact = 32768 * float(x[0])
    assert s.sum(x).item() == pytest.approx(exact, rel=1e-7)
    assert s.mean(x).item() == pytest.approx(float(x[0]), rel=1e-7)
    assert s.sum(x).dtype == torch.float32


@pytest.mark.parametrize("lengths", [[3, 2], [0, 3, 0, 2, 0], [5], [0, 0]])
def test_any_marks_the_segments_that_hold_a_marked_token(lengths: list[int]) -> None:
    marks = torch.tensor([False, False, True, False, False])[: sum(lengths)]
    expected = [bool(part.any()) for part in marks.split(lengths)]
    assert Segments.from_lengths(lengths).any(marks).tolist() == expected
