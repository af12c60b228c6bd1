"""Decoding with a transformers model: one forward pass per token, over what is still being written.

- A text that several responses continue is read once. Its row of the batch branches when they draw different tokens,
  on an accelerator when the prompt ends, since the host would have to wait for every token.
- A response that has ended leaves the batch, so that no step computes what nobody reads.
- Keys and values are written in place, into room that doubles when it is full.
- Every response draws from uniform numbers of its own, so its tokens depend on what else is in the batch
  only by rounding.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from typing import TypeVar

import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor
from transformers import (
    DynamicCache,
    MinPLogitsWarper,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.cache_utils import DynamicLayer

from offdrift.divergence.head import Head
from offdrift.engines.generate import Generation, Request, Tokens
from offdrift.engines.hf_cache import Evictions
from offdrift.engines.logit_fusion import fused_logits
from offdrift.engines.output_head import HeadInput
from offdrift.engines.retention import kept_until
from offdrift.engines.routing import Choices
from offdrift.records.provenance import Sampling
from offdrift.records.rollouts import (
    Evidence,
    EvidenceKind,
    FullVocab,
    HiddenStates,
    Speculation,
    Support,
    TopK,
    cumulative,
)

Text = TypeVar("Text", bound=Hashable)

PAD = 0
"""Padding id. Lengths say which tokens are real, so any id will do."""

KEPT_SHARE = 0.75
"""Ended responses leave the batch once at most this share of it is still being written."""

CHECK_EVERY = {"cpu": 1}
"""Steps between looks at what was drawn; on an accelerator each look waits for the device."""
CHECK_EVERY_ELSEWHERE = 16


class InPlaceLayer(DynamicLayer):
    """Keys and values of a layer, written in place into room that doubles as responses grow.

    Memory: at most twice what is kept, and never more than `capacity` tokens per response; of `rows` responses at
    least, once there are more than were read first.
    """

    def __init__(self, capacity: int, rows: int = 0) -> None:
        super().__init__()
        self.capacity, self.rows = capacity, rows
        self.count, self.length = 0, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self._room = [x.new_empty(*x.shape[:2], 0, x.shape[3]) for x in (key_states, value_states)]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """All keys and values so far, the new ones behind the others."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        count, begin, self.length = len(key_states), self.length, self.length + key_states.shape[-2]
        if self.length > self._room[0].shape[2]:
            self._make_room(len(self._room[0]), max(self.length, min(2 * self.length, self.capacity)), begin)
        for room, new in zip(self._room, (key_states, value_states), strict=True):
            room[:count, :, begin : self.length] = new
        return self._views(count)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """The cache of these rows, in this order; a row may be named several times. Rows that stay are not copied."""
        if not self.is_initialized:
            return
        count = len(beam_idx)
        if count < self.count:
            self._room = [room.index_select(0, beam_idx) for room in self._room]
        else:
            if count > len(self._room[0]):
                self._make_room(max(count, self.rows), self._room[0].shape[2], self.length)
            moved = (beam_idx != torch.arange(count, device=beam_idx.device)).nonzero().squeeze(1)
            source = beam_idx[moved]
            for room in self._room:
                room.index_copy_(0, moved, room.index_select(0, source))
        self._views(count)

    def _make_room(self, rows: int, places: int, filled: int) -> None:
        for i, room in enumerate(self._room):
            self._room[i] = room.new_empty(rows, room.shape[1], places, room.shape[3])
            self._room[i][: len(room), :, :filled] = room[:, :, :filled]

    def _views(self, count: int) -> tuple[Tensor, Tensor]:
        self.count = count
        self.keys, self.values = (room[:count, :, : self.length] for room in self._room)
        return self.keys, self.values


