"""Whose log-probs are the old ones: exact at any lag, cheap where they can be, and never called what they are not."""

from __future__ import annotations

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from accelerate import Accelerator
from torch import nn

from offdrift.audit.conclude import conclude
from offdrift.audit.partial import Job
from offdrift.audit.stream import audit
from offdrift.engines import make_engine
from offdrift.engines.score import score
from offdrift.errors import CheckpointError, EvidenceError, RecipeError
from offdrift.methods import METHODS
from offdrift.models import load_model
from offdrift.objectives.ewma import ewma_update
from offdrift.records.provenance import Sampling
from offdrift.records.readers import detect, pieces
from offdrift.records.schema import OLD_STATUS
from offdrift.records.store import read
from offdrift_lab.train.loop import batch as batch_module
from offdrift_lab.train.loop import old_policy
from offdrift_lab.train.loop.batch import make_batch
from offdrift_lab.train.loop.loop import train
from offdrift_lab.train.loop.old_policy import gradient_norms, score_batch
from tests_lab.train.conftest import short_arms, small_recipe
from tests_lab.train.loop.test_loop import Stop, rows, stop_at, weights

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
ROUNDING = 2e-5
"""Nats by which two forward passes of one float32 model differ when the batch is cut otherwise."""


def lagging(method: str, *, checkpoint_every: int = 99, **changes: Any):
    """Eight updates behind at most, engine and trainer both float32: all drift is staleness."""
    rare = {"eval_every": 99, "eval_prompts": 2, "samples_every": 99, "trackers": []}
    content: dict[str, Any] = {
        "batches": 8,
        "rollout": {"prompts": 8, "samples": 4, "max_tokens": 6, "dtype": "float32"},
        "lag": {"sync_every": 8},
        "optim": {"lr": 3e-3},
        "arms": {"arm": {"method": method}},
        "certificate": {"looks": "once"},  # whose alpha does not depend on how many arms there are
        "log": {**rare, "checkpoint_every": checkpoint_every},
    }
    return small_recipe(**{**content, **changes})


