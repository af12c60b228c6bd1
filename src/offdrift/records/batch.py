"""`Logged`: sequences as some training run logged them, whatever framework wrote the log.

The canonical record of an audit, on the packed layout. What a log does not hold is None, never a
made-up number; tokens whose log-probs are missing, a placeholder or not finite were dropped by the
reader and counted in `unscored`, their sequences stay. Every token that is left can train and is
scored by every field that is present: sequences that lack a field are in a batch of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from offdrift.errors import EvidenceError
from offdrift.logprobs import LogProbs
from offdrift.segments import Segments


@dataclass(frozen=True, kw_only=True)
class Logged:
    """A batch of logged sequences: `n` scored response tokens in `b` sequences; `n` may be 0.

    A sequence without any scored token has length 0 in `cu_seqlens`; `response_lengths` says how
    long the response was.
    """

    cu_seqlens: Int[Tensor, " cuts"]
    step: Int[Tensor, " b"]
    """Optimizer step (or the log's own counter) that each sequence belongs to."""
    row: Int[Tensor, " b"]
    """Where the sequence stands in its file: line or row number, from 1."""
    response_lengths: Int[Tensor, " b"]
    """Length of each whole response, masked and unscored tokens included, in `length_unit`."""
    length_unit: str = "token"
    """"token", or "character" where the log holds text alone."""
    logp_rollout: Float[Tensor, " n"] | None = None
    logp_old: Float[Tensor, " n"] | None = None
    logp: Float[Tensor, " n"] | None = None
    logp_ref: Float[Tensor, " n"] | None = None
    advantages: Float[Tensor, " n"] | None = None
    """Per token; a log with one advantage per sequence has it repeated."""
    rewards: Float[Tensor, " b"] | None = None
    group_ids: Int[Tensor, " b"] | None = None
    """Sequences of one prompt share a number, within the batch."""
    rollout_version: Int[Tensor, " n"] | None = None
    """Version of the weights that drew each token."""
    version: Int[Tensor, " b"] | None = None
    """Version of the weights that were trained when the sequence was used."""
    position: Int[Tensor, " n"] | None = None
    """Place of each token in its response, from 0; None: no token was dropped."""
    entropy: Float[Tensor, " n"] | None = None
    """Entropy of the training policy at each token, nats."""
    divergences: Mapping[str, Float[Tensor, " n"]] = field(default_factory=dict)
    """Exact full-vocabulary divergences by name (`kl_rollout_current`, `tv_rollout_old`, ...)."""
    tokens: Int[Tensor, " n"] | None = None
    old_status: Int[Tensor, " b"] | None = None
    """How the old log-probs of each sequence were come by, its worst token's: an index into
    `OLD_STATUS` (exact, stale, approximated, missing)."""
    truncated: Int[Tensor, " b"] | None = None
    """1 where the response was cut off by its length limit."""
    prompts: tuple[str, ...] | None = field(default=None, repr=False)
    completions: tuple[str, ...] | None = field(default=None, repr=False)
    trainable: Int[Tensor, " b"] | None = None
    """Tokens of each response that may train, scored or not; None: those that are here."""
    unscored: Mapping[str, Int[Tensor, " b"]] = field(default_factory=dict)
    """Of these, tokens without a usable log-prob, by "FIELD/CAUSE" (see `integrations.logs.scored`);
    a token without two of them counts in both."""

    @property
    def num_sequences(self) -> int:
        return len(self.step)

    @property
    def num_tokens(self) -> int:
        return int(self.cu_seqlens[-1])

    @cached_property
    def segments(self) -> Segments:
        """Which token belongs to which sequence and prompt group."""
        return Segments(self.cu_seqlens, group_ids=self.group_ids)

    @property
    def pairs(self) -> tuple[str, ...]:
        """The ratios that the log's policies make: of "mismatch", "full" and "staleness"."""
        held = {
            "mismatch": (self.logp_rollout, self.logp_old),
            "full": (self.logp_rollout, self.logp),
            "staleness": (self.logp_old, self.logp),
        }
        return tuple(on for on, two in held.items() if all(x is not None for x in two))

    @cached_property
    def lag(self) -> Int[Tensor, " n"] | None:
        """Updates between the weights that drew each token and those that were trained.

        None if the log does not say, or counts the two in different ways: no engine is ahead.
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
        """The log-probs through the library's door.

        Raises: `EvidenceError` if the log holds no rollout log-probs; `BadValueError` if no token is
            left, or the reader let a value through that no policy can produce.
        """
        if self.logp_rollout is None:
            raise EvidenceError(
                "this log holds no log-probs of the rollout policy, so drift cannot be measured; "
                "log the engine's log-prob of every sampled token"
            )
        return LogProbs.pack(
            self.logp_rollout,
            self.logp,
            self.logp_old,
            logp_ref=self.logp_ref,
            segments=self.segments,
        )

    def trained(self) -> LogProbs:
        """The trainer's two policies, the old one in the place of the rollout's.

        For what compares those two alone: of a log without rollout log-probs, staleness.

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
        rows = Segments(self.cu_seqlens).rows(sequences)
        order = sequences.tolist()
        lengths = self.cu_seqlens.diff()[sequences]

        def by_token(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[rows]

        def by_sequence(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[sequences]

        def texts(x: tuple[str, ...] | None) -> tuple[str, ...] | None:
            return None if x is None else tuple(x[i] for i in order)

        return Logged(
            cu_seqlens=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
            step=self.step[sequences],
            row=self.row[sequences],
            response_lengths=self.response_lengths[sequences],
            length_unit=self.length_unit,
            logp_rollout=by_token(self.logp_rollout),
            logp_old=by_token(self.logp_old),
            logp=by_token(self.logp),
            logp_ref=by_token(self.logp_ref),
            advantages=by_token(self.advantages),
            rewards=by_sequence(self.rewards),
            group_ids=by_sequence(self.group_ids),
            rollout_version=by_token(self.rollout_version),
            version=by_sequence(self.version),
            position=by_token(self.position),
            entropy=by_token(self.entropy),
            divergences={name: x[rows] for name, x in self.divergences.items()},
            tokens=by_token(self.tokens),
            old_status=by_sequence(self.old_status),
            truncated=by_sequence(self.truncated),
            prompts=texts(self.prompts),
            completions=texts(self.completions),
            trainable=by_sequence(self.trainable),
            unscored={name: x[sequences] for name, x in self.unscored.items()},
        )
