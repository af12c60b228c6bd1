"""`Clipped` and what is published as its parameters: values of the methods table, directions, bounds.

ESPO: values of the methods table, an oracle in plain loops, ranking, and the laws.
"""

import math

import pytest
import torch

from offdrift.batch_info import BatchInfo
from offdrift.logprobs import LogProbs
from offdrift.objectives.clipped import (
    Clipped,
    EntropyGrouped,
    GeometricClipped,
    entropy_groups,
    most_uncertain,
    ppo_clip,
)
from offdrift.ratios import log_ratio
from offdrift.segments import Segments
from tests.objectives.checks import check_golden, check_loss_and_gradient, fx_e, loss_and_grad, per_sequence
from tests.oracles.fixtures import double, fx_a, ragged

MEAN = "seq_mean_token_mean"
R = double([0.5, 1.0, 1.5, 5.0]).log()


def fx_a_batch():
    lp, a, _ = fx_a()
    return lp, a


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


@pytest.mark.parametrize(("advantage", "r"), [(1.0, 1.25), (-1.0, 0.75)])
def test_on_the_bound_the_token_still_pushes(advantage, r):
    l = torch.tensor([r], dtype=torch.float64).log().requires_grad_()  # noqa: E741
    got = ppo_clip(l, torch.tensor([advantage], dtype=torch.float64), eps_low=0.25, eps_high=0.25)
    got.loss.sum().backward()
    assert l.grad.item() == pytest.approx(-advantage * r)
    assert not got.clipped.any()


# GMPO: values of the methods table, an oracle in plain loops, and the laws.


def test_a_log_ratio_of_fifty_is_limited_before_the_mean():
    """FX-E: (20 - 0.2) / 2 = 9.9, and no gradient anywhere (dis.12: verl's loss is 2.17e10)."""
    lp, a = fx_e()
    check_golden(
        GeometricClipped(eps_low=0.2, eps_high=0.2), (lp, a), MEAN, loss=6643.049678,
        tokens=per_sequence([-1.221403, 0.0, 19930.370438], lp), grad=[[0, 0], [0, 0], [0, 0]],
    )  # fmt: skip


# QuRL: values of the methods table, the widened limit, and the laws.


# SAPO: numbers of the methods table, the closed form, and the shape of the push.


# FX-R


H = double([0.2, 2.5, 0.4, 3.0, 0.1, 0.3, 2.0])


def batch_info_of(lp: LogProbs, seed: int, *, scale: float = 7.0) -> BatchInfo:
    g = torch.Generator().manual_seed(seed)
    entropy = scale * torch.rand(lp.segments.num_tokens, generator=g, dtype=torch.float64)
    return BatchInfo(entropy=entropy, vocab=1000)


def test_values_of_the_methods_table():
    lp, a, _ = fx_a()
    batch_info = BatchInfo(entropy=H, vocab=1000)
    check_golden(
        EntropyGrouped(top_frac=0.5), (lp, a), "seq_mean_token_mean", loss=-0.213701, batch_info=batch_info,
        grad=[[-0.113105, 0, -0.113105, 0], [0, 0.06976738, 0.06976738, 0]],
    )  # fmt: skip
    top = most_uncertain(H, lp.segments, fraction=0.5)
    assert top.tolist() == [False, True, False, True, False, True, True]
    l = log_ratio(lp, on="staleness").detach()  # noqa: E741
    mean, mean_entropy, share = entropy_groups(l, H, top, lp.segments)
    s = [0.904837, 1.221403, 0.904837, 1.221403, 0.860708, 1.116278, 1.116278]
    assert mean.exp().tolist() == pytest.approx(s, abs=1e-6)
    eps = [0.00086859, 0.00796207, 0.00086859, 0.00796207, 0.00028953, 0.00332959, 0.00332959]
    assert (0.02 / math.log(1000) * mean_entropy).tolist() == pytest.approx(eps, abs=1e-8)
    # 4 / (2 groups * 2); 3 / (2 * 1) and 3 / (2 * 2)
    assert share.tolist() == pytest.approx([1.0, 1.0, 1.0, 1.0, 1.5, 0.75, 0.75])


@pytest.mark.parametrize(
    ("fraction", "length", "number"), [(0.2, 1, 1), (0.2, 5, 1), (0.2, 6, 2), (0.5, 3, 2), (0.07, 100, 7), (1.0, 4, 4)]
)
def test_the_number_of_top_tokens_is_rounded_up(fraction, length, number):
    g = torch.Generator().manual_seed(length)
    entropy = torch.rand(length, generator=g)
    top = most_uncertain(entropy, Segments.from_lengths([length]), fraction=fraction)
    assert int(top.sum()) == number
    assert top[entropy.sort(descending=True).indices[:number]].all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ranking_ends_at_sequences_and_ties_go_to_the_earlier_token(dtype):
    # An empty sequence; huge entropies next door; equal, zero, negative-zero and tiny entropies.
    s = Segments.from_lengths([0, 3, 4, 2, 3])
    entropy = torch.tensor([9.0, 9.0, 1e30, 1.0, 2.0, 2.0, 1.0, -0.0, 0.0, 1e-30, 2e-30, 0.0], dtype=dtype)
    top = most_uncertain(entropy, s, fraction=0.5)
    assert top.int().tolist() == [1, 0, 1, 0, 1, 1, 0, 1, 0, 1, 1, 0]


def test_a_sequence_of_one_token_is_ppo_with_the_width_of_its_entropy():
    lp = LogProbs.pack(
        double([-1.0, -1.0]), double([-0.9, -1.2]).requires_grad_(), double([-1.0, -1.0]),
        segments=Segments.from_lengths([1, 1]),
    )  # fmt: skip
    a = double([1.0, -1.0])
    batch_info = BatchInfo(entropy=double([math.log(10)] * 2), vocab=100)  # half of ln(100)
    got = EntropyGrouped(alpha=0.2)(lp, a, batch_info)
    check_loss_and_gradient(lp, got.loss, Clipped(eps_low=0.1, eps_high=0.1)(lp, a).loss)


def test_entropy_zero_clips_any_outward_drift_and_none_on_policy():
    old = double([-1.0, -1.0, -1.0])
    leaf = (old + double([1e-9, -1e-9, 0.0])).requires_grad_()
    lp = LogProbs.pack(old, leaf, old, segments=Segments.from_lengths([1, 1, 1]))
    got = EntropyGrouped()(lp, torch.ones_like(old), BatchInfo(entropy=torch.zeros_like(old), vocab=9))
    assert got.clipped.tolist() == [True, False, False]


def test_the_shares_of_a_sequence_add_up_to_its_length():
    """Its total push is that of the other methods."""
    lp = ragged(8)
    zeros = torch.zeros(lp.segments.num_tokens, dtype=torch.float64)
    top = most_uncertain(batch_info_of(lp, 8).required("entropy"), lp.segments, fraction=0.2)
    share = entropy_groups(zeros, zeros, top, lp.segments)[2]
    torch.testing.assert_close(lp.segments.sum(share), lp.segments.lengths.double())
