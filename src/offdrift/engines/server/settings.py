"""Settings of a server that no request changes: how each is set, where the server says it, and what it needs.

vLLM says them under `/server_info` (with `VLLM_SERVER_DEV_MODE=1`), SGLang under `/get_server_info`. Two servers that
say them are told apart by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LONGEST = 60
"""Characters of a value that are kept."""
ABSENT = object()


@dataclass(frozen=True)
class Setting:
    """A setting that a second server changes."""

    name: str
    """The factor's name in `check.json`."""
    vllm: str
    """Option of vLLM that changes it."""
    sglang: str
    """Option of SGLang that changes it; "" if it has none."""
    told: tuple[str, ...] = ()
    """Entries of vLLM's `/server_info`, the first that is there counts."""
    told_sglang: tuple[str, ...] = ()
    """Entries of SGLang's `/get_server_info`."""
    needs: str = ""
    """What a server needs besides the option; "" if nothing."""


# Names of vLLM's options are those of 0.32, of SGLang's those of 0.5.23.
SETTINGS = (
    Setting(
        "chunked_prefill",
        "--max-num-batched-tokens 64",
        "--chunked-prefill-size 64",
        ("scheduler_config.max_num_batched_tokens",),
        ("chunked_prefill_size",),
    ),
    Setting(
        "cuda_graphs",
        "--enforce-eager",
        "--disable-cuda-graph",
        ("model_config.enforce_eager",),
        ("disable_cuda_graph",),
        "a GPU",
    ),
    Setting(
        "kv_cache_dtype",
        "--kv-cache-dtype fp8",
        "--kv-cache-dtype fp8_e4m3",
        ("cache_config.cache_dtype",),
        ("kv_cache_dtype",),
        "a GPU, or a CPU with AVX-512 or AMX",
    ),
    Setting(
        "speculative_decoding",
        "--speculative-config",
        "--speculative-algorithm",
        ("speculative_config.method", "speculative_config"),
        ("speculative_algorithm",),
    ),
    Setting(
        "tensor_parallel",
        "--tensor-parallel-size 2",
        "--tp-size 2",
        ("parallel_config.tensor_parallel_size",),
        ("tp_size",),
        "two devices, or a CPU with two cores",
    ),
    Setting(
        "expert_parallel",
        "--enable-expert-parallel",
        "--ep-size 2",
        ("parallel_config.enable_expert_parallel",),
        ("ep_size",),
        "several devices and a mixture of experts",
    ),
    Setting(
        "unequal_expert_parallel",
        "--enable-eplb",
        "--ep-num-redundant-experts 1",
        ("parallel_config.enable_eplb",),
        ("ep_num_redundant_experts",),
        "several GPUs and a mixture of experts",
    ),
    Setting(
        "attention_backend",
        "--attention-backend NAME",
        "--attention-backend NAME",
        ("attention_config.backend",),
        ("attention_backend",),
        "a device with two backends: CPUs have one",
    ),
    Setting(
        "sampler_dtype",
        "VLLM_USE_V2_MODEL_RUNNER=1",
        "--enable-fp32-lm-head",
        (),
        ("enable_fp32_lm_head",),
        "vLLM's second model runner: a GPU with Triton",
    ),
    Setting(
        "quantization",
        "--quantization fp8_per_channel",
        "--quantization fp8",
        ("model_config.quantization",),
        ("quantization",),
        "a device that multiplies in it",
    ),
    Setting("dtype", "--dtype float16", "--dtype float16", ("model_config.dtype",), ("dtype",)),
)


def settings_of(software: str, info: Mapping[str, Any]) -> dict[str, str]:
    """Read the settings that a server says of itself, by the factor's name; those that it does not say are left out.

    Args:
        info: `vllm_config` of vLLM, or the answer of SGLang.
    """
    told = {}
    for setting in SETTINGS:
        for path in setting.told if software == "vllm" else setting.told_sglang:
            value = _entry(info, path)
            if value is not ABSENT and not isinstance(value, Mapping):
                told[setting.name] = str(value)[:LONGEST]
                break
    return told


def _entry(info: Any, path: str) -> Any:
    """The value at a dotted path, `ABSENT` where there is none."""
    for name in path.split("."):
        info = info.get(name, ABSENT) if isinstance(info, Mapping) else ABSENT
    return info


def differing(one: Mapping[str, str], other: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Settings that both servers say and that differ, with the value of each."""
    return {name: (one[name], other[name]) for name in one if name in other and one[name] != other[name]}
