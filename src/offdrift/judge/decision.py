"""`decide`: one decision from findings and numbers, so that verdict and suggestion say the same.

A correction is suggested only where the first finding is one that corrections are for. While something is broken, the
suggestion is to repair it: a correction hides it and does not remove it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from offdrift.judge.findings import Finding
from offdrift.judge.rules import load_rules

REPAIRED = ("A", "A/B", "")
"""Letters of findings that no correction is for: engines, what only a measurement can tell, and what is missing."""
URGENT = ("stop", "act")
INSTEAD = ("decoupled_token_is", "token_tis", "bypass_ppo_clip")
"""Methods that reject nothing, to take where a finding's own would reject too much."""

ALREADY = (
    "the run trains with {name} already, which keeps {kept} of the tokens of this log; repair what made them drift"
)
TOO_MUCH = "{name} would keep only {kept} of the tokens of this log; {instead} keeps {left}"
NONE_KEEPS = "no correction keeps enough of this log ({name} {kept} of its tokens)"
LACKING = "this log cannot show what {name} would do: {why}"


def decide(
    findings: Sequence[Finding],
    by_numbers: Mapping[str, Any],
    *,
    table: Sequence[Mapping[str, Any]] = (),
    trains: str | None = None,
    limits: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Choose the correction to turn on, given the findings.

        nothing urgent        what the numbers say, as long as that is no correction; else nothing yet
        a fault or question   no correction: repair, or measure, first
        lag, tails, clips     what the numbers say if that is a correction, else what the run trains with if that is one
                              that works on this log, else the finding's own method or what keeps more of the log

    Args:
        findings: in their order; the first urgent one decides.
        by_numbers: `method`, `settings`, `row`, `why` and `rung` of the smallest correction that the numbers ask for.
        table: what each method would have done with this log (`Counterfactual.table`); empty if unknown.
        trains: the method that the run trains with.
        limits: thresholds by name (`Rules.limits`), if not the built-in ones.

    Returns: the same keys, and `rule`, the finding that decided; None if none did.

    Example:
        >>> decide([], {"method": "disabled", "rung": "none", "why": "KL is small"})["method"]
        'disabled'
    """
    first = next((f for f in findings if f.severity in URGENT), None)
    held = dict(by_numbers)
    rung = held.get("rung")
    correction = rung not in (None, "none", "systems fix") and held.get("method") is not None
    if first is None:
        watched = next((f for f in findings if f.severity == "watch"), None)
        if correction and watched is not None:
            why = f"nothing to correct yet, look again when it grows: {held.get('why', '')}"
            return {
                **held,
                "method": None,
                "row": None,
                "settings": {},
                "why": why,
                "rung": "none",
                "rule": watched.rule,
            }
        return {**held, "rule": None}
    if first.letter in REPAIRED:
        why = f"repair first, a correction would hide it: {first.fix}"
        if first.letter == "A/B":
            why = f"measure first, a correction would hide a fault: {first.fix}"
        return {"method": None, "row": None, "settings": {}, "why": why, "rung": "systems fix", "rule": first.rule}
    limits = load_rules().limits if limits is None else limits
    trained = next((row for row in table if row["name"] == trains and _corrects(row) and _keeps(row, limits)), None)
    if correction:
        why = held.get("why") if trained is None or trains != held["method"] else _already(trained)
        return {**held, "why": why, "rule": first.rule}
    if first.method is not None and rung == "none":
        if trained is not None:
            chosen = {"method": trains, "row": trains, "settings": {}, "why": _already(trained), "rung": "rejection"}
        else:
            chosen = _of_finding(first, table, limits)
        return {**held, **chosen, "rule": first.rule}
    if rung == "none":
        why = f"no correction addresses this: {first.fix}"
        return {**held, "method": None, "row": None, "settings": {}, "why": why, "rung": None, "rule": first.rule}
    return {**held, "rule": first.rule}


def _of_finding(finding: Finding, table: Sequence[Mapping[str, Any]], limits: Mapping[str, float]) -> dict[str, Any]:
    """The finding's method with the settings that keep enough of the log, else one that keeps more, else none."""
    name = str(finding.method)
    chosen = {"method": name, "row": name, "settings": {}, "why": finding.fix, "rung": "rejection"}
    own = [row for row in table if row["name"].partition("(")[0] == name]
    tried = [row for row in own if row["why_not"] is None]
    if not tried:
        lacks = [LACKING.format(name=name, why=row["why_not"]) for row in own[:1]]
        return {**chosen, "why": "; ".join([*lacks, finding.fix])}
    others = [row for row in table if row["name"] in INSTEAD and row["why_not"] is None]
    others.sort(key=lambda row: INSTEAD.index(row["name"]))
    best = next((row for row in (*tried, *others) if _keeps(row, limits)), None)
    kept = f"{max(row['kept_tokens'] for row in tried):.1%}"
    if best is None:
        why = f"{NONE_KEEPS.format(name=name, kept=kept)}: {finding.fix}"
        return {**chosen, "method": None, "row": None, "why": why, "rung": "systems fix"}
    chosen |= {"method": best["name"].partition("(")[0], "row": best["name"], "settings": dict(best["settings"])}
    if chosen["method"] != name:
        left = f"{best['kept_tokens']:.1%}"
        chosen["why"] = TOO_MUCH.format(name=name, kept=kept, instead=best["name"], left=left)
    return chosen


def _keeps(row: Mapping[str, Any], limits: Mapping[str, float]) -> bool:
    """Whether a method leaves enough of the log to train on, by the limits of the survey's escalation."""
    kept = row["kept_tokens"]
    if row["why_not"] is not None or kept is None or kept < 1 - limits["rs_hard"]:
        return False
    return row["ess_frac"] >= limits["ess_wasted"] * kept


def _corrects(row: Mapping[str, Any]) -> bool:
    """Whether a method acts on the distance from the rollout policy: by gate, by weight, or by a clip on it."""
    on_engine = row["on"].startswith(("full", "mismatch"))
    return bool(row["gates"] or row["weights"]) or (row["clipped_frac"] is not None and on_engine)


def _already(row: Mapping[str, Any]) -> str:
    return ALREADY.format(name=row["name"], kept=f"{row['kept_tokens']:.1%}")
