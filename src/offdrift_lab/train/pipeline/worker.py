"""A rollout worker: an engine in a process of its own, which draws a few tokens of every response per call.

The driver sends orders with each call, and gets what was drawn. Weights change between steps only, so that all tokens
of a step have one version. A worker keeps no record of what it has delivered: the driver does, so that a lost worker
takes no delivered token with it.
"""

from __future__ import annotations

import os
import socket
import time
import warnings
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import ray
import torch
from torch import Tensor

from offdrift.engines import Engine, make_engine
from offdrift.engines.cluster import Node, this_node
from offdrift.engines.stream import Cache, Delta, DrawJob, Stream, open_stream
from offdrift.errors import EngineError, SyncError
from offdrift.records.provenance import Provenance, Sampling
from offdrift.records.rollouts import Evidence, EvidenceKind, Rollouts, Support, evidence_at, joined_evidence
from offdrift_lab.train.pipeline.scoring import RewardSpec, Score, Scored


@dataclass(frozen=True)
class EngineSpec:
    """The engine that every worker makes."""

    kind: str
    model: str
    """Checkpoint folder, as an absolute path: workers of a cluster are started elsewhere."""
    options: Mapping[str, Any]
    sampling: Sampling
    evidence: EvidenceKind
    rewards: RewardSpec | None = None
    """Those that workers compute, if they do."""


class Draw(NamedTuple):
    """Begin a response, or go on behind its prefix; give it back after `limit` tokens, if it has not ended."""

    job: DrawJob
    limit: int | None = None


class Forget(NamedTuple):
    """Drop responses in progress."""

    keys: tuple[str, ...]


class Published(NamedTuple):
    """Weights in Ray's object store."""

    reference: Any
    """In a tuple as it is here, it is fetched by the worker, in its own time."""
    fingerprint: int
    """See `fingerprint`."""
    nbytes: int


class TakeWeights(NamedTuple):
    """Load weights; responses in progress go on with them, or, if `beside`, on the old ones in a second engine."""

    version: int
    weights: Published
    beside: bool
    cache: Cache


Order = Draw | Forget | TakeWeights | Score


class Started(NamedTuple):
    """A worker that has started."""

    pid: int
    provenance: Provenance
    """What records say of the engine's draws."""
    node: Node
    """The machine that it is on."""


class Report(NamedTuple):
    """Result of one call of `advance`. Tokens of all responses are packed: a few tensors travel faster than many."""

    keys: tuple[str, ...]
    counts: tuple[int, ...]
    versions: tuple[int, ...]
    ends: tuple[str | None, ...]
    """"stop", "length", "slice" for one given back, None for one that goes on."""
    tokens: Tensor | None
    logp: Tensor | None
    evidence: Evidence | None
    support: Support | None
    loaded: tuple[int, ...]
    """Versions that were loaded."""
    generation_seconds: float
    load_seconds: float
    rewards: tuple[Scored, ...] = ()
    """Those that were ordered with the call."""
    reward_seconds: float = 0.0

    def deltas(self) -> Iterable[Delta]:
        """New tokens of each response."""
        if self.tokens is None or self.logp is None:
            return
        counts, start = list(self.counts), 0
        # Copies: a view would keep the draws of all responses in memory.
        columns = (x.clone() for x in self.tokens.split(counts)), (x.clone() for x in self.logp.split(counts))
        for key, version, end, count, tokens, logp in zip(
            self.keys, self.versions, self.ends, counts, *columns, strict=True
        ):
            evidence, support = self.evidence, self.support
            if evidence is not None or support is not None:
                rows = torch.arange(start, start + count)
                evidence = None if evidence is None else evidence_at(evidence, rows)
                support = None if support is None else support.select(rows)
            start += count
            finish: Any = None if end == "slice" else end
            yield Delta(key, version, tokens, logp=logp, evidence=evidence, finish=finish, support=support)


