"""Evidence of a batch: every column by hand, any split is one pass, and unknown means unknown."""

import math

import numpy as np
import pytest
import torch

from offdrift.certificate.batch import COLUMNS, BatchEvidence
from offdrift.certificate.regions import TrustRegion
from offdrift.divergence.evidence import Divergence, Grade
from offdrift.errors import BadValueError, MethodError, ShapeError
from offdrift.logprobs import LogProbs
from offdrift.segments import Segments

INF = math.inf
REGION = TrustRegion(horizon=5, delta=0.05, eps=0.1)
LENGTHS = [3, 0, 2]
LOG_W = [0.1, -0.2, 0.3, -1.0, 0.0]
KL = [0.01, 0.06, 0.02, 0.03, 0.04]
TV = [0.05, 0.12, 0.07, 0.11, 0.02]
KEEP = [True, True, True, True, False]


def doubles(x) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.float64)


def known(kl=KL, tv=TV) -> dict[str, Divergence]:
    return {
        "kl_rollout_current": Divergence.exact("kl_rollout_current", doubles(kl)),
        "tv_rollout_current": Divergence.exact("tv_rollout_current", doubles(tv)),
    }


def logprobs(log_w=LOG_W, lengths=LENGTHS, ids=(4, 4, 9)) -> LogProbs:
    rollout = torch.full((len(log_w),), -3.0).double()
    groups = None if ids is None else torch.tensor(ids)
    segments = Segments.from_lengths(lengths, group_ids=groups)
    return LogProbs.pack(rollout, rollout + doubles(log_w), segments=segments)


def evidence(**changes) -> BatchEvidence:
    given = {
        "region": REGION,
        "divergences": known(),
        "keep": torch.tensor(KEEP),
        "rewards": doubles([1.0, 0.0, 0.5]),
    } | changes
    return BatchEvidence.of(logprobs(), given.pop("rewards"), **given)


def test_every_column_by_hand():
    host, e = evidence().to_host(), np.exp
    expected = {
        "length": [3, 0, 2],
        "reward": [1.0, 0.0, 0.5],
        "kept": [1, 1, 0],
        "unscored": [0, 0, 0],
        "excess": [e(0.1) + e(-0.2) + e(0.3) - 3, 0, e(-1) - 1],
        "log_product": [0.2, 0, -1.0],
        "worst": [0.3, 0, 1.0],
        "kl_low": [0.06, 0, 0.04],
        "kl_high": [0.06, 0, 0.04],
        "tv_low": [0.12, 0, 0.11],
        "tv_high": [0.12, 0, 0.11],
        "kl_total": [0.09, 0, 0.07],
        "kl_sum": [0.01 + 0.05 + 0.02, 0, 0.07],
        "prefix_kl": [0.01, 0, 0.0],  # the second stops at once: TV 0.11 > eps
        "prefix_k3": [e(0.1) - 1.1, 0, 0.0],
        "refuted": [0, 0, 0],
        # omega_t = min(1, (T-t) .1, sqrt((T-t) .025)) for T - t = 4, 3, 2; TV limited to .1
        "shift": [
            0.05 * math.sqrt(4 * 0.025) + 0.1 * math.sqrt(3 * 0.025) + 0.07 * 0.2,
            0,
            0.1 * math.sqrt(4 * 0.025) + 0.02 * math.sqrt(3 * 0.025),
        ],
        "prefix_shift": [0.05 * math.sqrt(4 * 0.025), 0, 0.0],
    }
    expected["control"] = [math.nan] * 3  # no conditional means were given
    assert tuple(expected) == COLUMNS
    for name, values in expected.items():
        assert host[name] == pytest.approx(values, rel=1e-12, abs=1e-15, nan_ok=True), name
    assert host.group_ids.tolist() == [4, 4, 9]
    assert host.tv_by_position == pytest.approx([0.05 + 0.1, 0.1 + 0.02, 0.07, 0, 0])


def test_any_split_in_any_order_is_one_pass():
    whole = evidence()
    one = BatchEvidence.of(
        logprobs(LOG_W[:3], [3, 0], (4, 4)),
        doubles([1.0, 0.0]),
        region=REGION,
        divergences=known(KL[:3], TV[:3]),
        keep=torch.tensor(KEEP[:3]),
    )
    other = BatchEvidence.of(
        logprobs(LOG_W[3:], [2], (9,)),
        doubles([0.5]),
        region=REGION,
        divergences=known(KL[3:], TV[3:]),
        keep=torch.tensor(KEEP[3:]),
    )
    joined = one.merge(other)
    assert torch.equal(joined.columns.nan_to_num(-1), whole.columns.nan_to_num(-1))
    assert torch.equal(joined.tv_by_position, whole.tv_by_position)
    assert joined.grades == whole.grades
    swapped = other.merge(one.cpu())
    assert len(swapped) == 3
    assert torch.equal(swapped.columns[[1, 2, 0]].nan_to_num(-1), whole.columns.nan_to_num(-1))


