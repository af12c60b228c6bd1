"""Factors of the rollout engine: precision, caches, kernels, batching, and expert routing."""

from __future__ import annotations

import os
from dataclasses import replace

import torch
from torch import nn

from offdrift.check.bench import EngineSpec
from offdrift.check.factors.base import (
    ENTRIES,
    LISTED,
    ONE_BY_ONE,
    OPTION,
    SEVERAL_PROMPTS,
    Change,
    Effect,
    Setting,
    attention_changed,
    dtype_changed,
    evidence_of,
    factor,
    few,
    few_prompts,
    head_changed,
    measured_by,
    needs,
    one_by_one,
    only_vllm,
    recorded_alike,
    self_difference,
    teacher_forced,
    variant,
)
from offdrift.check.measure import measured
from offdrift.check.rescore import Scored, joined
from offdrift.engines import Rescores
from offdrift.engines.routing import at_predictions, flip_rate, flips, replayed, routers, routes_of
from offdrift.engines.score import divergences, score
from offdrift.errors import NotOfferedError, ShapeError
from offdrift.judge import num_experts
from offdrift.records.rollouts import Rollouts, Routes, concatenate

LONG = 160
"""Tokens of a prompt that fills more than one block of a prefix cache (up to 128 tokens)."""
STEP = 64
"""Tokens of one step under chunked prefill."""


SETTABLE = needs(
    lambda bench, rollout: rollout.kind in OPTION,
    "a running server keeps its settings; start it with the other one and check again",
)


def _cache_changed(spec: EngineSpec, model: nn.Module) -> Change:
    now = str(spec.options.get("kv_cache_dtype", "auto"))
    other = "fp8" if now == "auto" else "auto"
    return (f"kv_cache_dtype {other} instead of {now}", spec.with_(kv_cache_dtype=other))


def _compilation_changed(spec: EngineSpec, model: nn.Module) -> Change:
    eager = bool(spec.options.get("enforce_eager", True))
    words = "compiled instead of eager" if eager else "eager instead of compiled"
    return (words, spec.with_(enforce_eager=not eager))


def _grid_changed(spec: EngineSpec, model: nn.Module) -> Change:
    now = spec.options.get("quantization")
    if now is None:
        grid = "int8" if spec.kind == "transformers" else "fp8_per_channel"
        return (f"weights on the {grid} grid instead of {spec.dtype}", spec.with_(quantization=grid))
    options = {k: v for k, v in spec.options.items() if k != "quantization"}
    return (f"weights in {spec.dtype} instead of on the {now} grid", replace(spec, options=options))


rollout_dtype = variant(
    "rollout_dtype",
    "How much of the mismatch is the rollout engine's rounding: bf16 keeps 8 bits, float32 24.",
    dtype_changed,
    SETTABLE,
)
rollout_lm_head = variant(
    "rollout_lm_head",
    "Logits are large sums rounded once more: the head's precision alone.",
    head_changed,
    SETTABLE,
)
kv_cache_dtype = variant(
    "kv_cache_dtype",
    "A cache in fp8 halves memory and reads every earlier token through 3 bits of mantissa.",
    _cache_changed,
    only_vllm("cache of another dtype"),
)
quantization = variant(
    "quantization",
    "Weights on an 8-bit grid make the engine another policy at equal weights, not a noisy copy.",
    _grid_changed,
    SETTABLE,
)
compiled = variant(
    "compiled",
    "Compilation fuses kernels and keeps intermediate results in other precisions.",
    _compilation_changed,
    needs(lambda bench, rollout: os.environ.get("TORCH_COMPILE_DISABLE") != "1", "TORCH_COMPILE_DISABLE=1 is set"),
    only_vllm("compiled mode here"),
    cost="compile",
)
rollout_attention = variant(
    "rollout_attention",
    "Another attention kernel: the same sums in another order.",
    attention_changed,
    needs(
        lambda bench, rollout: rollout.kind != "vllm" or torch.cuda.is_available(),
        "vLLM has one attention backend on CPUs",
    ),
    SETTABLE,
)


