"""Methods in a user's file through the adapters: verl's own loss, driver and environment, TRL's own trainer, hooks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from offdrift.adapters.base import Adapter
from offdrift.adapters.hooks import HookConfig
from offdrift.adapters.verl import losses as verl_losses
from offdrift.adapters.verl.driver import Driver
from offdrift.errors import MethodError
from tests.adapters.verl_run import config, proto, pushed, real_verl
from tests.parity.peers import random_batch

CODE = """
import offdrift as od

def mine(cap: float = 2.0):
    return od.Method(
        objective=od.Clipped(dual_clip=3.0),
        correction=od.Correction() & od.Weight(on="mismatch", cap=cap),
        aggregate="token_mean",
    )

def clipped(eps: float = 0.2):
    return od.Method(objective=od.Clipped(eps_low=eps, eps_high=eps), aggregate="token_mean")
"""
NAMES = ("METHOD", "SETTINGS", "ON_IDLE", "RECORD")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(CODE)
    for name in NAMES:
        monkeypatch.delenv(f"OFFDRIFT_{name}", raising=False)
    monkeypatch.setattr(verl_losses, "_REPORTED", set())
    verl_losses.configured.cache_clear()
    yield tmp_path
    verl_losses.configured.cache_clear()


@pytest.mark.parametrize("prefix", ["", "ABSOLUTE"])
def test_verls_own_loss_runs_the_file_that_loss_mode_names(folder, prefix):
    batch = random_batch(0, far=False)
    name = f"offdrift/{folder if prefix else ''}{'/' if prefix else ''}mine.py:clipped"
    ours, theirs = (
        pushed(config(n), batch, tokens=batch.tokens, sequences=batch.sequences) for n in (name, "offdrift/ppo_clip")
    )
    torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=0)
    torch.testing.assert_close(ours[1], theirs[1], rtol=0, atol=0)
    assert ours[1].abs().sum() > 0


def test_settings_of_the_environment_are_the_functions_too(folder, monkeypatch):
    """Driver and worker may write the path in two ways."""
    batch = random_batch(1, far=False)
    monkeypatch.setenv("OFFDRIFT_METHOD", "mine.py:clipped")
    monkeypatch.setenv("OFFDRIFT_SETTINGS", "eps=0.05")
    found = pushed(config(f"offdrift/{folder}/mine.py:clipped"), batch, tokens=batch.tokens, sequences=batch.sequences)
    assert verl_losses.configured(f"{folder}/mine.py:clipped").objective.eps_high == 0.05  # type: ignore[attr-defined]
    plain = pushed(config("offdrift/ppo_clip"), batch, tokens=batch.tokens, sequences=batch.sequences)
    assert not torch.equal(found[1], plain[1])


def test_verls_driver_corrects_by_it(folder):
    batch = random_batch(2, far=False)
    ours, library = (Driver(name, on_idle="warn") for name in ("mine.py:mine", "decoupled_token_is"))
    weights = []
    for driver in (ours, library):
        weights.append(driver.correct(proto(batch), None)[0].batch["rollout_is_weights"])
    torch.testing.assert_close(*weights, rtol=0, atol=0)
    assert weights[0].std() > 0


@pytest.mark.parametrize("name", ["offdrift/gone.py:mine", "offdrift/mine.py:gone"])
def test_verl_hears_of_a_file_that_is_wrong_when_it_looks_for_the_loss(name):
    with pytest.raises(MethodError, match=r"there is no file|has no 'gone'; its methods are mine, clipped"):
        real_verl().core_algos.get_policy_loss_fn(name)
    with pytest.raises(ValueError, match="Unsupported loss mode: nothing"):
        real_verl().core_algos.get_policy_loss_fn("nothing")


@pytest.mark.slow
def test_a_process_of_verl_finds_it_by_its_plugin(folder):
    code = (
        "from verl.workers.utils.losses import get_policy_loss_fn\n"
        "print(get_policy_loss_fn('offdrift/mine.py:clipped').__name__)"
    )
    environment = {"VERL_USE_EXTERNAL_MODULES": "offdrift.adapters.verl", "VERL_USE_EXTERNAL_PLUGINS": "none"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert done.stdout.strip() == "offdrift_mine.py:clipped", done.stderr


def test_a_hook_is_sent_with_the_absolute_path(folder, monkeypatch):
    made = HookConfig.of("plain", "mine.py:mine", {"cap": 5})
    assert made.method == f"{folder / 'mine.py'}:mine"
    monkeypatch.chdir("/")
    assert made.row.correction.weights[0].cap == 5.0  # type: ignore[attr-defined]
    monkeypatch.setenv("OFFDRIFT_METHOD", f"{folder}/mine.py:mine")
    monkeypatch.setenv("OFFDRIFT_SETTINGS", "cap=4")
    assert HookConfig.of("plain").row.correction.weights[0].cap == 4.0  # type: ignore[attr-defined]


def test_an_adapter_takes_name_and_settings():
    adapter = Adapter("mine.py:mine", framework="plain", settings={"cap": 3, "objective.eps_high": 0.3})
    assert adapter.method.correction.weights[0].cap == 3.0  # type: ignore[attr-defined]
    with pytest.raises(MethodError, match=r"'kap' is not a part of this method .*; paths are cap, aggregate"):
        Adapter("mine.py:mine", framework="plain", settings={"kap": 3})


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_trls_own_trainer_trains_with_it(folder, tmp_path):
    from tests.adapters.trl_runs import Sampler, steps, trainer

    runs = [
        trainer(tmp_path / "trl", method=method, settings=settings, rollout_func=Sampler(0.2))
        for method, settings in (("mine.py:mine", {"cap": 1.1}), ("decoupled_token_is", {"weight.cap": 1.1}))
    ]
    for run in runs:
        run.train()
    ours, library = ([json.dumps({k: v for k, v in row.items() if "time" not in k}) for row in steps(r)] for r in runs)
    keys = ("loss", "offdrift/weight/mean", "offdrift/weight/max")
    for one, other in zip(map(json.loads, ours), map(json.loads, library), strict=True):
        assert [one[k] for k in keys] == pytest.approx([other[k] for k in keys], rel=1e-5)
        assert one["offdrift/weight/max"] == pytest.approx(1.1)
