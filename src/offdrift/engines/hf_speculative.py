"""Speculative decoding on two transformers models: a drafter proposes tokens, one pass of the target judges them all.

The law of every token is the target's own (`verified`): log-probs and evidence are those that plain decoding would have
recorded at that place. Only how a response's random numbers become tokens differs.

- Columns of the caches whose tokens were rejected stay behind, masked, until half of all columns are such.
- Every response draws from uniform numbers of its own, three a place, so its tokens depend on what else is in the
  batch only by rounding.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from offdrift.engines.generate import Generation, Request
from offdrift.engines.hf_decode import (
    PAD,
    DrawRecorder,
    Forward,
    InPlaceLayer,
    cache_of,
    distinct,
    filters_of,
    inverted,
    left_padded,
)
from offdrift.errors import EngineError
from offdrift.records.provenance import Sampling
from offdrift.records.rollouts import ACCEPTED, FREE, REDRAWN

NUMBERS = 3
"""Uniform numbers of a place: for the drafter's proposal, for the judgement of it, and for a token drawn without it."""


class Verified(NamedTuple):
    """Result of a pass of the target over a window of proposals."""

    tokens: Int[Tensor, "n k1"]
    """The accepted proposals and the token behind them; anything further on."""
    accepted: Int[Tensor, " n"]
    """Proposals accepted: the window's response grows by one more token than that."""
    overlap: Float[Tensor, "n k"]
    """sum_a min(p(a), q(a)) at every proposal."""


def verified(
    logp: Float[Tensor, "n k1 v"],
    draft: Float[Tensor, "n k v"],
    proposed: Int[Tensor, "n k"],
    uniforms: Float[Tensor, "n k1 2"],
    limit: Int[Tensor, " n"],
) -> Verified:
    """Accept proposals as far as the target p allows, and draw the token behind them so that all are draws from p.

        accept d_i   if u q_i(d_i) < p_i(d_i), and all before it were accepted
        then draw    from max(p_i - q_i, 0) / sum_a max(p_i - q_i, 0) at the first rejection, or from p behind the last

    Chance of acceptance: sum_a min(p, q) = 1 - TV(p, q). Law of the token at a place:
    min(p, q) + (1 - sum_a min(p, q)) max(p - q, 0) / sum_a max(p - q, 0) = p.

    Args:
        logp: log p of the target at the k proposals' places and at the one behind, k1 = k + 1; normalized.
        draft: log q of the drafter, which the proposals were drawn from.
        proposed: the proposals d.
        uniforms: independent uniform numbers of every place: to judge the proposal, and to draw without one.
        limit: proposals of a window that count; the others are as if there were none.

    Gradient: none.

    Example:
        >>> p, q = torch.tensor([[[0.4, 0.4, 0.2]] * 2]).log(), torch.tensor([[[0.6, 0.3, 0.1]]]).log()
        >>> # 0.8 * 0.6 is not below 0.4: rejected, and redrawn from 0, 1/2, 1/2
        >>> u = torch.tensor([[[0.8, 0.6], [0.0, 0.0]]], dtype=torch.float64)
        >>> verified(p, q, torch.tensor([[0]]), u, torch.tensor([1]))
        Verified(tokens=tensor([[2, 0]]), accepted=tensor([0]), overlap=tensor([[0.8000]]))

    Reference: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", arXiv:2211.17192,
    algorithm 1, theorem 3.5 and appendix A.1.
    """
    n, k, _ = draft.shape
    chance = [x.gather(2, proposed[..., None]).squeeze(2).double().exp() for x in (logp[:, :k], draft)]
    good = (uniforms[:, :k, 0] * chance[1] < chance[0]) & (torch.arange(k, device=logp.device) < limit[:, None])
    accepted = good.long().cumprod(1).sum(1)
    rows = torch.arange(n, device=logp.device)
    p = logp[rows, accepted].double().exp()
    # Behind the last proposal that counts, nothing was proposed.
    q = torch.zeros_like(p)
    judged = accepted < limit
    q[judged] = draft[judged, accepted[judged]].double().exp()
    rest = (p - q).clamp(min=0)
    rest = torch.where(rest.sum(1, keepdim=True) > 0, rest, p)  # p = q, up to rounding
    last = inverted(rest.log(), uniforms[rows, accepted, 1])
    tokens = torch.cat([proposed, proposed.new_full((n, 1), PAD)], 1)
    tokens[rows, accepted] = last
    overlap = torch.minimum(logp[:, :k], draft).exp().sum(-1)
    return Verified(tokens, accepted, overlap)


