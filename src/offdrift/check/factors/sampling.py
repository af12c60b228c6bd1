"""Factors of sampling and of what is recorded: temperature, filters, alignment, text and tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from offdrift.check.bench import Bench
from offdrift.check.factors.base import Factor, Found, NotOffered, Setting, always
from offdrift.check.factors.compare import (
    LISTED,
    few,
    few_prompts,
    is_plain,
    led_by,
    measured_by,
    one_by_one,
    scores,
)
from offdrift.check.factors.train import score_rows
from offdrift.check.measure import NAN, measured
from offdrift.check.rescore import Scored
from offdrift.divergence.fused import exact_divergences
from offdrift.engines.generate import responses_of
from offdrift.engines.score import score
from offdrift.engines.spec import EngineSpec
from offdrift.records.rollouts import Rollouts, Sampling, pack_sequences
from offdrift.segments import Segments

COLD = 0.7
"""Temperature that is tried where none is asked for."""
NUCLEUS = 0.95
"""The same for top-p."""


def _drawn_at(setting: Setting, sampling: Sampling) -> Rollouts:
    """A small draw under another sampling, with the whole vocabulary recorded."""
    bench = setting.bench
    prompts, short = few_prompts(bench.prompts, sampling, entries=LISTED, v=bench.vocab_size)
    return bench.rollouts(setting.rollout, sampling=short, prompts=prompts, evidence="full")


def _temperature(setting: Setting) -> Found:
    now = setting.bench.sampling.temperature
    other = COLD if now == 1 else 1.0
    drawn = setting.bench.rollouts(
        setting.rollout, sampling=replace(setting.unfiltered, temperature=other)
    )
    changed = f"temperature {other:g} instead of {now:g} in both engines"
    return Found(changed, measured_by(setting, drawn), setting.drawn_kl)


def _top_p(setting: Setting) -> Found:
    asked = setting.bench.sampling
    filtered = asked if asked.top_p < 1 or asked.top_k else replace(asked, top_p=NUCLEUS)
    drawn = _drawn_at(setting, filtered)
    plain = led_by(setting, setting.rollout, drawn, sampling=setting.unfiltered)
    kept = f"top_p {filtered.top_p:g}" + (f", top_k {filtered.top_k}" if filtered.top_k else "")
    return Found(
        f"{kept} in the rollout engine alone instead of no filter",
        measured_by(setting, drawn),
        measured_by(setting, plain).kl_mean,
        why="the trainer scores the whole distribution: mass that the filter removed counts as drift",
    )


def _raw(setting: Setting) -> Found:
    asked = setting.bench.sampling
    processed = replace(asked, temperature=COLD) if is_plain(asked) else asked
    drawn = _drawn_at(setting, processed)
    raw = led_by(
        setting,
        setting.rollout,
        drawn,
        sampling=replace(processed, temperature=1.0, top_k=0, top_p=1.0),
    )
    # Recorded as raw, but scored at the temperature that sampled, as a correct trainer does.
    recorded = raw.with_(provenance=drawn.provenance)
    exact = exact_divergences(scores(drawn), scores(raw)).kl_rollout_current.double()
    return Found(
        f"log-probs before temperature {processed.temperature:g} and top_p {processed.top_p:g} "
        "instead of after",
        measured_by(setting, recorded),
        measured_by(setting, drawn).kl_mean,
        why=f"recorded policy against sampled policy: KL {float(exact.mean()):.3g} nats per token",
        detail={
            "sampled_to_recorded_kl_mean": float(exact.mean()),
            "abs_recorded_error_max": float((raw.logp_rollout - drawn.logp_rollout).abs().max()),
        },
    )


# -- alignment -----------------------------------------------------------------------------------


def _off_by_one(setting: Setting) -> Found:
    drawn = setting.drawn
    log = setting.scored.logged
    assert log is not None
    assert log.logp_old is not None
    corr = {shift: shifted_correlation(drawn, log.logp_old, shift) for shift in (-1, 0, 1)}
    some = few(drawn, v=setting.bench.vocab_size)
    if int(some.lengths.max()) < 2:
        raise NotOffered("responses of one token cannot be misaligned")
    rows = score_rows(setting.bench.train_model(setting.train), some)
    inner = Segments(some.cu_seqlens).position > 0
    late = inner.nonzero().flatten()
    shifted = some_tokens(some, late)
    d = exact_divergences(scores(some)[late], rows[late - 1])
    # Row t - 1 of the trainer, beside token t.
    tokens = some.tokens[late, None].long()
    said = rows[late - 1].log_softmax(-1).gather(1, tokens).squeeze(1)
    scored = Scored(said, torch.zeros_like(said), kl=d.kl_rollout_current, tv=d.tv)
    detected = not math.isnan(corr[0]) and max(corr[-1], corr[1]) > corr[0]
    return Found(
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
    """The tokens at these places, each sequence shortened; sequences left empty are left out."""
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


# -- text ----------------------------------------------------------------------------------------


def _text_offered(bench: Bench, rollout: EngineSpec, train: EngineSpec) -> str | None:
    return "there is no tokenizer" if not hasattr(bench.tokenizer, "decode") else None


def _tokenization(setting: Setting) -> Found:
    tokenizer, drawn = setting.bench.tokenizer, setting.drawn
    there = responses_of(drawn)
    back = [
        list(
            tokenizer.encode(
                tokenizer.decode(r, skip_special_tokens=False), add_special_tokens=False
            )
        )
        for r in there
    ]
    changed = [i for i, (a, b) in enumerate(zip(there, back, strict=True)) if a != b]
    first = [_first_difference(there[i], back[i]) for i in changed]
    detail: dict[str, object] = {
        "sequences": len(there),
        "changed_sequences": len(changed),
        "changed_frac": len(changed) / len(there),
        "first_difference_min": min(first) if first else None,
        "sequence_logp_gap_max": _gap(setting, [i for i in changed if back[i]], back),
    }
    return Found(
        "responses decoded to text and encoded again instead of kept as token ids",
        None,
        NAN,
        why=f"{len(changed)} of {len(there)} responses come back as other tokens",
        detail=detail,
    )


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    same = (x == y for x, y in zip(a, b))
    return next((i for i, s in enumerate(same) if not s), min(len(a), len(b)))


def _gap(setting: Setting, changed: Sequence[int], back: Sequence[Sequence[int]]) -> float | None:
    """Largest change of a sequence's log-prob in the trainer's eyes, over a few responses, nats."""
    some = list(changed[:8])
    if not some:
        return None
    model = setting.bench.train_model(setting.train)
    before = setting.drawn.select(torch.tensor(some))
    gaps = []
    for one, ids in zip(one_by_one(before), [back[i] for i in some], strict=True):
        tokens, cuts = pack_sequences([ids])
        again = one.with_(
            tokens=tokens,
            cu_seqlens=cuts,
            logp_rollout=torch.zeros(len(tokens)),  # nobody drew these
            rollout_version=torch.zeros_like(tokens),
            evidence=None,
        )
        with torch.no_grad():
            gaps.append(
                float((score(model, again).logp.sum() - score(model, one).logp.sum()).abs())
            )
    return max(gaps)


TEMPERATURE = Factor(
    "temperature",
    "Both engines divide their logits by it: below 1 every difference of logits weighs more.",
    "sampling",
    always,
    _temperature,
)
TOP_P = Factor(
    "top_p",
    "A filter on one side: the rollout policy has no tail, the training policy has.",
    "sampling",
    always,
    _top_p,
)
RAW = Factor(
    "raw_logprobs",
    "Log-probs taken before temperature and top-p describe a policy that never sampled.",
    "sampling",
    always,
    _raw,
)
OFF_BY_ONE = Factor(
    "off_by_one",
    "Log-probs shifted by one token: the logits at position t speak about token t + 1.",
    "sampling",
    always,
    _off_by_one,
)
TOKENIZATION = Factor(
    "tokenization",
    "Text is not tokens: decoding and encoding again may give other ids than were sampled.",
    "sampling",
    _text_offered,
    _tokenization,
)
