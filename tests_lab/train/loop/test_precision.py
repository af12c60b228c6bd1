"""Half precision of the trainer's passes, the loss scale of float16, and weights that rest in host memory."""

from __future__ import annotations

import json
from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import FullyShardedDataParallelPlugin

from offdrift import models
from offdrift.errors import EngineError, RecipeError
from offdrift_lab.train.features import loss_scale
from offdrift_lab.train.features.loss_scale import LossScale
from offdrift_lab.train.loop import batch, loop, old_policy
from offdrift_lab.train.loop.context import half_precision
from offdrift_lab.train.loop.loop import train
from offdrift_lab.train.loop.sharded import _check_plugin
from tests_lab.train.conftest import small_recipe
from tests_lab.train.loop.test_loop import Stop, rows, stop_at, weights

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture
def launched(monkeypatch):
    """Launch with accelerate settings, as its environment has them."""

    def set_up(**settings: str) -> None:
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        AcceleratorState._reset_state(reset_partial_state=True)

    yield set_up
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setitem(models.TINY_SHAPE, "hidden_size", 32)
    monkeypatch.setitem(models.TINY_SHAPE, "intermediate_size", 64)


def quick(**changes):
    """Four updates, evaluated once before and once after."""
    log = {"eval_every": 99, "eval_prompts": 2, "checkpoint_every": 2, "samples_every": 9, "trackers": []}
    return small_recipe(**{"batches": 4, "log": log, **changes})


def test_the_scale_halves_at_an_overflow_and_doubles_after_enough_steps():
    scale = LossScale(value=8.0, interval=3)
    values = []
    for skipped in (True, False, False, True, False, False, False, False):
        scale = scale.after(skipped=skipped)
        values.append(scale.value)
    assert values == [4, 4, 4, 2, 2, 2, 4, 4]
    with pytest.raises(EngineError, match=r"float16 even with a loss scale of 1.*bfloat16"):
        LossScale(value=1.0).after(skipped=True)


@pytest.mark.parametrize(
    ("launch", "asked", "half"),
    [("no", None, None), ("no", "float16", torch.float16), ("bf16", None, torch.bfloat16),
     ("fp16", None, torch.float16), ("fp16", "float16", torch.float16)],
)  # fmt: skip
def test_the_recipe_or_the_launch_says_the_precision(monkeypatch, launch, asked, half):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launch)
    assert half_precision(small_recipe(optim={"dtype": asked})) is half


@pytest.mark.parametrize(("launch", "asked", "words"), [("bf16", "float16", "leave out one"), ("fp8", None, "fp8")])
def test_a_launch_in_another_precision_is_refused(monkeypatch, launch, asked, words):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launch)
    with pytest.raises(RecipeError, match=words):
        half_precision(small_recipe(optim={"dtype": asked}))


@pytest.mark.usefixtures("small")
def test_a_launch_in_half_precision_is_the_recipe_in_half_precision(tmp_path, launched):
    """And another run than in float32; the engine's weights are verified at float32 all the while."""
    for name in ("float32", "bfloat16", "float16"):
        rollout = {"prompts": 2, "samples": 4, "max_tokens": 6, "dtype": "float32"}
        train(quick(optim={"lr": 2e-4, "dtype": name}, rollout=rollout, batches=2), tmp_path / name)
    launched(ACCELERATE_MIXED_PRECISION="fp16")
    train(quick(optim={"lr": 2e-4}, rollout=rollout, batches=2), tmp_path / "launched")
    assert rows(tmp_path / "launched") == rows(tmp_path / "float16")
    # float16's mantissa has 10 bits, bfloat16's 7, float32's 23: differences from a float32 engine go by their unit.
    gaps = {name: rows(tmp_path / name)[0]["full/abs_log_ratio_max"] for name in ("float32", "bfloat16", "float16")}
    assert gaps["float32"] < 1e-5
    assert 4 < gaps["bfloat16"] / gaps["float16"] < 16
    assert gaps["float16"] > 20 * gaps["float32"]


