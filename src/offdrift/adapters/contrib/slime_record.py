"""slime's rollout data, recorded before each training phase: tokens, both log-probs, advantages, groups.

    --rollout-data-postprocess-path offdrift.adapters.contrib.slime_record.record

with OFFDRIFT_RECORD naming a folder that all training processes can write to.

Reference: slime 0.3.1 (624b824), `backends/megatron_utils/actor.py`: `train_actor`; `ray/rollout.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from offdrift.adapters import environment
from offdrift.adapters.contrib.slime import WITHOUT_MU, cp_size
from offdrift.errors import EvidenceError, MethodError
from offdrift.records.recorder import Recorder
from offdrift.records.unpacked import Unpacked

WITHOUT_OLD = "add --get-mismatch-metrics, with which slime scores the tokens before it trains"


def record(args: Any, rollout_id: int, rollout_data: Mapping[str, Any]) -> None:
    """slime's hook on the data of a rollout before it is trained on: records it in OFFDRIFT_RECORD.

    Of each tensor-parallel group one process writes, in the last pipeline stage.

    Raises: `EvidenceError` without log-probs of either engine; `MethodError` without OFFDRIFT_RECORD
        or under context parallelism.
    """
    from megatron.core import mpu

    if cp_size(args) > 1:
        raise MethodError("context parallelism cuts slime's log-probs: record without it")
    if mpu.get_tensor_model_parallel_rank() != 0 or not mpu.is_pipeline_last_stage():
        return
    for name, way_out in (("rollout_log_probs", WITHOUT_MU), ("log_probs", WITHOUT_OLD)):
        if not rollout_data.get(name):
            raise EvidenceError(f"slime's rollout data holds no {name}; {way_out}")
    _recorder().add(unpacked(args, rollout_id, rollout_data))


def unpacked(args: Any, rollout_id: int, data: Mapping[str, Any]) -> Unpacked:
    """slime's rollout data of one process, response tokens end to end."""
    lengths = torch.as_tensor(data["response_lengths"])

    def cat(name: str) -> Tensor | None:
        return torch.cat(list(data[name])) if data.get(name) else None

    def column(name: str) -> Tensor | None:
        return torch.as_tensor(data[name]) if data.get(name) is not None else None

    index, rewards = column("sample_indices"), column("raw_reward")
    if rewards is not None and data.get("partition") is not None:
        rewards = rewards[torch.as_tensor(data["partition"])]  # those of all processes are given
    ends = [t[len(t) - r :] for t, r in zip(data["tokens"], lengths.tolist(), strict=True)]
    return Unpacked(
        step=torch.tensor(rollout_id),
        logp_rollout=cat("rollout_log_probs"),
        logp_old=cat("log_probs"),
        logp_ref=cat("ref_log_probs"),
        tokens=torch.cat(ends),
        mask=cat("loss_masks"),
        cu_seqlens=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
        advantages=cat("advantages"),
        rewards=rewards,
        group_ids=None if index is None else index // args.n_samples_per_prompt,
        truncated=column("truncated"),
        response_lengths=lengths,
    )


@functools.cache
def _recorder() -> Recorder:
    folder = environment.record()
    if not folder:
        raise MethodError("recording slime's rollouts needs OFFDRIFT_RECORD, a folder")
    return Recorder(folder, framework="slime")
