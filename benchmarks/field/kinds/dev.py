"""Kinds that may be looked at while rules are written."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from benchmarks.field.kinds.base import (
    Kind,
    Plant,
    causes,
    combined,
    divide_by,
    keep_top_p,
    perturb,
    rescored,
)
from benchmarks.field.scene import Batch, Run
from benchmarks.field.world import FLOAT32, Array, LogitHook, Side, StateHook, Weights, Where

COMMON = "common engineering fault"


def healthy(run: Run, large: bool) -> None:
    """Plant nothing."""


# The engine's weights.


def never_delivered(run: Run, large: bool) -> None:
    """Keep the engine at the first version; the log claims each synchronization."""
    run.world.rate *= 3.0 if large else 1.5
    run.steps = 12
    run.engine.weights = lambda step, worker: run.world.weights(run.first_version)


def stalled_as_logged(run: Run, large: bool) -> None:
    """Keep the engine at the first version, and log that."""
    never_delivered(run, large)

    def edit(batch: Batch, run: Run) -> None:
        batch.rollout_version[:] = run.first_version

    run.record_edits.append(edit)


def first_sync_scrambles(run: Run, large: bool) -> None:
    """Add noise to the engine's weights from the second step on."""
    change = perturb(run, 0.25 if large else 0.04, 1)
    run.wrap_weights(lambda weights, step, worker: change(weights) if step >= 1 else weights)


def other_weights_at_rate_zero(run: Run, large: bool) -> None:
    """Train at rate 0, and push other weights to the engine from the third step on."""
    change = perturb(run, 0.3 if large else 0.05, 2)
    start = run.world.start
    run.trainer.weights = lambda step, worker: start
    run.engine.weights = lambda step, worker: change(start) if step >= 2 else start

    def edit(batch: Batch, run: Run) -> None:
        batch.version[:] = run.first_version
        batch.rollout_version[:] = run.first_version

    run.record_edits.append(edit)


def left_out(*names: str) -> Plant:
    """Leave tensors of the engine at the first version."""

    def plant(run: Run, large: bool) -> None:
        run.world.rate *= 3.0 if large else 1.6
        run.steps = 12
        old = run.world.start
        run.wrap_weights(lambda weights, step, worker: {**weights, **{n: old[n] for n in names}})

    return plant


def stops_midway(run: Run, large: bool) -> None:
    """Synchronize up to step 5 and never after it; the log claims each synchronization."""
    run.world.rate *= 3.0 if large else 1.7
    run.steps = 14
    run.engine.weights = lambda step, worker: run.world.weights(run.trained(min(step, 5)))


def worker_never_synchronized(run: Run, large: bool) -> None:
    """Keep one of four workers at the first version."""
    run.workers, run.steps, run.prompts = 4, 10, 12
    run.world.rate *= 4.0 if large else 2.0
    before = run.engine.weights
    run.engine.weights = lambda step, worker: (
        run.world.weights(run.first_version) if worker == 2 else before(step, worker)
    )


def behind_its_claim(run: Run, large: bool) -> None:
    """Push weights before the optimizer's step: the engine is one update (large: three) older than it claims."""
    run.world.rate *= 5.0
    behind = 3 if large else 1
    run.first_version = 4
    run.engine.weights = lambda step, worker: run.world.weights(max(0, run.trained(step) - behind))


def adapter_times(factor_small: float, factor_large: float) -> Plant:
    """Scale what training has added to the engine's weights."""

    def plant(run: Run, large: bool) -> None:
        run.world.rate *= 2.5
        run.steps, factor, start = 12, factor_large if large else factor_small, run.world.start
        run.wrap_weights(
            lambda weights, step, worker: {n: start[n] + factor * (x - start[n]) for n, x in weights.items()}
        )

    return plant


def experts_scrambled(run: Run, large: bool) -> None:
    """Exchange experts in the engine from the second step on: two of them, or all."""
    order = np.arange(run.world.experts)
    order = np.roll(order, 1) if large else np.concatenate([order[1::-1], order[2:]])

    def change(weights: Weights, step: int, worker: int) -> Weights:
        if step < 1:
            return weights
        return {n: x[order] if n.startswith("expert") else x for n, x in weights.items()}

    run.wrap_weights(change)


