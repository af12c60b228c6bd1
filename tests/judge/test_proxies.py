"""Gradient variance proxies: entry metric.variance_proxies of the methods, on FX-A."""

import math

import pytest
import torch

from offdrift.errors import ShapeError
from offdrift.judge import variance_proxies
from offdrift.segments import Segments
from tests.oracles.fixtures import fx_a

FX_A, ADVANTAGES, _ = fx_a()
SEGMENTS = FX_A.segments
LOGP_OLD, LOGP_ROLLOUT = FX_A.old.detach(), FX_A.logp_rollout

SUM_PI_SQUARED = torch.tensor([0.85, 0.35, 0.85, 0.2, 0.5, 0.6, 0.25], dtype=torch.float64)


def test_golden_without_weights():
    p = variance_proxies(SUM_PI_SQUARED, LOGP_OLD, ADVANTAGES, SEGMENTS, grad_norm=0.6)
    assert p.signal_strength == pytest.approx(0.36)
    assert p.total_power == pytest.approx(1.100931, abs=1e-6)
    assert p.pure_noise == pytest.approx(0.740931, abs=1e-6)
    assert p.expected_w == pytest.approx((1.820728 + 1.524532) / 2, abs=1e-6)


def test_golden_with_token_tis():
    weight = (LOGP_OLD - LOGP_ROLLOUT).exp().clamp(max=2)
    means = SEGMENTS.mean(weight)
    assert means.tolist() == pytest.approx([0.988699, 0.92034], abs=1e-6)
    p = variance_proxies(SUM_PI_SQUARED, LOGP_OLD, ADVANTAGES, SEGMENTS, grad_norm=0.6, weight=weight)
    assert p.total_power == pytest.approx(1.051318, abs=1e-6)
    assert p.pure_noise == pytest.approx(0.691318, abs=1e-6)


def test_one_sequence_has_no_variance_and_noise_is_never_negative():
    one = Segments.from_lengths([2])
    half = torch.tensor([0.5, 0.5])
    p = variance_proxies(half, half.log(), torch.ones(2), one, grad_norm=0.1)
    assert math.isnan(p.pure_noise)
    assert p.total_power == pytest.approx(1.0)
    two = Segments.from_lengths([1, 1])
    assert variance_proxies(half, half.log(), torch.ones(2), two, grad_norm=9.0).pure_noise == 0


def test_empty_sequences_do_not_count():
    plain = variance_proxies(SUM_PI_SQUARED, LOGP_OLD, ADVANTAGES, SEGMENTS, grad_norm=0.6)
    with_empty = Segments.from_lengths([4, 0, 3])
    assert variance_proxies(SUM_PI_SQUARED, LOGP_OLD, ADVANTAGES, with_empty, grad_norm=0.6) == plain  # fmt: skip


def test_lengths_are_checked_and_metrics_named():
    short = (x[:6] for x in (SUM_PI_SQUARED, LOGP_OLD, ADVANTAGES))
    with pytest.raises(ShapeError, match="sum_pi_squared has 6 tokens, the segments 7"):
        variance_proxies(*short, SEGMENTS, grad_norm=0.6)
    p = variance_proxies(SUM_PI_SQUARED, LOGP_OLD, ADVANTAGES, SEGMENTS, grad_norm=0.6)
    assert len(p.metrics()) == 5
    assert p.metrics()["variance_proxy/proxy3_pure_noise"] == p.pure_noise


def test_over_logits_alone_the_third_proxy_is_the_second():
    """Sequences have logits of their own, so |mean g|^2 = mean |g|^2 / N, and the variance of the mean, too."""
    p = variance_proxies(SUM_PI_SQUARED, LOGP_OLD, ADVANTAGES, SEGMENTS, grad_norm=0.0)
    of_mean = math.sqrt(p.total_power / 2)
    q = variance_proxies(SUM_PI_SQUARED, LOGP_OLD, ADVANTAGES, SEGMENTS, grad_norm=of_mean)
    assert q.pure_noise == pytest.approx(p.total_power / 2)
