"""What tests of function hooks share: a process without hooks, stand-ins for frameworks, a batch and its parts."""

import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from offdrift.adapters import frameworks, hooks

ROOT = Path(__file__).parents[2]
HORIZON = 16

SOME: dict[str, dict[str, float]] = {"geo_mask": {"gate.low": 0.9, "gate.high": 1.1}}
"""Settings under which a method keeps some sequences of `batch()` and rejects others."""

UNSCORED = (-9999.0, -torch.inf, -1e9)
"""What stands for a rollout log-prob that no engine gave."""


def install(monkeypatch: pytest.MonkeyPatch, version: str, modules: Mapping[str, Mapping[str, Any]] = {}) -> None:
    """Make a framework importable: its installed version, and contents of modules by dotted name."""
    monkeypatch.setattr(frameworks, "version", lambda _: version)
    frameworks.require.cache_clear()
    for dotted, content in modules.items():
        names = dotted.split(".")
        for i in range(1, len(names) + 1):
            name = ".".join(names[:i])
            if name not in sys.modules:
                monkeypatch.setitem(sys.modules, name, ModuleType(name))
            if i > 1:
                parent = sys.modules[".".join(names[: i - 1])]
                monkeypatch.setattr(parent, names[i - 1], sys.modules[name], raising=False)
        for key, value in content.items():
            monkeypatch.setattr(sys.modules[dotted], key, value, raising=False)


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[hooks.LossHook]]:
    """A process of its own: no settings from outside, and no hook outlives the test. Its hooks, oldest first."""
    handles, made = [], []
    real = hooks.register_optimizer_step_post_hook

    class Noted(hooks.LossHook):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    def register(function: Any) -> Any:
        handles.append(real(function))
        return handles[-1]

    monkeypatch.setattr(hooks, "register_optimizer_step_post_hook", register)
    monkeypatch.setattr(hooks, "LossHook", Noted)
    for name in ("METHOD", "SETTINGS", "RECORD", "ON_IDLE"):
        monkeypatch.delenv(f"OFFDRIFT_{name}", raising=False)
    hooks.hook_of.cache_clear()
    yield made
    for handle in handles:
        handle.remove()
    hooks.hook_of.cache_clear()
    frameworks.require.cache_clear()


def fake_site(site: Path, name: str, version: str, files: Mapping[str, str]) -> str:
    """A folder with an installed package of these files (by path) and this library, as a PYTHONPATH."""
    for path, text in files.items():
        file = site / name / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    for folder in (site / name, *(p for p in (site / name).rglob("*") if p.is_dir())):
        (folder / "__init__.py").touch()
    info = site / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return f"{site}:{ROOT / 'src'}"


def choose(
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    settings: Mapping[str, Any] = {},
    on_idle: str = "warn",
    record: str = "",
) -> None:
    """Name the method in the environment, as users of a hook without arguments do."""
    text = ",".join(f"{path}={value}" for path, value in settings.items())
    for name, value in {"METHOD": method, "SETTINGS": text, "RECORD": record, "ON_IDLE": on_idle}.items():
        monkeypatch.setenv(f"OFFDRIFT_{name}", value)


def ppo(
    logp: Tensor, old: Tensor, advantages: Tensor, low: float = 0.2, high: float = 0.2, dual: float | None = None
) -> Tensor:
    """PPO's clipped token losses as every framework of the contracts has them: their own plain loss."""
    ratio = (logp - old).exp()
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))
    return loss if dual is None else torch.where(advantages < 0, loss.minimum(-advantages * dual), loss)


def optimizer_step() -> None:
    """An optimizer of this process takes a step."""
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    torch.optim.SGD([weight], lr=0.1).step()


@dataclass(frozen=True)
class Batch:
    """Padded `[b, t]` log-probs under drift."""

    rollout: Tensor
    old: Tensor
    current: Tensor
    advantages: Tensor
    mask: Tensor


