"""Requests to vLLM and its answers: `Sampling` to `SamplingParams`, lists of log-probs to tensors.

Nothing here imports vLLM; `SamplingParams` is an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offdrift.engines.generate import Draws
from offdrift.errors import EngineError
from offdrift.records.rollouts import Evidence, EvidenceKind, FullVocab, Sampling, TopK


def request_seed(seed: int, index: int) -> int:
    """A 63-bit seed of one request; pairs that differ give unrelated streams."""
    mixed = np.random.SeedSequence([seed % 2**64, index]).generate_state(1, np.uint64)[0]
    return int(mixed >> np.uint64(1))


def sampling_params(
    kind: Callable[..., Any], sampling: Sampling, evidence: EvidenceKind, seed: int, indices: Iterable[int]
) -> list[Any]:
    """One `vllm.SamplingParams` (`kind`) for each request."""
    likeliest = -1 if evidence == "full" else width(evidence, 0) - 1
    return [
        kind(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=True,
            seed=request_seed(seed, index),
            logprobs=likeliest,
            flat_logprobs=True,
            detokenize=False,
        )
        for index in indices
    ]


def read(outputs: Sequence[Any], evidence: EvidenceKind, vocab_size: int) -> Draws:
    """vLLM's flat lists as tensors: per token the sampled entry, then the likeliest in order."""
    lengths = torch.tensor([len(o.token_ids) for o in outputs])
    tokens = torch.tensor([t for o in outputs for t in o.token_ids])
    entries = width(evidence, vocab_size)
    logp = _concatenated([o.logprobs.logprobs for o in outputs], torch.float32).view(-1, entries)
    ids = _concatenated([o.logprobs.token_ids for o in outputs], torch.int32).view(-1, entries)
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


def width(evidence: EvidenceKind, vocab_size: int) -> int:
    """Entries per token: the sampled one, then the likeliest that were asked for."""
    if isinstance(evidence, int):
        return 1 + evidence
    return 1 + vocab_size if evidence == "full" else 1


def _concatenated(lists: list[list[Any]], dtype: torch.dtype) -> Tensor:
    return torch.cat([torch.tensor(values, dtype=dtype) for values in lists])
