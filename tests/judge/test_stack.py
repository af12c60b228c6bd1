"""The survey's pick by stack: which kinds a run is, what it begins with, and why a log's own decision differs."""

import pytest

from offdrift.judge import Context
from offdrift.judge.stack import BELOW, MEASURED, OPEN, REPAIR, by_stack, stacks
from offdrift.methods import METHODS
from offdrift.methods.situations import SITUATIONS
from offdrift.show.stacks import stack_words

LAG = {"version_lag/mean": 4.0, "batch/updates_before": 1.5}


@pytest.mark.parametrize(
    ("context", "overall", "expected"),
    [
        (Context(quantized=False), {"version_lag/mean": 0.0}, ["dense"]),
        (Context(quantized=False, same_weights=True), {}, ["dense"]),
        (Context(quantized=False), {**LAG, "version_lag/mean": 1.5}, ["dense"]),  # the batch's own updates
        (Context(), {"version_lag/mean": 0.0}, []),  # whether the engine is quantized is not known
        (Context(quantized=False), {}, []),  # nor is the lag
        (Context(), LAG, ["async"]),
        (Context(mixture_of_experts=True), {}, ["moe"]),
        (Context(), {"router/delta_router": 0.0}, ["moe"]),
        (Context(quantized=True, mixture_of_experts=True), LAG, ["async", "moe", "quantized"]),
    ],
)
def test_a_run_is_of_the_kinds_that_facts_say(context, overall, expected):
    assert list(stacks(context, overall)) == expected


@pytest.mark.parametrize(
    ("decided", "reason"),
    [
        ({"method": None, "rung": "systems fix"}, REPAIR),
        ({"method": "disabled", "rung": "none"}, BELOW),
        ({"method": None, "rung": None}, OPEN),
        ({"method": "decoupled_token_is", "rung": "token TIS"}, MEASURED),
    ],
)
def test_where_log_and_heuristic_differ_the_reason_is_said(decided, reason):
    (row,) = by_stack(Context(quantized=True), {}, decided)
    assert not row["agrees"]
    assert row["differs"].startswith(reason)
    assert (SITUATIONS["quantized"].differs in row["differs"]) == (reason != BELOW)
    assert "this log" not in row["differs"], "a check has none"
    assert row["survey"] == ["qurl", "tbpo"]
    (words,) = stack_words({"stacks": [row]})
    assert words.startswith(f"Stack quantized (the engine is quantized): {reason}")


def test_where_they_agree_nothing_is_explained():
    (row,) = by_stack(Context(mixture_of_experts=True), {}, {"method": "icepop", "rung": "token TIS"})
    assert (row["agrees"], row["differs"]) == (True, "")
    assert row["survey"][0] in METHODS
    assert row["find"] == "offdrift methods --for moe"


@pytest.mark.parametrize("stored", [{}, {"stacks": None}, {"stacks": [1, {}, {"stack": 3, "survey": "x"}]}])
def test_what_is_malformed_is_passed_over(stored):
    assert stack_words(stored) == []
