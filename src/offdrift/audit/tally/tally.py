"""`Tally`: everything that an audit says about a log, as numbers that can be added.

One batch of logged sequences becomes a tally in one pass; tallies merge. Merged in the order of the
pieces of a log, the numbers are the same to the last bit whoever computed the parts: a batch is
summed by one thread, in blocks whose bounds depend on the batch alone.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from offdrift.audit.tally.arrays import packed, unpacked
from offdrift.audit.tally.facets import Facets, by_step, chunks, runs
from offdrift.audit.tally.timeline import Point, Timeline, width_for
from offdrift.audit.tally.worst import Worst
from offdrift.logprobs import LogProbs
from offdrift.numerics import one_thread
from offdrift.records.batch import Logged
from offdrift.records.schema import HELD
from offdrift.stats.signature import PerSequence

LAGS = ("version_lag/mean", "version_lag/max")


@dataclass(frozen=True)
class Tally:
    """Counts, a timeline, facets and the worst of any number of batches."""

    counts: Mapping[str, int] = field(default_factory=dict)
    """"rows", "sequences", "tokens"; "has/FIELD", the sequences that hold a field;
    "trainable", the tokens that may train, scored or not; "compared", those that two policies score;
    "partly", those that two policies score and a third does not; "unscored/FIELD/CAUSE", those that
    a policy does not score; "empty", the responses without a token; "ahead", tokens drawn by newer
    weights than were trained; "unit/UNIT", the sequences whose lengths are in that unit."""
    timeline: Timeline = field(default_factory=Timeline)
    facets: Facets = field(default_factory=Facets)
    worst: Worst = field(default_factory=Worst)
    groups: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """Ids of the groups of sequences; one that several batches hold stands there several times."""

    @staticmethod
    def of(batch: Logged, *, file: str = "") -> Tally:
        """Summarize one batch of logged sequences.

        Args:
            batch: at least one sequence, in any order of steps.
            file: where it was logged.

        Raises: `BadValueError` if a log-prob is one that no policy can produce.

        Example:
            >>> log = Logged(cu_seqlens=torch.tensor([0, 2]), step=torch.tensor([1]),
            ...     row=torch.tensor([1]), response_lengths=torch.tensor([2]),
            ...     logp_rollout=torch.tensor([-1.0, -2.0]), logp=torch.tensor([-1.1, -1.9]))
            >>> round(Tally.of(log).as_dict()["overall"]["full/k3"], 5)
            0.005
        """
        with torch.no_grad(), one_thread():
            ordered = by_step(batch)
            seen = batch.step.unique().numpy()
            width = width_for(seen)
            parts = [_Part.of(chunk, width) for chunk in chunks(ordered)]
            timeline = functools.reduce(Timeline.merge, (p.timeline for p in parts))
            facets = functools.reduce(Facets.merge, (p.facets for p in parts))
            worst = _worst(ordered, parts, file)
        groups = Tally().groups if batch.group_ids is None else batch.group_ids.unique().numpy()
        return Tally(_counts(batch), Timeline(width, timeline.points, seen), facets, worst, groups)

    @staticmethod
    def over(batches: Sequence[Logged], *, file: str = "") -> Tally:
        """Summarize batches of one reading, which may hold different fields.

        Args:
            batches: at least one with a sequence.
            file: where they were logged.
        """
        filled = [b for b in batches if b.num_sequences]
        return functools.reduce(Tally.merge, (Tally.of(b, file=file) for b in filled))

    @property
    def tokens(self) -> int:
        """Scored tokens."""
        return self.counts.get("tokens", 0)

    def merge(self, other: Tally) -> Tally:
        """Both together. Associative up to rounding; in one order of parts, to the last bit."""
        return Tally(
            dict(Counter(self.counts) + Counter(other.counts)),
            self.timeline.merge(other.timeline),
            self.facets.merge(other.facets),
            self.worst.merge(other.worst),
            np.concatenate([self.groups, other.groups]),
        )

    def to_arrays(self) -> dict[str, np.ndarray]:
        """The tally as plain numeric arrays, which `numpy.savez` stores without pickle."""
        arrays = packed(self.counts, self.timeline, self.facets, self.worst)
        return {**arrays, "groups": self.groups}

    @staticmethod
    def from_arrays(arrays: Mapping[str, np.ndarray]) -> Tally:
        """The tally that `to_arrays` was called on, to the last bit.

        Raises: `KeyError` or `ValueError` if the arrays are not a tally's.
        """
        return Tally(*unpacked(arrays), arrays["groups"])

    def as_dict(self) -> dict[str, Any]:
        """What an audit reports, as plain data; what cannot be known is NaN or left out.

        counts       rows, sequences, tokens, steps, prompts (groups of sequences), dropped tokens by field, the unit of response lengths
        has          fields that at least one sequence holds; versions that never change are none
        overall      metrics of the whole log; grade and quantiles are beside it
        steps        the same of each step; beyond 2000 steps, of `steps_per_point` step numbers
        histograms   of the log-ratio by ratio
        facets       metrics by length, position, advantage, lag and token class
        worst        sequences and tokens
        """
        whole, timeline = self.timeline.whole(), self.timeline
        told = {
            "counts": self._counts_as_dict(),
            "has": [k.removeprefix("has/") for k in self.counts if k.startswith("has/")],
            "overall": whole.metrics(),
            "quantiles": whole.quantiles(),
            "grade": whole.stats.grade,
            "steps": timeline.rows(),
            "steps_per_point": timeline.width,
            "histograms": {
                name.removesuffix("/log_ratio"): h.as_dict()
                for name, h in whole.histograms.items()
                if name.endswith("/log_ratio")
            },
            "facets": self.facets.rows(),
            "worst": self.worst.as_dict(),
        }
        frozen = len(timeline.seen) > 1 and still(self.versions)
        return without_lag(told) if frozen else told

    @property
    def versions(self) -> tuple[float, ...] | None:
        """Newest and oldest trained version, largest and smallest lag; None if the log has no versions."""
        numbers = self.timeline.whole().stats.to_host() if self.timeline.points else {}
        if "version_max" not in numbers:
            return None
        return (
            numbers["version_max"],
            -numbers["-version_min"],
            numbers["version_lag_max"],
            -numbers["-version_lag_min"],
        )

    def _counts_as_dict(self) -> dict[str, Any]:
        def under(prefix: str) -> dict[str, int]:
            return {k.removeprefix(prefix): n for k, n in self.counts.items() if k.startswith(prefix)}

        units = list(under("unit/"))
        return {
            "rows": self.counts["rows"],
            "sequences": self.counts["sequences"],
            "tokens": self.tokens,
            "steps": len(self.timeline.seen),
            "prompts": len(np.unique(self.groups)) or None,
            "trainable": self.counts.get("trainable", self.tokens),
            "unscored": _by_field(under("unscored/")),
            "empty": self.counts.get("empty", 0),
            "length_unit": units[0] if len(units) == 1 else "mixed",
        }


def _by_field(unscored: Mapping[str, int]) -> dict[str, int]:
    """Tokens that each policy does not score, for whatever cause."""
    found: Counter[str] = Counter()
    for name, n in unscored.items():
        found[name.partition("/")[0]] += n
    return dict(found)


def still(versions: tuple[float, ...] | None) -> bool:
    """Whether no version ever changes: over several steps, a counter that nobody moves."""
    if versions is None:
        return False
    newest, oldest, most, least = versions
    return newest == oldest and most == least


def without_lag(told: dict[str, Any]) -> dict[str, Any]:
    """What a tally tells, as of a log without versions: a counter that stands still says nothing of age."""
    return {
        **told,
        "has": [name for name in told["has"] if name not in ("version", "rollout_version")],
        "overall": ageless(told["overall"]),
        "steps": [ageless(step) for step in told["steps"]],
        "facets": {**told["facets"], "lag": []},
    }


def ageless(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of metrics without lags."""
    return {name: x for name, x in row.items() if name not in LAGS}


