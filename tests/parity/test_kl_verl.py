"""The same numbers and gradients as verl's KL penalties and controllers, called in this process."""

import math

import pytest
import torch

from offdrift.penalty import Adaptive, kl_estimate
from tests.parity.peers import load_verl

SAME = {
    "kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3",
    "kl+": "k1+", "k1+": "k1+", "abs+": "abs+", "mse+": "k2+", "k2+": "k2+",
    "low_var_kl+": "k3+", "k3+": "k3+",
}  # fmt: skip
"""verl's name -> ours."""


@pytest.fixture(scope="module")
def verl():
    return load_verl().core_algos


def batch(seed: int, spread: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    logp = -torch.rand(400, generator=g, dtype=torch.float64) * 5
    return logp, logp - spread * torch.randn(400, generator=g, dtype=torch.float64)


def both(verl, name, logp, logp_ref, **options):
    """Values and gradients of verl's estimate and of ours."""
    results = []
    theirs = lambda x: verl.kl_penalty(x, logp_ref, name)  # noqa: E731
    ours = lambda x: kl_estimate(x, logp_ref, estimator=SAME[name], **options)  # noqa: E731
    for function in (theirs, ours):
        leaf = logp.clone().requires_grad_()
        value = function(leaf)
        (gradient,) = torch.autograd.grad((value * torch.linspace(-1, 2, len(value))).sum(), leaf)
        results += [value.detach(), gradient]
    assert results[0].numel() == len(logp)
    return results


def same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", SAME)
def test_penalty_and_gradient(verl, name, seed):
    logp, logp_ref = batch(seed, spread=0.5)
    assert (logp - logp_ref).abs().max() < 2.5  # inside verl's clamp
    their_value, their_gradient, value, gradient = both(verl, name, logp, logp_ref)
    same(value, their_value)
    same(gradient, their_gradient)
    assert gradient.norm() > 0.1


@pytest.mark.parametrize("name", [n for n in SAME if not n.endswith("+")])
def test_forward_form(verl, name):
    logp, logp_ref = batch(5, spread=0.5)
    ours = kl_estimate(logp, logp_ref, estimator=SAME[name])  # type: ignore[arg-type]
    same(ours, verl.kl_penalty_forward(logp, logp_ref, name))


@pytest.mark.parametrize("name", ["k3", "low_var_kl", "k3+", "low_var_kl+"])
def test_k3_beyond_verls_clamp_agrees_with_value_limit_and_not_without(verl, name):
    logp, logp_ref = batch(1, spread=12.0)
    d = logp - logp_ref
    cut = d.neg().clamp(-20, 20).expm1() - d.neg().clamp(-20, 20) > 10
    assert 100 < int(cut.sum()) < 300
    assert int((d.abs() > 20).sum()) > 20
    their_value, their_gradient, value, gradient = both(verl, name, logp, logp_ref, value_limit=10.0)
    same(value, their_value)
    same(gradient, their_gradient)
    # The documented disagreement: by default the value is what k3 is, and has its gradient.
    _, _, value, gradient = both(verl, name, logp, logp_ref)
    same(value[~cut], their_value[~cut])
    same(gradient[~cut], their_gradient[~cut])
    limited = d.clamp(-20, 20)
    torch.testing.assert_close(value, torch.exp(-limited) + limited - 1, rtol=1e-12, atol=1e-9)
    assert bool((their_value[cut] == 10).all())
    assert bool((value[cut] > 10).all())
    if name.endswith("+"):
        same(gradient, their_gradient)
    else:
        assert bool((their_gradient[cut] == 0).all())
        inside = cut & (d.abs() < 20)
        assert int(inside.sum()) > 50
        assert bool((gradient[inside] != 0).all())


@pytest.mark.parametrize("name", ["k1", "abs", "k2", "k1+", "abs+", "k2+"])
def test_verl_limits_no_other_estimate(verl, name):
    logp, logp_ref = batch(2, spread=12.0)
    their_value, their_gradient, value, gradient = both(verl, name, logp, logp_ref)
    same(value, their_value)
    same(gradient, their_gradient)
    assert value.max() > 20


def test_verl_has_no_full_estimate(verl):
    with pytest.raises(NotImplementedError):
        verl.kl_penalty(*batch(0), "full")


@pytest.mark.parametrize("horizon", [10_000, 500])
def test_adaptive_controller_over_many_steps(verl, horizon):
    theirs = verl.AdaptiveKLController(init_kl_coef=0.001, target_kl=0.1, horizon=horizon)
    ours, coef = Adaptive(target=0.1, horizon=horizon), 0.001
    measured = torch.randn(200, generator=torch.Generator().manual_seed(0)).mul(0.2).tolist()
    for step, kl in enumerate(measured):
        samples = 64 * (1 + step % 4)
        theirs.update(kl, samples)
        coef = ours.next(coef, kl=kl, samples=samples)
        assert coef == pytest.approx(theirs.value, rel=1e-12)
    assert abs(math.log(coef / 0.001)) > 0.01


def test_adaptive_controller_disagrees_where_verls_coefficient_is_lost(verl):
    theirs = verl.AdaptiveKLController(init_kl_coef=0.001, target_kl=0.1, horizon=10)
    theirs.update(0.0, 64)
    assert theirs.value < 0
    assert Adaptive(target=0.1, horizon=10).next(0.001, kl=0.0, samples=64) == pytest.approx(1e-5)
    theirs = verl.AdaptiveKLController(init_kl_coef=0.001, target_kl=0.1, horizon=10_000)
    theirs.update(math.nan, 64)
    assert math.isnan(theirs.value)
    assert Adaptive(target=0.1, horizon=10_000).next(0.001, kl=math.nan, samples=64) == 0.001
