"""The benchmarks run (for errors, not for time) and the numbers they compare agree."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark_named(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def test_exact_kl(benchmark_named, tmp_path):
    path = tmp_path / "exact_kl.json"
    tiny = ["--rows", "200", "--vocab", "8192", "--hidden", "16", "--repeats", "1", "--plain-only"]
    found = benchmark_named("exact_kl").main([*tiny, "--json", str(path)])
    assert json.loads(path.read_text()) == found
    for dtype in ("float32", "bfloat16"):
        evidence, loss = found[dtype]["evidence"], found[dtype]["loss"]
        assert set(evidence) == {"naive kl, tv", "naive", "plain"}
        ours = evidence["plain"]
        for name in ("kl_rollout_current", "kl_current_rollout", "chi2"):
            assert ours[f"{name}_relative_error"] < 1e-4
        for name in ("tv", "entropy_rollout", "entropy", "sum_pi_squared", "logp_rollout", "logp"):
            assert ours[f"{name}_error"] < 1e-5
        for table in (evidence, loss):
            assert 0 < table["plain"]["peak_mib"] < table["naive"]["peak_mib"]
            assert all(row["share_of_lm_head"] > 0 for row in table.values())


def test_hidden_kl(tmp_path):
    """In a process of its own: checks of shapes hold arguments, and their memory would be counted."""
    path = tmp_path / "hidden_kl.json"
    command = [sys.executable, str(BENCHMARKS / "hidden_kl.py"), "--tiny", "--json", str(path)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    found = json.loads(path.read_text())
    cases = [table for name, table in found.items() if name.startswith("d=16")]
    assert len(cases) == 2
    for table in cases:
        for way in ("ours", "ours, keep_mib=0"):
            assert table[way]["kl_relative_error"] < 1e-4
            assert table[way]["tv_error"] < 1e-6
            assert 0 < table[way]["peak_mib"] < table["naive"]["peak_mib"]


def test_correction(benchmark_named, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    path = tmp_path / "correction.json"
    correction = benchmark_named("correction")
    tiny = ["--sequences", "8", "--longest", "64", "--repeats", "1", "--json", str(path)]
    found = correction.main(tiny)
    assert json.loads(path.read_text()) == found
    assert found["tokens"] > 64
    for mode in correction.MODES:
        assert {"read", "ours, packed", "ours, padded"} <= set(found[mode]["seconds"])


def test_correction_gives_packed_and_padded_input_the_same_numbers(benchmark_named):
    correction = benchmark_named("correction")
    batch = correction.ragged(8, 64)
    for how, _ in correction.MODES.values():
        corrected, metrics = correction.ours_packed(batch, how)
        keep, weight, padded_metrics = correction.ours_padded(batch, how)
        inside = batch.mask.bool()
        assert keep[inside].bool().equal(corrected.keep)
        assert weight[inside].equal(corrected.weight)
        assert padded_metrics == pytest.approx(metrics, nan_ok=True)
        assert len(metrics) > 10


def test_accuracy(benchmark_named, tmp_path):
    path = tmp_path / "accuracy.json"
    found = benchmark_named("accuracy").main(["--tiny", "--json", str(path)])
    assert json.loads(path.read_text()) == found
    assert len(found["levels"]) == 9
    for level in found["levels"]:
        for name in ("offdrift", "offdrift, no compiler"):
            ours = level["ways"][name]
            assert ours["negative_rows"] == 0
            assert ours["worst"] < 1e-3
    small = found["levels"][0]["ways"]
    assert small["log_softmax, float32"]["median"] > 100 * small["offdrift"]["median"]
