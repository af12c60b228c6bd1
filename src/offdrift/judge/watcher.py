"""Findings from metrics: of one reading, of a whole run, or of a run that is still going on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from offdrift.judge.findings import URGENCY, Confidence, Context, Finding, Row, Severity
from offdrift.judge.readings import READINGS
from offdrift.judge.readings.history import at_same_weights
from offdrift.judge.readings.view import Reading, View, Window, read
from offdrift.judge.rules import Rule, Rules, load_rules
from offdrift.stats import METRICS

LEVELS: tuple[Confidence, ...] = get_args(Confidence)
SHARED = ("cause", "letter", "severity", "explanation", "refuted_by", "decides", "fact", "source")
"""What a finding takes from its rule as it stands."""
UNKNOWN = Context()
OURS = {name for name in METRICS if not name.startswith(("critic/", "optim/"))} | {"step", "tokens", "sequences"}
"""Names that no framework has for anything: a row of these is read without the table of frameworks' names."""
BEFORE = "{before}"
"""Stands in an explanation for the finding that came before in time."""
LIKELY = "If it collapses, the likely cause is what began at step {step}: {symptom}"
ALONE = "No other finding came before it."
CAME_FIRST = "before the finding that came first in time, apply the fix of that finding, and only then continue"
BEGAN = "before it began, look what changed there (prompts, rewards, learning rate, a restart), and only then continue"
"""What a fix says of the finding that came before in time, and what in its place where there is none."""


def judge(reading: Mapping[str, float], rules: Rules, context: Context = UNKNOWN) -> list[Finding]:
    """Apply the rules to one reading and return the findings.

    Args:
        reading: numbers by the names of `READINGS`; what is absent is unknown.

    Example:
        >>> findings = judge({"pearson": 0.995, "kl": 0.08, "kl_same_ckpt": 0.01}, load_rules())
        >>> [(f.letter, f.cause) for f in findings]
        [('B', 'stale_engine')]
    """
    tried = {name: rule.when.holds(reading, rules.thresholds, rule.source) for name, rule in rules.rules.items()}
    fired = {
        name: evidence
        for name, evidence in tried.items()
        if evidence is not None and not any(c.holds(reading, rules.thresholds) for c in rules.rules[name].excluded_by)
    }
    found = context.shapes.get("found") or ()
    where = found[0]["where"] if found else "there"
    findings = []
    for name, evidence in fired.items():
        rule = rules.rules[name]
        if any(other in fired for other in rule.suppressed_by):
            continue
        fix = rules.fixes[rule.fix]
        raised = sum(c.holds(reading, rules.thresholds) is not None for c in rule.raised_by)
        level = min(len(LEVELS) - 1, LEVELS.index(rule.confidence) + raised)
        shared = {key: getattr(rule, key) for key in SHARED}
        shared["record"] = rules.tracks[name].sentence if name in rules.tracks else ""
        if context.metrics_only and rule.letter:  # averages of another program: a cause is never proved by them
            level, shared["fact"] = min(level, LEVELS.index("medium")), False
        findings.append(
            Finding(
                **shared,
                rule=name,
                symptom=rule.symptom.replace("{where}", where),
                confidence=LEVELS[level],
                evidence=evidence,
                fix=fix.do,
                snippets=dict(sorted(fix.snippets.items(), key=lambda kv: kv[0] != context.framework)),
                method=fix.method,
            )
        )
    return causes_first(findings, rules)


def causes_first(findings: Sequence[Finding], rules: Rules) -> list[Finding]:
    """The findings in their order, but that each stands behind those that name a cause of it (`Rule.follows`).

    Weights of too much variance are told after the stale engine that makes them so: who repairs the first finding
    repairs the cause.
    """
    fired, placed = {f.rule: f for f in findings}, dict[str, Finding]()

    def place(finding: Finding) -> None:
        if finding.rule not in placed:
            for cause in rules.rules[finding.rule].follows:
                if cause in fired:
                    place(fired[cause])
            placed[finding.rule] = finding

    for finding in findings:
        place(finding)
    return list(placed.values())


