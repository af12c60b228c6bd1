"""`AuditPartial`: the statistics of some pieces of a log. Parts merge, and go to disk and back.

A part is the unit of work, of transport and of resumption: one piece of a file becomes one part, wherever it is read.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from functools import reduce
from pathlib import PurePath
from typing import Any

import numpy as np
import torch

from offdrift.audit.certificate_evidence import Proof
from offdrift.audit.counterfactual import Counterfactual, sampled
from offdrift.audit.facets import Facets
from offdrift.audit.shapes import Shapes, StepSeries
from offdrift.audit.tally import Repeats, StepTally, Tally, Timeline, Worst, groups_of
from offdrift.errors import RecordError
from offdrift.methods import method
from offdrift.records.readers import BadRow, Detected, Piece, read
from offdrift.stats import DriftStats, Histogram
from offdrift.stats.digits import Exact
from offdrift.stats.histogram import Grid
from offdrift.texts import parse_json, read_arrays

BAD_ROWS_KEPT = 100
"""Bad rows whose place and reason are kept; all are counted."""


@dataclass(frozen=True)
class Job:
    """Settings that every worker process gets."""

    found: Detected
    sample_rate: float = 1.0
    """Share of prompt groups that every method of the table is tried on."""
    also: tuple[tuple[str, str], ...] = ()
    """Methods in a user's code that are tried, too: absolute names, and the hashes of their files."""


