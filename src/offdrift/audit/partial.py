"""`Part`: the statistics of some pieces of a log. Parts merge, and go to disk and back.

A part is the unit of work, of transport and of resumption: one piece of a file becomes one part,
wherever it is read. Parts are merged in the order of the pieces, so that an audit's numbers do not
depend on how many workers read the log, to the last bit.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import reduce
from typing import Any

import numpy as np

from offdrift.audit.certificate_evidence import Proof
from offdrift.audit.counterfactual import Counterfactual, sampled
from offdrift.audit.tally.tally import Tally
from offdrift.errors import RecordError
from offdrift.records.readers import BadRow, Detected, Piece, read

BAD_ROWS_KEPT = 100
"""Bad rows whose place and reason are kept; all are counted."""

KINDS: dict[str, Any] = {"tally": Tally, "counterfactual": Counterfactual, "proof": Proof}
"""What a part holds besides its counts: things with `merge`, `to_arrays` and `from_arrays`."""


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
        """What some bad places lost.

        Args:
            sizes: bytes of each file.
        """
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
        pairs = [(getattr(self, name), getattr(other, name)) for name in KINDS]
        merged = (b if a is None else a if b is None else a.merge(b) for a, b in pairs)
        return Part(self.unread.merge(other.unread), (self.bad + other.bad)[:BAD_ROWS_KEPT], *merged)

    def to_bytes(self) -> bytes:
        """The part as an uncompressed `.npz` of plain arrays; nothing in it is executable."""
        arrays = {
            "unread": np.array(astuple(self.unread), dtype=np.int64),
            "bad/file": np.array([b.file for b in self.bad], dtype=np.str_),
            "bad/row": np.array([b.row for b in self.bad], dtype=np.int64),
            "bad/reason": np.array([b.reason for b in self.bad], dtype=np.str_),
            "bad/rows": np.array([b.rows for b in self.bad], dtype=np.int64),
        }
        for name in KINDS:
            statistics = getattr(self, name)
            if statistics is not None:
                arrays |= {f"{name}/{k}": v for k, v in statistics.to_arrays().items()}
        out = io.BytesIO()
        np.savez(out, allow_pickle=False, **arrays)
        return out.getvalue()

    @staticmethod
    def from_bytes(stored: bytes) -> Part:
        """A part that `to_bytes` wrote.

        Raises: `RecordError` if it is damaged, or of another version's layout.
        """
        try:
            with np.load(io.BytesIO(stored), allow_pickle=False) as file:
                arrays = dict(file)
            places = zip(*(arrays[f"bad/{name}"] for name in BadRow._fields))
            statistics = []
            for name, kind in KINDS.items():
                own = {k.removeprefix(f"{name}/"): v for k, v in arrays.items() if k.startswith(f"{name}/")}
                statistics.append(kind.from_arrays(own) if own else None)
            bad = tuple(BadRow(str(f), int(row), str(why), int(n)) for f, row, why, n in places)
            return Part(Unread(*arrays["unread"].tolist()), bad, *statistics)
        except (ValueError, KeyError, OSError, EOFError, zipfile.BadZipFile, TypeError) as e:
            raise RecordError(f"a stored part of this audit cannot be read ({e!r})") from e


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
