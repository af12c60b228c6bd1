"""What is healthy, or not known, is not accused: noise, missing lags, luck, and nearly sure tokens."""

import random

import numpy as np
import pytest

from offdrift.audit.facets import Facets
from offdrift.judge import Context, Watcher, diagnose, escalate, judge, load_rules, verdict
from offdrift.judge.scatter import error_of_mean
from tests.audit.logs import asynchronous
from tests.judge.histories import FIRES, altered, both, clean, drift, later, without_lag

SURE = {"pearson": 0.4, "prob_diff_max": 0.002, "kl": 1e-5}
"""All probabilities lie in [0.9989, 0.9999] and differ by 5e-4: the range is restricted."""


def rules_of(rows, context=None):
    return [f.rule for f in diagnose(rows, context=context or Context())]


def test_a_low_correlation_of_nearly_sure_tokens_says_nothing():
    assert judge(SURE, load_rules()) == []
    same = both(k1=1e-5, k3=1e-5, pearson=0.4, prob_diff_max=0.002, prob_diff_mean=4e-4, prob_diff_std=3e-4)  # fmt: skip
    rows = altered(same)
    assert diagnose(rows) == []
    tail = {**SURE, "tail_share": 0.95, "experts": 1.0}
    assert judge(tail, load_rules()) == []
    lagging = {**SURE, "kl_same_ckpt": 1e-5, "lag_growth": 3.0}
    assert judge(lagging, load_rules()) == []
    assert judge({**SURE, "same_ckpt": 1.0}, load_rules()) == []
    for visible in ({**SURE, "prob_diff_max": 0.2}, {"pearson": 0.4}):
        # Only the same weights make it the engines'; without versions the log asks.
        assert [f.rule for f in judge(visible, load_rules())] == ["engine_or_lag"]
        same = judge({**visible, "same_ckpt": 1.0}, load_rules())
        assert [f.rule for f in same] == ["engines_disagree", "systems_fix"]


def test_the_escalation_overlooks_it_too():
    assert escalate(0.1, 0.0, pearson=0.4, prob_diff_max=0.002).action == "rejection"
    assert escalate(0.1, 0.0, pearson=0.4, prob_diff_max=0.2).action == "systems fix"


@pytest.mark.parametrize(("kl", "rule", "severity"), [(0.03, "stale_as_logged_mild", "watch"), (0.104, "stale_as_logged", "act")])  # fmt: skip
def test_low_correlation_at_a_known_lag_is_the_lag_alone_and_clears_no_engine(kl, rule, severity):
    """A constant lag of 4 and nothing at the same weights: the lag is named as logged, the engine is not cleared."""
    rows = later(altered({**drift(kl, pearson=0.937, prob_diff_max=0.5), "version_lag/mean": 4.0, "version_lag/max": 4.0}))  # fmt: skip
    (found,) = diagnose(rows)
    assert (found.rule, found.letter, found.severity, found.confidence) == (rule, "B", severity, "medium")
    assert "engines themselves are not cleared" in found.explanation
    assert "at lag 0" in found.decides


def test_engines_and_lag_are_never_blamed_and_cleared_together():
    """Without any lag in the log, too: a KL that lag could have made is not the engine's alone."""
    rows = later(altered({**drift(0.104, pearson=0.937, prob_diff_max=0.5), **without_lag()}))
    assert rules_of(rows) == ["engine_or_lag"]


def test_the_same_weights_decide_over_a_low_correlation():
    def at_lag(i, row):
        lag = float(i % 4)
        far = {"pearson": 0.93, "prob_diff_max": 0.4}
        return {**drift(0.001 + 0.02 * lag, **({} if lag == 0 else far)), "version_lag/mean": lag, "version_lag/max": lag}  # fmt: skip

    assert rules_of(later(altered(at_lag))) == ["stale_engine"]
    lag_free = {"version_lag/mean": 0.0, "version_lag/max": 0.0}
    engine = altered({**drift(0.04, pearson=0.93, prob_diff_max=0.4), **lag_free})
    assert rules_of(engine) == ["engines_disagree", "systems_fix"]


@pytest.mark.parametrize(
    ("on", "step"),
    [("mismatch", lambda i: i + 1), ("mismatch", lambda i: 0), ("full", lambda i: i + 1)],
    ids=["old policy", "no column of steps", "current policy"],
)
def test_the_first_step_is_at_the_same_weights_only_where_its_versions_say_so(on, step):
    rows = [{"step": step(i), f"{on}/k1": 0.08, f"{on}/k3": 0.08, f"{on}/pearson": 0.99} for i in range(9)]  # fmt: skip
    assert rules_of(rows) == ["engine_or_lag"]
    first = {**rows[0], "version_lag/mean": 0.0, "version_lag/max": 0.0}
    assert rules_of([first, *rows[1:]]) == ["engines_apart"]


