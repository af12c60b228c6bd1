"""Factors of the training engine: precision, kernels, common mistakes, and weight synchronisation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from offdrift.check.bench import Bench
from offdrift.check.factors.base import (
    Change,
    Factor,
    Found,
    NotOffered,
    Setting,
    always,
    attention_changed,
    dtype_changed,
    head_changed,
    several_prompts,
)
from offdrift.check.factors.compare import (
    ENTRIES,
    ONE_BY_ONE,
    few,
    few_prompts,
    led_by,
    measured_by,
    one_by_one,
    scored_alone,
    scores,
)
from offdrift.check.measure import measured
from offdrift.check.rescore import rescored
from offdrift.divergence.fused import exact_divergences
from offdrift.engines import make_engine
from offdrift.engines.score import score
from offdrift.engines.spec import EngineSpec
from offdrift.engines.verify_sync import examine_sync, perturbed
from offdrift.records.rollouts import Rollouts
from offdrift.segments import Segments


def _variant(setting: Setting, change: Change) -> Found:
    """The baseline's tokens scored by another training engine."""
    figures = measured_by(setting, setting.drawn, train=change.spec)
    return Found(change.words, figures, setting.drawn_kl)


def _dtype(setting: Setting) -> Found:
    return _variant(setting, dtype_changed(setting.train))


def _head(setting: Setting) -> Found:
    return _variant(setting, head_changed(setting.train))


def _attention(setting: Setting) -> Found:
    return _variant(setting, attention_changed(setting.train, setting.bench.model))


def _batch(setting: Setting) -> Found:
    some = few(setting.drawn, sequences=ONE_BY_ONE, v=setting.bench.vocab_size)
    model = setting.bench.train_model(setting.train)
    together, alone = score_rows(model, some), [score_rows(model, e) for e in one_by_one(some)]
    kl = exact_divergences(together, torch.cat(alone)).kl_rollout_current
    return Found(
        f"each of {some.num_sequences} sequences scored alone instead of padded among others",
        measured(some, scored_alone(model, some)),
        setting.drawn_kl_of(some.num_sequences),
        detail={"self_kl_mean": float(kl.double().mean()), "self_kl_max": float(kl.max())},
    )


@torch.no_grad()
def score_rows(model: nn.Module, rollouts: Rollouts) -> Tensor:
    """Tempered logits of every token, from one forward pass, [n, v]."""
    return score(model, rollouts, temperature=rollouts.provenance.sampling.temperature).logits.cpu()


# -- what trainers do by mistake -----------------------------------------------------------------


def _checkpointing_offered(bench: Bench, rollout: EngineSpec, train: EngineSpec) -> str | None:
    if getattr(bench.model, "supports_gradient_checkpointing", False):
        return None
    return f"{type(bench.model).__name__} has no gradient checkpointing"


def _checkpointing(setting: Setting) -> Found:
    bench = setting.bench
    v = bench.vocab_size
    prompts, sampling = few_prompts(bench.prompts, setting.unfiltered, entries=ENTRIES, v=v)

    def drawn(as_in_training: bool) -> Rollouts:
        engine = make_engine(
            "transformers", bench.model, dtype=setting.train.dtype, as_in_training=as_in_training
        )
        try:
            return engine.generate(prompts, sampling, seed=bench.seed, evidence="full")
        finally:
            engine.close()

    wrong, right = drawn(True), drawn(False)
    first = Segments(wrong.cu_seqlens).position == 0
    kl = bench.score(wrong, setting.train).kl
    assert kl is not None
    return Found(
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
        found = getattr(source, "pad_token_id", None)
        if found is not None:
            return int(found)
    return None


def _pad_offered(bench: Bench, rollout: EngineSpec, train: EngineSpec) -> str | None:
    return "the model has no pad id" if pad_id_of(bench) is None else None


@contextmanager
def masked_by_id(model: nn.Module, pad: int) -> Iterator[None]:
    """Let the model's attention mask be `ids != pad`, whatever the lengths say."""

    def hook(_: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        mask = named["attention_mask"] * (named["input_ids"] != pad)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        return arguments, {**named, "attention_mask": mask, "position_ids": positions}

    handle = model.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _pad(setting: Setting) -> Found:
    bench, drawn = setting.bench, setting.drawn
    pad = pad_id_of(bench)
    assert pad is not None
    # The last token of a response is never attended to.
    inner = torch.ones(len(drawn.tokens), dtype=torch.bool)
    inner[drawn.cu_seqlens[1:] - 1] = False
    sampled = int((drawn.tokens[inner] == pad).sum())
    prompted = int((drawn.prompt_tokens == pad).sum())
    chance = expected(drawn, pad)
    planted = not (sampled or prompted)
    if planted:
        drawn = _with_pad(setting, pad)
    without = measured_by(setting, drawn).kl_mean if planted else setting.drawn_kl
    model = bench.train_model(setting.train)
    with masked_by_id(model, pad):
        wrong = rescored(model, drawn)
    where = "planted in the middle of each response" if planted else "as it occurred"
    return Found(
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


def _with_pad(setting: Setting, pad: int) -> Rollouts:
    """A few of the responses with the pad id in their middle, as the rollout engine sees them."""
    some = few(setting.drawn, sequences=ONE_BY_ONE, v=setting.bench.vocab_size)
    if int(some.lengths.max()) < 2:
        raise NotOffered("responses of one token have nothing behind a pad id")
    tokens = some.tokens.clone()
    tokens[some.cu_seqlens[:-1] + (some.lengths - 1) // 2] = pad
    plain = replace(some.provenance.sampling, stop_token_ids=())
    return led_by(setting, setting.rollout, some.with_(tokens=tokens), sampling=plain)


DTYPE = Factor(
    "train_dtype",
    "The other half of the rounding: two engines in bf16 do not round alike.",
    "train",
    always,
    _dtype,
)
HEAD = Factor(
    "train_lm_head",
    "Precision of the trainer's output head alone.",
    "train",
    always,
    _head,
)
ATTENTION = Factor(
    "train_attention",
    "Another attention kernel in the trainer: the same sums in another order.",
    "train",
    always,
    _attention,
)
BATCH = Factor(
    "train_batch",
    "A sequence scored alone and padded among others: padding must not leak into it.",
    "train",
    several_prompts,
    _batch,
)
CHECKPOINTING = Factor(
    "gradient_checkpointing",
    "Generation in train mode under gradient checkpointing loses its cache and samples nonsense.",
    "train",
    _checkpointing_offered,
    _checkpointing,
)
PAD = Factor(
    "pad_id",
    "A policy can emit the pad id; a mask built from it hides a real token from all later ones.",
    "train",
    _pad_offered,
    _pad,
)


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
