"""Factors of the rollout engine: precision, caches, kernels, batching, and expert routing."""

from __future__ import annotations

import os
from dataclasses import replace

import torch
from torch import Tensor, nn

from offdrift.check.bench import Bench
from offdrift.check.factors.base import (
    OPTION,
    Change,
    Factor,
    Found,
    NotOffered,
    Setting,
    always,
    attention_changed,
    dtype_changed,
    head_changed,
    only_vllm,
    several_prompts,
)
from offdrift.check.factors.compare import (
    ENTRIES,
    LISTED,
    ONE_BY_ONE,
    evidence_of,
    few,
    few_prompts,
    joined,
    led_by,
    measured_by,
    one_by_one,
    recorded_alike,
    self_difference,
)
from offdrift.check.measure import measured
from offdrift.check.rescore import Scored
from offdrift.engines.base import CachesPrefixes, Rescores
from offdrift.engines.routing import (
    Routed,
    flip_rate,
    flips,
    num_experts,
    replayed,
    route_lengths,
    routers,
    routes_of,
)
from offdrift.engines.score import divergences, score
from offdrift.engines.spec import EngineSpec
from offdrift.errors import ShapeError
from offdrift.records.rollouts import Rollouts, concatenate
from offdrift.segments import Segments

LONG = 160
"""Tokens of a prompt that fills more than one block of a prefix cache (up to 128 tokens)."""
STEP = 64
"""Tokens of one step under chunked prefill."""


def _variant(setting: Setting, change: Change) -> Found:
    """The baseline's tokens as another engine records them."""
    drawn = setting.drawn
    led = led_by(setting, change.spec, drawn)
    return Found(
        change.words,
        measured_by(setting, led),
        setting.drawn_kl,
        detail=self_difference(drawn, led),
    )


# -- what the engine computes with ---------------------------------------------------------------


def _settable(bench: Bench, rollout: EngineSpec, train: EngineSpec) -> str | None:
    if rollout.kind in OPTION:
        return None
    return "a running server keeps its settings; start it with the other one and check again"


def _dtype(setting: Setting) -> Found:
    return _variant(setting, dtype_changed(setting.rollout))


def _head(setting: Setting) -> Found:
    return _variant(setting, head_changed(setting.rollout))


def _kv_cache(setting: Setting) -> Found:
    now = str(setting.rollout.options.get("kv_cache_dtype", "auto"))
    other = "fp8" if now == "auto" else "auto"
    spec = setting.rollout.with_(kv_cache_dtype=other)
    return _variant(setting, Change(f"kv_cache_dtype {other} instead of {now}", spec))


def _compiled_offered(bench: Bench, rollout: EngineSpec, train: EngineSpec) -> str | None:
    if os.environ.get("TORCH_COMPILE_DISABLE") == "1":
        return "TORCH_COMPILE_DISABLE=1 is set"
    return only_vllm("compiled mode here")(bench, rollout, train)


def _compiled(setting: Setting) -> Found:
    eager = bool(setting.rollout.options.get("enforce_eager", True))
    changed = "compiled instead of eager" if eager else "eager instead of compiled"
    return _variant(setting, Change(changed, setting.rollout.with_(enforce_eager=not eager)))


def _attention_offered(bench: Bench, rollout: EngineSpec, train: EngineSpec) -> str | None:
    if rollout.kind == "vllm" and not torch.cuda.is_available():
        return "vLLM has one attention backend on CPUs"
    return _settable(bench, rollout, train)


def _attention(setting: Setting) -> Found:
    return _variant(setting, attention_changed(setting.rollout, setting.bench.model))


# -- what should not matter ----------------------------------------------------------------------


def _repeats(setting: Setting) -> Found:
    drawn, bench = setting.drawn, setting.bench
    again = setting.engine.generate(
        bench.prompts, setting.unfiltered, seed=bench.seed, evidence=evidence_of(drawn)
    )
    detail: dict[str, object] = {"same_tokens_frac": _same_sequences(drawn, again)}
    if isinstance(setting.engine, Rescores):
        led = led_by(setting, setting.rollout, drawn)
        detail |= self_difference(drawn, led)
    changed = "drawn again with the same seed"
    same = recorded_alike(drawn, again)
    figures = setting.scored if same else measured_by(setting, again)
    return Found(changed, figures, setting.drawn_kl, detail=detail)


