"""Measure the zero-update mismatch of two engines: tokens of one draw, scored again with the same weights.

Nothing was trained between sampling and scoring, so the old policy and the current policy are the same,
and every difference from the recorded policy comes from the engines.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from offdrift.check.bench import Bench, EngineSpec, Pair
from offdrift.check.rescore import THETAS, Scored
from offdrift.divergence.evidence import Divergence
from offdrift.records.batch import Logged
from offdrift.records.rollouts import Rollouts
from offdrift.stats import DriftStats, signature, summarize

NAN = math.nan


@dataclass(frozen=True)
class Measured:
    """How far two engines with the same weights are apart. NaN where the evidence does not say.

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
    """How far the drawn tokens' surprise is from what the recorded distribution expects, in standard
    errors of a normal variable that is out there as rarely: beyond 5, they were not drawn from it."""
    tail_log_ratio_cap: float | None = None
    """Smallest cap on the tail's |log mu - log pi| whose upper end, with the top 20 recorded, covers
    the exact KL of 99 % of tokens, nats. None without full evidence, or if there is no tail."""
    tail_log_ratio_cap_all: float | None = None
    """The same for every token."""
    delta_router: float = NAN
    """Share of a layer's experts whose membership differs between the engines, mean over positions and
    layers (`engines.routing.flip_rate`). NaN of dense models and where routing was not compared."""
    by_sequence: Mapping[str, Shaped[Tensor, " b"]] = field(default_factory=dict, repr=False)
    """Per sequence: `length`, `kl_mean`, `kl_max`, `tv_max`, `log_ratio_sum`, `abs_log_ratio_max`."""
    logged: Logged | None = field(default=None, repr=False)
    """The tokens as a training log would hold them, exact divergences included."""


def measure(
    bench: Bench, rollouts: Rollouts, train: EngineSpec, *, details: bool = False
) -> Measured:
    """Score a draw with the training engine and say how far the two are apart.

    Args:
        bench: holds the weights of both.
        rollouts: of the rollout engine; `Bench.rollouts` records what exact divergences need.
        train: the training engine.
        details: also `drawn_z` and the caps on the tail.

    Example:
        measure(bench, bench.rollouts(rollout), train).kl_mean
    """
    return measured(rollouts, bench.score(rollouts, train, details=details))


def measured(rollouts: Rollouts, scored: Scored) -> Measured:
    """`Measured` of a draw and its scores."""
    log = logged(rollouts, scored)
    metrics = metrics_of(log)
    by_sequence = _by_sequence(log)
    kl, tv = scored.kl, scored.tv
    cap, cap_all = _caps(scored.tail_cap)
    return Measured(
        kl_mean=_mean(kl),
        kl_max=_max(kl),
        tv_mean=_mean(tv),
        tv_max=_max(tv),
        abs_log_ratio_max=metrics["mismatch/abs_log_ratio_max"],
        pearson=metrics["mismatch/pearson"],
        chi2_token=metrics["mismatch/chi2_token"],
        tokens=len(rollouts.tokens),
        sequences=rollouts.num_sequences,
        metrics=metrics,
        kl_se=NAN if kl is None else clustered_error(kl, log),
        tv_p95=NAN if tv is None else float(torch.quantile(tv.double(), 0.95)),
        chi2_exact=_mean(scored.chi2),
        record_deviation=_mean(
            None
            if scored.logp_recorded is None
            else (scored.logp_recorded - rollouts.logp_rollout).abs()
        ),
        drawn_z=_drawn_z(scored),
        tail_log_ratio_cap=cap,
        tail_log_ratio_cap_all=cap_all,
        by_sequence=by_sequence,
        logged=log,
    )


def logged(rollouts: Rollouts, scored: Scored) -> Logged:
    """The draw as a training log would hold it at its first step, before any update."""
    divergences: dict[str, Tensor] = {}
    for policy in ("old", "current"):
        if scored.kl is not None and scored.tv is not None:
            divergences |= {f"kl_rollout_{policy}": scored.kl, f"tv_rollout_{policy}": scored.tv}
    b = rollouts.num_sequences
    return Logged(
        cu_seqlens=rollouts.cu_seqlens,
        step=torch.zeros(b, dtype=torch.int64),
        row=torch.arange(1, b + 1),
        response_lengths=rollouts.lengths,
        logp_rollout=rollouts.logp_rollout,
        logp_old=scored.logp,
        logp=scored.logp,
        group_ids=rollouts.group_ids,
        entropy=scored.entropy,
        divergences=divergences,
        tokens=rollouts.tokens,
        truncated=torch.tensor([int(f == "length") for f in rollouts.finish]),
    )


def metrics_of(log: Logged) -> dict[str, float]:
    """Every metric that the log allows; none about updates, of which there were none."""
    divergences = {name: Divergence.exact(name, x) for name, x in log.divergences.items()}
    logprobs = log.logprobs()
    stats = DriftStats.of(logprobs, divergences=divergences).plus(signature(logprobs))
    found = summarize(stats)
    return {name: x for name, x in found.items() if not name.startswith("staleness/")}


