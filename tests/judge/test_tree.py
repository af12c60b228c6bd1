"""The survey's decision tree, entry diag.golden of the methods: readings in, letters out.

All of its rows hold. A low correlation counts less here than there in two cases that no row is about:
where it is known that no token's probability differs visibly, and where it is known that lag is above
0 and nothing is known at the same weights.
"""

import tomllib
from dataclasses import replace

import pytest

from offdrift.judge import Context, Finding, diagnose, escalate, judge, load_rules, verdict
from offdrift.methods import METHODS, override

HEALTHY = {"pearson": 0.995, "ppl_ratio": 1.001, "kl": 0.01}
GOLDEN = [
    ({}, set()),
    ({"pearson": 0.93, "ppl_ratio": 1.0}, {"A/B"}),  # nothing says that the weights were the same
    ({"kl": 0.08, "same_ckpt": 1.0}, {"A"}),
    ({"kl": 0.08, "kl_same_ckpt": 0.01}, {"B"}),
    ({"kl": 0.08}, {"A/B"}),
    ({"kl": 0.08, "kl_same_ckpt": 0.07}, {"A"}),
    ({"chi2_token": 0.4, "ess": 0.7}, {"C"}),
    ({"chi2_token": 0.4, "ess": 0.45}, {"D"}),
    ({"chi2_token": 1.2, "ess": 0.8}, {"D"}),
    ({"proxy3_rising": 1.0, "weighted": 1.0}, {"D"}),
    ({"proxy3_rising": 1.0, "weighted": 0.0}, set()),
    ({"proxy3_rising": 1.0}, set()),
    ({"clip_frac": 0.25, "clip_rising": 1.0}, {"E"}),
    ({"clip_frac": 0.25}, set()),
    ({"len_ratio": 1.25}, set()),  # without drift or a clip that acts, growth is what training does
    ({"len_ratio": 1.25, "kl": 0.03}, {"F"}),
    ({"pearson": 0.97, "kl": 0.03}, {"watch"}),
    (
        {
            "pearson": 0.93, "ppl_ratio": 1.1, "kl": 0.09, "same_ckpt": 1.0, "chi2_token": 1.5,
            "ess": 0.2, "clip_frac": 0.3, "clip_rising": 1.0, "len_ratio": 1.3,
        },
        {"A", "D", "E", "F"},
    ),
]  # fmt: skip


def letters(found: list[Finding]) -> set[str]:
    """The survey's classes; "watch" where only the gap between its thresholds shows."""
    named = {f.letter for f in found if f.letter}
    return named or {"watch" for f in found if f.rule == "agreement_gap"}


@pytest.mark.parametrize(("changes", "expected"), GOLDEN)
def test_golden(changes, expected):
    assert len(GOLDEN) == 18
    reading = {**HEALTHY, **changes}
    reading["ppl_off"] = abs(reading["ppl_ratio"] - 1)
    assert letters(judge(reading, load_rules())) == expected


@pytest.mark.parametrize(
    ("reading", "expected"),
    [
        ({"pearson": 0.95}, {"watch"}),
        ({"pearson": 0.99, "kl": 0.02}, set()),
        ({"kl": 0.05}, {"watch"}),
        ({"chi2_token": 0.3, "ess": 0.7}, set()),
        ({"chi2_token": 1.0, "ess": 0.5}, {"C"}),
        ({"clip_frac": 0.2, "clip_rising": 1.0}, set()),
        ({"len_ratio": 1.2}, set()),
    ],
)
def test_at_a_threshold_nothing_is_said_yet(reading, expected):
    assert letters(judge(reading, load_rules())) == expected


def test_order_of_repair():
    found = judge({**HEALTHY, **GOLDEN[-1][0]}, load_rules())
    assert [f.letter for f in found if f.letter] == ["A", "D", "E", "F"]
    assert found[0].letter == "A"


@pytest.mark.parametrize(
    ("chi2", "masked", "ess", "pearson", "action"),
    [
        (0.5, 0.02, None, None, "rejection"),
        (1.9, 0.05, None, None, "rejection"),
        (2.5, 0.05, None, None, "rejection and token TIS"),
        (0.5, 0.15, None, None, "rejection and token TIS"),
        (0.5, 0.3, None, None, "systems fix"),
        (2.5, 0.15, 0.25, None, "systems fix"),
        (1, 0.05, 0.6, 0.94, "systems fix"),
        (4.5, 0.05, None, None, "systems fix"),
        # the ends of the source's half-open ranges
        (2.0, 0.0, None, None, "rejection"),
        (4.0, 0.0, None, None, "rejection and token TIS"),
        (0.5, 0.10, None, None, "rejection and token TIS"),
        (0.5, 0.25, 0.3, 0.95, "rejection and token TIS"),
    ],
)
def test_escalation(chi2, masked, ess, pearson, action):
    told = escalate(chi2, masked, ess_after_rs=ess, pearson=pearson)
    assert told.action == action
    assert told.because


