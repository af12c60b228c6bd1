"""What a run says of itself, and what the user says above it."""

from __future__ import annotations

import json

from offdrift.audit.conclude import run_context

RUN = {
    "recipe": {"arms": {"plain": {"method": "none"}, "masked": {"method": "trm_max"}}, "rollout": {"temperature": 0.7}},
    "model": {"experts": True},
}


def test_an_arm_of_ours_says_how_it_trains(tmp_path):
    log = tmp_path / "arms" / "masked" / "log"
    log.mkdir(parents=True)
    (tmp_path / "run.json").write_text(json.dumps(RUN))
    found = run_context(str(log), "offdrift")
    assert (found.method, found.temperature, found.mixture_of_experts) == ("trm_max", 0.7, True)
    assert run_context(str(log), "offdrift", method="gspo").method == "gspo"


def test_a_run_of_several_arms_has_no_one_method(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps(RUN))
    assert run_context(str(tmp_path), "offdrift").method is None


def test_a_foreign_log_is_known_by_what_is_said(tmp_path):
    (tmp_path / "run.json").write_text("{half a file")
    found = run_context(str(tmp_path / "log.jsonl"), "verl", mixture_of_experts=False)
    assert (found.framework, found.method, found.temperature) == ("verl", None, None)
    assert found.mixture_of_experts is False
