"""Findings as people read them: order, wording, snippet of their framework, and nothing that runs."""

import pytest

from offdrift.audit.compare import comparison_view
from offdrift.audit.view import OTHER_FRAMEWORK, audit_view, spark
from offdrift.cli.app import Screen
from offdrift.judge.findings import Evidence, Finding
from offdrift.show.findings import (
    CAUSES,
    PLACE_OF_METHOD,
    SEVERITY_STYLE,
    finding_view,
    in_order,
    shown,
    verdict_of,
    verdict_view,
)
from tests.show.hostile import PAYLOADS, replaced
from tests.show.screens import flat, printed
from tests.show.synthetic_audit import SNIPPETS, audit, finding, little


@pytest.mark.parametrize("width", [80, 120])
def test_a_finding_shows_everything_that_it_says(width: int) -> None:
    text = printed(finding_view(finding(), "verl", width), width)
    words = flat(text)
    for part in ("▲ Act", "correlate by 0.931", "0.0611 nat", "> 0.05 nat", "not logged",
                 "Fix: Run both engines", "This finding is wrong if:", "confidence high", "first at step 107"):  # fmt: skip
        assert part in words, part
    for line in SNIPPETS["verl"].strip().splitlines():
        assert f"\n  {line}" in text, "a snippet's lines can be copied: nothing stands beside them"
    assert max(map(len, text.splitlines())) <= width


def test_no_line_of_a_snippet_is_broken(capsys: pytest.CaptureFixture[str]) -> None:
    line = f"offdrift check --model {'a/long/path/' * 15}MODEL"
    Screen().show(audit_view({"findings": [finding(snippets={"shell": line})]}, 80))
    assert f"\n  {line}\n" in capsys.readouterr().out


def test_a_real_finding_is_read_from_its_dict() -> None:
    real = Finding(
        rule="r", cause="stale_engine", letter="B", severity="stop", confidence="low", symptom="S.",
        evidence=(Evidence("m", 2.0, ">", 1.0, "nat", "src"),), explanation="E.", fix="F.",
        refuted_by="R.", snippets={"trl": "x"}, step=None, steps=1,
    )  # fmt: skip
    s = shown(real.as_dict(), "verl")
    assert (s.level, s.cause, s.when) == ("stop", CAUSES["stale_engine"], "seen in 1 step")
    assert s.evidence == (("m", "2.00 nat", "> 1 nat", "src"),)
    assert s.snippets == (("trl", "x"),), "without a snippet for verl or offdrift, the first there is"


@pytest.mark.parametrize(("where", "when"), [({"step": None, "steps": 0}, "over the whole log"), ({"step": 3, "steps": 1}, "first at step 3, seen in 1 step"), ({"step": None, "steps": 4}, "seen in 4 steps")])  # fmt: skip
def test_a_finding_says_where_it_was_seen(where: dict, when: str) -> None:
    assert shown(finding() | where).when == when


@pytest.mark.parametrize(("framework", "first"), [("trl", "trl"), ("slime", "slime"), ("plain", "offdrift"), ("", "offdrift")])  # fmt: skip
def test_the_snippet_of_the_detected_framework_comes_first(framework: str, first: str) -> None:
    names = [name for name, _ in shown(finding(), framework).snippets]
    assert names[0] == first
    assert sorted(names) == sorted(SNIPPETS)


def test_without_a_snippet_of_the_framework_a_shell_command_comes_first() -> None:
    snippets = {"offdrift": "[lag]\nqueue = 0", "shell": "offdrift check --model MODEL"}
    first = {name: shown(finding(snippets=snippets), name).snippets[0][0] for name in ("plain", "verl", "offdrift")}
    assert first == {"plain": "shell", "verl": "shell", "offdrift": "offdrift"}


def test_a_log_of_no_framework_is_shown_what_anybody_can_run_before_settings_of_our_own() -> None:
    snippets = {"offdrift": "[rollout]\ntemperature = 1.0", "python": "logits / temperature"}
    first = {name: shown(finding(snippets=snippets), name).snippets[0][0] for name in ("plain", "offdrift", "areal")}
    assert first == {"plain": "python", "offdrift": "offdrift", "areal": "python"}
    plain = {"source": {"framework": "plain"}, "findings": [finding(snippets={**snippets, "verl": "x: 1", "trl": "y"})]}
    words = flat(printed(audit_view(plain, 100)))
    assert OTHER_FRAMEWORK.format("trl, verl") in words
    ours = {**plain, "source": {"framework": "verl"}}
    assert "--framework" not in printed(audit_view(ours, 100))


def test_a_method_of_a_recipe_says_where_it_stands() -> None:
    code = dict(shown(finding(snippets={"offdrift": 'method = "gspo"\n[lag]\nqueue = 0'})).snippets)["offdrift"]
    place, *rest = code.splitlines()
    assert place == PLACE_OF_METHOD
    assert rest == ['method = "gspo"', "[lag]", "queue = 0"]
    assert dict(shown(finding(snippets={"offdrift": "[lag]\nqueue = 0"})).snippets) == {"offdrift": "[lag]\nqueue = 0"}


