"""Further kinds that may be looked at: reports of 2024 to 2026 that resemble none of `dev`.

They were written after the rules, and judged once before any rule was changed for them: `README.md` has that first score.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from benchmarks.field.kinds.base import Kind, causes, perturb, rescored
from benchmarks.field.kinds.dev import LOOKS_LIKE_LAG, SYNC, VERSIONS, WEIGHTS
from benchmarks.field.scene import Batch, Run
from benchmarks.field.world import Array, Numerics, Side, Tokens, Weights, Where, to_bfloat16, to_float8

# The engine's weights.


def base_checkpoint(run: Run, large: bool) -> None:
    """Let the engine add each update to another revision of the base model."""
    change = perturb(run, 0.12 if large else 0.03, 61)
    run.wrap_weights(lambda weights, step, worker: change(weights))


def router_frozen(run: Run, large: bool) -> None:
    """Leave the engine's router at the first version: it is a buffer, and only parameters are sent."""
    run.world.rate *= 5.0 if large else 2.5
    run.steps = 12
    router = run.world.start["router"]
    run.wrap_weights(lambda weights, step, worker: {**weights, "router": router})


def averaged(run: Run, large: bool) -> None:
    """Push a moving average of the weights in place of the weights; the log claims the newest."""
    run.world.rate *= 3.0
    run.steps, run.first_version, decay = 12, 12, 0.9 if large else 0.7

    def average(step: int) -> Weights:
        share = [(1 - decay) * decay**back for back in range(12)]
        versions = [run.world.weights(run.trained(step) - back) for back in range(12)]
        shares = np.array(share) / sum(share)
        return {n: np.tensordot(shares, np.stack([w[n] for w in versions]), 1) for n in versions[0]}

    kept = {step: average(step) for step in range(run.steps)}
    run.engine.weights = lambda step, worker: kept[step]


def resumed(run: Run, large: bool) -> None:
    """Abort responses at an update and go on with newer weights; the log has the last version alone."""
    run.world.rate *= 5.0
    older = 3 if large else 1
    run.first_version = older + 1
    new = run.engine.weights
    run.engine.weights = lambda step, worker: run.world.weights(run.trained(step) - older)
    later = Side(new, run.engine.numerics)

    def edit(batch: Batch, run: Run) -> None:
        switch = batch.generator.integers(8, 24, len(batch.prompts))[:, None]
        before = np.arange(run.max_length)[None] < switch
        walked = run.world.walk(
            later, batch.step, batch.prompts, batch.worker, batch.turn, given=np.where(before, batch.tokens, -1)
        )
        batch.tokens, batch.mu = walked.tokens, np.where(before, batch.mu, walked.logp)
        ended = batch.tokens == 0
        stop = np.where(ended.any(1), ended.argmax(1), run.max_length - 1)
        batch.valid = np.arange(run.max_length)[None] <= stop[:, None]
        batch.mask, batch.truncated = batch.valid.copy(), ~ended.any(1)

    run.draw_edits.append(edit)


def another_model(run: Run, large: bool) -> None:
    """Let another model answer every sixth request, or every third, with log-probs of its own."""
    change = perturb(run, 0.4 if large else 0.15, 62)
    other = Side(lambda step, worker: change(run.held(step, worker)), run.engine.numerics)
    every = 3 if large else 6

    def edit(batch: Batch, run: Run) -> None:
        rows = (np.arange(len(batch.prompts)) + batch.step) % every == 0
        walked = run.world.walk(other, batch.step, batch.prompts, batch.worker, batch.turn)
        batch.tokens = np.where(rows[:, None], walked.tokens, batch.tokens)
        batch.mu = np.where(rows[:, None], walked.logp, batch.mu)
        ended = batch.tokens == 0
        stop = np.where(ended.any(1), ended.argmax(1), run.max_length - 1)
        batch.valid = np.arange(run.max_length)[None] <= stop[:, None]
        batch.mask, batch.truncated = batch.valid.copy(), ~ended.any(1)

    run.draw_edits.append(edit)


