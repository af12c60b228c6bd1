"""Clip-Cov and KL-Cov: numbers of the methods table, the choice of tokens, and its independence."""

import math
import struct
from dataclasses import replace

import pytest
import torch

from offdrift.batch_info import NO_INFO, BatchInfo
from offdrift.engines.score import old_divergences
from offdrift.errors import EvidenceError, MethodError
from offdrift.logprobs import LogProbs
from offdrift.methods import METHODS, override
from offdrift.methods import describe as axes
from offdrift.objectives.clipped import Clipped
from offdrift.objectives.covariance import CovClipped, CovPenalized, covariance, token_keys
from offdrift.ratios import log_ratio
from offdrift.segments import Segments
from tests.objectives.checks import batch, check_golden
from tests.oracles.fixtures import double, fx_a, ragged

COV = [[1.545306, 0.345306, 1.03102, -3.16898], [-0.277551, -1.946122, 1.893878, 0]]  # cov.val


def fx_a3():
    """FX-A'': advantages 3 and -1."""
    lp, _, _ = fx_a()
    return lp, lp.segments.spread(double([3.0, -1.0]))


def chosen_by(objective: CovClipped, lp, advantages, batch_info=NO_INFO):
    return (objective(lp, advantages, batch_info).loss == 0).nonzero().squeeze(-1).tolist()


def test_covariance_on_fx_a3():
    lp, advantages = fx_a3()
    seen = CovPenalized().observe(lp, advantages, NO_INFO)
    assert seen["advantages"].mean().item() == pytest.approx(1.285714, abs=1e-6)  # cov.meanA
    assert seen["logp"].mean().item() == pytest.approx(-0.951429, abs=1e-6)  # cov.meanlp
    got = covariance(advantages, lp.current, seen)
    torch.testing.assert_close(got, lp.like_caller(double(COV)), rtol=0, atol=1e-6)
    assert not got.requires_grad


def test_covariance_does_not_depend_on_the_order_of_the_pieces():
    g = torch.Generator().manual_seed(0)
    a, logp = torch.randn(2, 5000, generator=g, dtype=torch.float64)
    orders = [torch.randperm(5000, generator=g) for _ in range(20)]
    assert any(a.mean() != a[order].mean() for order in orders)  # by rounding
    expected = covariance(a, logp, {"advantages": a, "logp": logp})
    for order in orders:
        seen = {"advantages": a[order], "logp": logp[order]}
        # the means round by an ulp; `TIE` is ten thousand times that
        torch.testing.assert_close(covariance(a, logp, seen), expected, rtol=1e-14, atol=1e-15)


def test_clip_cov_on_fx_a3():
    lp, advantages = fx_a3()
    # clipcov.cand: tokens 0, 2 and 6; clipcov.byorigin: token 1; one of seven is int(2e-4 * 7) -> 1
    drawn = {chosen_by(CovClipped(seed=s), lp, advantages)[0] for s in range(40)}
    assert drawn == {0, 2, 6}
    seed = next(s for s in range(40) if chosen_by(CovClipped(seed=s), lp, advantages) == [0])
    check_golden(  # loss.clipcov
        CovClipped(seed=seed),
        (lp, advantages),
        tokens=[[0, -3.6, -2.336402, -3.315513], [0.860708, 1.221403, 1.020201, 0]],
        loss=-0.878515,
        grad=[[0, 0, -0.333772, -0.473645], [0.122958, 0.174486, 0.145743, 0]],
    )
    assert CovClipped(seed=seed)(lp, advantages).clipped.tolist() == [True, True, False, False, False, False, False]


def test_kl_cov_on_fx_a3():
    lp, advantages = fx_a3()  # loss.klcov, klcov.sel
    check_golden(
        CovPenalized(fraction=0.15),
        (lp, advantages),
        tokens=[[-3.153813, -4.049576, -2.336402, -3.315513], [0.860708, 1.221403, 1.040201, 0]],
        loss=-1.390428,
        grad=[[-0.450545, -0.578511, -0.333772, -0.473645], [0.122958, 0.174486, 0.2886, 0]],
    )


@pytest.mark.parametrize(("fraction", "expected"), [(1 / 7 + 1e-9, 1), (0.3, 2), (0.5, 3), (1.0, 3)])
def test_clip_cov_takes_its_share_of_the_candidates(fraction, expected):
    lp, advantages = fx_a3()
    # token 1 lies within these bounds, too, but PPO has clipped it
    objective = CovClipped(fraction=fraction, cov_low=0.1)
    chosen = chosen_by(objective, lp, advantages)
    assert len(chosen) == expected
    assert set(chosen) <= {0, 2, 6}


