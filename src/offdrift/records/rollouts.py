"""`Rollouts`: what an engine sampled, how it sampled it, and the evidence it left.

One flat stream of response tokens is cut into sequences by `cu_seqlens`, which is also the layout of an Arrow list
column. Provenance travels with the tokens: engine, precision, sampling, policy version, and whether the log-probs are
those of the distribution that was really sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor

from offdrift.divergence.head import Head
from offdrift.errors import EvidenceError, ShapeError
from offdrift.records.provenance import REPLAYABLE, Provenance
from offdrift.segments import Segments, cumulative
from offdrift.texts import text_id

REDRAWN, ACCEPTED, FREE = 0, 1, 2
"""How speculative decoding came by a token: drawn anew where a proposal was rejected; the proposal itself; or drawn by
the target alone, behind the last proposal of a pass."""


EvidenceKind = Literal["full", "hidden", "sampled"] | int
"""What an engine is asked to record per token: "full" vocabulary, the "hidden" state that its output head turned into
logits, an integer k for the top k log-probs, or "sampled" for the sampled token's log-prob alone."""


@dataclass(frozen=True)
class FullVocab:
    """log mu(a) for every token a of the vocabulary, at every response token. Grade: exact."""

    logp: Float[Tensor, "n v"]


@dataclass(frozen=True)
class TopK:
    """The k largest log mu(a) and their token ids, at every response token. Grade: interval."""

    ids: Int[Tensor, "n k"]
    logp: Float[Tensor, "n k"]


@dataclass(frozen=True)
class HiddenStates:
    """Input of the engine's output head at every response token, `[n, d]`. Grade: exact.

    `d` numbers per token stand for the whole vocabulary: log mu is the log-softmax of the head's logits over the
    sampling temperature, on the tokens of `Rollouts.support` where the sampler filtered.
    """

    states: Float[Tensor, "n d"]
    """In the engine's own dtype."""
    head: Head
    """The engine's head at the version that sampled, in its own dtype; shared by batches."""

    def to(self, device: torch.device | str) -> HiddenStates:
        """On another device; itself if it is there."""
        bias = None if self.head.bias is None else self.head.bias.to(device)
        return HiddenStates(self.states.to(device), replace(self.head, weight=self.head.weight.to(device), bias=bias))


Evidence = FullVocab | TopK | HiddenStates


@dataclass(frozen=True)
class Support:
    """The tokens that the sampler's filters (top-k, top-p, min-p) left over, at every response token.

    The rollout policy has probability 0 everywhere else. A trainer whose policies live on the same tokens has ratios
    of 1 at equal weights; one that filters by itself does not (docs/sampling-mask.md).

    Reference: Keep Sampling Mask, DeepSeek-V3.2, arXiv:2512.02556, section 3.1.
    """

    ids: Int[Tensor, " k"]
    """int32, ascending within each token: 4 bytes per token that was kept."""
    cu_seqlens: Int[Tensor, " cuts"]
    """Where the ids of each response token begin and end."""

    @staticmethod
    def of(kept: Bool[Tensor, "n v"]) -> Support:
        """From the truth about every token of the vocabulary."""
        return Support(kept.nonzero()[:, 1].int(), cumulative(kept.sum(1)))

    @staticmethod
    def joined(parts: Sequence[Support | None]) -> Support | None:
        """Concatenate the supports of several parts; None unless every part has one."""
        tensors = [p for p in parts if p is not None]
        if not tensors or len(tensors) < len(parts):
            return None
        return Support(torch.cat([p.ids for p in tensors]), joined_cuts([p.cu_seqlens for p in tensors]))

    def select(self, rows: Int[Tensor, " r"]) -> Support:
        """Return the support of the tokens at `rows`."""
        segments = Segments(self.cu_seqlens)
        return Support(self.ids[segments.rows(rows)], cumulative(segments.lengths[rows]))

    def cpu(self) -> Support:
        """In host memory."""
        return Support(self.ids.cpu(), self.cu_seqlens.cpu())

    def left_out(self, rows: slice, vocab_size: int, *, device: torch.device | str = "cpu") -> Bool[Tensor, "r v"]:
        """Return a mask of the vocabulary entries that the sampler could not draw, at consecutive response tokens.

        Raises: `EvidenceError` if a recorded token is not in the vocabulary.
        """
        start, stop, _ = rows.indices(len(self.cu_seqlens) - 1)
        cuts = self.cu_seqlens[start : stop + 1]
        ids = self.ids[int(cuts[0]) : int(cuts[-1])].long()
        bad = ids[(ids < 0) | (ids >= vocab_size)]
        if len(bad):
            raise EvidenceError(
                f"the rollouts' support has token {int(bad[0])}, the model has {vocab_size} tokens; both must share "
                "one vocabulary"
            )
        row = torch.repeat_interleave(torch.arange(stop - start), cuts.diff())
        left_out = torch.ones(stop - start, vocab_size, dtype=torch.bool, device=device)
        left_out[row.to(device), ids.to(device)] = False
        return left_out


