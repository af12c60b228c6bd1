"""Losses for frameworks that call a function per sequence or per micro-batch.

Such a hook does not know the rest of its optimizer step: a step ends when an optimizer of this process has stepped, and
methods that must see a whole step are refused. Every aggregate is exact where the framework passes the token and
sequence counts of the step; elsewhere the loss is a sum over tokens, which the framework divides.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from offdrift.adapters.base import Adapter, environ, environ_metrics, environ_on_idle, environ_settings
from offdrift.adapters.proof import Loss, prove
from offdrift.adapters.selection import Choice, parse_choice
from offdrift.batch_info import LOGITS, NO_INFO, BatchInfo
from offdrift.correction import Corrected
from offdrift.divergence.evidence import k3
from offdrift.errors import EvidenceError, MethodError
from offdrift.judge import Context
from offdrift.logprobs import LogProbs
from offdrift.loss import PolicyLoss, policy_loss
from offdrift.methods import Method, override
from offdrift.methods import method as row
from offdrift.methods.describe import evidence
from offdrift.methods.load import absolute, in_code
from offdrift.methods.probe import batch as probe_batch
from offdrift.objectives import Reinforce
from offdrift.ratios import RatioName, stopped_log_ratio
from offdrift.records.batch import Logged
from offdrift.segments import Segments

METRIC_SUMS = {
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

INPUTS = {
    "logp_old": "log-probs of the old policy",
    "logp_ref": "log-probs of the reference policy",
    "entropy": "entropies of the old policy",
    "vocab": "the size of the vocabulary",
    "rewards": "rewards",
    "version_lag": "version lags",
    "distributions": "logits of the old and the current policy",
    "divergences": "divergences of whole distributions",
}


def check_served(
    config: HookConfig,
    *,
    has: Collection[str] = (),
    hints: Mapping[str, str] = {},
    folded: bool = False,
    only: Method | None = None,
    whole: bool = False,
) -> None:
    """Raise unless a hook that sees one piece of a step, and `has` these inputs, can serve the method.

    Args:
        has: of the keys of `INPUTS`, what the hook is given besides log-probs of the rollout and the
            current policy.
        hints: ways out, by what is missing.
        folded: whether the framework divides advantages, rather than losses, by its denominators.
        only: what of the method is used; None: all of it.
        whole: whether the hook sees a step at once after all.

    Raises: `EvidenceError` naming what the framework does not hand over; `MethodError` if the method must
        see a whole step, scales the learning rate, or cannot have its denominators in the advantages.

    Example:
        >>> check_served(HookConfig.of("x", "icepop"))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        offdrift.errors.EvidenceError: x hands its hook no log-probs of the old policy (logp_old), ...
    """
    method, framework = only or config.row, config.framework
    needed = {
        "version_lag": "versions" in evidence(method),
        "logp_old": method.needs_old,
        "logp_ref": method.needs_reference,
        "divergences": method.needs_divergences,
    }
    needs = {name for name in INPUTS if name in method.needs or needed.get(name)}
    missing = [name for name in INPUTS if name in needs - set(has)]
    if missing:
        named = " and ".join(f"{INPUTS[name]} ({name})" for name in missing)
        ways_out = {"distributions": LOGITS, **hints}
        hint = next((ways_out[name] for name in missing if name in ways_out), "choose another method")
        raise EvidenceError(f"{framework} hands its hook no {named}, which this method needs: {hint}")
    if (method.needs_whole_step and not whole) or method.lr_scale is not None:
        raise MethodError(
            f"this method acts on a whole step at once ({method.describe()}); {framework} calls its "
            "hook on one piece of a step at a time. Choose a method that decides by token or sequence"
        )
    if folded and not proportional(method):
        raise MethodError(
            f"{framework} has its denominators in the advantages, and the loss of this method "
            f"({method.describe()}) is not proportional to them; choose one that is"
        )


def correction_only(config: HookConfig, *, instead: str, hints: Mapping[str, str] = {}) -> Method:
    """The method's gates and weights, for a hook that keeps the framework's own loss.

    Such a hook is given log-probs of the rollout and of the old policy alone.

    Args:
        instead: the framework's hook that takes whole methods.

    Raises: `MethodError` if there is nothing for the hook to do; `EvidenceError` if a part needs more.

    Example:
        >>> correction_only(HookConfig.of("x", "token_tis"), instead="y")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        offdrift.errors.EvidenceError: x hands this hook log-probs of the rollout and of the old policy, but ...
    """
    name, method = config.method, config.row
    parts = (*method.correction.gates, *method.correction.weights)
    if not parts:
        raise MethodError(
            f"{name} has no gate and no weight, so this hook has nothing to do: use {instead}, or another method"
        )
    for part in parts:
        if part.on != "mismatch" or getattr(part, "advantage", "any") != "any":
            raise EvidenceError(
                f"{config.framework} hands this hook log-probs of the rollout and of the old policy, but no "
                f"current ones and no advantages, which {name} needs for [{part.formula}]: use "
                f'{instead}, or a method on="mismatch"'
            )
    only = Method(
        objective=Reinforce(),
        correction=method.correction,
        anchor=method.anchor,
        aggregate="token_mean",
        gate_scope=method.gate_scope,
    )
    check_served(config, has={"logp_old"}, hints=hints, only=only)
    return only


def proportional(method: Method) -> bool:
    """Whether c times the advantages give c times the loss, for every c > 0.

    Then a framework's weights and denominators can be folded into the advantages.

    Example:
        >>> proportional(row("dapo")), proportional(row("prime_rl"))
        (True, False)
    """
    batch = probe_batch()
    one, three = (method.objective(batch.logprobs, c * batch.advantages, batch.batch_info) for c in (1, 3))
    plain = one.regularizer is None and method.penalty is None
    return plain and torch.allclose(three.loss, 3 * one.loss, rtol=1e-9, atol=1e-12)


MICRO_BATCH_METRICS = {
    name: name.replace("/", "_")
    for name in (
        *("full/k3", "mismatch/k3", "staleness/k3", "weight/mean", "weight/max", "weight/ess_frac"),
        *("gate/drop_frac_token", "gate/drop_frac_seq", "objective/clip_frac_active"),
    )
}
"""Metrics of each micro-batch and what SkyRL and Trinity call them, behind "offdrift/". Always the same names, since
both reduce over ranks name by name; SkyRL averages over micro-batches, and takes the maximum of what ends in `_max`."""


@dataclass(frozen=True)
class HookConfig:
    """Settings of a hook, as plain values that can be sent to other processes."""

    framework: str
    method: str
    settings: str = "{}"
    """JSON."""
    record: str | None = None
    on_idle: str = "error"
    horizon: int | None = None
    """Tokens per sequence that aggregate="fixed" divides by."""
    metrics: str = "main"
    """Metrics to log, of `parse_choice`."""

    @staticmethod
    def of(
        framework: str,
        method: str | None = None,
        settings: Mapping[str, Any] | None = None,
        *,
        record: str | os.PathLike[str] | None = None,
        on_idle: str | None = None,
        horizon: int | None = None,
        metrics: Choice | None = None,
    ) -> HookConfig:
        """Arguments, or the environment (see `base.environ`) for those that are None.

        Args:
            method: a row of `METHODS`, or code: "mine.py:mine".
            settings: single values of the method, as paths for `override`.
            record: folder for log-probs and advantages of the tokens.
            on_idle: "error" or "warn", if a part of the method cannot act.
            horizon: tokens per sequence, for aggregate="fixed".
            metrics: those that are logged, as `Adapter` takes them.

        Raises: `MethodError` if neither names a method, or for an unknown method, setting or metric.
        """
        name = method or environ("METHOD")
        if not name:
            raise MethodError(
                f"{framework}'s hook needs a method: give method= or set OFFDRIFT_METHOD, for instance "
                "OFFDRIFT_METHOD=token_tis; `offdrift methods` lists all rows"
            )
        name = absolute(name) if in_code(name) else name  # the same in every process
        text = json.dumps(dict(environ_settings() if settings is None else settings), sort_keys=True)
        record = record or environ("RECORD")
        folder = None if record is None else os.fspath(record)
        config = HookConfig(framework, name, text, record=folder, on_idle=on_idle or environ_on_idle(), horizon=horizon)
        config = replace(config, metrics=environ_metrics() if metrics is None else parse_choice(metrics))
        _ = config.row  # an unknown setting is an error here, not in another process
        return config

    @property
    def row(self) -> Method:
        """The method, with its settings."""
        return override(row(self.method), json.loads(self.settings))


@functools.cache
def hook_of(config: HookConfig, *, only: Method | None = None, divides: bool = True) -> LossHook:
    """The hook of this configuration in this process.

    Args:
        only: the gates and weights that are used, see `correction_only`; None: the whole method.
        divides: False for a framework that divides a sum over tokens itself.
    """
    method = config.row if only is None else only
    method = method if divides else replace(method, aggregate="token_mean")
    adapter = Adapter(
        method,
        framework=config.framework,
        record=config.record,
        context=Context(method=config.method),
        on_idle=config.on_idle,  # type: ignore[arg-type]
        metrics=config.metrics,
    )
    note = method.describe() if divides else f"{method.describe()}. {config.framework}'s denominators"
    if only is not None:
        parts = "; ".join(part.formula for part in (*only.correction.gates, *only.correction.weights))
        note = f"its {parts}; the objective is {config.framework}'s own"
    adapter.log.info("%s: %s", config.method, note)
    return LossHook(adapter, config.horizon)


class LossHook:
    """An adapter whose steps end when an optimizer of this process has stepped."""

    def __init__(self, adapter: Adapter, horizon: int | None = None) -> None:
        self.adapter = adapter
        self.method = adapter.method
        if self.method.aggregate == "fixed" and not horizon:
            raise MethodError(
                'aggregate="fixed" divides by a number of tokens per sequence; give horizon= (the '
                "longest response), or another aggregate"
            )
        self.proportional = proportional(adapter.method)
        self.step = 0
        """Steps closed in this process."""
        self.metrics: dict[str, float] = {}
        """Those of the last step."""
        self.reached = False
        """Whether the framework called the hook at all, if only on masked tokens."""
        self.proved = False
        """Whether the framework's own loss was held against ours."""
        self._horizon = horizon
        self._pieces: list[dict[str, Tensor]] = []
        self._open = False
        register_optimizer_step_post_hook(lambda *_: self.end_step())

    def loss(
        self,
        logprobs: LogProbs,
        advantages: Float[Tensor, ...],
        *,
        column: Int[Tensor, ...] | None = None,
        tokens: Tensor | float | int = 1.0,
        sequences: Tensor | float | int = 1.0,
        also: Mapping[str, Shaped[Tensor, " n"]] = {},
        batch_info: BatchInfo = NO_INFO,
    ) -> PolicyLoss:
        """This piece's part of the step's loss; parts are added.

        Args:
            advantages: in the framework's shape, as `column` is.
            column: of each token in its row, for the record; None for padded rows.
            tokens: trainable tokens of the whole step; 1 for a framework that divides.
            sequences: sequences of the whole step.
            also: other fields of the record, per trainable token (`tokens`, `rollout_version`).
            batch_info: as `policy_loss` takes it.
        """
        advantages = logprobs.like_caller(advantages)
        divisor = self._divisor(self.method.aggregate, tokens, sequences, advantages.device)
        result = self.adapter.loss(logprobs, advantages, batch_info, normalizer=divisor)
        self._open = True
        if self.adapter.recorder is not None:
            names = ("logp_rollout", "logp_old", "logp")
            fields = {name: getattr(logprobs, name) for name in names}
            if column is None:
                assert logprobs.shape is not None
                column = torch.arange(logprobs.shape[-1], device=advantages.device).expand(logprobs.shape)
            column = logprobs.like_caller(column)
            fields |= {"advantages": advantages, **also, "lengths": logprobs.segments.lengths, "column": column}
            self._pieces.append({k: x.detach() for k, x in fields.items() if x is not None})
        return result

    def plain(self, method: Method, logprobs: LogProbs, advantages: Float[Tensor, ...], **step: Any) -> PolicyLoss:
        """Another method's loss on the same terms as `loss`: nothing is measured, recorded or counted.

        Args: as `loss`; of the others `tokens` and `sequences` are read.
        """
        advantages = logprobs.like_caller(advantages)
        counts = step.get("tokens", 1.0), step.get("sequences", 1.0)
        divisor = self._divisor(method.aggregate, *counts, advantages.device)
        return policy_loss(logprobs, method, advantages, normalizer=divisor)

    def prove(self, name: str, *, native: Loss | None, ours: Loss, at: Tensor) -> None:
        """Once: the framework's own loss and ours with every weight 1, as `proof.prove` compares them."""
        if self.proved:
            return
        self.proved = True  # what is compared may come here again
        try:
            prove(self.adapter.log, self.adapter.framework, name, native=native, ours=ours, at=at)
        except BaseException:
            self.proved = False  # a loop that goes on after an error is refused again
            raise

    def _divisor(self, aggregate: str, tokens: Any, sequences: Any, device: torch.device) -> Tensor:
        count = tokens if aggregate == "token_mean" else sequences
        count = count * self._horizon if aggregate == "fixed" and self._horizon else count
        return torch.as_tensor(count, dtype=torch.float32, device=device)

    def correct(self, logprobs: LogProbs, *, applied: bool = True) -> Corrected:
        """Gates and weights of the method, as `Adapter.correct`, for a framework that keeps its own loss."""
        self._open = True
        return self.adapter.correct(logprobs, applied=applied)

    def end_step(self) -> None:
        """Close the step, if this process saw any of it."""
        if not self._open:
            return
        self.step, self._open = self.step + 1, False
        pieces, self._pieces = self._pieces, []
        recorder = self.adapter.recorder
        try:
            if pieces and recorder is not None:
                fields = {k: torch.cat([piece[k] for piece in pieces]) for k in pieces[0]}
                lengths, column = fields.pop("lengths"), fields.pop("column")
                cuts = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
                first = column[cuts[:-1].clamp(max=len(column) - 1)]
                last = column[(cuts[1:] - 1).clamp(min=0)]
                batch = Logged(
                    cu_seqlens=cuts,
                    step=torch.full_like(lengths, self.step),
                    row=torch.arange(1, len(lengths) + 1, device=lengths.device),
                    response_lengths=(last - first + 1).where(lengths > 0, 0),
                    position=column - Segments(cuts).spread(first),  # counted from the row's first token
                    **fields,  # type: ignore[arg-type]
                )
                recorder.add(batch)
        finally:  # the next step begins empty, even if the disk failed
            self.metrics = self.adapter.end_step(self.step)
        self.adapter.log.debug("step %d: %s", self.step, self.metrics)


