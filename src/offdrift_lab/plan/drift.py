"""Drift as a function of the version lag, fitted to what an audit or an arm of a run has measured.

    metric(lag) = a + b lag^c,   a, b >= 0,   c in [0.25, 3]

a is what the engines disagree at the same weights, b lag^c what older weights add. Nothing here is a constant of
nature: a fit holds for the model, learning rate and method that it was measured with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from offdrift.errors import RecordError
from offdrift.judge import Finding, Rules, diagnose, load_rules
from offdrift.judge.kl_choice import joined_z, kl_metrics
from offdrift.show.json_access import at, mapping, number, read_lines, rows
from offdrift.texts import read_json

EXPONENTS = np.linspace(0.25, 3.0, 56)
"""Values of c that are tried."""
PAIRS = ("full", "mismatch")
"""Ratios whose drift is fitted, the better first: of the current policy, or of the old one."""


@dataclass(frozen=True)
class Fit:
    """One metric as a function of the lag."""

    metric: str
    a: float
    b: float
    c: float
    error: float | None
    """Root of the mean squared error where a measurement is left out of the fit; None of fewer than 4 lags."""
    lags: tuple[float, float]
    """Smallest and largest lag that was measured; beyond them the fit is an extrapolation."""

    def __call__(self, lag: float | int) -> float:
        return self.a + self.b * lag**self.c if lag else self.a

    def over(self, lags: Mapping[int, int]) -> float:
        """The mean over responses, counted by lag."""
        return sum(n * self(lag) for lag, n in lags.items()) / sum(lags.values())


@dataclass(frozen=True)
class DriftFit:
    """KL, and chi2 of tokens where it was measured, by lag."""

    kl: Fit
    chi2: Fit | None
    source: str
    rules: Rules = field(default_factory=load_rules)
    """By which drift at a lag is judged."""

    def findings(self, lags: Mapping[int, int]) -> list[Finding]:
        """Findings of the diagnosis for a run whose responses have these lags."""
        responses = sum(lags.values())
        row = {
            self.kl.metric: self.kl.over(lags),
            "version_lag/mean": sum(lag * n for lag, n in lags.items()) / responses,
            "version_lag/max": max(lags),
        }
        if self.chi2 is not None:
            row[self.chi2.metric] = self.chi2.over(lags)
        return diagnose([row], rules=self.rules)


def fit(metric: str, lags: Sequence[float | int], values: Sequence[float | int], weights: Sequence[float | int]) -> Fit:
    """Weighted least squares of a + b lag^c with a, b >= 0.

    Args:
        metric: name of what `values` are.
        weights: of each measurement, such as its tokens.

    Raises: `RecordError` if all lags are the same: how drift grows with them is not in the record.

    Example:
        >>> found = fit("full/k3", [0, 1, 2, 3, 4], [0.01, 0.03, 0.05, 0.07, 0.09], [1] * 5)
        >>> round(found.a, 6), round(found.b, 6), found.c
        (0.01, 0.02, 1.0)
    """
    x, y, w = (np.asarray(v, float) for v in (lags, values, weights))
    distinct = len(np.unique(x))
    if distinct < 2:
        raise RecordError(
            f"{metric} was measured at one lag alone ({x[0]:g} updates): how it grows with the lag is unknown; audit a "
            "run whose lag varies"
        )
    exponents = EXPONENTS if distinct > 2 else np.ones(1)
    a, b, c = _best(x, y, w, exponents)
    error = None
    if distinct >= 4:
        # Points of one lag are left out together: what is asked for is a lag that was not measured.
        squares = []
        for lag in np.unique(x):
            out = x == lag
            a_, b_, c_ = _best(x[~out], y[~out], w[~out], exponents)
            squares.append(float(np.average((a_ + b_ * lag**c_ - np.average(y[out], weights=w[out])) ** 2)))
        error = float(np.mean(squares) ** 0.5)
    return Fit(metric, a, b, c=c, error=error, lags=(float(x.min()), float(x.max())))


def _best(x: np.ndarray, y: np.ndarray, w: np.ndarray, exponents: np.ndarray) -> tuple[float, float, float]:
    """a, b and c with the least weighted squares."""
    best = (np.inf, 0.0, 0.0, 1.0)
    for c in exponents:
        z = x**c
        mean_z, mean_y = np.average(z, weights=w), np.average(y, weights=w)
        spread = np.average((z - mean_z) ** 2, weights=w)
        b = max(0.0, float(np.average((z - mean_z) * (y - mean_y), weights=w) / spread)) if spread else 0.0
        a = float(mean_y - b * mean_z)
        if a < 0:
            a, b = 0.0, max(0.0, float(np.average(z * y, weights=w) / np.average(z * z, weights=w)))
        loss = float(np.average((a + b * z - y) ** 2, weights=w))
        if loss < best[0] * (1 - 1e-9):
            best = (loss, a, b, float(c))
    return best[1:]


def measured_fit(path: Path, rules: Rules | None = None) -> DriftFit:
    """The fit to `audit.json` (or its folder): its buckets by lag; or to an arm's folder: its updates.

    Raises: `RecordError` if the path holds neither, or no drift at two lags or more.
    """
    table, what = _measurements(path)
    rules = rules or load_rules()
    limit = rules.limits["ratio_mean_z"]
    for on in PAIRS:
        z = joined_z([v for row in table if (v := number(row.get(f"{on}/ratio_mean_z"))) is not None])
        for metric in kl_metrics(on, z, limit):
            points = _points(table, metric)
            if points:
                chi2 = _points(table, f"{on}/chi2_token")
                return DriftFit(
                    fit(metric, *zip(*points)),
                    fit(f"{on}/chi2_token", *zip(*chi2)) if chi2 else None,
                    f"{metric} of {len(points)} {what} in {path}",
                    rules,
                )
    raise RecordError(
        f"{path} holds no drift by lag; log the rollout engine's log-probs and the version of its weights"
    )


def _points(table: Sequence[Mapping[str, Any]], metric: str) -> list[tuple[float, float, float]]:
    """Lag, value and tokens of every row that has them."""
    points = []
    for row in table:
        lag, value, tokens = (number(row.get(key)) for key in ("lag", metric, "tokens"))
        if lag is not None and value is not None:
            points.append((lag, max(0.0, value), tokens or 1.0))
    return points


def _measurements(path: Path) -> tuple[list[dict[str, Any]], str]:
    """Rows with their lag and tokens, and what they are."""
    file = path / "audit.json" if (path / "audit.json").is_file() else path
    try:
        if file.is_file():
            table = rows(at(mapping(read_json(file)), "facets", "lag"))
            # A bucket of several lags stands at its middle; the last has no end, and no place.
            ends = [(r, number(r.get("low")), number(r.get("high"))) for r in table]
            placed = [r | {"lag": (low + high) / 2} for r, low, high in ends if low is not None and high is not None]
            return placed, "lags"
        if not (path / "metrics.jsonl").is_file():
            raise FileNotFoundError("it is no audit.json and holds no metrics.jsonl")
        steps, _ = read_lines(path / "metrics.jsonl")
    except (OSError, ValueError) as e:
        raise RecordError(f"{path} holds no drift by lag ({e}); give an audit.json, or an arm's folder") from e
    return [s | {"lag": s.get("version_lag/mean"), "tokens": s.get("batch/tokens")} for s in steps], "updates"
