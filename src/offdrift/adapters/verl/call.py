"""`Call`: what verl hands a policy loss, in one object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Call:
    """Arguments that verl hands a policy loss."""

    old: Float[Tensor, "b t"]
    logp: Float[Tensor, "b t"]
    advantages: Float[Tensor, "b t"]
    mask: Tensor
    how: str
    """`loss_agg_mode`."""
    config: Any
    weights: Float[Tensor, "b t"] | None
    """`rollout_is_weights`."""

    @property
    def counts(self) -> Mapping[str, Any]:
        """Counts of the whole mini-batch."""
        return getattr(self.config, "global_batch_info", None) or {}
