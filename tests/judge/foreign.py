"""Logs with one fault each, of kinds that users of training frameworks report, drawn token by token from tables.

A `Play` is a policy over a small vocabulary whose next context depends on the last token, so that responses are truly
autoregressive. `Play.step` draws a batch honestly, from the engine's table or from a function of the place; a fault
then changes what one side scores or records. Rows are those of the plain schema, so that a log takes the reader's way.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np

from offdrift.audit.conclude import conclude
from offdrift.audit.partial import AuditPartial, Job, work
from offdrift.records.readers import detect, pieces

Row = dict[str, Any]
Scores = np.ndarray
"""Log-probs [..., vocabulary]."""


def log_softmax(z: np.ndarray) -> Scores:
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


@dataclass
class Play:
    """A policy with versions, and the size of the log that is drawn from it."""

    seed: int = 0
    sequences: int = 24
    length: int = 48
    steps: int = 8
    vocab: int = 40
    contexts: int = 60
    sharp: float = 2.0
    rounding: float = 0.03
    rate: float = 0.02
    g: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.g = np.random.default_rng(1000 + self.seed)
        shape = (self.contexts, self.vocab)
        self.base, self.way, self.error, self.other = (self.g.standard_normal(shape) for _ in range(4))

    def logits(self, version: float) -> np.ndarray:
        """Of the trainer after so many updates."""
        return self.sharp * self.base + version * self.rate * self.way

    def engine(self, version: float, *, rounding: float | None = None) -> np.ndarray:
        """The same with errors of arithmetic."""
        return self.logits(version) + (self.rounding if rounding is None else rounding) * self.error

    def step(
        self, logits: np.ndarray | Callable[[int, np.ndarray, np.ndarray], np.ndarray], length: int | None = None
    ) -> tuple[np.ndarray, np.ndarray, Scores]:
        """Tokens, contexts and the engine's log-probs of the tokens, each [sequences, length]."""
        n, length = self.sequences, length or self.length
        at = np.repeat(self.g.integers(0, self.contexts, (n + 3) // 4), 4)[:n]
        seen = np.zeros((n, self.vocab), bool)
        tokens, places, scores = [], [], []
        for t in range(length):
            z = logits(t, at, seen) if callable(logits) else logits[at]
            p = log_softmax(z)
            token = np.minimum((np.exp(p).cumsum(-1) < self.g.random((n, 1))).sum(-1), self.vocab - 1)
            tokens.append(token)
            places.append(at)
            scores.append(p[np.arange(n), token])
            seen[np.arange(n), token] = True
            at = (5 * at + 11 * token + 3) % self.contexts
        return np.stack(tokens, 1), np.stack(places, 1), np.stack(scores, 1)

    def score(self, logits: np.ndarray, tokens: np.ndarray, places: np.ndarray) -> Scores:
        """Log-probs of the tokens under logits by context, or by sequence and place."""
        table = logits[places] if logits.ndim == 2 else logits
        return np.take_along_axis(log_softmax(table), tokens[..., None], -1)[..., 0]

    def rows(self, step: int, rollout: Scores, old: Scores, *, lag: int | None = 0, **more: Any) -> list[Row]:
        """One row for each sequence; `more` holds a list by sequence, or one value for all."""
        rows = []
        for i in range(len(rollout)):
            row: Row = {"step": step, "logp_rollout": listed(rollout[i]), "logp_old": listed(old[i])}
            row |= {"group_id": i // 4, "reward": float(self.g.random() < 0.4)}
            if lag is not None:
                row |= {"version": step, "rollout_version": step - lag}
            for name, value in more.items():
                one = value[i] if isinstance(value, np.ndarray | list) else value
                row[name] = one.tolist() if isinstance(one, np.ndarray) else one
            rows.append(row)
        return rows


def listed(x: np.ndarray) -> list[float]:
    return [round(float(v), 5) for v in x]


Fault = Callable[[Play], list[Row]]


def plain(play: Play, change: Callable[..., tuple[Any, ...]], **kwargs: Any) -> list[Row]:
    """A log whose sides are changed step by step: `change(step, tokens, places, rollout, old)` gives rollout and old
    log-probs, and further columns as a dict."""
    rows = []
    for step in range(play.steps):
        tokens, places, rollout = play.step(play.engine(step))
        old = play.score(play.logits(step), tokens, places)
        changed = change(step, tokens, places, rollout, old)
        more = changed[2] if len(changed) > 2 else {}
        rows += play.rows(step, changed[0], changed[1], **{**kwargs, **more})
    return rows


def written(rows: Sequence[Row], file: Path) -> None:
    """A log of the plain schema."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def merged(folder: Path, **options: Any) -> tuple[AuditPartial, Job]:
    """What an audit has read of the logs in a folder, before it concludes, for which job; `options` are its own."""
    found = detect([str(folder)])
    job = Job(found, **options)
    return reduce(AuditPartial.merge, (work(piece, job) for piece in pieces(found))), job


def audited(folder: Path) -> dict[str, Any]:
    """What an audit concludes from the logs in a folder."""
    return conclude(*merged(folder))


def said(rows: Sequence[Row], folder: Path) -> dict[str, Any]:
    """What an audit concludes from these rows, read from a file."""
    written(rows, folder / "log.jsonl")
    return audited(folder)


# -- nothing is wrong ------------------------------------------------------------------------------------------------


def clean(play: Play) -> list[Row]:
    return plain(play, lambda step, t, c, mu, pi: (mu, pi))


def no_versions(play: Play) -> list[Row]:
    return plain(play, lambda step, t, c, mu, pi: (mu, pi), lag=None)


def fp8(play: Play) -> list[Row]:
    """Larger rounding, the same everywhere."""
    return clean(Play(**sizes(play), rounding=0.12))


def near_greedy(play: Play) -> list[Row]:
    return clean(Play(**sizes(play), sharp=9.0))


def heavy_tail(play: Play) -> list[Row]:
    """Rounding whose size differs by context, tenfold."""
    play.error = play.error * np.exp(1.2 * play.g.standard_normal((play.contexts, 1)))
    return clean(play)


def constant_lag(play: Play, lag: int = 4) -> list[Row]:
    rows = []
    for step in range(lag, lag + play.steps):
        tokens, places, mu = play.step(play.engine(step - lag))
        rows += play.rows(step, mu, play.score(play.logits(step), tokens, places), lag=lag)
    return rows


def sharpening(play: Play, lag: int = 6) -> list[Row]:
    """A policy whose entropy falls, at a constant lag that is logged."""
    rows = []
    for step in range(lag, lag + play.steps):
        mu, pi = (play.base * (1.4 + 0.01 * v) for v in (step - lag, step))
        tokens, places, rollout = play.step(mu + play.rounding * play.error)
        rows += play.rows(step, rollout, play.score(pi, tokens, places), lag=lag)
    return rows


def one_step_off(play: Play) -> list[Row]:
    rows = []
    for step in range(play.steps):
        tokens, places, mu = play.step(play.engine(max(0, step - 1)))
        rows += play.rows(step, mu, play.score(play.logits(step), tokens, places), lag=None)
    return rows


def shuffled_steps(play: Play) -> list[Row]:
    """Rows of all steps in any order, as of many writers."""
    rows = clean(play)
    return [rows[i] for i in play.g.permutation(len(rows))]


def repeated_rows(play: Play) -> list[Row]:
    rows = clean(play)
    return rows + rows[: len(rows) // 2]


def entropy_falls(play: Play) -> list[Row]:
    """The policy collapses, and both sides agree about it."""
    rows = []
    for step in range(play.steps):
        z = play.base * (1 + 0.5 * step)
        tokens, places, mu = play.step(z + play.rounding * play.error)
        rows += play.rows(step, mu, play.score(z, tokens, places))
    return rows


def mixed_lengths(play: Play) -> list[Row]:
    """Responses of 6 to `length` tokens."""

    def cut(step: int, t: np.ndarray, c: np.ndarray, mu: np.ndarray, pi: np.ndarray) -> tuple[Any, ...]:
        n = play.g.integers(6, play.length + 1, len(mu))
        return [m[:k] for m, k in zip(mu, n)], [p[:k] for p, k in zip(pi, n)]

    return plain(play, cut)


def one_hole(play: Play) -> list[Row]:
    rows = clean(play)
    rows[7]["logp_old"][3] = None
    return rows


# -- the record, or what is beside it ----------------------------------------------------------------------------------


def most_likely(play: Play, share: float = 1.0) -> list[Row]:
    """The log-prob of the most likely token in place of the sampled one's."""

    def change(step: int, t: np.ndarray, c: np.ndarray, mu: np.ndarray, pi: np.ndarray) -> tuple[Any, ...]:
        top = log_softmax(play.engine(step))[c].max(-1)
        return np.where(play.g.random(mu.shape) < share, top, mu), pi

    return plain(play, change)


def base_two(play: Play) -> list[Row]:
    return plain(play, lambda step, t, c, mu, pi: (mu / np.log(2), pi))


def shuffled_records(play: Play) -> list[Row]:
    """Each row has the record of another sequence of the batch."""
    return plain(play, lambda step, t, c, mu, pi: (np.roll(mu, 1, 0), pi))


def off_by(play: Play, k: int = 5) -> list[Row]:
    """The trainer's logits stand k places off the labels."""

    def change(step: int, t: np.ndarray, c: np.ndarray, mu: np.ndarray, pi: np.ndarray) -> tuple[Any, ...]:
        moved = np.roll(c, k, 1)
        return mu, play.score(play.logits(step), t, moved)

    return plain(play, change)


def neighbor(play: Play) -> list[Row]:
    """The record is shifted by one token."""
    return plain(play, lambda step, t, c, mu, pi: (np.concatenate([mu[:, :1], mu[:, :-1]], 1), pi))


def top_k_unlogged(play: Play, k: int = 6) -> list[Row]:
    """The engine draws among the k likeliest tokens and records log-probs over those; the trainer scores all."""
    rows = []
    for step in range(play.steps):
        z = play.engine(step)
        least = np.sort(z, -1)[:, -k][:, None]
        tokens, places, mu = play.step(np.where(z >= least, z, -1e9))
        rows += play.rows(step, mu, play.score(play.logits(step), tokens, places))
    return rows


def raw_record(play: Play, temperature: float = 0.7) -> list[Row]:
    """Drawn at a temperature, recorded before it; the trainer divides by it."""
    rows = []
    for step in range(play.steps):
        tokens, places, _ = play.step(play.engine(step) / temperature)
        mu = play.score(play.engine(step), tokens, places)
        rows += play.rows(step, mu, play.score(play.logits(step) / temperature, tokens, places))
    return rows


def coarse_record(play: Play) -> list[Row]:
    """Log-probs written with 8 bits of mantissa: bfloat16."""

    def change(step: int, t: np.ndarray, c: np.ndarray, mu: np.ndarray, pi: np.ndarray) -> tuple[Any, ...]:
        bits = mu.astype(np.float32).view(np.uint32)
        return ((bits + 0x8000) & 0xFFFF0000).astype(np.uint32).view(np.float32), pi

    return plain(play, change)


# -- one side has a setting that the other has not -----------------------------------------------------------------------


def engine_tempered(play: Play, temperature: float = 0.7) -> list[Row]:
    """The engine draws and records at a temperature that the trainer does not know."""
    rows = []
    for step in range(play.steps):
        tokens, places, mu = play.step(play.engine(step) / temperature)
        rows += play.rows(step, mu, play.score(play.logits(step), tokens, places))
    return rows


def trainer_tempered(play: Play, temperature: float = 0.7) -> list[Row]:
    return plain(play, lambda step, t, c, mu, pi: (mu, play.score(play.logits(step) / temperature, t, c)))


def presence_penalty(play: Play, size: float = 0.8) -> list[Row]:
    """What was drawn before is less likely, in the engine alone."""
    rows = []
    for step in range(play.steps):
        z = play.engine(step)
        tokens, places, mu = play.step(lambda t, at, seen, z=z: z[at] - size * seen)
        rows += play.rows(step, mu, play.score(play.logits(step), tokens, places), tokens=tokens)
    return rows


# -- somewhere in the response -------------------------------------------------------------------------------------------


def last_label(play: Play) -> list[Row]:
    def change(step: int, t: np.ndarray, c: np.ndarray, mu: np.ndarray, pi: np.ndarray) -> tuple[Any, ...]:
        wrong = t.copy()
        wrong[:, -1] = np.roll(t[:, 0], -1)
        return mu, play.score(play.logits(step), wrong, c)

    return plain(play, change)


def stop_token(play: Play) -> list[Row]:
    """The engine forces the end; its record of it is nearly certain."""

    def change(step: int, t: np.ndarray, c: np.ndarray, mu: np.ndarray, pi: np.ndarray) -> tuple[Any, ...]:
        mu = mu.copy()
        mu[:, -1] = -0.001
        return mu, pi

    return plain(play, change)


def garbage_at_the_limit(play: Play) -> list[Row]:
    """The last four places of responses at the limit, one in six, are wrong."""

    def change(step: int, t: np.ndarray, c: np.ndarray, mu: np.ndarray, pi: np.ndarray) -> tuple[Any, ...]:
        n = [
            play.length if i % 6 == 0 else int(play.g.integers(play.length // 3, play.length - 8))
            for i in range(len(mu))
        ]
        mu = [m[:k].copy() for m, k in zip(mu, n)]
        for m in mu:
            if len(m) == play.length:
                m[-4:] = -0.01 - 9 * play.g.random(4)
        return mu, [p[:k] for p, k in zip(pi, n)], {"truncated": [int(k == play.length) for k in n]}

    return plain(play, change)


def other_prompt(play: Play, size: float = 1.2) -> list[Row]:
    """The trainer sees another prompt; the difference fades."""

    def change(step: int, t: np.ndarray, c: np.ndarray, mu: np.ndarray, pi: np.ndarray) -> tuple[Any, ...]:
        fading = size * np.exp(-np.arange(play.length) / 12)[None, :, None]
        return mu, play.score(play.logits(step)[c] + fading * play.other[c], t, c)

    return plain(play, change)


def first_token(play: Play) -> list[Row]:
    """The boundary of prompt and response is off: the first token has another context."""

    def change(step: int, t: np.ndarray, c: np.ndarray, mu: np.ndarray, pi: np.ndarray) -> tuple[Any, ...]:
        wrong = c.copy()
        wrong[:, 0] = (c[:, 0] + 7) % play.contexts
        return mu, play.score(play.logits(step), t, wrong)

    return plain(play, change)


def beyond_a_place(play: Play, size: float = 0.7) -> list[Row]:
    """Two thirds into the longest response positions are scaled on one side."""
    place = 2 * play.length // 3

    def change(step: int, t: np.ndarray, c: np.ndarray, mu: np.ndarray, pi: np.ndarray) -> tuple[Any, ...]:
        on = (np.arange(play.length) >= place)[None, :, None]
        return mu, play.score(play.logits(step)[c] + size * on * play.other[c], t, c)

    return plain(play, change)


def cache_in_eight_bits(play: Play, size: float = 0.7) -> list[Row]:
    """Errors that add up along the response."""

    def change(step: int, t: np.ndarray, c: np.ndarray, mu: np.ndarray, pi: np.ndarray) -> tuple[Any, ...]:
        rising = (np.arange(play.length) / play.length)[None, :, None]
        noise = play.g.standard_normal((*t.shape, play.vocab))
        return mu, play.score(play.logits(step)[c] + size * rising * noise, t, c)

    return plain(play, change)


def later_turns(play: Play, size: float = 0.6) -> list[Row]:
    """Of three turns the later ones were tokenized again."""
    turn = np.arange(play.length) * 3 // play.length

    def change(step: int, t: np.ndarray, c: np.ndarray, mu: np.ndarray, pi: np.ndarray) -> tuple[Any, ...]:
        on = (turn > 0)[None, :, None]
        old = play.score(play.logits(step)[c] + size * on * play.other[c], t, c)
        return mu, old, {"turn_ids": [turn] * len(mu)}

    return plain(play, change)


# -- some of the sequences -----------------------------------------------------------------------------------------------


def one_worker(play: Play, column: str = "worker", size: float = 0.6) -> list[Row]:
    """One of four workers (or ranks, or environments) is off."""

    def change(step: int, t: np.ndarray, c: np.ndarray, mu: np.ndarray, pi: np.ndarray) -> tuple[Any, ...]:
        of = play.g.integers(0, 4, len(mu))
        bad = play.score(play.logits(step) + size * play.other, t, c)
        return mu, np.where((of == 2)[:, None], bad, pi), {column: [f"w{i}" for i in of]}

    return plain(play, change)


def some_rows(play: Play, share: float = 0.2) -> list[Row]:
    """A fifth of the rows hold another sequence's record."""

    def change(step: int, t: np.ndarray, c: np.ndarray, mu: np.ndarray, pi: np.ndarray) -> tuple[Any, ...]:
        bad = play.g.random(len(mu)) < share
        return np.where(bad[:, None], np.roll(mu, 1, 0), mu), pi

    return plain(play, change)


def tokenized_again(play: Play, share: float = 0.15) -> list[Row]:
    """In some responses the trainer's token ids differ from a place on."""

    def change(step: int, t: np.ndarray, c: np.ndarray, mu: np.ndarray, pi: np.ndarray) -> tuple[Any, ...]:
        place = np.where(play.g.random(len(mu)) < share, play.g.integers(0, play.length, len(mu)), play.length)
        behind = np.arange(play.length)[None] >= place[:, None]
        wrong = play.score(play.logits(step), t, np.where(behind, (c + 13) % play.contexts, c))
        return mu, np.where(behind, wrong, pi)

    return plain(play, change)


def claims_to_be_fresh(play: Play) -> list[Row]:
    """The engine is three updates behind, and the log claims lag 0."""
    rows = []
    play = Play(**sizes(play), rate=0.12)
    for step in range(2 * play.steps):
        tokens, places, mu = play.step(play.engine(max(0, step - 3)))
        rows += play.rows(step, mu, play.score(play.logits(step), tokens, places))
    return rows


def reused_prefix(play: Play, size: float = 0.6) -> list[Row]:
    """All responses to a prompt but the first read a prefix of old keys."""

    def change(step: int, t: np.ndarray, c: np.ndarray, mu: np.ndarray, pi: np.ndarray) -> tuple[Any, ...]:
        later = (np.arange(len(mu)) % 4 > 0)[:, None]
        bad = play.score(play.logits(step) + size * play.other, t, c)
        return mu, np.where(later, bad, pi)

    return plain(play, change)


# -- over the steps ------------------------------------------------------------------------------------------------------


def frozen(play: Play, lag: int | None = 0) -> list[Row]:
    """The engine keeps version 0; the log claims every synchronization, or has no versions."""
    rows = []
    play = Play(**sizes(play), rate=0.06)
    for step in range(2 * play.steps):
        tokens, places, mu = play.step(play.engine(0))
        rows += play.rows(step, mu, play.score(play.logits(step), tokens, places), lag=lag)
    return rows


def jump_at_sync(play: Play, lag: int | None = 0, still: bool = False) -> list[Row]:
    """From the third step on the engine holds other weights."""
    rows = []
    for step in range(play.steps):
        version = 0 if still else step
        z = play.engine(version) + (step >= 3) * 1.5 * play.other
        tokens, places, mu = play.step(z)
        more: Row = {"version": 0, "rollout_version": 0} if still else {}
        rows += play.rows(step, mu, play.score(play.logits(version), tokens, places), lag=lag, **more)
    return rows


def merged_twice(play: Play) -> list[Row]:
    """An adapter is added twice: the engine is always as far ahead as the policy has come."""
    rows = []
    play = Play(**sizes(play), rate=0.06)
    for step in range(2 * play.steps):
        tokens, places, mu = play.step(play.engine(2 * step))
        rows += play.rows(step, mu, play.score(play.logits(step), tokens, places))
    return rows


def rare_sync(play: Play, lag: int | None = None) -> list[Row]:
    """Weights are sent every six steps."""
    rows = []
    play = Play(**sizes(play), rate=0.12)
    for step in range(3 * play.steps):
        tokens, places, mu = play.step(play.engine(step - step % 6))
        told = None if lag is None else step % 6
        rows += play.rows(step, mu, play.score(play.logits(step), tokens, places), lag=told)
    return rows


def large_logged_lag(play: Play, size: float = 0.12) -> list[Row]:
    return constant_lag(Play(**sizes(play), rate=size), lag=8)


def dropout(play: Play, size: float = 0.4) -> list[Row]:
    """The trainer's own two forward passes differ, at the same weights."""

    def change(step: int, t: np.ndarray, c: np.ndarray, mu: np.ndarray, pi: np.ndarray) -> tuple[Any, ...]:
        noise = play.g.standard_normal((*t.shape, play.vocab))
        logp = play.score(play.logits(step)[c] + size * noise, t, c)
        return mu, pi, {"logp": [listed(x) for x in logp], "updates_before": 0}

    return plain(play, change)


def other_checkpoint(play: Play) -> list[Row]:
    """The engine loaded another checkpoint: apart everywhere and from the start."""
    rows = []
    for step in range(play.steps):
        tokens, places, mu = play.step(play.engine(step) + 0.9 * play.other)
        rows += play.rows(step, mu, play.score(play.logits(step), tokens, places))
    return rows


def sizes(play: Play) -> dict[str, int]:
    """The size of the log, for a policy of another kind."""
    return {name: getattr(play, name) for name in ("seed", "sequences", "length", "steps", "vocab", "contexts")}


OK: tuple[str, ...] = ("",)
"""No finding above watch."""
ASKS = (
    "no_versions_growing",
    "no_versions_jump",
    "no_versions_sawtooth",
    "no_versions_saturating",
    "engine_or_lag",
    "tempered_or_lag",
)

FAULTS: dict[str, tuple[Fault, tuple[str, ...]]] = {
    "clean": (clean, OK),
    "clean, no versions": (no_versions, OK),
    "clean, fp8": (fp8, OK),
    "clean, near greedy": (near_greedy, OK),
    "clean, heavy tail": (heavy_tail, OK),
    "clean, lag 4": (constant_lag, OK),
    "clean, sharpening at lag 6": (sharpening, OK),
    "clean, one step off, no versions": (one_step_off, OK),
    "clean, steps in any order": (shuffled_steps, OK),
    "clean, repeated rows": (repeated_rows, OK),
    "clean, entropy falls": (entropy_falls, OK),
    "clean, mixed lengths": (mixed_lengths, OK),
    "clean, one hole": (one_hole, OK),
    "clean, record in bfloat16": (coarse_record, OK),
    "most likely token recorded": (most_likely, ("record_or_support",)),
    "most likely token recorded, 3 in 10": (lambda p: most_likely(p, 0.3), ("record_or_support",)),
    "base two": (base_two, ("other_base",)),
    "records shuffled": (shuffled_records, ("misaligned",)),
    "five places off": (off_by, ("misaligned",)),
    "one place off": (neighbor, ("misaligned",)),
    "top-k 6, not logged": (top_k_unlogged, ("one_sided_filter",)),
    "raw record at temperature 0.7": (raw_record, ("raw_logprobs",)),
    "engine at temperature 0.7": (engine_tempered, ("untempered_trainer",)),
    "trainer at temperature 0.7": (trainer_tempered, ("tempered_trainer",)),
    "presence penalty": (presence_penalty, ("shape_seen",)),
    "last label of another sequence": (last_label, ("shape_last_token",)),
    "stop token": (stop_token, ("shape_last_token",)),
    "garbage at the limit": (garbage_at_the_limit, ("shape_end",)),
    "another prompt": (other_prompt, ("shape_beginning",)),
    "first token": (first_token, ("shape_first_tokens",)),
    "beyond a place": (beyond_a_place, ("shape_beyond",)),
    "cache in 8 bits": (cache_in_eight_bits, ("shape_grows",)),
    "later turns": (later_turns, ("shape_turns",)),
    "one worker": (one_worker, ("worker_apart", "shape_worker")),
    "one rank": (lambda p: one_worker(p, "rank"), ("shape_rank",)),
    "one environment": (lambda p: one_worker(p, "environment"), ("shape_environment",)),
    "some rows": (some_rows, ("shape_kinds",)),
    "tokenized again": (tokenized_again, ("shape_some",)),
    "three behind, lag 0 claimed": (claims_to_be_fresh, ("wrong_weights",)),
    "reused prefix": (reused_prefix, ("shape_group",)),
    "never delivered": (frozen, ("wrong_weights",)),
    "never delivered, no versions": (lambda p: frozen(p, None), ("no_versions_growing",)),
    "wrong weights from a sync on": (jump_at_sync, ("wrong_weights",)),
    "wrong weights from a sync on, no versions": (lambda p: jump_at_sync(p, None), ("no_versions_jump",)),
    "wrong weights at learning rate 0": (lambda p: jump_at_sync(p, None, still=True), ("wrong_weights",)),
    "adapter merged twice": (merged_twice, ("wrong_weights",)),
    "rare sync, no versions": (rare_sync, ("no_versions_sawtooth",)),
    "rare sync": (lambda p: rare_sync(p, 0), ("stale_engine",)),
    "large lag, logged": (large_logged_lag, ("stale_as_logged",)),
    "dropout": (dropout, ("trainer_not_repeating",)),
    "another checkpoint": (other_checkpoint, ("engines_apart", "engines_far_apart")),
}  # fmt: skip
"""By name, how the log is made, and which rules may stand first."""