@dataclass(frozen=True)
class Turns:
    """Turns of episodes: which one drew each response token, and what an environment wrote between them.

    A sequence is an episode. `c` tokens of context in all: a model that scores the episode reads them where they
    stand, and none of them is scored or trained.
    """

    ids: Int[Tensor, " n"]
    """Turn of each response token in its episode, from 0."""
    context_tokens: Int[Tensor, " c"]
    context_ids: Int[Tensor, " c"]
    """Turn that each context token stands before, never decreasing within an episode."""
    context_cu_seqlens: Int[Tensor, " cuts"]
    """Where the context of each episode begins and ends."""

    @staticmethod
    def single(tokens: int, sequences: int) -> Turns:
        """One turn per sequence, without context."""
        none = torch.zeros(0, dtype=torch.int64)
        return Turns(none.new_zeros(tokens), none, none, none.new_zeros(sequences + 1))

    def select(self, rows: Int[Tensor, " k"], sequences: Int[Tensor, " s"]) -> Turns:
        """The turns of the given sequences, whose response tokens are `rows`."""
        context = Segments(self.context_cu_seqlens)
        at = context.rows(sequences)
        cuts = cumulative(context.lengths[sequences])
        return Turns(self.ids[rows], self.context_tokens[at], self.context_ids[at], cuts)

    @staticmethod
    def joined(parts: Sequence[Turns]) -> Turns:
        """The turns of all parts' sequences."""
        streams = ("ids", "context_tokens", "context_ids")
        cuts = joined_cuts([part.context_cu_seqlens for part in parts])
        return Turns(*(torch.cat([getattr(part, name) for part in parts]) for name in streams), context_cu_seqlens=cuts)

    def columns(self, cu_seqlens: Int[Tensor, " cuts"]) -> tuple[Int[Tensor, " n"], Int[Tensor, " c"]]:
        """Places behind the prompt, from 0, of every response token and of every context token.

        In each episode: the context of a turn, then its response tokens, then the context of the next.

        Example:
            >>> turns = Turns(*map(torch.tensor, ([0, 0, 1], [7], [1], [0, 1])))
            >>> turns.columns(torch.tensor([0, 3]))  # y y c y
            (tensor([0, 1, 3]), tensor([2]))
        """
        responses, context = Segments(cu_seqlens), Segments(self.context_cu_seqlens)
        sequence = torch.cat([context.seq_ids, responses.seq_ids])
        turn = torch.cat([self.context_ids.long(), self.ids.long()])
        # Context stands first in the list, so that a stable sort puts it before the turn's own tokens.
        order = turn.argsort(stable=True)
        order = order[sequence[order].argsort(stable=True)]
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order))
        starts = (responses.cu_seqlens + context.cu_seqlens)[:-1].long()
        context_columns, columns = (place - starts[sequence]).split([len(self.context_ids), len(self.ids)])
        return columns, context_columns


