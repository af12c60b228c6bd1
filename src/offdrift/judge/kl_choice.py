"""Choice of the estimate of a KL: exact, else k3, else k1.

k1 = mean(-l) and k3 = mean(e^l - 1 - l) have the same expectation where E[e^l] = 1 (docs/rules.md).
Then k3, which is never negative and of second order in l, is far less noisy: a few sequences leave
k1 at several times its size. Where the mean ratio is not 1 the record is not that of the sampled
distribution, and k3 - k1 is the bias: k1 shows it, and the signatures find it.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from offdrift.judge.findings import Row, number

EXACT = {
    "mismatch": "divergence/kl_rollout_old_mean",
    "full": "divergence/kl_rollout_current_mean",
    "staleness": "divergence/kl_old_current_mean",
}


def kl_metrics(on: str, z: float | None, limit: float) -> tuple[str, ...]:
    """The metrics that measure the KL of a pair of policies, the best first.

    Args:
        z: distance of the mean ratio from 1, standard errors; None if it is unknown.
        limit: the threshold `ratio_mean_z`, up to which the mean ratio is still 1.

    Example:
        >>> kl_metrics("mismatch", -0.3, 6.0)[1:], kl_metrics("mismatch", -20.0, 6.0)[1:]
        (('mismatch/k3', 'mismatch/k1'), ('mismatch/k1', 'mismatch/k3'))
    """
    agrees = z is None or abs(z) < limit
    return (EXACT[on], *(f"{on}/{k}" for k in (("k3", "k1") if agrees else ("k1", "k3"))))


def joined_z(zs: Sequence[float]) -> float | None:
    """Steps are independent samples: their z add up to z sqrt(n) of their mean (Stouffer)."""
    return sum(zs) / len(zs) ** 0.5 if zs else None


def kl_of(rows: Sequence[Row], on: str, limit: float) -> tuple[float, str] | None:
    """The median KL of some rows and the metric that it was read from; `limit` as in `kl_metrics`."""
    z = joined_z([x for r in rows if (x := number(r, f"{on}/ratio_mean_z")) is not None])
    for metric in kl_metrics(on, z, limit):
        if values := [x for r in rows if (x := number(r, metric)) is not None]:
            return median(values), metric
    return None