class DrawRecorder:
    """Recorder of every drawn token, step by step: its log-prob and the evidence asked for.

    Full evidence keeps a row of the vocabulary per token, top-k evidence its k largest entries, hidden evidence what
    the head consumed. Where `filtered`, what the filters left over is kept besides; with `choices`, the experts that
    every text was sent to; with a teacher, how far the mixture is from the policy; with `evictions`, which keys the
    cache let go.
    """

    def __init__(
        self,
        evidence: EvidenceKind,
        head: Head | None = None,
        consumed: HeadInput | None = None,
        *,
        filtered: bool = False,
        choices: Choices | None = None,
        evictions: Evictions | None = None,
    ) -> None:
        self.evidence, self.head, self.consumed = evidence, head, consumed
        self.filtered, self.choices, self.evictions = filtered, choices, evictions
        self.support: list[Support] = []  # per step, of its texts
        self.prompts: tuple[Tensor, Tensor] | None = None
        self.lost: tuple[Tensor, Tensor] | None = None
        self.steps: list[dict[str, Tensor]] = []
        self.drafter_version = 0
        """Of `Speculation`, where there is a drafter."""

    def state(self) -> Float[Tensor, "a d"] | None:
        """Hidden state that the head consumed at the last place of every response."""
        last = None if self.consumed is None else self.consumed.last
        return None if last is None else last[:, -1].clone()

    def add(
        self,
        logp: Float[Tensor, "n v"],
        drawn: Int[Tensor, " a"],
        rows: Int[Tensor, " a"],
        state: Tensor | None,
        text: Int[Tensor, " a"] | None = None,
        mix_kl: Float[Tensor, " n"] | None = None,
    ) -> None:
        """One step: the tempered and filtered log-probs of `n` texts, and the tokens drawn for the responses `rows`.

        Response `rows[i]` continues `text[i]`; without `text`, each response a text of its own, in order.
        """
        text = torch.arange(len(rows), device=rows.device) if text is None else text
        step = {"rows": rows, "tokens": drawn, "text": text, "logp": logp[text, drawn]}
        if self.evidence == "full":
            step["evidence"] = logp
        elif isinstance(self.evidence, int):
            top = logp.topk(self.evidence, dim=-1)
            step |= {"evidence": top.values, "ids": top.indices.int()}
        elif state is not None:
            step["evidence"] = state
        if self.choices is not None:
            step["experts"] = self._experts(len(logp))[:, -1]
        if mix_kl is not None:
            step["mix_kl"] = mix_kl
        if self.evictions is not None:
            step["victims"] = self.evictions.victims
        if self.filtered:
            self.support.append(Support.of(logp > -torch.inf))
        self.steps.append(step)

    def read(self, mask: Int[Tensor, "texts width"], text: Int[Tensor, " b"]) -> None:
        """Prompts have been read: texts flush right in `mask`, and the one that each response continues."""
        if self.choices is not None:
            before = mask[text, :-1].bool()
            self.prompts = self._experts(len(mask))[text, :-1][before], before.sum(1)
        if self.evictions is not None:
            real = mask[text].bool()
            self.lost = self.evictions.lost[text][real], real.sum(1)

    def _experts(self, texts: int) -> Integer[Tensor, "texts t layers k"]:
        """Experts at every place of the texts that the model has just read."""
        assert self.choices is not None
        experts = self.choices.experts
        return experts.view(texts, -1, *experts.shape[1:])

    def draws(self, lengths: Int[Tensor, " b"]) -> Generation:
        """Pack what was drawn: of every response its first `lengths` tokens."""
        rows = torch.cat([step["rows"] for step in self.steps])
        number = torch.cat([torch.full_like(step["rows"], i) for i, step in enumerate(self.steps)])
        order = (rows * len(self.steps) + number).argsort()
        # A response may have no token in a step, so that its tokens are counted.
        place = torch.arange(len(order), device=rows.device) - cumulative(rows.bincount())[rows[order]]
        order = order[place < lengths[rows[order]]]

        def packed(name: str, order: Tensor = order) -> Tensor:
            return torch.cat([step[name] for step in self.steps]).index_select(0, order).cpu()

        def texts(counts: list[int]) -> Tensor:
            """The text that each token continues, among those of all steps, of which a step has so many."""
            before = cumulative(torch.tensor(counts))[:-1].tolist()
            return torch.cat([step["text"] + n for step, n in zip(self.steps, before, strict=True)])[order]

        def shared(name: str) -> Tensor:
            return packed(name, texts([len(step[name]) for step in self.steps]))

        support = Support.joined(self.support)
        if support is not None:
            support = support.select(texts([len(s.cu_seqlens) - 1 for s in self.support])).cpu()
        evidence: Evidence | None = None
        if isinstance(self.evidence, int):
            evidence = TopK(shared("ids"), shared("evidence"))
        elif self.head is not None:
            evidence = HiddenStates(shared("evidence"), self.head)
        elif self.evidence == "full":
            evidence = FullVocab(shared("evidence"))
        experts = None
        if self.prompts is not None:
            # A step has the experts of the place that its token is drawn from: in all, those of every place but the
            # last, of which prompts are all but their last.
            prompt_experts, counts = self.prompts
            sequence = [torch.arange(len(lengths)).repeat_interleave(n.cpu()) for n in (counts, lengths)]
            order_of_places = torch.cat(sequence).argsort(stable=True)
            experts = torch.cat([prompt_experts.cpu(), shared("experts")])[order_of_places]
        mix_kl = shared("mix_kl") if "mix_kl" in self.steps[0] else None
        until = None
        if self.lost is not None:
            lost, counts = self.lost
            until = kept_until(counts.cpu(), lengths.cpu(), lost.cpu(), shared("victims"))
        draws = Generation(
            packed("tokens"),
            lengths.cpu(),
            packed("logp"),
            evidence=evidence,
            support=support,
            experts=experts,
            mix_kl=mix_kl,
            visible_until=until,
        )
        if "origin" not in self.steps[0]:
            return draws
        version = torch.full_like(draws.tokens, self.drafter_version)
        return replace(draws, speculation=Speculation(packed("origin"), packed("overlap"), version))


