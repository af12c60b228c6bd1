"""Kinds that whoever writes rules does not look at: their logs measure rules that were written without them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from benchmarks.field.kinds.base import Kind, Plant, causes, combined, keep_top_k
from benchmarks.field.scene import Batch, Run
from benchmarks.field.world import (
    END,
    FLOAT8,
    FLOAT32,
    Array,
    LogitHook,
    Numerics,
    Side,
    Weights,
    Where,
    to_bfloat16,
)

COMMON = "common engineering fault"


def healthy(run: Run, large: bool) -> None:
    """Plant nothing."""


# The engine's weights, and what the log says of them.


def worker_restarts(run: Run, large: bool) -> None:
    """Restart one of four workers at step 5: it loads the first checkpoint and takes no update for the rest."""
    run.workers, run.steps, run.prompts, run.first_version = 4, 12, 12, 12
    run.world.rate *= 2.5 if large else 1.5
    before = run.engine.weights
    run.engine.weights = lambda step, worker: (
        run.world.weights(0) if worker == 1 and step >= 5 else before(step, worker)
    )


def stamped_at_the_end(run: Run, large: bool) -> None:
    """Draw with weights two (large: five) updates old; the version is read when the response is done."""
    run.world.rate *= 4.0
    lag = 5 if large else 2
    run.first_version = 8
    run.engine.weights = lambda step, worker: run.world.weights(run.trained(step) - lag)


def versions_count_calls(run: Run, large: bool) -> None:
    """Stamp rollouts with the count of update calls: several per version."""

    def edit(batch: Batch, run: Run) -> None:
        batch.rollout_version = batch.rollout_version * (5 if large else 2) + 1

    run.first_version = 3
    run.record_edits.append(edit)


def old_of_reference(run: Run, large: bool) -> None:
    """Score old log-probs by the reference policy: version 0."""
    run.world.rate *= 4.0 if large else 2.0
    run.steps, run.first_version = 10, 6
    run.updater = Side(run.trainer.weights, FLOAT32)
    run.trainer.weights = lambda step, worker: run.world.weights(0)


def stale_after_resume(run: Run, large: bool) -> None:
    """Resume at step 5: for two steps the engine draws from the first checkpoint, then it is synchronized again."""
    run.steps, run.first_version = 12, 10
    run.world.rate *= 4.0 if large else 2.0
    before = run.engine.weights
    run.engine.weights = lambda step, worker: run.world.weights(0) if step in (5, 6) else before(step, worker)


def copied_too_early(run: Run, large: bool) -> None:
    """Copy tensors before they are gathered: at each synchronization a random part of the rows is old."""
    run.world.rate *= 5.0
    run.steps, share = 10, 0.6 if large else 0.25

    def change(weights: Weights, step: int, worker: int) -> Weights:
        g = np.random.default_rng([run.seed, 37, step])
        old = run.world.weights(max(0, run.trained(step) - 4))
        return {n: np.where(g.random((len(x),) + (1,) * (x.ndim - 1)) < share, old[n], x) for n, x in weights.items()}

    run.first_version = 5
    run.wrap_weights(change)


def float8_scales_kept(run: Run, large: bool) -> None:
    """Quantize new weights with the scales of the first version: rows that have grown are clipped."""
    run.engine.numerics = FLOAT8
    run.steps = 12
    run.world.rate *= 4.0 if large else 2.0
    start = run.world.start
    room = 1.02

    def change(weights: Weights, step: int, worker: int) -> Weights:
        limits = {n: room * np.abs(x).max(-1, keepdims=True) * (0.75 if large else 0.9) for n, x in start.items()}
        return {n: np.clip(x, -limits[n], limits[n]) for n, x in weights.items()} if step >= 1 else weights

    run.wrap_weights(change)


# What is recorded.


def first_unscored(run: Run, large: bool) -> None:
    """Record 0 for the first token of each response, which the prefill samples (large: for the first three)."""

    def edit(batch: Batch, run: Run) -> None:
        batch.mu[:, : 3 if large else 1] = 0.0

    run.record_edits.append(edit)


def later_turns_unscored(run: Run, large: bool) -> None:
    """Record 0 for all tokens of the later turns (small: of the last)."""

    def edit(batch: Batch, run: Run) -> None:
        batch.mu = np.where(batch.turn >= (1 if large else run.turns - 1), 0.0, batch.mu)

    run.record_edits.append(edit)


def drafted_unscored(run: Run, large: bool) -> None:
    """Record 0 for tokens that the drafter proposed and the engine accepted: 60 %, or 15 %."""

    def edit(batch: Batch, run: Run) -> None:
        drafted = batch.generator.random(batch.mu.shape) < (0.6 if large else 0.15)
        batch.mu = np.where(drafted, 0.0, batch.mu)

    run.record_edits.append(edit)


def another_response(run: Run, large: bool) -> None:
    """Attach the log-probs of the next response of the group: everywhere, or in one group of four."""

    def edit(batch: Batch, run: Run) -> None:
        n = len(batch.prompts)
        other = (np.arange(n) // run.group) * run.group + (np.arange(n) + 1) % run.group
        moved = (np.arange(n) // run.group % 4 == 0) | large
        batch.mu = np.where(moved[:, None], batch.mu[other], batch.mu)

    run.record_edits.append(edit)


def retokenized(run: Run, large: bool) -> None:
    """Decode and encode responses anew: pairs of tokens become other pairs, under the drawn ones' log-probs."""

    def edit(batch: Batch, run: Run) -> None:
        g, v = batch.generator, run.world.vocab
        first = (g.random(batch.tokens.shape) < (0.08 if large else 0.02)) & batch.mask & (batch.tokens != END)
        first[:, -1] = False
        first[:, 1:] &= ~first[:, :-1]
        pair = first | np.concatenate([np.zeros((len(first), 1), bool), first[:, :-1]], 1)
        other = 1 + (batch.tokens * 7 + 3) % (v - 1)
        batch.tokens = np.where(pair & batch.mask & (batch.tokens != END), other, batch.tokens)

    run.draw_edits.append(edit)


