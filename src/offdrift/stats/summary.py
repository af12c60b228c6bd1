"""The metric table: name, unit, formula, direction. What is not a row here cannot be logged.

Each row computes one number from the host copy of `DriftStats`. A metric whose inputs are absent or
empty is NaN, never 0, and never an exception. Metrics are computed on the raw ratios of all sampled
tokens: they do not change with the correction that was chosen.
"""

from __future__ import annotations

import math

from offdrift.stats.drift import DriftStats
from offdrift.stats.metric import Metric as Metric
from offdrift.stats.metric import Numbers, ess, mean, std
from offdrift.stats.pairs import drift, shape
from offdrift.stats.proxies import PROXIES

MAX_GATES = 8
"""Gates of one method that are counted apart; all of them count together in `gate/drop_frac_*`."""


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
            value = metric.value(numbers)
            nothing = math.isinf(value) and not numbers.get("n", 1)  # the extreme of no tokens
            found[metric.name] = math.nan if nothing else value
        except KeyError:  # this ratio, gate or divergence was not part of the batch
            continue
        except (ZeroDivisionError, ValueError, OverflowError):
            found[metric.name] = math.nan
    return found


def _policy(name: str, count: str) -> list[Metric]:
    """Perplexities of one policy, over the sequences that it scored."""
    return [
        Metric(f"{name}/log_ppl", "nat", "mean over sequences of mean(-log p)", "neither", mean(f"{name}/nll", count)),
        Metric(f"{name}/ppl", "1", "mean over sequences of e^(mean(-log p))", "neither", mean(f"{name}/ppl", count)),
    ]  # fmt: skip


def _divergence(name: str, unit: str) -> list[Metric]:
    key = f"divergence/{name}"
    return [
        Metric(f"{key}_mean", unit, f"mean over tokens of {name}", "worse", mean(key)),
        Metric(
            f"{key}_max", unit, f"max over tokens of {name}", "worse", lambda s: s[f"{key}_max"]
        ),
    ]


def _mean_length(s: Numbers) -> float:
    """Of whole responses where a log says how long they were; of what was scored elsewhere."""
    return s["length"] / s["length/n"] if "length" in s else s["n"] / s["b"]


def _tokens(s: Numbers) -> float:
    """Of the step: those that the engine scored, which everything else is about, and the others."""
    return s["n"] + s.get("unscored", 0.0)


_ROWS = [
    *drift("mismatch", "pi_old", "mu"),
    *shape("mismatch", "pi_old"),
    *drift("staleness", "pi", "pi_old"),
    Metric("staleness/clip_frac", "1", "share of tokens whose PPO clip at 0.2 acts: e^l > 1.2 and A > 0, or e^l < 0.8 and A < 0; either side where A was not logged", "worse", mean("staleness/clipped")),
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
    Metric("weight/mean", "1", "mean weight, after limits", "neither", mean("weight/w")),
    Metric("weight/std", "1", "standard deviation of the weight, after limits", "worse", std("weight/w", "weight/w2", "n", ddof=0)),
    Metric("weight/max", "1", "largest weight, after limits", "worse", lambda s: s["weight/w_max"]),
    Metric("weight/min", "1", "smallest weight, after limits", "neither", lambda s: -s["weight/-w_min"]),
    Metric("weight/ess_frac", "1", "(sum w)^2 / (n sum w^2), per token, after limits", "better", ess("weight/log_w", "weight/log_w2", "n")),
    Metric("weight/cap_frac", "1", "share of tokens whose weight met a limit", "worse", mean("weight/limited")),
    Metric("weight/changed_frac", "1", "share of tokens whose weight is not 1", "neither", mean("weight/changed")),
    Metric("gate/acceptance_seq", "1", "share of sequences with a kept token", "better", mean("gate/kept_sequences", "b")),
    Metric("gate/drop_frac_seq", "1", "share of sequences rejected whole", "worse", lambda s: 1 - s["gate/kept_sequences"] / s["b"]),
    Metric("gate/drop_frac_token", "1", "share of tokens rejected", "worse", lambda s: 1 - s["gate/kept_tokens"] / s["n"]),
    Metric("reward/mean", "task", "mean reward of the batch's sequences", "better", mean("reward", "b")),
    Metric("response/length_mean", "token", "mean response length", "neither", _mean_length),
    Metric("response/length_max", "token", "longest response", "neither", lambda s: s["length_max"]),
    Metric("response/truncated_frac", "1", "share of responses that the length limit cut off", "neither", lambda s: s["truncated"] / s["truncated/n"]),
    Metric("version_lag/mean", "step", "mean over tokens of updates since its weights", "worse", mean("version_lag")),
    Metric("version_lag/max", "step", "most updates since a token's weights", "worse", lambda s: s["version_lag_max"]),
    Metric("old/exact_frac", "1", "share of tokens whose old log-prob is the training engine's at the weights that drew them", "better", mean("old/exact")),
    Metric("old/stale_frac", "1", "share of tokens whose old log-prob was taken at other weights: their mismatch contains staleness", "worse", mean("old/stale")),
    Metric("old/approximated_frac", "1", "share of tokens whose old log-prob is an averaged or interpolated policy's", "neither", mean("old/approximated")),
    Metric("old/missing_frac", "1", "share of tokens whose old log-prob is the rollout policy's own (bypass)", "neither", mean("old/missing")),
    Metric("old/version_lag", "step", "most updates between a token's weights and those that scored it as the old policy", "worse", lambda s: s["old/version_lag"]),
    Metric("batch/tokens", "token", "response tokens of the step, over all processes", "neither", _tokens),
    Metric("batch/unscored_tokens", "token", "tokens that the engine did not score (rollout log-prob of -1000 nats or less): left out of every metric of ratios, never trained", "worse", lambda s: 0 * s["n"] + s.get("unscored", 0.0)),
    Metric("batch/unscored_frac", "1", "share of the step's tokens that the engine did not score", "worse", lambda s: s.get("unscored", 0.0) / _tokens(s)),
    Metric("current/entropy", "nat", "mean entropy of the current policy", "neither", mean("current/entropy")),
    Metric("optim/loss", "task", "loss of the step, over all pieces and processes", "neither", lambda s: s["optim/loss"]),
    Metric("optim/grad_norm", "1", "global gradient norm before clipping", "neither", lambda s: s["optim/grad_norm"]),
    *(
        Metric(f"gate/{i}/drop_frac_token", "1", f"share of tokens that gate {i} alone rejects", "worse", mean(f"gate/{i}/rejected_tokens"))
        for i in range(MAX_GATES)
    ),
    *(
        Metric(f"gate/{i}/rejected_{on}", "nat", f"mean over the sequences that gate {i} rejects of mean(-l), l the {on} log-ratio: its part of what they were rejected for", "worse", mean(f"gate/{i}/rejected_{on}", f"gate/{i}/rejected_sequences"))
        for i in range(MAX_GATES) for on in ("mismatch", "staleness")
    ),
    Metric("reference/kl", "nat", "mean over tokens of the KL to the reference policy, by the penalty's estimator", "neither", mean("reference/kl")),
    Metric("optim/lr_scale", "1", "what the method multiplied the learning rate by", "neither", lambda s: s["optim/lr_scale"]),
    *PROXIES,
    Metric("objective/clip_frac_active", "1", "share of tokens whose loss a clip changed", "worse", mean("objective/clipped")),
]  # fmt: skip
METRICS: dict[str, Metric] = {row.name: row for row in _ROWS}
