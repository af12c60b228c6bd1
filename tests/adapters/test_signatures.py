"""Every argument of what an adapter replaces or wraps is used, passed on, or refused by name.

`signatures.toml` has the arguments as the frameworks' own sources write them. Rows of a wheel are compared with the
wheel where it is installed, so that a framework that moved fails here before it is silently replaced.
"""

import ast
import importlib.util
import inspect
import tomllib
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
import torch

from offdrift.adapters.arguments import refuse_set, refuse_unknown
from offdrift.adapters.contrib import areal, ms_swift, nemo_rl, openrlhf, prime_rl, roll, skyrl, slime, trinity
from offdrift.adapters.frameworks import FRAMEWORKS
from offdrift.adapters.trl import OffdriftMixin
from offdrift.adapters.verl import losses
from offdrift.adapters.verl.driver import Driver
from offdrift.errors import FrameworkError, MethodError

RECORDED = tomllib.loads((Path(__file__).parent / "signatures.toml").read_text())["function"]


def named(function: Callable[..., Any]) -> set[str]:
    """Parameters that a function of ours has by name."""
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {name for name, p in inspect.signature(function).parameters.items() if p.kind not in kinds} - {"self"}


EVERYTHING = None
"""What hands all arguments to the framework's own function, unchanged."""
HANDLED: dict[tuple[str, str], Iterable[str] | None] = {
    ("areal", "grpo_loss_fn"): {
        *(named(areal.grpo_loss_fn) - {"module"}),
        *(*areal.NEUTRAL, *areal.STOOD_IN_FOR, *areal.LOGGED),
    },
    ("areal", "apply_rejection_sampling"): named(areal.apply_rejection_sampling) - {"module"},
    ("areal", "PPOActor._ppo_update"): EVERYTHING,
    ("openrlhf", "PolicyLoss.__init__"): openrlhf.STOOD_IN_FOR,
    ("openrlhf", "PolicyLoss.forward"): named(openrlhf.PolicyLoss.forward),
    ("ms-swift", "GRPOTrainer._get_rollout_is_correction"): named(ms_swift.correction) - {"trainer"},
    ("ms-swift", "GRPOTrainer._apply_rollout_importance_sampling"): EVERYTHING,
    ("skyrl", "ppo_policy_loss"): named(skyrl.RegisteredLoss.__call__),
    # What the class of the configuration is made with; other settings are refused by name.
    ("trinity", "PolicyLossFn.__init__"): named(trinity.TrinityLoss.__init__),
    ("trinity", "PPOPolicyLossFn.__init__"): {*named(trinity.TrinityLoss.__init__), *trinity.PPO_SETTINGS},
    ("slime", "tis_kwargs"): named(slime.tis),
    ("miles", "tis_kwargs"): named(slime.tis),
    ("roll", "compute_train_infer_correction"): named(roll.train_infer_correction),
    ("nemo-rl", "ClippedPGLossConfig"): {*nemo_rl.OWN_TERMS, *nemo_rl.STOOD_IN_FOR, *nemo_rl.FOLLOWED},
    ("prime-rl", "LossInputs"): prime_rl.KNOWN,
    ("trl", "GRPOTrainer._compute_loss"): named(OffdriftMixin._compute_loss),
    ("trl", "GRPOTrainer._generate_and_score_completions"): named(OffdriftMixin._generate_and_score_completions),
    ("trl", "GRPOTrainer._get_per_token_logps_and_entropies"): EVERYTHING,
    ("trl", "GRPOTrainer._calculate_rewards"): EVERYTHING,
    ("trl", "GRPOTrainer.training_step"): EVERYTHING,
    ("verl", "compute_policy_loss_vanilla"): named(losses.policy_loss_named("ppo_clip")),
    # Bound by the original's own signature; an estimator of ours is not given the last three of these.
    ("verl", "compute_advantage"): named(Driver.advantages) - {"estimate"} | {"norm_adv_by_std_in_grpo", "config"} | {"lam", "num_repeat"},
    ("verl", "compute_rollout_correction_and_add_to_batch"): {"batch", "rollout_corr_config"},
    ("verl", "apply_bypass_mode"): EVERYTHING,
    ("verl", "PPOTrainer._compute_advantage"): EVERYTHING,
}  # fmt: skip


