"""The zero-update check: the divergence of two engines with the same weights, and its causes.

The rollout engine samples tokens and the training engine scores them. Nothing was learned in between,
so every difference comes from the engines.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from offdrift.check.bench import Bench, EngineSpec, Pair
from offdrift.check.factors.base import Factor, Outcome
from offdrift.check.measure import Measured, measure
from offdrift.check.recommend import Level, broken_record, defects, level_of, recommended, sentence, thresholds, worst
from offdrift.errors import BadValueError
from offdrift.judge import Context, Rules, diagnose, load_rules, num_experts, verdict
from offdrift.records.atomic import plain
from offdrift.records.rollouts import Rollouts

FORMAT = 1
FILE_NAME = "check.json"


Watch = Callable[[str, int, int], object]
"""Called with the name of a stage, the stages done, and their number."""

OWN_NUMBERS = (
    "kl_mean", "kl_max", "kl_se", "tv_mean", "tv_max", "tv_p95", "chi2_exact",
    "record_deviation", "drawn_z", "tail_log_ratio_cap", "tail_log_ratio_cap_all",
    "abs_log_ratio_max", "pearson", "chi2_token", "delta_router",
)  # fmt: skip
"""Fields of `Measured` that `check.json` lists under `baseline`, before the metrics."""
NOISE_PROMPTS = 8
"""Prompts of the rollouts that measure the training engine against itself."""


@dataclass
class Progress:
    """Measurements so far, which an interrupted check reports."""

    baseline: Measured | None = None
    rollouts: Rollouts | None = None
    noise: dict[str, Any] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)
    interrupted: bool = False


def check(
    bench: Bench,
    rollout: EngineSpec,
    train: EngineSpec,
    *,
    factors: Sequence[Factor] = (),
    left_out: Sequence[tuple[Factor, str]] = (),
    noise: bool = True,
    max_kl: float | None = None,
    rules: Rules | None = None,
    watch: Watch = lambda stage, done, total: None,
) -> dict[str, Any]:
    """The content of `check.json`: baseline, noise, factors, thresholds, findings, verdict, recommendation.

    An interrupt (Ctrl-C) after the baseline ends the check; what was measured is returned, with
    `"interrupted": true`.

    Args:
        rollout, train: the engines that sample the tokens and that rescore them.
        factors: changed one at a time.
        left_out: factors that are not run, and how to run each; rows of status "skipped".
        noise: also measure each engine against itself.
        max_kl: the largest mean KL(rollout || train) per token to pass with, nats.
        rules: of the diagnosis; default: the built-in ones.
        watch: called before each stage.

    Raises: `BadValueError` for a `max_kl` that is not positive; `EngineError` if an engine cannot be made.
    """
    check_max_kl(max_kl)
    rules = rules or load_rules()  # a rule that cannot be read must not cost the measurements
    started, so_far = time.monotonic(), Progress()
    pair = Pair(rollout, train)
    try:
        total = 2 + 2 * noise + len(factors)
        bench.train_model(train)  # an impossible training engine is refused before sampling
        watch(f"drawing with {rollout}", 0, total)
        so_far.rollouts = bench.rollouts(rollout)
        watch(f"scoring with {train}", 1, total)
        so_far.baseline = measure(bench, so_far.rollouts, train, details=True)
        if noise:
            watch("drawing again", 2, total)
            so_far.noise["repeat"] = repeated(so_far.rollouts, bench.rollouts(rollout, repeat=1))
            watch("the training engine against itself", 3, total)
            so_far.noise["null"] = null_pair(bench, train)
        for i, factor in enumerate(factors):
            watch(factor.name, total - len(factors) + i, total)
            so_far.outcomes.append(factor.run(bench, pair, so_far.baseline))
        watch("done", total, total)
    except KeyboardInterrupt:
        if so_far.baseline is None:
            raise
        so_far.interrupted = True
    seconds = time.monotonic() - started
    done = {outcome.factor for outcome in so_far.outcomes}
    stopped = [(f, "the check was interrupted") for f in factors if f.name not in done]
    not_run = []
    for factor, why in [*stopped, *left_out]:
        lacking = factor.lacking(bench, pair.rollout)
        status = "not offered" if lacking else "skipped"
        not_run.append(Outcome.without(factor, status, lacking or why))
    return _content(bench, pair, so_far, not_run, max_kl, rules, seconds)


def check_max_kl(max_kl: float | None) -> None:
    """Raise `BadValueError` unless this is None or a positive number."""
    if max_kl is not None and not 0 < max_kl < math.inf:
        raise BadValueError(f"max_kl = {max_kl}; give the largest mean KL per token to pass with, in nats (0.02)")


def _content(
    bench: Bench,
    pair: Pair,
    so_far: Progress,
    not_run: Sequence[Outcome],
    max_kl: float | None,
    rules: Rules,
    seconds: float,
) -> dict[str, Any]:
    """`check.json` of what was measured."""
    baseline, rollouts = so_far.baseline, so_far.rollouts
    assert baseline is not None
    assert rollouts is not None
    routing = [o.detail["delta_router"] for o in so_far.outcomes if "delta_router" in o.detail]
    baseline = replace(baseline, delta_router=routing[0] if routing else math.nan)
    mixture = num_experts(bench.model) > 1
    rows = thresholds(baseline, rules.limits)
    diagnosed = diagnose(
        [{"step": 0.0, **baseline.metrics}],
        context=Context(
            same_weights=True,
            mixture_of_experts=mixture,
            temperature=rollouts.provenance.sampling.temperature,
            overall=baseline.metrics,
        ),
        rules=rules,
    )
    own = broken_record(rows, rollouts.provenance.sampling)
    findings = [f for f in own if f.cause not in {d.cause for d in diagnosed}] + diagnosed
    wrong = defects(so_far.outcomes)
    severities: list[Level] = [f.severity for f in findings if f.severity != "info"]
    level: Level = "stop" if wrong else worst([level_of(rows), *severities])
    text = sentence(baseline, rows, pair=f"{pair.rollout} against {pair.train}", wrong=wrong)
    if not wrong and level != level_of(rows):  # a finding of the diagnosis decided
        text += f" {verdict(findings)['text']}"
    return plain(
        {
            "format": FORMAT,
            "kind": "check",
            "offdrift": version("offdrift"),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "interrupted": so_far.interrupted,
            "model": bench.name,
            "rollout": _side(pair.rollout, rollouts.provenance.engine_version),
            "train": _side(pair.train, version("transformers")),
            "sampling": asdict(rollouts.provenance.sampling),
            "seed": bench.seed,
            "evidence": type(rollouts.evidence).__name__,
            "prompts": len({tuple(p) for p in bench.prompts}),
            "sequences": baseline.sequences,
            "tokens": baseline.tokens,
            "seconds": seconds,
            "baseline": {n: getattr(baseline, n) for n in OWN_NUMBERS} | dict(baseline.metrics),
            "noise": {**so_far.noise, "kl_mean_se": baseline.kl_se},
            "factors": [o.as_dict() for o in [*so_far.outcomes, *not_run]],
            "thresholds": rows,
            "limits": rules.limits,
            "findings": [f.as_dict() for f in findings],
            "verdict": {"level": level, "text": text},
            "recommended": recommended(baseline, level=level, mixture_of_experts=mixture),
            "max_kl": max_kl,
            "passed": level != "stop" and (max_kl is None or baseline.kl_mean <= max_kl),
        }
    )


def _side(spec: EngineSpec, engine_version: str) -> dict[str, Any]:
    return {
        "engine": spec.kind,
        "engine_version": engine_version,
        "dtype": spec.dtype,
        "options": dict(spec.options),
        "spec": str(spec),
    }


def repeated(first: Rollouts, second: Rollouts) -> dict[str, float]:
    """Two repetitions of one draw: share of identical responses, and largest |log-ratio|.

    Log-probs are compared where both draws have the same tokens up to and including this one.
    """

    def padded(rollouts: Rollouts, values: Tensor, fill: float | int) -> Tensor:
        parts = list(values.split(rollouts.lengths.tolist()))
        return pad_sequence(parts, batch_first=True, padding_value=fill)

    a, b = padded(first, first.tokens, -1), padded(second, second.tokens, -2)
    x, y = padded(first, first.logp_rollout, 0.0), padded(second, second.logp_rollout, 0.0)
    width = min(a.shape[1], b.shape[1])
    same = (a[:, :width] == b[:, :width]).cumprod(1).bool()
    apart = (x[:, :width] - y[:, :width]).abs()[same]
    identical = same.sum(1) == first.lengths
    return {
        "sequences": float(len(identical)),
        "same_tokens_frac": float(identical.double().mean()),
        "compared_tokens": float(len(apart)),
        "abs_log_ratio_max": float(apart.max()) if len(apart) else math.nan,
    }


def null_pair(bench: Bench, train: EngineSpec) -> dict[str, Any]:
    """Null test: the KL this harness reports for one engine that samples and scores.

    Sampling goes token by token from a cache and scoring all at once, so in half precision even
    this pair differs; in float32 it must not, by more than 1e-6 nat.
    """
    sampling = replace(bench.sampling, max_tokens=min(32, bench.sampling.max_tokens))
    plain_options = {k: v for k, v in train.options.items() if k != "head_dtype"}
    drawer = EngineSpec("transformers", train.dtype, plain_options)
    rollouts = bench.rollouts(drawer, prompts=bench.prompts[:NOISE_PROMPTS], sampling=sampling)
    null = measure(bench, rollouts, train)
    bench.close_engine("transformers")  # a copy of the model
    names = ("tokens", "kl_mean", "kl_max", "tv_max", "abs_log_ratio_max")
    return {"rollout": str(drawer), "train": str(train), **{name: getattr(null, name) for name in names}}
