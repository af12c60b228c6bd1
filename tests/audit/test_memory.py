"""An audit's memory is that of the pieces that it holds, however large the log: nothing waits for Python's collector."""

import gc
import json
import subprocess
import sys
import weakref

import pytest
import torch

from offdrift.audit.tally import MAX_POINTS
from offdrift.logprobs import LogProbs
from offdrift.records.batch import Logged
from offdrift.records.recorder import GROUP_BYTES, write_log
from offdrift.segments import Segments
from offdrift.stats import DriftStats, signature

LENGTH = 512


def write(path, groups: int) -> int:
    """A log of so many equal row groups of two pieces each, one step in each; bytes of a row group once decoded."""
    rows = GROUP_BYTES // (LENGTH * 12 + 64)  # and what a row has besides its three lists
    sequences = rows * groups
    g = torch.Generator().manual_seed(0)
    rollout = -torch.rand(sequences * LENGTH, generator=g)
    log = Logged(
        cu_seqlens=torch.arange(sequences + 1) * LENGTH,
        step=torch.arange(sequences) // rows,
        row=torch.arange(sequences) + 1,
        response_lengths=torch.full((sequences,), LENGTH),
        logp_rollout=rollout,
        logp_old=(rollout + 0.01 * torch.randn(len(rollout), generator=g)).clamp(max=0.0),
        advantages=torch.randn(len(rollout), generator=g),
    )
    write_log(log, path)
    return rows * LENGTH * 12


AUDIT = """
import gc, json, sys, pyarrow as pa
from offdrift.audit.partial import Job, work
from offdrift.records.readers import detect, pieces
gc.disable()  # what only it would free counts
found = detect(sys.argv[1:])
total, stays = None, []
for piece in pieces(found):
    part = work(piece, Job(found, sample_rate=1e-9))
    total = part if total is None else total.merge(part)
    stays.append(pa.total_allocated_bytes())
print(json.dumps([pa.default_memory_pool().max_memory(), stays]))
"""


def test_an_audit_of_four_times_the_row_groups_takes_the_same_memory(tmp_path):
    """In processes of their own: the most bytes of decoded columns at once, and what stays after each piece."""
    peaks = {}
    for groups in (1, 4):
        path = tmp_path / f"{groups}.parquet"
        decoded = write(path, groups)
        done = subprocess.run([sys.executable, "-c", AUDIT, str(path)], capture_output=True, text=True, check=True)
        peaks[groups], stays = json.loads(done.stdout)
        assert len(stays) == 2 * groups
        assert min(stays[::2]) > decoded / 4  # where the next piece goes on
        assert max(stays[1::2]) < decoded / 100  # nothing of a row group that was read
    assert peaks[4] < 1.05 * peaks[1]


RESIDENT = """
import json, resource, sys
from offdrift.audit.partial import AuditPartial, Job, work
from offdrift.records.readers import detect, pieces
found = detect([sys.argv[1]])
part = None
for piece in pieces(found):
    one = AuditPartial.from_bytes(work(piece, Job(found, sample_rate=float(sys.argv[2]))).to_bytes())
    part = one if part is None else part.merge(one)
told = part.tally.as_dict()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
print(json.dumps([peak, len(told["steps"]), told["steps_per_point"]]))
"""


def many_steps(path, steps: int) -> None:
    """A log of a response of two tokens in each step, from workers of as many names."""
    g = torch.Generator().manual_seed(0)
    rollout = -torch.rand(2 * steps, generator=g)
    log = Logged(
        cu_seqlens=torch.arange(steps + 1) * 2,
        step=torch.arange(steps),
        row=torch.arange(steps) + 1,
        response_lengths=torch.full((steps,), 2),
        logp_rollout=rollout,
        logp_old=(rollout - 0.01).clamp(max=0.0),
        advantages=torch.ones(2 * steps),
        rewards=torch.ones(steps),
        rollout_version=torch.arange(steps).repeat_interleave(2),
        version=torch.arange(steps) + 1,
        workers=tuple(f"worker-{i:06}" for i in range(steps)),
    )
    write_log(log, path)


@pytest.mark.slow
def test_an_audit_of_eight_times_the_steps_takes_little_more_memory(tmp_path):
    """Resident memory of a process: steps beyond those that are drawn, and names beyond those that are shown, are none.

    Methods are tried on about 300 steps of the one and 400 of the other. Measured, MiB: 1,000 steps 423, 8,200 steps 435,
    100,000 steps 522, of which the rows themselves take the rest.
    """
    peaks = {}
    for steps, rate in ((1000, 0.3), (8200, 0.05)):
        many_steps(tmp_path / f"{steps}.parquet", steps)
        words = [sys.executable, "-c", RESIDENT, str(tmp_path / f"{steps}.parquet"), str(rate)]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        peaks[steps], points, per_point = json.loads(done.stdout)
        assert points <= MAX_POINTS
        assert (per_point > 1) == (steps > MAX_POINTS)
    assert peaks[8200] - peaks[1000] < 35, peaks


@pytest.mark.parametrize("unscored", [False, True])
@pytest.mark.parametrize("current", [False, True])
def test_a_batch_is_freed_at_once_when_nothing_refers_to_it(unscored, current):
    """Its tensors would otherwise stay, on a device too, until Python looks for circles: after many steps."""
    gc.collect()
    gc.disable()
    try:
        rollout = torch.tensor([-1.0, -9999.0 if unscored else -1.1, -0.5])
        logp = torch.tensor([-1.2, -1.0, -0.6], requires_grad=True)
        packed = LogProbs.pack(
            rollout, None if current else logp * 1.0, logp_old=logp.detach(), segments=Segments.from_lengths([2, 1])
        )
        batch = packed.with_current(logp * 1.0) if current else packed
        DriftStats.of(batch)
        signature(batch)
        batch.scored.detached_log_ratios  # noqa: B018
        gone = [weakref.ref(batch), weakref.ref(packed), weakref.ref(batch.scored), weakref.ref(batch.logp)]
        del batch, packed
        assert [ref() for ref in gone] == [None] * 4
    finally:
        gc.enable()
