"""Evidence in words: one name stands for one number, and every number beside what it is compared with."""

import math
import string

import pytest

from offdrift.judge import Context, diagnose, load_rules
from offdrift.judge.findings import HALF, Evidence
from offdrift.judge.readings import READINGS, UNMEASURED, WORDINGS, worded
from offdrift.judge.readings.view import View, Window, read
from offdrift.judge.rules import Compared
from offdrift.judge.watcher import ALONE, BEFORE, BEGAN, CAME_FIRST, LIKELY
from offdrift.show.findings import CAUSES, SIDES, SURVEY, YOUR_HALF, footnote, in_order, shown, to_paste
from tests.judge.histories import altered, both, workers

RULES = load_rules()


def rich(i, row):
    """A step that nearly every reading can be made of."""
    told = both(ppl_ratio=1.3, slope=0.8, slope_r2=0.95, k3_top_share=0.14, shift_corr=0.9, shift_corr_before=0.3,
                ess_frac=0.4, chi2_token=1.3, ratio_mean=1.0, ratio_mean_z=0.5)  # fmt: skip
    return {**told, "optim/grad_norm": 25.0 if i == 58 else 1.0, "eval/reward": 0.9 - 0.01 * i, "optim/lr": 1e-6,
            "weight/std": 0.4, "weight/mean": 1.1, "weight/ess_frac": 0.5, "gate/drop_frac_seq": 0.2,
            "version_lag/mean": float(i % 5), "version_lag/max": float(i % 5), "response/length_mean": 20.0 + i}  # fmt: skip


def reading():
    window = Window(205)
    for row in altered(rich):
        window.add(row, same_weights=row["version_lag/mean"] == 0)
    context = Context(method="token_tis", temperature=0.7, mixture_of_experts=False, facets=workers(k3=0.3))
    return read(View(window, context, RULES.limits), READINGS)


def test_no_name_of_evidence_stands_for_two_numbers():
    """A slope of 0.803 and its distance of 0.197 from 1 were both called `mismatch/slope`."""
    numbers, made = {}, reading()
    for name, value in made.items():
        numbers.setdefault(worded(name, made.metrics[name]).words, set()).add(round(value, 12))
    assert len(made) > 50
    assert {words: values for words, values in numbers.items() if len(values) > 1} == {}


def test_every_wording_is_of_a_reading_and_names_its_metric_alone():
    assert set(WORDINGS) | set(UNMEASURED) <= set(READINGS)
    for name, (words, scale) in WORDINGS.items():
        assert {field for _, field, _, _ in string.Formatter().parse(words) if field} <= {"metric"}, name
        assert READINGS[name].unit == "1" or scale == "number", f"{name} has a unit of its own"


@pytest.mark.parametrize(("row", "said"), [
    (Evidence("mismatch/slope", 0.197, ">", 0.05, what="distance of mismatch/slope from 1"),
     ("distance of mismatch/slope from 1", "0.197", "> 0.05")),
    (Evidence("eval/reward", 0.611, ">=", 0.3, what="fall of eval/reward from its best", scale="share"),
     ("fall of eval/reward from its best", "61.1 %", ">= 30 %")),
    (Evidence("optim/grad_norm", 24.5, ">", 10.0, what="optim/grad_norm over its usual value", scale="times"),
     ("optim/grad_norm over its usual value", "24.5 ×", "> 10 ×")),
    (Evidence("experts", 0.0, "=", 0.0, what="the model is a mixture of experts", scale="yes"),
     ("the model is a mixture of experts", "no", "")),
    (Evidence("mismatch/k1", 0.08, ">", 1e-5, "nat"), ("mismatch/k1", "0.0800 nat", "> 1e−05 nat")),
])  # fmt: skip
def test_a_line_of_evidence_says_what_was_measured_and_what_it_is_compared_with(row, said):
    (line,) = shown({"evidence": [row.__dict__]}).evidence
    assert line[:3] == said


def test_evidence_of_a_rule_carries_its_words():
    (found,) = Compared("slope_off", ">", "slope_off").holds(reading(), RULES.thresholds)
    assert (found.metric, found.what, found.scale) == ("mismatch/slope", "distance of mismatch/slope from 1", "number")
    assert math.isclose(found.value, 0.2)
    (missing,) = Compared("kl_same_ckpt", "missing").holds({}, RULES.thresholds)
    assert missing.what == UNMEASURED["kl_same_ckpt"]


def test_a_collapse_names_what_came_before_it():
    def fall(i, row):
        return {"reward/mean": 0.8 if i < 35 else 0.4, **(both(k1=0.08, k3=0.08, pearson=0.9) if i > 20 else {})}

    told = diagnose(altered(fall))
    collapse = next(f for f in told if f.rule == "reward_collapse")
    before = next(f for f in told if f.step is not None and f.step < collapse.step and f.severity != "info")
    assert collapse.explanation.endswith(LIKELY.format(step=before.step, symptom=before.symptom))
    (alone,) = diagnose(altered(lambda i, row: {"reward/mean": max(0.8 - 0.04 * max(i - 28, 0), 0.4)}))
    assert alone.explanation.endswith(ALONE)
    assert CAME_FIRST not in alone.fix
    assert BEGAN in alone.fix
    asking = [name for name, rule in RULES.rules.items() if BEFORE in rule.explanation]
    assert asking == ["reward_collapse"]


def test_no_shown_snippet_holds_a_learning_rate_of_another_run():
    halved = [text for fix in RULES.fixes.values() for text in fix.snippets.values() if "5e-7" in text or HALF in text]
    assert len(halved) > 20
    for text in halved:
        ((_, pasted),) = shown({"snippets": {"verl": text}}).snippets
        assert YOUR_HALF in pasted
        assert not any(x in pasted for x in ("5e-7", "2.5e-6", "5e-5", HALF)), text
    assert "lr: 0.0" in to_paste(RULES.fixes["measure_at_the_same_weights"].snippets["verl"])


def test_a_temperature_is_told_of_the_side_that_lacks_it():
    titles = {
        rule: shown({"rule": rule, "cause": RULES.rules[rule].cause}).cause for rule in SIDES if rule in RULES.rules
    }
    assert titles["untempered_trainer"] == SIDES["untempered_trainer"] != titles["raw_logprobs"]
    assert shown({"rule": "mine", "cause": "raw_logprobs"}).cause == CAUSES["raw_logprobs"]


def test_the_survey_is_cited_once_below_what_rests_on_it():
    assert footnote(in_order([{"source": "survey, step 1"}])) == SURVEY
    assert footnote(in_order([{"evidence": [{"source": "survey, escalation"}]}])) == SURVEY
    assert footnote(in_order([{"source": "derived: docs/rules.md"}])) == ""
