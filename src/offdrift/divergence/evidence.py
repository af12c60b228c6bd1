"""How surely a divergence is known, and what it may therefore be used for.

    exact      from the full vocabulary of both policies: the number itself
    interval   from the top k of one and all of the other: rigorous lower and upper ends
    sampled    from the one token that was drawn: an estimate, whatever its size

Rejecting needs a lower end (a token above the threshold by `lo` is above it); accepting, and every
guarantee, needs an upper end. Only exact values and upper ends of intervals may back a certificate.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from jaxtyping import Float
from torch import Tensor

from offdrift.errors import EvidenceError


class Grade(StrEnum):
    """How surely a divergence is known, best first."""

    EXACT = "exact"
    INTERVAL = "interval"
    SAMPLED = "sampled"


@dataclass(frozen=True)
class Divergence:
    """One divergence at every token, and how surely it is known.

    Args:
        name: what it is, first distribution first ("kl_rollout_current", "tv_rollout_current").
        grade: where the numbers come from.
        lo: lower end, nats (KL) or probability (TV). Rejection by `lo` is rigorous unless sampled.
        hi: upper end, the same tensor as `lo` unless the grade is interval; may be +inf.

    Example:
        >>> import torch
        >>> tv = Divergence.interval("tv", torch.tensor([0.1]), torch.tensor([0.3]))
        >>> tv.may_certify, tv.upper
        (True, tensor([0.3000]))
    """

    name: str
    grade: Grade
    lo: Float[Tensor, " n"]
    hi: Float[Tensor, " n"]

    @staticmethod
    def exact(name: str, value: Float[Tensor, " n"]) -> Divergence:
        """A divergence computed over the full vocabulary."""
        return Divergence(name, Grade.EXACT, value, value)

    @staticmethod
    def interval(name: str, lo: Float[Tensor, " n"], hi: Float[Tensor, " n"]) -> Divergence:
        """A divergence known to lie between `lo` and `hi`."""
        return Divergence(name, Grade.INTERVAL, lo, hi)

    @staticmethod
    def sampled(name: str, value: Float[Tensor, " n"]) -> Divergence:
        """An estimate from one drawn token."""
        return Divergence(name, Grade.SAMPLED, value, value)

    @property
    def value(self) -> Float[Tensor, " n"]:
        """The number to show and to reject by: the value, or the interval's lower end."""
        return self.lo

    @property
    def may_certify(self) -> bool:
        """Whether `upper` exists: exact values and intervals yes, samples never."""
        return self.grade is not Grade.SAMPLED

    @property
    def upper(self) -> Float[Tensor, " n"]:
        """The number a guarantee may use.

        Raises: `EvidenceError` for a sampled divergence, which proves nothing.
        """
        if not self.may_certify:
            raise EvidenceError(
                f"{self.name} is a sampled estimate and backs no guarantee; record the rollout "
                'policy with evidence="full" (exact) or evidence=k for its top k (interval)'
            )
        return self.hi