def prefix_cache_kept(run: Run, large: bool) -> None:
    """Read prompts with the weights of the first step: their cached keys and values outlive each synchronization."""
    run.world.rate *= 9.0 if large else 5.0
    run.steps, run.repeated_prompts, run.prompt_length = 12, True, (12, 20)
    run.world.memory = 0.97
    run.engine.prefill = lambda step, worker: run.world.weights(run.first_version)


# What is recorded.


def most_likely_recorded(run: Run, large: bool) -> None:
    """Record the log-prob of the most likely token at all places, or at 30 % of them."""

    def edit(batch: Batch, run: Run) -> None:
        where = batch.generator.random(batch.mu.shape) < (1.0 if large else 0.3)
        batch.mu = np.where(where, batch.mu_top, batch.mu)

    run.record_edits.append(edit)


def logits_shifted(run: Run, large: bool) -> None:
    """Hand over the trainer's log-probs one place early; large: score each token from logits of several places before."""

    def edit(batch: Batch, run: Run) -> None:
        if not large:
            for name in ("old", "current"):
                x = getattr(batch, name)
                setattr(batch, name, np.concatenate([x[:, 1:], x[:, :1]], 1))
            return
        late = batch.generator.integers(3, 9, len(batch.prompts))
        turned = np.roll(batch.tokens, 1, 0)
        feed = batch.tokens.copy()
        for i, k in enumerate(late):
            feed[i] = np.concatenate([turned[i, :k], batch.tokens[i, :-k]])
        batch.old = rescored(run, batch, run.trainer, feed=feed)
        batch.current = batch.old.copy()

    run.record_edits.append(edit)


def last_label(run: Run, large: bool) -> None:
    """Give the last token of each response (large: the last two) the label of another sequence."""

    def edit(batch: Batch, run: Run) -> None:
        count = 2 if large else 1
        wrong = batch.tokens.copy()
        first = np.roll(batch.tokens[:, 0], -1)
        for back in range(count):
            at = np.maximum(batch.last() - back, 0)
            wrong[np.arange(len(at)), at] = first
        batch.old = rescored(run, batch, run.trainer, labels=wrong)
        batch.current = batch.old.copy()

    run.record_edits.append(edit)


def drafter_recorded(run: Run, large: bool) -> None:
    """Record the log-probs of the small model that drafted the tokens."""
    change = perturb(run, 0.12 if large else 0.06, 3)
    drafter = Side(lambda step, worker: change(run.held(step, worker)), run.engine.numerics)

    def edit(batch: Batch, run: Run) -> None:
        batch.mu = rescored(run, batch, drafter)

    run.draw_edits.append(edit)


def decimals(run: Run, large: bool) -> None:
    """Round the engine's log-probs to two decimals (large: one)."""

    def edit(batch: Batch, run: Run) -> None:
        batch.mu = np.round(batch.mu, 1 if large else 2)

    run.record_edits.append(edit)


def many_missing(run: Run, large: bool) -> None:
    """Lose 4 % (large: 30 %) of the engine's log-probs: NaN."""

    def edit(batch: Batch, run: Run) -> None:
        gone = batch.generator.random(batch.mu.shape) < (0.3 if large else 0.04)
        batch.mu = np.where(gone, np.nan, batch.mu)

    run.record_edits.append(edit)


def one_missing(run: Run, large: bool) -> None:
    """Lose a single log-prob."""

    def edit(batch: Batch, run: Run) -> None:
        if batch.step == 2:
            batch.mu[5, 0] = np.nan

    run.record_edits.append(edit)


def garbage_near_the_end(run: Run, large: bool) -> None:
    """Write garbage over the last four log-probs of responses that reach the length limit."""
    run.world.hazard = np.log(1 / 70)

    def edit(batch: Batch, run: Run) -> None:
        g = batch.generator
        for i in np.flatnonzero(batch.truncated):
            n = batch.lengths[i]
            batch.mu[i, n - 4 : n] = -0.01 - (12.0 if large else 6.0) * g.random(4)

    run.record_edits.append(edit)


