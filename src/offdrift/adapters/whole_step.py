"""What hooks share whose framework tells them how much the whole step holds.

Token and sequence counts over all micro-batches and ranks are what a loss needs to be the same however
a step was split: with them, every aggregate is exact, and shares of metrics can be added up.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from offdrift.adapters import environment
from offdrift.adapters.base import Adapter
from offdrift.adapters.hooks import Attached, chosen
from offdrift.errors import EvidenceError, MethodError
from offdrift.judge import Context
from offdrift.logprobs import LogProbs
from offdrift.loss import PolicyLoss
from offdrift.methods import Method

SHARES = {
    "full/k3": "full/k3",
    "mismatch/k3": "mismatch/k3",
    "staleness/k3": "staleness/k3",
    "weight/mean": "weight/w",
    "weight/cap_frac": "weight/limited",
    "objective/clip_frac_active": "objective/clipped",
    "divergence/kl_rollout_current_mean": "divergence/kl_rollout_current",
    "divergence/tv_rollout_current_mean": "divergence/tv_rollout_current",
}
"""Metrics that are a sum over tokens divided by their number, and the sum."""

DROPPED = "gate/drop_frac_token"


@dataclass(frozen=True)
class Choice:
    """A method as a hook was asked for it: a value that can travel to other processes."""

    method: str
    settings: str = "{}"
    """JSON."""
    record: str | None = None
    on_idle: str = "error"
    horizon: int | None = None
    """Tokens per sequence that aggregate="fixed" divides by."""

    @staticmethod
    def of(
        framework: str,
        method: str | None,
        settings: Mapping[str, Any] | None,
        record: str | os.PathLike[str] | None,
        on_idle: str | None,
        horizon: int | None = None,
    ) -> Choice:
        """What is not given is read from the environment, see `adapter_from_env`."""
        name, _ = chosen(framework, method, settings)
        if settings is None:
            settings = environment.settings()
        record = record or environment.record()
        on_idle = on_idle or environment.on_idle()
        text = json.dumps(dict(settings), sort_keys=True)
        return Choice(name, text, None if record is None else os.fspath(record), on_idle, horizon)

    @property
    def row(self) -> Method:
        """The method, with its settings."""
        return chosen("", self.method, json.loads(self.settings))[1]

    def attach(self, framework: str, method: Method | None = None) -> WholeStep:
        """The method at work in this process."""
        adapter = Adapter(
            self.row if method is None else method,
            framework=framework,
            record=self.record,
            context=Context(method=self.method),
            on_idle=self.on_idle,  # type: ignore[arg-type]
        )
        adapter.log.info("%s: %s", self.method, adapter.method.describe())
        return WholeStep(adapter, self.horizon)


class WholeStep(Attached):
    """An adapter that knows the whole step's counts; a step ends when an optimizer has stepped."""

    def __init__(self, adapter: Adapter, horizon: int | None = None) -> None:
        super().__init__(adapter)
        if self.method.aggregate == "fixed" and not horizon:
            raise MethodError(
                'aggregate="fixed" divides by a number of tokens per sequence; give horizon= (the '
                "longest response), or another aggregate"
            )
        self._horizon = horizon

    def push(
        self,
        logprobs: LogProbs,
        advantages: Float[Tensor, " n"],
        place: Int[Tensor, " n"],
        *,
        tokens: Tensor | float | int,
        sequences: Tensor | float | int,
        also: Mapping[str, Shaped[Tensor, " n"]] = {},
        **known: Any,
    ) -> PolicyLoss:
        """This piece's part of the step's loss; parts are added.

        Args:
            place: of each token in its row, for the record.
            tokens: trainable tokens of the whole step.
            sequences: sequences of the whole step.
            also: other fields of the record, per token (`tokens`, `rollout_version`).
            known: other arguments of `policy_loss`.
        """
        how = self.method.aggregate
        count = tokens if how == "token_mean" else sequences
        count = count * self._horizon if how == "fixed" and self._horizon else count
        divisor = torch.as_tensor(count, dtype=torch.float32, device=advantages.device)
        result = self.adapter.loss(logprobs, advantages, normalizer=divisor, **known)
        self._keep(logprobs, advantages, place)
        if self._pieces and also:
            last = self._pieces[-1]
            self._pieces[-1] = replace(last, fields={**last.fields, **also})
        return result


def shares(pushed: PolicyLoss | None, tokens: Tensor | float | int) -> dict[str, float]:
    """Metrics of one piece as parts of the step's: to be added over pieces and ranks.

    Args:
        pushed: None if the piece has no trainable token; its share of everything is 0.
        tokens: trainable tokens of the whole step.
    """
    if pushed is None:
        return {}
    numbers, n = pushed.stats.to_host(), max(float(tokens), 1.0)
    found = {name: numbers[key] / n for name, key in SHARES.items() if key in numbers}
    found[DROPPED] = (numbers["n"] - numbers["gate/kept_tokens"]) / n
    return found


def columns(mask: Shaped[Tensor, "b t"], logprobs: LogProbs) -> Int[Tensor, " n"]:
    """The column of each trainable token of a padded batch."""
    return logprobs.like_caller(torch.arange(mask.shape[1], device=mask.device).expand(mask.shape))


def nothing(x: Float[Tensor, ...]) -> Float[Tensor, ""]:
    """Zero, with a graph to `x` that brings no NaN: every rank must run its backward pass."""
    return x.reshape(-1)[:0].sum()


def recorded(
    x: Float[Tensor, " *shape"] | None,
    mask: Shaped[Tensor, " *shape"],
    name: str,
    way_out: str,
    *,
    beside: Float[Tensor, " *shape"],
) -> Float[Tensor, " *shape"]:
    """The log-probs, unless they are absent or the zeros that stand for log-probs nobody computed.

    A policy that is sure of every token has zeros, too; another one that has -1 nat or less in all on
    the same tokens (`beside`) tells the two apart.

    Raises: `EvidenceError` with the way out.
    """
    if x is None:
        raise EvidenceError(f"{name} are missing; {way_out}")
    at = mask != 0
    if not bool((x[at] != 0).any()) and float(beside.detach()[at].sum()) <= -1:
        raise EvidenceError(f"{name} are 0 at every trainable token, a placeholder; {way_out}")
    return x
