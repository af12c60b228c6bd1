"""Values and gradients of the methods table on FX-A, six printed digits each."""

import pytest

from offdrift.objectives.clipped import Clipped, GeometricClipped, QuantizedClipped, Soft
from offdrift.objectives.flipped import Flipped
from offdrift.objectives.prefix import PrefixMinClipped
from offdrift.objectives.prompt_dual import PromptDual
from offdrift.objectives.regression import Quadratic
from offdrift.objectives.second_moment import VariancePenalized
from tests.objectives.checks import check_golden
from tests.oracles.fixtures import fx_a

TOKENS, MEAN, SUM = "token_mean", "seq_mean_token_mean", "seq_mean_token_sum"
GSPO = [[-0.131409] * 4, [0.08530064] * 3]


def sequences(first: float, second: float) -> list:
    return [[first] * 4, [second] * 3]


# objective, aggregate, loss, loss of each token, gradient to each log-prob
GOLDENS = [
    (Clipped(dual_clip=3.0), TOKENS, -0.369155,
     [[-1.051271, -1.2, -0.778801, -1.105171], [0.430354, 0.610701, 0.510101]],
     [[-0.150182, 0, -0.111257, -0.157882], [0.06147914, 0.08724305, 0.07287152]]),
    (Clipped(unit="geometric"), MEAN, -0.269734, sequences(-1.051271, 0.511804), GSPO),
    (Clipped(unit="geometric", gradient="token"), MEAN, -0.269734, sequences(-1.051271, 0.511804), GSPO),
    (Clipped(unit="geometric", eps_low=3e-4, eps_high=4e-4), MEAN, -0.244298,
     sequences(-1.0004, 0.511804), [[0.0] * 4, GSPO[1]]),
    (Clipped(unit="geometric", eps_low=2e-3, eps_high=2.5e-3), SUM, -1.237294,  # LUSPO
     sequences(-1.0025, 0.511804), sequences(0.0, 0.255902)),
    (GeometricClipped(), MEAN, -0.269734, sequences(-1.051271, 0.511804), GSPO),
    (GeometricClipped(eps_low=0.2, eps_high=0.2), MEAN, -0.256756, sequences(-1.025315, 0.511804),
     [[-0.128164, 0, -0.128164, -0.128164], GSPO[1]]),
    (QuantizedClipped(cap=1.2), TOKENS, -0.322794,
     [[-1.161834, -1.141475, -0.934561, -0.449329], [0.439048, 0.610701, 0.377892]],
     [[-0.165976, 0, -0.133509, -0.06418985], [0.0627211, 0.08724305, 0.05398455]]),
    (Soft(), MEAN, -0.550641,
     [[-2.05126, -2.346333, -1.779698, -2.105074], [0.882859, 1.062586, 0.962481]],
     [[-0.131323, -0.163673, -0.09616893, -0.137765], [0.07134346, 0.100421, 0.08500722]]),
    (Flipped(), TOKENS, -0.346039,
     [[-0.951229, -0.833333, -1.284025, -0.904837], [0.430354, 0.610701, 0.510101]],
     [[-0.13589, 0, -0.183432, -0.129262], [0.06147914, 0.08724305, 0.07287152]]),
    (PrefixMinClipped(), TOKENS, -0.443057,
     [[-1.161834, -1.394201, -1.349859, -0.522046], [0.439048, 0.536254, 0.351238]],
     [[-0.165976, 0, -0.192837, -0.07457797], [0.0627211, 0.07660773, 0]]),
    (PromptDual(multiplier=1.0), TOKENS, 0.372076,
     [[0.04993538, 0.708676, 0.340725, 2.785031], [-0.250036, -0.08549819, -0.944298]],
     [[-0.142673, -0.134986, -0.139072, -0.142093], [0.0430354, 0.12214, 0.07578639]]),
    (Quadratic(beta=0.1), TOKENS, 0.372342,
     [[0.050125, 0.7545, 0.353125, 2.8005], [-0.413875, -0.048, -0.88998]],
     [[-0.142143, -0.138571, -0.146429, -0.141429], [0.06928571, 0.07428571, 0.07171429]]),
    (VariancePenalized(), TOKENS, -0.389113,
     [[-1.051166, -1.344963, -0.776844, -1.104728], [0.43113, 0.612662, 0.510117]],
     [[-0.149566, -0.18744, -0.113226, -0.156553], [0.06010897, 0.09033359, 0.07310706]]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("objective", "how", "loss", "tokens", "grad"), GOLDENS, ids=lambda x: getattr(x, "formula", "")
)
def test_values_of_the_methods_table(objective, how, loss, tokens, grad):
    check_golden(objective, fx_a()[:2], how, loss=loss, tokens=tokens, grad=grad)