@factor("rollout", SETTABLE, cost="engine")
def float16(setting: Setting) -> Effect:
    """Float16 keeps 11 bits of mantissa where bfloat16 keeps 8: in both engines most of the mismatch goes."""
    sides = (setting.rollout, setting.train)
    other = "bfloat16" if all(spec.dtype == "float16" for spec in sides) else "float16"
    rollout, train = (spec.with_(dtype=other) for spec in sides)
    forced = teacher_forced(setting, rollout, setting.drawn)
    now = " and ".join(dict.fromkeys(spec.dtype for spec in sides))
    return Effect(
        f"{other} in both engines instead of {now}",
        measured_by(setting, forced, train=train),
        setting.scored.kl_mean,
        detail=self_difference(setting.drawn, forced),
    )


@factor("rollout")
def repeats(setting: Setting) -> Effect:
    """Draw again with the same seed and compare. Nondeterministic kernels and races show here."""
    drawn, bench = setting.drawn, setting.bench
    again = setting.engine.generate(bench.prompts, setting.unfiltered, seed=bench.seed, evidence=evidence_of(drawn))
    a, b = (r.tokens.split(r.lengths.tolist()) for r in (drawn, again))
    same = [torch.equal(x, y) for x, y in zip(a, b, strict=True)]
    detail: dict[str, object] = {"same_tokens_frac": sum(same) / len(same)}
    if isinstance(setting.engine, Rescores):
        detail |= self_difference(drawn, teacher_forced(setting, setting.rollout, drawn))
    return Effect(
        "drawn again with the same seed",
        setting.scored if recorded_alike(drawn, again) else measured_by(setting, again),
        setting.scored.kl_mean,
        detail=detail,
    )


@factor("rollout", SEVERAL_PROMPTS)
def batch(setting: Setting) -> Effect:
    """A prompt alone and in a batch: kernels sum in another order for another batch size."""
    together = few(setting.drawn, sequences=ONE_BY_ONE, v=setting.bench.vocab_size)
    parts = [teacher_forced(setting, setting.rollout, one) for one in one_by_one(together)]
    try:
        alone = concatenate([part.with_(provenance=parts[0].provenance) for part in parts])
    except ShapeError as error:
        raise NotOfferedError(f"its draws do not join: {error}") from error
    return Effect(
        f"each sequence alone instead of {setting.drawn.num_sequences} together",
        measured_by(setting, alone),
        setting.drawn_kl_of(together.num_sequences),
        detail=self_difference(together, alone),
    )


