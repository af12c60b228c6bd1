"""Speculative decoding: the law that is sampled is the target's own, whatever the drafter proposes."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from offdrift.engines.hf import TransformersEngine
from offdrift.engines.hf_decode import filters_of
from offdrift.engines.speculative import verified
from offdrift.errors import EngineError
from offdrift.records.rollouts import ACCEPTED, FREE, REDRAWN, Sampling, concatenate
from tests.engines.contract import PLAIN, PROMPTS, SAMPLINGS, EngineContract
from tests.engines.models import SMALLER, VOCAB, tiny
from tests.engines.oracles import logp_rows


def drafter_of(kind: str, noise: float):
    """The model with noisy weights: proposals that are often right, and often not."""
    model, g = tiny(kind), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            p += noise * p.std() * torch.randn(p.shape, generator=g) if p.ndim > 1 else 0.0
    return model


@pytest.fixture(
    scope="class",
    params=[("dense", 0.15, {}), ("moe", 0.1, {}), ("dense", 0.0, {"dtype": "bfloat16"})],
    ids=["dense-fp32", "moe-fp32", "dense-bf16"],
)
def built(request):
    kind, noise, options = request.param
    model = tiny(kind)
    return model, TransformersEngine(model, drafter=drafter_of(kind, noise), draft_tokens=3, **options), not options


class TestContract(EngineContract):
    """All of it: evidence, log-probs, frequencies, weights."""
