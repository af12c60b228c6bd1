"""Every reader meets spoiled files with this library's own errors or with a result: no traceback, no hang, no flood."""

import os
import random
import shutil
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from offdrift.errors import OffdriftError
from tests.fuzz.readers import READERS, Reader
from tests.fuzz.spoil import spoiled

EXAMPLES = int(os.environ.get("OFFDRIFT_FUZZ", "8"))
SECONDS = 20


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("inputs")


class Hangs(Exception):
    """A reader that took too long."""


def _hangs(number: int, frame: object) -> None:
    raise Hangs(f"a reader was at work for {SECONDS} s")


@pytest.mark.parametrize("name", READERS)
def test_good_inputs_are_read(tmp_path: Path, name: str) -> None:
    READERS[name].make(tmp_path)
    assert any(path.is_file() for path in tmp_path.glob(READERS[name].files))
    said = refusal(READERS[name], tmp_path)
    assert READERS[name].refused in said
    assert bool(said) == bool(READERS[name].refused), said


def refusal(reader: Reader, folder: Path) -> str:
    """What the reader says of an input that it refuses; empty if it reads it."""
    try:
        reader.read(folder)
    except OffdriftError as error:
        return str(error) or "(nothing)"
    return ""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", READERS)
def test_spoiled_inputs_are_read_or_refused_by_name(inputs: Path, name: str) -> None:
    reader, good, bad = READERS[name], inputs / name / "good", inputs / name / "bad"
    good.mkdir(parents=True)
    reader.make(good)
    files = sorted(path for path in good.glob(reader.files) if path.is_file())
    previous = signal.signal(signal.SIGPROF, _hangs)  # of CPU time: other processes may have the cores

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(seed=st.integers(0, 2**32))
    def one(seed: int) -> None:
        draw = random.Random(seed)
        shutil.rmtree(bad, ignore_errors=True)
        shutil.copytree(good, bad)
        file = draw.choice(files)
        (bad / file.relative_to(good)).write_bytes(spoiled(file, file.read_bytes(), draw))
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            said = refusal(reader, bad)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        assert "Traceback" not in said
        assert said != "(nothing)"

    try:
        one()
    finally:
        signal.signal(signal.SIGPROF, previous)
