"""`Tally`: everything that an audit counts in a log, as numbers that can be added.

One batch of logged sequences becomes a tally in one pass; tallies merge. Merged in the order of the
pieces of a log, the numbers are the same to the last bit whoever computed the parts: a batch is
summed by one thread, in blocks whose bounds depend on the batch alone.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from offdrift.audit.tally.facets import Facets, by_step, chunks, runs
from offdrift.audit.tally.timeline import Point, Timeline, width_for
from offdrift.audit.tally.worst import Worst
from offdrift.numerics import one_thread
from offdrift.records.batch import Logged
from offdrift.records.schema import HELD
from offdrift.stats import DriftStats, Histogram
from offdrift.stats.histogram import Grid
from offdrift.stats.signature import PerSequence

LAGS = ("version_lag/mean", "version_lag/max")
STATISTICS = {"sums": "sum_names", "maxima": "max_names", "logs": "log_names"}
"""The vectors of `DriftStats` and of `Facets`, and what names the entries of the former."""
HISTOGRAM = ("known", "counts", "moments", "extremes")
"""Arrays in which the histograms of one name are stored."""


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
            steps = batch.step.unique().numpy()
            width = width_for(steps)
            timeline, facets, per_sequence = Timeline(width), Facets(), []
            for chunk in chunks(ordered):
                own_facets, own = Facets.of(chunk)
                points, first = {}, 0
                for key, run in runs(chunk, width):
                    last = first + run.num_sequences
                    points[key] = Point.of(run, {on: s.select(first, last) for on, s in own.items()})
                    first = last
                timeline, facets = timeline.merge(Timeline(width, points)), facets.merge(own_facets)
                per_sequence.append(own)
            worst = Worst()
            # A chunk without tokens has sequences too, but no sums.
            if batch.logp_rollout is not None and batch.num_tokens and per_sequence[0]:
                on = next(iter(per_sequence[0]))  # the ratio that drift is judged by
                worst = Worst.of(ordered, on, PerSequence.cat([own[on] for own in per_sequence]), file=file)
        groups = Tally().groups if batch.group_ids is None else batch.group_ids.unique().numpy()
        return Tally(_counts(batch), Timeline(width, timeline.points, steps), facets, worst, groups)

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
        keys = sorted(self.timeline.points)
        points = [self.timeline.points[key] for key in keys]
        names = {
            kind: list(dict.fromkeys(n for p in points for n in getattr(p.stats, own)))
            for kind, own in STATISTICS.items()
        }
        grids = {name: h.grid for p in points for name, h in p.histograms.items()}
        header = {
            "counts": dict(self.counts),
            "width": self.timeline.width,
            **names,
            "grades": [p.stats.grade for p in points],
            "grids": {name: asdict(grid) for name, grid in grids.items()},
        }
        arrays = {
            "names": _text(header),
            "worst": _text(self.worst.as_dict()),
            "keys": np.array(keys, dtype=np.int64),
            "seen": self.timeline.steps,
            "groups": self.groups,
        }
        for kind, own in STATISTICS.items():  # named vectors as one table, and which of its entries there are
            column = {name: i for i, name in enumerate(names[kind])}
            table = np.zeros((len(points), len(column)))
            present = np.zeros(table.shape, dtype=np.bool_)
            for i, point in enumerate(points):
                at = [column[name] for name in getattr(point.stats, own)]
                table[i, at], present[i, at] = getattr(point.stats, kind).numpy(), True
            arrays |= {kind: table, f"{kind}/known": present}
            arrays |= {f"facets/{kind}/{name}": x for name, x in getattr(self.facets, kind).items()}
        for name, grid in grids.items():
            rows, key = [p.histograms.get(name) for p in points], f"histogram/{name}"
            empty = Histogram(grid, np.zeros(grid.bins, np.int64), np.zeros((2, grid.bins)))
            filled = [h or empty for h in rows]
            arrays |= {
                f"{key}/known": np.array([h is not None for h in rows]),
                f"{key}/counts": np.stack([h.counts for h in filled]),
                f"{key}/moments": np.stack([h.moments for h in filled]),
                f"{key}/extremes": np.array([(h.low, h.high) for h in filled]),
            }
        return arrays

    @staticmethod
    def from_arrays(arrays: Mapping[str, np.ndarray]) -> Tally:
        """The tally that `to_arrays` was called on, to the last bit.

        Raises: `KeyError` or `ValueError` if the arrays are not a tally's.
        """
        header, worst = (json.loads(arrays[name].astype(np.uint8).tobytes()) for name in ("names", "worst"))
        points = {}
        for i, key in enumerate(arrays["keys"].tolist()):
            vectors = []
            for kind in STATISTICS:
                present = arrays[f"{kind}/known"][i]
                vectors.append(tuple(n for n, there in zip(header[kind], present) if there))
                vectors.append(torch.from_numpy(arrays[kind][i][present]))
            histograms = {}
            for name, grid in header["grids"].items():
                present, counts, moments, extremes = (arrays[f"histogram/{name}/{x}"][i] for x in HISTOGRAM)
                if present:
                    histograms[name] = Histogram(Grid(**grid), counts, moments, *extremes.tolist())
            points[key] = Point(DriftStats(*vectors, by_position={}, grade=header["grades"][i]), histograms)
        facets = [
            {k.removeprefix(f"facets/{kind}/"): x for k, x in arrays.items() if k.startswith(f"facets/{kind}/")}
            for kind in STATISTICS
        ]
        return Tally(
            header["counts"],
            Timeline(header["width"], points, arrays["seen"]),
            Facets(*facets),
            Worst(tuple(worst["sequences"]), tuple(worst["tokens"])),
            arrays["groups"],
        )

    def as_dict(self) -> dict[str, Any]:
        """What an audit reports, as plain data; what cannot be known is NaN or left out.

        counts       rows, sequences, tokens, steps, prompts (groups of sequences), dropped tokens by field,
                     the unit of response lengths
        has          fields that at least one sequence holds; versions that never change are none
        overall      metrics of the whole log; grade and quantiles are beside it
        steps        the same of each step; beyond 2000 steps, of `steps_per_point` step numbers
        histograms   of the log-ratio by ratio
        facets       metrics by length, position, advantage, lag and token class
        worst        sequences and tokens
        """
        whole, timeline = self.timeline.whole(), self.timeline
        unscored: Counter[str] = Counter()  # tokens that each policy does not score, for whatever cause
        for name, n in self._under("unscored/").items():
            unscored[name.partition("/")[0]] += n
        units = list(self._under("unit/"))
        content = {
            "counts": {
                "rows": self.counts["rows"],
                "sequences": self.counts["sequences"],
                "tokens": self.tokens,
                "steps": len(timeline.steps),
                "prompts": len(np.unique(self.groups)) or None,
                "trainable": self.counts.get("trainable", self.tokens),
                "unscored": dict(unscored),
                "empty": self.counts.get("empty", 0),
                "length_unit": units[0] if len(units) == 1 else "mixed",
            },
            "has": list(self._under("has/")),
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
        if len(timeline.steps) > 1 and still(self.versions):
            # A counter that stands still says nothing of age: as of a log without versions.
            content |= {
                "has": [name for name in content["has"] if name not in ("version", "rollout_version")],
                "overall": ageless(content["overall"]),
                "steps": [ageless(step) for step in content["steps"]],
                "facets": {**content["facets"], "lag": []},
            }
        return content

    @property
    def versions(self) -> tuple[float, ...] | None:
        """Newest and oldest trained version, largest and smallest lag; None if the log has no versions."""
        numbers = self.timeline.whole().stats.to_host() if self.timeline.points else {}
        if "version_max" not in numbers:
            return None
        newest, lag = numbers["version_max"], numbers["version_lag_max"]
        return newest, -numbers["-version_min"], lag, -numbers["-version_lag_min"]

    def _under(self, prefix: str) -> dict[str, int]:
        return {k.removeprefix(prefix): n for k, n in self.counts.items() if k.startswith(prefix)}


def still(versions: tuple[float, ...] | None) -> bool:
    """Whether no version ever changes: over several steps, a counter that nobody moves."""
    if versions is None:
        return False
    newest, oldest, most, least = versions
    return newest == oldest and most == least


def ageless(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of metrics without lags."""
    return {name: x for name, x in row.items() if name not in LAGS}


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


def _text(value: Any) -> np.ndarray:
    """JSON as bytes: nothing in it is executable, and a float comes back to the last bit."""
    return np.frombuffer(json.dumps(value).encode("ascii"), dtype=np.uint8)
