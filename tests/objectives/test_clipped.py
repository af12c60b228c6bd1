"""`Clipped` and what is published as its parameters: values of the methods table, directions, bounds."""

from __future__ import annotations

import pytest
import torch

from offdrift.logprobs import LogProbs
from offdrift.objectives.clipped import (
    Clipped,
    GeometricClipped,
    Soft,
    geometric_clip,
    ppo_clip,
    quantized_clip,
    sapo,
)
from offdrift.ratios import log_ratio, per_unit
from offdrift.segments import Segments
from tests.objectives.checks import (
    check_golden,
    fx_e,
    loss_and_grad,
    per_sequence,
)
from tests.oracles.fixtures import double, fx_a

MEAN = "seq_mean_token_mean"
R = double([0.5, 1.0, 1.5, 5.0]).log()


def fx_a_batch():
    lp, a, _ = fx_a()
    return lp, a


def test_gspo_and_gspo_token_part_ways_where_advantages_vary():
    """GSPO pushes all tokens by the mean advantage; GSPO-token each by its own."""
    lp, _ = fx_a_batch()
    a = double([1.0, -1.0, 2.0, 0.0, -0.5, -0.5, -0.5])
    s = per_unit(log_ratio(lp, on="staleness").detach(), lp.segments, unit="geometric").exp()
    _, grad = loss_and_grad(Clipped(unit="geometric"), lp, a, how="seq_mean_token_sum")
    mean = double([0.5] * 4 + [-0.5] * 3)
    torch.testing.assert_close(grad, -mean * s / 2, rtol=1e-12, atol=0)
    _, grad = loss_and_grad(Clipped(unit="geometric", gradient="token"), lp, a, how="seq_mean_token_sum")
    torch.testing.assert_close(grad, -a * s / 2, rtol=1e-12, atol=0)


def test_tbpo_clips_both_sides_of_a_negative_push_and_is_weighted_by_the_mismatch():
    lp, a = fx_a_batch()
    got = Clipped(unit="geometric", negatives="both", eps_low=0.02, eps_high=0.04)(lp, a)
    per_seq = lp.segments.mean(got.loss)
    torch.testing.assert_close(per_seq, double([-1.04, 0.511804]), rtol=0, atol=1e-6)
    # by hand: the geometric mismatch, capped at 2
    m = lp.segments.mean(log_ratio(lp, on="mismatch")).exp().clamp(max=2.0)
    torch.testing.assert_close(m, double([0.893597, 0.91089]), rtol=0, atol=1e-6)
    assert (m * per_seq).mean().item() == pytest.approx(-0.231572, abs=1e-6)
    # s = 1.0236 is outside a band of 0.02: the negative push stops there, too
    tight = Clipped(unit="geometric", negatives="both", eps_low=0.02, eps_high=0.02)
    _, grad = loss_and_grad(tight, lp, a, how=MEAN)
    assert tight(lp, a).loss[4:].tolist() == pytest.approx([0.51] * 3)
    assert (grad == 0).all()


