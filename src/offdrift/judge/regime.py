"""`regime`: which of bias and variance an off-policy correction would have to fight, as one of four names.

Total variation bounds the bias of token weights, chi2 the variance of exact weights. Each is low or high.

    TV low,  chi2 low     on-policy in effect: no correction is needed
    TV high, chi2 low     bias: token weights or geometric rejection are enough
    TV low,  chi2 high    variance: truncate or mask whole sequences, and weight by no products
    TV high, chi2 high    both: no correction alone is enough, make the gap of the system smaller
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offdrift.judge.findings import Row, number
from offdrift.judge.kl_choice import kl_of
from offdrift.judge.rules import load_rules

MEANING = {
    "TV low, chi2 low": "on-policy in effect: no correction is needed",
    "TV high, chi2 low": "bias: token weights or geometric rejection are enough",
    "TV low, chi2 high": "variance: truncate or mask whole sequences, and weight by no products",
    "TV high, chi2 high": "both: no correction alone is enough, make the gap of the system smaller",
}
"""The four regimes, and the kind of tool that fits each. What to do is said by `decide`, which knows the cause."""
CALM = "TV low, chi2 low"
"""The regime in which nothing has to be corrected."""
EXACT = {"full": "divergence/tv_rollout_current_mean", "mismatch": "divergence/tv_rollout_old_mean"}


def regime(numbers: Row, *, limits: Mapping[str, float] | None = None) -> dict[str, Any] | None:
    """Name the regime of a run.

        TV high     above `tv_low`: exact if recorded, else sampled; without it KL above `kl_large`
        chi2 high   of tokens above `chi2_moderate`, or of sequences above `chi2_seq_exploded`

    Args:
        numbers: metrics of the run; of the current policy against the rollout's, else of the old one.
        limits: thresholds by name (`Rules.limits`), if not the built-in ones.

    Returns: `name`, `meaning`, `on` and the numbers that decided (`tv`, `kl`, `chi2_token`, `chi2_seq`; None where
        one was not logged); None where TV and KL, or chi2, are unknown.

    Example:
        >>> regime({"full/tv_sampled": 0.02, "full/chi2_token": 0.01, "full/chi2_seq": 5e4})["name"]
        'TV low, chi2 high'

    Reference: survey, "The SGA bias-variance framework"; Liu, Li et al., When Speed Kills Stability, 2025.
    """
    t = load_rules().limits if limits is None else limits
    on = next((x for x in EXACT if number(numbers, f"{x}/chi2_token") is not None), None)
    if on is None:
        return None

    def first(*names: str) -> float | None:
        return next((x for n in names if (x := number(numbers, n)) is not None), None)

    tv = first(EXACT[on], f"{on}/tv_sampled")
    estimate = kl_of([numbers], on, t["ratio_mean_z"])
    kl = None if estimate is None else estimate[0]
    token = first(f"{on}/chi2_token") or 0.0
    sequence = first(f"{on}/chi2_seq_largest", f"{on}/chi2_seq")
    if tv is None and kl is None:
        return None
    biased = tv > t["tv_low"] if tv is not None else abs(kl or 0.0) > t["kl_large"]
    noisy = token > t["chi2_moderate"] or (sequence or 0.0) > t["chi2_seq_exploded"]
    name = f"TV {'high' if biased else 'low'}, chi2 {'high' if noisy else 'low'}"
    measured = {"on": on, "tv": tv, "kl": kl, "chi2_token": token, "chi2_seq": sequence}
    return {"name": name, "meaning": MEANING[name], **measured}
