"""OpenRLHF's own loss, arguments and trainer beside the adapter.

OpenRLHF's packages import DeepSpeed and FlashAttention, which need CUDA to be built. The file of the
loss needs neither: it is imported without its packages' `__init__`, and `openrlhf.models.utils`, from
which it takes `masked_mean`, gets an empty module for `import deepspeed`. The trainer and the command
line, which cannot be imported, are read.
"""

import ast
import inspect
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from offdrift.adapters.contrib import openrlhf
from offdrift.adapters.frameworks import WAITING
from offdrift.errors import FrameworkError
from offdrift.methods import METHODS
from tests.adapters.hooked import Batch, code, heard
from tests.foreign import real

pytestmark = pytest.mark.foreign


@pytest.fixture
def package() -> Path:
    return real.folder("openrlhf")


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch, process: None, package: Path) -> Iterator[Any]:
    """`openrlhf.models.loss`."""
    real.shell(monkeypatch, "deepspeed")
    real.shell(monkeypatch, "openrlhf", package)
    real.shell(monkeypatch, "openrlhf.models", package / "models")
    yield real.quietly("openrlhf.models.loss")
    openrlhf.uninstall()
    WAITING.queues.pop(openrlhf.ACTOR, None)
    for name in ("openrlhf.models.loss", "openrlhf.models.utils"):
        sys.modules.pop(name, None)


def calls(path: Path) -> Iterator[tuple[str, ast.Call, ast.AST]]:
    """Every call in a file, by the last part of the function's name, and the statement that holds it."""
    for node in ast.walk(ast.parse(path.read_text())):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Call):
                yield getattr(child.func, "attr", getattr(child.func, "id", "")), child, node


def run(loss: Any, one: Batch, **counts: Any) -> tuple[tuple[Tensor, ...], Tensor]:
    current = one.current.clone().requires_grad_()
    out = loss(current, one.old, one.advantages, action_mask=one.mask.long(), rollout_log_probs=one.rollout, **counts)
    out[0].backward()
    assert current.grad is not None
    return tuple(x if x is None else x.detach() for x in out), current.grad


SAMPLE = {"aggregate": "seq_mean_token_mean"}
DUAL = {"objective.dual_clip": 3.0}
BAND = {"gate.low": 0.9, "gate.high": 1.1, "weight.cap": 1e9}
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("ppo_clip", {}, {}),
    ("ppo_clip", SAMPLE, {"token_level_loss": False}),
    ("ppo_clip", DUAL, {"dual_clip": 3.0}),
    ("icepop", {}, {"is_correction_level": "token"}),
    ("icepop", SAMPLE, {"is_correction_level": "token", "token_level_loss": False}),
    (
        "flashrl",
        {},
        {"is_correction_level": "token", "is_correction_mode": "clip", "is_correction_threshold": (0, 2.0)},
    ),
    (
        "decoupled_geo_rs_token_tis",
        BAND,
        {"is_correction_level": "seq", "is_correction_threshold": (0.9, 1.1), "dual_clip": 3.0},
    ),
]


@pytest.mark.parametrize(("name", "settings", "arguments"), CASES)
@pytest.mark.parametrize("counted", [False, True])
def test_losses_gradients_and_reports_are_openrlhfs(
    theirs: Any, name: str, settings: Any, arguments: Any, counted: bool
) -> None:
    one = real.doubles()
    tokens, samples = int(one.mask.sum()), int(one.mask.any(1).sum())
    more = {"dp_size": 2, "batch_num_tokens": 2.0 * tokens, "global_batch_size": 3.0 * samples}
    counts = more if counted else {}
    openrlhf.install(name, settings=settings)
    openrlhf._rebind(module_of(theirs))
    loss = openrlhf.PolicyLoss(values=5, **{k: x for k, x in arguments.items() if k in openrlhf.PLAIN})
    ours, gradient = run(loss, one, **counts)
    assert loss.hook.proved
    expected, its = run(theirs.PolicyLoss(**arguments), one, **counts)
    assert len(ours) == len(expected) == 5
    assert int((its != 0).sum()) > 5
    # OpenRLHF adds 1e-8 to the counts that it divides by.
    torch.testing.assert_close(ours[0], expected[0], rtol=2e-8, atol=1e-10)
    torch.testing.assert_close(gradient, its, rtol=2e-8, atol=1e-10)
    for mine, other in zip(ours[1:4], expected[1:4], strict=True):
        if other is not None:
            torch.testing.assert_close(mine.double(), other.double(), rtol=1e-6, atol=1e-7)
    if METHODS[name].correction.weights and expected[4] is not None:
        assert 0 < float(expected[4]) < 1


