"""Ranges that sources recommend, and the survey's column on stop-gradients: who differs, and why."""

import pytest
import torch

from offdrift.methods import METHODS, override, probe
from offdrift.methods import describe as axes
from offdrift.methods.published import RANGES, SHOWN_AT, STOP_GRADIENT, ShownAt, outside_ranges, published_ranges
from offdrift.methods.table import SYSTEMS

# The survey's column "Stop-gradient?" (2026-05-18), of rows that are methods here and have a yes or no there.
SURVEY = {
    "no": "ppo_clip dual_clip topr aspo minpro ctpo m2po gspo gmpo gpg sapo dppo_tv dppo_kl vespo vcpo oapl r2vpo_clip "
    "dispo quatro trm_max st_ppo otb kl_cov clip_cov",
    "yes": "gspo_token cispo",
}


def test_every_contradiction_to_the_survey_says_why_and_nothing_else_does():
    contradict = {n for n in SURVEY["no"].split() if axes.stop_gradient(METHODS[n]) == "yes"}
    contradict |= {n for n in SURVEY["yes"].split() if axes.stop_gradient(METHODS[n]) in ("no", "n/a")}
    assert contradict == set(STOP_GRADIENT)
    assert len(contradict) == 9
    for name, row in STOP_GRADIENT.items():
        assert row["survey"] == "no"
        assert len(row["why"]) > 60
        assert axes.facts(name, METHODS[name])["survey_differs"] == row


def pushed(name, changes):
    """The gradient of a method on a drifted batch, with settings of its own."""
    given = probe.batch()
    logp = given.logprobs.current.clone().requires_grad_()
    there = given.logprobs.__class__(**{**vars_of(given.logprobs), "logp": logp})
    loss = probe.token_losses(
        override(METHODS[name], changes), probe.ProbeBatch(there, given.advantages, given.batch_info)
    )
    (gradient,) = torch.autograd.grad(loss.sum(), logp)
    return gradient


def vars_of(logprobs):
    from dataclasses import fields

    return {f.name: getattr(logprobs, f.name) for f in fields(logprobs) if f.init}


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_below_the_cap_a_constant_ratio_and_a_differentiated_one_push_alike_as_the_reason_says(name):
    """w stop(w) and w itself have one gradient, A w grad log pi; a cap that acts parts them."""
    row, given = METHODS[name], probe.batch()
    capped = pushed(name, {"weight.cap": 0.5})
    free = pushed(name, {"weight.cap": 1e9})
    keep = row.correction(given.logprobs, given.advantages, given.batch_info).keep
    ratio = (given.logprobs.current - given.logprobs.logp_rollout).exp()
    torch.testing.assert_close(free, -given.advantages * ratio * keep)
    above = keep & (ratio > 0.5) & (given.advantages != 0)
    assert above.any()
    assert (capped[above] != 0).all()


def test_ranges_are_those_of_their_sources_and_the_defaults_lie_inside():
    assert {kind: (r.low, r.high) for kind, r in RANGES.items()} == {
        "ratio_error": (0.03, 0.10),
        "token truncation": (1.5, 5.0),
        "sequence truncation": (2.0, 10.0),
    }
    found = {name: published_ranges(row) for name, row in METHODS.items()}
    assert found["ser"] == {"gate.high": RANGES["ratio_error"]}
    assert found["token_tis"] == found["decoupled_token_is"] == {"weight.cap": RANGES["token truncation"]}
    assert found["seq_tis"] == {"weight.cap": RANGES["sequence truncation"]}
    assert not found["cispo"], "a clip on staleness"
    assert not found["icepop"], "a band that masks"
    assert not found["ppo_clip"]
    assert sum(map(bool, found.values())) > 15
    outside = {
        name: path
        for name, row in METHODS.items()
        for path, r in found[name].items()
        if not r.low <= axes.settings(row)[path] <= r.high
    }
    # As published: DPPO's cap only guards against overflow, and ROLL Flash takes 1.2.
    assert set(outside) == {"dppo_tv", "dppo_kl", "roll_flash"}
    assert not found["topr"], "a limit for wrong answers alone"


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("ser", {"gate.high": 0.3}, ["gate.high = 0.3 is outside 0.03 to 0.1"]),
        ("ser", {"gate.high": 0.1}, []),
        ("token_tis", {"weight.cap": 50.0}, ["weight.cap = 50 is outside 1.5 to 5"]),
        ("seq_tis", {"weight.cap": 1.5}, ["weight.cap = 1.5 is outside 2 to 10"]),
        ("token_tis", {}, []),
        ("cispo", {"weight.cap": 50.0}, []),
    ],
)
def test_a_setting_outside_its_range_is_said_and_one_inside_is_not(name, changes, said):
    found = outside_ranges(override(METHODS[name], changes), changes)
    assert [words.partition(":")[0] for words in found] == said


def test_scales_are_those_of_the_survey_or_of_a_primary_source_and_not_stated_elsewhere():
    """Every row of the survey's map is a method or a system here, with its two columns; none is invented."""
    assert SHOWN_AT.keys() <= METHODS.keys() | SYSTEMS.keys()
    of_survey = {name for name, x in SHOWN_AT.items() if x.source == "survey, comparison map"}
    assert {*SURVEY["no"].split(), *SURVEY["yes"].split()} - of_survey == {"trm_max"}, "whose paper says it itself"
    assert len(of_survey) == 48, "the rows of the map: without TRM, and QaRL and TBPO are two here"
    assert {x.models for x in SHOWN_AT.values()} == {"dense", "MoE", "both"}
    for name, system in SYSTEMS.items():  # read from the same column
        assert name not in of_survey or SHOWN_AT[name].models == system.model_class
    # Entries as they stand in the map.
    expected = {"topr": "7B", "gspo": "100B-1T", "icepop": "1T (Ring-1T)", "dora": "30-100B", "vespo": "7-30B, lag 64"}
    assert {name: SHOWN_AT[name].scale for name in expected} == expected
    assert axes.facts("kpop", METHODS["kpop"])["shown_at"] == {
        "scale": "not stated",
        "models": "not stated",
        "source": "",
    }
    assert axes.facts("topr", METHODS["topr"])["shown_at"]["models"] == "dense"
    assert axes.system_facts("seer", SYSTEMS["seer"])["shown_at"]["scale"] == "up to 70B"
    assert ShownAt().source == ""