def test_a_zero_update_test_is_one_row_and_is_judged():
    """`check`: one row of metrics, taken at the same weights by construction."""
    row = {"mismatch/k1": 0.08, "mismatch/k3": 0.08, "mismatch/pearson": 0.99, "mismatch/ppl_ratio": 1.08}  # fmt: skip
    (found,) = diagnose([row], context=Context(same_weights=True))
    assert (found.cause, found.letter, found.confidence) == ("precision", "A", "high")
    held = {(e.metric, e.relation, e.threshold) for e in found.evidence}
    assert held == {("mismatch/k3", ">", 0.05), ("mismatch/ppl_ratio", ">", 0.05), ("same_ckpt", "=", 1.0)}


def test_verdict_takes_the_most_urgent_level_and_the_first_repair():
    found = diagnose([{"mismatch/pearson": 0.93, "mismatch/k1": 0.01, "version_lag/max": 0, "version_lag/mean": 0}])
    assert [f.severity for f in found] == ["stop", "stop"]  # the cause is as severe as what follows from it
    assert [f.rule for f in found] == ["engines_disagree", "systems_fix"]
    told = verdict(found)
    assert (told["level"], told["text"]) == ("stop", found[0].symptom)
    measured = f"To confirm: {found[0].decides}"
    assert told["steps"] == [found[0].fix, measured, "Then look at 1 more finding."]
    assert verdict(found[:1])["steps"] == [found[0].fix, measured]
    asked = replace(found[0], fix=f"{found[0].decides} Then repair it.")
    assert verdict([asked])["steps"] == [asked.fix], "a measurement that the fix asks for is no second step"
    assert verdict([]) == {"level": "ok", "text": "No drift that matters shows in this log.", "steps": []}
    stale = verdict([], {"staleness/k3": 0.002}, missing=["1 of 9 tokens could not be compared."])
    assert stale["text"] == "1 of 9 tokens could not be compared. No drift that matters: KL 0.002 nat per token."  # fmt: skip


def test_snippet_of_the_own_framework_stands_first():
    row = {"mismatch/chi2_token": 0.5, "mismatch/ess_frac": 0.7, "mismatch/k1": 0.01}
    for framework in ("verl", "trl", "prime-rl", "slime", "skyrl", "nemo-rl", "offdrift"):
        (found,) = diagnose([row], context=Context(framework=framework))
        assert next(iter(found.snippets)) == framework
        assert found.method == "decoupled_geo_rs"


def test_nothing_in_nothing_out():
    assert diagnose([]) == []
    assert [f.rule for f in diagnose([{}])] == ["nothing_measured"]
    whole = Context(overall={"full/pearson": 0.9, "full/k1": 0.01})
    assert [f.rule for f in diagnose([], context=whole)] == ["engine_or_lag"]


def test_cause_b_is_corrected_by_how_far_it_went():
    """Survey, cause B: token weights for mild lag; for queue lag a geometric band of [0.99, 1.01] and
    the product of the sequence, truncated at 2."""
    clean = {"kl_same_ckpt": 0.01, "lag_growth": 3.0}
    mild = {**HEALTHY, **clean, "chi2_token": 0.4}
    (finding,) = [f for f in judge(mild, load_rules()) if f.letter == "B"]
    assert finding.rule == "lag_shows"
    assert 'method = "decoupled_token_is"' in finding.snippets["offdrift"]
    (finding,) = [f for f in judge({**mild, "kl": 0.08}, load_rules()) if f.letter == "B"]
    assert finding.rule == "stale_engine"
    asked = tomllib.loads(finding.snippets["offdrift"])
    row = override(METHODS[asked["method"]], asked["override"])
    assert asked["method"] == "decoupled_geo_rs_seq_tis"
    assert [(g.low, g.high) for g in row.correction.gates] == [(0.99, 1.01)]
    assert [(w.unit, w.cap) for w in row.correction.weights] == [("sequence", 2.0)]