@dataclass(frozen=True)
class Routes:
    """Experts that a mixture-of-experts model sent its tokens to, at every position that it computed.

    `p` positions: of each sequence its prompt and its response but the last token, which nothing is predicted from.
    None is missing: who cannot say all of them has no routes. Layers without a router are not counted.
    """

    experts: Integer[Tensor, "p layers k"]
    """The k chosen of each layer, in no order; one byte each up to 256 experts, else two (`expert_dtype`)."""
    cu_seqlens: Int[Tensor, " cuts"]
    """Where the positions of each sequence begin and end."""
    gates: Float[Tensor, "p layers k"] | None = None
    """Weights that the router gave them, where a trainer noted them to freeze them; never stored."""

    @property
    def bytes_per_position(self) -> int:
        """Size of what an engine records, layers x k x (1 or 2) bytes."""
        return self.experts[0].numel() * self.experts.itemsize if len(self.experts) else 0

    def select(self, sequences: Int[Tensor, " s"]) -> Routes:
        """The routes of the given sequences, in the given order."""
        segments = Segments(self.cu_seqlens)
        rows = segments.rows(sequences)
        gates = None if self.gates is None else self.gates[rows]
        return Routes(self.experts[rows], cumulative(segments.lengths[sequences]), gates)

    @staticmethod
    def joined(parts: Sequence[Routes]) -> Routes:
        """The routes of all parts' sequences."""
        cuts = joined_cuts([part.cu_seqlens for part in parts])
        gates = [part.gates for part in parts if part.gates is not None]
        return Routes(torch.cat([part.experts for part in parts]), cuts, torch.cat(gates) if gates else None)


@dataclass(frozen=True)
class Retention:
    """Until when a compressed KV cache kept each key: which earlier positions every token could see.

    A key that has gone does not come back, so one number per key says it for all tokens: the token at place q of its
    sequence sees the key at place k if

        k <= q < until_k

    `p` positions, those of `Routes`: of each sequence its prompt and its response but the last token.

    Reference: Shadow Mask Distillation, arXiv:2605.06850 (there a mask of positions x positions).
    """

    visible_until: Int[Tensor, "p layers heads"]
    """First place that no longer sees the key, the number of the sequence's positions where it stayed: 2 bytes each for
    sequences of up to 32,767 positions, else 4. One layer and one head where all of them keep the same."""
    cu_seqlens: Int[Tensor, " cuts"]
    """Where the positions of each sequence begin and end."""

    @property
    def bytes_per_position(self) -> int:
        """Size of what an engine records, layers x heads x (2 or 4) bytes."""
        return self.visible_until[0].numel() * self.visible_until.itemsize if len(self.visible_until) else 0

    def select(self, sequences: Int[Tensor, " s"]) -> Retention:
        """That of the given sequences, in the given order."""
        segments = Segments(self.cu_seqlens)
        return Retention(self.visible_until[segments.rows(sequences)], cumulative(segments.lengths[sequences]))

    @staticmethod
    def joined(parts: Sequence[Retention]) -> Retention:
        """That of all parts' sequences."""
        cuts = joined_cuts([part.cu_seqlens for part in parts])
        return Retention(torch.cat([part.visible_until for part in parts]), cuts)


def place_dtype(positions: int) -> torch.dtype:
    """Smallest integer dtype that holds positions in a sequence of this length."""
    return torch.int16 if positions <= torch.iinfo(torch.int16).max else torch.int32


