"""Bytes of small files, flipped one at a time: readers of an audit and of a certificate end with typed errors."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from offdrift.audit.partial import AuditPartial, Job, work
from offdrift.errors import OffdriftError
from offdrift.prove.certify import longest_response, newest_policy
from offdrift.records import store
from offdrift.records.readers import detect, pieces
from offdrift.records.recorder import write_log
from tests.fuzz.readers import LIMIT, LOG_FILES, PLAIN, a_log
from tests.records.samples import ragged, rollouts

SECONDS = 20
EXAMPLES = int(os.environ.get("OFFDRIFT_FUZZ", "8"))
MOST = 25 * EXAMPLES
"""Flips of one file; of more bytes, evenly spread ones."""


def audited(path: Path) -> None:
    """What `offdrift audit` does with a log, up to the merged part."""
    found = detect([str(path)], limit=LIMIT)
    job, total = Job(found, sample_rate=1e-9), AuditPartial()  # methods that are tried look at nothing new
    for piece in pieces(found):
        total = total.merge(work(piece, job))
    for bad in total.bad:
        assert bad.reason
    if total.tally is not None:
        total.tally.as_dict()


def certified(path: Path) -> None:
    """What `offdrift certify` reads of a file."""
    newest_policy([path])
    longest_response([path])
    batch = store.read(path)
    batch.prompt_keys()
    assert len(batch.segments.lengths) == batch.num_sequences


def own(path: Path) -> None:
    write_log(ragged(3), path.with_suffix(".bin")).rename(path)


FILES: dict[str, tuple[str, Callable[[Path], object], Callable[[Path], None]]] = {
    "rollouts": ("a.parquet", lambda path: store.write(rollouts(), path), certified),
    "rollouts as a log": ("a.parquet", lambda path: store.write(rollouts(), path), audited),
    "own log": ("a.parquet", own, audited),
    "plain lines": ("a.jsonl", lambda path: path.write_text(2 * PLAIN), audited),
    **{
        name: (
            f"step_7_{Path(LOG_FILES[name]).name}",
            lambda path, name=name: a_log(LOG_FILES[name])(path.parent),
            audited,
        )
        for name in ("slime", "skyrl", "miles columns")
    },
}


@contextmanager
def in_time() -> Iterator[None]:
    def hangs(number: int, frame: object) -> None:
        raise AssertionError(f"a reader was at work for {SECONDS} s")

    previous = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def places(data: bytes, name: str) -> list[int]:
    """Bytes to flip: all, or as many as there is time for; of Parquet, half of them in the footer."""
    n = len(data)
    if n <= MOST:
        return list(range(n))
    if not name.endswith(".parquet"):
        return list(range(0, n, -(-n // MOST)))
    footer = n - 8 - int.from_bytes(data[-8:-4], "little")
    halves = ((0, footer), (footer, n))
    return [i for low, high in halves for i in range(low, high, max(1, -(-2 * (high - low) // MOST)))]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", FILES)
def test_a_flipped_byte_is_read_or_refused_by_name(tmp_path: Path, kind: str) -> None:
    name, make, reader = FILES[kind]
    path = tmp_path / name
    make(path)
    reader(path)
    data = path.read_bytes()
    refused = 0
    for number, i in enumerate(places(data, name)):
        mask = 1 << i % 8 if number % 2 else 0xFF  # one bit of every other byte, all bits of those between
        path.write_bytes(data[:i] + bytes([data[i] ^ mask]) + data[i + 1 :])
        with in_time():
            try:
                reader(path)
            except OffdriftError:
                refused += 1
            except Exception as error:
                raise AssertionError(f"byte {i} of {len(data)}, xor {mask:#x}: {error!r}") from error
    assert refused or kind == "plain lines"  # a row that is no JSON costs itself


def test_the_footer_of_a_parquet_file_is_flipped_whole(tmp_path: Path) -> None:
    """What `places` takes for the footer is it."""
    path = store.write(rollouts(), tmp_path / "a.parquet")
    data = path.read_bytes()
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    assert pq.read_metadata(path).serialized_size == len(data) - 8 - footer
