"""The fit of drift by lag: a known law is found, a fit never falls, and both kinds of records are read."""

import json

import numpy as np
import pytest

from offdrift.errors import RecordError
from offdrift_lab.plan.drift import EXPONENTS, DriftFit, Fit, fit, measured_fit


@pytest.mark.parametrize("c", [0.5, 1.0, 1.5, 2.0])
@pytest.mark.parametrize(("a", "b"), [(0.001, 0.02), (0.0, 0.3), (0.5, 0.0)])
def test_a_known_law_is_found(a, b, c):
    lags = [0, 1, 2, 3, 5, 8, 13]
    found = fit("kl", lags, [a + b * x**c for x in lags], [1, 5, 2, 9, 1, 1, 3])
    assert found.a == pytest.approx(a, abs=1e-9)
    assert found.b == pytest.approx(b, abs=1e-9)
    assert found.c == pytest.approx(c) or b == 0
    assert found.error == pytest.approx(0, abs=1e-9)
    assert found.lags == (0, 13)
    assert found(0) == found.a
    assert found(4) == pytest.approx(a + b * 4**c)


def test_a_noisy_law_is_found_within_its_error():
    """Lags 0 to 9, 5 % of noise: the law's values come back within a few standard errors of their size."""
    draw = np.random.default_rng(0)
    lags = list(range(10)) * 20
    truth = 0.002 + 0.01 * np.asarray(lags, float)
    found = fit("kl", lags, (truth * (1 + 0.05 * draw.standard_normal(len(lags)))).tolist(), [1] * len(lags))
    for lag in range(10):
        assert found(lag) == pytest.approx(0.002 + 0.01 * lag, rel=0.05, abs=5e-4)
    assert 0 < found.error < 0.005
    assert found.c in EXPONENTS


def test_drift_never_falls_with_the_lag_and_is_never_negative():
    falling = fit("kl", [0, 1, 2, 3], [0.4, 0.3, 0.2, 0.1], [1] * 4)
    assert (falling.b, falling.a) == (0, pytest.approx(0.25))
    below = fit("kl", [1, 2, 3, 4], [0.0, 0.1, 0.2, 0.3], [1] * 4)
    assert below.a >= 0
    assert below.b > 0
    assert below(0) >= 0


def test_weights_count():
    """A point a million times as heavy as the other of its lag decides alone."""
    found = fit("kl", [0, 1, 1], [0.0, 0.5, 9.0], [1, 1e6, 1])
    assert found(1) == pytest.approx(0.5, rel=1e-4)


def test_the_error_is_that_of_a_lag_that_was_left_out():
    """Linear but for one outlier: by hand, each lag is predicted from the other three."""
    lags, values = [0, 1, 2, 3], [0.0, 0.1, 0.5, 0.3]
    found = fit("kl", lags, values, [1] * 4)
    squares = []
    for out in lags:
        rest = [x for x in lags if x != out]
        one = fit("kl", rest, [values[x] for x in rest], [1] * 3)
        squares.append((one(out) - values[out]) ** 2)
    assert found.error == pytest.approx(np.mean(squares) ** 0.5)


def test_few_lags():
    line = fit("kl", [0, 4], [0.1, 0.5], [1, 1])
    assert (line.a, line.b, line.c, line.error) == (pytest.approx(0.1), pytest.approx(0.1), 1.0, None)
    assert fit("kl", [0, 1, 2], [0.0, 1.0, 2.0], [1] * 3).error is None
    with pytest.raises(
        RecordError, match=r"full/k3 was measured at one lag alone \(2 updates\).*audit a run whose lag"
    ):
        fit("full/k3", [2, 2], [0.1, 0.2], [1, 1])


def test_the_mean_over_lags_is_that_of_the_responses():
    law = Fit("kl", 0.1, 0.2, 2.0, None, (0.0, 4.0))
    assert law.over({0: 3, 2: 1}) == pytest.approx((3 * 0.1 + 0.9) / 4)


def test_findings_come_from_the_lags():
    law = DriftFit(
        Fit("full/k3", 0.0, 0.1, 1.0, None, (0.0, 4.0)), Fit("full/chi2_token", 0.0, 9.0, 1.0, None, (0.0, 4.0)), ""
    )
    assert law.findings({0: 10}) == []
    assert law.findings({4: 10}) != []


# -- records ---------------------------------------------------------------------------------------


def stored_audit(folder, rows):
    (folder / "audit.json").write_text(json.dumps({"facets": {"lag": rows}}))
    return folder


def bucket(low, high, **values):
    return {"low": low, "high": high, "tokens": 100, **values}


def test_an_audit_is_read_by_its_buckets(tmp_path):
    """A bucket stands at its middle; the last, without an end, at no place. The full ratio goes before the mismatch."""
    rows = [bucket(x, x, **{"full/k3": 0.01 + 0.02 * x, "full/chi2_token": 0.1 * x}) for x in range(4)]
    rows += [bucket(9, 16, **{"full/k3": 0.01 + 0.02 * 12.5, "full/chi2_token": 1.25})]
    rows += [bucket(33, None, **{"full/k3": 99.0})]
    for path in (stored_audit(tmp_path, rows), tmp_path / "audit.json"):
        found = measured_fit(path)
        assert (found.kl.metric, found.kl.c) == ("full/k3", pytest.approx(1.0))
        assert (found.kl.a, found.kl.b) == (pytest.approx(0.01), pytest.approx(0.02))
        assert found.kl.lags == (0, 12.5)
        assert found.chi2.b == pytest.approx(0.1)
        assert found.source == f"full/k3 of 5 lags in {path}"


def test_exact_divergence_goes_before_samples_and_a_biased_k3_behind_k1(tmp_path):
    rows = [bucket(x, x, **{"mismatch/k3": 0.5, "mismatch/k1": 0.1 * x}) for x in range(3)]
    assert measured_fit(stored_audit(tmp_path, rows)).kl.metric == "mismatch/k3"
    biased = [row | {"mismatch/ratio_mean_z": -30.0} for row in rows]
    assert measured_fit(stored_audit(tmp_path, biased)).kl.metric == "mismatch/k1"
    exact = [row | {"divergence/kl_rollout_old_mean": 0.1} for row in biased]
    assert measured_fit(stored_audit(tmp_path, exact)).kl.metric == "divergence/kl_rollout_old_mean"


def test_an_arm_is_read_by_its_updates(tmp_path):
    steps = [
        {"version_lag/mean": lag, "full/k3": 0.001 + 0.004 * lag, "batch/tokens": 100} for lag in (0, 0.5, 1, 2, 2.5)
    ]
    text = "".join(json.dumps(s) + "\n" for s in [{"full/k3": 9.0}, *steps])
    (tmp_path / "metrics.jsonl").write_text(text + '{"version_lag/mean": 3, "full/k3"')  # being written
    found = measured_fit(tmp_path)
    assert (found.kl.a, found.kl.b, found.kl.c) == (pytest.approx(0.001), pytest.approx(0.004), pytest.approx(1.0))
    assert "of 5 updates" in found.source


def test_records_without_drift_are_refused(tmp_path):
    with pytest.raises(RecordError, match=r"give an audit.json, or an arm's folder"):
        measured_fit(tmp_path / "nowhere")
    with pytest.raises(RecordError, match="holds no drift by lag; log the rollout engine's log-probs"):
        measured_fit(stored_audit(tmp_path, [bucket(0, 0), bucket(1, 1)]))
    (tmp_path / "audit.json").write_text("{")
    with pytest.raises(RecordError, match="holds no drift by lag"):
        measured_fit(tmp_path)
