"""QuRL: values of the methods table, the widened limit, and the laws."""

import pytest
import torch

from offdrift.objectives.quantized import QuantizedClipped, quantized_clip
from offdrift.ratios import log_ratio
from tests.objectives.checks import advantages_of, check_golden, check_loss_and_gradient
from tests.oracles.fixtures import double, fx_a, ragged


def test_values_of_the_methods_table():
    lp, a, _ = fx_a()
    check_golden(
        QuantizedClipped(cap=1.2), (lp, a), "token_mean", loss=-0.322794,
        tokens=[[-1.161834, -1.141475, -0.934561, -0.449329], [0.439048, 0.610701, 0.377892, 0]],
        grad=[[-0.165976, 0, -0.133509, -0.06418985], [0.0627211, 0.08724305, 0.05398455, 0]],
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
def test_random_batches_agree_with_the_formula(seed):
    lp = ragged(seed, sequences=20)
    a = advantages_of(lp, seed, per="token")
    got = QuantizedClipped(eps_low=0.1, eps_high=0.15, cap=1.1)(lp, a)
    r, rho = log_ratio(lp, on="staleness").exp(), log_ratio(lp, on="mismatch").exp()
    w = rho.clamp(max=1.1)
    kappa = w / rho
    limited = -a * r.clamp(min=0.9).minimum(1.15 / kappa)
    check_loss_and_gradient(lp, got.loss, w * torch.maximum(-a * r, limited))
    expected = ((a > 0) & (r > 1.15 / kappa)) | ((a < 0) & (r < 0.9))
    assert got.clipped is not None
    assert torch.equal(got.clipped, expected)
    assert int((expected & (kappa < 1)).sum()) > 2
    assert int((~expected & (r > 1.15) & (a > 0)).sum()) > 2  # pushed only because it is wider


@pytest.mark.parametrize(
    ("rho", "r", "advantage", "clipped"),
    [
        # truncated to 2 of 4: the upper limit doubles, the lower one stays
        (4.0, 2.39, 1.0, False), (4.0, 2.41, 1.0, True),
        (4.0, 0.81, -1.0, False), (4.0, 0.79, -1.0, True), (4.0, 9.0, -1.0, False),
        # not truncated: plain PPO
        (1.0, 1.19, 1.0, False), (1.0, 1.21, 1.0, True),
    ],
)  # fmt: skip
def test_inside_and_beyond_each_limit(rho, r, advantage, clipped):
    leaf = double([r]).log().requires_grad_()
    got = quantized_clip(leaf, double([rho]).log(), double([advantage]))
    got.loss.sum().backward()
    assert got.clipped is not None
    assert got.clipped.item() == clipped
    assert leaf.grad is not None
    expected = 0.0 if clipped else -advantage * min(rho, 2.0) * r
    assert leaf.grad.item() == pytest.approx(expected, rel=1e-12)
