"""A tally as arrays and back: numbers as they are, names and texts as JSON in bytes.

Nothing here is executable, and a float comes back to the last bit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from offdrift.audit.tally.facets import Facets
from offdrift.audit.tally.timeline import Point, Timeline
from offdrift.audit.tally.worst import Worst
from offdrift.stats import DriftStats, Histogram
from offdrift.stats.histogram import Grid

Arrays = dict[str, np.ndarray]


def packed(counts: Mapping[str, int], timeline: Timeline, facets: Facets, worst: Worst) -> dict[str, np.ndarray]:
    """What `unpacked` reads."""
    keys = sorted(timeline.points)
    points = [timeline.points[key] for key in keys]
    sum_names = list(dict.fromkeys(n for p in points for n in p.stats.sum_names))
    max_names = list(dict.fromkeys(n for p in points for n in p.stats.max_names))
    log_names = list(dict.fromkeys(n for p in points for n in p.stats.log_names))
    grids = {name: h.grid for p in points for name, h in p.histograms.items()}
    names = {
        "counts": dict(counts),
        "width": timeline.width,
        "sums": sum_names,
        "maxima": max_names,
        "logs": log_names,
        "grades": [p.stats.grade for p in points],
        "grids": {name: asdict(grid) for name, grid in grids.items()},
    }
    arrays = {
        "names": _text(names),
        "worst": _text(worst.as_dict()),
        "keys": np.array(keys, dtype=np.int64),
        "seen": timeline.seen,
        **_columns("sums", sum_names, [(p.stats.sum_names, p.stats.sums) for p in points]),
        **_columns("maxima", max_names, [(p.stats.max_names, p.stats.maxima) for p in points]),
        **_columns("logs", log_names, [(p.stats.log_names, p.stats.logs) for p in points]),
        **{f"facets/sums/{name}": x for name, x in facets.sums.items()},
        **{f"facets/maxima/{name}": x for name, x in facets.maxima.items()},
        **{f"facets/logs/{name}": x for name, x in facets.logs.items()},
    }
    for name, grid in grids.items():
        arrays |= _histograms(name, grid, [p.histograms.get(name) for p in points])
    return arrays


def unpacked(arrays: Mapping[str, np.ndarray]) -> tuple[dict[str, int], Timeline, Facets, Worst]:
    """What `packed` was given."""
    names, held = _read(arrays["names"]), _read(arrays["worst"])
    histograms = {name: Grid(**grid) for name, grid in names["grids"].items()}
    points = {}
    for i, key in enumerate(arrays["keys"].tolist()):
        kinds = (_row(arrays, kind, names[kind], i) for kind in ("sums", "maxima", "logs"))
        sums, maxima, logs = kinds
        stats = DriftStats(*sums, *maxima, *logs, {}, names["grades"][i])
        found = {name: _histogram(arrays, name, grid, i) for name, grid in histograms.items()}
        points[key] = Point(stats, {name: h for name, h in found.items() if h is not None})
    facets = Facets(*(_under(arrays, f"facets/{kind}/") for kind in ("sums", "maxima", "logs")))
    worst = Worst(tuple(held["sequences"]), tuple(held["tokens"]))
    return names["counts"], Timeline(names["width"], points, arrays["seen"]), facets, worst


def _text(value: Any) -> np.ndarray:
    return np.frombuffer(json.dumps(value).encode("ascii"), dtype=np.uint8)


def _read(stored: np.ndarray) -> Any:
    return json.loads(stored.astype(np.uint8).tobytes())


def _columns(kind: str, names: list[str], rows: list[tuple[tuple[str, ...], torch.Tensor]]) -> Arrays:
    """Named vectors as one table, and which of its entries there are."""
    column = {name: i for i, name in enumerate(names)}
    table = np.zeros((len(rows), len(names)))
    known = np.zeros(table.shape, dtype=np.bool_)
    for i, (own, values) in enumerate(rows):
        at = [column[name] for name in own]
        table[i, at], known[i, at] = values.numpy(), True
    return {kind: table, f"{kind}/known": known}


def _row(arrays: Mapping[str, np.ndarray], kind: str, names: list[str], i: int) -> tuple[tuple[str, ...], torch.Tensor]:
    known = arrays[f"{kind}/known"][i]
    return tuple(n for n, k in zip(names, known) if k), torch.from_numpy(arrays[kind][i][known])


def _histograms(name: str, grid: Grid, rows: list[Histogram | None]) -> Arrays:
    empty = Histogram(grid, np.zeros(grid.bins, np.int64), np.zeros((2, grid.bins)))
    held = [h or empty for h in rows]
    key = f"histogram/{name}"
    return {
        f"{key}/known": np.array([h is not None for h in rows]),
        f"{key}/counts": np.stack([h.counts for h in held]),
        f"{key}/moments": np.stack([h.moments for h in held]),
        f"{key}/extremes": np.array([(h.low, h.high) for h in held]),
    }


def _histogram(arrays: Mapping[str, np.ndarray], name: str, grid: Grid, i: int) -> Histogram | None:
    key = f"histogram/{name}"
    if not arrays[f"{key}/known"][i]:
        return None
    low, high = arrays[f"{key}/extremes"][i].tolist()
    return Histogram(grid, arrays[f"{key}/counts"][i], arrays[f"{key}/moments"][i], low, high)


def _under(arrays: Mapping[str, np.ndarray], prefix: str) -> Arrays:
    return {k.removeprefix(prefix): x for k, x in arrays.items() if k.startswith(prefix)}
