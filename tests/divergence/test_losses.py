"""Exact KL and entropy as losses: the numbers that are measured, and gradients that are the truth."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from torch.autograd import gradcheck

from offdrift.divergence import chunks, kernels, losses
from offdrift.divergence.exact import definition
from offdrift.divergence.fused import exact_divergences
from offdrift.divergence.interval import OWN
from offdrift.divergence.losses import entropy, kl_current_rollout, kl_rollout_current
from offdrift.errors import BadValueError, ShapeError
from tests.divergence.definitions import naive_loss
from tests.divergence.pairs import HAS_COMPILER, first_tokens, pairs, peak_bytes, random_pair

INF, NAN = math.inf, math.nan


def entropy_of(_, logits, **options):
    return entropy(logits, **options)


LOSSES = {"kl_rollout_current": kl_rollout_current, "kl_current_rollout": kl_current_rollout, "entropy": entropy_of}
every_loss = pytest.mark.parametrize("of", LOSSES)


def gradient_of(value, logits, upstream):
    assert value.shape == upstream.shape == (len(logits),)
    return torch.autograd.grad(value, logits, upstream)[0]


def upstream_for(logits):
    """Coefficients as a loss gives them: of both signs, different on every token."""
    return torch.linspace(-1, 2, len(logits), dtype=torch.promote_types(logits.dtype, torch.float32))


@every_loss
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_gradcheck(of, temperature):
    mu, pi = random_pair(3, 6, drift=0.7, scale=1.5)
    mu[0, 2] = pi[0, 2] = mu[1, 4] = pi[1, 4] = -INF  # filtered by both
    if of != "kl_rollout_current":
        pi[2, 0] = -INF  # by the current policy alone
    loss = partial(LOSSES[of], temperature=temperature)
    assert gradcheck(lambda z: loss(mu, z), pi.requires_grad_(), eps=1e-6, atol=1e-8)


@every_loss
@given(pair=pairs())
@settings(deadline=None, max_examples=40)
def test_the_loss_is_the_number_that_is_measured(of, pair):
    mu, pi = pair
    measured = getattr(exact_divergences(mu, pi, temperature=0.8), of)
    lost = LOSSES[of](mu, pi, temperature=0.8)
    # The entropy is measured beside eight other numbers, and its sums are put together in another order.
    ulps = 4 * torch.finfo(measured.dtype).eps if of == "entropy" else 0.0
    torch.testing.assert_close(lost, measured, rtol=ulps, atol=0.0, equal_nan=True)
    assert len(measured) == len(mu)


@every_loss
@given(pair=pairs())
@settings(deadline=None, max_examples=40)
def test_laws_of_the_gradient(of, pair):
    mu, pi = pair
    pi.requires_grad_()
    value = LOSSES[of](mu, pi)
    ones = torch.ones(len(mu), dtype=torch.float64)
    gradient = gradient_of(value, pi, ones)
    assert gradient.shape == pi.shape
    finite = value.isfinite()
    # A shift of all logits changes nothing, as far as the KL is known; a filtered token stays so.
    shift = gradient[finite].sum(-1)
    assert (shift.abs() <= OWN * value[finite] + 1e-12).all()
    assert (gradient[pi == -INF] == 0).all()
    assert gradient.isfinite().all(1)[finite].all()
    if of != "entropy":
        # A policy that has not moved is not pushed.
        own = mu.clone().requires_grad_()
        assert (gradient_of(LOSSES[of](mu, own), own, ones).abs() < 1e-14).all()


@every_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("drift", [1e-3, 0.1, 2.0])
def test_no_further_from_the_truth_than_autograd(of, dtype, drift):
    mu, pi = (z.to(dtype) for z in random_pair(6, 500, drift=drift))
    upstream = upstream_for(pi)

    def gradient(loss, mu, pi):
        pi = pi.detach().clone().requires_grad_()
        value = loss(mu, pi, temperature=0.9)
        return gradient_of(value, pi, upstream.to(value.dtype))

    plain = partial(naive_loss, of)
    ours, theirs = gradient(LOSSES[of], mu, pi), gradient(plain, mu, pi)
    truth = gradient(plain, mu.double(), pi.double())
    assert ours.dtype is dtype
    assert ours.shape == (6, 500)
    slack = rounding(mu, pi, 0.9, upstream, truth) + torch.finfo(dtype).eps * truth.abs()
    slack += torch.finfo(dtype).smallest_normal
    assert ((ours - truth).abs() <= (theirs - truth).abs() + slack).all()


def rounding(mu, pi, temperature, upstream, gradient):
    """What float32 log-probs leave uncertain: two units in their last place, as share of the terms."""
    log_mu, log_pi = mu.double().log_softmax(-1), (pi.double() / temperature).log_softmax(-1)
    terms = gradient.abs() + (log_mu.exp() + log_pi.exp()) * upstream[:, None].abs()
    return 2 * torch.finfo(torch.float32).eps * (1 + log_mu.abs() + log_pi.abs()) * terms


def test_a_tiny_drift_has_a_gradient_in_float32():
    # KL is 5e-11 nats; a thousandth of the gradient is still right.
    mu, pi = (z.float() for z in random_pair(4, 2000, drift=1e-5))
    truth = pi.double().softmax(-1) - mu.double().softmax(-1)
    pi.requires_grad_()
    ours = gradient_of(kl_rollout_current(mu, pi), pi, torch.ones(4))
    relative = (ours - truth).abs().sum(-1) / truth.abs().sum(-1)
    assert len(relative) == 4
    assert (relative < 0.02).all()


@pytest.mark.parametrize(
    ("of", "mu", "pi", "value", "gradient"),
    [
        # KL(mu || pi) = inf where pi cannot draw the second token; what it can, still moves:
        # pi - mu = (2/3, 1/3) - (1/3, 1/3).
        ("kl_rollout_current", [1, 1, 1], [2, 0, 1], INF, [1 / 3, 0, 0]),
        ("kl_rollout_current", [1, 0, 1], [2, 0, 2], 0, [0, 0, 0]),
        ("kl_rollout_current", [1, 0, 0], [1, 0, 1], math.log(2), [-0.5, 0, 0.5]),
        # KL(pi || mu) = inf: as mu(b) vanishes the gradient grows beyond every bound.
        ("kl_current_rollout", [1, 0, 1], [1, 1, 0], INF, [NAN, NAN, 0]),
        ("kl_current_rollout", [1, 1, 2], [1, 1, 0], math.log(2), [0, 0, 0]),
        ("kl_current_rollout", [1, 0, 1], [1, 0, 1], 0, [0, 0, 0]),
        ("entropy", [1, 1, 1], [1, 0, 1], math.log(2), [0, 0, 0]),
        ("entropy", [1, 1, 1], [0, 1, 0], 0, [0, 0, 0]),
        # No distribution.
        ("kl_rollout_current", [1, 1, NAN], [1, 1, 1], NAN, [NAN] * 3),
        ("kl_rollout_current", [1, 1, 1], [1, 1, NAN], NAN, [NAN] * 3),
        ("kl_current_rollout", [NAN, 1, 1], [1, 1, 0], NAN, [NAN, NAN, 0]),
        ("entropy", [1, 1, 1], [1, NAN, 1], NAN, [NAN] * 3),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_edges(of, mu, pi, value, gradient, dtype):
    # Given as masses; their logarithms are the logits.
    mu, pi = (torch.tensor([x], dtype=dtype).log() for x in (mu, pi))
    pi.requires_grad_()
    got = LOSSES[of](mu, pi)
    close = {"rtol": 1e-6, "atol": 1e-7, "equal_nan": True}
    torch.testing.assert_close(got.detach(), torch.tensor([value], dtype=dtype), **close)
    one = torch.ones(1, dtype=dtype)
    expected = torch.tensor([gradient], dtype=dtype)
    torch.testing.assert_close(gradient_of(got, pi, one), expected, **close)
    # A token that a mask takes out of the loss has gradient 0, whatever is in its row.
    again = gradient_of(LOSSES[of](mu, pi), pi, 0 * one)
    assert again.tolist() == [[0.0] * 3]


@every_loss
@pytest.mark.parametrize("bad", [NAN, INF])
def test_nothing_leaks_out_of_a_bad_row(of, bad):
    mu, pi = random_pair(5, 8, drift=0.5)
    expected = gradient_of(LOSSES[of](mu, pi.requires_grad_()), pi, upstream_for(pi))
    spoiled = pi.detach().clone()
    spoiled[2, 3] = bad
    got = gradient_of(LOSSES[of](mu, spoiled.requires_grad_()), spoiled, upstream_for(pi))
    assert got.isnan().all(1).tolist() == [False, False, True, False, False]
    rest = [0, 1, 3, 4]
    torch.testing.assert_close(got[rest], expected[rest], rtol=0, atol=0)


@every_loss
@pytest.mark.parametrize("threads", [1, 2])
def test_pieces_and_threads_change_nothing(of, threads, monkeypatch):
    mu, pi = random_pair(11, 30, drift=0.5)
    pi.requires_grad_()
    whole = gradient_of(LOSSES[of](mu, pi, compiled=False), pi, upstream_for(pi))
    monkeypatch.setattr(chunks, "THREADS_FROM", 1)
    monkeypatch.setitem(chunks.PLAIN_CHUNK, "cpu", 3 * 30)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        pieces = gradient_of(LOSSES[of](mu, pi, compiled=False), pi, upstream_for(pi))
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(pieces, whole, rtol=1e-12, atol=1e-16)
    assert whole.abs().sum(-1).count_nonzero() == 11


@every_loss
def test_logits_may_be_cut_from_a_padded_vocabulary(of):
    mu, pi = random_pair(5, 12, drift=0.5)
    padded = torch.cat([pi, torch.full((5, 4), 99.0).double()], dim=1).requires_grad_()
    pi.requires_grad_()
    expected = gradient_of(LOSSES[of](mu, pi), pi, upstream_for(pi))
    got = gradient_of(LOSSES[of](mu, padded[:, :12]), padded, upstream_for(pi))
    torch.testing.assert_close(got[:, :12], expected)
    assert got[:, 12:].tolist() == [[0.0] * 4] * 5


@every_loss
def test_the_backward_pass_allocates_the_gradient_and_one_chunk(of, monkeypatch):
    v = 2**10
    monkeypatch.setitem(chunks.PLAIN_CHUNK, "cpu", 4 * v)
    extra = []
    for n in (64, 256):
        mu, pi = (z.bfloat16() for z in random_pair(n, v, drift=0.1))
        value = LOSSES[of](mu, pi.requires_grad_(), compiled=False)
        upstream = torch.ones(n)
        peak = peak_bytes(lambda v=value, p=pi, u=upstream: torch.autograd.grad(v, p, u))
        extra.append(peak - pi.nbytes)
    temporary = 4 * v * 4
    assert 0 < extra[0] < 12 * temporary
    assert extra[1] - extra[0] < temporary


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")
@pytest.mark.skipif(not HAS_COMPILER, reason="needs a C++ compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # by the library, and by torch's compiler
@every_loss
def test_compiled_equals_plain(of, dtype, monkeypatch, tmp_path):
    monkeypatch.delenv("TORCH_COMPILE_DISABLE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(chunks, "COMPILED_CHUNK", 5 * 2003)
    mu, pi = (z.to(dtype) for z in random_pair(23, 2003, drift=0.5))
    mu[0, 7], pi[1, 9], mu[2], pi[3, 3] = -INF, -INF, -INF, NAN
    mu[4, ::2] = pi[4, ::2] = -INF
    pi.requires_grad_()
    upstream = upstream_for(pi)
    upstream[2] = 0
    plain, compiled = (
        gradient_of(LOSSES[of](mu, pi, temperature=0.9, compiled=c), pi, upstream) for c in (False, True)
    )
    assert not compiled[2].any()
    assert torch.equal(compiled.isnan(), plain.isnan())
    assert torch.equal(compiled[4] == 0, pi[4] == -INF)
    ordinary = slice(5, 23)
    mu, own, upstream_here = mu[ordinary], pi.detach()[ordinary], upstream[ordinary]

    def autograd(dtype):
        logits = own.to(dtype).requires_grad_()
        value = naive_loss(of, mu.to(dtype), logits, temperature=0.9)
        return gradient_of(value, logits, upstream_here.to(dtype))

    truth, naive = autograd(torch.float64), autograd(torch.float32)
    slack = rounding(mu, own, 0.9, upstream_here, truth)
    assert slack.max() < 1e-5
    for ours in (plain[ordinary], compiled[ordinary]):
        assert ((ours - truth).abs() <= (naive - truth).abs() + slack).all()
    own.requires_grad_()
    value = LOSSES[of](mu, own, temperature=0.9, compiled=True)
    peak = peak_bytes(lambda: torch.autograd.grad(value, own, upstream_here))
    assert peak - own.nbytes < 2**14


@every_loss
def test_only_the_current_policy_learns_and_only_once(of):
    mu, pi = (z.requires_grad_() for z in random_pair(3, 6, drift=0.5))
    before = pi.detach().clone()
    loss = LOSSES[of](mu, pi).square().sum()
    loss.backward(retain_graph=True)
    assert mu.grad is None
    assert pi.grad.abs().sum() > 0
    assert torch.equal(pi, before)
    (first,) = torch.autograd.grad(loss, pi, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@every_loss
def test_without_gradient_nothing_is_kept(of):
    mu, pi = random_pair(3, 6, drift=0.5)
    assert LOSSES[of](mu, pi).grad_fn is None
    with torch.no_grad():
        assert LOSSES[of](mu, pi.requires_grad_()).grad_fn is None


@every_loss
def test_a_gpu_keeps_the_normalizers_for_the_way_back(of, monkeypatch):
    mu, pi = random_pair(3, 6, drift=0.5)
    pi.requires_grad_()
    kept = kernels.Normalizers(*torch.arange(12.0).reshape(4, 3))
    calls = []

    def with_normalizers(logits_rollout, logits, temperature, tv):
        assert not tv  # another sweep, for nothing
        calls.append((logits_rollout.data_ptr(), logits.data_ptr(), temperature))
        return definition(logits_rollout, logits, first_tokens(logits), temperature), kept

    def gradient(which, upstream, value, logits_rollout, logits, normalizers, temperature):
        calls.append((logits_rollout.data_ptr(), logits.data_ptr(), temperature))
        assert (which, upstream.tolist()) == (of, [1.0] * 3)
        torch.testing.assert_close(value, naive_loss(of, mu, pi.detach(), 0.7))
        assert torch.equal(torch.stack(normalizers), torch.stack(kept))
        return torch.full_like(pi, 7.0)

    monkeypatch.setattr(losses, "route_of", lambda *_, **__: "triton")
    monkeypatch.setattr(kernels, "with_normalizers", with_normalizers)
    monkeypatch.setattr(kernels, "gradient", gradient)
    value = LOSSES[of](mu, pi, temperature=0.7)
    assert gradient_of(value, pi, torch.ones(3).double()).unique().tolist() == [7.0]
    rollout = pi if of == "entropy" else mu
    assert calls == [(rollout.data_ptr(), pi.data_ptr(), 0.7)] * 2


def test_bad_arguments_are_refused():
    z = torch.zeros(2, 3)
    for loss in LOSSES.values():
        with pytest.raises(BadValueError, match="temperature is 0"):
            loss(z, z, temperature=0)
    for loss in (kl_rollout_current, kl_current_rollout):
        with pytest.raises((ShapeError, TypeError)):
            loss(z, torch.zeros(2, 4))
