"""Whole runs on a tiny model: what is stored, real staleness, and resuming step for step."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

from offdrift.advantages import ADVANTAGES
from offdrift.engines.hf import TransformersEngine
from offdrift.errors import CheckpointError, RecipeError, RecordError, SyncError
from offdrift.records import TopK
from offdrift.records.store import read
from offdrift_lab.train.loop.context import set_up
from offdrift_lab.train.loop.loop import Event, train, train_arm
from offdrift_lab.train.loop.run_folder import RunFolder
from offdrift_lab.train.report.page import render
from offdrift_lab.train.report.stored import read_run
from tests_lab.train.conftest import short_arms, small_recipe

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
TIMING = tuple(f"throughput/{name}" for name in ("seconds", "tokens_per_s", "draw_seconds", "publish_seconds"))


def rows(run: Path, arm: str = "trm_max", file: str = "metrics") -> list[dict[str, Any]]:
    text = (run / "arms" / arm / f"{file}.jsonl").read_text()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMING} for line in text.splitlines()]


def weights(run: Path, arm: str = "trm_max") -> dict[str, torch.Tensor]:
    return load_file(run / "arms" / arm / "model" / "model.safetensors")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One uninterrupted run of two arms that everything else is compared with."""
    run = tmp_path_factory.mktemp("runs") / "small"
    train(two_arms(), run)
    return run


def two_arms(**changes: Any):
    arms = {"trm_max": {"method": "trm_max", "override": {"gate.high": 0.004}}, "none": {"method": "none"}}
    return small_recipe(arms=arms, **changes)


def test_a_run_stores_everything_a_reader_needs(finished: Path):
    head = json.loads((finished / "run.json").read_text())
    assert head["format"] == 1
    assert [row["arm"] for row in head["table"]] == ["trm_max", "none"]
    assert head["model"]["vocab_size"] == 64
    zero = head["zero_update"]
    assert zero["tokens"] >= zero["equal"]
    assert 0 <= zero["mean"] <= zero["largest"] < zero["cap"] == 0.25
    for arm in ("trm_max", "none"):
        assert [r["update"] for r in rows(finished, arm)] == [1, 2, 3, 4, 5, 6]
        assert [r["update"] for r in rows(finished, arm, "eval")] == [0, 2, 4, 6]
        assert rows(finished, arm, "samples")
        assert len(list((finished / "arms" / arm / "rollouts").glob("*.parquet"))) == 6
        assert weights(finished, arm)


def test_staleness_is_real_and_stored_with_every_token(finished: Path):
    assert [r["version_lag/max"] for r in rows(finished)] == [0, 1, 0, 1, 0, 1]
    files = sorted((finished / "arms" / "trm_max" / "rollouts").glob("*.parquet"))
    assert [int(read(f).rollout_version.max()) for f in files] == [0, 0, 2, 2, 4, 4]
    kl = [r["divergence/kl_rollout_current_max"] for r in rows(finished, "none")]
    assert kl[1] > 10 * kl[0], "one update old must be further away than freshly synchronized"


def test_arms_see_the_same_first_batch_and_then_go_their_own_way(finished: Path):
    first, last = "batch-000000.parquet", "batch-000005.parquet"
    a, b = (finished / "arms" / arm / "rollouts" for arm in ("trm_max", "none"))
    assert torch.equal(read(a / first).tokens, read(b / first).tokens)
    assert read(a / last).prompts == read(b / last).prompts
    moved = [(weights(finished)[k] - w).abs().max() for k, w in weights(finished, "none").items()]
    assert max(moved) > 0


def test_the_gate_acts_and_the_table_says_so(finished: Path):
    kept = {arm: {s["accepted"] for s in rows(finished, arm, "samples")} for arm in ("trm_max", "none")}
    assert kept["none"] == {None}, "without a gate nothing is accepted, or rejected"
    assert kept["trm_max"] <= {True, False}
    assert kept["trm_max"]
    summary = json.loads((finished / "arms" / "trm_max" / "summary.json").read_text())
    assert 0 < summary["acceptance"] < 1
    # The gate's limit is 0.004; the recipe's delta, which a certificate takes for granted, 0.05.
    left = [row["divergence/kl_rollout_current_max"] > 0.05 for row in rows(finished)]
    assert summary["falsified_updates"] == sum(left) < len(left)
    assert summary["bound"] > 0
    assert summary["grade"] == "exact"


