"""The interpolated old policy: values of the methods table, its edges, and what it leaves alone."""

import pytest
import torch

from offdrift.batch_info import NO_INFO, BatchInfo
from offdrift.errors import EvidenceError
from offdrift.logprobs import LogProbs
from offdrift.methods.method import Interpolated, interpolated
from offdrift.objectives.clipped import Clipped
from offdrift.ratios import log_ratio, stopped_log_ratio
from offdrift.segments import Segments
from tests.oracles.fixtures import double, fx_a, ragged

MU, PI = double([-1.2]), double([-0.8])


@pytest.mark.parametrize(
    ("lag", "at_zero_lag", "expected"),
    [
        # weight.a3po: alpha = 0, 1/2, 3/4 at lags 1, 2, 4
        (1, "current", -1.2),
        (2, "current", -1.0),
        (4, "current", -0.9),
        (4, "behaviour", -0.9),
        # lag 0: the current policy (paper), or the rollout policy (AReaL's code: alpha = 0)
        (0, "current", -0.8),
        (0, "behaviour", -1.2),
        (-1, "current", -0.8),
        (0.5, "current", -1.2),  # between 0 and 1 the formula is negative and limited to 0
    ],
)
def test_values_of_the_methods_table(lag, at_zero_lag, expected):
    got = interpolated(MU, PI, torch.tensor([lag]), at_zero_lag=at_zero_lag)
    torch.testing.assert_close(got, double([expected]), rtol=0, atol=1e-12)


def test_at_its_ends_it_is_exactly_one_of_the_two_policies():
    lp = ragged(0)
    n = lp.segments.num_tokens
    args = (lp.logp_rollout.float(), lp.current.detach().float())
    assert torch.equal(interpolated(*args, torch.zeros(n)), args[1])
    assert torch.equal(interpolated(*args, torch.ones(n)), args[0])


@pytest.mark.parametrize("seed", range(3))
def test_the_two_ratios_are_powers_of_the_full_one(seed):
    lp = ragged(seed)
    g = torch.Generator().manual_seed(seed)
    lag = torch.randint(1, 6, (lp.segments.num_tokens,), generator=g)
    anchored = Interpolated()(lp, BatchInfo(version_lag=lag))
    full = log_ratio(lp, on="full").detach()
    staleness = log_ratio(anchored, on="staleness").detach()
    mismatch = log_ratio(anchored, on="mismatch")
    torch.testing.assert_close(staleness, full / lag, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(mismatch, full * (1 - 1 / lag.double()), rtol=1e-9, atol=1e-12)
    assert len(lag) > 10


def test_only_the_old_policy_changes_and_cached_ratios_are_not_shared():
    lp, _, leaf = fx_a()
    before = stopped_log_ratio(lp, on="staleness").clone()
    lag = torch.full((7,), 2)
    anchored = Interpolated()(lp, BatchInfo(version_lag=lag))
    assert "staleness" in lp.detached_log_ratios
    assert anchored.detached_log_ratios == {}
    expected = 0.5 * stopped_log_ratio(lp, on="full")
    torch.testing.assert_close(stopped_log_ratio(anchored, on="staleness"), expected)
    assert torch.equal(stopped_log_ratio(lp, on="staleness"), before)
    for name in ("logp", "logp_rollout", "segments", "kept", "shape"):
        assert getattr(anchored, name) is getattr(lp, name)
    assert not anchored.logp_old.requires_grad
    assert leaf.requires_grad


def test_the_clip_acts_on_the_tempered_ratio_and_the_gradient_only_on_the_current_policy():
    # full ratio e^0.4 is outside 1.2, its square root e^0.2 is outside, its fourth root is inside
    n = 3
    mu, leaf = double([-1.0] * n), double([-0.6] * n).requires_grad_()
    lp = LogProbs.pack(mu, leaf, segments=Segments.from_lengths([n]))
    anchored = Interpolated()(lp, BatchInfo(version_lag=torch.tensor([1, 2, 4])))
    got = Clipped()(anchored, torch.ones(n, dtype=torch.float64))
    got.loss.sum().backward()
    assert got.clipped.tolist() == [True, True, False]
    expected = double([0.0, 0.0, -1.0]) * double([0.1]).exp()
    torch.testing.assert_close(leaf.grad, expected, rtol=1e-12, atol=1e-12)


def test_extreme_log_ratios_stay_between_the_two_policies():
    mu, pi = torch.tensor([-1e4, -1.0, -1e4]), torch.tensor([-1.0, -3e4, -3e4])
    got = interpolated(mu, pi, torch.tensor([1, 2, 7]))
    assert got.isfinite().all()
    assert ((got >= torch.minimum(mu, pi)) & (got <= torch.maximum(mu, pi))).all()


def test_a_batch_without_lags_is_refused():
    lp, _, _ = fx_a()
    with pytest.raises(EvidenceError, match="version_lag"):
        Interpolated()(lp, NO_INFO)


def test_it_says_what_it_needs_and_what_it_does():
    assert Interpolated.needs == ("version_lag",)
    assert Interpolated(at_zero_lag="behaviour").formula.endswith("rollout policy at d = 0")
