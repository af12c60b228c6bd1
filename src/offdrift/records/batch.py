"""Batches of logged sequences: `Logged`, as an audit reads them, and `Unpacked`, as a training loop has them.

What a log does not hold is None, never a made-up number. Tokens without a usable log-prob were dropped by the reader
and counted in `unscored`; their sequences stay. Every token that is left can train and is scored by every field that is
present: sequences that lack a field are in a batch of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from offdrift import records
from offdrift.errors import BadValueError, EvidenceError, ShapeError
from offdrift.logprobs import LogProbs
from offdrift.records.schema import ARGUMENTS, FIELDS, MASK, LogValues
from offdrift.segments import Segments, cumulative

Files = str | tuple[str, ...]
"""The file of a batch, or those of which it was put together."""
ROW_BITS = 40
"""Bits of a row's number; above them stands the place of its file, in a batch of several."""


def origin(files: Files, row: int) -> tuple[str, int]:
    """The file of a row, and its number there.

    Example:
        >>> origin(("a", "b"), (1 << ROW_BITS) + 7), origin("a", 7)
        (('b', 7), ('a', 7))
    """
    if isinstance(files, str):
        return files, row
    return files[row >> ROW_BITS], row & (1 << ROW_BITS) - 1


@dataclass(frozen=True, kw_only=True)
class Logged(LogValues):
    """A batch of logged sequences: `n` scored response tokens in `b` sequences; `n` may be 0.

    Its other fields are those of `schema.LogValues`, which describes them. A sequence without any scored token has
    length 0 in `cu_seqlens`; `response_lengths` says how long the response was.
    """

    cu_seqlens: Int[Tensor, " cuts"]
    length_unit: str = "token"
    """"token", or "character" where the log holds text alone."""
    divergences: Mapping[str, Float[Tensor, " n"]] = field(default_factory=dict)
    """Exact full-vocabulary divergences by name (`kl_rollout_current`, `tv_rollout_old`, ...)."""
    unscored: Mapping[str, Int[Tensor, " b"]] = field(default_factory=dict)
    """Of the tokens that may train, those without a usable log-prob, by "FIELD/CAUSE" (see
    `records.readers.assemble`); a token without two of them counts in both."""

    @staticmethod
    def of(
        rollouts: records.Rollouts,
        *,
        step: Int[Tensor, " b"],
        recorded: Sequence[str] | None = None,
        replayed: Sequence[str] = (),
        **columns: Any,
    ) -> Logged:
        """The log of rollouts: what was sampled, and `columns` with what a trainer computed from it.

        Args:
            recorded: of `REPLAYABLE`, what the engine recorded; None: what the rollouts hold.
            replayed: of `REPLAYABLE`, what all policies of the trainer did again.
        """
        drawn_by = replace(
            rollouts.provenance,
            recorded=rollouts.recorded if recorded is None else tuple(recorded),
            replayed=tuple(replayed),
        ).as_text()
        return Logged(
            cu_seqlens=rollouts.cu_seqlens,
            step=step,
            row=torch.arange(1, rollouts.num_sequences + 1),
            response_lengths=rollouts.lengths,
            logp_rollout=rollouts.logp_rollout,
            group_ids=rollouts.group_ids,
            tokens=rollouts.tokens,
            turn_ids=None if rollouts.turns is None else rollouts.turns.ids,
            truncated=torch.tensor([int(f == "length") for f in rollouts.finish]),
            workers=rollouts.workers,
            queue_seconds=rollouts.queue_seconds,
            generation_seconds=rollouts.generation_seconds,
            drawn_by=(drawn_by,) * rollouts.num_sequences,
            mix_alpha=rollouts.mix_alpha,
            **columns,
        )

    @property
    def num_sequences(self) -> int:
        return len(self.step)

    @property
    def num_tokens(self) -> int:
        return int(self.cu_seqlens[-1])

    @cached_property
    def segments(self) -> Segments:
        """Sequence, turn and prompt group of each token."""
        segments = Segments(self.cu_seqlens, group_ids=self.group_ids)
        return segments if self.turn_ids is None else segments.with_turns(self.turn_ids)

    @property
    def pairs(self) -> tuple[str, ...]:
        """The ratios that the log's policies make: of "mismatch", "full" and "staleness"."""
        policies = {
            "mismatch": (self.logp_rollout, self.logp_old),
            "full": (self.logp_rollout, self.logp),
            "staleness": (self.logp_old, self.logp),
        }
        return tuple(on for on, two in policies.items() if all(x is not None for x in two))

    @cached_property
    def lag(self) -> Int[Tensor, " n"] | None:
        """Updates between the weights that drew each token and those that were trained; None if the log does not say.

        Also where it counts the two in different ways: no engine is ahead.
        """
        return None if self._age is None or self.ahead else self._age

    @cached_property
    def ahead(self) -> int:
        """Tokens that newer weights drew than were trained, by the log's own versions."""
        return 0 if self._age is None else int((self._age < 0).sum())

    @cached_property
    def _age(self) -> Int[Tensor, " n"] | None:
        if self.rollout_version is None or self.version is None:
            return None
        return self.version[self.segments.seq_ids] - self.rollout_version

    @cached_property
    def in_response(self) -> Int[Tensor, " n"]:
        """Place of each token in its response, from 0."""
        return self.segments.position if self.position is None else self.position

    def logprobs(self) -> LogProbs:
        """The log-probs, validated and packed.

        Raises: `EvidenceError` if the log holds no rollout log-probs; `BadValueError` if no token is left, or the
            reader let a value through that no policy can produce.
        """
        if self.logp_rollout is None:
            raise EvidenceError(
                "this log holds no log-probs of the rollout policy, so drift cannot be measured; "
                "log the engine's log-prob of every sampled token"
            )
        return LogProbs.pack(
            self.logp_rollout, self.logp, self.logp_old, logp_ref=self.logp_ref, segments=self.segments
        )

    def trained(self) -> LogProbs:
        """The trainer's two policies, the old one standing in for the rollout's: of a log without it, staleness.

        Raises: `EvidenceError` if the log lacks one of the two.
        """
        if self.logp_old is None or self.logp is None:
            raise EvidenceError(
                "this log holds no log-probs of the rollout policy, and not both of the trainer's; "
                "log the engine's log-prob of every sampled token"
            )
        return LogProbs.pack(self.logp_old, self.logp, self.logp_old, segments=self.segments)

    def select(self, sequences: Int[Tensor, " s"]) -> Logged:
        """The given sequences, in the given order, as a batch of their own."""
        cuts = cumulative(self.cu_seqlens.diff()[sequences])
        return self._part(cuts, Segments(self.cu_seqlens).rows(sequences), sequences)

    def cut(self, first: int, last: int) -> Logged:
        """Sequences `first` up to but not including `last`: views, no copies."""
        if (first, last) == (0, self.num_sequences):
            return self
        cuts = self.cu_seqlens[first : last + 1]
        tokens = slice(int(cuts[0]), int(cuts[-1]))
        return self._part(cuts - cuts[0], tokens, slice(first, last))

    def _part(self, cu_seqlens: Int[Tensor, " cuts"], tokens: Tensor | slice, sequences: Tensor | slice) -> Logged:
        values: dict[str, Any] = {}
        for f in FIELDS:
            x = getattr(self, f.name)
            if isinstance(x, tuple) and isinstance(sequences, Tensor):
                x = tuple(x[i] for i in sequences.tolist())
            elif x is not None:
                x = x[tokens if f.by_token else sequences]
            values[f.name] = x
        return Logged(
            cu_seqlens=cu_seqlens,
            length_unit=self.length_unit,
            divergences={name: x[tokens] for name, x in self.divergences.items()},
            unscored={name: x[sequences] for name, x in self.unscored.items()},
            **values,
        )


