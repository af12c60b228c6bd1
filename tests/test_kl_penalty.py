"""The penalty as a composition: rewards, errors, formula, and the controllers of its coefficient."""

import inspect
import math

import pytest
import torch

from offdrift.errors import EvidenceError, MethodError, ShapeError
from offdrift.penalty import ESTIMATORS, Adaptive, Fixed, KLPenalty, exact_kl, kl_estimate, penalized_rewards
from offdrift.segments import Segments
from tests.oracles.fixtures import double
from tests.test_kl import CORRECTED, LOGITS, LOGP, REF, REF_PROBS, exactly

# -- rewards ---------------------------------------------------------------------------------------


def test_penalized_rewards_stand_on_the_last_token_and_skip_empty_sequences():
    s = Segments.from_lengths([0, 2, 0, 0, 1, 3, 0])
    rewards = double([7.0, 1.0, 8.0, math.nan, 2.0, 3.0, 9.0]).requires_grad_()
    kl = double([0.1, 0.2, 0.3, 0.4, 0.5, 0.6]).requires_grad_()
    got = penalized_rewards(rewards, s, kl, 0.5)
    exactly(got, [-0.05, 0.9, 1.85, -0.2, -0.25, 2.7])
    assert not got.requires_grad
    exactly(penalized_rewards(rewards, s, kl, 0), [0.0, 1.0, 2.0, 0.0, 0.0, 3.0])
    only_empty = Segments.from_lengths([0, 0])
    assert penalized_rewards(torch.ones(2), only_empty, torch.ones(0), 1.0).shape == (0,)


def test_rewards_and_kl_of_another_batch_are_refused():
    s = Segments.from_lengths([2, 1])
    with pytest.raises(ShapeError, match=r"'rewards': \(3,\), 'sequences': \(2,\)"):
        penalized_rewards(torch.ones(3), s, torch.ones(3), 1.0)
    with pytest.raises(ShapeError, match=r"'kl': \(2,\), 'tokens': \(3,\)"):
        penalized_rewards(torch.ones(2), s, torch.ones(2), 1.0)


# -- errors ----------------------------------------------------------------------------------------


def test_the_ratio_must_be_there_and_carry_its_gradient():
    leaf = LOGP.clone().requires_grad_()
    with pytest.raises(EvidenceError, match="needs log_ratio="):
        kl_estimate(leaf, REF, estimator=CORRECTED)
    detached = (leaf - 0.1).detach()
    with pytest.raises(MethodError, match="log_ratio has no gradient"):
        kl_estimate(leaf, REF, estimator=CORRECTED, log_ratio=detached)
    kl_estimate(leaf, REF, estimator=CORRECTED, log_ratio=detached, ratio_gradient=False)
    with torch.no_grad():
        kl_estimate(leaf, REF, estimator=CORRECTED, log_ratio=leaf - 0.1)


def plain(function):
    """The function without the run-time type checks of the test suite, as a user runs it."""
    return inspect.unwrap(function)


def test_tokens_of_different_batches_are_refused():
    with pytest.raises(ShapeError, match=r"'logp': \(3,\), 'logp_ref': \(2,\)"):
        plain(kl_estimate)(LOGP, REF[:2], estimator="k1")
    with pytest.raises(ShapeError, match=r"'log_ratio': \(1,\)"):
        plain(kl_estimate)(LOGP, REF, estimator=CORRECTED, log_ratio=REF[:1])
    with pytest.raises(ShapeError, match=r"'logits_ref': \(1, 2\)"):
        plain(exact_kl)(LOGITS[None], REF_PROBS[None, :2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"estimator": "k4"}, "estimator='k4' is not one of"),
        ({"place": "advantage"}, "place='advantage' is not one of"),
        ({"coef": -0.1}, "coef=-0.1 must be positive and finite"),
        ({"coef": math.inf}, "coef=inf must be positive and finite"),
        ({"coef": math.nan}, "coef=nan must be a number"),
        ({"coef": None}, "coef=None must be positive and finite"),
        ({"coef": "0.1"}, "coef='0.1' must be a number"),
        ({"value_limit": 0.0}, "value_limit=0.0 must be positive"),
        ({"value_limit": math.nan}, "value_limit=nan must be a number"),
        ({"estimator": CORRECTED, "cap": -1.0}, "cap=-1.0 must be positive"),
        ({"cap": 2.0}, "cap and ratio_gradient belong to k3_corrected, not to 'k3'"),
        ({"ratio_gradient": False}, "belong to k3_corrected, not to 'k3'"),
        ({"estimator": CORRECTED, "place": "reward"}, "in the reward use estimator="),
        ({"coef": 0.0, "controller": Adaptive(target=0.1, horizon=10)}, "coef=0.0 must be positive"),
    ],
)
def test_penalties_that_cannot_be_are_refused(options, message):
    with pytest.raises(MethodError, match=message):
        unchecked_penalty(**{"estimator": "k3", "coef": 0.1, **options})


