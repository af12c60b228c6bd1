"""A clip stops only the push that leads further out; what no clip limits keeps its push.

One token per sequence, so that every unit is a token, and each alone in its step.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from offdrift.correction import Correction
from offdrift.laws.batches import VOCAB, Run, packed, run
from offdrift.methods import METHODS, Method
from offdrift.objectives import Clipped, ImportanceSampled, Reinforce
from offdrift.objectives.clipped import EntropyGrouped, GeometricClipped, QuantizedClipped, Soft
from offdrift.objectives.covariance import CovClipped, CovPenalized
from offdrift.objectives.ewma import ProximalEwma
from offdrift.objectives.flipped import Flipped
from offdrift.objectives.preference import Classified, Preference
from offdrift.objectives.prefix import PrefixClipped, PrefixMinClipped
from offdrift.objectives.prompt_dual import PromptDual
from offdrift.objectives.regression import Quadratic, Regression
from offdrift.objectives.reinforce import ProjectedSurrogate
from offdrift.objectives.second_moment import BalancedClipped, GroupClipped, SecondMomentClipped, VariancePenalized
from offdrift.objectives.turns import TurnNormalized
from tests.laws.definitions import edge_of_ball, pull_to_ball
from tests.laws.handmade import made

TINY = 1e-7


class Range(NamedTuple):
    """Ratios of one token between which no push is stopped."""

    low: float
    high: float
    negatives_above: float | None = None
    """Where a negative advantage stops pushing a large ratio down; None for never."""


def ppo(o: Any) -> Range:
    both = getattr(o, "negatives", "low") == "both"
    dual = 1 + o.eps_high if both else getattr(o, "dual_clip", None)
    return Range(1 - o.eps_low, 1 + o.eps_high, dual)


def second_moment(o: SecondMomentClipped) -> Range | None:
    """One harmful token beyond the budget leaves tau = 0, and so the floors."""
    if o.scope == "all_drop_largest":
        return None
    return Range(1 - o.floor_low, 1 + o.floor_high)


def prefix(o: PrefixClipped) -> Range:
    dual = None if o.dual_clip is None else math.exp(o.dual_clip)
    return Range(math.exp(-o.eps_low), math.exp(o.eps_high), dual)


def turn(o: TurnNormalized) -> Range:
    """Renormalizing divides a lone token by its own clipped ratio, so it takes twice the distance."""
    power = 2 if o.mode == "renorm" else 1
    return Range((1 - o.eps_low) ** power, (1 + o.eps_high) ** power)


def entropy(o: EntropyGrouped) -> Range:
    """The entropy of these tokens is 1 nat."""
    eps = o.alpha / math.log(VOCAB)
    return Range(1 - eps, 1 + eps)


CLIPS: dict[type, Callable[[Any], Range | None]] = {
    Clipped: ppo,
    CovClipped: ppo,
    PrefixMinClipped: ppo,
    QuantizedClipped: ppo,
    PrefixClipped: prefix,
    ProximalEwma: lambda o: Range(1 - o.eps, 1 + o.eps),
    GeometricClipped: lambda o: Range(math.exp(-o.eps_low), math.exp(o.eps_high)),
    # The ratio of a single token has variance 0, which doubles the width.
    GroupClipped: lambda o: Range(1 - 2 * o.eps, 1 + 2 * o.eps),
    SecondMomentClipped: second_moment,
    TurnNormalized: turn,
    EntropyGrouped: entropy,
    # One token that gains carries all at the first bounds; one that loses never carries its share.
    BalancedClipped: lambda o: Range(o.low_max, o.high, o.dual_clip),
    # Beyond its dual clip a negative push is bounded, not stopped.
    Flipped: lambda o: Range(1 - o.eps_low, 1 + o.eps_high),
}
"""Objectives that clip, and between which ratios of one token they do not."""

NEVER_STOP: dict[type, str] = {
    Reinforce: "contains no ratio; a truncated weight changes the size of a push, and only a mask ends it",
    Soft: "fades",
    VariancePenalized: "a penalty instead of a clip",
    CovPenalized: "a penalty on a chosen token instead of a clip",
    PromptDual: "a pull instead of a clip",
    Quadratic: "a pull instead of a clip",
    Regression: "fits its target from either side",
}
"""Objectives that keep a gradient by design, and how they limit drift instead."""

COMPARES = {
    Preference: "pushes the answers of a pair apart, and never stops; a token alone is in no pair",
    Classified: "pushes two classes of answers apart, and never stops; a token alone is in one class",
}

PROJECTS = {ProjectedSurrogate: "stops what moves along the path from the old policy, and nothing else"}

CAPPED = {ImportanceSampled: "a cap ends the push of either sign above it, a shape makes it small"}


def free_of_gates(row: Method) -> Method:
    """Without gates and masks, which have laws of their own, and without what pulls or anchors."""
    weights = tuple(w for w in row.correction.weights if getattr(w, "outside", "") != "mask")
    return replace(row, correction=Correction(weights=weights), anchor=None, penalty=None)


def alone(row: Method, r: float, a: float) -> Run:
    """One token as a whole step; small advantages, so that ST-PPO does not divide."""
    on = row.objective.on if row.objective.on in ("staleness", "full") else "staleness"
    if isinstance(row.objective, QuantizedClipped | ProximalEwma):
        on = "staleness"
    return run(free_of_gates(row), packed(made(on, [math.log(r)], [a], aside=0.0)))


def names(*kinds: dict) -> list[str]:
    return [n for n, row in METHODS.items() if any(type(row.objective) in k for k in kinds)]


CLIPPING = [n for n in names(CLIPS) if CLIPS[type(METHODS[n].objective)](METHODS[n].objective)]


@pytest.mark.parametrize("name", CLIPPING)
def test_a_clip_stops_only_the_outward_push(name):
    row = METHODS[name]
    limits = CLIPS[type(row.objective)](row.objective)
    above, below = limits.high * (1 + TINY), limits.low * (1 - TINY)
    for r in (above, 1.2 * limits.high):
        check_stopped(row, r, 0.5)
        if limits.negatives_above is None or r < limits.negatives_above:
            check_pushes(row, r, -0.5)
    for r in (below, 0.9 * limits.low):
        check_stopped(row, r, -0.5)
        check_pushes(row, r, 0.5)
    if limits.negatives_above is not None:
        check_stopped(row, limits.negatives_above * (1 + TINY), -0.5)
        check_stopped(row, limits.negatives_above * 3, -0.5)
        check_pushes(row, limits.negatives_above * (1 - TINY), -0.5)
    else:
        check_pushes(row, limits.high * 3, -0.5)


@pytest.mark.parametrize("name", CLIPPING)
def test_inside_the_range_nothing_is_stopped(name):
    row = METHODS[name]
    limits = CLIPS[type(row.objective)](row.objective)
    for r in (limits.high * (1 - TINY), 1.0, limits.low * (1 + TINY)):
        for a in (0.5, -0.5):
            check_pushes(row, r, a)


def check_stopped(row: Method, r: float, a: float) -> None:
    got = alone(row, r, a)
    assert got.grad.tolist() == [0.0]
    assert got.result.stats.to_host()["objective/clipped"] == 1


def check_pushes(row: Method, r: float, a: float) -> None:
    """A gradient descent step moves log pi the way of the advantage, and nothing counts as clipped."""
    got = alone(row, r, a)
    assert float(got.grad) * a < 0
    flipped = isinstance(row.objective, Flipped)  # its soft dual clip changes the size of a push
    assert flipped or got.result.stats.to_host()["objective/clipped"] == 0


@pytest.mark.parametrize("name", [n for n in names(CLIPS) if n not in CLIPPING])
def test_a_mask_drops_both_signs(name):
    """m2po_drop: the token of larger |log r| goes, whichever way it is pushed."""
    objective = METHODS[name].objective
    assert isinstance(objective, SecondMomentClipped)
    for a in (0.5, -0.5):
        for far in (0.6, -0.6):
            batch = made("staleness", [far, 0.01], [a, a], aside=0.0)
            got = run(METHODS[name], packed(batch)).grad
            assert got[0] == 0
            assert float(got[1]) * a < 0


@pytest.mark.parametrize("name", names(CAPPED))
def test_a_cap_ends_the_push_of_either_sign(name):
    row = METHODS[name]
    cap, c = row.objective.cap, row.objective.saturation  # type: ignore[attr-defined]
    pull = 2 * row.objective.pull  # type: ignore[attr-defined]
    for r in (0.05, 0.9, 1.0, 1.9, 2.1, 2.9, 3.1, 30.0):
        for a in (0.5, -0.5):
            got = float(alone(row, r, a).grad)
            slope = 1.0 if c is None else c / (r + c) ** 2
            expected = 0.0 if cap is not None and r > cap else -a * r * slope
            assert got == pytest.approx(expected + pull * math.log(r), rel=1e-9, abs=0)


@pytest.mark.parametrize("name", names(NEVER_STOP))
def test_what_does_not_clip_keeps_its_push(name):
    """At ratios where PPO would have stopped; vanishing kernels are small there, never 0."""
    row = METHODS[name]
    for r in (0.3, 0.75, 1.3, 3.0):
        for a in (0.5, -0.5):
            got = alone(row, r, a)
            assert float(got.grad) != 0
            if isinstance(row.objective, Reinforce | Soft):
                assert float(got.grad) * a < 0
            assert "objective/clipped" not in got.result.stats.to_host()


@pytest.mark.parametrize("name", names(COMPARES))
def test_what_compares_answers_does_nothing_to_one_alone(name):
    assert alone(METHODS[name], 1.3, 0.5).grad.tolist() == [0.0]


@pytest.mark.parametrize("name", names(PROJECTS))
def test_a_projection_stops_either_sign_at_the_edge_of_its_ball_and_pulls_back(name):
    """Of a vocabulary of two there is no other direction than the path."""
    objective, q = METHODS[name].objective, made("staleness", [0.0], [0.5], aside=0.0).tokens["old"].exp().item()
    assert isinstance(objective, ProjectedSurrogate)
    edges = [edge_of_ball(q, far, objective.bound) / q for far in (1e-6, 0.999)]
    for a in (0.5, -0.5):
        for r in (edges[0] * (1 + TINY), 1.0, edges[1] * (1 - TINY)):
            check_pushes(METHODS[name], r, a)
        for r in (edges[0] * 0.9, edges[1] * 1.1):
            got = alone(METHODS[name], r, a)
            assert got.grad.item() == pytest.approx(pull_to_ball(q, q * r, objective.bound), rel=1e-9)
            assert got.grad.item() * (r - 1) > 0, "a step leads back"
            assert got.result.stats.to_host()["objective/clipped"] == 1


def test_every_objective_is_of_one_kind():
    kinds = [set(CLIPS), set(NEVER_STOP), set(CAPPED), set(COMPARES), set(PROJECTS)]
    assert sum(map(len, kinds)) == len(set.union(*kinds))
    assert {type(row.objective) for row in METHODS.values()} == set.union(*kinds)
    assert len(CLIPPING) > 50
