"""Histories made by hand: a clean run, and for each rule the smallest change that it is about."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from offdrift.judge import Context
from offdrift.judge.readings.shapes import KINDS

Row = dict[str, float]
STEPS = 60


def clean(steps: int = STEPS, first: int = 1) -> list[Row]:
    """A healthy run: bfloat16 against float32, one update of lag every second step, a little noise."""
    rows = []
    for i in range(steps):
        wave = 1 + 0.1 * math.sin(1.7 * i)
        lag = float(i % 2)
        kl = 0.0012 * wave * (1 + 0.3 * lag)
        row: Row = {"step": float(first + i)}
        for on in ("mismatch", "full"):
            row |= {
                f"{on}/k1": kl,
                f"{on}/k3": kl * 1.01,
                f"{on}/pearson": 0.9990 + 0.0002 * wave,
                f"{on}/ppl_ratio": 1.0013,
                f"{on}/chi2_token": 0.003 * wave,
                f"{on}/chi2_seq": 0.2 * wave,
                f"{on}/ess_frac": 0.997,
                f"{on}/ess_seq_frac": 0.8 * wave,
                f"{on}/prob_diff_mean": 0.005,
                f"{on}/prob_diff_std": 0.01,
                f"{on}/prob_diff_max": 0.12 * wave,
                f"{on}/abs_log_ratio_mean": 0.02,
                f"{on}/abs_log_ratio_max": 0.5,
                f"{on}/ratio_mean": 1 + 0.0002 * math.sin(i),
                f"{on}/ratio_mean_z": math.sin(i),
                f"{on}/slope": 1.001,
                f"{on}/slope_r2": 0.999,
                f"{on}/shift_corr": 0.999,
                f"{on}/shift_corr_before": 0.1,
                f"{on}/shift_corr_after": 0.1,
                f"{on}/positive_frac": 0.46,
                f"{on}/negative_frac": 0.47,
                f"{on}/k3_top_share": 0.17,
            }
        rows.append(
            row
            | {
                "staleness/k3": 0.001,
                "version_lag/mean": lag,
                "version_lag/max": lag,
                "weight/std": 0.05,
                "weight/ess_frac": 0.99,
                "weight/cap_frac": 0.001,
                "gate/acceptance_seq": 0.97,
                "gate/drop_frac_seq": 0.03,
                "gate/0/drop_frac_token": 0.03,
                "objective/clip_frac_active": 0.03 * wave,
                "objective/eps_high": 0.2,
                "response/length_mean": 200.0 * (1 + 0.02 * math.sin(i)),
                "reward/mean": 0.5 + 0.002 * i + 0.01 * math.sin(i),
                "optim/grad_norm": 0.4 * wave,
                "optim/loss": 0.01,
                "optim/lr": 1e-6,
                "variance_proxy/proxy3_pure_noise": 0.02 * wave,
            }
        )
    return rows


def altered(change: Mapping[str, float] | Callable[[int, Row], Mapping[str, float | None]]) -> list[Row]:
    """The clean run with some numbers changed; None takes a number away."""
    rows = []
    for i, row in enumerate(clean()):
        new = change(i, row) if callable(change) else change
        rows.append({k: v for k, v in {**row, **new}.items() if v is not None})
    return rows


def both(**changes: float) -> dict[str, float]:
    """The same change on both ratios."""
    return {f"{on}/{name}": x for on in ("mismatch", "full") for name, x in changes.items()}


def without_lag(*more: str) -> dict[str, None]:
    """Takes away everything that says how old the weights are."""
    return dict.fromkeys(("version_lag/mean", "version_lag/max", *more))


def drift(k1: float, **more: float) -> dict[str, float]:
    """Honest drift of a size: k1 = k3 = chi2 / 2."""
    return both(k1=k1, k3=k1, chi2_token=2 * k1, ppl_ratio=math.exp(k1), **more)


def workers(**of_the_third: float) -> dict[str, list[Row]]:
    """Four workers, the third of them with other numbers of the mismatch."""
    usual: Row = {"sequences": 200, "version_lag/mean": 0.5}
    usual |= {
        f"mismatch/{k}": v for k, v in {"k3": 1e-3, "k3_se": 1e-4, "ratio_mean": 1.0005, "ratio_mean_z": 0.4}.items()
    }
    third = {f"mismatch/{k}": v for k, v in of_the_third.items()}
    return {"worker": [{**usual, **(third if i == 2 else {}), "label": f"worker-{i}"} for i in range(4)]}


def classes(**means: float) -> dict[str, list[Row]]:
    """Classes of tokens with the mean log-ratio of each."""
    return {
        "token_class": [{"label": name, "tokens": 500, "mismatch/k1": k1, "full/k1": k1} for name, k1 in means.items()]
    }


def shape(
    kind: str | None, gap: float = 0.1, there: Mapping[str, float] = MappingProxyType({}), **whole: float
) -> dict[str, Any]:
    """What an audit knows of a gap that is in one place, with other numbers `there`, or of the whole log alone."""
    row = {
        "kind": kind,
        "where": "in one place",
        "gap": gap,
        "elsewhere": gap / 50,
        "z": 20.0,
        "corr_high": 1.0,
        **there,
    }
    usual = {"gap": gap / 25, "tokens": 1e4, "sequences": 200, "ratio_mean": 1.0, "ratio_z": 0.0, "corr_high": 1.0}
    return {"found": [] if kind is None else [row], "whole": {**usual, **whole}}


def over_steps(trend: str, which: str = "over_steps", last: float = 0.2) -> dict[str, Any]:
    """What an audit knows of a gap that goes that way over the steps."""
    return {**shape(None), which: {"trend": trend, "first": 1e-3, "last": last, "largest": last}}


@dataclass(frozen=True)
class Example:
    """A history on which a rule must fire."""

    rows: list[Any]
    context: Context = field(default_factory=Context)


def rising(i: int, last: float, first: float = 0.0) -> float:
    return first + (last - first) * i / (STEPS - 1)


LATER = 1000.0
"""A log that begins in the middle of a run: its first step is no same-weights reading."""


def later(rows: list[Row]) -> list[Row]:
    return [{**row, "step": row["step"] + LATER} for row in rows]


FIRES: dict[str, Example] = {
    "misaligned": Example(altered(both(shift_corr=0.2, shift_corr_after=0.99, pearson=0.3))),
    "raw_logprobs": Example(altered(both(k1=-0.08, k3=0.06, ratio_mean=1.14, ratio_mean_z=4.0))),
    "cache_not_replayed": Example(clean(), Context(cache_replayed=False)),
    "raw_stated": Example(clean(), Context(raw_stated=True)),
    "one_sided_filter": Example(altered(both(k1=0.048, k3=0.0015, ratio_mean=0.9535, ratio_mean_z=-20.0))),
    "entropy_off": Example(altered({"record/entropy_gap": 0.1, "record/entropy_z": 40.0, "batch/tokens": 3000.0})),
    "temperature_unseen": Example(clean(), Context(temperature=0.7)),
    "length_changed": Example(altered(lambda i, row: {"response/length_mean": (600.0 if i > 30 else 200.0) * (1 + 0.02 * math.sin(i))})),
    "filter_or_swap": Example(
        altered(both(k1=-0.1, k3=0.005, ratio_mean=1.105, ratio_mean_z=14.0, positive_frac=0.99, negative_frac=0.0))
    ),
    "filter_not_replayed": Example(clean(), Context(filter_replayed=False)),
    "teacher_mixed": Example(altered({**drift(0.06), "fusion/alpha_mean": 0.5})),
    "untempered_trainer": Example(
        altered({**drift(0.06, slope=0.85, slope_r2=0.98), **without_lag()}),
        Context(temperature=0.8),
    ),
    "tempered_trainer": Example(altered(drift(0.06, slope=1.3, slope_r2=0.98))),
    "tempered_or_lag": Example(later(altered({**drift(0.03, slope=1.2, slope_r2=0.99), **without_lag()}))),
    "record_not_drawn": Example(clean(), Context(shapes=shape(None, ratio_mean=1.2, ratio_z=30.0), overall={**clean()[8], **both(ratio_mean=1.2)})),
    "record_or_support": Example(clean(), Context(shapes=shape(None, ratio_mean=0.8, ratio_z=-30.0), overall={**clean()[8], **both(ratio_mean=0.8)})),
    "shape_support": Example(clean(), Context(shapes=shape("first_tokens", there={"ratio_mean": 0.9, "ratio_z": -20.0}))),
    "shape_seen_mild": Example(clean(), Context(shapes=shape("seen", gap=0.01))),
    "no_versions_drifting": Example(later(altered(without_lag())), Context(shapes=over_steps("growing", last=0.01))),
    "updates_or_noise": Example(later(altered({**without_lag(), "staleness/k3": 0.08, "batch/updates_before": None})), Context(shapes=over_steps("flat", last=1e-3))),
    "small_gap": Example(altered({**drift(0.01), "version_lag/mean": 0.0, "version_lag/max": 0.0}), Context(shapes=over_steps("flat", last=0.01))),
    "ppl_below_one": Example(altered(lambda i, row: both(ppl_ratio=0.985 + 0.002 * math.sin(1.3 * i), k1=-0.004, k3=0.001, ratio_mean=None, ratio_mean_z=None))),
    "trainer_not_repeating": Example(altered({"staleness/k3": 0.1, "batch/updates_before": 0.0, "version_lag/mean": 0.0, "version_lag/max": 0.0})),
    **{f"shape_{kind}": Example(clean(), Context(shapes=shape(kind))) for kind in KINDS},
    "unit_too_fine": Example(clean(), Context(shapes=shape("kinds"), method="token_tis")),
    "unit_too_coarse": Example(altered(both(k3=0.03, k1=0.03, k3_top_share=0.7)), Context(method="decoupled_geo_rs")),
    "shape_mild": Example(clean(), Context(shapes=shape("end", gap=0.01))),
    "lag_contradicted": Example(
        altered({"version_lag/mean": 4.0, "version_lag/max": 4.0}), Context(shapes=over_steps("growing"))
    ),
    "weights_passing": Example(clean(), Context(shapes=over_steps("spike", "over_steps_same"))),
    **{
        f"no_versions_{trend}": Example(later(altered(without_lag())), Context(shapes=over_steps(trend)))
        for trend in ("growing", "jump", "sawtooth", "saturating")
    },
    "support_violated": Example(altered({"data/impossible_tokens": 2.0})),
    "stale_as_logged": Example(altered({**drift(0.08), "version_lag/mean": 8.0, "version_lag/max": 8.0})),
    "stale_as_logged_mild": Example(altered({**drift(0.03), "version_lag/mean": 8.0, "version_lag/max": 8.0})),
    "temperature_changed": Example(
        altered({**drift(0.06, slope=0.8, slope_r2=0.95), "version_lag/mean": 0.0, "version_lag/max": 0.0}),
        Context(shapes=over_steps("jump", "over_steps_same")),
    ),
    "wrong_weights": Example(
        altered(lambda i, row: {**drift(rising(i, 0.2, 0.001)), "version_lag/mean": 0.0, "version_lag/max": 0.0})
    ),
    "weights_part": Example(
        altered(lambda i, row: {**drift(rising(i, 2e-3, 1e-5)), "version_lag/mean": 0.0, "version_lag/max": 0.0})
    ),
    "engines_far_apart": Example(altered(drift(0.9)), Context(same_weights=True)),
    "router_flips": Example(
        altered(drift(0.03, k3_top_share=0.95, prob_diff_max=0.9)), Context(mixture_of_experts=True)
    ),
    "router_flips_some": Example(
        altered(drift(0.003, k3_top_share=0.95, prob_diff_max=0.9)), Context(mixture_of_experts=True)
    ),
    "router_or_rare_tokens": Example(
        altered(drift(0.018, k3_top_share=0.95, prob_diff_max=0.9))
    ),
    "engines_disagree": Example(altered(drift(0.08, pearson=0.93)), Context(same_weights=True)),
    "engines_apart": Example(altered(drift(0.08, pearson=0.97))),
    "engine_gap": Example(altered(drift(0.03))),
    "probability_spike": Example(altered(lambda i, row: both(prob_diff_max=0.8) if i == 30 else {})),
    "engine_or_lag": Example(later(altered({**drift(0.08), **without_lag()}))),
    "weight_variance": Example(altered(both(chi2_token=1.2))),
    "toxic_tail": Example(altered(both(chi2_token=2.5))),
    "sequence_weights_wasted": Example(altered({"weight/ess_frac": 0.4}), Context(method="seq_tis")),
    "truncation_heavy": Example(altered(lambda i, row: {"weight/cap_frac": 0.4 + 0.02 * math.sin(i)}), Context(method="token_tis")),
    "weights_off_mean": Example(altered(lambda i, row: {"weight/mean": 0.3 + 0.02 * math.sin(i)}), Context(method="token_tis")),
    "weights_spread": Example(altered({"weight/mean": 1.6, "weight/std": 1.4})),
    "sequence_products": Example(altered(both(chi2_seq=1e5))),
    "advantages_opposed": Example(altered({"advantage/reward_corr": -0.9, "advantage/reward_z": -20.0})),
    "advantages_misplaced": Example(altered({"advantage/misplaced_frac": 0.6})),
    "nothing_to_learn": Example(altered({"reward/span": 0.0})),
    "little_to_learn": Example(altered(lambda i, row: {"reward/span": 0.0 if i % 4 else 1.0, "advantage/span": 0.0 if i % 3 else 1.0})),
    "responses_again": Example(altered({"data/again_frac": 0.2, "data/again_times": 1.0})),
    "responses_again_evenly": Example(altered({"data/again_frac": 0.5, "data/again_times": 2.0})),
    "critic_blind": Example(altered(lambda i, row: {"critic/vf_explained_var": 0.01 * math.sin(i)})),
    "ess_collapse": Example(altered(lambda i, row: both(ess_seq_frac=0.8 if i < 50 else 0.1))),
    "stale_engine": Example(
        altered(lambda i, row: {**drift(0.001 if i % 4 == 0 else 0.08), "version_lag/max": float(i % 4), "version_lag/mean": float(i % 4)})
    ),
    "lag_shows": Example(
        altered(
            lambda i, row: {
                **drift(0.0005 if i % 4 == 0 else 0.01, pearson=0.995 if i % 4 == 0 else 0.97),
                "version_lag/max": float(i % 4),
                "version_lag/mean": float(i % 4),
            }
        )
    ),
    "lag_since_old": Example(
        altered(lambda i, row: {"staleness/k3": 0.07, "old/exact_frac": 1.0, "version_lag/mean": 3.0, "version_lag/max": 6.0})
    ),
    "constant_offset": Example(
        altered(both(k1=0.05, k2=0.0015, k3=0.0015)),
        Context(overall={**clean()[8], **both(k1=0.05, k2=0.0015, k3=0.0015)}, facets=classes(sure=0.05, likely=0.05, rare=0.051)),
    ),
    "old_apart": Example(altered({"mismatch/k3": 0.015, "full/k3": 0.0005})),
    "misaligned_some": Example(altered(both(shifted_frac=0.1, shifted_seqs=20.0, k3=0.2, k1=0.2))),
    "old_recomputed": Example(altered({"staleness/abs_log_ratio_max": 0.0, "batch/updates_before": 3.5})),
    "columns_equal": Example(
        altered({**both(abs_log_ratio_max=0.0, abs_log_ratio_mean=0.0, k1=0.0, k3=0.0), "batch/tokens": 4000.0})
    ),
    "old_copied": Example(
        altered({"mismatch/abs_log_ratio_max": 0.0, "mismatch/k3": 0.0, "full/abs_log_ratio_max": 1.0, "full/k3": 0.03})
    ),
    "old_policy_stale": Example(altered({"old/stale_frac": 0.5, "old/exact_frac": 0.5, "old/version_lag": 3.0})),
    "trained_again": Example(altered({"reuse/k3": 0.13})),
    "batch_reused": Example(altered({"staleness/k3": 0.07})),
    "token_drift": Example(altered(both(chi2_token=0.4, ess_frac=0.7))),
    "clip_saturation": Example(altered(lambda i, row: {"objective/clip_frac_active": rising(i, 0.5)})),
    "clip_widened": Example(
        altered(lambda i, row: {"objective/clip_frac_active": 0.25, "objective/eps_high": 0.2 if i < 30 else 0.28})
    ),
    "length_surge": Example(
        altered(lambda i, row: {"staleness/k3": 0.03, "response/length_mean": 200.0 if i < 40 else 260.0})
    ),
    "surge_without_guard": Example(
        altered(lambda i, row: {"staleness/k3": 0.03, "response/length_mean": rising(i, 300.0, 200.0)})
    ),
    "surge_despite_guard": Example(
        altered(lambda i, row: {"staleness/k3": 0.03, "response/length_mean": rising(i, 400.0, 200.0), "optim/lr": 1e-6 if i < 30 else 5e-7})
    ),
    "update_too_large": Example(altered({"staleness/k3": 0.3})),
    "updates_drift": Example(
        altered(
            lambda i, row: {
                **drift(0.0005 if i % 2 == 0 else 0.045),
                "batch/updates_before": float(i % 2), "version_lag/max": float(i % 2), "version_lag/mean": float(i % 2),
            }
        )
    ),
    "grad_spike": Example(altered(lambda i, row: {"optim/grad_norm": 6.0} if i == 40 else {})),
    "reward_collapse": Example(altered(lambda i, row: {"reward/mean": max(0.6 - 0.03 * max(i - 25, 0), 0.2)})),
    "reward_stepped": Example(altered(lambda i, row: {"reward/mean": 0.6 if i < 35 else 0.2})),
    "entropy_collapse": Example(altered(lambda i, row: {"current/entropy": max(0.5 * 0.9**i, 0.01)})),
    "truncation_rises": Example(altered(lambda i, row: {"response/truncated_frac": 0.02 if i < 20 else rising(i, 0.8)})),
    "critic_diverges": Example(altered(lambda i, row: {"critic/vf_loss": 0.1 * 1.2 ** max(i - 20, 0), "critic/vf_explained_var": 0.7 if i < 20 else -3.0})),
    "no_gradient": Example(altered({"optim/grad_norm": 0.0})),
    "engine_stalled": Example(altered(lambda i, row: {"version/rollout": float(min(i, 40)), "version/current": float(i)})),
    "engine_never": Example(altered({"version/rollout": 3.0}), Context(overall=clean()[8])),
    "advantages_unrelated": Example(altered({"advantage/reward_corr": 0.02, "advantage/reward_z": 0.4})),
    "gap_jumped": Example(altered(lambda i, row: {**drift(0.001 if i < 30 else 0.04), **without_lag("staleness/k3")})),
    "systems_fix": Example(altered({"gate/drop_frac_seq": 0.4})),
    "rejection_not_enough": Example(altered({"gate/drop_frac_seq": 0.15})),
    "band_at_its_limit": Example(altered({"weight/cap_frac": 0.15, **both(chi2_token=1.2)}), Context(method="decoupled_token_icepop")),
    "length_trap": Example(
        clean(),
        Context(facets={"length": [{"low": 0, "gate/acceptance_seq": 0.99}, {"low": 512, "gate/acceptance_seq": 0.3}]}),
    ),
    "worker_record": Example(clean(), Context(overall=clean()[8], facets=workers(ratio_mean=1.05, ratio_mean_z=7.0))),
    "worker_apart": Example(clean(), Context(overall=clean()[8], facets=workers(k3=0.02))),
    "broken_numbers": Example(altered(lambda i, row: {"optim/grad_norm": math.nan} if i == 7 else {})),
    "other_base": Example(altered(both(slope=0.6931, slope_r2=0.9998, k1=-0.7, k3=1.5, ratio_mean=3.3))),
    "probabilities_logged": Example(altered({"batch/unscored_frac": 1.0, "data/probability": 1.0})),
    "negated_log_probs": Example(altered({"batch/unscored_frac": 1.0, "data/negated": 1.0})),
    "not_per_token": Example(altered({"batch/unscored_frac": 1.0, "data/not_per_token": 1.0})),
    "unscored_most": Example(altered({"batch/unscored_frac": 0.9})),
    "unscored_many": Example(altered({"batch/unscored_frac": 0.3})),
    "unscored_some": Example(altered(lambda i, row: {"batch/tokens": 4000.0, "batch/unscored_tokens": 300.0 if i == 30 else 0.0})),
    "unread_most": Example(altered({"data/unread_frac": 0.9})),
    "unread_many": Example(altered({"data/unread_frac": 0.3})),
    "unread_some": Example(altered({"data/unread_frac": 0.001, "data/cuts": 1.0})),
    "side_field_many": Example(altered({"data/lacking_frac/rewards": 0.3})),
    "side_field_some": Example(altered({"data/lacking_frac/rewards": 0.05, "data/lacking_frac/turns": 0.001})),
    "lag_below_zero_many": Example(altered({"data/ahead_frac": 0.3})),
    "lag_below_zero_some": Example(altered({"data/ahead_frac": 0.001})),
    "partly_scored": Example(altered({"data/partly_frac": 0.02})),
    "rollout_not_logged": Example(
        [{"step": float(i), "staleness/k3": 0.001, "reward/mean": 0.5} for i in range(9)]
    ),
    "mean_gap": Example(
        [{"step": float(i), "sampling/sampling_logp_difference/mean": 0.3, "reward": 0.5} for i in range(9)]
    ),
    "nothing_measured": Example([{"step": float(i), "reward/mean": 0.5} for i in range(9)]),
    "all_rejected": Example(altered({"gate/acceptance_seq": 0.0})),
    "low_acceptance": Example(altered({"gate/acceptance_seq": 0.6})),
    "optim_moves_without_gradient": Example(altered(lambda i, row: {"optim/grad_norm": 0.0 if i % 5 == 0 else 0.3})),
    "idle_gate": Example(altered({**both(chi2_token=0.5), "gate/0/drop_frac_token": 0.0})),
    "idle_cap": Example(altered({**both(chi2_token=0.5), "weight/cap_frac": 0.0})),
    "inert_weights": Example(altered({"weight/std": 0.0}), Context(method="token_tis")),
    "workers_lost": Example(altered(lambda i, row: {"pipeline/lost_workers": float(i % 5 == 0)})),
    "workers_idle": Example(altered({"pipeline/worker_idle": 0.9})),
    "averaged_max": Example(altered(both(prob_diff_max=0.008))),
    "agreement_gap": Example(later(altered({**drift(0.03, pearson=0.97), **without_lag()}))),
}  # fmt: skip
"""One for every built-in rule: a test fails if a rule has none."""
