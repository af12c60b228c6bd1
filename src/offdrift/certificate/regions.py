"""The trust region of a batch, and how much each of its positions counts in the adaptive bounds.

    omega_t = min(1, (T - t) eps, sqrt((T - t) delta / 2)),   Z(T) = sum_t omega_t

is the largest TV of what T - t remaining tokens can write (Lemma 3.2). It weighs the mean TV in the
adaptive bound and the ratio errors in LN-TRM's score W(y) = sum_t |w_t - 1| omega_t.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from offdrift.certificate.bounds import check_constants
from offdrift.certificate.inequalities import context_shift, pinsker, total_shift
from offdrift.certificate.premises import premises
from offdrift.errors import BadValueError


@dataclass(frozen=True, kw_only=True)
class TrustRegion:
    """The limits that a certificate is about; chosen before the batch is seen.

    Args:
        horizon: longest possible response T, tokens.
        delta: limit on KL(rollout || current) at every context, nats; infinite to ask for none.
        eps: limit on TV at every context; None for Pinsker's of delta.
        tau: limit on |log w| of every sampled token, for the sample-ratio region; None for none.

    Raises: `BadValueError` for limits that limit nothing or cannot be met: T = 0, delta or tau
        negative or NaN, eps outside [0, 1].

    Example:
        >>> TrustRegion(horizon=8, delta=0.02).token_tv
        0.1
    """

    horizon: int
    delta: float
    eps: float | None = None
    tau: float | None = None

    def __post_init__(self) -> None:
        premises(horizon=self.horizon, delta=self.delta, eps=self.eps)
        if self.tau is not None and not 0 <= self.tau < math.inf:
            raise BadValueError(f"tau = {self.tau}; a limit on |log ratio| is a number >= 0")

    @property
    def token_tv(self) -> float:
        """The largest TV that the limits allow at a context, min(eps, sqrt(delta/2), 1)."""
        return min(1.0 if self.eps is None else self.eps, pinsker(self.delta))

    def weights(self) -> Float[np.ndarray, " t"]:
        """omega_t for t = 1 .. T; the last is 0."""
        left = np.arange(self.horizon - 1, -1, -1, dtype=np.float64)
        return context_shift(left, delta=self.delta, eps=self.token_tv)

    @property
    def total_weight(self) -> float:
        """Z(T)."""
        return total_shift(self.horizon, delta=self.delta, eps=self.token_tv)


def sample_ratio_error(*, horizon: int, tau: float, constants: str = "paper") -> float:
    """Bound the distance of the masked surrogate from the accepted gain if accepted |log w_t| <= tau.

    With l_t = log w_t, the two differ on an accepted sequence by

        D(l) = sum_t (w_t - 1) - (prod_t w_t - 1)

        |D| <= sum_t (e^tau - 1)(e^((T-t) tau) - 1) = e^(T tau) - 1 - T (e^tau - 1)      (paper)
         D  <= T (cosh tau - 1) + a log a - a + 1,   a = sinh(tau) / tau                (sharp)

    The paper's exponential is attained, but only where all ratios point up: there the surrogate
    says too little, which a guarantee of improvement does not mind. What it says too much is sharp:
    about T tau^2 / 2. By convexity w_t <= cosh tau + a l_t, so with s = sum_t l_t
    D <= T (cosh tau - 1) + a s - (e^s - 1), largest at s = log a. T/2 ratios up and T/2 down attain
    all but the last terms, of order tau^4.

    Args:
        horizon: longest possible response T, tokens.
        tau: limit on |log w| of accepted tokens, nats.
        constants: "paper" bounds both sides, "sharp" the one that a lower bound on the gain needs.

    Returns: B_A; infinite where the exponential overflows.

    Example:
        >>> round(sample_ratio_error(horizon=4, tau=0.05), 8)
        0.01631837
        >>> round(sample_ratio_error(horizon=4096, tau=0.01, constants="sharp"), 4)
        0.2048

    Reference: Li et al., arXiv:2512.23075v5, Remark G.2, second choice. The sharp one is not there.
    """
    check_constants(constants)
    TrustRegion(horizon=horizon, delta=math.inf, tau=tau)
    if max(tau, horizon * tau if constants == "paper" else 0.0) > 700:
        return math.inf
    if constants == "sharp":
        return 2 * horizon * math.sinh(tau / 2) ** 2 + _sinh_excess(tau)
    if horizon * tau < 1:  # the difference below would cancel: its series has only positive terms
        return math.fsum(tau**j / math.factorial(j) * (float(horizon) ** j - horizon) for j in range(2, 26))
    return math.expm1(horizon * tau) - horizon * math.expm1(tau)


def _sinh_excess(tau: float) -> float:
    """a log a - a + 1 for a = sinh(tau) / tau, without cancellation."""
    if tau < 0.1:
        h = tau**2 / 6 * (1 + tau**2 / 20 * (1 + tau**2 / 42))
        return h * h / 2 * (1 - h / 3) if h < 1e-4 else (1 + h) * math.log1p(h) - h
    a = math.sinh(tau) / tau
    return a * math.log(a) - a + 1