@dataclass(frozen=True)
class Speculation:
    """Origin of each response token under speculative decoding: a drafter proposes, the target (the engine's policy)
    verifies.

    The tokens are draws from the target all the same, and log-probs and evidence beside them are its own.

    Reference: Leviathan et al., arXiv:2211.17192; drafters that fall behind a policy in training: ReSpec,
    arXiv:2510.26475.
    """

    origin: Integer[Tensor, " n"]
    """int8: `REDRAWN`, `ACCEPTED` or `FREE`."""
    overlap: Float[Tensor, " n"]
    """Chance that the proposal at this place was accepted, whichever it was: sum_a min(mu(a), q(a)) = 1 - TV(mu, q) of
    target and drafter, both tempered and filtered. NaN where there was no proposal (`FREE`)."""
    drafter_version: Int[Tensor, " n"]
    """Version of the weights whose rollouts the drafter had last learned from, optimizer steps."""

    def begins(self, cu_seqlens: Int[Tensor, " cuts"]) -> Bool[Tensor, " n"]:
        """Mask of tokens that start a forward pass of the target: a response's first, and each after a token that is
        not `ACCEPTED`.
        """
        begins = torch.ones(len(self.origin), dtype=torch.bool)
        begins[1:] = self.origin[:-1] != ACCEPTED
        begins[cu_seqlens[:-1][cu_seqlens.diff() > 0]] = True
        return begins

    def sums(self, rollouts: Rollouts) -> dict[str, Tensor]:
        """Sums of the metrics `speculative/...`; they add over batches and processes."""
        judged = self.origin != FREE
        lag = rollouts.rollout_version - self.drafter_version
        sums = {
            "tokens": len(judged),
            "passes": self.begins(rollouts.cu_seqlens).sum(),
            "judged": judged.sum(),
            "accepted": (self.origin == ACCEPTED).sum(),
            "overlap": self.overlap[judged].double().sum(),
            "lag": lag.sum(),
        }
        return {f"speculative/{name}": torch.as_tensor(float(x), dtype=torch.float64) for name, x in sums.items()}

    def select(self, rows: Int[Tensor, " k"]) -> Speculation:
        """Return the record of the tokens at `rows`."""
        return Speculation(self.origin[rows], self.overlap[rows], self.drafter_version[rows])

    @staticmethod
    def joined(parts: Sequence[Speculation]) -> Speculation:
        """Concatenate the records of several parts."""
        names = ("origin", "overlap", "drafter_version")
        return Speculation(*(torch.cat([getattr(part, name) for part in parts]) for name in names))


def expert_dtype(experts: int) -> torch.dtype:
    """Smallest integer dtype that holds the index of one of `experts`. (Torch cannot index with, or by, its uint16.)"""
    return torch.uint8 if experts <= 256 else torch.int16


Recorded = Support | Turns | Routes | Retention | Speculation
"""What a batch may hold besides numbers and evidence; `joined` makes one of those of several batches."""

PER_TOKEN = ("tokens", "logp_rollout", "rollout_version", "mix_kl")
"""Tensors of `Rollouts` with a value for every response token."""