def unchecked_penalty(**options) -> KLPenalty:
    """A penalty checked by its own checks alone: the suite's type checks would come first."""
    penalty = object.__new__(KLPenalty)
    defaults = {"place": "loss", "cap": None, "value_limit": None, "ratio_gradient": True}
    for name, value in {**defaults, "controller": None, **options}.items():
        object.__setattr__(penalty, name, value)
    plain(KLPenalty.__post_init__)(penalty)
    return penalty


def test_estimates_refuse_the_same_options():
    with pytest.raises(MethodError, match="belong to k3_corrected"):
        kl_estimate(LOGP, REF, estimator="k1", cap=2.0)
    with pytest.raises(MethodError, match="value_limit=-1"):
        kl_estimate(LOGP, REF, estimator="k1", value_limit=-1)


# -- the penalty -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "formula"),
    [
        ({"estimator": "k2", "coef": 0.001}, "loss + 0.001 k2"),
        ({"estimator": "k1", "coef": 1, "place": "reward"}, "reward - 1 k1"),
        (
            {"estimator": CORRECTED, "coef": 0.1, "cap": 2.0, "ratio_gradient": False},
            "loss + 0.1 k3_corrected (q <= 2, no gradient through q)",
        ),
        (
            {"estimator": "k3", "coef": 1e-3, "value_limit": 10.0, "controller": Adaptive(target=0.1, horizon=10_000)},
            "loss + 0.001 k3 (|value| <= 10, coef adapts to 0.1 nats)",
        ),
        ({"estimator": "k3", "coef": 0, "controller": Fixed()}, "loss + 0 k3"),
    ],
)
def test_formula_is_one_line_with_every_option(options, formula):
    penalty = KLPenalty(**options)
    assert penalty.formula == formula
    assert penalty.needs_ratio == (options["estimator"] == CORRECTED)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_penalty_is_the_unscaled_estimate_with_its_options(estimator):
    leaf = LOGP.clone().requires_grad_()
    ref = REF - 1.5
    options = {"value_limit": 0.5}
    if estimator == CORRECTED:
        options |= {"cap": 1.2, "ratio_gradient": False}
    ratio = leaf + double([1.0, 1.5, 2.0])
    penalty = KLPenalty(estimator=estimator, coef=7.0, **options)
    got = penalty(leaf, ref, ratio)
    expected = kl_estimate(leaf, ref, estimator=estimator, log_ratio=ratio, **options)
    assert torch.equal(got, expected)
    one, two = (torch.autograd.grad(x.sum(), leaf, retain_graph=True)[0] for x in (got, expected))
    assert torch.equal(one, two)
    bare = kl_estimate(leaf, ref, estimator=estimator, log_ratio=ratio)
    assert not torch.equal(got, bare)


# -- controllers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("kl", "expected"), [(0.5, 0.00100512), (0.105, 0.00100128), (0.05, 0.00099488)])
def test_adaptive_goldens(kl, expected):  # ctl.up, ctl.small, ctl.down
    got = Adaptive(target=0.1, horizon=10_000).next(0.001, kl=kl, samples=256)
    assert got == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("kl", [0.0, -1.0, 0.5, math.nan, math.inf])
def test_fixed_never_changes(kl):
    assert Fixed().next(0.001, kl=kl, samples=256) == 0.001


def test_adaptive_edges():
    adaptive = Adaptive(target=0.1, horizon=100)
    assert adaptive.next(0.5, kl=math.nan, samples=256) == 0.5
    assert adaptive.next(0.5, kl=0.1, samples=256) == 0.5
    assert adaptive.next(1.0, kl=math.inf, samples=100) == pytest.approx(1.2)
    assert adaptive.next(1.0, kl=-math.inf, samples=100) == pytest.approx(0.8)
    assert adaptive.next(1.0, kl=-5, samples=100) == pytest.approx(0.8)
    assert adaptive.next(0.5, kl=9.0, samples=0) == 0.5


def test_a_huge_step_leaves_the_coefficient_positive():
    adaptive = Adaptive(target=0.1, horizon=100)
    assert adaptive.next(1.0, kl=0.0, samples=490) == pytest.approx(0.02)  # not floored yet
    assert adaptive.next(1.0, kl=0.0, samples=500) == 0.01
    assert adaptive.next(1.0, kl=0.0, samples=10**9) == 0.01


@pytest.mark.parametrize("name", ["target", "horizon"])
@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf])
def test_adaptive_refuses_what_it_cannot_divide_by(name, value):
    with pytest.raises(MethodError, match=f"{name}="):
        Adaptive(**{"target": 0.1, "horizon": 100, name: value})
