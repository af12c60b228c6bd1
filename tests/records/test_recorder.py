"""The recorder: nothing waits for the disk, nothing is lost that need not be, no file is ever broken."""

import gc
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from offdrift.cli import watch as watch_command
from offdrift.errors import OffdriftError, RecordError, ShapeError
from offdrift.records import recorder as module
from offdrift.records.batch import Logged
from offdrift.records.recorder import Recorder, WhenFull, record, write_unclaimed
from tests.audit.logs import log_of
from tests.command import command
from tests.records.samples import at, flat, ragged, read_all

SOON = 60.0
"""Seconds after which something that must happen is taken not to happen."""


def steps_in(folder: Path) -> list[int]:
    """Steps of all sequences that an audit would read, three per batch of `at`."""
    _, batches, bad = read_all(folder)
    assert not bad
    return [s for b in batches for s in b.step.tolist()]


def thrice(steps: range | list[int]) -> list[int]:
    return [s for s in steps for _ in range(3)]


def until(true: Callable[[], object]) -> None:
    end = time.monotonic() + SOON
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


class Disk:
    """A disk that takes nothing until it is released."""

    def __init__(self) -> None:
        self.released, self.asked = threading.Event(), threading.Event()

    def write(self, *args: object, **options: object) -> Path:
        self.asked.set()
        assert self.released.wait(SOON)
        return write_unclaimed(*args, **options)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    slow = Disk()
    monkeypatch.setattr(module, "write_unclaimed", slow.write)
    yield slow
    slow.released.set()


# -- what is written ---------------------------------------------------------------------------


def test_batches_come_back_as_they_were_in_one_file(tmp_path: Path) -> None:
    batches = [ragged(5, seed=i) for i in range(4)]
    with Recorder(tmp_path, seconds=SOON) as recorder:
        for batch in batches:
            recorder.add(batch)
    assert (recorder.written, recorder.dropped) == (4, 0)
    assert [p.name for p in tmp_path.iterdir()] == ["log-00000000-00000001-rank0-0.parquet"]
    found, back, bad = read_all(tmp_path)
    assert (found.framework, bad) == ("offdrift", [])
    want, have = flat(batches), flat(back)
    assert len(want["logp"]) > 100
    for name in want.keys() - {"row", "group_ids"}:
        assert have[name] == want[name], name
    assert have["row"] == list(range(1, 21))


def test_batches_share_a_file_until_it_is_full(tmp_path: Path) -> None:
    size = 3 * module.num_bytes(at(0, 40)) / 2**20
    with Recorder(tmp_path, file_mib=size * 0.9, seconds=SOON, queue=100) as recorder:
        for step in range(30):
            recorder.add(at(step, 40))
    files = sorted(tmp_path.iterdir())
    assert 5 <= len(files) <= 15
    assert sorted(set(steps_in(tmp_path))) == list(range(30))


def test_a_batch_waits_no_longer_than_it_may(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, seconds=0.01)
    recorder.add(at(1))
    until(lambda: recorder.written == 1)
    assert steps_in(tmp_path) == [1] * 3
    recorder.close()


def test_a_queue_that_is_half_full_is_written_at_once_and_together(tmp_path: Path) -> None:
    """Nothing else would have it written: neither age nor size, nor the end."""
    with Recorder(tmp_path, seconds=1e6, queue=6) as recorder:
        for step in range(3):
            recorder.add(at(step))
        until(lambda: recorder.written == 3)
        assert len(list(tmp_path.iterdir())) == 1


def test_batches_with_other_fields_or_names_have_files_of_their_own(tmp_path: Path) -> None:
    bare = replace(at(1), entropy=None)
    with Recorder(tmp_path, framework="verl", seconds=SOON) as recorder:
        recorder.add(at(0))
        recorder.add(bare)
        recorder.add(at(2), name="eval_0")
        recorder.add(at(3))
    names = {p.name for p in tmp_path.iterdir()}
    assert names == {
        "log-00000000-00000003-rank0-0.parquet",
        "log-00000001-00000001-rank0-0.parquet",
        "eval_0-00000002-00000002-rank0-0.parquet",
    }
    found, batches, _ = read_all(tmp_path)  # evaluations are left out
    assert found.framework == "verl"
    assert sorted(s for b in batches for s in b.step.tolist()) == thrice([0, 1, 3])
    assert [b.entropy is None for b in batches] == [False, True]


