"""Statistics: each on FX-A by the methods table, and the names divergences are looked up by."""

import pytest
import torch

from offdrift.correction.statistics import divergence_name, statistic
from offdrift.errors import MethodError
from tests.oracles.fixtures import double, fx_a

EXPECTED = {
    "ratio": [0.1, -0.05, 0.4, -0.9, 0.02, 0.0, -0.3],
    "k2": [0.005, 0.00125, 0.08, 0.405, 0.0002, 0.0, 0.045],
    "k3": [0.00517092, 0.00122942, 0.0918247, 0.30657, 0.00020134, 0.0, 0.04081822],
    "abs_log_ratio": [0.1, 0.05, 0.4, 0.9, 0.02, 0.0, 0.3],
}


@pytest.mark.parametrize("name", EXPECTED)
def test_statistic_on_fx_a(name):
    lp, _, _ = fx_a()
    got = statistic(name, lp, on="mismatch")
    torch.testing.assert_close(got, double(EXPECTED[name]), rtol=0, atol=1e-6)


def test_divergences_are_named_by_the_policies_they_compare():
    assert divergence_name("kl", "full") == "kl_rollout_current"
    assert divergence_name("tv", "mismatch") == "tv_rollout_old"


def test_unknown_statistic():
    with pytest.raises(MethodError, match="'k9' is not a statistic; choose one of"):
        statistic("k9", fx_a()[0], on="full")
