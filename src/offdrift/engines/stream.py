"""Responses in progress: prompts come at any time, tokens are drawn step by step, and weights change in between.

`Engine.generate` draws whole responses from one set of weights. A stream keeps responses in progress across weight
updates, as an asynchronous trainer needs: `submit`, `step` and `load_weights` in any order, from one thread. Every
`Delta` holds tokens of one version. What becomes of keys and values that old weights computed is the caller's choice:

- "recompute": the response so far is read again. Each token is drawn by the weights of its version and no others,
  as `rescore` at that version confirms. It costs one prefill per response.
- "keep": the old keys and values stay. Tokens behind the change are drawn by a mixture that no version has.

Responses of which nothing was read yet start with the new weights in either case.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from offdrift.engines import Engine
from offdrift.engines.generate import BaseEngine, Generation, Request, rollouts_from
from offdrift.errors import EngineError
from offdrift.records.provenance import Provenance, Sampling
from offdrift.records.rollouts import Evidence, EvidenceKind, Rollouts, Support, evidence_at, joined_evidence

Finish = Literal["stop", "length"]
Cache = Literal["recompute", "keep"]


@dataclass(frozen=True)
class DrawJob:
    """A response to draw."""

    key: str
    """Unique among responses in progress."""
    prompt: tuple[int, ...]
    seed: int
    """Of the response. On transformers, token t is drawn from a number that depends on (seed, t) alone."""
    before: tuple[int, ...] = ()
    """Response tokens drawn elsewhere or earlier: generation goes on behind them."""


@dataclass(frozen=True)
class Delta:
    """Tokens that a response got since the last step: `n` of one version."""

    key: str
    version: int
    """Of the weights that drew all of these tokens."""
    tokens: Int[Tensor, " n"]
    logp: Float[Tensor, " n"]
    evidence: Evidence | None
    finish: Finish | None
    """None: the response goes on."""
    support: Support | None = None
    """What the sampler's filters left over, where it filtered."""


@dataclass
class Response:
    """A response in progress: its tokens so far, `before` included."""

    job: DrawJob
    tokens: list[int]
    read: bool = False
    """Whether the engine holds keys and values of it."""
    finish: Finish | None = None

    def take(self, token: int, sampling: Sampling) -> None:
        """One more token, which may end it."""
        self.tokens.append(token)
        self.read = True
        if token in sampling.stop_token_ids:
            self.finish = "stop"
        elif len(self.tokens) >= sampling.max_tokens:
            self.finish = "length"


