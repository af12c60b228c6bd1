"""The metrics of one ratio: rows of the table of metrics, once for each pair of policies.

l = log second - log first, on tokens drawn from the rollout policy mu.
"""

from __future__ import annotations

import math

from offdrift.stats.metric import (
    NO_VARIANCE,
    Formula,
    Metric,
    Numbers,
    chi2,
    correlation,
    ess,
    largest_chi2,
    mean,
    second_moment,
    std,
)


def drift(on: str, second: str, first: str) -> list[Metric]:
    """How far the two policies are apart: everything `DriftStats.of` has the sums of."""
    kl = f"KL({first} || {second})"
    n, b = f"{on}/n", f"{on}/b"
    return [
        Metric(f"{on}/k1", "nat", f"mean(-l): {kl}, unbiased, signed", "worse", lambda s: -s[f"{on}/l_limited"] / s[n]),
        Metric(f"{on}/k2", "nat", "mean(l^2) / 2", "worse", lambda s: s[f"{on}/l2"] / s[n] / 2),
        Metric(f"{on}/k3", "nat", f"mean(e^l - 1 - l): {kl}, never negative", "worse", mean(f"{on}/k3", n)),
        Metric(f"{on}/abs_log_ratio_mean", "nat", "mean |l|", "worse", mean(f"{on}/abs", n)),
        Metric(f"{on}/abs_log_ratio_max", "nat", "max |l|", "worse", lambda s: max(s[f"{on}/l_max"], s[f"{on}/-l_min"])),
        Metric(f"{on}/chi2_token", "1", "mean(e^2l) - 1", "worse", second_moment(f"{on}/w2", n)),
        Metric(f"{on}/chi2_seq", "1", "mean over sequences(e^(2 sum l)) - 1", "worse", chi2(f"{on}/log_product2", b)),
        Metric(f"{on}/chi2_seq_largest", "1", "largest of mean(W^2) - 1, mean((W - 1)^2) and mean(W^2) / mean(W)^2 - 1 over sequences, W = e^(sum l): never negative; what limits are held against", "worse", largest_chi2(f"{on}/log_product", f"{on}/log_product2", b)),
        Metric(f"{on}/tv_sampled", "1", "mean |e^l - 1| / 2: total variation, unbiased", "worse", lambda s: s[f"{on}/excess_abs"] / s[n] / 2),
        Metric(f"{on}/ess_frac", "1", "(sum w)^2 / (n sum w^2), w = e^l per token, untruncated", "better", ess(f"{on}/log_w", f"{on}/log_w2", n)),
        Metric(f"{on}/ess_seq_frac", "1", "(sum W)^2 / (b sum W^2), W = e^(sum l), untruncated", "better", ess(f"{on}/log_product", f"{on}/log_product2", b)),
        Metric(f"{on}/pearson", "1", f"correlation of the probabilities under {first} and {second}", "better", _pearson(on)),
        Metric(f"{on}/prob_diff_mean", "1", f"mean |{second} - {first}| probability", "worse", mean(f"{on}/d_abs", n)),
        Metric(f"{on}/prob_diff_max", "1", f"max |{second} - {first}| probability", "worse", lambda s: s[f"{on}/d_abs_max"]),
        Metric(f"{on}/prob_diff_std", "1", f"standard deviation (n - 1) of |{second} - {first}|", "worse", std(f"{on}/d_abs", f"{on}/d2", n, ddof=1)),
        Metric(f"{on}/log_ppl_gap", "nat", "mean over sequences |mean l| (full: eq. 25)", "worse", mean(f"{on}/mean_abs", b)),
        Metric(f"{on}/log_ppl_diff_mean", "nat", "mean over sequences of mean(-l)", "worse", lambda s: -s[f"{on}/mean"] / s[b]),
        Metric(f"{on}/log_ppl_diff_max", "nat", "max over sequences of mean(-l)", "worse", lambda s: s[f"{on}/-mean_min"]),
        Metric(f"{on}/log_ppl_diff_min", "nat", "min over sequences of mean(-l)", "neither", lambda s: -s[f"{on}/mean_max"]),
        Metric(f"{on}/ppl_ratio", "1", "mean over sequences of e^(mean(-l))", "neither", mean(f"{on}/ppl_ratio", b)),
    ]  # fmt: skip


