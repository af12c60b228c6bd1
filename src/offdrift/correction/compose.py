"""`Correction`: gates times weight, and what happened to whom.

Gates are joined by AND and each looks at the original batch, so their order cannot matter. Every
configured part reports how many tokens it touched: a correction that is configured but never acts
is the most common silent failure of the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from offdrift.correction.gate import Gate
from offdrift.correction.weight import Weight
from offdrift.divergence.evidence import Divergence
from offdrift.errors import MethodError
from offdrift.logprobs import LogProbs


class Corrected(NamedTuple):
    """What a correction decided for each token; no gradient."""

    keep: Bool[Tensor, " n"]
    weight: Float[Tensor, " n"]
    limited: Bool[Tensor, " n"]
    """Tokens whose weight was changed by the weight's limits."""
    rejected_by: dict[Gate, Bool[Tensor, " n"]]
    """For each gate, the tokens it alone would reject."""


@dataclass(frozen=True)
class Correction:
    """Any number of gates and at most one weight. `correction & gate` adds a gate.

    Example:
        >>> gate = Gate(statistic="k2", on="full", unit="seq_max", high=0.05)
        >>> both = Correction(weight=Weight(on="mismatch", cap=2.0)) & gate
    """

    gates: tuple[Gate, ...] = ()
    weight: Weight | None = None

    def __and__(self, other: Gate | Correction) -> Correction:
        if isinstance(other, Gate):
            other = Correction((other,))
        if self.weight is not None and other.weight is not None and self.weight != other.weight:
            raise MethodError(
                f"two weights cannot be combined: {self.weight} and {other.weight}; a token has one "
                "importance weight"
            )
        gates = tuple(dict.fromkeys(self.gates + other.gates))
        return replace(self, gates=gates, weight=self.weight or other.weight)

    @property
    def needs_divergences(self) -> bool:
        """Whether a gate reads divergences of whole distributions."""
        return any(g.exact for g in self.gates)

    def __call__(
        self,
        logprobs: LogProbs,
        divergences: Mapping[str, Divergence] | None = None,
        advantages: Float[Tensor, " n"] | None = None,
    ) -> Corrected:
        """Decide about every token of the batch. Gradient: none.

        Raises: `EvidenceError` if the batch lacks what a part needs, before anything is decided.
        """
        keep = torch.ones_like(logprobs.logp_rollout, dtype=torch.bool)
        rejected_by = {}
        for gate in self.gates:
            kept = gate.keep(logprobs, divergences, advantages)
            rejected_by[gate] = ~kept
            keep = keep & kept
        if self.weight is None:
            ones = torch.ones_like(logprobs.logp_rollout)
            return Corrected(keep, ones, torch.zeros_like(keep), rejected_by)
        weight, limited = self.weight(logprobs)
        return Corrected(keep, weight, limited, rejected_by)
