"""Logged batches drawn from distributions that are known: ragged, several steps."""

from __future__ import annotations

import torch

from offdrift.records.batch import Logged


def logged(*, sequences: int = 24, steps: int = 3, drift: float = 0.1, seed: int = 0, vocab: int = 12) -> Logged:
    """Tokens drawn from one policy, and what two others say of them.

    The rollout policy is a softmax of random logits at every token; the old policy adds noise of
    size `drift` to them, the current policy noise of twice the size. So every signature is genuine.
    """
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 40, (sequences,), generator=g)
    cuts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    n = int(cuts[-1])
    logits = 2 * torch.randn(n, vocab, generator=g)
    near = logits + drift * torch.randn(n, vocab, generator=g)
    far = logits + 2 * drift * torch.randn(n, vocab, generator=g)
    tokens = torch.multinomial(logits.softmax(-1), 1, generator=g)

    def said(x: torch.Tensor) -> torch.Tensor:
        return x.log_softmax(-1).gather(-1, tokens).squeeze(-1)

    step = torch.arange(sequences) * steps // sequences
    return Logged(
        cu_seqlens=cuts,
        step=step,
        row=torch.arange(1, sequences + 1),
        response_lengths=lengths,
        logp_rollout=said(logits),
        logp_old=said(near),
        logp=said(far),
        advantages=torch.randn(sequences, generator=g).repeat_interleave(lengths),
        rewards=torch.randint(0, 2, (sequences,), generator=g).float(),
        group_ids=torch.arange(sequences) // 4,
        rollout_version=(step - step % 2).repeat_interleave(lengths),
        version=step,
        tokens=tokens.squeeze(-1),
        prompts=tuple(f"prompt {i // 4}" for i in range(sequences)),
        completions=tuple(f"answer {i}" for i in range(sequences)),
    )
