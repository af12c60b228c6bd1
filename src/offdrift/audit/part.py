"""`Part`: what an audit knows of some pieces of a log. Parts merge, and go to disk and back.

A part is the unit of work, of transport and of resumption: one piece of a file becomes one part,
wherever it is read. Parts are merged in the order of the pieces, so that an audit's numbers do not
depend on how many workers read the log, to the last bit.
"""

from __future__ import annotations

import io
import zipfile
from dataclasses import dataclass
from typing import Any

import numpy as np

from offdrift.audit.counterfactual import Counterfactual, sampled
from offdrift.audit.proof import Proof
from offdrift.audit.tally import Tally
from offdrift.errors import RecordError
from offdrift.integrations.logs import BadRow, Detected, Piece, read

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
class Part:
    """Counts, and mergeable statistics where there was anything to count."""

    bad_rows: int = 0
    bad: tuple[BadRow, ...] = ()
    """The first of them."""
    tally: Tally | None = None
    counterfactual: Counterfactual | None = None
    proof: Proof | None = None

    def merge(self, other: Part) -> Part:
        """This part, and then the other."""

        def joined(name: str) -> Any:
            mine, its = getattr(self, name), getattr(other, name)
            if mine is None or its is None:
                return its if mine is None else mine
            return mine.merge(its)

        return Part(
            self.bad_rows + other.bad_rows,
            (self.bad + other.bad)[:BAD_ROWS_KEPT],
            *(joined(name) for name in KINDS),
        )

    def to_bytes(self) -> bytes:
        """The part as an uncompressed `.npz` of plain arrays; nothing in it is executable."""
        arrays = {
            "bad_rows": np.array(self.bad_rows),
            "bad/file": np.array([b.file for b in self.bad], dtype=np.str_),
            "bad/row": np.array([b.row for b in self.bad], dtype=np.int64),
            "bad/reason": np.array([b.reason for b in self.bad], dtype=np.str_),
        }
        for name in KINDS:
            held = getattr(self, name)
            if held is not None:
                arrays |= {f"{name}/{k}": v for k, v in held.to_arrays().items()}
        out = io.BytesIO()
        np.savez(out, allow_pickle=False, **arrays)
        return out.getvalue()

    @staticmethod
    def from_bytes(stored: bytes) -> Part:
        """A part that `to_bytes` wrote.

        Raises: `RecordError` if it is damaged, or of another version's layout.
        """
        try:
            with np.load(io.BytesIO(stored), allow_pickle=False) as arrays:
                return _from_arrays(dict(arrays))
        except (ValueError, KeyError, OSError, EOFError, zipfile.BadZipFile, TypeError) as e:
            raise RecordError(f"a stored part of this audit cannot be read ({e!r})") from e


def _from_arrays(arrays: dict[str, np.ndarray]) -> Part:
    def held(name: str) -> Any:
        own = {k.removeprefix(f"{name}/"): v for k, v in arrays.items() if k.startswith(f"{name}/")}
        return KINDS[name].from_arrays(own) if own else None

    places = zip(arrays["bad/file"], arrays["bad/row"], arrays["bad/reason"])
    return Part(
        int(arrays["bad_rows"]),
        tuple(BadRow(str(file), int(row), str(reason)) for file, row, reason in places),
        *(held(name) for name in KINDS),
    )


def work(piece: Piece, job: Job) -> Part:
    """Read one piece of a log and say what is in it: what a worker does."""
    batch, bad = read(piece, job.found)
    rows = Part(len(bad), tuple(bad[:BAD_ROWS_KEPT]))
    if batch is None or not batch.num_sequences:
        return rows
    some = batch if job.sample_rate >= 1 else sampled(batch, job.sample_rate, piece.file)
    return Part(
        rows.bad_rows,
        rows.bad,
        Tally.of(batch, file=piece.file),
        Counterfactual.of(some) if some.num_sequences else None,
        Proof.of(batch),
    )