def _same_sequences(one: Rollouts, other: Rollouts) -> float:
    """Share of sequences that two draws have in common, token for token."""
    a, b = (r.tokens.split(r.lengths.tolist()) for r in (one, other))
    same = [torch.equal(x, y) for x, y in zip(a, b, strict=True)]
    return sum(same) / len(same)


def _batch(setting: Setting) -> Found:
    crowd = few(setting.drawn, sequences=ONE_BY_ONE, v=setting.bench.vocab_size)
    led = [led_by(setting, setting.rollout, each) for each in one_by_one(crowd)]
    try:
        alone = concatenate([each.with_(provenance=led[0].provenance) for each in led])
    except ShapeError as error:
        raise NotOffered(f"its draws do not join: {error}") from error
    return Found(
        f"each sequence alone instead of {setting.drawn.num_sequences} together",
        measured_by(setting, alone),
        setting.drawn_kl_of(crowd.num_sequences),
        detail=self_difference(crowd, alone),
    )


def _long_drawn(setting: Setting) -> Rollouts:
    """A draw of the rollout engine from prompts longer than a block of its prefix cache.

    Prompts are repeated until they are long enough; that they make little sense does not matter
    for how they are computed.
    """
    bench = setting.bench
    distinct = [list(p) for p in dict.fromkeys(map(tuple, bench.prompts))]
    longer = [(p * (LONG // len(p) + 1))[: max(LONG, len(p))] for p in distinct]
    longer = [list(p) for p in dict.fromkeys(map(tuple, longer))]
    prompts, sampling = few_prompts(longer, setting.unfiltered, entries=LISTED, v=bench.vocab_size)
    longest = max(map(len, prompts))
    limit = int(getattr(setting.engine, "max_model_len", longest + sampling.max_tokens))
    if longest + 8 > limit:
        raise NotOffered(f"prompts of {longest} tokens do not fit max_model_len = {limit}")
    sampling = replace(sampling, max_tokens=min(sampling.max_tokens, limit - longest))
    return bench.rollouts(setting.rollout, prompts=prompts, sampling=sampling)


def _prefix_cache(setting: Setting) -> Found:
    drawn, engine = _long_drawn(setting), setting.engine
    if not isinstance(engine, CachesPrefixes):
        raise NotOffered(f"the {setting.rollout.kind} engine has no prefix cache")
    engine.drop_prefixes()
    cold = led_by(setting, setting.rollout, drawn)
    before = engine.cached_tokens
    warm = led_by(setting, setting.rollout, drawn)
    hits = engine.cached_tokens - before
    if not hits:
        raise NotOffered(
            "the engine found no prefix in its cache; it is off, or its blocks are long"
        )
    return Found(
        f"prompts taken from the prefix cache ({hits} tokens) instead of computed",
        measured_by(setting, warm),
        measured_by(setting, cold).kl_mean,
        detail={"cached_tokens": hits, **self_difference(cold, warm)},
    )


def _chunked(setting: Setting) -> Found:
    drawn = _long_drawn(setting)
    whole = led_by(setting, setting.rollout, drawn)
    seats = min(STEP, int(setting.rollout.options.get("max_num_seqs", STEP)))
    spec = setting.rollout.with_(max_num_batched_tokens=STEP, max_num_seqs=seats)
    chunked = led_by(setting, spec, drawn)
    return Found(
        f"prompts prefilled in chunks of {STEP} tokens instead of whole",
        measured_by(setting, chunked),
        measured_by(setting, whole).kl_mean,
        detail=self_difference(whole, chunked),
    )


REPEATS = Factor(
    "repeats",
    "The same seed twice: does the engine itself know what it does? Atomics and races show here.",
    "rollout",
    always,
    _repeats,
)
BATCH = Factor(
    "batch",
    "A prompt alone and in a crowd: kernels sum in another order for another batch size.",
    "rollout",
    several_prompts,
    _batch,
)
PREFIX_CACHE = Factor(
    "prefix_caching",
    "Keys and values kept from an earlier request, perhaps computed in another shape.",
    "rollout",
    only_vllm("prefix cache"),
    _prefix_cache,
)
CHUNKED = Factor(
    "chunked_prefill",
    "A long prompt computed piece by piece: attention over the cache instead of over itself.",
    "rollout",
    only_vllm("chunked prefill"),
    _chunked,
    "engine",
)
DTYPE = Factor(
    "rollout_dtype",
    "How much of the mismatch is the rollout engine's rounding: bf16 keeps 8 bits, float32 24.",
    "rollout",
    _settable,
    _dtype,
    "engine",
)
HEAD = Factor(
    "rollout_lm_head",
    "Logits are large sums rounded once more: the head's precision alone.",
    "rollout",
    _settable,
    _head,
    "engine",
)
KV_CACHE = Factor(
    "kv_cache_dtype",
    "A cache in fp8 halves memory and reads every earlier token through 3 bits of mantissa.",
    "rollout",
    only_vllm("cache of another dtype"),
    _kv_cache,
    "engine",
)
ATTENTION = Factor(
    "rollout_attention",
    "Another attention kernel: the same sums in another order.",
    "rollout",
    _attention_offered,
    _attention,
    "engine",
)
COMPILED = Factor(
    "compiled",
    "Compilation fuses kernels and keeps intermediate results in other precisions.",
    "rollout",
    _compiled_offered,
    _compiled,
    "compile",
)


def _offered(bench: Bench, rollout: EngineSpec, train: EngineSpec) -> str | None:
    return None if routers(bench.model) else "needs a mixture of experts"


def _routing(setting: Setting) -> Found:
    bench = setting.bench
    drawn = few(setting.drawn, entries=2 * ENTRIES, v=bench.vocab_size)
    engine = setting.engine
    if not isinstance(engine, Routed):
        raise NotOffered(f"the {setting.rollout.kind} engine does not say its routing")
    theirs = engine.routes(drawn)
    model = bench.train_model(setting.train)
    ours = routes_of(model, drawn)
    flipped = flips(theirs, ours).double()
    rates = flip_rate(theirs, ours, experts=num_experts(model))
    own, same = scored_with(model, drawn, None), scored_with(model, drawn, theirs)
    assert own.kl is not None
    assert same.kl is not None
    without, replay = measured(drawn, own), measured(drawn, same)
    gate = predicting(drawn, flipped.amax(1) > 0)
    return Found(
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


def predicting(rollouts: Rollouts, at: Tensor) -> Tensor:
    """Of every response token, what holds at the position that predicts it."""
    cuts = Segments(
        torch.cat([torch.zeros(1, dtype=torch.int64), route_lengths(rollouts).cumsum(0)])
    )
    first = rollouts.prompt_cu_seqlens.diff() - 1
    segments = Segments(rollouts.cu_seqlens)
    return at[cuts.cu_seqlens[:-1][segments.seq_ids] + first[segments.seq_ids] + segments.position]


@torch.no_grad()
def scored_with(model: nn.Module, rollouts: Rollouts, routes: Tensor | None) -> Scored:
    """Scores of a model, sequence by sequence, with these experts or its own."""
    cuts = Segments(
        torch.cat([torch.zeros(1, dtype=torch.int64), route_lengths(rollouts).cumsum(0)])
    )
    parts = []
    for i in range(rollouts.num_sequences):
        one = torch.tensor([i])
        part = rollouts.select(one)
        temperature = part.provenance.sampling.temperature
        if routes is None:
            said = score(model, part, temperature=temperature)
        else:
            with replayed(model, part, routes[cuts.rows(one)]):
                said = score(model, part, temperature=temperature)
        found = divergences(part, said.logits)
        kl, tv = found["kl_rollout_current"].lo, found["tv_rollout_current"].lo
        parts.append(Scored(said.logp.cpu(), said.entropy.cpu(), kl=kl.cpu(), tv=tv.cpu()))
    return joined(parts)


ROUTING = Factor(
    "routing",
    "A router picks experts by rank: a last-bit difference sends a token somewhere else.",
    "routing",
    _offered,
    _routing,
)
