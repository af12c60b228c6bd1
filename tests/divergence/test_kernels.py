"""The GPU kernels: right in Triton's interpreter, compiled for real GPUs, right on one if it is there."""

import importlib
import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

NUMBERS = Path(__file__).with_name("kernel_numbers.py")
ROOT = Path(__file__).parents[2]

pytest.importorskip("triton", reason="Triton is not installed")


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A process of its own: how Triton runs programs is decided when it is imported."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TRITON_", "PYTEST_"))}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=kept | environment)


def assert_all_pass(done: subprocess.CompletedProcess[str], at_least: int) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    counts = re.findall(r"(\d+) (\w+)", done.stdout.strip().splitlines()[-1])
    assert [word for _, word in counts] == ["passed"], done.stdout
    assert int(counts[0][0]) >= at_least


@pytest.mark.slow
def test_numbers_in_the_interpreter():
    here = [str(NUMBERS), "-n", "0", "-p", "no:cacheprovider"]
    assert_all_pass(run("-m", "pytest", *here, TRITON_INTERPRET="1"), at_least=40)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_numbers_on_a_gpu():
    here = [str(NUMBERS), "-n", "0", "-p", "no:cacheprovider"]
    assert_all_pass(run("-m", "pytest", *here), at_least=40)


def test_offdrift_does_not_import_triton():
    code = "import sys, offdrift, offdrift.divergence.kernels; print('triton' in sys.modules)"
    assert run("-c", code).stdout.strip() == "False"


def test_without_triton_the_kernels_are_not_available(monkeypatch):
    from offdrift.divergence import kernels

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert kernels.available(torch.device("cpu"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not kernels.available(torch.device("cpu"))


@pytest.fixture(scope="module")
def compiled_for(tmp_path_factory):
    """Everything compiled by Triton and ptxas, without a GPU, and what came of it."""
    folder = tmp_path_factory.mktemp("compiled")

    @cache
    def count(arch: int, dtype: str) -> dict[str, dict]:
        path = folder / f"{arch}.json"
        done = run(
            *("benchmarks/gpu_kl.py", "--count", "--arch", str(arch), "--json", str(path)),
            *("--dtypes", dtype),
            TRITON_CACHE_DIR=str(folder),  # or a cache would answer, and nothing be compiled
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(path.read_text())["compiled"]

    return count


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "dtype"), [(90, "bf16"), (80, "fp32")])
def test_every_kernel_compiles_to_machine_code_without_spilling(compiled_for, arch, dtype):
    """Layouts, types and registers, which no interpreter sees."""
    compiled = compiled_for(arch, dtype)
    kernels = {
        *("one_sweep_rows", "one_sweep_rows:tv", "finish_rows"),
        *("exact_rows", "update_rows", "accumulate_rows"),
        *(f"gradient_rows:{of}" for of in ("kl_rollout_current", "kl_current_rollout", "entropy")),
    }
    assert set(compiled) == {f"{name} {dtype}" for name in kernels}
    for name, facts in compiled.items():
        assert facts["spilled_bytes"] == 0, name
        # One program's threads must fit the 65,536 registers of an SM.
        assert facts["registers"] * 32 * facts["warps"] <= 65_536, name
        assert facts["cubin_bytes"] > 1000


def test_the_sweeps_cost_what_their_documentation_says(compiled_for):
    """26 instructions for a pair of bfloat16 scores, 1 of them an exponential, or 30 with 2; 15 more for TV (sm_90)."""
    compiled = compiled_for(90, "bf16")
    alone, with_tv = (compiled[f"one_sweep_rows{of} bf16"] for of in ("", ":tv"))
    for facts in (alone, with_tv):
        blocks = [x for x in facts["sweeps"] if x["instructions"] > 200]  # the others are of the rest of a row
        one, two = ([x["per_entry"] for x in blocks if x["exponentials_per_entry"] == n] for n in (1, 2))
        assert len([x for x in one if 25 < x < 26.5]) == 2  # the first part of a row, and what follows it
        assert [x for x in two if 30 < x < 31]
        assert facts["registers"] <= 56
    assert 14 < min(x["per_entry"] for x in with_tv["sweeps"] if x["exponentials_per_entry"] == 1) < 16


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_benchmark_refuses_to_time_an_absent_gpu(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    with pytest.raises(SystemExit, match="no GPU"):
        importlib.import_module("gpu_kl").main([])


@pytest.mark.slow
def test_the_benchmark_of_everything_runs_without_a_gpu_for_errors(tmp_path):
    path = tmp_path / "gpu.json"
    parts = ["ceilings", "methods", "topk", "correction"]
    arguments = ["--tiny", "--repeats", "1", "--only", ",".join(parts), "--json", str(path)]
    done = run("benchmarks/gpu.py", *arguments, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(path.read_text())
    assert "Triton's interpreter" in results["device"]
    assert results["methods"]["failures"] == []
    assert all("failed" not in results[part] for part in parts), done.stdout


def test_the_benchmark_of_everything_names_its_parts_and_refuses_without_a_gpu():
    done = run("benchmarks/gpu.py", "--only", "exakt")
    assert done.returncode == 2
    assert "exact" in done.stderr
    if not torch.cuda.is_available():
        done = run("benchmarks/gpu.py")
        assert done.returncode == 1
        assert "no GPU here" in done.stderr