def test_every_batch_is_a_look_and_all_of_the_run_share_alpha(finished: Path):
    """6 / (pi^2 t^2) of .05, halved for two arms; a resumed run goes on counting (next test, by its rows)."""
    for arm in ("trm_max", "none"):
        found = rows(finished, arm)
        assert [r["certificate/look"] for r in found] == [1, 2, 3, 4, 5, 6]
        expected = [0.025 * 0.6079271018540267 / t**2 for t in range(1, 7)]
        assert [r["certificate/alpha"] for r in found] == pytest.approx(expected)
        for t, r in enumerate(found, 1):
            assert f"this is look {t} at one of 2 policies" in r["certificate/holds_for"]
            assert f"ith probability 0.95 ({r['certificate/holds_for']}; " in r["certificate/verdict"]
    page = render(read_run(finished))
    assert "The confidence is that of all\n    certificates of the run together" in page
    assert "one policy, one look" not in page


def test_a_run_may_look_once_at_every_batch_and_choose_its_alpha(tmp_path):
    train(small_recipe(batches=2, certificate={"looks": "once", "alpha": 0.2}), tmp_path / "run")
    for r in rows(tmp_path / "run"):
        assert (r["certificate/alpha"], r["certificate/look"]) == (0.2, None)
        assert "ith probability 0.8 (one policy, one look; " in r["certificate/verdict"]
    assert "some are false by chance" in render(read_run(tmp_path / "run"))


@pytest.mark.parametrize(("eps", "left"), [(0.5, [0.0, 0.0]), (0.1, [0.0, 1.0])])
def test_a_runs_trust_region_may_be_one_of_tv(tmp_path, monkeypatch, eps, left):
    """A token's KL leaves the usual region of .05; its TV is inside 0.5."""
    short_arms(monkeypatch)
    train(small_recipe(batches=2, optim__lr=2e-3, eps=eps), tmp_path / "run")
    found = rows(tmp_path / "run")
    assert found[1]["certificate/delta_hat"] > 0.05
    assert 0.1 < found[1]["certificate/eps_hat"] < 0.5
    assert [r["certificate/falsified"] for r in found] == left
    assert [r["certificate/bound"] is None for r in found] == [x > 0 for x in left]
    assert all("KL <=" not in r["certificate/verdict"] for r in found)


class Stop(Exception):
    """Stands for a kill: raised out of the loop at a chosen event."""


def stop_at(arm: str, update: int):
    def watch(event: Event) -> None:
        if event.kind == "update" and event.arm == arm and event.step == update:
            raise Stop

    return watch


