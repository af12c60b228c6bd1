"""What a row does to log pi: plain importance sampling without limits, its formula inside them."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from offdrift.correction import (
    Correction,
    FollowingGate,
    FutureWeight,
    Gate,
    LengthNeutralGate,
    RandomGate,
    SignWeight,
    Weight,
)
from offdrift.laws.batches import Batch, draw, packed, run
from offdrift.methods import METHODS, Method
from offdrift.objectives import Clipped, ImportanceSampled, Reinforce
from offdrift.objectives.clipped import GeometricClipped, QuantizedClipped
from offdrift.objectives.covariance import CovClipped, CovPenalized
from offdrift.objectives.prefix import PrefixClipped, PrefixMinClipped
from offdrift.objectives.reinforce import ProjectedSurrogate
from offdrift.objectives.second_moment import BalancedClipped, SecondMomentClipped, VariancePenalized
from offdrift.objectives.turns import TurnNormalized
from tests.laws.definitions import Matrix, Sequence, diagonal, gradient, ratio_push, sequences_of
from tests.laws.formulas import PUSH, covariances, outward, pushes
from tests.laws.reach import within_reach
from tests.laws.rows import ROWS

SEEDS = range(4)
FAR, NEAR = 1e9, 1e-12

NO_LIMITS: dict[type, dict[str, Any]] = {
    Reinforce: {},
    ImportanceSampled: {"cap": None, "saturation": None, "pull": 0.0},
    Clipped: {"eps_low": 1.0, "eps_high": FAR, "dual_clip": None, "negatives": "low"},
    PrefixClipped: {"eps_low": FAR, "eps_high": FAR, "dual_clip": None},
    PrefixMinClipped: {"eps_low": 1.0, "eps_high": FAR},
    GeometricClipped: {"eps_low": FAR, "eps_high": FAR},
    QuantizedClipped: {"eps_low": 1.0, "eps_high": FAR, "cap": FAR},
    SecondMomentClipped: {"budget": FAR},
    BalancedClipped: {"low": 0.0, "low_max": 0.0, "high": FAR, "high_max": FAR, "dual_clip": None},
    TurnNormalized: {"eps_low": 1 - NEAR, "eps_high": FAR},
    CovClipped: {"eps_low": 1.0, "eps_high": FAR, "cov_high": FAR, "cov_low": FAR / 2},
    CovPenalized: {"coef": 0.0},
    VariancePenalized: {"penalty": 0.0},
    ProjectedSurrogate: {"bound": FAR},
}
"""Objectives that are plain importance sampling once these numbers are far away."""

OTHER_FORM = {
    "sapo": "a sigmoid of the ratio, whatever its parameters",
    "aspo": "1 / ratio where the advantage is positive",
    "dro": "no ratio, and a pull that its parameter cannot be without",
    "quatro": "ratio times (A - price * log-ratio), the price found from rewards",
    "oapl": "regression on rewards",
    "online_dpo": "a loss of pairs",
    "espo": "ratios of entropy groups, whose width is bounded by the entropy",
    "r2vpo_clip": "a clip whose width is at most 0.5",
    "ppo_ewma": "one width for both sides, below 1: a positive push always stops at ratio 2",
    "vespo": "a kernel that vanishes in both tails",
    "asympo": "divided by the answer's surprisal, whatever its parameters",
    "real": "a logistic loss of two classes",
}
"""Rows that no parameter turns into importance sampling: their published formula is asserted."""


def free_gate(gate: Any) -> Any:
    """A gate that rejects nothing."""
    if isinstance(gate, LengthNeutralGate):
        return replace(gate, high=FAR)
    if isinstance(gate, FollowingGate):
        return replace(gate, width=FAR)
    if isinstance(gate, RandomGate):
        return replace(gate, limit=NEAR)
    assert isinstance(gate, Gate), f"say which limits of {type(gate).__name__} are no limits"
    low = 1e-300 if gate.statistic == "ratio" else -FAR
    return replace(gate, low=None if gate.low is None else low, high=None if gate.high is None else FAR)


def free_weight(weight: Any) -> Any:
    """A weight that is the ratio itself; 1 of one that corrects for none."""
    if isinstance(weight, FutureWeight):
        return replace(weight, floor=1.0, cap=1.0, harmful_above=None)
    if isinstance(weight, SignWeight):
        return SignWeight()
    assert isinstance(weight, Weight), f"say which limits of {type(weight).__name__} are no limits"
    return replace(weight, cap=None, floor=None, saturation=None, gaussian=None, normalize=False)


def without_limits(row: Method) -> Method:
    assert type(row.objective) in NO_LIMITS, (
        f"{type(row.objective).__name__} needs its limits in NO_LIMITS, or its row a reason in OTHER_FORM"
    )
    return replace(
        row,
        objective=replace(row.objective, **NO_LIMITS[type(row.objective)]),
        correction=Correction(
            tuple(map(free_gate, row.correction.gates)), tuple(map(free_weight, row.correction.weights))
        ),
    )


def plain_push(objective: Any, step: list[Sequence]) -> list[Matrix]:
    """The push of -A log pi or -A u, for the ratio that each objective is about."""
    if objective.on is None:
        return [diagonal([-a for a in s.a]) for s in step]
    unit = {PrefixClipped: "prefix", PrefixMinClipped: "prefix_min", GeometricClipped: "geometric"}.get(
        type(objective), getattr(objective, "unit", "token")
    )
    return [ratio_push(s, objective.on, unit, objective.gradient) for s in step]


@pytest.mark.parametrize("name", [n for n in METHODS if n not in OTHER_FORM])
def test_without_limits_it_is_plain_importance_sampling(name):
    row = without_limits(METHODS[name])
    compared = 0
    for seed in SEEDS:
        # GMPO takes tokens without advantage out of its mean, so its sequences have one number each.
        batch = draw(seed, per_token=not isinstance(row.objective, GeometricClipped))
        got = run(row, packed(batch))
        assert got.keep.all()
        expected = gradient(row, sequences_of(batch), plain_push, got.keep)
        torch.testing.assert_close(got.grad, expected, rtol=1e-9, atol=1e-12)
        compared += got.grad.numel()
    assert compared > 80


WITHOUT_FORMULA = (
    "clip_cov, a tenth",
    "m2po, exact",
    "aspo, by entropy",
    "kl_cov, k2",
    "kl_cov, k3",
    "oapl, geometric",
    "quatro, fixed",
)
"""Variants that `formulas` does not write down; `tests/objectives` has their closed forms."""


@pytest.mark.parametrize("name", [n for n in ROWS if n not in WITHOUT_FORMULA])
def test_inside_its_limits_it_is_its_formula(name):
    """Gates are taken from the run: what they decide has a law of its own (`test_membership`)."""
    row, compared, gone = ROWS[name], 0, 0
    for seed in range(12) if row.observers else SEEDS:  # statistics of a step seldom decide
        batch = larger(draw(seed, per_token=seed % 2 == 0), row)
        got = run(row, packed(batch))
        expected = gradient(row, sequences_of(batch), pushes, got.keep)
        if type(row.objective) is CovClipped:
            full, expected = expected, left_out(row.objective, batch, got.grad, expected)
            gone += int((full != expected).sum())
        torch.testing.assert_close(got.grad, expected, rtol=1e-9, atol=1e-12)
        compared += got.grad.numel()
    assert compared > 80
    assert (gone > 3) == (type(row.objective) is CovClipped)


def larger(batch: Batch, row: Method) -> Batch:
    """ST-PPO divides only where what was clipped has a length above 1."""
    big = 6.0 if isinstance(row.objective, TurnNormalized) else 1.0
    return batch.with_tokens(a=big * batch.tokens["a"])


def left_out(o: CovClipped, batch: Batch, got: torch.Tensor, expected: torch.Tensor):
    """The formula, with the loss of some candidates of high covariance gone by chance."""
    step = sequences_of(batch)
    candidates = [
        o.cov_low < c < o.cov_high and not outward(math.exp(x), a, 1 - o.eps_low, 1 + o.eps_high)
        for q, cov in zip(step, covariances(step))
        for c, x, a in zip(cov, q.l(o.on), q.a)
    ]
    gone = (got == 0) & (expected != 0)
    wanted = min(max(1, int(o.fraction * len(candidates))), sum(candidates))
    # Leaving out a candidate without advantage cannot be seen.
    silent = [c and e == 0 for c, e in zip(candidates, expected.tolist())]
    assert int(gone.sum()) == wanted or (any(silent) and not gone.any())
    assert all(candidates[i] for i in gone.nonzero().flatten())
    return expected.where(~gone, 0.0)


def test_every_row_is_of_one_form_or_the_other():
    plain = {n for n, row in METHODS.items() if n not in OTHER_FORM}
    assert plain | set(OTHER_FORM) == set(METHODS)
    for name in plain:
        assert type(METHODS[name].objective) in NO_LIMITS, name
    for name, reason in OTHER_FORM.items():
        row = METHODS[name]
        special = [w for w in row.correction.weights if not isinstance(w, Weight)]
        assert type(row.objective) not in NO_LIMITS or special, f"{name}: {reason}"
    assert {type(row.objective) for row in METHODS.values()} <= set(PUSH)


@pytest.mark.slow
def test_the_random_batches_reach_the_limits_of_every_row():
    """Otherwise the formulas above would agree without any gate, cap or clip at work."""
    for name in METHODS:
        row = within_reach(name)
        runs = [run(row, packed(draw(seed, per_token=seed % 2 == 0))) for seed in range(4)]
        total = sum(len(r.keep) for r in runs)
        if row.correction.gates:
            assert 0.02 < sum(int(r.keep.sum()) for r in runs) / total < 0.999, name
        if any(getattr(w, "cap", None) for w in row.correction.weights):
            assert 0 < sum(int(r.result.corrected.limited.sum()) for r in runs) < total, name
        clipped = [r.result.stats.to_host().get("objective/clipped") for r in runs]
        if None not in clipped:
            assert 0 < sum(clipped) < total, name  # type: ignore[arg-type]
