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
    ENTRIES,
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
from offdrift.check.measure import measured
from offdrift.check.rescore import joined, rescored
from offdrift.divergence.fused import exact_divergences
from offdrift.engines import make_engine
from offdrift.engines.score import score
from offdrift.engines.verify_sync import examine_sync, perturbed
from offdrift.errors import NotOfferedError
from offdrift.records.rollouts import Rollouts
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
"""Prompts, and last tokens of each, that the check of every group of weights samples from: few are
enough, since stale weights show after any prompt, and the trainer scores these some fifteen times."""


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
    names = ("effect", "gap", "limit", "stale", "conclusive")
    groups = {g.name: {name: getattr(g, name) for name in names} for g in report.groups}
    why = f"stale: {', '.join(report.stale)}" if report.stale else "every group of weights arrived"
    if report.unverified and not report.stale:
        why += f", but noise hides it for {', '.join(report.unverified)}"
    return Effect(
        f"all weights moved by {FRACTION:.0%} of their size and loaded, instead of the same weights",
        after,
        without,
        why=why,
        detail={"stale": list(report.stale), "kl_mean_if_nothing_arrived": unmoved, "groups": groups},
    )
