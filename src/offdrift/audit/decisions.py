"""What the parts of methods decide about a logged batch, each asked once.

A part is a frozen dataclass, so equal parts of different methods are one key. What a part cannot
decide is a sentence, not an exception: a log that lacks something still answers the rest.
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
        """The batch through the library's door; without the rollout policy's, the trainer's two."""
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
        found = [(step == s).nonzero().squeeze(-1) for s in step.unique()]
        if len(found) == 1:
            return [(torch.arange(self.batch.num_tokens), self)]
        parts = [(self.batch.segments.rows(which), which) for which in found]
        return [(rows, replace(self, batch=self.batch.select(which))) for rows, which in parts if len(rows)]


_Product = tuple[Tensor | None, Tensor | None, bool, Tensor | None]


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

    Gates and clips are remembered; of the weights only the last, so methods with the same weights
    are best asked one after the other. A reason why not comes from the last view that was tried.
    """

    def __init__(self, batch: Logged) -> None:
        self.views = [View(batch)]
        if batch.logp is None and batch.logp_old is not None:
            self.views.append(View(at_first_update(batch), first_update=True))
        self._gates: dict[Hashable, tuple[Tensor, bool] | str] = {}
        self._clips: dict[Hashable, Any] = {}
        self._weights: tuple[Hashable, Any] = (None, None)

    def unanswerable(self, method: Method) -> str:
        """Why the log cannot say what a method would have done with it; "" if it may."""
        batch = self.views[0].batch
        if not batch.num_tokens and (batch.pairs or batch.logp_rollout is not None):
            return "the log holds no token that every one of its policies scores"
        if batch.logp_rollout is not None or _of_staleness(method):
            return ""
        return "the log holds no log-probs of the rollout policy"

    def correction(self, method: Method) -> Decided | str:
        """What the method's gates and weights decide, or a sentence why they cannot."""
        gates = [self._gate(method, gate) for gate in method.correction.gates]
        for found in (*gates, weighted := self._weighted(method)):
            if isinstance(found, str):
                return found
        keep = None
        for gate in gates:
            assert not isinstance(gate, str)
            keep = gate[0] if keep is None else keep & gate[0]
        assert not isinstance(weighted, str)
        weight, limited, first_update, log_weight = weighted
        late = any(gate[1] for gate in gates)
        return Decided(keep, weight, limited, bool(late or first_update), log_weight)

    def clipped(self, method: Method) -> tuple[Bool[Tensor, " n"], bool] | None:
        """Tokens whose loss the objective's clip changes, and whether at the first update.

        None if it has no clip, or the log cannot say. At the first update nothing is stale, so a clip
        of staleness says nothing there.
        """
        key = (method.objective, method.anchor)
        if key not in self._clips:
            found = self._clip(method) if clips(method.objective) else ""
            mute = isinstance(found, str) or (found[1] and method.objective.on == "staleness")
            self._clips[key] = None if mute else found
        return self._clips[key]

    def _gate(self, method: Method, gate: Any) -> tuple[Tensor, bool] | str:
        key = (gate, method.anchor)
        if key not in self._gates:
            self._gates[key] = self._ask(method, gate, gate.keep)
        return self._gates[key]

    def _weighted(self, method: Method) -> _Product | str:
        key = (method.correction.weights, method.anchor)
        if key != self._weights[0]:
            self._weights = (key, self._product(method))
        return self._weights[1]

    def _product(self, method: Method) -> _Product | str:
        """The product of the method's weights, and what their limits touched."""
        late, parts = False, []
        if isinstance(found := self._ask(method, None, lambda *given: None), str):
            return found  # nothing is said about a log whose log-probs are no log-probs
        for part in method.correction.weights:
            found = self._ask(method, part, part)
            if isinstance(found, str):
                return found
            parts.append(found[0])
            late |= found[1]
        if not parts:
            return None, None, late, None
        weight = functools.reduce(torch.mul, (w.weight for w in parts))
        limited = functools.reduce(torch.logical_or, (w.limited for w in parts))
        guarded = any(w.guarded() for w in parts)
        if not guarded:
            return weight, limited, late, None
        return weight, limited, late, functools.reduce(torch.add, (w.log_weight() for w in parts))

    def _clip(self, method: Method) -> tuple[Tensor, bool] | str:
        objective = method.objective

        def clipped(logprobs: LogProbs, advantages: Tensor | None, batch_info: BatchInfo) -> Tensor | None:
            if advantages is None:
                raise EvidenceError("what a clip does depends on the advantages; log them")
            return objective(logprobs, advantages, batch_info).clipped

        return self._ask(method, objective, clipped)

    def _ask(self, method: Method, part: Any, call: Callable[..., Any]) -> tuple[Any, bool] | str:
        """What a part says, and whether at the first update; or why it says nothing."""
        reason = ""
        for view in self.views:
            try:
                return _asked(view, method, part, call), view.first_update
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
def _of_staleness(method: Method) -> bool:
    """Whether a method compares the trainer's two policies alone."""
    parts = (*method.correction.gates, *method.correction.weights, method.objective)
    return method.anchor is None and {part.on for part in parts} == {"staleness"}


@cache
def clips(objective: Objective) -> bool:
    """Whether an objective reports a clip at all, tried on a small batch."""
    given = probe()
    return objective(given.logprobs, given.advantages, given.batch_info).clipped is not None


def _asked(view: View, method: Method, part: Any, call: Callable[..., Any]) -> Any:
    if part not in OBSERVERS or len(view.steps) == 1:
        return _called(view, method, call)
    found = [(rows, _called(step, method, call)) for rows, step in view.steps]
    rows = torch.cat([r for r, _ in found])
    if not isinstance(found[0][1], Weighted):
        return _placed([x for _, x in found], rows)
    weighted: list[Weighted] = [w for _, w in found]
    log_weight = _placed([w.log_weight() for w in weighted], rows)
    return Weighted(
        _placed([w.weight for w in weighted], rows), _placed([w.limited for w in weighted], rows), lambda: log_weight
    )


def _called(view: View, method: Method, call: Callable[..., Any]) -> Any:
    logprobs, batch_info = view.logprobs, view.batch_info
    if method.anchor is not None:
        logprobs = method.anchor(logprobs, batch_info)
    return call(logprobs, view.batch.advantages, batch_info)


def _placed(parts: list[Tensor], rows: Int[Tensor, " n"]) -> Tensor:
    together = torch.cat(parts)
    return torch.empty_like(together).index_copy_(0, rows, together)
