"""`Correction`: gates and weights together, and what each of them did to every token.

Gates are joined by AND and each looks at the original batch, so their order cannot matter. Weights
multiply, and no two may correct the same ratio of the same token. Every configured part reports how
many tokens it touched: a correction that is configured but never acts is the most common silent
failure of the field.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from offdrift.batch_info import NO_INFO, BatchInfo, without_unscored
from offdrift.correction.weight import Weighted
from offdrift.errors import MethodError
from offdrift.logprobs import LogProbs
from offdrift.ratios import RatioName


@runtime_checkable
class GateLike(Hashable, Protocol):
    """Protocol of gates: `Gate`, or anything that decides without gradient."""

    @property
    def on(self) -> RatioName: ...
    @property
    def exact(self) -> bool: ...
    @property
    def formula(self) -> str: ...
    def keep(self, logprobs: LogProbs, advantages: Tensor | None = ..., batch_info: BatchInfo = ...) -> Tensor: ...


@runtime_checkable
class WeightLike(Hashable, Protocol):
    """Protocol of weights: `Weight`, or anything that gives a number >= 0 without gradient."""

    @property
    def on(self) -> RatioName | None: ...
    @property
    def advantage(self) -> str: ...
    @property
    def formula(self) -> str: ...
    def __call__(
        self, logprobs: LogProbs, advantages: Tensor | None = ..., batch_info: BatchInfo = ...
    ) -> Weighted: ...


class Corrected(NamedTuple):
    """Decisions of a correction for each token; no gradient."""

    keep: Bool[Tensor, " n"]
    weight: Float[Tensor, " n"]
    limited: Bool[Tensor, " n"]
    """Tokens whose weight was changed by a weight's limits."""
    rejected_by: dict[GateLike, Bool[Tensor, " n"]]
    """For each gate, the tokens it alone would reject."""
    weighted: tuple[Weighted, ...] = ()
    """What each weight decided."""

    def log_weight(self) -> Float[Tensor, " n"]:
        """Logs of the weights at any size, -inf for 0; see `Weighted.log_weight`."""
        return sum((w.log_weight() for w in self.weighted), torch.zeros_like(self.weight))

    def map(self, function: Callable[[Tensor], Tensor]) -> Corrected:
        """Apply `function` to every tensor, to choose other tokens or another device."""
        return Corrected(
            function(self.keep),
            function(self.weight),
            function(self.limited),
            {gate: function(x) for gate, x in self.rejected_by.items()},
            tuple(w.map(function) for w in self.weighted),
        )

    def scatter_to_all(self, logprobs: LogProbs) -> Corrected:
        """Scatter decisions about the scored tokens of a batch to all of its tokens."""
        placed = self.map(logprobs.scatter_to_all)
        return placed._replace(weight=logprobs.scatter_to_all(self.weight, fill=1.0))


@dataclass(frozen=True)
class Correction:
    """Any number of gates and weights. `a & b` joins corrections, gates and weights.

    Raises: `MethodError` if two weights correct the same ratio of the same tokens, or draw the line
        between correct and incorrect answers in different places.

    Example:
        >>> from offdrift.correction import Gate, Weight
        >>> gate = Gate(statistic="k2", on="full", unit="seq_max", high=0.05)
        >>> both = Correction(weights=(Weight(on="mismatch", cap=2.0),)) & gate
    """

    gates: tuple[GateLike, ...] = ()
    weights: tuple[WeightLike, ...] = ()

    def __post_init__(self) -> None:
        for one, other in itertools.combinations(self.weights, 2):
            if not disjoint(one, other) and factors(one.on) & factors(other.on):
                raise MethodError(
                    f"two weights count one ratio twice: {one.formula}; {other.formula}. A token "
                    "has one weight per ratio (mismatch, staleness)"
                )

    def __and__(self, other: GateLike | WeightLike | Correction) -> Correction:
        if not isinstance(other, Correction):
            is_gate = hasattr(other, "keep")
            other = Correction((other,)) if is_gate else Correction(weights=(other,))  # type: ignore[arg-type]
        return Correction(
            tuple(dict.fromkeys(self.gates + other.gates)), tuple(dict.fromkeys(self.weights + other.weights))
        )

    @property
    def needs_divergences(self) -> bool:
        """Whether a gate reads divergences of whole distributions."""
        return any(g.exact for g in self.gates)

    def __call__(
        self, logprobs: LogProbs, advantages: Float[Tensor, " n"] | None = None, batch_info: BatchInfo = NO_INFO
    ) -> Corrected:
        """Decide about every token of the batch. Gradient: none.

        A token that the engine did not score is not kept, has weight 1, and no gate sees it.

        Raises: `EvidenceError` if the batch lacks what a part needs, before anything is decided.
        """
        if logprobs.unscored is not None:
            return self(*without_unscored(logprobs, advantages, batch_info)).scatter_to_all(logprobs)
        kept = {g: g.keep(logprobs, advantages, batch_info) for g in self.gates}
        weighted = tuple(w(logprobs, advantages, batch_info) for w in self.weights)
        rejected_by = {g: ~inside for g, inside in kept.items()}
        decisions = list(kept.values()) or [torch.ones_like(logprobs.logp_rollout, dtype=torch.bool)]
        keep = functools.reduce(torch.logical_and, decisions)
        if len(weighted) == 1:
            return Corrected(keep, weighted[0].weight, weighted[0].limited, rejected_by, weighted)
        limited = torch.zeros_like(keep)
        for w in weighted:
            limited = limited | w.limited
        weight = torch.ones_like(logprobs.logp_rollout)
        for w in weighted:
            weight = weight * w.weight
        return Corrected(keep, weight, limited, rejected_by, weighted)


def disjoint(one: WeightLike, other: WeightLike) -> bool:
    """Whether no token can have both weights: by the sign of its advantage, or by its reward.

    Raises: `MethodError` if they draw the line between correct and incorrect in different places:
        rewards between the two would have both weights or neither.
    """
    if {one.advantage, other.advantage} == {"negative", "positive"}:
        return True
    outcomes = {getattr(weight, "outcome", "any") for weight in (one, other)}
    if outcomes != {"correct", "incorrect"}:
        return False
    lines = [weight.correct_above for weight in (one, other)]  # type: ignore[attr-defined]
    if lines[0] != lines[1]:
        raise MethodError(
            f"correct_above is {lines[0]:g} for one weight and {lines[1]:g} for another; give all "
            "weights of a method the same"
        )
    return True


def factors(on: RatioName | None) -> set[str]:
    """A ratio as the set of its two factors; empty for none."""
    if on is None:
        return set()
    return {"mismatch", "staleness"} if on == "full" else {on}