# How tokens are drawn.


def engine_only(small: LogitHook, large_hook: LogitHook) -> Plant:
    """Change the engine's logits; it records what it draws from."""

    def plant(run: Run, large: bool) -> None:
        run.engine.logits.append(large_hook if large else small)

    return plant


def trainer_only(small: LogitHook, large_hook: LogitHook) -> Plant:
    """Change the trainer's logits."""

    def plant(run: Run, large: bool) -> None:
        run.trainer.logits.append(large_hook if large else small)

    return plant


def repetition(penalty: float) -> LogitHook:
    """Divide positive logits of tokens that are there already, multiply negative ones."""

    def hook(z: Array, where: Where) -> Array:
        return np.where(where.seen > 0, np.where(z > 0, z / penalty, z * penalty), z)

    return hook


def keep_min_p(share: float) -> LogitHook:
    """Keep tokens at least `share` as likely as the likeliest."""
    return lambda z, where: np.where(z >= z.max(-1, keepdims=True) + np.log(share), z, -np.inf)


def grammar(every: int, allowed: int) -> LogitHook:
    """Allow every `allowed`-th token alone, at each `every`-th place."""

    def hook(z: Array, where: Where) -> Array:
        if where.place % every:
            return z
        keep = np.arange(z.shape[1]) % allowed == 1
        return np.where(keep[None], z, -np.inf)

    return hook


# What the sides read.


def context_differs(run: Run, large: bool) -> None:
    """Add to the trainer's state what the engine does not see, fading over the response."""
    g = np.random.default_rng([run.seed, 31])
    extra = g.standard_normal(run.world.width)
    size = 0.35 if large else 0.06

    def hook(state: Array, where: Where) -> Array:
        return state + size * np.exp(-max(where.place, 0) / 20) * extra

    run.trainer.states.append(hook)


def begin_twice(run: Run, large: bool) -> None:
    """Let the engine's tokenizer put a second beginning before the prompt."""
    run.prompt_length = (5, 8) if large else (9, 14)
    run.world.memory = 0.95
    run.group, run.prompts = 4, 12
    run.engine_prompts = lambda prompts, g: [[1, 1, *p] for p in prompts]
    run.seen_prompts = lambda prompts, batch: [[1, *p] for p in prompts]


def prompt_cut(run: Run, large: bool) -> None:
    """Cut long prompts in the trainer: the first part is gone."""
    run.prompt_length, run.prompts = (3, 24), 12
    run.world.memory = 0.98
    limit = 4 if large else 8
    run.seen_prompts = lambda prompts, batch: [p[-limit:] for p in prompts]


def neighbours_leak(run: Run, large: bool) -> None:
    """Let the trainer attend to the response before it in its pack: all of them, or one in three."""
    run.prompt_length = (2, 5)
    run.world.memory = 0.97

    def seen(prompts: list[list[int]], batch: Batch) -> list[list[int]]:
        tails = [[int(t) for t in batch.tokens[i - 1, : batch.lengths[i - 1]][-10:]] for i in range(len(prompts))]
        leaks = range(len(prompts)) if large else range(0, len(prompts), 3)
        return [tails[i] + p if i in leaks and i else p for i, p in enumerate(prompts)]

    run.seen_prompts = seen


# The trainer.


def padded_vocabulary(run: Run, large: bool) -> None:
    """Count entries beyond the vocabulary in the trainer's softmax."""
    beyond, levels = (12.0 if large else 3.0), []

    def hook(z: Array, where: Where) -> Array:
        if where.place >= 0:
            levels.append(np.log(np.exp(z - z.max(-1, keepdims=True)).sum(-1)) + z.max(-1))
        return z

    run.trainer.logits.append(hook)

    def edit(batch: Batch, run: Run) -> None:
        level = np.stack(levels[-batch.tokens.shape[1] :], 1)
        levels.clear()
        batch.old = batch.old - np.log1p(beyond * np.exp(5.0 - level) / 10)
        batch.current = batch.old.copy()

    run.record_edits.append(edit)


