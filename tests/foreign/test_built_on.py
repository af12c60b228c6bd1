"""Trainers that are built on TRL and verl, from their own wheels: `make test-built-on`.

Their modules, not their runs: the classes that the adapters' lines name, and the places where they call what the
adapters replace.
"""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from offdrift.adapters.trl import OffdriftMixin
from offdrift.adapters.trl.proof import refuse_class
from offdrift.errors import FrameworkError
from offdrift.methods import METHODS
from tests.adapters.hooked import code
from tests.adapters.test_verl_plugin import child
from tests.adapters.trl_bare import inputs_of, ours, pushed
from tests.foreign.real import quietly
from tests.parity.trl_trainer import sequence_batch

pytestmark = pytest.mark.foreign

FOLDER = os.environ.get("OFFDRIFT_BUILT_ON", "")


def needs(name: str) -> Path:
    """The folder of a package, without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        if FOLDER:
            pytest.fail(f"{name} is not in {FOLDER}")
        pytest.skip(f"{name}: `make test-built-on` installs and runs it")
    return Path(next(iter(spec.submodule_search_locations)))


@pytest.fixture
def axolotl() -> Any:
    needs("axolotl")
    return quietly("axolotl.core.trainers.grpo.trainer")


@pytest.fixture
def page(axolotl: Any, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module that the page says to write."""
    (text,) = (block for block in code("trl.md", "python") if "axolotl" in block)
    made = ModuleType("offdrift_axolotl")
    exec(compile(text, "trl.md", "exec"), made.__dict__)
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made


def test_axolotls_trainer_has_trls_loss_and_proves_it(axolotl: Any, page: Any) -> None:
    assert issubclass(page.Trainer, axolotl.AxolotlGRPOTrainer)
    refuse_class(page.Trainer, OffdriftMixin)
    run = ours(sequence_batch(1), METHODS["decoupled_token_is"], base=axolotl.AxolotlGRPOTrainer)
    pushed(run, inputs_of(run))
    assert run.trainer._proved


def test_axolotls_asynchronous_trainer_is_refused_by_name(axolotl: Any) -> None:
    mine = type("Mine", (OffdriftMixin, axolotl.AxolotlAsyncGRPOTrainer), {})
    with pytest.raises(FrameworkError, match=r"AsyncGRPOTrainer\._compute_loss is a loss that this adapter"):
        mine("model", method="decoupled_token_is")


def test_axolotls_builder_takes_the_class_that_the_page_names(axolotl: Any, page: Any, monkeypatch: Any) -> None:
    """By `trainer_cls`, with the model and its rewards; a plugin's `get_trainer_cls` is given neither."""
    builders, grpo = quietly("axolotl.core.builders.rl"), quietly("axolotl.core.trainers.grpo")
    (line,) = (line for block in code("trl.md", "yaml") for line in block.splitlines() if "trainer_cls" in line)
    trl = SimpleNamespace(async_prefetch=False, use_data_producer=False)
    settings = {"rl": builders.RLType.GRPO, "trl": trl, "context_parallel_size": 1, "trainer_cls": line.split()[1]}
    monkeypatch.setattr(grpo.GRPOStrategy, "set_trainer_args", lambda cfg: ["rewards"])
    monkeypatch.setattr(grpo.GRPOStrategy, "set_trainer_kwargs", lambda cfg: {})
    builder = SimpleNamespace(cfg=SimpleNamespace(**settings), model="model")
    assert builders.HFRLTrainerBuilder._get_trainer_cls(builder, {}) == (page.Trainer, ["model", "rewards"])
    plugin = SimpleNamespace(get_trainer_cls=lambda cfg: page.Trainer)
    monkeypatch.setattr(builders.PluginManager, "get_instance", lambda: plugin)
    assert builders.HFRLTrainerBuilder._get_trainer_cls(builder, {}) == (page.Trainer, [])


def test_agent_lightning_calls_what_the_verl_adapter_replaces() -> None:
    """Its losses and ours in verl's registry, and the driver's side by the names that its trainer imported."""
    folder = needs("agentlightning").parent
    found = child(
        """
        import inspect
        import agentlightning.verl.per_rollout_loss
        from agentlightning.verl import trainer
        from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
        print(*sorted({name.partition("/")[0] for name in POLICY_LOSS_REGISTRY} & {"offdrift", "per_rollout_mean"}))
        from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch as correct
        for function in (correct, trainer.compute_advantage, trainer.apply_bypass_mode):
            print(hasattr(function, "__wrapped__"))
        own = inspect.getsource(trainer.AgentLightningRayPPOTrainer)
        print("compute_rollout_correction_and_add_to_batch(batch, " in own, "= compute_advantage(batch" in own)
        """,
        folder,
        VERL_USE_EXTERNAL_MODULES="offdrift.adapters.verl",
        VERL_USE_EXTERNAL_PLUGINS="none",
        OFFDRIFT_METHOD="icepop",
    )
    assert found.returncode == 0, found.stderr[-2000:]
    assert found.stdout.splitlines()[-5:] == ["offdrift per_rollout_mean", "True", "True", "True", "True True"]


def test_trinity_calls_neither_verls_losses_nor_its_correction() -> None:
    """Why the page sends nobody of Trinity to verl's adapter: its losses are a registry of its own."""
    folder = needs("trinity")
    texts = {path: path.read_text() for path in (folder / "trainer" / "verl").glob("*.py")}
    assert any("POLICY_LOSS_FN.get(algo_config.policy_loss_fn)" in text for text in texts.values())
    for name in ("POLICY_LOSS_REGISTRY", "get_policy_loss_fn", "compute_rollout_correction_and_add_to_batch"):
        assert not any(name in text for text in texts.values()), name
