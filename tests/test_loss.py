"""`policy_loss` against the methods table, and what it refuses."""

import math
from dataclasses import replace

import pytest
import torch

from offdrift.batch_info import BatchInfo
from offdrift.correction import Correction, Gate, Weight
from offdrift.divergence.evidence import Divergence
from offdrift.errors import EvidenceError, ShapeError
from offdrift.logprobs import LogProbs
from offdrift.loss import policy_loss
from offdrift.methods import METHODS, Method, override
from offdrift.objectives import Clipped, Reinforce
from offdrift.penalty import KLPenalty
from offdrift.stats import summarize
from offdrift.stats.drift import DriftStats
from tests.oracles.fixtures import double, fx_a

DECOUPLED = Correction(weights=(Weight(on="mismatch", cap=2.0),))


def test_algorithm_1_divides_by_what_was_sampled_not_by_what_was_accepted():
    lp, advantages, leaf = fx_a()
    kl = double([0.01] * 4 + [0.01, 0.01, 0.06])  # the second sequence has one token above 0.05
    result = policy_loss(
        lp,
        METHODS["trm_max"],
        advantages,
        BatchInfo(divergences={"kl_rollout_current": Divergence.exact("kl_rollout_current", kl)}),
    )
    result.loss.backward()
    assert result.loss.item() == pytest.approx(-2.028511, abs=1e-6)  # accepted only: -4.057023
    expected = double([[-0.580917, -0.642013, -0.580917, -0.224664], [0, 0, 0, 0]])
    torch.testing.assert_close(leaf.grad, expected, rtol=0, atol=1e-6)


def test_missing_evidence_is_an_error_never_a_quiet_no_op():
    lp, advantages, _ = fx_a()
    with pytest.raises(EvidenceError, match="needs kl_rollout_current"):
        policy_loss(lp, METHODS["trm_max"], advantages)
    no_old = LogProbs.pack(lp.logp_rollout, lp.current, segments=lp.segments)
    with pytest.raises(EvidenceError, match="needs logp_old"):
        policy_loss(no_old, Method(objective=Reinforce(), correction=DECOUPLED), advantages)


def test_advantages_of_another_shape_are_refused():
    lp, _, _ = fx_a()
    with pytest.raises(ShapeError, match="7 tokens"):
        policy_loss(lp, METHODS["none"], torch.ones(2))


def test_a_penalty_counts_every_token_whatever_the_gates_and_weights_do():
    lp, advantages, leaf = fx_a()
    lp = replace(lp, logp_ref=lp.current.detach() - 0.2)
    penalty = KLPenalty(estimator="k2", coef=3.0)
    base = override(METHODS["trm_max_k2"], {"gate.high": 1e-9})  # rejects both sequences
    result = policy_loss(lp, replace(base, penalty=penalty), advantages)
    assert not result.corrected.keep.any()
    assert result.loss.item() == pytest.approx(3.0 * 0.02 * 7 / 2)  # k2 = 0.2^2 / 2, 7 tokens, N = 2
    result.loss.backward()
    torch.testing.assert_close(leaf.grad, double([[0.3] * 4, [0.3] * 3 + [0]]))  # 3 * 0.2 / 2
    gated = policy_loss(lp, replace(base, penalty=penalty, gate_scope="all"), advantages)
    assert gated.loss.item() == 0.0
    assert summarize(gated.stats)["reference/kl"] == pytest.approx(0.02)
    rewarded = policy_loss(lp, replace(base, penalty=replace(penalty, place="reward")), advantages)
    assert rewarded.loss.item() == 0.0
    with pytest.raises(EvidenceError, match="needs logp_ref"):
        policy_loss(fx_a()[0], replace(base, penalty=penalty), advantages)


def test_the_corrected_penalty_differentiates_its_ratio():
    """DeepSeek-V3.2, eq. 7: w (e^-d - 1 + d), by hand, with the ratio's gradient."""
    lp, _, leaf = fx_a()
    d = double([0.3, -0.2, 0.1, 0.4, -0.1, 0.2, 0.05])
    lp = replace(lp, logp_ref=lp.current.detach() - d)
    row = replace(METHODS["none"], penalty=KLPenalty(estimator="k3_corrected", coef=1.0))
    policy_loss(lp, row, torch.zeros(7).double(), normalizer=1.0).loss.backward()
    w = (lp.current.detach() - lp.logp_rollout).exp()
    value = (-d).exp() - 1 + d
    assert leaf.grad is not None
    torch.testing.assert_close(lp.like_caller(leaf.grad), w * value + w * (1 - (-d).exp()))