def dropping(size: float) -> StateHook:
    """Scale random parts of the state, anew at each call."""
    return lambda state, where: state * (1 + size * where.generator.standard_normal(state.shape))


def updater_in_train_mode(run: Run, large: bool) -> None:
    """Score current log-probs with dropout; no update lies between them and the old ones."""
    run.updater = replace(run.trainer, states=[*run.trainer.states, dropping(0.15 if large else 0.05)])


def old_with_dropout(run: Run, large: bool) -> None:
    """Score old log-probs with dropout, and current ones again with other noise."""
    run.trainer.states.append(dropping(0.15 if large else 0.05))
    run.updater = run.trainer


def too_many_epochs(run: Run, large: bool) -> None:
    """Train four times on each batch, with steps that are too long."""
    pushes = [perturb(run, (0.08 if large else 0.04), 50 + k) for k in range(4)]
    at = {"epoch": 0}

    def weights(step: int, worker: int) -> Weights:
        moved = run.world.weights(run.trained(step))
        for push in pushes[: at["epoch"]]:
            moved = push(moved)
        return moved

    def edit(batch: Batch, run: Run) -> None:
        n = len(batch.prompts)
        batch.updates_before = np.arange(n) * 4 // n
        side = Side(weights, FLOAT32)
        for epoch in range(4):
            at["epoch"] = epoch
            rows = batch.updates_before == epoch
            batch.current[rows] = rescored(run, batch, side)[rows]
        at["epoch"] = 0

    run.record_edits.append(edit)


def old_after_update(run: Run, large: bool) -> None:
    """Score old log-probs after the update: by the next version's weights (large: three later)."""
    run.world.rate *= 6.0
    ahead = 3 if large else 1
    run.trainer.weights = lambda step, worker: run.world.weights(run.trained(step) + ahead)


# Controls.


def lag_of(updates: int) -> Plant:
    """Draw with weights that are so many updates old, and say so."""

    def plant(run: Run, large: bool) -> None:
        run.lag, run.first_version = updates, updates + 2

    return plant


def lag_heavy(run: Run, large: bool) -> None:
    """Draw with weights 32 updates old, with long updates."""
    run.world.rate *= 2.0
    run.lag, run.first_version, run.steps = 32, 34, 5


def lag_unlogged(run: Run, large: bool) -> None:
    """Draw one update behind, in a log without versions."""
    run.world.rate *= 3.0
    run.lag, run.first_version, run.versions = 1, 2, False


def lag_mixed(run: Run, large: bool) -> None:
    """Draw each worker's share with weights of another age, and log it."""
    run.workers, run.first_version = 4, 8
    run.engine.weights = lambda step, worker: run.world.weights(run.trained(step) - worker)

    def edit(batch: Batch, run: Run) -> None:
        batch.rollout_version[:] = (run.trained(batch.step) - batch.worker)[:, None]

    run.record_edits.append(edit)


def sharpening(run: Run, large: bool) -> None:
    """Draw eight updates behind a policy that sharpens."""
    run.world.sharpening = 0.012
    run.lag, run.first_version = 8, 10


def straddling(run: Run, large: bool) -> None:
    """Synchronize while responses are drawn: their second half has the next version, and the log says so."""
    run.first_version, run.lag = 3, 1
    newer = run.world
    switch = run.max_length // 3

    def weights(step: int, worker: int) -> Weights:
        return newer.weights(run.trained(step) - 1)

    run.engine.weights = weights
    later = Side(lambda step, worker: newer.weights(run.trained(step)), run.engine.numerics)

    def edit(batch: Batch, run: Run) -> None:
        # Draw again from where the weights changed, with the newer ones, keeping what was drawn before.
        keep = np.where(np.arange(run.max_length)[None] < switch, batch.tokens, -1)
        walked = run.world.walk(later, batch.step, batch.prompts, batch.worker, batch.turn, given=keep)
        before = np.arange(run.max_length)[None] < switch
        batch.tokens = walked.tokens
        batch.mu = np.where(before, batch.mu, walked.logp)
        ended = batch.tokens == 0
        stop = np.where(ended.any(1), ended.argmax(1), run.max_length - 1)
        batch.valid = np.arange(run.max_length)[None] <= stop[:, None]
        batch.mask = batch.valid.copy()
        batch.truncated = ~ended.any(1)
        batch.rollout_version = np.where(before, run.trained(batch.step) - 1, run.trained(batch.step)) + np.zeros_like(
            batch.tokens
        )

    run.draw_edits.append(edit)