def decision_names(on: RatioName) -> list[str]:
    """The names of `decisions`, the same in every piece of a step."""
    return [f"offdrift/{name}" for name in (f"{on}/k3", "weight", "rejected", "limited")]


def decisions(logprobs: LogProbs, corrected: Corrected, *, on: RatioName) -> dict[str, Float[Tensor, " n"]]:
    """Numbers that a framework averages over tokens: k3 of the ratio, weight, rejected, limited. No gradient."""
    drift, weight = k3(stopped_log_ratio(logprobs, on=on)), corrected.weight
    values = (drift, weight, (~corrected.keep).to(weight.dtype), corrected.limited.to(weight.dtype))
    return dict(zip(decision_names(on), values, strict=True))


def metric_parts(result: PolicyLoss, tokens: Tensor | float | int) -> dict[str, float]:
    """Metrics of one piece as parts of the step's `tokens`: to be added over pieces and ranks."""
    numbers, n = result.stats.to_host(), max(float(tokens), 1.0)
    parts = {name: numbers[key] / n for name, key in METRIC_SUMS.items() if key in numbers}
    parts[DROPPED] = (numbers["n"] - numbers["gate/kept_tokens"]) / n
    return parts


def zero_loss(x: Float[Tensor, ...]) -> Float[Tensor, ""]:
    """Zero, with a graph to `x` that brings no NaN: every rank must run its backward pass."""
    return x.reshape(-1)[:0].sum()


def require_logprobs(
    x: Float[Tensor, " *shape"] | None,
    mask: Shaped[Tensor, " *shape"],
    name: str,
    way_out: str,
    *,
    beside: Float[Tensor, " *shape"],
) -> Float[Tensor, " *shape"]:
    """The log-probs, unless they are absent or a placeholder of zeros.

    A policy that is sure of every token has zeros, too: they are a placeholder where the log-probs of
    another policy on the same tokens (`beside`) sum to -1 nat or less.

    Raises: `EvidenceError` with the way out.
    """
    at = mask != 0
    if x is None:
        raise EvidenceError(f"{name} are missing; {way_out}")
    if not bool((x[at] != 0).any()) and float(beside.detach()[at].sum()) <= -1:
        raise EvidenceError(f"{name} are 0 at every trainable token, a placeholder; {way_out}")
    return x
