"""SkyRL's policy loss, against the contract of SkyRL 0.3.0 (a956457).

The stand-in is written from that contract: a registry that pickles functions with cloudpickle, as it
does for its Ray actor; advantages divided by the denominators; a masked sum per micro-batch.
"""

import re
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor

from offdrift.adapters import hooks
from offdrift.adapters.contrib import skyrl
from offdrift.errors import EvidenceError, FrameworkError, MethodError
from tests.adapters.hooked import Batch, Framework, Outcome, batch, code, counts, install, outcome, ppo, rows


@dataclass
class Registry:
    """Functions by name, as they come out of the other end of a pickle."""

    functions: dict[str, bytes] = field(default_factory=dict)
    launched: list[list[str]] = field(default_factory=list)
    """Arguments with which SkyRL's own entrypoint was called."""

    def register(self, name: str, function: Callable[..., Any]) -> None:
        if name in self.functions:
            raise ValueError(f"policy loss '{name}' already registered")
        self.functions[name] = cloudpickle.dumps(function)

    def unregister(self, name: str) -> None:
        del self.functions[name]

    def list_available(self) -> list[str]:
        return list(self.functions)

    def get(self, name: str) -> Callable[..., Any]:
        return cloudpickle.loads(self.functions[name])


def algorithm(**correction: Any) -> Any:
    clips = {"policy_loss_type": "offdrift/x", "eps_clip_low": 0.2, "eps_clip_high": 0.28}
    return SimpleNamespace(off_policy_correction=SimpleNamespace(**correction), **clips)


PLANTED = {"factor": 1.0}
"""What the stand-in does beside the contract."""


def regular(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, config: Any, loss_mask: Tensor, rollout_logprobs: Any
) -> tuple[Tensor, dict[str, float]]:
    """SkyRL's own loss: PPO's clip, a sum over what is not masked."""
    assert config.policy_loss_type == "regular"
    losses = ppo(log_probs, old_log_probs, advantages, config.eps_clip_low, config.eps_clip_high)
    return (losses * loss_mask).sum() * PLANTED["factor"], {}


@contextmanager
def stand_in(monkeypatch: pytest.MonkeyPatch, version: str = "0.3.0") -> Iterator[Registry]:
    made = Registry()
    modules = {
        "skyrl.backends.skyrl_train.utils.ppo_utils": {"PolicyLossRegistry": made, "ppo_policy_loss": regular},
        "skyrl.train.entrypoints.main_base": {"main": lambda: made.launched.append(list(sys.argv))},
    }
    install(monkeypatch, version, modules)
    yield made


def run(method: str, of: Batch, tokens: float, sequences: float = 1, **options: Any) -> Outcome:
    """A micro-batch as a worker takes it, with advantages divided by the tokens of the step."""
    return pushed(skyrl.register(method, **{"on_idle": "warn", **options}), of, of.advantages / tokens)


def pushed(name: str, of: Batch, advantages: Tensor) -> Outcome:
    from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry

    current = of.current.clone().requires_grad_()
    loss, metrics = PolicyLossRegistry.get(name)(
        current, of.old, advantages, config=algorithm(), loss_mask=of.mask.float(), rollout_logprobs=of.rollout
    )
    assert all(type(x) is float for x in metrics.values())
    return outcome(loss, current, metrics)


FRAMEWORK = Framework("skyrl", stand_in, run, served=103, by_environment=False)


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch, process: Any) -> Iterator[Registry]:
    with stand_in(monkeypatch) as made:
        yield made


def dppo(of: Batch, ratio: Tensor) -> Tensor:
    moved = (of.current.exp() - of.rollout.exp()).detach()
    stop = torch.where(of.advantages > 0, moved > 0.2, moved < -0.2)
    return (-ratio * of.advantages).where(~stop, 0.0)


def rollout_is(of: Batch, ratio: Tensor) -> Tensor:
    # r.detach() * log pi has the gradient of r where r is not detached.
    return (-ratio * of.advantages).where((ratio > 0.5) & (ratio < 5.0), 0.0)


def regular_with_tis(of: Batch, ratio: Tensor) -> Tensor:
    r = ratio * (of.rollout - of.old).exp()  # current over old
    ppo = -torch.min(r * of.advantages, r.clamp(0.8, 1.2) * of.advantages)
    return ppo * (of.old - of.rollout).exp().clamp(max=2.0)


@pytest.mark.parametrize(
    ("theirs", "name", "settings"),
    [
        (dppo, "dppo_tv", {"gate.low": -0.2, "gate.high": 0.2}),
        (rollout_is, "token_mis", {}),
        (regular_with_tis, "decoupled_ppo", {}),
    ],
)
@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
def test_gradients_of_skyrls_own_losses(theirs: Any, name: str, settings: dict[str, float], reduction: str) -> None:
    """Under both of SkyRL's denominators."""
    of = batch(spread=0.6)
    lengths = of.mask.sum(1, keepdim=True).clamp(min=1)
    divisor = of.mask.sum() if reduction == "token_mean" else len(of.mask) * lengths
    name = skyrl.register(name, settings=settings, on_idle="warn")
    gradient = pushed(name, of, of.advantages / divisor).gradient
    current = of.current.clone().requires_grad_()
    per_token = theirs(replace(of, current=current), (current - of.rollout).exp()) / divisor
    (wanted,) = torch.autograd.grad(per_token[of.mask].sum(), current)
    assert 10 < int((gradient != 0).sum()) <= int(of.mask.sum())
    torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-7)