def with_precursor(finding: Finding, findings: Sequence[Finding]) -> Finding:
    """Fill in the finding that came before this one in time, where its explanation asks for it.

    Args:
        findings: in the order of repair: the first of them that is earlier is the likely cause.
    """
    if BEFORE not in finding.explanation:
        return finding
    when = math.inf if finding.step is None else finding.step
    first = next((f for f in findings if f.severity != "info" and f.step is not None and f.step < when), None)
    said = ALONE if first is None else LIKELY.format(step=first.step, symptom=first.symptom)
    fix = finding.fix.replace(CAME_FIRST, BEGAN) if first is None else finding.fix
    return replace(finding, explanation=finding.explanation.replace(BEFORE, said), fix=fix)


def diagnose(history: Sequence[Row], *, context: Context = UNKNOWN, rules: Rules | None = None) -> list[Finding]:
    """Return the findings of a run in the order in which to repair them.

    Every step is judged on the steps before it, and the whole run once more on `context.overall`.
    A finding says at which step it first fired and at how many. One that fired at fewer than one
    step in fifty and no more at the end is "watch" at most, unless a single occurrence counts.

    Args:
        history: one row per step, oldest first: "step" and any metrics, by our names or those of verl, TRL, prime-rl
            and slime (`metric_names`).
        rules: `load_rules(path)`; the built-in rules if absent.

    Example:
        >>> steps = [{"step": i, "mismatch/k1": 0.08, "version_lag/max": 2} for i in range(1, 9)]
        >>> [f.cause for f in diagnose(steps[1:])]
        ['engine_or_lag']
    """
    rules = rules or load_rules()
    watcher = Watcher(context=context, rules=rules, patience=min(int(rules.limits["patience"]), len(history)))
    for row in history:
        watcher.update(row)
    return watcher.conclude()


def in_order(findings: Sequence[Finding], rules: Rules) -> list[Finding]:
    """The most severe first; of equal ones, in the order of repair.

    A cause is as severe as the worst of what follows from it: who repairs it repairs that.
    """
    worst = {f.rule: f.severity for f in findings}
    for finding in findings:
        for cause in rules.rules[finding.rule].follows:
            if cause in worst and worst[cause] != "info":
                worst[cause] = min(worst[cause], finding.severity, key=URGENCY.index)
    raised = [replace(f, severity=worst[f.rule]) for f in findings]
    ordered = sorted(raised, key=lambda f: (f.severity == "info", URGENCY.index(f.severity)))
    return causes_first(ordered, rules)


@dataclass
class _Firing:
    """Steps at which a rule fired, and its last finding."""

    first: int
    last: int
    finding: Finding
    steps: int = 1


