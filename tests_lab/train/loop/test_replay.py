"""Whole runs with filtered rollouts: the trainer lives on what the sampler left over, or says that it does not."""

from __future__ import annotations

import json
import math

import pyarrow.parquet as pq
import pytest
import torch

from offdrift.audit.conclude import run_context
from offdrift.engines.hf import TransformersEngine
from offdrift.engines.hf_decode import filters_of
from offdrift.engines.score import score
from offdrift.models import load_model
from offdrift.records.provenance import Provenance, Sampling
from offdrift.records.store import read
from offdrift_lab.train.loop import loop
from offdrift_lab.train.loop.loop import train
from offdrift_lab.train.loop.run_folder import ArmFolder
from tests_lab.train.conftest import short_arms, small_recipe
from tests_lab.train.loop.test_loop import TIMING

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
FILTERS = [{"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.1}, {"temperature": 0.7, "top_p": 0.8, "top_k": 20}]


@pytest.fixture
def short(monkeypatch):
    short_arms(monkeypatch)


def run(path, method="decoupled_ppo", *, evidence="full", replay=True, lag=1, watch=lambda event: None, resume=False, **filters):  # fmt: skip
    """Metrics of a run of one arm, and its batches."""
    rollout = {"prompts": 4, "samples": 4, "max_tokens": 6, "dtype": "float32", "evidence": evidence, **filters}
    settings = {"rollout": rollout, "replay": {"support": replay}, "arms": {"arm": {"method": method}}}
    recipe = small_recipe(**settings, lag={"sync_every": lag}, optim={"lr": 1e-3})
    train(recipe, path, watch=watch, resume=resume)
    files = ArmFolder(path / "arms" / "arm")
    return files.rows("metrics"), [read(p) for p in sorted((path / "arms/arm/rollouts").glob("*.parquet"))]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_at_equal_weights_every_ratio_is_one(short, tmp_path, filters):
    metrics, batches = run(tmp_path, **filters)
    assert len(metrics) == len(batches) == 6
    for row, batch in zip(metrics, batches, strict=True):
        assert row["full/abs_log_ratio_max"] <= 3e-6
        assert row["mismatch/abs_log_ratio_max"] <= 3e-6
        assert row["divergence/kl_rollout_current_max"] < 1e-9
        assert torch.equal(batch.support.left_out(slice(None), 64), batch.evidence.logp.isinf())
    assert all(row["optim/grad_norm"] > 0 for row in metrics)


def test_without_the_replay_the_kept_mass_counts_as_drift_and_the_run_says_so(short, tmp_path):
    findings = []
    watch = lambda event: findings.append(event.text) if event.kind == "finding" else None  # noqa: E731
    without, batches = run(tmp_path / "without", replay=False, watch=watch, top_p=0.7)
    with_replay, same = run(tmp_path / "with", top_p=0.7)
    assert torch.equal(batches[0].tokens, same[0].tokens)
    assert batches[0].support is not None  # recorded, not imposed
    assert all(0.65 < row["full/ratio_mean"] < 0.9 for row in without)
    assert all(abs(row["full/ratio_mean"] - 1) < 1e-5 for row in with_replay)
    # KL(mu || pi) of a filtered policy from its own unfiltered self is -log of the kept mass: at least that of top-p.
    assert all(0.1 < row["divergence/kl_rollout_current_mean"] < -math.log(0.7) + 0.01 for row in without)
    summary = json.loads((tmp_path / "without/arms/arm/summary.json").read_text())
    assert {f["rule"] for f in summary["findings"]} & {"filter_not_replayed", "one_sided_filter"}
    clean = json.loads((tmp_path / "with/arms/arm/summary.json").read_text())
    assert not {f["rule"] for f in clean["findings"]} & {"filter_not_replayed", "one_sided_filter"}
    for name, replayed in (("without", False), ("with", True)):
        assert run_context(str(tmp_path / name / "arms/arm/log"), "offdrift").filter_replayed is replayed


@pytest.mark.parametrize("repeats", [True, False])
def test_the_log_says_what_was_recorded_and_what_the_trainer_repeated(short, tmp_path, repeats):
    rollout = {"prompts": 4, "samples": 4, "max_tokens": 6, "dtype": "float32", "top_p": 0.9, "kv": {"budget": 4}}
    replay = {"support": repeats, "kv": repeats}
    train(small_recipe(rollout=rollout, replay=replay, arms={"arm": {"method": "token_is"}}), tmp_path)
    (text,) = {*pq.read_table(next((tmp_path / "arms/arm/log").glob("*.parquet")))["drawn_by"].to_pylist()}
    provenance = Provenance.from_text(text)
    assert provenance.recorded == ("support", "retention")
    assert provenance.replayed == (("support", "retention") if repeats else ())
    assert (provenance.sampling.top_p, provenance.eviction.budget) == (0.9, 4)


def test_a_filter_of_the_trainers_own_is_not_the_samplers():
    """Recomputed, the mask misses the sampler's at many tokens, and excludes tokens that were drawn."""
    model, _ = load_model("tiny-qwen3", seed=0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(std=0.08)
    sampling = Sampling(max_tokens=24, top_p=0.9)
    drawn = TransformersEngine(model, dtype="bfloat16").generate([[i, i + 1] for i in range(1, 33)], sampling, seed=0)
    with torch.no_grad():
        logits = score(model, drawn.with_(support=None)).logits
        recorded = score(model, drawn).logp - drawn.logp_rollout
    for apply in filters_of(sampling):
        logits = apply(None, logits)
    own = logits.log_softmax(-1).gather(1, drawn.tokens[:, None]).squeeze(1)
    differs = (logits.isinf() != drawn.support.left_out(slice(None), 64)).any(1)
    assert differs.double().mean() > 0.05
    assert own.isinf().any()
    assert recorded.isfinite().all()
    assert recorded.mean().abs() < 0.01


@pytest.mark.parametrize(("method", "evidence"), [("trm_max", "hidden"), ("trm_max", 3), ("kl_cov", "sampled")])
def test_old_current_and_whole_policies_are_on_the_support_with_every_evidence(short, tmp_path, method, evidence):
    metrics, _ = run(tmp_path / "fresh", method, evidence=evidence, top_p=0.8)
    for row in metrics:
        assert row["full/abs_log_ratio_max"] <= 3e-6
        assert math.isfinite(row["optim/loss"])
    assert all(math.isfinite(x) for row in metrics for k, x in row.items() if "kl" in k and isinstance(x, float))
    stale, _ = run(tmp_path / "stale", method, evidence=evidence, lag=3, top_p=0.8)
    assert [row["full/abs_log_ratio_max"] <= 3e-6 for row in stale] == [True, False, False] * 2


def test_a_resumed_run_equals_an_uninterrupted_one(short, tmp_path):
    whole, batches = run(tmp_path / "whole", lag=2, top_p=0.8)

    def stop(event):
        if event.kind == "update" and event.step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", lag=2, top_p=0.8, watch=stop)
    cut, again = run(tmp_path / "cut", lag=2, top_p=0.8, resume=True)
    assert [{k: x for k, x in row.items() if k not in TIMING} for row in cut] == [
        {k: x for k, x in row.items() if k not in TIMING} for row in whole
    ]
    assert all(torch.equal(a.support.ids, b.support.ids) for a, b in zip(batches, again, strict=True))


def test_evaluations_take_several_samples_with_a_filter_of_their_own(monkeypatch, tmp_path):
    asked = []

    def watched(engine, problems, task, tokenizer, sampling, *, samples, **options):
        drawn = rollout(engine, problems, task, tokenizer, sampling, samples=samples, **options)
        asked.append((sampling, samples, drawn))
        return drawn

    rollout = loop.rollout
    evaluate = loop.evaluate
    short_arms(monkeypatch)
    monkeypatch.setattr(loop, "evaluate", evaluate)
    monkeypatch.setattr(loop, "rollout", watched)
    log = {"eval_every": 6, "eval_prompts": 3, "eval_samples": 5, "eval_top_p": 0.9, "eval_temperature": 0.6, "trackers": []}  # fmt: skip
    train(small_recipe(log=log, rollout__top_k=7), tmp_path)
    rows = ArmFolder(tmp_path / "arms/trm_max").rows("eval")
    assert len(rows) == len(asked) == 2
    for row, (sampling, samples, drawn) in zip(rows, asked, strict=True):
        assert (sampling.temperature, sampling.top_p, sampling.top_k, samples) == (0.6, 0.9, 7, 5)
        assert drawn.num_sequences == 15
        assert (row["prompts"], row["samples"]) == (3, 5)
        assert row["reward"] == pytest.approx(float(drawn.rewards.double().mean()))