def key(row: dict[str, Any]) -> str:
    return f"{row['framework']}-{row['version']}-{row['name']}"


@pytest.mark.parametrize("row", RECORDED, ids=key)
def test_every_argument_is_used_passed_on_or_refused(row: dict[str, Any]) -> None:
    handled = HANDLED[row["framework"], row["name"]]
    assert row["arguments"]
    if handled is not EVERYTHING:
        assert [name for name in row["arguments"] if name not in handled] == []


def test_every_function_that_is_replaced_has_a_recorded_signature() -> None:
    assert {(row["framework"], row["name"]) for row in RECORDED} == set(HANDLED)
    assert {row["framework"] for row in RECORDED} == set(FRAMEWORKS)
    for row in RECORDED:
        assert row["source"] == "wheel" or row["date"]


def arguments_in(file: Path, name: str) -> list[str]:
    """Arguments of a function (or fields of a class), read from the source."""
    holder: ast.AST = ast.parse(file.read_text())
    for part in name.split("."):
        holder = next(node for node in ast.iter_child_nodes(holder) if getattr(node, "name", None) == part)
    assert isinstance(holder, ast.FunctionDef)
    found = holder.args
    assert found.vararg is None
    assert found.kwarg is None
    return [a.arg for a in (*found.posonlyargs, *found.args, *found.kwonlyargs) if a.arg != "self"]


@pytest.mark.parametrize("row", [row for row in RECORDED if row["source"] == "wheel"], ids=key)
def test_recorded_signatures_are_those_of_the_installed_wheel(row: dict[str, Any]) -> None:
    package, _, inside = row["file"].partition("/")
    spec = importlib.util.find_spec(package)
    try:
        installed = version(FRAMEWORKS[row["framework"]].distribution)
    except PackageNotFoundError:
        installed = "nothing"
    if spec is None or not spec.submodule_search_locations or installed != row["version"]:
        pytest.skip(f"{row['framework']} {row['version']} is not installed ({installed})")
    file = Path(next(iter(spec.submodule_search_locations))) / inside
    assert arguments_in(file, row["name"]) == row["arguments"]


def test_trl_hands_its_forward_pass_what_stands_in_the_inputs_under_the_same_names() -> None:
    """The adapter's own forward pass takes every argument from the inputs by its name."""
    spec = importlib.util.find_spec("trl")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("TRL is not installed")
    tree = ast.parse((Path(next(iter(spec.submodule_search_locations))) / "trainer" / "grpo_trainer.py").read_text())
    (loss,) = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "_compute_loss")
    (call,) = (
        n
        for n in ast.walk(loss)
        if isinstance(n, ast.Call) and getattr(n.func, "attr", "") == "_get_per_token_logps_and_entropies"
    )
    taken = {k.arg: k.value.args[0].value for k in call.keywords if isinstance(k.value, ast.Call)}  # type: ignore
    assert len(taken) >= 8
    assert all(name == entry for name, entry in taken.items())


def test_unknown_arguments_are_refused_unless_they_are_off() -> None:
    refuse_unknown("areal", "f", {"a": None, "b": False, "c": 1}, known={"c"})
    for value in (0, 1.0, "x", True, [], object()):
        with pytest.raises(FrameworkError, match="areal passes new="):
            refuse_unknown("areal", "f", {"new": value})
    refuse_set({"a": 1, "b": 5}, {"a": 1, "gone": None}, whose="x", way_out="y")
    with pytest.raises(MethodError, match="a='z': part of x, which is replaced; y"):
        refuse_set({"a": "z"}, {"a": 1}, whose="x", way_out="y")


def test_slimes_tis_function_and_openrlhfs_loss_refuse_what_they_do_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FrameworkError, match=r"slime passes opsm=True to its custom TIS function"):
        slime.tis(None, pg_loss=torch.zeros(3), train_log_probs=[], rollout_log_probs=[], loss_masks=[], total_lengths=[],
                  response_lengths=[], opsm=True)  # type: ignore  # fmt: skip
    with pytest.raises(FrameworkError, match=r"openrlhf passes is_correction_window=3 to PolicyLoss"):
        openrlhf.PolicyLoss(is_correction_window=3)