def test_what_is_not_known_says_how_to_tell_it() -> None:
    missing = {"metric": "temperature_off", "value": None, "relation": "missing", "threshold": None}
    (row,) = shown(finding(evidence=[missing])).evidence
    assert row[1] == "not known: --temperature 0.7 says it"
    (row,) = shown(finding(evidence=[{**missing, "metric": "experts"}])).evidence
    assert row[1] == "not known: --moe or --dense says it"
    (row,) = shown(finding(evidence=[{**missing, "metric": "version_lag/mean"}])).evidence
    assert row[1] == "not logged"


def test_the_place_of_a_finding_is_a_path_from_here() -> None:
    stored = {**finding(), "page": "report.html#finding-a"}
    words = printed(audit_view({"findings": [stored]}, 100, folder="audits/mine"))
    assert "Details: audits/mine/report.html#finding-a" in words
    assert "Details: report.html#finding-a" in printed(audit_view({"findings": [stored]}, 100))


def test_a_measurement_that_the_fix_asks_for_is_not_said_twice() -> None:
    fix = "Compare checksums of every tensor with the trainer's, then send what is missing."
    again = finding(fix=fix, decides="Compare checksums of all tensors with the trainer's.", refuted_by="Nothing: x.")
    other = finding(fix=fix, decides="Run both engines in float32.")
    assert (shown(again).decides, shown(again).refuted_by) == ("", "")
    assert "To confirm" not in printed(finding_view(again))
    assert "To confirm: Run both engines in float32." in flat(printed(finding_view(other)))


def test_the_most_severe_stands_first_and_the_order_of_repair_stays() -> None:
    found = [finding(severity=s, rule=str(i), symptom=f"{i}") for i, s in enumerate(("info", "act", "stop", "watch", "act", "odd"))]  # fmt: skip
    assert [f.symptom for f in in_order(found)] == ["2", "1", "4", "3", "0", "5"]
    assert list(SEVERITY_STYLE) == ["info", "watch", "act", "stop"]


@pytest.mark.parametrize("content", [{}, {"severity": None, "evidence": None, "snippets": None},
    {"evidence": [None, {"value": float("nan")}], "snippets": {"verl": None, "trl": "  "}, "step": "x"}])  # fmt: skip
def test_a_finding_with_next_to_nothing_is_shown(content: dict) -> None:
    s = shown(content)
    assert (s.level, s.snippets, s.when) == ("info", (), "")
    assert "● Note" in printed(finding_view(content))


def test_verdicts_that_are_not_there_are_called_that() -> None:
    assert verdict_of({"level": "odd", "text": None}) == ("", "No verdict was recorded.")
    assert "No verdict" in printed(verdict_view(None))


@pytest.mark.parametrize("payload", [*PAYLOADS, "[red]x[/red]", "[/]", "\x1b[31mred\x1b]0;title\x07"])
def test_texts_are_neither_markup_nor_escape_sequences(payload: str) -> None:
    hostile = replaced(finding(), lambda text: payload + text)
    text = printed(finding_view(hostile, "verl", 100), color=True)
    controls = [c for c in text if ord(c) < 32 and c not in "\n\x1b"]
    assert controls == []
    assert "\x1b]" not in text
    assert "\x1b[31mred" not in text
    assert "\u202e" not in text
    if payload.startswith("["):
        assert payload in flat(printed(finding_view(hostile, "verl", 100)))


@pytest.mark.parametrize("width", [80, 120])
def test_the_view_of_an_audit_fits_and_holds_what_matters(width: int) -> None:
    content = audit(steps=30)
    text = printed(audit_view(content, width), width)
    words = flat(text)
    assert max(map(len, text.splitlines())) <= width
    for part in ("▲ Act", "KL per token", "Effective sample size", "rollout_is_threshold: 2.0", "■ Stop",
                 "decoupled_token_icepop ◂", "What this log cannot answer", ": kl_rollout_current",
                 "3 rows could not be read", "112.jsonl:498", " more methods on the page", "30 steps"):  # fmt: skip
        assert part in words, part
    assert words.count("rollout_is_threshold: 2.0") == 1, "one snippet, that of the first finding"


def test_the_view_of_a_log_without_log_probs_and_of_nothing() -> None:
    words = flat(printed(audit_view(little(), 80), 80))
    assert "Mean reward" in words
    assert "KL per token" not in words
    assert "cannot tell whether there is drift" in words
    assert "No verdict" in printed(audit_view({}, 80), 80)


@pytest.mark.parametrize("payload", [*PAYLOADS, "[red]x", "\x1b[2J"])
def test_an_audit_full_of_hostile_texts_is_shown(payload: str) -> None:
    hostile = replaced(audit(steps=3), lambda text: text + payload)
    for view in (audit_view(hostile, 90), comparison_view(hostile, hostile, (payload, payload), 90)):
        text = printed(view, 90)
        assert [c for c in text if (ord(c) < 32 and c != "\n") or c == "\u202e"] == []
        assert len(text) > 500


def test_a_series_in_blocks() -> None:
    assert spark(tuple(float(i) for i in range(8)), 8) == "▁▂▃▄▅▆▇█"
    assert spark((0.0, 0.0, 4.0, 4.0), 2) == "▁█", "averages of two"
    assert spark((1.0, None)) == ""
