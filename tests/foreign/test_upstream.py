"""Own losses of frameworks that publish no wheel, from their sources at the commits that were read.

`make test-upstream` fetches them into a folder that OFFDRIFT_UPSTREAM names. Their files are imported without their
packages' `__init__`; what they import and no loss here computes with (megatron-core, configurations, loggers, models)
are hollow modules.
"""

import importlib
import os
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from offdrift.adapters import verl as verl_plugin
from offdrift.adapters.contrib import nemo_rl, prime_rl, roll, slime
from offdrift.adapters.verl import losses as verl_losses
from offdrift.errors import FrameworkError, MethodError
from tests.adapters import hooked, test_nemo_rl, test_prime_rl, test_roll, test_slime, verl_run
from tests.foreign import real
from tests.parity.peers import random_batch
from tests.records.samples import read_all
from tests.records.test_dumps import TITAN_TURNS

ROOT = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("OFFDRIFT_UPSTREAM") or ROOT / "no such folder")
COMMITS = runpy.run_path(str(ROOT / "packaging" / "upstream.py"))["COMMITS"]
ROWS = tomllib.loads(real.VERSIONS.read_text())
READ = {row["name"]: row["source"] for row in (*ROWS["framework"], *ROWS["trainer"])}

pytestmark = pytest.mark.foreign


def test_the_commits_are_those_that_the_table_names() -> None:
    named = {name: re.findall(r"\b[0-9a-f]{7,40}\b", READ[name])[-1] for name in COMMITS}
    assert named == {name: c[: len(named[name])] for name, (_, c) in COMMITS.items()}


def source(name: str) -> Path:
    if not (FOLDER / name).is_dir():
        if os.environ.get("OFFDRIFT_UPSTREAM"):
            pytest.fail(f"{FOLDER / name} is not there")
        pytest.skip(f"{name} {COMMITS[name][1][:9]}: `make test-upstream` fetches and runs it")
    return FOLDER / name


def packages(monkeypatch: pytest.MonkeyPatch, root: Path, *names: str) -> None:
    """Packages whose files can be imported without running their `__init__`."""
    for name in names:
        real.shell(monkeypatch, name, root.joinpath(*name.split(".")))


