"""The metric table: name, unit, formula and better direction of every logged number.

A metric whose inputs are absent or empty is NaN, never 0, and never an exception. Metrics are computed on the raw
ratios of all sampled tokens: they do not change with the correction that was chosen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from offdrift.errors import ShapeError
from offdrift.segments import Segments
from offdrift.stats.alphas import ROWS as ALPHAS
from offdrift.stats.formulas import (
    NO_VARIANCE,
    Formula,
    Metric,
    Numbers,
    chi2,
    correlation,
    ess,
    largest_chi2,
    margin_quantile,
    mean,
    std,
)

LEAST_PLACED = 24
"""Responses from which on a share of misplaced advantages says anything."""


LEAST_FOLLOWED = 0.3
"""Slope of -log p on the entropy, from which on a log's entropies are of a policy like that of its log-probs: else they
are a placeholder, or in another order."""


def _advantage_corr(s: Numbers) -> float:
    """Correlation of rewards and mean advantages of responses; NaN where either does not vary."""
    n = s["advantage/n"]
    if not n:
        return math.nan
    r, a = s["advantage/reward"] / n, s["advantage/mean"] / n
    var_r, var_a = s["advantage/reward2"] / n - r * r, s["advantage/mean2"] / n - a * a
    if var_r <= NO_VARIANCE * s["advantage/reward2"] / n or var_a <= NO_VARIANCE * s["advantage/mean2"] / n:
        return math.nan
    return max(-1.0, min(1.0, (s["advantage/product"] / n - r * a) / math.sqrt(var_r * var_a)))


def _span(name: str, count: str) -> Formula:
    """Largest less smallest of `count` values, two or more."""
    return lambda s: s[f"{name}_max"] + s[f"-{name}_min"] if s[count] > 1 else math.nan


def _misplaced(s: Numbers) -> float:
    """Share of advantages at another response than theirs, where most steps say whose they are."""
    known = 2 * s["advantage/same_steps"] > s["advantage/varied_steps"] and s["advantage/same"] >= LEAST_PLACED
    return s["advantage/misplaced"] / s["advantage/same"] if known else math.nan


def _entropy_gap(s: Numbers) -> float:
    """Mean of H + log p where H explains -log p: honest draws have Cov[H, -log p] = Var[H]."""
    n = s["surprise/n"]
    h, over = s["surprise/h"] / n, s["surprise/over"] / n
    variance = s["surprise/h2"] / n - h * h
    covariance = (over - h) * h - s["surprise/hl"] / n
    return over if variance > 0 and covariance > LEAST_FOLLOWED * variance else math.nan


def _explained_variance(s: Numbers) -> float:
    """Explained variance of the critic; NaN where returns do not vary."""
    variance = std("critic/return", "critic/return_squared", "n", ddof=0)(s) ** 2
    return 1 - std("critic/error", "critic/error_squared", "n", ddof=0)(s) ** 2 / variance


def drift(on: str, second: str, first: str) -> list[Metric]:
    """Size of the drift between two policies, from the sums of `DriftStats.of`."""
    kl = f"KL({first} || {second})"
    n, b = f"{on}/n", f"{on}/b"
    return [
        Metric(f"{on}/k1", "nat", f"mean(-l): {kl}, unbiased, signed", "worse",
               lambda s: -s[f"{on}/l_limited"] / s[n]),
        Metric(f"{on}/k2", "nat", "mean(l^2) / 2", "worse", lambda s: s[f"{on}/l2"] / s[n] / 2),
        Metric(f"{on}/k3", "nat", f"mean(e^l - 1 - l): {kl}, never negative", "worse", mean(f"{on}/k3", n)),
        Metric(f"{on}/abs_log_ratio_mean", "nat", "mean |l|", "worse", mean(f"{on}/abs", n)),
        Metric(f"{on}/abs_log_ratio_max", "nat", "max |l|", "worse",
               lambda s: max(s[f"{on}/l_max"], s[f"{on}/-l_min"])),
        Metric(f"{on}/chi2_token", "1", "mean(e^2l) - 1", "worse", lambda s: s[f"{on}/w2"] / s[n] - 1),
        Metric(f"{on}/chi2_seq", "1", "mean over sequences(e^(2 sum l)) - 1", "worse", chi2(f"{on}/log_product2", b)),
        Metric(f"{on}/chi2_seq_largest", "1",
               "largest of mean(W^2) - 1, mean((W - 1)^2) and mean(W^2) / mean(W)^2 - 1 over sequences, W = "
               "e^(sum l): never negative; what limits are held against",
               "worse", largest_chi2(f"{on}/log_product", f"{on}/log_product2", b)),
        Metric(f"{on}/tv_sampled", "1", "mean |e^l - 1| / 2: total variation, unbiased", "worse",
               lambda s: s[f"{on}/excess_abs"] / s[n] / 2),
        Metric(f"{on}/ess_frac", "1", "(sum w)^2 / (n sum w^2), w = e^l per token, untruncated", "better",
               ess(f"{on}/log_w", f"{on}/log_w2", n)),
        Metric(f"{on}/ess_seq_frac", "1", "(sum W)^2 / (b sum W^2), W = e^(sum l), untruncated", "better",
               ess(f"{on}/log_product", f"{on}/log_product2", b)),
        Metric(f"{on}/pearson", "1", f"correlation of the probabilities under {first} and {second}", "better",
               _pearson(on)),
        Metric(f"{on}/prob_diff_mean", "1", f"mean |{second} - {first}| probability", "worse",
               mean(f"{on}/d_abs", n)),
        Metric(f"{on}/prob_diff_max", "1", f"max |{second} - {first}| probability", "worse",
               lambda s: s[f"{on}/d_abs_max"]),
        Metric(f"{on}/prob_diff_std", "1", f"standard deviation (n - 1) of |{second} - {first}|", "worse",
               std(f"{on}/d_abs", f"{on}/d2", n, ddof=1)),
        Metric(f"{on}/log_ppl_gap", "nat", "mean over sequences |mean l| (full: eq. 25)", "worse",
               mean(f"{on}/mean_abs", b)),
        Metric(f"{on}/log_ppl_diff_mean", "nat", "mean over sequences of mean(-l)", "worse",
               lambda s: -s[f"{on}/mean"] / s[b]),
        Metric(f"{on}/log_ppl_diff_max", "nat", "max over sequences of mean(-l)", "worse",
               lambda s: s[f"{on}/-mean_min"]),
        Metric(f"{on}/log_ppl_diff_min", "nat", "min over sequences of mean(-l)", "neither",
               lambda s: -s[f"{on}/mean_max"]),
        Metric(f"{on}/ppl_ratio", "1", "mean over sequences of e^(mean(-l))", "neither", mean(f"{on}/ppl_ratio", b)),
    ]  # fmt: skip


def shape(on: str, second: str) -> list[Metric]:
    """Shape of the drift, which tells its cause, from the sums of `stats.signature`.

    Only for ratios whose first policy is mu: for tokens drawn from mu, the ratio of two other policies
    has no expected value.
    """
    return [
        Metric(f"{on}/ratio_mean", "1",
               "mean(e^l): 1 in expectation, whatever the drift, if tokens were drawn from mu as logged and "
               f"{second} is normalized",
               "neither", _ratio_mean(on)),
        Metric(f"{on}/ratio_mean_z", "1",
               "sum of s over sequences / sqrt(sum of s^2), s the sequence's sum of e^l - 1: ratio_mean - 1 in "
               "standard errors",
               "neither", lambda s: s[f"{on}/excess"] / math.sqrt(s[f"{on}/excess2"])),
        Metric(f"{on}/slope", "1",
               f"slope of the regression of log {second} on log mu: about T where the trainer ignores "
               "the engine's temperature T, about 1 / T where the engine recorded log-probs before it applied T",
               "neither", _slope(on)),
        Metric(f"{on}/slope_r2", "1", f"squared correlation of log {second} and log mu", "better",
               lambda s: _same_token(on, s) ** 2),
        Metric(f"{on}/shift_corr_before", "1",
               f"correlation of log {second} of the token before with log mu: near 1 if {second} lags by one",
               "worse", _shifted(on, "before")),
        Metric(f"{on}/shift_corr", "1", f"correlation of log {second} with log mu, of the same token", "better",
               lambda s: _same_token(on, s)),
        Metric(f"{on}/shift_corr_after", "1",
               f"correlation of log {second} of the token after with log mu: near 1 if {second} leads by one",
               "worse", _shifted(on, "after")),
        Metric(f"{on}/shifted_seqs", "sequence",
               f"sequences of 16 tokens and more in which log {second} is that of a neighbor: correlation with log mu "
               "below 0.5 for the same token, above 0.8 for the one before or behind",
               "worse", lambda s: s[f"{on}/shifted"]),
        Metric(f"{on}/shifted_frac", "1", "their share of the sequences of 16 tokens and more; 0 without any", "worse",
               lambda s: s[f"{on}/shifted"] / max(s[f"{on}/shifted/n"], 1)),
        Metric(f"{on}/positive_frac", "1", "share of tokens with l > 0.001", "neither",
               mean(f"{on}/positive", f"{on}/n")),
        Metric(f"{on}/negative_frac", "1", "share of tokens with l < -0.001", "neither",
               mean(f"{on}/negative", f"{on}/n")),
        Metric(f"{on}/k3_top_share", "1", "share of the sum of k3 that the 1% of tokens with the largest k3 carry",
               "worse", lambda s: s[f"{on}/k3_top"] / s[f"{on}/k3_binned"]),
        *(
            Metric(f"{on}/acceptance_{gate}", "1", f"share of sequences with {rule}", "better",
                   mean(f"{on}/accepted_{gate}", f"{on}/b"))
            for gate, rule in GATES.items()
        ),
    ]  # fmt: skip


GATES = {"sum": "|sum l| <= log 2", "mean": "|mean l| <= 0.01", "worst": "max l^2 / 2 <= 0.05"}
"""Three gates that depend differently on length: a sum grows, a mean shrinks, a maximum grows slowly."""


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
        return max(-1.0, min(1.0, (var_p + cov) / math.sqrt(var_p * var_q)))

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
    return correlation(s[f"{on}/n"], x, xx, y=y, yy=yy, xy=xx + xl)


def _shifted(on: str, where: str) -> Formula:
    """Over the tokens t that have a neighbor: log second at the neighbor, log mu at t."""

    def value(s: Numbers) -> float:
        sums = (s[f"{on}/{where}/{name}"] for name in ("n", "x", "xx", "y", "yy", "xy"))
        return correlation(*sums)

    return value


@torch.no_grad()
def gradient_power(
    sum_pi_squared: Float[Tensor, " n"],
    logp: Float[Tensor, " n"],
    advantages: Float[Tensor, " n"],
    segments: Segments,
    *,
    weight: Float[Tensor, " n"] | None = None,
) -> dict[str, Tensor]:
    """Sums over sequences of the squared norms of their gradients.

        s_t = 1 - 2 pi(y_t) + sum_a pi(a)^2        squared norm of the logits' gradient of log pi(y_t)
        W_i = sum_t s_t        A_i, w_i = means over the sequence's tokens
        power = sum_i w_i^2 A_i^2 max(W_i, 0)      a2 = sum_i A_i^2      w = sum_i w_i^2 W_i

    Args:
        sum_pi_squared: sum over the vocabulary of pi^2, per token.
        logp: log-probs of the sampled tokens under the same policy, nats.
        weight: importance weights per token, 0 where rejected; None for 1.

    Gradient: none. Raises: `ShapeError` if the tensors differ in length.

    Reference: verl's variance proxy metrics; survey, "Gradient variance proxy metrics".
    """
    n = int(segments.cu_seqlens[-1])
    tensors = {"sum_pi_squared": sum_pi_squared, "logp": logp, "advantages": advantages}
    for name, x in (tensors | {"weight": weight}).items():
        if x is not None and len(x) != n:
            raise ShapeError(f"{name} has {len(x)} tokens, the segments {n}")
    # In an empty sequence sums and means are 0, and so is all that follows.
    power = segments.sum(1 - 2 * logp.double().exp() + sum_pi_squared.double())
    a2 = segments.mean(advantages.double()).square()
    w2 = torch.ones_like(a2) if weight is None else segments.mean(weight.double()).square()
    by_name = {"power": w2 * a2 * power.clamp(min=0), "a2": a2, "w": w2 * power}
    sums = {f"variance_proxy/{name}": x.sum() for name, x in by_name.items()}
    return {**sums, "variance_proxy/n": segments.lengths.count_nonzero()}


def signal(s: Numbers) -> float:
    """Proxy 1: the squared norm of the mean gradient before clipping, over parameters."""
    return s["optim/grad_norm"] ** 2


def power(s: Numbers) -> float:
    """Proxy 2: the mean squared norm of one sequence's gradient, over logits."""
    return s["variance_proxy/power"] / s["variance_proxy/n"]


