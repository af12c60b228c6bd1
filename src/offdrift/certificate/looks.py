"""Several certificates that share one probability of error: what each may spend, and what is then covered.

A confidence is that of one policy and one look. These keep it where there are more (proofs: docs/certificates.md,
"Certificates in use"):

    a series     alpha_t = 6 alpha / (pi^2 t^2)    looks 1, 2, ... at new rollouts, of however many policies
    best of K    alpha / K                         K policies judged by the same rollouts, any of them then shown
    anytime      `confidence.betting(anytime=True)`  one policy, looked at as often as rollouts arrive

The first two are union bounds, and multiply. The third spends nothing on looks, because its bets are fair at
every moment.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from offdrift.errors import BadValueError, MethodError


@dataclass(frozen=True)
class Looks:
    """Which certificates hold together.

    Raises: `BadValueError` for a look or a number of policies below 1; `MethodError` for a look of a series that
        is anytime valid: such a series is one look.

    Example:
        >>> round(Looks(at=2, of=10).share(0.05), 6)  # 6 / (4 pi^2) of 0.05 / 10
        0.00076
        >>> sum(Looks(at=t).share(0.05) for t in range(1, 10_000)) < 0.05
        True
    """

    at: int | None = None
    """Number of this look in its series, from 1; None: there is no series."""
    of: int = 1
    """Policies that the same rollouts judge."""
    anytime: bool = False
    """Whether intervals hold at every moment of one growing sample."""
    series: str = "this series"
    """What the looks are looks of."""

    def __post_init__(self) -> None:
        for name, number in (("look", self.at), ("of", self.of)):
            if number is not None and number < 1:
                raise BadValueError(f"{name} = {number}; looks and policies are counted from 1")
        if self.anytime and self.at is not None:
            raise MethodError(
                f"look = {self.at} of intervals that hold at every moment: however often you look is one look; give "
                "either a look or anytime"
            )

    def share(self, alpha: float) -> float:
        """What this certificate may spend of a probability of error: 6 alpha / (pi^2 at^2 of)."""
        spent = alpha if self.at is None else 6 * alpha / (math.pi * self.at) ** 2
        return spent / self.of

    @property
    def covers(self) -> str:
        """What a confidence is about, in words to be shown beside it."""
        one_of = f"one of {self.of} policies"
        if self.at is not None:
            at = f" at {one_of}" if self.of > 1 else ""
            return f"all certificates of {self.series} together, this is look {self.at}{at}"
        if self.anytime:
            which = one_of if self.of > 1 else "one policy"
            return f"{which}, however often you look as rollouts arrive"
        return "one policy, one look" if self.of == 1 else f"whichever of {self.of} policies is shown, one look"

    @property
    def provided(self) -> str:
        """What `covers` takes for granted."""
        if self.at is not None:
            what = "one policy each" if self.of == 1 else f"at most {self.of} policies each"
            return f"looks are numbered 1, 2, ... without leaving one out, at rollouts of their own, and judge {what}"
        what = "one policy" if self.of == 1 else f"at most {self.of} policies, fixed before they were looked at"
        if self.anytime:
            return (
                f"they judge {what}, and count in order of arrival: a later look begins with the same files in the "
                "same order"
            )
        if self.of > 1:
            return f"they judge {what}, once (of several looks as rollouts arrive, each spends alpha)"
        return (
            "they judge one policy, once: of k certificates (of updates, checkpoints, regions, or of one policy as "
            "rollouts arrive) one is false with probability up to k alpha"
        )