class Reader:
    """A model's reading of the texts of a batch: its cache, and which columns of it hold tokens of each text."""

    def __init__(self, model: PreTrainedModel, ids: Int[Tensor, "n t"], mask: Int[Tensor, "n t"], room: int) -> None:
        cache = cache_of(model, ids.shape[1] + room)
        if not all(isinstance(layer, InPlaceLayer) for layer in cache.layers):
            raise EngineError(
                f"{type(model).__name__} does not keep the keys and values of every token in every layer, so that "
                "rejected proposals cannot be taken back; use a model with full attention, or no drafter"
            )
        self.forward, self.mask = Forward(model, cache), mask
        if not self.forward.positions:
            raise EngineError(
                f"{type(model).__name__} takes no position_ids, so that rejected proposals would shift what follows "
                "them; use another model, or no drafter"
            )
        if ids.shape[1]:
            self.forward(ids, mask, mask.cumsum(1) - 1)

    def read(self, ids: Int[Tensor, "n t"], mask: Int[Tensor, "n t"], places: Int[Tensor, "n t"]) -> Tensor:
        """Logits behind each of these tokens, which stand at `places` of their texts."""
        self.mask = torch.cat([self.mask, mask], 1)
        return self.forward.window(ids, self.mask, places)

    def keep(self, rows: Int[Tensor, " m"]) -> None:
        """Go on with these texts, in this order, and leave masked columns behind once they are half of all."""
        cache = self.forward.cache
        if self.mask.shape[1]:
            cache.reorder_cache(rows)  # type: ignore[arg-type]
        self.mask = self.mask[rows]
        width = int(self.mask.sum(1).max()) if len(rows) else 0
        if self.mask.shape[1] < 2 * width or not width:
            return
        order = self.mask.argsort(dim=1, stable=True)[:, -width:]  # flush right
        self.mask = self.mask.gather(1, order)
        for i, layer in enumerate(cache.layers):
            assert isinstance(layer, InPlaceLayer)
            parts: list[Tensor] = []
            for x in (layer.keys, layer.values):
                assert x is not None
                parts.append(x.gather(2, order[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])))
            cache.layers[i] = new_layer = InPlaceLayer(layer.capacity)
            new_layer.update(parts[0], parts[1])


class Proposals(NamedTuple):
    """Proposals of a drafter for every response of a pass."""

    tokens: Int[Tensor, "n k"]
    logp: Float[Tensor, "n k v"]
    """log q, which they were drawn from; anything behind a response's limit."""
    limit: Int[Tensor, " n"]
    """Proposals of each response. Whether one is made at a place may depend on the tokens before it, not on itself."""


@runtime_checkable
class Drafter(Protocol):
    """A source of proposals for the responses that are being drawn, by their numbers in the batch."""

    def waves(self) -> list[Int[Tensor, " w"]]:
        """Responses that are drawn together, in turn."""
        ...

    def start(self, rows: Int[Tensor, " n"], ids: Int[Tensor, "m t"], mask: Int[Tensor, "m t"], text: Tensor) -> None:
        """Begin with these responses, whose prompts are `text` among those flush right in `ids`."""
        ...

    def propose(
        self, last: Int[Tensor, "n 1"], places: Int[Tensor, " n"], numbers: Float[Tensor, "n k"], limit: Tensor
    ) -> Proposals:
        """Propose at most `limit` tokens behind `last`, drawn with `numbers`."""
        ...

    def judged(self, result: Verified, grown: Int[Tensor, " n"], limit: Int[Tensor, " n"]) -> None:
        """Take what the pass made of the proposals: of every response its next `grown` tokens."""
        ...

    def keep(self, alive: Int[Tensor, " m"]) -> None:
        """Go on with these responses, in this order."""
        ...


class ModelDrafter:
    """A smaller model that reads along: its law at every place, which it draws proposals from."""

    def __init__(self, model: PreTrainedModel, sampling: Sampling, count: int) -> None:
        self.model, self.sampling, self.count = model, sampling, count

    def waves(self) -> list[Int[Tensor, " w"]]:
        return [torch.arange(self.count, device=self.model.device)]

    def start(self, rows: Int[Tensor, " n"], ids: Int[Tensor, "m t"], mask: Int[Tensor, "m t"], text: Tensor) -> None:
        self.reader = Reader(self.model, ids[:, :-1], mask[:, :-1], self.sampling.max_tokens)
        self.reader.keep(text)
        # Token that it has not read yet: the one before the last, if it was its own last proposal.
        self.before = torch.full_like(rows, PAD)[:, None]
        self.unread = torch.zeros_like(self.before)

    def propose(
        self, last: Int[Tensor, "n 1"], places: Int[Tensor, " n"], numbers: Float[Tensor, "n k"], limit: Tensor
    ) -> Proposals:
        k, proposed, laws = int(limit.max()), [last], []
        ids, mask = torch.cat([self.before, last], 1), torch.cat([self.unread, torch.ones_like(last)], 1)
        at = places[:, None] + torch.arange(-1, 1, device=last.device)
        for i in range(k):
            laws.append(processed(self.reader.read(ids, mask, at)[:, -1:], self.sampling).squeeze(1))
            ids = inverted(laws[-1], numbers[:, i])[:, None]
            proposed.append(ids)
            mask, at = torch.ones_like(ids), at[:, -1:] + 1
        self.last = proposed[-1]
        tokens = torch.cat(proposed[1:], 1) if k else last[:, :0]
        return Proposals(tokens, torch.stack(laws, 1) if k else torch.empty(len(last), 0, 0, device=last.device), limit)

    def judged(self, result: Verified, grown: Int[Tensor, " n"], limit: Int[Tensor, " n"]) -> None:
        k = result.overlap.shape[1]
        if k > 1:
            step = torch.arange(1, k, device=grown.device)
            self.reader.mask[:, 1 - k :] = (step <= result.accepted[:, None]).long()
        self.unread = ((result.accepted == k) & (k > 0)).long()[:, None]
        self.before = self.last

    def keep(self, alive: Int[Tensor, " m"]) -> None:
        self.before, self.unread = self.before[alive], self.unread[alive]
        self.reader.keep(alive)


