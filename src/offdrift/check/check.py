"""The zero-update check: how far apart are two engines that hold the same weights, and why.

Tokens are drawn by the rollout engine and scored by the training engine. Nothing was learned in
between, so whatever difference there is comes from the engines: its size, what it is beside the noise
of each engine alone, and what each single factor does to it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from offdrift.check.bench import Bench, EngineSpec, Pair
from offdrift.check.measure import Factor, Measured, Outcome, measure
from offdrift.check.recommend import (
    broken_record,
    defects,
    level_of,
    recommended,
    sentence,
    thresholds,
    worst,
)
from offdrift.engines.routing import num_experts
from offdrift.errors import BadValueError, OffdriftError
from offdrift.judge import Context, Rules, diagnose, load_rules, verdict
from offdrift.records.atomic import plain
from offdrift.records.rollouts import Rollouts
from offdrift.segments import Segments

FORMAT = 1
FILE_NAME = "check.json"


@runtime_checkable
class Watch(Protocol):
    """Told what is being measured, and how far the check is."""

    def __call__(self, stage: str, done: int, total: int) -> None: ...


@dataclass
class Progress:
    """What has been measured so far; an interrupted check reports this much."""

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
    """The content of `check.json`: baseline, noise, factors, thresholds, findings, verdict, advice.

    An interrupt (Ctrl-C) after the baseline ends the check; what was measured is returned, with
    `"interrupted": true`.

    Args:
        bench: weights, prompts and sampling.
        rollout: draws the tokens.
        train: scores them.
        factors: what to change, one at a time.
        left_out: what not to change this time, and how to have it changed; rows of status "skipped".
        noise: also measure each engine against itself.
        max_kl: the largest mean KL(rollout || train) per token to pass with, nats.
        rules: of the diagnosis, if not the built-in ones.
        watch: called before each stage.

    Raises: `BadValueError` for a `max_kl` that is not positive; `EngineError` if an engine cannot
        be had.

    Example:
        check(bench, EngineSpec.parse("vllm:bfloat16"), EngineSpec.parse("transformers:float32"))
    """
    check_max_kl(max_kl)
    rules = rules or load_rules()  # a rule that cannot be read must not cost the measurements
    started, so_far = time.monotonic(), Progress()
    pair = Pair(rollout, train)
    try:
        _measure_all(bench, pair, factors, noise, so_far, watch)
    except KeyboardInterrupt:
        if so_far.baseline is None:
            raise
        so_far.interrupted = True
    seconds = time.monotonic() - started
    done = {outcome.factor for outcome in so_far.outcomes}
    stopped = [(f, "the check was interrupted") for f in factors if f.name not in done]
    not_run = [_skipped(f, why, bench, pair) for f, why in [*stopped, *left_out]]
    return _concluded(bench, pair, so_far, not_run, max_kl, rules, seconds)


def check_max_kl(max_kl: float | None) -> None:
    """Raise `BadValueError` unless this is a limit that a mean KL can exceed."""
    if max_kl is not None and not 0 < max_kl < math.inf:
        raise BadValueError(
            f"max_kl = {max_kl}; give the largest mean KL per token to pass with, in nats (0.02)"
        )


def _measure_all(
    bench: Bench,
    pair: Pair,
    factors: Sequence[Factor],
    noise: bool,
    so_far: Progress,
    watch: Watch,
) -> None:
    total = 2 + 2 * noise + len(factors)
    bench.train_model(pair.train)  # refuses what cannot score before anything is drawn
    watch(f"drawing with {pair.rollout}", 0, total)
    so_far.rollouts = bench.rollouts(pair.rollout)
    watch(f"scoring with {pair.train}", 1, total)
    so_far.baseline = measure(bench, so_far.rollouts, pair.train, details=True)
    if noise:
        watch("drawing again", 2, total)
        so_far.noise["repeat"] = repeated(so_far.rollouts, bench.rollouts(pair.rollout, repeat=1))
        watch("the training engine against itself", 3, total)
        so_far.noise["null"] = null_pair(bench, pair.train)
    for i, factor in enumerate(factors):
        watch(factor.name, total - len(factors) + i, total)
        so_far.outcomes.append(outcome_of(factor, bench, pair, so_far.baseline))
    watch("done", total, total)


def outcome_of(factor: Factor, bench: Bench, pair: Pair, baseline: Measured) -> Outcome:
    """One factor's row; an engine that breaks on it costs that row and no more."""
    started = time.monotonic()
    try:
        return factor.run(bench, pair, baseline)
    except Exception as error:  # whatever an engine throws
        why = (str(error).strip().splitlines() or [""])[0][:500]
        why = why if isinstance(error, OffdriftError) else f"{type(error).__name__}: {why}"
        bench.close_engine(pair.rollout.kind)  # nobody knows its state
        return Outcome.without(factor, "failed", why, seconds=time.monotonic() - started)


def _skipped(factor: Factor, why: str, bench: Bench, pair: Pair) -> Outcome:
    """The row of a factor that was not tried, or that these engines do not have anyway."""
    lacking = factor.applies(bench, *pair)
    return Outcome.without(factor, "not offered" if lacking else "skipped", lacking or why)


