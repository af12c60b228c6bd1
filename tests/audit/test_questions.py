"""Which questions a log can answer."""

from __future__ import annotations

import pytest

from offdrift.audit.coverage import LOG, QUESTIONS, questions


def test_a_full_log_answers_everything():
    asked = questions(LOG)
    assert len(asked) == len(QUESTIONS) >= 10
    assert all(q["answered"] and not q["log"] for q in asked)


def test_an_empty_log_answers_nothing_and_says_what_to_log():
    asked = questions([])
    assert not any(q["answered"] for q in asked)
    assert all(q["because"].startswith("the log has no ") and q["log"] for q in asked)


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda q: q.text[:30])
def test_each_question_needs_exactly_what_it_names(question):
    fields = {*question.needs, *question.either[:1]}
    by_text = {q["question"]: q for q in questions(fields)}
    assert by_text[question.text]["answered"]
    for field in question.needs:
        told = {q["question"]: q for q in questions(fields - {field})}[question.text]
        assert not told["answered"]
        assert LOG[field] in told["log"]
    assert all(name in LOG for name in (*question.needs, *question.either))


def test_either_field_will_do():
    has = {"logp_rollout", "logp"}
    by_text = {q["question"]: q["answered"] for q in questions(has)}
    assert by_text["What would each method have kept, and at which effective sample size?"]
    assert not by_text["Do rollout and training engine agree at the same weights?"]
