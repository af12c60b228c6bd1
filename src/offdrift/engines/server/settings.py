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
class ServerSetting:
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
    ServerSetting(
        "chunked_prefill",
        vllm="--max-num-batched-tokens 64",
        sglang="--chunked-prefill-size 64",
        told=("scheduler_config.max_num_batched_tokens",),
        told_sglang=("chunked_prefill_size",),
    ),
    ServerSetting(
        "cuda_graphs",
        vllm="--enforce-eager",
        sglang="--disable-cuda-graph",
        told=("model_config.enforce_eager",),
        told_sglang=("disable_cuda_graph",),
        needs="a GPU",
    ),
    ServerSetting(
        "kv_cache_dtype",
        vllm="--kv-cache-dtype fp8",
        sglang="--kv-cache-dtype fp8_e4m3",
        told=("cache_config.cache_dtype",),
        told_sglang=("kv_cache_dtype",),
        needs="a GPU, or a CPU with AVX-512 or AMX",
    ),
    ServerSetting(
        "speculative_decoding",
        vllm="--speculative-config",
        sglang="--speculative-algorithm",
        told=("speculative_config.method", "speculative_config"),
        told_sglang=("speculative_algorithm",),
    ),
    ServerSetting(
        "tensor_parallel",
        vllm="--tensor-parallel-size 2",
        sglang="--tp-size 2",
        told=("parallel_config.tensor_parallel_size",),
        told_sglang=("tp_size",),
        needs="two devices; on a CPU one core each: VLLM_CPU_OMP_THREADS_BIND='0|1'",
    ),
    ServerSetting(
        "expert_parallel",
        vllm="--enable-expert-parallel",
        sglang="--ep-size 2",
        told=("parallel_config.enable_expert_parallel",),
        told_sglang=("ep_size",),
        needs="several GPUs and a mixture of experts",
    ),
    ServerSetting(
        "unequal_expert_parallel",
        vllm="--enable-eplb",
        sglang="--ep-num-redundant-experts 1",
        told=("parallel_config.enable_eplb",),
        told_sglang=("ep_num_redundant_experts",),
        needs="several GPUs and a mixture of experts",
    ),
    ServerSetting(
        "attention_backend",
        vllm="--attention-backend NAME",
        sglang="--attention-backend NAME",
        told=("attention_config.backend",),
        told_sglang=("attention_backend",),
        needs="a device with two backends: CPUs have one",
    ),
    ServerSetting(
        "sampler_dtype",
        vllm="VLLM_USE_V2_MODEL_RUNNER=1",
        sglang="--enable-fp32-lm-head",
        told=(),
        told_sglang=("enable_fp32_lm_head",),
        needs="vLLM's second model runner: a GPU with Triton",
    ),
    ServerSetting(
        "quantization",
        vllm="--quantization fp8_per_channel",
        sglang="--quantization fp8",
        told=("model_config.quantization",),
        told_sglang=("quantization",),
        needs="a device that multiplies in it, and --dtype bfloat16 or float16",
    ),
    ServerSetting(
        "dtype",
        vllm="--dtype float16",
        sglang="--dtype float16",
        told=("model_config.dtype",),
        told_sglang=("dtype",),
    ),
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
