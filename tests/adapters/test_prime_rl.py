"""prime-rl's custom loss, against the contract of prime-rl 0.8.0 (559b447) as `compute_loss` calls it.

The stand-in is written from that contract: one call per sequence, results added, one division by the
number of loss tokens of the step, metrics per token. The same adapter was run once against the real
module of that commit; see docs/integrations/prime-rl.md.
"""

import inspect
import json
import math
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from offdrift.adapters.contrib import prime_rl
from offdrift.errors import EvidenceError, FrameworkError, MethodError
from offdrift.logprobs import LogProbs
from offdrift.loss import policy_loss
from offdrift.methods import METHODS
from tests.adapters.hooked import Batch, Framework, Outcome, batch, code, counts, install, outcome


@dataclass
class LossInputs:
    """One sequence, `[seq]` each."""

    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor
    loss_weights: Tensor | None = None


@dataclass
class LossOutputs:
    """A scalar, and metrics: one value per token."""

    loss: Tensor
    metrics: dict[str, Tensor]


PLANTED = {"factor": 1.0}
"""What the stand-in does beside the contract."""


def ipo_loss_fn(inputs: LossInputs, config: Any) -> LossOutputs:
    """prime-rl's loss of 0.8.0 as its thread and its source have it: a gate, the ratio, a squared log-ratio."""
    log_ratio = inputs.trainer_logprobs - inputs.inference_logprobs
    moved = (inputs.trainer_logprobs.exp() - inputs.inference_logprobs.exp()).abs()
    keep = inputs.loss_mask & (moved <= config.ipo_threshold)
    losses = config.kl_tau * log_ratio.square() * inputs.loss_mask
    losses = losses - PLANTED["factor"] * config.adv_tau * keep * inputs.advantages * log_ratio.exp()
    return LossOutputs((losses if inputs.loss_weights is None else losses * inputs.loss_weights).sum(), {})


class IPOLoss:
    """Its IPO loss since September 2026, by its source: a class, a capped ratio, and no KL."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def loss(self, inputs: LossInputs) -> LossOutputs:
        config = self.config
        assert not config.score_centering
        moved = (inputs.trainer_logprobs.exp() - inputs.inference_logprobs.exp()).abs()
        keep = inputs.loss_mask & (moved <= config.eps)
        log_ratio = inputs.trainer_logprobs - inputs.inference_logprobs
        # The cap holds the ratio and lets its gradient through.
        ratio = (log_ratio + (log_ratio.clamp(max=math.log(config.max_importance_ratio)) - log_ratio).detach()).exp()
        losses = -PLANTED["factor"] * config.adv_tau * keep * inputs.advantages * ratio
        return LossOutputs((losses if inputs.loss_weights is None else losses * inputs.loss_weights).sum(), {})


@contextmanager
def stand_in(monkeypatch: pytest.MonkeyPatch, version: str = "0.8.0") -> Iterator[None]:
    names = {"LossInputs": LossInputs, "LossOutputs": LossOutputs, "ipo_loss_fn": ipo_loss_fn}
    install(monkeypatch, version, {"prime_rl.trainer.rl.loss": names})
    prime_rl._hook.cache_clear()
    yield
    prime_rl._hook.cache_clear()


def run(
    method: str | None,
    of: Batch,
    tokens: float,
    sequences: float = 1,
    *,
    weights: Tensor | None = None,
    ref: Tensor | None = None,
    **options: Any,
) -> Outcome:
    """Part of a training step as prime-rl takes it."""
    current, options = of.current.clone().requires_grad_(), {"method": method, "on_idle": "warn", **options}
    columns = (current, of.rollout, ref, of.advantages, of.mask, weights)
    inputs = [LossInputs(*(None if x is None else x[i] for x in columns)) for i in range(len(current))]
    outputs = [prime_rl.loss(one, **options) for one in inputs]
    metrics = {name: torch.cat([o.metrics[name] for o in outputs]) for name in outputs[0].metrics}
    return outcome(torch.stack([o.loss for o in outputs]).sum() / tokens, current, metrics)


FRAMEWORK = Framework("prime-rl", stand_in, run, served=41, has_old=False)


@pytest.fixture(autouse=True)
def prime(monkeypatch: pytest.MonkeyPatch, process: Any) -> Iterator[None]:
    with stand_in(monkeypatch):
        yield


def step(of: Batch, method: str, **options: Any) -> Outcome:
    return run(method, of, *counts(of), **options)


@pytest.mark.parametrize(
    ("name", "drop"),
    [("prime_rl", lambda d, a: torch.where(a > 0, d > 0.2, d < -0.2)), ("prime_rl_ipo", lambda d, a: d.abs() > 0.1)],
)
def test_prime_rls_own_losses_are_rows_of_the_table(name: str, drop: Any) -> None:
    """-A r over kept tokens plus 1e-3 (log r)^2 over all of them, over the number of tokens."""
    of = batch(spread=0.5)
    current = of.current.clone().requires_grad_()
    ratio, moved = current - of.rollout, (current.exp() - of.rollout.exp()).detach()
    keep = of.mask & ~drop(moved, of.advantages)
    loss = (1e-3 * ratio.square()[of.mask].sum() - (of.advantages * ratio.exp())[keep].sum()) / of.mask.sum()
    wanted = outcome(loss, current, {})
    result = step(of, name)
    assert 0 < result.metrics["offdrift/rejected"].sum() < of.mask.sum()
    torch.testing.assert_close(result[:2], wanted[:2], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["ipo_loss_fn", "IPOLoss"])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_loss_that_is_not_known_is_refused_at_the_first_sequence(
    weighted: bool, name: str, process: Any, monkeypatch: Any, caplog: Any
) -> None:
    if name == "IPOLoss":
        module = import_module("prime_rl.trainer.rl.loss")
        monkeypatch.delattr(module, "ipo_loss_fn")
        monkeypatch.setattr(module, name, IPOLoss, raising=False)
    of = batch(spread=0.5)
    weights = torch.linspace(0.5, 1.5, 66).view(6, 11) if weighted else None
    with caplog.at_level("INFO", "offdrift.prime-rl"):
        step(of, "token_tis", weights=weights)
    assert f"{name}: loss" in caplog.text
    (hook,) = process
    assert hook.proved
    monkeypatch.setitem(PLANTED, "factor", 1.001)
    hook.proved = False
    with pytest.raises(FrameworkError, match=rf"prime-rl: prime_rl\.trainer\.rl\.loss\.{name} is a loss that"):
        step(of, "token_tis", weights=weights)


def test_a_prime_rl_without_its_ipo_loss_is_named_once(caplog: Any, monkeypatch: Any) -> None:
    monkeypatch.delattr("prime_rl.trainer.rl.loss.ipo_loss_fn")
    step(batch(), "token_tis")
    step(batch(), "token_tis")
    assert caplog.text.count("ipo_loss_fn is not") == 1


def test_what_score_centering_hands_over_is_refused_by_name() -> None:
    """Log-probs of the sampler's whole mask, which the newest `LossInputs` have where that is on."""
    of = batch(spread=0.5)
    fields = (of.current[0], of.rollout[0], None, of.advantages[0], of.mask[0])
    given = type("Newer", (LossInputs,), {})(*fields)
    given.trainer_mask_logprobs = None
    prime_rl.loss(given, method="token_tis", on_idle="warn")
    given.trainer_mask_logprobs = of.current[0][:, None]
    with pytest.raises(FrameworkError, match="prime-rl passes trainer_mask_logprobs="):
        prime_rl.loss(given, method="token_tis", on_idle="warn")