class Stream(ABC):
    """Responses in progress on one engine; a backend starts, forgets and advances them.

    An engine has at most one open stream. `sampling.max_tokens` counts whole responses, `before` included.
    """

    def __init__(self, engine: BaseEngine, sampling: Sampling, evidence: EvidenceKind) -> None:
        if engine.stream is not None:
            raise EngineError(f"engine {engine.name!r} has an open stream already; submit to it, or close it first")
        if engine.record_routes:
            raise EngineError(
                f"engine {engine.name!r} records routes, which streams do not; construct it without record_routes, or "
                "call generate"
            )
        if engine.provenance(sampling).eviction is not None:
            raise EngineError(
                f"engine {engine.name!r} compresses its KV cache, which streams do not; construct it without eviction, "
                "or call generate"
            )
        engine.check(Request([[0]], sampling, evidence))
        self.sampling = sampling
        self.evidence: EvidenceKind = evidence
        self._drawing: BaseEngine | None = engine
        self._responses: dict[str, Response] = {}
        self._cache: Cache | None = None
        engine.stream = self

    @property
    def engine(self) -> BaseEngine:
        """The engine that draws. Raises `EngineError` once the stream is closed."""
        if self._drawing is None:
            raise EngineError("the stream is closed; open another one with open_stream")
        return self._drawing

    @property
    def version(self) -> int:
        """Trainer version of the weights that draw the next token."""
        return self.engine.version

    @property
    def active(self) -> int:
        """Responses in progress."""
        return len(self._responses)

    @property
    def provenance(self) -> Provenance:
        """Provenance of these draws; `cache` is what happened at weight updates so far, "keep" if ever."""
        return replace(self.engine.provenance(self.sampling), cache=self._cache)

    def submit(self, jobs: Sequence[DrawJob]) -> None:
        """Begin these responses at the next step; all of them or, if one is refused, none.

        Raises: `EngineError` naming a key that is in progress already, a `before` that is a whole response, or a
            prompt or token that no engine should read (`check_request`).
        """
        engine, keys = self.engine, set(self._responses)
        for job in jobs:
            if job.key in keys:
                raise EngineError(
                    f"a response with key {job.key!r} is in progress already; give every job a key of its own, or "
                    "cancel the other one first"
                )
            keys.add(job.key)
            self._check_before(job, engine.vocab_size)
        if jobs:
            engine.check(Request([job.prompt for job in jobs], self.sampling, self.evidence))
            responses = {job.key: Response(job, list(job.before)) for job in jobs}
            try:
                self._start(list(responses.values()))
            except BaseException:
                self._forget(list(responses.values()))
                raise
            self._responses |= responses

    def step(self, steps: int = 1) -> list[Delta]:
        """Advance all responses by up to `steps` tokens.

        Returns: what each response got, of those that got any; those that ended are no longer in progress.
        """
        if steps < 1:
            raise EngineError(f"steps = {steps}, must be at least 1")
        version, deltas = self.version, []
        for responses, draws in self._advance(steps) if self._responses else ():
            start = 0
            for response, count in zip(responses, draws.lengths.tolist(), strict=True):
                # Copies: a slice would keep the draws of all responses in memory, and in every pickle.
                rows = torch.arange(start, start + count)
                evidence = None if draws.evidence is None else evidence_at(draws.evidence, rows)
                support = None if draws.support is None else draws.support.select(rows)
                key, finish, start = response.job.key, response.finish, start + count
                deltas.append(
                    Delta(
                        key,
                        version,
                        draws.tokens[rows],
                        logp=draws.logp[rows],
                        evidence=evidence,
                        finish=finish,
                        support=support,
                    )
                )
                if finish is not None:
                    del self._responses[key]
        return deltas

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int, cache: Cache = "recompute") -> None:
        """Take the trainer's `named_parameters`; responses in progress go on with them from their next token.

        Args:
            cache: what becomes of the keys and values that old weights computed; see the module's opening.

        Raises: `EngineError` as the engine's own `load_weights` does, or if the version is lower than that of the
            tokens in progress.
        """
        if cache not in ("recompute", "keep"):
            raise EngineError(f'cache = {cache!r}, must be "recompute" or "keep"')
        if self._responses and version < self.version:
            raise EngineError(
                f"version = {version} is lower than {self.version}, which responses in progress have tokens of; "
                "versions count optimizer steps. Cancel the responses first to go back"
            )
        reread = [r for r in self._responses.values() if cache == "recompute" or not r.read]
        if any(r.read for r in self._responses.values()) and self._cache != "keep":
            self._cache = cache
        self._forget(reread)
        try:
            self.engine.take_weights(weights, version=version)
        finally:
            for response in reread:
                response.read = False
            self._start(reread)

    def cancel(self, keys: Iterable[str]) -> None:
        """Forget these responses; tokens that were delivered stay so. A key that is not in progress changes nothing."""
        self._forget([r for key in dict.fromkeys(keys) if (r := self._responses.pop(key, None)) is not None])

    def close(self) -> None:
        """Forget all responses and free the engine for another stream. Idempotent."""
        if self._drawing is not None:
            self.cancel(list(self._responses))
            self._drawing.stream = None
            self._drawing = None

    def _check_before(self, job: DrawJob, vocab_size: int) -> None:
        before, sampling = job.before, self.sampling
        bad = next((t for t in before if not 0 <= t < vocab_size), None)
        if bad is not None:
            raise EngineError(f"`before` of {job.key!r} has token id {bad}, the vocabulary has {vocab_size}")
        if len(before) >= sampling.max_tokens:
            raise EngineError(
                f"`before` of {job.key!r} has {len(before)} tokens, and sampling.max_tokens = {sampling.max_tokens} "
                "counts them: the response is full. Do not submit it, or raise max_tokens"
            )
        end = next((i for i, t in enumerate(before) if t in sampling.stop_token_ids), None)
        if end is not None:
            raise EngineError(
                f"`before` of {job.key!r} ends with stop token {before[end]} at place {end}: the response is "
                "finished. Do not submit it"
            )

    @abstractmethod
    def _start(self, responses: Sequence[Response]) -> None:
        """Read prompts and tokens of these before their next token, with the weights of then."""

    @abstractmethod
    def _forget(self, responses: Sequence[Response]) -> None:
        """Free what is kept of these."""

    @abstractmethod
    def _advance(self, steps: int) -> list[tuple[list[Response], Generation]]:
        """Draw up to `steps` tokens of every response, and let it `take` them; draws in the order of the responses."""