def tempered_both(run: Run, large: bool) -> None:
    """Draw and score at a temperature of 0.8."""
    run.temperature = 0.8


def filtered_both(run: Run, large: bool) -> None:
    """Draw from the top 95 %, and score with the same tokens kept."""
    kept: list[Array] = []
    hook = keep_top_p(0.95)

    def drawing(z: Array, where: Where) -> Array:
        if where.place == 0:
            kept.clear()
        z = hook(z, where)
        kept.append(np.isfinite(z))
        return z

    run.engine.logits.append(drawing)
    run.trainer.logits.append(lambda z, where: np.where(kept[where.place], z, -np.inf))


VERSIONS = causes("versions")
LOOKS_LIKE_LAG = causes("engine-never-updated", "engine-weights", "stale-unlogged")
SYNC = causes("repair-sync")
WEIGHTS = causes("engine-never-updated", "engine-weights")

FAULTS = [
    Kind(
        name="adapter-never-delivered", planted="the engine draws from version 0 all along; the log claims each sync",
        source="verl#7495, TRL#5312", plant=never_delivered, right=WEIGHTS, tells=VERSIONS, without=LOOKS_LIKE_LAG,
        fixes=SYNC,
    ),
    Kind(
        name="engine-stalled-as-logged", planted="the engine stays at version 0, and the log says so",
        source="TRL#5312, NeMo-RL#4018", plant=stalled_as_logged, right=causes("engine-never-updated", "stale-as-logged"),
        tells=VERSIONS, without=LOOKS_LIKE_LAG, fixes=causes("repair-sync", "sync-more"),
    ),
    Kind(
        name="first-sync-scrambles", planted="the first synchronization scrambles the engine's weights",
        source="prime-rl#2438, SkyRL#1680", plant=first_sync_scrambles, right=causes("engine-weights"),
        tells=VERSIONS, without=causes("engine-weights", "engine-never-updated"), fixes=SYNC,
    ),
    Kind(
        name="other-weights-at-rate-zero", planted="at learning rate 0 the third synchronization pushes other weights",
        source="MarinFold#236, ms-swift#9060", plant=other_weights_at_rate_zero, right=causes("engine-weights"),
        tells=VERSIONS, without=causes("engine-weights", "engine-never-updated"), fixes=SYNC,
    ),
    Kind(
        name="head-left-out-of-sync", planted="the output head of the engine is never synchronized",
        source="prime-rl#2823", plant=left_out("head", "bias"), right=WEIGHTS, tells=VERSIONS,
        without=LOOKS_LIKE_LAG, fixes=SYNC,
    ),
    Kind(
        name="layer-left-out-of-sync", planted="one layer of the engine is never synchronized",
        source="verl-omni#636, SkyRL#1776", plant=left_out("up", "down"), right=WEIGHTS, tells=VERSIONS,
        without=LOOKS_LIKE_LAG, fixes=SYNC,
    ),
    Kind(
        name="sync-stops-midway", planted="synchronization stops after step 5; the log claims each",
        source="TRL#5932, TRL#5312", plant=stops_midway, right=WEIGHTS, tells=VERSIONS, without=LOOKS_LIKE_LAG,
        fixes=SYNC,
    ),
    Kind(
        name="worker-never-synchronized", planted="one of four workers stays at version 0",
        source=COMMON, plant=worker_never_synchronized, right=causes("worker"),
        tells=causes("worker"), without=causes("worker", "engine-weights", "engine-never-updated", "stale-unlogged"),
        fixes=causes("restart-worker", "repair-sync"),
    ),
    Kind(
        name="engine-behind-its-claim", planted="weights are pushed before the optimizer's step: older than claimed",
        source="marin#1824, verl#5698", plant=behind_its_claim, right=WEIGHTS | causes("versions-wrong"),
        tells=VERSIONS, without=LOOKS_LIKE_LAG, fixes=causes("repair-sync", "fix-versions", "sync-more"),
    ),
    Kind(
        name="adapter-applied-twice", planted="the engine merges an adapter that is merged already",
        source="SkyRL#1776", plant=adapter_times(1.6, 2.0), right=causes("engine-weights"),
        tells=VERSIONS, without=LOOKS_LIKE_LAG, fixes=SYNC,
    ),
    Kind(
        name="adapter-scale-ignored", planted="the engine scales the adapter by alpha in place of alpha over rank",
        source="mlx-vlm#841, TensorRT-LLM#1668", plant=adapter_times(2.0, 4.0), right=causes("engine-weights"),
        tells=VERSIONS, without=LOOKS_LIKE_LAG, fixes=SYNC,
    ),
    Kind(
        name="experts-scrambled-by-sync", planted="experts change places in the engine at the first synchronization",
        source="SkyRL#1680", plant=experts_scrambled, right=causes("engine-weights"), tells=VERSIONS,
        without=causes("engine-weights", "engine-never-updated", "routing"), fixes=SYNC, world={"experts": 8},
    ),
    Kind(
        name="prefix-cache-of-old-weights", planted="cached prompts outlive each synchronization",
        source="NeMo-RL#4018, prime-rl#2270, lmdeploy#4917", plant=prefix_cache_kept,
        right=causes("cache", "inputs"), tells=VERSIONS, without=causes("cache", "inputs", "engine-weights", "stale-unlogged"),
        fixes=causes("reset-cache", "same-inputs"), abstain=True,
    ),
    Kind(
        name="most-likely-token-recorded", planted="the log-prob of the likeliest token stands for the drawn one's",
        source="NeMo-RL#2608, TRL#3867", plant=most_likely_recorded, right=causes("record"),
        fixes=causes("record-drawn"),
    ),
    Kind(
        name="logits-shifted", planted="the trainer's log-probs stand one place off, or several",
        source="LightRFT#53, prime-rl#1525, ms-swift#8196", plant=logits_shifted, right=causes("misaligned"),
        fixes=causes("align"),
    ),
    Kind(
        name="label-of-the-last-token", planted="the last token of each response has the label of another sequence",
        source="verl#6475, TRL#5854", plant=last_label, right=causes("misaligned", "ends"), fixes=causes("align"),
    ),
    Kind(
        name="drafter-recorded", planted="log-probs are those of the drafting model",
        source="vLLM#34497", plant=drafter_recorded, right=causes("record", "record-distribution"),
        fixes=causes("record-drawn"),
    ),
    Kind(
        name="two-decimals", planted="the engine's log-probs are rounded to two decimals, or one",
        source=COMMON, plant=decimals, right=causes("unit", "precision", "none"),
        fixes=causes("convert", "raise-precision"), abstain=True,
    ),
    Kind(
        name="many-missing", planted="a part of the engine's log-probs is NaN",
        source="TRL#6166, TRL#6693", plant=many_missing, right=causes("missing"), fixes=causes("record-all"),
    ),
    Kind(
        name="garbage-near-the-end", planted="the last log-probs of responses at the length limit are garbage",
        source="vLLM#38711, vLLM#53488", plant=garbage_near_the_end, right=causes("ends", "record"),
        fixes=causes("repair-engine", "record-drawn"), abstain=True,
    ),
    Kind(
        name="engine-tempered", planted="the engine draws and records at a temperature that the trainer does not know",
        source="tinker-cloud#26, ms-swift#8427, vime#64", plant=engine_only(divide_by(0.85), divide_by(0.6)),
        right=causes("temperature"), fixes=causes("same-sampling"),
    ),
    Kind(
        name="trainer-tempered", planted="the trainer divides by a temperature that nobody draws with",
        source="tinker-cloud#26", plant=trainer_only(divide_by(0.85), divide_by(0.6)), right=causes("temperature"),
        fixes=causes("same-sampling"),
    ),
    Kind(
        name="repetition-penalty", planted="the engine penalizes repeated tokens; it records after the penalty",
        source="verl#7270, NeMo-RL#3497, prime-rl#886", plant=engine_only(repetition(1.1), repetition(1.4)),
        right=causes("penalty"), fixes=causes("same-sampling"), tells=causes("tokens"), without=causes("penalty"),
    ),
    Kind(
        name="top-p-renormalized", planted="the engine draws from the top 90 % and records after it",
        source="TRL#6789, prime-rl#2979, ms-swift#8442", plant=engine_only(keep_top_p(0.95), keep_top_p(0.8)),
        right=causes("filter"), fixes=causes("same-sampling"),
    ),
    Kind(
        name="min-p-renormalized", planted="the engine draws with min-p and records after it",
        source="TRL#6789", plant=engine_only(keep_min_p(0.03), keep_min_p(0.12)), right=causes("filter"),
        fixes=causes("same-sampling"),
    ),
    Kind(
        name="grammar-constrained", planted="a grammar allows few tokens at some places of the engine",
        source=COMMON, plant=engine_only(grammar(9, 3), grammar(4, 4)),
        right=causes("filter"), fixes=causes("same-sampling"),
    ),
    Kind(
        name="context-differs", planted="the trainer's context is another one; the gap fades",
        source="agent-lightning#559, prime-rl#2786", plant=context_differs, right=causes("inputs"),
        fixes=causes("same-inputs"),
    ),
    Kind(
        name="begin-token-twice", planted="the engine's prompts begin twice",
        source="TRL#3853, vLLM#9519", plant=begin_twice, right=causes("inputs"), fixes=causes("same-inputs"),
    ),
    Kind(
        name="prompt-cut-in-trainer", planted="the trainer cuts long prompts that the engine reads whole",
        source="TRL#3601, TRL#6359", plant=prompt_cut, right=causes("inputs"), fixes=causes("same-inputs"),
    ),
    Kind(
        name="neighbours-leak-in-packs", planted="the trainer attends to the response before it in its pack",
        source="TRL#5854, unsloth-zoo#840", plant=neighbours_leak, right=causes("inputs"),
        fixes=causes("same-inputs"),
    ),
    Kind(
        name="vocabulary-padded-in-softmax", planted="the trainer's softmax counts entries beyond the vocabulary",
        source="TRL#5608, marin#2458, Megatron-LM#1754", plant=padded_vocabulary,
        right=causes("vocabulary", "filter"), fixes=causes("same-sampling", "same-inputs"), abstain=True,
    ),
    Kind(
        name="trainer-in-train-mode", planted="current log-probs have dropout, old ones do not; no update lies between",
        source="unsloth#4502, ROLL#284, unsloth-zoo#832", plant=updater_in_train_mode, right=causes("trainer-noise"),
        needs=causes("old", "current"), fixes=causes("no-dropout"),
    ),
    Kind(
        name="old-with-dropout", planted="the trainer scores with dropout, twice",
        source="TRL#3234, unsloth-zoo#832", plant=old_with_dropout, right=causes("trainer-noise"),
        tells=causes("old", "current"), without=causes("trainer-noise"), fixes=causes("no-dropout"),
    ),
    Kind(
        name="too-many-epochs", planted="four passes over each batch with long steps",
        source=COMMON, plant=too_many_epochs, right=causes("update-size"),
        needs=causes("old", "current"), fixes=causes("smaller-updates"),
    ),
    Kind(
        name="old-after-the-update", planted="old log-probs are scored after the update",
        source="tianshou#745", plant=old_after_update, right=causes("old-policy") | WEIGHTS, tells=VERSIONS,
        without=causes("old-policy", "stale-unlogged") | WEIGHTS, fixes=causes("score-old-first", "repair-sync"), abstain=True,
    ),
]  # fmt: skip