def shape(on: str, second: str) -> list[Metric]:
    """How the two policies differ, and so why: what `stats.signature` has the sums of.

    Only for ratios whose first policy is mu: of tokens drawn from mu, nothing is known beforehand
    about the ratio of two other policies.
    """
    return [
        Metric(f"{on}/ratio_mean", "1", f"mean(e^l): 1 in expectation, whatever the drift, if tokens were drawn from mu as logged and {second} is normalized", "neither", _ratio_mean(on)),
        Metric(f"{on}/ratio_mean_z", "1", "sum of s over sequences / sqrt(sum of s^2), s the sequence's sum of e^l - 1: ratio_mean - 1 in standard errors", "neither", lambda s: s[f"{on}/excess"] / math.sqrt(s[f"{on}/excess2"])),
        Metric(f"{on}/slope", "1", f"slope of the regression of log {second} on log mu: 1 / T where temperature T was left out", "neither", _slope(on)),
        Metric(f"{on}/slope_r2", "1", f"squared correlation of log {second} and log mu", "better", lambda s: _same_token(on, s) ** 2),
        Metric(f"{on}/shift_corr_before", "1", f"correlation of log {second} of the token before with log mu: near 1 if {second} lags by one", "worse", _shifted(on, "before")),
        Metric(f"{on}/shift_corr", "1", f"correlation of log {second} with log mu, of the same token", "better", lambda s: _same_token(on, s)),
        Metric(f"{on}/shift_corr_after", "1", f"correlation of log {second} of the token after with log mu: near 1 if {second} leads by one", "worse", _shifted(on, "after")),
        Metric(f"{on}/positive_frac", "1", "share of tokens with l > 0.001", "neither", mean(f"{on}/positive", f"{on}/n")),
        Metric(f"{on}/negative_frac", "1", "share of tokens with l < -0.001", "neither", mean(f"{on}/negative", f"{on}/n")),
        Metric(f"{on}/k3_top_share", "1", "share of the sum of k3 that the 1% of tokens with the largest k3 carry", "worse", lambda s: s[f"{on}/k3_top"] / s[f"{on}/k3_binned"]),
        *(
            Metric(f"{on}/acceptance_{gate}", "1", f"share of sequences with {rule}", "better", mean(f"{on}/accepted_{gate}", f"{on}/b"))
            for gate, rule in GATES.items()
        ),
    ]  # fmt: skip


GATES = {
    "sum": "|sum l| <= log 2",
    "mean": "|mean l| <= 0.01",
    "worst": "max l^2 / 2 <= 0.05",
}
"""Three gates that age differently with length: a sum grows, a mean shrinks, a maximum creeps up."""


def _ratio_mean(on: str) -> Formula:
    """1 + mean(e^l - 1) where that was summed: near 1 the sum of e^l has rounded it away."""

    def value(s: Numbers) -> float:
        if f"{on}/excess" in s:
            return 1 + s[f"{on}/excess"] / s[f"{on}/n"]
        return s[f"{on}/w"] / s[f"{on}/n"]

    return value


def _pearson(on: str) -> Formula:
    """Correlation of the two probabilities, from p and d = q - p: exact where they nearly agree."""

    def value(s: Numbers) -> float:
        n = s[f"{on}/n"]
        p, d = s[f"{on}/p"] / n, s[f"{on}/d"] / n
        var_p = s[f"{on}/p2"] / n - p * p
        var_d = s[f"{on}/d2"] / n - d * d
        cov = s[f"{on}/pd"] / n - p * d
        var_q = var_p + 2 * cov + var_d
        if n < 2 or min(var_p, var_q) <= NO_VARIANCE:
            return math.nan
        return min(1.0, (var_p + cov) / math.sqrt(var_p * var_q))

    return value


def _slope(on: str) -> Formula:
    """cov(x, x + l) / var(x), x = log mu: from l, so that it is exact where the two nearly agree."""

    def value(s: Numbers) -> float:
        n, x = s[f"{on}/n"], s[f"{on}/x"] / s[f"{on}/n"]
        var = s[f"{on}/x2"] / n - x * x
        if n < 2 or var <= NO_VARIANCE:
            return math.nan
        return 1 + (s[f"{on}/xl"] / n - x * s[f"{on}/l_limited"] / n) / var

    return value


def _same_token(on: str, s: Numbers) -> float:
    x, xx, xl = s[f"{on}/x"], s[f"{on}/x2"], s[f"{on}/xl"]
    y, yy = x + s[f"{on}/l_limited"], xx + 2 * xl + s[f"{on}/l2"]
    return correlation(s[f"{on}/n"], x, xx, y, yy, xx + xl)


def _shifted(on: str, where: str) -> Formula:
    """Over the tokens t that have a neighbor: log second at the neighbor, log mu at t."""

    def value(s: Numbers) -> float:
        held = (s[f"{on}/{where}/{name}"] for name in ("n", "x", "xx", "y", "yy", "xy"))
        return correlation(*held)

    return value
