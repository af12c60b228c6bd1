"""The ends are sharp: on small vocabularies, enumerating every extreme point finds the same numbers."""

import itertools
import math
from typing import NamedTuple

import pytest
import torch

from offdrift.divergence import interval as tails
from offdrift.divergence.interval import OWN, OWN_ABSOLUTE, topk_divergences

INF = math.inf
MASS = 1e-13
"""What 128 roundings of float64 in a record are, and a little: less than that is no mass."""

ATOL = 1e-10
"""What that changes in a divergence, by the slopes met here."""


class Tail(NamedTuple):
    """An unknown part of mu: bounds per token, and the sum. Plain floats."""

    pi: list[float]
    low: list[float]
    high: list[float]
    total: float


def feasible(tail, x):
    inside = all(a - MASS <= m <= b + MASS for a, m, b in zip(tail.low, x, tail.high, strict=True))
    return inside and abs(sum(x) - tail.total) <= MASS


def corners(tail, *kinks):
    """Points with all but one token at a bound or a kink, the one having what is missing."""
    for free in range(len(tail.pi)):
        options = list(zip(tail.low, tail.high, *kinks, strict=True))
        for x in itertools.product(*options[:free], (0.0,), *options[free + 1 :]):
            x = list(x)
            x[free] = tail.total - sum(x)
            if feasible(tail, x):
                yield x


def water_levels(tail):
    """Points with some tokens at their bound and the others proportional to pi."""
    for full in itertools.product((False, True), repeat=len(tail.pi)):
        rest = sum(p for p, f in zip(tail.pi, full, strict=True) if not f)
        left = tail.total - sum(b for b, f in zip(tail.high, full, strict=True) if f)
        if rest > 0:
            rows = zip(tail.high, tail.pi, full, strict=True)
            x = [b if f else max(left, 0.0) * p / rest for b, p, f in rows]
            if feasible(tail, x):
                yield x


def kl(mu, pi):
    pairs = [(m, p) for m, p in zip(mu, pi, strict=True) if m > MASS]
    return sum(m * math.log(m / p) if p > 0 else INF for m, p in pairs)


def tv(mu, pi):
    return sum(abs(m - p) for m, p in zip(mu, pi, strict=True)) / 2


def record(mu, k, token):
    """What an engine records of one row of probabilities, as arguments."""
    top = mu.log()[None].topk(k)
    token = torch.tensor([token])
    return top.indices, top.values, token, mu.log()[token]


def unknown(mu, pi, k, token):
    """The tail behind that record, and the known parts of mu and pi."""
    ids, logp, *_ = record(mu, k, token)
    known = {*ids[0].tolist(), token}
    rest = [a for a in range(len(mu)) if a not in known]
    c = float(logp.exp().min()) if k else 1.0
    total = max(0.0, 1 - sum(float(mu[a]) for a in known))
    tail = Tail([float(pi[a]) for a in rest], [0.0] * len(rest), [c] * len(rest), total)
    return tail, [float(mu[a]) for a in known], [float(pi[a]) for a in known]


def enumerated(tail, mu, pi):
    """Least and most KL, least and most TV, over the extreme points of every kind."""
    if not tail.pi:
        return kl(mu, pi), kl(mu, pi), tv(mu, pi), tv(mu, pi)
    equal = [min(p, b) for p, b in zip(tail.pi, tail.high, strict=True)]
    spread = [kl(mu + x, pi + tail.pi) for x in corners(tail)]
    level = [kl(mu + x, pi + tail.pi) for x in water_levels(tail)]
    apart = [tv(mu + x, pi + tail.pi) for x in corners(tail, equal)]
    return min(level + spread), max(spread + level), min(apart), max(apart)


def row(seed):
    """A policy pair of 1 to 6 tokens and a record: sharp, flat, tied, drifted little or beyond sense."""
    g = torch.Generator().manual_seed(seed)
    pick = lambda n: int(torch.randint(n, (), generator=g))  # noqa: E731
    v = 1 + pick(6)
    scale, drift = (10.0 ** (torch.rand(2, generator=g, dtype=torch.float64) * 3 - 2)).tolist()
    mu = scale * torch.randn(v, generator=g, dtype=torch.float64)
    pi = mu + drift * torch.randn(v, generator=g, dtype=torch.float64)
    if seed % 5 == 0:
        mu, pi = mu.round(), pi.round()
    if seed % 7 == 0:
        mu = torch.zeros(v, dtype=torch.float64)
    if seed % 11 == 0 and v > 1:
        pi[pick(v)] = -INF
    mu = mu.softmax(0)
    return mu, pi.softmax(0), pick(v + 1), int(torch.multinomial(mu, 1, generator=g))


