"""Weights that correct for no ratio: exact numbers at, below and above each limit."""

import math

import pytest
import torch

from offdrift.correction import FutureWeight, SignWeight, SurprisalWeight
from offdrift.errors import MethodError
from offdrift.laws.batches import packed
from offdrift.methods import method
from offdrift.ratios import discounted_future
from offdrift.segments import Segments
from tests.laws.handmade import made
from tests.oracles.fixtures import double


def weights(weight, l, a, **how):  # noqa: E741
    batch = packed(made("staleness", l, a, **how))
    got = weight(batch.lp, batch.advantages, batch.batch_info)
    return got.weight, got.limited.tolist()


@pytest.mark.parametrize("decay", [0.3, 0.9, 1.0])
def test_a_discounted_future_is_the_loop_over_later_tokens(decay):
    draw = torch.Generator().manual_seed(3)
    lengths = [1, 0, 7, 2, 33, 8]
    x = torch.randn(sum(lengths), generator=draw, dtype=torch.float64)
    expected, start = [], 0
    for n in lengths:
        expected += [sum(decay ** (s - t) * float(x[start + s]) for s in range(t, n)) for t in range(n)]
        start += n
    got = discounted_future(x, Segments.from_lengths(lengths), decay=decay)
    torch.testing.assert_close(got, double(expected), rtol=1e-12, atol=1e-12)


def test_a_discounted_future_gives_every_token_its_share_of_the_gradient():
    x = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    discounted_future(x, Segments.from_lengths([3]), decay=0.5)[0].backward()
    assert x.grad.tolist() == [1.0, 0.5, 0.25]


def test_the_future_counts_half_after_a_half_life():
    free = FutureWeight(half_life=1.0, floor=0.0, cap=1e9, drop_above=None, harmful_above=None)
    w, limited = weights(free, [0.1, 0.2, -0.4], [1.0] * 3, lengths=[3])
    assert w.log().tolist() == pytest.approx([0.1 + 0.1 - 0.1, 0.2 - 0.2, -0.4])
    assert limited == [False] * 3


def test_limits_of_the_future():
    weight = FutureWeight(half_life=1e9)
    l = [math.log(1.1), math.log(1.3), math.log(0.9), math.log(9.9), math.log(10.1)]  # noqa: E741
    w, limited = weights(weight, l, [1.0] * 5)
    assert w.tolist() == pytest.approx([1.1, 1.2, 1.0, 1.2, 1.0])  # a ratio above 10 leaves its own sum, too
    assert limited == [False, True, True, True, False]


def test_harmful_tokens_are_not_strengthened():
    """Where A < 0 and r > 4 the weight is clipped to [0.8, 1]; elsewhere to [1, 1.2]."""
    for r, a, expected in ((4.1, -1.0, 1.0), (3.9, -1.0, 1.2), (4.1, 1.0, 1.2), (4.1, 0.0, 1.2)):
        w, _ = weights(FutureWeight(), [math.log(r)], [a])
        assert w.item() == pytest.approx(expected), (r, a)
    weak = FutureWeight(floor=0.5, half_life=1e9)  # a later fall weakens the token that rose
    w, _ = weights(weak, [math.log(5.0), math.log(0.1)], [-1.0, -1.0], lengths=[2])
    assert w[0].item() == pytest.approx(0.8)


def ms_swift(log_ratio: torch.Tensor, advantage: float) -> torch.Tensor:
    """Its influence weight with delta 10, decay rate 32, clip range 0.2 above 1, threshold 4, by its definition."""
    r = log_ratio.exp()
    counted = log_ratio.where(r <= 10, 0.0)
    n, gamma = len(r), 2 ** (-1 / 32)
    future = double([sum(gamma ** (s - t) * float(counted[s]) for s in range(t, n)) for t in range(n)])
    w = future.exp().clamp(1.0, 1.2)
    return torch.where((r > 4) & (advantage < 0), w.clamp(0.8, 1.0), w)


def test_it_weighs_as_ms_swift_does():
    draw, compared = torch.Generator().manual_seed(0), set()
    for scale in [0.03, 1.0] * 15:
        l = scale * torch.randn(9, generator=draw, dtype=torch.float64)  # noqa: E741
        for a in (1.0, -1.0):
            got, _ = weights(method("fipo").correction.weights[0], l.tolist(), [a] * 9, lengths=[9])
            torch.testing.assert_close(got, ms_swift(l, a), rtol=1e-10, atol=0)
            compared |= set(got.tolist())
    assert len(compared) > 20


def test_answers_count_alike_whatever_their_surprisal():
    """Their summed -A log pi times the weight is A times their length."""
    batch = packed(made("staleness", [0.0, 1.0, -2.0, 0.5, 0.5], [1.0] * 5, lengths=[2, 3]))
    got = SurprisalWeight()(batch.lp)
    segments = batch.lp.segments
    summed = segments.sum(-batch.lp.current * got.weight)
    assert summed.tolist() == pytest.approx([2.0, 3.0])
    assert not got.limited.any()
    sure = SurprisalWeight(floor=100.0)(batch.lp)
    assert sure.weight.tolist() == pytest.approx([0.01] * 5)
    assert sure.limited.all()


def test_signs_have_their_constants():
    w, _ = weights(SignWeight(positive=2.0, negative=0.5), [0.1, 0.2, 0.3], [3.0, 0.0, -2.0])
    assert w.tolist() == [2.0, 2.0, 0.5]


def test_settings_that_mean_nothing_are_refused():
    for make in (
        lambda: FutureWeight(floor=2.0),
        lambda: FutureWeight(half_life=0.0),
        lambda: SurprisalWeight(floor=0.0),
        lambda: SignWeight(negative=-1.0),
    ):
        with pytest.raises(MethodError):
            make()
    with pytest.raises(MethodError):
        SignWeight()(packed(made("full", [0.1], [1.0])).lp)
