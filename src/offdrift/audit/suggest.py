"""Which correction to turn on, by what it would have done with the user's own data.

The ladder of the survey: reject; reject and reweight; repair the system. What each rung would have
rejected and what sample size it would have left is read from the counterfactual table.

The bands of the ladder are centered on no drift. Where weights are older than the policy they correct
for, every sequence has drifted a little (its mean log-ratio is about -KL), and such a band rejects
nearly all of them though no tail is heavy. There the tail is measured by a band on single tokens,
and the step between is taken: reweight alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from offdrift.judge import load_rules
from offdrift.judge.kl_choice import kl_of

Rung = Literal["none", "reject", "reject and reweight", "reweight", "system"]

KL_OK = 0.05
"""Nats per token below which correction is optional."""
CHI2_OK = 0.3
"""Token chi2 below which correction is optional."""
CHI2_REJECT = 2.0
"""Token chi2 up to which rejection alone suffices."""
CHI2_MOST = 4.0
"""Token chi2 above which no correction of tokens suffices."""
REJECTED_SOFT = 0.10
"""Share of tokens that rejection alone may cost."""
REJECTED_MOST = 0.25
"""Share of tokens beyond which rejection hides a broken system."""
ESS_LEAST = 0.3
"""Effective sample size, as a share of kept tokens, below which reweighting wastes the batch."""
ESS_USABLE = 0.5
"""Effective sample size of raw token weights, as a share of all tokens, from which they are usable."""
PEARSON_LEAST = 0.95
"""Correlation of the two policies' probabilities below which no correction helps."""
PROB_DIFF_MOST = 0.1
"""Difference of a token's two probabilities up to which a low correlation is no sign by itself."""
PEARSON_CLEAN, PPL_CLEAN, KL_CLEAN = 0.99, load_rules().limits["ppl_near"], 0.02
"""Agreement that is no meaningful drift: correlation, |perplexity ratio - 1|, nats."""

MISSING_MOST = 0.5
"""Share of a log that was not read or not scored, above which the rest suggests nothing."""

LADDERS = {
    "mismatch": ("disabled", "decoupled_geo_rs", "decoupled_geo_rs_token_tis"),
    "full": ("none", "bypass_pg_geo_rs", "bypass_pg_geo_rs_token_tis"),
}
"""What to turn on at each rung, where the old policy was logged and where it was not."""
TAILS = {
    "mismatch": ("decoupled_token_icepop", "decoupled_token_is"),
    "full": ("bypass_pg_token_icepop", "token_tis"),
}
"""The band on single tokens that measures the tail, and truncated weights without any band."""
BAND = "(0.99_1.01)"
"""Names the rows of the table that try the presets with the band that is advised."""


def escalation(
    chi2_token: float,
    rejected: float,
    ess: float = math.nan,
    pearson: float = math.nan,
) -> tuple[Rung, str]:
    """The rung that drift of this size needs, and the number that decides it.

        system                pearson < 0.95, rejected > 0.25, ess < 0.3 or chi2_token > 4
        reject and reweight   else, if chi2_token > 2 or rejected >= 0.1
        reject                else

    Args:
        chi2_token: mean of squared token ratios, less 1.
        rejected: share of tokens that rejection alone would mask.
        ess: effective sample size after rejection, as a share of what is kept; NaN if unknown.
        pearson: correlation of the probabilities of both policies; NaN if unknown.

    Example:
        >>> escalation(2.5, 0.05)
        ('reject and reweight', 'token chi2 is 2.5, above 2')

    Reference: the survey's rule of thumb "When to escalate from RS to IS to systems fix"; above a
    chi2 of 4 it says nothing, which is read as a system to repair.
    """
    if pearson < PEARSON_LEAST:
        return "system", f"the policies' probabilities correlate at {pearson:.3g}, below {PEARSON_LEAST:g}"  # fmt: skip
    if rejected > REJECTED_MOST:
        return "system", f"rejection would mask {rejected:.1%} of tokens, above {REJECTED_MOST:.0%}"
    if ess < ESS_LEAST:
        return "system", f"the effective sample size after rejection is {ess:.1%} of what is kept, below {ESS_LEAST:.0%}"  # fmt: skip
    if chi2_token > CHI2_MOST:
        return "system", f"token chi2 is {chi2_token:.3g}, above {CHI2_MOST:g}"
    if chi2_token > CHI2_REJECT:
        return "reject and reweight", f"token chi2 is {chi2_token:.3g}, above {CHI2_REJECT:g}"
    if rejected >= REJECTED_SOFT:
        return "reject and reweight", f"rejection alone would mask {rejected:.1%} of tokens, at least {REJECTED_SOFT:.0%}"  # fmt: skip
    return "reject", f"token chi2 is {chi2_token:.3g} and rejection would mask only {rejected:.1%} of tokens"  # fmt: skip


