"""Calibrated thresholds accept what they say, are no wider than they must be, and cover."""

import math
from dataclasses import replace

import pytest
import torch

from offdrift.batch_info import BatchInfo
from offdrift.certificate import clopper_pearson
from offdrift.check.recommend import BANDS, CAPS, GATES, Calibrated, calibrated, rounded_up, settings
from offdrift.correction import Corrected
from offdrift.divergence.evidence import Divergence
from offdrift.errors import BadValueError
from offdrift.logprobs import LogProbs
from offdrift.methods import METHODS, override
from offdrift.records.batch import Logged
from offdrift.segments import Segments
from tests.audit.logs import logged

LOG = logged([1 + i % 9 for i in range(300)], scales=(0.001, 0.01, 0.03))
EXACT = {name: Divergence.exact(name, x) for name, x in LOG.divergences.items()}
SETTINGS = len(GATES) + 2 * len(BANDS) + len(CAPS)


def corrected(log: Logged, method: str, changes: dict[str, float]) -> Corrected:
    batch_info = BatchInfo(divergences={n: Divergence.exact(n, x) for n, x in log.divergences.items()})
    return override(METHODS[method], changes).correction(log.logprobs(), None, batch_info)


def accepted(log: Logged, method: str, changes: dict[str, float]) -> float:
    """Share of sequences that a gate keeps, or of tokens that a weight leaves as they are."""
    found = corrected(log, method, changes)
    if not METHODS[method].correction.gates:
        return float((~found.limited).double().mean())
    parts = found.keep.split(log.cu_seqlens.diff().tolist())
    return sum(bool(p.all()) for p in parts) / len(parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("share", [0.5, 0.9, 0.99, 1.0])
def test_applied_it_accepts_that_share_and_hardly_more(share: float, dtype: torch.dtype):
    log = replace(
        LOG,
        logp_rollout=LOG.logp_rollout.to(dtype),  # type: ignore[union-attr]
        logp_old=LOG.logp_old.to(dtype),  # type: ignore[union-attr]
        logp=LOG.logp.to(dtype),  # type: ignore[union-attr]
        divergences={k: x.to(dtype) for k, x in LOG.divergences.items()},
    )
    exact = {name: Divergence.exact(name, x) for name, x in log.divergences.items()}
    found = calibrated(log.logprobs(), exact, acceptance=share)
    methods = list(dict.fromkeys(c.method for c in found))
    assert len(methods) == len(GATES) + len(BANDS) + len(CAPS)
    assert len(found) == SETTINGS
    for name in methods:
        measured = accepted(log, name, settings(found, name))
        assert measured >= share - 1e-12, name
        one = next(c for c in found if c.method == name)
        assert one.acceptance == pytest.approx(measured)
        # One more sequence, or what rounding to three digits lets through.
        assert measured <= share + (0.02 if name not in CAPS or share > 0.5 else 0.5), name


@pytest.mark.parametrize("name", [*GATES, *BANDS])
def test_a_tighter_setting_would_accept_less(name: str):
    found = settings(calibrated(LOG.logprobs(), EXACT, acceptance=0.9), name)
    tighter = {k: 1 + 0.99 * (v - 1) if k != "gate.high" or name in BANDS else 0.99 * v for k, v in found.items()}  # fmt: skip
    assert accepted(LOG, name, tighter) < 0.9 <= accepted(LOG, name, found)


def test_a_quantile_by_hand():
    """Ten sequences of one token, l = 0.01 .. 0.10: k2 = l^2 / 2, the ninth is 0.00405."""
    drift = torch.arange(1, 11, dtype=torch.float64) / 100
    mu = torch.full((10,), -2.0, dtype=torch.float64)
    lp = LogProbs.pack(mu, mu + drift, segments=Segments.from_lengths([1] * 10))
    found = {c.method: c for c in calibrated(lp, {}, acceptance=0.9)}
    assert found["trm_max_k2"].value == pytest.approx(0.00405, rel=0.01)
    assert found["trm_max_k2"].value >= 0.00405
    assert found["token_tis"].value == pytest.approx(math.exp(0.09), rel=2e-3)
    interval = clopper_pearson(9, 10, alpha=0.05)
    assert (found["trm_max_k2"].low, found["trm_max_k2"].high) == (interval.low, interval.high)
    # Nothing about the old policy or about whole distributions: the log-probs do not have them.
    assert set(found) == {"trm_max_k2", "trm_avg_k3", "bypass_ppo_clip_k3_rs", "bypass_pg_geo_rs", "bypass_pg_token_icepop", "token_tis"}  # fmt: skip


def test_prompts_count_as_draws():
    lp = LOG.logprobs()
    alone = LogProbs.pack(lp.logp_rollout, lp.logp, segments=Segments.from_lengths(lp.segments.lengths))

    def width(x: LogProbs) -> float:
        one: Calibrated = calibrated(x, {})[0]
        assert one.low < one.acceptance < one.high
        return one.high - one.low

    grouped = replace(alone, segments=LOG.segments)
    assert width(grouped) > 1.5 * width(alone)  # 100 prompts, 300 sequences: sqrt(3) = 1.7


def test_the_interval_covers_the_share_of_fresh_data():
    """l ~ N(0, s): the true acceptance of k2 <= v is erf(sqrt(v) / s), whatever was measured."""
    draw, s, repeats, n = torch.Generator().manual_seed(0), 0.05, 120, 60
    below = above = 0
    for _ in range(repeats):
        drift = s * torch.randn(n, generator=draw, dtype=torch.float64)
        mu = torch.full((n,), -5.0, dtype=torch.float64)
        lp = LogProbs.pack(mu, mu + drift, segments=Segments.from_lengths([1] * n))
        one = next(c for c in calibrated(lp, {}, acceptance=0.9) if c.method == "trm_max_k2")
        truth = math.erf(math.sqrt(one.value) / s)
        below += truth < one.low
        above += truth > one.high
    # Each end misses with probability 0.025: 3 expected of 120, 11 are 4.7 standard deviations off.
    assert max(below, above) <= 11


def test_engines_that_agree_need_no_width():
    mu = torch.full((6,), -2.0)
    lp = LogProbs.pack(mu, mu, mu, segments=Segments.from_lengths([1, 2, 3]))
    found = calibrated(lp, {})
    assert {c.value for c in found if c.setting == "gate.high" and c.method in GATES} == {0.0}
    assert all(1 < c.value < 1.00001 for c in found if c.setting in ("weight.cap", "gate.high") and c.method not in GATES)  # fmt: skip
    assert all(c.acceptance == 1.0 for c in found)
    assert len(found) == SETTINGS - 3  # all but the three gates on exact divergences


def test_numbers_are_rounded_outwards():
    for x in (1.23456e-7, 0.999, 1.0, 0.0101, 123456.0, 4.05e-3):
        assert x <= rounded_up(x) <= x * 1.011
    assert rounded_up(0.0) == 0.0


@pytest.mark.parametrize(("share", "confidence"), [(0.0, 0.95), (1.1, 0.95), (0.9, 1.0)])
def test_what_is_no_share_is_refused(share: float, confidence: float):
    with pytest.raises(BadValueError, match=r"must lie in \(0, 1\]"):
        calibrated(LOG.logprobs(), {}, acceptance=share, confidence=confidence)