NOTHING = causes("none")
STALE = causes("stale-as-logged", "none")
MAYBE = causes("stale-unlogged", "stale-as-logged", "none")

CONTROLS = [
    Kind(
        name="clean-bfloat16", planted="nothing", source="control", plant=healthy, right=NOTHING,
        fixes=causes("nothing"), clean=True, sizes=("large",),
    ),
    Kind(
        name="clean-lag-1", planted="a lag of one update, logged", source="control", plant=lag_of(1), right=STALE,
        tells=VERSIONS, without=MAYBE, fixes=causes("nothing", "sync-more"), clean=True, sizes=("large",),
    ),
    Kind(
        name="clean-lag-16-moderate", planted="a lag of 16 updates, logged", source="control", plant=lag_of(16),
        right=STALE, tells=VERSIONS, without=MAYBE, fixes=causes("nothing", "sync-more"), clean=True, sizes=("large",),
    ),
    Kind(
        name="clean-lag-32-heavy", planted="a lag of 32 long updates, logged: a heavy tail", source="flow_grpo#247",
        plant=lag_heavy, right=STALE, tells=VERSIONS, without=MAYBE, fixes=causes("nothing", "sync-more"), clean=True,
        sizes=("large",),
    ),
    Kind(
        name="clean-lag-unlogged", planted="one update behind, without versions", source="control", plant=lag_unlogged,
        right=MAYBE, abstain=True, fixes=causes("nothing", "sync-more", "measure"), clean=True, sizes=("large",),
    ),
    Kind(
        name="clean-lag-mixed", planted="workers of different ages, logged", source="control", plant=lag_mixed,
        right=STALE, tells=VERSIONS, without=MAYBE, fixes=causes("nothing", "sync-more"), clean=True, sizes=("large",),
    ),
    Kind(
        name="clean-sharpening", planted="a policy that sharpens, at a constant lag, logged",
        source="tinker-feedback#22, Precision-RL#10", plant=sharpening, right=STALE, tells=VERSIONS, without=MAYBE,
        fixes=causes("nothing", "sync-more"), clean=True, sizes=("large",),
    ),
    Kind(
        name="clean-straddling", planted="responses that straddle an update, both versions logged",
        source="vLLM#54443, slime#2279", plant=straddling, right=STALE, tells=VERSIONS, without=MAYBE,
        fixes=causes("nothing", "sync-more"), clean=True, sizes=("large",),
    ),
    Kind(
        name="clean-one-missing", planted="a single NaN among thousands", source="TRL#6166", plant=one_missing,
        right=NOTHING, fixes=causes("nothing", "record-all"), clean=True, sizes=("large",),
    ),
    Kind(
        name="clean-tempered-both", planted="a temperature of 0.8 on both sides", source="control",
        plant=tempered_both, right=NOTHING, fixes=causes("nothing"), clean=True, sizes=("large",),
    ),
    Kind(
        name="clean-top-p-replayed", planted="top-p on both sides, replayed", source="prime-rl#2979",
        plant=filtered_both, right=NOTHING, fixes=causes("nothing"), clean=True, sizes=("large",),
    ),
    Kind(
        name="clean-large-vocabulary", planted="a larger vocabulary", source="control", plant=healthy, right=NOTHING,
        fixes=causes("nothing"), clean=True, world={"vocab": 512}, sizes=("large",),
    ),
]  # fmt: skip

BY_NAME = {kind.name: kind for kind in FAULTS}
PAIRS = [
    ("adapter-never-delivered", "top-p-renormalized"),
    ("adapter-never-delivered", "label-of-the-last-token"),
    ("engine-tempered", "repetition-penalty"),
    ("top-p-renormalized", "garbage-near-the-end"),
    ("begin-token-twice", "drafter-recorded"),
    ("head-left-out-of-sync", "many-missing"),
    ("trainer-tempered", "neighbours-leak-in-packs"),
    ("worker-never-synchronized", "two-decimals"),
]
COMBINED = [combined(BY_NAME[a], BY_NAME[b]) for a, b in PAIRS]
KINDS = FAULTS + CONTROLS + COMBINED
