"""Rows of a table in a CSV: cells are numbers, text, or lists of numbers, as Python, JSON or NumPy write them."""

from __future__ import annotations

import codecs
import csv
import math
import re
from collections.abc import Iterator
from itertools import islice
from typing import Any

from offdrift.errors import RecordError
from offdrift.records.readers.columns import Row
from offdrift.records.readers.files import LIMIT, PLANNED, Budget, Bytes

LOOKED_AT = 8
"""Rows that tell what a table holds."""


def rows_of_table(file: Bytes, limit: int = LIMIT) -> list[Row]:
    """Every row of a CSV, by the names of its first line.

    Raises: `RecordError` of what is no table of text, or takes more than `limit` bytes.
    """
    budget, kept = Budget(limit), []
    for row in _rows(file, limit):
        budget.spend(PLANNED * sum(len(x) for x in row.values() if isinstance(x, list | str)))
        kept.append(row)
    return kept


def head_of_table(file: Bytes, limit: int = LIMIT) -> list[Row]:
    """The first rows.

    Raises: `RecordError` of a table without a column of lists, which is none of responses.
    """
    head = list(islice(_rows(file, limit), LOOKED_AT))
    if not any(isinstance(value, list) for row in head for value in row.values()):
        raise RecordError("the file holds no column of log-probs, one list per row")
    return head


def _rows(file: Bytes, limit: int) -> Iterator[Row]:
    csv.field_size_limit(min(limit, 2**31 - 1))  # a cell is as long as a response
    try:
        for row in csv.DictReader(codecs.iterdecode(file, "utf-8-sig")):
            yield {name: cell(value) for name, value in row.items() if name is not None}
    except (csv.Error, UnicodeError) as e:
        raise RecordError(f"no table of text: {str(e)[:200]}") from e


WRITTEN = {"None": None, "null": None, "NaN": math.nan, "True": 1, "False": 0, "true": 1, "false": 0}
"""Words in lists of numbers."""


WRAPPED = re.compile(r"\b(?:np|numpy)\.\w+\(([^()]*)\)")
"""A number of NumPy as Python writes it in a list."""


def cell(text: str | None) -> Any:
    """The value that a cell of a CSV holds: nothing, a number, a list of numbers, or its text.

    Example:
        >>> cell("[-0.5, -1.25]"), cell("[1 2 3]"), cell("7"), cell(""), cell("yes")
        ([-0.5, -1.25], [1, 2, 3], 7, None, 'yes')
    """
    if not text:
        return None
    try:
        if text.startswith("[") and text.endswith("]"):
            text = WRAPPED.sub(r"\1", text)
            return [_written(word) for word in text[1:-1].replace(",", " ").split()]
        return _written(text)
    except ValueError:  # words; or a list that is no list of numbers, which its row's reader names
        return text


def _written(word: str) -> Any:
    """A number as it is written. Raises: `ValueError`."""
    if word in WRITTEN:
        return WRITTEN[word]
    try:
        return int(word)
    except ValueError:
        return float(word)
