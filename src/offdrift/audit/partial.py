"""`Part`: the statistics of some pieces of a log. Parts merge, and go to disk and back.

A part is the unit of work, of transport and of resumption: one piece of a file becomes one part, wherever it is read.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from functools import reduce
from typing import Any

import numpy as np
import torch

from offdrift.audit.certificate_evidence import Proof
from offdrift.audit.counterfactual import Counterfactual, sampled
from offdrift.audit.facets import Facets
from offdrift.audit.tally import Point, Tally, Timeline, Worst
from offdrift.errors import RecordError
from offdrift.records.readers import BadRow, Detected, Piece, read
from offdrift.stats import DriftStats, Histogram
from offdrift.stats.histogram import Grid
from offdrift.texts import parse_json, read_arrays

BAD_ROWS_KEPT = 100
"""Bad rows whose place and reason are kept; all are counted."""


@dataclass(frozen=True)
class Job:
    """What every worker must know."""

    found: Detected
    sample_rate: float = 1.0
    """Share of prompt groups that every method of the table is tried on."""


@dataclass(frozen=True)
class Unread:
    """How much of a log could not be read."""

    rows: int = 0
    """Rows; where nobody knows how many there were, 1."""
    cuts: int = 0
    """Places from which the rest of a file is lost."""
    files: int = 0
    """Files of which nothing could be read."""
    bytes: int = 0
    """Of these files."""

    @staticmethod
    def of(bad: Sequence[BadRow], sizes: Mapping[str, int]) -> Unread:
        """What some bad places lost, given the bytes of each file."""
        whole = {b.file for b in bad if b.row == 0}
        return Unread(
            sum(max(b.rows, 1) for b in bad),
            sum(b.rows == 0 and b.row > 0 for b in bad),
            len(whole),
            sum(sizes.get(file, 0) for file in whole),
        )

    def merge(self, other: Unread) -> Unread:
        """Both together."""
        return Unread(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class Part:
    """Counts, and mergeable statistics where there was anything to count."""

    unread: Unread = Unread()
    bad: tuple[BadRow, ...] = ()
    """The first places that could not be read."""
    tally: Tally | None = None
    counterfactual: Counterfactual | None = None
    proof: Proof | None = None

    def merge(self, other: Part) -> Part:
        """This part, and then the other."""

        def both(a: Any, b: Any) -> Any:
            return b if a is None else a if b is None else a.merge(b)

        return Part(
            self.unread.merge(other.unread),
            (self.bad + other.bad)[:BAD_ROWS_KEPT],
            both(self.tally, other.tally),
            both(self.counterfactual, other.counterfactual),
            both(self.proof, other.proof),
        )

    def to_bytes(self) -> bytes:
        """The part as an uncompressed `.npz` of plain arrays and JSON; nothing in it is executable."""
        arrays: dict[str, list[np.ndarray]] = {}
        about = json.dumps(_described(self, arrays)).encode("ascii")
        flat = {kind: np.concatenate(parts) for kind, parts in arrays.items()}
        out = io.BytesIO()
        np.savez(out, allow_pickle=False, about=np.frombuffer(about, np.uint8), **flat)
        return out.getvalue()

    @staticmethod
    def from_bytes(stored: bytes) -> Part:
        """A part that `to_bytes` wrote, to the last bit.

        Raises: `RecordError` if it is damaged, or of another version's layout.
        """
        try:
            flat = read_arrays(stored, limit=len(stored))
            part = _made(parse_json(flat.pop("about").tobytes()), flat)
        except (ValueError, LookupError, OSError, EOFError, TypeError, AttributeError, RuntimeError, MemoryError) as e:
            raise RecordError(f"a stored part of this audit cannot be read ({e!r})") from e
        if not isinstance(part, Part):
            raise RecordError(f"a stored part of this audit cannot be read (it holds a {type(part).__name__})")
        return part


OF_PARTS = (BadRow, Counterfactual, Part, Proof, Tally, Unread)
OF_TALLIES = (DriftStats, Facets, Grid, Histogram, Point, Timeline, Worst)
STORED: dict[str, Any] = {kind.__name__: kind for kind in OF_PARTS + OF_TALLIES}
"""What a stored part is made of, besides plain data, arrays and tensors."""


def _described(value: Any, arrays: dict[str, list[np.ndarray]]) -> Any:
    """A value as JSON; its arrays are added to those of their type, end to end."""
    if isinstance(value, np.ndarray | torch.Tensor):
        array = np.asarray(value)
        arrays.setdefault(array.dtype.str, []).append(array.reshape(-1))
        return {"array": array.dtype.str, "shape": array.shape, "tensor": isinstance(value, torch.Tensor)}
    if (name := type(value).__name__) in STORED:
        names = getattr(value, "_fields", None) or [f.name for f in fields(value)]
        return {"is": name, "of": [_described(getattr(value, n), arrays) for n in names]}
    if isinstance(value, Mapping):
        return {"map": [[key, _described(x, arrays)] for key, x in value.items()]}
    if isinstance(value, list | tuple):
        plain = all(isinstance(x, str | int | float) for x in value)
        items = list(value) if plain else [_described(x, arrays) for x in value]
        return {"tuple": items} if isinstance(value, tuple) else items
    return value


def _made(about: Any, flat: dict[str, np.ndarray]) -> Any:
    """What `_described` was called on; takes its arrays off the front of `flat`."""
    if isinstance(about, list):
        return [_made(x, flat) if isinstance(x, list | dict) else x for x in about]
    if not isinstance(about, dict):
        return about
    if "array" in about:
        kind, size = about["array"], math.prod(about["shape"])
        array, flat[kind] = flat[kind][:size].reshape(about["shape"]), flat[kind][size:]
        return torch.from_numpy(array) if about["tensor"] else array
    if "map" in about:
        return {key: _made(x, flat) for key, x in about["map"]}
    if "tuple" in about:
        return tuple(_made(about["tuple"], flat))
    return STORED[about["is"]](*(_made(x, flat) for x in about["of"]))


def work(piece: Piece, job: Job) -> Part:
    """Read one piece of a log and say what is in it: what a worker does."""
    batches, bad = read(piece, job.found)
    lost = Unread.of(bad, dict(zip(job.found.files, job.found.sizes)))
    part = Part(lost, tuple(bad[:BAD_ROWS_KEPT]))
    if not any(batch.num_sequences for batch in batches):
        return part
    some = [b if job.sample_rate >= 1 else sampled(b, job.sample_rate, piece.file) for b in batches]
    tried = [Counterfactual.of(b) for b in some if b.num_sequences]
    return replace(
        part,
        tally=Tally.over(batches, file=piece.file),
        counterfactual=reduce(Counterfactual.merge, tried) if tried else None,
        proof=Proof.over(batches),
    )
