"""The same losses and gradients as verl's per-token policy losses, called in this process."""

import warnings

import pytest
import torch

from offdrift.aggregate import aggregate, normalizer_of
from offdrift.logprobs import LogProbs
from offdrift.objectives.clipped import Soft
from offdrift.objectives.regression import Quadratic

AGGREGATES = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "seq_mean_token_mean",
    "seq-mean-token-sum": "seq_mean_token_sum",
}
"""verl's name -> ours."""


@pytest.fixture(scope="module")
def verl():
    pytest.importorskip("verl")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from verl.trainer.ppo import core_algos
        from verl.workers import config
    return core_algos, config


def padded(seed: int, *, drift: float = 0.5) -> dict[str, torch.Tensor]:
    """Ragged sequences in float64, padded with whatever; one advantage is exactly 0."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 13, (8,), generator=g)
    mask = (torch.arange(12) < lengths[:, None]).long()
    old = -3 * torch.rand(8, 12, generator=g, dtype=torch.float64) - 2
    logp = old + drift * torch.randn(8, 12, generator=g, dtype=torch.float64)
    advantages = torch.randn(8, 12, generator=g, dtype=torch.float64)
    advantages[0, 0] = 0.0
    return {"mask": mask, "old": old, "logp": logp.clamp(max=-1e-3), "advantages": advantages}


def theirs(verl, name, b, how, config, weights=None):
    """verl's loss and its gradient; only an integer mask keeps its sequence means exact."""
    core_algos, _ = verl
    leaf = b["logp"].clone().requires_grad_()
    loss, _ = core_algos.get_policy_loss_fn(name)(
        old_log_prob=b["old"],
        log_prob=leaf,
        advantages=b["advantages"],
        response_mask=b["mask"],
        loss_agg_mode=how,
        config=config,
        rollout_is_weights=weights,
    )
    (grad,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), grad


def ours(objective, b, how, weights=None):
    leaf = b["logp"].clone().requires_grad_()
    lp = LogProbs.pack(b["old"], leaf, b["old"], mask=b["mask"])
    tokens = objective(lp, lp.like_caller(b["advantages"])).loss
    if weights is not None:
        tokens = tokens * lp.like_caller(weights)
    loss = aggregate(tokens, lp.segments, how=how, normalizer=normalizer_of(lp.segments, how=how))
    (grad,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), grad


def check_same(actual, expected, *, grads: int, rtol: float = 0.0) -> None:
    torch.testing.assert_close(actual[0], expected[0], rtol=rtol, atol=1e-9)
    torch.testing.assert_close(actual[1], expected[1], rtol=rtol, atol=1e-9)
    assert (actual[1] != 0).sum() == grads > 20


def actor(verl, dro_beta=None, **options):
    policy_loss = verl[1].PolicyLossConfig(dro_beta=dro_beta)
    sizes = {"ppo_micro_batch_size_per_gpu": 1, "rollout_n": 1}
    return verl[1].ActorConfig(strategy="fsdp", policy_loss=policy_loss, **sizes, **options)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("tau_positive", "tau_negative"), [(1.0, 1.05), (0.5, 3.0)])
def test_sapo(verl, seed, tau_positive, tau_negative):
    b = padded(seed)
    config = actor(verl, tau_pos=tau_positive, tau_neg=tau_negative)
    how = "seq-mean-token-mean"
    soft = Soft(tau_positive=tau_positive, tau_negative=tau_negative)
    pushing = int((b["mask"].bool() & (b["advantages"] != 0)).sum())
    check_same(ours(soft, b, AGGREGATES[how]), theirs(verl, "sapo", b, how, config), grads=pushing)


def test_sapo_aggregates_in_one_way_whatever_it_is_asked(verl):
    b, config = padded(0), actor(verl)
    asked = theirs(verl, "sapo", b, "token-mean", config)
    forced = theirs(verl, "sapo", b, "seq-mean-token-mean", config)
    assert torch.equal(asked[0], forced[0])
    assert torch.equal(asked[1], forced[1])


@pytest.mark.parametrize("drift", [30.0])
def test_sapo_far_from_the_old_policy(verl, drift):
    b = padded(1, drift=drift)
    moved = (b["logp"] - b["old"]) * b["mask"]
    assert (moved < -20).any()
    how = "seq-mean-token-mean"
    actual, expected = ours(Soft(), b, AGGREGATES[how]), theirs(verl, "sapo", b, how, actor(verl))
    check_same(actual, expected, grads=int((expected[1] != 0).sum()))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("how", AGGREGATES)
@pytest.mark.parametrize("beta", [0.1, 2.0])
def test_dro(verl, seed, how, beta):
    b = padded(seed)
    config = actor(verl, dro_beta=beta)
    actual = ours(Quadratic(beta=beta), b, AGGREGATES[how])
    check_same(actual, theirs(verl, "dro", b, how, config), grads=int(b["mask"].sum()))


def test_dro_weights_multiply_push_and_pull_alike(verl):
    b, config = padded(2), actor(verl, dro_beta=0.7)
    weights = torch.rand(8, 12, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    actual = ours(Quadratic(beta=0.7), b, "token_mean", weights)
    expected = theirs(verl, "dro", b, "token-mean", config, weights)
    check_same(actual, expected, grads=int(b["mask"].sum()))


def test_dro_does_not_clamp_the_log_ratio(verl):
    b, config = padded(3, drift=300.0), actor(verl, dro_beta=0.1)
    assert ((b["logp"] - b["old"]) * b["mask"]).min() < -100
    actual = ours(Quadratic(beta=0.1), b, "token_mean")
    expected = theirs(verl, "dro", b, "token-mean", config)
    check_same(actual, expected, grads=int(b["mask"].sum()), rtol=1e-12)


def test_a_float_mask_makes_sequence_means_of_verl_too_small(verl):
    """The one disagreement: verl divides by T + 1e-8, which an integer mask rounds away."""
    b, config = padded(0), actor(verl)
    b["mask"] = b["mask"].double()
    how = "seq-mean-token-mean"
    actual, expected = ours(Soft(), b, AGGREGATES[how]), theirs(verl, "sapo", b, how, config)
    lengths = b["mask"].sum(1, keepdim=True)
    check = actual[1] * lengths / (lengths + 1e-8)
    torch.testing.assert_close(check, expected[1], rtol=1e-12, atol=0)
    assert ((actual[1] - expected[1]).abs() > 1e-9 * actual[1].abs()).sum() > 20