def test_a_loss_that_is_not_known_is_refused_at_the_first_batch(
    monkeypatch: pytest.MonkeyPatch, process: list[hooks.LossHook], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "offdrift.skyrl"):
        run("decoupled_ppo", batch(), *counts(batch()))
    assert "ppo_policy_loss: loss" in caplog.text
    monkeypatch.setitem(PLANTED, "factor", 1.001)
    run("decoupled_ppo", batch(), *counts(batch()))  # once per process
    process[-1].proved = False
    with pytest.raises(FrameworkError, match=r"skyrl: .*ppo_policy_loss is a loss"):
        run("decoupled_ppo", batch(), *counts(batch()))


def test_metrics_have_the_same_keys_in_every_micro_batch() -> None:
    of = batch()
    parts = [run("decoupled_geo", rows(of, [i]), *counts(of)).metrics for i in range(6)]
    assert {tuple(sorted(m)) for m in parts} == {tuple(sorted(parts[0]))}
    assert set(parts[-1].values()) == {0.0}  # the last row is masked throughout
    assert parts[0]["offdrift/weight_max"] >= parts[0]["offdrift/weight_mean"] > 0
    drift = (of.current - of.rollout)[:1][of.mask[:1]]
    assert parts[0]["offdrift/full_k3"] == pytest.approx(float((drift.expm1() - drift).mean()), rel=1e-5)
    rejected = run("trm_max_k2", of, *counts(of), settings={"gate.high": 1e-12}).metrics
    assert rejected["offdrift/gate_drop_frac_token"] == 1
    assert rejected["offdrift/gate_drop_frac_seq"] == pytest.approx(1)


def test_a_missing_mask_means_every_token_and_missing_log_probs_are_named(registry: Registry) -> None:
    of = replace(batch(), mask=torch.ones(6, 11, dtype=torch.bool))
    function = registry.get(skyrl.register("token_tis", on_idle="warn"))
    loss, _ = function(of.current, of.old, of.advantages / 66, algorithm(), None, of.rollout)
    assert torch.equal(loss, run("token_tis", of, 66).loss)
    with pytest.raises(EvidenceError, match=r"generator\.sampling_params\.logprobs=1"):
        function(of.current, of.old, of.advantages, algorithm(), of.mask.float())
    needs_old = registry.get(skyrl.register("decoupled_ppo", on_idle="warn"))
    with pytest.raises(EvidenceError, match="logp_old"):
        needs_old(of.current, None, of.advantages, algorithm(), of.mask, of.old)


def test_two_corrections_at_once_are_refused(registry: Registry) -> None:
    of = batch()
    function = registry.get(skyrl.register("token_tis", on_idle="warn"))
    for switch in skyrl.OWN:
        config = algorithm(**dict.fromkeys(skyrl.OWN) | {switch: 1.0})
        with pytest.raises(MethodError, match=switch):
            function(of.current, of.old, of.advantages, config, of.mask, of.rollout)


def test_settings_travel_with_the_function(registry: Registry, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("OFFDRIFT_SETTINGS", "weight.cap=1.1")
    name = skyrl.register("token_tis", on_idle="warn", record=str(tmp_path / "log"))
    monkeypatch.delenv("OFFDRIFT_SETTINGS")  # as on another machine
    assert not (tmp_path / "log").exists()  # nothing is alive in the driver
    assert hooks.hook_of.cache_info().currsize == 0
    of = batch()
    metrics = pushed(name, of, of.advantages).metrics
    assert metrics["offdrift/weight_max"] == pytest.approx(1.1)
    skyrl.register("token_tis", settings={"weight.cap": 3.0}, on_idle="warn")  # replaces it
    assert registry.list_available() == [name] == ["offdrift/token_tis"]


def test_the_entrypoint_registers_and_hands_over(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    others = ["trainer.override_entrypoint=offdrift.adapters.contrib.skyrl", "trainer.epochs=1"]
    loss = "trainer.algorithm.policy_loss_type=offdrift/dppo_tv"
    monkeypatch.setattr(sys, "argv", ["main", *others, loss])
    skyrl.main()
    assert registry.list_available() == ["offdrift/dppo_tv"]
    assert registry.launched == [["main", "trainer.epochs=1", loss]]
    monkeypatch.setattr(sys, "argv", ["main", *others])
    with pytest.raises(MethodError, match=r"policy_loss_type=offdrift/METHOD"):
        skyrl.main()


def test_the_page_runs(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its commands through the entrypoint, and its launcher."""
    commands = [b for b in code("skyrl.md", "bash") if "override_entrypoint" in b]
    launchers = [b for b in code("skyrl.md", "python") if "register(" in b]
    assert commands
    assert launchers
    for block in commands:
        overrides = [w for w in shlex.split(block.replace("\\\n", " ")) if re.match(r"[a-z_.]+=", w)]
        assert len(overrides) >= 5
        monkeypatch.setattr(sys, "argv", ["main", *overrides])
        skyrl.main()
        (named,) = (w.split("=", 1)[1] for w in overrides if ".policy_loss_type=" in w)
        pushed(named, batch(), batch().advantages)
    for block in launchers:
        registry.functions.clear()
        exec(compile(block, "skyrl.md", "exec"), {})
        assert any(name.startswith("offdrift/") for name in registry.list_available())
