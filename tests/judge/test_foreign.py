"""Logs with faults that users of other frameworks report: what stands first is right, or an honest question."""

from dataclasses import replace

import pytest

from offdrift.judge import decide, load_rules
from offdrift.judge.findings import URGENCY, Finding
from offdrift.judge.verdict import in_steps
from offdrift.judge.watcher import in_order
from offdrift.records.readers.formats.translate import drawn_by_versions
from tests.judge import foreign

SIZES = (
    {"seed": 0},
    {"seed": 1, "length": 120, "steps": 6},
    {"seed": 2, "sequences": 12, "steps": 12},
    {"seed": 3, "vocab": 120, "length": 32},
    {"seed": 4, "sequences": 64, "steps": 5},
)
CASES = [pytest.param(name, SIZES[0], id=f"{name}-0") for name in foreign.FAULTS]
CASES += [
    pytest.param(name, size := SIZES[1 + i % 4], id=f"{name}-{size['seed']}", marks=pytest.mark.slow)
    for i, name in enumerate(foreign.FAULTS)
]
"""Every fault in the first size and in one of the others, each of which meets a quarter of the faults."""


@pytest.mark.parametrize(("name", "size"), CASES)
def test_a_foreign_fault_is_named_or_asked_about(name, size, tmp_path):
    make, expected = foreign.FAULTS[name]
    audit = foreign.said(make(foreign.Play(**size)), tmp_path / "log")
    findings = [f for f in audit["findings"] if f["severity"] != "info"]
    first = findings[0] if findings else {"rule": "", "severity": "ok"}
    if expected == foreign.OK:
        assert first["severity"] in ("ok", "watch"), first
    else:
        assert first["rule"] in expected, [f["rule"] for f in findings]
    one_voice(audit, findings)


def one_voice(audit, findings):
    """Verdict, findings and suggestion come from one decision."""
    level, suggestion = audit["verdict"]["level"], audit["suggestion"]
    severities = [URGENCY.index(f["severity"]) for f in findings]
    assert severities == sorted(severities)
    assert level == (findings[0]["severity"] if findings else "ok")
    certain = [f for f in findings if f["confidence"] == "high"]
    assert all(f["fact"] or load_rules().rules[f["rule"]].data or len(f["evidence"]) > 1 for f in certain)
    if level in ("act", "stop"):
        assert suggestion["method"] not in ("none", "disabled")
        assert suggestion["rule"] == findings[0]["rule"]
        assert findings[0]["symptom"] in audit["verdict"]["text"]
        steps = in_steps(findings[0]["fix"])
        assert audit["verdict"]["steps"][: len(steps)] == steps
        if findings[0]["letter"] in ("A", "A/B"):
            assert suggestion["method"] is None
    else:
        assert suggestion["rung"] in (None, "none")
    assert not any(f["cause"] == "precision" and f["severity"] in ("act", "stop") for f in findings)


def test_what_arithmetic_does_not_prove_has_no_high_confidence():
    rules = load_rules().rules
    assert not [n for n, r in rules.items() if r.confidence == "high" and not (r.fact or r.data)]
    assert len([n for n, r in rules.items() if r.fact]) > 10
    assert all(r.decides for n, r in rules.items() if r.letter == "A" and not r.fact and n not in MEASURED)


MEASURED = {"worker_apart", "router_flips", "router_flips_some", "router_or_rare_tokens", "probability_spike"}
"""Findings of letter A whose snippet is the measurement."""


@pytest.mark.parametrize("name", load_rules().rules)
def test_a_verdict_has_few_words(name):
    assert len(load_rules().rules[name].symptom.replace("{where}", "").split()) <= WORDS.get(name, 20)


WORDS = {
    "wrong_weights": 15, "misaligned": 15, "record_not_drawn": 15, "engine_or_lag": 20, "rollout_not_logged": 30,
    "untempered_trainer": 15, "tempered_trainer": 15, "raw_stated": 30, "raw_logprobs": 25, "worker_record": 25,
}  # fmt: skip


def test_one_broken_rank_is_named(tmp_path):
    audit = foreign.said(foreign.one_worker(foreign.Play(), "rank"), tmp_path / "log")
    assert audit["shapes"]["found"][0]["name"] == "w2"
    assert "rank w2" in audit["verdict"]["text"]


def test_a_rank_is_known_from_the_file_that_it_wrote(tmp_path):
    rows = foreign.one_worker(foreign.Play(), "rank")
    for rank in range(4):
        mine = [{k: v for k, v in row.items() if k != "rank"} for row in rows if row["rank"] == f"w{rank}"]
        foreign.written(mine, tmp_path / "log" / f"rank_{rank}.jsonl")
    audit = foreign.audited(tmp_path / "log")
    assert (audit["findings"][0]["rule"], audit["shapes"]["found"][0]["name"]) == ("shape_rank", "2")


