"""What is guaranteed about the true return: surrogate - error - price, and under which precondition.

    J(pi) - J(mu) >= surrogate - error - price

`error` bounds how much the surrogate overstates, `price` what rejected sequences may cost. Rewards lie in [0, 1].
For any set of accepted sequences, M = 1 on it, and k3(u) = u - 1 - log u,

    J(pi) - J(mu) >= L'_masked - E_mu[M sum_t k3(w_t)] - E_mu[(1 - M) R]

since rewards are >= 0 (docs/certificates.md, "Under a mask"): the price of rejecting is the reward that was
rejected; the paper's TV_seq bounds the other side, which a lower bound does not need.

Reference: Li et al., arXiv:2512.23075v5, Theorem 4.2, Proposition G.1. The inequality above is not there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Unpack

from offdrift.certificate.bounds import check_constants, unified
from offdrift.certificate.premises import Limits
from offdrift.errors import BadValueError


@dataclass(frozen=True)
class Guarantee:
    """J(pi) - J(mu) >= surrogate - error - price, if what is `provided` holds.

    Example:
        >>> round(masked_guarantee(error=0.05, rejected=0.10, tv_seq=0.02).gain(0.30), 4)
        0.13
    """

    name: str
    surrogate: str
    """What it starts from: "surrogate", L' = E_mu[R sum_t (w_t - 1)], "surrogate_masked", with M
    inside, or "gain", the product of ratios itself."""
    error: float
    price: float
    provided: tuple[str, ...]
    """Preconditions, in words; none for a guarantee that holds for any two policies."""

    def gain(self, surrogate: float) -> float:
        """The guaranteed J(pi) - J(mu); improvement is certified where it is above 0."""
        return surrogate - self.error - self.price

    def scaled(self, factor: float) -> Guarantee:
        """The same for rewards in a range of size `factor`."""
        return replace(self, error=factor * self.error, price=factor * self.price)


def trm_guarantee(*, constants: str = "paper", **limits: Unpack[Limits]) -> Guarantee:
    """Theorem 4.2: what masking sequences with a token of KL > delta guarantees.

    1. Accepted sequences have KL <= delta at every token: by construction.
    2. delta does not depend on T.
    3. If KL <= delta at *every* reachable context, nothing is rejected, the masked surrogate is the
       full one, and |J(pi) - J(mu) - L'(pi)| <= B*(delta, eps).

    A batch can refute the condition of 3, never prove it. This is also Remark G.2's first choice:
    r = 0, so the price is 0 and B_A = B*. With sharp constants KL_seq bounds the error too (`bounds.sequence_kl`).

    Args, Raises: as in `offdrift.certificate.all_bounds`.

    Example:
        >>> trm_guarantee(horizon=4096, delta=1e-4, eps=5e-3, kl_seq=0.01, tv_seq=0.05).error
        4.096

    Reference: Li et al., arXiv:2512.23075v5, Theorem 4.2, Remark G.2.
    """
    best, eps = unified(constants=constants, **limits).value, limits.get("eps")
    limit = "" if eps is None else f" and TV <= {eps:g}"
    condition = f"KL(rollout || current) <= {limits['delta']:g}{limit} at every reachable context"
    return Guarantee("TRM", "surrogate", best, 0.0, (condition,))


def masked_guarantee(
    *, error: float, rejected: float, tv_seq: float | None = None, constants: str = "paper"
) -> Guarantee:
    """Proposition G.1: a guarantee for any accepted region, without a precondition on the policies.

        J(pi) - J(mu) >= L'_masked - B_A - r - TV_seq           (paper)
        J(pi) - J(mu) >= L'_masked - B_A - E_mu[(1 - M) R]      (sharp)

    Args:
        error: B_A, the most by which L'_masked overstates the accepted gain: the measured
            E_mu[sum_t 1(prefix accepted) KL(c_t)], or `sample_ratio_error`.
        rejected: r, the share of sequences rejected; for sharp constants the mean rejected reward
            will do.
        tv_seq: TV of whole sequences, for the paper's price.
        constants: "paper" or "sharp".

    Raises: `BadValueError` for numbers that no region can have; `MethodError` for other constants.

    Example:
        >>> best = masked_guarantee(error=0.05, rejected=0.10, constants="sharp")
        >>> round(best.gain(0.30), 4)
        0.15

    Reference: Li et al., arXiv:2512.23075v5, Proposition G.1, eq. 104.
    """
    check_constants(constants)
    for name, value, largest in (("error", error, math.inf), ("rejected", rejected, 1.0)):
        if not 0 <= value <= largest:
            raise BadValueError(f"{name} = {value}; it lies in [0, {largest:g}]")
    if constants == "sharp":
        return Guarantee("masked", "surrogate_masked", error, rejected, ())
    if tv_seq is None or not 0 <= tv_seq <= 1:
        raise BadValueError(
            f"tv_seq = {tv_seq}; the paper's price needs the TV of whole sequences, in [0, 1] "
            "(sqrt(kl_seq / 2) bounds it)"
        )
    return Guarantee("masked", "surrogate_masked", error, rejected + tv_seq, ())


def three_policy(*, advantage: float, gamma: float, tv_mismatch: float, tv_staleness: float) -> Guarantee:
    """Three-policy TRPO: the discounted bound with the drift split between engine and updates.

        J(pi) >= L_mu(pi) - C (alpha_0 + alpha_1),   C = 2 eps_mu gamma / (1 - gamma)^2

    For discounted returns of any scale, not rewards in [0, 1]; the surrogate is
    L_mu(pi) - J(mu) = E[A_mu] / (1 - gamma) over mu's states and pi's actions.

    Args:
        advantage: eps_mu, largest |A_mu| over states and actions.
        gamma: discount, in [0, 1).
        tv_mismatch: alpha_1, largest TV(rollout, old) over states.
        tv_staleness: alpha_0, largest TV(old, current) over states.

    Example:
        >>> found = three_policy(advantage=1.0, gamma=0.9, tv_mismatch=0.002, tv_staleness=0.001)
        >>> round(found.error, 6)
        0.54

    Reference: X. Wang, S. Zhang, "From Two Policies to Three", 2025, Theorem 2.
    """
    if not 0 <= gamma < 1:
        raise BadValueError(f"gamma = {gamma}; a discount lies in [0, 1)")
    if not 0 <= advantage < math.inf:
        raise BadValueError(f"advantage = {advantage}; give the largest |A|, a number >= 0")
    for name, value in (("tv_mismatch", tv_mismatch), ("tv_staleness", tv_staleness)):
        if not 0 <= value <= 1:
            raise BadValueError(f"{name} = {value}; a total variation lies in [0, 1]")
    factor = 2 * advantage * gamma / (1 - gamma) ** 2
    drift = min(1.0, tv_mismatch + tv_staleness)
    return Guarantee("three-policy", "surrogate", factor * drift, 0.0, ())