def suggest(rows: Sequence[Mapping[str, Any]], overall: Mapping[str, Any]) -> dict[str, Any]:
    """The smallest correction that the data ask for, and why.

    Args:
        rows: the counterfactual table (`Counterfactual.table`).
        overall: metrics of the whole log; where the old policy was logged its mismatch decides,
            else the full ratio.

    Returns: `method` (a row of `METHODS`; None if none helps or nothing can be said), `settings` for
        `override`, `row` (the method with these settings in the table), `why`, and the `rung` of the
        ladder (None if nothing can be said).

    Example:
        >>> suggest([], {"mismatch/chi2_token": 0.01, "mismatch/k1": 0.001})["method"]
        'disabled'
    """
    missing = max(overall.get(x) or 0.0 for x in ("data/unread_frac", "batch/unscored_frac"))
    if missing > MISSING_MOST:
        return _said(None, None, f"{missing:.0%} of the log is missing, so what the rest asks for may not be what the run needs")  # fmt: skip
    on = next((x for x in LADDERS if _known(overall, f"{x}/chi2_token")), None)
    if on is None:
        return _said(None, None, "drift cannot be measured: log the rollout engine's log-probs, and those of the training engine for the same tokens")  # fmt: skip
    chi2, pearson = _number(overall, f"{on}/chi2_token"), _correlation(overall, on)
    kl, ppl = _kl(overall, on), _number(overall, f"{on}/ppl_ratio")
    nothing, reject, both = LADDERS[on]
    if kl < KL_OK and chi2 < CHI2_OK and not pearson < PEARSON_LEAST:
        clean = kl < KL_CLEAN and not pearson < PEARSON_CLEAN and not abs(ppl - 1) > PPL_CLEAN
        size = f"KL is {kl:.2g} nats per token and token chi2 {chi2:.2g} ({on})"
        kind = "there is no meaningful drift" if clean else "drift is mild and correction optional"
        return _said("none", nothing, f"{kind}: {size}")
    tried = {row["name"]: row for row in rows if row["why_not"] is None}
    alone, weighted = tried.get(reject + BAND), tried.get(both + BAND)
    if alone is None or weighted is None:
        return _said(None, None, f"{reject} was not tried on this log, so its cost is unknown")
    ess = weighted["ess_frac"] / weighted["kept_tokens"] if weighted["kept_tokens"] else 0.0
    rung, why = escalation(chi2, 1 - alone["kept_tokens"], ess, pearson)
    if rung == "system":
        aged = _reweighted(tried, overall, on)
        return aged or _said(
            rung, None, f"repair the system, no correction is cheaper: {why} ({on})"
        )
    chosen = tried[(reject if rung == "reject" else both) + BAND]
    left = f"{chosen['kept_tokens']:.1%} of tokens stay, effective sample size {chosen['ess_frac']:.1%}"
    name = chosen["name"].removesuffix(BAND)
    return _said(rung, name, f"{why} ({on}); {left}", chosen["settings"])


def _correlation(overall: Mapping[str, Any], on: str) -> float:
    """Pearson's correlation of the probabilities; NaN where it says nothing by itself.

    It is a correlation over the probabilities that occur: where all of them are near 1, differences
    of no weight spoil it. It counts where the policies differ in KL or in some probability too.
    """
    narrow = _kl(overall, on) < KL_CLEAN
    alike = _number(overall, f"{on}/prob_diff_max") <= PROB_DIFF_MOST
    return math.nan if narrow and alike else _number(overall, f"{on}/pearson")


def _reweighted(
    tried: Mapping[str, Mapping[str, Any]], overall: Mapping[str, Any], on: str
) -> dict[str, Any] | None:
    """Token weights alone, where age explains the drift and they are usable; None elsewhere.

    Where the log says that weights were older, their age explains a low correlation too. Where it
    does not say, only what the centered band would reject is set aside. Policies of equal weights
    have nothing to catch up with: their engines disagree.
    """
    tail, weights = (tried.get(name) for name in TAILS[on])
    ess, lag = _number(overall, f"{on}/ess_frac"), _number(overall, "version_lag/mean")
    if tail is None or weights is None or not ess >= ESS_USABLE or (lag == 0 and on == "mismatch"):
        return None
    chi2 = _number(overall, f"{on}/chi2_token")
    pearson = math.nan if lag > 0 else _correlation(overall, on)
    if escalation(chi2, 1 - tail["kept_tokens"], ess, pearson)[0] == "system":
        return None
    kl = _kl(overall, on)
    size = f"KL is {kl:.2g} nats per token and token chi2 {chi2:.2g} ({on}), with no heavy tail: {1 - tail['kept_tokens']:.1%} of tokens have a ratio outside [0.5, 5]"  # fmt: skip
    left = f"a band around no drift would mask most of the batch, weights leave an effective sample size of {weights['ess_frac']:.1%}"  # fmt: skip
    age = f"tokens are {lag:.3g} updates old on average" if lag > 0 else "the log does not say that the policies hold the same weights; if they do, repair the engines instead"  # fmt: skip
    return _said("reweight", weights["name"], f"{size}; {left}; {age}")


def _said(
    rung: Rung | None, method: str | None, why: str, settings: Mapping[str, float] = {}
) -> dict[str, Any]:
    row = f"{method}{BAND}" if method and settings else method
    return {"method": method, "why": why, "settings": dict(settings), "row": row, "rung": rung}


def _kl(overall: Mapping[str, Any], on: str) -> float:
    """The KL as the diagnosis estimates it; where only k1 can be believed, its size: it is a bias then."""
    found = kl_of([overall], on)
    return math.nan if found is None else abs(found[0])


def _known(overall: Mapping[str, Any], name: str) -> bool:
    return not math.isnan(_number(overall, name))


def _number(overall: Mapping[str, Any], name: str) -> float:
    """A metric; NaN where it is missing, as where JSON says null."""
    value = overall.get(name)
    return math.nan if value is None else float(value)
