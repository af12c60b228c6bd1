"""Mismatch and staleness as the three-policy bound takes them, measured, and which of the two to lower first.

    J(pi) >= L_mu(pi) - C (alpha_0 + alpha_1),     alpha_1 = max_s TV(mu, pi_old),     alpha_0 = max_s TV(pi_old, pi)

alpha_1 is the mismatch between engines, alpha_0 the staleness of the data. Both have the same factor C, so that the
larger one is the larger part of the bound. Where whole distributions were recorded, the largest, the 95 % quantile and
the mean over the states that were met are known, exactly or as an interval. From sampled tokens the mean is estimated
without bias, the maximum is not: |pi_old(y) - mu(y)| of a drawn token is at most TV(mu, pi_old) there, so that the
largest of them is a lower end and nothing is an upper one. A state that nobody met may be worse in either case.

Reference: X. Wang, S. Zhang, "From Two Policies to Three", 2025, Theorem 2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from torch import Tensor

from offdrift.numerics import clamped
from offdrift.stats.formulas import Metric, mean, octave_counts, octave_quantile

PAIRS = ("tv_rollout_old", "tv_old_current", "tv_rollout_current")
LOWEST, BINS = -24, 25
"""Total variations are counted in bins of a factor of two, the first one up to 2^-23, the last one 1."""
NEAR = 1.5
"""Two distances within this factor are of one size: in exact processes the larger of two that are apart by less was
the one whose removal left the smaller error in 6 of 10 cases, of two that are apart by 3 to 10 in 95 of 100
(`offdrift lab three-policies`)."""


def _rows(name: str) -> list[Metric]:
    key = f"divergence/{name}"
    quantile = octave_quantile(f"{key}/bin", 0.95, low=LOWEST, bins=BINS, zero=True)
    return [
        Metric(
            f"{key}_p95", "1", f"95 % quantile over tokens of {name}, by bins of a factor of two", "worse", quantile
        ),
        Metric(
            f"{key}_max_high",
            "1",
            f"max over tokens of the upper end of {name}, where it is known as an interval",
            "worse",
            lambda s: s[f"{key}_max_high"],
        ),
    ]


ROWS = [
    *(row for name in PAIRS for row in _rows(name)),
    Metric(
        "staleness/tv_reweighted",
        "1",
        "mean rho |e^l - 1| / 2, rho = pi_old / mu: TV(pi_old, pi) at the states of mu, unbiased though mu drew the "
        "tokens",
        "worse",
        mean("staleness/tv_reweighted", "staleness/n"),
    ),
]
"""Rows of METRICS."""


def tv_bins(name: str, tv: Tensor) -> dict[str, Tensor]:
    """Sums for `{name}_p95`: how many tokens have a TV in each bin. Gradient: none, no transfer to the host."""
    counts = octave_counts(tv, low=LOWEST, bins=BINS)
    return {f"divergence/{name}/bin_{i}": n for i, n in enumerate(counts.unbind())}


def reweighted_tv(mismatch: Tensor, staleness: Tensor) -> Tensor:
    """sum over tokens of rho |r - 1| / 2, of log-ratios log rho = log pi_old / mu and log r = log pi / pi_old.

        E_mu[rho |r - 1|] / 2 = sum_y |pi(y) - pi_old(y)| / 2

    Example:
        >>> import torch
        >>> old, new, mu = (torch.tensor(p).log() for p in ([0.5, 0.5], [0.75, 0.25], [0.2, 0.8]))
        >>> each = [float(reweighted_tv((old - mu)[i], (new - old)[i])) for i in (0, 1)]
        >>> round(0.2 * each[0] + 0.8 * each[1], 6)  # under mu's law the TV of the other two
        0.25
    """
    return (clamped(mismatch).exp() * clamped(staleness).expm1().abs()).sum() / 2


Which = Literal["mismatch", "staleness"]
SYMBOLS: dict[Which, str] = {"mismatch": "α1 = TV(μ, π_old)", "staleness": "α0 = TV(π_old, π)"}


@dataclass(frozen=True)
class Alpha:
    """One distance over the states that were met."""

    which: Which
    grade: str
    """"exact", "interval", "capped interval" or "sampled", as `offdrift.divergence.evidence.Grade`."""
    mean: float
    """Of intervals, of their lower ends."""
    p95: float | None
    """None where it can only be sampled."""
    low: float
    """The largest is at least this."""
    high: float | None
    """The largest is at most this; None where nothing says so."""


@dataclass(frozen=True)
class Alphas:
    """Distances of mismatch and staleness, as far as they are known; make them with `Alphas.of`."""

    mismatch: Alpha | None
    staleness: Alpha | None
    missing: str
    """What would have to be recorded to tell the two apart; "" if nothing."""
    stale: bool = False
    """Whether the old log-probs were taken after the weights that sampled: mismatch then contains staleness."""

    @staticmethod
    def of(row: Mapping[str, Any], *, grade: str | None = None) -> Alphas:
        """From the metrics of a step, of a run or of a whole log.

        Args:
            row: metrics by name; what is absent, None or NaN was not measured.
            grade: of the divergences; None for the row's own `divergence/grade`, and exact where it has none.

        Example:
            >>> row = {"mismatch/tv_sampled": 0.02, "mismatch/prob_diff_max": 0.3}
            >>> Alphas.of(row | {"staleness/tv_reweighted": 0.001, "staleness/prob_diff_max": 0.02}).invest
            'mismatch'
            >>> Alphas.of(row).missing
            "the current policy's log-probs (logp)"
        """
        grade = grade or str(row.get("divergence/grade") or "exact")
        mismatch = _alpha("mismatch", row, "tv_rollout_old", "mismatch/tv_sampled", grade)
        staleness = _alpha("staleness", row, "tv_old_current", "staleness/tv_reweighted", grade)
        missing = ""
        if _known(row, "old/missing_frac"):
            # The rollout policy stands in for the old one: equal by construction, not by measurement.
            mismatch = staleness = None
            missing = "log-probs of the training engine's old policy: the rollout's own stand in for them (bypass)"
        elif mismatch is None and staleness is None:
            either = _known(row, "full/tv_sampled") is not None
            missing = "the old policy's log-probs (logp_old)" if either else "log-probs of three policies"
        elif mismatch is None:
            missing = "the rollout engine's log-probs (logp_rollout)"
        elif staleness is None:
            missing = "the current policy's log-probs (logp)"
        return Alphas(mismatch, staleness, missing, bool(_known(row, "old/stale_frac")))

    @property
    def basis(self) -> Literal["largest", "mean"] | None:
        """Statistic that compares the two: the largest, as in the bound, or the mean where that can only be sampled."""
        if self.mismatch is None or self.staleness is None:
            return None
        return "mean" if None in (self.mismatch.high, self.staleness.high) else "largest"

    @property
    def invest(self) -> Which | Literal["either", "neither"] | None:
        """The larger one; "either" within a factor of `NEAR`, "neither" where both are 0, None where nothing tells."""
        return self._larger(self.basis)

    def _larger(self, basis: str | None) -> Which | Literal["either", "neither"] | None:
        if basis is None or self.mismatch is None or self.staleness is None:
            return None
        ends = [
            (a.mean, a.mean) if basis == "mean" else (a.low, a.high or 0.0) for a in (self.mismatch, self.staleness)
        ]
        (low_1, high_1), (low_0, high_0) = ends
        if high_1 == high_0 == 0:
            return "neither"
        if low_1 >= NEAR * high_0:
            return "mismatch"
        if low_0 >= NEAR * high_1:
            return "staleness"
        return "either" if (low_1, low_0) == (high_1, high_0) or basis == "mean" else None

    @property
    def sentence(self) -> str:
        """Sentence on where to invest, and on what evidence; or on what is missing to say so."""
        if self.mismatch is None or self.staleness is None:
            measured = next((f" {_size(a, None)}." for a in (self.mismatch, self.staleness) if a is not None), "")
            return f"Which is larger, mismatch or staleness, cannot be said without {self.missing}.{measured}"
        basis, invest = self.basis, self.invest
        sizes = f"{_size(self.mismatch, basis)}, {_size(self.staleness, basis)}"
        about = {
            "mismatch": "mismatch (make the engines agree) is the larger part of the bound",
            "staleness": "staleness (fewer or smaller updates on the same data) is the larger part of the bound",
            "either": "mismatch and staleness are equally large; lower whichever is cheaper",
            "neither": "neither; the three policies do not differ",
            None: "the intervals of mismatch and staleness overlap; record whole distributions to tell them apart",
        }[invest]
        other = self._larger("mean") if basis == "largest" else None
        more = ""
        if other in ("mismatch", "staleness") and invest in ("mismatch", "staleness") and other != invest:
            more = f" On average over states {other} is the larger one."
        if basis == "mean":
            more += " The bound takes the largest over all states, which sampled tokens do not show."
        if self.stale:
            more += (
                " Old log-probs were taken at later weights than those that sampled, so mismatch contains staleness."
            )
        return f"Where to invest: {about}: {sizes}.{more}"

    def as_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        each: dict[str, Alpha | None] = {"mismatch": self.mismatch, "staleness": self.staleness}
        distances = {name: None if a is None else asdict(a) for name, a in each.items()}
        about = {"basis": self.basis, "invest": self.invest, "missing": self.missing or None}
        return {**distances, **about, "sentence": self.sentence}


def _alpha(which: Which, row: Mapping[str, Any], exact: str, sampled: str, grade: str) -> Alpha | None:
    key = f"divergence/{exact}"
    largest, high = _known(row, f"{key}_max"), _known(row, f"{key}_max_high")
    if largest is not None and grade != "sampled":
        mean_tv, p95 = _known(row, f"{key}_mean"), _known(row, f"{key}_p95")
        if high is None:
            return Alpha(which, "exact", mean_tv or 0.0, p95=p95, low=largest, high=largest)
        named = grade if grade in ("interval", "capped interval") else "interval"
        return Alpha(which, named, mean_tv or 0.0, p95=p95, low=largest, high=max(high, largest))
    estimate = _known(row, sampled)
    if estimate is None:
        return None
    # An estimate by weights can be above 1, which no TV is.
    return Alpha(
        which, "sampled", min(estimate, 1.0), p95=None, low=_known(row, f"{which}/prob_diff_max") or 0.0, high=None
    )


def _size(alpha: Alpha, basis: str | None) -> str:
    """The number that is compared, and how it is known."""
    at_most = "" if alpha.high in (None, alpha.low) else f" to {alpha.high:.2g}"
    largest = f"{alpha.low:.2g}{at_most}" if alpha.high is not None else f"at least {alpha.low:.2g}"
    if alpha.mean == alpha.low == 0 and alpha.high in (None, 0):
        return f"{SYMBOLS[alpha.which]} is 0 at every token that was met ({alpha.grade})"
    if basis == "largest":
        return f"{SYMBOLS[alpha.which]} has a largest value of {largest} and a mean of {alpha.mean:.2g} ({alpha.grade})"
    return f"{SYMBOLS[alpha.which]} has a mean of {alpha.mean:.2g} and a largest value of {largest} ({alpha.grade})"


def _known(row: Mapping[str, Any], name: str) -> float | None:
    """A metric; None where it is absent, or no number, or 0 of a share."""
    value = row.get(name)
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return None if name.startswith("old/") and not value else float(value)
