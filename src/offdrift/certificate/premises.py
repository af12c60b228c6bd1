"""`Premises`: upper limits on the divergence of two policies, checked and completed.

Only the worst token KL is required; what is missing follows from Pinsker's inequality and the chain rule. All of
them are upper limits, so where one is looser than another implies, the tighter one is used and `notes` says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Required, TypedDict

import numpy as np
from jaxtyping import Float

from offdrift.certificate.inequalities import marginal_kl, pinsker, tv_from_chi2
from offdrift.errors import BadValueError, ShapeError

Number = float | int

NOT_NEGATIVE = "a KL is never negative"

_SLACK = 1e-6  # relative; a mean and a maximum taken in float32 may cross by a rounding


class Limits(TypedDict, total=False):
    """Arguments of `premises`, for functions that hand them on."""

    horizon: Required[int]
    delta: Required[Number]
    eps: Number | None
    kl_seq: Number | None
    tv_seq: Number | None
    mean_tv: Float[np.ndarray, " t"] | Number | None
    chi2: Number | None
    reward_sd: Number | None
    hellinger_seq: Number | None
    kl_rewarded: Number | None
    kl_unrewarded: Number | None
    reward_range: Number


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
    chi2: float | None = None
    """Maximum over contexts of chi2(current || rollout) = E_mu[w_t^2 | c] - 1; None if not known."""
    reward_sd: float = 0.5
    """Standard deviation of the reward under the rollout policy, in units of the reward."""
    hellinger_seq: float | None = None
    """Sum over positions of the mean squared Hellinger distance E_mu[1 - sum_y sqrt(mu pi)]; None if not known."""
    kl_rewarded: float | None = None
    """E_mu[R sum_t k3(w_t)], R in [0, 1] and k3(w) = w - 1 - log w, nats; None if neither part is known."""
    kl_unrewarded: float | None = None
    """E_mu[(1 - R) sum_t k3(w_t)]: with `kl_rewarded` it adds up to `kl_seq`."""


def premises(
    *,
    horizon: int,
    delta: Number,
    eps: Number | None = None,
    kl_seq: Number | None = None,
    tv_seq: Number | None = None,
    mean_tv: Float[np.ndarray, " t"] | Number | None = None,
    chi2: Number | None = None,
    reward_sd: Number | None = None,
    hellinger_seq: Number | None = None,
    kl_rewarded: Number | None = None,
    kl_unrewarded: Number | None = None,
    reward_range: Number = 1.0,
) -> Premises:
    """Check the limits on the divergence of two policies and derive the missing ones.

        eps <= sqrt(delta/2), sqrt(chi2)/2     kl_seq <= T delta     tv_seq <= sqrt(kl_seq/2)
        mean_tv <= eps     hellinger_seq <= T eps, kl_seq/2     kl_rewarded, kl_unrewarded <= kl_seq

    Args:
        horizon: tokens of the longest sequence.
        delta: maximum over contexts of KL(rollout || current), nats; `inf` if not known.
        eps: maximum over contexts of TV; absent, Pinsker's.
        kl_seq: KL of whole sequences, nats; absent, `horizon * delta`.
        tv_seq: TV of whole sequences; absent, Pinsker's of `kl_seq`.
        mean_tv: mean TV at each of `horizon` positions, or one number for all of them.
        chi2: maximum over contexts of chi2(current || rollout); `inf` if not known.
        reward_sd: standard deviation of the reward under the rollout policy; absent, half the range.
        hellinger_seq: mean squared Hellinger distance of a token, summed over positions.
        kl_rewarded, kl_unrewarded: the sum of k3(w_t) over a sequence, averaged with weight R and 1 - R
            (R rescaled to [0, 1]), nats; if only one is given, the other is at most `kl_seq`.
        reward_range: largest minus smallest possible reward.

    Raises: `BadValueError` for a number that no pair of policies can have; `ShapeError` if
        `mean_tv` does not have one entry per position.

    Example:
        >>> p = premises(horizon=4096, delta=1e-4, eps=0.3)
        >>> p.notes["eps"]
        'eps = 0.3 exceeds sqrt(delta/2) = 0.00707107, which holds too and was used'
    """
    if not 0 < reward_range < math.inf:
        raise BadValueError(f"reward_range = {float(reward_range)}; give largest minus smallest reward")
    if horizon < 1:
        raise BadValueError(f"horizon = {horizon}; a sequence has at least 1 token")
    spread = f"rewards in a range of {reward_range:g} have a standard deviation of at most {reward_range / 2:g}"
    kinds = {
        "delta": (delta, math.inf, NOT_NEGATIVE),
        "eps": (eps, 1.0, "a total variation lies in [0, 1]"),
        "kl_seq": (kl_seq, math.inf, NOT_NEGATIVE),
        "tv_seq": (tv_seq, 1.0, "a total variation lies in [0, 1]"),
        "chi2": (chi2, math.inf, "a chi-squared divergence is never negative"),
        "reward_sd": (reward_sd, reward_range / 2, spread),
        "hellinger_seq": (hellinger_seq, math.inf, "a squared distance is never negative"),
        "kl_rewarded": (kl_rewarded, math.inf, NOT_NEGATIVE),
        "kl_unrewarded": (kl_unrewarded, math.inf, NOT_NEGATIVE),
    }
    for name, (value, largest, kind) in kinds.items():
        if value is not None and not 0 <= value <= largest * (1 + (name == "reward_sd") * _SLACK):
            raise BadValueError(f"{name} = {float(value)}; {kind}, omit what was not measured")
    numbers = {name: None if value is None else float(value) for name, (value, _, _) in kinds.items()}
    delta, eps = float(delta), numbers["eps"]
    notes: dict[str, str] = {}
    token_limits = {"sqrt(delta/2)": pinsker(delta), "sqrt(chi2)/2": 1.0 if chi2 is None else tv_from_chi2(chi2)}
    nearest = min(token_limits, key=token_limits.__getitem__)
    token_tv = _tightened("eps", eps, token_limits[nearest], nearest, notes)
    kl = _tightened("kl_seq", numbers["kl_seq"], marginal_kl(horizon, delta), "horizon * delta", notes)
    tv = _tightened("tv_seq", numbers["tv_seq"], pinsker(kl), "sqrt(kl_seq/2)", notes)
    mean = None if mean_tv is None else _checked_mean_tv(mean_tv, horizon, eps)
    if mean is not None and np.max(mean) > token_tv * (1 + _SLACK):
        notes["mean_tv"] = f"mean_tv up to {float(np.max(mean)):g} exceeds eps <= {token_tv:g}, which was used there"
    capped = np.minimum(mean, token_tv) if isinstance(mean, np.ndarray) else mean
    capped = min(capped, token_tv) if isinstance(capped, float) else capped
    beyond: dict[str, tuple[float, str]] = {}
    if hellinger_seq is not None:
        beyond["hellinger_seq"] = min((horizon * token_tv, "horizon * eps"), (kl / 2, "kl_seq/2"))
    if kl_rewarded is not None or kl_unrewarded is not None:
        beyond |= dict.fromkeys(("kl_rewarded", "kl_unrewarded"), (kl, "kl_seq"))
    further = {name: _tightened(name, numbers[name], *limit, notes) for name, limit in beyond.items()}
    sd = reward_range / 2 if reward_sd is None else min(float(reward_sd), reward_range / 2)
    return Premises(
        horizon,
        delta,
        token_tv,
        kl_seq=kl,
        tv_seq=tv,
        mean_tv=capped,
        notes=notes,
        chi2=numbers["chi2"],
        reward_sd=sd,
        **further,
    )


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
