"""`Timeline`: statistics and histograms of every step, on a grid that never grows beyond its limit.

Steps share a point of the grid where their number, divided by the grid's width, is the same. The
width is the smallest power of two that leaves at most `MAX_POINTS`: it depends on which steps there
are and not on the order in which parts were merged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from offdrift.divergence.evidence import Divergence
from offdrift.logprobs import LogProbs
from offdrift.ratios import stopped_log_ratio
from offdrift.records.batch import Logged
from offdrift.records.rollouts import OLD_STATUS
from offdrift.stats import DriftStats, Histogram, signature, summarize
from offdrift.stats.histogram import LENGTH, LOG_RATIO, REWARD
from offdrift.stats.signature import PerSequence

MAX_POINTS = 2000
MAX_STEPS_SEEN = 2**20
"""Distinct step numbers that are remembered, to count and to name them."""


@dataclass(frozen=True)
class Point:
    """Statistics and histograms of one step."""

    stats: DriftStats
    histograms: Mapping[str, Histogram]
    """By name: "mismatch/log_ratio", "reward", "response_length", ..."""

    @staticmethod
    def of(batch: Logged, per_sequence: Mapping[str, PerSequence]) -> Point:
        """Summarize the sequences of one step.

        Args:
            batch: what was logged.
            per_sequence: sums of each sequence by ratio.
        """
        logprobs = None  # what ratios can be made of
        if batch.num_tokens and batch.logp_rollout is not None:
            logprobs = batch.logprobs()
        elif batch.num_tokens and batch.pairs:
            logprobs = batch.trained()
        histograms = {"response_length": Histogram.of(batch.response_lengths.double(), LENGTH)}
        if batch.rewards is not None:
            histograms["reward"] = Histogram.of(batch.rewards[batch.rewards.isfinite()], REWARD)
        stats = _scored(batch, logprobs, per_sequence)
        for on in () if logprobs is None else (on for on in logprobs.stopped if on in batch.pairs):
            raw = stopped_log_ratio(logprobs, on=on)  # type: ignore[arg-type]
            histograms[f"{on}/log_ratio"] = Histogram.of(raw, LOG_RATIO)
        sums, maxima = _facts(batch)
        return Point(stats.plus(sums, maxima), histograms)

    def merge(self, other: Point) -> Point:
        """Both together."""
        histograms = dict(self.histograms)
        for name, h in other.histograms.items():
            histograms[name] = histograms[name].merge(h) if name in histograms else h
        return Point(self.stats.merge(other.stats), histograms)

    def metrics(self) -> dict[str, float]:
        """Every metric of the table that was logged."""
        sums = {}
        for name, h in self.histograms.items():
            if name.endswith("/log_ratio") and h.n:
                on = name.removesuffix("/log_ratio")
                sums[f"{on}/k3_top"], sums[f"{on}/k3_binned"] = h.k3_top()
        return summarize(self.stats.plus(sums))

    def counted(self, name: str) -> int:
        """One of the counts: "sequences", or "n", the scored tokens."""
        return int(self.stats.sums[self.stats.sum_names.index(name)])

    def quantiles(self) -> dict[str, dict[str, float]]:
        """Quantiles of each histogram."""
        return {name: h.quantiles() for name, h in self.histograms.items() if h.n}


def _scored(batch: Logged, logprobs: LogProbs | None, per_sequence: Mapping[str, PerSequence]) -> DriftStats:
    """What the log-probs say.

    Divergences by position are in the facets: a vector of the horizon at every step is not kept.
    """
    if logprobs is None:
        nothing, grade = (torch.zeros(2, dtype=torch.float64), "exact" if batch.divergences else "sampled")
        return DriftStats(("n", "b"), nothing, (), nothing[:0], (), nothing[:0], {}, grade)
    exact = {k: Divergence.exact(k, x) for k, x in batch.divergences.items()}  # type: ignore[arg-type]
    stats = replace(DriftStats.of(logprobs, divergences=exact), by_position={})
    shape = signature(logprobs, advantages=batch.advantages, position=batch.position, per_sequence=dict(per_sequence))
    counts = {f"divergence/{name}/n": float(batch.num_tokens) for name in exact}
    stats = stats.plus(shape | counts)
    return stats if batch.logp_rollout is not None else stats.only("n", "b", "staleness/", "diverg")


def _facts(batch: Logged) -> tuple[dict[str, Tensor | float], dict[str, Tensor | float]]:
    """Rewards, lengths, lags and entropy, each with its own count: a log may lack any of them."""
    b, n, length = batch.num_sequences, batch.num_tokens, batch.response_lengths
    sums: dict[str, Tensor | float] = {"sequences": float(b), "length": length.sum(), "length/n": float(b)}
    maxima: dict[str, Tensor | float] = {"length_max": length.max()} if b else {}
    if batch.trainable is not None:
        sums["unscored"] = float(batch.trainable.sum()) - n
    if batch.rewards is not None:
        finite = batch.rewards.isfinite()
        sums |= {"reward": batch.rewards.double().where(finite, 0.0).sum(), "reward/n": finite.sum()}
    if batch.truncated is not None:
        sums |= {"truncated": batch.truncated.count_nonzero(), "truncated/n": float(b)}
    if batch.old_status is not None and n:
        status, lengths = batch.old_status, batch.segments.lengths.double()
        stated = (status >= 0) & (status < len(OLD_STATUS))  # a log may say anything
        for code, name in enumerate(OLD_STATUS):
            sums[f"old/{name}"] = lengths.where(status == code, 0.0).sum()
            sums[f"old/{name}/n"] = lengths.where(stated, 0.0).sum()
    if batch.lag is not None and batch.version is not None and n:
        sums |= {"version_lag": batch.lag.sum(), "version_lag/n": float(n)}
        maxima["version_lag_max"] = batch.lag.max()
        maxima["-version_lag_min"] = -batch.lag.min()
        maxima |= {"version_max": batch.version.max(), "-version_min": -batch.version.min()}
    if batch.entropy is not None and n:
        sums |= {"current/entropy": batch.entropy.double().sum(), "current/entropy/n": float(n)}
    return sums, maxima


@dataclass(frozen=True)
class Timeline:
    """Points by their number on the grid."""

    width: int = 1
    points: Mapping[int, Point] = field(default_factory=dict)
    steps: Int[np.ndarray, " steps"] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """The distinct step numbers, ascending; at most `MAX_STEPS_SEEN`."""

    def merge(self, other: Timeline) -> Timeline:
        """Both together, on the wider grid of the two or, if that is too fine, a wider one."""
        width = max(self.width, other.width)
        points = dict(self.widened(width).points)
        for key, point in other.widened(width).points.items():
            points[key] = points[key].merge(point) if key in points else point
        steps = np.union1d(self.steps, other.steps)[:MAX_STEPS_SEEN]
        merged = Timeline(width, points, steps)
        return merged.widened(width * width_for(np.fromiter(points, np.int64)))

    def widened(self, width: int) -> Timeline:
        """The same on a wider grid; its width is a multiple of this one's."""
        if width == self.width:
            return self
        points: dict[int, Point] = {}
        for key in sorted(self.points):
            wide = key * self.width // width
            points[wide] = points[wide].merge(self.points[key]) if wide in points else self.points[key]
        return Timeline(width, points, self.steps)

    def whole(self) -> Point:
        """Everything, added up in the order of steps."""
        first, *rest = (self.points[key] for key in sorted(self.points))
        for point in rest:
            first = first.merge(point)
        return first

    def rows(self) -> list[dict[str, Any]]:
        """One row for each point, in order: the first step in it, counts, metrics and quantiles."""
        table = []
        for key, point in sorted(self.points.items()):
            at = np.searchsorted(self.steps, key * self.width)
            step = int(self.steps[at]) if at < len(self.steps) else key * self.width
            counts = {"sequences": point.counted("sequences"), "tokens": point.counted("n")}
            table.append({"step": step, **counts, **point.metrics(), "quantiles": point.quantiles()})
        return table


def width_for(steps: Int[np.ndarray, " s"]) -> int:
    """The smallest power of two that leaves at most `MAX_POINTS` distinct values of step // width.

    Example:
        >>> width_for(np.arange(2000)), width_for(np.arange(1, 2001)), width_for(np.arange(1, 2002))
        (1, 1, 2)
    """
    width = 1
    while len(np.unique(steps // width)) > MAX_POINTS:
        width *= 2
    return width
