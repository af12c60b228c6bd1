"""What hooks that are plain functions share: which methods they can serve, where a step ends, and
what they record.

A framework that calls a function per sequence or per micro-batch says neither which step this is nor
what the rest of the step looks like, and divides by denominators of its own. So a step ends when an
optimizer of this process has stepped, methods that must see a whole step are refused, and losses are
sums over tokens that the framework divides.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from offdrift.adapters import environment
from offdrift.adapters.base import Adapter
from offdrift.correction import Corrected
from offdrift.divergence.sampled import k3
from offdrift.errors import EvidenceError, MethodError
from offdrift.judge import Context
from offdrift.logprobs import LogProbs
from offdrift.loss import PolicyLoss
from offdrift.methods import Method, override
from offdrift.methods import method as row
from offdrift.methods.describe import evidence
from offdrift.methods.probe import batch as probe_batch
from offdrift.objectives import Reinforce
from offdrift.ratios import RatioName, stopped_log_ratio
from offdrift.records.batch import Logged
from offdrift.segments import Segments

BY_TOKEN = ("logp_rollout", "logp_old", "logp", "advantages")
ASKED = {
    "logp_old": "log-probs of the old policy",
    "logp_ref": "log-probs of the reference policy",
    "entropy": "entropies of the old policy",
    "vocab": "the size of the vocabulary",
    "rewards": "rewards",
    "version_lag": "version lags",
    "divergences": "divergences of whole distributions",
}


def check_served(
    method: Method,
    *,
    framework: str,
    has: Collection[str] = (),
    hints: Mapping[str, str] = {},
    folded: bool = False,
) -> None:
    """Raise unless a hook that sees one piece of a step, and `has` these inputs, can serve the method.

    Args:
        has: of the keys of `ASKED`, what the hook is given besides log-probs of the rollout and the
            current policy.
        hints: ways out, by what is missing.
        folded: whether the framework divides advantages, rather than losses, by its denominators.

    Raises:
        EvidenceError: naming what the framework does not hand over.
        MethodError: if the method must see a whole step, scales the learning rate, or cannot have
            its denominators in the advantages.

    Example:
        >>> check_served(row("icepop"), framework="x")
        Traceback (most recent call last):
        offdrift.errors.EvidenceError: x hands its hook no log-probs of the old policy (logp_old), which this method needs: choose another method
    """
    wanted = set(method.needs)
    wanted |= {"version_lag"} if "versions" in evidence(method) else set()
    wanted |= {"logp_old"} if method.needs_old else set()
    wanted |= {"logp_ref"} if method.penalty is not None else set()
    wanted |= {"divergences"} if method.needs_divergences else set()
    missing = [name for name in ASKED if name in wanted - set(has)]
    if missing:
        named = " and ".join(f"{ASKED[name]} ({name})" for name in missing)
        hint = next((hints[name] for name in missing if name in hints), "choose another method")
        raise EvidenceError(
            f"{framework} hands its hook no {named}, which this method needs: {hint}"
        )
    if method.looks_ahead or method.lr_scale is not None:
        raise MethodError(
            f"this method acts on a whole step at once ({method.describe()}); {framework} calls its "
            "hook on one piece of a step at a time. Choose a method that decides by token or sequence"
        )
    if folded and not proportional(method):
        raise MethodError(
            f"{framework} has its denominators in the advantages, and the loss of this method "
            f"({method.describe()}) is not proportional to them; choose one that is"
        )


def correction_alone(
    name: str, method: Method, *, framework: str, instead: str, hints: Mapping[str, str] = {}
) -> Method:
    """The method's gates and weights, for a hook that is given log-probs of the rollout and of the old
    policy alone, and keeps the framework's own loss.

    Args:
        name: of the method's row.
        instead: the framework's hook that takes whole methods.

    Raises: `MethodError` if there is nothing for the hook to do; `EvidenceError` if a part needs more.

    Example:
        >>> correction_alone("token_tis", row("token_tis"), framework="x", instead="y")
        Traceback (most recent call last):
        offdrift.errors.EvidenceError: x hands this hook log-probs of the rollout and of the old policy, but no current ones and no advantages, which token_tis needs for [weight token ratio(full), truncate above 2]: use y, or a method on="mismatch"
    """
    parts = (*method.correction.gates, *method.correction.weights)
    if not parts:
        raise MethodError(
            f"{name} has no gate and no weight, so this hook has nothing to do: use {instead}, or "
            "another method"
        )
    for part in parts:
        if part.on != "mismatch" or getattr(part, "advantage", "any") != "any":
            raise EvidenceError(
                f"{framework} hands this hook log-probs of the rollout and of the old policy, but no "
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
    check_served(only, framework=framework, has={"logp_old"}, hints=hints)
    return only


def proportional(method: Method) -> bool:
    """Whether c times the advantages give c times the loss, for every c > 0.

    Where they do, weights and denominators of a framework can be folded into the advantages.

    Example:
        >>> proportional(row("dapo")), proportional(row("prime_rl"))
        (True, False)
    """
    given = probe_batch()
    one, three = (
        method.objective(given.logprobs, c * given.advantages, given.facts) for c in (1, 3)
    )
    plain = one.regularizer is None and method.penalty is None
    return plain and torch.allclose(three.loss, 3 * one.loss, rtol=1e-9, atol=1e-12)


def chosen(
    framework: str, method: str | None = None, settings: Mapping[str, Any] | None = None
) -> tuple[str, Method]:
    """The method that arguments name, or else the environment (see `adapter_from_env`).

    Raises: `MethodError` if neither names one.
    """
    name = method or environment.method()
    if not name:
        raise MethodError(
            f"{framework}'s hook needs a method: give method= or set OFFDRIFT_METHOD, for instance "
            "OFFDRIFT_METHOD=token_tis; `offdrift methods` lists all rows"
        )
    if settings is None:
        settings = environment.settings()
    return name, override(row(name), settings)


def attach(
    framework: str,
    name: str,
    method: Method,
    *,
    record: str | None = None,
    on_idle: str | None = None,
    said: str = "",
) -> Attached:
    """The method as a hook whose loss is a sum over tokens: the framework divides.

    Args:
        name: of its row.
        said: what of the method is used, for the log; all of it unless given.
    """
    adapter = Adapter(
        replace(method, aggregate="token_mean"),
        framework=framework,
        record=record,
        context=Context(method=name),
        on_idle=on_idle or "error",  # type: ignore[arg-type]
    )
    adapter.log.info("%s: %s. %s's denominators", name, said or method.describe(), framework)
    return Attached(adapter)


class Attached:
    """An adapter whose steps end when an optimizer of this process has stepped."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.method = adapter.method
        self.proportional = proportional(adapter.method)
        self.step = 0
        """Steps closed in this process."""
        self.metrics: dict[str, float] = {}
        """Those of the last step."""
        self.reached = False
        """Whether the framework called the hook at all, if only on masked tokens."""
        self._pieces: list[_Piece] = []
        self._seen = False
        register_optimizer_step_post_hook(lambda *_: self.end_step())

    def loss(
        self, logprobs: LogProbs, advantages: Float[Tensor, " n"], place: Int[Tensor, " n"]
    ) -> PolicyLoss:
        """The sum of the method's token losses.

        Args:
            place: of each token in its row, for the record.
        """
        result = self.adapter.loss(logprobs, advantages, normalizer=1.0)
        self._keep(logprobs, advantages, place)
        return result

    def correct(self, logprobs: LogProbs, *, applied: bool = True) -> Corrected:
        """Gates and weights of the method, for a framework that keeps its own loss.

        Args:
            applied: False if the framework measures with it and changes nothing.
        """
        self._seen = True
        return self.adapter.correct(logprobs, applied=applied)

    def end_step(self) -> None:
        """Close the step, if this process saw any of it."""
        if not self._seen:
            return
        self.step, self._seen = self.step + 1, False
        pieces, self._pieces = self._pieces, []
        try:
            if pieces:
                self.adapter.record(_logged(pieces, self.step))
        finally:  # whatever the disk says, the next step begins empty
            self.metrics = self.adapter.end_step(self.step)
        self.adapter.log.debug("step %d: %s", self.step, self.metrics)

    def _keep(self, logprobs: LogProbs, advantages: Tensor, place: Tensor) -> None:
        self._seen = True
        if self.adapter.records:
            given = {**vars(logprobs), "advantages": advantages}
            fields = {k: given[k].detach() for k in BY_TOKEN if given[k] is not None}
            self._pieces.append(_Piece(fields, logprobs.segments.lengths, place))