@dataclass(frozen=True)
class _Part:
    """A chunk of a batch."""

    timeline: Timeline
    facets: Facets
    per_sequence: dict[str, PerSequence]
    """By ratio to the rollout policy; the first is what drift is judged by."""

    @staticmethod
    def of(batch: Logged, width: int) -> _Part:
        """Summarize sequences in order of steps."""
        facets, own = Facets.of(batch)
        points = dict(_points(batch, own, width))
        return _Part(Timeline(width, points), facets, own)


def _points(batch: Logged, per_sequence: dict[str, PerSequence], width: int) -> Iterator[tuple[int, Point]]:
    """A point for each run of steps."""
    first = 0
    for key, run in runs(batch, width):
        last = first + run.num_sequences
        own = {on: s.select(first, last) for on, s in per_sequence.items()}
        yield key, Point.of(run, _logprobs(run), own)
        first = last


def _logprobs(run: Logged) -> LogProbs | None:
    """What ratios can be made of; None if nothing."""
    if run.num_tokens and run.logp_rollout is not None:
        return run.logprobs()
    return run.trained() if run.num_tokens and run.pairs else None


def _worst(batch: Logged, parts: list[_Part], file: str) -> Worst:
    """The worst of the whole batch; a chunk without tokens has sequences too, but no sums."""
    if batch.logp_rollout is None or not batch.num_tokens or not (held := parts[0].per_sequence):
        return Worst()
    on = next(iter(held))
    return Worst.of(batch, on, PerSequence.cat([p.per_sequence[on] for p in parts]), file=file)


def _counts(batch: Logged) -> dict[str, int]:
    b = batch.num_sequences
    counts = {"rows": len(batch.row.unique()), "sequences": b, "tokens": batch.num_tokens}
    fields = [name for name in HELD if getattr(batch, name) is not None]
    counts |= {f"has/{name}": b for name in (*fields, *batch.divergences)}
    trainable = batch.cu_seqlens.diff() if batch.trainable is None else batch.trainable
    unscored = {name: int(n.sum()) for name, n in batch.unscored.items()}
    absent = [n for name, n in unscored.items() if getattr(batch, name.partition("/")[0], 0) is None]
    counts |= {f"unscored/{name}": n for name, n in unscored.items()}
    counts |= {
        "trainable": int(trainable.sum()),
        "compared": batch.num_tokens if batch.pairs else 0,
        "partly": max(absent, default=0) if batch.pairs else 0,
        "empty": int((batch.response_lengths == 0).sum()) if batch.response_lengths.any() else 0,
        "ahead": batch.ahead,
    }
    return counts | {f"unit/{batch.length_unit}": b}
