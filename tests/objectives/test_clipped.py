"""`Clipped` and what is published as its parameters: values of the methods table, directions, bounds."""

import pytest
import torch

from offdrift.objectives.clipped import Clipped, ppo_clip
from offdrift.ratios import log_ratio, per_unit
from tests.objectives.checks import check_golden, fx_e, loss_and_grad, per_sequence
from tests.oracles.fixtures import double, fx_a

MEAN = "seq_mean_token_mean"
GSPO_GRAD = [[-0.131409] * 4, [0.08530064, 0.08530064, 0.08530064, 0]]
R = double([0.5, 1.0, 1.5, 5.0]).log()


def fx_a_batch():
    lp, a, _ = fx_a()
    return lp, a


def test_dual_clip():
    check_golden(
        Clipped(dual_clip=3.0), fx_a_batch(), "token_mean", loss=-0.369155,
        tokens=[[-1.051271, -1.2, -0.778801, -1.105171], [0.430354, 0.610701, 0.510101, 0.0]],
        grad=[[-0.150182, 0, -0.111257, -0.157882], [0.06147914, 0.08724305, 0.07287152, 0]],
    )  # fmt: skip
    five = double([5.0]).log()
    assert ppo_clip(five, double([-0.5])).loss.item() == pytest.approx(2.5)
    assert ppo_clip(five, double([-0.5]), dual_clip=3.0).loss.item() == pytest.approx(1.5)


@pytest.mark.parametrize("gradient", ["unit", "token"])
def test_gspo_and_gspo_token(gradient):
    lp, a = fx_a_batch()
    check_golden(
        Clipped(unit="geometric", gradient=gradient), (lp, a), MEAN, loss=-0.269734,
        tokens=per_sequence([-1.051271, 0.511804], lp), grad=GSPO_GRAD,
    )  # fmt: skip


def test_gspo_with_the_limits_of_the_paper():
    lp, a = fx_a_batch()
    check_golden(
        Clipped(unit="geometric", eps_low=3e-4, eps_high=4e-4), (lp, a), MEAN, loss=-0.244298,
        tokens=per_sequence([-1.0004, 0.511804], lp), grad=[[0.0] * 4, GSPO_GRAD[1]],
    )  # fmt: skip


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


def test_luspo_is_gspo_summed_over_tokens():
    lp, a = fx_a_batch()
    check_golden(
        Clipped(unit="geometric", eps_low=2e-3, eps_high=2.5e-3), (lp, a), "seq_mean_token_sum",
        loss=-1.237294, tokens=per_sequence([-1.0025, 0.511804], lp),
        grad=[[0.0] * 4, [0.255902] * 3 + [0.0]],
    )  # fmt: skip


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
    assert leaf.grad is not None
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
    assert l.grad is not None
    assert l.grad.item() == pytest.approx(-advantage * r if pushes else 0.0)


@pytest.mark.parametrize(("advantage", "r"), [(1.0, 1.25), (-1.0, 0.75)])
def test_on_the_bound_the_token_still_pushes(advantage, r):
    l = torch.tensor([r], dtype=torch.float64).log().requires_grad_()  # noqa: E741
    got = ppo_clip(l, torch.tensor([advantage], dtype=torch.float64), eps_low=0.25, eps_high=0.25)
    got.loss.sum().backward()
    assert l.grad is not None
    assert l.grad.item() == pytest.approx(-advantage * r)
    assert not got.clipped.any()


def test_a_log_ratio_of_fifty_has_a_finite_loss_and_no_gradient():
    l = torch.tensor([50.0, -50.0], dtype=torch.float64, requires_grad=True)  # noqa: E741
    loss = ppo_clip(l, torch.tensor([-1.0, -1.0], dtype=torch.float64)).loss
    loss.sum().backward()
    assert loss.tolist() == pytest.approx([4.851652e8, 0.8], rel=1e-6)
    assert l.grad is not None
    assert l.grad.tolist() == [0.0, 0.0]