def test_dropped_tokens_keep_their_places_in_a_shared_file(tmp_path: Path) -> None:
    full, part = at(0), at(1)
    keep = torch.arange(part.num_tokens) % 2 == 1
    kept = torch.cat([torch.zeros(1).long(), keep.cumsum(0)])[part.cu_seqlens].diff()
    whole = log_of(full.response_lengths, full.step, logp=full.logp)
    places = {"response_lengths": part.response_lengths, "position": part.in_response[keep]}
    thinned = log_of(kept, part.step, logp=part.logp[keep], **places)
    with Recorder(tmp_path, seconds=SOON) as recorder:
        recorder.add(whole)
        recorder.add(thinned)
    assert len(list(tmp_path.iterdir())) == 1
    _, (back,), _ = read_all(tmp_path)
    assert torch.equal(back.in_response, torch.cat([whole.in_response, thinned.in_response]))
    assert len(back.in_response) > 30


def test_no_sequences_make_no_file_and_no_tokens_keep_their_rows(tmp_path: Path) -> None:
    with Recorder(tmp_path) as recorder:
        recorder.add(ragged(0))
        recorder.flush()
        assert list(tmp_path.iterdir()) == []
        recorder.add(ragged(3, longest=1))
    _, (back,), _ = read_all(tmp_path)
    assert (recorder.written, back.num_sequences, back.num_tokens) == (2, 3, 0)


def test_without_text_equal_prompts_stay_groups(tmp_path: Path) -> None:
    with Recorder(tmp_path, text=False) as recorder:
        recorder.add(replace(at(1, 6), group_ids=None))
    _, (back,), _ = read_all(tmp_path)
    assert (back.prompts, back.completions) == (None, None)
    assert (back.group_ids.diff() == 0).tolist() == [True, False, True, False, True]


# -- never waiting -----------------------------------------------------------------------------