def divided_log_probs(run: Run, large: bool) -> None:
    """Draw and train at a temperature, and divide recorded log-probs by it in place of logits."""
    run.temperature = 0.6 if large else 0.85

    def edit(batch: Batch, run: Run) -> None:
        batch.mu = batch.mu_raw / run.temperature

    run.record_edits.append(edit)


def raw_recorded(run: Run, large: bool) -> None:
    """Draw and train at a temperature, and record log-probs from before it."""
    run.temperature = 0.6 if large else 0.85

    def edit(batch: Batch, run: Run) -> None:
        batch.mu = batch.mu_raw

    run.record_edits.append(edit)


def bfloat16_record(run: Run, large: bool) -> None:
    """Keep log-probs in bfloat16: both sides', or the engine's."""

    def edit(batch: Batch, run: Run) -> None:
        batch.mu = to_bfloat16(batch.mu)
        if large:
            batch.old, batch.current = to_bfloat16(batch.old), to_bfloat16(batch.current)

    run.record_edits.append(edit)


def base_two(run: Run, large: bool) -> None:
    """Record logarithms to base 10 (small: base 2) on the engine's side."""

    def edit(batch: Batch, run: Run) -> None:
        batch.mu = batch.mu / np.log(10.0 if large else 2.0)

    run.record_edits.append(edit)


def clamped(run: Run, large: bool) -> None:
    """Clamp the engine's log-probs from below: at -1.5, or at -4."""

    def edit(batch: Batch, run: Run) -> None:
        batch.mu = np.maximum(batch.mu, -1.5 if large else -4.0)

    run.record_edits.append(edit)


def signs_lost(run: Run, large: bool) -> None:
    """Record negative log-likelihoods of the engine, or of both sides."""

    def edit(batch: Batch, run: Run) -> None:
        batch.mu = -batch.mu
        if large:
            batch.old, batch.current = -batch.old, -batch.current

    run.record_edits.append(edit)


