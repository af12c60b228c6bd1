"""An alarm says what, why, fix and link, and nothing in it is more than a text."""

import json

import pytest

from offdrift.alarms.alarm import LONGEST, Alarm, measured
from tests.alarms.receivers import FINDING, HOSTILE


def alarm(**changes) -> Alarm:
    return Alarm("/runs/a", "none", {**FINDING, **changes}, "https://host/watch.html#finding-none-stale_engine")


def test_every_channel_says_what_why_fix_and_link():
    content, variables = alarm().as_dict(), alarm().environment()
    for name, words in (
        ("what", "The engine is behind."),
        ("why", "It draws with older weights."),
        ("fix", "Synchronize more often."),
        ("confirm", "Compare checksums."),
        ("link", "https://host/watch.html#finding-none-stale_engine"),
        ("source", "none"),
        ("run", "/runs/a"),
        ("level", "act"),
    ):
        assert content[name] == words
        assert variables[f"OFFDRIFT_{name.upper()}"] == words
        assert words in content["text"] or name == "level"
    assert (content["step"], variables["OFFDRIFT_STEP"]) == (40, "40")
    assert content["finding"] == FINDING
    assert "full/k3 = 0.25 nat (&gt; 0.05)" in content["text"]


def test_a_chat_message_escapes_what_could_be_a_link_or_a_mention():
    message = alarm(symptom=HOSTILE).message()
    assert "<!channel>" not in message
    assert "&lt;!channel&gt;" in message
    assert message.count("<") == message.count(">") == 1, "the link alone"
    assert len(message.splitlines()) == 7
    assert not set("\x00\x1b\u202e") & set(message)


def test_texts_are_cut_and_hold_no_zero_byte():
    variables = alarm(symptom=HOSTILE, explanation="x" * 10**6).environment()
    assert len(variables["OFFDRIFT_WHY"]) < LONGEST + 40
    assert all("\0" not in value and "\n" not in value for value in variables.values())
    for value in variables.values():
        value.encode()  # no half surrogate
    assert json.loads(json.dumps(alarm(symptom=HOSTILE).as_dict()))["finding"]["symptom"] == HOSTILE


def test_a_finding_that_lacks_everything_is_an_alarm():
    bare = Alarm("r", "log", {})
    assert (bare.level, bare.as_dict()["step"], bare.environment()["OFFDRIFT_STEP"]) == ("info", None, "")
    assert bare.message().count("\n") == 1


def test_the_name_follows_what_was_measured_and_not_the_words():
    first = alarm().id
    assert alarm(symptom="other words", steps=9).id == first
    other = [{**FINDING["evidence"][0], "value": 0.26}]
    ids = {first, alarm(step=41).id, alarm(rule="x").id, alarm(evidence=other).id, Alarm("b", "none", FINDING).id}
    ids.add(Alarm("/runs/a", "tis", FINDING).id)
    assert len(ids) == 6


@pytest.mark.parametrize(
    ("evidence", "words"),
    [
        ([], ""),
        ([{"metric": "x", "value": None, "relation": "missing", "threshold": None}], "x = not logged"),
        ([{"metric": "x", "value": 2, "unit": "1"}, {"metric": "y", "value": 1e-9, "unit": "s"}], "x = 2, y = 1e-09 s"),
    ],
)
def test_evidence_in_one_line(evidence, words):
    assert measured({"evidence": evidence}) == words
