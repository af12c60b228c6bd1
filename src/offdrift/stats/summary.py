"""The metric table: name, unit, formula, direction. What is not a row here cannot be logged.

Each row computes one number from the host copy of `DriftStats`. A metric whose inputs are absent or
empty is NaN, never 0, and never an exception. Metrics are computed on the raw ratios of all sampled
tokens: they do not change with the correction that was chosen.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from offdrift.stats.drift import DriftStats

Numbers = dict[str, float]

MAX_GATES = 8
"""Gates of one method that are counted apart; all of them count together in `gate/drop_frac_*`."""


@dataclass(frozen=True)
class Metric:
    """One row of the table."""

    name: str
    unit: str
    formula: str
    larger_is: Literal["worse", "better", "neither"]
    value: Callable[[Numbers], float]


def summarize(stats: DriftStats) -> dict[str, float]:
    """Every metric of the table that these statistics allow, by name.

    Example:
        >>> import torch
        >>> from offdrift.logprobs import LogProbs
        >>> from offdrift.segments import Segments
        >>> lp = LogProbs.pack(torch.tensor([-1.0, -2.0]), torch.tensor([-1.1, -1.9]),
        ...                    segments=Segments.from_lengths([2]))
        >>> round(summarize(DriftStats.of(lp))["full/k3"], 5)
        0.005
    """
    numbers = stats.to_host()
    found = {}
    for metric in METRICS.values():
        try:
            found[metric.name] = metric.value(numbers)
        except KeyError:  # this ratio, gate or divergence was not part of the batch
            continue
        except (ZeroDivisionError, ValueError, OverflowError):
            found[metric.name] = math.nan
    return found


def _mean(name: str, count: str = "n") -> Callable[[Numbers], float]:
    return lambda s: s[name] / s[count]


def _chi2(name: str, count: str) -> Callable[[Numbers], float]:
    return lambda s: s[name] / s[count] - 1


def _pearson(on: str) -> Callable[[Numbers], float]:
    """Correlation of the two probabilities, from p and d = q - p: exact where they nearly agree."""

    def value(s: Numbers) -> float:
        n = s[f"{on}/n"]
        p, d = s[f"{on}/p"] / n, s[f"{on}/d"] / n
        var_p = s[f"{on}/p2"] / n - p * p
        var_d = s[f"{on}/d2"] / n - d * d
        cov = s[f"{on}/pd"] / n - p * d
        var_q = var_p + 2 * cov + var_d
        # Below rounding of the sums there is no variance to correlate.
        if n < 2 or min(var_p, var_q) <= 1e-12:
            return math.nan
        return min(1.0, (var_p + cov) / math.sqrt(var_p * var_q))

    return value


def _std(total: str, square: str, count: str, *, ddof: int) -> Callable[[Numbers], float]:
    def value(s: Numbers) -> float:
        n = s[count]
        mean = s[total] / n
        return math.sqrt(max(0.0, s[square] / n - mean * mean) * n / (n - ddof))

    return value


def _ess(total: str, square: str, count: str) -> Callable[[Numbers], float]:
    """(sum w)^2 / (n sum w^2); 0 where every weight is 0."""

    def value(s: Numbers) -> float:
        return s[total] ** 2 / (s[count] * s[square]) if s[square] > 0 else 0.0 / s[count]

    return value


def _pair(on: str, second: str, first: str) -> list[Metric]:
    """The metrics of one ratio; l = log second - log first, on tokens drawn from the rollout."""

    def row(name, unit, formula, larger_is, value) -> Metric:
        return Metric(f"{on}/{name}", unit, formula, larger_is, value)

    kl = f"KL({first} || {second})"
    return [
        row(
            "k1",
            "nat",
            f"mean(-l): {kl}, unbiased, signed",
            "worse",
            lambda s: -s[f"{on}/l_limited"] / s[f"{on}/n"],
        ),
        row("k2", "nat", "mean(l^2) / 2", "worse", lambda s: s[f"{on}/l2"] / s[f"{on}/n"] / 2),
        row(
            "k3",
            "nat",
            f"mean(e^l - 1 - l): {kl}, never negative",
            "worse",
            _mean(f"{on}/k3", f"{on}/n"),
        ),
        row("abs_log_ratio_mean", "nat", "mean |l|", "worse", _mean(f"{on}/abs", f"{on}/n")),
        row(
            "abs_log_ratio_max",
            "nat",
            "max |l|",
            "worse",
            lambda s: max(s[f"{on}/l_max"], s[f"{on}/-l_min"]),
        ),
        row("chi2_token", "1", "mean(e^2l) - 1", "worse", _chi2(f"{on}/w2", f"{on}/n")),
        row(
            "chi2_seq",
            "1",
            "mean over sequences(e^(2 sum l)) - 1",
            "worse",
            _chi2(f"{on}/product2", "b"),
        ),
        row(
            "tv_sampled",
            "1",
            "mean |e^l - 1| / 2: total variation, unbiased",
            "worse",
            lambda s: s[f"{on}/excess_abs"] / s[f"{on}/n"] / 2,
        ),
        row(
            "ess_frac",
            "1",
            "(sum w)^2 / (n sum w^2), w = e^l per token, untruncated",
            "better",
            _ess(f"{on}/w", f"{on}/w2", f"{on}/n"),
        ),
        row(
            "ess_seq_frac",
            "1",
            "(sum W)^2 / (b sum W^2), W = e^(sum l), untruncated",
            "better",
            _ess(f"{on}/product", f"{on}/product2", "b"),
        ),
        row(
            "pearson",
            "1",
            f"correlation of the probabilities under {first} and {second}",
            "better",
            _pearson(on),
        ),
        row(
            "prob_diff_mean",
            "1",
            f"mean |{second} - {first}| probability",
            "worse",
            _mean(f"{on}/d_abs", f"{on}/n"),
        ),
        row(
            "prob_diff_max",
            "1",
            f"max |{second} - {first}| probability",
            "worse",
            lambda s: s[f"{on}/d_abs_max"],
        ),
        row(
            "prob_diff_std",
            "1",
            f"standard deviation (n - 1) of |{second} - {first}|",
            "worse",
            _std(f"{on}/d_abs", f"{on}/d2", f"{on}/n", ddof=1),
        ),
        row(
            "log_ppl_gap",
            "nat",
            "mean over sequences |mean l| (full: eq. 25)",
            "worse",
            _mean(f"{on}/mean_abs", "b"),
        ),
        row(
            "log_ppl_diff_mean",
            "nat",
            "mean over sequences of mean(-l)",
            "worse",
            lambda s: -s[f"{on}/mean"] / s["b"],
        ),
        row(
            "log_ppl_diff_max",
            "nat",
            "max over sequences of mean(-l)",
            "worse",
            lambda s: s[f"{on}/-mean_min"],
        ),
        row(
            "log_ppl_diff_min",
            "nat",
            "min over sequences of mean(-l)",
            "neither",
            lambda s: -s[f"{on}/mean_max"],
        ),
        row(
            "ppl_ratio",
            "1",
            "mean over sequences of e^(mean(-l))",
            "neither",
            _mean(f"{on}/ppl_ratio", "b"),
        ),
    ]


def _policy(name: str) -> list[Metric]:
    return [
        Metric(
            f"{name}/log_ppl",
            "nat",
            "mean over sequences of mean(-log p)",
            "neither",
            _mean(f"{name}/nll", "b"),
        ),
        Metric(
            f"{name}/ppl",
            "1",
            "mean over sequences of e^(mean(-log p))",
            "neither",
            _mean(f"{name}/ppl", "b"),
        ),
    ]


def _divergence(name: str, unit: str) -> list[Metric]:
    key = f"divergence/{name}"
    return [
        Metric(f"{key}_mean", unit, f"mean over tokens of {name}", "worse", _mean(key)),
        Metric(
            f"{key}_max", unit, f"max over tokens of {name}", "worse", lambda s: s[f"{key}_max"]
        ),
    ]


_ROWS = [
    *_pair("mismatch", "pi_old", "mu"),
    *_pair("staleness", "pi", "pi_old"),
    *_pair("full", "pi", "mu"),
    *_policy("rollout"),
    *_policy("old"),
    *_policy("current"),
    *_divergence("kl_rollout_current", "nat"),
    *_divergence("tv_rollout_current", "1"),
    *_divergence("kl_rollout_old", "nat"),
    *_divergence("tv_rollout_old", "1"),
    Metric("weight/mean", "1", "mean weight, after limits", "neither", _mean("weight/w")),
    Metric("weight/std", "1", "standard deviation of the weight, after limits", "worse", _std("weight/w", "weight/w2", "n", ddof=0)),
    Metric("weight/max", "1", "largest weight, after limits", "worse", lambda s: s["weight/w_max"]),
    Metric("weight/min", "1", "smallest weight, after limits", "neither", lambda s: -s["weight/-w_min"]),
    Metric("weight/ess_frac", "1", "(sum w)^2 / (n sum w^2), per token, after limits", "better", _ess("weight/w", "weight/w2", "n")),
    Metric("weight/cap_frac", "1", "share of tokens whose weight met a limit", "worse", _mean("weight/limited")),
    Metric("gate/acceptance_seq", "1", "share of sequences with a kept token", "better", _mean("gate/kept_sequences", "b")),
    Metric("gate/drop_frac_seq", "1", "share of sequences rejected whole", "worse", lambda s: 1 - s["gate/kept_sequences"] / s["b"]),
    Metric("gate/drop_frac_token", "1", "share of tokens rejected", "worse", lambda s: 1 - s["gate/kept_tokens"] / s["n"]),
    Metric("reward/mean", "task", "mean reward of the batch's sequences", "better", _mean("reward", "b")),
    Metric("response/length_mean", "token", "mean response length", "neither", _mean("n", "b")),
    Metric("response/length_max", "token", "longest response", "neither", lambda s: s["length_max"]),
    Metric("version_lag/mean", "step", "mean over tokens of updates since its weights", "worse", _mean("version_lag")),
    Metric("version_lag/max", "step", "most updates since a token's weights", "worse", lambda s: s["version_lag_max"]),
    Metric("batch/tokens", "token", "response tokens of the step, over all processes", "neither", lambda s: s["n"]),
    Metric("current/entropy", "nat", "mean entropy of the current policy", "neither", _mean("current/entropy")),
    Metric("optim/loss", "task", "loss of the step, over all pieces and processes", "neither", lambda s: s["optim/loss"]),
    Metric("optim/grad_norm", "1", "global gradient norm before clipping", "neither", lambda s: s["optim/grad_norm"]),
    *(
        Metric(f"gate/{i}/drop_frac_token", "1", f"share of tokens that gate {i} alone rejects", "worse", _mean(f"gate/{i}/rejected_tokens"))
        for i in range(MAX_GATES)
    ),
    *(
        Metric(f"gate/{i}/rejected_{on}", "nat", f"mean over the sequences that gate {i} rejects of mean(-l), l the {on} log-ratio: its part of what they were rejected for", "worse", _mean(f"gate/{i}/rejected_{on}", f"gate/{i}/rejected_sequences"))
        for i in range(MAX_GATES) for on in ("mismatch", "staleness")
    ),
    Metric("reference/kl", "nat", "mean over tokens of the KL to the reference policy, by the penalty's estimator", "neither", _mean("reference/kl")),
    Metric("optim/lr_scale", "1", "what the method multiplied the learning rate by", "neither", lambda s: s["optim/lr_scale"]),
    Metric("objective/clip_frac_active", "1", "share of tokens whose loss a clip changed", "worse", _mean("objective/clipped")),
]  # fmt: skip
METRICS: dict[str, Metric] = {row.name: row for row in _ROWS}