def test_an_anchor_replaces_the_old_policy_and_nothing_else():
    """A-3PO at lag 2: the proximal policy is halfway; its factors are w^(1/2) each."""
    lp, advantages, _ = fx_a()
    lag = torch.full((7,), 2)
    result = policy_loss(lp, METHODS["a3po"], advantages, BatchInfo(version_lag=lag))
    w = (lp.current.detach() - lp.logp_rollout).exp()
    torch.testing.assert_close(result.corrected.weight, w.sqrt())
    r = w.sqrt()
    push = torch.maximum(-advantages * r, -advantages * r.clamp(0.8, 1.2))
    assert result.loss.item() == pytest.approx((w.sqrt() * push).mean().item())
    recorded = summarize(result.stats)["mismatch/k1"]
    assert recorded == pytest.approx(-(lp.old - lp.logp_rollout).mean().item())
    with pytest.raises(EvidenceError, match="needs version_lag"):
        policy_loss(lp, METHODS["a3po"], advantages)


@pytest.mark.parametrize("name", ["entropy", "version_lag", "rewards"])
def test_batch_info_of_another_shape_are_refused(name):
    lp, advantages, _ = fx_a()
    with pytest.raises((ShapeError, Exception), match=f"{name} has shape|[Tt]ype-check"):
        policy_loss(lp, METHODS["none"], advantages, BatchInfo(**{name: torch.ones(3)}))


def test_opsm_tells_mismatch_from_staleness_in_what_it_rejects():
    """gate.opsm on FX-A at delta 0.05: sequence 2 goes, with d = 0.07 = 0.0933 - 0.0233."""
    lp, advantages, _ = fx_a()
    row = override(METHODS["opsm"], {"gate.low": math.exp(-0.05)})
    found = summarize(policy_loss(lp, row, advantages).stats)
    assert found["gate/drop_frac_seq"] == 0.5
    assert found["gate/0/rejected_mismatch"] == pytest.approx(0.28 / 3)
    assert found["gate/0/rejected_staleness"] == pytest.approx(-0.07 / 3)
    kept = override(METHODS["opsm"], {"gate.low": math.exp(-0.1)})
    nothing = summarize(policy_loss(lp, kept, advantages).stats)
    assert math.isnan(nothing["gate/0/rejected_mismatch"])


GEO = Correction((Gate(statistic="ratio", on="mismatch", unit="seq_mean", low=0.9, high=1.1),))


@pytest.mark.parametrize(
    ("how", "normalizer", "loss"),
    [
        ("token_mean", "sampled", 0.221594),
        ("token_mean", "accepted", 0.517052),
        ("token_mean", "verl_trainer", 0.517052),
        ("seq_mean_token_mean", "sampled", 0.258526),
        ("seq_mean_token_mean", "accepted", 0.517052),
        ("seq_mean_token_mean", "verl_trainer", 0.258526),
        ("seq_mean_token_sum", "sampled", 3 * 0.517052 / 2),
        ("seq_mean_token_sum", "accepted", 3 * 0.517052),
    ],
)
def test_denominators_after_a_rejection(how, normalizer, loss):
    """conv.normaliser: FX-A, the first sequence rejected by a geometric gate, PPO."""
    lp, advantages, _ = fx_a()
    row = Method(objective=Clipped(), correction=GEO, aggregate=how, normalizer=normalizer)
    assert policy_loss(lp, row, advantages).loss.item() == pytest.approx(loss, abs=2e-6)


def test_statistics_are_computed_when_they_are_asked_for_and_once(monkeypatch):
    """An accelerator works on the gradient meanwhile; a loss whose statistics nobody reads does not pay for them."""
    calls, real = [], DriftStats.of

    def counted(*args, **kwargs):
        calls.append(args)
        return real(*args, **kwargs)

    monkeypatch.setattr(DriftStats, "of", staticmethod(counted))
    lp, advantages, _ = fx_a()
    result = policy_loss(lp, METHODS["ppo_clip"], advantages)
    result.loss.backward()
    more = result.plus(lambda: {"extra": 2.0})
    assert calls == []
    assert more.stats.to_host() == result.stats.to_host() | {"extra": 2.0}
    assert result.stats is result.stats
    assert len(calls) == 1
