"""The correction that is suggested: what the log's own table says of it, and what the run trains with already."""

from typing import Any

import pytest

from offdrift.judge import decide
from offdrift.judge.decision import ALREADY, LACKING, NONE_KEEPS, TOO_MUCH
from tests.judge.test_foreign import CORRECTION, NOTHING, finding

STALE = "decoupled_geo_rs_seq_tis"
WIDE = {"gate.low": 0.99, "gate.high": 1.01}


def row(name: str, kept: float = 1.0, ess: float = 1.0, **said: Any) -> dict[str, Any]:
    told = {"settings": {}, "why_not": None, "on": "mismatch", "gates": "g", "weights": "w", "clipped_frac": None}
    return {"name": name, **told, "kept_tokens": kept, "ess_frac": ess, **said}


def decided(*table: dict[str, Any], trains: str | None = None, numbers=NOTHING) -> dict[str, Any]:
    return decide([finding("stale_engine", method=STALE)], numbers, table=table, trains=trains)


def test_a_method_whose_gate_keeps_little_of_this_log_is_not_suggested():
    found = decided(row(STALE, 0.043), row("decoupled_token_is", ess=0.8))
    assert found["method"] == found["row"] == "decoupled_token_is"
    assert found["why"] == TOO_MUCH.format(name=STALE, kept="4.3%", instead="decoupled_token_is", left="100.0%")
    assert decided(row(STALE, 0.8, 0.6), row("decoupled_token_is"))["method"] == STALE


def test_the_setting_that_keeps_enough_is_taken_with_it():
    found = decided(row(STALE, 0.043), row(f"{STALE}(0.99_1.01)", 0.9, 0.8, settings=WIDE))
    assert (found["method"], found["settings"], found["row"]) == (STALE, WIDE, f"{STALE}(0.99_1.01)")


@pytest.mark.parametrize("worst", [row("decoupled_token_is", ess=0.1), row("decoupled_token_is", 0.5, 0.5)])
def test_where_no_method_keeps_enough_none_is_suggested(worst):
    found = decided(row(STALE, 0.043), worst)
    assert (found["method"], found["row"], found["rung"]) == (None, None, "systems fix")
    assert found["why"].startswith(NONE_KEEPS.format(name=STALE, kept="4.3%"))


def test_a_method_whose_inputs_the_log_lacks_says_so():
    lacking = row(STALE, None, None, why_not="logp_old is missing")
    found = decided(lacking, row("token_tis"))
    assert found["method"] == STALE
    assert LACKING.format(name=STALE, why="logp_old is missing") in found["why"]


CLIPPED = {"on": "full", "gates": "", "weights": "", "clipped_frac": 0.1}


def test_a_run_that_trains_with_a_correction_that_works_keeps_it():
    trained = row("bypass_ppo_clip", **CLIPPED)
    found = decided(row(STALE, 0.9, 0.9), trained, trains="bypass_ppo_clip")
    assert found["method"] == found["row"] == "bypass_ppo_clip"
    assert found["why"] == ALREADY.format(name="bypass_ppo_clip", kept="100.0%")
    same = decided(row("decoupled_geo_rs", 0.9, 0.9), trains="decoupled_geo_rs", numbers=CORRECTION)
    assert same["why"] == ALREADY.format(name="decoupled_geo_rs", kept="90.0%")


@pytest.mark.parametrize(
    "trained",
    [
        row("none", **{**CLIPPED, "clipped_frac": None}),  # nothing that corrects
        row("none", **{**CLIPPED, "on": "staleness"}),  # a clip on the trainer's own two policies
        row("none", 0.2, 0.2),  # a gate that is the trouble
    ],
)
def test_a_run_without_a_correction_that_works_is_offered_one(trained):
    assert decided(row(STALE, 0.9, 0.9), trained, trains="none")["method"] == STALE
