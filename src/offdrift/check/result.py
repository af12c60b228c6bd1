"""`Check`: the result of a check of two engines, or of a running server and a checkpoint."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from offdrift.check.check import FILE_NAME, PAGE
from offdrift.check.page import write_check_page
from offdrift.check.view import about, live_rows
from offdrift.notebook import bar, columns_of, frame, table
from offdrift.records.atomic import write_json
from offdrift.show.headline import headlines
from offdrift.show.json_access import number, rows, text
from offdrift.show.numbers import short
from offdrift.show.result import Result, numbers_of

TEXTS = ("factor", "status", "side", "changed")
"""Columns of the factors' frame that are texts; its others are numbers."""


@dataclass(frozen=True, repr=False)
class Check(Result):
    """The result of `check`: `data` is the content of `check.json`.

    Example:
        >>> found = Check({"passed": True, "baseline": {"kl_mean": 1e-6}, "verdict": {"level": "ok", "text": "Equal."}})
        >>> found.passed, found.metrics
        (True, {'kl_mean': 1e-06})
    """

    file: ClassVar[str] = FILE_NAME
    page: ClassVar[str] = PAGE

    @property
    def passed(self) -> bool | None:
        """True if the engines agree as asked; None if it was interrupted, or cannot be told."""
        passed = self.data.get("passed")
        return passed if isinstance(passed, bool) else None

    @property
    def metrics(self) -> dict[str, float]:
        """Every number of the engines as they are, by name; what is not known is left out."""
        return numbers_of(self.data.get("baseline"))

    def to_frame(self) -> Any:
        """The factors as a frame of pandas or polars, a row for each: status, and its numbers beside the baseline's.

        Raises: `OffdriftError` if neither is installed.
        """
        factors = [
            {k: v for k, v in row.items() if k in TEXTS or number(v) is not None}
            for row in rows(self.data.get("factors"))
        ]
        return frame(columns_of(factors) or {"factor": [], "kl_mean": []})

    def write(self, folder: str | os.PathLike[str]) -> Path:
        """Store `check.json` and `check.html` in a folder; return the page. Raises: `RecordError`."""
        write_json(Path(folder) / FILE_NAME, self.data)
        return write_check_page(self.data, Path(folder))

    def __repr__(self) -> str:
        """Verdict, how much was measured, and what was found."""
        return self._brief(" · ".join(about(self.data)))

    def _repr_html_(self) -> str:
        live = live_rows(self.data)
        tiles = [] if live else headlines({"overall": self.data.get("baseline"), "limits": self.data.get("limits")})
        sizes = [
            (text(row.get("factor")), kl)
            for row in rows(self.data.get("factors"))
            if (kl := number(row.get("kl_mean"))) is not None
        ]
        most = max((kl for _, kl in sizes), default=0.0)
        bars = [(name, f"{short(kl)} nat", bar(kl, most, name=f"KL with {name} changed")) for name, kl in sizes]
        head = ("factor changed", "KL per token", "")
        tables = [table(live) if live else "", table(bars, head) if bars else ""]
        return self._as_html(" · ".join(about(self.data)), tiles, *tables)
