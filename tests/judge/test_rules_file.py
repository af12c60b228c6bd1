"""A user's TOML: what it changes, and what it is told when it is wrong."""

import itertools
import re
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest

from offdrift.check.recommend import THRESHOLDS
from offdrift.errors import RecipeError
from offdrift.judge import Watcher, diagnose, judge, load_rules
from offdrift.judge.rules import HERE, Compared
from offdrift.texts import parse_toml
from tests.judge.histories import FIRES

BUILT_IN = load_rules()

OWN = """
[thresholds]
kl_large = 0.1
ess_half = { value = 0.4, source = "our cluster" }

[rules.probability_spike]
enabled = false

[rules.token_drift]
severity = "stop"
all = [{ metric = "chi2_token", above = 0.2 }]

[rules.entropy_gone]
cause = "entropy"
letter = "F"
severity = "watch"
confidence = "low"
all = [
    { metric = "clip_frac", above = 0.3 },
    { any = [{ metric = "len_ratio", below = 0.8 }, { metric = "len_ratio", missing = true }] },
]
raised_by = [{ metric = "clip_rising", is = 1 }]
symptom = "Responses shrink while the clip acts."
explanation = "The policy collapses onto short answers."
fix = "less"
refuted_by = "Held-out reward rises."
source = "us"

[fixes.less]
do = "Less."
snippets.verl = "actor: {}"

[fixes.halve_lr]
snippets.verl = "actor: {}"
"""


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(OWN)
    return load_rules(path)


def test_everything_that_is_not_named_stays(own):
    built_in = load_rules()
    assert set(built_in.rules) - set(own.rules) == {"probability_spike"}
    assert set(own.rules) - set(built_in.rules) == {"entropy_gone"}
    changed = {n for n in built_in.rules if n in own.rules and own.rules[n] != built_in.rules[n]}
    # Texts that name a threshold say its new value.
    assert changed == {"token_drift", "engines_apart"}
    assert own.rules["engines_apart"].when == built_in.rules["engines_apart"].when
    assert "below 0.1 nat" in own.rules["engines_apart"].explanation
    limits = {n for n, t in built_in.thresholds.items() if own.thresholds[n] != t}
    assert limits == {"kl_large", "ess_half"}
    assert own.thresholds["kl_large"].unit == "nat"
    assert own.thresholds["kl_large"].source.endswith("mine.toml"), "not the survey"
    assert own.thresholds["ess_half"].source == "our cluster"
    assert built_in is load_rules()


def test_a_snippet_of_ones_own_stands_among_the_others(own):
    old, new = load_rules().fixes["halve_lr"], own.fixes["halve_lr"]
    assert (new.do, new.snippets) == (old.do, {**old.snippets, "verl": "actor: {}\n"})
    assert len(new.snippets) > 3


def test_changed_thresholds_decide(own):
    reading = {"kl": 0.08, "kl_same_ckpt": 0.01}
    assert [f.rule for f in judge(reading, load_rules())] == ["stale_engine"]
    assert [f.rule for f in judge(reading, own)] == ["agreement_gap"]
    (drift,) = judge({"chi2_token": 0.25}, own)
    assert (drift.rule, drift.severity) == ("token_drift", "stop")
    assert (drift.evidence[0].threshold, drift.evidence[0].source) == (0.2, drift.source)


def test_own_rule_fires_with_its_own_fix(own):
    row = {"mismatch/pearson": 0.999, "objective/clip_frac_active": 0.4}
    (found,) = diagnose([row], rules=own)
    assert (found.rule, found.cause, found.letter, found.confidence) == ("entropy_gone", "entropy", "F", "low")  # fmt: skip
    assert found.fix == "Less."
    assert found.snippets == {"verl": "actor: {}\n"}
    assert [(e.metric, e.relation) for e in found.evidence] == [
        ("objective/clip_frac_active", ">"),
        ("len_ratio", "missing"),
    ]
    raised = judge({"clip_frac": 0.4, "clip_rising": 1.0, "len_ratio": 0.5}, own)
    assert [f.confidence for f in raised if f.rule == "entropy_gone"] == ["medium"]


