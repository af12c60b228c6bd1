"""What the diagnosis once took for something else, each by what theory says that the cause does to the numbers."""

from dataclasses import replace

import pytest
import torch

from offdrift.judge import Context, diagnose, judge, load_rules
from offdrift.judge.apply import apply_fix
from offdrift_lab.train.settings.recipe import check_recipe
from tests.judge import planted
from tests.judge.histories import altered, both, clean, drift
from tests.judge.reported import audited

DENSE = Context(mixture_of_experts=False)
FRESH = {"version_lag/mean": 0.0, "version_lag/max": 0.0}

OVERALL = {"mismatch/k3": 0.03, "mismatch/k1": 0.03, "mismatch/pearson": 0.98, "version_lag/mean": 0.5}
FACETS = {"lag": [{"low": i, "label": str(i), "mismatch/k3": x, "mismatch/k1": x} for i, x in enumerate((5e-4, 0.06))]}


def named(history, context=DENSE):
    return [f.rule for f in diagnose(history, context=context)]


def growing(i, *, first, last, tail):
    """K3 at lag 0: that of the engine's arithmetic at the first step, another level from the second on."""
    size = first if i == 0 else last
    return {**drift(size, k3_top_share=tail, pearson=0.94, prob_diff_max=0.6), **FRESH}


@pytest.mark.parametrize("last", [0.002, 0.011, 0.1])
@pytest.mark.parametrize("first", [1e-12, 6e-6])
def test_weights_that_never_arrive_are_no_precision(first, last):
    """Equal up to the engine's arithmetic before anything was trained, and apart ever after, in few tokens or many."""
    told = named(altered(lambda i, row: growing(i, first=first, last=last, tail=0.7)))
    assert told[0] in ("wrong_weights", "weights_part")
    assert not {"engines_disagree", "engine_gap", "agreement_gap"} & set(told)


@pytest.mark.parametrize("last", [0.002, 0.011, 0.045])
def test_precision_is_there_at_the_first_step(last):
    told = named(altered(lambda i, row: growing(i, first=last / 2, last=last, tail=0.7)))
    assert told[0] in ("engines_disagree", "engine_gap")
    assert not {"wrong_weights", "weights_part"} & set(told)


def test_of_a_mixture_of_experts_few_tokens_are_routers_unless_the_engines_were_equal():
    experts = Context(mixture_of_experts=True)
    rounded = altered(lambda i, row: growing(i, first=1e-4, last=0.03, tail=0.7))
    equal = altered(lambda i, row: growing(i, first=1e-12, last=0.03, tail=0.7))
    assert named(rounded, experts)[0] == "router_flips"
    assert named(equal, experts)[0] == "wrong_weights"


def reversed_responses(batch):
    parts = batch.logp_rollout.split(batch.cu_seqlens.diff().tolist())
    return replace(batch, logp_rollout=torch.cat(parts[::-1]), divergences={})


def test_log_probs_of_other_responses_are_misaligned():
    (case,) = [c for c in planted.CASES if c.name == "float32"]
    told = audited([reversed_responses(b) for b in planted.run(case, seed=3)], DENSE)
    assert told.findings[0].rule == "misaligned"
    assert "raw_logprobs" not in told.causes


def test_a_heavy_tail_of_unrelated_log_probs_is_beyond_any_drift_though_its_error_is_large():
    """Markov: a mean of honest ratios above 20 is one log in 20, whatever the standard errors."""
    tail = both(shift_corr=0.01, k1=0.002, k3=108.0, ratio_mean=109.0, ratio_mean_z=1.9)
    assert named(altered(tail))[0] == "misaligned"
    mild = both(shift_corr=0.01, k1=2.0, k3=2.2, ratio_mean=1.2, ratio_mean_z=0.5)
    assert "misaligned" not in named(altered(mild))


def test_a_filter_that_the_recorded_settings_exclude_is_not_accused():
    old = {"version_lag/mean": 1.0, "version_lag/max": 2.0}
    rows = altered({**both(k1=0.1, k3=0.03, ratio_mean=0.93, ratio_mean_z=-7.5), **old})
    assert "one_sided_filter" in named(rows, DENSE)
    assert "one_sided_filter" in named(rows, replace(DENSE, filtered=True))
    assert "one_sided_filter" not in named(rows, replace(DENSE, filtered=False))


def test_an_engine_may_filter_by_a_setting_of_its_own():
    """At lag 0 nothing else explains it, whatever the run's settings say."""
    rows = altered({**both(k1=0.1, k3=0.03, ratio_mean=0.93, ratio_mean_z=-7.5), **FRESH})
    assert named(rows, replace(DENSE, filtered=False))[0] == "one_sided_filter"


