"""A factor of the check, and what came of changing it: one row of the table."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from offdrift.check.bench import Bench, EngineSpec, Pair
from offdrift.check.measure import NAN, Measured

Side = Literal["rollout", "train", "sampling", "sync", "routing"]
"""Where a factor acts."""

Status = Literal["ran", "not offered", "failed", "skipped"]


@dataclass(frozen=True)
class Outcome:
    """What one change did to the mismatch. NaN where nothing was measured."""

    factor: str
    what: str
    """The question in one line."""
    side: Side
    changed: str = ""
    """What was changed, in words: "float32 instead of bfloat16"."""
    kl_mean: float = NAN
    """Mean over tokens of KL(rollout || train) after the change, nats."""
    kl_max: float = NAN
    tv_max: float = NAN
    abs_log_ratio_max: float = NAN
    pearson: float = NAN
    baseline_kl_mean: float = NAN
    """The same mean before the change."""
    status: Status = "ran"
    why: str = ""
    """Why it did not run, or one sentence on what the numbers say."""
    seconds: float = 0.0

    @staticmethod
    def without(factor: Factor, status: Status, why: str, *, seconds: float = 0.0) -> Outcome:
        """The row of a factor that was not measured, and why."""
        return Outcome(
            factor.name, factor.what, factor.side, status=status, why=why, seconds=seconds
        )

    @property
    def ratio(self) -> float:
        """The change's mean KL over the baseline's; NaN where there is none to compare."""
        if not self.baseline_kl_mean > 0:
            return math.nan
        return self.kl_mean / self.baseline_kl_mean

    def as_dict(self) -> dict[str, Any]:
        """The row as it stands in `check.json`."""
        return {**asdict(self), "ratio": self.ratio}


@runtime_checkable
class Factor(Protocol):
    """One thing that may set two engines apart, and the experiment that shows how far."""

    @property
    def name(self) -> str: ...

    @property
    def what(self) -> str: ...

    @property
    def side(self) -> Side: ...

    def applies(self, bench: Bench, rollout: EngineSpec, train: EngineSpec) -> str | None:
        """Why these engines do not have it; None if they do."""
        ...

    def run(self, bench: Bench, pair: Pair, baseline: Measured) -> Outcome:
        """Change this one thing, measure again.

        What these engines do not have is an outcome of status "not offered", not an error.
        """
        ...
