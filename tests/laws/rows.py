"""What the laws hold for: every row of the method table, and objectives with settings that no row has."""

from offdrift.methods import METHODS, Method
from offdrift.objectives.clipped import EntropyGrouped, GeometricClipped, QuantizedClipped, Soft
from offdrift.objectives.covariance import CovClipped, CovPenalized
from offdrift.objectives.flipped import Flipped
from offdrift.objectives.preference import Classified, Preference
from offdrift.objectives.prefix import PrefixClipped, PrefixMinClipped
from offdrift.objectives.prompt_dual import PromptDual
from offdrift.objectives.regression import Quadratic, Regression
from offdrift.objectives.second_moment import BalancedClipped, GroupClipped, SecondMomentClipped, VariancePenalized
from offdrift.objectives.turns import TurnNormalized

OBJECTIVES = {
    "clip_cov, a tenth": CovClipped(fraction=0.1, cov_low=0.0, cov_high=5.0),
    "clip_cov, full": CovClipped(on="full"),
    "kl_cov, abs": CovPenalized(fraction=0.2, coef=0.7, penalty="abs"),
    "kl_cov, full": CovPenalized(on="full", fraction=0.2),
    "kl_cov, k2": CovPenalized(fraction=0.2, coef=0.7, penalty="k2"),
    "kl_cov, k3": CovPenalized(fraction=0.2, coef=0.7, penalty="k3"),
    "m2po, exact": SecondMomentClipped(level="exact", budget=0.03, floor_low=0.05, floor_high=0.05),
    "m2po, no floors": SecondMomentClipped(budget=0.03, floor_low=0.0, floor_high=0.0),
    "m2po, full": SecondMomentClipped(on="full", budget=0.03),
    "st_ppo, token": TurnNormalized(unit="token", eps_low=0.1, eps_high=0.1),
    "st_ppo, product": TurnNormalized(unit="turn_product", eps_low=0.1, eps_high=0.1),
    "st_ppo, arithmetic": TurnNormalized(unit="turn_arithmetic", eps_low=0.1, eps_high=0.1),
    "aspo, no dual clip": Flipped(dual_clip=None),
    "aspo, full": Flipped(on="full"),
    "aspo, by entropy": Flipped(eps_low=0.1, eps_high=0.1, eps_high_entropy=(0.4, 0.4)),
    "quatro, fixed": PromptDual(multiplier=1.0),
    "bapo, full": BalancedClipped(on="full", share=0.7, dual_clip=None),
    "bapo, no search": BalancedClipped(low=0.8, low_max=0.8, high=1.2, high_max=1.2),
    "real, full": Classified(on="full", tau=2.0),
    "r2vpo, full": VariancePenalized(on="full"),
    "r2vpo, dear": VariancePenalized(penalty=10.0),
    "r2vpo_clip, full": GroupClipped(on="full", reference=0.1),
    "oapl, geometric": Regression(beta=1.0, unit="geometric"),
    "oapl, half": Regression(beta=0.5, beta_value=0.3),
    "online_dpo, strong": Preference(beta=2.0),
    "dro, full": Quadratic(on="full", beta=0.3),
    "sapo, full": Soft(on="full", tau_positive=2.0, tau_negative=2.0),
    "espo, half": EntropyGrouped(top_frac=0.5),
    "espo, full": EntropyGrouped(on="full", alpha=0.9, top_frac=0.5),
    "espo, one group": EntropyGrouped(on="full", alpha=0.3, top_frac=1.0),
    "gmpo, full": GeometricClipped(on="full", eps_low=0.2, eps_high=0.3),
    "ctpo, linear": PrefixClipped(on="full", dual_clip=0.1, gradient="unit", growth=1.0),
    "ctpo, constant": PrefixClipped(on="full", dual_clip=None, growth=0.0),
    "qurl, tight": QuantizedClipped(cap=1.1),
    "minpro, staleness": PrefixMinClipped(on="staleness"),
}
VARIANTS = {name: Method(objective=o, aggregate="token_mean") for name, o in OBJECTIVES.items()}
ROWS = {**METHODS, **VARIANTS}