@torch.no_grad()
def decode(
    model: PreTrainedModel,
    request: Request,
    recorder: DrawRecorder,
    uniforms: Float[Tensor, "b t"],
    teacher: PreTrainedModel | None = None,
) -> Generation:
    """One response per prompt: tokens drawn at `uniforms`, or those of `request.forced` (teacher forcing).

    With `request.alphas`, the teacher reads every token along, and tokens are drawn from the mixture.
    """
    lengths = _decode(model, request, recorder, uniforms, teacher)
    return recorder.draws(lengths)  # outside of inference mode, whose tensors can't enter a loss


@torch.inference_mode()
def _decode(
    model: PreTrainedModel,
    request: Request,
    recorder: DrawRecorder,
    uniforms: Float[Tensor, "b t"],
    teacher: PreTrainedModel | None,
) -> Int[Tensor, " b"]:
    """Record every step; how many tokens of each response count."""
    device, sampling, forced = model.device, request.sampling, request.forced
    count, filters = len(request.prompts), filters_of(sampling)
    lengths = torch.full((count,), sampling.max_tokens, device=device)
    stops = torch.tensor(sampling.stop_token_ids, dtype=torch.long, device=device)
    uniforms, forced_ids = uniforms.to(device), None
    if forced is not None:
        forced_ids, lengths = right_padded(forced, device)
        stops = stops[:0]
    steps = int(lengths.max())
    check_every = CHECK_EVERY.get(device.type, CHECK_EVERY_ELSEWHERE)
    # Each text once; the response `rows[i]` continues `text[i]`.
    pairs = zip(map(tuple, request.prompts), request.alphas or [0.0] * count, strict=True)
    texts, text = distinct(pairs, device)
    ids, mask = left_padded([prompt for prompt, _ in texts], device)
    width, rows = ids.shape[1], torch.arange(count, device=device)
    if recorder.evictions is None:
        cache = cache_of(model, width + steps, count)
    else:
        cache = recorder.evictions.cache(model, mask)
    forward = Forward(model, cache)
    if request.alphas is not None:
        assert teacher is not None
        theirs = Forward(teacher, cache_of(teacher, width + steps, count)) if any(request.alphas) else None
        forward = FusedForward(forward, theirs, torch.tensor([alpha for _, alpha in texts], device=device))
    scores = forward(ids, mask, mask.cumsum(1) - 1)
    recorder.read(mask, text)
    places, mask = mask.sum(1, keepdim=True), torch.cat([mask, mask.new_ones(len(mask), steps)], 1)
    for step in range(steps):
        scores = scores.float()
        for apply in filters:
            scores = apply(None, scores)
        logp = scores.log_softmax(-1)
        next_tokens = forced_ids[rows, step] if forced_ids is not None else inverted(logp, uniforms[rows, step], text)
        mix_kl = forward.divergence(logp, sampling.temperature) if isinstance(forward, FusedForward) else None
        recorder.add(logp, next_tokens, rows, recorder.state(), text, mix_kl)
        ended = torch.isin(next_tokens, stops)
        lengths[rows] = lengths[rows].where(~ended, lengths[rows].clamp(max=step + 1))
        if step + 1 == steps:
            break
        if (step + 1) % check_every == 0:
            alive = (lengths[rows] > step + 1).nonzero().squeeze(1)
            if len(alive) == 0:
                break
            if len(alive) < len(rows):
                rows, text, next_tokens = rows[alive], text[alive], next_tokens[alive]
        moves = None
        if check_every == 1:
            moves, text = branched(text, next_tokens, *logp.shape)
        elif len(rows) > len(logp) or len(rows) <= KEPT_SHARE * len(logp):
            moves, text = text, torch.arange(len(rows), device=device)
        if moves is not None:
            forward.reorder(moves)
            mask, places = mask[moves], places[moves]
        # A text that nobody continues any more reads padding.
        ids = next_tokens.new_full((len(mask), 1), PAD)
        ids[text, 0] = next_tokens
        scores = forward(ids, mask[:, : width + step + 1], places + step)
    return lengths


