"""The definition against an independent one in float64, and the laws of the divergences."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offdrift.divergence.exact import SERIES_BELOW, ExactDivergences, all_terms, definition, terms
from tests.divergence.definitions import naive, truth
from tests.divergence.pairs import FX_V_MU, FX_V_PI, FX_V_TOKENS, first_tokens, pairs, random_pair

INF, NAN = math.inf, math.nan
unhurried = settings(deadline=None)  # the first example may wait for a busy machine
SWAPPED = {"kl_rollout_current": "kl_current_rollout", "tv": "tv", "entropy_rollout": "entropy", "logp_rollout": "logp"}


def of(mu, pi, tokens=None, temperature=1.0):
    return definition(mu, pi, first_tokens(mu) if tokens is None else tokens, temperature)


def check_close(got, expected, *, n, rtol, atol):
    """Every field, and of every field all `n` numbers."""
    for name, ours, theirs in zip(ExactDivergences._fields, got, expected, strict=True):
        assert ours.shape == (n,)
        torch.testing.assert_close(
            ours, theirs.to(ours.dtype), rtol=rtol, atol=atol, equal_nan=True,
            msg=lambda words, name=name: f"{name}: {words}",
        )  # fmt: skip


def test_golden_numbers_of_the_methods_table():
    found = of(FX_V_MU.log(), FX_V_PI.log(), FX_V_TOKENS)  # V.kl, V.tv
    golden = {"kl_rollout_current": [0.02681245, 0.01006776, 0.05107412], "tv": [0.1, 0.05, 0.1]}
    # By hand, from FX-V: chi2 = sum (pi - mu)^2 / mu and so on.
    golden["chi2"] = [0.01 / 0.7 + 0.01 / 0.2, 0.05**2 / 0.3 + 0.05**2 / 0.2, 0.01 / 0.9 + 0.01 / 0.05]
    golden["sum_pi_squared"] = [0.36 + 0.09 + 0.01, 0.25 + 2 * 0.0625, 0.64 + 0.0225 + 0.0025]
    golden["logp_rollout"] = [math.log(0.7), math.log(0.3), math.log(0.05)]
    golden["logp"] = [math.log(0.6), math.log(0.25), math.log(0.15)]
    for name, numbers in golden.items():
        expected = torch.tensor(numbers, dtype=torch.float64)
        torch.testing.assert_close(getattr(found, name), expected, rtol=0, atol=1e-8)


@given(pairs(), st.data())
@unhurried
def test_equals_the_definition(pair, data):
    mu, pi = pair
    n, v = mu.shape
    tokens = data.draw(st.lists(st.integers(0, v - 1), min_size=n, max_size=n))
    tokens = torch.tensor(tokens, dtype=torch.int64)
    check_close(of(mu, pi, tokens), truth(mu, pi, tokens), n=n, rtol=1e-7, atol=1e-14)


@given(pairs())
@unhurried
def test_laws_of_the_divergences(pair):
    mu, pi = pair
    n, v = mu.shape
    found = of(mu, pi)
    for name in ("kl_rollout_current", "kl_current_rollout", "tv", "chi2"):
        assert (getattr(found, name) >= 0).all(), name
    for h in (found.entropy_rollout, found.entropy):
        assert ((h >= -1e-14) & (h <= math.log(v) + 1e-12)).all()
    assert (found.tv <= 1).all()
    assert (found.tv <= (found.kl_rollout_current / 2).sqrt() + 1e-12).all()  # Pinsker
    assert (found.tv <= (found.kl_current_rollout / 2).sqrt() + 1e-12).all()
    # Both sides are equal where pi / mu is constant, and each is known to 1e-7, as above.
    assert (found.kl_current_rollout <= found.chi2.log1p() * (1 + 1e-7) + 1e-12).all()  # Jensen
    assert ((2 * found.tv).square() <= found.chi2 * (1 + 1e-7) + 1e-12).all()  # Cauchy-Schwarz
    assert (found.sum_pi_squared >= (-found.entropy).exp() * (1 - 1e-9)).all()  # Jensen
    assert len(found.chi2) == n


@given(pairs())
@unhurried
def test_swapping_the_policies_swaps_the_fields(pair):
    mu, pi = pair
    tokens = first_tokens(mu)
    found, swapped = of(mu, pi, tokens), of(pi, mu, tokens)
    for name, other in SWAPPED.items():
        a, b = getattr(found, name), getattr(swapped, other)
        assert len(a) == len(mu)
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-12)


@given(pairs())
@unhurried
def test_a_policy_does_not_diverge_from_itself(pair):
    mu, _ = pair
    found = of(mu, mu.clone())
    for zero in found[:4]:
        assert zero.tolist() == [0.0] * len(mu)
    torch.testing.assert_close(found.entropy, found.entropy_rollout, rtol=0, atol=0)


@given(pairs(), st.floats(-100, 100), st.floats(-100, 100))
@unhurried
def test_only_differences_within_a_row_matter(pair, shift_mu, shift_pi):
    mu, pi = pair
    tokens = first_tokens(mu)
    shifted = of(mu + shift_mu, pi.log_softmax(-1) + shift_pi, tokens)
    check_close(shifted, of(mu, pi, tokens), n=len(mu), rtol=1e-9, atol=1e-11)


@given(pairs(), st.randoms(use_true_random=False), st.integers(0, 5))
@unhurried
def test_neither_the_order_of_the_vocabulary_nor_its_padding_matters(pair, random, padding):
    mu, pi = pair
    n, v = mu.shape
    order = torch.tensor(random.sample(range(v + padding), v + padding))
    tokens = first_tokens(mu)
    moved = [torch.cat([z, z.new_full((n, padding), -INF)], dim=1)[:, order] for z in (mu, pi)]
    got = of(*moved, order.argsort()[tokens])
    check_close(got, of(mu, pi, tokens), n=n, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize(
    ("mu", "pi", "expected"),
    [
        # Expected: KL(mu || pi), KL(pi || mu), TV, chi2, H(mu), H(pi), sum pi^2.
        # 0 log 0 = 0: what mu cannot draw costs KL(mu || pi) nothing, and the others everything.
        ([0.0, -INF], [0.0, 0.0], (math.log(2), INF, 0.5, INF, 0, math.log(2), 0.5)),
        # What pi cannot draw and mu can: infinite; chi2 = (1 - 1/2)^2 / (1/2) + 1/2.
        ([0.0, 0.0], [0.0, -INF], (INF, math.log(2), 0.5, 1, math.log(2), 0, 1)),
        # Both filtered: as if the token did not exist.
        ([0.0, -INF, 0.0], [0.0, -INF, 0.0], (0, 0, 0, 0, math.log(2), math.log(2), 0.5)),
        ([0.0, -INF], [-INF, 0.0], (INF, INF, 1, INF, 0, 0, 1)),
        # A probability that underflows in every float format is still not zero.
        ([0.0, -1e4], [0.0, -INF], (INF, 0, 0, 0, 0, 0, 1)),
        ([0.0, -INF], [0.0, -1e4], (0, INF, 0, INF, 0, 0, 1)),
        # mu(a) underflows (e^-2000), its share of the sums does not: KL(pi || mu) = 1/2 log 1/2
        # + 1/2 (log 1/2 + 2000); chi2 overflows.
        ([0.0, -2e3], [0.0, 0.0], (math.log(2), 1e3 - math.log(2), 0.5, INF, 0, math.log(2), 0.5)),
        # A finite mask value instead of -inf.
        ([0.0, -3e38], [0.0, -3e38], (0, 0, 0, 0, 0, 0, 1)),
        ([0.0, 1e4], [0.0, -1e4], (1e4, 1e4, 1, INF, 0, 0, 1)),
        ([1e4, 0.0], [1e4, 0.0], (0, 0, 0, 0, 0, 0, 1)),
        ([5.0], [-7.0], (0, 0, 0, 0, 0, 0, 1)),
        # No distribution: NaN in every field, whatever stands beside it.
        ([-INF, -INF], [0.0, 0.0], (NAN,) * 7),
        ([0.0, 0.0], [-INF, -INF], (NAN,) * 7),
        ([0.0, NAN], [0.0, 0.0], (NAN,) * 7),
        ([0.0, 0.0], [NAN, -INF], (NAN,) * 7),
        ([INF, 0.0], [0.0, 0.0], (NAN,) * 7),
        ([0.0, 0.0], [0.0, INF], (NAN,) * 7),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_edges(mu, pi, expected, dtype):
    got = of(torch.tensor([mu], dtype=dtype), torch.tensor([pi], dtype=dtype))
    assert {x.dtype for x in got} == {dtype}
    expected = torch.tensor(expected, dtype=dtype)[:, None]
    close = {"rtol": 1e-6, "atol": 1e-7, "equal_nan": True}
    torch.testing.assert_close(torch.stack(got[:7]), expected, **close)
    assert got.logp_rollout.isnan().tolist() == got.logp.isnan().tolist() == [expected.isnan().all()]


@pytest.mark.parametrize("token", [-100, -1, 3, 2**40])
def test_a_token_outside_the_vocabulary_has_no_log_prob(token):
    found = of(FX_V_MU.log(), FX_V_PI.log(), torch.tensor([0, token, 2]))
    for logp in (found.logp_rollout, found.logp):
        assert logp.isnan().tolist() == [False, True, False]
    assert not found.kl_rollout_current.isnan().any()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_temperature_divides_the_current_logits_alone(temperature):
    mu, pi = random_pair(5, 40, drift=0.5)
    got, expected = of(mu, pi, temperature=temperature), truth(mu, pi, temperature=temperature)
    check_close(got, expected, n=5, rtol=1e-7, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("drift", [1e-2, 0.3, 3.0])
def test_no_further_from_the_truth_than_the_naive_way(dtype, drift):
    mu, pi = (z.to(dtype) for z in random_pair(6, 500, drift=drift))
    tokens = torch.arange(6)
    got, obvious = of(mu, pi, tokens), naive(mu.float(), pi.float(), tokens)
    for ours, theirs, exact in zip(got, obvious, truth(mu.double(), pi.double(), tokens), strict=True):
        assert ours.dtype is torch.float32
        assert len(ours) == 6
        assert ((ours - exact).abs() <= (theirs - exact).abs() + 2e-5 * exact.abs()).all()


@pytest.mark.parametrize("drift", [1e-5, 1e-4])
def test_a_tiny_divergence_survives_float32(drift):
    # Naive float32 is noise here: KL is 5e-11 and 5e-9 nats, chi2 twice that.
    mu, pi = (z.float() for z in random_pair(8, 2000, drift=drift))
    got, obvious, expected = of(mu, pi), naive(mu, pi, first_tokens(mu)), truth(mu, pi)
    assert 2e-11 < float(expected.kl_rollout_current.mean()) < 1e-8
    for name in ("kl_rollout_current", "kl_current_rollout", "tv", "chi2"):
        ours, theirs, exact = (getattr(x, name) for x in (got, obvious, expected))
        assert ((ours - exact).abs() <= 0.02 * exact).all(), name
        if name != "tv":
            assert (theirs - exact).abs().mean() > 10 * (ours - exact).abs().mean(), name


def test_the_series_meets_the_closed_form():
    x = torch.tensor([-1.0, 1.0], dtype=torch.float64)[:, None] * SERIES_BELOW
    log_mu = torch.tensor([[-1.0], [-1.0]], dtype=torch.float64)
    inside, outside = (all_terms(log_mu, y, log_mu.exp(), y.exp()) for y in (log_mu + x * (1 - 1e-12), log_mu + x))
    assert len(inside) == 4
    torch.testing.assert_close(torch.stack(inside), torch.stack(outside), rtol=3e-8, atol=0)


def test_terms_of_a_partition_never_sum_to_more():
    # Lumping tokens into buckets loses divergence: the ground that intervals stand on.
    mu, pi = FX_V_MU, FX_V_PI
    lumped = [torch.stack([p[:, 0], p[:, 1:].sum(1)], dim=1).log() for p in (mu, pi)]
    fine = of(mu.log(), pi.log())
    for coarse, whole in zip(terms(*lumped), (fine.kl_rollout_current, fine.tv), strict=True):
        assert (coarse.sum(1) <= whole + 1e-15).all()
    for coarse, whole in zip(all_terms(*lumped, *(y.exp() for y in lumped)), fine[:4], strict=True):
        assert (coarse.sum(1) <= whole + 1e-15).all()