def test_adds_return_while_the_disk_hangs_and_the_queue_stays_bounded(
    tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(tmp_path, when_full="drop", queue=4)
    for step in range(10):
        recorder.add(at(step))  # on this thread: were it to wait, the test would never end
    assert disk.asked.wait(SOON)
    assert (recorder.written, recorder.dropped) == (0, 6)
    assert not recorder.flush(timeout=0)
    assert [r.message for r in caplog.records if "dropped" in r.message] == [
        f"{tmp_path}: the disk is slower than training: batches are dropped, and counted"
    ]
    disk.released.set()
    recorder.close()
    assert (recorder.written, recorder.dropped) == (4, 6)
    assert caplog.records[-1].message == f"{tmp_path}: 6 batches were not recorded, 4 were"
    assert steps_in(tmp_path) == thrice(range(4))


@pytest.mark.parametrize("limit", [{"queue": 4}, {"queue": 100, "queue_mib": 0.5}])
def test_by_default_a_full_queue_waits_and_nothing_is_lost(
    tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture, limit: dict[str, float]
) -> None:
    caplog.set_level(logging.WARNING)
    recorder = Recorder(tmp_path, **limit)
    batch, returned = at(0, 100), count()
    size = module.num_bytes(batch)

    def train() -> None:
        for _ in range(12):
            recorder.add(replace(batch, step=batch.step + next(returned)))

    thread = threading.Thread(target=train)
    thread.start()
    until(lambda: any("steps wait" in r.message for r in caplog.records))
    waiting = next(returned) - 1  # the one that waits has drawn its number
    room = limit.get("queue_mib", 1e9) * 2**20
    assert 1 < waiting == min(limit["queue"], int(room // size)) < 12
    disk.released.set()
    thread.join(SOON)
    recorder.close()
    assert (recorder.written, recorder.dropped) == (12, 0)
    assert len(steps_in(tmp_path)) == 12 * 100


def test_a_batch_larger_than_the_queue_is_let_in_alone(tmp_path: Path) -> None:
    with Recorder(tmp_path, queue=1, queue_mib=1e-6) as recorder:
        for step in range(3):
            recorder.add(at(step))
    assert steps_in(tmp_path) == thrice(range(3))


class Graph(torch.autograd.Function):
    """A node of a graph that can be watched."""

    nodes: ClassVar[weakref.WeakSet[object]] = weakref.WeakSet()

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        Graph.nodes.add(ctx)
        return x.clone()


def test_what_a_step_does_afterwards_is_not_recorded_and_nothing_of_it_is_kept(tmp_path: Path, disk: Disk) -> None:
    recorder, batch = Recorder(tmp_path), at(1)
    logp = Graph.apply(batch.logp * torch.ones(batch.num_tokens, requires_grad=True))
    assert logp.requires_grad
    assert len(Graph.nodes) == 1
    expected, wanted = batch.logp.clone(), batch.advantages.clone()
    recorder.add(replace(batch, logp=logp))
    batch.advantages.zero_()
    ref = weakref.ref(logp)
    del logp
    gc.collect()
    assert ref() is None
    assert len(Graph.nodes) == 0
    disk.released.set()
    recorder.close()
    _, (back,), _ = read_all(tmp_path)
    assert torch.equal(back.logp, expected)
    assert torch.equal(back.advantages, wanted)
    assert len(expected) == batch.num_tokens > 20


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_device_is_not_waited_for_and_its_memory_not_kept(tmp_path: Path) -> None:
    n = 1 << 20
    before = torch.cuda.memory_allocated()
    x = torch.zeros(n, device="cuda")
    with Recorder(tmp_path) as recorder:
        recorder.add(at(0))  # whatever is set up once
        torch.cuda._sleep(2_000_000_000)
        x -= 1.5
        late = torch.cuda.Event()
        one = torch.tensor([1])
        recorder.add(Logged(cu_seqlens=torch.tensor([0, n]), step=one, row=one, response_lengths=one * n, logp=x))
        late.record()
        assert not late.query()  # the device is still busy with what came before
        x.zero_()
        del x
        assert torch.cuda.memory_allocated() == before
    _, batches, _ = read_all(tmp_path)
    logp = next(b.logp for b in batches if b.step[0] == 1)
    assert bool((logp == -1.5).all())


def wrongly(batch: Logged, **fields: torch.Tensor) -> Logged:
    """The batch with fields that the checks of the tests would refuse, and nobody else's."""
    wrong = replace(batch)
    for name, value in fields.items():
        object.__setattr__(wrong, name, value)
    return wrong


# -- disks that fail ---------------------------------------------------------------------------


ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
ENVIRONMENT.pop("RANK", None)


def run(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", HEAD + program, str(folder)]
    return subprocess.run(words, capture_output=True, text=True, timeout=SOON, env=ENVIRONMENT)


HEAD = """
import os, signal, sys, time
from pathlib import Path
from offdrift.errors import RecordError
from offdrift.records.recorder import Recorder
from tests.records.samples import at
folder = Path(sys.argv[1])
"""

DISK_FULL = """
import resource
def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
for choice in ("raise", "warn"):
    recorder = Recorder(folder / choice, on_error=choice)
    recorder.add(at(0))
    recorder.flush()
    limit(1000)
    recorder.add(at(1))
    try:
        recorder.flush()
        print("went on")
    except RecordError as e:
        print(e)
    limit(resource.RLIM_INFINITY)
    try:
        recorder.add(at(2))
    except RecordError:  # the thread tried again before there was room
        recorder.add(at(2))
    recorder.close()
    print(recorder.written, recorder.dropped)
"""


def test_a_disk_that_takes_no_more(tmp_path: Path) -> None:
    done = run(DISK_FULL, tmp_path)
    assert done.returncode == 0, done.stderr
    told, *others = done.stdout.splitlines()
    # Told with the file and a way out, and nothing is lost once there is room again ...
    assert told.startswith(f"cannot write {tmp_path}/raise/log-00000001-00000001-rank0-0.parquet: ")
    assert "free disk space" in told
    assert sorted(steps_in(tmp_path / "raise")) == thrice(range(3))
    # ... or, if training should go on, logged and counted.
    assert others == ["3 0", "went on", "2 1"]
    assert "1 batches are lost: cannot write" in done.stderr
    assert "1 batches were not recorded, 2 were" in done.stderr
    assert sorted(steps_in(tmp_path / "warn")) == thrice([0, 2])
    assert list(tmp_path.rglob(".*")) == []


def put_in_the_way(folder: Path) -> None:
    """A file where the recorder's folder was."""
    folder.rmdir()
    folder.write_text("in the way")


@pytest.mark.parametrize("when_full", ["wait", "drop"])
def test_a_folder_that_goes_away_is_reported_at_the_next_add_and_at_the_end(
    tmp_path: Path, when_full: WhenFull
) -> None:
    folder = tmp_path / "log"
    recorder = Recorder(folder, seconds=0.01, queue=1, when_full=when_full)
    put_in_the_way(folder)
    recorder.add(at(0))
    until(lambda: recorder._box._error)
    with pytest.raises(RecordError, match=r"cannot write .*/log/log-.*parquet: .*choose another"):
        recorder.add(at(1))
    if when_full == "drop":  # what was kept is written once it can be
        folder.unlink()
        recorder.close()
        assert steps_in(folder) == [0] * 3
        return
    with pytest.raises(RecordError, match=r"choose another folder \(1 batches are lost\)"):
        recorder.close()
    assert (recorder.written, recorder.dropped) == (0, 1)
    recorder.close()


@pytest.mark.parametrize(("first", "warns"), [(0, True), (1, True), (2, False)])
def test_a_second_run_that_repeats_steps_of_the_first_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, first: int, warns: bool
) -> None:
    """One that goes on behind them is the same run, resumed; and another rank repeats nothing."""
    with Recorder(tmp_path, rank=0) as recorder:
        recorder.add(at(0))
        recorder.add(at(1))
    with Recorder(tmp_path, rank=1) as recorder:
        recorder.add(at(0))
    assert not caplog.records
    with Recorder(tmp_path, rank=0) as recorder:
        for step in (first, first + 1):
            recorder.add(at(step))
            recorder.flush()
    said = [r.message for r in caplog.records]
    words = f"{tmp_path} holds an earlier run up to step 1, and this one writes step {first} there"
    assert [words in text for text in said] == [True] * warns


def test_a_folder_that_cannot_be_made_is_told_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match=r"cannot record to .*file/log: .*choose a folder"):
        Recorder(tmp_path / "file" / "log")
    recorder = Recorder(tmp_path / "file" / "log", on_error="warn")
    recorder.add(at(0))
    recorder.close()
    assert recorder.dropped == 1
    assert len(caplog.records) == 3


def test_a_batch_that_contradicts_itself_is_named_and_the_others_are_written(tmp_path: Path) -> None:
    recorder, good = Recorder(tmp_path, seconds=SOON), at(1)
    with pytest.raises(ShapeError, match="rewards has 2 entries for 3 sequences"):
        recorder.add(wrongly(good, rewards=torch.zeros(2)))
    with pytest.raises(ShapeError, match="different lengths"):
        recorder.add(wrongly(good, logp=torch.zeros(5)))
    recorder.add(good)
    bad = [replace(good, cu_seqlens=good.cu_seqlens + 1), replace(good, tokens=torch.full_like(good.tokens, 2**31))]
    for wrong, said in zip(bad, ("cu_seqlens must start at 0", "beyond 32 bits"), strict=True):
        recorder.add(wrong)
        with pytest.raises(RecordError, match=said):
            recorder.flush()
    recorder.close()
    assert (recorder.written, recorder.dropped) == (1, 2)
    assert steps_in(tmp_path) == [1] * 3


@pytest.mark.parametrize("name", ["a/b", "..", "", ".x"])
def test_names_stay_in_the_folder(tmp_path: Path, name: str) -> None:
    with Recorder(tmp_path) as recorder, pytest.raises(RecordError, match="name="):
        recorder.add(at(0), name=name)
    assert list(tmp_path.iterdir()) == []


# -- processes that end, fork, and share a folder ------------------------------------------------

KILLED = """
recorder = Recorder(folder, seconds=0)
replaced, move = 0, os.replace
def hang(*paths):
    global replaced
    replaced += 1
    if replaced == 4:
        print("writing", flush=True)
        time.sleep(600)
    move(*paths)
os.replace = hang
for step in range(20):
    recorder.add(at(step))
    until = time.monotonic() + 60
    while recorder.written <= step and replaced < 4 and time.monotonic() < until:
        time.sleep(0.001)
time.sleep(600)
"""


def test_a_killed_process_leaves_whole_files_and_the_next_one_goes_on(tmp_path: Path) -> None:
    words = [sys.executable, "-c", HEAD + KILLED, str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) as process:
        assert process.stdout.readline() == "writing\n"
        process.kill()
    left = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    hidden = sorted(name for name in left if name.startswith("."))
    assert len(left) - len(hidden) == 3
    assert {name.rsplit(".")[-1] for name in hidden} == {"tmp", "claim"}
    assert steps_in(tmp_path) == thrice(range(3))
    # The next process repeats a step, and the one whose file was never finished.
    with Recorder(tmp_path, seconds=0) as recorder:
        for step in (2, 3, 4):
            recorder.add(at(step))
            recorder.flush()
    assert steps_in(tmp_path) == thrice([0, 1, 2, 2, 3, 4])
    assert all((tmp_path / name).read_bytes() == data for name, data in left.items())
    # What the killed process left is removed once no writer can be at it.
    long_ago = time.time() - 2 * module.STALE_S
    for name in hidden:
        os.utime(tmp_path / name, (long_ago, long_ago))
    Recorder(tmp_path).close()
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".")) == []
    assert steps_in(tmp_path) == thrice([0, 1, 2, 2, 3, 4])


