"""Inequalities between divergences, and the largest shift between the contexts of two policies.

Worst-case mathematics on plain numbers. Divergences are in nats, total variation (TV) is half the L1 distance, `kl`
is KL(rollout || current); an infinite one is legal and means "not known": the TV routes still hold.
"""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float

_CHUNK = 1 << 16  # remaining steps per block: two float64 temporaries stay in the L2 cache
_ZETA_MINUS_HALF = -0.20788622497735457  # the constant of Euler-Maclaurin for square roots


def pinsker(kl: float) -> float:
    """Pinsker's inequality, the largest TV that a KL divergence allows.

        TV <= min(1, sqrt(KL / 2))

    Args:
        kl: KL divergence in either direction, nats.

    Example:
        >>> pinsker(1e-4)
        0.007071067811865475

    Reference: Li et al., arXiv:2512.23075v5, Definition 2.3 and Appendix B.
    """
    return min(1.0, math.sqrt(kl / 2))


def tv_from_chi2(chi2: float) -> float:
    """The largest TV that a chi-squared divergence allows (Cauchy-Schwarz).

        TV <= min(1, sqrt(chi2) / 2)

    Args:
        chi2: E[ratio^2] - 1 under the distribution that was sampled.

    Example:
        >>> tv_from_chi2(0.04)
        0.1
    """
    return min(1.0, math.sqrt(chi2) / 2)


def marginal_kl(horizon: int, delta: float) -> float:
    """Chain rule: the largest KL between two laws of `horizon` tokens, nats.

        KL(d_mu || d_pi) = sum_t E_mu[KL(c_t)] <= T delta

    Args:
        horizon: number of tokens T.
        delta: maximum over contexts of the token KL, nats.

    Reference: Li et al., arXiv:2512.23075v5, Definition 2.3 and Appendix B.
    """
    return horizon * delta if horizon else 0.0


def context_shift(
    steps: Float[np.ndarray, " k"], *, delta: float, eps: float = 1.0, cap: float = 1.0
) -> Float[np.ndarray, " k"]:
    """TV between the two policies' laws of what `steps` tokens can write.

        shift(k) = min(cap, k eps, sqrt(k delta / 2))

    With k = t - 1 it bounds the shift of the context at position t (Lemma 3.2), with k = T - t that
    of the future after it (Theorem 3.6).

    Args:
        steps: numbers of tokens k.
        delta: maximum over contexts of the token KL, nats; infinite leaves the TV route alone.
        eps: maximum over contexts of the token TV; 1 leaves the KL route alone.
        cap: whatever bounds every shift: 1, or the TV of whole sequences.

    Returns: the shift for each k, non-decreasing in k, 0 at k = 0.

    Example:
        >>> context_shift(np.array([0.0, 1.0, 4.0, 900.0]), delta=0.02)
        array([0. , 0.1, 0.2, 1. ])

    Reference: Li et al., arXiv:2512.23075v5, Lemma 3.2, eq. 10.
    """
    # From k = 1 on, eps = 1 and delta = 2 reach the cap as any larger value does; limiting them
    # keeps an infinite delta from meeting k = 0.
    limited = math.sqrt(min(delta, 2.0) / 2)
    return np.minimum(np.minimum(steps * min(eps, 1.0), np.sqrt(steps) * limited), cap)


def total_shift(horizon: int, *, delta: float, eps: float = 1.0, cap: float = 1.0) -> float:
    """The context shift summed over all positions of a sequence.

        S = sum_{t=1}^T min(cap, (t-1) eps, sqrt((t-1) delta / 2))

    The exact sum, at a cost that does not grow with T: the terms are linear in t up to where the KL
    route takes over, then square roots up to the cap, then the cap.

    Args:
        horizon: number of tokens T.
        delta, eps, cap: as in `context_shift`.

    Example:
        >>> round(total_shift(4096, delta=float("inf"), eps=0.00707106781), 5)
        4024.78846
        >>> round(total_shift(10**12, delta=1e-12, eps=1e-8), 3)
        471404520790.636

    Reference: Li et al., arXiv:2512.23075v5, eqs. 12, 13 and 17.
    """
    if min(delta, eps, cap) == 0:
        return 0.0
    linear, rising = route_ends(horizon - 1, delta=delta, eps=eps, cap=cap)
    roots = _sum_of_roots(rising) - _sum_of_roots(linear) if rising > linear else 0.0
    parts = eps * (linear * (linear + 1) // 2), roots * math.sqrt(min(delta, 2.0) / 2)
    return math.fsum([*parts, (horizon - 1 - rising) * cap])


def route_ends(steps: int, *, delta: float, eps: float, cap: float = 1.0) -> tuple[int, int]:
    """Return the last tokens at which the first two routes to the context shift are the smallest.

        k eps              for k = 1 .. a,       a = min(delta / (2 eps^2), cap / eps)
        sqrt(k delta / 2)  for k = a+1 .. b,     b = 2 cap^2 / delta
        cap                for k = b+1 .. steps

    Args:
        steps: largest number of tokens k.
        delta, eps, cap: as in `context_shift`, above 0.

    Returns: a and b, rounded down, 0 <= a <= b <= steps.

    Example:
        >>> route_ends(4095, delta=1e-4, eps=5e-3, cap=0.05)
        (2, 50)

    Reference: Li et al., arXiv:2512.23075v5, Lemma 3.2 and Section 3.3.
    """
    linear = math.floor(min(steps, delta / eps / (2 * eps), cap / eps))
    return linear, max(linear, math.floor(min(steps, 2 * cap * cap / delta)))


def _sum_of_roots(n: int) -> float:
    """sqrt(1) + ... + sqrt(n): by Euler-Maclaurin, whose next term is below a rounding."""
    if n < 256:
        return math.fsum(math.sqrt(k) for k in range(1, n + 1))
    root = math.sqrt(n)
    tail = 1 / (24 * root) - 1 / (1920 * root * n * n)
    return math.fsum([2 / 3 * n * root, root / 2, _ZETA_MINUS_HALF, tail])


def weighted_shift(mean_tv: Float[np.ndarray, " t"] | float, *, horizon: int, delta: float, eps: float = 1.0) -> float:
    """The shift of the future, weighted with the mean TV at each position.

        sum_{t=1}^T Dbar_t min(1, (T-t) eps, sqrt((T-t) delta / 2))

    Args:
        mean_tv: Dbar_t = E_rollout[TV(c_t)] for t = 1 .. T, or one number for all positions.
        horizon, delta, eps: as in `total_shift`.

    Reference: Li et al., arXiv:2512.23075v5, Theorem 3.6, eqs. 18-20.
    """
    if not isinstance(mean_tv, np.ndarray):
        return mean_tv * total_shift(horizon, delta=delta, eps=eps) if mean_tv else 0.0
    weights = mean_tv[::-1]  # entry k belongs to the position with k tokens to come
    sums = []
    for low in range(0, horizon, _CHUNK):
        k = np.arange(low, min(low + _CHUNK, horizon), dtype=np.float64)
        shift = context_shift(k, delta=delta, eps=eps)
        # pairwise sums: a dot product of equal terms rounds the same way each time
        sums.append(float((weights[low : low + _CHUNK] * shift).sum()))
    return math.fsum(sums)
