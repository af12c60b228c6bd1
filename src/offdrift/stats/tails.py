"""How much of a step's divergence its worst tokens carry: what an audit reads off a histogram.

A step knows its tokens, so it need not bin them. The worst of all pieces and processes together are
among the worst of each, so the number does not depend on how the batch was cut.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from offdrift.logprobs import LogProbs
from offdrift.numerics import clamped
from offdrift.ratios import stopped_log_ratio
from offdrift.stats.drift import SECOND

SHARE = 100
"""One in so many tokens is in the tail, and at least one."""


@dataclass
class Tails:
    """Collects k3 of every token of a step, on its device.

    As `{on}/k3` shows it, with l limited at 20: tokens beyond count alike, and outweigh all others.
    """

    k3: dict[str, list[Float[Tensor, " k"]]] = field(default_factory=lambda: defaultdict(list))

    @torch.no_grad()
    def add(self, logprobs: LogProbs) -> None:
        """Note the tokens of a piece that the engine scored."""
        logprobs = logprobs.scored
        for on, second in SECOND.items():
            if (logprobs.logp_old if second == "old" else logprobs.logp) is None:
                continue
            ratio = clamped(stopped_log_ratio(logprobs, on=on))  # type: ignore[arg-type]
            self.k3[on].append(ratio.expm1() - ratio)

    def sums(self, gather: Callable[[object], list]) -> dict[str, Tensor]:
        """Sums for `{on}/k3_top_share`: k3 of the 1 % of tokens with the largest k3, and of all.

        Args:
            gather: one object of every process, in every process.

        Example:
            >>> from offdrift.segments import Segments
            >>> zero = torch.full((200,), -1.0)
            >>> off = zero.clone()
            >>> off[[3, 7]] = -2.0
            >>> tails = Tails()
            >>> tails.add(LogProbs.pack(zero, off, segments=Segments.from_lengths([200])))
            >>> found = tails.sums(lambda mine: [mine])
            >>> bool(found["full/k3_top"] == found["full/k3_binned"])
            True
        """
        # Some process may have seen nothing, and must take part all the same.
        seen = set().union(*gather(list(self.k3)))
        found = {}
        for on in (name for name in SECOND if name in seen):
            k3 = torch.cat(self.k3[on]).double() if on in self.k3 else torch.zeros(0).double()
            worst = -(-sum(gather(len(k3))) // SHARE)
            mine = k3.topk(min(worst, len(k3))).values
            tops, totals = zip(*gather((mine.cpu(), k3.sum().cpu())), strict=True)
            found[f"{on}/k3_top"] = torch.cat(tops).topk(worst).values.sum()
            found[f"{on}/k3_binned"] = torch.stack(totals).sum()
        return found