@pytest.fixture(scope="module")
def stale(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run of methods on staleness and mismatch, at lags 0 to 7."""
    arms = {n: {"method": n} for n in ("ppo_clip", "gspo", "decoupled_token_is")}
    run = tmp_path_factory.mktemp("stale") / "run"
    train(lagging("none", arms=arms), run)
    return run


def test_engines_in_one_precision_differ_by_staleness_alone_at_any_lag(stale: Path):
    for arm in ("ppo_clip", "gspo", "decoupled_token_is"):
        metrics = rows(stale, arm)
        assert [m["version_lag/max"] for m in metrics] == list(range(8))
        for m in metrics:
            assert m["mismatch/abs_log_ratio_max"] < ROUNDING
            assert m["staleness/abs_log_ratio_max"] == pytest.approx(m["full/abs_log_ratio_max"], abs=ROUNDING)  # fmt: skip
            assert m["staleness/k3"] == pytest.approx(m["full/k3"], rel=1e-3, abs=1e-9)
            assert (m["old/status"], m["old/exact_frac"], m["old/version_lag"]) == ("exact", 1.0, 0)
        assert metrics[-1]["staleness/abs_log_ratio_max"] > 0.2, "lag must have moved the policy"


def test_clips_on_staleness_act_on_stale_batches(stale: Path):
    for arm in ("ppo_clip", "gspo"):
        clipped = [m["objective/clip_frac_active"] for m in rows(stale, arm)]
        assert clipped[0] == 0, "the first batch was drawn by the trainer's own weights"
        assert max(clipped[1:]) > 0.01


def test_weights_on_mismatch_act_where_the_engine_computes_otherwise(tmp_path: Path):
    coarse = {"prompts": 8, "samples": 4, "max_tokens": 6, "dtype": "bfloat16"}
    train(lagging("decoupled_token_is", rollout=coarse), tmp_path / "run")
    metrics = rows(tmp_path / "run", "arm")
    assert all(m["weight/changed_frac"] > 0.9 for m in metrics)
    ratio = [m["mismatch/abs_log_ratio_max"] / m["full/abs_log_ratio_max"] for m in metrics]
    assert ratio[0] == pytest.approx(1, rel=1e-3), "without lag all drift is the engine's"
    assert ratio[-1] < 0.5, "at lag 7 most of it is staleness, and no weight on mismatch may see it"


@pytest.fixture(scope="module")
def inert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, with old log-probs taken when a batch's turn has come."""
    run = tmp_path_factory.mktemp("inert") / "run"
    train(lagging("ppo_clip", old_policy={"from": "batch_start"}), run)
    return run


def test_the_batch_start_policy_makes_the_same_methods_inert_and_the_run_says_so(inert: Path):
    (row,) = json.loads((inert / "run.json").read_text())["table"]
    metrics = rows(inert, "arm")
    assert max(m["staleness/abs_log_ratio_max"] for m in metrics) < ROUNDING
    assert max(m["objective/clip_frac_active"] for m in metrics) == 0
    assert [m["old/status"] for m in metrics] == ["exact"] + ["stale"] * 7
    assert [m["old/version_lag"] for m in metrics] == list(range(8))
    assert row["description"].endswith("; old log-probs stale (batch_start)")
    said = " ".join(row["notes"])
    assert "clip never changed a token" in said
    assert "stale: taken up to 7 updates after" in said


def test_mismatch_and_staleness_are_measured_of_whole_distributions_where_they_are_asked_for(stale, tmp_path: Path):
    run = tmp_path / "run"
    settings = {"looks": "once", "alphas": True}
    train(lagging("decoupled_token_is", certificate=settings), run)
    exact, sampled = rows(run, "arm"), rows(stale, "decoupled_token_is")
    for lag, (m, s) in enumerate(zip(exact, sampled, strict=True)):
        assert m["divergence/tv_rollout_old_max"] < ROUNDING, "one precision: no mismatch"
        staleness = m["divergence/tv_old_current_max"]
        assert staleness == pytest.approx(m["divergence/tv_rollout_current_max"], abs=ROUNDING)
        assert staleness < ROUNDING if lag == 0 else staleness > 1e-3
        assert m["divergence/tv_old_current_mean"] <= m["divergence/tv_old_current_max"]
        assert m["staleness/prob_diff_max"] <= staleness + ROUNDING, "a lower end"
        assert m["staleness/tv_reweighted"] == pytest.approx(s["staleness/tv_reweighted"], rel=1e-3, abs=1e-6)
        assert "divergence/tv_old_current_max" not in s
    for path, arm, grade in ((run, "arm", "exact"), (stale, "decoupled_token_is", "sampled")):
        table = json.loads((path / "run.json").read_text())["table"]
        (said,) = [" ".join(row["notes"]) for row in table if row["arm"] == arm]
        assert "Where to invest: staleness" in said
        assert f"({grade})" in said


def audited(log: Path, out: Path) -> dict[str, Any]:
    found = detect([str(log)])
    job = Job(found)
    return conclude(audit(job, pieces(found), folder=out), job)


@pytest.mark.slow
def test_an_audit_reads_how_old_log_probs_were_come_by(stale: Path, inert: Path, tmp_path: Path):
    exact = audited(stale / "arms" / "ppo_clip" / "log", tmp_path / "a")
    assert exact["overall"]["old/exact_frac"] == 1
    assert "old_policy_stale" not in {f["rule"] for f in exact["findings"]}
    late = audited(inert / "arms" / "arm" / "log", tmp_path / "b")
    assert late["overall"]["old/stale_frac"] > 0.5
    assert "old_policy_stale" in {f["rule"] for f in late["findings"]}


def test_a_log_may_say_it_in_words_and_anything_else_is_no_status(tmp_path: Path):
    words = ["exact", "stale", "approximated", "missing", "whatever", None, 1, 77]
    row = {"step": 1, "logp_rollout": [-1.0, -2.0], "logp_old": [-1.1, -2.0], "logp": [-1.0, -2.1]}
    (tmp_path / "log.jsonl").write_text("".join(json.dumps({**row, "old_status": w}) + "\n" for w in words))  # fmt: skip
    overall = audited(tmp_path / "log.jsonl", tmp_path / "out")["overall"]
    assert [overall[f"old/{name}_frac"] for name in OLD_STATUS] == [1 / 5, 2 / 5, 1 / 5, 1 / 5]


@pytest.mark.parametrize(
    ("source", "where"), [("second_model", "memory"), pytest.param("sampling", "disk", marks=pytest.mark.slow)]
)
def test_every_exact_source_gives_the_same_run(stale: Path, tmp_path: Path, source: str, where: str):
    train(lagging("ppo_clip", old_policy={"from": source, "snapshots": where}), tmp_path / "run")
    assert rows(tmp_path / "run", "arm") == rows(stale, "ppo_clip")
    assert len(list((tmp_path / "run/arms/arm").glob("snapshots/*"))) <= (where == "disk")
    head = json.loads((tmp_path / "run" / "run.json").read_text())
    assert head["recipe"]["old_policy"]["from"] == source


def test_a_second_model_is_too_new_for_batches_that_waited(tmp_path: Path):
    changes: dict[str, Any] = {"batches": 5, "lag": {"sync_every": 1, "queue": 2}}
    train(lagging("ppo_clip", old_policy={"from": "second_model"}, **changes), tmp_path / "a")
    train(lagging("ppo_clip", **changes), tmp_path / "b")
    second, snapshots = rows(tmp_path / "a", "arm"), rows(tmp_path / "b", "arm")
    assert [m["old/status"] for m in second] == ["exact", "stale", "stale", "stale", "stale"]
    assert [m["old/status"] for m in snapshots] == ["exact"] * 5
    assert max(m["mismatch/abs_log_ratio_max"] for m in snapshots) < ROUNDING
    assert max(m["mismatch/abs_log_ratio_max"] for m in second) > 1e-3


@pytest.mark.slow
def test_the_interpolated_and_the_rollout_policy_stand_in(tmp_path: Path):
    arms = {
        "a3po": {"method": "a3po"},
        "interpolated": {"method": "decoupled_ppo", "override": {"weight.cap": 1e9, "objective.dual_clip": 1e9}, "old_policy": {"from": "interpolated"}},
        "bypass": {"method": "ppo_clip", "old_policy": {"from": "rollout"}},
        "full": {"method": "ppo_clip", "override": {"objective.on": "full"}},
    }  # fmt: skip
    table = train(lagging("none", arms=arms, batches=4), tmp_path / "run")
    names = ("a3po", "interpolated", "bypass", "full")
    a3po, interpolated, bypass, full = (rows(tmp_path / "run", a) for a in names)
    for a, b in [*zip(a3po, interpolated, strict=True), *zip(bypass, full, strict=True)]:
        assert a["optim/grad_norm"] == pytest.approx(b["optim/grad_norm"], rel=1e-5)
        assert a["objective/clip_frac_active"] == b["objective/clip_frac_active"]
    assert {m["old/status"] for m in a3po} == {"approximated"}
    assert {m["old/status"] for m in bypass} == {"missing"}
    assert "mismatch/k3" not in bypass[0]
    said = {row["arm"]: " ".join(row["notes"]) for row in table}
    assert "old log-probs are approximated" in said["a3po"]
    assert "old log-probs are missing" in said["bypass"]


def test_averaged_weights_follow_the_trainer_and_are_what_the_proximal_policy_is(tmp_path: Path):
    """The run's old log-probs equal those of weights averaged by hand from its own updates."""
    seen: list[dict[str, torch.Tensor]] = []
    scored: list[torch.Tensor] = []
    original = old_policy.Averaged.score

    def spy(self, model, rollouts, version, **options):
        seen.append({n: p.detach().clone() for n, p in model.named_parameters()})
        found = original(self, model, rollouts, version, **options)
        mean, weight = seen[0], 1.0
        for now in seen[1:]:
            moved = {n: ewma_update(mean[n], p, weight=weight, decay=0.889) for n, p in now.items()}
            mean, weight = {n: m for n, (m, _) in moved.items()}, next(iter(moved.values()))[1]
        twin = copy.deepcopy(model)
        twin.load_state_dict(mean, strict=False)
        expected = score_batch(twin, rollouts, **options).logp
        torch.testing.assert_close(found.logp, expected, rtol=0, atol=2e-5)
        scored.append(found.logp)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(old_policy.Averaged, "score", spy)
        train(lagging("ppo_ewma", batches=5), tmp_path / "run")
    assert len(scored) == 5
    metrics = rows(tmp_path / "run", "arm")
    assert {m["old/status"] for m in metrics} == {"approximated"}
    assert metrics[-1]["staleness/abs_log_ratio_max"] > 1e-3, "the average lags behind the trainer"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "settings", "lag"),
    [
        ("ppo_clip", {}, {"sync_every": 2, "queue": 2}),
        ("ppo_clip", {"snapshots": "disk"}, {"sync_every": 2, "queue": 2}),
        ("decoupled_ppo", {"from": "second_model"}, {"sync_every": 2}),
        ("ppo_ewma", {}, {"sync_every": 2}),
    ],
)
def test_a_resumed_run_keeps_its_old_policies(tmp_path: Path, method, settings, lag):
    recipe = lagging(method, batches=4, lag=lag, old_policy=settings, checkpoint_every=2)
    train(recipe, tmp_path / "whole")
    with pytest.raises(Stop):
        train(recipe, tmp_path / "cut", watch=stop_at("arm", 3))
    told: list[str] = []
    train(recipe, tmp_path / "cut", resume=True, watch=lambda e: told.append(e.kind))
    assert "resume" in told
    assert rows(tmp_path / "cut", "arm") == rows(tmp_path / "whole", "arm")
    expected = weights(tmp_path / "whole", "arm")
    assert all(torch.equal(w, expected[k]) for k, w in weights(tmp_path / "cut", "arm").items())