def test_ends_are_those_of_the_enumeration():
    seen = dict.fromkeys(("finite most KL", "infinite most KL", "binding c", "no tail"), 0)
    for seed in range(300):
        mu, pi, k, token = row(seed)
        tail, *known = unknown(mu, pi, k, token)
        got_kl, got_tv = topk_divergences(*record(mu, k, token), pi.log()[None])
        got = [float(x) for x in (got_kl.lo, got_kl.hi, got_tv.lo, got_tv.hi)]
        want = list(enumerated(tail, *known))
        rtol = 2 * OWN  # theirs and ours
        assert got == pytest.approx(want, rel=rtol, abs=ATOL), (seed, got, want)
        seen["finite most KL"] += want[1] < INF
        seen["infinite most KL"] += want[1] == INF
        seen["binding c"] += any(p > b for p, b in zip(tail.pi, tail.high, strict=True))
        seen["no tail"] += not tail.pi
    assert min(seen.values()) >= 20, seen


def capped(tail, cap):
    low = [p * math.exp(-cap) for p in tail.pi]
    high = [min(c, p * math.exp(cap)) for c, p in zip(tail.high, tail.pi, strict=True)]
    return tail._replace(low=low, high=high)


def test_under_a_cap_no_extreme_point_is_outside_and_refuted_means_there_is_none():
    compared = refuted = tighter = 0
    for seed in range(200):
        mu, pi, k, token = row(seed)
        tail, mu_known, pi_known = unknown(mu, pi, k, token)
        cap = (0.01, 0.1, 0.5, 2.0)[seed % 4]
        evidence = (*record(mu, k, token), pi.log()[None])
        found = topk_divergences(*evidence, tail_log_ratio_cap=cap)
        within = capped(tail, cap)
        points = list(corners(within)) if tail.pi else [[]]
        assert bool(found[0].refuted) == (not points), seed
        for d, free, measure in zip(found, topk_divergences(*evidence), (kl, tv), strict=True):
            values = [measure(mu_known + x, pi_known + tail.pi) for x in points]
            compared += len(values)
            assert all(v <= float(d.hi) + ATOL for v in values), seed
            assert (d.hi <= free.hi).all()
            assert torch.equal(d.lo, free.lo)
            if not values:
                refuted += 1
                assert torch.equal(d.hi, free.hi)
            tighter += bool(d.hi < free.hi)
    assert min(compared, refuted, tighter) >= 40, (compared, refuted, tighter)


@pytest.mark.parametrize("cap", [1e-6, 0.1, 0.5, 3.0])
def test_a_capped_end_is_attained(cap):
    # Two tail tokens, one at pi e^L and one at pi e^-L, such that both policies have half outside.
    q = 1 / (1 + math.exp(cap))
    pi = torch.tensor([0.5, q / 2, (1 - q) / 2], dtype=torch.float64)
    mu = torch.stack([pi[0], pi[1] * math.exp(cap), pi[2] * math.exp(-cap)])
    token = torch.tensor([0])
    logp = pi[:1].log()
    found = topk_divergences(token[:, None], logp[:, None], token, logp, pi.log()[None], tail_log_ratio_cap=cap)
    want = (kl(mu.tolist(), pi.tolist()), tv(mu.tolist(), pi.tolist()))
    assert want[0] == pytest.approx(cap * math.tanh(cap / 2) / 2, rel=1e-6)
    for d, value in zip(found, want, strict=True):
        assert float(d.hi) == pytest.approx(value, rel=1e-6, abs=2 * OWN_ABSOLUTE)
        assert not d.refuted.any()


