"""What readings are made of: levels, trends, same weights, and what happens without numbers."""

import math
from typing import Any

import numpy as np
import pytest
from benchmarks.trend_alarms import ar1

from offdrift.judge import READINGS, Context, Watcher, load_rules
from offdrift.judge.readings.view import Window
from offdrift.judge.scatter import (
    Scatter,
    break_of,
    drift_of,
    line_of,
    moved,
    normal_score,
    shift_of,
    slope_over,
    walk_of,
)
from tests.judge.histories import altered, both, classes, clean, over_steps, shape, workers

LIMITS = load_rules().limits


def reading_after(rows, context=None):
    watcher = Watcher(context=context or Context())
    for row in rows:
        watcher.update(row)
    return watcher.reading


def test_levels_are_medians_of_five_steps():
    values = [0.0, 0.1, 5.0, 0.2, 0.4, 0.3]
    reading = reading_after([{"mismatch/chi2_token": x} for x in values])
    assert reading["chi2_token"] == 0.3  # of the last five
    assert reading.metrics["chi2_token"] == "mismatch/chi2_token"


def test_maxima_are_maxima_of_five_steps():
    rows = [{"mismatch/prob_diff_max": x} for x in (0.9, 0.1, 0.5, 0.2, 0.4, 0.3)]
    assert reading_after(rows)["prob_diff_max"] == 0.5


def test_engine_ratio_is_mismatch_where_there_is_one():
    both_logged = reading_after([{"mismatch/pearson": 0.9, "full/pearson": 0.8}])
    full_alone = reading_after([{"full/pearson": 0.8}])
    assert (both_logged["pearson"], full_alone["pearson"]) == (0.9, 0.8)
    assert full_alone.metrics["pearson"] == "full/pearson"
    heavy = reading_after([{"mismatch/k1": 0.1, "mismatch/chi2_token": 0.1, "full/chi2_token": 0.3}])
    assert heavy["chi2_token"] == 0.3, "the larger of both"


@pytest.mark.parametrize("nothing", [None, math.nan, math.inf, -math.inf, "0.9", [0.9], {}])
def test_what_is_not_a_number_is_missing(nothing):
    assert "pearson" not in reading_after([{"mismatch/pearson": nothing, "mismatch/k1": 0.1}])


def test_broken_gradients_are_not_missing():
    assert reading_after([{"optim/grad_norm": math.inf}])["broken"] == 1
    assert "broken" not in reading_after([{"optim/grad_norm": 1.0}])
    assert "broken" not in reading_after([{"optim/grad_norm": math.inf}, {"optim/grad_norm": 1.0}]), "of the last step"
    assert "broken" not in reading_after([{"optim/grad_norm": None}])


@pytest.mark.parametrize(
    ("values", "change", "score"),
    [
        ([1.0] * 9, 0.0, 0.0),
        ([1.0, 2.0, 3.0, 4.0, 5.0], 4 / 3, math.inf),
        ([5.0, 4.0, 3.0, 2.0, 1.0], -4 / 3, -math.inf),
        ([1.0, 2.0], 0.0, 0.0),
        ([], 0.0, 0.0),
        ([-1.0, 1.0, -1.0, 1.0, 0.0], 0.0, 0.0),
    ],
)
def test_slope_by_hand(values, change, score):
    assert slope_over(values) == pytest.approx(change)
    assert line_of(values, 5) == pytest.approx(score)


def test_slope_against_numpy():
    g = np.random.default_rng(0)
    y = 3 + 0.05 * np.arange(39) + g.normal(size=39) * 0.2
    line = np.polyfit(np.arange(39), y, 1)
    assert slope_over(list(y)) == pytest.approx(line[0] * 38 / y.mean())
    found = Scatter.of(y - np.polyval(line, np.arange(39)), fitted=2)
    sxx = 39 * (39**2 - 1) / 12
    t = line[0] / (found.deviation * math.sqrt(found.per_draw / sxx))
    assert line_of(list(y), 5) == pytest.approx(normal_score(t, 39 / found.per_draw - 2))


