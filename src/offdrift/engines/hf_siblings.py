"""A drafter without a model: answers to one prompt draft for each other.

Siblings write much alike. What follows the last few tokens of a response in the answers to its prompt, as far as they
are drawn, is counted; the shares are the drafter's law, and a pass of the target judges the proposals as it judges
those of a model (`hf_speculative.verified`). So the law of every token stays the target's, and responses stay
independent of each other: what a sibling wrote changes proposals only.

Source: adaptive grouped speculative decoding, Seer, arXiv:2511.14617, after a description; the counts, the
back-off to shorter contexts and the rule that ends a window are this library's.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from offdrift.engines.hf_speculative import Proposals, Verified

LONGEST_CONTEXT = 6
"""Tokens before a place that are looked up, at most."""
LEAST_CHANCE = 0.3
"""A window ends where the chance that all of its proposals are accepted is estimated below this."""


class SiblingIndex:
    """Counts of what followed the last tokens, in the answers to each prompt, and how well they foretold.

    Args:
        longest: tokens of a context, at most.

    Example:
        >>> index = SiblingIndex(longest=2)
        >>> index.add(0, (7,), [1, 2, 3, 1, 2, 4])
        >>> index.following(0, (9, 1, 2))
        (2, {3: 0.5, 4: 0.5})
        >>> index.following(0, (1, 9)), index.following(1, (1, 2))
        (None, None)
    """

    def __init__(self, longest: int = LONGEST_CONTEXT) -> None:
        self.longest = longest
        self._counts: dict[tuple[int, tuple[int, ...]], Counter[int]] = defaultdict(Counter)
        self._judged: dict[int, list[int]] = defaultdict(lambda: [1, 2])
        self._groups: dict[tuple[int, ...], int] = {}
        self.groups: set[int] = set()
        """Groups of which an answer is drawn, or being drawn."""

    def group_of(self, prompt: Sequence[int]) -> int:
        """Number of the group of answers to a prompt."""
        return self._groups.setdefault(tuple(prompt), len(self._groups))

    def add(self, group: int, before: Sequence[int], tokens: Sequence[int]) -> None:
        """Count `tokens`, which an answer of the group wrote behind `before`."""
        text = [*before[-self.longest :], *tokens]
        for end in range(len(text) - len(tokens), len(text)):
            for begin in range(max(0, end - self.longest), end):
                self._counts[group, tuple(text[begin:end])][text[end]] += 1

    def following(self, group: int, context: Sequence[int]) -> tuple[int, dict[int, float]] | None:
        """Length of the longest end of `context` that the group has seen, and the shares of what followed it there."""
        for length in range(min(self.longest, len(context)), 0, -1):
            counts = self._counts.get((group, tuple(context[-length:])))
            if counts:
                total = counts.total()
                return length, {token: n / total for token, n in counts.items()}
        return None

    def learn(self, length: int, accepted: bool) -> None:
        """Take the judgement of a proposal whose context had so many tokens."""
        self._judged[length][0] += accepted
        self._judged[length][1] += 1

    def chance(self, length: int) -> float:
        """Estimated acceptance of a proposal by the length of its context: (accepted + 1) / (judged + 2)."""
        good, judged = self._judged[length]
        return good / judged


class SiblingDrafter:
    """Proposals from an index of siblings' answers.

    The first answer to every prompt that the index does not know is drawn ahead, without proposals (Seer's order of
    dispatch has it first, too); then the others are, which also read each other. A window ends where no sibling has
    been, or where all of it is accepted with an estimated chance below `LEAST_CHANCE`: both are known before the
    proposal at that place, as exactness asks.

    Args:
        index: what siblings wrote so far; it is added to.
        groups: the group of every response: those of one group draft for each other.
        vocab_size: of the target.
    """

    def __init__(self, index: SiblingIndex, groups: Sequence[int], *, vocab_size: int, device: torch.device) -> None:
        self.index, self.groups, self.vocab_size, self.device = index, list(groups), vocab_size, device

    def waves(self) -> list[Int[Tensor, " w"]]:
        first: list[int] = []
        others: list[int] = []
        for row, group in enumerate(self.groups):
            (others if group in self.index.groups else first).append(row)
            self.index.groups.add(group)
        return [torch.tensor(rows, device=self.device) for rows in (first, others) if rows]

    def start(self, rows: Int[Tensor, " n"], ids: Int[Tensor, "m t"], mask: Int[Tensor, "m t"], text: Tensor) -> None:
        prompts = [p[m.bool()].tolist() for p, m in zip(ids, mask, strict=True)]
        self.active = [self.groups[row] for row in rows.tolist()]
        self.texts = [list(prompts[i]) for i in text.tolist()]

    def propose(
        self, last: Int[Tensor, "n 1"], places: Int[Tensor, " n"], numbers: Float[Tensor, "n k"], limit: Tensor
    ) -> Proposals:
        draws, self.lengths = numbers.cpu(), []
        proposed: list[list[int]] = []
        laws: list[list[dict[int, float]]] = []
        for row, most in enumerate(limit.tolist()):
            context, chance = self.texts[row][-self.index.longest :], 1.0
            tokens, law, lengths = [], [], []
            while len(tokens) < most:
                found = self.index.following(self.active[row], context)
                if found is None:
                    break
                length, shares = found
                chance *= self.index.chance(length)
                if chance < LEAST_CHANCE:
                    break
                token = drawn(shares, float(draws[row, len(tokens)]))
                tokens.append(token)
                law.append(shares)
                lengths.append(length)
                context = [*context, token]
            proposed.append(tokens)
            laws.append(law)
            self.lengths.append(lengths)
        return self._packed(proposed, laws)

    def _packed(self, proposed: list[list[int]], laws: list[list[dict[int, float]]]) -> Proposals:
        k = max(map(len, proposed))
        tokens = torch.zeros(len(proposed), k, dtype=torch.long)
        logp = torch.full((len(proposed), k, self.vocab_size), -torch.inf)
        logp[..., 0] = 0.0  # behind a response's limit: any law, of the padding
        for row, (own, law) in enumerate(zip(proposed, laws, strict=True)):
            tokens[row, : len(own)] = torch.tensor(own, dtype=torch.long)
            for i, shares in enumerate(law):
                logp[row, i, 0] = -torch.inf
                logp[row, i, list(shares)] = torch.tensor(list(shares.values())).log()
        limit = torch.tensor([len(own) for own in proposed])
        return Proposals(tokens.to(self.device), logp.to(self.device), limit.to(self.device))

    def judged(self, result: Verified, grown: Int[Tensor, " n"], limit: Int[Tensor, " n"]) -> None:
        accepted, tokens = result.accepted.tolist(), result.tokens.tolist()
        for row, new in enumerate(grown.tolist()):
            for i, length in enumerate(self.lengths[row][: accepted[row] + 1]):
                self.index.learn(length, i < accepted[row])
            self.index.add(self.active[row], self.texts[row], tokens[row][:new])
            self.texts[row] += tokens[row][:new]

    def keep(self, alive: Int[Tensor, " m"]) -> None:
        rows = alive.tolist()
        self.active, self.texts = [self.active[i] for i in rows], [self.texts[i] for i in rows]


def drawn(shares: dict[int, float], uniform: float) -> int:
    """The first token, in their order, whose cumulated share exceeds `uniform`.

    Example:
        >>> drawn({5: 0.25, 3: 0.75}, 0.2), drawn({5: 0.25, 3: 0.75}, 0.25)
        (5, 3)
    """
    height = uniform
    for token, share in shares.items():
        height -= share
        if height < 0:
            return token
    return next(reversed(shares))  # shares that add up to less than 1 by a rounding
