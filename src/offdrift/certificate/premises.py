"""`Premises`: upper limits on the divergence of two policies, checked and completed.

The bounds take five divergences. Only the worst token KL is required; what is missing follows from
Pinsker's inequality and the chain rule. All of them are upper limits, so where one is looser than
another implies, the tighter one is used and `notes` says so. Numbers that no pair of policies can
have are refused by name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from offdrift.certificate.inequalities import marginal_kl, pinsker
from offdrift.errors import BadValueError, ShapeError

Number = float | int

_SLACK = 1e-6  # relative; a mean and a maximum taken in float32 may cross by a rounding


@dataclass(frozen=True)
class Premises:
    """Upper limits on the divergence of two policies over `horizon` tokens.

    `notes` maps the name of a field that was tightened to the reason, in words.
    """

    horizon: int
    """Tokens of the longest sequence, T."""
    delta: float
    """Maximum over contexts of KL(rollout || current), nats; infinite if not known."""
    eps: float
    """Maximum over contexts of TV."""
    kl_seq: float
    """KL of whole sequences, the sum over positions of the mean token KL, nats."""
    tv_seq: float
    """TV of whole sequences."""
    mean_tv: Float[np.ndarray, " t"] | float | None
    """Mean TV under the rollout policy, per position or one for all; None if not known."""
    notes: dict[str, str]


def premises(
    *,
    horizon: int,
    delta: Number,
    eps: Number | None = None,
    kl_seq: Number | None = None,
    tv_seq: Number | None = None,
    mean_tv: Float[np.ndarray, " t"] | Number | None = None,
) -> Premises:
    """Check the limits on the divergence of two policies and derive the missing ones.

        eps <= sqrt(delta/2),  kl_seq <= T delta,  tv_seq <= sqrt(kl_seq/2),  mean_tv <= eps

    Args:
        horizon: tokens of the longest sequence.
        delta: maximum over contexts of KL(rollout || current), nats; `inf` if not known.
        eps: maximum over contexts of TV; absent, Pinsker's.
        kl_seq: KL of whole sequences, nats; absent, `horizon * delta`.
        tv_seq: TV of whole sequences; absent, Pinsker's of `kl_seq`.
        mean_tv: mean TV at each of `horizon` positions, or one number for all of them.

    Raises: `BadValueError` for a number that no pair of policies can have; `ShapeError` if
        `mean_tv` does not have one entry per position.

    Example:
        >>> p = premises(horizon=4096, delta=1e-4, eps=0.3)
        >>> p.notes["eps"]
        'eps = 0.3 exceeds sqrt(delta/2) = 0.00707107, which holds too and was used'
    """
    numbers = (None if x is None else float(x) for x in (delta, eps, kl_seq, tv_seq))
    delta, eps, kl_seq, tv_seq = numbers  # type: ignore[assignment]
    if horizon < 1:
        raise BadValueError(f"horizon = {horizon}; a sequence has at least 1 token")
    limits = {"delta": delta, "eps": eps, "kl_seq": kl_seq, "tv_seq": tv_seq}
    for name, value in limits.items():
        largest = 1.0 if name in ("eps", "tv_seq") else math.inf
        if value is not None and not 0 <= value <= largest:
            kind = "a total variation lies in [0, 1]" if largest == 1 else "a KL is never negative"
            raise BadValueError(f"{name} = {value}; {kind}, omit what was not measured")
    notes: dict[str, str] = {}
    token_tv = _tightened("eps", eps, pinsker(delta), "sqrt(delta/2)", notes)
    kl = _tightened("kl_seq", kl_seq, marginal_kl(horizon, delta), "horizon * delta", notes)
    tv = _tightened("tv_seq", tv_seq, pinsker(kl), "sqrt(kl_seq/2)", notes)
    mean = None if mean_tv is None else _checked_mean_tv(mean_tv, horizon, eps)
    if mean is not None and np.max(mean) > token_tv * (1 + _SLACK):
        notes["mean_tv"] = f"mean_tv up to {float(np.max(mean)):g} exceeds eps <= {token_tv:g}, which was used there"
    capped = np.minimum(mean, token_tv) if isinstance(mean, np.ndarray) else mean
    capped = min(capped, token_tv) if isinstance(capped, float) else capped
    return Premises(horizon, delta, token_tv, kl, tv, capped, notes)


def _tightened(name: str, value: float | None, limit: float, limit_name: str, notes: dict[str, str]) -> float:
    """The smaller of a premise and what the others imply; the latter adds a note."""
    if value is not None and value > limit * (1 + _SLACK):
        notes[name] = f"{name} = {value:g} exceeds {limit_name} = {limit:g}, which holds too and was used"
    return limit if value is None else min(value, limit)


def _checked_mean_tv(
    mean_tv: Float[np.ndarray, " t"] | Number, horizon: int, eps: float | None
) -> Float[np.ndarray, " t"] | float:
    """`mean_tv` in float64, one number or one per position; refused if no pair can have it."""
    mean = np.asarray(mean_tv, dtype=np.float64)
    if mean.shape not in ((), (horizon,)):
        raise ShapeError(
            f"mean_tv has shape {mean.shape} for horizon = {horizon}; give one mean TV per "
            "position (0 where no sequence is that long), or one number for all"
        )
    limit = 1.0 if eps is None else eps
    wrong = ~((mean >= 0) & (mean <= limit * (1 + _SLACK) + 1e-9))
    if wrong.any():
        where = int(np.flatnonzero(wrong)[0])
        raise BadValueError(
            f"mean_tv[{where}] = {mean.flat[where]}; a mean TV lies between 0 and the maximum "
            f"eps = {limit:g} over the same contexts"
        )
    return mean if mean.ndim else float(mean)