def test_large_group_ids_survive_the_transfer():
    ids = (2**62 + 1, -(2**63), 2**62 + 3)
    found = BatchEvidence.of(logprobs(ids=ids), region=REGION).to_host().group_ids
    assert found.tolist() == list(ids)


@pytest.mark.parametrize("divergences", [None, "sampled"])
def test_without_distributions_everything_is_possible(divergences):
    if divergences == "sampled":
        divergences = {
            k: Divergence.sampled(k, doubles(KL)) for k in ("kl_rollout_current", "tv_rollout_current")
        }  # fmt: skip
    found = evidence(divergences=divergences)
    host = found.to_host()
    assert set(found.grades.values()) == {Grade.SAMPLED}
    assert host["kl_low"].tolist() == [0, 0, 0]
    assert host["kl_high"].tolist() == [INF, 0, INF]  # no token, no divergence
    assert host["tv_high"].tolist() == [1, 0, 1]
    assert host["kl_sum"] == pytest.approx([3 * 0.05, 0, 2 * 0.05])
    assert host["prefix_kl"].tolist() == [0, 0, 0]


def test_upper_ends_limit_and_lower_ends_falsify():
    low, high = doubles(KL) / 2, doubles(KL) * 2
    high[0] = INF
    found = evidence(divergences={"kl_rollout_current": Divergence.interval("kl_rollout_current", low, high)})
    host = found.to_host()
    assert found.grades["kl_rollout_current"] is Grade.INTERVAL
    assert found.grades["tv_rollout_current"] is Grade.SAMPLED
    assert host["kl_low"] == pytest.approx([0.03, 0, 0.02])
    assert host["kl_high"] == pytest.approx([INF, 0, 0.08])
    assert host["kl_total"] == pytest.approx([INF, 0, 0.14])
    assert host["kl_sum"] == pytest.approx([0.05 + 0.05 + 0.04, 0, 0.05 + 0.05])
    # TV follows from KL by Pinsker where the region does not limit it further: all are at eps
    omega = [math.sqrt(k * 0.025) for k in (4, 3)] + [0.2]
    assert host["shift"] == pytest.approx([0.1 * sum(omega), 0, 0.1 * sum(omega[:2])])


def test_nan_is_a_violation_and_unknown_above():
    kl = [0.01, math.nan, 0.02, 0.03, 0.04]
    host = evidence(divergences=known(kl=kl)).to_host()
    assert host["kl_low"][0] == INF
    assert host["kl_high"][0] == INF
    assert host["prefix_kl"][0] == pytest.approx(0.01)


def test_rounding_below_zero_is_zero():
    host = evidence(divergences=known(kl=[-1e-8, 0.0, 0.0, 0.0, 0.0])).to_host()
    assert host["kl_total"][0] == 0


def test_the_weakest_grade_is_stated():
    exact, none = evidence(), evidence(divergences=None)
    assert set(exact.merge(none).grades.values()) == {Grade.SAMPLED}
    interval = evidence(divergences={k: Divergence.interval(k, d.lo, d.hi) for k, d in known().items()})
    assert set(interval.merge(exact).grades.values()) == {Grade.INTERVAL}


def test_huge_ratios_are_limited_above_only():
    lp = logprobs([900.0 - 897.0, -2e4, 0.0], [1, 1, 1], None)
    host = BatchEvidence.of(lp, region=REGION).to_host()
    assert host["excess"] == pytest.approx([math.expm1(3.0), -1, 0])
    wild = LogProbs(doubles([-50.0]), Segments.from_lengths([1]), doubles([-1.0]))
    host = BatchEvidence.of(wild, region=REGION).to_host()
    assert host["excess"] == pytest.approx([math.expm1(20.0)])
    assert host["log_product"] == pytest.approx([49.0])


def with_unscored(value: float = -INF) -> LogProbs:
    """The batch with the second token of the first sequence not scored."""
    rollout = torch.full((5,), -3.0).double()
    rollout[1] = value
    groups = Segments.from_lengths(LENGTHS, group_ids=torch.tensor([4, 4, 9]))
    return LogProbs.pack(rollout, doubles(LOG_W) - 3.0, segments=groups)


