"""Intervals from the top k contain the exact value, and are what the methods table says they are."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offdrift.divergence import interval
from offdrift.divergence.evidence import Grade
from offdrift.divergence.exact import kl_and_tv
from offdrift.divergence.interval import topk_divergences
from offdrift.errors import ShapeError
from tests.divergence.pairs import FX_V_MU, FX_V_PI, FX_V_TOKENS, pairs, random_pair

INF = math.inf


def record(mu, k, tokens):
    """What an engine records of `mu` (scores): its top k, and the drawn token's log-prob."""
    log_mu = mu.log_softmax(-1)
    top = log_mu.topk(k, dim=-1)
    return top.indices, top.values, tokens, log_mu.gather(1, tokens[:, None]).squeeze(1)


@pytest.mark.parametrize(
    ("k", "kl", "tv"),
    [
        (0, [0.02160085, 0.00640146, 0.05073374], [0.1, 0.05, 0.1]),  # V.bkl, V.btv
        (1, [0.02160085, 0.01006776, 0.05107412], [0.1, 0.05, 0.1]),  # V.top1kl, V.top1tv
        (3, [0.02681245, 0.01006776, 0.05107412], [0.1, 0.05, 0.1]),  # V.kl, V.tv
    ],
)
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-8), (torch.float32, 2e-5)])
def test_golden_lower_ends(k, kl, tv, dtype, atol):
    evidence = record(FX_V_MU.log().to(dtype), k, FX_V_TOKENS)
    got_kl, got_tv = topk_divergences(*evidence, FX_V_PI.log().to(dtype))
    assert (got_kl.name, got_tv.name) == ("kl_rollout_current", "tv_rollout_current")
    assert got_kl.grade is got_tv.grade is Grade.INTERVAL
    assert got_kl.lo.dtype is dtype
    torch.testing.assert_close(got_kl.lo, torch.tensor(kl, dtype=dtype), rtol=0, atol=atol)
    torch.testing.assert_close(got_tv.lo, torch.tensor(tv, dtype=dtype), rtol=0, atol=atol)


def test_golden_upper_ends():
    # Top 1 and the drawn token leave mu (.3, .2, .05) and pi (.4, .25, .05): TV_lo + the smaller.
    kl, tv = topk_divergences(*record(FX_V_MU.log(), 1, FX_V_TOKENS), FX_V_PI.log())
    assert kl.hi.tolist() == [INF] * 3
    expected = torch.tensor([0.1 + 0.3, 0.05 + 0.2, 0.1 + 0.05], dtype=torch.float64)
    torch.testing.assert_close(tv.hi, expected, rtol=0, atol=1e-9)


