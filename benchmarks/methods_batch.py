"""The ragged batch of `correction.py` with every fact that a method may ask for, packed and padded."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from correction import ragged
from offdrift.batch_info import BatchInfo
from offdrift.divergence.evidence import Distributions, Divergence
from offdrift.logprobs import LogProbs
from offdrift.methods import Method
from offdrift.segments import Segments


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The same tokens twice: `packed`, as ours are, and `padded`, as verl's are."""

    cu_seqlens: Tensor
    turns: Tensor
    groups: Tensor
    packed: dict[str, Tensor]
    """rollout, old, logp, ref and advantages."""
    padded: dict[str, Tensor]
    mask: Tensor
    horizon: int
    batch_info: BatchInfo
    """Everything that some row reads, with all divergences."""

    @property
    def tokens(self) -> int:
        return len(self.packed["rollout"])

    def fresh(self) -> LogProbs:
        """The packed batch, with nothing that an earlier call derived and cached."""
        segments = Segments(self.cu_seqlens, Segments(self.turns), self.groups)
        given, leaf = self.packed, self.packed["logp"].detach().requires_grad_()
        return LogProbs(given["rollout"], segments, leaf, given["old"], given["ref"])

    def batch_info_for(self, row: Method, logprobs: LogProbs | None = None) -> BatchInfo:
        """The batch's side information with what the row's parts read alone; distributions are over a vocabulary of two."""
        found = {name: self.batch_info.divergences[name] for name in row.divergences}
        if name := getattr(row.objective, "reads", None):  # a penalty that is differentiated
            found[name] = Divergence.exact(name, found[name].lo.detach().requires_grad_())
        both = None
        if "distributions" in row.needs:
            both = Distributions.of_two(self.packed["old"], (logprobs or self.fresh()).current)
        return replace(self.batch_info, divergences=found, distributions=both)


def make_batch(sequences: int, longest: int) -> Batch:
    """Prompts with eight responses of three turns each.

    Drift differs by sequence, from 1e-4 to 0.2 nats per token with a heavy tail, old policy from
    rollout policy and current from old: limits of ordinary width act on some of it. Advantages are
    not centered, so that no loss is the small difference of large sums.
    """
    given, generator = ragged(sequences, longest), torch.Generator().manual_seed(1)
    segments, n = given.segments, given.segments.num_tokens

    def uniform(size: int) -> Tensor:
        return torch.rand(size, generator=generator)

    scale = torch.logspace(-4, -0.7, sequences)[torch.randperm(sequences, generator=generator)]

    def drifted(start: Tensor) -> Tensor:
        wide = 1 + 8 * (uniform(n) < 0.01)
        noise = torch.randn(n, generator=generator) * wide
        return (start + segments.spread(scale) * noise).clamp(max=0.0)

    old = drifted(given.rollout)
    logp = drifted(old)
    rewards = (uniform(sequences) < 0.4).float()
    packed = {
        "rollout": given.rollout,
        "old": old,
        "logp": logp,
        "ref": drifted(logp),
        "advantages": segments.spread(2 * rewards - 0.3),
    }
    empty, mask = torch.zeros(sequences, longest), given.mask.bool()
    third = segments.lengths // 3
    turns = torch.stack([third, third, segments.lengths - 2 * third], dim=1).flatten()
    pairs = ("rollout_current", "rollout_old", "old_current")
    names = [f"{d}_{pair}" for d in ("kl", "tv") for pair in pairs]
    return Batch(
        cu_seqlens=segments.cu_seqlens,
        turns=Segments.from_lengths(turns).cu_seqlens,
        groups=torch.arange(sequences) // 8,
        packed=packed,
        padded={name: empty.masked_scatter(mask, x) for name, x in packed.items()},
        mask=given.mask,
        horizon=longest,
        batch_info=BatchInfo(
            entropy=-uniform(n).log(),
            vocab=151_936,
            rewards=rewards,
            version_lag=segments.spread((4 * uniform(sequences)).long()),
            # Random: their computation from distributions is what `exact_kl.py` times.
            divergences={name: Divergence.exact(name, -1e-3 * uniform(n).log()) for name in names},
        ),
    )
