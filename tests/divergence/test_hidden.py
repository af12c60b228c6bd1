"""Divergences from hidden states against the same ones from materialised logits, and what they hold."""

import importlib.util
import inspect
import math
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from offdrift.divergence import chunks
from offdrift.divergence.exact import ExactDivergences, definition
from offdrift.divergence.hidden import Head, hidden_divergences
from offdrift.errors import BadValueError, OffdriftError, ShapeError
from tests.divergence.definitions import naive
from tests.divergence.pairs import HAS_COMPILER, STRANGE

INF, NAN = math.inf, math.nan
F64 = torch.float64


def numbers(*shape: int, seed: int = 0, scale: float = 1.0, dtype=F64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(*shape, generator=generator, dtype=F64)).to(dtype)


def logits_of(hidden: torch.Tensor, head: Head) -> torch.Tensor:
    """The equation of a head in float64, all of the vocabulary at once."""
    logits = hidden.double() @ head.weight.double().T
    logits = logits if head.bias is None else logits + head.bias.double()
    logits = head.scale * logits
    return logits if head.soft_cap is None else head.soft_cap * torch.tanh(logits / head.soft_cap)


def truth(h_mu, head_mu, h_pi, head_pi, tokens, t_mu=1.0, t_pi=1.0) -> ExactDivergences:
    return definition(logits_of(h_mu, head_mu) / t_mu, logits_of(h_pi, head_pi), tokens, t_pi)


def assert_fields(got: ExactDivergences, expected: ExactDivergences, of: str = "", **tolerance) -> None:
    for name, ours, exact in zip(got._fields, got, expected, strict=True):
        assert (ours is None) == (exact is None), name
        if ours is not None:
            say = lambda message, name=name: f"{of} {name}: {message}"  # noqa: E731
            torch.testing.assert_close(ours, exact, equal_nan=True, msg=say, **tolerance)


def policies(n=7, v=53, d=11, dtype=F64, drift=0.3, **head):
    """Two policies of the same architecture, and the tokens drawn."""
    h, w = numbers(n, d, dtype=dtype), numbers(v, d, seed=1, dtype=dtype)
    h2 = h + numbers(n, d, seed=2, scale=drift / d**0.5, dtype=dtype)
    w2 = w + numbers(v, d, seed=3, scale=drift / d**0.5, dtype=dtype)
    tokens = torch.randint(v, (n,), generator=torch.Generator().manual_seed(4))
    return h, Head(w, **head), h2, Head(w2, **head), tokens


@st.composite
def cases(draw):
    """Everything that may differ between two policies, over vocabularies that chunks do not divide."""
    n, v = draw(st.integers(0, 5)), draw(st.integers(1, 17))
    seed = draw(st.integers(0, 2**16))
    score = st.one_of(st.floats(-3, 3, width=32), st.just(-INF))

    def policy(seed):
        d = draw(st.integers(1, 5))
        bias = draw(st.none() | st.lists(score, min_size=v, max_size=v).filter(lambda b: max(b) > -9))
        head = Head(
            numbers(v, d, seed=seed),
            None if bias is None else torch.tensor(bias, dtype=F64),
            draw(st.sampled_from([1, 0.25, 8.0])),
            draw(st.sampled_from([None, 2.0])) if bias is None or -INF not in bias else None,
        )
        return numbers(n, d, seed=seed + 1), head

    pair = (*policy(seed), *policy(draw(st.sampled_from([seed, seed + 7]))))
    tokens = torch.tensor(draw(st.lists(st.integers(0, v - 1), min_size=n, max_size=n)), dtype=torch.int64)
    sizes = {
        "chunk": draw(st.none() | st.integers(1, 19)),
        "token_chunk": draw(st.none() | st.integers(1, 6)),
        "keep_mib": draw(st.sampled_from([0, 1e-4, 256])),
    }
    temperatures = draw(st.tuples(*[st.sampled_from([0.5, 1.0, 1.7])] * 2))
    return pair, tokens, sizes, temperatures


