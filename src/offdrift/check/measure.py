"""The zero-update mismatch of two engines: tokens that one sampled, scored by the other at the same weights.

No update lies between, so the old policy is the current one, and every difference comes from the engines.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from offdrift.check.bench import Bench, EngineSpec
from offdrift.check.rescore import THETAS, Scored
from offdrift.divergence.evidence import Divergence
from offdrift.records.batch import Logged
from offdrift.records.rollouts import Rollouts
from offdrift.segments import Segments
from offdrift.stats import DriftStats, signature, summarize

NAN = math.nan


@dataclass(frozen=True)
class Measured:
    """Divergences of two engines with the same weights. NaN where the evidence is missing.

    pi is the training engine, mu the policy that the rollout engine recorded.
    """

    kl_mean: float
    """Mean over tokens of KL(mu || pi), nats, exact."""
    kl_max: float
    tv_mean: float
    tv_max: float
    """TV(mu, pi), exact."""
    abs_log_ratio_max: float
    """Largest |log pi - log mu| of a drawn token, nats, with mu as the engine reported it."""
    pearson: float
    """Correlation of the two probabilities of the drawn tokens."""
    chi2_token: float
    """Mean of (pi / mu)^2, less 1, over drawn tokens: sampled, so noise may make it negative."""
    tokens: int
    sequences: int
    metrics: Mapping[str, float] = field(repr=False)
    """Every metric of the table that applies, by name."""
    kl_se: float = NAN
    """Standard error of `kl_mean`, sequences taken as the independent draws."""
    tv_p95: float = NAN
    chi2_exact: float = NAN
    """Mean over tokens of the exact chi2(pi || mu)."""
    record_deviation: float = NAN
    """Mean |reported log mu - recorded distribution's log mu| of the drawn tokens, nats: 0 up to
    rounding if the engine reports the distribution that it shows."""
    drawn_z: float = NAN
    """Deviation of the drawn tokens' surprise from what the recorded distribution expects, as the
    z-score of a normal variable with the same probability: beyond 5, they were not drawn from it."""
    tail_log_ratio_cap: float | None = None
    """Smallest cap on the tail's |log mu - log pi| whose upper end, with the top 20 recorded, covers
    the exact KL of 99 % of tokens, nats. None without full evidence, or if there is no tail."""
    tail_log_ratio_cap_all: float | None = None
    """The same for every token."""
    delta_router: float = NAN
    """Share of a layer's experts whose membership differs between the engines, mean over positions and
    layers (`engines.routing.flip_rate`). NaN of dense models and where routing was not compared."""
    kl_low: float = NAN
    """Mean of the certified lower ends of KL(mu || pi), nats, where only the likeliest tokens of mu are known."""
    kl_high: float = NAN
    """Mean of the upper ends."""
    logged: Logged | None = field(default=None, repr=False)
    """The tokens as a training log would hold them, exact divergences included."""

    @property
    def same_bits(self) -> bool:
        """Whether the engines agree to the last bit, in distributions too where these are recorded."""
        return self.abs_log_ratio_max == 0 and not self.kl_max > 0

    @property
    def kl_known(self) -> float:
        """Mean KL, nats: exact where distributions are recorded, else the estimate k3 of the drawn tokens."""
        return self.metrics.get("mismatch/k3", NAN) if math.isnan(self.kl_mean) else self.kl_mean

    def within(self, max_kl: float | None) -> bool:
        """Whether the mean KL is at most `max_kl`, nats; None: no limit.

        Without distributions the estimate is held against it, and it must not be certain that the KL is above.
        """
        return max_kl is None or (self.kl_known <= max_kl and not self.kl_low > max_kl)


def measure(bench: Bench, rollouts: Rollouts, train: EngineSpec, *, details: bool = False) -> Measured:
    """Score rollouts with the training engine and measure the divergence of the two engines.

    `Bench.rollouts` records what exact divergences need; `details` adds `drawn_z` and the caps on the tail.
    """
    return measured(rollouts, bench.score(rollouts, train, details=details))


def measured(rollouts: Rollouts, scored: Scored) -> Measured:
    """`Measured` of rollouts and their scores."""
    log = logged(rollouts, scored)
    metrics = metrics_of(log)
    kl, tv = scored.kl, scored.tv
    deviation = None
    if scored.logp_recorded is not None:
        deviation = (scored.logp_recorded - rollouts.logp_rollout).abs()
    cap = cap_all = None
    if scored.tail_cap is not None and bool((scored.tail_cap > 0).any()):
        ordered = scored.tail_cap.double().sort().values
        # The smallest that covers 99 % of tokens, and the one that covers all.
        cap, cap_all = float(ordered[math.ceil(0.99 * len(ordered)) - 1]), float(ordered[-1])
    return Measured(
        kl_mean=_mean(kl),
        kl_max=NAN if kl is None else float(kl.max()),
        tv_mean=_mean(tv),
        tv_max=NAN if tv is None else float(tv.max()),
        abs_log_ratio_max=metrics["mismatch/abs_log_ratio_max"],
        pearson=metrics["mismatch/pearson"],
        chi2_token=metrics["mismatch/chi2_token"],
        tokens=len(rollouts.tokens),
        sequences=rollouts.num_sequences,
        metrics=metrics,
        kl_se=NAN if kl is None else clustered_error(kl, log.segments),
        tv_p95=NAN if tv is None else float(torch.quantile(tv.double(), 0.95)),
        chi2_exact=_mean(scored.chi2),
        record_deviation=_mean(deviation),
        drawn_z=surprise_z(scored),
        tail_log_ratio_cap=cap,
        tail_log_ratio_cap_all=cap_all,
        kl_low=_mean(scored.kl_low),
        kl_high=_mean(scored.kl_high),
        logged=log,
    )


def logged(rollouts: Rollouts, scored: Scored) -> Logged:
    """The rollouts as a training log records them at its first step, before any update."""
    divergences: dict[str, Tensor] = {}
    for policy in ("old", "current"):
        if scored.kl is not None and scored.tv is not None:
            divergences |= {f"kl_rollout_{policy}": scored.kl, f"tv_rollout_{policy}": scored.tv}
    return Logged.of(
        rollouts,
        step=torch.zeros(rollouts.num_sequences, dtype=torch.int64),
        logp_old=scored.logp,
        logp=scored.logp,
        entropy=scored.entropy,
        divergences=divergences,
    )


def metrics_of(log: Logged) -> dict[str, float]:
    """Every metric that the log allows, without those of updates."""
    divergences = {name: Divergence.exact(name, x) for name, x in log.divergences.items()}
    logprobs = log.logprobs()
    stats = DriftStats.of(logprobs, divergences=divergences).plus(signature(logprobs))
    metrics = summarize(stats)
    return {name: x for name, x in metrics.items() if not name.startswith("staleness/")}


def clustered_error(x: Float[Tensor, " n"], segments: Segments) -> float:
    """Standard error of a mean over tokens, clustered by sequence; NaN for one sequence.

    sqrt(b / (b - 1) sum_i (S_i - xbar T_i)^2) / n,   S_i the sum over sequence i, T_i its length
    """
    b, n = len(segments.lengths), len(x)
    if b < 2:
        return NAN
    x = x.double()
    residuals = segments.sum(x - x.mean())
    return math.sqrt(b / (b - 1) * float(residuals.square().sum())) / n


def surprise_z(scored: Scored) -> float:
    """Normal z-score with the tail probability of this sum of surprises; NaN if all tokens are sure.

        sign(S) sqrt(2 L)      L = max_theta theta S - sum_t log E e^(theta s_t)      S = sum_t s_t

    P(S is as far out) <= e^-L for any distribution (Chernoff); for a normal one sqrt(2 L) is its z, up to
    the grid of thetas, which lowers it by at most a tenth. A variance alone would not do: a token that is
    nearly sure is rarely, and then by many standard deviations, another one.
    """
    if scored.surprise is None or scored.surprise_cgf is None:
        return NAN
    total = float(scored.surprise.double().sum())
    cgf = scored.surprise_cgf.double().sum(0).tolist()
    if not any(cgf):
        return NAN
    rate = max(theta * total - log_mgf for theta, log_mgf in zip(THETAS, cgf, strict=True))
    return math.copysign(math.sqrt(2 * max(rate, 0.0)), total)


def _mean(x: Float[Tensor, " n"] | None) -> float:
    return NAN if x is None else float(x.double().mean())
