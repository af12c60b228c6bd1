"""Requests to vLLM and its answers: `Sampling` to `SamplingParams`, lists of log-probs to tensors.

Nothing here imports vLLM; `SamplingParams` is an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from offdrift.engines.generate import Draws, Request
from offdrift.errors import EngineError
from offdrift.records.rollouts import Evidence, EvidenceKind, FullVocab, TopK


def request_seed(seed: int, index: int) -> int:
    """A 63-bit seed of one request; pairs that differ give unrelated streams."""
    mixed = np.random.SeedSequence([seed % 2**64, index]).generate_state(1, np.uint64)[0]
    return int(mixed >> np.uint64(1))


def sampling_params(kind: Callable[..., Any], request: Request) -> list[Any]:
    """One `vllm.SamplingParams` (`kind`) for each prompt."""
    sampling = request.sampling
    return [
        kind(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=True,
            seed=request_seed(request.seed, index),
            logprobs=-1 if request.evidence == "full" else entries(request.evidence, 0) - 1,
            flat_logprobs=True,
            detokenize=False,
        )
        for index in range(len(request.prompts))
    ]


def read(outputs: Sequence[Any], evidence: EvidenceKind, vocab_size: int) -> Draws:
    """vLLM's flat lists as tensors: per token the sampled entry, then the likeliest in order."""
    lengths = torch.tensor([len(o.token_ids) for o in outputs])
    tokens = torch.tensor([t for o in outputs for t in o.token_ids])
    width = entries(evidence, vocab_size)
    logp = torch.cat([torch.tensor(o.logprobs.logprobs, dtype=torch.float32) for o in outputs]).view(-1, width)
    ids = torch.cat([torch.tensor(o.logprobs.token_ids, dtype=torch.int32) for o in outputs]).view(-1, width)
    if not torch.equal(ids[:, 0].long(), tokens):
        raise EngineError(
            "vLLM's log-probs do not start with those of the sampled tokens; this vLLM version is not supported"
        )
    likeliest: Evidence | None = None
    if evidence == "full":
        rows = torch.empty(len(tokens), vocab_size)
        likeliest = FullVocab(rows.scatter_(1, ids[:, 1:].long(), logp[:, 1:]))
    elif isinstance(evidence, int):
        likeliest = TopK(ids[:, 1:].clone(), logp[:, 1:].clone())
    return Draws(tokens, lengths, logp[:, 0].clone(), likeliest)


def entries(evidence: EvidenceKind, vocab_size: int) -> int:
    """Log-probs per token: that of the sampled one, then those of the likeliest that were asked for."""
    if isinstance(evidence, int):
        return 1 + evidence
    return 1 + vocab_size if evidence == "full" else 1
