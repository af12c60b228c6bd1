"""Rows of the Trust Region Masking family: reject whole sequences, push the rest by the full ratio."""

from __future__ import annotations

from offdrift.correction import Correction, Gate, LengthNeutralGate
from offdrift.correction.compose import GateLike
from offdrift.methods.method import Bias, Method
from offdrift.objectives import ImportanceSampled

TRM = "Li et al., Trust Region Masking, arXiv:2512.23075v5"
FEW_ACCEPTED = "rejects almost everything once drift is strong; below 70 % acceptance nothing is learned reliably"
DETECTOR = "a detector, not a guarantee: rare tokens give false alarms, unsampled tokens none"


def _gate(statistic: str, unit: str, high: float) -> Gate:
    return Gate(statistic=statistic, on="full", unit=unit, high=high)  # type: ignore[arg-type]


def _trm(
    *gates: GateLike,
    summary: str,
    fails: str,
    where: str = "section 4.3 and Algorithm 1",
    bias: Bias = "O(drift)",
) -> Method:
    return Method(
        objective=ImportanceSampled(on="full"),
        correction=Correction(gates),
        summary=summary,
        mechanism="admission test of the whole sequence",
        target="one bad token corrupts its sequence",
        fails=fails,
        bias=bias,
        reference=f"{TRM}, {where}",
    )


ROWS: dict[str, Method] = {
    "trm_max": _trm(
        _gate("kl", "seq_max", 0.05),
        summary="reject a sequence if the exact KL of any token exceeds 0.05 nat",
        fails=FEW_ACCEPTED + "; long sequences are rejected more often",
    ),
    "trm_max_tv": _trm(
        _gate("tv", "seq_max", 0.1),
        summary="reject a sequence if the exact TV of any token exceeds 0.1 (no value is published)",
        fails=FEW_ACCEPTED + "; long sequences are rejected more often",
        where="section 4.3",
    ),
    "trm_avg": _trm(
        _gate("kl", "seq_mean", 0.001),
        summary="reject a sequence if its mean exact KL per token exceeds 0.001 nat",
        fails="one catastrophic token hides in a long sequence",
    ),
    "trm_max_avg": _trm(
        _gate("kl", "seq_max", 0.1),
        _gate("kl", "seq_mean", 0.002),
        summary="both criteria, each looser: worst token 0.1, mean 0.002 nat",
        fails=FEW_ACCEPTED,
    ),
    "trm_max_k2": _trm(
        _gate("k2", "seq_max", 0.05),
        summary="trm_max with the sampled stand-in k2 = (log w)^2 / 2; |log w| <= 0.316 is the same region",
        fails=DETECTOR,
    ),
    "trm_avg_k3": _trm(
        _gate("k3", "seq_mean", 0.001),
        summary="trm_avg with the sampled stand-in k3 = w - 1 - log w",
        fails=DETECTOR,
    ),
    "trm_max_avg_k2_k3": _trm(
        _gate("k2", "seq_max", 0.1),
        _gate("k3", "seq_mean", 0.002),
        summary="trm_max_avg with the sampled stand-ins k2 and k3",
        fails=DETECTOR,
    ),
    "trm_ratio": _trm(
        _gate("abs_log_ratio", "seq_max", 0.1),
        summary="reject a sequence if |log w| of any token exceeds 0.1: discharges the bound G.2 without a precondition",
        fails="the bound grows exponentially in the limit times the tokens left",
        where="Remark G.2",
    ),
    "ln_trm": _trm(
        LengthNeutralGate(high=0.05),
        summary="reject by the mean of |w - 1|, weighted by how much each position can still matter",
        fails="the last token has weight 0: an outlier there is invisible; add a gate on the worst token",
        where="Appendix F.2, eqs. 98-99",
    ),
    "ser": _trm(
        _gate("ratio_error", "seq_mean", 0.1),
        summary="reject by the sequence-error ratio, the plain mean of |w - 1|",
        fails="an average hides one catastrophic token",
        where="Appendix F.3, eq. 100",
    ),
}