def noise(s: Numbers) -> float:
    """Proxy 3: what proxy 2 exceeds proxy 1 by, per further sequence; NaN for fewer than two sequences.

    The two norms are of different spaces, as in the source; over logits alone it would be proxy 2 / N
    (`judge.readings.history` says why).
    """
    n = s["variance_proxy/n"]
    return max(0.0, (power(s) - signal(s)) / (n - 1)) if n > 1 else math.nan


PROXIES = [
    Metric("variance_proxy/proxy1_signal_strength", "1",
           "|g|^2, g the mean gradient with respect to the parameters, before clipping", "neither",
           lambda s: signal(s) if s["variance_proxy/n"] else math.nan),
    Metric("variance_proxy/proxy2_total_power", "1",
           "mean over sequences of w^2 A^2 sum_t (1 - 2 pi(y_t) + sum_a pi(a)^2): squared norms of gradients "
           "with respect to the logits",
           "neither", power),
    Metric("variance_proxy/proxy3_pure_noise", "1",
           "max(0, (proxy 2 - proxy 1) / (sequences - 1)), as verl logs it: a norm over logits less one over "
           "parameters, so it is the variance of the mean gradient in neither space, and comparable with nothing "
           "but itself",
           "worse", noise),
    Metric("variance_proxy/expected_a_squared", "1", "mean over sequences of A^2", "neither",
           lambda s: s["variance_proxy/a2"] / s["variance_proxy/n"]),
    Metric("variance_proxy/expected_w", "1", "mean over sequences of w^2 sum_t (1 - 2 pi(y_t) + sum_a pi(a)^2)",
           "neither", lambda s: s["variance_proxy/w"] / s["variance_proxy/n"]),
]  # fmt: skip
"""Rows of METRICS. Proxies, not variances: tokens of a sequence are taken as uncorrelated, only the last
layer's logits are seen, and proxy 3 takes a norm over parameters from one over logits, which have no common
unit: where the parameters' is the larger it is 0, whatever the noise. Watch its trend when weights are
switched on, in one run, and no more."""


