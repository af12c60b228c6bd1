"""Tokens whose log-probs a server gave, read by a model: log-probs, misfit, and the place between two checkpoints.

    d_t = log pi_t - log mu_t,   e_t = log pi_t - log pi'_t        pi, pi' two checkpoints, mu the server
    position = sum_t d_t e_t / s_t^2  /  sum_t e_t^2 / s_t^2       0 at pi, 1 at pi'

s_t is what a log-prob moves by when logits move by 1. Noise of the server's precision adds to d and is as likely up as
down, so the position tells two checkpoints apart whose difference at a single token is far below the noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from offdrift.check.rescore import LOGITS, PADDED
from offdrift.engines.score import chunks, score
from offdrift.engines.sync_units import spread_of
from offdrift.records.rollouts import Rollouts
from offdrift.segments import Segments


class TokensRead(NamedTuple):
    """Tokens as a model reads them, in the order of the batches."""

    logp: Float[Tensor, " n"]
    """log pi of each token, nat."""
    spread: Float[Tensor, " n"]
    """s of each token."""
    entropy: Float[Tensor, " n"]
    """Entropy of pi there, nat."""
    likeliest: Int[Tensor, " n"]
    """The likeliest token at each place."""


class Position(NamedTuple):
    """Place of a server on the way from one checkpoint to another."""

    place: float
    error: float
    """Standard error, prompts taken as the independent draws."""

    def below(self, limit: float, z: float) -> bool:
        """Whether it lies below by z standard errors."""
        return self.place + z * self.error < limit

    def above(self, limit: float, z: float) -> bool:
        """Whether it lies above by z standard errors."""
        return self.place - z * self.error > limit


@torch.no_grad()
def read_by(model: nn.Module, batches: Sequence[Rollouts]) -> TokensRead:
    """Log-probs of the tokens of all batches at temperature 1, their spread, and the likeliest tokens there."""
    vocabulary = int(model.config.get_text_config().vocab_size)  # type: ignore[union-attr,operator]
    budget = min(PADDED, max(1, LOGITS // vocabulary))
    read = []
    for rollouts in batches:
        segments, rows, parts = Segments(rollouts.cu_seqlens), [], []
        for piece in chunks(rollouts, token_budget=budget):
            scored = score(model, rollouts.select(piece))
            spread = spread_of(scored.logp, scored.sum_pi_squared)
            parts.append((scored.logp.cpu(), spread, scored.entropy.cpu(), scored.logits.argmax(-1).cpu()))
            rows.append(segments.rows(piece))
        order = torch.cat(rows).argsort()
        read.append([torch.cat(x)[order] for x in zip(*parts, strict=True)])
    return TokensRead(*(torch.cat(x) for x in zip(*read, strict=True)))


def misfit(logp: Float[Tensor, " n"], served: Float[Tensor, " n"]) -> float:
    """Mean of (log pi - log mu)^2 / 2, nat per token: the KL, to second order, where mu drew the tokens."""
    return float((logp - served).double().square().mean() / 2)


def position(
    here: TokensRead, there: Float[Tensor, " n"], served: Float[Tensor, " n"], groups: Int[Tensor, " n"]
) -> Position:
    """Place of the server between a checkpoint and another one, and its error, clustered by prompt.

    Args:
        here: the tokens as read by the checkpoint at 0.
        there: log pi' of the checkpoint at 1.
        served: log mu.
        groups: the prompt of each token, counted from 0.

    Returns: NaN for two checkpoints that read all tokens alike.
    """
    spread = here.spread.double()
    d, e = ((here.logp - x).double() / spread for x in (served, there))
    size = float(e.square().sum())
    if not size > 0:
        return Position(math.nan, math.nan)
    place = float((d * e).sum()) / size
    count = int(groups.max()) + 1
    sums = torch.zeros(count, dtype=torch.float64).index_add_(0, groups, (d - place * e) * e)
    error = math.sqrt(count / max(1, count - 1) * float(sums.square().sum())) / size
    return Position(place, error if count > 1 else math.inf)


def prompts_of_tokens(batches: Sequence[Rollouts]) -> Int[Tensor, " n"]:
    """The prompt of every token, counted from 0; equal prompts are one."""
    return torch.cat([b.group_ids.long().repeat_interleave(b.cu_seqlens.diff().long()) for b in batches])
