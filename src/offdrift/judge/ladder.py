"""When rejection stops being enough: RS, then RS with token TIS, then a systems fix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from offdrift.judge.rules import load_rules

Action = Literal["rejection", "rejection and token TIS", "systems fix"]


class Escalation(NamedTuple):
    """What to do next, and the number that decides it."""

    action: Action
    because: str


def escalate(
    chi2_token: float | int,
    rs_masked: float | int,
    *,
    ess_after_rs: float | int | None = None,
    pearson: float | int | None = None,
    prob_diff_max: float | int | None = None,
    limits: Mapping[str, float] | None = None,
) -> Escalation:
    """The survey's escalation. Rejection runs first in every row: tails are removed, then weighted.

        systems fix               rs_masked > 25 %, ESS after RS < 0.3, Pearson < 0.95, chi2_token > 4
        rejection and token TIS   2 < chi2_token <= 4, or 10 % <= rs_masked <= 25 %
        rejection                 otherwise

    The source leaves chi2_token = 2 and > 4 open; here they are rejection alone and a systems fix.

    Args:
        chi2_token: of the ratio that is corrected.
        rs_masked: share of sequences that rejection removes.
        ess_after_rs: effective share of what is left.
        prob_diff_max: largest difference of a token's probabilities. Where it is small, a low
            correlation only says that all tokens are about equally likely, and does not count.
        limits: thresholds by name, if not the built-in ones.

    Example:
        >>> escalate(2.5, 0.05).action
        'rejection and token TIS'

    Reference: survey, "When to escalate".
    """
    t = load_rules().limits if limits is None else limits
    if rs_masked > t["rs_hard"]:
        return Escalation("systems fix", f"rejection removes {rs_masked:.0%} of the batch")
    if ess_after_rs is not None and ess_after_rs < t["ess_wasted"]:
        return Escalation(
            "systems fix", f"effective sample size {ess_after_rs:.2g} after rejection"
        )
    differs = prob_diff_max is None or prob_diff_max > t["prob_diff_visible"]
    if pearson is not None and pearson < t["pearson_broken"] and differs:
        return Escalation("systems fix", f"correlation of the engines {pearson:.3g}")
    if chi2_token > t["chi2_last"]:
        return Escalation("systems fix", f"chi2 {chi2_token:.3g} is past what weights can carry")
    if chi2_token > t["chi2_toxic"]:
        return Escalation("rejection and token TIS", f"chi2 {chi2_token:.3g}: a toxic tail")
    if rs_masked >= t["rs_soft"]:
        return Escalation(
            "rejection and token TIS", f"rejection alone removes {rs_masked:.0%} of the batch"
        )
    return Escalation("rejection", f"chi2 {chi2_token:.3g}, {rs_masked:.0%} rejected")