@settings(deadline=None, max_examples=60)
@given(cases())
def test_equals_the_definition_on_materialised_logits(case):
    pair, tokens, sizes, (t_mu, t_pi) = case
    got = hidden_divergences(*pair, tokens=tokens, temperature_rollout=t_mu, temperature=t_pi, **sizes)
    assert all(x.shape == tokens.shape for x in got)
    assert_fields(got, truth(*pair, tokens, t_mu, t_pi), rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize("chunk", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_infinities_and_rows_that_are_no_distribution(chunk, dtype):
    # One policy is a head whose bias is the row of logits.
    one, drawn = torch.zeros(1, 1, dtype=dtype), torch.tensor([2])
    for name, rows in STRANGE.items():
        mu, pi = (torch.tensor([row], dtype=dtype) for row in rows)
        heads = [Head(torch.zeros(4, 1, dtype=dtype), row[0]) for row in (mu, pi)]
        for keep_mib in (0, 256):
            got = hidden_divergences(one, heads[0], one, heads[1], tokens=drawn, chunk=chunk, keep_mib=keep_mib)
            assert_fields(got, definition(mu, pi, drawn), rtol=1e-5, atol=1e-7, of=name)


def test_kept_and_repeated_products_give_the_same_bits():
    pair = policies(n=9, v=100)
    kept, repeated = (hidden_divergences(*pair[:4], chunk=7, keep_mib=k) for k in (256, 0))
    assert all(torch.equal(a, b) for a, b in zip(kept[:7], repeated[:7], strict=True))


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("soft_cap", [None, 5.0])
@pytest.mark.parametrize("of_rollout", [True, False])
def test_a_state_that_is_no_number_makes_its_row_nan_and_no_other(bad, soft_cap, of_rollout):
    h, head, h2, head2, tokens = policies(soft_cap=soft_cap)
    expected = truth(h, head, h2, head2, tokens)
    (h if of_rollout else h2)[3, 2] = bad
    got = hidden_divergences(h, head, h2, head2, tokens=tokens, chunk=10)
    others = torch.arange(len(h)) != 3
    assert all(math.isnan(x[3]) for x in got)
    assert_fields(
        ExactDivergences(*(x[others] for x in got)),
        ExactDivergences(*(x[others] for x in expected)), rtol=1e-9, atol=1e-14,
    )  # fmt: skip


def test_masked_padding_is_no_token_also_under_a_soft_cap():
    h, head, h2, head2, tokens = policies(v=20, soft_cap=3.0)
    mask = torch.zeros(26, dtype=F64).index_fill(0, torch.arange(20, 26), -INF)
    pad = lambda w: torch.cat([w, numbers(6, 11, seed=9)])  # noqa: E731
    padded = [replace(x, weight=pad(x.weight), bias=mask) for x in (head, head2)]
    got = hidden_divergences(h, padded[0], h2, padded[1], tokens=tokens % 20, chunk=7)
    assert_fields(got, truth(h, head, h2, head2, tokens % 20), rtol=1e-9, atol=1e-14)


def test_tokens_outside_the_vocabulary_have_no_log_prob():
    pair = policies(n=3)
    got = hidden_divergences(*pair[:4], tokens=torch.tensor([-1, 53, 52]), chunk=10)
    assert got.logp.isnan().tolist() == got.logp_rollout.isnan().tolist() == [True, True, False]
    assert not got.tv.isnan().any()


# Precision.


def products(h, head, h2, head2):
    """Two whole matrices of logits in float32, for the naive way."""
    return h.float() @ head.weight.float().T, h2.float() @ head2.weight.float().T


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("drift", [0.03, 0.3])
def test_no_further_from_the_truth_than_the_naive_way(dtype, drift):
    *pair, tokens = policies(n=16, v=3000, d=24, dtype=dtype, drift=drift)
    got = hidden_divergences(*pair, tokens=tokens, chunk=512, token_chunk=5)
    obvious, exact = naive(*products(*pair), tokens), truth(*pair, tokens)
    for name, ours, theirs, best in zip(got._fields, got, obvious, exact, strict=True):
        assert ours.dtype is torch.float32
        assert len(ours) == 16
        excess = (ours - best).abs() - (theirs - best).abs()
        # Scores of size 16 carry 1e-6 of rounding, whoever computes them.
        assert (excess <= 1e-6 * best.abs().clamp(min=1.0)).all(), name


def test_a_tiny_divergence_survives_float32():
    # States that differ in the last bits: KL of about 1e-9 nats, which is noise in the naive way.
    h, head, h2, _, tokens = policies(n=16, v=4000, d=24, dtype=torch.float32, drift=1e-4)
    got = hidden_divergences(h, head, h2, head, chunk=512)
    exact = truth(h, head, h2, head, tokens)
    assert 1e-11 < exact.kl_rollout_current.min() < exact.kl_rollout_current.max() < 1e-7
    error = (got.kl_rollout_current - exact.kl_rollout_current).abs()
    # Float32 products of size 16 are off by 1e-6, and x here is 6e-5.
    assert (error <= 0.1 * exact.kl_rollout_current).all()
    obvious = naive(*products(h, head, h2, head), tokens).kl_rollout_current
    assert (obvious - exact.kl_rollout_current).abs().mean() > 10 * error.mean()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("extra", [{}, {"scale": 0.3, "soft_cap": 4.0}])
@pytest.mark.parametrize("with_bias", [True, False])
def test_rounded_scores_are_those_of_an_engine_of_that_dtype(dtype, extra, with_bias):
    h, w = numbers(12, 64, dtype=dtype), numbers(500, 64, seed=1, dtype=dtype)
    bias = numbers(500, seed=2, dtype=dtype) if with_bias else None
    head = Head(w, bias, **extra, round_to=dtype)
    engine = torch.nn.functional.linear(h, w, bias)
    if extra:
        engine = (engine * 0.3 / 4.0).tanh() * 4.0  # each step rounds
    blocks = [head.scores(h, slice(i, i + 128)) for i in range(0, 500, 128)]
    got = torch.cat(blocks, dim=1)
    assert got.dtype is torch.float32
    assert torch.equal(got.to(dtype).float(), got)
    # One logit in thousands lies so near a tie that another order of summation rounds it elsewhere.
    assert (got != engine.float()).float().mean() < 5e-3
    assert (got - engine.float()).abs().max() <= 4 * torch.finfo(dtype).eps * got.abs().max()


def test_autocast_does_not_round_the_evidence():
    pair = policies(dtype=torch.float32)[:4]
    expected = hidden_divergences(*pair)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_fields(hidden_divergences(*pair), expected, rtol=0, atol=0)


def test_mixed_sizes_and_dtypes():
    h, head = (numbers(5, 8, dtype=torch.bfloat16), Head(numbers(40, 8, seed=1, dtype=torch.bfloat16)))
    h2, head2 = numbers(5, 3, seed=2), Head(numbers(40, 3, seed=3, dtype=torch.float32))
    tokens = torch.arange(5, dtype=torch.int32)
    got = hidden_divergences(h, head, h2, head2, tokens=tokens, chunk=9)
    assert {x.dtype for x in got} == {F64}
    # The bfloat16 policy's product is a float32 one.
    assert_fields(got, truth(h, head, h2, head2, tokens.long()), rtol=1e-4, atol=1e-5)


# Memory.


class LargestTensor(TorchDispatchMode):
    """The size of the largest tensor that any operator returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in tree_leaves(args) if torch.is_tensor(x)}
        for x in tree_leaves(result):
            if torch.is_tensor(x) and x.untyped_storage().data_ptr() not in given:
                self.numel = max(self.numel, x.numel())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [500, 1500])
@pytest.mark.parametrize("n", [32, 64])
def test_no_tensor_grows_with_the_vocabulary_or_the_batch(n, vocab, dtype):
    pair = policies(n=n, v=vocab, d=6, dtype=dtype)
    with LargestTensor() as seen:
        hidden_divergences(*pair[:4], tokens=pair[4], chunk=64, token_chunk=16, keep_mib=0)
    assert seen.numel == 16 * 64  # token_chunk x chunk, above chunk x d and every field of the result


def test_kept_scores_stay_within_their_budget():
    pair = policies(n=200, v=4096, d=6, dtype=torch.float32)
    held = []
    score = Head.scores

    class Watched(Head):
        def scores(self, hidden, rows):
            held.append(len(hidden))
            return score(self, hidden, rows)

    heads = [Watched(head.weight) for head in (pair[1], pair[3])]
    hidden_divergences(pair[0], heads[0], pair[2], heads[1], chunk=1024, keep_mib=2)
    # 2 MiB are 64 tokens of two policies: 4 chunks of tokens, 4 of the vocabulary, each product once.
    assert len(held) == 2 * 4 * 4
    assert max(held) <= 64
    held.clear()
    hidden_divergences(pair[0], heads[0], pair[2], heads[1], chunk=1024, keep_mib=0.5)
    # 16 tokens would read the weights too often: all 200 at once, each product twice.
    assert len(held) == 2 * 2 * 4
    assert max(held) == 200


# Ways to run.


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")
@pytest.mark.skipif(not HAS_COMPILER, reason="needs a C++ compiler")
def test_compiled_and_plain_agree():
    *pair, tokens = policies(n=12, v=300, dtype=torch.float32)
    pair[1] = replace(pair[1], bias=torch.zeros(300).index_fill(0, torch.arange(3), -INF))
    sizes = {"tokens": tokens, "chunk": 64, "token_chunk": 5, "temperature": 0.7}
    plain = hidden_divergences(*pair, **sizes, compiled=False)
    assert plain.kl_current_rollout.isinf().all()
    assert_fields(hidden_divergences(*pair, **sizes, compiled=True), plain, rtol=2e-5, atol=2e-6)


INTERPRETED = """
import math, torch
from offdrift.divergence import fused
from offdrift.divergence.hidden import Head, hidden_divergences

assert fused.route(torch.device("cpu"), torch.float32) == "triton"
torch.manual_seed(0)
tokens, mask = torch.tensor([0, 49, 3, -1, 16]), torch.zeros(50)
mask[-4:] = -math.inf
checked = 0
for dtype, keep_mib, extra in (
    (torch.float32, 0, {}), (torch.float16, 1, {"scale": 0.5, "soft_cap": 3.0})
):
    h, w = torch.randn(5, 7).to(dtype), torch.randn(50, 7).to(dtype)
    h[1, 2] = math.nan
    head = Head(w, mask.to(dtype), **extra, round_to=None if dtype is torch.float32 else dtype)
    case = (h, head, h + 0.1, Head(w + 0.1, **extra))
    more = {"tokens": tokens, "chunk": 16, "temperature_rollout": 1.2, "temperature": 0.7}
    got = hidden_divergences(*case, **more, keep_mib=keep_mib)
    for a, b in zip(got, hidden_divergences(*case, **more, compiled=False)):
        torch.testing.assert_close(a, b, equal_nan=True, rtol=2e-5, atol=2e-6)
        checked += 1
print(checked)
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_the_gpu_kernels_give_the_plain_numbers():
    # In a process of its own: Triton decides at its first import whether it interprets.
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == str(2 * 9), done.stderr


def test_a_compiler_that_fails_leaves_the_plain_numbers(monkeypatch):
    def fail(function):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(chunks, "_kernel", fail)
    monkeypatch.setattr(chunks, "_broken", set())
    monkeypatch.setattr(chunks, "COMPILE_FROM", 0)
    pair = policies()
    assert_fields(hidden_divergences(*pair[:4]), hidden_divergences(*pair[:4], compiled=False), rtol=0, atol=0)
    assert chunks._broken == {"cpu"}
    with pytest.raises(RuntimeError, match="no compiler"):
        hidden_divergences(*pair[:4], compiled=True)


def test_evidence_has_no_gradient():
    h, head, h2, _, tokens = policies()
    leaf = Head(head.weight.clone().requires_grad_())
    got = hidden_divergences(h.requires_grad_(), leaf, h2, leaf, tokens=tokens)
    assert [x.requires_grad for x in got] == [False] * 9


# Refusals.


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"hidden": torch.zeros(2, 3)}, r"hidden_rollout.*\(4, 3\).*hidden \(2, 3\)"),
        ({"hidden": torch.zeros(4, 5)}, r"hidden has shape \(4, 5\).*\(6, 3\)"),
        ({"hidden_rollout": torch.zeros(4, 5)}, r"hidden_rollout has shape \(4, 5\).*\(6, 3\)"),
        ({"head": Head(torch.zeros(8, 3))}, "head_rollout has 6 tokens.*head has 8.*cut"),
        ({"tokens": torch.zeros(3, dtype=torch.int64)}, r"tokens \(3,\)"),
    ],
)
def test_shapes_that_do_not_fit_are_named(change, names):
    head, hidden = Head(torch.zeros(6, 3)), torch.zeros(4, 3)
    good = {"hidden_rollout": hidden, "head_rollout": head, "hidden": hidden, "head": head}
    with pytest.raises(ShapeError, match=names):
        inspect.unwrap(hidden_divergences)(**{**good, **change})


@pytest.mark.parametrize(
    "change",
    [{"temperature": 0.0}, {"temperature_rollout": -1.0}, {"temperature": NAN}, {"chunk": 0},
     {"token_chunk": -1}, {"keep_mib": -1}, {"keep_mib": NAN}],
)  # fmt: skip
def test_numbers_that_mean_nothing_are_named(change):
    with pytest.raises(BadValueError, match=f"{next(iter(change))} is "):
        hidden_divergences(*policies()[:4], **change)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"weight": torch.zeros(0, 3)}, "weight has shape"),
        ({"weight": torch.zeros(4, 3), "scale": 0.0}, "scale is 0.0"),
        ({"weight": torch.zeros(4, 3), "soft_cap": INF}, "soft_cap is inf"),
        ({"weight": torch.zeros(4, 3), "bias": torch.zeros(3)}, "bias"),
    ],
)
def test_heads_that_mean_nothing_are_refused(arguments, names):
    with pytest.raises((OffdriftError, TypeError), match=names):
        Head(**arguments)
