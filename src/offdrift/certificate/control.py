"""Control variates of importance-weighted returns: sums over a response whose mean under mu is exactly 0.

    D_t = min(w_<t, A) (min(w_t, C) - m_t),    m_t = E_mu[min(w_t, C) | c_t]
    S   = sum_t D_t over the tokens that cannot carry the sum so far above K

w_t is the ratio of a token, w_<t the product of those before it. Whether a token counts is decided before it is
drawn, by what can become of it at most, so that S has mean 0 and S <= K. R (w - 1) - S / 2 then has the mean of R (w
- 1), which is J(pi) - J(mu) where pi draws nothing mu cannot, and is at least -1 - K / 2. Where responses are right
half of the time, S / 2 takes away most of the scatter of w itself. m_t needs both policies' probabilities of every
token that mu can draw: exact evidence.

The caps are fixed before any batch is seen. They were chosen on worlds that no test and no table of the docs uses.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from offdrift.segments import Segments

PREFIX_CAP, RATIO_CAP, SUM_CAP, SHARE = 4.0, 2.0, 4.0, 0.5
"""A, C and K above, and the share of S that is taken off."""
CONTROL_FROM = 256
"""Prompts from which on `certify` takes control variates beside ratios alone. With fewer, betting on both costs more
than it gains (docs/certificates.md)."""
LOWEST = -1.0 - SHARE * SUM_CAP
"""Least value of R (w - 1) - S / 2, for rewards in [0, 1]."""
ROWS = 512
"""Tokens whose whole vocabulary is looked at together."""


@torch.no_grad()
def ratio_means(rollout: Float[Tensor, "n v"], current: Float[Tensor, "n v"]) -> Float[Tensor, " n"]:
    """E_mu[min(pi / mu, C)] of each context, exactly: sum over the tokens that mu draws of min(pi, C mu).

    Gradient: none. Float64 inside, `ROWS` tokens at a time.

    Args:
        rollout, current: log-probs or logits of both policies over the whole vocabulary; -inf where one draws nothing.

    Example:
        >>> mu, pi = torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[0.2, 0.7, 0.1]])
        >>> [round(x, 4) for x in ratio_means(mu.log(), pi.log()).tolist()]
        [0.9]
    """
    parts = []
    for mu, pi in zip(rollout.split(ROWS), current.split(ROWS), strict=True):
        mu, pi = mu.double().softmax(-1), pi.double().softmax(-1)
        parts.append(torch.minimum(pi, RATIO_CAP * mu).sum(-1))
    return torch.cat(parts)


@torch.no_grad()
def control_sums(log_w: Float[Tensor, " n"], means: Float[Tensor, " n"], segments: Segments) -> Float[Tensor, " b"]:
    """S of every sequence. Gradient: none. One step for each position.

    Args:
        log_w: log-ratios of the sampled tokens, nats.
        means: m_t, of `ratio_means`.

    Returns: S, at most `SUM_CAP`; 0 for an empty sequence.

    Example:
        >>> log_w = torch.tensor([1.4, 0.5]).log()
        >>> [round(x, 4) for x in control_sums(log_w, torch.ones(2), Segments.from_lengths([2])).tolist()]
        [-0.3]
    """
    log_w, means = log_w.double(), means.double()
    starts, lengths = segments.cu_seqlens[:-1].long(), segments.lengths
    total = torch.zeros(len(segments), dtype=torch.float64, device=log_w.device)
    prefix = torch.zeros_like(total)
    for t in range(int(lengths.max()) if len(segments) else 0):
        here = lengths > t
        at = (starts + t).clamp(max=max(0, len(log_w) - 1))
        before = prefix.exp().clamp(max=PREFIX_CAP)
        counts = here & (total + before * (RATIO_CAP - means[at]) <= SUM_CAP)
        moved = before * (log_w[at].exp().clamp(max=RATIO_CAP) - means[at])
        total = torch.where(counts, total + moved, total)
        prefix = torch.where(here, prefix + log_w[at], prefix)
    return total
