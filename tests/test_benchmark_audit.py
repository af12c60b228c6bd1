"""The benchmark of the audit runs, counts the same numbers three ways, and times every arm."""

import importlib
import json
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def benchmark():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("audit")


def test_a_tiny_run(benchmark, tmp_path, monkeypatch):
    threads, path = torch.get_num_threads(), tmp_path / "audit.json"
    processes = []
    monkeypatch.setattr(benchmark, "peak_mib", lambda arm, file: processes.append(arm) or 1.0)
    found = benchmark.main(["--tokens", "20000", "--steps", "2", "--repeats", "1", "--json", str(path)])
    torch.set_num_threads(threads)
    assert json.loads(path.read_text()) == json.loads(json.dumps(found))
    arms = benchmark.available()
    assert found["parquet"].keys() == arms.keys() == found["peak_mib"].keys()
    assert processes == [arm for arm in arms for _ in range(2)]
    assert found["decoded"].keys() >= {"everything", "core statistics", "facets"}
    assert all(x["tokens_per_second"] > 0 for part in ("decoded", "parquet") for x in found[part].values())
    assert all(x < 1e-3 for x in found["disagreement"].values())


def test_another_number_is_noticed(benchmark, tmp_path, monkeypatch):
    pytest.importorskip("polars")
    file = benchmark.write_log(benchmark.make_log(3000, steps=1), tmp_path / "log.parquet")
    right = benchmark.core
    monkeypatch.setattr(benchmark, "core", lambda path: {step: {**n, "k3": 1.01 * n["k3"] + 1e-4} for step, n in right(path).items()})  # fmt: skip
    with pytest.raises(AssertionError, match="finds other numbers"):
        benchmark.disagreement(file)


def test_peak_memory_is_of_a_process_of_its_own(benchmark, tmp_path):
    file = benchmark.write_log(benchmark.make_log(3000, steps=1), tmp_path / "log.parquet")
    assert benchmark.peak_mib("reading alone", file) > 0
