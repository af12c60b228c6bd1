"""What a micro-batch of NeMo-RL holds, and the exact divergences that its logits allow."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.distributed.tensor import DTensor

from offdrift.divergence import Divergence, exact_divergences, topk_divergences
from offdrift.errors import ShapeError
from offdrift.logprobs import LogProbs

FULL = "generation_logits"
"""Data field `[batch, time, vocab]`: scores of the policy that drew each token, logits or log-probs,
aligned as `generation_logprobs` (index t is about token t; index 0 is padding)."""
TOP_IDS, TOP_LOGP = "generation_topk_ids", "generation_topk_logprobs"
"""Data fields `[batch, time, k]`: ids and log-probs of its k likeliest tokens, aligned likewise."""


@dataclass(frozen=True)
class Seen:
    """The trainable tokens of a micro-batch; index 0 of every field is padding."""

    data: Mapping[str, Any]
    mask: Bool[Tensor, "b s"]

    def field(self, name: str) -> Tensor | None:
        """A field `[b, s, ...]` without its padding at index 0; None if the data lack it."""
        return self.data[name][:, 1:] if name in self.data else None

    def rows(self, name: str) -> Tensor | None:
        """A field of vectors at the trainable tokens."""
        x = self.field(name)
        return None if x is None else x[self.mask]

    @functools.cached_property
    def ids(self) -> Int[Tensor, " n"]:
        """The trainable tokens themselves."""
        return self.data["input_ids"][:, 1:][self.mask]

    def unpack(self, x: Float[Tensor, " n"]) -> Float[Tensor, "b s"]:
        """One number per trainable token, where the token stands; 0 elsewhere. Gradient: to `x`."""
        empty = x.new_zeros(self.mask.numel())
        at = self.mask.reshape(-1).nonzero().squeeze(1)
        return empty.index_put((at,), x).reshape(self.mask.shape)


def score_rows(logits: Tensor, seen: Seen, vocab: int | None) -> Float[Tensor, "n v"]:
    """The scores from which each trainable token was drawn. Gradient: to `logits`."""
    if isinstance(logits, DTensor):
        logits = logits.full_tensor()
    if vocab is not None and logits.shape[-1] < vocab:
        raise ShapeError(
            f"logits have {logits.shape[-1]} columns for a vocabulary of {vocab}: tensor parallelism "
            'has sharded it; set tensor_model_parallel_size=1, or reads="logprob"'
        )
    return logits[:, : seen.mask.shape[1]][seen.mask]


def drawn(scores: Float[Tensor, "n v"], ids: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
    """log pi(token) = z(token) - log sum exp z. Gradient: to `scores`."""
    scores = scores.float()
    return scores.gather(1, ids[:, None].long()).squeeze(1) - scores.logsumexp(1)


def divergences_of(
    scores: Float[Tensor, "n v"], seen: Seen, logprobs: LogProbs
) -> dict[str, Divergence] | None:
    """KL(mu || pi) and TV(mu, pi) at every token: exact, intervals, or None without evidence."""
    full = seen.rows(FULL)
    if full is not None:
        found = exact_divergences(full, scores)
        kl = Divergence.exact("kl_rollout_current", found.kl_rollout_current)
        return {kl.name: kl, "tv_rollout_current": Divergence.exact("tv_rollout_current", found.tv)}
    ids, top = seen.rows(TOP_IDS), seen.rows(TOP_LOGP)
    if ids is None or top is None:
        return None
    pair = topk_divergences(ids.long(), top, seen.ids.long(), logprobs.logp_rollout, scores)
    return {d.name: d for d in pair}
