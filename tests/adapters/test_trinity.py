"""Trinity's policy loss, against the contract of Trinity-RFT 0.6.0.

The stand-in is written from that contract: a class by its path, made with the backend and the arguments of the
configuration, pickled to workers; columns by verl's names; means over the micro-batch. The wheel's own classes run in
tests/foreign/test_built_on.py.
"""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from offdrift.adapters import hooks
from offdrift.adapters.contrib import trinity
from offdrift.errors import FrameworkError, LivenessError, MethodError
from tests.adapters.hooked import Batch, Framework, Outcome, batch, counts, install, outcome, ppo, rows

PLANTED = {"factor": 1.0}
"""What the stand-in does beside the contract."""


def mean(losses: Tensor, mask: Tensor, mode: str) -> Tensor:
    """Trinity's means of one micro-batch."""
    losses = (losses * mask).where(mask, 0.0)
    per_row = losses.sum(-1)
    return {
        "token-mean": lambda: losses.sum() / (mask.sum() + 1e-8),
        "seq-mean-token-sum": lambda: per_row.mean(),
        "seq-mean-token-mean": lambda: (per_row / (mask.sum(-1) + 1e-8)).mean(),
        "seq-mean-token-sum-norm": lambda: losses.sum() / (mask.shape[-1] + 1e-8),
    }[mode]()


class PPO:
    """Trinity's own loss, as `PPOPolicyLossFn` is called."""

    def __init__(self, backend: str, clip_range: float, loss_agg_mode: str) -> None:
        assert backend == "verl"
        self.clip, self.mode = clip_range, loss_agg_mode

    def __call__(self, logprob: Tensor, **columns: Tensor) -> tuple[Tensor, dict[str, float]]:
        old, advantages, mask = (columns[name] for name in ("old_log_probs", "advantages", "response_mask"))
        losses = ppo(logprob, old, advantages, low=self.clip, high=self.clip, dual=3.0)
        return PLANTED["factor"] * mean(losses, mask, self.mode), {}


@contextmanager
def stand_in(monkeypatch: pytest.MonkeyPatch, version: str = "0.6.0") -> Iterator[None]:
    install(monkeypatch, version, {trinity.PPO: {"PPOPolicyLossFn": PPO}})
    yield


def loss_of(method: str | None, mode: str = "token-mean", **options: Any) -> trinity.TrinityLoss:
    """As Trinity makes it, at the other end of a pickle."""
    made = trinity.TrinityLoss(
        backend="verl", method=method, loss_agg_mode=mode, **{"on_idle": "warn", "settings": {}, **options}
    )
    return pickle.loads(pickle.dumps(made))


def pushed(loss: trinity.TrinityLoss, of: Batch, scale: float = 1.0) -> Outcome:
    """One micro-batch; `scale` makes its mean a part of a larger one's."""
    current = of.current.clone().requires_grad_()
    columns = {"old_log_probs": of.old, "rollout_log_probs": of.rollout, "advantages": of.advantages}
    assert set(columns) == set(loss.select_keys)
    value, metrics = loss(logprob=current, response_mask=of.mask, **columns)
    assert all(type(x) is float for x in metrics.values())
    return outcome(value * scale, current, metrics)


def run(method: str | None, of: Batch, tokens: float, sequences: float = 1, **options: Any) -> Outcome:
    return pushed(loss_of(method, **options), of, float(of.mask.sum()) / tokens)


FRAMEWORK = Framework("trinity", stand_in, run, served=106)


@pytest.fixture(autouse=True)
def framework(monkeypatch: pytest.MonkeyPatch, process: Any) -> Iterator[None]:
    with stand_in(monkeypatch):
        yield


@pytest.mark.parametrize("mode", sorted(trinity.AGGREGATES))
def test_gradients_of_trinitys_own_loss_under_each_of_its_means(mode: str) -> None:
    of = batch(spread=0.6)
    ours = pushed(loss_of("grpo", mode, settings={"objective.dual_clip": 3.0}), of)
    current = of.current.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(mean(ppo(current, of.old, of.advantages, dual=3.0), of.mask, mode), current)
    assert int((ours.gradient != 0).sum()) > 10
    torch.testing.assert_close(ours.gradient, wanted, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("mode", sorted(trinity.AGGREGATES))
def test_a_loss_that_is_not_known_is_refused_at_the_first_batch(
    mode: str, monkeypatch: pytest.MonkeyPatch, process: list[hooks.LossHook], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "offdrift.trinity"):
        pushed(loss_of("decoupled_ppo", mode), batch())
    assert f"PPOPolicyLossFn with loss_agg_mode='{mode}': loss" in caplog.text
    monkeypatch.setitem(PLANTED, "factor", 1.001)
    pushed(loss_of("decoupled_ppo", mode), batch())  # once per process
    process[-1].proved = False
    with pytest.raises(FrameworkError, match=r"trinity: .*PPOPolicyLossFn with .* is a loss"):
        pushed(loss_of("decoupled_ppo", mode), batch())


def test_one_engines_log_probs_for_two_are_refused() -> None:
    """As `bypass_old_logprobs` hands them over, which is Trinity's default."""
    of = batch()
    bypassed = replace(of, old=of.rollout)
    with pytest.raises(LivenessError, match="bypass_old_logprobs=false"):
        pushed(loss_of("decoupled_ppo", on_idle="error"), bypassed)
    for method in ("token_tis", "dapo"):  # on the full ratio, and on the old policy, which is the rollout's here
        assert int((pushed(loss_of(method, on_idle="error"), bypassed).gradient != 0).sum()) > 10


def test_what_the_arguments_cannot_mean_is_refused() -> None:
    with pytest.raises(MethodError, match="trainer_type: verl"):
        trinity.TrinityLoss("tinker", method="grpo", loss_agg_mode="token-mean")
    with pytest.raises(MethodError, match="needs loss_agg_mode"):
        trinity.TrinityLoss(method="grpo")
    with pytest.raises(MethodError, match="policy_loss_fn_args has clip_range, which other losses"):
        loss_of("grpo", clip_range=0.2)
    with pytest.raises(MethodError, match="loss_agg_mode='token-max'"):
        loss_of("grpo", "token-max")
    with pytest.raises(MethodError, match="OFFDRIFT_METHOD"):
        trinity.TrinityLoss(**trinity.TrinityLoss.default_args())


def test_metrics_have_the_same_keys_in_every_micro_batch() -> None:
    of, loss = batch(), loss_of("decoupled_geo")
    parts = [pushed(loss, rows(of, [i])).metrics for i in range(6)]
    assert {tuple(sorted(m)) for m in parts} == {tuple(sorted(parts[0]))}
    assert set(parts[-1].values()) == {0.0}  # the last row is masked throughout
    drift = (of.current - of.rollout)[:1][of.mask[:1]]
    assert parts[0]["offdrift/full_k3"] == pytest.approx(float((drift.expm1() - drift).mean()), rel=1e-5)
    assert counts(of)[0] > 10
