"""Every rule fires on a history of its kind, is silent on a clean one, and says all it has to."""

from dataclasses import replace
from functools import cache

import pytest

from offdrift.judge import Context, Watcher, diagnose, judge, load_rules
from offdrift.judge.rules import Compared
from tests.judge.histories import FIRES, clean

RULES = load_rules().rules

# What stands first on the history of each rule; itself unless it is listed here.
TOLD_FIRST = {
    "toxic_tail": "weight_variance",
    "sequence_weights_wasted": "weight_variance",
    "surge_without_guard": "length_surge",
    "surge_despite_guard": "length_surge",
    "idle_gate": "token_drift",
    "idle_cap": "token_drift",
    "unit_too_fine": "shape_kinds",
    "unit_too_coarse": "router_or_rare_tokens",
}


@cache
def told(name):
    """What is found in the history of a rule."""
    return diagnose(FIRES[name].rows, context=FIRES[name].context)


def test_every_rule_has_an_example():
    assert set(FIRES) == set(RULES)
    assert len(RULES) > 30


@pytest.mark.parametrize("name", RULES)
def test_fires_on_its_kind_and_is_what_is_told_first(name):
    found = told(name)
    assert name in [f.rule for f in found]
    assert found[0].rule == TOLD_FIRST.get(name, name), [f.rule for f in found]


@pytest.mark.parametrize("name", RULES)
def test_finding_is_complete(name):
    (finding,) = [f for f in told(name) if f.rule == name]
    rule = RULES[name]
    assert (finding.cause, finding.letter) == (rule.cause, rule.letter)
    for text in (finding.symptom, finding.explanation, finding.fix, finding.refuted_by):
        assert text.endswith(".")
        assert len(text) > 20
    assert finding.source
    assert finding.evidence
    assert all(e.source for e in finding.evidence)
    for e in finding.evidence:
        assert (e.value is None) == (e.relation == "missing") == (e.threshold is None)
    if not rule.whole and name != "length_trap":  # known from the whole run alone
        assert finding.step is not None
        assert finding.steps >= 1
    assert finding.snippets


@pytest.mark.parametrize("steps", [1, 2, 3, 20, 130])
@pytest.mark.parametrize(
    "context",
    [
        Context(),
        Context(same_weights=True),
        Context(mixture_of_experts=True, temperature=1.0, method="token_tis"),
        Context(method="decoupled_token_icepop"),
        Context(overall=clean(9)[8], facets={"lag": [{"low": 0, "full/k3": 1e-3}, {"low": 1, "full/k3": 2e-3}]}),
    ],
    ids=["nothing known", "same weights", "experts", "band", "whole run"],
)
def test_clean_run_is_silent(steps, context):
    watcher = Watcher(context=context, patience=min(3, steps))
    assert sum(len(watcher.update(row)) for row in clean(steps)) == 0
    assert watcher.conclude() == []


@pytest.mark.parametrize("name", [n for n, r in RULES.items() if r.suppressed_by])
def test_better_explanations_silence_a_rule(name):
    """Where the conditions of both hold, the one that is explained is not shown, alone it is."""
    always = Compared("kl", ">", 0.0)
    for other in RULES[name].suppressed_by:
        pair = {n: replace(r, when=always) for n, r in RULES.items() if n in (name, other)}
        rules = replace(load_rules(), rules=pair)
        assert [f.rule for f in judge({"kl": 1.0}, rules)] == [other]
        steps = [{"step": float(i), "mismatch/k1": 1.0} for i in range(4)]
        assert [f.rule for f in diagnose(steps, rules=rules)] == [other]
        alone = replace(rules, rules={name: pair[name]})
        assert [f.rule for f in judge({"kl": 1.0}, alone)] == [name]


def test_no_two_rules_silence_each_other():
    pairs = {(n, other) for n, r in RULES.items() for other in r.suppressed_by}
    assert len(pairs) > 100
    assert not {(a, b) for a, b in pairs if (b, a) in pairs or a == b}


@pytest.mark.parametrize(
    ("moderate", "heavy", "expected"), [(10, 20, ["weight_variance"]), (40, 10, ["weight_variance", "token_drift"])]
)
def test_over_a_run_the_better_explanation_needs_half_the_steps(moderate, heavy, expected):
    levels = [0.4] * moderate + [1.2] * heavy
    rows = [{"step": 50 + i, "mismatch/chi2_token": x, "mismatch/k1": 0.01} for i, x in enumerate(levels)]
    assert [f.rule for f in diagnose(rows)] == expected


@pytest.mark.parametrize("begins", [0, 1, 2, 3, 7])
def test_a_finding_is_dated_from_the_step_at_which_it_would_have_fired_without_patience(begins):
    rows = [{"step": 10 + i, "mismatch/k3": 1e-5 if i < begins else 0.5, "mismatch/pearson": 0.9999} for i in range(12)]
    rows = [{**row, "mismatch/pearson": 0.5} if i >= begins else row for i, row in enumerate(rows)]
    dated = [f.step for f in diagnose(rows) if f.step is not None]
    at_once = Watcher(patience=1)
    (first, *_) = [row["step"] for row in rows if at_once.update(row)]
    assert min(dated) == first >= 10 + begins
    assert begins > 0 or first == 10