def test_a_checkpoint_without_the_weights_that_its_queue_needs_is_refused(tmp_path: Path):
    recipe = lagging("ppo_clip", batches=6, lag={"sync_every": 2, "queue": 2}, checkpoint_every=2)
    with pytest.raises(Stop):
        train(recipe, tmp_path / "run", watch=stop_at("arm", 5))
    newest = sorted((tmp_path / "run/arms/arm/checkpoints").glob("batch-*"))[-1]
    stored = list((newest / "old_policy").glob("version-*.safetensors"))
    assert stored, "the queue holds batches of older weights"
    for file in stored:
        file.unlink()
    with pytest.raises(CheckpointError, match="weights of an earlier version cannot be read"):
        train(recipe, tmp_path / "run", resume=True)


@pytest.mark.slow
@pytest.mark.parametrize("source", ["sampling", "second_model"])
def test_whole_distributions_of_old_and_current_policy_are_compared(tmp_path: Path, source: str):
    """A gate on the exact KL to the old policy, and a penalty that differentiates it, act at lag."""
    arms = {
        "gate": {"method": "ppo_clip", "gates_of": "trm_max", "override": {"gate.on": "staleness", "gate.high": 0.01}},
        "penalty": {"method": "kl_cov", "override": {"objective.penalty": "exact", "objective.coef": 10.0}},
        "plain": {"method": "kl_cov", "override": {"objective.coef": 0.0}},
    }  # fmt: skip
    optim = {"lr": 3e-3, "minibatches": 2, "token_budget": 120}
    recipe = lagging("none", arms=arms, batches=4, old_policy={"from": source}, optim=optim)
    train(recipe, tmp_path / "run")
    gate, penalty, plain = (rows(tmp_path / "run", a) for a in arms)
    kl = "divergence/kl_old_current_mean"
    for m in [*gate, *penalty]:  # one precision, so the old policy is the rollout policy
        assert m[kl] == pytest.approx(m["divergence/kl_rollout_current_mean"], rel=1e-3, abs=1e-6)
    assert max(m["gate/0/drop_frac_token"] for m in gate) > 0.01
    assert gate[0]["gate/0/drop_frac_token"] == 0
    assert kl not in plain[0]
    ends = [arm[-1]["optim/grad_norm"] for arm in (penalty, plain)]
    assert ends[0] != pytest.approx(ends[1], rel=1e-3), "the penalty must push"