def branched(
    text: Int[Tensor, " a"], drawn: Int[Tensor, " a"], count: int, vocab_size: int
) -> tuple[Int[Tensor, " n"] | None, Int[Tensor, " a"]]:
    """Row that each row of the cache is to copy (None if all stay), and the row that each response continues.

    Of the `count` texts, each is kept by those that drew the least of its next tokens. The others take the rows of
    texts that nobody continues, then new ones. Once few rows are continued, they close ranks.

    Example:
        >>> branched(torch.tensor([0, 0, 1]), torch.tensor([5, 7, 5]), 2, 9)
        (tensor([0, 1, 0]), tensor([0, 2, 1]))
    """
    branches, branch = (text * vocab_size + drawn).unique(return_inverse=True)
    origin = branches // vocab_size
    if len(origin) <= KEPT_SHARE * count:
        return origin, branch
    new = origin.diff(prepend=origin.new_tensor([-1])) == 0
    if not new.any():
        return None, text
    free = torch.ones(count + len(origin), dtype=torch.bool, device=text.device)
    free[origin] = False
    row = origin.masked_scatter(new, free.nonzero().squeeze(1))
    moves = torch.arange(max(count, int(row.max()) + 1), device=text.device)
    moves[row] = origin
    return moves, row[branch]


def inverted(
    logp: Float[Tensor, "n v"], uniform: Float[Tensor, " a"], rows: Int[Tensor, " a"] | None = None
) -> Int[Tensor, " a"]:
    """The first token whose cumulated probability exceeds `uniform` of the whole, in float64.

    Tokens of probability 0 are never drawn. Number i is drawn from `logp[rows[i]]`; without `rows`, from `logp[i]`.

    Example:
        >>> inverted(torch.tensor([[0.5, 0.0, 0.5]]).log().repeat(3, 1), torch.tensor([0.0, 0.49, 0.5]).double())
        tensor([0, 0, 2])
    """
    mass = logp.double().exp().cumsum(-1)
    mass = mass if rows is None else mass[rows]
    total = mass[:, -1]
    # Rounded up to the whole, a product would lie behind the last token.
    height = torch.minimum(uniform * total, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(mass, height[:, None], right=True).squeeze(1)


def uniform_numbers(count: int, steps: int, seed: int) -> Float[Tensor, "b t"]:
    """A uniform number for every token of `count` responses; those of the first responses do not depend on `count`."""
    g = torch.Generator().manual_seed(seed)
    return torch.rand(count, steps, generator=g, dtype=torch.float64)


class Forward:
    """Logits of the last place, or of all places that are read."""

    def __init__(self, model: PreTrainedModel, cache: DynamicCache) -> None:
        takes = inspect.signature(model.forward).parameters
        self.model, self.cache = model, cache
        self.positions = "position_ids" in takes
        self.options = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}

    def __call__(self, ids: Int[Tensor, "a t"], mask: Int[Tensor, "a s"], position: Int[Tensor, "a t"]) -> Tensor:
        return self.window(ids, mask, position, **self.options)[:, -1]

    def window(
        self, ids: Int[Tensor, "a t"], mask: Int[Tensor, "a s"], position: Int[Tensor, "a t"], **options: int
    ) -> Tensor:
        """Logits of every place of `ids`; `options` go to the model."""
        positions = {"position_ids": position.clamp(min=0)} if self.positions else {}
        output = self.model(
            input_ids=ids,
            attention_mask=mask,
            past_key_values=self.cache,
            use_cache=True,
            **positions,
            **options,
        )
        return output.logits

    def reorder(self, rows: Int[Tensor, " n"]) -> None:
        """Go on with these rows of the cache, in this order."""
        self.cache.reorder_cache(rows)  # type: ignore[arg-type]


