"""A tiny autoregressive policy that draws honestly, and the two sides that score what it drew (numpy only).

A state `h` of `width` numbers carries the context: `h <- norm(memory * R h + kick * E[token] + place)`. Two small layers, the
second of them optionally a mixture of experts, lead from the state to logits of `vocab` tokens. Token 0 ends a response.
Weights have versions: version `v` is `v` updates after the start, each a step along a fixed direction and one of its own.

An engine and a trainer are `Side`s: weights, rounding, and hooks on what they see and on their logits. Whoever draws from a
side and records that side's log-probs obeys `E[pi / mu] = 1` at every token, for any other side's `pi`, whatever the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Tokens = NDArray[np.int64]
END = 0
PLACES = 512


def log_softmax(logits: Array) -> Array:
    """Log-probs in nats, over the last axis; -inf stays -inf."""
    top = logits.max(-1, keepdims=True)
    shifted = logits - top
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def to_bfloat16(x: Array) -> Array:
    """Round to 8 significant bits, to nearest even."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32).astype(np.float64)


def to_float8(x: Array) -> Array:
    """Round to 4 significant bits with one scale per row, as e4m3 with per-channel scales does."""
    scale = np.abs(x).max(-1, keepdims=True) / 448.0 + 1e-30
    _, exponent = np.frexp(x / scale)
    exponent = np.maximum(exponent, -5)
    return np.ldexp(np.round(np.ldexp(x / scale, 4 - exponent)), exponent - 4) * scale


def exact(x: Array) -> Array:
    """Round nothing."""
    return x


@dataclass(frozen=True)
class Numerics:
    """Rounding of an engine: of its weights, of its states, and of its logits."""

    weights: Callable[[Array], Array] = exact
    states: Callable[[Array], Array] = exact
    logits: Callable[[Array], Array] = exact
    routing: float = 0.0
    """Standard deviation of the noise of router scores: which expert wins a near tie."""


FLOAT32 = Numerics()
BFLOAT16 = Numerics(to_bfloat16, to_bfloat16, to_bfloat16)
BFLOAT16_HEAD32 = Numerics(to_bfloat16, to_bfloat16)
FLOAT8 = Numerics(to_float8, to_bfloat16)


@dataclass
class Where:
    """Place of a walk, as hooks see it; arrays have a row per response."""

    step: int
    place: int
    """Place in the response, from 0; negative in the prompt."""
    rows: NDArray[np.int64]
    """Number of each response within its step."""
    worker: NDArray[np.int64]
    turn: NDArray[np.int64]
    prompt_length: NDArray[np.int64]
    seen: NDArray[np.int64]
    """Counts [n, vocab] of the tokens that each response holds so far."""
    generator: np.random.Generator


StateHook = Callable[[Array, Where], Array]
LogitHook = Callable[[Array, Where], Array]
Weights = dict[str, Array]


@dataclass
class Side:
    """An engine or a trainer: which weights it holds, and what it does to states and logits."""

    weights: Callable[[int, int], Weights]
    """Weights by step and worker."""
    numerics: Numerics = FLOAT32
    states: list[StateHook] = field(default_factory=list)
    logits: list[LogitHook] = field(default_factory=list)
    prefill: Callable[[int, int], Weights] | None = None
    """Weights that read the prompt by step and worker, where those are others: a cache that was kept."""
    places: Callable[[NDArray[np.int64], Where], NDArray[np.int64]] | None = None
    """Positions [n] that the side gives to tokens, from the true ones."""


@dataclass
class Walked:
    """Tokens of a step and what a side knows of them; arrays are [responses, places]."""

    tokens: Tokens
    logp: Array
    """Log-prob of the token after all hooks."""
    raw: Array
    """Log-prob before the hooks on logits (temperature, filters, penalties)."""
    top: Array
    """Log-prob of the most likely token, after hooks."""
    entropy: Array


