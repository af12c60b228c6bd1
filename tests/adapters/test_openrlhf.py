"""OpenRLHF's policy loss, against the contract of OpenRLHF 0.11.2 and of 0.10.4, 0.11.0 and 0.11.1.

The stand-in is written from that contract: `ActorPPOTrainer` builds `PolicyLoss` by the name in its own
module, calls it per micro-batch with counts of the optimizer step, and unpacks five values (until
0.11.1: four). `trainer.ray.ppo_actor` itself needs DeepSpeed, FlashAttention and a GPU.
"""

import importlib
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from offdrift.adapters.contrib import openrlhf
from offdrift.adapters.frameworks import WAITING
from offdrift.errors import EvidenceError, FrameworkError, LivenessError, MethodError
from offdrift.methods import METHODS
from tests.adapters.hooked import (
    HORIZON,
    SOME,
    Batch,
    Framework,
    Outcome,
    batch,
    counts,
    fake_site,
    install,
    outcome,
    ppo,
    rows,
)


class Plain:
    """OpenRLHF's PPO loss without a correction, which the adapter holds itself against."""

    planted: Any = staticmethod(lambda loss: loss)
    """What a version that is not known would do to its token losses."""

    def keep(self, clip_eps_low: float = 0.2, clip_eps_high: float = 0.2, token_level_loss: bool = True) -> None:
        self.clips, self.by_token = (clip_eps_low, clip_eps_high), token_level_loss

    def __call__(self, logp: Tensor, old: Tensor, advantages: Tensor, **info: Any) -> tuple[Tensor]:
        mask = info["action_mask"].double()
        losses = self.planted(ppo(logp, old, advantages, *self.clips)) * mask
        kind, lengths = "batch_num_tokens" if self.by_token else "global_batch_size", mask.sum(1)
        count = info[kind] if info[kind] is not None else mask.sum() if self.by_token else (lengths > 0).sum()
        sums = losses.sum(1) if self.by_token else losses.sum(1) / lengths.clamp(min=1)
        return (sums.sum() / count * info["dp_size"],)


class TheirLoss(Plain):
    """What tells OpenRLHF 0.11.2 from earlier versions: its switch of the correction."""

    def __init__(self, policy_loss_type: str = "ppo", is_correction_level: str = "off", **others: Any) -> None:
        self.keep(**others)


class EarlierLoss(Plain):
    """Until 0.11.1."""

    def __init__(self, policy_loss_type: str = "ppo", enable_vllm_is_correction: bool = False, **others: Any) -> None:
        self.keep(**others)


ACTOR = """
from openrlhf.models import PolicyLoss
import torch


class ActorPPOTrainer:
    def __init__(self, **given):
        self.actor_loss_fn = PolicyLoss(clip_eps_low=0.2, clip_eps_high=0.28, **given)

    def ppo_train(self, kl_ctl):
        weight = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for piece, info in self.pieces:
            log_probs = piece.current + weight
            loss, *rest = self.actor_loss_fn(
                log_probs, piece.old, piece.advantages, action_mask=piece.mask,
                rollout_log_probs=piece.rollout, **info,
            )
            loss.backward()
            self.rest = rest
        optimizer.step()
        return {"policy_loss": float(loss.detach())}
"""


@contextmanager
def stand_in(monkeypatch: pytest.MonkeyPatch, version: str = "", *, theirs: type = TheirLoss) -> Iterator[type]:
    """`openrlhf.trainer.ray.ppo_actor`, to be imported by the test."""
    version = version or ("0.11.2" if theirs is TheirLoss else "0.11.1")
    install(monkeypatch, version, {"openrlhf.models": {"PolicyLoss": theirs}})
    with TemporaryDirectory() as site:
        folder = Path(site) / "openrlhf" / "trainer" / "ray"
        folder.mkdir(parents=True)
        (folder / "ppo_actor.py").write_text(ACTOR)
        for name, path in (("trainer", folder.parent), ("trainer.ray", folder)):
            package = ModuleType(f"openrlhf.{name}")
            package.__path__ = [str(path)]
            monkeypatch.setitem(sys.modules, package.__name__, package)
        monkeypatch.setattr(sys.modules["openrlhf"], "__path__", [str(folder.parents[1])], raising=False)
        yield theirs
    openrlhf.uninstall()
    WAITING.queues.pop(openrlhf.ACTOR, None)
    sys.modules.pop(openrlhf.ACTOR, None)