@pytest.mark.parametrize(("dof", "t"), [(1, 318.309), (2, 22.327), (3, 10.215), (5, 5.893), (10, 4.144), (100, 3.174)])
def test_normal_scores_are_those_of_tables(dof, t):
    """Student's t at 0.001, where a normal variable has 3.090."""
    assert normal_score(t, dof) == pytest.approx(3.090, rel=0.11 / dof)
    assert normal_score(-t, dof) == -normal_score(t, dof)
    assert normal_score(t, 0) == 0


def test_few_independent_draws_say_little():
    """The same shift over the same scatter: of 200 steps it is sure, of 14 it is not."""
    noise = list(np.random.default_rng(0).normal(size=200))
    late = [5.5] * 5
    assert shift_of(noise + late, 5) > LIMITS["trend_t"] > shift_of(noise[:14] + late, 5)


def test_a_slow_change_is_not_compared_with_itself():
    """A fall to a tenth in 40 of 100 steps: it makes the scatter of all before the end its own."""
    course = np.interp(np.arange(100), [45, 85], [0.0, -2.3])
    values = list(course + 0.1 * ar1(0.5, 100, 3))
    assert shift_of(values, 5, gap=50) < -LIMITS["trend_t"] < shift_of(values, 5)


def test_a_walk_moves_as_far_as_a_walk_does():
    """Random walks: a standard normal variable, whatever the size of a step; stationary steps: less."""
    g = np.random.default_rng(0)
    walks = [walk_of(7 * np.cumsum(g.normal(size=100)), 1, 40) for _ in range(2000)]
    assert np.std(walks) == pytest.approx(1.0, abs=0.06)
    for phi in (0.0, 0.5, 0.9):
        assert np.std([walk_of(ar1(phi, 100, seed), 5, 40) for seed in range(300)]) < 0.8


@pytest.mark.parametrize("phi", [0.0, 0.5, 0.8, 0.95])
def test_a_collapse_is_seen_whatever_steps_remember(phi):
    """A fall to a tenth in 40 steps under noise of 10 %, and the same noise without a fall."""
    course = np.interp(np.arange(160), [60, 100], [0.0, math.log(0.1)])
    limits = {x: LIMITS[f"trend_{x}"] for x in ("t", "walk", "drift")}

    def seen(y):
        return any(moved(np.exp(y[n - 80 : n]), 5, -1, **limits) for n in range(80, 160, 4))

    noise = [0.1 * ar1(phi, 160, seed) for seed in range(20)]
    assert sum(seen(course + x) for x in noise) == 20
    assert sum(seen(x) for x in noise) <= 1


def test_the_scatter_of_autocorrelated_steps_counts_independent_ones():
    """phi = .8 over 2,000 steps: nine steps say as much as one draw, and the mean scatters as it does."""
    series = np.array([ar1(0.8, 2000, seed) for seed in range(40)])
    found = [Scatter.of(list(x - x.mean()), fitted=1) for x in series]
    assert np.mean([s.deviation for s in found]) == pytest.approx(1.0, rel=0.05)
    assert np.mean([s.per_draw for s in found]) == pytest.approx(9.0, rel=0.15)
    assert np.mean([s.of_mean(2000) for s in found]) == pytest.approx(series.mean(1).std(), rel=0.3)


def test_a_series_too_short_for_its_correlation_counts_as_one_draw():
    walk = np.cumsum(np.random.default_rng(0).normal(size=30))
    walk -= walk.mean()
    assert Scatter.of(walk, fitted=1) == pytest.approx((math.hypot(*walk), 30.0, 0.0))
    assert line_of(list(100 + walk), 5) == 0
    smooth = [math.exp(i / 20) for i in range(40)]  # no line, and yet it rises at every step
    assert walk_of(smooth, 5, 20) > LIMITS["trend_walk"]
    assert drift_of([math.log(100 + i) for i in range(15)]) > LIMITS["trend_drift"]
    assert abs(drift_of(list(walk))) < 2