def test_own_rule_takes_the_place_of_its_letter(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(f"[rules.mine]\nletter = 'A'\n{RULE}all = [{{ metric = 'chi2_token', above = 0.1 }}]")
    told = judge({"chi2_token": 1.5, "pearson": 0.9}, load_rules(path))
    assert [f.rule for f in told] == ["mine", "engine_or_lag", "weight_variance"]


def test_every_rule_can_be_switched_off(tmp_path):
    path = tmp_path / "off.toml"
    names = list(load_rules().rules)
    path.write_text("\n".join(f"[rules.{n}]\nenabled = false" for n in names))
    assert dict(load_rules(path).rules) == {}
    assert diagnose([{"mismatch/pearson": 0.1}], rules=load_rules(path)) == []


RULE = 'cause = "x"\nsymptom = "x"\nexplanation = "x"\nrefuted_by = "x"\nfix = "halve_lr"\n'
WRONG = {
    "no TOML": ("= 3", "cannot be read as TOML"),
    "table": ("[treshold]\nx = 1", "unknown key 'treshold'; did you mean 'thresholds'?"),
    "table of the wrong kind": ("rules = 3", "[rules] = 3 must be a table"),
    "threshold": ("[thresholds]\nkl_larg = 0.1", "[thresholds]: unknown key 'kl_larg'; did you mean 'kl_large'?"),
    "threshold's value": ("[thresholds]\nkl_large = 'a'", "kl_large.value = 'a' must be a number"),
    "threshold that is no number": ("[thresholds]\nkl_large = nan", "kl_large.value = nan must be a number"),
    "threshold that is true": ("[thresholds]\nkl_large = true", "kl_large.value = True must be a number"),
    "threshold's key": ("[thresholds]\nkl_large = { valu = 1 }", "unknown key 'valu'; did you mean 'value'?"),
    "window of nothing": ("[thresholds]\nwindow_level = 0", "window_level.value = 0 must be at least 1: it is a number of steps"),
    "endless window": ("[thresholds]\nwindow_long = { value = inf }", "window_long.value = inf must be at least 1"),
    "key of a rule": ("[rules.token_drift]\nseverty = 'act'", "[rules.token_drift]: unknown key 'severty'; did you mean 'severity'?"),
    "severity": ("[rules.token_drift]\nseverity = 'bad'", "severity = 'bad' must be one of 'info', 'watch', 'act', 'stop'"),
    "confidence": ("[rules.token_drift]\nconfidence = 'sure'", "confidence = 'sure' must be one of"),
    "letter": ("[rules.token_drift]\nletter = 'G'", "letter = 'G' must be one of"),
    "fix": ("[rules.token_drift]\nfix = 'halve_the_lr'", "fix = 'halve_the_lr' is not known; did you mean 'halve_lr'?"),
    "suppressor": ("[rules.token_drift]\nsuppressed_by = ['weight_varianc']", "did you mean 'weight_variance'?"),
    "reading": (f"[rules.x]\n{RULE}all = [{{ metric = 'ch2_token', above = 1 }}]", "metric = 'ch2_token' is not known; did you mean 'chi2_token'?"),
    "relation": (f"[rules.x]\n{RULE}all = [{{ metric = 'kl', abov = 1 }}]", "unknown key 'abov'; did you mean 'above'?"),
    "two relations": (f"[rules.x]\n{RULE}all = [{{ metric = 'kl', above = 1, below = 2 }}]", "needs exactly one of"),
    "no relation": (f"[rules.x]\n{RULE}all = [{{ metric = 'kl' }}]", "needs exactly one of"),
    "name of a threshold": (f"[rules.x]\n{RULE}all = [{{ metric = 'kl', above = 'kl_lrge' }}]", "above = 'kl_lrge' is not known; did you mean 'kl_large'?"),
    "limit of the wrong kind": (f"[rules.x]\n{RULE}all = [{{ metric = 'kl', above = [1] }}]", "above = [1] must be a number"),
    "missing = false": (f"[rules.x]\n{RULE}all = [{{ metric = 'kl', missing = false }}]", "must be true"),
    "no condition": (f"[rules.x]\n{RULE}", "has no condition"),
    "empty condition": (f"[rules.x]\n{RULE}any = []", "never says anything"),
    "code": (f"[rules.x]\n{RULE}all = 'kl > 1'", "all = 'kl > 1' must be a list"),
    "no text": ("[rules.x]\ncause = 'x'\nall = [{ metric = 'kl', above = 1 }]", "symptom = None must be text"),
    "fix without words": ("[fixes.x]\nmethod = 'token_tis'", "[fixes.x] do = None must be text"),
    "threshold in a text": ("[rules.token_drift]\nsymptom = 'above {kl_larg}'", "symptom: threshold in braces = 'kl_larg' is not known; did you mean 'kl_large'?"),
    "threshold in a fix": ("[fixes.halve_lr]\ndo = 'below {kl_updat:%}'", "did you mean 'kl_update'?"),
    "method of a fix": ("[fixes.x]\ndo = 'x'\nmethod = 'token_ti'", "method = 'token_ti' is not known; did you mean 'token_tis'?"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "told"), WRONG.values(), ids=WRONG)
def test_wrong_files_name_the_table_the_value_and_the_way_out(tmp_path, text, told):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(RecipeError) as error:
        load_rules(path)
    assert told in str(error.value)
    assert str(path) in str(error.value)


def test_missing_file_is_refused(tmp_path):
    with pytest.raises(RecipeError, match=r"none\.toml cannot be read: No such file or directory"):
        load_rules(tmp_path / "none.toml")


SOURCES = "".join(
    file.read_text(encoding="utf-8")
    for package in ("offdrift", "offdrift_lab")
    for file in sorted((Path(__file__).parents[2] / "src" / package).rglob("*.py"))
)
WINDOWS = {"window_level", "window_trend", "window_long", "window_young"}
TRENDS = {"trend_change", "trend_t", "trend_walk", "trend_drift", "trend_sure"}
CONDITIONS = [c for rule in BUILT_IN.rules.values() for c in (rule.when, *rule.raised_by, *rule.excluded_by)]


def bent(name, value):
    """The built-in rules with one threshold changed."""
    return replace(
        BUILT_IN, thresholds={**BUILT_IN.thresholds, name: replace(BUILT_IN.thresholds[name], value=float(value))}
    )


def branches(condition):
    """The ways in which a condition can hold, each as comparisons that all hold."""
    if isinstance(condition, Compared):
        return [[condition]]
    each = [branches(part) for part in condition.parts]
    if condition.how == "any":
        return [branch for ways in each for branch in ways]
    return [[c for way in ways for c in way] for ways in itertools.product(*each)]


def decisive(branch):
    """A reading on which these comparisons hold, or None if they contradict each other."""
    reading = {}
    for name, group in itertools.groupby(sorted(branch, key=lambda c: c.reading), key=lambda c: c.reading):
        comparisons = list(group)
        limits = [
            c.threshold if isinstance(c.threshold, float) else BUILT_IN.limits.get(c.threshold) for c in comparisons
        ]
        if None in limits:  # a reading that is missing
            continue
        # Just beyond the limit: much further, a higher limit of another branch would hold as well.
        near = [max(1e-6, abs(x) / 100) for x in limits]
        ends = sorted({*limits, *(x + d for x, d in zip(limits, near)), *(x - d for x, d in zip(limits, near))})
        values = [*ends, *((a + b) / 2 for a, b in itertools.pairwise(ends))]
        fitting = [v for v in values if all(c.holds({name: v}, BUILT_IN.thresholds) for c in comparisons)]
        if not fitting:
            return None
        reading[name] = fitting[0]
    return reading


def last_reading(rule, rules):
    watcher = Watcher(context=FIRES[rule].context, rules=rules)
    for row in FIRES[rule].rows:
        watcher.update(row)
    return dict(watcher.reading)


built_in_reading = cache(partial(last_reading, rules=BUILT_IN))


@pytest.mark.parametrize("name", BUILT_IN.thresholds)
def test_every_threshold_decides(name):
    """Out of reach, it turns a condition of some rule; what rules do not use, a reading, the check or the table does."""
    users = [c for c in CONDITIONS if any(x.threshold == name for branch in branches(c) for x in branch)]
    if name in WINDOWS | TRENDS:
        histories = ("length_surge", "clip_saturation", "surge_without_guard", "truncation_heavy")
        values = (1, 500) if name in WINDOWS else (-1e12, 1e12)
        assert any(last_reading(h, bent(name, v)) != built_in_reading(h) for h in histories for v in values)
    elif users:

        def turned(condition, branch):
            reading = decisive(branch)
            if reading is None or condition.holds(reading, BUILT_IN.thresholds) is None:
                return False
            return any(condition.holds(reading, bent(name, v).thresholds) is None for v in (-1e12, 1e12))

        assert any(turned(c, b) for c in users for b in branches(c))
    else:
        assert name in {row.limit for row in THRESHOLDS} | {"length_kept", "tv_low"} or f'["{name}"]' in SOURCES


def test_built_in_tables_are_documented():
    assert {r.fix for r in BUILT_IN.rules.values()} == set(BUILT_IN.fixes)
    assert all(t.source and t.about for t in BUILT_IN.thresholds.values())
    assert len(BUILT_IN.thresholds) > 50


def test_texts_say_the_number_that_decides(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        "[thresholds]\nacceptance_low = 0.5\nkl_update = 0.25\n"
        "[rules.token_drift]\nexplanation = 'past {kl_update} nat and {acceptance_low:%}, at {where} and {}'\n"
    )
    rules = load_rules(path)
    assert rules.rules["low_acceptance"].symptom == FEW.format(50)
    assert rules.rules["token_drift"].explanation == "past 0.25 nat and 50 %, at {where} and {}"
    assert any("below 0.25 nat" in fix.do for fix in rules.fixes.values())
    assert BUILT_IN.rules["low_acceptance"].symptom == FEW.format(70)


FEW = "The gates accept fewer than {} % of the sequences."


def test_no_text_of_the_built_in_tables_names_the_value_of_its_own_threshold_by_hand():
    """A number of its condition in a symptom would stay when the threshold is moved."""
    tables = parse_toml((HERE / "rules.toml").read_text(encoding="utf-8"))
    for name, rule in BUILT_IN.rules.items():
        parts = [c for way in branches(rule.when) for c in way if isinstance(c.threshold, str)]
        values = {v for c in parts for v in (BUILT_IN.limits[c.threshold], 100 * BUILT_IN.limits[c.threshold])}
        words = re.findall(r"(?<![\w.{])\d+(?:\.\d+)?(?= ?%| nat\b)", tables["rules"][name]["symptom"])
        assert not {float(word) for word in words} & values, (name, words)


def test_a_file_too_large_to_be_rules_is_refused(tmp_path):
    path = tmp_path / "large.toml"
    path.write_text("#" * (2**20 + 1))
    with pytest.raises(RecipeError, match="more than 1 MiB"):
        load_rules(path)