def imported() -> Any:
    return importlib.import_module(openrlhf.ACTOR)


def pushed(loss: Any, of: Batch, tokens: float, sequences: float, *, values: int, dp_size: int = 1) -> Outcome:
    current = of.current.clone().requires_grad_()
    out, *rest = loss(
        current,
        of.old,
        of.advantages,
        action_mask=of.mask,
        rollout_log_probs=of.rollout,
        dp_size=dp_size,
        batch_num_tokens=torch.tensor(tokens),
        global_batch_size=torch.tensor(sequences),
    )
    assert len(rest) == values - 1
    assert all(bool(torch.isfinite(x)) for x in rest)
    return outcome(out, current, {})


def run(values: int, method: str | None, of: Batch, tokens: float, sequences: float, **options: Any) -> Outcome:
    openrlhf.install(method, **{"on_idle": "warn", "horizon": HORIZON, **options})
    return pushed(imported().ActorPPOTrainer().actor_loss_fn, of, tokens, sequences, values=values)


FRAMEWORKS = [
    Framework(f"openrlhf {version}", partial(stand_in, theirs=theirs), partial(run, values), 106, own_aggregate=True)
    for version, theirs, values in (("0.11.2", TheirLoss, 5), ("earlier", EarlierLoss, 4))
]


@pytest.fixture(params=FRAMEWORKS, ids=lambda f: f.name)
def actor(request: Any, monkeypatch: pytest.MonkeyPatch, process: Any) -> Iterator[type]:
    with request.param.stand_in(monkeypatch) as theirs:
        yield theirs


def test_ranks_are_averaged_by_the_optimizer(actor: Any) -> None:
    openrlhf.install("dapo")
    loss, of = imported().ActorPPOTrainer().actor_loss_fn, batch()
    values = 5 if actor is TheirLoss else 4
    one, four = (pushed(loss, of, *counts(of), values=values, dp_size=n) for n in (1, 4))
    torch.testing.assert_close((four.loss / 4, four.gradient / 4), one[:2])
    assert float(one.loss) != 0


def test_a_batch_without_counts_is_the_step(actor: Any) -> None:
    openrlhf.install("grpo")
    loss, of = imported().ActorPPOTrainer().actor_loss_fn, batch()
    out, *_ = loss(of.current, of.old, of.advantages, of.mask, of.rollout)
    wanted = pushed(loss, of, *counts(of), values=5 if actor is TheirLoss else 4).loss
    assert float(out) == pytest.approx(float(wanted), rel=1e-5)


def test_reported_values_by_hand(actor: Any) -> None:
    openrlhf.install("ppo_clip")
    loss = imported().ActorPPOTrainer().actor_loss_fn
    row = torch.tensor([[-1.0, -1.0, -1.0, -1.0]])
    current = row + torch.tensor([[0.5, 0.0, -0.5, 9.0]])  # e^0.5 > 1.2 is clipped for A > 0
    out = loss(current.clamp(max=0), row, torch.ones(1, 4), torch.tensor([[1, 1, 1, 0]]), row - 0.25)
    # L = -(min(e^0.5, 1.2) + 1 + e^-0.5) / 3
    assert float(out[0]) == pytest.approx(-(1.2 + 1 + 0.60653066) / 3, rel=1e-5)
    assert float(out[1]) == pytest.approx(1 / 3)
    assert float(out[2]) == pytest.approx(0.0, abs=1e-6)  # -(0.5 + 0 - 0.5) / 3
    assert float(out[3]) == pytest.approx(-0.25)
    assert actor is not TheirLoss or float(out[4]) == 0.0


PLANTED = {
    "with another factor": lambda loss: 1.001 * loss,
    "with a term of its own": lambda loss: loss + 0.01 * loss.square(),
    "that fails": lambda loss: loss.no_such_thing,
}


@pytest.mark.parametrize("change", PLANTED)
def test_a_loss_that_is_not_known_is_refused_at_the_first_batch(actor: Any, change: str, monkeypatch: Any) -> None:
    openrlhf.install("icepop", on_idle="warn")
    values, of = 5 if actor is TheirLoss else 4, batch()
    same = imported().ActorPPOTrainer().actor_loss_fn
    pushed(same, of, *counts(of), values=values, dp_size=3)
    assert same.hook.proved
    monkeypatch.setattr(actor, "planted", staticmethod(PLANTED[change]))
    pushed(same, of, *counts(of), values=values)  # once per process
    same.hook.proved = False
    with pytest.raises(FrameworkError, match=r"openrlhf: openrlhf\.models\.loss\.PolicyLoss is a loss that"):
        pushed(same, of, *counts(of), values=values)