@pytest.mark.parametrize("value", [-INF, -9999.0, -1000.0])
def test_a_token_that_was_not_scored_has_any_ratio_and_any_divergence(value):
    kl = [0.01, 0.0, 0.02, 0.03, 0.04]  # what a record says of a token without log-prob is not used
    region = TrustRegion(horizon=5, delta=0.05, eps=0.2)
    exact = known(kl=kl, tv=[0.05, 0.0, 0.07, 0.11, 0.02])
    found = BatchEvidence.of(with_unscored(value), region=region, divergences=exact)
    host, e = found.to_host(), np.exp
    omega = [math.sqrt(k * 0.025) for k in (4, 3)] + [math.sqrt(2 * 0.025)]
    expected = {
        "length": [3, 0, 2],
        "kept": [1, 1, 1],
        "unscored": [1, 0, 0],
        "excess": [e(0.1) - 1 - 1 + e(0.3) - 1, 0, e(-1) - 1],
        "log_product": [-INF, 0, -1.0],
        "worst": [INF, 0, 1.0],
        "kl_low": [0.02, 0, 0.04],
        "kl_high": [INF, 0, 0.04],
        "tv_low": [0.07, 0, 0.11],
        "tv_high": [1, 0, 0.11],
        "kl_total": [INF, 0, 0.07],
        "kl_sum": [0.01 + 0.05 + 0.02, 0, 0.07],
        "prefix_kl": [0.01 + 0.05, 0, 0.07],
        "prefix_k3": [e(0.1) - 1.1, 0, sum(e(x) - 1 - x for x in LOG_W[3:])],
        "refuted": [0, 0, 0],
        "shift": [
            0.05 * omega[0] + math.sqrt(0.025) * omega[1] + 0.07 * omega[2],
            0,
            0.11 * omega[0] + 0.02 * omega[1],
        ],
        "prefix_shift": [0.05 * omega[0] + math.sqrt(0.025) * omega[1], 0, 0.11 * omega[0] + 0.02 * omega[1]],
    }
    assert [name for name in COLUMNS if name not in ("reward", "control")] == list(expected)
    for name, values in expected.items():
        assert host[name] == pytest.approx(values, rel=1e-12, abs=1e-15), name
    assert host.tv_by_position == pytest.approx([0.16, math.sqrt(0.025) + 0.02, 0.07, 0, 0])


def test_an_interval_of_a_token_that_was_not_scored_says_nothing():
    low, high = doubles(KL) / 2, doubles(KL)
    interval = {"kl_rollout_current": Divergence.interval("kl_rollout_current", low, high)}
    host = BatchEvidence.of(with_unscored(), region=REGION, divergences=interval).to_host()
    assert host["kl_low"] == pytest.approx([0.01, 0, 0.02])
    assert host["kl_high"].tolist() == [INF, 0, pytest.approx(0.04)]


def test_an_unscored_token_in_a_region_without_limits_makes_no_nan():
    for eps in (None, 0.1):
        region = TrustRegion(horizon=5, delta=INF, eps=eps)
        host = BatchEvidence.of(with_unscored(), region=region, divergences=known()).to_host()
        assert host["prefix_kl"][0] == INF  # KL <= delta limits nothing
        first = math.expm1(0.1) - 0.1
        assert host["prefix_k3"][0] == pytest.approx(first if eps else first + math.expm1(0.3) - 0.3)
        assert not any(np.isnan(host[name]).any() for name in COLUMNS if name not in ("reward", "control"))


def test_a_rollout_log_prob_that_is_nan_never_gets_here():
    with pytest.raises(BadValueError, match="logp_rollout of sequence 0 is nan"):
        with_unscored(math.nan)


def test_what_does_not_add_up_is_refused():
    other = evidence(region=TrustRegion(horizon=5, delta=0.06, eps=0.1))
    with pytest.raises(MethodError, match=r"delta=0\.05.*delta=0\.06"):
        evidence().merge(other)
    with pytest.raises(ShapeError, match="rewards and some have none"):
        evidence().merge(evidence(rewards=None))
    alone = BatchEvidence.of(logprobs(ids=None), doubles([1.0, 0.0, 0.5]), region=REGION)
    with pytest.raises(ShapeError, match="group_ids and some have none"):
        evidence().merge(alone)
    with pytest.raises(ShapeError, match=r"rewards has shape \(2,\) for 3 sequences"):
        evidence(rewards=doubles([1.0, 2.0]))


def test_no_gradient_is_kept():
    lp = logprobs()
    lp.logp.requires_grad_()
    assert not BatchEvidence.of(lp, region=REGION).columns.requires_grad