TERMINATED = """
import signal
HANDLER
recorder = Recorder(folder, seconds=600)
for step in range(3):
    recorder.add(at(step))
print("added", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("handler", "status", "steps"),
    [
        ("", -signal.SIGTERM, range(3)),
        # Whoever has a handler keeps it, and what becomes of the process is theirs to say.
        ("signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))", 7, range(3)),
        ("signal.signal(signal.SIGTERM, lambda *_: os._exit(8))", 8, range(0)),
        ("signal.signal(signal.SIGTERM, signal.SIG_IGN)", None, range(0)),
    ],
)
def test_sigterm_writes_what_waits_and_then_ends_the_process(tmp_path: Path, handler, status, steps) -> None:
    words = [sys.executable, "-c", HEAD + TERMINATED.replace("HANDLER", handler), str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) as process:
        assert process.stdout.readline() == "added\n"
        assert not any(tmp_path.iterdir())
        process.terminate()
        if status is None:
            time.sleep(0.5)
            assert process.poll() is None
            process.kill()
        else:
            assert process.wait(timeout=60) == status
    assert (steps_in(tmp_path) if len(steps) else []) == thrice(steps)
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


ENDS = """
recorder = Recorder(folder, seconds=600)
recorder.add(at(0))
if os.fork() == 0:
    sys.exit(0)  # what waits is the parent's
