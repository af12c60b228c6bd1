"""Weight synchronisation: does the rollout engine hold what the trainer holds, once it has moved?"""

from __future__ import annotations

from offdrift.check.factors.base import Factor, Found, Setting, always
from offdrift.check.factors.compare import ONE_BY_ONE, few, led_by
from offdrift.check.measure import measured
from offdrift.check.rescore import rescored
from offdrift.engines.verify_sync import examine_sync, perturbed
from offdrift.records.rollouts import Rollouts

FRACTION = 0.02
"""Size of the perturbation, in root-mean-squares of each tensor."""
PROBES, CONTEXT = 8, 16
"""Prompts that the check of each group of weights samples from, and how many of their last tokens:
weights that stayed behind show after any prompt, and the trainer reads these some fifteen times."""


def _sync(setting: Setting) -> Found:
    """Perturb all weights, load them into the engine, compare on the tokens of the baseline.

    Both sides of the comparison are scored by the model that holds the weights, in its own dtype.
    """
    bench, engine = setting.bench, setting.engine
    model, version = bench.model, setting.engine.version
    drawn = few(setting.drawn, sequences=ONE_BY_ONE, v=bench.vocab_size)
    without = _without(setting, drawn)
    try:
        with perturbed(model, fraction=FRACTION, seed=bench.seed):
            engine.load_weights(model.named_parameters(), version=version)
            moved = led_by(setting, setting.rollout, drawn)
            found = measured(moved, rescored(model, moved))
            kept = measured(drawn, rescored(model, drawn)).kl_mean
        engine.load_weights(model.named_parameters(), version=version)
        prompts = [p[-CONTEXT:] for p in bench.prompts[:PROBES]]
        report = examine_sync(engine, model, prompts, setting.unfiltered, seed=bench.seed)
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


def _without(setting: Setting, drawn: Rollouts) -> float:
    """Mean KL of these first tokens of the draw against the model that holds the weights."""
    if setting.bench.train_model(setting.train) is setting.bench.model:
        return setting.drawn_kl_of(drawn.num_sequences)
    return measured(drawn, rescored(setting.bench.model, drawn)).kl_mean


SYNC = Factor(
    "weight_sync",
    "Load moved weights: an identity sync agrees even if a tied head or the experts ignore it.",
    "sync",
    always,
    _sync,
)
