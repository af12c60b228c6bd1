"""GMPO: values of the methods table, an oracle in plain loops, and the laws."""

import pytest
import torch

from offdrift.objectives.geometric import GeometricClipped, geometric_clip
from offdrift.ratios import log_ratio
from offdrift.segments import Segments
from tests.objectives.checks import (
    advantages_of,
    check_golden,
    check_loss_and_gradient,
    fx_e,
    per_sequence,
)
from tests.oracles.fixtures import double, fx_a, ragged

MEAN = "seq_mean_token_mean"


def test_values_of_the_methods_table():
    lp, a, _ = fx_a()
    check_golden(
        GeometricClipped(), (lp, a), MEAN, loss=-0.269734,
        tokens=per_sequence([-1.051271, 0.511804], lp),
        grad=[[-0.131409] * 4, [0.08530064, 0.08530064, 0.08530064, 0]],
    )  # fmt: skip
    check_golden(
        GeometricClipped(eps_low=0.2, eps_high=0.2), (lp, a), MEAN, loss=-0.256756,
        tokens=per_sequence([-1.025315, 0.511804], lp),
        grad=[[-0.128164, 0, -0.128164, -0.128164], [0.08530064, 0.08530064, 0.08530064, 0]],
    )  # fmt: skip


def test_a_log_ratio_of_fifty_is_limited_before_the_mean():
    """FX-E: (20 - 0.2) / 2 = 9.9, and no gradient anywhere (dis.12: verl's loss is 2.17e10)."""
    lp, a = fx_e()
    check_golden(
        GeometricClipped(eps_low=0.2, eps_high=0.2), (lp, a), MEAN, loss=6643.049678,
        tokens=per_sequence([-1.221403, 0.0, 19930.370438], lp), grad=[[0, 0], [0, 0], [0, 0]],
    )  # fmt: skip


def oracle(lp, a, on, eps_low, eps_high):
    """The formula of the entry, one sequence at a time."""
    losses = []
    lengths = lp.segments.lengths.tolist()
    for l, ai in zip(log_ratio(lp, on=on).split(lengths), a.split(lengths), strict=True):  # noqa: E741
        sign = ai.sign()
        m = sign * torch.minimum(sign * l, sign * l.clamp(-eps_low, eps_high))
        losses.append((-ai.mean() * m.mean().exp()).expand(len(l)))
    return torch.cat(losses)


@pytest.mark.parametrize("per", ["sequence", "token"])
@pytest.mark.parametrize("on", ["staleness", "full"])
@pytest.mark.parametrize("seed", range(3))
def test_random_batches_agree_with_the_formula(seed, on, per):
    lp = ragged(seed, sequences=20)
    a = advantages_of(lp, seed, per=per)
    if per == "token":
        a[::5] = 0.0
    objective = GeometricClipped(on=on, eps_low=0.2, eps_high=0.3)
    got = objective(lp, a)
    grad = check_loss_and_gradient(lp, got.loss, oracle(lp, a, on, 0.2, 0.3))
    l = log_ratio(lp, on=on).detach()  # noqa: E741
    expected = ((a > 0) & (l > 0.3)) | ((a < 0) & (l < -0.2))
    assert got.clipped is not None
    assert torch.equal(got.clipped, expected)
    assert 10 < int(expected.sum()) < len(a) / 2
    assert (grad[expected] == 0).all()


@pytest.mark.parametrize(
    ("advantage", "l", "clipped"),
    [
        (1.0, 0.25, False), (1.0, 0.26, True), (1.0, -9.0, False),
        (-1.0, -0.25, False), (-1.0, -0.26, True), (-1.0, 9.0, False),
    ],
)  # fmt: skip
def test_clipping_stops_only_the_outward_push(advantage, l, clipped):  # noqa: E741
    leaf = double([l]).requires_grad_()
    got = geometric_clip(leaf, double([advantage]), Segments.from_lengths([1]), eps_low=0.25, eps_high=0.25)
    got.loss.sum().backward()
    assert leaf.grad is not None
    expected = 0.0 if clipped else -advantage * double([l]).exp().item()
    assert leaf.grad.item() == pytest.approx(expected, rel=1e-12)
    assert got.clipped is not None
    assert got.clipped.item() == clipped
