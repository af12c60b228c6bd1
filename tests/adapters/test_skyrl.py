"""SkyRL's policy-loss registry, against the contract of SkyRL 0.3.0 (a956457).

The stand-ins below are written from that contract: a registry that refuses a name twice and sends
functions by cloudpickle, advantages that carry the denominators, losses that are masked sums, metrics
that are numbers under the same keys in every micro-batch. The same adapter was run once against the
real module of that commit and a real Ray; see docs/integrations/skyrl.md.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from offdrift.adapters.contrib import skyrl
from offdrift.adapters.hooks import proportional
from offdrift.errors import BadValueError, EvidenceError, FrameworkError, LivenessError, MethodError
from offdrift.logprobs import LogProbs
from offdrift.loss import policy_loss
from offdrift.methods import METHODS
from tests.adapters import loss_laws as laws
from tests.adapters.hooked import Batch, batch, code, install, optimizer_step, process

__all__ = ["process"]


@dataclass
class Registry:
    """Functions by name, as they come out of the other end of a pickle."""

    functions: dict[str, bytes] = field(default_factory=dict)

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
    return SimpleNamespace(off_policy_correction=SimpleNamespace(**correction))


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch, process: None) -> Iterator[Registry]:
    made, launched = Registry(), []
    install(
        monkeypatch,
        "0.3.0",
        skyrl__backends__skyrl_train__utils__ppo_utils={"PolicyLossRegistry": made},
        skyrl__train__entrypoints__main_base={"main": lambda: launched.append(list(sys.argv))},
    )
    made.launched = launched  # type: ignore[attr-defined]
    skyrl._hook.cache_clear()
    yield made
    skyrl._hook.cache_clear()


def divided(given: Batch, how: str) -> Tensor:
    """Advantages with the denominators that make a sum the mean that was asked for."""
    if how == "token_mean":
        return given.advantages / given.mask.sum()
    lengths = given.mask.sum(1, keepdim=True).clamp(min=1)
    return given.advantages / (len(given.mask) * lengths)


def step(
    registry: Registry,
    given: Batch,
    name: str = "token_tis",
    *,
    how: str = "token_mean",
    pieces: int = 1,
    **options: Any,
) -> tuple[Tensor, Tensor, list[dict[str, float]]]:
    """A mini-batch as a worker takes it: micro-batches whose masked sums add up."""
    function = registry.get(skyrl.register(name, **{"on_idle": "warn", **options}))
    current = given.current.clone().requires_grad_()
    advantages, total, metrics = divided(given, how), torch.zeros(()), []
    for rows in torch.arange(len(current)).chunk(pieces):
        loss, found = function(
            current[rows],
            given.old[rows],
            advantages[rows],
            config=algorithm(),
            loss_mask=given.mask[rows].float(),
            rollout_logprobs=given.rollout[rows],
        )
        assert all(type(x) is float for x in found.values())
        total = total + loss
        metrics.append(found)
    total.backward()
    assert current.grad is not None
    return total.detach(), current.grad, metrics


def test_bad_advantages_are_named(registry: Registry) -> None:
    laws.check_bad_advantages(lambda given, *_: step(registry, given)[:2])  # type: ignore[arg-type, return-value]


def test_unscored_tokens(registry: Registry) -> None:
    given = batch()
    _, whole, _ = step(registry, given)
    for value in laws.UNSCORED:
        with_them, without = laws.unscored(given, value)
        loss, grad, metrics = step(registry, with_them)
        torch.testing.assert_close(grad, whole.where(without.mask, 0.0))
        assert int((grad != 0).sum()) > 5
        assert all(bool(torch.isfinite(torch.tensor([loss, *m.values()])).all()) for m in metrics)


# -- parity -------------------------------------------------------------------------------------------


def dppo(given: Batch, ratio: Tensor) -> Tensor:
    moved = (given.current.exp() - given.rollout.exp()).detach()
    stop = torch.where(given.advantages > 0, moved > 0.2, moved < -0.2)
    return (-ratio * given.advantages).where(~stop, 0.0)


def rollout_is(given: Batch, ratio: Tensor) -> Tensor:
    inside = (ratio > 0.5) & (ratio < 5.0)
    # r.detach() * log pi has the gradient of r where r is not detached.
    return (-ratio * given.advantages).where(inside, 0.0)


def regular_with_tis(given: Batch, ratio: Tensor) -> Tensor:
    r = ratio * (given.rollout - given.old).exp()  # current over old
    ppo = -torch.min(r * given.advantages, r.clamp(0.8, 1.2) * given.advantages)
    return ppo * (given.old - given.rollout).exp().clamp(max=2.0)


@pytest.mark.parametrize(
    ("theirs", "name", "settings"),
    [
        (dppo, "dppo_tv", {"gate.low": -0.2, "gate.high": 0.2}),
        (rollout_is, "token_mis", {}),
        (regular_with_tis, "decoupled_ppo", {}),
    ],
)
@pytest.mark.parametrize("how", ["token_mean", "sequence_mean"])
def test_gradients_of_skyrls_own_losses(
    registry: Registry, theirs: Any, name: str, settings: dict[str, float], how: str
) -> None:
    given = batch(spread=0.6)
    _, grad, _ = step(registry, given, name, how=how, settings=settings)
    current = given.current.clone().requires_grad_()
    ratio = (current - given.rollout).exp()
    per_token = theirs(replace(given, current=current), ratio)
    weights = divided(replace(given, advantages=torch.ones(6, 11)), how)
    (per_token * weights)[given.mask].sum().backward()
    assert current.grad is not None
    assert 10 < int((grad != 0).sum()) <= int(given.mask.sum())
    torch.testing.assert_close(grad, current.grad, rtol=1e-4, atol=1e-7)


# -- every method -------------------------------------------------------------------------------------


def test_every_method_is_the_librarys_or_refused_by_name(registry: Registry) -> None:
    given, served, refused = batch(), 0, 0
    for name, row in METHODS.items():
        lag = any(getattr(g, "statistic", "") == "version_lag" for g in row.correction.gates)
        lacking = row.needs_divergences or row.needs or row.penalty or lag
        if lacking or row.looks_ahead or row.lr_scale or not proportional(row):
            with pytest.raises(EvidenceError if lacking else MethodError, match="SkyRL"):
                skyrl.register(name)
            refused += 1
            continue
        loss, grad, _ = step(registry, given, name)
        current = given.current.clone().requires_grad_()
        lp = LogProbs.pack(given.rollout, current, given.old, mask=given.mask)
        whole = policy_loss(lp, replace(row, aggregate="token_mean"), lp.like_caller(given.advantages))
        whole.loss.backward()
        torch.testing.assert_close(loss, whole.loss.detach(), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(grad, current.grad, rtol=1e-4, atol=1e-7)
        served += 1
    assert served + refused == len(METHODS)
    assert served >= 75


# -- laws ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["token_tis", "seq_tis", "decoupled_geo", "gspo"])
def test_split_permutation_padding_and_masked_values_change_nothing(registry: Registry, name: str) -> None:
    given = batch()
    loss, grad, _ = step(registry, given, name)
    for pieces in (2, 3, 6):
        split, split_grad, _ = step(registry, given, name, pieces=pieces)
        torch.testing.assert_close(split, loss)
        torch.testing.assert_close(split_grad, grad)
    order = torch.tensor([3, 1, 5, 0, 4, 2])
    _, moved, _ = step(registry, Batch(*(x[order] for x in vars(given).values())), name)
    torch.testing.assert_close(moved, grad[order])
    for poison in (float("nan"), 1e9):
        wide = {k: torch.nn.functional.pad(v.where(given.mask, poison), (0, 3), value=poison)
                for k, v in vars(given).items() if k != "mask"}  # fmt: skip
        padded = Batch(mask=torch.nn.functional.pad(given.mask, (0, 3)), **wide)
        padded_loss, padded_grad, _ = step(registry, padded, name)
        assert torch.equal(padded_loss, loss)
        assert torch.equal(padded_grad[:, :11], grad)
        assert torch.equal(padded_grad[:, 11:], torch.zeros(6, 3))


def test_metrics_have_the_same_keys_in_every_micro_batch(registry: Registry) -> None:
    given = batch()
    _, _, found = step(registry, given, "decoupled_geo", pieces=6)
    assert len(found) == 6
    assert {tuple(sorted(m)) for m in found} == {tuple(sorted(found[0]))}
    assert set(found[-1].values()) == {0.0}  # the last row is masked throughout
    assert found[0]["offdrift/weight_max"] >= found[0]["offdrift/weight_mean"] > 0
    drift = (given.current - given.rollout)[:1][given.mask[:1]]
    assert found[0]["offdrift/full_k3"] == pytest.approx(float((drift.expm1() - drift).mean()), rel=1e-5)


def test_all_masked_and_all_rejected_are_zero(registry: Registry) -> None:
    given = batch()
    masked = replace(given, mask=torch.zeros_like(given.mask), current=torch.full((6, 11), float("nan")))
    loss, grad, _ = step(registry, replace(masked, advantages=given.advantages))
    assert loss == 0
    assert torch.equal(grad, torch.zeros(6, 11))
    loss, grad, (found,) = step(registry, given, "trm_max_k2", settings={"gate.high": 1e-12})
    assert loss == 0
    assert torch.equal(grad, torch.zeros(6, 11))
    assert found["offdrift/gate_drop_frac_token"] == 1
    assert found["offdrift/gate_drop_frac_seq"] == pytest.approx(1)


def test_no_mask_means_every_token(registry: Registry) -> None:
    given = replace(batch(), mask=torch.ones(6, 11, dtype=torch.bool))
    function = registry.get(skyrl.register("token_tis", on_idle="warn"))
    advantages = divided(given, "token_mean")
    loss, _ = function(given.current, given.old, advantages, algorithm(), None, given.rollout)
    expected, _, _ = step(registry, given)
    assert torch.equal(loss, expected)


# -- what is refused ----------------------------------------------------------------------------------


def test_missing_and_bad_log_probs_are_named(registry: Registry) -> None:
    given = batch()
    function = registry.get(skyrl.register("token_tis", on_idle="warn"))
    with pytest.raises(EvidenceError, match=r"generator\.sampling_params\.logprobs=1"):
        function(given.current, given.old, given.advantages, algorithm(), given.mask.float())
    given.rollout[0, given.mask[0].nonzero()[0]] = float("nan")
    with pytest.raises(BadValueError, match="logp_rollout of sequence 0 is nan"):
        step(registry, given)
    needs_old = registry.get(skyrl.register("decoupled_ppo", on_idle="warn"))
    with pytest.raises(EvidenceError, match="logp_old"):
        needs_old(given.current, None, given.advantages, algorithm(), given.mask, given.old)


@pytest.mark.parametrize("switch", skyrl.OWN)
def test_two_corrections_at_once_are_refused(registry: Registry, switch: str) -> None:
    given = batch()
    function = registry.get(skyrl.register("token_tis", on_idle="warn"))
    config = algorithm(**dict.fromkeys(skyrl.OWN) | {switch: 1.0})
    with pytest.raises(MethodError, match=switch):
        function(given.current, given.old, given.advantages, config, given.mask, given.rollout)


def test_an_old_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "0.0.1")
    with pytest.raises(FrameworkError, match=r"skyrl 0\.0\.1 is older"):
        skyrl.register("token_tis")


# -- registry, steps, records -------------------------------------------------------------------------


def test_settings_travel_with_the_function(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFDRIFT_SETTINGS", "weight.cap=1.1")
    name = skyrl.register("token_tis", on_idle="warn")
    monkeypatch.delenv("OFFDRIFT_SETTINGS")  # as on another machine
    assert name == "offdrift/token_tis"
    given = batch()
    _, found = registry.get(name)(given.current, given.old, given.advantages, algorithm(), given.mask, given.rollout)
    assert found["offdrift/weight_max"] == pytest.approx(1.1)
    skyrl.register("token_tis", settings={"weight.cap": 3.0}, on_idle="warn")  # replaces it
    assert registry.list_available() == [name]


def test_registering_leaves_nothing_alive_in_the_driver(registry: Registry, tmp_path: Path) -> None:
    skyrl.register("token_tis", record=str(tmp_path / "log"))
    assert not (tmp_path / "log").exists()
    assert skyrl._hook.cache_info().currsize == 0


def test_an_optimizer_step_closes_the_step_and_records_it(registry: Registry, tmp_path: Path) -> None:
    given = batch()
    step(registry, given, pieces=2, record=str(tmp_path))
    optimizer_step()
    hook = skyrl._hook(registry.get("offdrift/token_tis"))
    hook.adapter.close()
    assert hook.step == 1
    assert hook.metrics["offdrift/batch/tokens"] == int(given.mask.sum())
    (file,) = tmp_path.glob("*.parquet")
    rows = [r for r in pq.read_table(file).to_pylist() if r["logp_rollout"]]
    assert len(rows) == 5
    for i, row in enumerate(rows):
        for mine, theirs in [("logp_rollout", "rollout"), ("logp_old", "old"), ("logp", "current")]:
            expected = getattr(given, theirs)[i][given.mask[i]]
            torch.testing.assert_close(torch.tensor(row[mine]), expected)


def test_copied_log_probs_end_the_run(registry: Registry) -> None:
    given = batch()
    step(registry, replace(given, rollout=given.current.clone()), on_idle="error")
    with pytest.raises(LivenessError, match="cannot act"):
        optimizer_step()


# -- the entrypoint and the page ----------------------------------------------------------------------


def test_the_entrypoint_registers_and_hands_over(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["trainer.override_entrypoint=offdrift.adapters.contrib.skyrl", "trainer.epochs=1"]
    loss = "trainer.algorithm.policy_loss_type=offdrift/dppo_tv"
    monkeypatch.setattr(sys, "argv", ["main", *given, loss])
    skyrl.main()
    assert registry.list_available() == ["offdrift/dppo_tv"]
    assert registry.launched == [["main", "trainer.epochs=1", loss]]  # type: ignore[attr-defined]
    monkeypatch.setattr(sys, "argv", ["main", *given])
    with pytest.raises(MethodError, match=r"policy_loss_type=offdrift/METHOD"):
        skyrl.main()


def test_commands_of_the_page_are_the_entrypoints(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = [b for b in code("skyrl.md", "bash") if "override_entrypoint" in b]
    assert commands
    for block in commands:
        words = shlex.split(block.replace("\\\n", " "))
        overrides = [w for w in words if re.match(r"[a-z_.]+=", w)]
        assert len(overrides) >= 5
        monkeypatch.setattr(sys, "argv", ["main", *overrides])
        skyrl.main()
        (named,) = (w.split("=", 1)[1] for w in overrides if ".policy_loss_type=" in w)
        step(registry, batch(), named.removeprefix("offdrift/"))


def test_the_launcher_of_the_page_runs(registry: Registry) -> None:
    blocks = [b for b in code("skyrl.md", "python") if "register(" in b]
    assert blocks
    for block in blocks:
        exec(compile(block, "skyrl.md", "exec"), {})
    assert any(name.startswith("offdrift/") for name in registry.list_available())