@dataclass(frozen=True)
class Rollouts:
    """A batch of sampled sequences on the packed layout.

    `n` response tokens in `b` sequences; `m` prompt tokens. `group_ids` says which sequences answer the same prompt.
    `rewards`, `turns` and the texts are optional and filled in by whoever knows them.
    """

    tokens: Int[Tensor, " n"]
    logp_rollout: Float[Tensor, " n"]
    cu_seqlens: Int[Tensor, " cuts"]
    rollout_version: Int[Tensor, " n"]
    prompt_tokens: Int[Tensor, " m"]
    prompt_cu_seqlens: Int[Tensor, " cuts"]
    group_ids: Int[Tensor, " b"]
    finish: tuple[Literal["stop", "length"], ...]
    provenance: Provenance
    evidence: Evidence | None = None
    support: Support | None = None
    """What the sampler's filters left over, where it filtered and the engine recorded it; the trainer's policies are
    then scored on it, too."""
    rewards: Float[Tensor, " b"] | None = None
    components: Mapping[str, Float[Tensor, " b"]] | None = None
    """Named parts of the reward, where the task has them."""
    greedy_rewards: Float[Tensor, " b"] | None = None
    """Reward of a greedy response to the same prompt by the same weights, where one was drawn (ReMax's baseline)."""
    workers: tuple[str, ...] | None = None
    """Where several rollout workers draw: name of the one that drew the last token of each response."""
    queue_seconds: Float[Tensor, " b"] | None = None
    """Seconds from the submission of the response's group until a worker began its first token."""
    generation_seconds: Float[Tensor, " b"] | None = None
    """Seconds from the beginning of its first token to the end of the response."""
    mix_alpha: Float[Tensor, " b"] | None = None
    """Where a teacher decoded along: its share of the logits that each response was drawn from, [0, 1]."""
    mix_kl: Float[Tensor, " n"] | None = None
    """There: KL(mixture || policy alone) at each response token, nats, exact over the tokens that could be drawn."""
    prompts: tuple[str, ...] | None = field(default=None, repr=False)
    completions: tuple[str, ...] | None = field(default=None, repr=False)
    turns: Turns | None = field(default=None, repr=False)
    """Where sequences are episodes of several turns; None: one turn each."""
    routes: Routes | None = field(default=None, repr=False)
    """Experts that the engine sent the tokens to, where it was asked to record them."""
    retention: Retention | None = field(default=None, repr=False)
    """What the engine's compressed KV cache kept, where it compresses; the trainer's attention then sees no more."""
    speculation: Speculation | None = field(default=None, repr=False)
    """How each token came about, where a drafter proposed tokens to the engine."""

    @property
    def num_sequences(self) -> int:
        return len(self.finish)

    @property
    def segments(self) -> Segments:
        """Sequence, turn and prompt group of each token."""
        segments = Segments(self.cu_seqlens, group_ids=self.group_ids)
        return segments if self.turns is None else segments.with_turns(self.turns.ids)

    @property
    def lengths(self) -> Int[Tensor, " b"]:
        """Response tokens per sequence."""
        return self.cu_seqlens.diff()

    @property
    def lengths_with_context(self) -> Int[Tensor, " b"]:
        """Tokens per sequence behind its prompt: response tokens, and what an environment wrote between them."""
        return self.lengths if self.turns is None else self.lengths + self.turns.context_cu_seqlens.diff()

    def prompt_keys(self) -> Int[Tensor, " b"]:
        """A hash of each sequence's prompt tokens: equal where prompts are, in whatever file or batch.

        64 bits of BLAKE2b; a million different prompts share one with probability 3e-8.
        """
        return keys_of(self.prompt_tokens, self.prompt_cu_seqlens)

    def with_(self, **changes: object) -> Rollouts:
        """Return the rollouts with some fields replaced (rewards, group ids, texts, ...)."""
        return replace(self, **changes)  # type: ignore[arg-type]

    @property
    def recorded(self) -> tuple[str, ...]:
        """Names in `REPLAYABLE` that these rollouts recorded."""
        return tuple(name for name in REPLAYABLE if getattr(self, name) is not None)

    def select(self, sequences: Int[Tensor, " s"]) -> Rollouts:
        """The given sequences, in the given order, as a batch of their own."""
        rows, order = Segments(self.cu_seqlens).rows(sequences), sequences.tolist()
        values: dict[str, Any] = {}
        for name in {f.name for f in fields(self)} - {"cu_seqlens", "prompt_tokens", "prompt_cu_seqlens"}:
            x = getattr(self, name)
            if isinstance(x, Tensor):
                values[name] = x[rows if name in PER_TOKEN else sequences]
            elif isinstance(x, Mapping):
                values[name] = {key: value[sequences] for key, value in x.items()}
            elif isinstance(x, tuple):
                values[name] = tuple(x[i] for i in order)
        return replace(
            self,
            evidence=None if self.evidence is None else evidence_at(self.evidence, rows),
            support=None if self.support is None else self.support.select(rows),
            turns=None if self.turns is None else self.turns.select(rows, sequences),
            routes=None if self.routes is None else self.routes.select(sequences),
            retention=None if self.retention is None else self.retention.select(sequences),
            speculation=None if self.speculation is None else self.speculation.select(rows),
            cu_seqlens=cumulative(self.lengths[sequences]),
            prompt_tokens=self.prompt_tokens[Segments(self.prompt_cu_seqlens).rows(sequences)],
            prompt_cu_seqlens=cumulative(self.prompt_cu_seqlens.diff()[sequences]),
            **values,
        )


def pack_sequences(sequences: Sequence[Sequence[int]]) -> tuple[Int[Tensor, " n"], Int[Tensor, " cuts"]]:
    """Token lists as one flat stream and its cuts."""
    lengths = torch.tensor([len(s) for s in sequences], dtype=torch.int64)
    flat = torch.tensor([t for s in sequences for t in s], dtype=torch.int64)
    return flat, cumulative(lengths)