@pytest.mark.parametrize(("fraction", "expected"), [(2e-4, [6]), (0.3, [0, 6]), (1.0, [*range(7)])])
def test_kl_cov_takes_the_largest_covariances(fraction, expected):
    lp, advantages = fx_a3()
    got = CovPenalized(fraction=fraction)(lp, advantages).loss
    penalized = got != CovPenalized(coef=0.0)(lp, advantages).loss
    assert penalized.nonzero().squeeze(-1).tolist() == expected


@pytest.mark.parametrize(
    ("penalty", "value", "slope"),
    [
        ("abs", abs, lambda x: math.copysign(1, x)),
        ("k2", lambda x: x * x / 2, lambda x: x),
        ("k3", lambda x: math.exp(x) - 1 - x, lambda x: math.exp(x) - 1),
    ],
)
def test_penalties_and_their_gradients(penalty, value, slope):
    lp, advantages, _ = fx_a()
    x = log_ratio(lp, on="staleness").detach()
    got = CovPenalized(fraction=1.0, coef=0.7, penalty=penalty)(lp, advantages).loss
    expected = -advantages * x.exp() + 0.7 * double([value(v) for v in x.tolist()])
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)
    (grad,) = torch.autograd.grad(got.sum(), lp.current)
    expected = -advantages * x.exp() + 0.7 * double([slope(v) for v in x.tolist()])
    torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("penalty", "most"), [("abs", 20), ("k2", 200), ("k3", math.exp(20) - 21)])
def test_beyond_twenty_nats_the_penalty_stops_growing(penalty, most):
    old, leaf = double([-51.0]), double([-1.0]).requires_grad_()
    lp = LogProbs.pack(old, leaf, old, segments=Segments.from_lengths([1]))
    loss = CovPenalized(penalty=penalty)(lp, torch.zeros_like(old)).loss
    loss.sum().backward()
    assert loss.item() == pytest.approx(most)
    assert leaf.grad.item() == 0


