"""Peak memory as the benchmarks measure it: of all threads, whatever was allocated before."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
import torch
from measure import peak_mib

MIB = 2**18  # float32 numbers
torch.ones(16 * MIB)  # freed at once: what it leaves behind must not be reused unseen

def in_turn():
    for _ in range(4):
        torch.ones(8 * MIB)
    return torch.ones(3 * MIB) + torch.ones(3 * MIB)

def work(size, together):
    block = torch.ones(size * MIB)
    together.wait(10)
    block.sum()

def side_by_side():
    together = Barrier(3)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, (4, 5, 6), [together] * 3))

print(json.dumps([peak_mib(run) for run in (in_turn, side_by_side) * 2]))
"""


def test_blocks_of_every_thread_count_once_while_they_live():
    # In a process of its own, as benchmarks are: threads of other tests have heaps of their own.
    run = [sys.executable, "-c", SCRIPT]
    folder = Path(__file__).parents[1] / "benchmarks"
    done = subprocess.run(run, cwd=folder, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == pytest.approx([9, 15, 9, 15], abs=0.6)