def test_engines_that_part_beyond_a_place_are_not_ok(tmp_path):
    """Apart by .07 nat behind place 1,500, and alike up to there, in few responses."""
    play = foreign.Play(sequences=8, length=2400, steps=3)

    def change(step, t, c, mu, pi):
        on = (foreign.np.arange(play.length) >= 1500)[None]
        other = play.score(play.logits(step) + 0.45 * play.other, t, c)
        return mu, foreign.np.where(on, other, pi)

    audit = foreign.said(foreign.plain(play, change), tmp_path / "log")
    assert audit["findings"][0]["rule"] == "shape_beyond"
    assert "from token 1,448" in audit["verdict"]["text"]


def test_constant_versions_are_versions(tmp_path):
    rows = foreign.jump_at_sync(foreign.Play(), None, still=True)
    audit = foreign.said(rows, tmp_path / "log")
    assert {"version", "rollout_version"} <= set(audit["has"])
    assert audit["overall"]["version_lag/max"] == 0


def test_a_single_hole_is_named_and_is_no_finding(tmp_path):
    audit = foreign.said(foreign.one_hole(foreign.Play()), tmp_path / "log")
    assert audit["findings"] == []
    assert "1 of 9,216 tokens" in audit["coverage"]["sentences"][0]
    assert audit["verdict"]["text"].startswith(audit["coverage"]["sentences"][0])
    assert audit["coverage"]["partial"] == {}


def test_several_versions_of_a_response_are_kept():
    assert drawn_by_versions(["7"]) == {"rollout_version": 7}
    assert drawn_by_versions(["8", "7"]) == {"rollout_version": 7, "newest_version": 8}
    spans = [{"version": 7, "start": 0, "end": 2}, {"version": 8, "start": 2, "end": 3}]
    assert drawn_by_versions(spans, 3) == {"rollout_version": [7, 7, 8]}
    assert drawn_by_versions(spans, 5) == {"rollout_version": 7, "newest_version": 8}
    assert drawn_by_versions([None, "x"]) == drawn_by_versions("7") == drawn_by_versions([]) == {}


def test_a_trainer_that_gives_no_probability_is_told(tmp_path):
    rows = foreign.clean(foreign.Play())
    rows[3]["logp_old"][5] = -1e30
    audit = foreign.said(rows, tmp_path / "log")
    assert [f["rule"] for f in audit["findings"]] == ["support_violated"]


def finding(rule: str, **more) -> Finding:
    rows = load_rules().rules[rule]
    fields = {"symptom": "a.", "evidence": (), "explanation": "", "fix": "do it.", "refuted_by": ""}
    told = {"rule": rule, "cause": rows.cause, "letter": rows.letter, "severity": rows.severity, "confidence": "low"}
    return Finding(**{**told, **fields, **more})


CORRECTION = {"method": "decoupled_geo_rs", "settings": {}, "row": "decoupled_geo_rs", "why": "w", "rung": "rejection"}
NOTHING = {"method": "disabled", "settings": {}, "row": "disabled", "why": "w", "rung": "none"}


def test_one_decision():
    assert decide([], NOTHING) == {**NOTHING, "rule": None}
    repair = decide([finding("wrong_weights")], NOTHING)
    assert (repair["method"], repair["rung"], repair["rule"]) == (None, "systems fix", "wrong_weights")
    assert decide([finding("engine_or_lag")], CORRECTION)["method"] is None
    assert decide([finding("token_drift")], CORRECTION) == {**CORRECTION, "rule": "token_drift"}
    assert decide([finding("stale_engine", method="decoupled_token_is")], NOTHING)["method"] == "decoupled_token_is"
    assert decide([finding("reward_collapse")], NOTHING)["method"] is None
    watched = decide([finding("agreement_gap")], CORRECTION)
    assert (watched["method"], watched["rung"]) == (None, "none")


def test_a_cause_is_as_severe_as_what_follows_from_it():
    rules = load_rules()
    consequence, cause, other = finding("systems_fix"), finding("stale_engine"), finding("clip_saturation")
    told = in_order([other, consequence, cause], rules)
    assert [f.rule for f in told] == ["stale_engine", "systems_fix", "clip_saturation"]
    assert [f.severity for f in told] == ["stop", "stop", "act"]
    assert told[0] == replace(cause, severity="stop")
