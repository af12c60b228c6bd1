"""Live levels: what a rule's finding foretold in training runs, in place of its severity while a run goes on."""

from dataclasses import replace

import pytest

from offdrift.judge import Watcher, diagnose, load_rules
from offdrift.judge.rules import parse_rules
from offdrift.judge.track_record import Track, tracks
from offdrift.show.findings import shown

DRIFTING = [{"step": i, "mismatch/k1": 0.08, "version_lag/max": 2} for i in range(8)]
"""Fires `engine_or_lag`, whose severity is "act"."""
RULE = "engine_or_lag"


def with_track(**numbers):
    rules = load_rules()
    own = replace(rules)
    vars(own)["tracks"] = {RULE: Track(**{"level": "stop", **numbers})}  # in place of what is read of the file
    return own


@pytest.mark.parametrize("level", ["stop", "watch"])
def test_a_run_that_goes_on_is_told_at_the_live_level(level):
    watcher = Watcher(rules=with_track(level=level), patience=1)
    told = [f for row in DRIFTING for f in watcher.update(row)]
    assert [(f.rule, f.severity) for f in told if f.rule == RULE] == [(RULE, level)]
    assert [f.severity for f in watcher.findings if f.rule == RULE] == [level]
    assert [f.severity for f in watcher.conclude() if f.rule == RULE] == ["act"], "looking back, it is the rule's own"


def test_looking_back_the_severity_is_the_rules_own():
    before, after = (diagnose(DRIFTING, rules=rules) for rules in (load_rules(), with_track(level="stop")))
    assert [(f.rule, f.severity) for f in before] == [(f.rule, f.severity) for f in after]


def test_a_passing_finding_is_watch_at_most_even_if_its_live_level_is_stop():
    watcher = Watcher(rules=with_track(), patience=1)
    for i in range(400):
        drifts = 5 <= i < 8
        watcher.update({"step": i, "mismatch/k1": 0.08 if drifts else 1e-5, "mismatch/pearson": 0.99999})
    found = {f.rule: f.severity for f in watcher.findings}
    assert found[RULE] == "watch"


def test_the_numbers_are_in_the_finding_and_are_shown():
    (finding,) = diagnose(DRIFTING, rules=with_track(told=25, fell=23, base=0.314))
    assert [x in finding.record for x in ("23 of 25", "31 %")] == [True, True]
    assert shown(finding.as_dict()).record == finding.record


def test_few_runs_say_nothing():
    assert not Track(level="act", told=9, fell=9, late=9, still=9).sentence
    assert "12" in Track(level="act", told=3, fell=3, late=12, still=7).sentence


@pytest.mark.parametrize(
    "text",
    [
        "rules.{rule}.severity = 'watch'",
        "rules.{rule}.all = [{{metric = 'kl', above = 1.0}}]",
        "rules.{rule}.suppressed_by = []",
        "rules.{rule}.excluded_by = [{{metric = 'lag', at_least = 1}}]",
        "rules.{rule}.enabled = false",
    ],
)
def test_a_rule_that_a_user_changed_has_no_record(text):
    name = next(
        n for n in tracks() if load_rules().rules[n].suppressed_by and load_rules().rules[n].severity != "watch"
    )
    changed = parse_rules(text.format(rule=name), "mine.toml")
    assert name in load_rules().tracks
    assert name not in changed.tracks
    assert set(load_rules().tracks) - {name} <= set(changed.tracks), "the others keep theirs"


def test_another_threshold_takes_the_record_of_the_rules_that_compare_with_it():
    kept = parse_rules("thresholds.chi2_last = 5", "mine.toml").tracks
    assert "systems_fix" in load_rules().tracks
    assert "systems_fix" not in kept
    assert "stale_engine" in kept


def test_a_text_that_changes_keeps_the_record():
    assert "systems_fix" in parse_rules("rules.systems_fix.symptom = 'Too far.'", "mine.toml").tracks
