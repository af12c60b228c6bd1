"""Decoding with a transformers model: one forward pass per token, over what is still being written.

- A prompt that several responses continue is read once; its keys and values are copied to each of them.
- A response that has ended leaves the batch, so that no step computes what nobody reads.
- Keys and values are written in place, into room that doubles when it is full.
- Every response draws from uniform numbers of its own, so its tokens depend on what else is in the batch
  only by rounding.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers.cache_utils import DynamicLayer

from offdrift.divergence.head import Head
from offdrift.engines.generate import Draws, Request, Tokens
from offdrift.engines.output_head import HeadInput
from offdrift.records.rollouts import Evidence, EvidenceKind, FullVocab, HiddenStates, Sampling, TopK

PAD = 0
"""Padding id. Lengths say which tokens are real, so any id will do."""

KEPT_SHARE = 0.75
"""Ended responses leave the batch once at most this share of it is still being written."""

CHECK_EVERY = {"cpu": 1}
"""Steps between looks at which responses have ended; on an accelerator each look waits for the device."""
CHECK_EVERY_ELSEWHERE = 16


class InPlaceLayer(DynamicLayer):
    """Keys and values of a layer, written in place into room that doubles as responses grow.

    Memory: at most twice what is kept, and never more than `capacity` tokens per response.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity, self.length = capacity, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self._room = [x.new_empty(*x.shape[:2], 0, x.shape[3]) for x in (key_states, value_states)]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """All keys and values so far, the new ones behind the others."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        begin, self.length = self.length, self.length + key_states.shape[-2]
        if self.length > self._room[0].shape[2]:
            places = max(self.length, min(2 * self.length, self.capacity))
            for i, room in enumerate(self._room):
                self._room[i] = room.new_empty(*room.shape[:2], places, room.shape[3])
                self._room[i][:, :, :begin] = room[:, :, :begin]
        for room, new in zip(self._room, (key_states, value_states), strict=True):
            room[:, :, begin : self.length] = new
        self.keys, self.values = (room[:, :, : self.length] for room in self._room)
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """The cache of these rows, in this order; a row may be named several times."""
        if not self.is_initialized:
            return
        for i, room in enumerate(self._room):
            rows = room.new_empty(len(beam_idx), *room.shape[1:])
            rows[:, :, : self.length] = room[beam_idx, :, : self.length]
            self._room[i] = rows
        self.keys, self.values = (room[:, :, : self.length] for room in self._room)


class Recorder:
    """What is known of every drawn token, step by step: its log-prob and the evidence asked for.

    Full evidence keeps a row of the vocabulary per token, top-k evidence its k largest entries, hidden evidence what
    the head consumed.
    """

    def __init__(self, evidence: EvidenceKind, head: Head | None = None, consumed: HeadInput | None = None) -> None:
        self.evidence, self.head, self.consumed = evidence, head, consumed
        self.steps: list[dict[str, Tensor]] = []

    def state(self) -> Float[Tensor, "a d"] | None:
        """What the head consumed at the last place of every response."""
        last = None if self.consumed is None else self.consumed.last
        return None if last is None else last[:, -1].clone()

    def add(self, logp: Float[Tensor, "a v"], drawn: Int[Tensor, " a"], rows: Int[Tensor, " a"], state: Tensor | None):
        """One step: the tempered and filtered log-probs of the responses `rows`, and the tokens drawn from them."""
        step = {"rows": rows, "tokens": drawn, "logp": logp.gather(1, drawn[:, None]).squeeze(1)}
        if self.evidence == "full":
            step["evidence"] = logp
        elif isinstance(self.evidence, int):
            top = logp.topk(self.evidence, dim=-1)
            step |= {"evidence": top.values, "ids": top.indices.int()}
        elif state is not None:
            step["evidence"] = state
        self.steps.append(step)

    def draws(self, lengths: Int[Tensor, " b"]) -> Draws:
        """What was drawn, packed: of every response its first `lengths` tokens."""
        rows = torch.cat([step["rows"] for step in self.steps])
        number = torch.cat([torch.full_like(step["rows"], i) for i, step in enumerate(self.steps)])
        order = (rows * len(self.steps) + number).argsort()
        order = order[(number < lengths[rows])[order]]

        def packed(name: str) -> Tensor:
            return torch.cat([step[name] for step in self.steps])[order].cpu()

        evidence: Evidence | None = None
        if isinstance(self.evidence, int):
            evidence = TopK(packed("ids"), packed("evidence"))
        elif self.head is not None:
            evidence = HiddenStates(packed("evidence"), self.head)
        elif self.evidence == "full":
            evidence = FullVocab(packed("evidence"))
        return Draws(packed("tokens"), lengths.cpu(), packed("logp"), evidence)


@torch.no_grad()
def decode(model: PreTrainedModel, request: Request, recorder: Recorder, uniforms: Float[Tensor, "b t"]) -> Draws:
    """One response per prompt: tokens drawn at `uniforms`, or those of `request.forced` (teacher forcing)."""
    device, sampling, forced = model.device, request.sampling, request.forced
    count, filters = len(request.prompts), _filters(sampling)
    lengths = torch.full((count,), sampling.max_tokens, device=device)
    stops = torch.tensor(sampling.stop_token_ids, dtype=torch.long, device=device)
    uniforms, given = uniforms.to(device), None
    if forced is not None:
        given, lengths = right_padded(forced, device)
        stops = stops[:0]
    steps = int(lengths.max())
    check_every = CHECK_EVERY.get(device.type, CHECK_EVERY_ELSEWHERE)
    # Each prompt once; the response i continues prompt `source[i]`.
    number: dict[tuple[int, ...], int] = {}
    source = torch.tensor([number.setdefault(tuple(p), len(number)) for p in request.prompts], device=device)
    ids, mask = left_padded(list(number), device)
    cache = _cache(model, ids.shape[1] + steps)
    forward = _Forward(model, cache)
    scores = forward(ids, mask, mask.cumsum(1) - 1)
    state = recorder.state()
    if len(number) < count:
        cache.reorder_cache(source)  # type: ignore[arg-type]
        scores, mask, state = scores[source], mask[source], None if state is None else state[source]
    rows = torch.arange(count, device=device)
    for step in range(steps):
        scores = scores.float()
        for apply in filters:
            scores = apply(None, scores)
        logp = scores.log_softmax(-1)
        drawn = given[rows, step] if given is not None else inverted(logp, uniforms[rows, step])
        recorder.add(logp, drawn, rows, state)
        ended = torch.isin(drawn, stops)
        lengths[rows] = lengths[rows].where(~ended, lengths[rows].clamp(max=step + 1))
        if step + 1 == steps:
            break
        if (step + 1) % check_every == 0:
            alive = (lengths[rows] > step + 1).nonzero().squeeze(1)
            if len(alive) == 0:
                break
            if len(alive) <= KEPT_SHARE * len(rows):
                cache.reorder_cache(alive)  # type: ignore[arg-type]
                rows, mask, drawn = rows[alive], mask[alive], drawn[alive]
        mask = torch.cat([mask, mask.new_ones(len(rows), 1)], 1)
        scores = forward(drawn[:, None], mask, mask.sum(1, keepdim=True) - 1)
        state = recorder.state()
    return recorder.draws(lengths)


def inverted(logp: Float[Tensor, "a v"], uniform: Float[Tensor, " a"]) -> Int[Tensor, " a"]:
    """The first token whose cumulated probability exceeds `uniform` of the whole, in float64.

    Tokens of probability 0 are never drawn.

    Example:
        >>> inverted(torch.tensor([[0.5, 0.0, 0.5]]).log().repeat(3, 1), torch.tensor([0.0, 0.49, 0.5]).double())
        tensor([0, 0, 2])
    """
    mass = logp.double().exp().cumsum(-1)
    whole = mass[:, -1]
    # Rounded up to the whole, a product would lie behind the last token.
    height = torch.minimum(uniform * whole, whole.nextafter(torch.zeros_like(whole)))
    return torch.searchsorted(mass, height[:, None], right=True).squeeze(1)


def uniform_numbers(count: int, steps: int, seed: int) -> Float[Tensor, "b t"]:
    """A uniform number for every token of `count` responses; those of the first responses do not depend on `count`."""
    g = torch.Generator().manual_seed(seed)
    return torch.rand(count, steps, generator=g, dtype=torch.float64)


class _Forward:
    """Logits of the last place."""

    def __init__(self, model: PreTrainedModel, cache: DynamicCache) -> None:
        takes = inspect.signature(model.forward).parameters
        self.model, self.cache = model, cache
        self.positions = "position_ids" in takes
        self.options = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}

    def __call__(self, ids: Int[Tensor, "a t"], mask: Int[Tensor, "a s"], position: Int[Tensor, "a t"]) -> Tensor:
        positions = {"position_ids": position.clamp(min=0)} if self.positions else {}
        output = self.model(
            input_ids=ids,
            attention_mask=mask,
            past_key_values=self.cache,
            use_cache=True,
            **positions,
            **self.options,
        )
        return output.logits[:, -1]


def _filters(sampling: Sampling) -> list[Callable[..., Tensor]]:
    """Temperature, top-k and top-p, in this order, where they change anything."""
    filters: list[Callable[..., Tensor]] = []
    if sampling.temperature != 1:
        filters.append(TemperatureLogitsWarper(float(sampling.temperature)))
    if sampling.top_k:
        filters.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        filters.append(TopPLogitsWarper(sampling.top_p))
    return filters


def _cache(model: PreTrainedModel, capacity: int) -> DynamicCache:
    """The cache that the model's configuration asks for, with room for `capacity` tokens where it keeps all."""
    cache = DynamicCache(config=model.config)
    cache.layers = [InPlaceLayer(capacity) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def left_padded(prompts: Tokens, device: torch.device) -> tuple[Int[Tensor, "b t"], Int[Tensor, "b t"]]:
    """Prompts flush right, and the mask of what is a prompt, by length."""
    width = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (width - len(p)) + list(p) for p in prompts], device=device)
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    mask = torch.arange(width, device=device) >= width - lengths[:, None]
    return ids, mask.long()


def right_padded(responses: Tokens, device: torch.device) -> tuple[Int[Tensor, "b t"], Int[Tensor, " b"]]:
    """Responses flush left, and their lengths."""
    width = max(map(len, responses))
    ids = torch.tensor([[*r, *[PAD] * (width - len(r))] for r in responses], device=device)
    return ids, torch.tensor(list(map(len, responses)), device=device)
