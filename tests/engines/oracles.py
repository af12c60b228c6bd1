"""Slow, obvious answers: one sequence at a time, no padding, filters by their definitions."""

import torch
from torch import Tensor, nn

from offdrift.records.provenance import Sampling
from offdrift.records.rollouts import Rollouts


@torch.no_grad()
def logp_rows(model: nn.Module, rollouts: Rollouts, sampling: Sampling) -> Tensor:
    """log mu(a) for every token a at every response token, [n, vocab], from unpadded forwards."""
    rows = []
    prompt_lengths = rollouts.prompt_cu_seqlens.diff().tolist()
    prompts = rollouts.prompt_tokens.split(prompt_lengths)
    responses = rollouts.tokens.split(rollouts.lengths.tolist())
    for prompt, response in zip(prompts, responses, strict=True):
        logits = model(input_ids=torch.cat([prompt, response])[None]).logits[0]
        rows += [processed(row, sampling) for row in logits[len(prompt) - 1 : -1]]
    return torch.stack(rows)


def processed(logits: Tensor, sampling: Sampling) -> Tensor:
    """Temperature, then min_p of the likeliest, then the k likeliest, then the smallest set of at least top_p mass."""
    logp = (logits.double() / sampling.temperature).log_softmax(-1)
    if sampling.min_p > 0:
        kept = logp.exp() >= sampling.min_p * logp.max().exp()
        logp = logp.masked_fill(~kept, -torch.inf).log_softmax(-1)
    order = logp.argsort(descending=True)
    kept = order[: sampling.top_k or None]
    mass, nucleus = 0.0, []
    for token in kept.tolist():
        if mass >= sampling.top_p or logp[token] == -torch.inf:
            break
        nucleus.append(token)
        mass += float((logp[token] - logp[kept].logsumexp(0)).exp())
    filtered = torch.full_like(logp, -torch.inf)
    filtered[nucleus] = logp[nucleus]
    return filtered.log_softmax(-1)