def decisions(
    logprobs: LogProbs, corrected: Corrected, *, on: RatioName
) -> dict[str, Float[Tensor, " n"]]:
    """What a framework can average over tokens: the raw drift, and what was decided about it.

    Gradient: none.
    """
    drift, weight = k3(stopped_log_ratio(logprobs, on=on)), corrected.weight
    values = (drift, weight, (~corrected.keep).to(weight.dtype), corrected.limited.to(weight.dtype))
    return dict(zip(decision_names(on), values, strict=True))


def decision_names(on: RatioName) -> list[str]:
    """The names of `decisions`, the same in every piece of a step."""
    return [f"offdrift/{name}" for name in (f"{on}/k3", "weight", "rejected", "limited")]


@dataclass(frozen=True)
class _Piece:
    """What one call saw, kept until the step ends."""

    fields: Mapping[str, Tensor]
    lengths: Tensor
    place: Tensor


def _logged(pieces: list[_Piece], step: int) -> Logged:
    """The pieces of a step as one batch; places count from each row's first token."""
    fields = {k: torch.cat([p.fields[k] for p in pieces]) for k in pieces[0].fields}
    lengths = torch.cat([p.lengths for p in pieces])
    place = torch.cat([p.place for p in pieces])
    cuts = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    segments = Segments(cuts)
    end = len(place) - 1
    first, last = place[cuts[:-1].clamp(max=end)], place[(cuts[1:] - 1).clamp(min=0)]
    return Logged(
        cu_seqlens=cuts,
        step=torch.full_like(lengths, step),
        row=torch.arange(1, len(lengths) + 1, device=lengths.device),
        response_lengths=(last - first + 1).where(lengths > 0, 0),
        position=place - segments.spread(first),
        **fields,  # type: ignore[arg-type]
    )
