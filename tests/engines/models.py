"""Two tiny policies with distributions that are far from flat: dense and tied, sparse and untied."""

import copy
import importlib.util
import os
from functools import cache

import pytest
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

VOCAB = 64
CACHE_MIB = 64
"""Of keys and values in vLLM: twice what 256 sequences of one block need. Its own choice is gibibytes."""

_WIDE_VECTORS = ("_is_avx512_supported", "_is_amx_tile_supported")

FP8_CACHE = torch.cuda.is_available() or any(getattr(torch.cpu, has)() for has in _WIDE_VECTORS)
"""Whether vLLM offers a cache in fp8 on this machine."""


def no_wide_vectors(patch: pytest.MonkeyPatch) -> None:
    """Let vLLM, which asks torch, take this processor for one without AVX-512 and AMX."""
    for has in _WIDE_VECTORS:
        patch.setattr(torch.cpu, has, lambda: False)


def need_vllm(*besides: str) -> None:
    """Skip the test where vLLM, or a module that it needs besides, is missing; fail where CI should have it."""
    missing = [name for name in ("vllm", *besides) if importlib.util.find_spec(name) is None]
    if missing:
        words = f"not installed: {', '.join(missing)}; run `make install-vllm`"
        if os.environ.get("CI"):
            pytest.fail(words, pytrace=False)
        pytest.skip(words)


SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
SMALLER = SIZES | {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "head_dim": 16}


def tiny(kind: str) -> PreTrainedModel:
    """A fresh copy of the "dense" or the "moe" model, float32, eval mode; always the same weights."""
    return copy.deepcopy(_original(kind))


@cache
def _original(kind: str) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if kind == "dense":
            return Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True)).eval()
        config = Qwen3MoeConfig(
            **SIZES, tie_word_embeddings=False, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2
        )
        return Qwen3MoeForCausalLM(config).eval()
