"""Intervals from the top k contain the exact value, and are what the methods table says they are."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offdrift.divergence import interval
from offdrift.divergence.evidence import Grade
from offdrift.divergence.exact import definition
from offdrift.divergence.interval import OWN, OWN_ABSOLUTE, rounding, topk_divergences
from offdrift.errors import BadValueError, ShapeError
from tests.divergence.pairs import FX_V_MU, FX_V_PI, FX_V_TOKENS, first_tokens, pairs, random_pair

INF = math.inf


def kl_and_tv(mu, pi):
    """What the intervals must contain."""
    found = definition(mu, pi, first_tokens(mu))
    return found.kl_rollout_current, found.tv


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
    # Top 1 and the drawn token leave mu .3 on pi (.3, .1), .2 on pi .25, .05 on pi .05: only in the
    # first row is anything open, and most KL is .3 on the token of pi .1, as most TV is.
    evidence = record(FX_V_MU.log(), 1, FX_V_TOKENS)
    kl, tv = topk_divergences(*evidence, FX_V_PI.log())
    kl_hi = 0.7 * math.log(0.7 / 0.6) + 0.3 * math.log(0.3 / 0.1)
    expected = torch.tensor([kl_hi, 0.01006776, 0.05107412], dtype=torch.float64)  # V.kl
    torch.testing.assert_close(kl.hi, expected, rtol=0, atol=1e-8)
    expected = torch.tensor([(0.1 + 0.2 + 0.3) / 2, 0.05, 0.1], dtype=torch.float64)
    torch.testing.assert_close(tv.hi, expected, rtol=0, atol=1e-8)


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


@pytest.mark.parametrize("cap", [None, 5.0])
def test_more_evidence_never_widens_the_interval(cap):
    mu, pi = random_pair(20, 60, drift=0.7)
    tokens = torch.arange(20)
    ends = [topk_divergences(*record(mu, k, tokens), pi, tail_log_ratio_cap=cap) for k in (0, 1, 2, 5, 20, 59, 60)]
    for coarse, fine in pairwise(ends):
        for a, b in zip(coarse, fine, strict=True):
            assert (a.lo <= b.lo + 1e-9).all()
            assert (a.hi >= b.hi - 1e-9).all()
    for got, exact in zip(ends[-1], kl_and_tv(mu, pi), strict=True):
        torch.testing.assert_close(got.lo, exact, rtol=2 * OWN, atol=2 * OWN_ABSOLUTE)
        torch.testing.assert_close(got.hi, exact, rtol=2 * OWN, atol=2 * OWN_ABSOLUTE)


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


def test_a_tail_that_is_provably_empty_leaves_nothing_open():
    # Sampling with top_k = 3: the fourth of the recorded five has probability zero.
    mu, pi = random_pair(6, 40, drift=0.3)
    mu = mu.masked_fill(mu < mu.topk(3).values[:, -1:], -INF)
    for got, exact in zip(topk_divergences(*record(mu, 5, mu.argmax(1)), pi), kl_and_tv(mu, pi), strict=True):
        torch.testing.assert_close(got.hi, exact, rtol=2 * OWN, atol=0)
        torch.testing.assert_close(got.lo, exact, rtol=2 * OWN, atol=0)


def test_kl_has_no_upper_end_where_the_tail_could_be_on_a_token_that_pi_cannot_draw():
    mu, pi = random_pair(6, 40, drift=0.3)
    pi[::2] = pi[::2].scatter(1, mu[::2].argmin(1, keepdim=True), -INF)
    kl, tv = topk_divergences(*record(mu, 5, mu.argmax(1)), pi)
    assert (kl.hi == INF).tolist() == [True, False] * 3
    assert (tv.hi < 1).all()
    capped, _ = topk_divergences(*record(mu, 5, mu.argmax(1)), pi, tail_log_ratio_cap=4.0)
    assert (capped.hi < INF).all()


@pytest.mark.parametrize("cap", [None, 1.5])
def test_on_one_support_the_ends_are_those_of_its_tokens_as_a_vocabulary_of_their_own(cap):
    compared = finite = 0
    for seed in range(24):
        mu, pi, tokens, k = hard_rows(seed, n=16)
        g = torch.Generator().manual_seed(seed)
        kept = (torch.rand(mu.shape, generator=g) < torch.rand(len(mu), 1, generator=g)) & (mu > -INF)
        kept.scatter_(1, tokens[:, None], True)
        mu, pi = mu.masked_fill(~kept, -INF), pi.masked_fill(~kept, -INF)
        options = {"tail_log_ratio_cap": cap}
        top_ids, top_logp, *_ = record(mu, k, tokens)
        both = topk_divergences(*record(mu, k, tokens), pi, one_support=True, **options)
        open_ends = topk_divergences(*record(mu, k, tokens), pi, **options)
        exact = kl_and_tv(mu, pi)
        for i in range(len(mu)):
            ids = kept[i].nonzero()[:, 0]
            inside = top_logp[i] > -INF
            top = torch.searchsorted(ids, top_ids[i, inside])[None], top_logp[i : i + 1, inside]
            token = torch.searchsorted(ids, tokens[i : i + 1])
            drawn = record(mu[i : i + 1, ids], 0, token)[2:]
            alone = topk_divergences(*top, *drawn, pi[i : i + 1, ids], **options)
            for got, want, wide, true in zip(both, alone, open_ends, exact, strict=True):
                torch.testing.assert_close(got.lo[i : i + 1], want.lo, rtol=1e-9, atol=1e-11)
                torch.testing.assert_close(got.hi[i : i + 1], want.hi, rtol=1e-9, atol=1e-11)
                if cap is None:
                    assert wide.lo[i] <= true[i] * (1 + 1e-9) + 1e-12
                    assert got.lo[i] <= true[i] * (1 + 1e-9) + 1e-12
                    assert true[i] <= got.hi[i] * (1 + 1e-9) + 1e-12
                    assert got.hi[i] <= wide.hi[i] * (1 + 1e-9) + 1e-12
            compared += 1
            finite += bool(both[0].hi[i] < INF and open_ends[0].hi[i] == INF)
    assert compared == 24 * 16
    assert cap is not None or finite > 100


def exactly(log_mu, log_pi):
    """KL and TV in float64, by terms that cancel as little as those of the library."""
    mu, pi, x = log_mu.exp(), log_pi.exp(), log_pi - log_mu
    kl = torch.where(mu > 0, mu * (x.expm1() - x), pi)
    return torch.where((mu > 0) & (pi == 0), INF, kl).sum(1), (mu - pi).abs().sum(1) / 2


def hard_rows(seed, n=64):
    """Policies of every sharpness and drift, some tied, Zipfian or filtered, on up to 300 tokens."""
    g = torch.Generator().manual_seed(seed)
    v = int(torch.randint(1, 300, (), generator=g))
    noise = torch.randn(2, n, v, generator=g, dtype=torch.float64)
    scale, drift = torch.rand(2, n, 1, generator=g, dtype=torch.float64)
    mu = noise[0] * (8 * scale - 4).exp()
    if seed % 4 == 1:
        mu = -(8 * scale - 4).exp() * torch.arange(1, v + 1).double().log()
    if seed % 4 == 2:
        mu = mu.round()
    pi = mu + noise[1] * (10 * drift - 9).exp()
    if seed % 3 == 0:
        least_kept = mu.topk(1 + v // 3).values[:, -1:]
        mu = mu.masked_fill(mu < least_kept, -INF)
    tokens = torch.multinomial(mu.softmax(1), 1, generator=g).squeeze(1)
    return mu, pi, tokens, int(torch.randint(v + 1, (), generator=g))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_contains_the_exact_value_and_under_a_true_cap_too(dtype):
    compared = capped = 0
    for seed in range(24):
        mu, pi, tokens, k = hard_rows(seed)
        pi = pi.to((torch.float32, torch.bfloat16)[seed % 2])
        temperature = (1.0, 0.7)[seed // 2 % 2]
        ids, logp, _, drawn = record(mu, k, tokens)
        evidence = (ids, logp.to(dtype), tokens, drawn.to(dtype), pi)
        log_mu, log_pi = mu.log_softmax(1), (pi.double() / temperature).log_softmax(1)
        exact = exactly(log_mu, log_pi)
        found = topk_divergences(*evidence, temperature=temperature)
        for d, x in zip(found, exact, strict=True):
            assert (d.lo <= x).all()
            assert (x <= d.hi).all()
            compared += len(x)
        apart = (log_mu - log_pi).abs().masked_fill(log_mu == log_pi, 0.0)  # also where both are -inf
        needed = apart.scatter(1, log_mu.topk(k).indices, 0.0).amax(1)
        for cap in (0.0, 0.1, 1.0, 8.0):
            found = topk_divergences(*evidence, temperature=temperature, tail_log_ratio_cap=cap)
            true = needed <= cap
            for d, x in zip(found, exact, strict=True):
                assert (x <= d.hi)[true].all()
                assert not (d.refuted & true).any()
                capped += int(true.sum())
    assert compared == 24 * 64 * 2
    assert capped > 1000


def test_rounding_of_the_recorded_mass_is_no_divergence():
    # Both policies keep the same two tokens; the record misses 1e-6 of mu's mass. A naive tail
    # bucket would compare that 1e-6 with pi's exact 0 and report +inf.
    log_mu = torch.tensor([[0.5, 0.5 - 1e-6]]).log()
    pi = torch.tensor([[0.5, 0.5, 0.0]]).log()
    tokens = torch.tensor([0])
    kl, tv = topk_divergences(torch.tensor([[0, 1]]), log_mu, tokens, log_mu[:, 0], pi)
    assert kl.lo.tolist() == [0.0]
    assert tv.lo.tolist() == [0.0]


def in_lanes(logits):
    """log-softmax in float32 whose sum is taken as a kernel of eight lanes takes it."""
    shifted = logits - logits.amax(1, keepdim=True)
    lanes = np.cumsum(shifted.exp().numpy().reshape(len(logits), -1, 8), axis=1, dtype=np.float32)
    return shifted - torch.from_numpy(lanes[:, -1].sum(1, dtype=np.float32)).log()[:, None]


@pytest.mark.parametrize("vocab", [151_936, 262_144])
@pytest.mark.parametrize("scale", [0.0, 1.0, 3.0])
def test_identical_policies_over_wide_vocabularies_do_not_differ(vocab, scale):
    z = scale * torch.randn(6, vocab, generator=torch.Generator().manual_seed(1))
    tokens, exact = torch.arange(6), z.double().log_softmax(-1)
    for log_mu in (z.log_softmax(-1), in_lanes(z)):
        logp, ids = log_mu.topk(20)
        drawn = log_mu.gather(1, tokens[:, None]).squeeze(1)
        kl, tv = topk_divergences(ids, logp, tokens, drawn, z)
        assert kl.lo.tolist() == tv.lo.tolist() == [0.0] * 6
        assert ((log_mu.double() - exact).abs() <= sum(rounding(log_mu, vocab=vocab))).all()


@pytest.mark.parametrize("vocab", [32_000, 151_936])
@pytest.mark.parametrize("drift", [0.0, 1e-4, 1e-2])
def test_terms_of_one_size_that_all_round_in_one_direction_are_allowed_for(vocab, drift):
    """A few likely tokens and a flat tail: eight lanes are off by the worst case, on purpose."""
    g = torch.Generator().manual_seed(3)
    z = torch.zeros(4, vocab)
    z[:, :8] = 13.5
    pi = z + drift * torch.randn(4, vocab, generator=g)
    tokens, truth = torch.tensor([0, 7, 8, vocab - 1]), kl_and_tv(z.double(), pi)
    for log_mu in (z.log_softmax(-1), in_lanes(z)):
        logp, ids = log_mu.topk(20)
        drawn = log_mu.gather(1, tokens[:, None]).squeeze(1)
        intervals = topk_divergences(ids, logp, tokens, drawn, pi)
        for got, exact in zip(intervals, truth, strict=True):
            assert (got.lo <= exact).all()
            assert (exact <= got.hi).all()
    off = (in_lanes(z).double() - z.double().log_softmax(-1))[0, 0].abs()
    own, shared = rounding(torch.tensor(-1.0), vocab=vocab)
    assert 0.9 * shared < off <= own + shared


@pytest.mark.parametrize("vocab", [151_936, 262_144])
def test_small_divergences_over_wide_vocabularies_are_still_seen(vocab):
    """KL of 1e-6 to 1e-4 nat on a distribution whose top 20 hold most of its mass."""
    g = torch.Generator().manual_seed(2)
    z = torch.randn(8, vocab, generator=g)
    z[:, :20] += 14
    for drift, least in ((1e-2, 0.9), (1e-3, 0.7)):
        pi = z + drift * torch.randn(8, vocab, generator=g)
        log_mu, tokens = z.log_softmax(-1), torch.arange(8)
        logp, ids = log_mu.topk(20)
        kl, _ = topk_divergences(ids, logp, tokens, log_mu[:, :8].diagonal(), pi)
        exact = kl_and_tv(z.double(), pi)[0]
        assert (kl.lo >= least * exact).all()
        assert (kl.lo <= exact).all()


def test_half_precision_is_half_a_unit_in_the_last_place():
    x = torch.tensor([-0.01, -1.0, -17.3, -INF])
    for dtype in (torch.bfloat16, torch.float16):
        stored = x.to(dtype)
        slack = sum(rounding(stored, vocab=1000))
        assert ((stored.double() - x.double()).abs() <= slack)[:3].all()
        # 128 epsilons, |log mu| more, and 1,000 / 16: 2.5e-5.
        assert (slack[:3] <= 2.5e-5 + torch.finfo(dtype).eps * x[:3].abs()).all()


def test_a_known_token_that_pi_cannot_draw_is_infinite():
    mu, pi = torch.zeros(1, 4), torch.tensor([[-INF, 0.0, 0.0, 0.0]])
    ids, tokens = torch.tensor([[0]]), torch.tensor([0])
    kl, tv = topk_divergences(ids, mu[:, :1] - math.log(4), tokens, mu[:, 0] - math.log(4), pi)
    assert kl.lo.tolist() == [INF]
    torch.testing.assert_close(tv.lo, torch.tensor([0.25]), rtol=0, atol=2e-5)


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
    monkeypatch.setattr(interval, "CHUNK", {"cpu": 4 * 30})
    for a, b in zip(whole, topk_divergences(*evidence, pi), strict=True):
        torch.testing.assert_close(a.lo, b.lo)
        assert len(b.lo) == 11


def test_evidence_has_no_gradient_and_the_logits_are_left_alone():
    mu, pi = random_pair(2, 5, drift=0.1)
    before = pi.clone()
    ids, logp, tokens, drawn = record(mu, 2, torch.tensor([0, 1]))
    out = topk_divergences(ids, logp.requires_grad_(), tokens, drawn.requires_grad_(), pi.requires_grad_())
    assert not any(end.requires_grad for d in out for end in (d.lo, d.hi))
    assert torch.equal(pi, before)


def test_a_record_that_no_distribution_leaves_is_nan():
    third = [-math.log(3)] * 2
    rows = {
        "as it should be": (third, 1, -math.log(3)),
        "masses above 1": ([-0.1, -0.2], 1, -0.2),
        "a drawn token likelier than the top k": ([-3.0, -3.0], 2, -0.7),
        "top k that leave more than the rest can have": ([-4.0, -4.0], 1, -4.0),
        "NaN": ([math.nan, -1.0], 1, -1.0),
    }
    logp = torch.tensor([r[0] for r in rows.values()])
    tokens = torch.tensor([r[1] for r in rows.values()])
    drawn = torch.tensor([r[2] for r in rows.values()])
    ids = torch.tensor([[0, 1]]).expand(len(rows), 2)
    for d in topk_divergences(ids, logp, tokens, drawn, torch.zeros(len(rows), 12)):
        for end in (d.lo, d.hi):
            assert end.isnan().tolist() == [False, True, True, True, True]


@pytest.mark.parametrize("bad", [[0.0, 0.0, INF, 0.0], [-INF] * 4, [0.0, 0.0, math.nan, 0.0]])
def test_logits_that_are_no_distribution_are_nan(bad):
    log_mu = torch.tensor([[0.4, 0.3, 0.2, 0.1]] * 2).log()
    tokens = torch.tensor([0, 0])
    for d in topk_divergences(*record(log_mu, 1, tokens), torch.tensor([bad, [0.0] * 4])):
        for end in (d.lo, d.hi):
            assert end.isnan().tolist() == [True, False]


def test_ends_are_rounded_outwards():
    x = torch.rand(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    low, high = interval._down(x, torch.float32), interval._up(x, torch.float32)
    assert (low.double() <= x * (1 - OWN)).all()
    assert (high.double() >= x * (1 + OWN)).all()
    torch.testing.assert_close(low, high, rtol=3 * 2**-23, atol=2 * OWN_ABSOLUTE)
    ends = torch.tensor([0.0, INF, math.nan], dtype=torch.float64)
    assert interval._down(ends, torch.float32).tolist() == pytest.approx([0, INF, math.nan], nan_ok=True)


def test_no_tokens_no_numbers():
    evidence = (torch.zeros(0, 2).long(), torch.zeros(0, 2), torch.zeros(0).long(), torch.zeros(0))
    for d in topk_divergences(*evidence, torch.zeros(0, 5), tail_log_ratio_cap=1.0):
        assert d.lo.shape == d.hi.shape == d.refuted.shape == (0,)


def test_a_refuted_cap_is_flagged_and_not_used():
    # pi has .4 outside the top 1 and mu .3: within a cap of .1 mu would have at least .36.
    evidence = record(FX_V_MU[:1].log(), 1, FX_V_TOKENS[:1])
    free, _ = topk_divergences(*evidence, FX_V_PI[:1].log())
    refuted, _ = topk_divergences(*evidence, FX_V_PI[:1].log(), tail_log_ratio_cap=0.1)
    assert refuted.refuted.tolist() == [True]
    assert torch.equal(refuted.hi, free.hi)
    # log(.4 / .3) = .288 is the least that the masses allow; the tail of mu is then pi times 3 / 4.
    kept, _ = topk_divergences(*evidence, FX_V_PI[:1].log(), tail_log_ratio_cap=0.288)
    assert kept.refuted.tolist() == [False]
    torch.testing.assert_close(kept.hi, kept.lo, rtol=2e-3, atol=0)
    assert kept.grade is Grade.CAPPED
    assert kept.assumes == "|log mu - log pi| <= 0.288 nats outside the top 1"


@pytest.mark.parametrize("cap", [-0.1, INF, math.nan, True])
def test_caps_that_mean_nothing_are_refused(cap):
    evidence = record(FX_V_MU.log(), 1, FX_V_TOKENS)
    with pytest.raises(BadValueError, match="tail_log_ratio_cap="):
        topk_divergences(*evidence, FX_V_PI.log(), tail_log_ratio_cap=cap)


@pytest.mark.parametrize("temperature", [0.0, -1.0, INF, math.nan])
def test_temperatures_that_mean_nothing_are_refused(temperature):
    with pytest.raises(BadValueError, match="temperature is"):
        topk_divergences(*record(FX_V_MU.log(), 1, FX_V_TOKENS), FX_V_PI.log(), temperature=temperature)


def test_arguments_must_describe_the_same_tokens():
    z = torch.zeros
    with pytest.raises(ShapeError, match="must describe the same tokens"):
        interval._check(z(2, 3).long(), z(2, 3), z(2).long(), z(2), z(3, 5))