def test_a_few_sequences_leave_k1_at_several_times_the_kl():
    noisy = {"step": 5, "mismatch/k1": 0.042, "mismatch/k3": 0.0148, "mismatch/ratio_mean_z": -2.0, "version_lag/max": 0}  # fmt: skip
    assert diagnose([noisy]) == []
    assert "KL 0.0148 nat" in verdict([], noisy)["text"]
    negative = {**noisy, "mismatch/k1": -0.03}
    assert "KL 0.0148 nat" in verdict([], negative)["text"]
    # A mean ratio that is not 1 is no noise: then k1 shows what k3 hides.
    dishonest = {**noisy, "mismatch/ratio_mean_z": -20.0}
    assert rules_of([dishonest]) == ["one_sided_filter"]
    assert diagnose([dishonest])[0].evidence[0].metric == "ratio_mean"


def test_a_noisy_first_batch_does_not_decide_a_run():
    rows = altered(lambda i, row: {**both(k1=0.0224 if i == 0 else 0.009, k3=0.009, ratio_mean_z=-1.0), **without_lag()})  # fmt: skip
    assert diagnose(rows) == []


@pytest.mark.parametrize("p", [0.02, *(pytest.param(p, marks=pytest.mark.slow) for p in (0.004, 0.1, 0.5))])
def test_rare_rewards_that_come_and_go_are_no_collapse(p):
    """200 steps of 16 sequences, rewarded with probability p, always."""
    for seed in range(2):
        g = random.Random(seed)
        rows = [{"step": 100 + i, "mismatch/k1": 0.001, "reward/mean": sum(g.random() < p for _ in range(16)) / 16} for i in range(200)]  # fmt: skip
        assert diagnose(rows) == []


def test_a_fall_of_the_reward_alone_is_of_medium_confidence():
    fall = altered(lambda i, row: {"reward/mean": max(0.8 - 0.04 * max(i - 28, 0), 0.4)})
    (found,) = diagnose(fall)
    assert (found.rule, found.severity, found.confidence) == ("reward_collapse", "stop", "medium")
    # At one step, while nothing of the optimizer moves: other prompts, or another reward function.
    at_once = altered(lambda i, row: {"reward/mean": 0.8 if i < 35 else 0.4})
    (asked,) = diagnose(at_once)
    assert (asked.rule, asked.severity, asked.confidence) == ("reward_stepped", "act", "medium")
    silent = [{k: x for k, x in row.items() if not k.startswith(("optim/", "objective/"))} for row in at_once]
    assert [f.rule for f in diagnose(silent)] == ["reward_stepped"]  # also where of the optimizer nothing is known
    second = [{**row, "objective/clip_frac_active": 0.3} for row in fall]
    # A clip that acts is a second reading, but no fact: tasks may have become harder all the same.
    (still,) = [f for f in diagnose(second) if f.rule == "reward_collapse"]
    assert (still.severity, still.confidence) == ("stop", "medium")


def test_lengths_that_scatter_do_not_surge():
    """Means of 8 lognormal lengths a step, independent of the step."""
    for seed in range(2):
        g = random.Random(seed)
        rows = [{"step": i, "mismatch/k1": 0.001, "response/length_mean": sum(g.lognormvariate(3, 1) for _ in range(8)) / 8} for i in range(160)]  # fmt: skip
        assert diagnose(rows) == []


@pytest.mark.parametrize(
    ("steps", "shows", "surges"),
    [
        (30, drift(0.03), False),
        (60, drift(0.03), True),
        (60, {"mismatch/k1": 0.001, "objective/clip_frac_active": 0.3}, True),
        (60, {"mismatch/k1": 0.001}, False),
    ],
    ids=["young", "drift", "clip", "neither"],
)
def test_lengths_surge_in_a_run_with_a_past_where_drift_or_a_clip_shows(steps, shows, surges):
    rows = [{"step": i, **shows, "response/length_mean": 100.0 if i < steps - 9 else 200.0} for i in range(steps)]  # fmt: skip
    assert ("length_surge" in rules_of(rows)) == surges