def test_the_policy_is_projected_into_a_ball_around_the_one_that_drew(tmp_path: Path):
    """At the first update of a batch it is the old one; later ones leave a small ball, and none leaves a huge one."""
    arms = {
        "near": {"method": "troll", "override": {"objective.bound": 1e-4}},
        "far": {"method": "troll", "override": {"objective.bound": 1e3}},
        "plain": {"method": "ppo_clip", "override": {"objective.eps_low": 0.999, "objective.eps_high": 1e6}},
    }
    optim = {"lr": 3e-3, "minibatches": 2, "token_budget": 120}
    recipe = lagging("none", arms=arms, batches=2, old_policy={"from": "sampling"}, optim=optim)
    train(recipe, tmp_path / "run")
    near, far, plain = (rows(tmp_path / "run", a) for a in arms)
    outside = [m["objective/clip_frac_active"] for m in near]
    assert outside[0] == 0
    assert max(outside) > 0.1
    logs = [pq.read_table(f) for f in sorted((tmp_path / "run" / "arms" / "near" / "log").glob("*.parquet"))]
    kl = np.concatenate([np.concatenate(log["kl_current_old"].to_pylist()) for log in logs])
    tokens = [m["batch/tokens"] for m in near]
    assert (kl > 1e-4).sum() == pytest.approx(np.dot(outside, tokens)), "the log shows what the projection changed"
    assert [m["objective/clip_frac_active"] for m in far] == [0] * len(far)
    norms = [[m["optim/grad_norm"] for m in arm] for arm in (near, far, plain)]
    assert norms[1] == pytest.approx(norms[2], rel=1e-4), "inside the ball it is the plain surrogate"
    assert norms[0][0] == pytest.approx(norms[1][0], rel=1e-4)
    assert norms[0][-1] != pytest.approx(norms[1][-1], rel=1e-2)


