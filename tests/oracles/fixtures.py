"""Fixtures of the methods table: hand-sized batches whose every number is known.

FX-A: two sequences of 4 and 3 tokens, all three policies, mixed advantages; padded positions hold
NaN on purpose. FX-V: three positions over a vocabulary of three, full distributions. FX-G: four
sequences in two prompt groups.
"""

import torch
from torch import Tensor

from offdrift.logprobs import LogProbs
from offdrift.segments import Segments

PAD = float("nan")
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
LOGP_ROLLOUT = [[-0.20, -1.00, -0.50, -2.00], [-0.70, -0.30, -1.50, PAD]]
MISMATCH = [[0.10, -0.05, 0.40, -0.90], [0.02, 0.00, -0.30, PAD]]
STALENESS = [[0.05, 0.30, -0.25, 0.10], [-0.15, 0.20, 0.02, PAD]]
ADVANTAGES = [[1.0, 1.0, 1.0, 1.0], [-0.5, -0.5, -0.5, 0.0]]


def double(rows: list) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def fx_a() -> tuple[LogProbs, Tensor, Tensor]:
    """FX-A packed, its advantages packed, and the padded leaf that receives the gradient."""
    logp_old = double(LOGP_ROLLOUT) + double(MISMATCH)
    leaf = (logp_old + double(STALENESS)).requires_grad_()
    lp = LogProbs.pack(double(LOGP_ROLLOUT), leaf, logp_old, mask=MASK)
    return lp, lp.like_caller(double(ADVANTAGES)), leaf


FX_V_KL = [0.02681245, 0.01006776, 0.05107412]
FX_V_TV = [0.1, 0.05, 0.1]

FX_G_REWARDS = [1.0, 0.0, 0.5, 1.0]
FX_G_SEGMENTS = Segments.from_lengths([3, 2, 4, 2], group_ids=torch.tensor([5, 5, 5, 9]))


def ragged(seed: int, *, sequences: int = 6, longest: int = 9, drift: float = 0.3) -> LogProbs:
    """A random ragged batch in float64 with all three policies; lengths from 1 to `longest`."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (sequences,), generator=g)
    n = int(lengths.sum())
    logp_rollout = -torch.rand(n, generator=g, dtype=torch.float64) * 3 - 0.01
    near = lambda x: (x + drift * torch.randn(n, generator=g, dtype=torch.float64)).clamp(max=-1e-3)  # noqa: E731
    logp_old = near(logp_rollout)
    logp = near(logp_old).requires_grad_()
    groups = torch.randint(0, 3, (sequences,), generator=g)
    segments = Segments.from_lengths(lengths, group_ids=groups)
    return LogProbs.pack(logp_rollout, logp, logp_old, segments=segments)
