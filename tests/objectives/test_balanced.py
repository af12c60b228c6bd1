"""BAPO: bounds that open until positives carry their share, against the official search written as a loop."""

import math

import pytest
import torch

from offdrift.batch_info import NO_INFO, BatchInfo
from offdrift.errors import MethodError
from offdrift.laws.batches import packed, seen
from offdrift.loss import policy_loss
from offdrift.methods import Method, method
from offdrift.objectives.second_moment import BalancedClipped
from tests.laws.handmade import made

DEFAULT = BalancedClipped()


def official(r: list[float], a: list[float], o: BalancedClipped) -> tuple[float, float]:
    """The two loops of `recipe/bapo/policy_loss.py`: low first, then high, until positive / negative >= the target."""

    def quotient(low: float, high: float) -> float:
        effective = [(min(x, high) if y >= 0 else max(x, low)) * y for x, y in zip(r, a, strict=True)]
        positive, negative = sum(max(x, 0) for x in effective), -sum(min(x, 0) for x in effective)
        return math.inf if negative <= 0 else positive / negative

    low, high, target = o.low, o.high, o.share / (1 - o.share)
    while quotient(low, high) < target and low < o.low_max:
        low = min(low + o.increment, o.low_max)
    while quotient(low, high) < target and high < o.high_max:
        high = min(high + o.increment, o.high_max)
    return low, high


def bounds(o: BalancedClipped, r: list[float], a: list[float]) -> tuple[float, float]:
    batch = packed(made("staleness", [math.log(x) for x in r], a))
    low, high = o.bounds(o.observe(batch.lp, batch.advantages, NO_INFO))
    return low.item(), high.item()


def test_the_search_is_that_of_the_official_code():
    draw, found = torch.Generator().manual_seed(0), set()
    for case in range(140):
        r = (0.6 * torch.randn(80, generator=draw, dtype=torch.float64)).exp().tolist()
        a = torch.randn(80, generator=draw, dtype=torch.float64) + 0.1 * (case % 7)
        got = bounds(DEFAULT, r, a.tolist())
        assert got == pytest.approx(official(r, a.tolist(), DEFAULT), rel=1e-9)
        found.add(tuple(round(x, 6) for x in got))
    assert len(found) > 6
    assert {low for low, _ in found} == {0.6, 0.9}, "a higher low counts for more, so the search goes through"
    assert (0.6, 1.2) in found
    assert (0.9, 3.0) in found


def test_bounds_by_hand():
    """P = min(2, high) against N = 1.5 max(r, low): 1.2 > 0.9 at once, 1.5 = 1.5 at high = 1.5, never 9."""
    assert bounds(DEFAULT, [2.0, 0.5], [1.0, -1.5]) == pytest.approx((0.6, 1.2))
    # A ratio of 1 is above all lower bounds: the upper one makes up for what is missing.
    assert bounds(DEFAULT, [2.0, 1.0], [1.0, -1.5]) == pytest.approx((0.9, 1.5))
    assert bounds(DEFAULT, [2.0, 1.0], [1.0, -9.0]) == pytest.approx((0.9, 3.0))
    assert bounds(DEFAULT, [2.0, 1.0], [-1.0, -1.0]) == pytest.approx((0.9, 3.0))  # a batch of failures
    assert bounds(DEFAULT, [2.0, 1.0], [1.0, 1.0]) == pytest.approx((0.6, 1.2))


def test_the_loss_is_ppo_at_those_bounds():
    r, a = [2.0, 1.0, 0.5, 1.0, 4.0], [1.0, -1.5, -0.1, 0.2, -0.05]
    low, high = official(r, a, DEFAULT)
    batch = packed(made("staleness", [math.log(x) for x in r], a))
    got = DEFAULT(batch.lp, batch.advantages, NO_INFO)
    expected = [max(-y * x, -y * min(max(x, low), high)) for x, y in zip(r, a, strict=True)]
    expected[4] = min(expected[4], 0.05 * 3)  # dual clip
    assert got.loss.tolist() == pytest.approx(expected)
    assert got.clipped.tolist() == [True, False, True, False, True]


def test_pieces_share_the_bounds_of_the_step():
    r, a = [2.0, 1.0, 0.7, 1.4], [1.0, -1.5, -1.0, 1.2]
    row: Method = method("bapo")
    whole = packed(made("staleness", [math.log(x) for x in r], a))
    parts = [packed(made("staleness", [math.log(x)], [y])) for x, y in zip(r, a, strict=True)]
    merged = seen(row, parts[0])
    for part in parts[1:]:
        merged = merged.merge(seen(row, part))
    total = policy_loss(whole.lp, row, whole.advantages, normalizer=1.0, batch_info=BatchInfo(observed="this_batch"))
    losses = [policy_loss(p.lp, row, p.advantages, BatchInfo(observed=merged), normalizer=1.0).loss for p in parts]
    assert sum(x.item() for x in losses) == pytest.approx(total.loss.item())
    alone = [policy_loss(p.lp, row, p.advantages).loss for p in parts]
    assert sum(x.item() for x in alone) != pytest.approx(total.loss.item(), rel=1e-3)


@pytest.mark.parametrize(
    "settings",
    [{"low": 0.95}, {"low_max": 1.1}, {"high": 0.9}, {"share": 1.0}, {"increment": 0.0}, {"dual_clip": 0.5}],
)
def test_settings_that_mean_nothing_are_refused(settings):
    with pytest.raises(MethodError):
        BalancedClipped(**settings)
