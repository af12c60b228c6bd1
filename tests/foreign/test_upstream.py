"""slime's and prime-rl's own losses, from their sources at the commits that were read.

`make test-upstream` fetches them into a folder that OFFDRIFT_UPSTREAM names. Neither publishes a wheel. Their files are
imported without their packages' `__init__`; megatron-core and prime-rl's configuration, which no loss here computes with,
are empty modules.
"""

import importlib
import os
import runpy
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from offdrift.adapters.contrib import prime_rl, slime
from offdrift.errors import FrameworkError
from tests.adapters import hooked, test_prime_rl, test_slime
from tests.foreign import real

ROOT = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("OFFDRIFT_UPSTREAM") or ROOT / "no such folder")
COMMITS = runpy.run_path(str(ROOT / "packaging" / "upstream.py"))["COMMITS"]
READ = {row["name"]: row["source"] for row in tomllib.loads(real.VERSIONS.read_text())["framework"]}

pytestmark = pytest.mark.foreign


def test_the_commits_are_those_that_the_table_names() -> None:
    assert {name: READ[name] for name in COMMITS} == {name: c[: len(READ[name])] for name, (_, c) in COMMITS.items()}


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
