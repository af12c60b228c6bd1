"""How much a token counts: exact weights below, at and above each limit of each weight of each row."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from offdrift.correction import Correction, FutureWeight, SignWeight, SurprisalWeight, VariationalWeight, Weight
from offdrift.laws.batches import Run, packed, run
from offdrift.methods import METHODS
from tests.laws.handmade import made
from tests.oracles.fixtures import double

TINY = 1e-9
ALL = [(n, i, w) for n, row in METHODS.items() for i, w in enumerate(row.correction.weights)]
WEIGHTS = [(n, i) for n, i, w in ALL if isinstance(w, Weight)]
KERNELS = [(n, i) for n, i, w in ALL if isinstance(w, VariationalWeight)]
every_weight = pytest.mark.parametrize(("name", "i"), WEIGHTS)

L = [0.1, -0.3, 0.5, -0.2]
TURNS = [[2, 2]]
UNITS = {
    "token": [0.1, -0.3, 0.5, -0.2],
    "prefix": [0.1, -0.2, 0.3, 0.1],  # sums up to each token
    "prefix_min": [0.1, -0.2, 0.2, -0.5],  # each plus the least before it: 0, 0.1, -0.3, -0.3
    "turn": [-0.1, -0.1, 0.15, 0.15],  # means of 0.1, -0.3 and of 0.5, -0.2
    "sequence": [0.1, 0.1, 0.1, 0.1],  # the sum of all
    "geometric": [0.025, 0.025, 0.025, 0.025],  # a quarter of it
}
"""Log-ratio of the unit of each of four tokens, by hand."""


def weighed(name: str, weight: Any, batch, *, reward: float | None = None) -> Run:
    """The row with one of its weights alone, and as it says where the old policy is.

    Sequences are those that the weight is about, unless a reward is given.
    """
    if reward is None:
        reward = -0.5 if getattr(weight, "outcome", "any") == "incorrect" else 0.5
    batch = replace(batch, rewards=torch.full_like(batch.rewards, reward))
    row = replace(METHODS[name], correction=Correction(weights=(weight,)), anchor=None)
    return run(row, packed(batch))


def applies(weight: Weight, a: float) -> bool:
    return {"any": True, "positive": a > 0, "negative": a < 0}[weight.advantage]


def size(weight: Weight, raw: float) -> float:
    """What a ratio becomes: truncated to its limit, or nothing, beyond it."""
    truncates = weight.outside == "truncate"
    if weight.cap is not None and raw > weight.cap:
        raw = weight.cap if truncates else 0.0
    elif weight.floor is not None and raw < weight.floor:
        raw = weight.floor if truncates else 0.0
    return raw if weight.saturation is None else raw / (raw + weight.saturation)


def trust(weight: Weight, log_ratio: torch.Tensor) -> torch.Tensor:
    """The Gaussian factor of log-ratios; 1 of a weight without one."""
    if weight.gaussian is None:
        return torch.ones_like(log_ratio)
    return (-(log_ratio**2) / (2 * weight.gaussian**2)).exp()


def ratios(weight: Weight) -> list[float]:
    """Far and just outside, just and far inside of each limit, and 1."""
    floor, cap = weight.floor or 1e-4, weight.cap or 400.0
    near = [floor * (1 - TINY), floor * (1 + TINY), cap * (1 - TINY), cap * (1 + TINY)]
    return [floor / 3, *near, math.sqrt(floor * cap), 1.0, 3 * cap]


@every_weight
def test_a_cap_is_a_cap_and_a_floor_is_a_floor(name, i):
    """Units of one token, for either sign of the advantage and without one."""
    weight = METHODS[name].correction.weights[i]
    cases = [(x, a) for x in ratios(weight) for a in (1.0, -1.0, 0.0)]
    batch = made(weight.on, [math.log(x) for x, _ in cases], [a for _, a in cases], aside=0.01)
    sizes = [size(weight, x) * float(trust(weight, double(math.log(x)))) for x, _ in cases]
    mean = sum(sizes) / len(sizes) if weight.normalize else 1.0
    expected = [s / mean if applies(weight, a) else 1.0 for s, (_, a) in zip(sizes, cases)]
    got = weighed(name, weight, batch).result.corrected
    torch.testing.assert_close(got.weight, double(expected), rtol=1e-12, atol=1e-15)
    outside = [
        applies(weight, a)
        and ((weight.cap is not None and x > weight.cap) or (weight.floor is not None and x < weight.floor))
        for x, a in cases
    ]  # fmt: skip
    assert got.limited.tolist() == outside
    assert len(cases) == 24


@pytest.mark.parametrize(("name", "i"), [(n, i) for n, i, w in ALL if getattr(w, "outside", "") == "mask"])
def test_a_ratio_on_the_limit_of_a_mask_is_inside(name, i):
    """Limits are inclusive, and compared as logs, so that rounding cannot mask the limit itself."""
    weight = METHODS[name].correction.weights[i]
    one, two = {"mismatch": ("mu", "old"), "staleness": ("old", "pi"), "full": ("mu", "pi")}[weight.on]
    for limit in (weight.floor, weight.cap):
        if limit is None:
            continue
        batch = made(weight.on, [0.0], [1.0], aside=0.0)
        zero, x = double([0.0]), math.log(limit)
        batch = batch.with_tokens(mu=zero, old=zero, pi=zero)
        batch = batch.with_tokens(**{one if x > 0 else two: zero - abs(x)})  # exactly the limit's log
        got = weighed(name, weight, batch).result.corrected
        assert got.weight.tolist() == pytest.approx([limit], rel=1e-12)


@every_weight
def test_a_weight_is_taken_over_its_unit(name, i):
    """Without limits, on one sequence of two turns."""
    weight = replace(METHODS[name].correction.weights[i], cap=None, floor=None, normalize=False)
    expected = double(UNITS[weight.unit]).exp()
    if weight.saturation is not None:
        expected = expected / (expected + weight.saturation)
    expected = expected * trust(weight, double(UNITS[weight.unit]))
    for a in (1.0, -1.0):
        got = weighed(name, weight, made(weight.on, L, [a] * 4, turns=TURNS, aside=0.01))
        wanted = expected if applies(weight, a) else torch.ones(4, dtype=torch.float64)
        torch.testing.assert_close(got.result.corrected.weight, wanted, rtol=1e-12, atol=0)


@every_weight
def test_a_weight_beyond_twenty_nats_stays_there(name, i):
    weight = replace(METHODS[name].correction.weights[i], cap=None, floor=None, normalize=False)
    got = weighed(name, weight, made(weight.on, [25.0, -25.0], [-1.0, -1.0], aside=0.0))
    expected = double([20.0, -20.0]).exp()
    if weight.saturation is not None:
        expected = expected / (expected + weight.saturation)
    expected = expected * trust(weight, double([20.0, -20.0]))
    if not applies(weight, -1.0):
        expected = torch.ones(2, dtype=torch.float64)
    torch.testing.assert_close(got.result.corrected.weight, expected, rtol=1e-12, atol=0)


GROWING = [(n, i) for n, i in WEIGHTS if METHODS[n].correction.weights[i].growth]


@pytest.mark.parametrize(("name", "i"), GROWING)
def test_growing_limits_widen_with_the_position(name, i):
    """A prefix that is out of bounds at once stays at limit^(t^growth) until these reach it."""
    weight = METHODS[name].correction.weights[i]
    assert weight.unit == "prefix"
    assert weight.growth == 0.5
    for limit in (weight.cap, weight.floor):
        # twice the first limit, in nats: t^0.5 reaches 2 at t = 4
        l = [2 * math.log(limit) * (1 - TINY), 0.0, 0.0, 0.0, 0.0]  # noqa: E741
        got = weighed(name, weight, made(weight.on, l, [1.0] * 5, lengths=[5])).result.corrected
        expected = [limit, limit**1.4142135623730951, limit**1.7320508075688772, limit**2, limit**2]
        torch.testing.assert_close(got.weight, double(expected), rtol=1e-7, atol=0)
        assert got.limited.tolist() == [True, True, True, False, False]


OUTCOMES = [(n, i) for n, i in WEIGHTS if METHODS[n].correction.weights[i].outcome != "any"]


@pytest.mark.parametrize(("name", "i"), OUTCOMES)
def test_a_weight_of_one_outcome_leaves_the_other_alone(name, i):
    """A reward on the line is not above it."""
    weight = METHODS[name].correction.weights[i]
    a = -1.0 if weight.advantage == "negative" else 1.0
    line, x = weight.correct_above, math.log(500.0)
    for reward, correct in ((line + 1e-6, True), (line, False), (line - 1, False)):
        about = correct == (weight.outcome == "correct")
        batch = made(weight.on, [x, x], [a, a], lengths=[1, 1])
        got = weighed(name, weight, batch, reward=reward).result.corrected
        expected = size(weight, 500.0) if about else 1.0
        assert got.weight.tolist() == pytest.approx([expected, expected], rel=1e-12)
        assert got.limited.tolist() == [about, about]


@pytest.mark.parametrize(("name", "i"), KERNELS)
def test_the_kernel_of_a_sequence(name, i):
    """exp(lam + k l - lam e^l), with (k, lam) = (2, 3) where A >= 0 and (3, 2) where A < 0."""
    weight = METHODS[name].correction.weights[i]
    assert weight == VariationalWeight()
    for a, k, lam in ((1.0, 2, 3), (0.0, 2, 3), (-1.0, 3, 2)):
        l = [-1.0, 0.0, 0.5, 1.0, -6.0, 4.0]  # noqa: E741
        expected = double([math.exp(lam + k * x - lam * math.exp(x)) for x in l])
        got = weighed(name, weight, made("staleness", l, [a] * 6, aside=0.0)).result.corrected
        torch.testing.assert_close(got.weight, expected, rtol=1e-12, atol=0)
        assert got.limited.tolist() == (expected < 1e-3).tolist()
        # Two tokens add up, and a mismatch counts no more than log 2 per token.
        sums = made("mismatch", [0.9, -0.4], [a] * 2, lengths=[2], aside=0.1)
        x = math.log(2) - 0.4 + 2 * 0.1
        wanted = math.exp(lam + k * x - lam * math.exp(x))
        both = weighed(name, weight, sums).result.corrected.weight.tolist()
        assert both == pytest.approx([wanted, wanted], rel=1e-12)


def test_every_weight_of_the_table_was_looked_at():
    others = [w for _, _, w in ALL if not isinstance(w, Weight | VariationalWeight)]
    assert {type(w) for w in others} == {FutureWeight, SignWeight, SurprisalWeight}, (
        "tests/correction/test_influence.py"
    )
    assert len(WEIGHTS) + len(KERNELS) + len(others) == len(ALL) >= 40
    assert len(GROWING) >= 1
    assert {w.outside for _, _, w in ALL if isinstance(w, Weight)} == {"truncate", "mask"}
    conditions = {w.advantage for _, _, w in ALL if isinstance(w, Weight)}
    assert conditions == {"any", "positive", "negative"}
    assert {METHODS[n].correction.weights[i].outcome for n, i in OUTCOMES} == {"correct", "incorrect"}