def test_noise_does_not_rise():
    """2,000 steps of noise with a coefficient of variation of one half: next to no window alarms."""
    g = np.random.default_rng(1)
    values = list(map(float, g.gamma(4, 0.25, 2000)))
    windows = [values[i : i + 20] for i in range(len(values) - 20)]
    steep = sum(slope_over(w) > LIMITS["trend_change"] for w in windows)
    limits = {x: LIMITS[f"trend_{x}"] for x in ("t", "walk", "drift")}
    raised = sum(moved(w, 5, **limits) for w in windows)
    assert len(windows) == 1980
    assert raised <= 4 < steep  # the change alone would alarm all the time


def test_length_ratio_is_the_golden_of_the_methods():
    """Entry metric.response_length: 1.21, over a hundred steps; medians see through one odd batch."""
    rows = [{"step": i, "response/length_mean": 100.0} for i in range(100)]
    rows += [{"step": i, "response/length_mean": 121.0} for i in range(100, 105)]
    assert reading_after(rows)["len_ratio"] == pytest.approx(1.21)
    rows[-1] = {"step": 104, "response/length_mean": 900.0}
    assert reading_after(rows)["len_ratio"] == pytest.approx(1.21)


def test_length_ratio_looks_back_by_steps_not_by_rows():
    """Steps logged every tenth: a hundred steps ago is ten rows ago."""
    rows = [{"step": 10 * i, "response/length_mean": 100.0 + i} for i in range(40)]
    ratio = reading_after(rows)["len_ratio"]
    assert ratio == pytest.approx((100 + 37) / (100 + 27))  # medians of rows 35..39 and 25..29


def test_same_weights_from_the_best_source():
    row = {"step": 50, "mismatch/k1": 0.03, "version_lag/max": 0}
    lagging = {"step": 51, "mismatch/k1": 0.3, "version_lag/max": 2}
    assert reading_after([row, lagging])["kl_same_ckpt"] == 0.03
    assert "kl_same_ckpt" not in reading_after([lagging])
    assert reading_after([lagging], Context(same_weights=True))["kl_same_ckpt"] == 0.3
    bucket = Context(facets={"lag": [{"low": 3, "mismatch/k1": 0.5}, {"low": 0, "mismatch/k1": 0.02}]})
    assert reading_after([lagging], bucket)["kl_same_ckpt"] == 0.02
    first = {"step": 1, "mismatch/k1": 0.01}  # nothing says that its weights were the same
    assert "kl_same_ckpt" not in reading_after([first, {"step": 2, "mismatch/k1": 0.2}])
    # the old policy may be scored by newer weights than the rollout's: its own lag decides
    scored_late = {"step": 50, "mismatch/k1": 0.3, "old/version_lag": 2, "version_lag/max": 3}
    assert "kl_same_ckpt" not in reading_after([scored_late])
    scored_at_once = {**scored_late, "old/version_lag": 0}
    assert reading_after([scored_at_once])["kl_same_ckpt"] == 0.3


def test_exact_divergences_are_preferred():
    row = {"mismatch/k1": 0.05, "divergence/kl_rollout_old_mean": 0.04, "full/k1": 0.2}
    reading = reading_after([row])
    assert (reading["kl"], reading["kl_full"]) == (0.04, 0.2)


def test_mean_ratio_follows_from_what_every_framework_logs():
    """mean e^l = 1 + k3 - k1, identically."""
    import torch

    l = torch.randn(999, dtype=torch.float64)  # noqa: E741
    row = {"mismatch/k1": float(-l.mean()), "mismatch/k3": float((l.exp() - 1 - l).mean())}
    assert reading_after([row])["ratio_mean"] == pytest.approx(float(l.exp().mean()), abs=1e-12)


