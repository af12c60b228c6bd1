"""Small nasty files in place of good ones: each reader meets each file that its format could be, in little memory.

`corpus/` holds files that have broken a reader of somebody's, or of this library before it was mended: `lines` stand
for .jsonl, `documents` for .json, `settings` for .toml and `binary` for every other format.
"""

import json
import os
import resource
import shutil
import signal
import traceback
import zlib
from pathlib import Path

import pytest

from tests.fuzz.readers import READERS, Reader
from tests.fuzz.test_readers import EXAMPLES, refusal

CORPUS = Path(__file__).parent / "corpus"
KINDS = {".jsonl": "lines", ".json": "documents", ".toml": "settings"}
CPU, SECONDS, MEMORY = 10, 40, 1 << 30
"""Seconds of work, seconds of waiting (on a busy machine), bytes."""
STEP = 1 if EXAMPLES >= 100 else 4
"""Of the corpus every so manieth file, another part with each reader: all of it with OFFDRIFT_FUZZ=100."""
PLANTED = Path("/tmp/pwned")
"""What programs in the corpus would make if they were run."""


def in_a_fork(reader: Reader, folder: Path) -> str:
    """What came of reading a folder, in a process that may take little time and memory."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ours)
        try:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            most = pages * resource.getpagesize() + MEMORY
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
            signal.alarm(SECONDS)
            signal.setitimer(signal.ITIMER_PROF, CPU)
            said = refusal(reader, folder)
        except BaseException as error:
            said = f"!{type(error).__name__}: {error}; {traceback.format_exc()[-1200:]}"
        os.write(theirs, said.encode("utf-8", "replace")[:60_000])
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        said = pipe.read().decode()
    _, status = os.waitpid(pid, 0)
    return said if status == 0 else f"!ended by {os.waitstatus_to_exitcode(status)}"


def no_file(how: str, path: Path) -> None:
    """Something that has the file's name and is none."""
    path.unlink()
    if how == "pipe":
        os.mkfifo(path)
    elif how == "folder":
        path.mkdir()
    else:
        path.symlink_to(
            {"device": "/dev/zero", "loop": path.name, "nowhere": "nowhere", "memory": "/proc/self/mem"}[how]
        )


NO_FILES = ("pipe", "folder", "device", "loop", "nowhere", "memory")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="limits of memory are those of Linux")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", READERS)
def test_nasty_files_are_read_or_refused(tmp_path: Path, name: str) -> None:
    reader, good, bad = READERS[name], tmp_path / "good", tmp_path / "bad"
    good.mkdir()
    reader.make(good)
    targets = sorted(path for path in good.glob(reader.files) if path.is_file())
    assert targets
    reader.read(good) if not reader.refused else refusal(reader, good)  # whatever it loads is loaded
    PLANTED.unlink(missing_ok=True)
    # One file of each kind that is read.
    by_kind = {(path.suffix, path.stem.split("-")[0]): path for path in reversed(targets)}
    targets = list(by_kind.values())[:3]
    for i, target in enumerate(targets):
        nasty = sorted((CORPUS / KINDS.get(target.suffix, "binary")).iterdir())
        nasty = nasty[zlib.crc32(f"{name} {target.name}".encode()) % STEP :: STEP]
        for each in (*nasty, *NO_FILES[i :: len(targets)]):  # each of these once in place of a file of the reader's
            shutil.rmtree(bad, ignore_errors=True)
            shutil.copytree(good, bad)
            place = bad / target.relative_to(good)
            if isinstance(each, str):
                no_file(each, place)
            else:
                shutil.copy(each, place)
            said = in_a_fork(reader, bad)
            what = f"{target.relative_to(good)} is {each if isinstance(each, str) else each.name}: {said[-1500:]}"
            assert not said.startswith("!"), what
            assert "Traceback" not in said, what
            assert "\x1b" not in said, what
    assert not PLANTED.exists(), "a program in a file was run"


def test_the_corpus_is_small_and_every_kind_is_there() -> None:
    files = [path for path in CORPUS.rglob("*") if path.is_file()]
    assert {path.parent.name for path in files} == {*KINDS.values(), "binary"}
    assert len(files) > 70
    assert sum(path.stat().st_size for path in files) < 1 << 20
    with pytest.raises(RecursionError):
        json.loads((CORPUS / "documents/deep.json").read_text())