def test_installed_before_or_after_the_import_and_undone(actor: Any) -> None:
    openrlhf.install("dapo")
    openrlhf.uninstall()
    openrlhf.install("icepop")
    assert openrlhf.ACTOR not in sys.modules
    module = imported()
    assert isinstance(module.ActorPPOTrainer().actor_loss_fn, openrlhf.PolicyLoss)
    openrlhf.uninstall()
    assert module.PolicyLoss is actor
    openrlhf.install("dapo")  # the module is there already
    assert module.ActorPPOTrainer().actor_loss_fn.hook.method.aggregate == "token_mean"
    openrlhf.uninstall()
    assert module.PolicyLoss is actor
    sys.modules.pop(openrlhf.ACTOR)
    openrlhf.install("icepop")
    openrlhf.uninstall()
    assert imported().PolicyLoss is actor, "undone before the import"


def test_a_training_step_reports_metrics(actor: Any) -> None:
    openrlhf.install("geo_mask", settings=SOME["geo_mask"])
    switch = {"is_correction_level": "token"} if actor is TheirLoss else {"enable_vllm_is_correction": True}
    trainer, of = imported().ActorPPOTrainer(**switch), batch()
    tokens, sequences = counts(of)
    info = {"dp_size": 1, "batch_num_tokens": tokens, "global_batch_size": sequences}
    trainer.pieces = [(rows(of, i), info) for i in ([0, 1, 2], [3, 4, 5])]
    status = trainer.ppo_train(0.0)
    assert "policy_loss" in status
    assert status["offdrift/batch/tokens"] == tokens
    assert 0 < status["offdrift/gate/drop_frac_token"] < 1


def test_what_cannot_train_is_refused(actor: Any) -> None:
    openrlhf.install("icepop")
    trainer, of = imported().ActorPPOTrainer(), batch()
    with pytest.raises(EvidenceError, match=r"rollout_log_probs are missing.*is_correction_level"):
        trainer.actor_loss_fn(of.current, of.old, of.advantages, of.mask, None)
    trainer.pieces = [(Batch(of.old, of.old, of.current, of.advantages, of.mask), {})]
    with pytest.raises(LivenessError, match="cannot act"):
        trainer.ppo_train(0.0)
    with pytest.raises(MethodError, match="policy_loss_type gspo"):
        imported().ActorPPOTrainer(policy_loss_type="gspo")


RAY = """
import os, ray, sys

# What `ray job submit` hands its driver; the driver then calls ray.init as OpenRLHF does.
ray.init(
    num_cpus=1, include_dashboard=False, logging_level="ERROR",
    runtime_env={"env_vars": {"TOKENIZERS_PARALLELISM": "true"}},
)

@ray.remote
class PolicyModelActor:
    def loss(self):
        from openrlhf.trainer.ray.ppo_actor import ActorPPOTrainer
        return repr(ActorPPOTrainer().actor_loss_fn.hook.method.describe())

actor = PolicyModelActor.remote()
print("LOSS", ray.get(actor.loss.remote()))
"""


@pytest.mark.slow
def test_ray_runs_it_in_the_actors_process(tmp_path: Path) -> None:
    """The runtime environment of the page's command, in a real Ray job, on a stand-in package."""
    theirs = "class PolicyLoss:\n    def __init__(self, is_correction_level='off', **_): ...\n"
    files = {"models/__init__.py": theirs, "trainer/ray/ppo_actor.py": ACTOR}
    path = fake_site(tmp_path / "site", "openrlhf", "0.11.2", files)
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(RAY))
    environment = {
        "worker_process_setup_hook": "offdrift.adapters.contrib.openrlhf.install",
        "env_vars": {"OFFDRIFT_METHOD": "icepop"},
    }

    env = {
        **os.environ,
        "PYTHONPATH": path,
        "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"runtime_env": environment, "metadata": {}}),
    }
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=120)
    assert f"LOSS {METHODS['icepop'].describe()!r}" in done.stdout.replace('"', "'"), done.stderr[-3000:]