def empty(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> None:
    made = ModuleType(name)
    made.__dict__.update(content)
    monkeypatch.setitem(sys.modules, name, made)


class Hollow(ModuleType):
    """A module that has every name: an empty class each."""

    __path__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def hollow(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    for name in names:
        monkeypatch.setitem(sys.modules, name, Hollow(name))


def leave(package: str) -> None:
    """Forget the modules of a framework that were imported from here."""
    for name in [n for n in sys.modules if n.split(".")[0] == package]:
        sys.modules.pop(name)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their compiled functions run as they are written."""
    monkeypatch.setattr(torch, "compile", lambda function=None, **_: function or (lambda f: f))


@pytest.fixture
def slimes(monkeypatch: pytest.MonkeyPatch, process: Any, eager: None) -> Iterator[Any]:
    """`slime.backends.megatron_utils.loss`; its forward pass is the test's."""
    root = source("slime")
    alone = SimpleNamespace(get_context_parallel_world_size=lambda: 1, get_context_parallel_rank=lambda: 0)
    empty(monkeypatch, "megatron")
    empty(monkeypatch, "megatron.core", mpu=alone)
    packages(monkeypatch, root, "slime", "slime.utils", "slime.backends", "slime.backends.megatron_utils")
    module = importlib.import_module(slime.LOSSES["slime"])
    monkeypatch.setattr(module, "get_log_probs_and_entropy", test_slime.model)
    monkeypatch.setattr(module, "get_rollout_top_p_logprob_kwargs", lambda args, batch: {})
    hooked.install(monkeypatch, "0.3.1")
    test_slime.forget()
    yield module
    test_slime.forget()
    for name in [n for n in sys.modules if n.startswith("slime.")]:
        sys.modules.pop(name)


@pytest.mark.parametrize("per_token", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_slimes_own_losses(
    slimes: Any, whole: bool, per_token: bool, monkeypatch: Any, process: Any, caplog: Any
) -> None:
    test_slime.chosen(monkeypatch, "icepop")
    step = test_slime.loss_step if whole else test_slime.tis_step
    name = "policy_loss_function" if whole else "vanilla_tis_function"
    with caplog.at_level("INFO", "offdrift.slime"):
        step(hooked.batch(), calculate_per_token_loss=per_token)
    assert f"{name}: loss" in caplog.text
    part = "compute_policy_loss" if whole else "vanilla_tis_function"
    own = getattr(slimes, part)
    monkeypatch.setattr(slimes, part, lambda *x, **y: (1.001 * (found := own(*x, **y))[0], *found[1:]))
    process[-1].proved = False
    with pytest.raises(FrameworkError, match=f"{name} is a loss that this adapter does not know"):
        step(hooked.batch(), calculate_per_token_loss=per_token)


@pytest.fixture
def primes(monkeypatch: pytest.MonkeyPatch, process: Any, eager: None) -> Iterator[Any]:
    """`prime_rl.trainer.rl.loss`."""
    root = source("prime-rl") / "src"
    packages(monkeypatch, root, "prime_rl", "prime_rl.trainer", "prime_rl.trainer.rl")
    configs = dict.fromkeys(("CustomLossConfig", "DefaultLossConfig", "IPOLossConfig", "LossConfig"), Any)
    for name, content in {"configs.trainer": configs, "utils.utils": {"import_object": None}}.items():
        empty(monkeypatch, f"prime_rl.{name.partition('.')[0]}")
        empty(monkeypatch, f"prime_rl.{name}", **content)
    module = importlib.import_module("prime_rl.trainer.rl.loss")
    hooked.install(monkeypatch, "0.8.0")
    prime_rl._hook.cache_clear()
    yield module
    prime_rl._hook.cache_clear()
    sys.modules.pop("prime_rl.trainer.rl.loss")


@pytest.mark.parametrize(
    ("name", "own", "config"),
    [
        ("prime_rl", "default_loss_fn", {"dppo_mask_low": 0.2, "dppo_mask_high": 0.2, "adv_tau": 1.0, "kl_tau": 1e-3}),
        ("prime_rl_ipo", "ipo_loss_fn", {"ipo_threshold": 0.1, "adv_tau": 1.0, "kl_tau": 1e-3}),
    ],
)
def test_prime_rls_own_losses(primes: Any, name: str, own: str, config: Any, caplog: Any) -> None:
    """The two rows are its two losses, and the adapter proves itself."""
    of = hooked.batch(spread=0.5)
    with caplog.at_level("INFO", "offdrift.prime-rl"):
        ours = test_prime_rl.step(of, name)
    assert "ipo_loss_fn: loss" in caplog.text
    current = of.current.clone().requires_grad_()
    columns = (current, of.rollout, None, of.advantages, of.mask)
    sequences = [primes.LossInputs(*(x if x is None else x[i] for x in columns)) for i in range(len(current))]
    losses = [getattr(primes, own)(one, SimpleNamespace(**config)).loss for one in sequences]
    theirs = hooked.outcome(torch.stack(losses).sum() / of.mask.sum(), current, {})
    torch.testing.assert_close(ours[:2], theirs[:2], rtol=1e-5, atol=1e-6)


def test_prime_rls_loss_with_a_change_is_refused(primes: Any, monkeypatch: Any, process: Any) -> None:
    own = primes.compute_importance_ratio_and_mismatch_kl
    monkeypatch.setattr(primes, "compute_importance_ratio_and_mismatch_kl", lambda x, y: own(y, x))
    with pytest.raises(FrameworkError, match=r"prime_rl\.trainer\.rl\.loss\.ipo_loss_fn is a loss that"):
        test_prime_rl.step(hooked.batch(), "token_tis")


@pytest.fixture
def mileses(monkeypatch: pytest.MonkeyPatch, process: Any, eager: None) -> Iterator[Any]:
    """`miles.backends.training_utils.loss_hub.losses`; miles calls the adapter of slime."""
    root = source("miles")
    packages(monkeypatch, root, "miles", "miles.backends", "miles.backends.training_utils", "miles.utils")
    hollow(monkeypatch, "miles.utils.ft_utils", "miles.utils.ft_utils.process_group_utils")
    hollow(monkeypatch, "miles.utils.misc", "miles.utils.types")
    module = importlib.import_module(slime.LOSSES["miles"])
    hooked.install(monkeypatch, "0.1.0")
    test_slime.forget()
    yield module
    test_slime.forget()
    leave("miles")


@pytest.mark.parametrize("name", ["icepop", "decoupled_ppo"])
def test_mileses_own_weights(mileses: Any, name: str, monkeypatch: Any, process: Any, caplog: Any) -> None:
    with caplog.at_level("INFO", "offdrift.miles"):
        test_slime.correct(name, hooked.batch())
    assert "loss_hub.losses.vanilla_tis_function: loss" in caplog.text
    own = mileses.vanilla_tis_function
    monkeypatch.setattr(mileses, "vanilla_tis_function", lambda *x, **y: (1.001 * (f := own(*x, **y))[0], *f[1:]))
    process[-1].proved = False
    with pytest.raises(FrameworkError, match=r"miles: .*vanilla_tis_function is a loss"):
        test_slime.correct(name, hooked.batch())


def test_mileses_policy_loss_takes_the_adapters_weights(mileses: Any, monkeypatch: Any, process: Any) -> None:
    """Its own loss calls the function with arguments of its own, and multiplies token losses by what it returns."""
    of, losses = hooked.batch(spread=0.6), {}
    test_slime.chosen(monkeypatch, "decoupled_ppo")
    lengths = [of.mask.shape[1]] * len(of.mask)
    seen = {"total_lengths": [1 + n for n in lengths], "response_lengths": lengths, "unconcat_tokens": []}
    seen |= {"log_probs": list(of.old), "rollout_log_probs": list(of.rollout), "advantages": list(of.advantages)}
    seen |= {"loss_masks": list(of.mask.int()), "rollout_mask_sums": [m.sum().clamp(min=1) for m in of.mask]}
    monkeypatch.setattr(mileses, "get_parallel_state", lambda: None)
    monkeypatch.setattr(mileses, "get_local_response_loss_masks", lambda total, own, masks, *_: masks)
    monkeypatch.setattr(mileses, "compute_ess_ratio_contribution", lambda **_: torch.zeros(1))
    monkeypatch.setattr(mileses, "load_function", lambda path: slime.tis)

    def mean(values: torch.Tensor) -> torch.Tensor:
        parts = zip(values.split(lengths), seen["loss_masks"], seen["rollout_mask_sums"], strict=True)
        return torch.stack([(x * m).sum() / n for x, m, n in parts]).sum()

    monkeypatch.setattr(mileses, "get_sum_of_sample_mean", lambda *_, **__: mean)
    off = dict.fromkeys(
        ("use_opsm", "skip_actor_forward_only", "use_rollout_logprobs", "observe_training_entropy"), False
    )
    off |= {"get_mismatch_metrics": False, "custom_pg_loss_reducer_function_path": None, "advantage_estimator": "grpo"}
    bounds = {"tis_clip": 2.0, "tis_clip_low": 0.0, "qkv_format": "thd"}
    for name, path in (("ours", "offdrift.adapters.contrib.slime.tis"), ("theirs", None)):
        current = of.current.clone().requires_grad_()
        scored = {"log_probs": list(current), "entropy": [torch.zeros(n) for n in lengths]}
        monkeypatch.setattr(mileses, "get_log_probs_and_entropy", lambda *_, scored=scored, **__: scored)
        args = test_slime.options(custom_tis_function_path=path, **off, **bounds)
        total, _ = mileses.policy_loss_function(args, seen, current, mean)
        losses[name] = hooked.outcome(total, current, {})[:2]
    torch.testing.assert_close(losses["ours"], losses["theirs"])
    assert int((losses["ours"][1] != 0).sum()) > 10


@pytest.fixture
def nemos(monkeypatch: pytest.MonkeyPatch, process: Any) -> Iterator[Any]:
    """`nemo_rl.algorithms.loss.loss_functions`."""
    root = source("nemo-rl")
    inner = ("algorithms", "algorithms.loss", "distributed", "models", "models.dtensor")
    packages(monkeypatch, root, "nemo_rl", *(f"nemo_rl.{name}" for name in inner))
    unread = ("data", "data.chat_templates", "data.multimodal_utils", "data.packing", "utils", "utils.logger")
    unread += ("utils.fastokens", "models.policy", "models.dtensor.parallelize")
    unread += ("algorithms.x_token", "algorithms.x_token.loss_utils")
    hollow(monkeypatch, *(f"nemo_rl.{name}" for name in unread))
    module = importlib.import_module(nemo_rl.LOSSES)
    hooked.install(monkeypatch, "0.7.0")
    yield module
    leave("nemo_rl")


@pytest.mark.parametrize("name", ["dapo", "grpo"])  # a mean over tokens, and over sequences
def test_nemo_rls_own_loss(nemos: Any, name: str, monkeypatch: Any, process: Any, caplog: Any) -> None:
    of = hooked.batch(spread=0.5)
    with caplog.at_level("INFO", "offdrift.nemo-rl"):
        ours = test_nemo_rl.run(name, of, *hooked.counts(of))
    assert "ClippedPGLossFn: loss" in caplog.text
    current, (tokens, sequences) = of.current.clone().requires_grad_(), map(torch.tensor, hooked.counts(of))
    clips = {"ratio_clip_max": 0.28 if name == "dapo" else 0.2, "token_level_loss": name == "dapo"}
    own = nemos.ClippedPGLossFn(nemos.ClippedPGLossConfig(reference_policy_kl_penalty=0.0, **clips))
    data = {key: x.nan_to_num() for key, x in test_nemo_rl.fields(of).items()}
    total, _ = own(next_token_logprobs=current, data=data, global_valid_seqs=sequences, global_valid_toks=tokens)
    torch.testing.assert_close(ours[:2], hooked.outcome(total, current, {})[:2], rtol=1e-5, atol=1e-7)
    mean = nemos.masked_mean
    monkeypatch.setattr(nemos, "masked_mean", lambda *x, **y: 1.001 * mean(*x, **y))
    process[-1].proved = False
    with pytest.raises(FrameworkError, match="ClippedPGLossFn is a loss"):
        test_nemo_rl.run(name, of, *hooked.counts(of))


def test_every_setting_of_nemo_rls_loss_is_known(nemos: Any) -> None:
    known = {*nemo_rl.OWN_TERMS, *nemo_rl.STOOD_IN_FOR, *nemo_rl.FOLLOWED}
    assert known == set(nemos.ClippedPGLossConfig.model_fields)


class BaseWorker:
    """ROLL's base worker, as far as a loss is concerned; its real one needs Ray, Megatron and an engine."""

    def get_old_log_probs_with_cache(self, data: Any, log_probs: torch.Tensor) -> torch.Tensor:
        return data.batch["old_log_probs"]


@pytest.fixture
def rolls(monkeypatch: pytest.MonkeyPatch, process: Any) -> Iterator[None]:
    """ROLL's workers and correction."""
    root = source("roll")
    packages(
        monkeypatch, root, "roll", *(f"roll.{x}" for x in ("utils", "pipeline", "pipeline.rlvr", "pipeline.agentic"))
    )
    unread = ("configs", "configs.base_config", "pipeline.rlvr.rlvr_config", "pipeline.rlvr.utils", "platforms")
    unread += ("distributed", "distributed.scheduler", "distributed.scheduler.protocol", "utils.logging")
    unread += ("pipeline.agentic.agentic_config", "pipeline.agentic.agentic_pipeline")
    hollow(monkeypatch, "imageio", "codetiming", *(f"roll.{name}" for name in unread))
    empty(monkeypatch, "roll.utils.logging", get_logger=lambda: None)
    empty(monkeypatch, "roll.pipeline.base_worker", ActorWorker=BaseWorker)
    for module in (roll.CORRECTIONS, roll.RLVR, roll.RLVR_PG, roll.AGENTIC, roll.AGENTIC_PG):
        importlib.import_module(module)
    hooked.install(monkeypatch, "0.3.0")
    test_roll.forget()
    yield
    roll.uninstall()
    test_roll.forget()
    leave("roll")


@pytest.mark.parametrize("worker", ["Worker", "AgenticWorker"])
@pytest.mark.parametrize("method", ["dapo", "grpo"])
def test_rolls_own_losses(rolls: None, worker: str, method: str, monkeypatch: Any, process: Any, caplog: Any) -> None:
    of = hooked.batch(spread=0.5)
    with caplog.at_level("INFO", "offdrift.roll"):
        test_roll.run(worker, method, of, *hooked.counts(of))
    module, base, _ = roll.WORKERS[worker]
    assert f"{module}.{base}.loss_func: loss" in caplog.text
    theirs = sys.modules[module]
    own = theirs.agg_loss
    monkeypatch.setattr(theirs, "agg_loss", lambda **kwargs: 1.001 * own(**kwargs))
    process[-1].proved = False
    with pytest.raises(FrameworkError, match=rf"{base}\.loss_func is a loss"):
        test_roll.run(worker, method, of, *hooked.counts(of))


@pytest.mark.parametrize("variant", ["vanilla", "ppo", "tis", "topr", "cispo", "kimi15"])
@pytest.mark.parametrize("name", ["CorrectingPGWorker", "AgenticCorrectingPGWorker"])
def test_rolls_own_variants_are_multiplied_by_the_weights(
    rolls: None, name: str, variant: str, monkeypatch: Any, caplog: Any
) -> None:
    """Every `pg_variant` of both pipelines, and a mean of squares in its place."""
    hooked.choose(monkeypatch, "icepop")
    of = hooked.batch(spread=0.5)
    settings = SimpleNamespace(pg_variant=variant)
    made = test_roll.worker(name, train_infer_correction=test_roll.ON, actor_train=settings)
    made.__dict__.update({f"_{x}_logged": True for x in ("topr_sample", "cispo_config", "kimi15_config")})
    data = test_roll.data_of(of, *hooked.counts(of))
    data.batch |= {"train_infer_is_weight": torch.ones_like(of.old), "scores": of.advantages[:, 0]}
    theirs = sys.modules[roll.WORKERS[name][0]]
    monkeypatch.setattr(theirs, "get_episode_scores", lambda data: data.batch["scores"], raising=False)
    monkeypatch.setattr(theirs, "current_platform", SimpleNamespace(device_type="cpu"), raising=False)
    with caplog.at_level("INFO", "offdrift.roll"):
        made.loss_func(data, test_roll.logits_of(of.current))
    assert f"loss_func with pg_variant={variant!r}: loss" in caplog.text
    type(made).proved = False
    own = theirs.agg_loss
    monkeypatch.setattr(theirs, "agg_loss", lambda **x: own(**{**x, "loss_mat": x["loss_mat"] ** 2}))
    with pytest.raises(FrameworkError, match=rf"loss_func with pg_variant={variant!r} is a loss"):
        made.loss_func(data, test_roll.logits_of(of.current))


def test_rolls_own_weights_of_samples(rolls: None, monkeypatch: Any, caplog: Any) -> None:
    """By length of the whole response, also where a part of it trains."""
    hooked.choose(monkeypatch, "dapo")
    of = hooked.batch()
    data = test_roll.data_of(of, *hooked.counts(of))
    data.batch["response_mask"][:3, -4:] = 0
    with caplog.at_level("INFO", "offdrift.roll"):
        test_roll.worker(length_loss_weight=True).loss_func(data, test_roll.logits_of(of.current))
    assert "loss_func: loss" in caplog.text


def test_rolls_own_correction(rolls: None, monkeypatch: Any, process: Any, caplog: Any) -> None:
    with caplog.at_level("INFO", "offdrift.roll"):
        test_roll.correct("icepop", hooked.batch())
    assert f"{roll.COMPUTE}: loss" in caplog.text
    theirs = sys.modules[roll.CORRECTIONS]
    own = theirs._compute_all_granularity
    swapped = lambda old, infer, mask: own(infer, old, mask)  # noqa: E731
    monkeypatch.setattr(theirs, "_compute_all_granularity", lambda **x: swapped(*x.values()))
    process[-1].proved = False
    with pytest.raises(FrameworkError, match=f"{roll.COMPUTE} is a loss"):
        test_roll.correct("icepop", hooked.batch())


PAIR = Path(__file__).with_name("context_parallel.py")


@pytest.mark.parametrize("factor", ["1.0", "1.001"])
def test_slimes_context_parallel_group_of_two_processes(factor: str, tmp_path: Path) -> None:
    """Its own gathering and slicing between two processes, and its own weights of tokens."""
    root = source("slime")
    command = [sys.executable, str(PAIR), str(root), str(tmp_path / "meeting"), factor]
    paths = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
    env = {**os.environ, "PYTHONPATH": paths, "OFFDRIFT_METHOD": "icepop", "OFFDRIFT_ON_IDLE": "warn"}
    ranks = [subprocess.Popen([*command, rank], env=env, stdout=-1, stderr=-2, text=True) for rank in ("0", "1")]
    said = [rank.communicate(timeout=300)[0] for rank in ranks]
    if factor == "1.0":
        assert all("vanilla_tis_function: loss" in text for text in said), said
    else:
        assert all("vanilla_tis_function is a loss" in text for text in said), said


@pytest.fixture(scope="module")
def rllms() -> Iterator[Any]:
    """`rllm.trainer.verl.verl_backend`, over the installed verl; imported once, as by its trainer."""
    root = source("rllm")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("METHOD", "SETTINGS", "RECORD"):
            patch.delenv(f"OFFDRIFT_{name}", raising=False)
        packages(patch, root, "rllm", "rllm.trainer", "rllm.trainer.verl")
        unread = ("data", "data.utils", "engine", "engine.rollout", "trainer.algorithms", "trainer.verl.metrics")
        hollow(patch, *(f"rllm.{name}" for name in (*unread, "trainer.verl.utils", "types")))
        protocol = type("BackendProtocol", (), {"__class_getitem__": classmethod(lambda cls, _: cls)})
        empty(patch, "rllm.trainer.backend_protocol", BackendProtocol=protocol)
        transforms = ("transform_episodes_to_dataproto", "transform_trajectory_groups_to_dataproto")
        for name in (*transforms, "update_dataproto_with_advantages"):
            patch.setattr(sys.modules["rllm.trainer.verl"], name, None, raising=False)
        verl_run.real_verl()
        verl_losses.configured.cache_clear()
        yield real.quietly(verl_plugin.RLLM)
    verl_losses.configured.cache_clear()
    leave("rllm")


def test_rllms_own_loss_takes_verls_losses_of_ours(rllms: Any, monkeypatch: Any) -> None:
    """By the configuration, and by the name that it sends along with the batch of a role."""
    batch = random_batch(0, far=False).bypass
    counts = {"tokens": batch.tokens, "sequences": batch.sequences}
    for name, bypass in (("token_tis", True), ("ppo_clip", False)):
        config = verl_run.config(f"offdrift/{name}", bypass=bypass)
        ours = verl_run.pushed(config, batch, **counts)
        found = verl_run.pushed(config, batch, **counts, through=rllms.CustomPPOLoss(config))
        torch.testing.assert_close(found[:2], ours[:2], rtol=0, atol=0)
        assert int((found[1] != 0).sum()) > 10
        assert config.policy_loss.loss_mode in rllms._get_verl_known_losses()


def backend_of(rllms: Any, loss: str, **by_role: str) -> Any:
    """Its backend as far as its validation reads it."""
    rollout = SimpleNamespace(mode="async", n=1)
    actor = OmegaConf.create({"policy_loss": {"loss_mode": loss}, "ppo_mini_batch_size": 4})
    own = OmegaConf.create({"algorithm": {}, "stepwise_advantage": {"mode": "broadcast"}})
    more = {"algorithm": OmegaConf.create({}), "rllm": own, "get": lambda name, default: default}
    made = object.__new__(rllms.VerlBackend)
    made.config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout, actor=actor), **more)
    made.is_separated, made.algorithm_config = False, SimpleNamespace(loss_fn_map=by_role)
    return made


def test_what_rllms_trainer_would_leave_out_is_refused_before_training(rllms: Any, monkeypatch: Any) -> None:
    for loss in ("vanilla", "offdrift/token_tis", "offdrift/grpo"):
        backend_of(rllms, loss).validate_config()
    with pytest.raises(MethodError, match=r"offdrift/icepop leaves \[.*mismatch.*tis_mode"):
        backend_of(rllms, "offdrift/icepop").validate_config()
    for loss in ("offdrift/no_such", "offdrift//folder/mine.py:mine"):
        with pytest.raises(MethodError, match="not in verl's registry"):
            backend_of(rllms, "vanilla", solver=loss)._update_actor_with_loss_routing(None, None)
    for name in ("METHOD", "RECORD"):
        monkeypatch.setenv(f"OFFDRIFT_{name}", "token_tis")
        with pytest.raises(MethodError, match=f"OFFDRIFT_{name} is set and has no"):
            backend_of(rllms, "vanilla").validate_config()
        monkeypatch.delenv(f"OFFDRIFT_{name}")


def test_where_rllm_calls_what_the_verl_adapter_replaces() -> None:
    """The driver's correction in the fully asynchronous trainer alone; names of its settings in verl's place."""
    root = source("rllm") / "rllm"
    unified, separate = root / "trainer" / "verl" / "verl_backend.py", root / "experimental" / "fully_async"
    name = "compute_rollout_correction_and_add_to_batch("
    assert name not in unified.read_text()
    assert name in (separate / "fully_async_trainer.py").read_text()
    mapped = (root / "trainer" / "verl" / "utils.py").read_text()
    assert '("actor_rollout_ref.actor.policy_loss.loss_mode", "rllm.algorithm.loss_fn")' in mapped


def test_titan_rls_own_recorder_writes_what_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    root = source("torchtitan")
    packages(monkeypatch, root, "torchtitan", "torchtitan.experiments", "torchtitan.experiments.rl")
    hollow(monkeypatch, "torchtitan.experiments.rl.rollout")
    empty(monkeypatch, "torchtitan.config", Configurable=type("Configurable", (), {"Config": object}))
    spans = SimpleNamespace(log_trace_span=lambda name: lambda function: function)
    empty(monkeypatch, "torchtitan.observability", structured_logger=spans)
    module = importlib.import_module("torchtitan.experiments.rl.rollout_recorder")
    recorder = object.__new__(module.RolloutSampleRecorder)
    recorder.__dict__.update(
        _filter=list, _log_tensors=True, _log_logprobs=True, _path=tmp_path / "rollout_samples.jsonl"
    )
    more = {"prompt_messages": [], "env_messages": [], "env_rewards": {}}
    turns = [
        SimpleNamespace(rollout_id=SimpleNamespace(turn_id=i), **turn, **more) for i, turn in enumerate(TITAN_TURNS)
    ]
    about = {"group_id": 3, "rollout_id": 0, "status": "completed", "reward": 2.0, "reward_breakdown": {}}
    recorder.record(is_validation=False, rollout_groups=[SimpleNamespace(turns=turns, advantage=0.5, **about)])
    found, batches, bad = read_all(tmp_path)
    assert (found.format, bad) == ("titan-rl", [])
    assert [x for b in batches for x in b.tokens.tolist()] == [1, 2, 3, 4, 5]
    assert [x for b in batches for x in b.logp_rollout.tolist()] == [-1.0, -2.0, -3.0, -4.0, -5.0]
    leave("torchtitan")