def new_rows(run: Run, large: bool) -> None:
    """Let the engine hold random rows for a few tokens, in its embedding and its head."""
    g = np.random.default_rng([run.seed, 65])
    rows = g.choice(np.arange(1, run.world.vocab), 8 if large else 2, replace=False)
    fresh = {
        n: x.std() * g.standard_normal((len(rows), x.shape[1]))
        for n, x in run.world.start.items()
        if n in ("embed", "head")
    }

    def change(weights: Weights, step: int, worker: int) -> Weights:
        changed = dict(weights)
        for name, values in fresh.items():
            changed[name] = weights[name].copy()
            changed[name][rows] = values
        return changed

    run.wrap_weights(change)


# Precision.


def four_bits(x: Array) -> Array:
    """Round to 15 levels a row, as symmetric int4 does."""
    scale = np.abs(x).max(-1, keepdims=True) / 7 + 1e-30
    return np.clip(np.round(x / scale), -7, 7) * scale


def six_bits(x: Array) -> Array:
    """Round to 63 levels a row."""
    scale = np.abs(x).max(-1, keepdims=True) / 31 + 1e-30
    return np.clip(np.round(x / scale), -31, 31) * scale


def quantized(run: Run, large: bool) -> None:
    """Round the engine's weights to six bits (large: four)."""
    run.engine.numerics = Numerics(four_bits if large else six_bits, to_bfloat16, to_bfloat16)


# How tokens are drawn.


def softcap(run: Run, large: bool) -> None:
    """Cap the trainer's logits by c tanh(z / c), which the engine leaves out."""
    cap = 9.0 if large else 20.0

    def hook(z: Array, where: Where) -> Array:
        middle = z.mean(-1, keepdims=True)
        return middle + cap * np.tanh((z - middle) / cap)

    run.trainer.logits.append(hook)


def biased_tokens(run: Run, large: bool) -> None:
    """Add a bias to the engine's logits of a few tokens, and record after it."""
    ids = np.arange(3, run.world.vocab, 8 if large else 16)
    size = -2.5 if large else -1.5

    def hook(z: Array, where: Where) -> Array:
        z = z.copy()
        z[:, ids] += size
        return z

    run.engine.logits.append(hook)


def no_early_end(run: Run, large: bool) -> None:
    """Forbid the end in the engine before the 12th token (large: the 32nd), and record after it."""
    least = 32 if large else 12
    run.world.hazard = np.log(1 / 12)

    def hook(z: Array, where: Where) -> Array:
        if where.place >= least:
            return z
        z = z.copy()
        z[:, 0] = -np.inf
        return z

    run.engine.logits.append(hook)


# What the sides read.


def retokenized(run: Run, large: bool) -> None:
    """Let the trainer read text that was tokenized again: two ids in a row are others at some places."""
    share = 0.05 if large else 0.005
    run.world.memory = 0.8

    def seen(batch: Batch) -> Tokens:
        g = np.random.default_rng([run.seed, 64, batch.step])
        feed = batch.tokens.copy()
        at = g.random(feed.shape) < share
        at[:, 1:] |= at[:, :-1]
        return np.where(at, 1 + (feed * 7 + 3) % (run.world.vocab - 1), feed)

    run.seen_tokens = seen


def scaled_positions(run: Run, large: bool) -> None:
    """Scale the trainer's positions, as a rope factor that one side reads from its configuration."""
    factor = 1.5 if large else 1.06
    run.trainer.places = lambda position, where: np.round(128 + (position - 128) * factor).astype(np.int64)


def reasoning_stripped(run: Run, large: bool) -> None:
    """Drop what was thought in earlier turns from the trainer's context."""
    run.turns, run.tool_tokens, run.max_length = 3, 4, 72
    run.world.memory, run.world.hazard = 0.95, np.log(1 / 400)
    kept = 0.2 if large else 0.75

    def hook(state: Array, where: Where) -> Array:
        begins = where.place > 0 and where.place % 24 == 3 and bool(where.turn.max() > 0)
        return state * kept if begins else state

    run.trainer.states.append(hook)


# What is recorded.


def chunk_ends(run: Run, large: bool) -> None:
    """Give the last label of each chunk of 16 tokens (large: of 8) the first token of another chunk."""
    width = 8 if large else 16

    def edit(batch: Batch, run: Run) -> None:
        wrong = batch.tokens.copy()
        wrong[:, width - 1 :: width] = np.roll(batch.tokens, 1, 0)[:, width - 1 :: width]
        batch.old = rescored(run, batch, run.trainer, labels=wrong)
        batch.current = batch.old.copy()

    run.record_edits.append(edit)