@pytest.mark.parametrize(
    ("arm", "update"),
    [
        ("trm_max", 3),
        pytest.param("trm_max", 5, marks=pytest.mark.slow),
        pytest.param("none", 4, marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one_step_for_step(finished, tmp_path, arm, update):
    run = tmp_path / "run"
    with pytest.raises(Stop):
        train(two_arms(), run, watch=stop_at(arm, update))
    resumed = []
    train(two_arms(), run, resume=True, watch=lambda e: resumed.append(e.kind))
    assert ("resume" in resumed) == (update > 2), "there is a checkpoint after two batches"
    for name in ("trm_max", "none"):
        for file in ("metrics", "eval", "samples"):
            assert rows(run, name, file) == rows(finished, name, file), (name, file)
        expected = weights(finished, name)
        assert len(expected) > 20
        assert all(torch.equal(w, expected[k]) for k, w in weights(run, name).items())


def test_a_queue_of_drawn_batches_survives_an_interruption(tmp_path):
    recipe = small_recipe(lag={"sync_every": 1, "queue": 2}, batches=7)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train(recipe, whole)
    assert [r["version_lag/max"] for r in rows(whole)] == [0, 1, 2, 2, 2, 2, 2]
    with pytest.raises(Stop):
        train(recipe, cut, watch=stop_at("trm_max", 5))
    train(recipe, cut, resume=True)
    assert rows(cut) == rows(whole)


def test_epochs_and_minibatches_take_their_steps_and_grow_stale_within_a_batch(tmp_path):
    recipe = small_recipe(batches=2, optim__epochs=2, optim__minibatches=2, lag__sync_every=4)
    train(recipe, tmp_path / "run")
    found = rows(tmp_path / "run")
    assert [r["version_lag/max"] for r in found] == [0, 1, 2, 3, 0, 1, 2, 3]
    # two minibatches make up the batch, in every epoch
    tokens = [r["batch/tokens"] for r in found]
    assert tokens[0] + tokens[1] == tokens[2] + tokens[3]


def test_top_k_evidence_trains_and_is_called_an_interval(tmp_path):
    train(small_recipe(batches=2, rollout__evidence=8), tmp_path / "run")
    assert {r["divergence/grade"] for r in rows(tmp_path / "run")} == {"interval"}
    for r in rows(tmp_path / "run"):  # upper ends are finite, and far above the lower ends' mean
        tokens = r["response/length_mean"]
        assert r["certificate/kl_seq"] > tokens * r["divergence/kl_rollout_current_mean"]
    r = read(next((tmp_path / "run" / "arms" / "trm_max" / "rollouts").glob("*.parquet")))
    assert isinstance(r.evidence, TopK)


def test_hidden_states_train_as_full_rows_do_and_old_heads_stay_with_old_batches(finished, tmp_path):
    run = tmp_path / "run"
    train(small_recipe(rollout__evidence="hidden"), run)
    found, expected = rows(run), rows(finished)
    assert {r["divergence/grade"] for r in found} == {"exact"}
    assert [r["version_lag/max"] for r in found] == [0, 1, 0, 1, 0, 1]
    compared = [k for k in expected[0] if "rollout_current" in k]
    assert len(compared) == 5  # mean and maximum of KL and TV, and the TV that 95 % of the tokens stay below
    unit = torch.finfo(torch.float32).eps  # of the probabilities whose differences these are
    for a, b in zip(found, expected, strict=True):
        for key in compared:
            assert a[key] == pytest.approx(b[key], rel=1e-5, abs=unit), key
    files = sorted((run / "arms" / "trm_max" / "rollouts").glob("*.parquet"))
    heads = [read(f).evidence.head.weight for f in files]
    assert len(list((files[0].parent / "heads").iterdir())) == 3
    assert [torch.equal(a, b) for a, b in pairwise(heads)] == [True, False, True, False, True]


def test_resuming_nothing_or_another_recipe_is_refused(finished, tmp_path):
    with pytest.raises(CheckpointError, match="no run to resume"):
        train(small_recipe(), tmp_path / "nowhere", resume=True)
    with pytest.raises(CheckpointError, match=r"another recipe .optim differ"):
        train(two_arms(optim={"lr": 5.0}), finished, resume=True)
    with pytest.raises(CheckpointError, match=r"another recipe .arms differ"):
        train(small_recipe(method="none"), finished, resume=True)


def test_an_engine_that_ignores_weights_stops_the_run(tmp_path, monkeypatch):
    load = TransformersEngine.load_weights

    def stale_head(self, weights, *, version):
        own = dict(self.model.named_parameters())
        kept = ((k, own[k].detach().clone() if "embed_tokens" in k else w) for k, w in weights)
        load(self, kept, version=version)

    monkeypatch.setattr(TransformersEngine, "load_weights", stale_head)
    with pytest.raises(SyncError, match=r"model\.embed_tokens\.weight"):
        train(small_recipe(), tmp_path / "run")


def test_what_cannot_be_written_stops_with_the_file_and_the_way_out(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RecordError, match=r"cannot write .*run.json"):
        train(small_recipe(), tmp_path / "file" / "run")

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("offdrift.records.store.pq.write_table", full)
    with pytest.raises(RecordError, match=r"batch-000000.parquet: No space left.*free disk space"):
        train(small_recipe(), tmp_path / "run")
    assert not list(tmp_path.rglob("*.tmp"))
    assert not list(tmp_path.rglob("batch-*"))


def test_seeds_decide_everything(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train(small_recipe(batches=1, seed=seed), tmp_path / name)
    a, b, c = (rows(tmp_path / n) for n in "abc")
    assert a == b
    assert a != c


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("GRADIENT_ACCUMULATION_STEPS", "4", "gradient_accumulation_steps = 4"),
        ("MIXED_PRECISION", "fp8", "fp8"),
        ("USE_FSDP", "true", "--use_fsdp with one process"),
    ],
)
def test_a_launch_that_would_silently_change_the_step_is_refused(tmp_path, monkeypatch, variable, value, words):
    monkeypatch.setenv(f"ACCELERATE_{variable}", value)
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        with pytest.raises((RecipeError, ValueError), match=words):
            train(small_recipe(), tmp_path / "run")
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    assert not (tmp_path / "run" / "arms").exists()


def test_an_adaptive_method_resumes_with_what_it_had_become(tmp_path):
    recipe = small_recipe(arms={"r2vpo": {"method": "r2vpo", "override": {"objective.step": 50.0}}})
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train(recipe, whole)
    with pytest.raises(Stop):
        train(recipe, cut, watch=stop_at("r2vpo", 5))
    positions = sorted((cut / "arms" / "r2vpo" / "checkpoints").glob("*/position.json"))
    stored = json.loads(positions[-1].read_text())["method"]
    assert stored["objective.penalty"] != 0.04, "four updates have moved the multiplier"
    train(recipe, cut, resume=True)
    assert rows(cut, "r2vpo") == rows(whole, "r2vpo")


def test_rejected_siblings_count_in_the_baseline_or_not_as_asked(tmp_path):
    """The gate splits groups; the advantages, and with them the first step, differ by the choice."""
    first = {}
    for over in ("sampled", "kept"):
        arm = {"method": "trm_max", "override": {"gate.high": 1e-5}}
        train(small_recipe(batches=1, optim={"lr": 2e-4, "baseline_over": over}, arms={"trm": arm}), tmp_path / over)
        (first[over],) = rows(tmp_path / over, "trm")
    assert 0 < first["sampled"]["gate/acceptance_seq"] < 1
    assert first["sampled"]["gate/acceptance_seq"] == first["kept"]["gate/acceptance_seq"]
    assert first["sampled"]["optim/grad_norm"] != first["kept"]["optim/grad_norm"]


@pytest.mark.slow
def test_every_advantage_estimator_that_needs_no_critic_trains(tmp_path, monkeypatch):
    given = {"logp_old", "sum_pi_squared", "weight", "position", "entropy"}
    supplied = [name for name, row in ADVANTAGES.items() if set(row.needs) <= given]
    assert len(supplied) >= 12
    short_arms(monkeypatch)
    run = set_up(small_recipe(batches=1, method="vcpo"), RunFolder(tmp_path), lambda event: None)
    for how in supplied:
        recipe = small_recipe(batches=1, optim={"advantage": how}, method="vcpo")
        train_arm(replace(run, recipe=recipe, folder=RunFolder(tmp_path / how)), "vcpo", resume=False)
        (row,) = rows(tmp_path / how, "vcpo")
        assert math.isfinite(row["optim/loss"]), how
        assert row["optim/grad_norm"] > 0, how


def test_a_penalty_in_the_reward_changes_the_advantages_and_reports_its_kl(tmp_path):
    loss = {}
    for place in ("loss", "reward"):
        estimator = "k1" if place == "reward" else "k3_corrected"
        penalty = {"penalty.place": place, "penalty.estimator": estimator, "penalty.coef": 0.5}
        arm = {"method": "deepseek_v32", "override": penalty}
        train(small_recipe(batches=4, arms={"v32": arm}), tmp_path / place)
        found = rows(tmp_path / place, "v32")
        assert found[0]["reference/kl"] == pytest.approx(0.0, abs=1e-6)
        assert abs(found[-1]["reference/kl"]) > 1e-9
        loss[place] = found[-1]["optim/grad_norm"]
    assert loss["loss"] != loss["reward"]


@pytest.mark.slow
def test_old_policy_exact_gates_and_versions_go_together(tmp_path, monkeypatch):
    """What one part needs at the batch's start must not be asked of another that comes later."""
    short_arms(monkeypatch)
    arms = {name: {"method": name, "gates_of": "trm_max"} for name in ("decoupled_ppo", "otb")}
    arms |= {"trm_max": {"method": "trm_max", "override": {"gate.on": "mismatch"}}}
    arms |= {"normalized_tis": {"method": "normalized_tis", "gates_of": "echo2"}}
    for over in ("sampled", "kept"):
        train(small_recipe(batches=2, optim={"lr": 2e-4, "baseline_over": over}, arms=arms), tmp_path / over)
        for arm in arms:
            assert [math.isfinite(r["optim/loss"]) for r in rows(tmp_path / over, arm)] == [True, True], arm