@pytest.mark.parametrize(
    ("known", "rule", "severity"),
    [(None, "router_or_rare_tokens", "watch"), (True, "router_flips_some", "watch"), (False, "probability_spike", "watch")],
)  # fmt: skip
def test_a_router_is_only_accused_where_there_is_one(known, rule, severity):
    rows = altered(both(k1=0.005, k3=0.005, k3_top_share=0.93, prob_diff_max=0.77))
    (found,) = diagnose(rows, context=Context(mixture_of_experts=known))
    assert (found.rule, found.severity) == (rule, severity)


@pytest.mark.parametrize(
    ("kl", "rules"), [(2e-4, []), (6e-4, []), (1.5e-3, ["router_flips_some"]), (8e-3, ["router_flips"])]
)
def test_a_router_that_flips_at_a_token_is_told_where_flips_add_up(kl, rules):
    """Rounding tips some router in every run of such a model: one token of two thousand is no defect."""
    rows = altered(both(k1=kl, k3=kl, k3_top_share=0.95, prob_diff_max=0.6))
    assert [f.rule for f in diagnose(rows, context=Context(mixture_of_experts=True))] == rules
    assert [f.rule for f in diagnose(rows, context=Context(mixture_of_experts=False))] == ["probability_spike"]


def test_an_unknown_router_does_not_hide_engines_that_disagree():
    rows = altered({**drift(0.08, k3_top_share=0.95), "version_lag/mean": 0.0, "version_lag/max": 0.0})  # fmt: skip
    first, second = diagnose(rows)
    assert (first.rule, first.severity) == ("engines_apart", "act")
    assert (second.rule, second.severity) == ("router_or_rare_tokens", "watch")


def growing(first):
    """Drift at lag 0 that grows; the first batch alone is `first`."""
    return altered(lambda i, row: {**drift(first if i == 0 else 0.01 + 0.0006 * i), "version_lag/mean": 0.0, "version_lag/max": 0.0})  # fmt: skip


def test_drift_that_grows_at_lag_0_is_the_sync_or_the_version_counter():
    rows = altered(lambda i, row: {**drift(0.0015 + 0.001 * i), "version_lag/mean": 0.0, "version_lag/max": 0.0})  # fmt: skip
    (found,) = diagnose(rows)
    assert (found.rule, found.severity, found.confidence) == ("wrong_weights", "act", "medium")
    assert "synchronization" in found.explanation
    assert "version counter" in found.explanation
    assert "checkpoint" in found.decides


def test_one_lucky_first_batch_is_no_baseline():
    """k3 of 0.0106 to 0.045: against a first batch of 0.001 it would have grown 40 times."""
    assert growing(0.001)[0]["mismatch/k3"] == 0.001
    (found,) = [f for f in diagnose(growing(0.001)) if f.rule == "wrong_weights"] or [None]
    assert found is None or found.evidence[1].value < 5


def by_length(short, long, sequences=100):
    return {"length": [{"low": 1, "mismatch/acceptance_sum": short, "sequences": 400}, {"low": 512, "mismatch/acceptance_sum": long, "sequences": sequences}]}  # fmt: skip


@pytest.mark.parametrize(
    ("method", "facets", "trapped"),
    [
        ("seq_mis", by_length(0.9, 0.2), True),
        ("seq_tis", by_length(0.9, 0.2), True),
        ("seq_tis", by_length(0.9, 0.8), False),
        ("seq_tis", by_length(0.9, 0.0, sequences=12), False),
        ("token_tis", by_length(0.9, 0.0), False),
        ("decoupled_geo_rs", by_length(0.9, 0.0), False),
        (None, by_length(0.9, 0.0), False),
    ],
)
def test_length_trap_of_an_audit(method, facets, trapped):
    """The audit knows what a gate on sums would accept; that is held against methods on sums alone."""
    found = rules_of(clean(), Context(method=method, facets=facets))
    assert ("length_trap" in found) == trapped


def test_what_is_about_the_whole_log_has_no_step():
    blind = [{"step": i, "reward/mean": 0.5} for i in range(5)]
    (found,) = diagnose(blind)
    assert (found.rule, found.step, found.steps) == ("nothing_measured", None, 0)
    late = [*blind, *({"step": i, "mismatch/k1": 0.001} for i in range(5, 9))]
    assert diagnose(late) == []


def jumping(first, later, steps=12):
    """Same weights throughout, k3 of the first batch and around that of all others."""
    return [{"step": i + 1.0, "version_lag/mean": 0.0, "version_lag/max": 0.0, **drift(first if i == 0 else later * (0.5 + i % 3))} for i in range(steps)]  # fmt: skip