def order_lost(run: Run, large: bool) -> None:
    """Leave the trainer's log-probs of the last micro-batch (large: of half the batch) in the order of lengths."""

    def edit(batch: Batch, run: Run) -> None:
        n = len(batch.prompts)
        rows = np.arange(n // 2 if large else n - max(2, n // 8), n)
        turned = np.roll(rows, 1)
        for name in ("old", "current"):
            x = getattr(batch, name).copy()
            x[rows] = getattr(batch, name)[turned]
            setattr(batch, name, x)

    run.record_edits.append(edit)


def tool_output_trains(run: Run, large: bool) -> None:
    """Let tokens of tools train: the engine's log-probs there are 0."""
    run.turns, run.tool_tokens, run.max_length = 3, 8 if large else 3, 72
    run.world.hazard = np.log(1 / 400)

    def edit(batch: Batch, run: Run) -> None:
        batch.mu = np.where(batch.valid & ~batch.mask, 0.0, batch.mu)
        batch.mask = batch.valid.copy()

    run.record_edits.append(edit)


def floored(run: Run, large: bool) -> None:
    """Raise the engine's log-probs to -5 at least (large: -2)."""

    def edit(batch: Batch, run: Run) -> None:
        batch.mu = np.maximum(batch.mu, -2.0 if large else -5.0)

    run.record_edits.append(edit)


def mean_recorded(run: Run, large: bool) -> None:
    """Record the response's mean log-prob at every place (large), or at every place of every fourth response."""

    def edit(batch: Batch, run: Run) -> None:
        mean = (batch.mu * batch.mask).sum(1, keepdims=True) / np.maximum(batch.mask.sum(1, keepdims=True), 1)
        rows = (np.arange(len(batch.prompts)) % (1 if large else 4) == 0)[:, None]
        batch.mu = np.where(rows, mean, batch.mu)

    run.record_edits.append(edit)


# Written after the rules were mended for the kinds above.


def router_jitter(run: Run, large: bool) -> None:
    """Add noise to the trainer's router scores, as a mode of training does."""
    run.trainer.numerics = replace(run.trainer.numerics, routing=0.5 if large else 0.1)


def another_adapter(run: Run, large: bool) -> None:
    """Serve every third step with the adapter of another tenant."""
    run.world.rate *= 2.0
    run.steps = 12
    change = perturb(run, 0.2 if large else 0.05, 66)
    run.wrap_weights(lambda weights, step, worker: change(weights) if step % 3 == 2 else weights)


def template_for_some(run: Run, large: bool) -> None:
    """Put a system message before every fourth prompt in the trainer (large: every second)."""
    run.prompt_length, run.prompts, every = (3, 6), 12, 2 if large else 4
    run.world.memory = 0.95

    def seen(prompts: list[list[int]], batch: Batch) -> list[list[int]]:
        return [[5, 9, 7, *p] if group % every == 0 else p for group, p in zip(batch.group, prompts, strict=True)]

    run.seen_prompts = seen


def worker_tempered(run: Run, large: bool) -> None:
    """Let one of four workers sample at another temperature, and record after it."""
    run.workers, run.prompts = 4, 12
    temperature = 0.6 if large else 0.85

    def hook(z: Array, where: Where) -> Array:
        return np.where((where.worker == 1)[:, None], z / temperature, z)

    run.engine.logits.append(hook)


def old_in_eight_bits(run: Run, large: bool) -> None:
    """Score old log-probs with weights in 8 bits (large: 4), and current ones in full."""
    exact = run.trainer
    run.trainer = Side(exact.weights, Numerics(four_bits if large else to_float8))
    run.updater = exact


def restart(run: Run, large: bool) -> None:
    """Restart the trainer at step 5 from a checkpoint that is four updates old; the engine is two steps late."""
    run.world.rate *= 5.0 if large else 2.5
    run.steps, run.first_version = 12, 6
    run.engine.weights = lambda step, worker: run.world.weights(run.trained(step) + (4 if step in (5, 6) else 0))


def unscaled(run: Run, large: bool) -> None:
    """Leave out a part of the scale of the engine's embedding."""
    factor = 0.7 if large else 0.95
    run.wrap_weights(lambda weights, step, worker: {**weights, "embed": factor * weights["embed"]})


def coarse_cache(run: Run, large: bool) -> None:
    """Round what the engine keeps of the context on a coarse grid, as a cache with scales of 1 does."""
    grid = 3.0 if large else 10.0
    run.engine.states.append(lambda state, where: np.round(state * grid) / grid)


KINDS = [
    Kind(
        name="base-checkpoint-in-engine", planted="the engine's base model is another revision from the start",
        source="verl#7904, open-instruct#1473", plant=base_checkpoint, right=causes("engine-weights"), abstain=True,
        fixes=SYNC | causes("measure"),
    ),
    Kind(
        name="routers-not-synchronized", planted="the engine's router is never synchronized",
        source="DeepSpeed#8369, maxtext#2494", plant=router_frozen, right=WEIGHTS | causes("routing"), tells=VERSIONS,
        without=LOOKS_LIKE_LAG | causes("routing"), fixes=SYNC, world={"experts": 8},
    ),
    Kind(
        name="averaged-weights-pushed", planted="a moving average of weights is pushed, the newest is claimed",
        source="schnetpack#785", plant=averaged, right=WEIGHTS | causes("versions-wrong"), tells=VERSIONS,
        without=LOOKS_LIKE_LAG, fixes=SYNC, abstain=True,
    ),
    Kind(
        name="resumed-by-newer-weights", planted="responses go on with newer weights; the last version is logged",
        source="verl#5071, SkyRL#1657", plant=resumed,
        right=WEIGHTS | causes("versions-wrong", "stale-unlogged", "cache", "inputs"), abstain=True,
        fixes=causes("fix-versions", "repair-sync", "same-inputs", "reset-cache"),
    ),
    Kind(
        name="requests-to-another-model", planted="another model answers some of the requests",
        source="TensorRT-LLM#1668", plant=another_model, right=WEIGHTS | causes("worker"), abstain=True,
        fixes=SYNC | causes("restart-worker", "measure"),
    ),
    Kind(
        name="four-bit-engine", planted="the engine's weights are rounded to six bits, or four",
        source="Flash-RL, NeMo-RL#1212", plant=quantized, right=causes("precision"), abstain=True,
        fixes=causes("raise-precision", "measure"),
    ),
    Kind(
        name="softcap-in-trainer-alone", planted="the trainer caps its logits, the engine does not",
        source="unsloth-zoo#1029, vLLM#52173, TRL#5692", plant=softcap, right=causes("temperature", "vocabulary"),
        abstain=True, fixes=causes("same-sampling", "measure"),
    ),
    Kind(
        name="bias-on-some-tokens", planted="the engine adds a bias to the logits of some tokens",
        source="SGLang#6749, vLLM#32163", plant=biased_tokens, right=causes("filter", "vocabulary", "penalty"),
        abstain=True, fixes=causes("same-sampling", "measure"),
    ),
    Kind(
        name="min-tokens-in-engine", planted="the engine forbids the end in the first places",
        source="vLLM#32163, TensorRT-LLM#12358", plant=no_early_end, right=causes("filter", "vocabulary", "penalty"),
        abstain=True, fixes=causes("same-sampling", "measure"),
    ),
    Kind(
        name="new-tokens-random", planted="rows of new tokens are random in the engine, in embedding and head",
        source="OpenRLHF#648, TRL#5608", plant=new_rows, right=causes("vocabulary", "engine-weights"), abstain=True,
        fixes=SYNC | causes("same-inputs", "measure"),
    ),
    Kind(
        name="history-retokenized", planted="the trainer reads other ids than were drawn, at some places",
        source="TRL#5224, ms-swift#10012, sglang#26555", plant=retokenized, right=causes("inputs", "misaligned"),
        abstain=True, fixes=causes("same-inputs", "align", "measure"),
    ),
    Kind(
        name="rope-scaling-in-trainer", planted="the trainer scales positions, the engine does not",
        source="mlx-vlm#1710, unsloth#3083", plant=scaled_positions, right=causes("position", "inputs"), abstain=True,
        fixes=causes("same-inputs", "repair-engine", "measure"),
    ),
    Kind(
        name="reasoning-stripped", planted="the trainer's context lacks what was thought in earlier turns",
        source="verl#6854, NeMo-RL#2821", plant=reasoning_stripped, right=causes("turn", "inputs", "position"),
        tells=causes("turns"), without=causes("turn", "inputs", "position"), fixes=causes("same-inputs"), abstain=True,
    ),
    Kind(
        name="chunk-ends-mislabeled", planted="the last label of each chunk is another chunk's first token",
        source="ChatLearn#343, TRL#6843", plant=chunk_ends, right=causes("misaligned", "record"), abstain=True,
        fixes=causes("align", "measure"),
    ),
    Kind(
        name="order-not-restored", planted="log-probs of some responses stand in another order",
        source="verl#2185", plant=order_lost, right=causes("misaligned"), abstain=True,
        fixes=causes("align", "measure"),
    ),
    Kind(
        name="tool-output-trains", planted="tokens of tools train, with log-probs of 0 in the record",
        source="slime#1563, Flash-RL#19", plant=tool_output_trains, right=causes("mask", "missing", "turn"),
        fixes=causes("record-all", "same-inputs"),
    ),
    Kind(
        name="log-probs-floored", planted="the engine's log-probs are raised to a floor",
        source="open-instruct#1817, prime-rl#1329", plant=floored, right=causes("record", "unit", "missing"),
        fixes=causes("record-drawn", "record-all", "convert"),
    ),
    Kind(
        name="mean-log-prob-recorded", planted="each token has its response's mean log-prob",
        source="hands-on-modern-rl#75", plant=mean_recorded, right=causes("record", "misaligned"),
        fixes=causes("record-drawn", "align"),
    ),
]  # fmt: skip

LATER = [
    Kind(
        name="router-jitter-in-trainer", planted="the trainer's router scores are noisy",
        source="transformers#33969, NeMo-RL#4243", plant=router_jitter, right=causes("routing", "trainer-noise"),
        abstain=True, fixes=causes("replay-routing", "no-dropout", "measure"), world={"experts": 8},
    ),
    Kind(
        name="another-tenant-adapter", planted="another adapter is served at every third step",
        source="SkyRL#1657", plant=another_adapter, right=WEIGHTS, tells=VERSIONS, without=LOOKS_LIKE_LAG, fixes=SYNC,
        abstain=True,
    ),
    Kind(
        name="template-differs-for-some", planted="some prompts have a system message in the trainer alone",
        source="halo#25, slime#2263", plant=template_for_some, right=causes("inputs"), abstain=True,
        fixes=causes("same-inputs", "measure"),
    ),
    Kind(
        name="worker-with-temperature", planted="one of four workers samples at another temperature",
        source="vime#64", plant=worker_tempered, right=causes("worker", "temperature"), tells=causes("worker"),
        without=causes("worker", "temperature"), fixes=causes("restart-worker", "same-sampling"), abstain=True,
    ),
    Kind(
        name="old-scored-in-eight-bits", planted="old log-probs are scored in low precision", needs=causes("old"),
        source="verl#3487", plant=old_in_eight_bits, right=causes("precision", "trainer-noise", "old-policy"),
        abstain=True, fixes=causes("raise-precision", "no-dropout", "measure"),
    ),
    Kind(
        name="restart-loses-updates", planted="a restarted trainer is behind the engine for two steps",
        source="verl#7904, open-instruct#1473", plant=restart, right=WEIGHTS | causes("versions-wrong"), tells=VERSIONS,
        without=LOOKS_LIKE_LAG, fixes=SYNC, abstain=True,
    ),
    Kind(
        name="embedding-unscaled", planted="the engine's embedding lacks a part of its scale",
        source="unsloth-zoo#1029", plant=unscaled, right=causes("engine-weights", "inputs"), abstain=True,
        fixes=SYNC | causes("measure"),
    ),
    Kind(
        name="stale-scales-in-cache", planted="the engine's cache is rounded with scales that do not fit",
        source="NeMo-RL#3226, NeMo-RL#3008", plant=coarse_cache, right=causes("cache", "precision", "position"),
        abstain=True, fixes=causes("reset-cache", "raise-precision", "measure"),
    ),
]  # fmt: skip