MAX_GATES = 8
"""Gates of one method that are counted apart; all of them count together in `gate/drop_frac_*`."""


@runtime_checkable
class Sums(Protocol):
    """`DriftStats`, of which only the numbers are read."""

    def to_host(self) -> dict[str, float]:
        """All sums, extremes and logs of sums by name."""
        ...


def summarize(stats: Sums) -> dict[str, float]:
    """Every metric of the table that these statistics allow, by name.

    Example:
        >>> import torch
        >>> from offdrift.logprobs import LogProbs
        >>> from offdrift.segments import Segments
        >>> from offdrift.stats.drift import DriftStats
        >>> lp = LogProbs.pack(torch.tensor([-1.0, -2.0]), torch.tensor([-1.1, -1.9]),
        ...                    segments=Segments.from_lengths([2]))
        >>> round(summarize(DriftStats.of(lp))["full/k3"], 5)
        0.005
    """
    numbers = stats.to_host()
    metrics = {}
    for metric in METRICS.values():
        try:
            value = metric.value(numbers)
            nothing = math.isinf(value) and not numbers.get("n", 1)  # the extreme of no tokens
            metrics[metric.name] = math.nan if nothing else value
        except KeyError:  # this ratio, gate or divergence was not part of the batch
            continue
        except (ZeroDivisionError, ValueError, OverflowError):
            metrics[metric.name] = math.nan
    return metrics