@pytest.fixture(scope="module")
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


@pytest.fixture(scope="module")
def drawn(stale: Path):
    """A recorded batch, and a model that did not draw it."""
    batch = read(stale / "arms" / "ppo_clip" / "rollouts" / "batch-000000.parquet")
    model, _ = load_model("tiny-qwen3", seed=0)
    return batch, model


def moved(model: nn.Module, seed: int) -> nn.Module:
    other = copy.deepcopy(model)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.02 * torch.randn(p.shape, generator=g))
    return other


def test_a_response_of_several_versions_is_scored_under_each(accelerator, drawn, tmp_path):
    batch, model = drawn
    versions = {0: moved(model, 0), 1: moved(model, 1), 2: model}
    g = torch.Generator().manual_seed(5)
    tagged = batch.with_(rollout_version=torch.randint(0, 3, (len(batch.tokens),), generator=g))
    keeper = old_policy.Snapshots(accelerator, tmp_path)
    for v in (0, 1):
        keeper.retain({0, 1}, versions[v], v)
    got = keeper.score(model, tagged, 2, token_budget=200)
    for v, scorer in versions.items():
        mine = tagged.rollout_version == v
        assert mine.any()
        want = score_batch(scorer, tagged, token_budget=200)
        torch.testing.assert_close(got.logp[mine], want.logp[mine], rtol=0, atol=ROUNDING)
        torch.testing.assert_close(got.entropy[mine], want.entropy[mine], rtol=1e-4, atol=1e-5)
    assert torch.equal(got.version, tagged.rollout_version)
    assert (got.status(tagged.rollout_version) == OLD_STATUS.index("exact")).all()
    differ = (got.logp - score_batch(model, tagged, token_budget=200).logp).abs()
    assert differ[tagged.rollout_version < 2].max() > 0.01, "the versions must be told apart"
    logits = keeper.logits(model, tagged, 2).log_softmax(-1)
    for v, scorer in versions.items():
        mine = tagged.rollout_version == v
        with torch.no_grad():
            want = score(scorer, tagged).logits.log_softmax(-1)
        torch.testing.assert_close(logits[mine], want[mine], rtol=0, atol=1e-4)


