"""Findings from metrics: of one reading, of a whole run, or of a run that is still going on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from offdrift.judge.findings import Confidence, Context, Finding, Row
from offdrift.judge.readings import READINGS
from offdrift.judge.readings.history import at_same_weights
from offdrift.judge.readings.view import Reading, View, Window, read
from offdrift.judge.rules import Rule, Rules, load_rules

PATIENCE = 3
"""Steps before a live run is judged: a level is a median, and one batch is none."""
LEVELS: tuple[Confidence, ...] = get_args(Confidence)
SHARED = ("cause", "letter", "severity", "symptom", "explanation", "refuted_by", "source")
"""What a finding takes from its rule as it stands."""
UNKNOWN = Context()


def judge(reading: Mapping[str, float], rules: Rules, context: Context = UNKNOWN) -> list[Finding]:
    """What the rules say of one reading: the decision tree itself.

    Args:
        reading: numbers by the names of `READINGS`; what is absent is unknown.

    Example:
        >>> findings = judge({"pearson": 0.995, "kl": 0.08, "kl_same_ckpt": 0.01}, load_rules())
        >>> [(f.letter, f.cause) for f in findings]
        [('B', 'stale_engine')]
    """
    tried = {name: rule.when.holds(reading, rules.thresholds, rule.source) for name, rule in rules.rules.items()}
    fired = {name: evidence for name, evidence in tried.items() if evidence is not None}
    findings = []
    for name, evidence in fired.items():
        rule = rules.rules[name]
        if any(other in fired for other in rule.suppressed_by):
            continue
        fix = rules.fixes[rule.fix]
        raised = sum(c.holds(reading, rules.thresholds) is not None for c in rule.raised_by)
        findings.append(
            Finding(
                **{key: getattr(rule, key) for key in SHARED},
                rule=name,
                confidence=LEVELS[min(len(LEVELS) - 1, LEVELS.index(rule.confidence) + raised)],
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


def diagnose(history: Sequence[Row], *, context: Context = UNKNOWN, rules: Rules | None = None) -> list[Finding]:
    """What is wrong with a run, in the order in which to repair it.

    Every step is judged on the steps before it, and the whole run once more on `context.overall`.
    A finding says at which step it first fired and at how many. One that fired at fewer than one
    step in fifty and no more at the end is "watch" at most, unless a single occurrence counts.

    Args:
        history: one row per step, oldest first: "step" and any metrics.
        rules: `load_rules(path)`; the built-in rules if absent.

    Example:
        >>> steps = [{"step": i, "mismatch/k1": 0.08, "version_lag/max": 2} for i in range(1, 9)]
        >>> [f.cause for f in diagnose(steps[1:])]
        ['engine_or_lag']
    """
    rules = rules or load_rules()
    watcher = Watcher(context=context, rules=rules, patience=min(PATIENCE, len(history)))
    for row in history:
        watcher.update(row)
    return watcher.conclude()


@dataclass
class _Firing:
    """How often a rule fired, and with what evidence the last time."""

    first: int
    last: int
    finding: Finding
    steps: int = 1


class Watcher:
    """The same rules on a run that is going on: feed it each step, get what is new.

    Memory and time of an update do not grow with the run.

    Example:
        >>> w = Watcher(patience=1)
        >>> [f.cause for f in w.update({"step": 9, "mismatch/pearson": 0.9})]
        ['precision', 'beyond_correction']
        >>> w.update({"step": 10, "mismatch/pearson": 0.9})
        []
    """

    def __init__(self, *, context: Context = UNKNOWN, rules: Rules | None = None, patience: int = PATIENCE) -> None:
        self.context, self.rules, self.patience = context, rules or load_rules(), patience
        self._limits = self.rules.limits
        span = int(2 * self._limits["window_long"] + self._limits["window_level"])
        self._window = Window(span, *(int(self._limits[f"window_{x}"]) for x in ("trend", "long")))
        self._firings: dict[str, _Firing] = {}
        self.reading = Reading()
        """The last reading."""

    def update(self, row: Row) -> list[Finding]:
        """Take one more step; returns the findings that fired for the first time."""
        self._window.add(row, same_weights=at_same_weights(row, self.context))
        self.reading = read(View(self._window, self.context, self._limits), READINGS)
        if self._window.steps < self.patience:
            return []
        new = []
        for finding in judge(self.reading, self.rules, self.context):
            firing = self._firings.get(finding.rule)
            if firing is None:
                firing = self._firings[finding.rule] = _Firing(self._window.step, 0, finding, 0)
                new.append(replace(finding, step=self._window.step, steps=1))
            firing.finding, firing.last, firing.steps = finding, self._window.steps, firing.steps + 1
        return new

    @property
    def findings(self) -> list[Finding]:
        """All findings so far, in the order in which to repair them; what can wait stands last."""
        return self._report({})

    def conclude(self) -> list[Finding]:
        """All findings of the run that ends here, judged as a whole as well."""
        if not self._window.steps and not self.context.overall:
            return []
        view = View(self._window, self.context, self._limits, overall=self.context.overall)
        whole = judge(read(view, READINGS), self.rules, self.context)
        return self._report({f.rule: f for f in whole} if self.context.overall else {})

    def _report(self, whole: Mapping[str, Finding]) -> list[Finding]:
        """What fired at some step or for the whole run, but for what is explained better."""
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
                finding = replace(whole.get(name, firing.finding), step=firing.first, steps=firing.steps)
                passing = firing.last < now and 50 * firing.steps < now
                if passing and not rule.transient and name not in whole and finding.severity != "info":
                    finding = replace(finding, severity="watch")
                findings.append(finding)
        # What can wait stands behind what cannot; within both, the order of repair.
        urgent_first = sorted(findings, key=lambda f: f.severity in ("watch", "info"))
        return causes_first(urgent_first, self.rules)

    def _stands(self, name: str, whole: Mapping[str, Finding]) -> bool:
        """Whether a rule fired, and often enough where it is about what does not come and go."""
        firing = self._firings.get(name)
        if firing is None or name in whole:
            return name in whole
        passed = bool(self.context.overall) and 2 * firing.steps < self._window.steps
        return not (self.rules.rules[name].lasting and passed)

    def _explained(self, rule: Rule, firing: _Firing | None, whole: Mapping[str, Finding]) -> bool:
        """Whether a better explanation held for the whole run, or at half as many steps as this."""
        steps = 1 if firing is None else max(firing.steps, 1)
        return any(
            other in whole or (self._stands(other, whole) and 2 * self._firings[other].steps >= steps)
            for other in rule.suppressed_by
        )
