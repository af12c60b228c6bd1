"""What the GPU kernels must return; run by `test_kernels.py`, which chooses where they run.

On a GPU if there is one, else in Triton's interpreter: then `TRITON_INTERPRET=1` must be set before
Triton is imported, hence a process of its own.
"""

import importlib
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from offdrift.divergence import kernels
from offdrift.divergence.exact import ExactDivergences, definition
from offdrift.divergence.head import Head
from offdrift.divergence.hidden import hidden_divergences
from offdrift.errors import BadValueError, ShapeError
from tests.divergence.definitions import naive
from tests.divergence.pairs import STRANGE

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
INF = math.inf
ULP = 2.0**-23

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),  # the interpreter's numpy
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),  # torch.compile's own imports
]


@pytest.fixture(autouse=True, scope="session")
def bfloat16_is_rounded():
    """The interpreter cuts float32 off where the hardware, and torch, round to the nearest even."""
    if DEVICE != "cpu":
        yield
        return
    import triton.language as tl
    from triton.runtime import interpreter

    cut_off = interpreter._convert_float

    def convert(x: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) != (tl.float32, tl.bfloat16):
            return cut_off(x, source, target, mode)
        rounded = torch.from_numpy(np.array(x, np.float32)).bfloat16()
        return rounded.view(torch.int16).numpy().view(np.uint16)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_convert_float", convert)
        yield