class Watcher:
    """Apply the rules to a run that is still going: feed it each step, get the new findings.

    Memory and time of an update do not grow with the run.

    Example:
        >>> w = Watcher(patience=1)
        >>> [f.cause for f in w.update({"step": 9, "mismatch/pearson": 0.9})]
        ['engine_or_lag']
        >>> w.update({"step": 10, "mismatch/pearson": 0.9})
        []
    """

    def __init__(self, *, context: Context = UNKNOWN, rules: Rules | None = None, patience: int | None = None) -> None:
        self.context, self.rules = context, rules or load_rules()
        self._limits = self.rules.limits
        self.patience = int(self._limits["patience"]) if patience is None else patience
        span = int(2 * self._limits["window_long"] + self._limits["window_level"])
        self._window = Window(span, *(int(self._limits[f"window_{x}"]) for x in ("trend", "long")))
        self._firings: dict[str, _Firing] = {}
        self._early: dict[str, int] = {}
        """Since when rules would have fired that patience held back."""
        self.reading = Reading()
        """The last reading."""

    def update(self, row: Row) -> list[Finding]:
        """Take one more step, of our names or a framework's; returns the findings that fired for the first time."""
        if not row.keys() <= OURS:
            from offdrift.judge.metric_names import metric_names

            row = metric_names().translate(row)
        self._window.add(row, same_weights=at_same_weights(row, self.context))
        self.reading = read(View(self._window, self.context, self._limits), READINGS)
        findings = judge(self.reading, self.rules, self.context)
        if self._window.steps < self.patience:
            self._early = {f.rule: self._early.get(f.rule, self._window.step) for f in findings}
            return []
        early, self._early, new = self._early, {}, []
        for finding in findings:
            firing = self._firings.get(finding.rule)
            if firing is None:
                first = early.get(finding.rule, self._window.step)
                firing = self._firings[finding.rule] = _Firing(first, 0, finding, 0)
                new.append(replace(finding, step=self._window.step, steps=1, severity=self._live_level(finding)))
            firing.finding, firing.last, firing.steps = finding, self._window.steps, firing.steps + 1
        return [with_precursor(f, self.findings) if BEFORE in f.explanation else f for f in new]

    @property
    def findings(self) -> list[Finding]:
        """All findings so far, at live levels, in the order in which to repair them; what can wait stands last."""
        return self._report({}, live=True)

    def conclude(self) -> list[Finding]:
        """All findings of the run that ends here, judged as a whole as well."""
        if not self._window.steps and not self.context.overall:
            return []
        view = View(self._window, self.context, self._limits, overall=self.context.overall)
        whole = judge(read(view, READINGS), self.rules, self.context)
        return self._report(self._since_breaks() | {f.rule: f for f in whole} if self.context.overall else {})

    def _since_breaks(self) -> dict[str, Finding]:
        """Findings about what does not come and go, of the parts of the log since something changed at one step."""
        findings: dict[str, Finding] = {}
        for part in self.context.since:
            context = replace(self.context, overall=part["overall"], shapes={}, facets={}, since=())
            view = View(self._window, context, self._limits, overall=part["overall"])
            for finding in judge(read(view, READINGS), self.rules, context):
                if self.rules.rules[finding.rule].lasting:
                    findings.setdefault(finding.rule, replace(finding, step=part["step"], steps=part["steps"]))
        return findings

    def _live_level(self, finding: Finding) -> Severity:
        """Level of a finding while the run goes on: what runs with this finding came to, where that is known."""
        track = self.rules.tracks.get(finding.rule)
        return finding.severity if track is None or finding.severity == "info" else track.level

    def _report(self, whole: Mapping[str, Finding], *, live: bool = False) -> list[Finding]:
        """Findings of all steps and of the whole run, without those that another finding explains better.

        Args:
            live: at the levels of a run that is going on.
        """
        findings, now = [], self._window.steps
        for name, rule in self.rules.rules.items():
            firing = self._firings.get(name)
            if not self._stands(name, whole) or self._explained(rule, firing, whole):
                continue
            if firing is None:
                findings.append(whole[name])
            elif rule.whole:
                if name in whole or firing.steps + self.patience > now:
                    findings.append(replace(whole.get(name, firing.finding), step=None, steps=0))
            else:
                finding = whole.get(name, firing.finding)
                if finding.step is None:
                    finding = replace(finding, step=firing.first, steps=firing.steps)
                if live:
                    finding = replace(finding, severity=self._live_level(finding))
                passing = firing.last < now and firing.steps < self._limits["passing"] * now
                if passing and not rule.transient and name not in whole and finding.severity != "info":
                    finding = replace(finding, severity="watch")
                findings.append(finding)
        ordered = in_order(findings, self.rules)
        return [with_precursor(f, ordered) for f in ordered]

    def _stands(self, name: str, whole: Mapping[str, Finding]) -> bool:
        """Whether a rule fired, and often enough where it is about what does not come and go.

        Of metrics alone, which have no numbers of the whole log: often enough, or still.
        """
        firing = self._firings.get(name)
        if firing is None or name in whole:
            return name in whole
        rare = firing.steps < self._limits["lasting"] * self._window.steps
        over = self.context.metrics_only and firing.last < self._window.steps
        passed = rare and (bool(self.context.overall) or over)
        return not (self.rules.rules[name].lasting and passed)

    def _explained(self, rule: Rule, firing: _Firing | None, whole: Mapping[str, Finding]) -> bool:
        """Whether a better explanation held for the whole run, or at half as many steps as this."""
        steps = 1 if firing is None else max(firing.steps, 1)
        return any(
            other in whole or (self._stands(other, whole) and 2 * self._firings[other].steps >= steps)
            for other in rule.suppressed_by
        )