def module_of(theirs: Any, **changed: Any) -> Any:
    """What stands in for the actor's module: its trainer, and OpenRLHF's real loss (or a subclass of it)."""
    trainer = type("ActorPPOTrainer", (), {"ppo_train": lambda self: {}})
    loss = type("PolicyLoss", (theirs.PolicyLoss,), changed) if changed else theirs.PolicyLoss
    return SimpleNamespace(PolicyLoss=loss, ActorPPOTrainer=trainer)


def test_the_adapter_proves_itself_and_refuses_a_loss_that_was_changed(theirs: Any, caplog: Any) -> None:
    one = real.doubles()
    own = theirs.PolicyLoss.forward

    def off(self: Any, log_probs: Tensor, *rest: Any, **named: Any) -> Any:
        return own(self, log_probs.clamp(min=-3.0), *rest, **named)

    for forward, known in ((own, True), (off, False)):
        openrlhf.uninstall()
        openrlhf.install("flash_reinforce", on_idle="warn")
        openrlhf._rebind(module_of(theirs, forward=forward))
        loss = openrlhf.PolicyLoss(values=5, dual_clip=3.0, clip_eps_high=0.28)
        loss.hook.proved = False
        if known:
            with heard(loss.hook.adapter.log, caplog):
                run(loss, one, dp_size=2, batch_num_tokens=77.0)
            assert ": loss and gradient" in caplog.text
        else:
            with pytest.raises(FrameworkError, match=r"openrlhf.*PolicyLoss is a loss that this adapter does not know"):
                run(loss, one)


def test_the_trainer_calls_and_unpacks_what_the_adapter_takes_and_gives(theirs: Any, package: Path) -> None:
    found = list(calls(package / "trainer" / "ray" / "ppo_actor.py"))
    (arguments,) = ({k.arg for k in call.keywords} for name, call, _ in found if name == "PolicyLoss")
    ((names, keywords),) = (
        (holder.targets[0].elts, {k.arg for k in call.keywords} - {None})
        for name, call, holder in found
        if name == "actor_loss_fn"
    )
    assert arguments <= set(inspect.signature(theirs.PolicyLoss.__init__).parameters)
    assert keywords < set(inspect.signature(openrlhf.PolicyLoss.forward).parameters)
    module = module_of(theirs)
    openrlhf.install("icepop")
    openrlhf._rebind(module)
    assert module.PolicyLoss.keywords == {"values": len(names)}
    assert module.PolicyLoss(is_correction_level="token").hook.method == METHODS["icepop"]


def test_flags_of_the_page_and_of_messages_are_openrlhfs(package: Path) -> None:
    found = calls(package / "cli" / "train_ppo_ray.py")
    added = [call.args for name, call, _ in found if name == "add_argument"]
    known = {a.value for args in added for a in args if isinstance(a, ast.Constant)}
    (command,) = code("openrlhf.md", "shell")
    ours = ("--", "--runtime-env-json")
    asked = [w for w in shlex.split(command) if w.startswith("--") and w not in ours]
    assert len(asked) >= 2
    assert set(asked) <= known
    assert "--algo.advantage.is_correction_level" in re.findall(r"--[\w.]+", openrlhf.RECORD)
    assert "--algo.advantage.is_correction_enable" not in known  # until 0.11.1
    assert "--actor.policy_loss_type" in known
