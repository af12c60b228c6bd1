"""Responses in progress on a transformers model: cohorts that are read together, then advance a token a step.

Cohorts whose caches allow it become one as soon as they have been read, so that a step is one forward pass however
often prompts arrive. Token t of a response is drawn from a uniform number of (seed, t), so that a response
continued elsewhere with the same weights gets the same tokens, up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Protocol, cast

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from offdrift.divergence.head import Head
from offdrift.engines.generate import BaseEngine, Generation, pieces
from offdrift.engines.hf_decode import DrawRecorder, Forward, InPlaceLayer, cache_of, filters_of, inverted, left_padded
from offdrift.engines.output_head import head_input
from offdrift.engines.stream import Response, Stream
from offdrift.records.provenance import Sampling
from offdrift.records.rollouts import EvidenceKind


class Transformers(Protocol):
    """The parts of a transformers engine that a stream uses; see `engines.hf`, which opens it."""

    model: PreTrainedModel
    batch_size: int

    def head(self) -> Head: ...
    def checked(self, draws: Generation, sampling: Sampling) -> Generation: ...


class TransformersStream(Stream):
    """See `engines.stream`."""

    def __init__(self, engine: BaseEngine, sampling: Sampling, evidence: EvidenceKind) -> None:
        super().__init__(engine, sampling, evidence)
        self._hf = cast("Transformers", engine)
        self._waiting: list[Response] = []
        self._cohorts: list[_Cohort] = []

    def _start(self, responses: Sequence[Response]) -> None:
        self._waiting += responses

    def _forget(self, responses: Sequence[Response]) -> None:
        keys = {response.job.key for response in responses}
        self._waiting = [r for r in self._waiting if r.job.key not in keys]
        for cohort in self._cohorts:
            cohort.keep([i for i, r in enumerate(cohort.responses) if r.job.key not in keys])
        self._cohorts = [cohort for cohort in self._cohorts if cohort.responses]

    @torch.no_grad()
    def _advance(self, steps: int) -> list[tuple[list[Response], Generation]]:
        engine, hidden = self._hf, self.evidence == "hidden"
        head = engine.head() if hidden else None
        fresh = [self._waiting[p] for p in pieces(len(self._waiting), engine.batch_size)]
        self._waiting = []
        self._cohorts = _joined(self._cohorts, engine.batch_size)
        self._cohorts += [_Cohort(engine.model, responses, self.sampling) for responses in fresh]
        result = []
        with head_input(engine.model) if hidden else nullcontext() as consumed:
            for cohort in self._cohorts:
                recorder = DrawRecorder(self.evidence, head, consumed, filtered=self.sampling.filtered)
                responses, draws = cohort.advance(steps, recorder)
                result.append((responses, engine.checked(draws, self.sampling) if hidden else draws))
        self._cohorts = [cohort for cohort in self._cohorts if cohort.responses]
        return result


def response_numbers(seed: int, count: int) -> Float[Tensor, " t"]:
    """A uniform number for every token of a response; the first ones do not depend on `count`."""
    return torch.from_numpy(np.random.default_rng(seed % 2**64).random(count))


class _Cohort:
    """Responses whose keys and values stand in one cache, flush right.

    `ids` are the tokens that the next forward pass reads: prompts and tokens at first, then the tokens drawn last.
    """

    def __init__(self, model: PreTrainedModel, responses: list[Response], sampling: Sampling) -> None:
        self.model, self.responses, self.sampling = model, list(responses), sampling
        texts = [(*r.job.prompt, *r.tokens) for r in responses]
        # Each text is read once, however many responses continue it.
        number: dict[tuple[int, ...], int] = {}
        source = [number.setdefault(text, len(number)) for text in texts]
        self.source = torch.tensor(source, device=model.device) if len(number) < len(texts) else None
        self.ids, self.mask = left_padded(list(number), model.device)
        self.forward = Forward(model, cache_of(model, self.ids.shape[1] + sampling.max_tokens))
        self.uniforms = torch.stack([response_numbers(r.job.seed, sampling.max_tokens) for r in responses])
        self.uniforms = self.uniforms.to(model.device)

    def advance(self, steps: int, recorder: DrawRecorder) -> tuple[list[Response], Generation]:
        """Draw up to `steps` tokens of every response; those that end leave."""
        before, filters = list(self.responses), filters_of(self.sampling)
        lengths = torch.tensor([len(r.tokens) for r in before])
        rows = torch.arange(len(before), device=self.model.device)
        for _ in range(steps):
            places = (self.mask.cumsum(1) - 1)[:, -self.ids.shape[1] :]
            scores, state = self.forward(self.ids, self.mask, places).float(), recorder.state()
            if self.source is not None:
                self.forward.cache.reorder_cache(self.source)  # type: ignore[arg-type]
                scores, state = scores[self.source], None if state is None else state[self.source]
                self.mask, self.source = self.mask[self.source], None
            for apply in filters:
                scores = apply(None, scores)
            logp = scores.log_softmax(-1)
            place = torch.tensor([len(r.tokens) for r in self.responses], device=rows.device)
            next_tokens = inverted(logp, self.uniforms.gather(1, place[:, None]).squeeze(1))
            recorder.add(logp, next_tokens, rows, state)
            for response, token in zip(self.responses, next_tokens.tolist(), strict=True):
                response.take(token, self.sampling)
            self.ids = next_tokens[:, None]
            self.mask = torch.cat([self.mask, self.mask.new_ones(len(next_tokens), 1)], 1)
            rows = rows[self.keep([i for i, r in enumerate(self.responses) if r.finish is None])]
            if not self.responses:
                break
        return before, recorder.draws(torch.tensor([len(r.tokens) for r in before], device=rows.device) - lengths)

    def keep(self, places: list[int]) -> Tensor:
        """Let go of all responses but these; their places as a tensor."""
        rows = torch.tensor(places, dtype=torch.int64, device=self.ids.device)
        if len(places) < len(self.responses):
            self.responses = [self.responses[i] for i in places]
            self.ids, self.mask, self.uniforms = self.ids[rows], self.mask[rows], self.uniforms[rows]
            if places:
                self.forward.cache.reorder_cache(rows)  # type: ignore[arg-type]
        return rows


def _joined(cohorts: Sequence[_Cohort], limit: int) -> list[_Cohort]:
    """Join responses into fewer cohorts of at most `limit` each, where all layers keep plain keys and values."""
    result: list[_Cohort] = []
    for cohort in cohorts:
        into = result[-1] if result else None
        if (
            into is not None
            and len(into.responses) + len(cohort.responses) <= limit
            and _plain(into)
            and _plain(cohort)
        ):
            _absorb(into, cohort)
        else:
            result.append(cohort)
    return result


def _plain(cohort: _Cohort) -> bool:
    return all(isinstance(layer, InPlaceLayer) and layer.is_initialized for layer in cohort.forward.cache.layers)


def _absorb(cohort: _Cohort, other: _Cohort) -> None:
    """Put the responses of the other cohort behind those of `cohort`, all flush right, without columns of padding."""
    parts = (cohort, other)
    blank = [int(c.mask.any(0).long().argmax()) for c in parts]  # columns that nobody reads any more
    width = max(c.mask.shape[1] - b for c, b in zip(parts, blank))

    def aligned(tensors: Sequence[Tensor], columns: int, behind: int) -> Tensor:
        """Rows of both, `behind` dimensions behind the columns."""
        cut = [x.narrow(-1 - behind, b, x.shape[-1 - behind] - b) for x, b in zip(tensors, blank)]
        return torch.cat(
            [pad(x, (*(0, 0) * behind, columns - x.shape[-1 - behind], 0)) for x in cut],
        )

    cache = cache_of(cohort.model, width + cohort.sampling.max_tokens)
    for new, *old in zip(cache.layers, *(c.forward.cache.layers for c in parts), strict=True):
        # The last column of the mask is that of the token that is to be read next.
        keys, values = (aligned([getattr(layer, name) for layer in old], width - 1, 1) for name in ("keys", "values"))
        new.update(keys, values)
    cohort.mask = aligned([c.mask for c in parts], width, 0)
    cohort.forward = Forward(cohort.model, cache)
    cohort.responses += other.responses
    cohort.ids, cohort.uniforms = (torch.cat([getattr(c, name) for c in parts]) for name in ("ids", "uniforms"))
