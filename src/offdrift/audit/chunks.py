"""Logged sequences cut into runs of whole sequences, without copying tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from offdrift.rollouts.logged import Logged

CHUNK = 2**20
"""Tokens that are summarized at once: temporaries stay at some tens of MiB however large a piece is."""


def by_step(batch: Logged) -> Logged:
    """The same sequences, those of earlier steps first, otherwise in their order."""
    if bool((batch.step.diff() >= 0).all()):
        return batch
    return batch.select(torch.sort(batch.step, stable=True).indices)


def cut(batch: Logged, first: int, last: int) -> Logged:
    """Sequences `first` up to but not including `last`: views, no copies."""
    if (first, last) == (0, batch.num_sequences):
        return batch
    cuts = batch.cu_seqlens[first : last + 1]
    a, b = int(cuts[0]), int(cuts[-1])

    def part(x: Any, i: int, j: int) -> Any:
        return None if x is None else x[i:j]

    by_token = ("logp_rollout", "logp_old", "logp", "logp_ref", "advantages", "rollout_version", "position", "entropy", "tokens")  # fmt: skip
    by_sequence = ("rewards", "group_ids", "version", "old_status", "truncated", "prompts", "completions", "trainable")  # fmt: skip
    return replace(
        batch,
        cu_seqlens=cuts - a,
        step=batch.step[first:last],
        row=batch.row[first:last],
        response_lengths=batch.response_lengths[first:last],
        divergences={name: x[a:b] for name, x in batch.divergences.items()},
        unscored={name: x[first:last] for name, x in batch.unscored.items()},
        **{name: part(getattr(batch, name), a, b) for name in by_token},
        **{name: part(getattr(batch, name), first, last) for name in by_sequence},
    )


def chunks(batch: Logged, *, tokens: int = CHUNK) -> Iterator[Logged]:
    """Runs of whole sequences of about so many tokens each; one longer sequence is a run of its own.

    Where they are cut depends on the batch alone, never on the machine.
    """
    goals = torch.tensor(range(tokens, batch.num_tokens, tokens), dtype=torch.int64)
    inner = torch.searchsorted(batch.cu_seqlens, goals)
    inner = inner[batch.cu_seqlens[inner] < batch.num_tokens]  # no run without a token at the end
    bounds = sorted({0, *inner.tolist(), batch.num_sequences})
    for first, last in pairwise(bounds):
        yield cut(batch, first, last)


def runs(batch: Logged, width: int) -> Iterator[tuple[int, Logged]]:
    """Each run of steps that share `step // width`, with that number; the batch is in order of steps."""
    keys, counts = torch.unique_consecutive(
        torch.div(batch.step, width, rounding_mode="floor"), return_counts=True
    )
    ends = counts.cumsum(0).tolist()
    for key, first, last in zip(keys.tolist(), [0, *ends], ends):
        yield key, cut(batch, first, last)