os.wait()
if os.fork() == 0:
    recorder.add(at(1))
    sys.exit(0)
os.wait()
recorder.add(at(0))
raise KeyError("the loop fails")
"""


def test_a_process_that_ends_writes_what_waits_once_forks_included(tmp_path: Path) -> None:
    done = run(ENDS, tmp_path)
    assert "the loop fails" in done.stderr
    assert sorted(steps_in(tmp_path)) == thrice([0, 0, 1])
    assert len(list(tmp_path.iterdir())) == 2


def test_writers_of_one_name_never_replace_each_others_files(tmp_path: Path) -> None:
    ready = threading.Barrier(4)

    def write(seed: int) -> None:
        ready.wait()
        for i in range(4):
            write_unclaimed(at(100 * seed + i), tmp_path, "log", framework="offdrift")

    threads = [threading.Thread(target=write, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    assert len(list(tmp_path.iterdir())) == 16
    want = thrice([100 * seed + i for seed in range(4) for i in range(4)])
    assert sorted(steps_in(tmp_path)) == want


RANKS = """
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

def one(**options):
    with Recorder(folder, **options) as recorder:
        recorder.add(at(5))

one()
os.environ["RANK"] = "2"
one()
one(rank=7)
torch.distributed.init_process_group("fake", rank=3, world_size=4, store=FakeStore())
one()
"""


def test_ranks_write_into_one_folder(tmp_path: Path) -> None:
    """In a process of its own: an engine in this one may have a process group."""
    done = run(RANKS, tmp_path)
    assert done.returncode == 0, done.stderr
    names = [f"log-00000005-00000005-rank{rank}-0.parquet" for rank in (0, 2, 3, 7)]
    assert sorted(p.name for p in tmp_path.iterdir()) == names
    assert steps_in(tmp_path) == thrice([5] * 4)


def test_a_closed_recorder_takes_nothing_and_does_not_mask_what_ended_the_loop(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    recorder = Recorder(folder)

    def loop() -> None:
        with recorder:
            recorder.add(at(0))
            put_in_the_way(folder)
            raise KeyError("loop")

    with pytest.raises(KeyError, match="loop"):
        loop()
    assert recorder.closed
    assert recorder.dropped == 1
    with pytest.raises(RecordError, match="is closed"):
        recorder.add(at(1))


@pytest.mark.parametrize("flushed", [True, False])
def test_nobody_waits_for_a_thread_that_is_gone_and_its_loss_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flushed: bool
) -> None:
    def gone(*args: object, **options: object) -> Path:
        raise SystemExit

    monkeypatch.setattr(module, "write_unclaimed", gone)
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    recorder = Recorder(tmp_path, queue=1)
    recorder.add(at(0))
    if not flushed:
        until(lambda: recorder.closed)
    with pytest.raises(RecordError, match="1 batches are lost: SystemExit"):
        recorder.flush(timeout=5) if flushed else recorder.close()
    recorder.close(timeout=5)
    assert (recorder.closed, recorder.written, recorder.dropped) == (True, 0, 1)


@pytest.mark.parametrize("option", ["when_full", "on_error"])
def test_unknown_choices_are_named(tmp_path: Path, option: str) -> None:
    with pytest.raises((OffdriftError, TypeError), match=option):
        Recorder(tmp_path, **{option: "never"})


def test_closing_again_after_an_interrupt_waits_for_what_is_being_written(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(tmp_path, seconds=0)
    for step in range(3):
        recorder.add(at(step))
    assert disk.asked.wait(SOON)

    def interrupted(*_: object) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as ctrl_c:
        ctrl_c.setattr(recorder._own._changed, "wait_for", interrupted)
        with pytest.raises(KeyboardInterrupt):
            recorder.close()
    with pytest.raises(RecordError, match="is closed"):
        recorder.add(at(3))
    threading.Timer(0.05, disk.released.set).start()
    module._close_all()  # as at the end of the process
    assert (recorder.written, recorder.dropped) == (3, 0)
    assert steps_in(tmp_path) == thrice(range(3))


def test_a_loop_that_changes_its_directory_keeps_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    recorder = Recorder("log", seconds=600)
    recorder.add(at(0))
    monkeypatch.chdir(tmp_path / "elsewhere")
    recorder.close()
    assert steps_in(tmp_path / "log") == thrice([0])
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_two_threads_that_close_both_wait(tmp_path: Path, disk: Disk) -> None:
    recorder = Recorder(tmp_path)
    recorder.add(at(0))
    seen: list[int] = []

    def close() -> None:
        recorder.close()
        seen.append(recorder.written)

    threads = [threading.Thread(target=close) for _ in range(2)]
    for thread in threads:
        thread.start()
    until(lambda: recorder.closed and disk.asked.is_set())
    assert seen == []
    disk.released.set()
    for thread in threads:
        thread.join(SOON)
    assert seen == [1, 1]


def test_no_thread_outlives_closing(tmp_path: Path) -> None:
    def writers() -> int:
        return sum(t.name == "offdrift-recorder" for t in threading.enumerate())

    before = writers()
    for name in ("kept", "gone"):
        recorder = Recorder(tmp_path / name, seconds=600)
        recorder.add(at(0))
        assert writers() == before + 1
        if name == "gone":
            put_in_the_way(tmp_path / name)
        with pytest.raises(RecordError, match="is a file") if name == "gone" else nullcontext():
            recorder.close()
        assert writers() == before


PROCESSES = """
import multiprocessing

