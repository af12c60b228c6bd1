"""Weight synchronisation: does the rollout engine hold what the trainer holds, once it has moved?"""

from __future__ import annotations

from offdrift.audit.factors.base import Factor, Found, Setting, always
from offdrift.audit.factors.compare import led_by
from offdrift.audit.measure import measured
from offdrift.audit.rescore import rescored
from offdrift.engines.sync import examine_sync, perturbed

FRACTION = 0.02
"""Size of the perturbation, in root-mean-squares of each tensor."""
PROBES = 8
"""Prompts that the check of each group of weights samples from."""


def _sync(setting: Setting) -> Found:
    """Perturb all weights, load them into the engine, compare on the tokens of the baseline.

    Both sides of the comparison are scored by the model that holds the weights, in its own dtype.
    """
    bench, drawn, engine = setting.bench, setting.drawn, setting.engine
    model, version = bench.model, setting.engine.version
    without = measured(drawn, rescored(model, drawn)).kl_mean
    try:
        with perturbed(model, fraction=FRACTION, seed=bench.seed):
            engine.load_weights(model.named_parameters(), version=version)
            moved = led_by(setting, setting.rollout, drawn)
            found = measured(moved, rescored(model, moved))
            kept = measured(drawn, rescored(model, drawn)).kl_mean
        engine.load_weights(model.named_parameters(), version=version)
        report = examine_sync(
            engine, model, bench.prompts[:PROBES], setting.unfiltered, seed=bench.seed
        )
    except BaseException:
        bench.close_engine(setting.rollout.kind)  # it may hold other weights
        raise
    groups = {
        g.name: {
            "effect": g.effect,
            "gap": g.gap,
            "limit": g.limit,
            "stale": g.stale,
            "conclusive": g.conclusive,
        }
        for g in report.groups
    }
    return Found(
        f"all weights moved by {FRACTION:.0%} of their size and loaded, instead of the same weights",
        found,
        without,
        why=(
            f"stale: {', '.join(report.stale)}"
            if report.stale
            else "every group of weights arrived"
            + (
                f", but of {', '.join(report.unverified)} noise hides it"
                if report.unverified
                else ""
            )
        ),
        detail={"stale": list(report.stale), "kl_mean_if_nothing_arrived": kept, "groups": groups},
    )


SYNC = Factor(
    "weight_sync",
    "Load moved weights: an identity sync agrees even if a tied head or the experts ignore it.",
    "sync",
    always,
    _sync,
)
