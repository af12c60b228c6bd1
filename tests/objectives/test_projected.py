"""TROLL: the loss of a projected policy, from logits to weights, and its refusal where there are none."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from offdrift import METHODS, BatchInfo, LogProbs, Segments, policy_loss
from offdrift.divergence.evidence import Distributions
from offdrift.errors import BadValueError, EvidenceError, MethodError, ShapeError
from offdrift.methods import method, override
from offdrift.objectives.reinforce import ProjectedSurrogate
from tests.divergence.test_projection import projected

TOKENS = torch.tensor([0, 3, 1, 2, 2, 0])
SEGMENTS = Segments.from_lengths([2, 4])
A = torch.tensor([1.0, 1.0, -0.5, -0.5, -0.5, -0.5], dtype=torch.float64)


def batch(apart: float = 1.0) -> tuple[LogProbs, BatchInfo, torch.Tensor]:
    """Six tokens of a vocabulary of four; the current policy is `apart` from the old one."""
    g = torch.Generator().manual_seed(3)
    old, move = torch.randn(2, 6, 4, generator=g, dtype=torch.float64)
    logits = (old + apart * move).requires_grad_()
    at = lambda x: x.log_softmax(-1).gather(1, TOKENS[:, None])[:, 0]  # noqa: E731
    lp = LogProbs.pack(at(old), at(logits), at(old), segments=SEGMENTS)
    return lp, BatchInfo(distributions=Distributions(old, logits, TOKENS)), logits


def test_the_loss_is_the_projected_ratio_and_the_pull_by_hand():
    lp, info, _ = batch()
    both = info.distributions
    assert both is not None
    log_old, log_new = both.logits_old.log_softmax(-1), both.logits.detach().log_softmax(-1)
    pi = projected(both.logits_old, both.logits.detach(), bound=0.05)
    outside = (log_new.exp() * (log_new - log_old)).sum(-1) > 0.05
    assert 0 < int(outside.sum()) < 6
    ratio = (pi - log_old).gather(1, TOKENS[:, None])[:, 0].exp()
    pull = (log_new.exp() * (log_new - pi)).sum(-1)
    for coef in (0.0, 1.0, 2.5):
        out = policy_loss(lp, override(method("troll"), {"objective.coef": coef}), A, info)
        assert float(out.loss.detach()) == pytest.approx(float((-A * ratio + coef * pull).mean()), rel=1e-10)
    assert out.metrics["objective/clip_frac_active"] == pytest.approx(float(outside.double().mean()))


def test_inside_the_ball_it_is_the_plain_surrogate():
    lp, info, logits = batch(apart=0.05)
    plain = replace(METHODS["trm_max"], correction=METHODS["none"].correction, aggregate="token_mean")
    plain = override(plain, {"objective.on": "staleness"})
    losses = [policy_loss(lp, row, A, info).loss for row in (method("troll"), plain)]
    mine, surrogate = (torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in losses)
    torch.testing.assert_close(mine, surrogate, rtol=1e-10, atol=1e-15)
    assert float(losses[0].detach()) == pytest.approx(float(losses[1].detach()), rel=1e-12)


def test_the_gradient_at_the_logits_is_a_finite_difference():
    """With the pull's target held, as the objective says."""
    lp, info, logits = batch()
    both = info.distributions
    assert both is not None
    row = override(method("troll"), {"objective.coef": 0.0})
    (got,) = torch.autograd.grad(policy_loss(lp, row, A, info).loss, logits)

    def loss(z: torch.Tensor) -> float:
        logp = z.log_softmax(-1).gather(1, TOKENS[:, None])[:, 0]
        moved = BatchInfo(distributions=Distributions(both.logits_old, z, TOKENS))
        return float(policy_loss(replace(lp, logp=logp), row, A, moved).loss)

    for i in range(6):
        for a in range(4):
            e = torch.zeros(6, 4, dtype=torch.float64)
            e[i, a] = 1e-6
            z = logits.detach()
            assert float(got[i, a]) == pytest.approx((loss(z + e) - loss(z - e)) / 2e-6, rel=1e-5, abs=1e-9)


def test_repeated_steps_stay_near_the_ball_where_a_clip_does_not():
    """One token that is always good: PPO's clip lets the KL grow until the ratio is 1.2, TROLL holds it at the bound."""
    old = torch.tensor([[4.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    tokens, a = torch.tensor([1]), torch.ones(1, dtype=torch.float64)
    kl = {}
    for name, bound in (("troll", 0.01), ("none", None)):
        z = old.clone().requires_grad_()
        optimizer = torch.optim.SGD([z], lr=0.5)
        row = METHODS[name] if bound is None else override(METHODS[name], {"objective.bound": bound})
        for _ in range(400):
            logp, was = (x.log_softmax(-1)[:, 1] for x in (z, old))
            lp = LogProbs.pack(was, logp, was, segments=Segments.from_lengths([1]))
            info = BatchInfo(distributions=Distributions(old, z, tokens))
            optimizer.zero_grad()
            policy_loss(lp, row, a, info).loss.backward()
            optimizer.step()
        new, log_old = z.detach().log_softmax(-1), old.log_softmax(-1)
        kl[name] = float((new.exp() * (new - log_old)).sum())
    assert kl["troll"] < 0.03
    assert kl["none"] > 1


def test_log_probs_alone_are_refused_with_the_way_out():
    lp, _, _ = batch()
    with pytest.raises(EvidenceError, match=r"needs distributions, .*logits_old, logits, tokens.*ppo_clip or gspo"):
        policy_loss(lp, "troll", A)


@pytest.mark.parametrize("which", ["logits_old", "logits"])
def test_distributions_of_another_temperature_or_order_are_refused(which):
    lp, info, _ = batch()
    both = info.distributions
    assert both is not None
    hot = replace(both, **{which: getattr(both, which) / 2})
    with pytest.raises(BadValueError, match=rf"^{which} of distributions give the drawn token of row \d"):
        policy_loss(lp, "troll", A, BatchInfo(distributions=hot))
    spoiled = getattr(both, which).clone()
    spoiled[4, 1] = torch.nan
    with pytest.raises(BadValueError, match=rf"^{which} .* row 4 the log-prob nan"):
        policy_loss(lp, "troll", A, BatchInfo(distributions=replace(both, **{which: spoiled})))
    shorter = both.map(lambda x: x[:5])
    with pytest.raises(ShapeError, match="distributions has shape"):
        policy_loss(lp, "troll", A, BatchInfo(distributions=shorter))


def test_where_the_host_must_not_wait_such_a_loss_is_no_number(monkeypatch):
    lp, info, _ = batch()
    both = info.distributions
    assert both is not None
    hot = BatchInfo(distributions=replace(both, logits=both.logits / 2))
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    assert policy_loss(lp, "troll", A, hot).loss.isnan()
    assert policy_loss(lp, "troll", A, info).loss.isfinite()


def test_tokens_that_the_engine_did_not_score_are_left_out():
    lp, info, logits = batch()
    rollout = lp.logp_rollout.clone()
    rollout[2] = -9999.0
    some = LogProbs.pack(rollout, lp.logp, lp.logp_old, segments=SEGMENTS)
    out = policy_loss(some, "troll", A, info)
    (grad,) = torch.autograd.grad(out.loss, logits)
    assert (grad[2] == 0).all()
    assert (grad[[0, 1, 3]] != 0).any(1).all()


def test_settings_out_of_range_are_refused():
    for words in ({"bound": 0.0}, {"bound": -1.0}, {"coef": -1.0}):
        with pytest.raises(MethodError, match="must be positive and"):
            ProjectedSurrogate(**words)
