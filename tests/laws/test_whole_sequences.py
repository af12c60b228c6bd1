"""Long sequences under ordinary drift: sums of log-ratios far from 0, and what is divided by what.

Numbers are derived by hand or in float64 from the definitions, with the largest sum taken out.
"""

import functools
import math

import numpy as np
import pytest
import torch

from offdrift.check.recommend import THRESHOLDS
from offdrift.judge import load_rules
from offdrift.logprobs import LogProbs
from offdrift.segments import Segments
from offdrift.stats import DriftStats, summarize
from tests.oracles.fixtures import double

LENGTH, SEQUENCES = 4096, 64


@functools.cache
def drifted() -> LogProbs:
    """64 sequences of 4,096 tokens really drawn from mu, 0.0125 nats per token from pi.

    mu is a fair coin, pi one with odds e^(2 h): each token's log-ratio is h - log cosh h or
    -h - log cosh h, and KL(mu || pi) = log cosh h per token.
    """
    h = math.acosh(math.exp(0.0125))
    g = torch.Generator().manual_seed(0)
    heads = torch.rand(SEQUENCES * LENGTH, generator=g, dtype=torch.float64) < 0.5
    mu = torch.full((SEQUENCES * LENGTH,), math.log(0.5), dtype=torch.float64)
    pi = mu + torch.where(heads, h, -h) - 0.0125
    segments = Segments.from_lengths([LENGTH] * SEQUENCES)
    return LogProbs.pack(mu, pi, logp_old=pi, segments=segments)


def exact_ess(log_w: np.ndarray) -> float:
    """(sum w)^2 / (n sum w^2), relative to the largest w."""
    w = np.exp(log_w - log_w.max())
    return float(w.sum() ** 2 / (len(w) * (w * w).sum()))


def sums() -> np.ndarray:
    lp = drifted()
    return (lp.current - lp.logp_rollout).reshape(SEQUENCES, LENGTH).sum(1).numpy()


def test_the_effective_sample_of_long_sequences_is_a_few_of_them():
    assert -60 < sums().mean() < -45
    found = summarize(DriftStats.of(drifted()))
    for on in ("full", "mismatch"):
        assert found[f"{on}/ess_seq_frac"] == pytest.approx(exact_ess(sums()), rel=1e-9)
    assert 1 / SEQUENCES <= found["full/ess_seq_frac"] < 0.05
    # Every token weighs about the same, and tokens are many.
    assert found["full/ess_frac"] > 0.9


def test_chi_squared_of_long_sequences_is_not_taken_for_none():
    """Nothing drawn carries E[W] = 1: E[W^2] - 1 comes out at -1, and is no evidence of no drift."""
    found = summarize(DriftStats.of(drifted()))
    assert found["full/chi2_seq"] == pytest.approx(-1, abs=1e-6)
    assert found["full/chi2_seq_largest"] == pytest.approx(1 / exact_ess(sums()) - 1, rel=1e-9)


def test_no_verdict_takes_it_for_none():
    found = summarize(DriftStats.of(drifted()))
    (row,) = [t for t in THRESHOLDS if "chi2_seq" in t.metric]
    assert (row.relation, found[row.metric] < load_rules().limits[row.limit]) == ("<", False)
    assert row.metric == "mismatch/chi2_seq_largest"
    # One sequence, or equal ones: they agree with each other, but not with E[W] = 1.
    for same in ([-50.0], [-50.0, -50.0]):
        found = summarize(DriftStats.of(with_sums(same)))
        assert found["full/chi2_seq_largest"] == pytest.approx(1.0)
        assert found["full/ess_seq_frac"] == pytest.approx(1.0)


def test_a_chi_squared_beyond_what_is_shown_is_a_number():
    for size in (25.0, 1e4):
        found = summarize(DriftStats.of(with_sums([size, -1.0])))
        assert found["full/chi2_seq"] == found["full/chi2_seq_largest"] == math.expm1(40)


def with_sums(values: list[float]) -> LogProbs:
    """Sequences of tokens of at most 500 nats with these sums of full log-ratios."""
    length = 2 * math.ceil(max(map(abs, values)) / 1000)
    share = (double(values) / length).repeat_interleave(length)
    top = torch.zeros_like(share)
    return LogProbs.pack(
        top.minimum(-share) - 0.5, top.minimum(share) - 0.5, segments=Segments.from_lengths([length] * len(values))
    )