def tool_tokens_train(run: Run, large: bool) -> None:
    """Leave tool output in the mask, with a rollout log-prob of 0 (small: of the policy that did not draw it)."""

    def edit(batch: Batch, run: Run) -> None:
        tool = batch.valid & ~batch.mask
        batch.mask = batch.valid.copy()
        if large:
            batch.mu = np.where(tool, 0.0, batch.mu)
        else:
            batch.mu = np.where(tool, -0.05 * np.abs(batch.generator.standard_normal(batch.mu.shape)), batch.mu)

    run.record_edits.append(edit)


# How tokens are drawn.


def engine_only(small: LogitHook, large_hook: LogitHook) -> Plant:
    """Change the engine's logits; it records what it draws from."""

    def plant(run: Run, large: bool) -> None:
        run.engine.logits.append(large_hook if large else small)

    return plant


def presence(penalty: float) -> LogitHook:
    """Take a constant from the logits of tokens that are there already."""
    return lambda z, where: z - penalty * (where.seen > 0)


def no_end_before(place: int) -> LogitHook:
    """Forbid the end before a place."""

    def hook(z: Array, where: Where) -> Array:
        z = z.copy()
        if where.place < place:
            z[:, END] = -np.inf
        return z

    return hook


def banned(share: int) -> LogitHook:
    """Forbid every `share`-th token."""

    def hook(z: Array, where: Where) -> Array:
        ids = np.arange(z.shape[1])
        return np.where((ids % share == 1)[None], -np.inf, z)

    return hook


def some_requests_tempered(run: Run, large: bool) -> None:
    """Draw half of the responses of each group at another temperature."""
    t = 0.5 if large else 0.8
    run.engine.logits.append(lambda z, where: np.where((where.rows % 2 == 0)[:, None], z / t, z))


def worker_tempered(run: Run, large: bool) -> None:
    """Let one of four workers take its temperature from the checkpoint's defaults."""
    t = 0.6 if large else 0.85
    run.workers, run.prompts = 4, 12
    run.engine.logits.append(lambda z, where: np.where((where.worker == 3)[:, None], z / t, z))


# What the sides read.


def image_missing_in_some(run: Run, large: bool) -> None:
    """Keep from the trainer what a third of the prompts show: a constant in the engine's state."""
    g = np.random.default_rng([run.seed, 41])
    image = (0.5 if large else 0.2) * g.standard_normal(run.world.width)

    def hook(state: Array, where: Where) -> Array:
        shown = (where.rows // run.group % 3 == 0)[:, None]
        return np.where(shown, state + image, state)

    run.engine.states.append(hook)


def thoughts_stripped(run: Run, large: bool) -> None:
    """Strip earlier turns' thoughts from what the engine reads: from the second turn on its state forgets them."""
    keep = 0.2 if large else 0.7

    def hook(state: Array, where: Where) -> Array:
        starts = (where.place + 1) % (run.max_length // run.turns) == 0 and where.place >= 0
        return state * keep + (1 - keep) * 0.3 if starts else state

    run.world.memory = 0.98
    run.engine.states.append(hook)


def positions_from_padding(run: Run, large: bool) -> None:
    """Count positions from the padded prompt's beginning in the trainer."""
    run.prompt_length = (3, 40) if large else (3, 8)
    longest = run.prompt_length[1]
    run.trainer.places = lambda position, where: position + (longest - where.prompt_length)


def padding_attended(run: Run, large: bool) -> None:
    """Let the trainer attend to the padding of short prompts."""
    run.prompt_length = (2, 16)
    run.world.memory = 0.98
    longest = 16 if large else 9
    run.seen_prompts = lambda prompts, batch: [[0] * max(0, longest - len(p)) + p for p in prompts]


def positions_scaled_beyond(run: Run, large: bool) -> None:
    """Scale positions beyond 32 in the engine alone, as a context extension does."""
    run.world.hazard = np.log(1 / 90)
    run.max_length = 128
    factor = 4 if large else 2
    run.engine.places = lambda position, where: np.where(
        where.place > 32, position - (where.place - 32) + (where.place - 32) // factor, position
    )


# Numerics.


def head_rounded(run: Run, large: bool) -> None:
    """Round the engine's logits to bfloat16 with two bits less, or four."""
    lost = 4 if large else 2

    def coarse(z: Array) -> Array:
        scale = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(z), 1e-6))) - 7 + lost)
        return np.round(z / scale) * scale

    run.engine.numerics = Numerics(logits=coarse)