def _concluded(
    bench: Bench,
    pair: Pair,
    so_far: Progress,
    not_run: Sequence[Outcome],
    max_kl: float | None,
    rules: Rules,
    seconds: float,
) -> dict[str, Any]:
    baseline, rollouts = so_far.baseline, so_far.rollouts
    assert baseline is not None
    assert rollouts is not None
    baseline = replace(baseline, delta_router=_delta_router(so_far.outcomes))
    rows = thresholds(baseline)
    told = diagnose(
        [{"step": 0.0, **baseline.metrics}],
        context=Context(
            same_weights=True,
            mixture_of_experts=_is_mixture(bench.model),
            temperature=rollouts.provenance.sampling.temperature,
            overall=baseline.metrics,
        ),
        rules=rules,
    )
    own = broken_record(baseline, rows, rollouts.provenance.sampling)
    findings = [f for f in own if f.cause not in {t.cause for t in told}] + told
    wrong = defects(so_far.outcomes)
    level = worst([level_of(rows), *(_level_of(f.severity) for f in findings), *(["stop"] if wrong else [])])  # fmt: skip
    text = sentence(baseline, rows, pair=f"{pair.rollout} against {pair.train}", wrong=wrong)
    if not wrong and level != level_of(rows):  # the diagnosis sees more than single thresholds
        text += f" {verdict(findings)['text']}"
    return plain({
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
        "baseline": _numbers(baseline),
        "noise": {**so_far.noise, "kl_mean_se": baseline.kl_se},
        "factors": [o.as_dict() for o in [*so_far.outcomes, *not_run]],
        "thresholds": rows,
        "findings": [f.as_dict() for f in findings],
        "verdict": {"level": level, "text": text},
        "recommended": recommended(baseline, level=level, mixture_of_experts=_is_mixture(bench.model)),
        "max_kl": max_kl,
        "passed": level != "stop" and (max_kl is None or baseline.kl_mean <= max_kl),
    })  # fmt: skip


def _numbers(found: Measured) -> dict[str, float | None]:
    """The baseline's numbers: those of `Measured` by their own names, then the metrics by theirs."""
    own = {
        name: getattr(found, name)
        for name in (
            "kl_mean", "kl_max", "kl_se", "tv_mean", "tv_max", "tv_p95", "chi2_exact",
            "record_deviation", "drawn_z", "tail_log_ratio_cap", "tail_log_ratio_cap_all",
            "abs_log_ratio_max", "pearson", "chi2_token", "delta_router",
        )
    }  # fmt: skip
    return {**own, **found.metrics}


def _side(spec: EngineSpec, engine_version: str) -> dict[str, Any]:
    return {
        "engine": spec.kind,
        "engine_version": engine_version,
        "dtype": spec.dtype,
        "options": dict(spec.options),
        "spec": str(spec),
    }


def _delta_router(outcomes: Sequence[Outcome]) -> float:
    """The flip rate per expert that the routing factor measured; NaN if it did not run."""
    details = (outcome.as_dict().get("detail") or {} for outcome in outcomes)
    return next((d["delta_router"] for d in details if "delta_router" in d), math.nan)


def _is_mixture(model: torch.nn.Module) -> bool:
    return num_experts(model) > 1


def _level_of(severity: str) -> Any:
    return "ok" if severity == "info" else severity


# What a check would show of engines that do not differ: chance, and the harness' own part.


NOISE_PROMPTS = 8
"""Prompts of the draws that measure each engine against itself."""


def repeated(first: Rollouts, second: Rollouts) -> dict[str, float]:
    """The same draw made twice: whether the tokens are the same, and how far their log-probs are.

    Log-probs are compared where both draws have the same tokens up to and including this one.
    """
    a, b = _rectangle(first, first.tokens, -1), _rectangle(second, second.tokens, -2)
    width = min(a.shape[1], b.shape[1])
    same = (a[:, :width] == b[:, :width]).cumprod(1).bool()
    x = _rectangle(first, first.logp_rollout, 0.0)[:, :width]
    y = _rectangle(second, second.logp_rollout, 0.0)[:, :width]
    apart = (x - y).abs()[same]
    whole = same.sum(1) == first.lengths
    return {
        "sequences": float(len(whole)),
        "same_tokens_frac": float(whole.double().mean()),
        "compared_tokens": float(len(apart)),
        "abs_log_ratio_max": float(apart.max()) if len(apart) else math.nan,
    }


def null_pair(bench: Bench, train: EngineSpec) -> dict[str, Any]:
    """The training engine draws a few tokens and scores them: what the harness itself adds.

    Drawing goes token by token from a cache and scoring all at once, so in half precision even
    this pair differs; in float32 it must not, by more than 1e-6 nat.
    """
    sampling = replace(bench.sampling, max_tokens=min(32, bench.sampling.max_tokens))
    plain_options = {k: v for k, v in train.options.items() if k != "head_dtype"}
    drawer = EngineSpec("transformers", train.dtype, plain_options)
    rollouts = bench.rollouts(drawer, prompts=bench.prompts[:NOISE_PROMPTS], sampling=sampling)
    found = measure(bench, rollouts, train)
    bench.close_engine("transformers")  # a copy of the model
    return {
        "rollout": str(drawer),
        "train": str(train),
        "tokens": found.tokens,
        "kl_mean": found.kl_mean,
        "kl_max": found.kl_max,
        "tv_max": found.tv_max,
        "abs_log_ratio_max": found.abs_log_ratio_max,
    }


def _rectangle(rollouts: Rollouts, x: Tensor, fill: float | int) -> Tensor:
    segments = Segments(rollouts.cu_seqlens)
    made = x.new_full((rollouts.num_sequences, int(rollouts.lengths.max())), fill)
    made[segments.seq_ids, segments.position] = x
    return made