class World:
    """The policy of a run and its updates.

    Args:
        seed: of weights, updates and tokens.
        vocab: tokens, the end included.
        width: numbers of the state.
        sharp: spread of logits; 1.5 is nearly uniform, 3 is like a tuned model, 9 is nearly greedy.
        rate: relative size of an update.
        drift: share of an update that repeats (a learning rate that is followed); the rest is new each time.
        sharpening: relative growth of logits per update, as reinforcement learning lowers entropy.
        memory: share of the state that stays; 0.9 remembers about 15 tokens.
        experts: of the second layer, two of which are active; 0: a dense layer.
        mean_length: responses end with a chance of about one over this at each place.
    """

    def __init__(
        self,
        seed: int,
        vocab: int = 64,
        width: int = 24,
        sharp: float = 3.0,
        rate: float = 0.006,
        drift: float = 0.5,
        sharpening: float = 0.0,
        memory: float = 0.9,
        experts: int = 0,
        mean_length: float = 40.0,
    ):
        self.generator = np.random.default_rng([seed, 1])
        self.seed, self.vocab, self.width, self.sharp, self.rate = seed, vocab, width, sharp, rate
        self.drift, self.sharpening, self.memory, self.experts = drift, sharpening, memory, experts
        self.hazard = np.log(1 / (mean_length - 1))
        g = np.random.default_rng([seed, 2])
        rotation, _ = np.linalg.qr(g.standard_normal((width, width)))
        hidden = 2 * width
        self.start: Weights = {
            "embed": g.standard_normal((vocab, width)),
            "rotate": rotation,
            "up": g.standard_normal((width, hidden)) / np.sqrt(width),
            "down": g.standard_normal((hidden, width)) / np.sqrt(hidden),
            "head": sharp * g.standard_normal((vocab, width)) / np.sqrt(width),
            "bias": 0.5 * g.standard_normal(vocab),
        }
        if experts:
            self.start["router"] = g.standard_normal((experts, width)) / np.sqrt(width)
            self.start["expert_up"] = g.standard_normal((experts, width, width)) / np.sqrt(width)
            self.start["expert_down"] = 0.6 * g.standard_normal((experts, width, width)) / np.sqrt(width)
        angles = np.arange(PLACES)[:, None] * (0.7 ** np.arange(width))[None]
        self.positions = 0.5 * np.where(np.arange(width) % 2, np.cos(angles), np.sin(angles))
        self.weights = lru_cache(maxsize=256)(self._weights)  # a cache per world

    def direction(self, update: int) -> Weights:
        """Random direction of one update, with the scale of the weights; -1: the one that repeats."""
        g = np.random.default_rng([self.seed, 3, update + 1])
        return {n: x.std() * g.standard_normal(x.shape) for n, x in self.start.items() if n != "rotate"}

    def _weights(self, version: int) -> Weights:
        """Weights after `version` updates."""
        if version <= 0:
            return self.start
        before = self.weights(version - 1)
        steady, new = self.direction(-1), self.direction(version)
        share = np.sqrt(1 - self.drift**2)
        after = dict(before)
        for name, step in steady.items():
            after[name] = before[name] + self.rate * (self.drift * step + share * new[name])
        after["head"] = after["head"] * (1 + self.sharpening)
        return after

    def advance(self, side: Side, weights: Weights, state: Array, token: Tokens, where: Where) -> tuple[Array, Array]:
        """Feed one token per row: the new state and the logits [n, vocab] of the next token, before hooks."""
        n = side.numerics
        # From the response's beginning, as relative positions are: a longer prompt moves nothing.
        position = np.full(len(token), where.place + 1 + PLACES // 4)
        if side.places is not None:
            position = side.places(position, where)
        mixed = self.memory * state @ weights["rotate"].T + 0.45 * weights["embed"][token]
        mixed = mixed + 0.2 * self.positions[position % PLACES]
        state = n.states(mixed / np.sqrt((mixed**2).mean(-1, keepdims=True) + 1e-6))
        for hook in side.states:
            state = hook(state, where)
        u = state + np.tanh(state @ weights["up"]) @ weights["down"]
        if self.experts:
            u = u + self._mixture(weights, u, n, where)
        u = n.states(u)
        u = u / np.sqrt((u**2).mean(-1, keepdims=True) + 1e-6)
        # Where the first state number is large the policy is sure: a few forks among many near-certain tokens.
        z = (u @ weights["head"].T + weights["bias"]) * np.exp(0.6 * np.tanh(2 * state[:, :1]))
        z = n.logits(z)
        rest = log_softmax(z[:, 1:])
        # Six more, so that likely tokens have positive logits, as in a real model: penalties scale them.
        return state, np.concatenate([self.hazard + 0.3 * np.tanh(z[:, :1] / 4), rest], -1) + 6.0

    def _mixture(self, weights: Weights, u: Array, n: Numerics, where: Where) -> Array:
        """Sum of the two experts that the router scores highest, by their softmax."""
        scores = u @ weights["router"].T
        if n.routing:
            scores = scores + n.routing * where.generator.standard_normal(scores.shape)
        chosen = np.argsort(-scores, -1)[:, :2]
        gate = np.exp(np.take_along_axis(scores, chosen, -1))
        gate = gate / gate.sum(-1, keepdims=True)
        added = np.zeros_like(u)
        for k in range(2):
            inner = np.tanh(np.einsum("nd,nde->ne", u, weights["expert_up"][chosen[:, k]]))
            added += gate[:, k : k + 1] * np.einsum("nd,nde->ne", inner, weights["expert_down"][chosen[:, k]])
        return added

    def walk(
        self,
        side: Side,
        step: int,
        prompts: list[list[int]],
        worker: NDArray[np.int64],
        turn: NDArray[np.int64],
        *,
        feed: Tokens | None = None,
        labels: Tokens | None = None,
        given: Tokens | None = None,
        generator: np.random.Generator | None = None,
    ) -> Walked:
        """Draw responses, or score given ones.

        Args:
            prompts: token ids of each row's prompt.
            turn: [n, places] turn of each place.
            feed, labels: what a scoring side reads as the response, and whose log-probs it returns; both None: draw.
            given: tokens [n, places] that an environment writes while drawing, -1 where the policy does.
            generator: of the drawing and of hooks that draw; the world's own by default.
        """
        g = generator or self.generator
        places = turn.shape[1]
        n = len(prompts)
        rows = np.arange(n)
        by_worker, reading = self._loaded(side, side.weights, step, worker), None
        if side.prefill is not None:
            reading = self._loaded(side, side.prefill, step, worker)
        lengths = np.array([len(p) for p in prompts])
        where = Where(step, 0, rows, worker, turn[:, 0], lengths, np.zeros((n, self.vocab), np.int64), g)
        state, logits = self._prefill(side, reading or by_worker, prompts, where)
        out = Walked(*(np.zeros((n, places), t) for t in (np.int64, float, float, float, float)))
        for i in range(places):
            where.place, where.turn = i, turn[:, i]
            processed = logits
            for hook in side.logits:
                processed = hook(processed, where)
            logp = log_softmax(processed)
            if labels is None:
                u = g.random((n, 1)) * (1 - 1e-12)
                cumulative = np.exp(logp).cumsum(-1)
                token = np.minimum((cumulative <= u * cumulative[:, -1:]).sum(-1), self.vocab - 1)
                if given is not None:
                    token = np.where(given[:, i] >= 0, given[:, i], token)
            else:
                token = labels[:, i]
            p = np.exp(logp)
            out.tokens[:, i] = token
            out.logp[:, i], out.raw[:, i] = logp[rows, token], log_softmax(logits)[rows, token]
            out.top[:, i] = logp.max(-1)
            out.entropy[:, i] = -(p * np.where(p > 0, logp, 0.0)).sum(-1)
            where.seen[rows, token] += 1
            read = token if feed is None else feed[:, i]
            state, logits = self._by_worker(side, by_worker, state, read, where)
        return out

    def _loaded(
        self, side: Side, weights: Callable[[int, int], Weights], step: int, worker: NDArray[np.int64]
    ) -> list[tuple[NDArray[np.bool_], Weights]]:
        """Which rows hold which weights, rounded; workers that hold the same are taken together."""
        found: dict[int, tuple[NDArray[np.bool_], Weights]] = {}
        for w in np.unique(worker):
            held = weights(step, int(w))
            mine = worker == w
            before = found.get(id(held))
            found[id(held)] = (mine if before is None else mine | before[0], held)
        return [(mine, {n: side.numerics.weights(x) for n, x in held.items()}) for mine, held in found.values()]

    def _prefill(
        self, side: Side, by_worker: list[tuple[NDArray[np.bool_], Weights]], prompts: list[list[int]], where: Where
    ) -> tuple[Array, Array]:
        longest = max(len(p) for p in prompts)
        padded = np.array([[0] * (longest - len(p)) + list(p) for p in prompts], np.int64)
        state, logits = np.zeros((len(prompts), self.width)), np.zeros((len(prompts), self.vocab))
        for i in range(longest):
            where.place = i - longest
            moved, found = self._by_worker(side, by_worker, state, padded[:, i], where)
            real = (i >= longest - where.prompt_length)[:, None]
            state, logits = np.where(real, moved, state), np.where(real, found, logits)
        return state, logits

    def _by_worker(
        self, side: Side, by_worker: list[tuple[NDArray[np.bool_], Weights]], state: Array, token: Tokens, where: Where
    ) -> tuple[Array, Array]:
        if len(by_worker) == 1:
            return self.advance(side, by_worker[0][1], state, token, where)
        moved, logits = np.empty_like(state), np.empty((len(state), self.vocab))
        for mine, weights in by_worker:
            a, b = self.advance(side, weights, state, token, where)
            moved[mine], logits[mine] = a[mine], b[mine]
        return moved, logits