class FusedForward:
    """Mixed logits of the last place: teacher and student read every token in lock-step, each with its own cache.

        pi_mix = softmax(alpha l_T + (1 - alpha) l_S)

    Args:
        teacher: None where no text has a share of it.
        alpha: the teacher's share in each text.

    Reference: Zhang et al., "Logit Fusion", 2026.
    """

    def __init__(self, student: Forward, teacher: Forward | None, alpha: Float[Tensor, " n"]) -> None:
        self.student, self.teacher, self.alpha = student, teacher, alpha

    def __call__(self, ids: Int[Tensor, "a t"], mask: Int[Tensor, "a s"], position: Int[Tensor, "a t"]) -> Tensor:
        self.own = self.student(ids, mask, position).float()
        if self.teacher is None:
            return self.own
        return fused_logits(self.teacher(ids, mask, position), self.own, self.alpha)

    def reorder(self, rows: Int[Tensor, " n"]) -> None:
        """Go on with these rows of both caches, in this order."""
        self.alpha = self.alpha[rows]
        for forward in (self.student, self.teacher):
            if forward is not None:
                forward.reorder(rows)

    def divergence(self, logp: Float[Tensor, "n v"], temperature: float) -> Float[Tensor, " n"]:
        """KL(pi_mix || pi_S) at the last place, nats: both tempered, and on the tokens that the filters left over.

        Args:
            logp: of the mixture, tempered and filtered.
        """
        possible = logp > -torch.inf
        policy_logp = (self.own / temperature).where(possible, -torch.inf).log_softmax(-1)
        return (logp.exp() * (logp - policy_logp).where(possible, 0.0)).sum(-1).clamp(min=0)


def filters_of(sampling: Sampling) -> list[Callable[..., Tensor]]:
    """Temperature, min-p, top-k and top-p, in this order (vLLM's), where they change anything."""
    filters: list[Callable[..., Tensor]] = []
    if sampling.temperature != 1:
        filters.append(TemperatureLogitsWarper(float(sampling.temperature)))
    if sampling.min_p > 0:
        filters.append(MinPLogitsWarper(sampling.min_p))
    if sampling.top_k:
        filters.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        filters.append(TopPLogitsWarper(sampling.top_p))
    return filters


def cache_of(model: PreTrainedModel, capacity: int, rows: int = 0) -> DynamicCache:
    """The cache that the model's configuration asks for; room for `capacity` tokens of `rows` where it keeps all."""
    cache = DynamicCache(config=model.config)
    cache.layers = [InPlaceLayer(capacity, rows) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def distinct(texts: Iterable[Text], device: torch.device) -> tuple[list[Text], Int[Tensor, " b"]]:
    """Return each text once, in the order of its first place, and the number of every given text among those.

    Example:
        >>> distinct([(7, 1), (7,), (7, 1)], torch.device("cpu"))
        ([(7, 1), (7,)], tensor([0, 1, 0]))
    """
    number: dict[Text, int] = {}
    numbers = torch.tensor([number.setdefault(text, len(number)) for text in texts], device=device)
    return list(number), numbers


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