def _long_drawn(setting: Setting) -> Rollouts:
    """Rollouts of prompts longer than a block of the prefix cache: each prompt is repeated."""
    bench = setting.bench
    distinct = [list(p) for p in dict.fromkeys(map(tuple, bench.prompts))]
    longer = [(p * (LONG // len(p) + 1))[: max(LONG, len(p))] for p in distinct]
    longer = [list(p) for p in dict.fromkeys(map(tuple, longer))]
    prompts, sampling = few_prompts(longer, setting.unfiltered, entries=LISTED, v=bench.vocab_size)
    longest = max(map(len, prompts))
    limit = int(getattr(setting.engine, "max_model_len", longest + sampling.max_tokens))
    if longest + 8 > limit:
        raise NotOfferedError(f"prompts of {longest} tokens do not fit max_model_len = {limit}")
    sampling = replace(sampling, max_tokens=min(sampling.max_tokens, limit - longest))
    return bench.rollouts(setting.rollout, prompts=prompts, sampling=sampling)


@factor("rollout", only_vllm("prefix cache"))
def prefix_caching(setting: Setting) -> Effect:
    """Keys and values kept from an earlier request, perhaps computed in another shape."""
    drawn, engine = _long_drawn(setting), setting.engine
    engine.drop_prefixes()
    cold = teacher_forced(setting, setting.rollout, drawn)
    before = engine.cached_tokens
    warm = teacher_forced(setting, setting.rollout, drawn)
    hits = engine.cached_tokens - before
    if not hits:
        raise NotOfferedError("the engine found no prefix in its cache; it is off, or its blocks are long")
    return Effect(
        f"prompts taken from the prefix cache ({hits} tokens) instead of computed",
        measured_by(setting, warm),
        measured_by(setting, cold).kl_mean,
        detail={"cached_tokens": hits, **self_difference(cold, warm)},
    )


@factor("rollout", only_vllm("chunked prefill"), cost="engine")
def chunked_prefill(setting: Setting) -> Effect:
    """A long prompt computed piece by piece: attention over the cache instead of over itself."""
    drawn = _long_drawn(setting)
    whole = teacher_forced(setting, setting.rollout, drawn)
    seats = min(STEP, int(setting.rollout.options.get("max_num_seqs", STEP)))
    spec = setting.rollout.with_(max_num_batched_tokens=STEP, max_num_seqs=seats)
    chunked = teacher_forced(setting, spec, drawn)
    return Effect(
        f"prompts prefilled in chunks of {STEP} tokens instead of whole",
        measured_by(setting, chunked),
        measured_by(setting, whole).kl_mean,
        detail=self_difference(whole, chunked),
    )


@factor("routing", needs(lambda bench, rollout: routers(bench.model), "needs a mixture of experts"))
def routing(setting: Setting) -> Effect:
    """A router picks experts by rank: a last-bit difference sends a token somewhere else."""
    bench = setting.bench
    drawn = few(setting.drawn, entries=2 * ENTRIES, v=bench.vocab_size)
    theirs = setting.engine.routes(drawn)
    model = bench.train_model(setting.train)
    ours = routes_of(model, drawn)
    flipped = flips(theirs.experts, ours.experts).double()
    rates = flip_rate(theirs.experts, ours.experts, experts=num_experts(model))
    own, same = scored_with(model, drawn, None), scored_with(model, drawn, theirs)
    assert own.kl is not None
    assert same.kl is not None
    without, replay = measured(drawn, own), measured(drawn, same)
    gate = at_predictions(drawn, flipped.amax(1) > 0)
    return Effect(
        "the trainer sends every token to the rollout engine's experts instead of its own",
        replay,
        without.kl_mean,
        why=f"{float(flipped.amax(1).mean()):.2%} of tokens change experts in some layer",
        detail={
            "delta_router": float(rates.double().mean()),
            "experts": num_experts(model),
            "flip_frac_per_layer": [float(x) for x in flipped.mean(0)],
            "flip_frac": float(flipped.mean()),
            "flipped_tokens_frac": float(flipped.amax(1).mean()),
            "positions": len(flipped),
            "kl_mean_without_replay": without.kl_mean,
            "kl_max_without_replay": without.kl_max,
            "kl_mean_with_replay": replay.kl_mean,
            "kl_max_with_replay": replay.kl_max,
            "kl_mean_at_flips": float(own.kl[gate].mean()) if bool(gate.any()) else None,
            "kl_mean_elsewhere": float(own.kl[~gate].mean()) if bool((~gate).any()) else None,
        },
    )


@torch.no_grad()
def scored_with(model: nn.Module, rollouts: Rollouts, routes: Routes | None) -> Scored:
    """Scores of a model, sequence by sequence, with these experts or its own."""
    parts = []
    for i in range(rollouts.num_sequences):
        one = torch.tensor([i])
        part = rollouts.select(one)
        with replayed(model, part, None if routes is None else routes.select(one)):
            scores = score(model, part, temperature=part.provenance.sampling.temperature)
        exact = divergences(part, scores.logits)
        kl, tv = exact["kl_rollout_current"].lo, exact["tv_rollout_current"].lo
        parts.append(Scored(scores.logp.cpu(), scores.entropy.cpu(), kl=kl.cpu(), tv=tv.cpu()))
    return joined(parts)
