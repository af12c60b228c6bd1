"""Trainers that are built on TRL and verl, or beside them, from their own wheels: `make test-built-on`.

Their modules, not their runs: the classes that the adapters' lines name, and the places where they call what the
adapters replace.
"""

import importlib.util
import inspect
import logging
import os
import pickle
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from offdrift.adapters.contrib.trinity import PPO_SETTINGS
from offdrift.adapters.trl import OffdriftMixin
from offdrift.adapters.trl.proof import refuse_class
from offdrift.errors import FrameworkError, LivenessError
from offdrift.methods import METHODS
from tests.adapters.hooked import Batch, Outcome, code, filled, heard, outcome
from tests.adapters.test_verl_plugin import child
from tests.adapters.trl_bare import inputs_of, ours, pushed
from tests.foreign.real import doubles, quietly
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


@pytest.fixture
def trinity(process: Any) -> Any:
    """`trinity.trainer.verl.losses`, which calls the policy loss."""
    needs("trinity")
    return quietly("trinity.trainer.verl.losses")


def configured(**arguments: Any) -> Any:
    """The page's settings after Trinity's own validation; `loss_agg_mode` is the algorithm's."""
    block, common = yaml.safe_load(code("trinity.md", "yaml")[0]), quietly("trinity.common.config")
    validator = quietly("trinity.common.config_validator").AlgorithmConfigValidator()
    algorithm = {**block["algorithm"], "kl_loss_fn": "none", "entropy_loss_fn": "none"}
    algorithm |= {"loss_agg_mode": arguments.pop("loss_agg_mode", None)}
    config = common.Config(algorithm=common.AlgorithmConfig(algorithm_type="grpo", **algorithm))
    config.algorithm.policy_loss_fn_args |= arguments
    validator.validate(config)
    return config.algorithm


def trinitys_batch(of: Batch, width: int = 3) -> Any:
    """The columns that Trinity's trainer puts into verl's batch, as its `_update_actor` sends them."""
    b, t = of.mask.shape
    ids = torch.arange(b * (width + t)).view(b, -1)
    full = torch.ones_like(ids)
    columns = {"input_ids": ids, "attention_mask": full, "position_ids": full.cumsum(1) - 1}
    columns |= {"prompts": ids[:, :width], "responses": ids[:, width:], "response_mask": of.mask.long()}
    columns |= {"old_log_probs": of.old, "rollout_log_probs": of.rollout, "advantages": of.advantages}
    padding = quietly("verl.workers.utils.padding")
    data = quietly("verl.protocol").DataProto.from_dict(tensors=columns).to_tensordict()
    return padding.left_right_2_no_padding(data)


def stepped(trinity: Any, algorithm: Any, of: Batch, width: int = 3) -> Outcome:
    """Loss and gradient of one micro-batch, by Trinity's own loss at the other end of a pickle."""
    current, of = of.current.clone().requires_grad_(), filled(of, -1.0)
    before = current.new_zeros(len(current), width - 1)
    # verl's model output has log-probs of the next token: one to the left, and one too many.
    flat = torch.cat([before, current, current.new_zeros(len(current), 1)], 1)
    loss = pickle.loads(pickle.dumps(trinity.build_trinity_loss(algorithm)))
    total, metrics = loss({"log_probs": flat.reshape(-1)}, trinitys_batch(of, width))
    return outcome(total, current, metrics)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_trinitys_own_loss_takes_a_method(trinity: Any, mode: str, monkeypatch: Any, process: Any, caplog: Any) -> None:
    """The page's class through its configuration, its registry and its loss; equal to its PPO, and proved."""
    of = doubles()
    ppo = {"method": "grpo", "settings": {"objective.dual_clip": 3.0}, "on_idle": "warn"}
    with heard(logging.getLogger("offdrift.trinity"), caplog):
        ours = stepped(trinity, configured(loss_agg_mode=mode, **ppo), of)
    assert f"PPOPolicyLossFn with loss_agg_mode='{mode}': loss" in caplog.text
    theirs = configured(loss_agg_mode=mode)
    theirs.policy_loss_fn, theirs.policy_loss_fn_args = "ppo", {"clip_range": 0.2, "loss_agg_mode": mode}
    torch.testing.assert_close(ours[:2], stepped(trinity, theirs, of)[:2], rtol=1e-6, atol=1e-8)
    assert int((ours.gradient != 0).sum()) > 10
    assert "actor/offdrift/weight_ess_frac" in ours.metrics
    own = sys.modules["trinity.algorithm.policy_loss_fn.ppo_policy_loss"]
    mean = own.aggregate_loss
    monkeypatch.setattr(own, "aggregate_loss", lambda *x, **y: 1.001 * mean(*x, **y))
    process[-1].proved = False
    with pytest.raises(FrameworkError, match=r"trinity: .*PPOPolicyLossFn with .* is a loss"):
        stepped(trinity, configured(loss_agg_mode=mode, **ppo), of)


def test_trinitys_page_corrects_the_mismatch(trinity: Any) -> None:
    """The page's own method, and what it says of the default that hands over one engine twice."""
    of, algorithm = doubles(), configured()
    assert not algorithm.bypass_old_logprobs
    with pytest.raises(LivenessError, match="bypass_old_logprobs=false"):
        stepped(trinity, algorithm, replace(of, old=of.rollout))
    plain = stepped(trinity, configured(method="ppo_clip"), of)
    assert int((stepped(trinity, algorithm, of).gradient != plain.gradient).sum()) > 10


def test_settings_of_trinitys_ppo_are_known(trinity: Any) -> None:
    ppo = quietly("trinity.algorithm.policy_loss_fn.ppo_policy_loss").PPOPolicyLossFn
    assert {*PPO_SETTINGS, "loss_agg_mode"} == set(inspect.signature(ppo.__init__).parameters) - {"self", "backend"}
    assert set(ppo.default_args()) < {*PPO_SETTINGS, "loss_agg_mode"}


def test_trinity_calls_neither_verls_losses_nor_its_correction() -> None:
    """Why the page sends nobody of Trinity to verl's adapter: its losses are a registry of its own."""
    folder = needs("trinity")
    texts = {path: path.read_text() for path in (folder / "trainer" / "verl").glob("*.py")}
    assert any("POLICY_LOSS_FN.get(algo_config.policy_loss_fn)" in text for text in texts.values())
    for name in ("POLICY_LOSS_REGISTRY", "get_policy_loss_fn", "compute_rollout_correction_and_add_to_batch"):
        assert not any(name in text for text in texts.values()), name


def test_art_takes_no_loss_but_its_two() -> None:
    """Why the page says that it is not served; read, since its wheel is for Python 3.12."""
    folder = needs("art")
    backend, worker = (folder / "local" / "backend.py").read_text(), (folder / "unsloth" / "train.py").read_text()
    assert 'if loss_fn not in {"cispo", "ppo"}:' in backend
    assert "if loss_fn_config is not None:" in backend
    assert "from ..loss import LossInputs, loss_fn" in worker
