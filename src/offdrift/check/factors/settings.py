"""Settings that both engines have, and the other value that an experiment gives them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from offdrift.check.bench import Bench
from offdrift.engines.spec import EngineSpec, Option

OPTION = {"vllm": "attention_backend", "transformers": "attn_implementation"}
"""What each engine that is started here calls its attention kernel."""
BACKENDS, IMPLEMENTATIONS = ("TRITON_ATTN", "FLASH_ATTN"), ("eager", "sdpa")
"""Attention kernels by engine: the first is tried, or the second if that is the one in use."""


class Change(NamedTuple):
    """An engine with one setting changed, and the change in words."""

    words: str
    spec: EngineSpec


def dtype_changed(spec: EngineSpec) -> Change:
    """The whole engine at another precision.

    Example:
        >>> dtype_changed(EngineSpec.parse("vllm:bfloat16")).words
        'float32 instead of bfloat16'
    """
    other = _other_dtype(spec.dtype)
    return Change(f"{other} instead of {spec.dtype}", spec.with_(dtype=other))


def head_changed(spec: EngineSpec) -> Change:
    """The output head alone at another precision."""
    now = str(spec.options.get("head_dtype", spec.dtype))
    other = _other_dtype(now)
    words = f"output head in {other} instead of {now}, the rest in {spec.dtype}"
    return Change(words, spec.with_(head_dtype=other))


def attention_changed(spec: EngineSpec, model: torch.nn.Module) -> Change:
    """Another attention kernel."""
    option, (first, second) = OPTION[spec.kind], BACKENDS
    default: Option = "the default"
    if spec.kind == "transformers":
        first, second = IMPLEMENTATIONS
        default = str(getattr(model.config, "_attn_implementation", None) or second)
    now = spec.options.get(option, default)
    other = second if now == first else first
    return Change(f"{other} instead of {now}", spec.with_(**{option: other}))


def several_prompts(bench: Bench, rollout: EngineSpec, train: EngineSpec) -> str | None:
    """Offered where a batch has more than one sequence."""
    return "there is one prompt only" if len(bench.prompts) < 2 else None


def _other_dtype(now: str) -> str:
    return "bfloat16" if now == "float32" else "float32"