def metric_rows(metrics: Mapping[str, float]) -> list[dict[str, Any]]:
    """Metrics as rows of a table: name, value, unit, which direction is better, formula.

    Example:
        >>> metric_rows({"full/k2": 0.5})[0]["formula"]
        'mean(l^2) / 2'
    """
    better = {"worse": "lower is better", "better": "higher is better", "neither": ""}
    rows = []
    for name, value in metrics.items():
        metric = METRICS[name]
        row = {"metric": name, "value": value, "unit": metric.unit}
        rows.append({**row, "direction": better[metric.larger_is], "formula": metric.formula})
    return rows


TELLING = tuple(
    f"{on}/{name}"
    for on in ("mismatch", "full", "staleness")
    for name in ("k3", "ess_frac", "chi2_token", "pearson", "abs_log_ratio_max")
)
"""Metrics that a short view of some statistics shows."""


def metrics_html(metrics: Mapping[str, float]) -> str:
    """The telling metrics as a table of HTML, with all others folded away below it."""
    from offdrift.notebook import table

    rows = [row for row in metric_rows(metrics) if math.isfinite(row["value"])]
    lines = {row["metric"]: (row["metric"], f"{row['value']:.4g}", row["unit"], row["direction"]) for row in rows}
    first = [lines[name] for name in TELLING if name in lines]
    rest = [line for name, line in lines.items() if name not in TELLING]
    return table(first) + (
        f"<details><summary>{len(rest)} more metrics</summary>{table(rest)}</details>" if rest else ""
    )


def _policy(name: str, count: str) -> list[Metric]:
    """Perplexities of one policy, over the sequences that it scored."""
    return [
        Metric(f"{name}/log_ppl", "nat", "mean over sequences of mean(-log p)", "neither",
               mean(f"{name}/nll", count)),
        Metric(f"{name}/ppl", "1", "mean over sequences of e^(mean(-log p))", "neither", mean(f"{name}/ppl", count)),
    ]  # fmt: skip


def _divergence(name: str, unit: str) -> list[Metric]:
    key = f"divergence/{name}"
    return [
        Metric(f"{key}_mean", unit, f"mean over tokens of {name}", "worse", mean(key)),
        Metric(f"{key}_max", unit, f"max over tokens of {name}", "worse", lambda s: s[f"{key}_max"]),
    ]


def _mean_length(s: Numbers) -> float:
    """Mean length of whole responses where a log says how long they were, else of what was scored."""
    return s["length"] / s["length/n"] if "length" in s else s["n"] / s["b"]


def _tokens(s: Numbers) -> float:
    """Tokens of the step: those that the engine scored, which everything else is about, and the others."""
    return s["n"] + s.get("unscored", 0.0)


BESIDE: dict[str, tuple[str, Literal["worse", "better", "neither"], str]] = {
    "worker_idle": (
        "1",
        "worse",
        "share of the workers' time without drawing, loading weights or computing rewards",
    ),
    "trainer_idle": ("1", "worse", "share of the time in which the trainer waited for groups"),
    "reward_seconds": ("s", "neither", "seconds in which workers computed rewards, summed over workers"),
    "sync_seconds": ("s", "worse", "seconds in which workers loaded weights, summed over workers"),
    "sync_bytes": ("byte", "neither", "size of the weights as they were last published, one copy"),
    "stale_frac": ("1", "worse", "share of responses with a token of older weights than the update's own"),
    "mixed_frac": ("1", "neither", "share of responses whose tokens have more than one version"),
    "wasted_tokens": (
        "token",
        "worse",
        "tokens thrown away: of groups dropped or drawn again, of responses begun again",
    ),
    "dropped_groups": ("1", "worse", "groups that became too old, and whose place another prompt took"),
    "redrawn_groups": ("1", "worse", "groups that became too old, and were drawn again"),
    "restarted": (
        "1",
        "worse",
        "responses begun again: their worker was lost, and the weights of their tokens are gone",
    ),
    "lost_workers": ("1", "worse", "workers that died or hung, and were replaced"),
    "stored_groups": ("1", "neither", "groups in progress or waiting for the trainer at the end of the update"),
    "queue_seconds": (
        "s",
        "neither",
        "mean over responses of the time from submission of the group to the first token",
    ),
    "generation_seconds": ("s", "neither", "mean over responses of the time from the first token's start to the end"),
}
"""Rows of METRICS of generation beside training, since the last update; beside them stands `pipeline/lag_counts`."""


