"""Runs whose trainer and engine are equal bit for bit: metrics of mismatch are 0, and what cannot be is refused."""

import pytest

from offdrift.errors import EngineError, RecipeError
from offdrift_lab.train.loop import context
from offdrift_lab.train.loop.context import half_precision
from offdrift_lab.train.loop.loop import train
from offdrift_lab.train.settings.recipe import load_recipe
from tests_lab.train.conftest import short_arms, small_recipe
from tests_lab.train.loop.test_loop import rows

ZERO = (
    "mismatch/abs_log_ratio_max", "mismatch/k3", "full/abs_log_ratio_max", "full/k3",
    "divergence/kl_rollout_current_max", "divergence/tv_rollout_current_max",
)  # fmt: skip


def equal_recipe(dtype: str = "float32", **changes):
    """Two batches of an engine that computes as the trainer does, with full evidence."""
    rollout = {"prompts": 4, "samples": 4, "max_tokens": 6, "dtype": dtype}
    content = {
        "batches": 2,
        "batch_invariant": True,
        "rollout": rollout,
        "optim": {"lr": 2e-4, "dtype": dtype},
        "arms": {"a": {"method": "decoupled_token_is"}},
    }
    return small_recipe(**{**content, **changes})


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("dtype", "model"),
    [("float32", "tiny-qwen3"), ("bfloat16", "tiny-qwen3-moe"), ("float16", "tiny-qwen3")],
)
def test_every_update_starts_from_log_probs_that_are_equal_bit_for_bit(tmp_path, monkeypatch, dtype, model):
    short_arms(monkeypatch)
    batches = 6 if dtype == "float16" else 1  # at first the loss scale overflows
    options = {"model": model, "lag": {"sync_every": 1}, "batches": batches}
    for invariant in (False, True):  # the mode stays in the configuration that the models share
        train(equal_recipe(dtype, batch_invariant=invariant, **options), tmp_path / str(invariant))
    for row in rows(tmp_path / "True", "a"):
        assert {name: row[name] for name in ZERO} == dict.fromkeys(ZERO, 0.0)
        assert row["mismatch/pearson"] == 1
    for row in rows(tmp_path / "False", "a"):  # the same numbers, but for rounding
        assert row["full/abs_log_ratio_max"] > 0
    norms = [[r["optim/grad_norm"] for r in rows(tmp_path / name, "a")] for name in ("True", "False")]
    taken = [pair for pair in zip(*norms, strict=True) if None not in pair]
    assert taken
    for with_mode, without in taken:
        assert with_mode == pytest.approx(without, rel=1e-4 if dtype == "float32" else 0.2)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_staleness_is_left_and_mismatch_is_0(tmp_path, monkeypatch):
    """The engine is one update behind in the second batch: the old policy, from a snapshot, still has its bits."""
    short_arms(monkeypatch)
    train(equal_recipe(lag={"sync_every": 2}, rollout__top_p=0.9), tmp_path)
    first, second = rows(tmp_path, "a")
    assert first["full/abs_log_ratio_max"] == first["mismatch/abs_log_ratio_max"] == 0
    assert second["mismatch/abs_log_ratio_max"] == 0
    assert second["full/abs_log_ratio_max"] > 1e-4


@pytest.mark.parametrize("side", ["trainer", "engine"])
def test_a_run_whose_sides_differ_is_refused_before_it_trains(tmp_path, monkeypatch, side):
    short_arms(monkeypatch)
    if side == "trainer":
        monkeypatch.setattr(context, "batch_invariant", lambda model: model)
    else:
        make = context.make_engine
        monkeypatch.setattr(context, "make_engine", lambda *a, **k: make(*a, **{**k, "dtype": "bfloat16"}))
    with pytest.raises(EngineError, match=r"batch_invariant = true, but log-probs .* differ by up to"):
        train(equal_recipe(), tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rollout": {"engine": "vllm", "dtype": "float32"}}, r'rollout.engine = "vllm" has its own'),
        ({"rollout": {"dtype": "float32", "quantization": "int8"}}, r'rollout.quantization = "int8"'),
        ({"rollout": {"dtype": "bfloat16"}}, r'rollout.dtype = "bfloat16" is not the trainer.s "float32"; set'),
        ({"optim": {"dtype": "float16"}}, r'is not the trainer.s "float16"'),
        ({"lora": {}}, r"\[lora\]: the engine multiplies by merged weights"),
        ({"fusion": {"teacher": "tiny-qwen3"}}, r"batch_invariant = true has no place beside \[fusion\]"),
        (
            {"rollout": {"dtype": "float32", "speculative": {"model": "tiny-qwen3-draft"}}},
            r"batch_invariant = true has no place beside rollout.speculative",
        ),
        ({"rollout": {"dtype": "float32", "kv": {"budget": 8}}}, r"has no place beside rollout.kv"),
    ],
)
def test_what_cannot_be_equal_is_refused(changes, words):
    with pytest.raises(RecipeError, match=words):
        equal_recipe(**changes)


def test_a_launch_in_another_precision_is_refused(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.raises(RecipeError, match=r"launched with --mixed_precision bf16, but rollout.dtype"):
        half_precision(equal_recipe(optim={"lr": 2e-4}))


def test_the_recipe_of_equal_engines_is_one():
    recipe = load_recipe("recipes/equal.toml")
    assert recipe.batch_invariant
    assert recipe.rollout.dtype == recipe.optim.dtype == "float16"