@pytest.mark.parametrize(
    ("dual_clip", "advantage", "expected"),
    [
        (None, 1.0, [-0.5, -1.0, -1.2, -1.2]),  # tab.ppo
        (None, -1.0, [0.8, 1.0, 1.5, 5.0]),
        (3.0, 1.0, [-0.5, -1.0, -1.2, -1.2]),  # tab.dual
        (3.0, -1.0, [0.8, 1.0, 1.5, 3.0]),
        (4.0, 1.0, [-0.5, -1.0, -1.2, -1.2]),  # tab.delta
        (4.0, -1.0, [0.8, 1.0, 1.5, 4.0]),
    ],
)
def test_rows_of_the_ratio_table(dual_clip, advantage, expected):
    leaf = R.clone().requires_grad_()
    got = ppo_clip(leaf, torch.full_like(R, advantage), dual_clip=dual_clip)
    torch.testing.assert_close(got.loss.detach(), double(expected), rtol=1e-12, atol=0)
    # Delta clipping limits the ratio before the surrogate, dual clipping the loss after it.
    r = R.exp().clamp(max=dual_clip or 1e9)
    delta = torch.maximum(-advantage * r, -advantage * R.exp().clamp(0.8, 1.2))
    torch.testing.assert_close(got.loss.detach(), delta, rtol=1e-12, atol=0)
    got.loss.sum().backward()
    plain = -advantage * R.exp()
    pushes = (got.loss.detach() - plain).abs() < 1e-12
    torch.testing.assert_close(leaf.grad, plain.where(pushes, 0.0), rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("objective", "how", "tokens", "loss", "grad"),
    [
        (
            Clipped(), "token_mean", [[-1.2, 0], [0, 0], [485165200.0, 0.8]], 97033040.0,
            [[0, 0], [0, 0], [0, 0]],
        ),
        (
            Clipped(dual_clip=3.0), "token_mean", [[-1.2, 0], [0, 0], [3, 0.8]], 0.52,
            [[0, 0], [0, 0], [0, 0]],
        ),
        (  # +50 and -50 cancel: s = 1
            Clipped(unit="geometric"), MEAN, [[-1.2, 0], [0, 0], [1, 1]], -0.06666667,
            [[0, 0], [0, 0], [0.166667, 0.166667]],
        ),
    ],
    ids=["ppo", "dual", "gspo"],
)  # fmt: skip
def test_edge_cases_of_fx_e(objective, how, tokens, loss, grad):
    lp, a = fx_e()
    check_golden(objective, (lp, a), how, loss=loss, tokens=tokens, grad=grad)
    r = log_ratio(lp, on="staleness").detach()
    expected = double([2.013753, 1.105171, 0.818731, 485165200.0, 2.061154e-09])  # E.r
    torch.testing.assert_close(r.clamp(-20, 20).exp(), expected, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize(
    ("advantage", "r", "pushes"), [(1.0, 1.5, False), (1.0, 0.5, True), (-1.0, 0.5, False), (-1.0, 1.5, True)]
)
def test_clipping_stops_only_the_outward_push(advantage, r, pushes):
    l = torch.tensor([r], dtype=torch.float64).log().requires_grad_()  # noqa: E741
    ppo_clip(l, torch.tensor([advantage], dtype=torch.float64)).loss.sum().backward()
    assert l.grad.item() == pytest.approx(-advantage * r if pushes else 0.0)


@pytest.mark.parametrize(("advantage", "r"), [(1.0, 1.25), (-1.0, 0.75)])
def test_on_the_bound_the_token_still_pushes(advantage, r):
    l = torch.tensor([r], dtype=torch.float64).log().requires_grad_()  # noqa: E741
    got = ppo_clip(l, torch.tensor([advantage], dtype=torch.float64), eps_low=0.25, eps_high=0.25)
    got.loss.sum().backward()
    assert l.grad.item() == pytest.approx(-advantage * r)
    assert not got.clipped.any()


def test_a_log_ratio_of_fifty_has_a_finite_loss_and_no_gradient():
    l = torch.tensor([50.0, -50.0], dtype=torch.float64, requires_grad=True)  # noqa: E741
    loss = ppo_clip(l, torch.tensor([-1.0, -1.0], dtype=torch.float64)).loss
    loss.sum().backward()
    assert loss.tolist() == pytest.approx([4.851652e8, 0.8], rel=1e-6)
    assert l.grad.tolist() == [0.0, 0.0]


# GMPO: values of the methods table, an oracle in plain loops, and the laws.


def test_a_log_ratio_of_fifty_is_limited_before_the_mean():
    """FX-E: (20 - 0.2) / 2 = 9.9, and no gradient anywhere (dis.12: verl's loss is 2.17e10)."""
    lp, a = fx_e()
    check_golden(
        GeometricClipped(eps_low=0.2, eps_high=0.2), (lp, a), MEAN, loss=6643.049678,
        tokens=per_sequence([-1.221403, 0.0, 19930.370438], lp), grad=[[0, 0], [0, 0], [0, 0]],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("advantage", "l", "clipped"),
    [
        (1.0, 0.25, False), (1.0, 0.26, True), (1.0, -9.0, False),
        (-1.0, -0.25, False), (-1.0, -0.26, True), (-1.0, 9.0, False),
    ],
)  # fmt: skip
def test_geometric_clipping_stops_only_the_outward_push(advantage, l, clipped):  # noqa: E741
    leaf = double([l]).requires_grad_()
    got = geometric_clip(leaf, double([advantage]), Segments.from_lengths([1]), eps_low=0.25, eps_high=0.25)
    got.loss.sum().backward()
    expected = 0.0 if clipped else -advantage * double([l]).exp().item()
    assert leaf.grad.item() == pytest.approx(expected, rel=1e-12)
    assert got.clipped.item() == clipped


# QuRL: values of the methods table, the widened limit, and the laws.


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
    assert got.clipped.item() == clipped
    expected = 0.0 if clipped else -advantage * min(rho, 2.0) * r
    assert leaf.grad.item() == pytest.approx(expected, rel=1e-12)


# SAPO: numbers of the methods table, the closed form, and the shape of the push.


# FX-R


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        (1.0, [-1.510163, -2, -2.489837, -3.928055]),
        (-1.0, [1.415938, 1.904762, 2.393585, 3.753242]),
        (0.0, [0, 0, 0, 0]),
    ],
)
def test_token_losses_of_fx_r(advantage, expected):
    got = sapo(R, torch.full_like(R, advantage))
    torch.testing.assert_close(got, double(expected), rtol=0, atol=1e-6)


def test_on_the_full_ratio_it_needs_no_old_policy():
    whole, advantages, _ = fx_a()
    lp = LogProbs.pack(whole.logp_rollout, whole.logp, segments=whole.segments)
    _, grad = loss_and_grad(Soft(on="full", tau_positive=2.0, tau_negative=2.0), lp, advantages)
    w = (lp.current.detach() - lp.logp_rollout).exp()
    sigma = (2 * (w - 1)).sigmoid()
    torch.testing.assert_close(grad, -advantages * w * 4 * sigma * (1 - sigma) / 7, rtol=1e-9, atol=0)
