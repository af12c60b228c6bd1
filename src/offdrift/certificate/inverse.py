"""Inverse bounds: the largest divergence and the longest horizon that keep B* below a target error.

B*, the smallest of `all_bounds`, never falls when a divergence or the horizon grows, so each question has one
answer, found by bisection of B* itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from offdrift.certificate.bounds import all_bounds, tightest
from offdrift.certificate.inequalities import pinsker, route_ends
from offdrift.certificate.premises import premises
from offdrift.errors import BadValueError, check_choice

PARAMETERS = ("delta", "eps", "kl_seq", "chi2", "reward_sd", "hellinger_seq", "kl_rewarded", "kl_unrewarded")
"""What `largest` can solve for."""

NEEDS = {"reward_sd": "chi2", "kl_rewarded": "kl_unrewarded", "kl_unrewarded": "kl_rewarded"}
"""Premises without which no bound depends on what is solved for."""

LONGEST = 10**12
"""Horizons that `vacuous_horizon` looks at, in tokens."""

MeanTV = Float[np.ndarray, " t"] | float | int | None


def largest(
    parameter: str,
    *,
    target: float | int,
    horizon: int,
    mean_tv: MeanTV = None,
    constants: str = "sharp",
    reward_range: float | int = 1.0,
    **limits: float | int | None,
) -> float:
    """The largest divergence for which B* stays at or below a target.

        max { x : B*(T, x, other premises) <= target }

    The other premises stay as given; those that are absent follow from what is tried, by Pinsker's
    inequality and the chain rule. A `mean_tv` above the eps that is tried is lowered to it.

    Args:
        parameter: one of `PARAMETERS`: "delta" (nats), "eps", "kl_seq" (nats, of whole sequences), or a premise
            of a bound that is not in the paper.
        target: largest error that is acceptable, in units of the reward.
        horizon: tokens of the longest sequence T.
        mean_tv, constants, reward_range, limits: as in `all_bounds`; delta is needed unless it is solved for.

    Returns: the value, to a relative 1e-12 and never too large. `largest_possible` says that any
        value does: the other premises alone keep B* at the target. 0 says that none above 1e-150 does.

    Raises: `MethodError` for another parameter; `BadValueError` for a target that is negative or
        not finite, if the parameter is itself given, or for premises that no pair can have.

    Example:
        >>> round(4096 * largest("delta", target=0.1, horizon=4096), 9)
        0.1
        >>> delta = largest("delta", target=0.1, horizon=4096, constants="paper")
        >>> f"{delta:.3e}"
        '2.862e-07'
    """
    check_choice("parameter", parameter, PARAMETERS)
    others: dict[str, Any] = {"delta": None, "eps": None, **limits}
    if others.pop(parameter, None) is not None:
        raise BadValueError(f"{parameter} is given and solved for; leave it out")
    if parameter != "delta" and others["delta"] is None:
        raise BadValueError(f"solving for {parameter} needs delta; inf if no KL is known")
    needed = NEEDS.get(parameter)
    if needed is not None and others.get(needed) is None:
        raise BadValueError(f"solving for {parameter} needs {needed}: no bound depends on {parameter} alone")
    if not 0 <= target < math.inf:
        raise BadValueError(f"target = {target}; an error is not negative, and finite")

    def within(value: float) -> bool:
        tried: dict[str, Any] = others | {parameter: value}
        mean = mean_tv
        if mean is not None and tried["eps"] is not None:
            lowered = np.minimum(mean, tried["eps"])
            mean = lowered if isinstance(mean, np.ndarray) else float(lowered)
        fixed: dict[str, Any] = {"horizon": horizon, "constants": constants, "reward_range": reward_range}
        return tightest(all_bounds(**fixed, **tried, mean_tv=mean)).value <= target

    most = largest_possible(parameter, reward_range)
    if within(most):
        return most
    high = min(most, 2 * max(1.0, target / reward_range))  # beyond: TV is 1, and KL_seq above the target
    while within(high):  # where a small factor (the reward's deviation) lets a premise be larger
        high *= 2
    return _last_within(within, high)


def largest_possible(parameter: str, reward_range: float | int) -> float:
    """The largest value that one of `PARAMETERS` can have; infinite for most.

    Example:
        >>> largest_possible("eps", 1), largest_possible("reward_sd", 1), largest_possible("delta", 1)
        (1.0, 0.5, inf)
    """
    return {"eps": 1.0, "reward_sd": reward_range / 2}.get(parameter, math.inf)


def vacuous_horizon(
    *,
    kl_seq: float | int | None = None,
    kl_rate: float | int | None = None,
    mean_tv: MeanTV = None,
    target: float | int | None = None,
    constants: str = "sharp",
    reward_range: float | int = 1.0,
    **limits: float | int | None,
) -> int | None:
    """The shortest horizon at which B* is vacuous: not below the range of the reward.

        min { T : B*(T) >= target },  target = the range of the reward by default

    What does not depend on the horizon (delta, eps, one mean TV for all positions) holds at each.
    A sequence's divergence does depend on it: a given `kl_seq` or `tv_seq` (and of the premises beyond the
    paper those of sequences) is taken as a limit at every T, `kl_rate` lets KL_seq = T kl_rate grow, and
    without either it is T delta.

    Args:
        kl_rate: mean token KL, nats per token; instead of `kl_seq`.
        mean_tv: one mean TV for all positions.
        target: smallest error at which the bound counts as vacuous.
        kl_seq, constants, reward_range, limits: as in `all_bounds`.

    Returns: tokens; None if the bound stays below the target up to 10^12 tokens.

    Raises: `BadValueError` for numbers that cannot be, for both `kl_seq` and `kl_rate`, or for a
        mean TV per position, which has no continuation.

    Example:
        >>> vacuous_horizon(delta=1e-4), vacuous_horizon(delta=1e-4, constants="paper")
        (10000, 384)
        >>> vacuous_horizon(delta=1e-4, eps=5e-3, kl_rate=2.5e-6)
        400000
    """
    level = reward_range if target is None else target
    if not 0 < level < math.inf:
        raise BadValueError(f"target = {level}; give an error above 0")
    if isinstance(mean_tv, np.ndarray) and mean_tv.ndim:
        raise BadValueError(f"mean_tv has {mean_tv.size} positions and no continuation; give one number for all")
    fixed: dict[str, Any] = {"mean_tv": mean_tv, "constants": constants, "reward_range": reward_range, **limits}

    def useful(horizon: int) -> bool:
        grown = kl_of_sequences(horizon, kl_seq, kl_rate)
        return tightest(all_bounds(horizon=horizon, **fixed, kl_seq=grown)).value < level

    return first_useless(useful)


def first_useless(useful: Callable[[int], bool]) -> int | None:
    """The shortest horizon at which `useful` is false, for what is never true again once it was false.

    Returns: tokens; None if it is true up to 10^12 tokens.

    Example:
        >>> first_useless(lambda horizon: horizon < 700)
        700
    """
    low, high = 0, 1
    while useful(high):
        if high == LONGEST:
            return None
        low, high = high, min(2 * high, LONGEST)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if useful(middle) else (low, middle)
    return high


def kl_of_sequences(horizon: int, kl_seq: float | int | None, kl_rate: float | int | None) -> float | None:
    """KL of whole sequences in nats: as given, or KL_seq = T kl_rate; None if neither is known.

    Example:
        >>> kl_of_sequences(4096, None, 2.5e-6)
        0.01024
    """
    if kl_rate is None:
        return None if kl_seq is None else float(kl_seq)
    if kl_seq is not None:
        raise BadValueError("kl_seq and kl_rate are both given; KL_seq = T kl_rate, give one")
    if not 0 <= kl_rate < math.inf:
        raise BadValueError(f"kl_rate = {kl_rate}; a mean KL is not negative, and finite")
    return float(horizon * kl_rate)


@dataclass(frozen=True)
class Route:
    """From which to which token one route gives the smallest shift."""

    name: str
    """"tv" (k eps), "kl" (sqrt(k delta/2)), or the cap: "tv_seq", "kl_seq" or "one"."""
    first: int
    last: int


def route_crossovers(
    *,
    horizon: int,
    delta: float | int,
    eps: float | int | None = None,
    kl_seq: float | int | None = None,
    tv_seq: float | int | None = None,
    of: str = "context",
) -> list[Route]:
    """Stretches of a sequence where each route to the shift of Lemma 3.2, or of Theorem 3.6, is smallest.

        context at position t:  k = t - 1,  min(1, k eps, sqrt(k delta/2), TV_seq, sqrt(KL_seq/2))
        future of position t:   k = T - t,  min(1, k eps, sqrt(k delta/2))

    The TV route crosses into the KL route at k = delta / (2 eps^2). On ties the earlier of the five
    (TV, KL, TV_seq, KL_seq, 1) is named.

    Args:
        horizon, delta, eps, kl_seq, tv_seq: as in `all_bounds`.
        of: "context", for the pointwise bound, or "future", for the adaptive one.

    Returns: routes in the order of positions t = 1 .. horizon, without gap or overlap.

    Example:
        >>> for route in route_crossovers(horizon=4096, delta=1e-4, eps=5e-3, tv_seq=0.05):
        ...     print(route.name, route.first, route.last)
        tv 1 3
        kl 4 51
        tv_seq 52 4096
    """
    check_choice("of", of, ("context", "future"))
    limits = premises(horizon=horizon, delta=delta, eps=eps, kl_seq=kl_seq, tv_seq=tv_seq)
    caps = {"one": 1.0}
    if of == "context":  # what was derived from delta and T is no route of its own
        caps |= {"tv_seq": limits.tv_seq} if tv_seq is not None else {}
        caps |= {"kl_seq": pinsker(limits.kl_seq)} if kl_seq is not None else {}
    name = min(("tv_seq", "kl_seq", "one"), key=lambda n: caps.get(n, math.inf))
    steps = horizon - 1
    if limits.eps == 0:
        ends = (steps, steps)
    elif caps[name] == 0:
        ends = (0, 0)
    else:
        ends = route_ends(steps, delta=limits.delta, eps=limits.eps, cap=caps[name])
    spans = [("tv", 0, ends[0]), ("kl", ends[0] + 1, ends[1]), (name, ends[1] + 1, steps)]
    if of == "context":
        return [Route(n, low + 1, high + 1) for n, low, high in spans if low <= high]
    return [Route(n, horizon - high, horizon - low) for n, low, high in spans[::-1] if low <= high]


def _last_within(within: Callable[[float], bool], high: float) -> float:
    """The largest number with `within`, by bisection of its logarithm; 0 if there is none."""
    low = math.log(1e-150)  # a square below it is rounded to 0
    if not within(math.exp(low)):
        return 0.0
    top = math.log(high)
    while top - low > 1e-12:
        middle = (low + top) / 2
        low, top = (middle, top) if within(math.exp(middle)) else (low, middle)
    return math.exp(low)