@torch.no_grad()
def speculate(
    target: PreTrainedModel,
    drafter: Drafter,
    request: Request,
    recorder: DrawRecorder,
    uniforms: Float[Tensor, "b t 3"],
    *,
    tokens: int,
) -> Generation:
    """One response per prompt, drawn from the target, of which the drafter proposes up to `tokens` tokens a pass.

    Args:
        uniforms: `NUMBERS` independent uniform numbers of every place of every response.

    Raises: `EngineError` if a model's cache cannot take back what it has read.
    """
    uniforms = uniforms.to(target.device)
    lengths = torch.zeros(len(uniforms), dtype=torch.long, device=target.device)
    for rows in drafter.waves():
        _speculate(target, drafter, request, recorder, uniforms=uniforms, tokens=tokens, lengths=lengths, rows=rows)
    return recorder.draws(lengths)  # outside of inference mode, whose tensors can't enter a loss


@torch.inference_mode()
def _speculate(
    target: PreTrainedModel,
    drafter: Drafter,
    request: Request,
    recorder: DrawRecorder,
    *,
    uniforms: Float[Tensor, "b t 3"],
    tokens: int,
    lengths: Int[Tensor, " b"],
    rows: Int[Tensor, " n"],
) -> None:
    """Record every token of the responses `rows`, and in `lengths` how many there are."""
    device, sampling = target.device, request.sampling
    longest, stops = sampling.max_tokens, torch.tensor(sampling.stop_token_ids, dtype=torch.long, device=device)
    # Each prompt is read once, but for its last token, with which the first pass begins.
    prompts, text = distinct((tuple(request.prompts[i]) for i in rows.tolist()), device)
    ids, mask = left_padded(prompts, device)
    reader = Reader(target, ids[:, :-1], mask[:, :-1], longest)
    reader.keep(text)
    drafter.start(rows, ids, mask, text)
    last, places = ids[text, -1:], mask.sum(1)[text] - 1
    while len(rows):
        written = lengths[rows]
        limit = (longest - written - 1).clamp(max=tokens)
        room = torch.arange(int(limit.max()) + 1, device=device)
        numbers = uniforms[rows[:, None], (written[:, None] + room).clamp(max=longest - 1)]
        proposals = drafter.propose(last, places, numbers[:, :-1, 0], limit)
        # Verify.
        limit, k = proposals.limit, proposals.tokens.shape[1]
        window = torch.cat([last, proposals.tokens], 1)
        step = room[: k + 1]
        logp = processed(reader.read(window, torch.ones_like(window), places[:, None] + step), sampling)
        draft = proposals.logp if k else logp[:, :0]
        result = verified(logp, draft, proposals.tokens, numbers[:, : k + 1, 1:], limit)
        accepted = result.accepted
        # A response ends behind its first stop token, or with its last place.
        grown = accepted + 1
        stop = torch.isin(result.tokens, stops) & (step < grown[:, None])
        grown = torch.where(stop.any(1), stop.long().argmax(1) + 1, grown)
        states = None if recorder.consumed is None or recorder.consumed.last is None else recorder.consumed.last
        origin = torch.where(step < accepted[:, None], ACCEPTED, torch.where(step < limit[:, None], REDRAWN, FREE))
        overlap = torch.cat([result.overlap, result.overlap.new_full((len(rows), 1), torch.nan)], 1)
        overlap = overlap.where(origin != FREE, torch.nan)
        for j in range(int(grown.max())):
            grows = (grown > j).nonzero().squeeze(1)
            state = None if states is None else states[grows, j]
            recorder.add(logp[grows, j], result.tokens[grows, j], rows[grows], state)
            recorder.steps[-1] |= {"origin": origin[grows, j].to(torch.int8), "overlap": overlap[grows, j]}
        lengths[rows] = written + grown
        # Keys of rejected proposals no longer count.
        reader.mask[:, -k - 1 :] = (step <= accepted[:, None]).long()
        drafter.judged(result, grown, limit)
        last = result.tokens.gather(1, accepted[:, None])
        alive = (~stop.any(1) & (lengths[rows] < longest)).nonzero().squeeze(1)
        rows, places, last = (x[alive] for x in (rows, places + accepted + 1, last))
        reader.keep(alive)
        drafter.keep(alive)


def processed(scores: Float[Tensor, "n t v"], sampling: Sampling) -> Float[Tensor, "n t v"]:
    """Log-probs of the law that tokens are drawn from: tempered, filtered and normalized."""
    flat = scores.float().flatten(0, 1)
    for apply in filters_of(sampling):
        flat = apply(None, flat)
    return flat.log_softmax(-1).view(scores.shape)
