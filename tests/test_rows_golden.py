"""Rows of the table on FX-A against the methods table: loss, gradient, and two edge batches.

Goldens are copied from the specification (entries named by the ids); where its example uses other
parameters than the row publishes, the override is in the table.
"""

import math

import pytest
import torch

from offdrift.batch_info import BatchInfo
from offdrift.logprobs import LogProbs
from offdrift.loss import policy_loss
from offdrift.methods import METHODS, override
from offdrift.segments import Segments
from tests.oracles.fixtures import MASK, double, fx_a

CISPO_CAP = [[-0.150182, -0.192837, -0.111257, -0.157882], [0.06147914, 0.08724305, 0.07287152, 0]]
DECOUPLED = [[-0.165976, 0, -0.165976, -0.06418985], [0.0627211, 0.08724305, 0.05398455, 0]]
OLD = {"gate.on": "staleness", "weight.on": "staleness", "aggregate": "token_mean"}

REWARDS = double([1.0, 0.0])
"""Sequence 1, of advantage 1, is correct; sequence 2, of advantage -0.5, is not."""

# id, row, changes, loss, gradient
TABLE = [
    ("none", "none", {}, 0.370714, [[-0.142857] * 4, [0.07142857] * 3 + [0]]),
    ("token_tis", "token_tis", {}, 0.226821, [[-0.165976, -0.183432, -0.165976, -0.06418985], [0.0627211, 0.08724305, 0.05398455, 0]]),
    ("trm_max_k2", "trm_max_k2", {"gate.high": 0.31}, None, [[0, 0, 0, 0], [0.219524, 0.305351, 0.188946, 0]]),
    ("cispo", "cispo", {}, 0.428838, [[-0.150182, -0.171429, -0.114286, -0.157882], [0.06147914, 0.08571429, 0.07287152, 0]]),
    ("cispo_cap", "cispo_upper", {}, 0.443682, CISPO_CAP),
    ("dispo", "dispo_paper", {}, 0.444742, [[-0.150182, -0.192837, -0.114286, -0.157882], [0.06147914, 0.08724305, 0.07287152, 0]]),
    ("dppo_tv", "dppo_tv", {**OLD, "gate.low": -0.1, "gate.high": 0.1}, 0.299054, [[-0.150182, 0, -0.111257, -0.157882], [0.06147914, 0.08724305, 0.07287152, 0]]),
    ("dppo_kl", "dppo_kl", OLD, 0.443682, CISPO_CAP),
    ("vespo", "vespo", {}, 0.514005, [[-0.168249] * 4, [0.05556366] * 3 + [0]]),
    ("topr", "topr", {}, 1.425829, [[-0.5] * 4, [0.202646] * 3 + [0]]),
    ("minpro", "minpro", {}, 0.300351, [[-0.165976, -0.213118, -0.192837, -0.07457797], [0.0627211, 0.07660773, 0.04740359, 0]]),
    ("minirl", "mini_rl", {}, 0.08924679, DECOUPLED),
    ("prime", "prime_rl", {}, -0.3755, [[-0.165933, -0.183361, -0.165933, -0.06441842], [0.06268396, 0.0873002, 0.05390455, 0]]),
    ("gpg", "gpg", {}, 0.370714, [[-0.142857] * 4, [0.07142857] * 3 + [0]]),
    ("decoupled", "decoupled_ppo", {}, -0.355262, DECOUPLED),
    ("icepop", "icepop", {}, -0.291072, [[-0.165976, 0, -0.165976, 0], [0.0627211, 0.08724305, 0.05398455, 0]]),
    ("bypass_ppo", "bypass_ppo_clip", {}, -0.360464, [[-0.165976, 0, -0.165976, -0.06418985], [0.0627211, 0.08724305, 0, 0]]),
    ("bypass_pg_is", "bypass_pg_is", {}, 0.988961, [[-0.3894] * 4, [0.202646] * 3 + [0]]),
    ("disabled", "disabled", {}, -0.369155, [[-0.150182, 0, -0.111257, -0.157882], [0.06147914, 0.08724305, 0.07287152, 0]]),
    ("preset.decoupled_token_is", "decoupled_token_is", {}, -0.355262, DECOUPLED),
    ("preset.decoupled_token_icepop", "decoupled_token_icepop", {}, -0.291072, [[-0.165976, 0, -0.165976, 0], [0.0627211, 0.08724305, 0.05398455, 0]]),
    ("preset.decoupled_geo_rs", "decoupled_geo_rs", {}, 0.0, [[0] * 4, [0] * 4]),
    ("preset.decoupled_k3_rs", "decoupled_k3_rs", {}, 0.0, [[0] * 4, [0] * 4]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "loss", "grad"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_loss_and_gradient(name, changes, loss, grad):
    check(name, changes, REWARDS, loss, grad)


def check(name, changes, rewards, loss, grad):
    lp, advantages, leaf = fx_a()
    row, fresh = override(METHODS[name], changes), torch.zeros(7)
    result = policy_loss(lp, row, advantages, BatchInfo(rewards=rewards, version_lag=fresh))
    result.loss.backward()
    assert loss is None or result.loss.item() == pytest.approx(loss, abs=1e-6)
    torch.testing.assert_close(leaf.grad, double(grad), rtol=0, atol=1e-6)


# By hand, from w = [1.161834, 1.284025, 1.161834, 0.449329; 0.878095, 1.221403, 0.755784],
# r = [1.051271, 1.349859, 0.778801, 1.105171; 0.860708, 1.221403, 1.020201], products of the mismatch
# 0.637628 and 0.755784, products of w 0.778801 and 0.810584, and the log-probs
# [-0.05, -0.75, -0.35, -2.8; -0.83, -0.1, -1.78]. Rewards swapped: the correct sequence is the second.
SWAPPED = double([0.0, 1.0])
BY_HAND = [
    # W = min(w, 1.2): (0.0580917 + 0.9 + 0.4066419 + 1.2581212 - 0.5 * 2.1941144) / 7; W A / 7
    ("echo2, capped", "echo2", {"weight.cap": 1.2}, REWARDS, 0.217971, [[-0.165976, -0.171429, -0.165976, -0.06418985], [0.0627211, 0.08571429, 0.05398455, 0]]),
    # W in [0.8, 11] and [0.9, 101]
    ("dispo", "dispo", {}, REWARDS, 0.442412, [[-0.150182, -0.192837, -0.114286, -0.157882], [0.06428571, 0.08724305, 0.07287152, 0]]),
    # W in [0.9, 1.2] and [0.8, 1.2]: an incorrect answer that is pushed up, a correct one pushed down
    ("dispo, swapped", "dispo", {}, SWAPPED, 0.433839, [[-0.150182, -0.171429, -0.128571, -0.157882], [0.06147914, 0.08571429, 0.07287152, 0]]),
    # (0.778801 * 3.95 - 0.5 * 2.71) / 2: the weight goes with the reward, whatever the advantage
    ("topr, swapped", "topr", {}, SWAPPED, 0.860632, [[-0.389400] * 4, [0.25] * 3 + [0]]),
    # no reward exceeds 2: both are weighted
    ("topr, higher line", "topr", {"weight.correct_above": 2}, REWARDS, 0.988961, [[-0.389400] * 4, [0.202646] * 3 + [0]]),
    # -0.637628 (1.051271 + 1.2 + 0.778801 + 1.105171) / 2; the second token is clipped, the second sequence is above 0.7
    ("decoupled_seq_mis, masked", "decoupled_seq_mis", {"weight.cap": 0.7}, REWARDS, -1.318374, [[-0.335160, 0, -0.248293, -0.352344], [0, 0, 0, 0]]),
    # the same + 0.755784 * 0.5 (0.860708 + 1.221403 + 1.020201) / 2
    ("decoupled_seq_mis", "decoupled_seq_mis", {}, REWARDS, -0.732204, [[-0.335160, 0, -0.248293, -0.352344], [0.162627, 0.230779, 0.192763, 0]]),
    # means of the mismatch are e^-0.1125 = 0.8936 and e^-0.0933 = 0.9109: 0.5 (0.860708 + 1.221403 + 1.020201) / 7
    ("ppo_clip_geo_rs, wider", "ppo_clip_geo_rs", {"gate.low": 0.9}, REWARDS, 0.221594, [[0] * 4, [0.06147914, 0.08724305, 0.07287152, 0]]),
    ("ppo_clip_geo_rs", "ppo_clip_geo_rs", {}, REWARDS, 0.0, [[0] * 4, [0] * 4]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "rewards", "loss", "grad"), [row[1:] for row in BY_HAND], ids=[row[0] for row in BY_HAND])  # fmt: skip
def test_loss_and_gradient_by_hand(name, changes, rewards, loss, grad):
    check(name, changes, rewards, loss, grad)


def test_a_capped_token_still_learns():
    """ECHO-2 caps the weight, not the loss: w = 3 counts 2, and its gradient goes on."""
    logp = double([math.log(0.3)]).requires_grad_()
    lp = LogProbs.pack(double([math.log(0.1)]), logp, segments=Segments.from_lengths([1]))
    result = policy_loss(lp, METHODS["echo2"], double([1.0]), BatchInfo(version_lag=torch.zeros(1)))
    result.loss.backward()
    assert result.corrected.limited.tolist() == [True]
    assert logp.grad.item() == pytest.approx(-2.0)


def fx_e() -> tuple[LogProbs, torch.Tensor, torch.Tensor]:
    """FX-E: a one-token sequence, one of advantage 0, one with log-ratios +50 and -50; rho = 1."""
    old = double([[-1.0, -9.0], [-0.5, -0.7], [-51.0, -1.0]])
    leaf = double([[-0.3, -9.0], [-0.4, -0.9], [-1.0, -51.0]]).requires_grad_()
    mask = torch.tensor([[1, 0], [1, 1], [1, 1]])
    lp = LogProbs.pack(old, leaf, old, mask=mask)
    return lp, lp.like_caller(double([[1.0, 0.0], [0.0, 0.0], [-1.0, -1.0]])), leaf


EDGES = [
    ("E.ppo", "ppo_clip", {}, 97033040.0, [[0, 0], [0, 0], [0, 0]]),
    ("E.dual", "dual_clip", {}, 0.52, [[0, 0], [0, 0], [0, 0]]),
    ("E.cispo", "cispo", {}, -8.328, [[-0.24, 0], [0, 0], [0.24, 0.16]]),
    ("E.sapo", "sapo", {}, -0.178831, [[-0.52454, 0], [0, 0], [0, 0]]),
    ("E.gspo", "gspo", {"objective.eps_low": 0.2, "objective.eps_high": 0.2}, -0.06666667, [[0, 0], [0, 0], [0.166667, 0.166667]]),
    ("E.gmpo", "gmpo", {"objective.eps_low": 0.2, "objective.eps_high": 0.2}, 6643.049678, [[0, 0], [0, 0], [0, 0]]),
    ("E.dppo_tv", "dppo_tv", OLD, -4.0, [[0, 0], [0, 0], [4, 0]]),
    ("E.gpg", "gpg", {}, -10.34, [[-0.2, 0], [0, 0], [0.2, 0.2]]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "loss", "grad"), [e[1:] for e in EDGES], ids=[e[0] for e in EDGES])
def test_edge_batch(name, changes, loss, grad):
    lp, advantages, leaf = fx_e()
    result = policy_loss(lp, override(METHODS[name], changes), advantages)
    result.loss.backward()
    assert result.loss.item() == pytest.approx(loss, rel=1e-6, abs=1e-6)
    torch.testing.assert_close(leaf.grad, double(grad), rtol=0, atol=1e-6)


def test_trm_divides_by_all_sequences():
    """loss.trm with M = [1, 0], by hand: the second sequence adds nothing and stays in N = 2."""
    lp, advantages, leaf = fx_a()
    row = override(METHODS["trm_ratio"], {"gate.high": 0.3})  # max |log w| is 0.8 and 0.28
    result = policy_loss(lp, row, advantages)
    result.loss.backward()
    w = (lp.current.detach() - lp.logp_rollout).exp()
    assert result.corrected.keep.tolist() == [False] * 4 + [True] * 3
    assert result.loss.item() == pytest.approx(0.5 * w[4:].sum().item() / 2, rel=1e-12)
    assert (leaf.grad[0] == 0).all()
    torch.testing.assert_close(leaf.grad[1, :3], 0.5 * w[4:] / 2)
    assert int(MASK.sum()) == len(w)


@pytest.mark.parametrize(
    ("name", "advantage", "reward", "low", "high"),
    [
        ("dispo", 1.0, 1.0, 0.8, 11.0),
        ("dispo", -1.0, 1.0, 0.8, 1.2),
        ("dispo", 1.0, 0.0, 0.9, 1.2),
        ("dispo", -1.0, 0.0, 0.9, 101.0),
        ("dispo_paper", 1.0, 1.0, 0.8, 11.0),
        ("dispo_paper", -1.0, 0.0, 0.0, 101.0),
    ],
)
def test_both_limits_of_dispo_act_for_each_sign_and_outcome(name, advantage, reward, low, high):
    ratios = double([0.05, 0.5, 1.0, 5.0, 50.0, 500.0])
    old = torch.full_like(ratios, -8.0)
    logp = (old + ratios.log()).requires_grad_()
    lp = LogProbs(old, Segments.from_lengths([1] * len(ratios)), logp, old)
    batch_info = BatchInfo(rewards=torch.full_like(ratios, reward))
    policy_loss(lp, name, torch.full_like(ratios, advantage), batch_info).loss.backward()
    torch.testing.assert_close(logp.grad, -advantage * ratios.clamp(low, high) / len(ratios))