@pytest.mark.parametrize("cap", [0.0, 800.0])
def test_caps_at_both_ends_of_what_a_float_can_say(cap):
    mu = torch.tensor([0.6, 0.2, 0.15, 0.05], dtype=torch.float64)
    evidence = (*record(mu, 1, 0), mu.log()[None])
    capped_kl, capped_tv = topk_divergences(*evidence, tail_log_ratio_cap=cap)
    free_kl, free_tv = topk_divergences(*evidence)
    assert not capped_kl.refuted.any()
    if cap == 0:  # the policies agree on the tail, and off it as well
        assert float(capped_kl.hi) == pytest.approx(0.0, abs=ATOL)
        assert float(capped_tv.hi) == pytest.approx(0.0, abs=ATOL)
    else:
        assert torch.equal(capped_kl.hi, free_kl.hi)
        assert torch.equal(capped_tv.hi, free_tv.hi)


def tail_of(pi, log_c, r_lo, r_hi):
    """Rows that share one tail of pi and differ in what is known of mu's mass there."""
    n = len(r_lo)
    log_pi = pi.log().sort().values.expand(n, -1).contiguous()
    size = torch.full((n,), len(pi))
    return tails.Tail(log_pi, log_pi.exp().cumsum(1), size, log_c.expand(n), r_lo, r_hi)


@pytest.mark.parametrize("c", [0.02, 0.06, 0.2, 0.9])
@pytest.mark.parametrize("width", [0.0, 0.01, 0.05, 0.3])
def test_ends_hold_for_every_mass_that_rounding_leaves_open(c, width):
    g = torch.Generator().manual_seed(0)
    pi = 0.7 * torch.randn(12, generator=g, dtype=torch.float64).mul(2).softmax(0)
    log_c = torch.tensor(c, dtype=torch.float64).log()
    room = min(1.0, 12 * c)
    r_lo = torch.linspace(0.0, room, 23, dtype=torch.float64)
    r_hi = (r_lo + width).clamp(max=room)
    open_tail = tail_of(pi, log_c, r_lo, r_hi)
    mass = (r_lo + (r_hi - r_lo) * torch.linspace(0, 1, 201, dtype=torch.float64)[:, None]).view(-1)
    fixed = tail_of(pi, log_c, mass, mass)
    for wide, narrow in zip(tails.least(open_tail), tails.least(fixed), strict=True):
        assert (wide <= narrow.view(201, 23).amin(0) + 1e-14).all()
    for wide, narrow in zip(tails.most(open_tail), tails.most(fixed), strict=True):
        assert (wide >= narrow.view(201, 23).amax(0) - 1e-14).all()


def test_a_tail_token_too_likely_for_the_cap_refutes_it():
    # mu: .7 and .01 on the top two, .29 on 40 tokens. pi gives one of these .05: at least .05 / e, and
    # mu has at most .01. The masses alone, .29 against .29, refute nothing.
    mu = torch.tensor([0.7, 0.01] + 40 * [0.29 / 40], dtype=torch.float64)
    pi = torch.tensor([0.7, 0.01, 0.05] + 39 * [0.24 / 39], dtype=torch.float64)
    for cap, refuted in ((1.0, True), (1.6, True), (1.7, False)):  # log(.05 / .01) = 1.609
        kl, _ = topk_divergences(*record(mu, 2, 0), pi.log()[None], tail_log_ratio_cap=cap)
        assert kl.refuted.tolist() == [refuted]


def test_a_device_without_numpy_sorts_alike():
    scores = torch.randn(5, 33, generator=torch.Generator().manual_seed(0))
    scores[0, 3], scores[1, 4] = -INF, INF
    ours = scores.clone()
    tails._ascending_(ours)
    assert torch.equal(ours, scores.sort(-1).values)
    assert len(ours) == 5


def test_logits_too_far_apart_for_an_exponential():
    # pi gives the tail e^-2000; mu gives it 0.1 in all. KL is about 0.1 (2000 + log 0.05).
    pi = torch.tensor([[0.0, -2000.0, -2000.0]], dtype=torch.float64)
    mu = torch.tensor([0.9, 0.05, 0.05], dtype=torch.float64)
    got, _ = topk_divergences(*record(mu, 1, 0), pi)
    exact = 0.9 * math.log(0.9) + 0.1 * (2000 + math.log(0.05))
    most = 0.9 * math.log(0.9) + 0.1 * (2000 + math.log(0.1))
    assert 0 < float(got.lo) <= exact  # the lower end treats e^-2000 as e^-700
    assert float(got.hi) == pytest.approx(most, rel=2 * OWN)