def batch(b: int = 6, t: int = 11, *, seed: int = 0, spread: float = 0.3) -> Batch:
    """A batch whose last sequence is masked throughout and whose others have gaps."""
    draw = torch.Generator().manual_seed(seed)
    rollout = -3 * torch.rand(b, t, generator=draw) - 0.01
    old = (rollout + spread * torch.randn(b, t, generator=draw)).clamp(max=-1e-3)
    current = (old + spread * torch.randn(b, t, generator=draw)).clamp(max=-1e-3)
    signs = torch.tensor([1.0, -1.0, 0.5, -2.0, 1.5, -0.5])[:b, None]
    mask = torch.rand(b, t, generator=draw) > 0.3
    mask[-1] = False
    assert mask[:-1].any(1).all()
    return Batch(rollout, old, current, signs.expand(b, t).clone(), mask)


def rows(of: Batch, index: list[int]) -> Batch:
    """Some of the sequences."""
    return replace(of, **{f.name: getattr(of, f.name)[index] for f in fields(of)})


def counts(of: Batch) -> tuple[float, float]:
    """Trainable tokens, and sequences that have one."""
    return float(of.mask.sum()), float((of.mask.sum(1) > 0).sum())


def filled(of: Batch, value: float) -> Batch:
    """The batch with something else at every masked position."""
    names = ("rollout", "old", "current", "advantages")
    return replace(of, **{name: getattr(of, name).where(of.mask, value) for name in names})


def unscored(of: Batch, value: float) -> tuple[Batch, Batch]:
    """The batch with rollout log-probs that were not scored, a whole sequence of them and single ones;
    and with those tokens masked."""
    some = of.mask & (torch.arange(of.mask.shape[1]) % 4 == 1)
    some[2] = of.mask[2]
    assert 8 < int(some.sum()) < int(of.mask.sum()) - 8
    return replace(of, rollout=of.rollout.masked_fill(some, value)), replace(of, mask=of.mask & ~some)


class Outcome(NamedTuple):
    """What a framework made of a batch."""

    loss: Tensor
    gradient: Tensor
    """To the current log-probs, `[b, t]`."""
    metrics: dict[str, Any]


def outcome(loss: Tensor, current: Tensor, metrics: dict[str, Any]) -> Outcome:
    """After the backward pass to the leaf `current`."""
    loss.backward()
    assert current.grad is not None
    return Outcome(loss.detach(), current.grad, metrics)


@dataclass(frozen=True)
class Framework:
    """A stand-in for a framework whose hook returns a loss."""

    name: str
    stand_in: Callable[..., AbstractContextManager[Any]]
    """Makes it importable, given a `MonkeyPatch` and, if not the tested one, its version."""
    run: Callable[..., Outcome]
    """A part of a step through its hook, given a method, a batch, the step's tokens and sequences, and
    `settings`, `record`, `on_idle`."""
    served: int
    """Rows of the table that its hook can serve."""
    own_aggregate: bool = False
    """Whether losses are aggregated as the method says, rather than as token means."""
    has_old: bool = True
    """Whether it hands over log-probs of the old policy."""
    records: bool = True
    by_environment: bool = True
    """Whether the method may be named by the environment."""


@dataclass(frozen=True)
class Correcting:
    """A stand-in for a framework that keeps its loss and asks for weights."""

    name: str
    stand_in: Callable[..., AbstractContextManager[Any]]
    correct: Callable[..., tuple[Tensor, Tensor]]
    """Weights `[b, t]`, zero where a gate rejects, and the mask that is left, given a method, a batch, and
    `settings`, `on_idle`."""
    mask_is_kept: bool = False
    """Whether a rejected token stays in the mask."""


def code(page: str, language: str) -> list[str]:
    """The code blocks of a page under docs/integrations in one language."""
    text = (ROOT / "docs" / "integrations" / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


@contextmanager
def heard(log: logging.Logger, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Messages of a logger reach `caplog`, also after AReaL has given the process another tree of loggers."""
    level, propagate = log.level, log.propagate
    log.addHandler(caplog.handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(caplog.handler)
        log.setLevel(level)
        log.propagate = propagate