def clustered_error(x: Float[Tensor, " n"], log: Logged) -> float:
    """Standard error of a mean over tokens, if sequences are the independent draws; NaN for one.

    sqrt(b / (b - 1) sum_i (S_i - xbar T_i)^2) / n,   S_i the sum over sequence i, T_i its length
    """
    b, n = log.num_sequences, log.num_tokens
    if b < 2:
        return NAN
    x = x.double()
    residuals = log.segments.sum(x - x.mean())
    return math.sqrt(b / (b - 1) * float(residuals.square().sum())) / n


def _by_sequence(log: Logged) -> dict[str, Tensor]:
    segments = log.segments
    assert log.logp_old is not None
    assert log.logp_rollout is not None
    ratio = log.logp_old - log.logp_rollout
    found = {
        "length": segments.lengths,
        "log_ratio_sum": segments.sum(ratio),
        "abs_log_ratio_max": segments.max(ratio.abs()),
    }
    if "kl_rollout_old" in log.divergences:
        kl, tv = log.divergences["kl_rollout_old"], log.divergences["tv_rollout_old"]
        found |= {"kl_mean": segments.mean(kl), "kl_max": segments.max(kl), "tv_max": segments.max(tv)}  # fmt: skip
    return found


def _drawn_z(scored: Scored) -> float:
    """How many standard errors of a normal sum are as rare as this sum of surprises; NaN if none could be.

        sign(S) sqrt(2 L)      L = max_theta theta S - sum_t log E e^(theta s_t)      S = sum_t s_t

    P(S is as far out) <= e^-L for any distribution (Chernoff); for a normal one sqrt(2 L) is its z, up to
    the grid of thetas, which lowers it by at most a tenth. A variance alone would not do: a token that is
    nearly sure is rarely, and then by many standard deviations, another one.
    """
    if scored.surprise is None or scored.surprise_cgf is None:
        return NAN
    total = float(scored.surprise.double().sum())
    price = scored.surprise_cgf.double().sum(0).tolist()
    if not any(price):
        return NAN
    rate = max(theta * total - cost for theta, cost in zip(THETAS, price, strict=True))
    return math.copysign(math.sqrt(2 * max(rate, 0.0)), total)


def _caps(caps: Float[Tensor, " n"] | None) -> tuple[float | None, float | None]:
    if caps is None or not bool((caps > 0).any()):
        return None, None
    ordered = caps.double().sort().values
    at = math.ceil(0.99 * len(ordered)) - 1  # the smallest that covers 99 % of tokens
    return float(ordered[at]), float(ordered[-1])


def _mean(x: Float[Tensor, " n"] | None) -> float:
    return NAN if x is None else float(x.double().mean())


def _max(x: Float[Tensor, " n"] | None) -> float:
    return NAN if x is None else float(x.max())


Side = Literal["rollout", "train", "sampling", "sync", "routing"]
"""Where a factor acts."""

Status = Literal["ran", "not offered", "failed", "skipped"]


@dataclass(frozen=True)
class Outcome:
    """What one change did to the mismatch. NaN where nothing was measured."""

    factor: str
    what: str
    """The question in one line."""
    side: Side
    changed: str = ""
    """What was changed, in words: "float32 instead of bfloat16"."""
    kl_mean: float = NAN
    """Mean over tokens of KL(rollout || train) after the change, nats."""
    kl_max: float = NAN
    tv_max: float = NAN
    abs_log_ratio_max: float = NAN
    pearson: float = NAN
    baseline_kl_mean: float = NAN
    """The same mean before the change."""
    status: Status = "ran"
    why: str = ""
    """Why it did not run, or one sentence on what the numbers say."""
    seconds: float = 0.0

    @staticmethod
    def without(factor: Factor, status: Status, why: str, *, seconds: float = 0.0) -> Outcome:
        """The row of a factor that was not measured, and why."""
        return Outcome(
            factor.name, factor.what, factor.side, status=status, why=why, seconds=seconds
        )

    @property
    def ratio(self) -> float:
        """The change's mean KL over the baseline's; NaN where there is none to compare."""
        if not self.baseline_kl_mean > 0:
            return math.nan
        return self.kl_mean / self.baseline_kl_mean

    def as_dict(self) -> dict[str, Any]:
        """The row as it stands in `check.json`."""
        return {**asdict(self), "ratio": self.ratio}


@runtime_checkable
class Factor(Protocol):
    """One thing that may set two engines apart, and the experiment that shows how far."""

    @property
    def name(self) -> str: ...

    @property
    def what(self) -> str: ...

    @property
    def side(self) -> Side: ...

    def applies(self, bench: Bench, rollout: EngineSpec, train: EngineSpec) -> str | None:
        """Why these engines do not have it; None if they do."""
        ...

    def run(self, bench: Bench, pair: Pair, baseline: Measured) -> Outcome:
        """Change this one thing, measure again.

        What these engines do not have is an outcome of status "not offered", not an error.
        """
        ...