class RolloutWorker:
    """An engine behind orders; Ray makes an actor of it."""

    def __init__(self, spec: EngineSpec, threads: int) -> None:
        torch.set_num_threads(threads)
        if not Path(spec.model).is_dir():
            raise EngineError(
                f"the node {socket.gethostname()} has no folder {spec.model}, from which a rollout worker loads the "
                "model; give an --out that all machines of the cluster share under the same path"
            )
        self.spec = spec
        self.engine: Any = self._engine()
        self._rewards = None if spec.rewards is None else spec.rewards.find()
        self._streams: list[Stream] = []  # the one with the newest weights last
        self._left: dict[str, int] = {}  # tokens that a response may still get in its slice

    def ready(self) -> Started:
        """Process id, provenance and node of a worker that can take orders."""
        return Started(os.getpid(), self.engine.provenance(self.spec.sampling), this_node())

    def advance(self, orders: Sequence[Order], steps: int) -> Report:
        """Carry out orders, then draw up to `steps` tokens of every response in progress, then compute rewards."""
        loaded, load_seconds = [], 0.0
        for order in orders:
            if isinstance(order, Forget):
                self._forget(order.keys)
            elif isinstance(order, TakeWeights):
                load_seconds += self._take(order)
                loaded.append(order.version)
            elif isinstance(order, Draw):
                self._newest.submit([order.job])
                if order.limit is not None:
                    self._left[order.job.key] = order.limit
        begin, deltas = time.perf_counter(), []
        steps = min([steps, *self._left.values()])
        for stream in self._streams:
            if stream.active:
                deltas += stream.step(steps)
        ends = [self._end(delta) for delta in deltas]
        self._let_go()
        seconds = time.perf_counter() - begin if deltas else 0.0
        rewards, reward_seconds = self._scored(orders)
        evidence = [d.evidence for d in deltas if d.evidence is not None]
        return Report(
            tuple(d.key for d in deltas),
            tuple(len(d.tokens) for d in deltas),
            tuple(d.version for d in deltas),
            ends=tuple(ends),
            tokens=torch.cat([d.tokens for d in deltas]) if deltas else None,
            logp=torch.cat([d.logp for d in deltas]) if deltas else None,
            evidence=joined_evidence(evidence) if evidence else None,
            support=Support.joined([d.support for d in deltas]),
            loaded=tuple(loaded),
            generation_seconds=seconds,
            load_seconds=load_seconds,
            rewards=rewards,
            reward_seconds=reward_seconds,
        )

    def start_over(self) -> None:
        """Drop all responses in progress: another run of the driver begins."""
        for stream in self._streams:
            engine: Any = stream.engine
            stream.close()
            if engine is not self.engine:
                engine.close()
        self._streams, self._left = [], {}

    def generate(self, prompts: list[list[int]], sampling: Sampling, seed: int, evidence: EvidenceKind) -> Rollouts:
        """Whole responses, while none is in progress: for checks of the engine."""
        return self.engine.generate(prompts, sampling, seed=seed, evidence=evidence)

    def load_weights(self, weights: Mapping[str, np.ndarray], version: int) -> None:
        """Weights while no response is in progress: for checks of the engine."""
        self.engine.load_weights(unpacked(weights), version=version)

    @property
    def _newest(self) -> Stream:
        if not self._streams:
            self._streams = [open_stream(self.engine, self.spec.sampling, evidence=self.spec.evidence)]
        return self._streams[-1]

    def _engine(self) -> Engine:
        return make_engine(self.spec.kind, self.spec.model, **self.spec.options)

    def _take(self, order: TakeWeights) -> float:
        """Load weights; the seconds that it took. Raises: `SyncError` if they are not the published ones."""
        begin = time.perf_counter()
        arrays: Any = ray.get(order.weights.reference)
        if fingerprint(arrays, order.version) != order.weights.fingerprint:
            raise SyncError(
                f"what a rollout worker received as the weights of version {order.version} is not what the trainer "
                "published as them, so nothing was drawn by it; continue with --resume, and if it happens again look "
                "for a defect of memory or network on the worker's machine"
            )
        if order.beside and self._newest.active:
            self._streams.append(open_stream(self._engine(), self.spec.sampling, evidence=self.spec.evidence))
            self.engine = self._newest.engine
        self._newest.load_weights(unpacked(arrays), version=order.version, cache=order.cache)
        return time.perf_counter() - begin

    def _scored(self, orders: Sequence[Order]) -> tuple[tuple[Scored, ...], float]:
        """Rewards that were ordered, and the seconds that they took."""
        begin, scored = time.perf_counter(), []
        for order in (o for o in orders if isinstance(o, Score)):
            assert self._rewards is not None
            scored.append(Scored(order.group, order.attempt, self._rewards(order.completions, order.problems)))
        return tuple(scored), time.perf_counter() - begin if scored else 0.0

    def _forget(self, keys: Sequence[str]) -> None:
        for stream in self._streams:
            stream.cancel(keys)
        for key in keys:
            self._left.pop(key, None)

    def _end(self, delta: Delta) -> str | None:
        """Reason why a response ended, None while it goes on; one whose slice is used up is given back ("slice")."""
        if delta.key not in self._left:
            return delta.finish
        self._left[delta.key] -= len(delta.tokens)
        if delta.finish is None and self._left[delta.key] > 0:
            return None
        self._forget([delta.key])
        return delta.finish or "slice"

    def _let_go(self) -> None:
        """Free engines of old versions that have nothing left to draw."""
        for stream in [s for s in self._streams[:-1] if not s.active]:
            engine: Any = stream.engine
            stream.close()
            engine.close()
            self._streams.remove(stream)


def packed(weights: Iterable[tuple[str, Tensor]]) -> dict[str, np.ndarray]:
    """Weights by name, as arrays on the host, which workers on one machine read without a copy; 16-bit as integers."""
    result = {}
    for name, weight in weights:
        host = weight.detach().cpu()
        result[name] = (host.view(torch.int16) if host.dtype == torch.bfloat16 else host).numpy()
    return result


def published(weights: Iterable[tuple[str, Tensor]], version: int) -> Published:
    """Put the trainer's weights where workers take them from."""
    arrays = packed(weights)
    return Published(ray.put(arrays), fingerprint(arrays, version), sum(a.nbytes for a in arrays.values()))


def fingerprint(arrays: Mapping[str, np.ndarray], version: int) -> int:
    """A checksum of a version's number and, by name, of every tensor: the sum of its 64-bit words modulo 2^64.

    Adding reads memory about as fast as it can be read. The sum does not notice words that have changed places.
    """
    sums = {}
    for name, array in arrays.items():
        content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        words = len(content) // 8 * 8
        rest = int.from_bytes(content[words:].tobytes(), "little")
        sums[name] = int(content[:words].view(np.uint64).sum()) + rest
    return zlib.crc32(repr((version, sums)).encode())


def unpacked(weights: Mapping[str, np.ndarray]) -> Iterable[tuple[str, Tensor]]:
    """The inverse of `packed`; engines copy what they take."""
    for name, array in weights.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the arrays are read-only, and nobody writes
            tensor = torch.from_numpy(array)
        yield name, tensor.view(torch.bfloat16) if array.dtype == np.int16 else tensor
