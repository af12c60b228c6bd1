"""Pairs of policies to measure: golden, random, and every awkward row we know of."""

import math
import shutil
from collections.abc import Callable

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

HAS_COMPILER = any(map(shutil.which, ("c++", "g++", "clang++")))

# FX-V of the methods table: three positions, three tokens, and the token drawn at each.
FX_V_MU = torch.tensor([[0.7, 0.2, 0.1], [0.5, 0.3, 0.2], [0.9, 0.05, 0.05]], dtype=torch.float64)
FX_V_PI = torch.tensor([[0.6, 0.3, 0.1], [0.5, 0.25, 0.25], [0.8, 0.15, 0.05]], dtype=torch.float64)
FX_V_TOKENS = torch.tensor([0, 1, 1])

INF = math.inf
STRANGE = {
    "neither has a token": ([1, 2, -INF, 0], [1, 0.5, -INF, 0.5]),
    "pi lacks one": ([1, 2, 3, 0], [1, -INF, 2, 0.5]),
    "mu lacks one": ([1, -INF, 3, 0], [1, 2, 2, 0.5]),
    "each lacks one": ([1, -INF, 3, 0], [-INF, 2, 2, 0.5]),
    "disjoint": ([1, -INF, 3, -INF], [-INF, 2, -INF, 0.5]),
    "one token left": ([-INF, -INF, 3, -INF], [-INF, -INF, 2, -INF]),
    "mu is nothing": ([-INF] * 4, [1, 2, 3, 4]),
    "pi is nothing": ([1, 2, 3, 4], [-INF] * 4),
    "NaN in mu": ([1, math.nan, 3, 4], [1, 2, 3, 4]),
    "NaN in pi": ([1, 2, 3, 4], [math.nan, 2, 3, 4]),
    "NaN beside nothing": ([-INF, math.nan, 3, 4], [1, 2, 3, 4]),
    "inf in mu": ([1, INF, 3, 4], [1, 2, 3, 4]),
    "inf in pi": ([1, 2, 3, 4], [1, 2, 3, INF]),
    "masked by a large number": ([0, -1e9, 0, 0], [0, 0, -1e9, -1e9]),
    "mu underflows": ([0, -95, 0, 0], [0, -20, 0, 0]),
    "pi underflows": ([0, -20, 0, 0], [0, -200, 0, 0]),
    "mu underflows where pi has nothing": ([0, -200, 0, 0], [0, -INF, 0, 0]),
    "pi underflows where mu has nothing": ([0, -INF, 0, 0], [0, -200, 0, 0]),
    "mu underflows, chi2 does not": ([0, -88, 0, 0], [0, -44, 0, 0]),
    "huge and equal": ([-1e30] * 4, [1e30] * 4),
    "far above the first": ([0, 0, 0, 95], [0, 0, 90, 100]),
}
"""Four scores of mu and pi: one-sided, underflowing, far apart, or no distribution."""


def random_pair(n: int, v: int, *, drift: float, scale: float = 3.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits of two policies, the second the first plus noise of size `drift` (float64)."""
    generator = torch.Generator().manual_seed(seed)
    mu = scale * torch.randn(n, v, generator=generator, dtype=torch.float64)
    return mu, mu + drift * torch.randn(n, v, generator=generator, dtype=torch.float64)


@st.composite
def pairs(draw: st.DrawFn, max_rows: int = 4, max_vocab: int = 9) -> tuple[Tensor, Tensor]:
    """Two float64 score matrices of one shape; -inf, ties, shared rows and empty batches included.

    Every row has at least one finite score, so that it is a distribution.
    """
    n, v = draw(st.integers(0, max_rows)), draw(st.integers(1, max_vocab))
    score = st.one_of(st.floats(-30, 30, width=32), st.sampled_from([0.0, 1.0]), st.just(-math.inf))
    row = st.lists(score, min_size=v, max_size=v).filter(lambda r: max(r) > -math.inf)
    mu = [draw(row) for _ in range(n)]
    pi = [draw(st.one_of(row, st.just(r))) for r in mu]
    as_matrix = lambda rows: torch.tensor(rows, dtype=torch.float64).reshape(n, v)  # noqa: E731
    return as_matrix(mu), as_matrix(pi)


def first_tokens(scores: Tensor) -> Tensor:
    """A token per row that the policy can draw: its likeliest."""
    return scores.argmax(1) if scores.numel() else torch.zeros(len(scores), dtype=torch.int64)


def peak_bytes(function: Callable[[], object]) -> int:
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
