"""From metrics to findings: one reading, one run, or a run that is still going on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from offdrift.judge.conditions import Threshold
from offdrift.judge.context import Context, Row
from offdrift.judge.findings import Confidence, Evidence, Finding
from offdrift.judge.readings import reading_of
from offdrift.judge.readings.lag import at_same_weights
from offdrift.judge.readings.view import Reading, View
from offdrift.judge.rules import Rule, Rules, load_rules
from offdrift.judge.window import Window

PATIENCE = 3
"""Steps before a live run is judged: a level is a median, and one batch is none."""
LEVELS: tuple[Confidence, ...] = get_args(Confidence)
UNKNOWN = Context()
Evidences = dict[str, tuple[Evidence, ...]]


def judge(reading: Mapping[str, float], rules: Rules, context: Context = UNKNOWN) -> list[Finding]:
    """What the rules say of one reading: the decision tree itself.

    Args:
        reading: numbers by the names of `READINGS`; what is absent is unknown.

    Example:
        >>> found = judge({"pearson": 0.995, "kl": 0.08, "kl_same_ckpt": 0.01}, load_rules())
        >>> [(f.letter, f.cause) for f in found]
        [('B', 'stale_engine')]
    """
    fired = _fired(reading, rules)
    shown = (n for n in fired if not any(s in fired for s in rules.rules[n].suppressed_by))
    return [_finding(n, fired[n], reading, rules, context) for n in shown]


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
class _Seen:
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
        self._seen: dict[str, _Seen] = {}
        self.reading = Reading()
        """The last reading."""

    def update(self, row: Row) -> list[Finding]:
        """Take one more step; returns the findings that fired for the first time."""
        self._window.add(row, same_weights=at_same_weights(row, self.context))
        self.reading = reading_of(View(self._window, self.context, self._limits))
        if self._window.seen < self.patience:
            return []
        new = []
        for finding in judge(self.reading, self.rules, self.context):
            seen = self._seen.get(finding.rule)
            if seen is None:
                seen = self._seen[finding.rule] = _Seen(self._window.step, 0, finding, 0)
                new.append(replace(finding, step=self._window.step, steps=1))
            seen.finding, seen.last, seen.steps = finding, self._window.seen, seen.steps + 1
        return new

    @property
    def findings(self) -> list[Finding]:
        """All findings so far, in the order in which to repair them; what can wait stands last."""
        return self._report({})

    def conclude(self) -> list[Finding]:
        """All findings of the run that ends here, judged as a whole as well."""
        if not self._window.seen and not self.context.overall:
            return []
        view = View(self._window, self.context, self._limits, overall=self.context.overall)
        whole = judge(reading_of(view), self.rules, self.context)
        return self._report({f.rule: f for f in whole} if self.context.overall else {})

    def _report(self, whole: Mapping[str, Finding]) -> list[Finding]:
        found = []
        for name, rule in self.rules.rules.items():
            seen = self._seen.get(name)
            if (seen is None and name not in whole) or self._explained(name, rule, whole):
                continue
            if seen is None:
                found.append(whole[name])
                continue
            if rule.whole:
                if name in whole or seen.steps + self.patience > self._window.seen:
                    found.append(replace(whole.get(name, seen.finding), step=None, steps=0))
                continue
            finding = replace(whole.get(name, seen.finding), step=seen.first, steps=seen.steps)
            passing = seen.last < self._window.seen and 50 * seen.steps < self._window.seen
            if passing and not rule.transient and name not in whole and finding.severity != "info":
                finding = replace(finding, severity="watch")
            found.append(finding)
        return sorted(found, key=_late)

    def _explained(self, name: str, rule: Rule, whole: Mapping[str, Finding]) -> bool:
        """Whether a better explanation held for the whole run, or at half as many steps as this."""
        steps = self._seen[name].steps if name in self._seen else 0
        return any(
            other in whole or (other in self._seen and 2 * self._seen[other].steps >= max(steps, 1))
            for other in rule.suppressed_by
        )


def _late(finding: Finding) -> bool:
    """What can wait stands behind what cannot; within both, the order of repair."""
    return finding.severity in ("watch", "info")


def _fired(reading: Mapping[str, float], rules: Rules) -> Evidences:
    return {
        name: evidence
        for name, rule in rules.rules.items()
        if (evidence := rule.when.holds(reading, rules.thresholds, rule.source)) is not None
    }


def _finding(
    name: str, evidence: tuple[Evidence, ...], reading: Mapping[str, float], rules: Rules, context: Context
) -> Finding:
    rule = rules.rules[name]
    fix = rules.fixes[rule.fix]
    return Finding(
        rule=name,
        cause=rule.cause,
        letter=rule.letter,
        severity=rule.severity,
        confidence=_confidence(rule, reading, rules.thresholds),
        symptom=rule.symptom,
        evidence=evidence,
        explanation=rule.explanation,
        fix=fix.do,
        refuted_by=rule.refuted_by,
        snippets=dict(sorted(fix.snippets.items(), key=lambda kv: kv[0] != context.framework)),
        method=fix.method,
        source=rule.source,
    )


def _confidence(rule: Rule, reading: Mapping[str, float], limits: Mapping[str, Threshold]) -> Confidence:
    raised = sum(c.holds(reading, limits) is not None for c in rule.raised_by)
    return LEVELS[min(len(LEVELS) - 1, LEVELS.index(rule.confidence) + raised)]
