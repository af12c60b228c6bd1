"""What the gates, weights and clips of methods decide about a logged batch; each part is evaluated once.

Parts are frozen, so equal parts of different methods are one key. What a part cannot decide is a sentence, not an
exception: a log that lacks something still answers the rest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from offdrift.batch_info import BatchInfo
from offdrift.correction.weight import Weighted
from offdrift.divergence.evidence import Divergence
from offdrift.errors import EvidenceError, OffdriftError
from offdrift.logprobs import LogProbs
from offdrift.methods import METHODS, Method
from offdrift.methods.probe import batch as probe
from offdrift.objectives import Objective
from offdrift.records.batch import Logged

OBSERVERS: frozenset[Any] = frozenset(p for row in METHODS.values() for p in row.observers)
"""Parts that look at a whole step."""


@dataclass(frozen=True, eq=False)
class View:
    """A logged batch as parts of methods take it."""

    batch: Logged
    first_update: bool = False
    """Whether the old policy stands in for the current one."""

    @cached_property
    def logprobs(self) -> LogProbs:
        """The batch packed and validated; without the rollout policy's, the trainer's two."""
        return self.batch.trained() if self.batch.logp_rollout is None else self.batch.logprobs()

    @cached_property
    def batch_info(self) -> BatchInfo:
        """What methods may read of the batch beside its log-probs."""
        logged = self.batch
        exact = {name: Divergence.exact(name, x) for name, x in logged.divergences.items()}
        return BatchInfo(divergences=exact, entropy=logged.entropy, rewards=logged.rewards, version_lag=logged.lag)

    @cached_property
    def steps(self) -> list[tuple[Int[Tensor, " k"], View]]:
        """Each step's tokens, and the step as a view of its own."""
        step = self.batch.step
        sequences = [(step == s).nonzero().squeeze(-1) for s in step.unique()]
        if len(sequences) == 1:
            return [(torch.arange(self.batch.num_tokens), self)]
        parts = [(self.batch.segments.rows(which), which) for which in sequences]
        return [(rows, replace(self, batch=self.batch.select(which))) for rows, which in parts if len(rows)]

    def call(self, method: Method, function: Callable[..., Any]) -> Any:
        """The result of a part on this batch, as a method with its anchor hands it over."""
        logprobs, batch_info = self.logprobs, self.batch_info
        if method.anchor is not None:
            logprobs = method.anchor(logprobs, batch_info)
        return function(logprobs, self.batch.advantages, batch_info)

    def call_by_step(self, method: Method, function: Callable[..., Any]) -> Any:
        """The same for each step alone, put together in the order of the tokens."""
        results = [(rows, step.call(method, function)) for rows, step in self.steps]
        rows = torch.cat([r for r, _ in results])

        def joined(parts: list[Tensor]) -> Tensor:
            together = torch.cat(parts)
            return torch.empty_like(together).index_copy_(0, rows, together)

        if not isinstance(results[0][1], Weighted):
            return joined([x for _, x in results])
        weights: list[Weighted] = [w for _, w in results]
        log_weight = joined([w.log_weight() for w in weights])
        return Weighted(joined([w.weight for w in weights]), joined([w.limited for w in weights]), lambda: log_weight)


Decision = tuple[Any, bool] | str
"""What a part decides and whether at the first update; or why it decides nothing."""


class Decided(NamedTuple):
    """What a correction decided; None where it has no part that could."""

    keep: Bool[Tensor, " n"] | None
    weight: Float[Tensor, " n"] | None
    limited: Bool[Tensor, " n"] | None
    first_update: bool
    log_weight: Float[Tensor, " n"] | None = None
    """Logs of the weights, where the guard of `exp` may have changed one of them."""


