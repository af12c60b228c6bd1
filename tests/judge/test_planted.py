"""Each planted cause is named, clean runs are left in peace, and the documented matrix is the measured one."""

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.confusion import BEGIN, END, KINDS, PAGE, RESULTS, render, upper_limit
from tests_lab.train.conftest import Digits

from offdrift.judge import Context
from offdrift.stats import DriftStats, summarize
from offdrift.stats.signature import signature
from offdrift_lab.train.data.tasks import TASKS
from tests.judge import planted, planted_real
from tests.judge.reported import CAUSES, CLEAN, audited, logged

CONFUSED = {"learning rate, clip saturated"}
"""Both are true of it, and the survey repairs the clip (E) before the optimizer (F)."""


FIRST = {case.cause: case.name for case in reversed(planted.CASES)}.values()
"""A case of every cause; the others are in the slow tier."""


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=c.name, marks=() if c.name in FIRST else pytest.mark.slow) for c in planted.CASES]
)
def test_a_generated_plant_is_named_first(case):
    said = audited(planted.run(case, seed=0), Context(mixture_of_experts=case.mixture_of_experts))
    assert (case.cause or CLEAN) in (said.causes or (CLEAN,))
    assert (said.cause == (case.cause or CLEAN)) == (case.name not in CONFUSED)


def test_every_cause_is_planted_and_so_is_nothing():
    planted_causes = Counter(c.cause for c in planted.CASES)
    assert set(planted_causes) == {None, *CAUSES}
    assert planted_causes[None] >= 4
    assert {c.cause for c in planted_real.CASES} >= {
        None, "precision", "stale_engine", "raw_logprobs", "router_flips", "wrong_weights", "optimizer_amplification",
    }  # fmt: skip


def test_generated_tokens_are_drawn_from_what_is_said():
    """E[pi / mu] = 1 where both sides are honest; a filter or a temperature on one side breaks it."""
    compared = 0
    for case in planted.CASES:
        batches = planted.run(replace(case, steps=12, growth=0.0), seed=3)
        each = (lp for lp in (b.logprobs() for b in batches))
        found = summarize(DriftStats.merge_all(DriftStats.of(lp).plus(signature(lp)) for lp in each))
        lies = case.cause in ("one_sided_filter", "misaligned") or "engine raw" in case.name
        assert (abs(found["full/ratio_mean_z"]) > 5) == lies, case.name
        compared += 1
    assert compared == len(planted.CASES) == 25


REAL = {"float32": {}, "top-p 0.9": {}, "off by one": {}, "no weights arrive": {"optim.lr": 1e-2}}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", REAL)
def test_a_real_plant_is_named_first_by_the_audit_and_by_the_trainer(name, tmp_path, monkeypatch):
    monkeypatch.setitem(TASKS, "digits", Digits())
    (case,) = (c for c in planted_real.CASES if c.name == name)
    case = replace(case, recipe={**case.recipe, **planted_real.SMALL, **REAL[name]})
    arm = planted_real.run(case, tmp_path, batches=8)
    said = audited(logged(arm / "log"), planted_real.context_of(case))
    assert said.cause == (case.cause or CLEAN), said.causes
    live = json.loads((arm / "summary.json").read_text())["findings"]
    assert [f["cause"] for f in live][:1] == ([case.cause] if case.cause else [])


def test_upper_limits_are_those_of_clopper_and_pearson():
    """Without a hit 1 - 0.05^(1/n); one of 20 from a table."""
    assert upper_limit(0, 149) == pytest.approx(1 - 0.05 ** (1 / 149), abs=1e-6)
    assert upper_limit(1, 20) == pytest.approx(0.2161, abs=1e-4)


def test_the_documented_matrix_is_the_stored_one_and_covers_every_case():
    runs = json.loads(RESULTS.read_text(encoding="utf-8"))["runs"]
    there = {kind: {r["case"] for r in runs if r["kind"] == kind} for kind in KINDS}
    assert there == {"generated": {c.name for c in planted.CASES}, "real": {c.name for c in planted_real.CASES}}
    page = Path(PAGE).read_text(encoding="utf-8")
    assert page.split(BEGIN)[1].split(END)[0].strip() == render(runs).strip()
    assert all(math.isfinite(r["k3"]) for r in runs)