_Values: Any = make_dataclass(
    "_Values",
    [
        (f.name, tuple[str, ...] | None, field(default=None, repr=False))
        if f.is_text
        else (f.name, Tensor | None, None)
        for f in ARGUMENTS
    ],
    frozen=True,
    kw_only=True,
)


@dataclass(frozen=True, kw_only=True)
class Unpacked(_Values):
    """Token tensors of one shape: padded `[b, time]` with `mask`, or packed `[n]` with `cu_seqlens`.

    Its other fields are those that `record` takes. Making one looks at shapes alone, so that nothing waits for a
    device.

    Raises: `ShapeError` if a field has neither the tokens' shape nor one value per sequence.
    """

    step: Shaped[Tensor, ...]
    cu_seqlens: Shaped[Tensor, ...] | None = None
    divergences: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shape, b = self.shape, self.num_sequences
        if (len(shape) == 2) == (self.cu_seqlens is not None) or len(shape) not in (1, 2):
            raise ShapeError(
                f"{self._first} has shape {shape}: give padded [sequences, time] with mask=, or "
                "packed [tokens] with cu_seqlens="
            )
        if len(shape) == 2 and self.mask is None:
            raise ShapeError("padded input needs mask= (nonzero where a token may train)")
        tensors: list[tuple[str, Tensor, list[tuple[int, ...]]]] = []
        for f in ARGUMENTS:
            x = getattr(self, f.name)
            if x is not None and f.is_text:
                if len(x) != b:
                    raise ShapeError(f"{f.name} has {len(x)} texts for {b} sequences")
            elif x is not None:
                per_token = [shape] if f.by_token else []
                single = [()] if f.one_for_all or f.per == "token or sequence" else []
                tensors.append((f.name, x, per_token + single + ([(b,), (b, 1)] if f.per != "token" else [])))
        tensors += [(name, x, [shape]) for name, x in self.divergences.items()]
        for name, x, allowed in tensors:
            if tuple(x.shape) not in allowed:
                raise ShapeError(
                    f"{name} has shape {tuple(x.shape)}, expected {' or '.join(map(str, allowed))}: "
                    f"{self._first} has shape {shape}, {b} sequences"
                )

    @property
    def _first(self) -> str:
        names = [f.name for f in ARGUMENTS if f.per == "token" and f is not MASK]
        for name in names:
            if getattr(self, name) is not None:
                return name
        raise ShapeError(f"nothing per token is given; give at least one of {', '.join(names)}")

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of every token tensor."""
        return tuple(getattr(self, self._first).shape)

    @property
    def num_sequences(self) -> int:
        """Rows of padded input, cuts less one of packed input."""
        return self.shape[0] if self.cu_seqlens is None else max(0, self.cu_seqlens.numel() - 1)

    def logged(self) -> Logged:
        """The tokens that may train, packed; on a device this waits for it.

        A response reaches from its first to its last token that may train, unless `response_lengths` says otherwise; a
        sequence without any keeps its row. NaN and infinite values stay what they are: readers leave such tokens out,
        and count them.

        Raises: `ShapeError` if `cu_seqlens` does not cut the tokens; `BadValueError` if what is counted is no whole
            number.
        """
        b = self.num_sequences
        if self.cu_seqlens is None:
            cuts = torch.arange(b + 1) * self.shape[1]
        else:
            cuts = self.cu_seqlens.reshape(-1).long()
            Segments(cuts).check()
            if int(cuts[-1]) != self.shape[0]:
                raise ShapeError(
                    f"{self._first} has {self.shape[0]} tokens, cu_seqlens ends at {int(cuts[-1])}; both "
                    "must come from the same packing"
                )
        position, lengths, kept = None, cuts.diff(), None
        if self.mask is not None:
            kept = self.mask.reshape(-1).nonzero().squeeze(-1)
            cuts = torch.searchsorted(kept, cuts)
            lengths = cuts.diff()
            # A response reaches from its first kept token to its last.
            if len(kept):
                start = kept[cuts[:-1].clamp(max=len(kept) - 1)]
                stop = kept[(cuts[1:] - 1).clamp(min=0)] + 1
                lengths = torch.where(cuts.diff() > 0, stop - start, 0)
                if not torch.equal(lengths, cuts.diff()):
                    position = kept - torch.repeat_interleave(start, cuts.diff())

        def sequences(x: Tensor) -> Tensor:
            return x.reshape(-1).expand(b)

        def tokens(x: Tensor) -> Tensor:
            if tuple(x.shape) == self.shape:
                return x.reshape(-1) if kept is None else x.reshape(-1)[kept]
            return torch.repeat_interleave(sequences(x), cuts.diff())

        values: dict[str, Any] = {"response_lengths": lengths}
        for f in ARGUMENTS:
            x = getattr(self, f.name)
            if x is None or f is MASK:
                continue
            if not f.is_text:
                x = tokens(x) if f.by_token else sequences(x)
                if f.is_whole and x.is_floating_point():
                    fractions = x[~x.isfinite() | (x != x.trunc())]
                    if len(fractions):
                        raise BadValueError(f"{f.name} holds {float(fractions[0]):g}; give whole numbers")
                x = x.long() if f.is_whole else x.float()
            values[f.name] = x
        return Logged(
            cu_seqlens=cuts,
            row=torch.arange(1, b + 1),
            position=position,
            divergences={name: tokens(x).float() for name, x in self.divergences.items()},
            **values,
        )