def test_a_filter_is_told_of_the_whole_run_and_not_of_two_steps_of_a_heavy_tail():
    filtered = both(k1=0.1, k3=0.02, ratio_mean=0.92, ratio_mean_z=-7.5)
    rows = altered(lambda i, row: filtered if 40 <= i < 52 else {})
    whole = clean()[8]
    assert "one_sided_filter" not in named(rows, replace(DENSE, overall=whole))
    assert "one_sided_filter" in named(altered(filtered), replace(DENSE, overall={**whole, **filtered}))


def test_epochs_are_seen_by_what_they_add_and_before_what_follows_from_them():
    logged = altered({**both(chi2_token=1.2, ess_frac=0.4), "reuse/k3": 0.13})
    assert named(logged)[:2] == ["trained_again", "weight_variance"]
    assert named(altered({"reuse/k3": 0.03}))[0] == "batch_reused"
    assert named(altered({"reuse/k3": 0.002})) == []


def test_epochs_are_seen_live_by_the_steps_of_the_last_one():
    def epochs(i, row):
        epoch = i % 4
        return {"batch/epoch": epoch, "batch/updates_before": epoch, "staleness/k3": 0.006 * epoch**2}

    told = diagnose(altered(epochs), context=DENSE)
    assert told[0].rule == "trained_again"
    (evidence,) = told[0].evidence
    assert evidence.value == pytest.approx(0.054)
    one = altered(lambda i, row: {**epochs(i, row), "batch/epoch": 0.0})
    assert "trained_again" not in named(one)


def test_minibatches_of_a_fresh_batch_are_no_lag():
    """Mean version lag of two minibatches is .5: with what came before a step, it is known to be their own."""
    own = {"staleness/k3": 0.07, "old/exact_frac": 1.0, "version_lag/mean": 0.51, "version_lag/max": 1.0}
    assert "lag_since_old" in named(altered(own))
    known = named(altered({**own, "batch/updates_before": 0.51}))
    assert "lag_since_old" not in known
    assert "batch_reused" in known


@pytest.mark.parametrize(("before", "rule"), [(1.0, "updates_drift"), (0.0, "stale_engine")])
def test_drift_of_a_batch_s_own_updates_is_not_the_engine_s_age(before, rule):
    """Two updates apart: of the batch itself the learning rate makes it, of earlier batches the lag."""

    def second(i, row):
        size, lag = (0.06, 1.0) if i % 2 else (0.0005, 0.0)
        return {**drift(size), "batch/updates_before": before * lag, "version_lag/mean": lag, "version_lag/max": lag}

    told = named(
        altered(second), replace(DENSE, overall=OVERALL | {"batch/updates_before": 0.5 * before}, facets=FACETS)
    )
    assert told[0] == rule


def test_what_follows_from_a_cause_stands_behind_it():
    reading = {"kl": 0.08, "kl_same_ckpt": 0.001, "lag_growth": 9.0, "chi2_token": 4.5, "ess": 0.3, "pearson": 0.9}
    told = [f.rule for f in judge(reading, load_rules())]
    assert told.index("stale_engine") < told.index("weight_variance") < told.index("toxic_tail")
    assert told.index("stale_engine") < told.index("systems_fix")
    alone = [f.rule for f in judge({"chi2_token": 2.5, "ess": 0.3}, load_rules())]
    assert alone[:2] == ["weight_variance", "toxic_tail"]


@pytest.mark.parametrize("name", ["halve_lr", "smaller_updates", "less_pressure"])
def test_a_fix_that_says_half_halves(name):
    recipe = recipe_with(optim={"lr": 4e-3})
    after = apply_fix(recipe, load_rules().fixes[name].snippets["offdrift"], "a")
    assert check_recipe(after, source=name).optim.lr == 2e-3


def test_equal_precision_is_without_quantization():
    recipe = recipe_with(rollout={"quantization": "int8"})
    after = apply_fix(recipe, load_rules().fixes["align_precision"].snippets["offdrift"], "a")
    assert check_recipe(after, source="test").rollout.quantization is None


def recipe_with(**changes):
    content = {"name": "r", "model": "tiny-qwen3", "batches": 4, "arms": {"a": {"method": "none"}}, **changes}
    return check_recipe(content, source="test").model_dump(by_alias=True)


@pytest.mark.parametrize(
    ("slope", "lag", "first"),
    [
        (0.66, None, "tempered_or_lag"),
        (0.66, FRESH, "untempered_trainer"),
        (1.4, FRESH, "tempered_trainer"),
        (0.95**0.5, None, "router_or_rare_tokens"),
    ],
)
def test_a_spread_that_noise_cannot_make_is_no_routers(slope, lag, first):
    """A temperature of a sharp policy has a heavy tail; noise about a line keeps both spreads within 1 / sqrt(r2)."""
    tail = both(slope=slope, slope_r2=0.95, k3_top_share=0.6, prob_diff_max=0.6)
    versions = {"version_lag/mean": None, "version_lag/max": None} if lag is None else lag
    rows = altered({**drift(0.2), **tail, **versions})
    assert named([{**row, "step": row["step"] + 40} for row in rows], Context())[0] == first