def test_snapshots_are_dropped_when_nothing_refers_to_them(accelerator, drawn, tmp_path):
    _, model = drawn
    for on_disk in (False, True):
        keeper = old_policy.Snapshots(accelerator, tmp_path, on_disk=on_disk)
        keeper.retain({1}, model, 2)
        assert keeper.kept == {}, "nothing of these weights is still to be trained on"
        keeper.retain({3}, model, 3)
        keeper.retain({3, 5}, model, 5)
        assert set(keeper.kept) == {3, 5}
        keeper.retain({5}, model, 6)
        assert set(keeper.kept) == {5}
        assert len(list(tmp_path.glob("*.safetensors"))) == (1 if on_disk else 0)


def test_weights_that_are_gone_are_asked_for_by_version(accelerator, drawn, tmp_path):
    batch, model = drawn
    keeper = old_policy.Snapshots(accelerator, tmp_path)
    with pytest.raises(EvidenceError, match=r"rollouts of version 0 .* not kept \(kept: none\)"):
        keeper.score(model, batch, 4, token_budget=200)


def test_the_trainers_weights_come_back_bit_for_bit_even_after_an_error(accelerator, drawn):
    _, model = drawn
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    other = {n: p.detach() + 1 for n, p in model.named_parameters()}

    def fail() -> None:
        with old_policy.weights_replaced(accelerator, model, other):
            assert all(torch.equal(p, other[n]) for n, p in model.named_parameters())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_a_batch_that_was_just_drawn_costs_no_forward_pass(tmp_path: Path, monkeypatch):
    calls = []
    monkeypatch.setattr(old_policy, "score_batch", lambda *args, **kw: calls.append(1) or score_batch(*args, **kw))
    train(lagging("ppo_clip", batches=3, lag={"sync_every": 1}), tmp_path / "run")
    assert not calls
    metrics = rows(tmp_path / "run", "arm")
    assert all(m["staleness/abs_log_ratio_max"] == 0 for m in metrics)
    assert [m["old/status"] for m in metrics] == ["exact"] * 3
    several = {"lr": 3e-3, "minibatches": 2}
    train(lagging("ppo_clip", batches=3, lag={"sync_every": 1}, optim=several), tmp_path / "two")
    assert len(calls) == 3, "the second minibatch needs what the first one's weights said"
    assert max(m["staleness/abs_log_ratio_max"] for m in rows(tmp_path / "two", "arm")) > 1e-3


def test_defaults_are_what_a_method_was_published_with():
    recipe = small_recipe(arms={n: {"method": n} for n in METHODS if METHODS[n].needs_old or METHODS[n].anchor})  # fmt: skip
    chosen = {n: recipe.old_policy_of(n).source for n in recipe.arms}
    special = {n: s for n, s in chosen.items() if s != "sampling"}
    assert special == {"a3po": "interpolated", "ppo_ewma": "ewma", "ppo_ewma_decoupled": "ewma"}


@pytest.mark.parametrize(
    ("method", "source", "words"),
    [
        ("decoupled_token_is", "rollout", "acts on the mismatch ratio, which old_policy.from"),
        ("icepop", "rollout", "makes 1 at every token"),
        ("a3po", "sampling", "a3po interpolates its old policy"),
        ("kl_cov", "batch_start", "kl_old_current compares whole distributions of the old and the current policy"),
        ("troll", "batch_start", "the method compares whole distributions of the old and the current policy"),
    ],
)
def test_old_policies_that_leave_a_part_without_effect_are_refused(method, source, words):
    exact = {"objective.penalty": "exact"} if method == "kl_cov" else {}
    with pytest.raises(RecipeError, match=words):
        small_recipe(arms={"x": {"method": method, "override": exact}}, old_policy={"from": source})


