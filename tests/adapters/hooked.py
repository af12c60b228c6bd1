"""What tests of function hooks share: stand-ins for frameworks, an optimizer's step, a batch."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from offdrift.adapters import frameworks, hooks

ROOT = Path(__file__).parents[2]


def install(monkeypatch: pytest.MonkeyPatch, version: str, **modules: dict[str, Any]) -> None:
    """Make a framework importable: its installed version, and modules by dotted name with `__`."""
    monkeypatch.setattr(frameworks, "version", lambda _: version)
    frameworks.require.cache_clear()
    for underscored, content in modules.items():
        dotted = underscored.replace("__", ".")
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
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process of its own: no settings from outside, and no hook outlives the test."""
    handles = []
    real = hooks.register_optimizer_step_post_hook

    def register(function: Any) -> Any:
        handles.append(real(function))
        return handles[-1]

    monkeypatch.setattr(hooks, "register_optimizer_step_post_hook", register)
    for name in ("METHOD", "SETTINGS", "RECORD", "ON_IDLE"):
        monkeypatch.delenv(f"OFFDRIFT_{name}", raising=False)
    yield
    for handle in handles:
        handle.remove()
    frameworks.require.cache_clear()


def optimizer_step() -> None:
    """An optimizer of this process takes a step."""
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    torch.optim.SGD([weight], lr=0.1).step()


@dataclass(frozen=True)
class Batch:
    """Padded `[b, t]` log-probs under drift; masked positions hold NaN where `poison` is set."""

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


def poisoned(x: Tensor, mask: Tensor, value: float) -> Tensor:
    """The tensor with something else where the mask is 0."""
    return x.where(mask, value)


def code(page: str, language: str) -> list[str]:
    """The code blocks of a page under docs/integrations in one language."""
    text = (ROOT / "docs" / "integrations" / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