@pytest.mark.usefixtures("small")
def test_overflowing_steps_are_skipped_counted_and_the_same_in_a_resumed_run(tmp_path, monkeypatch):
    monkeypatch.setattr(loss_scale, "LossScale", partial(LossScale, value=2.0**40, interval=2))
    recipe = quick(optim={"lr": 2e-4, "dtype": "float16"}, batches=4, lag={"sync_every": 1})
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train(recipe, whole)
    assert [row["optim/skipped"] for row in rows(whole)] == [1.0] * 4
    assert [row["optim/loss_scale"] for row in rows(whole)] == [2.0**40, 2.0**39, 2.0**38, 2.0**37]
    start, _ = models.load_model("tiny-qwen3", seed=0)
    assert all(torch.equal(w, start.get_parameter(name)) for name, w in weights(whole).items())
    with pytest.raises(Stop):
        train(recipe, cut, watch=stop_at("trm_max", 3))
    train(recipe, cut, resume=True)
    assert rows(cut) == rows(whole)


@pytest.mark.usefixtures("small")
def test_a_resident_model_goes_back_where_it_was_also_on_errors(monkeypatch):
    model, places = models.load_model("tiny-qwen3", seed=0)[0], ["cpu"]
    monkeypatch.setattr(type(model), "to", lambda model, device: places.append(str(device)))

    def fail() -> None:
        with models.resident(model, torch.device("cuda:0")):
            assert places[-1] == "cuda:0"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert places == ["cpu", "cuda:0", "cpu"]


@pytest.mark.usefixtures("small")
def test_the_reference_is_on_the_device_for_its_passes_and_evaluations_only(tmp_path, monkeypatch):
    inside, scored = [], []

    @contextmanager
    def visiting(model, device):
        inside.append(model)
        yield model
        inside.pop()

    for module in (batch, loop):
        monkeypatch.setattr(module, "resident", visiting)
    score, engine = batch.score_batch, loop.make_engine
    monkeypatch.setattr(
        batch, "score_batch", lambda model, *a, **k: scored.append(inside == [model]) or score(model, *a, **k)
    )
    monkeypatch.setattr(
        loop, "make_engine", lambda kind, model, **k: scored.append(inside == [model]) or engine(kind, model, **k)
    )
    train(quick(arms={"v3": {"method": "deepseek_v32"}}, batches=2), tmp_path / "run")
    assert scored == [True] * 4  # two batches with a penalty between two evaluations


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("source", "method"), [("second_model", "decoupled_ppo"), ("ewma", "ppo_ewma")])
def test_offloaded_old_policies_train_as_those_on_the_device(tmp_path, monkeypatch, source, method):
    copies = []
    monkeypatch.setattr(old_policy, "kept", lambda w, *, offload: copies.append(offload) or w.clone())
    for offload in (False, True):
        arms = {"arm": {"method": method, "old_policy": {"from": source, "offload": offload}}}
        train(quick(arms=arms), tmp_path / str(offload))
    assert rows(tmp_path / "False", "arm") == rows(tmp_path / "True", "arm")
    assert copies == sorted(copies)
    assert set(copies) == {False, True}


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"fsdp_version": 1, "reshard_after_forward": "FULL_SHARD"}, "--fsdp_version 1"),
     ({"fsdp_version": 2, "cpu_offload": True}, "--fsdp_offload_params"),
     ({"fsdp_version": 2, "state_dict_type": "FULL_STATE_DICT"}, "SHARDED_STATE_DICT"), ({"fsdp_version": 2}, None)],
)  # fmt: skip
def test_kinds_of_sharding_that_nothing_tests_are_refused(settings, words):
    with pytest.raises(RecipeError, match=words) if words else nullcontext():
        _check_plugin(FullyShardedDataParallelPlugin(**settings))


def test_offloading_what_is_not_on_the_device_is_refused():
    with pytest.raises(RecipeError, match=r'old_policy.offload = true, but old_policy.from = "sampling".*second_model'):
        small_recipe(old_policy={"offload": True}, arms={"a": {"method": "decoupled_ppo"}})
    assert json.loads(small_recipe(reference={"offload": True}).model_dump_json())["reference"] == {"offload": True}
