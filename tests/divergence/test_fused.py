"""The chunked and the compiled ways give the definition's numbers, in bounded memory."""

import inspect
import math
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from torch.utils._python_dispatch import TorchDispatchMode

from offdrift.divergence import chunks, fused
from offdrift.divergence.exact import ExactDivergences, definition, plain_divergences
from offdrift.divergence.fused import exact_divergences, route
from offdrift.errors import BadValueError, ShapeError
from tests.divergence.pairs import HAS_COMPILER, STRANGE, first_tokens, pairs, peak_bytes, random_pair

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """No test sees that compiling failed in another, and the environment forbids nothing."""
    monkeypatch.setattr(chunks, "_broken", set())
    monkeypatch.delenv("TORCH_COMPILE_DISABLE", raising=False)


def check_same(got, expected, *, n, rtol=1e-6):
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.shape == (n,)
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=1e-7, equal_nan=True)


@given(pairs(max_rows=12))
@settings(deadline=None)
def test_pieces_give_the_definition(pair):
    mu, pi = pair
    tokens = first_tokens(mu)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(chunks.PLAIN_CHUNK, "cpu", 3 * mu.shape[1])
        got = exact_divergences(mu, pi, tokens=tokens, compiled=False)
    assert isinstance(got, ExactDivergences)
    check_same(got, definition(mu, pi, tokens), n=len(mu), rtol=1e-12)


