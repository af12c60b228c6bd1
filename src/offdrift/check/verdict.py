"""The verdict of a check in words: one short sentence, and the numbers behind it below."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offdrift.check.measure import Measured
from offdrift.check.precision import Explained
from offdrift.check.recommend import LEVELS, Level, worst
from offdrift.judge import Finding
from offdrift.judge import verdict as verdict_of_findings

WORDS = 15
"""Longest verdict, in words; what goes beyond is below it."""


@dataclass(frozen=True)
class CheckVerdict:
    """Verdict of a check, as `check.json` has it."""

    level: Level
    text: str
    """One sentence of at most `WORDS` words."""
    details: tuple[str, ...]
    """Numbers and exceptions behind it, the most important first."""
    steps: tuple[str, ...] = ()
    """What to do, in order."""

    def as_dict(self) -> dict[str, Any]:
        """The `verdict` entry of `check.json`."""
        return {"level": self.level, "text": self.text, "steps": [*self.steps], "details": [*self.details]}


def conclusion(
    baseline: Measured,
    rows: Sequence[Mapping[str, Any]],
    *,
    level: Level,
    pair: str,
    findings: Sequence[Finding] = (),
    wrong: Sequence[str] = (),
    precision: Explained | None = None,
    limits: Mapping[str, float] | None = None,
) -> CheckVerdict:
    """The verdict: a defect first, then what precision does not explain, a missed threshold, and a finding.

    Args:
        rows: of `thresholds`.
        level: the worst of rows, findings and defects.
        pair: both engines in words.
        findings: of the check, in their order.
        wrong: defects that an experiment detected, in words.
        precision: the divergence over what the rollout engine's dtype explains.
        limits: thresholds by name (`Rules.limits`), if not the built-in ones.
    """
    size = f"{pair} with the same weights: {_size_of(baseline)}"
    of_findings = verdict_of_findings(findings, limits=limits)
    steps = () if level == "ok" else tuple(of_findings["steps"])
    missed = [r for r in rows if not r["holds"] and r["kind"] != "budget"]
    if wrong:
        words = _capital("; ".join(wrong)) + "."
        return CheckVerdict(level, shortened(words), (size, *_rest(words)), steps)
    record = any(r["kind"] == "record" for r in missed)  # a wrong record explains any difference
    if precision is not None and precision.exceeded and not record:
        beyond = f"{precision.ratio:.3g} times what {precision.dtype} explains"
        text = f"KL {baseline.kl_known:.2g} nat per token, {beyond}: weights or configuration differ."
        return CheckVerdict(level, text, (size,), steps)
    if missed:
        first = max(missed, key=lambda r: LEVELS.index(r["level"]))
        if LEVELS.index(first["level"]) >= LEVELS.index(level):
            words = _capital(first["missed"]) + "."
            limit = f"{first['metric']} = {first['value']:.3g}, healthy: {first['relation']} {first['threshold']:g}."
            return CheckVerdict(level, shortened(words), (limit, *_rest(words), size), steps)
    if level != "ok":
        return CheckVerdict(level, shortened(of_findings["text"]), (*_rest(of_findings["text"]), size), steps)
    holds = "every threshold of health holds."
    compared = _capital(holds)
    if precision is not None and not math.isnan(precision.ratio):
        compared = f"{precision.ratio:.2g} times what {precision.dtype} explains, and {holds}"
    text = f"The engines agree: KL {baseline.kl_known:.2g} nat per token, nothing to repair."
    return CheckVerdict(level, text, (size, compared))


def with_claim(claim: Mapping[str, Any], verdict: Mapping[str, Any]) -> dict[str, Any]:
    """The verdict of a check that was to prove equality: the claim first.

    Args:
        claim: entry of `check.json`.
        verdict: of the check without the claim.
    """
    same, steps = claim.get("same_digest", True), []
    if not claim["equal"]:
        first = claim["first"]
        text = f"Not equal: first difference at request {first['request']}, token {first['token']}"
        steps = ["Give both sides one dtype and one set of options; then --bisect names the first module that differs."]
        if module := first.get("module"):
            text += f", in module {module}" if first["within"] == module else f", before module {module}"
            steps = [f"Compare {module} on both sides: its weights, dtype and kernel."]
    elif same:
        text = f"Equal: {claim['equal_tokens']:,} of {claim['tokens']:,} tokens, KL = 0, digest "
        text += claim["digest_rollout"]
    else:
        where = (claim.get("first_of_machines") or {}).get("text", "")
        text = "Equal here, but not the other machine's digest" + f": {where.partition(':')[0]}" * bool(where)
        steps = ["Compare both check.json (engines, versions, dtypes, options), then the processors."]
    level = verdict["level"] if claim["equal"] and same else worst([verdict["level"], "act"])
    behind = claim["text"]
    if claim["equal"] and same:  # its beginning is the verdict
        behind = behind.partition(" (")[2].replace(")", "", 1)
    details = [f"{_capital(behind)}.", verdict["text"], *verdict["details"]]
    return {**verdict, "level": level, "text": f"{text}.", "steps": [*steps, *verdict["steps"]], "details": details}


def above_limit(verdict: Mapping[str, Any], kl: float, max_kl: float, *, factors: bool) -> dict[str, Any]:
    """The verdict of a check whose KL is above its limit: the limit first, unless there is more to act upon.

    Args:
        kl: mean KL per token that is above the limit, or the lower end of its certain interval, nats.
        factors: whether settings were changed one at a time.
    """
    text = f"KL {kl:.2g} nat per token is above --max-kl {max_kl:g}."
    if verdict["level"] in ("act", "stop"):
        return {**verdict, "details": [text, *verdict["details"]]}
    steps = [] if factors else ["Find the setting that moves it: --factors all, or --against a second server."]
    details = [f"Without the limit: {verdict['text']}", *verdict["details"]]
    return {**verdict, "level": "act", "text": text, "steps": [*steps, *verdict["steps"]], "details": details}


def incomplete(so_far: Mapping[str, Any], done: int, factors: int) -> dict[str, Any]:
    """Verdict of a check that was interrupted after some of its factors: no level, neither passed nor failed."""
    text = f"Interrupted after {done} of {factors} factors: incomplete, neither passed nor failed."
    details = [f"So far: {so_far['text']}", *so_far["details"]]
    verdict = {"level": "interrupted", "text": text, "steps": [], "details": details, "so_far": so_far}
    return {"verdict": verdict, "passed": None}


def shortened(words: str) -> str:
    """A sentence of at most `WORDS` words: its first clauses, where it is longer and has some.

    Example:
        >>> shortened("The log-probs are raw: taken before the temperature, or after a filter of it, or after neither.")
        'The log-probs are raw: taken before the temperature, or after a filter of it.'
    """
    if len(words.split()) <= WORDS:
        return words
    cuts = [i for i in range(len(words) - 1) if words[i] in ":;," and words[i + 1] == " "]
    fitting = [words[:i] for i in cuts if len(words[:i].split()) <= WORDS]
    return f"{fitting[-1]}." if fitting else words


def _rest(words: str) -> tuple[str, ...]:
    """The whole sentence, where `shortened` cuts it."""
    return () if shortened(words) == words else (words,)


def _size_of(baseline: Measured) -> str:
    """The size of the divergence in words: exact, or as far as drawn and likeliest tokens tell it."""
    if not math.isnan(baseline.kl_mean):
        return f"KL {baseline.kl_mean:.2g} nat per token on average, {baseline.kl_max:.2g} at the worst token."
    certain = ""
    if not math.isnan(baseline.kl_low):
        certain = f", for certain {baseline.kl_low:.2g} to {baseline.kl_high:.2g}"
    return f"KL {baseline.kl_known:.2g} nat per token, estimated from the drawn tokens (k3){certain}."


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]
