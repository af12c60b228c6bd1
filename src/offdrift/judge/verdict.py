"""`verdict`: all findings in one word and one or two sentences. `escalate`: what to do next.

The escalation ladder is rejection sampling, then rejection with token TIS, then a systems fix.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from offdrift.judge.findings import URGENCY, Finding, Row, number
from offdrift.judge.kl_choice import kl_metrics
from offdrift.judge.rules import load_rules

LONG_WORD = re.compile(r"[^\W\d_]{4,}")


def verdict(
    findings: Sequence[Finding],
    numbers: Row | None = None,
    *,
    missing: Sequence[str] = (),
    limits: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """The level, "ok", "watch", "act" or "stop", what to tell a person, and what to do in steps.

    All are the first finding's: findings come with the most severe first, and a cause is as severe as what follows
    from it.

    Args:
        numbers: metrics of the run; named where nothing is wrong.
        missing: sentences on what these findings have not seen; the first stands before the rest.
        limits: thresholds by name (`Rules.limits`), if not the built-in ones.

    Example:
        >>> verdict([], {"mismatch/pearson": 0.9995, "mismatch/k1": 0.001})["text"]
        'No drift that matters: Pearson correlation 0.9995, KL 0.001 nat per token.'
    """
    shown = [f for f in findings if f.severity != "info"]
    if not shown:
        text = f"No drift that matters{_agreement(numbers or {}, (limits or load_rules().limits)['ratio_mean_z'])}."
        return {"level": "ok", "text": " ".join([*missing[:1], text]), "steps": []}
    first = min(shown, key=lambda f: URGENCY.index(f.severity))
    others = len(shown) - 1
    confirm = deciding_measurement(first.fix, first.decides)
    steps = [*in_steps(first.fix), *([f"To confirm: {confirm}"] if confirm else [])]
    steps += [f"Then look at {others} more finding{'s' * (others > 1)}."] if others else []
    return {"level": first.severity, "text": " ".join([*missing[:1], first.symptom]), "steps": steps}


def in_steps(fix: str) -> list[str]:
    """A fix that is done one thing after the other, in its steps.

    Example:
        >>> in_steps("Synchronize and run again; then, only if the gap stays, weight each token.")
        ['Synchronize and run again.', 'Only if the gap stays, weight each token.']
        >>> in_steps("Compare the tensors; then send those that differ.")
        ['Compare the tensors.', 'Send those that differ.']
    """
    parts = [part for part in re.split(r";\s+then,?\s+", fix.rstrip(".")) if part]
    return [f"{part[:1].upper()}{part[1:]}." for part in parts]


def deciding_measurement(fix: str, measurement: str) -> str:
    """The measurement that tells the causes apart, or "" if the fix already asks for it.

    The fix asks for it if it has every word of four letters or more, in singular or plural.

    Example:
        >>> deciding_measurement("Compare checksums of the tensors, then resend.", "Compare checksums of all tensors.")
        ''
        >>> deciding_measurement("Compare checksums of the tensors, then resend.", "Run both engines in float32.")
        'Run both engines in float32.'
    """
    fix_words, words = ({w.removesuffix("s") for w in LONG_WORD.findall(t.lower())} for t in (fix, measurement))
    return "" if words <= fix_words else measurement


def _agreement(numbers: Row, limit: float) -> str:
    """Correlation, KL and chi2 of the first pair of policies that has any of them; or that two columns are equal."""
    for on in ("mismatch", "full", "staleness"):
        if number(numbers, f"{on}/abs_log_ratio_mean") == 0:  # two engines leave rounding
            return ": both columns of log-probs are the same at every token, so one may be a copy of the other"
        rows = (
            ("Pearson correlation {:.4f}", (f"{on}/pearson",)),
            ("KL {:.4g} nat per token", kl_metrics(on, number(numbers, f"{on}/ratio_mean_z"), limit)),
            ("chi2 {:.3g}", (f"{on}/chi2_token",)),
        )
        best = ((text, next((x for n in names if (x := number(numbers, n)) is not None), None)) for text, names in rows)
        if texts := [text.format(x) for text, x in best if x is not None]:
            return ": " + ", ".join(texts)
    return " shows in this log"


Action = Literal["rejection", "rejection and token TIS", "systems fix"]


class Escalation(NamedTuple):
    """Next action, and the number that decides it."""

    action: Action
    because: str


def escalate(
    chi2_token: float | int,
    rs_masked: float | int,
    *,
    ess_after_rs: float | int | None = None,
    pearson: float | int | None = None,
    prob_diff_max: float | int | None = None,
    kl: float | int | None = None,
    limits: Mapping[str, float] | None = None,
) -> Escalation:
    """The survey's escalation. Rejection runs first in every row: tails are removed, then weighted.

        systems fix               rs_masked > 25 %, ESS after RS < 0.3, Pearson < 0.95, chi2_token > 4
        rejection and token TIS   2 < chi2_token <= 4, or 10 % <= rs_masked <= 25 %
        rejection                 otherwise

    The source leaves chi2_token = 2 and > 4 open; here they are rejection alone and a systems fix.
    What is None or NaN is unknown and decides nothing.

    Args:
        chi2_token: of the ratio that is corrected.
        rs_masked: share of the batch that rejection alone removes.
        ess_after_rs: effective share of what is left.
        pearson: correlation of the probabilities of the two policies.
        prob_diff_max: largest difference of a token's probabilities. Where it is small, a low
            correlation only says that all tokens are about equally likely, and does not count.
        kl: between the two policies, nats per token. Where it is large, a low correlation counts.
        limits: thresholds by name, if not the built-in ones.

    Example:
        >>> escalate(2.5, 0.05)
        Escalation(action='rejection and token TIS', because='token chi2 is 2.5, above 2')

    Reference: survey, "When to escalate".
    """
    t = load_rules().limits if limits is None else limits
    action: Action = "rejection"
    because = f"token chi2 is {chi2_token:.3g} and rejection would mask only {rs_masked:.1%} of the batch"
    if correlation_broken(pearson, prob_diff_max=prob_diff_max, kl=kl, limits=t):
        action = "systems fix"
        because = f"the policies' probabilities correlate at {pearson:.3g}, below {t['pearson_broken']:g}"
    elif rs_masked > t["rs_hard"]:
        action = "systems fix"
        because = f"rejection would mask {rs_masked:.1%} of the batch, above {t['rs_hard']:.0%}"
    elif ess_after_rs is not None and ess_after_rs < t["ess_wasted"]:
        action = "systems fix"
        because = (
            f"the effective sample size after rejection is {ess_after_rs:.1%} of what is kept, "
            f"below {t['ess_wasted']:.0%}"
        )
    elif chi2_token > t["chi2_last"]:
        action, because = "systems fix", f"token chi2 is {chi2_token:.3g}, above {t['chi2_last']:g}"
    elif chi2_token > t["chi2_toxic"]:
        action, because = "rejection and token TIS", f"token chi2 is {chi2_token:.3g}, above {t['chi2_toxic']:g}"
    elif rs_masked >= t["rs_soft"]:
        action = "rejection and token TIS"
        because = f"rejection alone would mask {rs_masked:.1%} of the batch, at least {t['rs_soft']:.0%}"
    return Escalation(action, because)


def correlation_broken(
    pearson: float | int | None,
    *,
    prob_diff_max: float | int | None,
    kl: float | int | None,
    limits: Mapping[str, float],
) -> bool:
    """Whether the correlation of two policies' probabilities says that no correction helps.

    It is a correlation over the probabilities that occur: where all of them are near 1, differences
    of no weight spoil it. It counts unless some probability is known not to differ visibly, and the
    policies are not known to differ in KL.
    """
    if pearson is None or not pearson < limits["pearson_broken"]:
        return False
    alike = prob_diff_max is not None and prob_diff_max <= limits["prob_diff_visible"]
    return not alike or (kl is not None and kl > limits["kl_clean"])
