"""Rows of metrics in text files: JSON lines, a JSON file, CSV, and the lines that verl prints."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from offdrift import texts
from offdrift.errors import RecordError
from offdrift.judge.metric_names import STEPS, finite, metric_names
from offdrift.records.readers.files import BadRow, opened, size
from offdrift.records.readers.jsonl import loads

LONGEST_LINE = 4 << 20
"""Bytes of one line: rows of metrics have a few thousand."""
LARGEST_JSON = 256 << 20
"""Bytes of a file that is one JSON value, and is decoded at once."""
SPELLED = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}
"""How trackers write in JSON what it has no numbers for."""


class MetricRow(NamedTuple):
    """One row of a file, by the names that it has there."""

    number: int
    """Line or record of the file, from 1."""
    values: Mapping[str, Any]


def as_number(value: object) -> float | None:
    """A number, NaN and infinities included, also as trackers spell them; None if it is none.

    Example:
        >>> as_number("NaN"), as_number(2), as_number(True), as_number(10**400)
        (nan, 2.0, None, None)
    """
    if isinstance(value, str):
        return SPELLED.get(value)
    if isinstance(value, float):
        return value
    return finite(value)


def lines(file: str, bad: list[BadRow]) -> Iterator[tuple[int, bytes]]:
    """The lines of a file with their numbers, without those that are too long."""
    with opened(file) as f:
        number = 0
        while line := f.readline(LONGEST_LINE):
            number += 1
            if len(line) == LONGEST_LINE and not line.endswith(b"\n"):
                bad.append(BadRow(file, number, f"the line has more than {LONGEST_LINE >> 20} MiB"))
                while (rest := f.readline(LONGEST_LINE)) and not rest.endswith(b"\n"):
                    pass
                continue
            yield number, line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line


def json_lines(file: str, bad: list[BadRow]) -> Iterator[MetricRow]:
    """Rows of JSON lines: flat objects, or those of verl's file logger, {"step": 1, "data": {...}}."""
    for number, line in lines(file, bad):
        if not line.strip():
            continue
        try:
            row = loads(line)
        except (ValueError, RecursionError) as e:
            bad.append(BadRow(file, number, f"not JSON: {e or type(e).__name__}"))
            continue
        if not isinstance(row, dict):
            bad.append(BadRow(file, number, f"a JSON {type(row).__name__}, expected an object"))
            continue
        yield MetricRow(number, _flat(row))


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    inner = row.get("data")
    return {**inner, "step": row.get("step")} if isinstance(inner, dict) else row


def json_rows(file: str, bad: list[BadRow]) -> Iterator[MetricRow]:
    """Rows of one JSON value: the `log_history` of transformers' `trainer_state.json`, a list of rows, or one row.

    JSON lines that are named so are read as such.

    Raises: `RecordError` if it is too large, no JSON, or neither of these.
    """
    if (bytes_ := size(file)) > LARGEST_JSON:
        raise RecordError(
            f"{file} has {bytes_ >> 20:,} MiB, more than the {LARGEST_JSON >> 20} of a JSON file of metrics; write "
            "JSON lines (one object per step) instead"
        )
    with opened(file) as f:
        content = f.read(LARGEST_JSON + 1)
    try:
        value = texts.parse_json(content)
    except ValueError as e:
        if _is_row(content.lstrip().partition(b"\n")[0]):
            yield from json_lines(file, bad)
            return
        raise RecordError(f"{file} is not JSON ({e}): cut off or damaged; copy or export it again") from e
    if isinstance(value, dict):
        value = value.get("log_history", [value])
    if not isinstance(value, list):
        raise RecordError(f"{file} holds no list of rows; export one object per step")
    for number, row in enumerate(value, 1):
        if isinstance(row, dict):
            yield MetricRow(number, _flat(row))
        else:
            bad.append(BadRow(file, number, f"a JSON {type(row).__name__}, expected an object"))


def _is_row(line: bytes) -> bool:
    """Whether a line is a whole JSON object."""
    with suppress(ValueError):
        return isinstance(texts.parse_json(line), dict)
    return False


def csv_rows(file: str, bad: list[BadRow]) -> Iterator[MetricRow]:
    """Rows of CSV with a header, as the W&B API and its charts export them.

    A chart names its columns `RUN - METRIC` and adds `__MIN` and `__MAX`, which are left out.

    Raises: `RecordError` if its columns are of several runs.
    """
    texts_ = (line.decode("utf-8", "replace") for _, line in lines(file, bad))
    reader = csv.reader(texts_)
    try:
        header = next(reader, [])
        names = _metric_columns(file, header)
        for number, cells in enumerate(reader, 2):
            values = {name: _cell(cell) for name, cell in zip(names, cells) if name and cell.strip()}
            if len(cells) > len(header):
                bad.append(BadRow(file, number, f"{len(cells)} cells under {len(header)} names"))
            elif values:
                yield MetricRow(number, values)
    except csv.Error as e:
        bad.append(BadRow(file, reader.line_num, f"no CSV: {e}", rows=0))


def _metric_columns(file: str, header: list[str]) -> list[str]:
    """Names of metrics for the columns of a CSV; "" for a column that is left out."""
    names, runs = [], dict[str, None]()
    for column in header:
        run, dash, metric = column.strip().rpartition(" - ")
        derived = metric.endswith(("__MIN", "__MAX")) or metric.removesuffix("__MAX").endswith("_step")
        names.append("" if dash and derived else metric)
        if dash and not derived:
            runs[run] = None
    if len(runs) > 1:
        some = ", ".join(list(runs)[:5])
        raise RecordError(f"{file} holds the metrics of {len(runs)} runs ({some}); export a chart of one of them")
    return names


def _cell(cell: str) -> float | str:
    try:
        return float(cell)
    except ValueError:
        return cell


PRINTED = re.compile(r"(?:^|\s)step:(\d{1,16})((?: - [^\s:]+:\S+)+)")
"""verl's console logger: `step:1 - actor/pg_loss:0.1 - ...`, behind whatever Ray writes before it."""
PRINTED_VALUE = re.compile(r" - ([^\s:]+):(?:np\.\w+\()?([-+.\w]+)\)?")


def console_rows(file: str, bad: list[BadRow]) -> Iterator[MetricRow]:
    """Rows that verl printed, among whatever else was printed."""
    for number, line in lines(file, bad):
        if b"step:" not in line:
            continue
        if found := PRINTED.search(line.decode("utf-8", "replace")):
            values = {name: _cell(cell) for name, cell in PRINTED_VALUE.findall(found[2])}
            yield MetricRow(number, {**values, "step": int(found[1])})


def has_step(names: object) -> bool:
    """Whether some of these names is that of a step."""
    return not {*STEPS, *metric_names().steps}.isdisjoint(names)  # type: ignore[arg-type]
