"""Exact divergences from one read of each row: the definition's numbers on every kind of row, and their gradients."""

import logging
import math
import shutil
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from offdrift.compiled import build, compiled_passes, exact
from offdrift.divergence import chunks
from offdrift.divergence.exact import ExactDivergences, definition
from offdrift.divergence.fused import exact_divergences
from offdrift.divergence.losses import entropy, kl_current_rollout, kl_rollout_current
from tests.divergence.definitions import naive_loss
from tests.divergence.pairs import STRANGE

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None, reason="there is no C++ compiler"
)

INF, NAN = math.inf, math.nan
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
every_float = pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: str(d).removeprefix("torch."))
BEYOND = exact.THREADS_FROM // 9001 + 3
"""Rows of 9,001 that several threads share."""


def fields_of(mu: Tensor, pi: Tensor, tokens: Tensor | None, temperature: float = 1.0, **options: bool) -> Tensor:
    found = exact.divergences(mu, pi, tokens, temperature, **options)
    assert found is not None
    return found[0]


def truth(mu: Tensor, pi: Tensor, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    return torch.stack(definition(mu.double(), pi.double(), tokens, temperature))


def noise(n: int, v: int, *, scale: float = 3.0, seed: int = 0) -> Tensor:
    return scale * torch.randn(n, v, generator=torch.Generator().manual_seed(seed))


def moved(logits: Tensor, drift: float) -> Tensor:
    return logits + drift * noise(*logits.shape, scale=1.0, seed=1)


def check_rows(ours: Tensor, expected: Tensor, *, rtol: float, atol: float = 3e-7) -> None:
    """Every field of every row; a few roundings of a float32 probability are no error."""
    assert ours.dtype is torch.float32
    for name, found, exactly in zip(ExactDivergences._fields, ours, expected, strict=True):
        torch.testing.assert_close(
            found.double(), exactly, rtol=rtol, atol=atol, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("v", [1, 2, 7, 16, 17, 31, 2048, 2049, 4103])
@every_float
def test_vocabularies_of_any_length(compiled: None, v: int, dtype: torch.dtype) -> None:
    mu, pi = noise(3, v).to(dtype), moved(noise(3, v), 0.05).to(dtype)
    tokens = torch.tensor([0, v // 2, v - 1])
    for temperature in (1.0, 0.7):
        check_rows(fields_of(mu, pi, tokens, temperature), truth(mu, pi, tokens, temperature), rtol=5e-6)


@pytest.mark.parametrize(("drift", "kl", "bar"), [(1e-3, 5e-7, 1e-4), (1.4e-2, 1e-4, 1e-5), (0.3, 0.04, 1e-5)])
@pytest.mark.parametrize("offset", [0, -500])
@pytest.mark.parametrize("scale", [1.0, 3.0, 8.0])
def test_a_small_kl_is_known_to_its_bar(
    compiled: None, scale: float, offset: float, drift: float, kl: float, bar: float
) -> None:
    mu = noise(16, 20_000, scale=scale) + offset  # scores of one policy may lie anywhere
    pi = moved(mu - offset, drift)
    tokens = torch.arange(16)
    ours, expected = fields_of(mu, pi, tokens), truth(mu, pi, tokens)
    assert expected[0].median() == pytest.approx(kl, rel=0.8)
    assert float((ours / expected - 1)[:4].abs().max()) < bar
    check_rows(ours, expected, rtol=max(bar, 2e-5))


ROWS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "one token has all": lambda z: (z.index_fill(1, torch.tensor([77]), 40), moved(z, 0.01).index_fill(1, torch.tensor([77]), 40)),
    "the likeliest token alone moved": lambda z: (z, z.scatter_add(1, z.argmax(1)[:, None], torch.full((8, 1), 0.4))),
    "as far apart as can be": lambda z: (z, z.flip(0)),
    "opposites": lambda z: (40 * z, -40 * z),
    "sharp and flat": lambda z: (4 * z, 0.01 * z),
    "flat and sharp": lambda z: (0.01 * z, 4 * z),
    "rollout of the top 50": lambda z: (z.where(z >= z.topk(50).values[:, -1:], -INF), moved(z, 0.05)),
    "current of the top 50": lambda z: (z, moved(z, 0.05).where(z >= z.topk(50).values[:, -1:], -INF)),
    "the same half masked": lambda z: (z.where(z > 0, -INF), moved(z, 0.05).where(z > 0, -INF)),
    "the same half masked by a number": lambda z: (z.where(z > 0, -3e38), moved(z, 0.05).where(z > 0, -3e38)),
    "rollout masked by a number": lambda z: (z.where(z > 0, -1e9), moved(z, 0.05)),
    "a far token in the last block": lambda z: (z, moved(z, 0.05).index_fill(1, torch.tensor([z.shape[1] - 1]), 9.0)),
    "the same": lambda z: (z, z.clone()),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_every_kind(compiled: None, name: str) -> None:
    mu, pi = ROWS[name](noise(8, 5003))
    tokens = mu.argmax(1)
    check_rows(fields_of(mu, pi, tokens), truth(mu, pi, tokens), rtol=1e-5)
    check_rows(fields_of(mu, pi, tokens, 0.8), truth(mu, pi, tokens, 0.8), rtol=2e-5)


def test_a_reference_that_is_far_from_the_rest_of_the_row_costs_no_digits(compiled: None) -> None:
    mu = noise(16, 40_003, scale=0.01)
    pi = mu.scatter_add(1, mu.argmax(1)[:, None], torch.linspace(0.1, 0.7, 16)[:, None])
    ours, expected = (x[[0, 1, 3]] for x in (fields_of(mu, pi, None), truth(mu, pi, torch.zeros(16).long())))
    assert float(expected.max()) < 1e-3
    torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("temperature", [1.0, 0.8])
@every_float
def test_strange_rows_are_as_the_definition_has_them(compiled: None, dtype: torch.dtype, temperature: float) -> None:
    mu, pi = (torch.tensor([pair[i] for pair in STRANGE.values()]).to(dtype) for i in (0, 1))
    tokens = torch.arange(len(STRANGE)) % 4
    expected = torch.stack(definition(mu, pi, tokens, temperature))
    ours = fields_of(mu, pi, tokens, temperature)
    for i, name in enumerate(STRANGE):
        torch.testing.assert_close(
            ours[:, i], expected[:, i], rtol=2e-5, atol=1e-6, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )
    for i in range(len(STRANGE)):  # what is beside a row does not matter
        row = slice(i, i + 1)
        alone = fields_of(mu[row], pi[row], tokens[row], temperature)
        torch.testing.assert_close(alone, ours[:, row], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("payload", [0x7FC00000, 0x7F800001, 0xFFC00000 - 2**32])
def test_every_kind_of_nan_is_nan(compiled: None, payload: int) -> None:
    nan = torch.tensor(payload, dtype=torch.int32).view(torch.float32)
    for which in (0, 1):
        pair = [noise(2, 3000), noise(2, 3000)]
        pair[which][1, 2900] = nan
        ours = fields_of(*pair, torch.zeros(2, dtype=torch.int64))
        assert ours.isnan().any(0).tolist() == ours.isnan().all(0).tolist() == [False, True]


def test_the_two_policies_may_have_different_dtypes_and_lie_apart(compiled: None) -> None:
    mu, pi, tokens = noise(9, 3000), moved(noise(9, 3000), 0.1).bfloat16(), torch.arange(9)
    apart = fields_of(mu[::2, 5:2900], pi[::2, 5:2900], tokens[::2])
    assert torch.equal(apart, fields_of(mu[::2, 5:2900].clone(), pi[::2, 5:2900].clone(), tokens[::2].clone()))
    check_rows(apart, truth(mu[::2, 5:2900], pi[::2, 5:2900], tokens[::2]), rtol=1e-5)
    across = (mu.T.contiguous().T, pi.T.contiguous().T)
    assert torch.equal(fields_of(*across, tokens), fields_of(mu, pi, tokens))


def test_no_bit_depends_on_threads_tokens_or_tv(compiled: None, threads: Callable[[int], None]) -> None:
    mu = noise(BEYOND, 9001)
    pi = moved(mu, 0.05)
    pi[3, 7] = -INF
    tokens = torch.arange(BEYOND)
    found = []
    for count in (1, 2, 3, 7):
        threads(count)
        found.append(exact.divergences(mu, pi, tokens, 1.0))
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))
    without = fields_of(mu, pi, None, tv=False)
    assert torch.equal(without[[0, 1, 3, 4, 5, 6]], found[0][0][[0, 1, 3, 4, 5, 6]])
    assert without[[2, 7, 8]].isnan().all()


def test_tokens_outside_the_vocabulary_and_batches_without_rows(compiled: None) -> None:
    mu = noise(3, 50)
    logps = fields_of(mu, mu, torch.tensor([-1, 49, 50]))[7:]
    assert logps.isnan().tolist() == [[True, False, True]] * 2
    assert fields_of(mu[:0], mu[:0], torch.zeros(0, dtype=torch.int64)).shape == (9, 0)


LOSSES = {
    "kl_rollout_current": kl_rollout_current,
    "kl_current_rollout": kl_current_rollout,
    "entropy": lambda _, logits, **options: entropy(logits, **options),
}
every_loss = pytest.mark.parametrize("of", LOSSES)


def gradient_of(of: str, mu: Tensor, pi: Tensor, upstream: Tensor, **options: float) -> tuple[Tensor, Tensor]:
    logits = pi.detach().requires_grad_()
    value = LOSSES[of](mu, logits, **options)
    return value.detach(), torch.autograd.grad(value, logits, upstream)[0]


@every_loss
@every_float
@pytest.mark.parametrize("drift", [1e-4, 0.05, 2.0])
def test_gradients_are_true_to_rounding(compiled: None, of: str, dtype: torch.dtype, drift: float) -> None:
    mu, pi = noise(7, 3001).to(dtype), moved(noise(7, 3001), drift).to(dtype)
    upstream = torch.linspace(-1, 2, 7)
    value, ours = gradient_of(of, mu, pi, upstream, temperature=0.9)
    measured = getattr(exact_divergences(mu, pi, temperature=0.9), of)
    # The entropy is of one policy, whatever the other.
    torch.testing.assert_close(value, measured, rtol=1e-6 if of == "entropy" else 0, atol=0)
    logits = pi.double().requires_grad_()
    expected = torch.autograd.grad(naive_loss(of, mu.double(), logits, 0.9), logits, upstream.double())[0]
    assert ours.dtype is dtype
    off = (ours - expected).abs() - torch.finfo(dtype).eps * expected.abs() - torch.finfo(dtype).smallest_normal
    assert float(off.max()) < 1e-6


@pytest.mark.parametrize("of", ["kl_rollout_current", "kl_current_rollout"])
def test_the_gradient_of_a_tiny_drift(compiled: None, of: str) -> None:
    mu = noise(4, 3001)
    pi = moved(mu, 1e-5)
    _, ours = gradient_of(of, mu, pi, torch.ones(4))
    logits = pi.double().requires_grad_()
    expected = torch.autograd.grad(naive_loss(of, mu.double(), logits), logits, torch.ones(4).double())[0]
    assert float(((ours - expected).abs().sum(1) / expected.abs().sum(1)).max()) < 1e-5


@every_loss
@every_float
def test_gradients_of_strange_rows_are_those_of_the_plain_way(compiled: None, of: str, dtype: torch.dtype) -> None:
    mu, pi = (torch.tensor([pair[i] for pair in STRANGE.values()]).to(dtype) for i in (0, 1))
    upstream = torch.ones(len(STRANGE))
    (_, ours), (_, plain) = (gradient_of(of, mu, pi, upstream, compiled=c) for c in (True, False))
    assert plain.isnan().any()
    torch.testing.assert_close(ours, plain, rtol=1e-2, atol=1e-6, equal_nan=True)
    _, still = gradient_of(of, mu, pi, 0 * upstream, compiled=True)
    assert not still.any()


@every_float
def test_a_gradient_is_rounded_to_the_nearest(compiled: None, dtype: torch.dtype) -> None:
    """pi - mu = 1/2, times numbers of every size, and those in the middle between two of the dtype."""
    steps = torch.tensor([1.0, 1 + 2**-8, 1 + 2**-11, 1 + 3 * 2**-8, 1 + 3 * 2**-11, 1 + 2**-11 + 2**-20, 1.7, -1.3])
    upstream = (steps[:, None] * 2.0 ** torch.arange(-27, 19)).flatten()
    mu = torch.tensor([[0.0, -INF]]).expand(len(upstream), 2)
    _, ours = gradient_of("kl_rollout_current", mu.to(dtype), torch.zeros_like(mu).to(dtype), upstream)
    assert torch.equal(ours[:, 1], (upstream / 2).to(dtype))
    assert ours.isinf().any() == (dtype is torch.float16)


# When it is built, and what happens if it cannot be.


@pytest.fixture
def taken(fresh: None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is built, in a process whose inputs are large from 1,000 entries on."""
    names: list[str] = []
    for name in ("COMPILE_FROM", "LIBRARY_FROM"):
        monkeypatch.setattr(chunks, name, 1000)
    monkeypatch.setattr(chunks, "_kernel", lambda function: names.append("torch") or function)
    built = build.built
    monkeypatch.setattr(build, "built", lambda name: names.append(name) or built(name))
    return names


def test_large_inputs_are_worth_building_it_unless_that_is_refused(
    taken: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mu, pi = noise(5, 200), moved(noise(5, 200), 0.1)
    exact_divergences(mu[:4], pi[:4])
    exact_divergences(mu, pi, compiled=False)
    with compiled_passes(False):
        exact_divergences(mu, pi)
    for name, value in (("OFFDRIFT_COMPILE", "0"), ("TORCH_COMPILE_DISABLE", "1")):
        monkeypatch.setenv(name, value)
        exact_divergences(mu, pi)
        monkeypatch.delenv(name)
    assert taken == []
    exact_divergences(mu, pi)
    assert taken == ["exact"]
    with compiled_passes(False):
        exact_divergences(mu, pi, compiled=True)
    exact_divergences(mu.double(), pi.double())
    assert taken == ["exact", "torch"]  # what the library does not read


def test_one_row_of_a_large_vocabulary_is_worth_building_it_and_torchs_compiler_is_not(
    fresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []
    monkeypatch.setattr(chunks, "_kernel", lambda function: taken.append("torch") or function)
    built = build.built
    monkeypatch.setattr(build, "built", lambda name: taken.append(name) or built(name))
    mu = noise(1, 2**14)
    exact_divergences(mu[:, 1:], moved(mu, 0.1)[:, 1:])
    exact_divergences(mu.double(), moved(mu, 0.1).double())
    assert taken == []
    exact_divergences(mu, moved(mu, 0.1))
    assert taken == ["exact"]


def test_small_inputs_take_it_where_compiled_passes_are_asked_for(taken: list[str]) -> None:
    with compiled_passes():
        exact_divergences(noise(2, 10), noise(2, 10))
    assert taken == ["exact"]


def test_without_a_compiler_another_way_gives_the_numbers(
    taken: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "/no/such/compiler")
    mu, pi = noise(5, 200), moved(noise(5, 200), 0.1)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            found = exact_divergences(mu, pi, tokens=torch.arange(5))
    assert taken[:2] == ["exact", "torch"]
    assert len(caplog.records) == 1
    check_rows(torch.stack(found), truth(mu, pi, torch.arange(5)), rtol=1e-4)


def test_transformed_tensors_and_those_without_memory_are_left_to_others(compiled: None) -> None:
    def none_for(mu: Tensor, pi: Tensor) -> None:
        assert exact.divergences(mu, pi, None, 1.0) is None

    none_for(noise(2, 5).double(), noise(2, 5))
    none_for(torch.empty(2, 5, device="meta"), torch.empty(2, 5, device="meta"))
    torch.func.vmap(lambda x: none_for(x, x) or x)(noise(2, 10).reshape(2, 2, 5))
