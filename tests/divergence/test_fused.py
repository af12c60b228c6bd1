"""The chunked and the compiled ways give the definition's numbers, in bounded memory."""

import math
import shutil

import pytest
import torch
from hypothesis import given
from torch.profiler import ProfilerActivity, profile

from offdrift.divergence import fused
from offdrift.divergence.exact import kl_and_tv
from offdrift.divergence.fused import exact_divergences
from offdrift.errors import BadValueError, ShapeError
from tests.divergence.pairs import pairs, random_pair

HAS_COMPILER = any(map(shutil.which, ("c++", "g++", "clang++")))


def assert_same(got, expected, *, n, rtol=1e-6):
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.shape == (n,)
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=1e-7, equal_nan=True)


@given(pairs(max_rows=12))
def test_pieces_give_the_definition(pair):
    mu, pi = pair
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(fused.PLAIN_CHUNK, "cpu", 3 * mu.shape[1])
        got = exact_divergences(mu, pi, compiled=False)
    assert_same(got, kl_and_tv(mu, pi), n=len(mu))


@pytest.mark.parametrize("n", [0, 1, 2, 3, 5, 7, 8, 17])
@pytest.mark.parametrize("chunk_rows", [1, 2, 3])
def test_no_row_is_lost_and_none_is_alone(n, chunk_rows):
    seen = []

    def spy(a, b, temperature):
        seen.append(len(a))
        return kl_and_tv(a, b, temperature)

    mu, pi = random_pair(n, 4, drift=1.0)
    got = fused._by_rows(spy, chunk_rows * 4, mu, pi, torch.tensor(1.0))
    assert_same(got, kl_and_tv(mu, pi), n=n)
    assert sum(seen) == n
    rows = max(2, chunk_rows)
    assert all(rows <= r < 2 * rows for r in seen) or seen == [n]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_temperature_and_dtypes_reach_the_definition(dtype):
    mu, pi = (z.to(dtype) for z in random_pair(9, 70, drift=0.3))
    expected = kl_and_tv(mu, pi, 0.7)
    assert_same(exact_divergences(mu, pi, temperature=0.7), expected, n=9)


def test_rows_may_be_cut_from_a_padded_vocabulary():
    mu, pi = random_pair(9, 70, drift=0.3)
    padded = torch.cat([pi, torch.full((9, 10), 99.0).double()], dim=1)
    assert_same(exact_divergences(mu, padded[:, :70]), kl_and_tv(mu, pi), n=9)


def peak_bytes(function) -> int:
    """The most that torch's allocator held at once during the call, beyond what it held before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        function()
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert events
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def test_memory_is_bounded_by_the_chunk_whatever_the_batch(monkeypatch):
    v = 2**10
    monkeypatch.setitem(fused.PLAIN_CHUNK, "cpu", 4 * v)
    pairs = [[z.float() for z in random_pair(n, v, drift=0.1)] for n in (64, 128)]
    small, large = (peak_bytes(lambda p=p: exact_divergences(*p, compiled=False)) for p in pairs)
    temporary = 4 * v * 4
    assert 2 * temporary < small < 14 * temporary
    assert large - small < temporary
    assert peak_bytes(lambda: kl_and_tv(*pairs[1])) > 20 * large  # so the measure can see it


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")
@pytest.mark.skipif(not HAS_COMPILER, reason="needs a C++ compiler")
def test_compiled_equals_plain(monkeypatch):
    monkeypatch.delenv("TORCH_COMPILE_DISABLE", raising=False)
    monkeypatch.setattr(fused, "COMPILED_CHUNK", 5 * 5000)
    fused._kernel.cache_clear()
    mu, pi = (z.float() for z in random_pair(23, 5003, drift=0.5))
    mu[0, 7], pi[1, 9], mu[2], pi[3, 3] = -math.inf, -math.inf, -math.inf, math.nan
    mu[4, ::2] = pi[4, ::2] = -math.inf
    pi[5], mu[6] = mu[5], 1e4 * mu[6]
    for rows in (23, 11):
        pair = (mu[:rows], pi[:rows])
        got = exact_divergences(*pair, temperature=0.9, compiled=True)
        assert_same(got, kl_and_tv(*pair, 0.9), n=rows, rtol=2e-5)
        assert got[0].isinf().sum() == 1
        assert got[0].isnan().sum() == 2
    assert peak_bytes(lambda: exact_divergences(mu, pi, compiled=True)) < 2**14


def test_a_large_input_falls_back_to_plain_where_compiling_fails(monkeypatch):
    calls = []

    def failing(*_):
        calls.append(1)
        raise RuntimeError("no compiler")

    monkeypatch.setattr(fused, "COMPILE_FROM", 1)
    monkeypatch.setattr(fused, "_broken", set())
    monkeypatch.setattr(fused, "_kernel", lambda: failing)
    monkeypatch.delenv("TORCH_COMPILE_DISABLE", raising=False)
    mu, pi = random_pair(4, 10, drift=0.5)
    for _ in range(2):
        assert_same(exact_divergences(mu, pi), kl_and_tv(mu, pi), n=4)
    assert len(calls) == 1  # decided once
    with pytest.raises(RuntimeError, match="no compiler"):
        exact_divergences(mu, pi, compiled=True)
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    assert_same(exact_divergences(mu, pi, compiled=True), kl_and_tv(mu, pi), n=4)


def test_small_inputs_never_wait_for_a_compiler(monkeypatch):
    def forbidden():
        raise AssertionError("compiled a small input")

    monkeypatch.setattr(fused, "_kernel", forbidden)
    mu, pi = random_pair(50, 1000, drift=0.5)
    assert_same(exact_divergences(mu, pi), kl_and_tv(mu, pi), n=50)
    assert not fused._broken


@pytest.mark.parametrize("shapes", [((2, 3), (2, 4)), ((2, 3), (3, 3)), ((2, 0), (2, 0))])
def test_mismatched_policies_are_refused(shapes):
    with pytest.raises(ShapeError, match="logits_rollout has shape"):
        fused._check(*(torch.zeros(s) for s in shapes), 1.0)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf])
def test_a_temperature_that_is_none_is_refused(temperature):
    z = torch.zeros(1, 2)
    with pytest.raises(BadValueError, match="temperature is"):
        exact_divergences(z, z, temperature=temperature)


def test_evidence_has_no_gradient():
    mu, pi = (z.requires_grad_() for z in random_pair(2, 5, drift=0.1))
    for x in exact_divergences(mu, pi):
        assert not x.requires_grad
