"""Factors of the training engine, of sampling and of the record: precision, common mistakes, weight synchronisation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from offdrift.check.bench import Bench
from offdrift.check.factors.base import (
    ENTRIES,
    LISTED,
    ONE_BY_ONE,
    SEVERAL_PROMPTS,
    Effect,
    Setting,
    attention_changed,
    dtype_changed,
    factor,
    few,
    few_prompts,
    head_changed,
    measured_by,
    needs,
    one_by_one,
    scores,
    teacher_forced,
    variant,
)
from offdrift.check.measure import NAN, measured
from offdrift.check.rescore import Scored, joined, rescored
from offdrift.divergence.fused import exact_divergences
from offdrift.engines import make_engine
from offdrift.engines.generate import responses_of
from offdrift.engines.hf_fixed_order import row_parallel_layers
from offdrift.engines.hf_fixed_order import tensor_parallel as emulated_tensor_parallel
from offdrift.engines.score import score
from offdrift.engines.sync_units import perturbed
from offdrift.engines.verify_sync import examine_sync
from offdrift.errors import NotOfferedError
from offdrift.records.provenance import Sampling
from offdrift.records.rollouts import Rollouts, pack_sequences
from offdrift.segments import Segments

train_dtype = variant(
    "train_dtype",
    "The other half of the rounding: two engines in bf16 do not round alike.",
    dtype_changed,
    side="train",
    cost="cheap",
)
train_lm_head = variant(
    "train_lm_head", "Precision of the trainer's output head alone.", head_changed, side="train", cost="cheap"
)
train_attention = variant(
    "train_attention",
    "Another attention kernel in the trainer: the same sums in another order.",
    attention_changed,
    side="train",
    cost="cheap",
)


@factor("train", SEVERAL_PROMPTS)
def train_batch(setting: Setting) -> Effect:
    """A sequence scored alone and padded among others: padding must not leak into it."""
    some = few(setting.drawn, sequences=ONE_BY_ONE, v=setting.bench.vocab_size)
    model = setting.bench.train_model(setting.train)
    together, alone = score_rows(model, some), [score_rows(model, e) for e in one_by_one(some)]
    kl = exact_divergences(together, torch.cat(alone)).kl_rollout_current
    return Effect(
        f"each of {some.num_sequences} sequences scored alone instead of padded among others",
        measured(some, joined([rescored(model, one) for one in one_by_one(some)])),
        setting.drawn_kl_of(some.num_sequences),
        detail={"self_kl_mean": float(kl.double().mean()), "self_kl_max": float(kl.max())},
    )


@torch.no_grad()
def score_rows(model: nn.Module, rollouts: Rollouts) -> Tensor:
    """Tempered logits of every token, from one forward pass, [n, v]."""
    return score(model, rollouts, temperature=rollouts.provenance.sampling.temperature).logits.cpu()


DEVICES = (1, 2, 4, 8)
"""Tensor-parallel sizes that are emulated."""


@factor(
    "train",
    needs(lambda bench, rollout: row_parallel_layers(bench.model), "{model} has no plan for row-parallel layers"),
)
def tensor_parallel(setting: Setting) -> Effect:
    """Matrices split over two devices: partial sums are added in another order than on one."""
    some = few(setting.drawn, sequences=ONE_BY_ONE, v=setting.bench.vocab_size)
    model = setting.bench.train_model(setting.train)

    def rows(shards: int, tree: bool) -> Tensor:
        with emulated_tensor_parallel(model, shards=shards, tree=tree):
            return score_rows(model, some)

    with emulated_tensor_parallel(model, shards=2, tree=False) as layers:
        split = measured(some, rescored(model, some))
    own = exact_divergences(score_rows(model, some), rows(2, False)).kl_rollout_current
    in_order, in_tree = ([rows(k, tree) for k in DEVICES] for tree in (False, True))
    moved, moved_tree = ([float((x - each[0]).abs().max()) for x in each] for each in (in_order, in_tree))
    return Effect(
        f"{layers} row-parallel layers of the trainer split over 2 devices (emulated) instead of whole",
        split,
        setting.drawn_kl_of(some.num_sequences),
        why=(
            f"logits of {', '.join(map(str, DEVICES[1:]))} devices differ from those of one by up to "
            f"{max(moved):.3g}; with sums in one tree (TBIK) by {max(moved_tree):.3g}"
        ),
        detail={
            "self_kl_mean": float(own.double().mean()),
            "self_kl_max": float(own.max()),
            "devices": list(DEVICES),
            "abs_logit_difference_max": moved,
            "abs_logit_difference_max_in_tree": moved_tree,
        },
    )


@factor(
    "train",
    needs(
        lambda bench, rollout: getattr(bench.model, "supports_gradient_checkpointing", False),
        "{model} has no gradient checkpointing",
    ),
)
def gradient_checkpointing(setting: Setting) -> Effect:
    """Generation in train mode under gradient checkpointing loses its cache and samples nonsense."""
    bench = setting.bench
    v = bench.vocab_size
    prompts, sampling = few_prompts(bench.prompts, setting.unfiltered, entries=ENTRIES, v=v)

    def drawn(as_in_training: bool) -> Rollouts:
        engine = make_engine("transformers", bench.model, dtype=setting.train.dtype, as_in_training=as_in_training)
        try:
            return engine.generate(prompts, sampling, seed=bench.seed, evidence="full")
        finally:
            engine.close()

    wrong, right = drawn(True), drawn(False)
    first = Segments(wrong.cu_seqlens).position == 0
    kl = bench.score(wrong, setting.train).kl
    assert kl is not None
    return Effect(
        "the training model draws in train mode with gradient checkpointing instead of eval mode",
        measured_by(setting, wrong),
        measured_by(setting, right).kl_mean,
        why="what a trainer that samples from its own model without model.eval() would see",
        detail={
            "first_token_kl_mean": float(kl[first].mean()),
            "later_tokens_kl_mean": float(kl[~first].mean()) if bool((~first).any()) else 0.0,
        },
    )


def pad_id_of(bench: Bench) -> int | None:
    """The id that batches of this model are padded with: the tokenizer's, or the configuration's."""
    config: Any = bench.model.config
    for source in (bench.tokenizer, config.get_text_config()):
        pad = getattr(source, "pad_token_id", None)
        if pad is not None:
            return int(pad)
    return None


@contextmanager
def masked_by_id(model: nn.Module, pad: int) -> Iterator[None]:
    """Make the model's attention mask `ids != pad`, whatever the lengths are."""

    def hook(_: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        mask = named["attention_mask"] * (named["input_ids"] != pad)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        return arguments, {**named, "attention_mask": mask, "position_ids": positions}

    handle = model.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@factor("train", needs(lambda bench, rollout: pad_id_of(bench) is not None, "the model has no pad id"))
def pad_id(setting: Setting) -> Effect:
    """A policy can emit the pad id; a mask built from it hides a real token from all later ones."""
    bench, drawn = setting.bench, setting.drawn
    pad = pad_id_of(bench)
    assert pad is not None  # or the factor is not offered
    # The last token of a response is never attended to.
    inner = torch.ones(len(drawn.tokens), dtype=torch.bool)
    inner[drawn.cu_seqlens[1:] - 1] = False
    sampled = int((drawn.tokens[inner] == pad).sum())
    prompted = int((drawn.prompt_tokens == pad).sum())
    chance = expected(drawn, pad)
    planted = not (sampled or prompted)
    without = setting.scored.kl_mean
    if planted:
        # A few responses with the pad id in their middle, as the rollout engine scores them.
        some = few(drawn, sequences=ONE_BY_ONE, v=bench.vocab_size)
        if int(some.lengths.max()) < 2:
            raise NotOfferedError("responses of one token have nothing behind a pad id")
        tokens = some.tokens.clone()
        tokens[some.cu_seqlens[:-1] + (some.lengths - 1) // 2] = pad
        plain = replace(some.provenance.sampling, stop_token_ids=())
        drawn = teacher_forced(setting, setting.rollout, some.with_(tokens=tokens), sampling=plain)
        without = measured_by(setting, drawn).kl_mean
    model = bench.train_model(setting.train)
    with masked_by_id(model, pad):
        wrong = rescored(model, drawn)
    where = "planted in the middle of each response" if planted else "as it occurred"
    return Effect(
        f"attention mask of the trainer from ids != {pad} instead of lengths, pad id {where}",
        measured(drawn, wrong),
        without,
        why=(
            f"pad id {pad}: {sampled} in the responses, {prompted} in the prompts, "
            f"{1000 * chance:.3g} expected in 1000 sampled tokens"
        ),
        detail={
            "pad_id": pad,
            "in_responses": sampled,
            "in_prompts": prompted,
            "probability_mean": chance,
            "planted": planted,
        },
    )


def expected(rollouts: Rollouts, token: int) -> float:
    """Mean probability of a token under the recorded policy."""
    total, step = 0.0, max(1, ENTRIES // 4 // scores(rollouts, slice(0, 1)).shape[-1])
    for start in range(0, len(rollouts.tokens), step):
        rows = scores(rollouts, slice(start, start + step)).float()
        total += float(rows.log_softmax(-1)[:, token].double().exp().sum())
    return total / len(rollouts.tokens)


FRACTION = 0.02
"""Size of the perturbation, in root-mean-squares of each tensor."""
PROBES, CONTEXT = 8, 16
"""Prompts, and last tokens of each, that the check of every tensor samples from: few are enough, since stale weights
show after any prompt."""


@factor("sync")
def weight_sync(setting: Setting) -> Effect:
    """Load moved weights: an identity sync agrees even if a tied head or the experts ignore it.

    All weights are perturbed, loaded into the engine, and compared on the tokens of the baseline.
    Both sides are scored by the model that has the weights, in its own dtype.
    """
    bench, engine = setting.bench, setting.engine
    model, version = bench.model, setting.engine.version
    drawn = few(setting.drawn, sequences=ONE_BY_ONE, v=bench.vocab_size)
    without = setting.drawn_kl_of(drawn.num_sequences)
    if bench.train_model(setting.train) is not model:
        without = measured(drawn, rescored(model, drawn)).kl_mean
    try:
        with perturbed(model, fraction=FRACTION, seed=bench.seed):
            engine.load_weights(model.named_parameters(), version=version)
            moved = teacher_forced(setting, setting.rollout, drawn)
            after = measured(moved, rescored(model, moved))
            unmoved = measured(drawn, rescored(model, drawn)).kl_mean
        engine.load_weights(model.named_parameters(), version=version)
        prompts = [p[-CONTEXT:] for p in bench.prompts[:PROBES]]
        report = examine_sync(engine, model, prompts, setting.unfiltered, seed=bench.seed)
    except BaseException:
        bench.close_engine(setting.rollout.kind)  # it may hold other weights
        raise
    detail = {
        "stale": [unit.name for unit in report.stale],
        "kl_mean_if_nothing_arrived": unmoved,
        "parts": report.parts,
        "proved": report.proved,
        "together": dict(report.together),
        "unverified": list(report.unverified),
        "perturbed_loads": report.loads,
        "noise": report.noise,
        "gap": report.gap,
        "limit": report.limit,
    }
    return Effect(
        f"all weights moved by {FRACTION:.0%} of their size and loaded, instead of the same weights",
        after,
        without,
        why=str(report),
        detail=detail,
    )


# Sampling and the record: temperature, filters, alignment, text and tokens.

COLD = 0.7
"""Temperature that is tried where the check samples at 1."""
NUCLEUS = 0.95
"""Top-p that is tried where the check samples without a filter."""


def _drawn_at(setting: Setting, sampling: Sampling) -> Rollouts:
    """A few rollouts under another sampling, with the whole vocabulary recorded."""
    bench = setting.bench
    prompts, short = few_prompts(bench.prompts, sampling, entries=LISTED, v=bench.vocab_size)
    return bench.rollouts(setting.rollout, sampling=short, prompts=prompts, evidence="full")


@factor("sampling")
def temperature(setting: Setting) -> Effect:
    """Draw and score at another temperature in both engines. Below 1, differences of logits weigh more."""
    now = setting.bench.sampling.temperature
    other = COLD if now == 1 else 1.0
    drawn = setting.bench.rollouts(setting.rollout, sampling=replace(setting.unfiltered, temperature=other))
    changed = f"temperature {other:g} instead of {now:g} in both engines"
    return Effect(changed, measured_by(setting, drawn), setting.scored.kl_mean)


@factor("sampling")
def top_p(setting: Setting) -> Effect:
    """A filter on one side: the rollout policy has no tail, the training policy has."""
    filtered = setting.bench.sampling
    if not filtered.filtered:
        filtered = replace(filtered, top_p=NUCLEUS)
    drawn = _drawn_at(setting, filtered)
    plain = teacher_forced(setting, setting.rollout, drawn, sampling=setting.unfiltered)
    words = {"top_p": filtered.top_p < 1, "top_k": filtered.top_k > 0, "min_p": filtered.min_p > 0}
    kept = ", ".join(f"{name} {getattr(filtered, name):g}" for name, acts in words.items() if acts)
    detail = {}
    if drawn.support is not None:
        pi = score_rows(setting.bench.train_model(setting.train), drawn)
        replayed = exact_divergences(scores(drawn), pi).kl_rollout_current.double()
        detail = {"kl_mean_with_replayed_support": float(replayed.mean())}
    return Effect(
        f"{kept} in the rollout engine alone instead of no filter",
        measured_by(setting, drawn),
        measured_by(setting, plain).kl_mean,
        why="the trainer scores the whole distribution: mass that the filter removed counts as drift",
        detail=detail,
    )


@factor("sampling")
def raw_logprobs(setting: Setting) -> Effect:
    """Log-probs taken before temperature and top-p describe a policy that never sampled."""
    processed = setting.bench.sampling
    if processed.temperature == 1 and not processed.filtered:
        processed = replace(processed, temperature=COLD)
    drawn = _drawn_at(setting, processed)
    unprocessed = replace(processed.unfiltered, temperature=1.0)
    raw = teacher_forced(setting, setting.rollout, drawn, sampling=unprocessed)
    # Recorded as raw, but scored at the temperature that sampled, as a correct trainer does.
    recorded = raw.with_(provenance=drawn.provenance)
    exact = exact_divergences(scores(drawn), scores(raw)).kl_rollout_current.double()
    return Effect(
        f"log-probs before temperature {processed.temperature:g} and top_p {processed.top_p:g} instead of after",
        measured_by(setting, recorded),
        measured_by(setting, drawn).kl_mean,
        why=f"recorded policy against sampled policy: KL {float(exact.mean()):.3g} nats per token",
        detail={
            "sampled_to_recorded_kl_mean": float(exact.mean()),
            "abs_recorded_error_max": float((raw.logp_rollout - drawn.logp_rollout).abs().max()),
        },
    )


@factor("sampling")
def off_by_one(setting: Setting) -> Effect:
    """Log-probs shifted by one token: the logits at position t speak about token t + 1."""
    drawn = setting.drawn
    log = setting.scored.logged
    assert log is not None
    assert log.logp_old is not None
    corr = {shift: shifted_correlation(drawn, log.logp_old, shift) for shift in (-1, 0, 1)}
    some = few(drawn, v=setting.bench.vocab_size)
    if int(some.lengths.max()) < 2:
        raise NotOfferedError("responses of one token cannot be misaligned")
    rows = score_rows(setting.bench.train_model(setting.train), some)
    late = (Segments(some.cu_seqlens).position > 0).nonzero().flatten()
    shifted = some_tokens(some, late)
    d = exact_divergences(scores(some)[late], rows[late - 1])
    # Row t - 1 of the trainer, beside token t.
    tokens = some.tokens[late, None].long()
    logp = rows[late - 1].log_softmax(-1).gather(1, tokens).squeeze(1)
    scored = Scored(logp, torch.zeros_like(logp), kl=d.kl_rollout_current, tv=d.tv)
    detected = not math.isnan(corr[0]) and max(corr[-1], corr[1]) > corr[0]
    return Effect(
        "the trainer's distributions one token late instead of aligned",
        measured(shifted, scored),
        setting.drawn_kl_of(some.num_sequences),
        why="this pair is misaligned: log-probs fit a neighbouring token better"
        if detected
        else "this pair is aligned; the numbers are what one token of shift would cost",
        detail={
            "correlation_before": corr[-1],
            "correlation": corr[0],
            "correlation_after": corr[1],
            "detected": detected,
        },
    )


def some_tokens(rollouts: Rollouts, at: Tensor) -> Rollouts:
    """The rollouts with these tokens only; sequences without any are left out."""
    ids = Segments(rollouts.cu_seqlens).seq_ids[at]
    counts = torch.bincount(ids, minlength=rollouts.num_sequences)
    left = rollouts.select((counts > 0).nonzero().flatten())
    cuts = torch.cat([counts.new_zeros(1), counts[counts > 0].cumsum(0)])
    return left.with_(
        tokens=rollouts.tokens[at],
        logp_rollout=rollouts.logp_rollout[at],
        rollout_version=rollouts.rollout_version[at],
        cu_seqlens=cuts,
        evidence=None,
    )


def shifted_correlation(rollouts: Rollouts, logp: Tensor, shift: int) -> float:
    """Correlation of the trainer's log-prob at t + shift with the rollout's at t, within sequences."""
    segments = Segments(rollouts.cu_seqlens)
    at = torch.arange(len(logp))
    other = (at + shift).clamp(0, len(logp) - 1)
    inside = (segments.seq_ids[other] == segments.seq_ids) & (other == at + shift)
    if int(inside.sum()) < 2:
        return NAN
    pair = torch.stack([rollouts.logp_rollout[inside], logp[other[inside]]]).double()
    return float(torch.corrcoef(pair)[0, 1]) if bool((pair.std(1) > 0).all()) else NAN


@factor("sampling", needs(lambda bench, rollout: hasattr(bench.tokenizer, "decode"), "there is no tokenizer"))
def tokenization(setting: Setting) -> Effect:
    """Text is not tokens: decoding and encoding again may give other ids than were sampled."""
    tokenizer, responses = setting.bench.tokenizer, responses_of(setting.drawn)
    texts = [tokenizer.decode(ids, skip_special_tokens=False) for ids in responses]
    again = [list(tokenizer.encode(text, add_special_tokens=False)) for text in texts]
    changed = [i for i, (a, b) in enumerate(zip(responses, again, strict=True)) if a != b]
    first = [
        next((t for t, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
        for a, b in ((responses[i], again[i]) for i in changed)
    ]
    model = setting.bench.train_model(setting.train)
    gaps = []  # of the first eight responses that changed
    for i in [i for i in changed if again[i]][:8]:
        one = setting.drawn.select(torch.tensor([i]))
        tokens, cuts = pack_sequences([again[i]])
        encoded = one.with_(
            tokens=tokens,
            cu_seqlens=cuts,
            logp_rollout=torch.zeros(len(tokens)),  # no engine sampled these
            rollout_version=torch.zeros_like(tokens),
            evidence=None,
        )
        with torch.no_grad():
            gaps.append(abs(float(score(model, encoded).logp.sum() - score(model, one).logp.sum())))
    return Effect(
        "responses decoded to text and encoded again instead of kept as token ids",
        None,
        NAN,
        why=f"{len(changed)} of {len(responses)} responses come back as other tokens",
        detail={
            "sequences": len(responses),
            "changed_sequences": len(changed),
            "changed_frac": len(changed) / len(responses),
            "first_difference_min": min(first) if first else None,
            "sequence_logp_gap_max": max(gaps, default=None),
        },
    )