def begin(step):
    global recorder  # nothing but the end of the process closes it
    recorder = Recorder(folder, rank=step)
    recorder.add(at(step))

def grandchild(step):
    begin(step)
    child = fork.Process(target=recorder.add, args=(at(step + 1),))
    child.start()
    child.join()

fork = multiprocessing.get_context("fork")
for target, step in ((begin, 1), (grandchild, 2)):
    process = fork.Process(target=target, args=(step,))
    process.start()
    process.join()
    assert process.exitcode == 0
"""


def test_processes_of_multiprocessing_write_what_waits(tmp_path: Path) -> None:
    done = run(PROCESSES, tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(steps_in(tmp_path)) == thrice([1, 2, 3])
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


# -- `offdrift watch` on a folder that a recorder is writing to --

SEQUENCES, TIME = 64, 16


def step_of(recorder: Recorder, step: int, *, drift: float = 0.01) -> None:
    """A step whose log-ratio (current against rollout) has standard deviation `drift`."""
    generator = torch.Generator().manual_seed(step)
    rollout = -torch.rand(SEQUENCES, TIME, generator=generator) - 0.5
    moved = drift * torch.randn(SEQUENCES, TIME, generator=generator)
    record(
        recorder, step=step, logp_rollout=rollout, logp=(rollout + moved).clamp(max=0), mask=torch.ones(SEQUENCES, TIME)
    )


def test_the_command_follows_a_recorder_and_finds_an_engine_that_breaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From step 21 on the engines differ by half a nat per token."""

    def train() -> None:
        with Recorder(tmp_path, seconds=0.05) as recorder:
            for step in range(1, 41):
                step_of(recorder, step, drift=0.01 if step <= 20 else 0.5)
                time.sleep(0.01)

    class Clock:
        """It stands still while the recorder writes, however long that takes, then ticks."""

        now, sleep = 0.0, staticmethod(time.sleep)

        def monotonic(self) -> float:
            self.now += not training.is_alive()
            return self.now

    training = threading.Thread(target=train)
    training.start()
    monkeypatch.setattr(watch_command, "time", Clock())
    done = command(monkeypatch, capsys, "watch", str(tmp_path), "--every", "0.05", "--until-idle", "2", "--json")
    training.join()
    assert (done.code, done.stderr) == (0, "")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    steps = [row for row in lines if row["kind"] == "step"]
    assert [row["step"] for row in steps] == list(range(1, 41))
    assert {row["sequences"] for row in steps} == {SEQUENCES}
    # E[k3] of a normal log-ratio x with deviation s, to fourth order: s^2 / 2 + s^4 / 8.
    for row, s in ((steps[0], 0.01), (steps[-1], 0.5)):
        assert row["full/k3"] == pytest.approx(s**2 / 2 + s**4 / 8, rel=0.2)
    findings = [i for i, row in enumerate(lines) if row["kind"] == "finding"]
    assert findings
    assert min(findings) > next(i for i, row in enumerate(lines) if row.get("step") == 21)