@dataclass(frozen=True)
class Unread:
    """Amount of a log that could not be read."""

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
        """Count what the bad rows and files lost, given the size of each file in bytes."""
        unreadable = {b.file for b in bad if b.row == 0}
        return Unread(
            sum(max(b.rows, 1) for b in bad),
            sum(b.rows == 0 and b.row > 0 for b in bad),
            len(unreadable),
            sum(sizes.get(file, 0) for file in unreadable),
        )

    def merge(self, other: Unread) -> Unread:
        """Add up two counts."""
        return Unread(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


REASON = 240
"""Characters that are shown of why a row could not be read."""


@dataclass(frozen=True)
class AuditPartial:
    """Counts, and mergeable statistics where there was anything to count."""

    unread: Unread = Unread()
    bad: tuple[BadRow, ...] = ()
    """The first places that could not be read."""
    tally: Tally | None = None
    counterfactual: Counterfactual | None = None
    proof: Proof | None = None

    @property
    def first_reason(self) -> str:
        """Place and reason of the first row that could not be read, for a sentence; "" if all could.

        Example:
            >>> AuditPartial(bad=(BadRow("run/log.jsonl", 3, "no numbers."),)).first_reason
            '; log.jsonl, row 3: no numbers'
        """
        first = next((row for row in self.bad if row.row > 0), None)
        where = "" if first is None else f"; {PurePath(first.file).name}, row {first.row:,}: {first.reason}"
        return where[:REASON].rstrip(".")

    def merge(self, other: AuditPartial) -> AuditPartial:
        """This part, and then the other."""

        def both(a: Any, b: Any) -> Any:
            return b if a is None else a if b is None else a.merge(b)

        return AuditPartial(
            self.unread.merge(other.unread),
            (self.bad + other.bad)[:BAD_ROWS_KEPT],
            both(self.tally, other.tally),
            both(self.counterfactual, other.counterfactual),
            both(self.proof, other.proof),
        )

    def to_bytes(self) -> bytes:
        """The part as an uncompressed `.npz` of plain arrays and JSON; nothing in it is executable."""
        arrays: dict[str, list[np.ndarray]] = {}
        names: dict[tuple[str, ...], int] = {}
        described = _described(self, arrays, names)
        about = json.dumps({"names": list(names), "part": described}).encode("ascii")
        flat = {kind: np.concatenate(parts) for kind, parts in arrays.items()}
        out = io.BytesIO()
        np.savez(out, allow_pickle=False, about=np.frombuffer(about, np.uint8), **flat)
        return out.getvalue()

    @staticmethod
    def from_bytes(stored: bytes) -> AuditPartial:
        """A part that `to_bytes` wrote, to the last bit.

        Raises: `RecordError` if it is damaged, or of another version's layout.
        """
        try:
            flat = read_arrays(stored, limit=len(stored))
            about = parse_json(flat.pop("about").tobytes())
            part = _made(about["part"], flat, [tuple(names) for names in about["names"]])
        except (ValueError, LookupError, OSError, EOFError, TypeError, AttributeError, RuntimeError, MemoryError) as e:
            raise RecordError(f"a stored part of this audit cannot be read ({e!r})") from e
        if not isinstance(part, AuditPartial):
            raise RecordError(f"a stored part of this audit cannot be read (it holds a {type(part).__name__})")
        return part


OF_PARTS = (BadRow, Counterfactual, AuditPartial, Proof, Tally, Unread)
OF_TALLIES = (DriftStats, Exact, Facets, Grid, Histogram, Repeats, StepTally, StepSeries, Shapes, Timeline, Worst)
STORED: dict[str, Any] = {kind.__name__: kind for kind in OF_PARTS + OF_TALLIES}
"""What a stored part is made of, besides plain data, arrays and tensors."""


def _described(value: Any, arrays: dict[str, list[np.ndarray]], names: dict[tuple[str, ...], int]) -> Any:
    """A value as JSON; its arrays are added to those of their type, end to end, and its tuples of names to `names`."""
    if isinstance(value, np.ndarray | torch.Tensor):
        array = np.asarray(value)
        arrays.setdefault(array.dtype.str, []).append(array.reshape(-1))
        return {"array": array.dtype.str, "shape": array.shape, "tensor": isinstance(value, torch.Tensor)}
    if (name := type(value).__name__) in STORED:
        attributes = getattr(value, "_fields", None) or [f.name for f in fields(value)]
        return {"is": name, "of": [_described(getattr(value, n), arrays, names) for n in attributes]}
    if isinstance(value, Mapping):
        return {"map": [[key, _described(x, arrays, names)] for key, x in value.items()]}
    if isinstance(value, tuple) and len(value) > 1 and all(isinstance(x, str) for x in value):
        return {"names": names.setdefault(value, len(names))}  # every point of a timeline has the same
    if isinstance(value, list | tuple):
        plain = all(isinstance(x, str | int | float) for x in value)
        items = list(value) if plain else [_described(x, arrays, names) for x in value]
        return {"tuple": items} if isinstance(value, tuple) else items
    return value


def _made(about: Any, flat: dict[str, np.ndarray], names: Sequence[tuple[str, ...]]) -> Any:
    """Rebuild the object that `_described` has described; removes its arrays from the front of `flat`."""
    if isinstance(about, list):
        return [_made(x, flat, names) if isinstance(x, list | dict) else x for x in about]
    if not isinstance(about, dict):
        return about
    if "array" in about:
        kind, size = about["array"], math.prod(about["shape"])
        array, flat[kind] = flat[kind][:size].reshape(about["shape"]), flat[kind][size:]
        return torch.from_numpy(array) if about["tensor"] else array
    if "map" in about:
        return {key: _made(x, flat, names) for key, x in about["map"]}
    if "names" in about:
        return names[about["names"]]
    if "tuple" in about:
        return tuple(_made(about["tuple"], flat, names))
    return STORED[about["is"]](*(_made(x, flat, names) for x in about["of"]))


def work(piece: Piece, job: Job) -> AuditPartial:
    """Read one piece of a log, and those that are read with it, and say what is in them: what a worker does."""
    files = tuple(each.file for each in piece.each)
    readings = [read(each, job.found) for each in piece.each]
    bad = [row for reading in readings for row in reading.bad]
    lost = Unread.of(bad, dict(zip(job.found.files, job.found.sizes)))
    part = AuditPartial(lost, tuple(bad[:BAD_ROWS_KEPT]))
    filled = [(i, b) for i, reading in enumerate(readings) for b in reading.batches if b.num_sequences]
    if not filled:
        return part
    for name, _ in job.also:
        method(name)
    names = tuple(name for name, _ in job.also)
    some = filled
    if job.sample_rate < 1:
        some = [(i, sampled(b, job.sample_rate, files[i])) for i, b in filled]
    batches = [b for _, b in filled]
    if len(files) == 1:
        tally, tried = Tally.over(batches, file=files[0]), [b for _, b in some if b.num_sequences]
    else:
        from offdrift.audit.small_files import joined

        tally = replace(Tally.over(joined(filled, files), file=files), groups=groups_of(batches))
        tried = joined([(i, b) for i, b in some if b.num_sequences], files)
    return replace(
        part,
        tally=tally,
        counterfactual=reduce(Counterfactual.merge, (Counterfactual.of(b, names) for b in tried)) if tried else None,
        proof=Proof.over(batches),
    )
