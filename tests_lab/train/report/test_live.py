"""Findings while an arm trains: said once, stored, in the summary, and the same after a resume."""

from __future__ import annotations

import json
import sys

import pytest

from offdrift.judge import Context, diagnose
from offdrift_lab.train.loop.loop import train
from offdrift_lab.train.loop.run_folder import RunFolder
from offdrift_lab.train.report.diagnosis import LiveDiagnosis
from tests_lab.train.conftest import small_recipe
from tests_lab.train.loop.test_loop import Stop, rows, stop_at

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
ARM = "none"
FAST = {"optim": {"lr": 3e-2}, "lag": {"sync_every": 4}, "batches": 12, "arms": {ARM: {"method": ARM}}}
"""A learning rate at which the policy is far from the engine's within a few updates."""


@pytest.fixture(scope="module")
def drifting(tmp_path_factory: pytest.TempPathFactory):
    events = []
    run = tmp_path_factory.mktemp("runs") / "drifting"
    (summary,) = train(small_recipe(**FAST), run, watch=events.append)
    return run, summary, events


def test_a_finding_is_said_once_stored_and_in_the_summary(drifting):
    run, summary, events = drifting
    assert [r["optim/lr"] for r in rows(run, ARM)] == [3e-2] * 12
    stored = rows(run, ARM, "findings")
    assert stored, "nothing was found in a run that drifts apart"
    names = [f["rule"] for f in stored]
    assert len(names) == len(set(names))
    said = [e for e in events if e.kind == "finding"]
    assert [e.metrics["rule"] for e in said] == names
    assert [e.step for e in said] == [f["update"] for f in stored]
    assert all(f["symptom"] in e.text for f, e in zip(stored, said, strict=True))
    assert {f["rule"] for f in summary["findings"]} <= set(names), "what another explains is left out"
    assert summary["findings"]
    assert json.loads((run / "run.json").read_text())["table"][0]["findings"] == summary["findings"]


def test_a_resumed_run_finds_the_same_without_repeating_itself(drifting, tmp_path):
    run, summary, _ = drifting
    with pytest.raises(Stop):
        train(small_recipe(**FAST), tmp_path / "cut", watch=stop_at(ARM, 11))
    (again,) = train(small_recipe(**FAST), tmp_path / "cut", resume=True)
    assert rows(tmp_path / "cut", ARM, "findings") == rows(run, ARM, "findings")
    assert again["findings"] == summary["findings"]


def test_stored_rows_say_what_the_live_ones_said(drifting):
    run, summary, _ = drifting
    files = RunFolder(run).arm(ARM)
    context = Context(method=ARM, mixture_of_experts=False, temperature=1.0)
    assert LiveDiagnosis.of(files.rows("metrics"), files.rows("eval"), context).summary() == summary["findings"]
    history = [{**r, "step": r["update"]} for r in files.rows("metrics")]
    history = [{k: v for k, v in r.items() if isinstance(v, (int, float))} for r in history]
    told = {f.rule for f in diagnose(history, context=context)}
    assert {f["rule"] for f in summary["findings"]} <= told


def test_a_quiet_run_acts_on_nothing(tmp_path):
    recipe = small_recipe(
        batches=8, lag={"sync_every": 1}, rollout={"prompts": 4, "samples": 4, "max_tokens": 6, "dtype": "float32"}
    )
    (summary,) = train(recipe, tmp_path / "run")
    assert [f for f in summary["findings"] if f["severity"] in ("act", "stop")] == []


def test_a_step_is_diagnosed_with_work_that_does_not_grow_with_the_run(drifting):
    run, _, _ = drifting
    files = RunFolder(run).arm(ARM)
    live = LiveDiagnosis.of(files.rows("metrics"), files.rows("eval"), Context())
    row = files.rows("metrics")[-1]
    calls: dict[int, int] = dict.fromkeys([*range(600, 620), *range(820, 840)], 0)

    def count(frame, event, argument) -> None:
        calls[step] += event == "call"

    before = sys.getprofile()
    for step in range(500, 840):
        sys.setprofile(count if step in calls else before)
        try:
            live.update({**row, "update": step})
        finally:
            sys.setprofile(before)
    early, late = list(calls.values())[:20], list(calls.values())[20:]
    assert 0 < max(late) <= 1.1 * max(early)