def whole_distributions() -> tuple[LogProbs, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Seven tokens of a vocabulary of 5: the batch, its advantages, old and current logits (a leaf)."""
    g = torch.Generator().manual_seed(5)
    old = torch.randn(7, 5, generator=g, dtype=torch.float64)
    leaf = (old + 0.5 * torch.randn(7, 5, generator=g, dtype=torch.float64)).requires_grad_()
    at, tokens = torch.arange(7), torch.randint(0, 5, (7,), generator=g)
    logp = [x.log_softmax(-1)[at, tokens] for x in (old, leaf)]
    lp = LogProbs.pack(logp[0], logp[1], logp[0], segments=Segments.from_lengths([4, 3]))
    return lp, double([1.0] * 4 + [-0.5] * 3), old, leaf


def test_the_exact_penalty_is_the_kl_of_whole_distributions_where_the_covariance_is_largest():
    """Eq. 14, against the formula in plain operators; gradient to every logit of the chosen rows."""
    lp, advantages, old, leaf = whole_distributions()
    objective = CovPenalized(fraction=0.3, coef=0.7, penalty="exact")
    batch_info = BatchInfo(divergences=old_divergences(old, leaf))
    loss = objective(lp, advantages, batch_info).loss
    (got,) = torch.autograd.grad(loss.sum(), leaf, retain_graph=True)
    mu, pi = old.log_softmax(-1), leaf.log_softmax(-1)
    kl = (mu.exp() * (mu - pi)).sum(-1)
    logp = lp.current.detach()
    cov = (advantages - advantages.mean()) * (logp - logp.mean())
    chosen = cov >= cov.sort(descending=True).values[1]  # int(0.3 * 7) = 2 tokens
    expected = -advantages * (lp.current - lp.old).exp() + (0.7 * kl).where(chosen, 0.0)
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-12)
    (wanted,) = torch.autograd.grad(expected.sum(), leaf)
    torch.testing.assert_close(got, wanted, rtol=1e-7, atol=1e-10)
    assert int(chosen.sum()) == 2
    sampled = replace(objective, penalty="abs")(lp, advantages).loss
    assert not torch.allclose(loss, sampled)


def test_the_exact_penalty_is_refused_without_distributions_or_their_gradient():
    lp, advantages, old, leaf = whole_distributions()
    objective = CovPenalized(penalty="exact")
    with pytest.raises(EvidenceError, match=r"needs kl_old_current, .*none.*old_divergences"):
        objective(lp, advantages)
    stopped = BatchInfo(divergences=old_divergences(old, leaf.detach()))
    with pytest.raises(EvidenceError, match="kl_old_current carries no gradient"):
        objective(lp, advantages, stopped)
    with torch.no_grad():  # where nothing is differentiated, its value is enough
        bare = replace(lp, logp=lp.current.detach())
        assert objective(bare, advantages, stopped).loss.isfinite().all()
    with pytest.raises(MethodError, match='on must be "staleness"'):
        CovPenalized(penalty="exact", on="full")


def test_the_exact_penalty_is_a_setting_that_says_what_it_needs():
    row = override(METHODS["kl_cov"], {"objective.penalty": "exact"})
    assert row.needs_divergences
    assert row.divergences == {"kl_old_current"}
    assert "KL(old || current) on the 0.0002" in row.describe()
    assert axes.evidence(row) == {"exact"}
    assert not METHODS["kl_cov"].needs_divergences


def test_every_candidate_is_as_likely_as_any_other():
    lp, advantages = fx_a3()
    draws = [chosen_by(CovClipped(seed=s), lp, advantages)[0] for s in range(600)]
    counts = [draws.count(t) for t in (0, 2, 6)]
    assert sum(counts) == 600
    assert sum((c - 200) ** 2 / 200 for c in counts) < 13.8  # chi^2(2) above it once in 1000


def test_the_next_step_draws_anew():
    lp, advantages = fx_a3()
    objective, draws = CovClipped(), []
    for step in range(20):
        assert objective == replace(CovClipped(), seed=step)
        draws.append(chosen_by(objective, lp, advantages)[0])
        objective = objective.next(objective.observe(lp, advantages, NO_INFO))
    assert len(set(draws)) == 3


def test_equal_covariances_do_not_choose_more_tokens():
    lp, _, _ = batch(2)
    zero = torch.zeros_like(lp.logp_rollout)  # all covariances are 0
    for fraction in (0.1, 0.5):
        got = CovPenalized(fraction=fraction)(lp, zero).loss
        assert int((got != 0).sum()) == int(fraction * len(zero)) > 1


def test_without_a_candidate_it_is_ppo():
    lp, advantages, _ = fx_a()  # no covariance above 1
    assert torch.equal(CovClipped()(lp, advantages).loss, Clipped()(lp, advantages).loss)


# The pseudo-random keys of tokens: by whole numbers, uniform, and the same wherever a token lies.


def mix(x: int) -> int:
    """The splitmix64 finalizer on Python's unbounded integers."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def test_keys_by_whole_numbers():
    lp = ragged(3)
    got, expected = token_keys(lp, seed=5).tolist(), []
    for row in lp.logp_rollout.split(lp.segments.lengths.tolist()):
        bits = [struct.unpack("<Q", struct.pack("<d", x))[0] for x in row.tolist()]
        own = [(b ^ (t + 1) * 0x9E3779B97F4A7C15 % 2**64) * 0xD1342543DE82EF95 % 2**64 for t, b in enumerate(bits)]
        whole = mix((sum(own) + 6 * 0x9E3779B97F4A7C15) % 2**64)
        expected += [(mix(k ^ whole) >> 11) / 2**53 for k in own]
    assert got == expected
    assert len(got) > 20


def test_keys_are_uniform_and_change_with_the_seed():
    n = 40000
    g = torch.Generator().manual_seed(0)
    logp = -torch.rand(n, generator=g, dtype=torch.float64).round(decimals=2)  # many alike
    lp = LogProbs.pack(logp, segments=Segments.from_lengths([8] * (n // 8)))
    first, second = token_keys(lp, seed=0), token_keys(lp, seed=1)
    for keys in (first, second):
        counts = torch.histc(keys, bins=20, min=0, max=1)
        assert ((counts - n / 20).square() / (n / 20)).sum() < 45  # chi^2(19) > 45 once in 1000
        assert len(keys.unique()) == n
    for pair in (torch.stack([first, second]), torch.stack([first[1:], first[:-1]])):
        assert abs(torch.corrcoef(pair)[0, 1]) < 4 / math.sqrt(n)
    logp_of_chosen = logp[first < 0.1]
    assert abs(logp_of_chosen.mean() - logp.mean()) < 4 * logp.std() / math.sqrt(0.1 * n)


def test_equal_first_tokens_of_different_responses_have_different_keys():
    logp = torch.tensor([-0.5, -1.0, -0.5, -1.25, -0.5, -1.0])
    keys = token_keys(LogProbs.pack(logp, segments=Segments.from_lengths([2, 2, 2])))
    assert len(keys[[0, 2]].unique()) == 2
    assert keys[0] == keys[4]  # the same response twice
