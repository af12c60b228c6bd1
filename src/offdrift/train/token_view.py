"""What a step saw of every token: for the report's samples and for the token log.

A by-product of the step's own forward pass; it comes to the host once per step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from offdrift.divergence.evidence import Divergence, Grade

DIVERGENCE = "divergence/"


@dataclass(frozen=True)
class TokenView:
    """Per-token values of a step, in the batch's order, on the host."""

    keep: Bool[Tensor, " n"]
    """Whether every gate kept the token."""
    weight: Float[Tensor, " n"]
    logp: Float[Tensor, " n"]
    """log-prob under the policy that the step started from, nats."""
    entropy: Float[Tensor, " n"]
    """Entropy of that policy at the token, nats."""
    lower: Mapping[str, Float[Tensor, " n"]]
    """Divergences by name, their lower ends where they are intervals."""
    exact: bool
    """Whether all of them are known exactly."""

    @property
    def kl(self) -> Float[Tensor, " n"]:
        """KL(rollout || current), nats; NaN where nothing was recorded to compute it from."""
        return self._current("kl_rollout_current")

    @property
    def tv(self) -> Float[Tensor, " n"]:
        """TV(rollout, current); NaN where nothing was recorded to compute it from."""
        return self._current("tv_rollout_current")

    def _current(self, name: str) -> Float[Tensor, " n"]:
        return self.lower.get(name, torch.full_like(self.weight, torch.nan))


@dataclass
class Viewer:
    """Collects a step's pieces on their device."""

    rows: list[Int[Tensor, " r"]] = field(default_factory=list)
    columns: list[Float[Tensor, "c r"]] = field(default_factory=list)
    names: tuple[str, ...] = ()
    exact: bool = True

    def add(
        self,
        rows: Int[Tensor, " r"],
        *,
        keep: Bool[Tensor, " r"],
        weight: Float[Tensor, " r"],
        logp: Float[Tensor, " r"],
        entropy: Float[Tensor, " r"],
        divergences: Mapping[str, Divergence],
    ) -> None:
        """Note a piece, whose tokens stand at `rows` of the batch."""
        found = {"keep": keep, "weight": weight, "logp": logp, "entropy": entropy}
        found |= {f"{DIVERGENCE}{name}": d.lo for name, d in divergences.items()}
        self.names = tuple(found)
        self.exact &= all(d.grade is Grade.EXACT for d in divergences.values())
        self.rows.append(rows)
        self.columns.append(torch.stack([x.detach().float() for x in found.values()]))

    def view(self) -> TokenView:
        """All pieces in the batch's order: the one transfer to the host."""
        packed = torch.cat(self.columns, 1).cpu()
        ordered = torch.empty_like(packed)
        ordered[:, torch.cat(self.rows)] = packed
        found = dict(zip(self.names, ordered, strict=True))
        return TokenView(
            found["keep"] > 0,
            found["weight"],
            found["logp"],
            found["entropy"],
            {k.removeprefix(DIVERGENCE): x for k, x in found.items() if k.startswith(DIVERGENCE)},
            self.exact,
        )