@given(pairs(), st.data())
def test_contains_the_exact_value(pair, data):
    mu, pi = pair
    n, v = mu.shape
    k = data.draw(st.integers(0, v))
    # The drawn token has positive probability: it was drawn.
    drawn = [data.draw(st.sampled_from([a for a in range(v) if row[a] > -INF])) for row in mu]
    tokens = torch.tensor(drawn, dtype=torch.int64)
    kl, tv = kl_and_tv(mu, pi)
    got_kl, got_tv = topk_divergences(*record(mu, k, tokens), pi)
    assert got_kl.lo.shape == got_tv.hi.shape == (n,)
    for got, exact in ((got_kl, kl), (got_tv, tv)):
        assert (got.lo <= exact * (1 + 1e-9) + 1e-12).all()
        assert (exact <= got.hi * (1 + 1e-9) + 1e-12).all()
        assert (got.lo >= 0).all()
    assert (got_tv.hi <= 1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("drift", [0.0, 1e-3, 0.1, 1.0])
@pytest.mark.parametrize("k", [0, 1, 20, 200])
def test_contains_the_exact_value_however_the_record_is_rounded(dtype, drift, k):
    mu, pi = random_pair(16, 200, drift=drift, seed=k)
    ids, logp, tokens, drawn = record(mu, k, torch.arange(16))
    wobble = torch.linspace(-1, 1, 16).double() * (2**-17 if dtype is torch.float32 else 2**-9)
    logp, drawn = (logp + wobble[:, None]).to(dtype), (drawn + wobble).to(dtype)
    got_kl, got_tv = topk_divergences(ids, logp, tokens, drawn, pi)
    for got, exact in zip((got_kl, got_tv), kl_and_tv(mu, pi), strict=True):
        assert (got.lo <= exact + 1e-15).all()
        assert (exact <= got.hi + 1e-15).all()


def test_more_evidence_never_widens_the_interval():
    mu, pi = random_pair(20, 60, drift=0.7)
    tokens = torch.arange(20)
    ends = [topk_divergences(*record(mu, k, tokens), pi) for k in (0, 1, 2, 5, 20, 59, 60)]
    for (kl, tv), (finer_kl, finer_tv) in pairwise(ends):
        assert (kl.lo <= finer_kl.lo + 1e-9).all()
        assert (tv.lo <= finer_tv.lo + 1e-9).all()
        assert (tv.hi >= finer_tv.hi - 1e-9).all()
    exact_kl, exact_tv = kl_and_tv(mu, pi)
    for got, exact in zip(ends[-1], (exact_kl, exact_tv), strict=True):
        torch.testing.assert_close(got.lo, exact, rtol=1e-6, atol=1e-10)
        torch.testing.assert_close(got.hi, exact, rtol=1e-6, atol=1e-10)


def test_a_drawn_token_inside_the_top_k_counts_once():
    mu, pi = random_pair(10, 30, drift=0.5)
    best = mu.argmax(1)
    with_best = topk_divergences(*record(mu, 3, best), pi)
    unlikely = topk_divergences(*record(mu, 3, mu.argmin(1)), pi)
    log_mu, log_pi = mu.log_softmax(-1), pi.log_softmax(-1)
    ids = mu.topk(3).indices
    p, q = log_mu.exp().gather(1, ids), log_pi.exp().gather(1, ids)
    p, q = (torch.cat([x, 1 - x.sum(1, keepdim=True)], dim=1) for x in (p, q))
    torch.testing.assert_close(with_best[0].lo, (p * (p / q).log()).sum(1), rtol=1e-6, atol=1e-10)
    assert (unlikely[0].lo > with_best[0].lo).all()


@pytest.mark.parametrize("filtered", [True, False])
def test_kl_has_an_upper_end_only_if_the_tail_is_provably_empty(filtered):
    # Sampling with top_k = 3: the fourth of the recorded five has probability zero.
    mu, pi = random_pair(6, 40, drift=0.3)
    if filtered:
        mu = mu.masked_fill(mu < mu.topk(3).values[:, -1:], -INF)
    kl, tv = topk_divergences(*record(mu, 5, mu.argmax(1)), pi)
    exact_kl, exact_tv = kl_and_tv(mu, pi)
    if filtered:
        torch.testing.assert_close(kl.hi, exact_kl, rtol=1e-9, atol=0)
        torch.testing.assert_close(kl.lo, exact_kl, rtol=1e-9, atol=0)
        torch.testing.assert_close(tv.hi, exact_tv, rtol=1e-9, atol=0)
    else:
        assert kl.hi.tolist() == [INF] * 6
        assert (tv.hi > tv.lo).all()


def test_rounding_of_the_recorded_mass_is_no_divergence():
    # Both policies keep the same two tokens; the record misses 1e-6 of mu's mass. A naive tail
    # bucket would compare that 1e-6 with pi's exact 0 and report +inf.
    log_mu = torch.tensor([[0.5, 0.5 - 1e-6]]).log()
    pi = torch.tensor([[0.5, 0.5, 0.0]]).log()
    tokens = torch.tensor([0])
    kl, tv = topk_divergences(torch.tensor([[0, 1]]), log_mu, tokens, log_mu[:, 0], pi)
    assert kl.lo.tolist() == [0.0]
    assert tv.lo.tolist() == [0.0]


def test_a_known_token_that_pi_cannot_draw_is_infinite():
    mu, pi = torch.zeros(1, 4), torch.tensor([[-INF, 0.0, 0.0, 0.0]])
    ids, tokens = torch.tensor([[0]]), torch.tensor([0])
    kl, tv = topk_divergences(ids, mu[:, :1] - math.log(4), tokens, mu[:, 0] - math.log(4), pi)
    assert kl.lo.tolist() == [INF]
    torch.testing.assert_close(tv.lo, torch.tensor([0.25]), rtol=0, atol=2e-5)


def test_nan_stays_in_its_row():
    mu, pi = random_pair(3, 8, drift=0.3)
    pi[1, 5] = math.nan
    for divergence in topk_divergences(*record(mu, 2, torch.tensor([0, 1, 2])), pi):
        for end in (divergence.lo, divergence.hi):
            assert end.isnan().tolist() == [False, True, False]


def test_temperature_divides_the_current_logits():
    mu, pi = random_pair(5, 12, drift=0.3)
    evidence = record(mu, 4, torch.arange(5))
    warm = topk_divergences(*evidence, pi, temperature=0.6)
    divided = topk_divergences(*evidence, pi / 0.6)
    for a, b in zip(warm, divided, strict=True):
        torch.testing.assert_close(a.lo, b.lo)
        torch.testing.assert_close(a.hi, b.hi)


def test_the_batch_is_worked_through_in_pieces(monkeypatch):
    mu, pi = random_pair(11, 30, drift=0.3)
    evidence = record(mu, 4, torch.arange(11))
    whole = topk_divergences(*evidence, pi)
    monkeypatch.setattr(interval, "CHUNK", 4 * 30)
    for a, b in zip(whole, topk_divergences(*evidence, pi), strict=True):
        torch.testing.assert_close(a.lo, b.lo)
        assert len(b.lo) == 11


def test_evidence_has_no_gradient_and_the_logits_are_left_alone():
    mu, pi = random_pair(2, 5, drift=0.1)
    before = pi.clone()
    ids, logp, tokens, drawn = record(mu, 2, torch.tensor([0, 1]))
    out = topk_divergences(
        ids, logp.requires_grad_(), tokens, drawn.requires_grad_(), pi.requires_grad_()
    )
    assert not any(end.requires_grad for d in out for end in (d.lo, d.hi))
    assert torch.equal(pi, before)


def test_arguments_must_describe_the_same_tokens():
    z = torch.zeros
    with pytest.raises(ShapeError, match="must describe the same tokens"):
        interval._check(z(2, 3).long(), z(2, 3), z(2).long(), z(2), z(3, 5))
