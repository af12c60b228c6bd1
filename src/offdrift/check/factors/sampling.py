"""Factors of sampling and of the record: temperature, filters, alignment, text and tokens."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from offdrift.check.factors.base import (
    LISTED,
    Effect,
    Setting,
    factor,
    few,
    few_prompts,
    measured_by,
    needs,
    scores,
    teacher_forced,
)
from offdrift.check.factors.train import score_rows
from offdrift.check.measure import NAN, measured
from offdrift.check.rescore import Scored
from offdrift.divergence.fused import exact_divergences
from offdrift.engines.generate import responses_of
from offdrift.engines.score import score
from offdrift.errors import NotOfferedError
from offdrift.records.rollouts import Rollouts, Sampling, pack_sequences
from offdrift.segments import Segments

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
    """Both engines divide their logits by it: below 1 every difference of logits weighs more."""
    now = setting.bench.sampling.temperature
    other = COLD if now == 1 else 1.0
    drawn = setting.bench.rollouts(setting.rollout, sampling=replace(setting.unfiltered, temperature=other))
    changed = f"temperature {other:g} instead of {now:g} in both engines"
    return Effect(changed, measured_by(setting, drawn), setting.scored.kl_mean)


@factor("sampling")
def top_p(setting: Setting) -> Effect:
    """A filter on one side: the rollout policy has no tail, the training policy has."""
    filtered = setting.bench.sampling
    if filtered.top_p == 1 and not filtered.top_k:
        filtered = replace(filtered, top_p=NUCLEUS)
    drawn = _drawn_at(setting, filtered)
    plain = teacher_forced(setting, setting.rollout, drawn, sampling=setting.unfiltered)
    kept = f"top_p {filtered.top_p:g}" + (f", top_k {filtered.top_k}" if filtered.top_k else "")
    return Effect(
        f"{kept} in the rollout engine alone instead of no filter",
        measured_by(setting, drawn),
        measured_by(setting, plain).kl_mean,
        why="the trainer scores the whole distribution: mass that the filter removed counts as drift",
    )


@factor("sampling")
def raw_logprobs(setting: Setting) -> Effect:
    """Log-probs taken before temperature and top-p describe a policy that never sampled."""
    processed = setting.bench.sampling
    if (processed.temperature, processed.top_k, processed.top_p) == (1, 0, 1):
        processed = replace(processed, temperature=COLD)
    drawn = _drawn_at(setting, processed)
    unprocessed = replace(processed, temperature=1.0, top_k=0, top_p=1.0)
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