def test_mistakes_in_the_table_name_its_keys():
    with pytest.raises(RecipeError, match=r"unknown key 'old_policy.form'; old_policy has from, snapshots, decay"):  # fmt: skip
        small_recipe(old_policy={"form": "ewma"})
    with pytest.raises(RecipeError, match=r"old_policy.from = 'newest'"):
        small_recipe(old_policy={"from": "newest"})
    with pytest.raises(RecipeError, match=r"arms.x.old_policy has from, snapshots, decay"):
        small_recipe(arms={"x": {"method": "grpo", "old_policy": {"kind": "ewma"}}})


def test_gradient_norms_are_those_of_each_response_alone():
    """Finite differences along the gradient itself: d log pi(y) / d eps = |g|."""
    model = load_model("tiny-qwen3", seed=0)[0].double()
    sampling = Sampling(5, temperature=0.7, stop_token_ids=tuple(range(20)))
    drawn = make_engine("transformers", model).generate([[3, 4, 5], [6], [7, 8]], sampling, seed=0)
    norms = gradient_norms(model, drawn).double()
    for i in range(3):
        one = drawn.select(torch.tensor([i]))
        model.zero_grad()
        score(model, one, temperature=0.7).logp.sum().backward()
        along, size = [p.grad / norms[i].sqrt() for p in model.parameters()], []
        for eps in (1e-5, -1e-5):
            moved = copy.deepcopy(model)
            with torch.no_grad():
                for p, g in zip(moved.parameters(), along, strict=True):
                    p += eps * g
                size.append(score(moved, one, temperature=0.7).logp.sum())
        assert float((size[0] - size[1]) / 2e-5) == pytest.approx(float(norms[i].sqrt()), rel=1e-4)
    assert len({round(float(x), 3) for x in norms}) == 3


def test_opob_with_exact_norms_in_a_run(tmp_path, monkeypatch):
    """Advantages are R - b with b from the norms at the weights that the batch arrived at."""
    short_arms(monkeypatch)
    batches = []
    monkeypatch.setattr(
        batch_module, "make_batch", lambda arm, picked: batches.append(make_batch(arm, picked)) or batches[-1]
    )
    arms = {"opob": {"method": "none"}}
    settings = {"lr": 1e-3, "advantage": "opob", "gradient_norms": "exact"}
    train(small_recipe(batches=1, optim=settings, arms=arms), tmp_path)
    (batch,) = batches
    rollouts, segments = batch.rollouts, batch.rollouts.segments
    norms = gradient_norms(load_model("tiny-qwen3", seed=0)[0], rollouts).double()
    apart, shift, tau, pairs = [], [], 0.0, 0
    stand_in = score_batch(load_model("tiny-qwen3", seed=0)[0], rollouts, token_budget=999)
    proxy = segments.sum(1 - 2 * stand_in.logp.exp() + stand_in.sum_pi_squared).double()
    for group in range(4):
        of = rollouts.group_ids == group
        rewards, x, y = rollouts.rewards[of].double(), norms[of], proxy[of]
        baselines = [float((z * rewards).sum() / z.sum()) for z in (x, y)]
        apart += (rewards - baselines[0]).tolist()
        shift += [abs(baselines[0] - baselines[1])] * 4
        for i, j in itertools.combinations(range(4), 2):
            tau, pairs = tau + float(torch.sign((x[i] - x[j]) * (y[i] - y[j]))), pairs + 1
    first = segments.cu_seqlens[:-1].long()
    by_group = torch.argsort(rollouts.group_ids, stable=True)
    assert batch.advantages[first][by_group].tolist() == pytest.approx(apart, abs=1e-4)
    (row,) = [json.loads(x) for x in (tmp_path / "arms/opob/metrics.jsonl").read_text().splitlines()]
    assert row["opob/baseline_shift"] == pytest.approx(sum(shift) / 16, rel=1e-2)
    assert row["opob/norm_rank_corr"] == pytest.approx(tau / pairs, abs=1e-6)
    assert row["opob/baseline_shift"] > 1e-4
    with pytest.raises(RecipeError, match="reads norms of gradients"):
        small_recipe(optim={"gradient_norms": "exact"})