def concatenate(batches: Sequence[Rollouts]) -> Rollouts:
    """Several batches of one provenance and one kind of evidence as a single batch.

    Raises: `ShapeError` if they differ in provenance, or in the output head of their hidden states.
    """
    first = batches[0]
    if any(b.turns is not None for b in batches):
        batches = [b.with_(turns=b.turns or Turns.single(len(b.tokens), b.num_sequences)) for b in batches]
    if any(b.provenance != first.provenance for b in batches):
        raise ShapeError(
            "cannot concatenate rollouts of different provenance: "
            f"{first.provenance} and {next(b.provenance for b in batches if b.provenance != first.provenance)}; "
            "keep them as separate batches"
        )

    def joined(name: str) -> object:
        values = [getattr(b, name) for b in batches]
        one = values[0]
        if any(v is None for v in values):
            return None
        if isinstance(one, Tensor):
            return joined_cuts(values) if name.endswith("cu_seqlens") else torch.cat(values)
        if isinstance(one, Recorded):
            return one.joined(values)
        if isinstance(one, Mapping):
            return {k: torch.cat([v[k] for v in values]) for k in one}
        if isinstance(one, Evidence):
            return joined_evidence(values)
        return sum(values, ()) if isinstance(one, tuple) else one

    return Rollouts(**{f.name: joined(f.name) for f in fields(Rollouts)})  # type: ignore[arg-type]


def joined_evidence(parts: Sequence[Evidence]) -> Evidence:
    """One evidence of the tokens of all parts; a lone part is not copied.

    Raises: `ShapeError` if the parts differ in kind or width, or are hidden states of different output heads.
    """
    first, *others = parts
    if not others:
        return first
    shapes = [(type(p).__name__, *(x.shape[1:] for x in _per_token(p).values())) for p in parts]
    if len(set(shapes)) > 1:
        raise ShapeError(
            f"cannot join evidence of different kinds: {shapes[0][0]} with {tuple(shapes[0][1])} numbers per token and "
            f"{next(f'{s[0]} with {tuple(s[1])}' for s in shapes if s != shapes[0])}; keep them as separate batches"
        )
    if not all(_same_head(first, p) for p in others):
        raise ShapeError(
            "cannot join hidden states of different output heads (drawn at different versions); keep them as "
            'separate batches, or record evidence = "full" or a number of top log-probs'
        )
    values = [_per_token(p) for p in parts]
    return replace(first, **{name: torch.cat([v[name] for v in values]) for name in values[0]})


def evidence_at(evidence: Evidence, rows: Int[Tensor, " k"]) -> Evidence:
    """The evidence of some of the tokens."""
    return replace(evidence, **{name: x[rows] for name, x in _per_token(evidence).items()})


def _per_token(evidence: Evidence) -> dict[str, Tensor]:
    """Tensors of the evidence that have one row per token."""
    values = {f.name: getattr(evidence, f.name) for f in fields(evidence)}
    return {name: x for name, x in values.items() if isinstance(x, Tensor)}


def _same_head(a: Evidence, b: Evidence) -> bool:
    """Whether hidden states belong to equal output heads; True for other evidence."""

    def same(x: object, y: object) -> bool:
        if isinstance(x, Tensor) and isinstance(y, Tensor):
            return x.dtype == y.dtype and torch.equal(x, y)
        return x == y

    if not isinstance(a, HiddenStates) or not isinstance(b, HiddenStates) or a.head is b.head:
        return True
    return all(same(getattr(a.head, f.name), getattr(b.head, f.name)) for f in fields(Head))


def joined_cuts(parts: Sequence[Int[Tensor, " _"]]) -> Int[Tensor, " cuts"]:
    """Cuts of the segments of all parts, one part behind the other."""
    return cumulative(torch.cat([cuts.diff() for cuts in parts]))


def keys_of(tokens: Int[Tensor, " m"], cu_seqlens: Int[Tensor, " cuts"]) -> Int[Tensor, " b"]:
    """Return a hash of each prompt's tokens, as `Rollouts.prompt_keys`."""
    ids, cuts = tokens.long().numpy(), cu_seqlens.tolist()
    return torch.tensor([text_id(ids[a:b].tobytes()) for a, b in pairwise(cuts)], dtype=torch.int64)
