"""Two processes that share the weights (FSDP2 over gloo) take the steps that one process takes on the same rollouts.

One launch of this file as a module makes all runs that the tests look at.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from offdrift import models
from offdrift.records.rollouts import concatenate
from offdrift.records.store import read
from offdrift_lab.train.data.source import Source
from offdrift_lab.train.data.tasks import TASKS
from offdrift_lab.train.loop import loop
from offdrift_lab.train.loop.loop import train
from offdrift_lab.train.loop.sharded import is_sharded, local_weights
from tests_lab.train.conftest import Digits, small_recipe
from tests_lab.train.loop.test_loop import Stop, rows, stop_at

ROOT = Path(__file__).parents[3]
WORLD = 2
FSDP = {
    "ACCELERATE_USE_CPU": "true", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false", "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
}  # fmt: skip
DENSE = {
    "trm": {"method": "trm_max", "override": {"gate.high": 1.5e-3}},
    "cov": {"method": "kl_cov_exact"},  # whole distributions of the weights that drew each token
    "ewma": {"method": "ppo_ewma"},
    "second": {"method": "decoupled_ppo", "old_policy": {"from": "second_model", "offload": True}},
    "reference": {"method": "deepseek_v32"},
    "scaled": {"method": "vcpo"},  # looks at the whole step before it acts
}
RECIPES = {
    # Five prompts: the processes have 12 and 8 sequences, and other numbers of passes.
    "dense": {"arms": DENSE},
    "experts": {"model": "tiny-qwen3-moe", "arms": {"gae": {"method": "trm_max"}}, "batches": 3,
                "optim": {"advantage": "gae"}},
    # The processes pick groups of different versions from their buffers.
    "buffer": {"arms": {"mixed": {"method": "decoupled_ppo"}}, "buffer": {"capacity": 16, "reuse": 2},
               "lag": {"sync_every": 1}, "optim": {"dtype": "float16"}, "batches": 6},
}  # fmt: skip
COMMON = {
    "rollout": {"prompts": 5, "samples": 4, "max_tokens": 6, "dtype": "float32"},
    "lag": {"sync_every": 2, "queue": 1},
    "batches": 5,
    "reference": {"offload": True},
    # Evaluated at the beginning, at the end and once in between.
    "log": {"eval_every": 3, "eval_prompts": 4, "checkpoint_every": 2, "samples_every": 2, "trackers": []},
}


def recipe(name: str):
    changes = COMMON | RECIPES[name]
    return small_recipe(**changes | {"optim": {"lr": 2e-4, "token_budget": 60, **changes.get("optim", {})}})


def small_models(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(models.TINY_SHAPE, "hidden_size", 32)
    patch.setitem(models.TINY_SHAPE, "intermediate_size", 64)


def main(folder: Path) -> None:
    """All runs, in each of the processes."""
    gc.freeze()  # what was imported stays: every arm ends with a full collection, which walks it
    rank, patch = int(os.environ["RANK"]), pytest.MonkeyPatch()
    TASKS["digits"] = Digits()
    small_models(patch)
    start, rollout, facts = loop.start_arm, loop.rollout, {}

    def started(run, name, **options):
        arm, source = start(run, name, **options)
        parts = local_weights(arm.model)
        whole = sum(p.numel() for p in run.model.parameters())
        facts[name] = {"sharded": is_sharded(arm.model), "share": sum(map(torch.Tensor.numel, parts.values())) / whole}
        return arm, source

    def evaluated(engine, *args, **options):
        weights = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
        torch.save(weights, folder / f"evaluated-rank{rank}.pt")
        return rollout(engine, *args, **options)

    patch.setattr(loop, "start_arm", started)
    patch.setattr(loop, "rollout", evaluated)
    for name in RECIPES:
        train(recipe(name), folder / name)
    (folder / f"facts-rank{rank}.json").write_text(json.dumps(facts))
    cut = folder / "cut"
    for resume, watch in ((False, stop_at("cov", 3)), (True, stop_at("ewma", 4))):
        with pytest.raises(Stop):
            train(recipe("dense"), cut, resume=resume, watch=watch)
    train(recipe("dense"), cut, resume=True)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(WORLD)]
    done = subprocess.run(
        [*command, "-m", "tests_lab.train.loop.test_sharded", str(folder)], cwd=ROOT, env={**os.environ, **FSDP},
        capture_output=True, text=True, timeout=560,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]
    return folder


@pytest.fixture(scope="module")
def single(sharded, tmp_path_factory):
    """The same recipes in one process, on the rollouts that the two have drawn."""
    folder = tmp_path_factory.mktemp("single")

    def drawn(source, index):
        arm = source.folder.relative_to(folder)
        parts = (read(sharded / arm / f"batch-{index:06d}-rank{rank}.parquet") for rank in range(WORLD))
        return concatenate(list(parts))

    with pytest.MonkeyPatch.context() as patch:
        small_models(patch)
        patch.setattr(Source, "draw", drawn)
        for name in ("dense", "experts"):
            train(recipe(name), folder / name)
    return folder


pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
ARMS = [("dense", arm) for arm in DENSE] + [("experts", "gae")]
OF_ROUNDING = {"mismatch/ratio_mean_z", "mismatch/k3_top_share", "weight/std", "weight/changed_frac"}
"""Statistics of ratios that differ from 1 by rounding alone."""
QUOTIENTS = ("shift_corr", "ratio_mean_z", "k3_top_share", "certificate/")
"""Where differences are divided by each other, or a confidence bound is searched for."""


@pytest.mark.parametrize(("name", "arm"), ARMS)
def test_every_update_is_the_one_that_a_single_process_takes(sharded, single, name, arm):
    ours, theirs = (rows(folder / name, arm) for folder in (sharded, single))
    assert len(ours) == len(theirs) == recipe(name).updates
    compared = 0
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        for key in other.keys() - OF_ROUNDING:
            if isinstance(other[key], float):
                # Two halves are added in another order: float32's unit, 1.2e-7, some tens of times.
                rel = 3e-3 if any(part in key for part in QUOTIENTS) else 1e-5
                mean = 1.0 if "chi2_" in key else 0.0  # chi^2 is the mean of squared ratios, less 1
                expected = pytest.approx(mean + other[key], rel=rel, abs=1e-6)
                assert mean + one[key] == expected, (one["update"], key)
                compared += 1
    assert compared > 200
    if arm == "trm":
        assert any(0 < row["gate/acceptance_seq"] < 1 for row in ours)
    weights, expected = (load_file(f / name / "arms" / arm / "model" / "model.safetensors") for f in (sharded, single))
    assert weights.keys() == expected.keys()
    for key, weight in weights.items():  # a step moves a weight by up to 2e-4
        torch.testing.assert_close(weight, expected[key], rtol=1e-5, atol=1e-6)


def test_each_process_holds_half_of_the_weights(sharded):
    for rank in range(WORLD):
        facts = json.loads((sharded / f"facts-rank{rank}.json").read_text())
        assert facts.keys() == {*(arm for _, arm in ARMS), "mixed"}
        assert all(fact["sharded"] and fact["share"] == pytest.approx(0.5, abs=0.01) for fact in facts.values())


def test_processes_that_hold_other_versions_score_them_all_in_step(sharded):
    run = sharded / "buffer" / "arms" / "mixed"
    assert [row["old/exact_frac"] for row in rows(sharded / "buffer", "mixed")] == [1.0] * 6
    logs = [[pq.read_table(f)["rollout_version"] for f in sorted(run.glob(f"log/*rank{r}*"))] for r in range(WORLD)]
    picked = [[{v for row in log.to_pylist() for v in row} for log in own] for own in logs]
    assert any(one != other for one, other in zip(*picked, strict=True))
    assert [row["optim/loss_scale"] for row in rows(sharded / "buffer", "mixed")] == [65536.0] * 6


def test_what_was_resumed_twice_equals_what_was_not_interrupted(sharded):
    for arm in DENSE:
        whole, cut = sharded / "dense", sharded / "cut"
        assert rows(cut, arm) == rows(whole, arm)
        weights, expected = (load_file(f / "arms" / arm / "model" / "model.safetensors") for f in (cut, whole))
        assert all(torch.equal(weights[name], expected[name]) for name in expected | weights)


def test_evaluations_and_the_stored_model_have_the_trained_weights_whole(sharded):
    last = list(DENSE)[-1]
    stored = load_file(sharded / "cut" / "arms" / last / "model" / "model.safetensors")
    for rank in range(WORLD):
        evaluated = torch.load(sharded / f"evaluated-rank{rank}.pt")
        assert evaluated.keys() == stored.keys()
        assert all(torch.equal(weight, stored[name]) for name, weight in evaluated.items())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