def integers(run: Run, large: bool) -> None:
    """Quantize the engine's weights to integers per row, as coarse as 4-bit groups (small: 6-bit) drift."""
    levels = 15.0 if large else 40.0

    def quantize(x: Array) -> Array:
        scale = np.abs(x).max(-1, keepdims=True) / levels + 1e-30
        return np.round(x / scale) * scale

    run.engine.numerics = Numerics(weights=quantize)


def router_flips(run: Run, large: bool) -> None:
    """Choose experts with noise in the engine: nothing replays its choice."""
    run.world.start["expert_down"] = run.world.start["expert_down"] * 2.0
    run.engine.numerics = replace(run.engine.numerics, routing=0.15 if large else 0.04)


def cache_in_float8(run: Run, large: bool) -> None:
    """Compress what the engine keeps of earlier tokens: errors grow with the place."""
    run.world.hazard = np.log(1 / 80)
    run.max_length = 120
    size = 0.12 if large else 0.05

    def hook(state: Array, where: Where) -> Array:
        grown = np.sqrt(max(where.place, 0) / 60)
        return state * (1 + size * grown * where.generator.standard_normal(state.shape))

    run.engine.states.append(hook)


def shard_wrong(run: Run, large: bool) -> None:
    """Scale a quarter of the vocabulary's logits in the trainer: one tensor-parallel rank is wrong."""
    factor = 0.8 if large else 0.95

    def hook(z: Array, where: Where) -> Array:
        ids = np.arange(z.shape[1])
        mine = (ids >= z.shape[1] // 4) & (ids < z.shape[1] // 2)
        return np.where(mine[None], z * factor, z)

    run.trainer.logits.append(hook)


# Controls.


def lag_4(run: Run, large: bool) -> None:
    """Draw with weights four updates old, and say so."""
    run.lag, run.first_version = 4, 6


def float8(run: Run, large: bool) -> None:
    """Round the engine's weights and states to float8."""
    run.engine.numerics = FLOAT8


def float32(run: Run, large: bool) -> None:
    """Round nothing but the last digits."""
    run.engine.numerics = Numerics(logits=lambda z: z.astype(np.float32).astype(float))


def moe(run: Run, large: bool) -> None:
    """Mix experts: bfloat16 flips a few of the choices."""


VERSIONS = causes("versions")
WEIGHTS = causes("engine-never-updated", "engine-weights")
LOOKS_LIKE_LAG = WEIGHTS | {"stale-unlogged"}
SYNC = causes("repair-sync")
TURNS = {"turns": 3, "tool_tokens": 5}

FAULTS = [
    Kind(
        name="worker-restarts-on-base", planted="one of four workers restarts on the first checkpoint at step 5",
        source=COMMON, plant=worker_restarts, right=causes("worker"), tells=causes("worker"),
        without=causes("worker") | LOOKS_LIKE_LAG, fixes=causes("restart-worker", "repair-sync"),
    ),
    Kind(
        name="versions-stamped-at-the-end", planted="versions are read when a response is done: older than they say",
        source="rllm#622, vLLM#54443", plant=stamped_at_the_end, right=WEIGHTS | {"versions-wrong"}, tells=VERSIONS,
        without=LOOKS_LIKE_LAG, fixes=causes("fix-versions", "repair-sync", "sync-more"),
    ),
    Kind(
        name="versions-count-calls", planted="rollout versions count update calls", source="UniRL#324, miles#1893",
        plant=versions_count_calls, right=causes("versions-wrong"), needs=VERSIONS, fixes=causes("fix-versions"),
    ),
    Kind(
        name="old-from-the-reference", planted="old log-probs are the reference policy's", source="NeMo-RL#3722",
        plant=old_of_reference, right=causes("old-policy"), tells=causes("old", "current"),
        without=causes("old-policy") | LOOKS_LIKE_LAG, needs=causes("old"), fixes=causes("score-old-first"), abstain=True,
    ),
    Kind(
        name="stale-checkpoint-after-resume", planted="after a resume the engine draws from the first checkpoint for two steps",
        source="prime-rl#1351, TRL#5312", plant=stale_after_resume, right=WEIGHTS, tells=VERSIONS,
        without=LOOKS_LIKE_LAG, fixes=SYNC,
    ),
    Kind(
        name="tensors-copied-too-early", planted="a random part of the rows is old at each synchronization",
        source="ms-swift#9060", plant=copied_too_early, right=WEIGHTS, tells=VERSIONS, without=LOOKS_LIKE_LAG,
        fixes=SYNC,
    ),
    Kind(
        name="float8-scales-kept", planted="float8 scales stay those of the first version",
        source="SkyRL#1898, verl#7136", plant=float8_scales_kept, right=causes("engine-weights"), tells=VERSIONS,
        without=WEIGHTS, fixes=causes("repair-sync", "raise-precision"), abstain=True, world={"sharp": 2.5},
    ),
    Kind(
        name="first-token-unscored", planted="the first token's log-prob is filled in with 0", source="metaseq#87, vime#70",
        plant=first_unscored, right=causes("missing", "record"), fixes=causes("record-all", "record-drawn"),
    ),
    Kind(
        name="later-turns-unscored", planted="log-probs of later turns are filled in with 0", source="verl#6364",
        plant=later_turns_unscored, right=causes("missing", "record", "turn"), fixes=causes("record-all", "record-drawn"),
        run=TURNS,
    ),
    Kind(
        name="drafted-tokens-unscored", planted="log-probs of drafted tokens are 0", source="llama.cpp#27972, vLLM#17876",
        plant=drafted_unscored, right=causes("missing", "record"), fixes=causes("record-all", "record-drawn"),
    ),
    Kind(
        name="another-response-recorded", planted="responses have the log-probs of another of their group",
        source="TRL#5446, SkyRL#2201", plant=another_response, right=causes("misaligned", "record"),
        fixes=causes("align", "record-drawn"),
    ),
    Kind(
        name="retokenized", planted="responses are decoded and encoded anew under the old log-probs",
        source="rllm#816, TRL#5224", plant=retokenized, right=causes("inputs", "record", "misaligned"),
        fixes=causes("same-inputs", "record-drawn", "align"),
    ),
    Kind(
        name="logprobs-divided-by-temperature", planted="log-probs are divided by the temperature in place of logits",
        source="prime-rl#697", plant=divided_log_probs, right=causes("record-distribution", "record", "temperature"),
        fixes=causes("record-drawn", "same-sampling"),
    ),
    Kind(
        name="raw-before-temperature", planted="log-probs are recorded before the temperature",
        source="TRL#4159, tinker-feedback#148, vime#64", plant=raw_recorded,
        right=causes("record-distribution", "record", "temperature"), fixes=causes("record-drawn", "same-sampling"),
    ),
    Kind(
        name="bfloat16-record", planted="log-probs are kept in bfloat16", source="slime#892, slime#245, maxtext#5231",
        plant=bfloat16_record, right=causes("unit", "precision", "none"), fixes=causes("convert", "raise-precision", "nothing"),
        abstain=True,
    ),
    Kind(
        name="base-two", planted="the engine's logarithms have another base", source=COMMON, plant=base_two,
        right=causes("unit", "record", "record-distribution"), fixes=causes("convert", "record-drawn"), abstain=True,
    ),
    Kind(
        name="clamped-record", planted="the engine's log-probs are clamped from below", source=COMMON, plant=clamped,
        right=causes("unit", "record", "record-distribution"), fixes=causes("convert", "record-drawn"),
    ),
    Kind(
        name="top-k-renormalized", planted="the engine draws with top-k and records after it",
        source="TRL#6789, ms-swift#8442", plant=engine_only(keep_top_k(20), keep_top_k(5)), right=causes("filter"),
        fixes=causes("same-sampling"),
    ),
    Kind(
        name="presence-penalty", planted="the engine has a presence penalty; it records after it",
        source="vLLM#50767, NeMo-RL#3497", plant=engine_only(presence(0.5), presence(1.5)), right=causes("penalty"),
        fixes=causes("same-sampling"), tells=causes("tokens"),
    ),
    Kind(
        name="end-forbidden-early", planted="the engine may not end before a place (min_tokens)", source=COMMON,
        plant=engine_only(no_end_before(10), no_end_before(25)), right=causes("filter", "position", "vocabulary"),
        fixes=causes("same-sampling"), abstain=True, world={"mean_length": 14},
    ),
    Kind(
        name="words-banned", planted="the engine may not draw some words", source="vLLM#13376",
        plant=engine_only(banned(12), banned(4)), right=causes("filter", "vocabulary"), fixes=causes("same-sampling"),
    ),
    Kind(
        name="some-requests-tempered", planted="half of the responses are drawn at another temperature",
        source="verl#6364", plant=some_requests_tempered, right=causes("temperature"), fixes=causes("same-sampling"),
        abstain=True,
    ),
    Kind(
        name="worker-tempered", planted="one of four workers has another temperature", source="NeMo-RL#3497",
        plant=worker_tempered, right=causes("worker", "temperature"), tells=causes("worker"),
        fixes=causes("restart-worker", "same-sampling"),
    ),
    Kind(
        name="image-missing-in-some", planted="the trainer does not see what a third of the prompts show",
        source="agent-lightning#559, ms-swift#9668", plant=image_missing_in_some, right=causes("inputs"),
        fixes=causes("same-inputs"), abstain=True,
    ),
    Kind(
        name="thoughts-stripped", planted="the engine's history lacks earlier thoughts from the second turn on",
        source="verl#6854, verl#5576, NeMo-RL#2821", plant=thoughts_stripped, right=causes("inputs", "turn"),
        tells=causes("turns"), without=causes("inputs", "turn", "position"), fixes=causes("same-inputs"), run=TURNS,
    ),
    Kind(
        name="positions-from-padding", planted="the trainer counts positions from the padding",
        source="unsloth#6738, TRL#6800", plant=positions_from_padding, right=causes("inputs", "position"),
        fixes=causes("same-inputs"), abstain=True,
    ),
    Kind(
        name="padding-attended", planted="the trainer attends to the padding of short prompts",
        source="TRL#2708", plant=padding_attended, right=causes("inputs"), fixes=causes("same-inputs"),
    ),
    Kind(
        name="positions-scaled-beyond", planted="the engine scales positions beyond a length", source="ROLL#276",
        plant=positions_scaled_beyond, right=causes("position", "inputs"), fixes=causes("same-inputs", "repair-engine"),
    ),
    Kind(
        name="head-rounded-coarsely", planted="the engine rounds its logits", source="vLLM#48390, open-instruct#1387",
        plant=head_rounded, right=causes("precision"), fixes=causes("raise-precision"),
    ),
    Kind(
        name="int4-engine", planted="the engine has integer weights", source="verl#1803", plant=integers,
        right=causes("precision"), fixes=causes("raise-precision"), abstain=True,
    ),
    Kind(
        name="router-flips", planted="experts are chosen differently", source="Megatron-LM#4168, TensorRT-LLM#19501",
        plant=router_flips, right=causes("routing"), fixes=causes("replay-routing"), abstain=True,
        world={"experts": 8},
    ),
    Kind(
        name="cache-in-float8", planted="the engine's cache is compressed: errors grow with the place",
        source="NeMo-RL#1212, prime-rl#3555", plant=cache_in_float8, right=causes("cache", "position"),
        fixes=causes("reset-cache", "raise-precision"),
    ),
    Kind(
        name="vocabulary-shard-wrong", planted="a quarter of the vocabulary has wrong logits in the trainer",
        source="NeMo-RL#1767, Megatron-LM#1754", plant=shard_wrong, right=causes("vocabulary"), tells=causes("tokens"),
        fixes=causes("repair-engine"), abstain=True,
    ),
    Kind(
        name="tool-tokens-train", planted="tool output is in the mask", source="SkyRL#354, Flash-RL#19",
        plant=tool_tokens_train, right=causes("mask", "record", "missing"), fixes=causes("record-all", "record-drawn"),
        run=TURNS,
    ),
    Kind(
        name="signs-lost", planted="negative log-likelihoods are recorded", source=COMMON, plant=signs_lost,
        right=causes("unit", "missing"), fixes=causes("convert", "record-all"),
    ),
]  # fmt: skip

NOTHING = causes("none")
STALE = causes("stale-as-logged", "none")
MAYBE = causes("stale-unlogged", "stale-as-logged", "none")
SMALL = causes("none", "precision")


def control(name: str, planted: str, plant: Plant, right: frozenset[str], **more: object) -> Kind:
    """A clean log."""
    return Kind(
        name=name, planted=planted, source="control", plant=plant, right=right, clean=True, sizes=("large",),
        fixes=causes("nothing", "sync-more", "raise-precision"), **more,
    )  # type: ignore[arg-type]  # fmt: skip


CONTROLS = [
    control("clean-lag-4", "a lag of four updates, logged", lag_4, STALE, tells=VERSIONS, without=MAYBE),
    control("clean-near-greedy", "a nearly greedy policy", healthy, NOTHING, world={"sharp": 9.0}),
    control("clean-float8", "a float8 engine", float8, SMALL, world={"sharp": 2.5}),
    control("clean-moe", "a mixture of experts", moe, causes("none", "routing", "precision"), world={"experts": 8}),
    control("clean-peaked-moe", "a peaked mixture of experts", moe, causes("none", "routing", "precision"),
            world={"experts": 8, "sharp": 6.0}),
    control("clean-long-answers", "responses of up to 300 tokens", healthy, NOTHING, world={"mean_length": 150},
            run={"max_length": 300, "prompts": 4}),
    control("clean-multi-turn", "three turns with tool output between them", healthy, NOTHING, run=TURNS),
    control("clean-few-rows", "sixteen responses in all", healthy, NOTHING, run={"steps": 2, "prompts": 2}),
    control("clean-float32", "float32 on both sides", float32, NOTHING),
    control("clean-many-workers", "eight workers", healthy, NOTHING, run={"workers": 8}),
    control("clean-repeated-prompts", "prompts that come again", healthy, NOTHING, run={"repeated_prompts": True}),
]  # fmt: skip

BY_NAME = {kind.name: kind for kind in FAULTS}
PAIRS = [
    ("raw-before-temperature", "later-turns-unscored"),
    ("top-k-renormalized", "presence-penalty"),
    ("retokenized", "head-rounded-coarsely"),
    ("image-missing-in-some", "drafted-tokens-unscored"),
    ("stale-checkpoint-after-resume", "words-banned"),
    ("worker-tempered", "clamped-record"),
    ("router-flips", "first-token-unscored"),
    ("old-from-the-reference", "positions-from-padding"),
]
COMBINED = [combined(BY_NAME[a], BY_NAME[b]) for a, b in PAIRS]
KINDS = FAULTS + CONTROLS + COMBINED