class Decisions:
    """The decisions of any number of methods about one batch.

    Gates and clips are remembered; of the weights only the last, so ask about methods with equal weights one after the
    other. A reason why not comes from the last view that was tried.
    """

    def __init__(self, batch: Logged) -> None:
        self.views = [View(batch)]
        if batch.logp is None and batch.logp_old is not None:
            self.views.append(View(at_first_update(batch), first_update=True))
        self._answers: dict[Hashable, Decision] = {}
        self._weights: tuple[Hashable, Decided | str] = (None, "")

    def unanswerable(self, method: Method) -> str:
        """Why the log cannot say what a method would have done with it; "" if it may."""
        batch = self.views[0].batch
        if not batch.num_tokens and (batch.pairs or batch.logp_rollout is not None):
            return "the log holds no token that every one of its policies scores"
        parts = (*method.correction.gates, *method.correction.weights, method.objective)
        of_staleness = method.anchor is None and all(part.on == "staleness" for part in parts)
        if batch.logp_rollout is not None or of_staleness:
            return ""
        return "the log holds no log-probs of the rollout policy"

    def correction(self, method: Method) -> Decided | str:
        """What the method's gates and weights decide, or a sentence why they cannot."""
        gates = []
        for gate in method.correction.gates:
            decision = self._once(("gate", gate, method.anchor), method, gate, gate.keep)
            if isinstance(decision, str):
                return decision
            gates.append(decision)
        key = (method.correction.weights, method.anchor)
        if key != self._weights[0]:
            self._weights = (key, self._weighted(method))
        weighted = self._weights[1]
        if isinstance(weighted, str):
            return weighted
        keep = functools.reduce(torch.logical_and, (keep for keep, _ in gates)) if gates else None
        return weighted._replace(keep=keep, first_update=weighted.first_update or any(late for _, late in gates))

    def clipped(self, method: Method) -> tuple[Bool[Tensor, " n"], bool] | None:
        """Tokens whose loss the objective's clip changes, and whether at the first update.

        None if it has no clip, or the log cannot say. At the first update nothing is stale, so a clip
        of staleness says nothing there.
        """
        objective = method.objective
        if not clips(objective):
            return None

        def clipped(logprobs: LogProbs, advantages: Tensor | None, batch_info: BatchInfo) -> Tensor | None:
            if advantages is None:
                raise EvidenceError("what a clip does depends on the advantages; log them")
            return objective(logprobs, advantages, batch_info).clipped

        decision = self._once(("clip", objective, method.anchor), method, objective, clipped)
        if isinstance(decision, str) or (decision[1] and objective.on == "staleness"):
            return None
        return decision

    def _weighted(self, method: Method) -> Decided | str:
        """The product of the method's weights, and what their limits touched."""
        refused = self._ask(method, None, lambda *arguments: None)
        if isinstance(refused, str):
            return refused  # nothing is said about a log whose log-probs are no log-probs
        decisions = []
        for part in method.correction.weights:
            decision = self._ask(method, part, part)
            if isinstance(decision, str):
                return decision
            decisions.append(decision)
        if not decisions:
            return Decided(None, None, None, False)
        parts: list[Weighted] = [w for w, _ in decisions]
        guarded = any(w.guarded() for w in parts)
        return Decided(
            keep=None,
            weight=functools.reduce(torch.mul, (w.weight for w in parts)),
            limited=functools.reduce(torch.logical_or, (w.limited for w in parts)),
            first_update=any(late for _, late in decisions),
            log_weight=functools.reduce(torch.add, (w.log_weight() for w in parts)) if guarded else None,
        )

    def _once(self, key: Hashable, method: Method, part: Any, call: Callable[..., Any]) -> Decision:
        if key not in self._answers:
            self._answers[key] = self._ask(method, part, call)
        return self._answers[key]

    def _ask(self, method: Method, part: Any, call: Callable[..., Any]) -> Decision:
        reason = ""
        for view in self.views:
            try:
                whole = part not in OBSERVERS or len(view.steps) == 1
                return (view.call if whole else view.call_by_step)(method, call), view.first_update
            except OffdriftError as e:
                reason = str(e)
        return reason


def at_first_update(batch: Logged) -> Logged:
    """The batch with its old policy as the current one, as at the first update on it."""
    divergences = {
        name.replace("_old", "_current"): x for name, x in batch.divergences.items() if name.endswith("_rollout_old")
    }
    return replace(batch, logp=batch.logp_old, divergences={**divergences, **batch.divergences})


@cache
def clips(objective: Objective) -> bool:
    """Whether an objective reports a clip at all, tried on a small batch."""
    tiny = probe()
    return objective(tiny.logprobs, tiny.advantages, tiny.batch_info).clipped is not None