def pair(
    n: int, v: int, *, drift: float = 0.05, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(n, v, generator=generator)
    moved = logits + drift * torch.randn(n, v, generator=generator)
    tokens = torch.randint(0, v, (n,), generator=generator)
    return logits.to(dtype).to(DEVICE), moved.to(dtype).to(DEVICE), tokens.to(DEVICE)


def exact_of(*policies: Any) -> ExactDivergences:
    """What the kernels say of two policies, their tokens and a temperature."""
    return kernels.with_normalizers(*policies)[0]


def stacked(logits_rollout: Tensor, logits: Tensor, tokens: Tensor, t: float = 1.0) -> Tensor:
    """The nine fields of `naive`."""
    return torch.stack(naive(logits_rollout, logits, tokens, t))


def assert_as_good_as_naive(ours: Tensor, truth: Tensor, plain: Tensor, rtol: float = 12 * ULP) -> None:
    """|ours - truth| <= |naive - truth| + eps: a dozen roundings of the number, one of a probability in each policy."""
    assert ours.shape == truth.shape == plain.shape
    assert truth.isfinite().all()
    assert truth.numel() > 0
    eps = rtol * truth.abs() + ULP
    excess = (ours - truth).abs() - (plain - truth).abs() - eps
    assert excess.max() <= 0, (ours, truth)


SIZES = [
    (1, 1),
    (1, 2),
    (3, 7),  # less than a vector
    (2, 129),  # one tile of one warp, and one more
    (5, 1000),
    (2, 4096),  # tiles, and no rest
    (2, 4097),
    (3, 9001),
]


@pytest.mark.parametrize(("n", "v"), SIZES)
def test_float32_is_as_good_as_naive(n, v):
    temperature = 1 if v % 2 else 0.7
    mu, pi, tokens = pair(n, v, seed=v)
    ours = torch.stack(exact_of(mu, pi, tokens, temperature))
    truth = stacked(mu.double(), pi.double(), tokens, temperature)
    assert ours.dtype == torch.float32
    if v == 1:  # one token: everything is certain
        certain = torch.tensor([0.0, 0, 0, 0, 0, 0, 1, 0, 0], device=ours.device)
        assert torch.allclose(ours[:, 0], certain, rtol=0, atol=ULP)
        return
    assert_as_good_as_naive(ours, truth, stacked(mu, pi, tokens, temperature))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("v", [7, 4999])
def test_half_precision_logits_are_read_as_they_are_and_summed_in_float32(dtype, v):
    mu, pi, tokens = pair(3, v, dtype=dtype)
    ours = torch.stack(exact_of(mu, pi, tokens, 1.3))
    truth = stacked(mu.double(), pi.double(), tokens, 1.3)
    assert_as_good_as_naive(ours, truth, stacked(mu.float(), pi.float(), tokens, 1.3))


def test_the_two_policies_may_have_different_dtypes_and_offsets():
    mu, pi, tokens = pair(3, 3000)
    mu, pi = mu.log_softmax(-1), (pi + 100).bfloat16()
    ours = torch.stack(exact_of(mu, pi, tokens))
    truth = stacked(mu.double(), pi.double(), tokens)
    # Scores 110 apart: log pi - log mu, of about 0.05, is known to an ulp of 110.
    assert_as_good_as_naive(ours, truth, stacked(mu, pi.float(), tokens), rtol=2e-5)


def test_a_small_drift_survives():
    mu, pi, tokens = pair(4, 5000, drift=1e-4)
    ours = exact_of(mu, pi, tokens)
    truth = definition(mu.double(), pi.double(), tokens)
    assert truth.kl_rollout_current.max() < 1e-8
    for name in ("kl_rollout_current", "kl_current_rollout", "chi2", "tv"):
        error = (getattr(ours, name) / getattr(truth, name) - 1).abs()
        assert error.max() < 2e-3, name


def test_equal_policies_are_at_distance_0():
    mu, _, tokens = pair(3, 3000)
    found = exact_of(mu, mu.clone(), tokens)
    assert torch.stack(found[:4]).eq(0).all()
    assert found.logp.equal(found.logp_rollout)


def test_without_tokens_there_are_no_log_probs():
    mu, pi, tokens = pair(3, 300)
    found, with_tokens = (exact_of(mu, pi), exact_of(mu, pi, tokens))
    assert found.logp is None
    assert found.logp_rollout is None
    # Another reference, other roundings.
    assert torch.allclose(torch.stack(found[:7]), torch.stack(with_tokens[:7]), rtol=2e-5, atol=ULP)


def test_no_tokens_no_rows():
    mu, pi, tokens = pair(0, 300)
    assert [x.shape for x in exact_of(mu, pi, tokens)] == [(0,)] * 9


def test_rows_may_lie_apart_and_entries_too():
    mu, pi, tokens = pair(4, 1000)
    expected = torch.stack(exact_of(mu, pi, tokens))
    wide = torch.full((4, 1300), math.nan, device=mu.device)
    wide[:, 200:1200] = mu
    apart = exact_of(wide[:, 200:1200], pi.T.contiguous().T, tokens)
    assert torch.stack(apart).equal(expected)


def spread(scores: list[float], v: int) -> Tensor:
    """The four scores at places in different tiles, -inf elsewhere; four entries as they are."""
    row = torch.full((v,), -INF)
    row[torch.linspace(0, v - 1, 4).long()] = torch.tensor(scores, dtype=torch.float32)
    return row


@pytest.mark.parametrize(("v", "temperature"), [(4, 1), (4500, 0.5)])
def test_infinities_and_rows_that_are_no_distribution(v, temperature):
    mu, pi = (torch.stack([spread(scores[i], v) for scores in STRANGE.values()]).to(DEVICE) for i in (0, 1))
    tokens = torch.linspace(0, v - 1, 4).long()[torch.arange(len(STRANGE)) % 4].to(DEVICE)
    tokens[0], tokens[1] = v, -1  # not in the vocabulary
    ours, normalizers = kernels.with_normalizers(mu, pi, tokens, temperature)
    truth = definition(mu.double(), pi.double(), tokens, float(temperature))
    for scores, high, low in ((mu, *normalizers[:2]), (pi, *normalizers[2:])):
        nothing = ~scores.double().logsumexp(-1).isfinite()
        assert 3 <= nothing.sum() <= 4
        assert (high + low).isnan().equal(nothing)
    for name, found, expected in zip(ExactDivergences._fields, ours, truth):
        # 1e-5: chi2 is e^(2 log pi - log mu), and float32 holds an exponent of 100 to 4e-6.
        assert torch.allclose(found.double(), expected, rtol=1e-5, atol=ULP, equal_nan=True), (
            name,
            [(*row, a, b) for *row, a, b in zip(STRANGE, found.tolist(), expected.tolist())],
        )
    kl = dict(zip(STRANGE, ours.kl_rollout_current.tolist()))
    assert kl["pi lacks one"] == INF
    assert kl["mu lacks one"] < INF
    assert math.isnan(kl["mu is nothing"])


def swept_again(*policies: Any, **how: Any) -> tuple[ExactDivergences, list[bool]]:
    """What the kernels say, and which rows one sweep was not enough for."""
    flags: list[Tensor] = []
    once = kernels.sweep_again

    def listed(again: Tensor, *others: Any) -> None:
        flags.append(again.clone())
        once(again, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "sweep_again", listed)
        found = kernels.with_normalizers(*policies, **how)[0]
    return found, flags[0].bool().tolist()


@pytest.fixture(params=[True, False], ids=["exponentials", "polynomial first"])
def wide(request, monkeypatch):
    """Both ways of the sweep."""
    monkeypatch.setattr(kernels, "SWEEP", kernels.SWEEP._replace(wide=request.param))


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("v", [7, 2048, 9001])
def test_ordinary_rows_are_swept_once(v, dtype):
    mu, pi, _ = pair(2, v, drift=0.5, dtype=dtype)
    tokens = mu.argmax(1)
    found, again = swept_again(mu, pi, tokens)
    assert again == [False, False]
    assert found.tv.isfinite().all()


@pytest.mark.usefixtures("wide")
def test_rows_that_one_sweep_is_too_coarse_for_are_swept_again():
    mu, pi, _ = pair(8, 1000)
    tokens = mu.argmax(1)
    mu[1, 7] = pi[2, 8] = mu[3, 9] = pi[3, 9] = -INF  # one policy, or both, cannot draw it
    pi[4, 3] += 9  # a ratio beyond e^8
    pi[5] = -pi[5]  # another policy altogether
    mu[6, tokens[6]] += 40  # a peak, and a token that is not on it
    pi[6, tokens[6]] += 40
    tokens[6] = (tokens[6] + 1) % 1000
    found, again = swept_again(mu, pi, tokens)
    assert again == [False, True, True, True, True, True, True, False]
    truth = torch.stack(definition(mu.double(), pi.double(), tokens))
    assert torch.allclose(torch.stack(found).double(), truth, rtol=2e-5, atol=ULP)


def drifted(kl: float, *, peaked: bool, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Four rows of about this KL, and tokens drawn from mu; the top token of peaked rows has up to all the mass."""
    mu, _, _ = pair(4, 3000, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    if peaked:
        mu[:, 17] += 25 * torch.rand(4, generator=generator).to(DEVICE)
    pi = mu + math.sqrt(2 * kl) * torch.randn(4, 3000, generator=generator).to(DEVICE)
    tokens = torch.multinomial(mu.softmax(-1).cpu(), 1, generator=generator).squeeze(1)
    return mu, pi, tokens.to(DEVICE)


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("peaked", [False, True])
@pytest.mark.parametrize(
    ("kl", "limit"), [(1e-8, 2e-4), (5e-7, 1e-4), (1e-4, 1e-5), (1e-2, 1e-5), (1, 1e-5), (10, 1e-5)]
)
def test_divergences_of_any_size_keep_their_digits(kl, limit, peaked):
    mu, pi, tokens = drifted(kl, peaked=peaked)
    found, truth = exact_of(mu, pi, tokens), definition(mu.double(), pi.double(), tokens)
    assert kl / 100 < truth.kl_rollout_current.median() < 3 * kl
    for name in ("kl_rollout_current", "kl_current_rollout", "tv", "chi2"):
        expected = getattr(truth, name)
        error = (getattr(found, name) - expected).abs()
        assert (error <= limit * expected + 1e-13).all(), (name, error / expected)


def test_pairs_of_bfloat16_are_read_like_single_ones():
    """Words of two where rows begin at one, single numbers where they do not."""
    mu, pi, tokens = pair(3, 4096, dtype=torch.bfloat16)
    found = torch.stack(exact_of(mu, pi, tokens))
    apart = torch.full((3, 4097), math.nan, dtype=torch.bfloat16, device=DEVICE)  # rows at odd places
    apart[:, 1:] = mu
    single = torch.stack(exact_of(apart[:, 1:], pi, tokens))
    assert torch.allclose(found, single, rtol=1e-5, atol=ULP)
    assert torch.stack(exact_of(mu, mu.clone(), tokens)[:4]).eq(0).all()


def test_tv_only_when_asked():
    mu, pi, tokens = pair(3, 1001)
    mu[1, 5] = -INF
    with_tv, without = (kernels.with_normalizers(mu, pi, tokens, tv=tv) for tv in (True, False))
    assert without[0].tv.isnan().all()
    others = [x for x in range(9) if x != 2]
    assert torch.stack(with_tv[0])[others].equal(torch.stack(without[0])[others])
    assert torch.stack(with_tv[1]).equal(torch.stack(without[1]))


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("drift", [0.05, 2.0])
def test_tv_of_near_and_far_policies(drift):
    """By the series of one exponential, and by the difference of two."""
    mu, pi, _ = pair(3, 3001, drift=drift)
    pi += 3  # a shift of all scores is none of the policy
    tokens = mu.argmax(1)
    found, again = swept_again(mu, pi, tokens, temperature=1.1)
    expected = definition(mu.double(), pi.double(), tokens, 1.1).tv
    assert not all(again)
    assert torch.allclose(found.tv.double(), expected, rtol=5e-6, atol=ULP)


@pytest.mark.parametrize("name", ["kl_rollout_current", "kl_current_rollout", "entropy"])
def test_gradients_are_those_of_finite_differences(name):
    mu, pi, _ = pair(2, 300, drift=0.3)
    ours = gradient(name, mu, pi, torch.ones(2, device=DEVICE), 1.0)
    tokens = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    h = 1e-4
    for column in pi.argmax(1).tolist():
        step = torch.zeros(300, dtype=torch.float64, device=DEVICE)
        step[column] = h
        ends = (getattr(definition(mu.double(), pi.double() + s, tokens), name) for s in (step, -step))
        above, below = ends
        assert torch.allclose(ours[:, column].double(), (above - below) / (2 * h), rtol=1e-4, atol=1e-7)


def test_a_late_large_score_costs_another_sweep_and_no_digits():
    mu, pi, tokens = pair(2, 9001)
    mu[:, 8000] += 200  # beyond float32 relative to anything in the first tile
    pi[:, 8000] += 198
    tokens[:] = 8000
    ours = torch.stack(exact_of(mu, pi, tokens))
    truth = torch.stack(definition(mu.double(), pi.double(), tokens))
    assert torch.allclose(ours[:4].double(), truth[:4], rtol=1e-5, atol=1e-30)
    assert torch.allclose(ours[4:].double(), truth[4:], rtol=1e-5, atol=ULP / 2)


def truth_of_gradient(name: str, mu: Tensor, pi: Tensor, upstream: Tensor, t: float) -> Tensor:
    logits = pi.double().requires_grad_()
    index = ExactDivergences._fields.index(name)
    tokens = torch.zeros(len(mu), dtype=torch.int64, device=mu.device)
    value = stacked(mu.double(), logits, tokens, t)[index]
    return torch.autograd.grad(value, logits, upstream.double())[0]


def gradient(name: str, mu: Tensor, pi: Tensor, upstream: Tensor, t: float) -> Tensor:
    found, normalizers = kernels.with_normalizers(mu, pi, None, t)
    return kernels.gradient(name, upstream, getattr(found, name), mu, pi, normalizers, t)


LOSSES = ["kl_rollout_current", "kl_current_rollout", "entropy"]


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("n", "v", "t"), [(3, 7, 1.0), (2, 3001, 0.7)])
def test_gradients_are_those_of_float64(name, n, v, t):
    mu, pi, _ = pair(n, v)
    upstream = torch.linspace(-1, 2, n).to(DEVICE)
    ours, truth = gradient(name, mu, pi, upstream, t), truth_of_gradient(name, mu, pi, upstream, t)
    logits = pi.clone().requires_grad_()
    index = ExactDivergences._fields.index(name)
    tokens = torch.zeros(n, dtype=torch.int64, device=mu.device)
    value = stacked(mu, logits, tokens, t)[index]
    plain = torch.autograd.grad(value, logits, upstream)[0]
    # A unit in the last place of each log-prob: half a one for its distance from the normalizer, and half a one for
    # scaling that. Relative to the gradient of a small drift it is much; how they round decides who is luckier.
    log_mu, log_pi = mu.double().log_softmax(1), (pi.double() / t).log_softmax(1)
    last_place = ULP * (log_mu.abs() + log_pi.abs()) * (log_mu.exp() + log_pi.exp())
    last_place *= upstream.double().abs()[:, None] / t
    # Per entry roundings are luck; over a row they are not.
    for error in (torch.linalg.vector_norm, lambda x, dim: x.abs().amax(dim)):
        least = 12 * ULP * error(truth, dim=1) + error(last_place, dim=1)
        assert (error(ours - truth, dim=1) <= error(plain - truth, dim=1) + least).all()
    assert ours.dtype == torch.float32


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_have_the_dtype_of_the_logits(name):
    mu, pi, _ = pair(2, 1001, dtype=torch.bfloat16)
    upstream = torch.ones(2, device=mu.device)
    ours, truth = (gradient(name, mu, pi, upstream, 1.0), truth_of_gradient(name, mu, pi, upstream, 1))
    assert ours.dtype == torch.bfloat16
    # One rounding to 8 bits on top of what float32 loses.
    limit = 2.0**-8 * truth.abs() + 1e-6 * truth.abs().amax()
    assert ((ours - truth).abs() <= limit).all()


def test_gradients_of_strange_rows():
    mu = torch.tensor([[1.0, 2, 3], [1, -INF, 3], [1, 2, 3], [math.nan, 2, 3], [math.nan, 2, 3]])
    pi = torch.tensor([[1.0, -INF, 2], [1.0, 2, 2], [3, 2, 1], [1, 2, 3], [1, 2, 3]])
    mu, pi = mu.to(DEVICE), pi.to(DEVICE)
    upstream = torch.tensor([1.0, 1, 0, 0, 1], device=mu.device)
    kl = gradient("kl_rollout_current", mu, pi, upstream, 1.0)
    p, q = pi.softmax(-1), mu.softmax(-1)
    assert torch.allclose(kl[:2], (p - q)[:2] * (pi[:2] > -INF), atol=1e-7)
    kl_back = gradient("kl_current_rollout", mu, pi, upstream, 1.0)
    assert kl_back[0, 1] == 0
    assert kl_back[0].isfinite().all()
    assert kl_back[1].isnan().all()  # pi draws what mu cannot: no limit
    h = gradient("entropy", pi, pi, upstream, 1.0)
    assert h[0, 1] == 0
    assert torch.allclose(h.sum(-1), torch.zeros_like(upstream), atol=1e-6)
    for found in (kl, kl_back):  # nothing is asked of rows 2 and 3
        assert found[2:4].eq(0).all()
        assert found[4].isnan().all()


def head(*shape: Any) -> Head:
    """A head with this scale, soft cap and rounding, of which the kernels take the products."""
    return Head(torch.zeros(1, 1), None, *shape)


def by_chunks(
    mu: Tensor, pi: Tensor, chunk: int, temperatures: tuple[float, float], heads: tuple[Head, Head] = (head(), head())
) -> Tensor:
    n = len(mu)
    normalizers = []
    for x, t, of in zip((mu, pi), temperatures, heads):
        top = torch.full((n,), torch.finfo(torch.float32).min, device=mu.device)
        total = torch.zeros(n, dtype=torch.float64, device=mu.device)
        for scores in x.split(chunk, 1):
            top, total = kernels.update_normalizer(top, total, scores, t, of)
        normalizers.append((top, total))
    sums = torch.zeros(7, n, device=mu.device)
    for scores in zip(mu.split(chunk, 1), pi.split(chunk, 1)):
        sums = kernels.accumulate(sums, scores, tuple(normalizers), temperatures, heads)
    return sums


@pytest.mark.parametrize(("v", "chunk"), [(7, 3), (1000, 1000), (5000, 1024)])
def test_chunks_make_up_a_row(v, chunk):
    mu, pi, tokens = pair(3, v)
    ours = by_chunks(mu, pi, chunk, (1.3, 0.8))
    truth = stacked(mu.double() / 1.3, pi.double(), tokens, 0.8)[:7]
    assert_as_good_as_naive(ours, truth, stacked(mu / 1.3, pi, tokens, 0.8)[:7])


def test_chunks_of_strange_rows():
    mu, pi = (torch.tensor([row[i] for row in STRANGE.values()], device=DEVICE) for i in (0, 1))
    mu, pi = mu.float(), pi.float()
    ours = by_chunks(mu, pi, 3, (1.0, 1.0))
    tokens = torch.zeros(len(mu), dtype=torch.int64, device=DEVICE)
    truth = torch.stack(definition(mu.double(), pi.double(), tokens)[:7])
    distributions = ~truth.isnan().any(0)
    assert distributions.sum() == len(STRANGE) - 7
    expected, found = truth[:, distributions], ours[:, distributions].double()
    assert torch.allclose(found, expected, rtol=1e-5, atol=2 * ULP)
    assert ours[:4, ~distributions].isnan().all()


@pytest.mark.parametrize("round_to", [None, torch.bfloat16])
def test_heads_that_scale_and_cap(round_to):
    mu, pi, tokens = pair(3, 500, drift=0.3)
    mu[0, 3] = -INF  # stays out, however low the cap
    heads = (head(0.5, None, round_to), head(2, 4.0, round_to))

    def rounded(x: Tensor) -> Tensor:
        return x if round_to is None else x.to(round_to).to(x.dtype)

    def capped(x: Tensor) -> Tensor:
        return rounded(rounded(rounded(rounded(2 * x) / 4).tanh()) * 4)

    pi[0, 3] = -INF
    a, b = rounded(0.5 * mu.double()), capped(pi.double())
    b[0, 3] = -INF
    truth = torch.stack(definition(a, b, tokens)[:7])
    plain_b = capped(pi)
    plain_b[0, 3] = -INF
    plain = torch.stack(definition(rounded(0.5 * mu), plain_b, tokens)[:7])
    ours = by_chunks(mu, pi, 128, (1.0, 1.0), heads)
    assert_as_good_as_naive(ours, truth, plain)


def test_tanh_where_its_two_ways_meet():
    """At a cap of 1 and no temperature, scores are tanh itself: two tokens tell it from log pi."""
    x = torch.tensor([[-9.0], [-0.3], [-0.25], [-1e-3], [0], [1e-6], [0.2499], [0.25], [0.3], [9]])
    scores = torch.cat([x, torch.zeros_like(x)], 1).to(DEVICE)
    top, total = torch.full((10,), -INF, device=DEVICE), torch.zeros(10, device=DEVICE)
    top, total = kernels.update_normalizer(top, total, scores, 1, head(1, 1.0))
    tanh = x[:, 0].double().tanh().to(DEVICE)
    assert torch.allclose(top.double(), tanh.clamp(min=0), rtol=4 * ULP, atol=0)
    assert torch.allclose(total.double(), 1 + (-tanh.abs()).exp(), rtol=4 * ULP, atol=0)


@pytest.mark.parametrize("keep_mib", [None, 0], ids=["whole rows", "chunks"])
@pytest.mark.parametrize("round_to", [None, torch.bfloat16])
def test_hidden_states_whole_rows_and_in_chunks(round_to, keep_mib):
    """Scores are those of the head, in float64; the rows are as in `test_heads_that_scale_and_cap`."""
    generator = torch.Generator().manual_seed(3)
    dtype = round_to or torch.float32
    states, moved = (torch.randn(5, 16, generator=generator).to(dtype).to(DEVICE) for _ in range(2))
    moved = states + 0.1 * moved
    weight = torch.randn(700, 16, generator=generator).to(dtype).to(DEVICE)
    bias = torch.zeros(700, dtype=dtype, device=DEVICE)
    bias[600:] = -INF
    heads = (Head(weight, bias, 0.5, None, round_to), Head(weight, bias, 2.0, 4.0, round_to))
    tokens = torch.tensor([0, 5, 599, 3, -1], device=DEVICE)
    states[3, 2] = INF
    both = (states, heads[0], moved, heads[1])
    temperatures = {"temperature_rollout": 1.3, "temperature": 0.8}
    ours = torch.stack(hidden_divergences(*both, tokens=tokens, chunk=128, keep_mib=keep_mib, **temperatures))
    scores = [h.scores(x, slice(0, 700)).double() for x, h in zip((states, moved), heads)]
    rows = torch.tensor([0, 1, 2, 4])
    drawn = tokens[rows].clamp(min=0)
    truth = torch.stack(definition(scores[0][rows] / 1.3, scores[1][rows] / 0.8, drawn))
    truth[7:, 3] = math.nan
    assert ours[:, 3].isnan().all()
    # Of the chunks' normalizers in float32 less is asked: they have been tested beside `naive`.
    assert torch.allclose(ours[:, rows].double(), truth, rtol=2e-5, atol=1e-6, equal_nan=True)


def test_what_the_kernels_do_not_take():
    device = torch.device(DEVICE)
    assert kernels.available(device)
    assert kernels.available(device, torch.bfloat16, torch.float32)
    assert not kernels.available(device, torch.float64)
    wide = torch.zeros(2, 3, dtype=torch.float64, device=device)
    with pytest.raises(BadValueError, match="float64"):
        exact_of(wide, wide)
    with pytest.raises(ShapeError, match="vocab"):
        exact_of(*torch.zeros(2, 2, 0, device=device))


def test_the_benchmark_runs(monkeypatch, tmp_path, capsys):
    """For errors, not for time."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    path = tmp_path / "gpu_kl.json"
    found = importlib.import_module("gpu_kl").main(["--tiny", "--json", str(path)])
    assert json.loads(path.read_text()) == found
    for part in ("exact", "backward", "hidden"):
        assert {"ours", "naive"} <= set(found[part])
        assert found[part]["ours"]["seconds"] > 0
    for dtype in ("bfloat16", "float32"):
        assert max(found[dtype]["relative_errors"].values()) < 1e-4
    if DEVICE == "cpu":
        assert "say nothing about a GPU" in capsys.readouterr().out
