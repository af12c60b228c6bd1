"""The plain definition against an independent one in float64, and the laws of KL and TV."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offdrift.divergence.exact import SERIES_BELOW, kl_and_tv, terms
from tests.divergence.pairs import FX_V_MU, FX_V_PI, pairs, random_pair
from tests.oracles import divergence as oracle

INF, NAN = math.inf, math.nan


def truth(mu, pi, temperature=1.0):
    rows = list(zip(mu.tolist(), pi.tolist(), strict=True))
    as_vector = lambda xs: torch.tensor(xs, dtype=torch.float64)  # noqa: E731
    return (
        as_vector([oracle.kl(*r, temperature) for r in rows]),
        as_vector([oracle.tv(*r, temperature) for r in rows]),
    )


def naive(mu, pi):
    """Log-softmax twice and reduce, in float32: what one writes without thinking."""
    log_mu, log_pi = mu.float().log_softmax(-1), pi.float().log_softmax(-1)
    p, q = log_mu.exp(), log_pi.exp()
    return (p * (log_mu - log_pi)).sum(-1), (p - q).abs().sum(-1) / 2


def test_golden_numbers_of_the_methods_table():
    kl, tv = kl_and_tv(FX_V_MU.log(), FX_V_PI.log())  # V.kl, V.tv
    torch.testing.assert_close(kl, torch.tensor([0.02681245, 0.01006776, 0.05107412]).double(), rtol=0, atol=1e-8)  # fmt: skip
    torch.testing.assert_close(tv, torch.tensor([0.1, 0.05, 0.1]).double(), rtol=0, atol=1e-8)


@given(pairs())
def test_equals_the_definition(pair):
    mu, pi = pair
    kl, tv = kl_and_tv(mu, pi)
    expected_kl, expected_tv = truth(mu, pi)
    assert kl.shape == tv.shape == (len(mu),)
    torch.testing.assert_close(kl, expected_kl, rtol=1e-7, atol=1e-14)
    torch.testing.assert_close(tv, expected_tv, rtol=1e-7, atol=1e-14)


@given(pairs())
def test_laws_of_kl_and_tv(pair):
    mu, pi = pair
    kl, tv = kl_and_tv(mu, pi)
    reverse_tv = kl_and_tv(pi, mu)[1]
    assert (kl >= 0).all()
    assert ((tv >= 0) & (tv <= 1)).all()
    assert (tv <= (kl / 2).sqrt() + 1e-12).all()  # Pinsker
    torch.testing.assert_close(tv, reverse_tv, rtol=1e-7, atol=1e-12)
    for same in kl_and_tv(mu, mu.clone()):
        assert same.tolist() == [0.0] * len(mu)


@given(pairs(), st.floats(-100, 100), st.floats(-100, 100))
def test_only_differences_within_a_row_matter(pair, shift_mu, shift_pi):
    mu, pi = pair
    kl, tv = kl_and_tv(mu, pi)
    shifted = kl_and_tv(mu + shift_mu, pi.log_softmax(-1) + shift_pi)
    torch.testing.assert_close(shifted[0], kl, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(shifted[1], tv, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("mu", "pi", "kl", "tv"),
    [
        # 0 log 0 = 0: what mu cannot draw costs KL nothing; TV sees pi's mass there.
        ([0.0, -INF], [0.0, 0.0], math.log(2), 0.5),
        # What pi cannot draw and mu can: infinite.
        ([0.0, 0.0], [0.0, -INF], INF, 0.5),
        # Both filtered: as if the token did not exist.
        ([0.0, -INF, 0.0], [0.0, -INF, 0.0], 0.0, 0.0),
        ([0.0, -INF], [-INF, 0.0], INF, 1.0),
        # mu(a) underflows in every float format, and is still not zero.
        ([0.0, -1e4], [0.0, -INF], INF, 0.0),
        # A finite mask value instead of -inf.
        ([0.0, -3e38], [0.0, 0.0], math.log(2), 0.5),
        ([0.0, 1e4], [0.0, -1e4], 1e4, 1.0),
        ([1e4, 0.0], [1e4, 0.0], 0.0, 0.0),
        ([5.0], [-7.0], 0.0, 0.0),
        # No distribution: NaN, whatever stands beside it.
        ([-INF, -INF], [0.0, 0.0], NAN, NAN),
        ([0.0, 0.0], [-INF, -INF], NAN, NAN),
        ([0.0, NAN], [0.0, 0.0], NAN, NAN),
        ([0.0, 0.0], [NAN, -INF], NAN, NAN),
        ([INF, 0.0], [0.0, 0.0], NAN, NAN),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_edges(mu, pi, kl, tv, dtype):
    got = kl_and_tv(torch.tensor([mu], dtype=dtype), torch.tensor([pi], dtype=dtype))
    expected = torch.tensor([[kl], [tv]], dtype=dtype)
    torch.testing.assert_close(torch.stack(got), expected, equal_nan=True, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_temperature_divides_the_current_logits_alone(temperature):
    mu, pi = random_pair(5, 40, drift=0.5)
    torch.testing.assert_close(
        torch.stack(kl_and_tv(mu, pi, temperature)), torch.stack(truth(mu, pi, temperature)),
        rtol=1e-7, atol=0,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("drift", [1e-2, 0.3, 3.0])
def test_no_further_from_the_truth_than_the_naive_way(dtype, drift):
    mu, pi = (z.to(dtype) for z in random_pair(6, 500, drift=drift))
    got, obvious, expected = kl_and_tv(mu, pi), naive(mu, pi), truth(mu.double(), pi.double())
    for ours, theirs, exact in zip(got, obvious, expected, strict=True):
        assert ours.dtype is torch.float32
        assert len(ours) == 6
        assert ((ours - exact).abs() <= (theirs - exact).abs() + 2e-5 * exact).all()


@pytest.mark.parametrize("drift", [1e-5, 1e-4])
def test_a_tiny_divergence_survives_float32(drift):
    # Naive float32 is noise here: KL is 5e-11 and 5e-9 nats.
    mu, pi = (z.float() for z in random_pair(8, 2000, drift=drift))
    kl, tv = kl_and_tv(mu, pi)
    expected_kl, expected_tv = truth(mu.double(), pi.double())
    assert 2e-11 < float(expected_kl.mean()) < 1e-8
    assert ((kl - expected_kl).abs() <= 0.02 * expected_kl).all()
    assert ((tv - expected_tv).abs() <= 0.02 * expected_tv).all()
    assert ((naive(mu, pi)[0] - expected_kl).abs().mean()) > 10 * (kl - expected_kl).abs().mean()


def test_the_series_meets_the_closed_form():
    x = torch.tensor([-1.0, 1.0], dtype=torch.float64)[:, None] * SERIES_BELOW
    log_mu = torch.tensor([[-1.0], [-1.0]], dtype=torch.float64)
    inside, outside = terms(log_mu, log_mu + x * (1 - 1e-12)), terms(log_mu, log_mu + x)
    torch.testing.assert_close(torch.stack(inside), torch.stack(outside), rtol=3e-8, atol=0)


def test_terms_of_a_partition_never_sum_to_more():
    # Lumping tokens into buckets loses divergence: the ground that intervals stand on.
    mu, pi = FX_V_MU, FX_V_PI
    lumped = [torch.stack([p[:, 0], p[:, 1:].sum(1)], dim=1).log() for p in (mu, pi)]
    for coarse, fine in zip(terms(*lumped), kl_and_tv(mu.log(), pi.log()), strict=True):
        assert (coarse.sum(1) <= fine + 1e-15).all()


def test_evidence_has_no_gradient():
    mu, pi = (z.requires_grad_() for z in random_pair(2, 5, drift=0.1))
    for x in kl_and_tv(mu, pi):
        assert not x.requires_grad