def test_the_current_policy_may_stand_for_the_old_one() -> None:
    of, served = batch(3, 8), 0
    of = replace(of, old=of.current)
    with pytest.raises(EvidenceError, match=r"logp_old.*old=\"current\""):
        step(of, "icepop")
    for name, row in METHODS.items():
        try:
            result = step(of, name, old="current", ref=of.old)
        except (EvidenceError, MethodError):
            continue
        served += 1
        if row.penalty is None:
            current = of.current.clone().requires_grad_()
            lp = LogProbs.pack(of.rollout, current, of.old, mask=of.mask)
            own = policy_loss(lp, replace(row, aggregate="token_mean"), lp.like_caller(of.advantages))
            torch.testing.assert_close(result[:2], outcome(own.loss, current, {})[:2], rtol=1e-4, atol=1e-5)
    assert served == 107
    with pytest.raises(MethodError, match="old='yes'"):
        step(of, "icepop", old="yes")


def test_a_penalty_reads_the_reference_and_loss_weights_multiply_token_losses() -> None:
    of = batch()
    one, other = (step(of, "deepseek_v32", old="current", ref=ref).gradient for ref in (of.old, of.current))
    assert int((one != other).sum()) == int(of.mask.sum())
    weights = torch.rand(6, 11, generator=torch.Generator().manual_seed(3)) + 0.5
    weighted, plain = (step(of, "dapo", old="current", weights=w).gradient for w in (weights, None))
    torch.testing.assert_close(weighted, plain * weights, rtol=1e-5, atol=1e-8)
    assert int((plain != 0).sum()) > 5
    # A loss that is not proportional to the advantage takes weights of 1 alone.
    weights = torch.ones(6, 11)
    assert torch.equal(step(of, "prime_rl", weights=weights).gradient, step(of, "prime_rl").gradient)
    weights[0] = 0.5
    with pytest.raises(MethodError, match=r"rl_weights.*not proportional"):
        step(of, "prime_rl", weights=weights)


def test_metrics_are_those_of_every_token() -> None:
    of = batch()
    metrics = step(of, "token_tis").metrics
    drift = (of.current - of.rollout)[of.mask]
    torch.testing.assert_close(metrics["offdrift/full/k3"], drift.expm1() - drift)
    torch.testing.assert_close(metrics["offdrift/weight"], drift.exp().clamp(max=2))
    assert torch.equal(metrics["offdrift/limited"], (drift.exp() > 2).float())
    assert not bool(metrics["offdrift/rejected"].any())
    nothing = step(replace(of, mask=torch.zeros_like(of.mask)), "token_tis").metrics
    assert {name: len(x) for name, x in nothing.items()} == dict.fromkeys(metrics, 0)


def test_configurations_of_the_page_are_read_and_run() -> None:
    blocks = code("prime-rl.md", "toml")
    assert len(blocks) >= 2
    for text in blocks:
        table = tomllib.loads(text)
        loss = table.get("trainer", table)["loss"]
        assert loss["type"] == "custom"
        assert set(loss) <= {"type", "import_path", "kwargs"}
        module, _, name = loss["import_path"].rpartition(".")
        assert getattr(import_module(module), name) is prime_rl.loss
        assert set(loss["kwargs"]) <= set(inspect.signature(prime_rl.loss).parameters)
        json.dumps(loss["kwargs"])
        step(batch(), **{k: v for k, v in loss["kwargs"].items() if k != "record"})