@pytest.fixture
def two_threads(monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    monkeypatch.setattr(chunks, "THREADS_FROM", 1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("n", [0, 1, 2, 3, 11])
def test_rows_shared_out_among_threads_give_the_definition(n, two_threads, monkeypatch):
    mu, pi = random_pair(n, 50, drift=0.5)
    monkeypatch.setitem(chunks.PLAIN_CHUNK, "cpu", 3 * 50)
    with torch.inference_mode():
        got = exact_divergences(mu, pi, tokens=first_tokens(mu), compiled=False)
    check_same(got, definition(mu, pi, first_tokens(mu)), n=n, rtol=1e-12)


def test_each_thread_keeps_its_operators_to_itself_and_leaves_the_others_theirs(two_threads):
    here, widths = threading.get_ident(), {}

    def spy(x):
        widths.setdefault(threading.get_ident(), set()).add(torch.get_num_threads())
        time.sleep(0.01)  # long enough for both to take part
        assert not torch.is_grad_enabled()
        return (x.sum(1),)

    x = random_pair(8, 5, drift=0.1)[0]
    with torch.no_grad():
        (sums,) = chunks.by_rows(spy, (x,), compiled=False)
    assert torch.equal(sums, x.sum(1))
    assert here not in widths
    assert list(widths.values()) == [{1}, {1}]
    assert torch.get_num_threads() == 2
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(torch.get_num_threads).result() == 2


def test_what_fails_in_a_thread_fails_in_the_caller(two_threads):
    def failing(x):
        raise ArithmeticError("in a thread")

    with pytest.raises(ArithmeticError, match="in a thread"):
        chunks.by_rows(failing, random_pair(8, 5, drift=0.1)[:1], compiled=False)
    assert torch.get_num_threads() == 2


def test_a_thread_that_cannot_start_leaves_none_waiting(two_threads, monkeypatch):
    submit, calls = ThreadPoolExecutor.submit, []

    def second_fails(pool, *arguments):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("can't start new thread")
        return submit(pool, *arguments)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", second_fails)
    mu, pi = random_pair(8, 5, drift=0.1)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        exact_divergences(mu, pi, compiled=False)
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_plain_rows_that_are_strange_give_the_definition(dtype):
    mu, pi = (torch.tensor([pair[i] for pair in STRANGE.values()], dtype=dtype) for i in (0, 1))
    tokens = torch.arange(len(STRANGE)) % 4
    expected = definition(mu, pi, tokens, 0.8)
    got = exact_divergences(mu, pi, tokens=tokens, temperature=0.8, compiled=False)
    check_same(got, expected, n=len(STRANGE), rtol=1e-5 if dtype is torch.float32 else 1e-12)
    for i in range(len(STRANGE)):  # alone: whether all are near is asked of a chunk
        row = slice(i, i + 1)
        alone = exact_divergences(mu[row], pi[row], tokens=tokens[row], temperature=0.8)
        check_same(alone, [x[row] for x in expected], n=1, rtol=1e-5)


class Passes(TorchDispatchMode):
    """Counts the operations that write as much as one matrix, and those that choose."""

    def __init__(self, size):
        super().__init__()
        self.size, self.found, self.chosen = size, 0, 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.numel() == self.size:
            self.found += 1
            self.chosen += "where" in operation.name()
        return out


@pytest.mark.parametrize(("drift", "most"), [(0.01, 32), (1.0, 52)])
def test_the_plain_way_passes_over_its_rows_half_as_often_as_the_definition(drift, most):
    mu, pi = (z.float() for z in random_pair(3, 500, drift=drift))
    counts = []
    for way in (plain_divergences, definition):
        with Passes(mu.numel()) as passes:
            inspect.unwrap(way)(mu, pi, torch.arange(3), torch.tensor(1.0))
        counts.append(passes)
    assert 10 < counts[0].found <= most < counts[1].found
    assert counts[0].chosen == 0 < counts[1].chosen


def test_log_probs_come_only_with_tokens():
    mu, pi = random_pair(3, 7, drift=0.3)
    without, given_tokens = (exact_divergences(mu, pi, tokens=t) for t in (None, torch.tensor([0, 1, 2])))
    assert without.logp_rollout is None
    assert without.logp is None
    check_same(without[:7], given_tokens[:7], n=3, rtol=0)


@pytest.mark.parametrize("n", [0, 1, 2, 3, 5, 7, 8, 17])
@pytest.mark.parametrize("chunk_rows", [0, 1, 2, 3])
@pytest.mark.parametrize("at_least", [1, 2])
def test_no_row_is_lost_and_none_is_alone_if_that_matters(n, chunk_rows, at_least):
    seen = []

    def spy(*arguments):
        seen.append(len(arguments[0]))
        return definition(*arguments)

    rows = (*random_pair(n, 4, drift=1.0), torch.arange(n) % 4)
    got = chunks._in_chunks(spy, chunk_rows * 4, rows, [torch.tensor(1.0)], at_least=at_least)
    check_same(got, definition(*rows), n=n)
    assert sum(seen) == n
    least = max(at_least, chunk_rows)
    assert all(least <= r < 2 * least for r in seen) or seen == [n]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_temperature_and_dtypes_reach_the_definition(dtype):
    mu, pi = (z.to(dtype) for z in random_pair(9, 70, drift=0.3))
    tokens = torch.arange(9)
    expected = definition(mu, pi, tokens, 0.7)
    got = exact_divergences(mu, pi, tokens=tokens.int(), temperature=0.7)
    check_same(got, expected, n=9, rtol=1e-12 if dtype is torch.float64 else 1e-6)


def test_memory_is_bounded_by_the_chunk_whatever_the_batch(monkeypatch):
    v = 2**10
    monkeypatch.setitem(chunks.PLAIN_CHUNK, "cpu", 4 * v)
    pairs = [[z.float() for z in random_pair(n, v, drift=0.1)] for n in (64, 128)]
    small, large = (peak_bytes(lambda p=p: exact_divergences(*p, compiled=False)) for p in pairs)
    temporary = 4 * v * 4
    assert 2 * temporary < small < 24 * temporary
    assert large - small < temporary
    tokens = torch.zeros(128, dtype=torch.int64)
    assert peak_bytes(lambda: definition(*pairs[1], tokens)) > 20 * large  # so it can be seen


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")
@pytest.mark.skipif(not HAS_COMPILER, reason="needs a C++ compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # by the library, and by torch's compiler
def test_compiled_equals_plain(dtype, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(chunks, "COMPILED_CHUNK", 5 * 5000)
    chunks._kernel.cache_clear()
    mu, pi = (z.to(dtype) for z in random_pair(23, 5003, drift=0.5))
    mu[0, 7], pi[1, 9], mu[2], pi[3, 3] = -math.inf, -math.inf, -math.inf, math.nan
    mu[4, ::2] = pi[4, ::2] = -math.inf
    pi[5], mu[6] = mu[5], 1e4 * mu[6]
    tokens = torch.arange(23)
    tokens[7] = -1
    for rows in (23, 11):
        given_rows = (mu[:rows], pi[:rows], tokens[:rows])
        got = exact_divergences(*given_rows[:2], tokens=given_rows[2], temperature=0.9, compiled=True)
        check_same(got, definition(*given_rows, 0.9), n=rows, rtol=2e-5)
        assert got.kl_rollout_current.isinf().sum() == 1
        assert all(field.isnan().sum() >= 2 for field in got)
    assert peak_bytes(lambda: exact_divergences(mu, pi, compiled=True)) < 2**14


SUMS = """
import torch
from offdrift.divergence.chunks import by_rows

def sums(x):
    return (x.exp().sum(-1),)

x = torch.linspace(-1, 1, 4 * 1003).reshape(4, 1003)
compiled, plain = by_rows(sums, (x,), compiled=True), by_rows(sums, (x,), compiled=False)
torch.testing.assert_close(compiled, plain, rtol=1e-5, atol=0)
print(torch.backends.cpu.get_cpu_capability())
"""


@pytest.mark.slow
@pytest.mark.skipif(not HAS_COMPILER, reason="needs a C++ compiler")
@pytest.mark.skipif(not torch.cpu.get_capabilities().get("avx512_f"), reason="needs two widths of vectors")
def test_kernels_in_the_cache_serve_only_the_vectors_they_were_made_for(tmp_path):
    """Processes of one machine, or machines that share a home, with vectors of two widths."""
    for capability in ("avx512", "avx2"):
        environment = os.environ | {
            "ATEN_CPU_CAPABILITY": capability,
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
            "PYTHONWARNINGS": "ignore",
        }
        done = subprocess.run([sys.executable, "-c", SUMS], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        assert done.stdout.split() == [capability.upper()]


def test_a_large_input_falls_back_to_plain_where_compiling_fails(monkeypatch):
    calls = []

    def failing(*_):
        calls.append(1)
        raise RuntimeError("no compiler")

    monkeypatch.setattr(chunks, "COMPILE_FROM", 1)
    monkeypatch.setattr(chunks, "_kernel", lambda _: failing)
    mu, pi = random_pair(4, 10, drift=0.5)
    expected = definition(mu, pi, first_tokens(mu))[:7]
    assert route(CPU, entries=40) == "compiled"
    for _ in range(2):
        check_same(exact_divergences(mu, pi)[:7], expected, n=4)
        assert route(CPU, entries=40) == "plain"
    assert len(calls) == 1  # decided once
    with pytest.raises(RuntimeError, match="no compiler"):
        exact_divergences(mu, pi, compiled=True)
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    check_same(exact_divergences(mu, pi, compiled=True)[:7], expected, n=4)


def test_small_inputs_never_wait_for_torchs_compiler(monkeypatch):
    def forbidden(_):
        raise AssertionError("compiled a small input")

    monkeypatch.setattr(chunks, "_kernel", forbidden)
    mu, pi = random_pair(50, 1000, drift=0.5)
    expected = definition(mu, pi, first_tokens(mu))[:7]
    check_same(exact_divergences(mu, pi)[:7], expected, n=50)


def test_the_route_is_the_one_that_is_taken(monkeypatch):
    taken = []
    monkeypatch.setattr(chunks, "_kernel", lambda f: lambda *a: taken.append("compiled") or f(*a))
    monkeypatch.setattr(chunks, "COMPILE_FROM", 40)
    mu, pi = random_pair(4, 10, drift=0.5)
    for n, expected in ((4, "compiled"), (3, "plain")):
        assert route(CPU, entries=n * 10) == expected
        exact_divergences(mu[:n], pi[:n])
        assert (taken or ["plain"]) == [expected]
        taken.clear()


@pytest.fixture
def kernels(monkeypatch):
    """Kernels that only say what they were given, in the place of the real ones."""
    stub = ModuleType("kernels")
    stub.available = lambda *_: True
    stub.with_normalizers = lambda *given_arguments, tv: ((*given_arguments, tv), None)
    monkeypatch.setattr(fused, "kernels", stub)
    return stub


def test_a_gpu_takes_the_triton_kernels_unless_told_otherwise(kernels, monkeypatch):
    cuda = torch.device("cuda")
    assert route(cuda) == route(cuda, entries=1) == "triton"
    assert route(cuda, compiled=True) == "compiled"
    assert route(cuda, compiled=False) == "plain"
    kernels.available = lambda *_: False
    assert route(cuda, entries=1) == "plain"
    assert route(cuda, entries=2**30) == "compiled"
    monkeypatch.setattr(fused, "route_of", lambda *_, **__: "triton")
    mu, pi = random_pair(4, 10, drift=0.5)
    tokens = torch.arange(4)
    got = inspect.unwrap(exact_divergences)(mu, pi, tokens=tokens, temperature=0.7)
    for ours, theirs in zip(got, (mu, pi, tokens, 0.7, True), strict=True):
        assert ours is theirs


@pytest.mark.parametrize("shapes", [((2, 3), (2, 4)), ((2, 3), (3, 3)), ((2, 0), (2, 0))])
def test_mismatched_policies_are_refused(shapes):
    with pytest.raises(ShapeError, match="logits_rollout has shape"):
        fused.check_pair(*(torch.zeros(s) for s in shapes), 1.0)


def test_tokens_of_other_rows_are_refused():
    rows = torch.zeros(2, 5)
    with pytest.raises(ShapeError, match=r"tokens has shape \(3,\)"):
        inspect.unwrap(exact_divergences)(rows, rows, tokens=torch.zeros(3, dtype=torch.int64))


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf])
def test_a_temperature_that_is_none_is_refused(temperature):
    z = torch.zeros(1, 2)
    with pytest.raises(BadValueError, match="temperature is"):
        exact_divergences(z, z, temperature=temperature)


def test_evidence_has_no_gradient():
    mu, pi = (z.requires_grad_() for z in random_pair(2, 5, drift=0.1))
    for x in exact_divergences(mu, pi, tokens=torch.tensor([0, 1])):
        assert not x.requires_grad


@pytest.mark.parametrize("compiled", [False, None])
def test_tv_may_be_left_out(compiled):
    mu, pi = random_pair(4, 10, drift=0.5)
    found, without = (exact_divergences(mu, pi, compiled=compiled, tv=tv) for tv in (True, False))
    assert without.tv.isnan().all()
    assert without.tv.shape == found.tv.shape
    assert without.kl_rollout_current.equal(found.kl_rollout_current)
