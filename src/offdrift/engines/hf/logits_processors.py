"""What stands behind the filters while transformers draws: a recorder, and a leader along given tokens.

Both are logits processors by their form; nothing here imports transformers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from offdrift.divergence.head import Head
from offdrift.engines.generate import Draws
from offdrift.engines.output_head import HeadInput
from offdrift.records.rollouts import Evidence, EvidenceKind, FullVocab, HiddenStates, TopK

PAD = 0
"""Fills rectangles only: what is real is said by lengths, so any id will do."""


class Recorder:
    """Records the scores that are sampled: the last processor, behind every filter.

    Which token was drawn is known one step later, so one block of `[batch, vocab]` waits; with
    full evidence all blocks are kept, with top-k evidence their k largest, with hidden evidence what
    the head consumed to make them.
    """

    def __init__(
        self, evidence: EvidenceKind, head: Head | None = None, seen: HeadInput | None = None
    ) -> None:
        self.evidence, self.head, self.seen = evidence, head, seen
        self.waiting: Tensor | None = None
        self.logp: list[Tensor] = []  # per step: log-prob of the token drawn, [batch]
        self.ids: list[Tensor] = []  # per step: ids of the k likeliest, [batch, k]
        self.rows: list[Tensor] = []  # per step: log-probs or states, [batch, vocab, k or hidden]

    def __call__(
        self, input_ids: Int[Tensor, "b t"], scores: Float[Tensor, "b v"]
    ) -> Float[Tensor, "b v"]:
        self._settle(input_ids[:, -1])
        self.waiting = block = scores.float().log_softmax(-1)
        if self.evidence == "full":
            self.rows.append(block)
        elif isinstance(self.evidence, int):
            top = block.topk(self.evidence, dim=-1)
            self.rows.append(top.values)
            self.ids.append(top.indices.int())
        elif self.seen is not None and self.seen.last is not None:
            # The last place of every prompt: a copy, where the forward pass kept all places.
            self.rows.append(self.seen.last[:, -1].clone())
        return scores

    def draws(self, tokens: Int[Tensor, "b t"], lengths: Int[Tensor, " b"]) -> Draws:
        """What was drawn, packed, given the tokens that `generate` returned."""
        steps = tokens.shape[1]
        if len(self.logp) < steps:
            self._settle(tokens[:, -1])
        drawn = torch.arange(steps, device=tokens.device) < lengths[:, None]  # [b, t]

        def packed(per_step: list[Tensor]) -> Tensor:
            # A backend that checks for stops late records steps it then undoes: keep the rest.
            return torch.stack(per_step[:steps], dim=1)[drawn].cpu()

        evidence: Evidence | None = None
        if self.ids:
            evidence = TopK(packed(self.ids), packed(self.rows))
        elif self.head is not None:
            evidence = HiddenStates(packed(self.rows), self.head)
        elif self.rows:
            evidence = FullVocab(packed(self.rows))
        return Draws(tokens[drawn].cpu(), lengths.cpu(), packed(self.logp), evidence)

    def _settle(self, drawn: Int[Tensor, " b"]) -> None:
        if self.waiting is not None:
            self.logp.append(self.waiting.gather(1, drawn[:, None]).squeeze(1))


class Leader:
    """Leaves one token to draw, the next of a response that is given: behind the recorder."""

    def __init__(self, responses: Sequence[Sequence[int]], device: torch.device) -> None:
        width = max(map(len, responses))
        rows = [[*r, *[PAD] * (width - len(r))] for r in responses]
        self.steps = iter(torch.tensor(rows, device=device).T)

    def __call__(
        self, input_ids: Int[Tensor, "b t"], scores: Float[Tensor, "b v"]
    ) -> Float[Tensor, "b v"]:
        alone = torch.full_like(scores, -torch.inf)
        return alone.scatter_(1, next(self.steps)[:, None], 0.0)


def left_padded(
    prompts: Sequence[Sequence[int]], device: torch.device
) -> tuple[Int[Tensor, "b t"], Int[Tensor, "b t"]]:
    """Prompts flush right, and the mask of what is a prompt, by length."""
    width = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (width - len(p)) + list(p) for p in prompts], device=device)
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    mask = torch.arange(width, device=device) >= width - lengths[:, None]
    return ids, mask.long()


def response_lengths(tokens: Int[Tensor, "b t"], stops: tuple[int, ...]) -> Int[Tensor, " b"]:
    """Tokens up to and including the first stop token; all of them if there is none."""
    is_stop = torch.isin(tokens, torch.tensor(stops, dtype=tokens.dtype, device=tokens.device))
    first = is_stop.int().argmax(1) + 1
    return first.where(is_stop.any(1), tokens.shape[1])
