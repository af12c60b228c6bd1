"""How much of a piece's divergence its worst tokens carry: what an audit reads off a histogram.

A step knows its tokens, so it need not bin them. The sums add up over pieces; the top of several
pieces together is then at most what the top of the whole would be, and equal for one piece.
"""

from __future__ import annotations

import torch
from torch import Tensor

from offdrift.logprobs import LogProbs
from offdrift.numerics import clamped
from offdrift.ratios import stopped_log_ratio
from offdrift.stats.drift import SECOND

SHARE = 100
"""The worst token of so many counts as the tail."""


@torch.no_grad()
def tails(logprobs: LogProbs) -> dict[str, Tensor]:
    """Sums for `{on}/k3_top_share`: k3 of the 1 % of tokens with the largest k3, and of all.

    Example:
        >>> from offdrift.segments import Segments
        >>> zero = torch.full((200,), -1.0)
        >>> off = zero.clone()
        >>> off[[3, 7]] = -2.0
        >>> found = tails(LogProbs.pack(zero, off, segments=Segments.from_lengths([200])))
        >>> bool(found["full/k3_top"] == found["full/k3_binned"])
        True
    """
    found = {}
    for on, second in SECOND.items():
        if (logprobs.logp_old if second == "old" else logprobs.logp) is None:
            continue
        ratio = clamped(stopped_log_ratio(logprobs, on=on))  # type: ignore[arg-type]
        k3 = (ratio.expm1() - ratio).double()
        worst = k3.topk(-(-len(k3) // SHARE)).values
        found |= {f"{on}/k3_top": worst.sum(), f"{on}/k3_binned": k3.sum()}
    return found