@pytest.mark.parametrize(
    ("first", "later", "named"),
    [
        (1e-13, 1.5e-3, "weights_part"),  # equal to rounding before the first update, never again
        (1e-13, 0.04, "wrong_weights"),
        (1e-4, 1.5e-3, None),  # batches of one engine differ that much
        (1e-13, 1e-4, None),  # too small to be told from rounding that begins with the second batch
        (1e-3, 1.5e-3, None),
    ],
)
def test_weights_that_part_at_the_first_update(first, later, named):
    rules = rules_of(jumping(first, later))
    assert [r for r in rules if r in ("weights_part", "wrong_weights")] == ([named] if named else [])  # fmt: skip


@pytest.mark.parametrize("names", [("batch/tokens", "batch/unscored_tokens"), ("batch/tokens", "unscored_tokens")])
def test_three_tokens_without_log_probs_are_told_live_and_once(names):
    """At one step of sixty, where a median over five would see none of them."""
    watcher, tokens = Watcher(), dict(zip(names, (100.0, 0.0), strict=True))
    told = []
    for i, row in enumerate(clean()):
        told += watcher.update({**row, **tokens, names[1]: 3.0 if i == 9 else 0.0})
    (finding,) = told
    assert (finding.rule, finding.severity, finding.step) == ("unscored_some", "watch", 10)
    assert "(3 of 1,00" in finding.evidence[0].metric
    assert [f.rule for f in watcher.conclude()] == ["unscored_some"]


@pytest.mark.parametrize(("slow", "fast", "most"), [(0.0, 1.0, 1.5), (1.0, 0.0, 1.9), (1.0, 2.0, 1.5)])
def test_the_error_of_a_mean_counts_noise_of_steps_and_of_blocks(slow, fast, most):
    """Fresh noise, levels that last eight steps, and such levels under fresh noise that hides them from one step."""
    g, ratios = np.random.default_rng(0), []
    true = (slow**2 / 10 + fast**2 / 80) ** 0.5
    for _ in range(60):
        series = slow * np.repeat(g.normal(size=40), 8) + fast * g.normal(size=320)
        ratios.append(error_of_mean(series - series.mean(), 1, 80, 8)[0] / true)
    assert 1.0 <= np.mean(ratios) <= most


@pytest.mark.parametrize("noise", [0.02, 0.3])
def test_workers_that_differ_by_chance_are_left_in_peace(noise: float) -> None:
    limits, largest = load_rules().limits, {"worker_z": 0.0, "worker_ratio_z": 0.0}
    for seed in range(40):
        rows = Facets.of(asynchronous(seed, noise=noise))[0].rows()["worker"]
        watcher = Watcher(context=Context(facets={"worker": rows}))
        watcher.update({"step": 1, "mismatch/k3": 1e-3})
        reading = watcher.reading
        largest = {name: max(x, reading[name]) for name, x in largest.items()}
        assert reading["worker_growth"] < 1.5
    assert min(largest.values()) > 1.5  # of 8 workers one is always somewhat off
    assert max(largest.values()) < limits["worker_z"]


EXPLAINED_BY_A_TEACHER = (
    *("untempered_trainer", "wrong_weights", "weights_part", "engines_far_apart", "engines_disagree"),
    *("router_flips", "router_or_rare_tokens", "engine_gap", "probability_spike", "engine_or_lag", "agreement_gap"),
)


@pytest.mark.parametrize("name", EXPLAINED_BY_A_TEACHER)
def test_a_teacher_whose_logits_are_mixed_in_is_no_fault_of_the_engines(name):
    rows, context = FIRES[name].rows, FIRES[name].context
    assert name in rules_of(rows, context)
    mixed = rules_of([{**row, "fusion/alpha_mean": 0.5} for row in rows], context)
    assert "teacher_mixed" in mixed
    assert not {*mixed} & {*EXPLAINED_BY_A_TEACHER, "systems_fix"}
    assert rules_of([{**row, "fusion/alpha_mean": 0.0} for row in rows], context) == rules_of(rows, context)


@pytest.mark.parametrize(("steps", "expected"), [((20, 30), False), ((20, 60), True), ((0, 60), True)])
def test_a_filter_is_not_told_of_metrics_that_showed_it_for_a_while(steps, expected):
    """A filter does not come and go; drift that begins has its signs for some steps."""
    filtered = both(k1=0.048, k3=0.0015, ratio_mean=0.9535)  # metrics have no error of the mean ratio
    rows = altered(lambda i, row: (filtered if steps[0] <= i < steps[1] else {}) | both(ratio_mean_z=None))
    context = Context(metrics_only=True)
    assert ("one_sided_filter" in [f.rule for f in diagnose(rows, context=context)]) == expected
