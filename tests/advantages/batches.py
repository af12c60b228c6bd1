"""Random batches with every input that any estimator reads, padded and packed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from offdrift.advantages import ADVANTAGES
from offdrift.segments import Segments


@dataclass(frozen=True)
class Batch:
    """`b` responses of up to `t` columns; padded per-token fields are zero off the mask."""

    mask: Tensor
    groups: Tensor
    padded: dict[str, Tensor]
    per_sequence: dict[str, Tensor]

    @property
    def segments(self) -> Segments:
        return Segments.from_lengths(self.mask.sum(1), group_ids=self.groups)

    def pack(self, x: Tensor) -> Tensor:
        return x[self.mask.bool()]

    def inputs(self, how: str) -> dict:
        """What the estimator needs and reads, packed; gamma and lambda below 1."""
        known = {name: self.pack(x) for name, x in self.padded.items()} | self.per_sequence
        known |= {
            "gamma": 0.9,
            "lam": 0.8,
            "right_from": 0.0,
            "zvp_alpha": 0.3,
            "position": self.pack(columns(self.mask)),
        }
        if how == "opob":
            known["weight"] = self.segments.spread(self.per_sequence["sequence_weight"])
        row = ADVANTAGES[how]
        return {name: known[name] for name in (*row.needs, *row.reads)}

    def select(self, sequences: Tensor) -> Batch:
        take = lambda fields: {name: x[sequences] for name, x in fields.items() if len(x) != 2}  # noqa: E731
        per_sequence = take(self.per_sequence) | {"component_weights": self.per_sequence["component_weights"]}
        return Batch(self.mask[sequences], self.groups[sequences], take(self.padded), per_sequence)


def columns(mask: Tensor) -> Tensor:
    return torch.arange(mask.shape[1]).expand_as(mask)


def random_batch(seed: int, groups: list[int], *, longest: int = 11, empty: int = 1) -> Batch:
    """One sequence per entry of `groups`, with gaps in the mask, `empty` of them without tokens."""
    g = torch.Generator().manual_seed(seed)
    b, t = len(groups), longest
    assert b > 2, "component weights are told apart from per-sequence fields by their length"
    lengths = torch.randint(1, t + 1, (b,), generator=g)
    mask = (columns(torch.zeros(b, t)) < lengths[:, None]) & (torch.rand(b, t, generator=g) > 0.25)
    mask[torch.randperm(b, generator=g)[:empty]] = False
    uniform = lambda *shape: torch.rand(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    normal = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    probability = 0.05 + 0.9 * uniform(b, t)
    padded = {
        "rewards": normal(b, t),
        "values": normal(b, t),
        "logp_old": probability.log(),
        # The square of the sampled one, and part of what is left.
        "sum_pi_squared": probability.square() + (1 - probability).square() * uniform(b, t),
        "weight": 0.25 + uniform(b, t),
        "entropy": 2 * uniform(b, t),
    }
    per_sequence = {
        "greedy_rewards": normal(b),
        "components": normal(b, 2),
        "component_weights": torch.tensor([1.0, 0.5], dtype=torch.float64),
        "grad_norm_squared": 0.5 + uniform(b),
        "sequence_weight": 0.25 + uniform(b),
    }
    on_mask = {name: x * mask for name, x in padded.items()}
    return Batch(mask.double(), torch.tensor(groups), on_mask, per_sequence)