_ROWS = [
    *drift("mismatch", "pi_old", "mu"),
    *shape("mismatch", "pi_old"),
    *drift("staleness", "pi", "pi_old"),
    Metric("staleness/clip_frac", "1",
           "share of tokens whose PPO clip at 0.2 acts: e^l > 1.2 and A > 0, or e^l < 0.8 and A < 0; either side "
           "where A was not logged",
           "worse", mean("staleness/clipped")),
    Metric("reuse/k3", "nat",
           "k3 of pi at the last update that trains on a token against pi at the first: what further epochs move",
           "worse", mean("reuse/k3")),
    Metric("batch/updates_before", "1", "earlier updates on the same batch, mean over tokens", "neither",
           mean("updates_before")),
    *drift("full", "pi", "mu"),
    *shape("full", "pi"),
    *_policy("rollout", "b"),
    *_policy("old", "mismatch/b"),
    *_policy("current", "full/b"),
    *_divergence("kl_rollout_current", "nat"),
    *_divergence("tv_rollout_current", "1"),
    *_divergence("kl_rollout_old", "nat"),
    *_divergence("tv_rollout_old", "1"),
    *_divergence("kl_old_current", "nat"),
    *_divergence("tv_old_current", "1"),
    *_divergence("kl_current_old", "nat"),
    *ALPHAS,
    Metric("weight/mean", "1", "mean weight, after limits", "neither", mean("weight/w")),
    Metric("weight/std", "1", "standard deviation of the weight, after limits", "worse",
           std("weight/w", "weight/w2", "n", ddof=0)),
    Metric("weight/max", "1", "largest weight, after limits", "worse", lambda s: s["weight/w_max"]),
    Metric("weight/min", "1", "smallest weight, after limits", "neither", lambda s: -s["weight/-w_min"]),
    Metric("weight/ess_frac", "1", "(sum w)^2 / (n sum w^2), per token, after limits", "better",
           ess("weight/log_w", "weight/log_w2", "n")),
    Metric("weight/cap_frac", "1", "share of tokens whose weight met a limit", "worse", mean("weight/limited")),
    Metric("weight/changed_frac", "1", "share of tokens whose weight is not 1", "neither", mean("weight/changed")),
    Metric("gate/acceptance_seq", "1", "share of sequences with a kept token", "better",
           mean("gate/kept_sequences", "b")),
    Metric("gate/drop_frac_seq", "1", "share of sequences rejected whole", "worse",
           lambda s: 1 - s["gate/kept_sequences"] / s["b"]),
    Metric("gate/drop_frac_token", "1", "share of tokens rejected", "worse",
           lambda s: 1 - s["gate/kept_tokens"] / s["n"]),
    Metric("reward/mean", "task", "mean reward of the batch's sequences", "better", mean("reward", "b")),
    Metric("advantage/reward_corr", "1",
           "correlation, over responses, of the reward and the mean advantage of the tokens: above 0 for a baseline "
           "that knows the prompt alone", "better", _advantage_corr),
    Metric("advantage/reward_z", "1",
           "advantage/reward_corr times sqrt(responses): in standard errors of a sample without correlation", "better",
           lambda s: _advantage_corr(s) * math.sqrt(s["advantage/n"])),
    Metric("advantage/misplaced_frac", "1",
           "share of advantages that stand beside another response than the one they are of, in steps whose advantages "
           "are, in some order, those of the logged rewards (r, r - mean of the group, or that over the group's "
           "deviation, up to scale and offset)", "worse", _misplaced),
    Metric("advantage/span", "task", "largest advantage less the smallest", "neither",
           _span("advantage", "advantage/tokens")),
    Metric("reward/span", "task", "largest reward of a response less the smallest", "better",
           _span("reward", "reward/n")),
    Metric("preference/pair_frac", "1", "share of prompts whose answers do not all earn alike: those with a pair",
           "better", mean("preference/pairs", "preference/prompts")),
    Metric("preference/accuracy", "1", "share of pairs of which the policy prefers the better answer, as compared with "
           "the reference", "better", mean("preference/right", "preference/pairs")),
    Metric("preference/margin", "1", "mean over pairs of beta (log pi / pi_ref of the better - of the worse answer)",
           "better", mean("preference/margin", "preference/pairs")),
    Metric("opob/norm_rank_corr", "1", "Kendall's tau, within prompts, of exact gradient norms of responses and of "
           "their stand-in at the logits", "better", mean("opob/concordant", "opob/pairs")),
    Metric("opob/baseline_shift", "task", "mean over responses of |baseline with exact norms - with their stand-in|",
           "neither", mean("opob/shift", "opob/responses")),
    Metric("critic/vf_loss", "task^2", "mean over tokens of the critic's (clipped) squared error / 2", "neither",
           mean("critic/vf")),
    Metric("critic/vf_clip_frac", "1", "share of tokens whose value has moved past the critic's clip", "neither",
           mean("critic/vf_clipped")),
    Metric("critic/vf_explained_var", "1", "1 - Var[return - value] / Var[return], values as the batch arrived",
           "better", _explained_variance),
    Metric("critic/value_mean", "task", "mean value over tokens, as the batch arrived", "neither",
           mean("critic/value")),
    Metric("critic/grad_norm", "1", "the critic's gradient norm before clipping; of its head alone where it is shared",
           "neither",
           lambda s: s["critic/grad_norm"]),
    Metric("response/length_mean", "token", "mean response length", "neither", _mean_length),
    Metric("response/length_max", "token", "longest response", "neither", lambda s: s["length_max"]),
    Metric("response/turns_mean", "1", "mean number of turns of an episode; without episodes it is missing", "neither",
           mean("turns")),
    Metric("response/truncated_frac", "1", "share of responses that the length limit cut off", "neither",
           lambda s: s["truncated"] / s["truncated/n"]),
    Metric("version_lag/mean", "update", "mean over tokens of updates since its weights", "worse", mean("version_lag")),
    Metric("version_lag/max", "update", "most updates since a token's weights", "worse",
           lambda s: s["version_lag_max"]),
    Metric("version_lag/mixed_frac", "1", "share of responses whose tokens several versions of the weights drew",
           "neither", mean("mixed", "mixed/n")),
    Metric("version/rollout", "update", "newest version of the weights that drew a token", "neither",
           lambda s: s["rollout_version_max"]),
    Metric("version/current", "update", "newest version of the weights that train", "neither",
           lambda s: s["version_max"]),
    Metric("groups/flat_frac", "1",
           "share of the batch's groups whose rewards are all equal: siblings give them no advantage", "worse",
           mean("groups/flat", "groups/n")),
    Metric("draws/rounds", "1", "rounds of prompts per batch drawn, mean over processes", "worse",
           mean("draws/rounds", "draws/draws")),
    Metric("draws/discarded_frac", "1", "share of the groups drawn that are not trained on", "worse",
           lambda s: 1 - s["draws/kept_groups"] / s["draws/groups"]),
    Metric("draws/responses_per_kept", "1", "responses drawn, greedy ones included, over responses trained on", "worse",
           mean("draws/responses", "draws/kept_responses")),
    Metric("draws/group_size", "1", "responses per group that is trained on", "neither",
           mean("draws/kept_responses", "draws/kept_groups")),
    Metric("draws/filled_frac", "1", "share of the batch's groups without a spread that fill it, rounds being over",
           "worse", mean("draws/filled", "draws/kept_groups")),
    Metric("draws/left_out", "1", "prompts that are left out of draws by now, over all processes", "neither",
           lambda s: s["draws/left_out"]),
    Metric("buffer/groups", "1", "groups that the replay buffer holds, over all processes", "neither",
           lambda s: s["buffer/n"]),
    Metric("buffer/age_mean", "step", "mean over held groups of updates since their oldest token's weights", "worse",
           mean("buffer/age", "buffer/n")),
    Metric("buffer/age_std", "step", "standard deviation of that age over held groups", "worse",
           std("buffer/age", "buffer/age2", "buffer/n", ddof=0)),
    Metric("buffer/unique_prompts_frac", "1", "different prompts over groups held: diversity", "better",
           mean("buffer/prompts", "buffer/n")),
    Metric("buffer/earlier_uses", "1", "mean number of batches that the batch's groups were part of before", "worse",
           mean("buffer/earlier", "buffer/processes")),
    Metric("buffer/drawn_frac", "1", "batches drawn over batches trained on, so far: the share of generation paid for",
           "better", mean("buffer/drawn", "buffer/trained")),
    Metric("buffer/tau", "step", "age at which the priority of a group has fallen by a factor of e", "neither",
           mean("buffer/tau", "buffer/processes")),
    Metric("old/exact_frac", "1",
           "share of tokens whose old log-prob is the training engine's at the weights that drew them", "better",
           mean("old/exact")),
    Metric("old/stale_frac", "1",
           "share of tokens whose old log-prob was taken at other weights: their mismatch contains staleness",
           "worse", mean("old/stale")),
    Metric("old/approximated_frac", "1", "share of tokens whose old log-prob is an averaged or interpolated policy's",
           "neither", mean("old/approximated")),
    Metric("old/missing_frac", "1", "share of tokens whose old log-prob is the rollout policy's own (bypass)",
           "neither", mean("old/missing")),
    Metric("old/version_lag", "update",
           "most updates between a token's weights and those that scored it as the old policy", "worse",
           lambda s: s["old/version_lag"]),
    Metric("batch/tokens", "token", "response tokens of the step, over all processes", "neither", _tokens),
    Metric("batch/unscored_tokens", "token",
           "tokens that the engine did not score (rollout log-prob of -1000 nats or less): left out of every "
           "metric of ratios, never trained",
           "worse", lambda s: 0 * s["n"] + s.get("unscored", 0.0)),
    Metric("batch/unscored_frac", "1", "share of the step's tokens that the engine did not score", "worse",
           lambda s: s.get("unscored", 0.0) / _tokens(s)),
    Metric("current/entropy", "nat", "mean entropy of the current policy", "neither", mean("current/entropy")),
    Metric("record/entropy_gap", "nat",
           "mean over tokens of the logged entropy plus the trainer's log-prob: 0 for tokens that are drawn from the "
           "policy whose entropy it is, above 0 for such that are drawn sharper, as at a temperature below 1; missing "
           "where log-probs do not follow the entropies", "neither", _entropy_gap),
    Metric("record/entropy_z", "1", "sum of H + log p over the root of the sum of its squares: in standard errors",
           "neither", lambda s: s["surprise/over"] / math.sqrt(s["surprise/square"])),
    Metric("sampling/temperature", "1", "temperature that responses were drawn at, where it is the same for all",
           "neither", lambda s: s["temperature_max"] if s["temperature_max"] == -s["-temperature_min"] else math.nan),
    Metric("optim/loss", "task", "loss of the step, over all pieces and processes", "neither",
           lambda s: s["optim/loss"]),
    Metric("optim/grad_norm", "1", "global gradient norm before clipping", "neither", lambda s: s["optim/grad_norm"]),
    *(
        Metric(f"gate/{i}/drop_frac_token", "1", f"share of tokens that gate {i} alone rejects", "worse",
               mean(f"gate/{i}/rejected_tokens"))
        for i in range(MAX_GATES)
    ),
    *(
        Metric(f"gate/{i}/rejected_{on}", "nat",
               f"mean over the sequences that gate {i} rejects of mean(-l), l the {on} log-ratio: its part of "
               "what they were rejected for",
               "worse", mean(f"gate/{i}/rejected_{on}", f"gate/{i}/rejected_sequences"))
        for i in range(MAX_GATES) for on in ("mismatch", "staleness")
    ),
    Metric("reference/kl", "nat", "mean over tokens of the KL to the reference policy, by the penalty's estimator",
           "neither", mean("reference/kl")),
    Metric("reference/kl_exact", "nat", "mean over tokens of KL(pi || pi_ref), from both whole distributions",
           "neither", lambda s: s["reference/kl_exact"]),
    Metric("reference/kl_exact_max", "nat", "largest KL(pi || pi_ref) of a token, from both whole distributions",
           "neither", lambda s: s["reference/kl_exact_max"]),
    Metric("reference/tv_exact", "1", "mean over tokens of the total variation from the reference policy",
           "neither", lambda s: s["reference/tv_exact"]),
    Metric("optim/lr_scale", "1", "factor of the learning rate by the method and `optim.min_acceptance`", "neither",
           lambda s: s["optim/lr_scale"]),
    Metric("optim/loss_scale", "1", "what a float16 loss was multiplied by while its gradient was taken", "neither",
           lambda s: s["optim/loss_scale"]),
    Metric("optim/skipped", "1", "1 if the gradient overflowed in float16: no step was taken, weights are as before",
           "neither", lambda s: s["optim/skipped"]),
    Metric("optim/gradient_cosine", "1",
           "cosine of the gradient and the last update's, both before projection and clipping: near 0 on-policy",
           "worse", lambda s: s["optim/gradient_cosine"]),
    Metric("optim/gradient_removed_frac", "1",
           "norm of what was removed of the gradient because it repeats the last one, over the gradient's norm",
           "neither", lambda s: s["optim/gradient_removed_frac"]),
    Metric("perturb/sigma_mean", "1", "mean over layers of the size of the noise in their input", "neither",
           lambda s: s["perturb/sigma_mean"]),
    Metric("perturb/sigma_max", "1", "largest size of the noise in a layer's input", "neither",
           lambda s: s["perturb/sigma_max"]),
    Metric("optim/empty", "1", "1 where the whole gradient was 0, as when everything was rejected", "worse",
           lambda s: s["optim/empty"]),
    Metric("optim/undone", "1", "1 where a step failed its test and was undone, else 0", "worse",
           lambda s: s["optim/undone"]),
    Metric("optim/accept_test", "1",
           "what the test of a step measured: the engine's gap to the trainer, or nats (optim.accept)", "neither",
           lambda s: s["optim/accept_test"]),
    Metric("optim/accept_limit", "1", "its limit: the tolerated loss of a gap, or the largest nats", "neither",
           lambda s: s["optim/accept_limit"]),
    Metric("optim/step_skipped", "1", "1 where no step was taken: large cosine, or no gradient; else 0", "neither",
           lambda s: s["optim/step_skipped"]),
    *(
        Metric(f"pipeline/{name}", unit, what, larger_is, lambda s, name=name: s[f"pipeline/{name}"])
        for name, (unit, larger_is, what) in BESIDE.items()
    ),
    *PROXIES,
    Metric("router/flip_frac", "1",
           "share of decisions (positions x layers) in which the routers of the pass that the loss is taken from would "
           "themselves choose other experts than the recorded ones: the engine's, or the old policy's (replay.routes)",
           "worse", mean("router/flips", "router/decisions")),
    Metric("router/flipped_tokens_frac", "1", "share of tokens predicted where some layer's decision flips", "worse",
           mean("router/flipped_tokens")),
    Metric("router/delta_router", "1",
           "(1/K) sum_i Pr[m_i^roll != m_i^train]: share of a layer's experts whose membership differs between the "
           "engines, mean over positions and layers; missing where routes are replayed, and do not differ",
           "worse", mean("router/delta", "router/decisions")),
    Metric("router/margin_mean", "1", "mean over decisions of h_(K) - h_(K+1), logit of the least chosen expert less "
           "the largest other one", "better", mean("router/margin", "router/decisions")),
    Metric("router/margin_p01", "1", "1 % quantile of that margin, by bins of a factor of two: what rounding tips",
           "better", margin_quantile(0.01)),
    Metric("router/kl_at_flips", "nat", "mean KL(rollout || current) of tokens predicted where some decision flips",
           "worse", mean("router/kl_at_flips")),
    Metric("router/kl_elsewhere", "nat", "mean KL(rollout || current) of all other tokens", "worse",
           mean("router/kl_elsewhere")),
    Metric("router/bytes_per_token", "byte", "size of the recorded experts, prompts' included, over response tokens",
           "neither", mean("router/bytes")),
    Metric("fusion/alpha_mean", "1", "mean over responses of the teacher's share in the logits they were drawn from",
           "neither", mean("fusion/alpha", "fusion/responses")),
    Metric("fusion/kl_mean", "nat", "mean over tokens of KL(mixture || policy alone), both as the engine drew: the "
           "deliberate part of the drift", "neither", mean("fusion/kl")),
    Metric("fusion/kl_max", "nat", "max over tokens of KL(mixture || policy alone)", "neither",
           lambda s: s["fusion/kl_max"]),
    Metric("fusion/difficulty_mean", "1", "mean over prompts of the difficulty that scaled the share; probed, 1 less "
           "the policy's own mean reward on the scale of reward_range", "neither",
           mean("fusion/difficulty", "fusion/prompts")),
    Metric("kv/kept_frac", "1", "share of earlier positions, their own included, whose keys tokens behind the prompt "
           "still saw in the engine's compressed cache; mean over layers and heads", "better",
           mean("kv/kept", "kv/pairs")),
    Metric("kv/bytes_per_token", "byte", "size of the recorded retention, prompts' included, over response tokens",
           "neither", mean("kv/bytes")),
    Metric("kv/distill", "nat", "mean KL(dense || shadow), by replay.distill_by: of the current policy that sees "
           "everything from the one that sees what the engine's cache had", "worse", mean("kv/distill")),
    Metric("kv/kl_dense", "nat", "mean KL(rollout || current) of the current policy that sees everything, where that "
           "of the loss sees what the engine's cache had (replay.distill); lower end of intervals", "worse",
           mean("kv/kl_dense")),
    Metric("speculative/accepted_frac", "1", "share of the drafter's proposals that the policy accepted, of those that "
           "it came to judge: none behind the first rejection of a pass", "better",
           mean("speculative/accepted", "speculative/judged")),
    Metric("speculative/overlap_mean", "1", "mean over judged places of sum_a min(mu(a), q(a)) = 1 - TV(mu, q): the "
           "chance of acceptance, of which accepted_frac is the outcome", "better",
           mean("speculative/overlap", "speculative/judged")),
    Metric("speculative/tokens_per_pass", "token", "response tokens over passes of the policy, each response's counted "
           "for itself: 1 without a drafter", "better", mean("speculative/tokens", "speculative/passes")),
    Metric("speculative/drafter_lag", "step", "mean over tokens of updates between the weights that drew them and "
           "those whose rollouts the drafter had last learned from", "worse",
           mean("speculative/lag", "speculative/tokens")),
    Metric("speculative/kl", "nat", "mean over tokens of KL(mu || q), the drafter's loss before it learns from the "
           "batch (of the sampled token alone where the evidence is not whole); missing where it does not learn",
           "worse", mean("speculative/kl")),
    Metric("grid/moved_frac", "1",
           "share of the weights that an update changed whose code on the rollouts' grid changed, too", "better",
           mean("grid/moved", "grid/changed")),
    Metric("grid/update_cosine", "1", "cosine of an update of the rollouts' matrices and of what the grid makes of it",
           "better", lambda s: s["grid/dot"] / math.sqrt(s["grid/step2"] * s["grid/rounded2"])),
    Metric("grid/noise_sigma", "1", "standard deviation of the noise in the engine's norms", "neither",
           lambda s: s["grid/noise_sigma"]),
    Metric("error_tokens/frac", "1",
           "share of tokens that a quantized engine drew with more than 4 times the trainer's probability", "worse",
           mean("error_tokens/errors")),
    Metric("error_tokens/repeated_frac", "1",
           "share of these that end a 3-gram which their response has had before", "worse",
           mean("error_tokens/repeated", "error_tokens/errors")),
    Metric("error_tokens/late_frac", "1", "share of these in the second half of their response", "neither",
           mean("error_tokens/late", "error_tokens/errors")),
    Metric("error_tokens/repetition_frac", "1",
           "share of all tokens of a quantized engine that end a 3-gram which their response has had before", "worse",
           mean("error_tokens/repetitions")),
    Metric("objective/clip_frac_active", "1", "share of tokens whose loss a clip changed", "worse",
           mean("objective/clipped")),
]  # fmt: skip
METRICS: dict[str, Metric] = {row.name: row for row in _ROWS}
"""Every metric by its name (docs/metrics.md): unit, formula, and whether larger is better or worse."""
