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

from offdrift.judge import escalate, load_rules
from offdrift.judge.kl_choice import kl_of
from offdrift.judge.ladder import Action, correlation_broken

Rung = Action | Literal["none", "token TIS"]

LADDERS = {
    "mismatch": ("disabled", "decoupled_geo_rs", "decoupled_geo_rs_token_tis"),
    "full": ("none", "bypass_pg_geo_rs", "bypass_pg_geo_rs_token_tis"),
}
"""What to turn on at each rung, where the old policy was logged and where it was not."""
TAILS = {"mismatch": ("decoupled_token_icepop", "decoupled_token_is"), "full": ("bypass_pg_token_icepop", "token_tis")}
"""The band on single tokens that measures the tail, and truncated weights without any band."""
BAND = "(0.99_1.01)"
"""Names the rows of the table that try the presets with the band that is advised."""


def suggest(
    rows: Sequence[Mapping[str, Any]], overall: Mapping[str, Any], *, limits: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """The smallest correction that the data ask for, and why.

    Args:
        rows: the counterfactual table (`Counterfactual.table`).
        overall: metrics of the whole log; where the old policy was logged its mismatch decides,
            else the full ratio.
        limits: thresholds by name (`Rules.limits`), if not the built-in ones.

    Returns: `method` (a row of `METHODS`; None if none helps or nothing can be said), `settings` for
        `override`, `row` (the method with these settings in the table), `why`, and the `rung` of the
        ladder (None if nothing can be said).

    Example:
        >>> suggest([], {"mismatch/chi2_token": 0.01, "mismatch/k1": 0.001})["method"]
        'disabled'
    """
    t = load_rules().limits if limits is None else limits
    missing = max(overall.get(x) or 0.0 for x in ("data/unread_frac", "batch/unscored_frac"))
    if missing > t["data_most"]:
        return _said(
            None, None, f"{missing:.0%} of the log is missing, so what the rest asks for may not be what the run needs"
        )
    on = next((x for x in LADDERS if _known(overall, f"{x}/chi2_token")), None)
    if on is None:
        return _said(
            None,
            None,
            "drift cannot be measured: log the rollout engine's log-probs, and those of the training engine for the same tokens",
        )
    chi2, pearson = _number(overall, f"{on}/chi2_token"), _number(overall, f"{on}/pearson")
    kl, ppl = _kl(overall, on), _number(overall, f"{on}/ppl_ratio")
    prob_diff = _number(overall, f"{on}/prob_diff_max")
    broken = correlation_broken(pearson, prob_diff_max=prob_diff, kl=kl, limits=t)
    nothing, reject, both = LADDERS[on]
    if kl < t["kl_large"] and chi2 < t["chi2_moderate"] and not broken:
        decorrelated = pearson < t["pearson_clean"] and not prob_diff <= t["prob_diff_visible"]
        clean = kl < t["kl_clean"] and not decorrelated and not abs(ppl - 1) > t["ppl_near"]
        size = f"KL is {kl:.2g} nats per token and token chi2 {chi2:.2g} ({on})"
        kind = "there is no meaningful drift" if clean else "drift is mild and correction optional"
        return _said("none", nothing, f"{kind}: {size}")
    tried = {row["name"]: row for row in rows if row["why_not"] is None}
    alone, weighted = tried.get(reject + BAND), tried.get(both + BAND)
    if alone is None or weighted is None:
        return _said(None, None, f"{reject} was not tried on this log, so its cost is unknown")
    ess = weighted["ess_frac"] / weighted["kept_tokens"] if weighted["kept_tokens"] else 0.0
    rung, why = escalate(
        chi2, 1 - alone["kept_tokens"], ess_after_rs=ess, pearson=pearson, prob_diff_max=prob_diff, kl=kl, limits=t
    )
    if rung == "systems fix":
        aged = _reweighted(tried, overall, on, t)
        return aged or _said(rung, None, f"repair the system, no correction is cheaper: {why} ({on})")
    chosen = tried[(reject if rung == "rejection" else both) + BAND]
    left = f"{chosen['kept_tokens']:.1%} of tokens stay, effective sample size {chosen['ess_frac']:.1%}"
    name = chosen["name"].removesuffix(BAND)
    return _said(rung, name, f"{why} ({on}); {left}", chosen["settings"])


def _reweighted(
    tried: Mapping[str, Mapping[str, Any]], overall: Mapping[str, Any], on: str, limits: Mapping[str, float]
) -> dict[str, Any] | None:
    """Token weights alone, where age explains the drift and they are usable; None elsewhere.

    Where the log says that weights were older, their age explains a low correlation too. Where it
    does not say, only what the centered band would reject is set aside. Policies of equal weights
    have nothing to catch up with: their engines disagree.
    """
    tail, weights = (tried.get(name) for name in TAILS[on])
    ess, lag = _number(overall, f"{on}/ess_frac"), _number(overall, "version_lag/mean")
    if tail is None or weights is None or not ess >= limits["ess_half"] or (lag == 0 and on == "mismatch"):
        return None
    chi2 = _number(overall, f"{on}/chi2_token")
    kl = _kl(overall, on)
    rejected = 1 - tail["kept_tokens"]
    rung = escalate(
        chi2,
        rejected,
        ess_after_rs=ess,
        pearson=None if lag > 0 else _number(overall, f"{on}/pearson"),
        prob_diff_max=_number(overall, f"{on}/prob_diff_max"),
        kl=kl,
        limits=limits,
    ).action
    if rung == "systems fix":
        return None
    size = f"KL is {kl:.2g} nats per token and token chi2 {chi2:.2g} ({on}), with no heavy tail: {rejected:.1%} of tokens have a ratio outside [0.5, 5]"
    left = f"a band around no drift would mask most of the batch, weights leave an effective sample size of {weights['ess_frac']:.1%}"
    age = (
        f"tokens are {lag:.3g} updates old on average"
        if lag > 0
        else "the log does not say that the policies hold the same weights; if they do, repair the engines instead"
    )
    return _said("token TIS", weights["name"], f"{size}; {left}; {age}")


def _said(rung: Rung | None, method: str | None, why: str, settings: Mapping[str, float] = {}) -> dict[str, Any]:
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
