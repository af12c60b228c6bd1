"""Chance without a generator: pseudo-random numbers that every token makes of its own recorded values."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from offdrift.logprobs import LogProbs
from offdrift.numerics import blocks

GOLDEN = 0x9E3779B97F4A7C15


def token_keys(logprobs: LogProbs, *, seed: int = 0) -> Float[Tensor, " n"]:
    """A pseudo-random number in [0, 1) for every token, made from recorded values alone.

    It mixes the bits of log mu of the token, its position, all of log mu of its sequence, and the
    seed; thus neither micro-batches nor ranks nor the order of sequences change it. Sequences that
    agree in every bit of log mu have equal keys. Gradient: none.

    Example:
        >>> from offdrift.segments import Segments
        >>> lp = LogProbs.pack(torch.tensor([-1.0, -1.0]), segments=Segments.from_lengths([2]))
        >>> token_keys(lp)
        tensor([0.0499, 0.6963], dtype=torch.float64)

    Reference: Steele et al., "Fast splittable pseudorandom number generators", 2014 (the mixer).
    """
    segments = logprobs.segments
    bits = logprobs.logp_rollout.double().view(torch.int64)
    token_hash = (bits ^ (segments.position + 1) * _signed(GOLDEN)) * _signed(0xD1342543DE82EF95)
    # Integers wrap around, so a difference of running sums is exact however long the stream.
    running = torch.cat([token_hash.new_zeros(1), token_hash.cumsum(0)])
    sequence_hash = _mixed(running[segments.cu_seqlens].diff() + _signed((seed + 1) * GOLDEN))
    mixed = [_shifted(_mixed(x ^ w), 11) for x, w in blocks(token_hash, segments.spread(sequence_hash))]
    return torch.cat(mixed).double() * 2.0**-53


def _mixed(x: Int[Tensor, " k"]) -> Int[Tensor, " k"]:
    """Every bit of the result depends on every bit of x; one to one."""
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def _shifted(x: Int[Tensor, " k"], bits: int) -> Int[Tensor, " k"]:
    """Shift right, filling with zeros; torch repeats the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(x: int) -> int:
    """The 64-bit integer with the same last bits."""
    return (x + 2**63) % 2**64 - 2**63
