"""Settings that cannot mean anything, and evidence that a batch lacks, are refused by name."""

import math

import pytest
import torch

from offdrift.batch_info import NO_INFO, BatchInfo
from offdrift.errors import EvidenceError, MethodError
from offdrift.logprobs import LogProbs
from offdrift.objectives.clipped import Clipped, EntropyGrouped, GeometricClipped, QuantizedClipped, Soft
from offdrift.objectives.covariance import CovClipped, CovPenalized
from offdrift.objectives.ewma import ProximalEwma
from offdrift.objectives.flipped import Flipped
from offdrift.objectives.prefix import PrefixClipped, PrefixMinClipped
from offdrift.objectives.prompt_dual import PromptDual
from offdrift.objectives.regression import Quadratic, Regression
from offdrift.objectives.second_moment import GroupClipped, SecondMomentClipped, VariancePenalized
from offdrift.objectives.turns import TurnNormalized
from tests.oracles.fixtures import double, fx_a

NAN = math.nan
REFUSED = {
    Clipped: [{"eps_low": 0.0}, {"eps_high": -1.0}, {"dual_clip": 1.0}],
    CovClipped: [{"on": "mismatch"}, {"fraction": 0.0}, {"eps_low": 0.0}, {"cov_low": 5.0}],
    CovPenalized: [{"fraction": 1.5}, {"coef": -1.0}, {"coef": NAN}],
    EntropyGrouped: [{"alpha": 0.0}, {"alpha": 1.5}, {"top_frac": 0.0}, {"top_frac": 1.1}],
    Flipped: [
        *({"eps_low": 0.0}, {"eps_high": -1.0}, {"dual_clip": 1.0}, {"eps_high_entropy": (1.5, 0.2)}),
        *({"entropy_quantile": 80.0}, {"on": "mismatch"}),
    ],
    GeometricClipped: [{"eps_low": 0.0}, {"eps_high": -1.0}, {"eps_high": NAN}],
    GroupClipped: [{"eps": 0.6}, {"eps": 0.0}, {"reference": 0.0}],
    PrefixClipped: [{"eps_low": 0.0}, {"eps_high": NAN}, {"dual_clip": -0.1}, {"growth": -1.0}],
    PrefixMinClipped: [{"eps_low": 1.5}, {"eps_high": 0.0}],
    PromptDual: [{"radius": 0.0}, {"floor": -1.0}, {"multiplier": -0.1}],
    ProximalEwma: [{"eps": 0.0}, {"eps": 1.0}, {"limit": 1.0}],
    Quadratic: [{"beta": 0.0}, {"beta": -1.0}, {"on": "mismatch"}],
    QuantizedClipped: [{"eps_low": 0.0}, {"eps_low": 1.1}, {"eps_high": -1.0}, {"cap": 0.0}, {"cap": NAN}],
    Regression: [{"beta": 0.0}, {"beta_value": -1.0}],
    SecondMomentClipped: [
        {"on": "mismatch"},
        {"budget": 0.0},
        {"budget": NAN},
        {"floor_low": 1.5},
        {"floor_high": -0.1},
    ],
    Soft: [{"tau_positive": 0.0}, {"tau_negative": -1.0}, {"on": "mismatch"}],
    TurnNormalized: [{"eps_low": 0.0}, {"eps_low": 1.0}, {"eps_high": -1.0}, {"unit": "sequence"}, {"mode": "renorm"}],
    VariancePenalized: [{"penalty": -0.1}, {"step": -1.0}, {"target": -0.01}],
}


@pytest.mark.parametrize(("make", "settings"), [(make, parts) for make, many in REFUSED.items() for parts in many])
def test_settings_that_cannot_mean_anything_are_refused(make, settings):
    with pytest.raises(MethodError, match=next(iter(settings))):
        make(**settings)


REWARDS = double([1.0, 0.0])
LACKING = [
    (EntropyGrouped(), BatchInfo(vocab=1000), "entropy"),
    (EntropyGrouped(), BatchInfo(entropy=torch.ones(7).double()), "vocab"),
    (Flipped(eps_high_entropy=(0.4, 0.4)), NO_INFO, "entropy"),
    (GroupClipped(), NO_INFO, "group_ids"),
    (PromptDual(), BatchInfo(rewards=REWARDS), "group_ids"),
    (Regression(), BatchInfo(rewards=REWARDS), "group_ids"),
    (PromptDual(), NO_INFO, "rewards"),
    (Regression(), NO_INFO, "rewards"),
    (ProximalEwma(), NO_INFO, "logp_old"),
    (QuantizedClipped(), NO_INFO, "logp_old"),
]


@pytest.mark.parametrize(("objective", "batch_info", "lacks"), LACKING)
def test_what_the_batch_must_carry_is_named(objective, batch_info, lacks):
    lp, advantages, _ = fx_a()
    if lacks == "rewards":
        lp = LogProbs.pack(lp.logp_rollout, lp.logp, lp.old, segments=lp.segments, group_ids=torch.tensor([3, 3]))
    if lacks == "logp_old":
        assert objective.needs_old
        lp = LogProbs.pack(lp.logp_rollout, lp.logp, segments=lp.segments)
    if lacks in ("entropy", "vocab", "rewards"):
        assert lacks in objective.needs
    with pytest.raises(EvidenceError, match=lacks):
        objective(lp, advantages, batch_info)


@pytest.mark.parametrize("objective", [TurnNormalized(), SecondMomentClipped(), CovClipped()])
def test_what_is_observed_of_advantages_needs_them(objective):
    with pytest.raises(MethodError, match="advantages"):
        objective.observe(fx_a()[0], None, NO_INFO)


def test_what_a_setting_makes_unnecessary_is_not_asked_for():
    lp, advantages, _ = fx_a()
    assert Flipped().needs == PromptDual(multiplier=0.0).needs == ()
    assert PromptDual(multiplier=0.0).observe(lp, advantages, NO_INFO) == {}