def test_signatures_by_hand():
    row = {
        "positive_frac": 0.6,
        "negative_frac": 0.2,
        "k1": 0.05,
        "k3": 0.01,
        "abs_log_ratio_max": 5.0,
        "abs_log_ratio_mean": 0.1,
    }
    row |= {"slope": 0.9, "shift_corr": 0.3, "shift_corr_before": 0.5, "shift_corr_after": 0.8}
    reading = reading_after([{f"mismatch/{name}": x for name, x in row.items()}])
    expected = {"asymmetry": 0.5, "filter_share": 0.8, "tail_ratio": 50, "slope_off": 0.1, "shift_gain": 0.5}
    assert {name: reading[name] for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize(("count", "share"), [(2.0, 0.0), (3.0, 0.06)])
def test_a_few_shifted_sequences_are_none(count, share):
    row = {"mismatch/k3": 0.2, "mismatch/shifted_seqs": count, "mismatch/shifted_frac": 0.06}
    assert reading_after([row])["shifted_frac"] == share


def test_gates_and_weights_by_the_method():
    rows = altered({"weight/cap_frac": 0.2})
    assert reading_after(rows, Context(method="decoupled_token_icepop"))["icepop_oob"] == 0.2
    assert "icepop_oob" not in reading_after(rows, Context(method="token_tis"))
    assert reading_after(rows, Context(method="seq_tis"))["sequence_weights"] == 1
    assert reading_after(rows, Context(method="geo_is"))["sequence_weights"] == 0
    assert "sequence_weights" not in reading_after(rows, Context(method="not a method"))


def test_a_gate_that_acted_once_is_not_idle():
    rows = altered(lambda i, row: {"gate/0/drop_frac_token": 0.1 if i == 3 else 0.0, "gate/1/drop_frac_token": 0.1})  # fmt: skip
    assert reading_after(rows)["idle_gate"] == 0
    rows = altered({"gate/0/drop_frac_token": 0.1, "gate/1/drop_frac_token": 0.0})
    reading = reading_after(rows)
    assert (reading["idle_gate"], reading.metrics["idle_gate"]) == (60, "gate/1/drop_frac_token")


@pytest.mark.parametrize(("fall", "noise"), [(12, 0.08), (25, 0.08), (30, 0.0)])
def test_a_fall_of_the_reward_is_dated(fall, noise):
    g = np.random.default_rng(7)
    rewards = [max((0.7 if i < fall else 0.3) + noise * g.normal(), 0.0) for i in range(40)]
    rows = [{"step": 100 + i, "reward/mean": x} for i, x in enumerate(rewards)]
    reading = reading_after(rows)
    assert abs(reading["reward_step_at"] - (100 + fall)) <= 1
    assert reading["reward_step"] == pytest.approx(0.43, abs=0.1)
    # A slow fall, noise, and a rise are none.
    for other in (
        [0.7 - 0.01 * i for i in range(40)],
        [0.5 + 0.2 * g.normal() for _ in range(40)],
        [1.0 - x for x in rewards],
    ):
        rows = [{"step": i, "reward/mean": x} for i, x in enumerate(other)]
        assert "reward_step_at" not in reading_after(rows)


@pytest.mark.parametrize("phi", [0.0, 0.5, 0.8])
def test_a_series_without_a_break_has_none(phi):
    scores = [abs(break_of(ar1(phi, 40, seed), 5).score) for seed in range(300)]
    assert sum(score > 5 for score in scores) <= 1
    # The same series with a step of five standard deviations of a step have one, at its place.
    found = [break_of(ar1(0.0, 40, seed) - 5.0 * (np.arange(40) >= 17), 5) for seed in range(20)]
    assert all(abs(one.at - 17) <= 1 and one.score < -5 for one in found)


def test_an_offset_is_one_of_every_class_of_tokens():
    rows = altered({"mismatch/k1": 0.02, "full/k1": 0.02})

    def uneven(**means):
        reading = reading_after(rows, Context(facets=classes(**means)))
        return reading.get("offset_uneven")

    assert uneven(sure=0.02, likely=0.02, rare=0.021) == pytest.approx(0.05)
    assert uneven(sure=0.001, likely=0.03, rare=0.03) == pytest.approx(0.95)  # a filter
    assert uneven(sure=0.0, likely=0.01, rare=0.1) == pytest.approx(4.0)  # drift
    assert uneven(likely=0.02, rare=0.02, unsure=0.02) is None
    assert uneven(sure=0.02, rare=0.02) is None


def test_every_reading_can_be_made_and_is_documented():
    context = Context(
        same_weights=True,
        mixture_of_experts=True,
        temperature=0.7,
        filter_replayed=True,
        filtered=False,
        raw_stated=False,
        cache_replayed=True,
        method="decoupled_token_icepop",
        shapes={**over_steps("flat"), **shape("end"), "over_steps": over_steps("flat")["over_steps"],
                "over_steps_same": over_steps("jump")["over_steps"]},
        facets={"length": [{"low": 0, "gate/acceptance_seq": 0.9}, {"low": 9, "gate/acceptance_seq": 0.8}], **workers(),
                **classes(sure=0.01, likely=0.01, rare=0.02)},
    )  # fmt: skip
    data = ("batch/unscored_frac", "data/unread_frac", "data/cuts", "data/partly_frac", "data/probability", "data/impossible_tokens", "data/negated", "data/not_per_token", "data/ahead_frac", "data/lacking_frac/rewards")  # fmt: skip
    data += (
        "reuse/k3",
        "batch/updates_before",
        "old/version_lag",
        "old/stale_frac",
        "advantage/reward_corr",
        "advantage/reward_z",
        "advantage/misplaced_frac",
        "version/rollout",
        "advantage/span",
        "reward/span",
        "data/again_frac",
        "data/again_times",
        "record/entropy_gap",
        "record/entropy_z",
        "pipeline/lost_workers",
        "pipeline/worker_idle",
        "staleness/abs_log_ratio_max",
        "mismatch/shifted_seqs",
        "mismatch/shifted_frac",
    )
    rows = altered(
        {"router/delta_router": 0.01, "fusion/alpha_mean": 0.1, "gate/drop_frac_seq": 0.1, "batch/tokens": 3000.0}
        | dict.fromkeys(data, 0.0)
    )
    rows[-1] = {**rows[-1], "optim/loss": math.nan}
    made = {**reading_after(rows, context), **reading_after([{"full/abs_log_ratio_mean": 0.1}])}
    made |= reading_after(altered(lambda i, row: {"reward/mean": 0.6 if i < 35 else 0.2}))
    more = {
        "critic/vf_explained_var": 0.5,
        "critic/vf_loss": 0.1,
        "current/entropy": 0.4,
        "response/truncated_frac": 0.1,
    }
    more |= {"advantage/reward_corr": 0.4, "advantage/reward_z": 6.0, "weight/mean": 0.9}
    others = reading_after(altered(lambda i, _: more | {"version/rollout": float(i)}), Context(method="token_tis"))
    absent = {"truncated", "weight_mean", "critic_explains", "critic_level", "critic_loss_times"}
    absent |= {"entropy_left", "truncated_now", "advantage_corr_high", "engine_still"}
    assert set(made) | absent == set(READINGS)
    assert absent <= set(others)
    assert all(math.isfinite(x) for x in made.values())
    assert all(len(d.about) > 20 or "`" in d.about for d in READINGS.values())
    assert len(READINGS) > 40


def test_the_worker_that_drifts_most_is_compared_with_the_median_other() -> None:
    two_broken = workers(k3=0.02, **{"k3_se": 3e-4})
    two_broken["worker"][0] = {**two_broken["worker"][2], "mismatch/k3": 0.01, "label": "worker-0"}
    reading = reading_after(clean(), Context(facets=two_broken))
    assert reading["worker_growth"] == pytest.approx(20)  # the mean of the others would say 5
    assert reading["worker_z"] == pytest.approx((0.02 - 1e-3) / math.hypot(1e-4, 3e-4))
    assert reading.metrics["worker_growth"] == "mismatch/k3 of worker-2"
    off = reading_after(clean(), Context(facets=workers(ratio_mean=0.95, ratio_mean_z=-7.0)))
    assert (off["worker_ratio_z"], off["worker_ratio_off"]) == (7, pytest.approx(0.05))
    assert off["worker_ratio_growth"] == pytest.approx(100)


@pytest.mark.parametrize("left", [{"sequences": 29}, {"mismatch/k3": math.nan, "mismatch/ratio_mean_z": None}])
def test_workers_with_few_sequences_or_no_numbers_are_not_compared(left: dict[str, Any]) -> None:
    rows = [{**row, **(left if i else {})} for i, row in enumerate(workers(k3=0.02)["worker"])]
    assert not [name for name in reading_after(clean(), Context(facets={"worker": rows})) if name.startswith("worker")]


def test_an_older_worker_is_not_blamed_for_its_drift() -> None:
    from offdrift.judge import diagnose

    for lag, told in ((0.9, ["worker_apart"]), (1.1, [])):
        rows = workers(k3=0.02)["worker"]
        rows[2]["version_lag/mean"] = lag
        context = Context(overall=clean()[8], facets={"worker": rows})
        assert [f.rule for f in diagnose(clean(), context=context)] == told


def test_memory_does_not_grow_with_the_run():
    window = Window(205)
    for i in range(2000):
        window.add({"step": i, "gate/0/drop_frac_token": 0.0}, same_weights=True)
    assert len(window.rows) == 205
    assert window.steps == 2000
    assert len(window.same_weights) == 5
    assert len(window.peak) == 1


def test_alarms_need_more_than_one_odd_batch():
    rows = altered(lambda i, row: both(chi2_token=5.0, pearson=0.5) if i == 30 else {})
    watcher = Watcher()
    assert sum(len(watcher.update(row)) for row in rows) == 0


def test_watcher_and_diagnosis_agree():
    from offdrift.judge import diagnose
    from tests.judge.histories import FIRES

    compared = 0
    for name in ("raw_logprobs", "stale_engine", "length_surge", "idle_gate", "length_trap"):
        example = FIRES[name]
        watcher = Watcher(context=example.context)
        alerts = [f for row in example.rows for f in watcher.update(row)]
        assert len({f.rule for f in alerts}) == len(alerts)
        assert watcher.conclude() == diagnose(example.rows, context=example.context)
        compared += len(alerts)
    assert compared >= 5


def test_passing_findings_are_told_as_passing():
    from offdrift.judge import diagnose

    rows = clean(400)
    for i in range(100, 105):
        rows[i] = {**rows[i], **both(pearson=0.9), "version_lag/mean": 0.0, "version_lag/max": 0.0}
    (a, b) = diagnose(rows)
    assert (a.rule, a.severity, a.steps) == ("engines_disagree", "watch", 5)
    assert (b.rule, b.severity) == ("systems_fix", "watch")
    assert a.step == 103  # the third of five


def test_held_out_reward_decides_where_it_is_measured():
    """Training reward of a stale engine stays, while the policy has lost what it knew; and the other way round."""
    trained = [{"step": i, "reward/mean": 0.6} for i in range(60)]
    lost = [
        {**row, **({"eval/reward": 0.5 if i < 30 else 0.05} if i % 10 == 0 else {})} for i, row in enumerate(trained)
    ]
    assert reading_after(lost)["reward_drop"] == pytest.approx(0.9)
    assert reading_after(trained)["reward_drop"] == 0
    harder = [{"step": i, "reward/mean": 0.6 if i < 30 else 0.1, **({"eval/reward": 0.5} if i % 10 == 0 else {})} for i in range(60)]  # fmt: skip
    assert reading_after(harder)["reward_drop"] == 0