@runtime_checkable
class Streams(Protocol):
    """An engine that can keep responses in progress."""

    def open_stream(self, sampling: Sampling, *, evidence: EvidenceKind = "sampled") -> Stream:
        """See `open_stream`."""
        ...


def open_stream(engine: Engine, sampling: Sampling, *, evidence: EvidenceKind = "sampled") -> Stream:
    """A stream of responses drawn by `engine`.

    Args:
        sampling: of all responses; `max_tokens` counts whole responses, `before` included.
        evidence: recorded at every token.

    Raises: `EngineError` if the engine has none, or has one open, or cannot draw so.

    Example:
        >>> from offdrift.engines.hf import TransformersEngine
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8,
        ...     num_hidden_layers=1, num_attention_heads=1)
        >>> stream = open_stream(TransformersEngine(LlamaForCausalLM(config)), Sampling(max_tokens=3))
        >>> stream.submit([DrawJob("a", prompt=(1, 2), seed=0), DrawJob("b", prompt=(3,), seed=1, before=(5, 6))])
        >>> [(d.key, len(d.tokens), d.finish) for d in stream.step(steps=2)]
        [('a', 2, None), ('b', 1, 'length')]
    """
    if not isinstance(engine, Streams):
        raise EngineError(
            f"engine {engine.name!r} keeps no responses in progress; use the transformers engine, or vLLM here"
        )
    return engine.open_stream(sampling, evidence=evidence)


def rollouts_of(jobs: Sequence[DrawJob], deltas: Mapping[str, Sequence[Delta]], provenance: Provenance) -> Rollouts:
    """One batch of finished responses, with the version of every token.

    Args:
        jobs: one per sequence, in order.
        deltas: by key, all of each response in order, whichever streams drew them.
        provenance: a stream's, whose `cache` must say how responses of several versions came about.

    Raises: `EngineError` naming a response that is not whole, whose versions fall, or that spans versions although
        `provenance.cache` is None; `ShapeError` if evidence differs in kind, or hidden states in their output head.
    """
    if not jobs:
        raise EngineError("jobs is empty; give at least one finished response")
    parts: list[Delta] = []
    lengths = []
    for job in jobs:
        job_deltas = deltas.get(job.key, ())
        _check_whole(job, job_deltas, provenance)
        parts += job_deltas
        lengths.append(sum(len(d.tokens) for d in job_deltas))
    evidence = [d.evidence for d in parts]
    recorded = [e for e in evidence if e is not None]
    draws = Generation(
        tokens=torch.cat([d.tokens for d in parts]),
        lengths=torch.tensor(lengths),
        logp=torch.cat([d.logp for d in parts]),
        evidence=joined_evidence(recorded) if recorded and len(recorded) == len(evidence) else None,
        support=Support.joined([d.support for d in parts]),
    )
    versions = torch.tensor([d.version for d in parts]).repeat_interleave(torch.tensor([len(d.tokens) for d in parts]))
    return rollouts_from([draws], [job.prompt for job in jobs], version=versions, provenance=provenance)


def _check_whole(job: DrawJob, deltas: Sequence[Delta], provenance: Provenance) -> None:
    ends = [d.finish is not None for d in deltas]
    if not deltas or not ends[-1] or any(ends[:-1]):
        what = "goes on behind its end" if any(ends[:-1]) else "has not finished"
        raise EngineError(f"response {job.key!r} {what}; give all of its deltas, once each and in order")
    begin = [t for d in deltas for t in d.tokens.tolist()][: len(job.before)]
    if begin != list(job.before):
        raise EngineError(
            f"the deltas of {job.key!r} do not begin with its `before`; give those of the streams that drew it, too"
        )
    versions = [d.version for d in deltas]
    for first, second in pairwise(versions):
        if second < first:
            raise EngineError(
                f"the version of response {job.key!r} falls from {first} to {second}; give its deltas in order"
            )
    if versions[0] != versions[-1] and provenance.cache is None:
        raise EngineError(
            f"response {job.key!r} spans versions {versions[0]} to {versions[-1]}, but provenance.cache is None; say "
            'whether load_weights was given cache = "recompute" or "keep"'
        )
