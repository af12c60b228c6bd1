"""The footer of a Parquet file: read as pyarrow reads it where it is whole, refused where it is not, never the end of us."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from offdrift.errors import RecordError
from offdrift.records import pages, store
from offdrift.records.readers import detect, pieces, read
from offdrift.records.recorder import write_log
from tests.records.samples import ragged, rollouts

ROWS = 40
TABLE = pa.table(
    {
        "number": np.arange(ROWS) / 7,
        "text": [f"{i % 3}" for i in range(ROWS)],
        "lists": [[float(i)] * (i % 4) for i in range(ROWS)],
        "deep": [[{"a": i, "b": ["x"] * (i % 3)}] for i in range(ROWS)],
        "flag": [i % 2 == 0 for i in range(ROWS)],
        "nothing": [None] * ROWS,
    }
)
WRITERS = {
    "one group": {},
    "many groups": {"row_group_size": 3},
    "no dictionary, no statistics": {"use_dictionary": False, "write_statistics": False},
    "pages of version 2": {"data_page_version": "2.0", "compression": "zstd", "write_page_index": True},
    "no row": {},
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_footer_says_what_pyarrow_says(tmp_path: Path, name: str) -> None:
    table = TABLE.slice(0, 0) if name == "no row" else TABLE
    pq.write_table(table, tmp_path / "a.parquet", **WRITERS[name])
    metadata = pq.read_metadata(tmp_path / "a.parquet")
    with open(tmp_path / "a.parquet", "rb") as file:
        groups = pages.row_groups(file, metadata.num_columns)
    assert [group.num_rows for group in groups] == [metadata.row_group(i).num_rows for i in range(len(groups))]
    assert len(groups) == metadata.num_row_groups
    for i, group in enumerate(groups):
        assert len(group.columns) == metadata.num_columns
        for j, column in enumerate(group.columns):
            theirs = metadata.row_group(i).column(j)
            assert column._asdict() == {field: getattr(theirs, field) for field in column._fields}


def test_a_footer_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(TABLE, path)
    whole, columns = path.read_bytes(), pq.read_metadata(path).num_columns
    for content, why in (
        (whole[:-1], "does not end with a footer"),
        (b"PAR1", "does not end with a footer"),
        (whole[:-8] + (2**31).to_bytes(4, "little") + b"PAR1", "does not end with a footer"),
    ):
        path.write_bytes(content)
        with open(path, "rb") as file, pytest.raises(pages.BadPage, match=why):
            pages.row_groups(file, columns)
    path.write_bytes(whole)
    with (
        open(path, "rb") as file,
        pytest.raises(pages.BadPage, match=rf"has {columns} columns, the schema {columns + 1}"),
    ):
        pages.row_groups(file, columns + 1)


def stored(path: Path) -> None:
    store.read(path)


def logged(path: Path) -> None:
    found = detect([str(path)])
    for piece in pieces(found):
        read(piece, found)


FILES: dict[str, tuple[Callable[[Path], object], Callable[[Path], None]]] = {
    "rollouts": (lambda path: store.write(rollouts(), path), stored),
    "log": (lambda path: write_log(ragged(3), path), logged),
}
STEPS = (1, 16, 255)
"""What is added to a byte, modulo 256: one of them for each byte, in turn."""
EVERY = 1 if int(os.environ.get("OFFDRIFT_FUZZ", "8")) >= 100 else 7
"""Of the bytes every so manieth; all of them with OFFDRIFT_FUZZ=100."""


def spoil(name: str, path: Path) -> None:
    """Read a file with each byte of its footer changed, one at a time; the number of bytes goes to the output."""
    write, reads = FILES[name]
    write(path)
    whole = path.read_bytes()
    begin = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    for at in range(begin, len(whole), EVERY):
        path.write_bytes(whole[:at] + bytes([(whole[at] + STEPS[at // EVERY % 3]) % 256]) + whole[at + 1 :])
        print(at - begin, flush=True)
        with contextlib.suppress(RecordError):
            reads(path)


@pytest.mark.parametrize("name", FILES)
def test_no_byte_of_a_footer_ends_the_process(tmp_path: Path, name: str) -> None:
    """Arrow throws where nothing catches it, for instance at a histogram of levels that the schema does not have."""
    command = [sys.executable, "-m", "tests.records.test_pages", name, str(tmp_path / "a.parquet")]
    run = subprocess.run(command, capture_output=True, text=True)
    last = int(run.stdout.split()[-1])
    assert run.returncode == 0, f"byte {last} of the footer: {run.stderr[-2000:]}"
    assert last > 3000


if __name__ == "__main__":
    spoil(sys.argv[1], Path(sys.argv[2]))
