"""Peak memory as the benchmarks measure it: of all threads, whatever was allocated before."""

import importlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
import torch

MIB = 2**18  # float32 numbers


@pytest.fixture
def peak_mib(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    return importlib.import_module("measure").peak_mib


def test_blocks_count_once_while_they_live(peak_mib):
    torch.ones(16 * MIB)  # freed at once: what it leaves behind must not be reused unseen

    def run():
        for _ in range(4):
            torch.ones(8 * MIB)
        return torch.ones(3 * MIB) + torch.ones(3 * MIB)

    assert [peak_mib(run) for _ in range(2)] == pytest.approx([9, 9], abs=0.6)


def test_blocks_of_every_thread_count(peak_mib):
    with ThreadPoolExecutor(3) as pool:

        def run():
            together = Barrier(3)

            def work(size: int) -> None:
                block = torch.ones(size * MIB)
                together.wait(10)
                block.sum()

            list(pool.map(work, (4, 5, 6)))

        assert [peak_mib(run) for _ in range(2)] == pytest.approx([15, 15], abs=0.6)
